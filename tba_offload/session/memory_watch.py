"""Where in a step memory is at its peak, and what holds it then.

Live bytes come from the meter of the step. What of them the offloader holds it tells by its ledger; what a
layer leaves in memory beside that shows when the layer returns. The rest is of what runs at the time.

Looking costs a reading of the allocator before and after each run of a layer. Where that takes long, on an
accelerator, few steps are looked at: the first three, and then those whose number is a power of two. Those
are told, and of the others each whose peak is clearly higher than that of the one that was told last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tba_offload.session.memory_seen import (
    BACKWARD,
    BETWEEN,
    EMBEDDINGS,
    FORWARD,
    LOSS,
    UPDATE,
    Held,
    LayerMemory,
    Peak,
    Runs,
    holder_of,
)

if TYPE_CHECKING:
    import torch

    from tba_offload.capture.hooks import Capture
    from tba_offload.capture.scope import Lookahead, ScopeKey
    from tba_offload.device.live_bytes import LiveBytes
    from tba_offload.device.memory import MemoryMeter
    from tba_offload.session.outputs import Outputs
    from tba_offload.session.static_memory import ModuleTensors
    from tba_offload.transfer.offloader import Offloader

_NEWS = 9 / 8
"""Peak of a step, in peaks of the one that was told last, from which on it is told as well."""

_ALL = 3
"""Steps that are looked at from the first on: states come in the first, and the second is as all others."""


class Sources(NamedTuple):
    """What knows of memory.

    Attributes:
        gradients: Bytes of gradients, and of frozen weights while they are there.
        outputs: Bytes of what the model put out.
        offloader: Knows what is on its way.
        capture: Knows what layers have saved.
        attributes: Know what of that modules hold, and what else.
        device: Whose memory it is.
    """

    gradients: LiveBytes
    outputs: Outputs
    offloader: Offloader
    capture: Capture
    attributes: ModuleTensors
    device: torch.device


class MemoryWatch:
    """Looks at the memory of some steps.

    Args:
        sources: What knows of memory.
        layers: How many layers there are.

    Attributes:
        is_on: Whether the step that is open is looked at.
        peaks: Of each phase.
        layers: What each layer did.
        runs: Those of layers.
    """

    def __init__(self, sources: Sources, layers: int) -> None:
        self.is_on = False
        self.peaks: dict[str, Peak] = {}
        self.layers = [LayerMemory() for _ in range(layers)]
        self._sources = sources
        self._meter: MemoryMeter | None = None
        self._base = 0
        self._now = _Moment(FORWARD, 0)
        self._is_due = False
        self._told = 0
        self._found: dict[str, object] = {"held": [], "caches": []}  # attributes of modules
        self.runs = Runs(layers - 1)
        self._last: tuple[str, _Moment] | None = None  # its forward has ended, and the next has not begun

    def begin_step(self, meter: MemoryMeter | None, number: int, *, wanted: bool = False) -> None:
        """Record that a step begins.

        Args:
            meter: Its meter; ``None`` if its memory is not measured.
            number: How many ended before it.
            wanted: Whether the meter is to look before and after each run of a layer.
        """
        self._is_due = number < _ALL or (number + 1).bit_count() == 1
        # A meter that samples looks at every tensor anyway.
        looks = self._is_due or wanted or (meter is not None and meter.samples)
        self._meter = meter if looks else None
        self.is_on = False  # until the meter has forgotten the step before
        self.peaks.clear()
        self.layers = [LayerMemory() for _ in self.layers]
        self.runs, self._last = Runs(self.runs.final), None
        if self._meter is not None and self._is_due:
            self._sources.attributes.begin_step()

    def started(self) -> None:
        """Record that what is live from here on is of the step."""
        if self._meter is not None:
            live = self._meter.live()
            self._base = live - self._sources.outputs.at_begin
            self.is_on = True
            self._enter(EMBEDDINGS, 0, live)

    def look_back(self) -> None:
        """Record that the step is about to end; what it has saved is known still."""
        if self.is_on and self._is_due:
            attributes, registry = self._sources.attributes, self._sources.capture.registry
            self._found = {
                "held": attributes.saved(registry),
                "caches": attributes.lasting(registry, self._sources.device),
            }

    def stop(self) -> None:
        """Nothing is looked at any more."""
        self.is_on = False

    # ---- what the step is at ---------------------------------------------------------------------

    def layer_begins(self, index: int) -> bool:
        """Return a layer's forward begins; only while the watch is on, as what follows.

        Returns:
            Whether it is the first layer, whose backward is the last.
        """
        live = self._look()
        self._count_last(live)
        self._enter(FORWARD, index, live)
        return self.runs.begin(index)

    def layer_ended(self, index: int, way: str) -> None:
        """Record that a layer's forward has ended.

        What it leaves in memory is known when the caller has let go of what the layer was given: when the
        next one begins.

        Args:
            index: Of the layer.
            way: How it ran: a placement of the package.
        """
        live, before = self._close(), self._now
        self._last = holder_of(way), before
        if is_last := self.runs.end(index):
            self._count_last(live)
        self._enter(LOSS if is_last else FORWARD, index, live)

    def _count_last(self, live: int) -> None:
        if self._last is None:
            return
        (way, before), self._last = self._last, None
        trace = self._sources.capture.trace
        left = max(live - before.live - (self._sources.offloader.own_bytes - before.known), 0)
        self.layers[before.layer].left(left)
        planned = min(trace.planned_kept_bytes - before.planned, left)
        small = min(trace.kept_bytes - before.small - planned, left - planned)
        holders = {"kept": planned, "small": small}
        holders[way] = holders.get(way, 0) + left - planned - small
        self.runs.wait(before.layer, holders)

    def model_ended(self) -> None:
        """Record that the model's forward has ended: the loss comes next, whichever layer ran last."""
        if self.is_on and self._now.phase == FORWARD:
            live = self._close()
            self._count_last(live)
            self._enter(LOSS, self._now.layer, live)

    def backward_reached(self, index: int, scope: ScopeKey) -> None:
        """Backward comes to a run of a layer, so that it is done with the one before.

        Args:
            index: Of the layer.
            scope: The run.
        """
        live = self._close()
        self._count_last(live)
        self.runs.fit(max(live - self._base - self._sources.offloader.own_bytes, 0))
        self.runs.reach(index)
        self._enter(BACKWARD, index, live, _Uses(scope, self._sources.capture.lookahead))

    def leave(self, phase: str) -> None:
        """From now on no layer runs.

        Args:
            phase: What does: ``EMBEDDINGS`` where backward has come out of the first layer, to what made the
                input of that; ``BETWEEN`` where it is over, ``UPDATE`` where an optimizer works.
        """
        live = self._close()
        self.runs.let_go()
        self._enter(phase, 0, live)

    def update_ended(self, born: int) -> None:
        """Record that the optimizer is done.

        Args:
            born: Bytes of its states that came into being, which are none that it works with.
        """
        live, peak = self._close(), self.peaks.get(UPDATE)
        if peak is not None:
            self.peaks[UPDATE] = peak._replace(nbytes=max(peak.nbytes - born, 0))
        self._enter(BETWEEN, 0, live)

    def seen(self, live: int, aside: int) -> None:
        """Record that the meter has seen bytes that are in use.

        Args:
            live: Those that count.
            aside: Gradients, and what else did not count at that moment; there may be more of them by now.
        """
        if self.is_on:
            gradients, frozen = self._sources.gradients.parts
            now = self._now
            released = now.uses.count() if now.uses is not None else 0
            self._note(now, live, min(gradients, max(aside - frozen, 0)), frozen, released)

    def _note(self, now: _Moment, live: int, gradients: int, frozen: int, released: int = 0) -> None:
        """Of several moments of a phase the fullest stays."""
        nbytes = max(live - self._base, 0)
        held = self._held()
        now.sees(live - self._sources.offloader.ledger.read_ahead)
        samples = self._meter is None or self._meter.samples
        now.knows(nbytes, held.planned, at_once=samples, released=released)
        best = self.peaks.get(now.phase)
        if best is None or nbytes + gradients + frozen > best.whole:
            self.peaks[now.phase] = Peak(nbytes, now.layer, held, now.beside, gradients, frozen)

    # ---- sums ------------------------------------------------------------------------------------

    def _enter(self, phase: str, index: int, live: int, uses: _Uses | None = None) -> None:
        beside = max(live - self._base - self._held().nbytes, 0)
        offloader, trace = self._sources.offloader, self._sources.capture.trace
        books = offloader.own_bytes, trace.kept_bytes, trace.planned_kept_bytes
        least = live - offloader.ledger.read_ahead
        self._now = _Moment(phase, index, live, *books, beside, least, uses=uses)
        self._note(self._now, live, *self._sources.gradients.parts)

    def _close(self) -> int:
        """End what the step is at; returns the live bytes."""
        live, now = self._look(), self._now
        if self.layers:
            now.sees(live - self._sources.offloader.ledger.read_ahead)
            self.layers[now.layer].took(now.phase, now.most - now.least, now.unplanned, now.whole)
        if now.phase == LOSS:
            self.runs.at_loss(now.unplanned)
        return live

    def _look(self) -> int:
        return 0 if self._meter is None else self._meter.cut()

    def _held(self) -> Held:
        ledger = self._sources.offloader.ledger
        return Held(
            in_flight=max(ledger.in_flight - ledger.read_ahead, 0),
            read_ahead=ledger.read_ahead,
            settled=ledger.settled,
            **self.runs.left,
            put_out=self._sources.outputs.nbytes,
        )

    def figures(self) -> dict[str, object] | None:
        """All of it, for the run log; ``None`` of a step that was not looked at, or has no news."""
        most = max((peak.whole for peak in self.peaks.values()), default=0)
        if self._meter is None or not (self._is_due or most > _NEWS * self._told):
            return None
        self._told = most
        return {
            "source": self._meter.source,
            **self._found,
            "phases": {phase: peak.figures() for phase, peak in self.peaks.items()},
            "layers": [[layer.leaves, layer.forward, layer.backward] for layer in self.layers],
        }


