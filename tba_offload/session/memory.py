"""The memory of steps: how much there is at the peak, what holds it then, and how it goes over time.

A meter tells live bytes. Of them the offloader knows its own by its ledger; what a layer leaves in memory
beside that shows when the next one begins. The rest is of what runs at the time.

Looking costs a reading of the allocator before and after each run of a layer. Where that takes long, on an
accelerator, few steps are looked at: the first three, and then those whose number is a power of two.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING

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

    from tba_offload.capture.hooks import Capture
    from tba_offload.capture.registry import Registry
    from tba_offload.capture.scope import ScopeKey
    from tba_offload.capture.trace import ScopeTrace, StepTrace
    from tba_offload.device.live_bytes import LiveBytes
    from tba_offload.device.streams import Device
    from tba_offload.planner.model import Limits
    from tba_offload.session.layers import Outputs, Returned
    from tba_offload.session.notices import Notices
    from tba_offload.session.step import Step
    from tba_offload.states import OptimizerStates
    from tba_offload.store.base import Moved
    from tba_offload.weights import WeightsTraffic

FORWARD, LOSS, BACKWARD, EMBEDDINGS = "forward", "loss", "backward", "embeddings"
BETWEEN, UPDATE = "between", "update"
"""After a backward pass: gradients are clipped, or another pass begins; and while an optimizer works."""


class Memory:
    """The memory of the step that is open, as differences to what was live when it began.

    Args:
        device: Whose memory.
        gradients: Their bytes, which are no activations, and those of frozen weights while they are there.
        watch: Looks at what holds memory.
        curve: Records memory over time.
        outputs: Outputs of earlier steps are none of what lasts.
        notices: Takes the warning that memory cannot be measured.
        wanted: Whether steps are measured that do not say so themselves.

    Attributes:
        meter: Of the step that is open; ``None`` if no step is, or its memory is not measured.
        watch: As given.
        curve: As given.
        resident: The operating system's peak of the process.
        base_bytes: Bytes that were live when the step began, gradients and outputs of earlier steps left out;
            ``None`` if not measured.
        gradients_allocated: Whether every gradient existed when the step began.
        state_bytes: By how much optimizers have let memory grow.
        reserved_bytes: Most bytes that the allocator held in the step; ``None`` if that is not known.
        device_peak_bytes: Most live bytes in forward and backward, gradients and states included.
        overlaps: Whether a step of another session is open at the same time: neither peak can be told.
    """

    def __init__(
        self,
        device: Device,
        gradients: LiveBytes,
        watch: MemoryWatch,
        curve: StepCurve,
        outputs: Outputs,
        notices: Notices,
        *,
        wanted: bool,
    ) -> None:
        self.meter: MemoryMeter | None = None
        self.watch, self.curve, self.resident = watch, curve, ResidentPeak()
        self.base_bytes: int | None = None
        self.state_bytes = 0
        self.reserved_bytes: int | None = None
        self.device_peak_bytes: int | None = None
        self.gradients_allocated = self.overlaps = False
        self.source: str | None = None
        self._peak: int | None = None
        self._live_at_pause: int | None = None
        self._device, self._gradients, self._outputs = device, gradients, outputs
        self._notices, self._wanted = notices, wanted
        self._meter = self._meter_if_possible() if wanted else None

    # ---- meters ----------------------------------------------------------------------------------

    def meter_of_step(self, *, wanted: bool | None, may_help: bool) -> MemoryMeter | None:
        """Return the meter of a step that begins.

        Args:
            wanted: Whether the step is to be measured; ``None`` for what holds for all.
            may_help: Whether the planner has a use for its figures anyway.

        Raises:
            UnsupportedError: It is wanted of this step, and the memory of this device cannot be measured.
        """
        if wanted and self._meter is None:
            self._meter = self._new_meter()
        wanted = self._wanted if wanted is None else wanted
        if not wanted and may_help:
            wanted = True
            self._meter = self._meter or self._meter_if_possible()
        return self._meter if wanted else None

    def _new_meter(self) -> MemoryMeter:
        own, gradients = weakref.ref(self), self._gradients  # a thread must not keep a model alive

        def static() -> int:
            """Live bytes that are no activations and may have come into being in this step."""
            memory = own()
            return gradients.nbytes + memory.state_bytes if memory is not None else 0

        def saw(live: int, aside: int) -> None:
            if (memory := own()) is not None:
                memory.watch.seen(live, aside)
                memory.curve.seen(live, memory.watch.runs.all_left)

        meter = meter_of(self._device, static)
        meter.tell(saw)
        return meter

    def check_measured(self) -> None:
        """Check that live bytes of the device can be told, as a budget of the device needs.

        Raises:
            UnsupportedError: They cannot.
        """
        try:
            self.meter_of_step(wanted=True, may_help=True)
        except UnsupportedError as error:
            raise UnsupportedError(
                "budget.device_bytes needs to know what lies on the device, and that is not measured here "
                f"({error}); set budget.activation_bytes instead"
            ) from error

    def _meter_if_possible(self) -> MemoryMeter | None:
        """Training goes on where memory cannot be measured; the run log has no figure then."""
        try:
            return self._new_meter()
        except UnsupportedError as error:
            self._notices.warn_once("meter", f"the activation peak is not measured: {error}")
            return None

    def close(self) -> None:
        """End the thread that samples, if there is one."""
        if self._meter is not None:
            self._meter.close()

    # ---- one step --------------------------------------------------------------------------------

    def begin(self, meter: MemoryMeter | None, *, gradients_allocated: bool) -> None:
        """Read what is live now; the step begins."""
        if self._meter is not None and meter is None:
            self._meter.peak()  # an interrupted step may have left it watching
        self.resident.reset()
        self.meter, self.source = meter, None if meter is None else meter.source
        self.gradients_allocated, self.overlaps, self.state_bytes = gradients_allocated, False, 0
        self.base_bytes = self.reserved_bytes = self.device_peak_bytes = None
        self._peak = self._live_at_pause = None
        self._outputs.begin_step()
        if meter is not None:
            meter.reset()
            self.base_bytes = meter.live() - self._outputs.at_begin
            self.watch.started()

    def sample(self, grows_by: int = 0) -> None:
        """Note what is live, for a meter that sees only what it looks at."""
        if self.meter is not None:
            self.meter.sample(grows_by)

    def pause(self) -> None:
        """From now on an optimizer works: its memory is not that of activations."""
        if self.meter is not None and self._live_at_pause is None:
            self.meter.pause()
            self._live_at_pause = self.meter.live()
            if self.watch.is_on:
                self.watch.leave(UPDATE)

    def resume(self) -> None:
        """Record that the optimizer is done; what it has left allocated are its states."""
        if self.meter is not None:
            self._count_states()
            self.meter.resume()
            if self.watch.is_on:
                self.watch.leave(BETWEEN)

    def end(self) -> None:
        """Record that the step has ended, and what of its activations modules hold."""
        if self.meter is not None:
            self._count_states()
            self._peak = max(self.meter.peak() - (self.base_bytes or 0), 0)
            self.reserved_bytes = self.meter.reserved()
            self.device_peak_bytes = self.meter.whole_peak()

    def stop(self) -> None:
        """Look no more: the step is over, or was left."""
        self.meter = None
        self.watch.is_on = False
        self.curve.stop()

    def _count_states(self) -> None:
        if self.meter is not None and self._live_at_pause is not None:
            self.state_bytes += max(self.meter.live() - self._live_at_pause, 0)
            self._live_at_pause = None

    @property
    def peak_bytes(self) -> int | None:
        """Peak of live bytes, gradients and states left out that the step allocated; ``None`` if untold."""
        return None if self.overlaps else self._peak

    @property
    def beside(self) -> SeenBeside | None:
        """Most bytes beside the activations of layers; ``None`` if the memory of this step was not seen."""
        at_loss = self.watch.runs.beside_at_loss
        if self.overlaps or at_loss is None:
            return None
        return SeenBeside(at_loss, [layer.beside for layer in self.watch.layers])


# What holds memory at the peak

_AS_FULL = 1 + 1 / 64
"""Of moments that differ by less, the first one says what holds memory. Live bytes are sampled before the
books are read, and a program may have let go of its outputs between."""

_ALL = 3
"""Steps that are looked at from the first on: states come in the first, and the second is as all others."""


class MemoryWatch:
    """Looks at what holds memory in some steps.

    Args:
        gradients: Bytes of gradients, and of frozen weights while they are there.
        outputs: Bytes of what the model put out.
        capture: Knows what layers have saved.
        names: Module names of the layers.

    Attributes:
        is_on: Whether the step that is open is looked at.
        is_due: Whether what is seen in it goes to the run log.
        peaks: The fullest moment of each phase.
        layers: What each layer did.
        runs: Those of layers.
        held_by_modules: What attributes of modules hold, as of :func:`attributes_saved`.
        returned: Bytes that layers returned and something holds, by layer, and whether the model puts them
            out.
    """

    def __init__(
        self, gradients: LiveBytes, outputs: Outputs, capture: Capture, names: Sequence[str]
    ) -> None:
        self.is_on = self.is_due = False
        self.peaks: dict[str, PhasePeak] = {}
        self.layers = [LayerMemory() for _ in names]
        self.runs = Runs(len(names) - 1)
        self.held_by_modules: list[tuple[str, int, bool]] = []
        self.returned: dict[tuple[int, bool], int] = defaultdict(int)
        self._gradients, self._outputs = gradients, outputs
        self._capture, self._offloader = capture, capture.offloader
        self._meter: MemoryMeter | None = None
        self._base = 0
        self._now = _Moment(FORWARD, 0)
        # What makes the input of the first layer of a stack, as embeddings, has its backward after that.
        stacks = [name.rpartition(".")[0] for name in names]
        self._begin_stacks = {i for i, stack in enumerate(stacks) if i == 0 or stack != stacks[i - 1]}
        self._last: tuple[str, _Moment] | None = None  # its forward has ended, and the next has not begun

    def begin_step(self, meter: MemoryMeter | None, number: int, *, wanted: bool = False) -> None:
        """Record that a step begins.

        Args:
            meter: Its meter; ``None`` if its memory is not measured.
            number: How many ended before it.
            wanted: Whether the meter is to look before and after each run of a layer.
        """
        is_due = number < _ALL or (number + 1).bit_count() == 1
        self.is_due = is_due and meter is not None
        # A meter that samples looks at every tensor anyway.
        looks = meter is not None and (is_due or wanted or meter.samples)
        self._meter = meter if looks else None
        self.is_on = False  # until the meter has forgotten the step before
        self.peaks.clear()
        self.returned.clear()
        self.layers = [LayerMemory() for _ in self.layers]
        self.runs, self._last = Runs(self.runs.final), None

    def started(self) -> None:
        """Record that what is live from here on is of the step."""
        if self._meter is not None:
            live = self._meter.live()
            self._base = live - self._outputs.at_begin
            self.is_on = True
            self._enter(EMBEDDINGS, 0, live)

    def look_back(self, modules: Sequence[nn.Module]) -> None:
        """Note what modules hold of the step, which is about to end: what it has saved is known still."""
        self.held_by_modules = attributes_saved(modules, self._capture.registry) if self.is_due else []

    # ---- what the step is at: called only while the watch is on ----------------------------------

    def layer_begins(self, index: int) -> bool:
        """Record that the forward of a layer begins.

        Returns:
            Whether it is the first layer of a stack, with what made its input coming after its backward.
        """
        live = self._look()
        self._count_last(live)
        self._enter(FORWARD, index, live)
        return index in self._begin_stacks

    def layer_ended(self, index: int, way: str) -> None:
        """Record that the forward of a layer has ended.

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
            self.returned[each.layer, each.is_put_out] += each.nbytes
            if not each.is_put_out:
                self.runs.drop(each.layer, each.nbytes, holder_of(each.placement))
        for phase in (FORWARD, LOSS) if collected else ():
            if (peak := self.peaks.get(phase)) is not None:
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
        self._enter(BACKWARD, index, live, scope)

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
            self._note(live, min(gradients, max(aside - frozen, 0)), frozen)

    # ---- sums ------------------------------------------------------------------------------------

    def _note(self, live: int, gradients: int, frozen: int) -> None:
        """Of several moments of a phase the fullest stays."""
        now, lookahead = self._now, self._capture.lookahead
        if now.scope is not None:  # no two threads at once: a meter takes one sample at a time
            before, now.uses = now.uses, lookahead.uses
            now.used += lookahead.used_bytes(now.scope, before, now.uses)
        nbytes, held = max(live - self._base, 0), self._held()
        now.most = max(now.most, live - self._offloader.ledger.read_ahead)
        # A meter of stretches tells the most of one, in which layers may have had more than now.
        at_once = self._meter is None or self._meter.samples
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
        offloader, trace = self._offloader, self._capture.trace
        self._now = _Moment(
            *(phase, index, live, offloader.own_bytes, trace.kept_bytes, trace.planned_kept_bytes),
            beside=max(live - self._base - sum(self._held()), 0),
            least=live - offloader.ledger.read_ahead,
            scope=scope,
            uses=self._capture.lookahead.uses,
        )
        self._note(live, *self._gradients.parts)

    def _close(self) -> int:
        """End what the step is at; return the live bytes."""
        live, now = self._look(), self._now
        now.most = max(now.most, live - self._offloader.ledger.read_ahead)
        if self.layers:
            self.layers[now.layer].took(now)
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
        known: Those that the offloader holds.
        small: Bytes that layers had kept by then.
        planned: Those of them that a plan keeps.
        beside: Bytes of nothing that is known.
        least: Bytes at the begin that are not read ahead.
        most: Most of them.
        of_plans: Bytes that plans knew of at the last look.
        unplanned: Most bytes that plans do not know of.
        whole: The same if all that the run had saved lay beside them.
        scope: The run that backward is at.
        uses: How many activations backward had used at the last look.
        used: Bytes of those of the run.
    """

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
    scope: ScopeKey | None = None
    uses: int = 0
    used: int = 0


@dataclass(slots=True)
class LayerMemory:
    """What the runs of one layer did, the largest of each, in bytes.

    Attributes:
        leaves: Left in memory by a forward, without what the offloader holds.
        forward: Most live bytes in a forward beyond those before it; what is read ahead is of others.
        backward: The same in a backward.
        beside: Most bytes in each beside what plans know of.
    """

    leaves: int = 0
    forward: int = 0
    backward: int = 0
    beside: Beside = field(default_factory=Beside)

    def took(self, moment: _Moment) -> None:
        """Take what was seen in a run."""
        nbytes = moment.most - moment.least
        if moment.phase == FORWARD:
            self.forward = max(self.forward, nbytes)
            self.beside = self.beside.at_least(Beside(forward=moment.unplanned))
        elif moment.phase == BACKWARD:
            self.backward = max(self.backward, nbytes)
            self.beside = self.beside.at_least(Beside(0, moment.unplanned, moment.whole))


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
        self.final = self._latest = final
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
        for run in chain.from_iterable(self._waiting.values()):
            if gone <= 0 or not (self.left["outputs"] or self.left["small"]):
                return
            gone -= self._take(run, gone, "outputs")
            gone -= self._take(run, gone, "small")

    def drop(self, index: int, nbytes: int, holder: str) -> None:
        """Record that bytes that the latest run of a layer has left in memory are gone before backward."""
        for run in self._waiting[index][-1:]:
            self._take(run, nbytes, holder)

    def let_go(self) -> None:
        """Backward is done with the run that it had come to."""
        if self._leaving is not None:
            self._change(self._leaving, -1)
            self._leaving = None

    def _take(self, run: _Left, nbytes: int, holder: str) -> int:
        fewer = min(nbytes, run.get(holder, 0))
        self._change({holder: fewer}, -1)
        run[holder] = run.get(holder, 0) - fewer
        return fewer

    def _change(self, run: _Left, sign: int) -> None:
        for holder, nbytes in run.items():
            self.left[holder] += sign * nbytes
            self.all_left += sign * nbytes


# Memory over time

_STATES, _WEIGHTS = "optimizer states", "frozen weights"

_FIRST = 3
"""Number of the first step that is recorded: states exist, and drives are warm."""

_POINTS = 300
"""Points of a curve: a picture has some 600 columns. There are up to four times as many where a step takes
more samples than the one before it did; each takes some 10 us of processor time until it is in the log."""

_MOST_LINES = 20_000
"""Runs of layers of a step that is told, and calls that moved bytes: a line of some MiB each."""

Point = tuple[float, int, int, int, int, int, int, int]
"""Memory and traffic at one moment. It is a plain tuple, because one is made for each sample:

