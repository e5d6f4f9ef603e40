"""Where in a step memory is at its peak, and what holds it then.

Live bytes come from the meter of the step. What of them the offloader holds it tells by its ledger; what a
layer leaves in memory beside that shows when the layer returns. The rest is of what runs at the time.

Looking costs a reading of the allocator before and after each run of a layer. Where that takes long, on an
accelerator, few steps are looked at: the first three, and then those whose number is a power of two. Those
are told.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tba_offload.placements import Placement
from tba_offload.plan.beside import Beside
from tba_offload.report.log import HeldBytes, PhasePeak
from tba_offload.session.static_memory import attributes_saved

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from tba_offload.capture.hooks import Capture
    from tba_offload.capture.scope import Lookahead, ScopeKey
    from tba_offload.device.live_bytes import LiveBytes
    from tba_offload.device.memory import MemoryMeter
    from tba_offload.session.outputs import Outputs, Returned

FORWARD, LOSS, BACKWARD, EMBEDDINGS = "forward", "loss", "backward", "embeddings"
BETWEEN, UPDATE = "between", "update"
"""After a backward pass: gradients are clipped, or another pass begins; and while an optimizer works."""

_AS_FULL = 1 + 1 / 64
"""Of moments that differ by less, the first one says what holds memory. Live bytes are sampled before the
books are read, and a program may have let go of its outputs between."""

_ALL = 3
"""Steps that are looked at from the first on: states come in the first, and the second is as all others."""


class MemoryWatch:
    """Looks at the memory of some steps.

    Args:
        gradients: Bytes of gradients, and of frozen weights while they are there.
        outputs: Bytes of what the model put out.
        capture: Knows what layers have saved.
        modules: The model or its chunks.
        names: Module names of the layers.

    Attributes:
        is_on: Whether the step that is open is looked at.
        peaks: Of each phase.
        layers: What each layer did.
        runs: Those of layers.
    """

    def __init__(
        self,
        gradients: LiveBytes,
        outputs: Outputs,
        capture: Capture,
        modules: Sequence[nn.Module],
        names: Sequence[str],
    ) -> None:
        self.is_on = False
        self.peaks: dict[str, PhasePeak] = {}
        self.layers = [LayerMemory() for _ in names]
        self._gradients, self._outputs, self._modules = gradients, outputs, modules
        self._capture, self._offloader = capture, capture.offloader
        self._meter: MemoryMeter | None = None
        self._base = 0
        self._now = _Moment(FORWARD, 0)
        self._is_due = False
        self._held_by_modules: list[tuple[str, int, bool]] = []
        self._returned: dict[tuple[int, bool], int] = defaultdict(int)
        # What makes the input of the first layer of a stack, as embeddings, has its backward after that.
        stacks = [name.rpartition(".")[0] for name in names]
        self._begin_stacks = {i for i, stack in enumerate(stacks) if i == 0 or stack != stacks[i - 1]}
        self.runs = Runs(len(names) - 1)
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
        self._returned.clear()
        self.layers = [LayerMemory() for _ in self.layers]
        self.runs, self._last = Runs(self.runs.final), None

    def started(self) -> None:
        """Record that what is live from here on is of the step."""
        if self._meter is not None:
            live = self._meter.live()
            self._base = live - self._outputs.at_begin
            self.is_on = True
            self._enter(EMBEDDINGS, 0, live)

    def look_back(self) -> None:
        """Record that the step is about to end; what it has saved is known still."""
        if self.is_on and self._is_due:
            registry = self._capture.registry
            self._held_by_modules = attributes_saved(self._modules, registry)

    def stop(self) -> None:
        """Nothing is looked at any more."""
        self.is_on = False

    # ---- what the step is at ---------------------------------------------------------------------

    def layer_begins(self, index: int) -> bool:
        """Return a layer's forward begins; only while the watch is on, as what follows.

        Returns:
            Whether it is the first layer of a stack, with what made its input coming after its backward.
        """
        live = self._look()
        self._count_last(live)
        self._enter(FORWARD, index, live)
        return index in self._begin_stacks

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
        trace = self._capture.trace
        left = max(live - before.live - (self._offloader.own_bytes - before.known), 0)
        of_layer = self.layers[before.layer]
        of_layer.leaves = max(of_layer.leaves, left)
        planned = min(trace.planned_kept_bytes - before.planned, left)
        small = min(trace.kept_bytes - before.small - planned, left - planned)
        holders = {"kept": planned, "small": small}
        holders[way] = holders.get(way, 0) + left - planned - small
        self.runs.wait(before.layer, holders)

    def model_ended(self, collected: Sequence[Returned]) -> None:
        """Record that the model's forward has ended: the loss comes next, whichever layer ran last.

        Args:
            collected: What the forward has held of its layers' outputs, and no graph.
        """
        if not self.is_on:
            return
        if is_forward := self._now.phase == FORWARD:
            live = self._close()
            self._count_last(live)
        else:
            live = self._look()
        for each in collected:
            self._returned[each.layer, each.is_put_out] += each.nbytes
            if not each.is_put_out:
                self.runs.drop(each.layer, each.nbytes, holder_of(each.placement))
        for phase in FORWARD, LOSS:
            if (peak := self.peaks.get(phase)) is None:
                continue
            held = peak.held
            for each in collected:
                if each.number < peak.number:  # it was there at the peak
                    held = held.with_returned(each.nbytes, holder_of(each.placement))
            self.peaks[phase] = peak._replace(held=held)
        if is_forward:
            self._enter(LOSS, self._now.layer, live)

    def backward_reached(self, index: int, scope: ScopeKey) -> None:
        """Backward comes to a run of a layer, so that it is done with the one before.

        Args:
            index: Of the layer.
            scope: The run.
        """
        live = self._close()
        self._count_last(live)
        self.runs.fit(max(live - self._base - self._offloader.own_bytes, 0))
        self.runs.reach(index)
        self._enter(BACKWARD, index, live, _Uses(scope, self._capture.lookahead))

    def leave(self, phase: str) -> None:
        """From now on no layer runs.

        Args:
            phase: What does: ``EMBEDDINGS`` where backward has come out of the first layer, to what made the
                input of that; ``BETWEEN`` where it is over, ``UPDATE`` where an optimizer works.
        """
        live = self._close()
        self.runs.let_go()
        self._enter(phase, self._now.layer if phase == EMBEDDINGS else 0, live)

    def seen(self, live: int, aside: int) -> None:
        """Record that the meter has seen bytes that are in use.

        Args:
            live: Those that count.
            aside: Gradients, and what else did not count at that moment; there may be more of them by now.
        """
        if self.is_on:
            gradients, frozen = self._gradients.parts
            now = self._now
            released = now.uses.count() if now.uses is not None else 0
            self._note(now, live, min(gradients, max(aside - frozen, 0)), frozen, released)

    def _note(self, now: _Moment, live: int, gradients: int, frozen: int, released: int = 0) -> None:
        """Of several moments of a phase the fullest stays."""
        nbytes = max(live - self._base, 0)
        held = self._held()
        now.sees(live - self._offloader.ledger.read_ahead)
        samples = self._meter is None or self._meter.samples
        now.knows(nbytes, held.planned, at_once=samples, released=released)
        best, whole = self.peaks.get(now.phase), nbytes + gradients + frozen
        if best is None or whole > best.whole * _AS_FULL:
            number = self._outputs.returned
            self.peaks[now.phase] = PhasePeak(nbytes, now.layer, held, now.beside, gradients, frozen, number)
        elif whole > best.whole:
            self.peaks[now.phase] = best._replace(nbytes=nbytes, gradients=gradients, frozen=frozen)

    # ---- sums ------------------------------------------------------------------------------------

    def _enter(self, phase: str, index: int, live: int, uses: _Uses | None = None) -> None:
        beside = max(live - self._base - sum(self._held()), 0)
        offloader, trace = self._offloader, self._capture.trace
        books = offloader.own_bytes, trace.kept_bytes, trace.planned_kept_bytes
        least = live - offloader.ledger.read_ahead
        self._now = _Moment(phase, index, live, *books, beside, least, uses=uses)
        self._note(self._now, live, *self._gradients.parts)

    def _close(self) -> int:
        """End what the step is at; return the live bytes."""
        live, now = self._look(), self._now
        if self.layers:
            now.sees(live - self._offloader.ledger.read_ahead)
            self.layers[now.layer].took(now.phase, now.most - now.least, now.unplanned, now.whole)
        if now.phase == LOSS:
            self.runs.beside_at_loss = max(self.runs.beside_at_loss or 0, now.unplanned)
        return live

    def _look(self) -> int:
        return 0 if self._meter is None else self._meter.cut()

    def _held(self) -> HeldBytes:
        ledger = self._offloader.ledger
        return HeldBytes(
            in_flight=max(ledger.in_flight - ledger.read_ahead, 0),
            read_ahead=ledger.read_ahead,
            settled=ledger.settled,
            **self.runs.left,
            put_out=self._outputs.nbytes,
        )

    def figures(self) -> dict[str, object] | None:
        """Return all of it for the run log; ``None`` of a step that is not due."""
        if self._meter is None or not self._is_due:
            return None
        return {
            "source": self._meter.source,
            "held": self._held_by_modules,
            "returned": [[*key, nbytes] for key, nbytes in sorted(self._returned.items())],
            "phases": {phase: peak.as_json() for phase, peak in self.peaks.items()},
            "layers": [[layer.leaves, layer.forward, layer.backward] for layer in self.layers],
        }


@dataclass(slots=True)
class LayerMemory:
    """What the runs of one layer did, the largest of each, in bytes.

    Attributes:
        leaves: Left in memory by a forward, what the offloader holds left out.
        forward: Most live bytes in a forward beyond those before it; what is read ahead is of others.
        backward: The same in a backward.
        beside: Most bytes in each beside what plans know of.
    """

    leaves: int = 0
    forward: int = 0
    backward: int = 0
    beside: Beside = field(default_factory=Beside)

    def took(self, phase: str, nbytes: int, beside: int, whole: int) -> None:
        """At its peak a phase had ``nbytes`` more live than at its begin, and ``beside`` what plans know.

        Of that, ``whole`` would have lain beside all that the run had saved.
        """
        if phase == FORWARD:
            self.forward = max(self.forward, nbytes)
            self.beside = self.beside.at_least(Beside(forward=beside))
        elif phase == BACKWARD:
            self.backward = max(self.backward, nbytes)
            self.beside = self.beside.at_least(Beside(0, beside, whole))


_Left = dict[str, int]
"""Bytes that a run of a layer has left in memory, by holder."""


class Runs:
    """The runs of layers that wait for their backward, and what they have left in memory, by holder.

    Args:
        final: Index of the layer after which the loss comes, as far as is known: where a model has several
            stacks it need not be the last one.

    Attributes:
        left: Bytes that runs have left in memory for backward, beside what the offloader holds.
        all_left: All of them.
        beside_at_loss: Most bytes between the last layer's forward and its backward that plans do not know
            of: logits, temporaries, what the model has put out; ``None`` if that was not seen.
    """

    def __init__(self, final: int) -> None:
        self.final = final
        self._latest = final
        self.left = {"kept": 0, "inputs": 0, "outputs": 0, "small": 0}
        self.all_left = 0
        self.beside_at_loss: int | None = None
        self._waiting: dict[int, list[_Left]] = defaultdict(list)
        self._leaving: _Left | None = None

    def end(self, index: int) -> bool:
        """Record that a forward has ended; return whether the loss comes next."""
        self._latest = index
        return index == self.final

    def wait(self, index: int, run: _Left) -> None:
        """Record that a run begins to wait."""
        self._waiting[index].append(run)
        self._change(run, 1)

    def reach(self, index: int) -> None:
        """Backward comes to the latest run of a layer, so that it is done with the one before."""
        self.final = self._latest
        self.let_go()
        runs = self._waiting[index]
        self._leaving = runs.pop() if runs else None

    def fit(self, most: int) -> None:
        """No more than ``most`` bytes are there: what the model's output alone had held went with that."""
        gone = self.all_left - most
        for run in (run for runs in self._waiting.values() for run in runs):
            if gone <= 0 or not (self.left["outputs"] or self.left["small"]):
                return
            for holder in ("outputs", "small"):
                fewer = min(gone, run.get(holder, 0))
                self._change({holder: fewer}, -1)
                run[holder] = run.get(holder, 0) - fewer
                gone -= fewer

    def drop(self, index: int, nbytes: int, holder: str) -> None:
        """Record that bytes that the latest run of a layer has left in memory are gone before backward."""
        for run in self._waiting[index][-1:]:
            fewer = min(nbytes, run.get(holder, 0))
            self._change({holder: fewer}, -1)
            run[holder] = run.get(holder, 0) - fewer

    def let_go(self) -> None:
        """Backward is done with the run that it had come to."""
        if self._leaving is not None:
            self._change(self._leaving, -1)
            self._leaving = None

    def _change(self, run: _Left, sign: int) -> None:
        for holder, nbytes in run.items():
            self.left[holder] += sign * nbytes
            self.all_left += sign * nbytes


def holder_of(way: str) -> str:
    """Return what holds the bytes that a run of a layer leaves in memory, by how it ran."""
    placement = Placement(way)
    if placement is Placement.KEEP:
        return "kept"
    return "inputs" if placement.recomputes else "outputs"


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