class _Uses:
    """What backward has used of the run of a layer that it is at.

    Args:
        scope: The run.
        lookahead: Knows the order in which activations are used.
    """

    def __init__(self, scope: ScopeKey, lookahead: Lookahead) -> None:
        self._scope, self._lookahead = scope, lookahead
        self._count = lookahead.uses
        self._nbytes = 0

    def count(self) -> int:
        """Take note of what was used since the last time, and tell the bytes of all.

        Not for two threads at once: a meter takes one sample at a time.
        """
        before, self._count = self._count, self._lookahead.uses
        self._nbytes += self._lookahead.used_bytes(self._scope, before, self._count)
        return self._nbytes


@dataclass(slots=True)
class _Moment:
    """Since when the step is at something, and what there was then, in bytes."""

    phase: str
    layer: int
    live: int = 0
    known: int = 0
    small: int = 0
    planned: int = 0
    beside: int = 0
    least: int = 0
    most: int = 0
    of_plans: int = 0
    unplanned: int = 0
    whole: int = 0
    uses: _Uses | None = None

    def knows(self, live: int, of_plans: int, *, at_once: bool, released: int) -> None:
        """Memory holds ``live`` bytes, and plans know of ``of_plans`` of them.

        Args:
            live: Those of the step.
            of_plans: Those of activations of layers.
            at_once: Whether both were so at one moment. Otherwise ``live`` are the most since the last time,
                when layers may have had more than now.
            released: Bytes that backward has used of the run that it is at, and that plans know nothing of.
        """
        known = of_plans if at_once else max(of_plans, self.of_plans)
        self.of_plans = of_plans
        self.unplanned = max(self.unplanned, live - known)
        self.whole = max(self.whole, live - known - (released if at_once else 0))

    def sees(self, own: int) -> None:
        """There were ``own`` bytes that are not read ahead; ``least`` are those that it began with."""
        self.most = max(self.most, own)
