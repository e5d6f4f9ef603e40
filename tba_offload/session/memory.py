"""The memory of steps: how much there is at the peak, what holds it then, and how it goes over time.

A meter tells live bytes. Of them the offloader knows its own by its ledger; what a layer leaves in memory
beside that shows when the next one begins. The rest is of what runs at the time.

Looking costs a reading of the allocator before each run of a layer. Where that takes long, on an
accelerator, few steps are looked at: the first three, and then those whose number is a power of two.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from tba_offload.device.live_bytes import plain_storage
from tba_offload.device.memory import MemoryMeter, ResidentPeak, meter_of
from tba_offload.errors import UnsupportedError
from tba_offload.placements import Placement
from tba_offload.planner.measure import SeenBeside
from tba_offload.planner.profile import Beside
from tba_offload.report.log import HeldBytes, PhasePeak
from tba_offload.states.parameters import parameters_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from tba_offload.capture.registry import Registry
    from tba_offload.capture.scope import ScopeKey
    from tba_offload.capture.trace import ScopeTrace, StepTrace
    from tba_offload.planner.model import Limits
    from tba_offload.session.layers import Returned
    from tba_offload.session.session import Session
    from tba_offload.session.step import Step
    from tba_offload.states import OptimizerStates
    from tba_offload.store.base import Moved

FORWARD, LOSS, BACKWARD, EMBEDDINGS = "forward", "loss", "backward", "embeddings"
BETWEEN, UPDATE = "between", "update"
"""After a backward pass: gradients are clipped, or another pass begins; and while an optimizer works."""

_AS_FULL = 1 + 1 / 64
"""Of moments that differ by less, the first one says what holds memory. Live bytes are sampled before the
books are read, and a program may have let go of its outputs between."""

_ALL = 3
"""Steps that are looked at from the first on: states come in the first, and the second is as all others."""


class Memory:
    """The memory of the step that is open, as differences to what was live when it began.

    Args:
        session: What works in its steps. It is not kept.
        wanted: Whether steps are measured that do not say so themselves.

    Attributes:
        meter: Of the step that is open; ``None`` if no step is, or its memory is not measured.
        curve: Records memory over time.
        base_bytes: Bytes that were live when the step began, gradients and outputs of earlier steps left out;
            ``None`` if not measured.
        overlaps: Whether a step of another session is open at the same time: no peak can be told then.
        figures: What was measured of the step, by the fields of :class:`~tba_offload.report.log.StepRecord`.
        is_on: Whether the meter looks before each run of a layer.
        is_due: Whether what is seen then goes to the run log.
        peaks: The fullest moment of each phase.
        layers: Bytes of each layer, the most of its runs: what a forward leaves in memory beside what the
            offloader holds, and what a forward and a backward take beyond what was there before.
        left: Bytes that layers have left in memory for backward beside what the offloader holds, by holder.
        held_by_modules: What attributes of modules hold, as of :func:`attributes_saved`.
        returned: Bytes that layers returned and something holds, by layer, and whether the model puts them
            out.
    """

    def __init__(self, session: Session, *, wanted: bool) -> None:
        self._device, self._gradients, self._outputs = session.device, session.gradients.live, session.outputs
        self._capture, self._offloader, self._notices = session.capture, session.offloader, session.notices
        self._names, self._wanted = [layer.id.name for layer in session.layers], wanted
        self.curve, self._resident = StepCurve(session), ResidentPeak()
        self.held_by_modules: list[tuple[str, int, bool]] = []
        # The loss comes after this layer, as far as is known: of several stacks it need not be the last one.
        self._final = self._latest = len(self._names) - 1
        self._meter: MemoryMeter | None = None
        self._forget()
        if wanted:
            self.meter_of_step(wanted=None, may_help=False)

    def _forget(self) -> None:
        self.is_on = self.is_due = self.overlaps = False
        self.meter: MemoryMeter | None = None
        self.base_bytes: int | None = None
        self.figures: dict[str, Any] = {}
        self._live_at_pause: int | None = None
        self._state_bytes = self._base = 0
        self.peaks: dict[str, PhasePeak] = {}
        self.layers = [{"leaves": 0, FORWARD: 0, BACKWARD: 0} for _ in self._names]
        self._beside, self._at_loss = [Beside() for _ in self._names], -1
        self.returned: Counter[tuple[int, bool]] = Counter()
        self.left: Counter[str] = Counter(kept=0, inputs=0, outputs=0, small=0)
        self._waiting: dict[int, list[Counter[str]]] = defaultdict(list)  # runs that wait for their backward
        self._leaving: Counter[str] = Counter()  # of the run that backward is at
        self._now = _Moment(EMBEDDINGS, 0)

    # ---- meters ----------------------------------------------------------------------------------

    def meter_of_step(self, *, wanted: bool | None, may_help: bool) -> MemoryMeter | None:
        """Return the meter of a step that begins; where memory cannot be measured the run log has no figure.

        Args:
            wanted: Whether the step is to be measured; ``None`` for what holds for all.
            may_help: Whether the planner has a use for its figures anyway.

        Raises:
            UnsupportedError: It is wanted of this step, and the memory of this device cannot be measured.
        """
        if not (may_help or (self._wanted if wanted is None else wanted)):
            return None
        if self._meter is None:
            try:
                self._meter = meter_of(self._device, lambda: self._gradients.nbytes + self._state_bytes)
                self._meter.tell(self._saw)
            except UnsupportedError as error:
                if wanted:
                    raise
                self._notices.warn_once("meter", f"the activation peak is not measured: {error}")
        return self._meter

    def check_measured(self) -> None:
        """Check that live bytes of the device can be told, as a budget of the device needs.

        Raises:
            UnsupportedError: They cannot.
        """
        try:
            self.meter_of_step(wanted=True, may_help=True)
        except UnsupportedError as error:
            needs = "budget.device_bytes needs to know what lies on the device, and that is not measured here"
            raise UnsupportedError(f"{needs} ({error}); set budget.activation_bytes instead") from error

    def close(self) -> None:
        """End the thread that samples, if there is one."""
        if self._meter is not None:
            self._meter.close()
        self._meter = None  # in a cycle, the model would stay alive

    # ---- one step --------------------------------------------------------------------------------

    def begin_step(
        self, meter: MemoryMeter | None, number: int, *, wanted: bool, traced: bool, gradients_allocated: bool
    ) -> None:
        """Read what is live now; the step begins.

        Args:
            meter: Its meter; ``None`` if its memory is not measured.
            number: How many ended before it.
            wanted: Whether the meter is to look before each run of a layer.
            traced: Whether a user wants the step over time.
            gradients_allocated: Whether every gradient exists already.
        """
        if self._meter is not None and meter is None:
            self._meter.peak()  # an interrupted step may have left it watching
        self._resident.reset()
        self._forget()
        self._outputs.begin_step()
        self.figures["gradients_allocated"] = gradients_allocated
        self.curve.begin_step(meter, number, wanted=traced)
        if meter is None:
            return
        self.meter, self.is_due = meter, number < _ALL or (number + 1).bit_count() == 1
        meter.reset()
        live = meter.live()
        self.base_bytes = self._base = live - self._outputs.at_begin
        if self.is_due or wanted or meter.samples:  # a meter that samples looks at every tensor anyway
            self._enter(EMBEDDINGS, 0, live)
            self.is_on = True

    def sample(self, grows_by: int = 0) -> None:
        """Note what is live, for a meter that sees only what it looks at."""
        if self.meter is not None:
            self.meter.sample(grows_by)

    def pause(self) -> None:
        """From now on an optimizer works: its memory is not that of activations."""
        if self.meter is not None and self._live_at_pause is None:
            self.meter.pause()
            self._live_at_pause = self.meter.live()
            self.leave(UPDATE)

    def resume(self) -> None:
        """Record that the optimizer is done; what it has left allocated are its states."""
        if self.meter is not None:
            self._count_states(self.meter)
            self.meter.resume()
            self.leave(BETWEEN)

    def end(self) -> None:
        """Record that the step has ended."""
        self.figures["resident_peak_bytes"] = self._resident.read()
        if (meter := self.meter) is not None:
            self._count_states(meter)
            peak = max(meter.peak() - self._base, 0)
            self.figures |= {
                "activation_peak_bytes": None if self.overlaps else peak,
                "peak_source": meter.source,
                "base_bytes": self._base,
                "earlier_outputs_bytes": self._outputs.at_begin,
                "reserved_peak_bytes": meter.reserved(),
                "device_peak_bytes": meter.whole_peak(),
                "state_bytes": self._state_bytes,
            }

    def look_back(self, modules: Sequence[nn.Module]) -> None:
        """Note what modules hold of the step, which is about to end: what it has saved is known still."""
        self.held_by_modules = attributes_saved(modules, self._capture.registry) if self.is_due else []

    def stop(self) -> None:
        """Look no more: the step is over, or was left."""
        self.meter, self.is_on = None, False
        self.curve.stop()

    def _count_states(self, meter: MemoryMeter) -> None:
        if self._live_at_pause is not None:
            self._state_bytes += max(meter.live() - self._live_at_pause, 0)
            self._live_at_pause = None

    @property
    def beside(self) -> SeenBeside | None:
        """Most bytes beside the activations of layers; ``None`` if the memory of this step was not seen."""
        return None if self.overlaps or self._at_loss < 0 else SeenBeside(self._at_loss, self._beside)

    # ---- what the step is at ---------------------------------------------------------------------

    def layer_begins(self, index: int) -> bool:
        """Record that the forward of a layer begins, while ``is_on``.

        Returns:
            Whether it is the first layer of a stack, with what made its input coming after its backward.
        """
        self._enter(FORWARD, index, self._close())
        # What makes the input of the first layer of a stack, as embeddings, has its backward after that.
        before, stack = (name.rpartition(".")[0] for name in (self._names[index - 1], self._names[index]))
        return index == 0 or before != stack

    def layer_ended(self, index: int, way: str) -> None:
        """Record that the forward of a layer has ended.

        What it leaves in memory is known when the caller has let go of what the layer was given: when the
        next one begins, or the loss does.

        Args:
            index: Of the layer.
            way: How it ran: a placement of the package.
        """
        self._now.holder, self._latest = holder_of(way), index
        if index == self._final:
            self._enter(LOSS, index, self._close())

    def model_ended(self, collected: Sequence[Returned]) -> None:
        """Record that the model's forward has ended: the loss comes next, whichever layer ran last.

        Args:
            collected: What the forward has held of its layers' outputs, and no graph.
        """
        if not self.is_on:
            return
        live = self._close()
        for each in collected:
            holder = holder_of(each.placement)
            self.returned[each.layer, each.is_put_out] += each.nbytes
            for run in () if each.is_put_out else self._waiting[each.layer][-1:]:
                self._drop(run, each.nbytes, holder)
            for phase in (FORWARD, LOSS):
                peak = self.peaks.get(phase)
                if peak is not None and each.number < peak.number:  # it was there at the peak
                    self.peaks[phase] = peak._replace(held=peak.held.with_returned(each.nbytes, holder))
        if self._now.phase == FORWARD:
            self._enter(LOSS, self._now.layer, live)

    def backward_reached(self, index: int, scope: ScopeKey) -> None:
        """Backward comes to the latest run of a layer, so that it is done with the one before.

        Args:
            index: Of the layer.
            scope: The run.
        """
        live = self._close()
        # What the model's output alone had held went with that.
        gone = self.left.total() - max(live - self._base - self._offloader.own_bytes, 0)
        for run in chain(*self._waiting.values()) if gone > 0 else ():
            gone -= self._drop(run, gone, "outputs")
            gone -= self._drop(run, gone, "small")
        self._final = self._latest
        self.left.subtract(self._leaving)
        self._leaving = self._waiting[index].pop() if self._waiting[index] else Counter()
        self._enter(BACKWARD, index, live, scope)

    def leave(self, phase: str) -> None:
        """From now on no layer runs.

        Args:
            phase: What does: ``EMBEDDINGS`` where backward has come out of the first layer, to what made the
                input of that; ``BETWEEN`` where it is over, ``UPDATE`` where an optimizer works.
        """
        if self.is_on:
            live = self._close()
            self.left.subtract(self._leaving)
            self._leaving = Counter()
            self._enter(phase, self._now.layer if phase == EMBEDDINGS else 0, live)

    # ---- sums ------------------------------------------------------------------------------------

    def _saw(self, live: int, aside: int) -> None:
        """Take what the meter has seen: live bytes, and those aside, of which there may be more by now."""
        if self.is_on:
            gradients, frozen = self._gradients.parts
            self._note(live, min(gradients, max(aside - frozen, 0)), frozen)
        if self.curve.is_on:
            self.curve.seen(live, self.left.total())

    def _note(self, live: int, gradients: int, frozen: int) -> None:
        """Of several moments of a phase the fullest stays."""
        now, lookahead = self._now, self._capture.lookahead
        if now.scope is not None:  # no two threads at once: a meter takes one sample at a time
            before, now.uses = now.uses, lookahead.uses
            now.used += lookahead.used_bytes(now.scope, before, now.uses)
        nbytes, held = max(live - self._base, 0), self._held()
        now.most = max(now.most, live - held.read_ahead)
        # A meter of stretches tells the most of one, in which layers may have had more than now.
        at_once = self.meter is None or self.meter.samples
        known = held.planned if at_once else max(held.planned, now.of_plans)
        now.of_plans = held.planned
        now.unplanned = max(now.unplanned, nbytes - known)
        now.whole = max(now.whole, nbytes - known - (now.used if at_once else 0))
        best, whole = self.peaks.get(now.phase), nbytes + gradients + frozen
        if best is None or whole > best.whole * _AS_FULL:
            number = self._outputs.returned
            self.peaks[now.phase] = PhasePeak(nbytes, now.layer, held, now.beside, gradients, frozen, number)
        elif whole > best.whole:
            self.peaks[now.phase] = best._replace(nbytes=nbytes, gradients=gradients, frozen=frozen)

    def _enter(self, phase: str, index: int, live: int, scope: ScopeKey | None = None) -> None:
        held, uses = self._held(), self._capture.lookahead.uses
        beside, least = max(live - self._base - sum(held), 0), live - held.read_ahead
        self._now = _Moment(phase, index, live, self._books(), beside, least, scope=scope, uses=uses)
        self._note(live, *self._gradients.parts)

    def _books(self) -> tuple[int, int, int]:
        """Return the bytes that the offloader holds, that hooks have kept, and that a plan keeps of these."""
        trace = self._capture.trace
        return self._offloader.own_bytes, trace.kept_bytes, trace.planned_kept_bytes

    def _close(self) -> int:
        """End what the step is at; return the live bytes."""
        live, now = 0 if self.meter is None else self.meter.cut(), self._now
        now.most = max(now.most, live - self._offloader.ledger.read_ahead)
        if now.holder is not None:
            self._count_left(now, now.holder, live)
        if now.phase == LOSS:
            self._at_loss = max(self._at_loss, now.unplanned)
        elif now.phase in {FORWARD, BACKWARD}:
            seen = (now.unplanned,) if now.phase == FORWARD else (0, now.unplanned, now.whole)
            self._beside[now.layer] = self._beside[now.layer].at_least(Beside(*seen))
            layer = self.layers[now.layer]
            layer[now.phase] = max(layer[now.phase], now.most - now.least)
        return live

    def _count_left(self, run: _Moment, holder: str, live: int) -> None:
        own, small, kept = (after - before for after, before in zip(self._books(), run.books, strict=True))
        nbytes = max(live - run.live - own, 0)
        kept = min(kept, nbytes)
        small = min(small - kept, nbytes - kept)
        left = Counter(kept=kept, small=small)
        left[holder] += nbytes - kept - small
        self.layers[run.layer]["leaves"] = max(self.layers[run.layer]["leaves"], nbytes)
        run.holder = None
        self._waiting[run.layer].append(left)
        self.left.update(left)

    def _drop(self, run: Counter[str], nbytes: int, holder: str) -> int:
        fewer = min(nbytes, run[holder])
        run[holder] -= fewer
        self.left[holder] -= fewer
        return fewer

    def _held(self) -> HeldBytes:
        ledger = self._offloader.ledger
        ahead, settled = ledger.read_ahead, ledger.settled
        return HeldBytes(
            max(ledger.in_flight - ahead, 0), ahead, settled, **self.left, put_out=self._outputs.nbytes
        )


def holder_of(way: str) -> str:
    """Return what holds the bytes that a run of a layer leaves in memory, by how it ran."""
    placement = Placement(way)
    if placement is Placement.KEEP:
        return "kept"
    return "inputs" if placement.recomputes else "outputs"


@dataclass(slots=True)
class _Moment:
    """Since when the step is at something, what there was then, and what was seen since, in bytes.

    Attributes:
        phase: The phase.
        layer: Index of the layer that runs, or ran last.
        live: Live bytes at the begin.
        books: What was known of them.
        beside: Bytes of nothing that is known.
        least: Bytes at the begin that are not read ahead.
        most: Most of them since.
        of_plans: Bytes that plans knew of at the last look.
        unplanned: Most bytes that plans do not know of.
        whole: The same if all that the run had saved lay beside them.
        scope: The run that backward is at.
        uses: How many activations backward had used at the last look.
        used: Bytes of those of the run.
        holder: What holds what a forward leaves, once that has ended.
    """

    phase: str
    layer: int
    live: int = 0
    books: tuple[int, int, int] = (0, 0, 0)
    beside: int = 0
    least: int = 0
    most: int = 0
    of_plans: int = 0
    unplanned: int = 0
    whole: int = 0
    scope: ScopeKey | None = None
    uses: int = 0
    used: int = 0
    holder: str | None = None


# Memory over time

_STATES, _WEIGHTS = "optimizer states", "frozen weights"

_FIRST = 3
"""Number of the first step that is recorded: states exist, and drives are warm."""

_POINTS = 1200
"""Most points of a curve in the log: a picture has some 600 columns."""

_MOST_LINES = 20_000
"""Most waits, and calls that moved bytes, of a step that is told: a line of some MiB each."""


class StepCurve:
    """Records memory and traffic of some steps: the third, powers of four from 16 on, and those asked for.

    Args:
        session: Its stores tell what they move, also for states of optimizers, of which more may come.

    Attributes:
        is_on: Whether a step is recorded now.
    """

    def __init__(self, session: Session) -> None:
        self._ledger, self._store = session.offloader.ledger, session.store
        self._states, self._weights = session.states, session.weights_traffic
        self.is_on = False
        self._points: list[tuple[float, int, int, int, int, int, int, int]] = []  # as ``Moment`` of the log
        self._moves: dict[str, list[Moved]] = {}  # by what they moved; of a step that is not recorded empty
        self._source = ""

    def begin_step(self, meter: MemoryMeter | None, number: int, *, wanted: bool) -> None:
        """Record that a step begins.

        Args:
            meter: Its meter; without one there is no memory to record.
            number: How many ended before it.
            wanted: Whether a user asks for it.
        """
        self.stop()
        number += 1
        is_power = number >= 16 and number.bit_count() == 1 and number.bit_length() % 2 == 1
        self.is_on = wanted or (meter is not None and (number == _FIRST or is_power))
        self._source = meter.source if meter is not None else ""
        self._points, self._moves = [], {"": [], _STATES: [], _WEIGHTS: []} if self.is_on else {}
        if self.is_on:
            self._watch_moves(*(moves.append for moves in self._moves.values()))

    def _watch_moves(self, *seen: Callable[[Moved], object] | None) -> None:
        activations, states, weights = seen
        self._store.watch_moves(activations)
        for each in self._states:
            each.watch_moves(states)
        self._weights.watch_moves(weights)

    def seen(self, live: int, left: int) -> None:
        """Record that ``live`` bytes are in use, of which layers have ``left`` so many for backward."""
        ledger, stats = self._ledger, self._ledger.stats
        moved = stats.offloaded, stats.read, ledger.settled, left
        self._points.append((time.perf_counter(), live, ledger.in_flight, ledger.read_ahead, *moved))

    def stop(self) -> None:
        """Record nothing any more."""
        if self.is_on:
            self.is_on = False
            self._watch_moves(None, None, None)

    def figures(
        self,
        step: Step,
        trace: StepTrace,
        waits: Sequence[tuple[float, float]],
        names: Sequence[str],
        base_bytes: int | None,
        limits: Limits,
    ) -> dict[str, object] | None:
        """Return all of it, for the run log; ``None`` of a step that was not recorded.

        Args:
            step: The step, which has ended.
            trace: What ran.
            waits: When training waited for I/O: from, until.
            names: Module names of the layers.
            base_bytes: Live bytes when it began.
            limits: Budget and window.
        """
        if not self._moves or len(trace.scopes) > _MOST_LINES:
            return None

        def at(*times: float | None) -> list[Any]:
            return [None if each is None else round(max(each - step.began, 0.0), 6) for each in times]

        def run_of(run: ScopeTrace) -> list[Any]:
            times = at(run.forward_began, run.forward_ended, run.backward_began)
            return [names.index(run.key.name), run.key.micro_batch, *times]

        def move_of(what: str, move: Moved) -> list[Any]:
            drive, times = drives.index((what, move.drive, move.place)), at(move.began, move.ended)
            return [drive, move.writes, *times, move.nbytes, threads.index(move.thread)]

        def point_of(seconds: float, live: int, *others: int) -> list[Any]:
            # Other threads change the sums, so that one may be negative for a moment.
            return [*at(seconds), *(max(0, nbytes) for nbytes in (live - (base_bytes or 0), *others))]

        told = [(what, move) for what, moves in self._moves.items() for move in list(moves)]
        told = sorted((each for each in told if each[1].began >= step.began), key=lambda each: each[1].began)
        told = told[:_MOST_LINES]
        drives = sorted({(what, move.drive, move.place) for what, move in told})
        threads = list(dict.fromkeys(move.thread for _, move in told))
        points = list(self._points)
        each = len(points) // _POINTS + 1
        fullest = [max(points[i : i + each], key=itemgetter(1)) for i in range(0, len(points), each)]
        return {
            "source": self._source,
            "names": list(names),
            "scopes": list(map(run_of, trace.scopes)),
            "backward_ends": at(*trace.backward_ends),
            "layers_left": at(*trace.layers_left),
            "updates": [at(*update) for update in step.update_times(trace.backward_ends)],
            "stalls": [at(*wait) for wait in waits[:_MOST_LINES]],
            "budget": limits.budget,
            "window": limits.window,
            "points": [point_of(*point) for point in fullest],
            "drives": [[drive, place, what] for what, drive, place in drives],
            "moves": [move_of(*each) for each in told],
        }


# Memory that lasts from step to step

_MOST_ITEMS = 1024
"""Entries of a list or a mapping that are looked at: a table of a model has a few, a data set millions."""


def static_bytes(
    modules: Sequence[nn.Module],
    optimizers: Iterable[Optimizer],
    offloaded: Iterable[OptimizerStates],
    device: torch.device,
) -> dict[str, int]:
    """Return bytes of a device by what holds them, each storage once.

    Args:
        modules: The model or its chunks.
        optimizers: Those that update it, or masters of it.
        offloaded: Offloaded states of some of these, of which slots hold what is in memory.
        device: The device.
    """
    optimizers = list(optimizers)
    parameters = [each for module in modules for each in torch.nn.Module.parameters(module)]
    states = (state for each in optimizers for state in each.state.values() if isinstance(state, dict))
    groups: dict[str, Iterable[object]] = {
        "parameters": parameters,
        "gradients": ((each.grad, getattr(each, "main_grad", None)) for each in parameters),
        "buffers": chain.from_iterable(map(torch.nn.Module.buffers, modules)),
        "optimizer_states": chain.from_iterable(state.values() for state in states),
        "masters": chain.from_iterable(map(parameters_of, optimizers)),  # what is not the model's own
    }
    seen: set[int] = set()
    nbytes = {name: sum(new_bytes(found, device, seen)) for name, found in groups.items()}
    nbytes["optimizer_states"] += sum(states.device_bytes for states in offloaded)
    return nbytes


def largest_trained(
    modules: Sequence[nn.Module], layers: Sequence[nn.Module]
) -> tuple[list[tuple[str, int]], int]:
    """Return the largest trained parameters beside the layers, by name, and the bytes of the largest in them.

    Args:
        modules: The model or its chunks.
        layers: Its layers.
    """
    inner = {parameter for layer in layers for parameter in torch.nn.Module.parameters(layer)}
    found = chain.from_iterable(map(torch.nn.Module.named_parameters, modules))
    sizes = {each: (name, each.nbytes) for name, each in found if each.requires_grad and not is_lazy(each)}
    beside = [size for each, size in sizes.items() if each not in inner]
    inside = max((nbytes for each, (_, nbytes) in sizes.items() if each in inner), default=0)
    return sorted(beside, key=itemgetter(1), reverse=True)[:3], inside


def new_bytes(found: Iterable[object], device: torch.device, seen: set[int]) -> Iterator[int]:
    """Yield the bytes of storages of a device that are not among those that were seen."""
    for each in found:
        for tensor in each if isinstance(each, list | tuple) else (each,):  # LBFGS: a history
            storage = plain_storage(tensor)
            if storage is not None and storage.device == device and storage._cdata not in seen:
                seen.add(storage._cdata)
                yield storage.nbytes()


def attributes_saved(modules: Iterable[nn.Module], registry: Registry) -> list[tuple[str, int, bool]]:
    """Return what attributes of modules hold and layers have saved, beside parameters and buffers.

    Args:
        modules: The model or its chunks.
        registry: What was saved in the step.

    Returns:
        For each tensor its name, its bytes, and whether it outlives the step, as a table does.
    """
    found: dict[int, tuple[str, int, bool]] = {}
    for name, inner in chain.from_iterable(map(torch.nn.Module.named_modules, modules)):
        for attribute, value in list(vars(inner).items()):
            items = list(value.values()) if isinstance(value, dict) else value
            is_short = isinstance(items, list | tuple) and len(items) <= _MOST_ITEMS
            for tensor in () if attribute in _OF_TORCH else items if is_short else (value,):
                storage = plain_storage(tensor)
                if storage is None or not (registry.is_kept(storage) or registry.record_of(storage)):
                    continue
                lasts = isinstance(tensor, torch.Tensor) and tensor.grad_fn is None
                known = f"{name}.{attribute}".lstrip("."), storage.nbytes(), lasts
                found.setdefault(storage._cdata, known)
    return list(found.values())


_OF_TORCH = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has."""