1. when, by :func:`time.perf_counter`;
2. live bytes, without gradients;
3. bytes in flight;
4. those of them that were read ahead;
5. bytes written since the step began;
6. bytes read since then;
7. bytes that the offloader keeps outside of its window: backward uses them, or no drive took them;
8. bytes that layers have left in memory beside that, and that wait for backward.
"""

_LIVE = 1
"""Place of the live bytes."""


class StepCurve:
    """Records memory and traffic of some steps: the third, powers of four from 16 on, and those asked for.

    Args:
        capture: Its offloader knows what is offloaded, and whose store tells what drives move.
        states: States of optimizers that are offloaded too, to stores of their own; more may come.
        weights: What frozen weights move, likewise.
    """

    def __init__(self, capture: Capture, states: Sequence[OptimizerStates], weights: WeightsTraffic) -> None:
        self._ledger, self._store = capture.offloader.ledger, capture.offloader.store
        self._states, self._weights = states, weights
        self._is_on = self._was_on = False
        self._points: list[Point] = []
        self._moves: dict[str, list[Moved]] = {}  # by what they moved
        self._highest: Point | None = None  # of those that become the next point
        self._samples = 0  # in this step
        self._each = 1
        self._source = ""

    def begin_step(self, meter: MemoryMeter | None, number: int, *, wanted: bool = False) -> None:
        """Record that a step begins.

        Args:
            meter: Its meter; without one there is no memory to record.
            number: How many ended before it.
            wanted: Whether a user asks for it.
        """
        self.stop()
        self._points, self._highest = [], None
        self._each, self._samples = self._samples // _POINTS + 1, 0
        self._moves = {"": [], _STATES: [], _WEIGHTS: []}
        number += 1
        is_power = number >= 16 and number.bit_count() == 1 and number.bit_length() % 2 == 1
        self._is_on = self._was_on = wanted or (meter is not None and (number == _FIRST or is_power))
        self._source = meter.source if meter is not None else ""
        if self._is_on:
            self._watch_moves(*(moves.append for moves in self._moves.values()))

    def _watch_moves(self, *seen: Callable[[Moved], object] | None) -> None:
        activations, states, weights = seen
        self._store.watch_moves(activations)
        for each in self._states:
            each.watch_moves(states)
        self._weights.watch_moves(weights)

    def seen(self, live: int, left: int) -> None:
        """Record that the meter has seen ``live`` bytes in use, of which layers had ``left`` so many.

        Of several moments the one with most of them stays.
        """
        self._samples += 1
        if not self._is_on:
            return
        ledger, highest = self._ledger, self._highest
        if highest is None or live > highest[_LIVE]:
            stats, now = ledger.stats, time.perf_counter()
            of_ledger = ledger.in_flight, ledger.read_ahead, stats.offloaded, stats.read, ledger.settled
            self._highest = highest = (now, live, *of_ledger, left)
        if self._samples % self._each == 0:
            self._points.append(highest)
            self._highest = None
            if len(self._points) >= 4 * _POINTS:
                pairs = zip(self._points[::2], self._points[1::2], strict=True)
                self._points = [max(pair, key=itemgetter(_LIVE)) for pair in pairs]
                self._each *= 2

    def stop(self) -> None:
        """Record nothing any more."""
        if self._is_on:
            self._is_on = False
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
        if not self._was_on or len(trace.scopes) > _MOST_LINES:
            return None
        index = {name: number for number, name in enumerate(names)}

        def at(seconds: float | None) -> float | None:
            return None if seconds is None else round(max(seconds - step.began, 0.0), 6)

        def run_of(scope: ScopeTrace) -> list[object]:
            times = scope.forward_began, scope.forward_ended, scope.backward_began
            return [index[scope.key.name], scope.key.micro_batch, *map(at, times)]

        moves = [
            (what, move)
            for what, seen in self._moves.items()
            for move in list(seen)
            if move.began >= step.began
        ]
        moves = sorted(moves, key=lambda each: each[1].began)[:_MOST_LINES]
        drives = sorted({(what, move.drive, move.place) for what, move in moves})
        number_of: dict[int, int] = {}  # of I/O threads, in the order in which each first moved bytes
        return {
            "source": self._source,
            "names": list(names),
            "scopes": [run_of(scope) for scope in trace.scopes if scope.key.name in index],
            "backward_ends": [at(seconds) for seconds in trace.backward_ends],
            "layers_left": [at(seconds) for seconds in trace.layers_left],
            "updates": [[at(since), at(until)] for since, until in step.update_times(trace.backward_ends)],
            "stalls": [[at(since), at(until)] for since, until in waits[:_MOST_LINES]],
            "budget": limits.budget,
            "window": limits.window,
            "points": [
                # Other threads change the sums, so that one may be negative for a moment.
                [at(seconds), *[max(0, nbytes) for nbytes in (live - (base_bytes or 0), *others)]]
                for seconds, live, *others in list(self._points)
            ],
            "drives": [[drive, place, what] for what, drive, place in drives],
            "moves": [
                [
                    *(drives.index((what, move.drive, move.place)), move.writes, at(move.began)),
                    *(at(move.ended), move.nbytes, number_of.setdefault(move.thread, len(number_of))),
                ]
                for what, move in moves
            ],
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
    parameters = list(chain.from_iterable(map(torch.nn.Module.parameters, modules)))
    groups: dict[str, Iterable[object]] = {
        "parameters": parameters,
        "gradients": ((each.grad, getattr(each, "main_grad", None)) for each in parameters),
        "buffers": chain.from_iterable(map(torch.nn.Module.buffers, modules)),
        "optimizer_states": (
            value
            for optimizer in optimizers
            for state in optimizer.state.values()
            for value in (state.values() if isinstance(state, dict) else ())
        ),
        "masters": chain.from_iterable(map(parameters_of, optimizers)),  # what is not the model's own
    }
    seen: set[int] = set()
    nbytes = {name: sum(_new_bytes(found, device, seen)) for name, found in groups.items()}
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
    of_layers = {parameter for layer in layers for parameter in torch.nn.Module.parameters(layer)}
    found = chain.from_iterable(map(torch.nn.Module.named_parameters, modules))
    trained = [(name, each) for name, each in found if each.requires_grad and not is_lazy(each)]
    sizes = [(name, each.numel() * each.element_size(), each in of_layers) for name, each in trained]
    beside = [(name, nbytes) for name, nbytes, is_inside in sizes if not is_inside]
    inside = max((nbytes for _, nbytes, is_inside in sizes if is_inside), default=0)
    return sorted(beside, key=itemgetter(1), reverse=True)[:3], inside


def frozen_bytes(layers: Sequence[nn.Module], device: torch.device) -> int:
    """Return the bytes of frozen weights of layers that are in memory."""
    found = chain.from_iterable(map(torch.nn.Module.parameters, layers))
    return sum(_new_bytes((each for each in found if not each.requires_grad), device, set()))


def _new_bytes(found: Iterable[object], device: torch.device, seen: set[int]) -> Iterator[int]:
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
