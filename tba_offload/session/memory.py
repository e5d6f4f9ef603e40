"""The memory of steps: how much there is at the peak, what holds it then, and how it goes over time.

A meter tells live bytes. Of them the offloader knows its own by its window; what a layer leaves in memory
beside that shows when the next one begins. The rest is of what runs at the time.

Looking costs a reading of the allocator before each run of a layer. Where that takes long, on an
accelerator, few steps are looked at: the first three, and then those whose number is a power of two.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.device.meters import LiveBytes, MemoryMeter, ResidentPeak, meter_of, plain_storage
from tba_offload.errors import UnsupportedError
from tba_offload.layers.nested import TooManyError, tensors_in
from tba_offload.placements import Placement
from tba_offload.planner.measure import SeenBeside
from tba_offload.planner.model import Beside
from tba_offload.report.log import HeldBytes, PhasePeak
from tba_offload.states.parameters import parameters_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tba_offload.capture.trace import ScopeKey
    from tba_offload.session.loop import Step
    from tba_offload.session.session import Session
    from tba_offload.store.base import Moved
    from tba_offload.transfer.window import InFlightWindow

FORWARD, LOSS, BACKWARD, EMBEDDINGS = "forward", "loss", "backward", "embeddings"
BETWEEN, UPDATE = "between", "update"
"""After a backward pass: gradients are clipped, or another pass begins; and while an optimizer works."""

_FULLER = 1 + 1 / 64
"""Of moments that differ by less, the first says what holds memory: what is made then lies there later."""

_MOST = 20_000
"""Most runs, waits, moments, and calls that moved bytes, of a step over time: a line of some MiB each."""


class Memory:
    """The memory of the step that is open, as differences to what was live when it began.

    Args:
        session: What works in its steps. It is not kept.

    Attributes:
        meter: Of the step that is open; ``None`` if no step is, or its memory is not measured.
        curve: Memory over time, of a step that is told so; ``None`` of others.
        base_bytes: Bytes that were live when the step began, gradients and outputs of earlier steps left out;
            ``None`` if not measured.
        figures: What was measured of the step, by the fields of :class:`~tba_offload.report.log.StepRecord`.
        is_on: Whether the meter looks before each run of a layer.
        is_due: Whether what is seen then goes to the run log.
        peaks: The fullest moment of each phase.
        left: Bytes that layers have left in memory for backward beside what the offloader holds, by holder.
    """

    def __init__(self, session: Session) -> None:
        self._device, self._gradients = session.device, session.gradients.live
        self._outputs = LiveBytes(session.device.torch_device)
        self._capture, self._offloader, self._notices = session.capture, session.offloader, session.notices
        self._names = [layer.id.name for layer in session.layers]
        self._resident = ResidentPeak()
        self._store, self._states, self._traffic = session.store, session.states, session.weights_traffic
        self._meter: MemoryMeter | None = None
        self._forget()

    def _forget(self) -> None:
        self.is_on = self.is_due = False
        self.meter: MemoryMeter | None = None
        self.curve: StepCurve | None = None
        self.base_bytes: int | None = None
        self.figures: dict[str, Any] = {}
        self._live_at_pause: int | None = None
        self._state_bytes = self._base = self._earlier_outputs = 0
        self.peaks: dict[str, PhasePeak] = {}
        self._beside, self._at_loss = [Beside() for _ in self._names], -1
        self.left: Counter[str] = Counter(kept=0, inputs=0, outputs=0, small=0)
        self._waiting: dict[int, list[Counter[str]]] = defaultdict(list)  # runs that wait for their backward
        self._now = _Section(EMBEDDINGS)

    # ---- meters ----------------------------------------------------------------------------------

    def meter_of_step(self) -> MemoryMeter | None:
        """Return the meter of a step that begins; ``None`` and a warning where memory cannot be measured."""
        if self._meter is None:
            try:
                self._meter = meter_of(self._device, lambda: self._gradients.nbytes + self._state_bytes)
                self._meter.seen = self._saw
            except UnsupportedError as error:
                self._notices.warn_once("meter", f"the activation peak is not measured: {error}")
        return self._meter

    def close(self) -> None:
        """End the thread that samples, if there is one."""
        if self._meter is not None:
            self._meter.close()
        self._meter = None  # in a cycle, the model would stay alive

    # ---- one step --------------------------------------------------------------------------------

    def begin_step(self, step: Step, *, wanted: bool) -> None:
        """Read what is live now; the step begins.

        Args:
            step: The step.
            wanted: Whether its meter is to look before each run of a layer.
        """
        meter, number = step.meter, step.number
        self.stop()  # of a step whose begin was interrupted
        self._resident.reset()
        self._forget()
        # States come in the first step; in the third drives are warm too.
        self.is_due = meter is not None and (number <= 3 or number.bit_count() == 1)
        if step.is_traced or (self.is_due and number >= 3):
            movers = [("", self._store), ("frozen weights", self._traffic)]
            movers += [("optimizer states", states) for states in self._states]
            self.curve = StepCurve(self._offloader.window, movers)
        if meter is None:
            return
        self.meter = meter
        meter.reset(closely=self.is_due or wanted)
        live = meter.live()
        self._earlier_outputs = self._outputs.nbytes
        self.base_bytes = self._base = live - self._earlier_outputs
        if self.is_due or wanted or meter.samples:  # a meter that samples looks at every tensor anyway
            self.is_on = True
            self.enter(EMBEDDINGS)

    def sample(self, grows_by: int = 0) -> None:
        """Note what is live, for a meter that sees only what it looks at."""
        if self.meter is not None:
            self.meter.sample(grows_by)

    def look(self, *_: object) -> None:
        """Begin a new section of the peak: an operation of backward begins or ends."""
        if self.meter is not None:
            self.meter.cut()

    def pause(self) -> None:
        """From now on an optimizer works: its memory is not that of activations."""
        if self.meter is not None and self._live_at_pause is None:
            self.meter.pause()
            self._live_at_pause = self.meter.live()
            self.enter(UPDATE)

    def resume(self) -> None:
        """Record that the optimizer is done; what it has left allocated are its states."""
        if self.meter is not None and self._live_at_pause is not None:
            self._state_bytes += max(self.meter.live() - self._live_at_pause, 0)
            self._live_at_pause = None
            self.meter.resume()
            self.enter(BETWEEN)

    def end(self) -> None:
        """Record that the step has ended."""
        self.figures["resident_peak_bytes"] = self._resident.read()
        if (meter := self.meter) is not None:
            peak, is_thin = max(meter.peak() - self._base, 0), meter.is_thin
            self.figures |= {
                "activation_peak_bytes": None if is_thin else peak,
                "sampled_peak_bytes": peak if is_thin else None,
                "peak_samples": meter.samples_taken,
                "peak_source": meter.source,
                "base_bytes": self._base,
                "earlier_outputs_bytes": self._earlier_outputs,
                "reserved_peak_bytes": meter.reserved,
                "device_peak_bytes": None if is_thin else meter.whole_peak,
                "state_bytes": self._state_bytes,
            }

    def stop(self) -> None:
        """Look no more: the step is over, or was left."""
        self.meter, self.is_on = None, False
        if self.curve is not None:
            self.curve.stop()

    @property
    def beside(self) -> SeenBeside | None:
        """Most bytes beside the activations of layers; ``None`` if the memory of this step was not seen."""
        return None if self._at_loss < 0 else SeenBeside(self._at_loss, self._beside)

    # ---- what the step is at ---------------------------------------------------------------------

    def layer_ended(self, index: int, way: Placement) -> None:
        """Record that the forward of a layer has ended.

        What it leaves in memory is known when the caller has let go of what the layer was given: when the
        next one begins, or the loss does.

        Args:
            index: Of the layer.
            way: How it ran.
        """
        self._now.way = way
        if index == len(self._names) - 1:
            self.enter(LOSS)

    def model_ended(self, output: object) -> None:
        """Record that the model's forward has ended: the loss comes next, whichever layer ran last.

        Args:
            output: What it has put out, which counts for as long as it is alive.
        """
        if self.meter is None:
            return
        with suppress(TooManyError):
            for storage in map(plain_storage, tensors_in(output)):
                if storage is not None and storage not in self._capture.static:
                    self._outputs.add_storage(storage)
        if self._now.phase == FORWARD:
            self.enter(LOSS)

    def enter(self, phase: str, index: int | None = None, scope: ScopeKey | None = None) -> None:
        """End what the step was at, by what is live now, and begin the next.

        Args:
            phase: What begins.
            index: Of the layer that runs; ``None`` if none does.
            scope: The run of the layer that backward is at; it is the latest that waits for it.
        """
        if self.meter is None or not self.is_on:
            return
        live, now, trace = self.meter.cut(), self._now, self._capture.trace
        own = self._offloader.window.in_flight + self._offloader.window.settled
        if now.left is not None:
            self.left.subtract(now.left)
        if now.way is not None:
            nbytes = max(live - own - now.others, 0)
            kept = min(trace.kept_bytes - now.kept, nbytes)
            holder = "kept" if now.way is Placement.KEEP else "inputs" if now.way.recomputes else "outputs"
            of_run = Counter({holder: nbytes - kept})
            of_run["small" if now.way.percent == 100 else "kept"] += kept
            self._waiting[now.layer].append(of_run)
            self.left.update(of_run)
        if now.phase == LOSS:
            self._at_loss = max(self._at_loss, now.unplanned)
        elif now.phase in {FORWARD, BACKWARD}:
            seen = Beside(now.unplanned) if now.phase == FORWARD else Beside(0, now.unplanned, now.whole)
            self._beside[now.layer] = self._beside[now.layer].at_least(seen)
        index = now.layer if index is None else index
        beside, uses = max(live - self._base - sum(self._held()), 0), self._capture.schedule.uses
        runs = self._waiting[index] if scope is not None else []
        left = runs.pop() if runs else None
        self._now = _Section(phase, index, scope, left, uses, beside, live - own, trace.kept_bytes)
        self._note(live)

    # ---- sums ------------------------------------------------------------------------------------

    def _saw(self, live: int, _aside: int) -> None:
        """Take what the meter has seen, on whatever thread; it takes one sample at a time."""
        if self.is_on:
            self._note(live)
        if self.curve is not None:
            self.curve.seen(live, self.left.total())

    def _note(self, live: int) -> None:
        """Of several moments of a phase the fullest stays."""
        now, schedule = self._now, self._capture.schedule
        nbytes, held = max(live - self._base, 0), self._held()
        # A meter of stretches tells the most of one, in which layers may have had more than now.
        at_once = self.meter is None or self.meter.samples
        known = held.planned if at_once else max(held.planned, now.planned)
        now.planned = held.planned
        used = 0
        if now.scope is not None and at_once:
            used = schedule.used_bytes(now.scope, now.uses, schedule.uses)
        now.unplanned = max(now.unplanned, nbytes - known)
        now.whole = max(now.whole, nbytes - known - used)
        peak = PhasePeak(nbytes, now.layer, held, now.beside, *self._gradients.parts)
        best = self.peaks.get(now.phase)
        if best is None or peak.whole > best.whole * _FULLER:
            self.peaks[now.phase] = peak

    def _held(self) -> HeldBytes:
        window = self._offloader.window
        return HeldBytes(window.in_flight, window.settled, **self.left, put_out=self._outputs.nbytes)


@dataclass(slots=True)
class _Section:
    """What the step is at, what there was when that began, and what was seen since, in bytes.

    Attributes:
        phase: The phase.
        layer: Index of the layer that runs, or ran last.
        scope: The run that backward is at.
        left: What the run had left in memory for this backward.
        uses: How many activations backward had used at the begin.
        beside: Bytes at the begin of nothing that is known.
        others: Live bytes at the begin that the offloader does not hold.
        kept: Bytes that hooks had kept by then.
        way: How a forward ran, once that has ended.
        planned: Bytes that plans knew of at the last look.
        unplanned: Most bytes that plans do not know of.
        whole: The same if all that the run had saved lay beside them.
    """

    phase: str
    layer: int = 0
    scope: ScopeKey | None = None
    left: Counter[str] | None = None
    uses: int = 0
    beside: int = 0
    others: int = 0
    kept: int = 0
    way: Placement | None = None
    planned: int = 0
    unplanned: int = 0
    whole: int = 0


# Memory over time


class StepCurve:
    """Memory and traffic of a step over time: of those that are looked at from the third on, or asked for.

    Args:
        window: Tells what the offloader holds.
        movers: Tell what they move, each with what that is besides activations.
    """

    def __init__(self, window: InFlightWindow, movers: Sequence[tuple[str, Any]]) -> None:
        self._window, self._movers = window, movers
        self._points: list[tuple[float, int, int, int, int, int]] = []  # as ``Moment`` of the log
        self._moves: dict[str, list[Moved]] = {what: [] for what, _ in movers}
        for what, each in movers:
            each.watch_moves(self._moves[what].append)

    def stop(self) -> None:
        """Watch nothing any more."""
        for _, each in self._movers:
            each.watch_moves(None)

    def seen(self, live: int, left: int) -> None:
        """Record that ``live`` bytes are in use, of which layers have ``left`` so many for backward."""
        window = self._window
        held = window.in_flight, window.read_ahead, window.settled, left
        self._points.append((time.perf_counter(), live, *held))

    def figures(
        self, session: Session, step: Step, waits: Sequence[tuple[float, float]]
    ) -> dict[str, object]:
        """Return all of it, for the run log.

        Args:
            session: The session, after the step.
            step: The step.
            waits: When training waited for I/O: from, until.
        """
        trace, began, base = session.capture.trace, step.began, session.memory.base_bytes or 0
        names, points = [layer.id.name for layer in session.layers], list(self._points)

        def at(*times: float | None) -> list[float | None]:
            return [None if when is None else round(max(when - began, 0.0), 6) for when in times]

        scopes: list[list[Any]] = []
        for run in trace.scopes[:_MOST]:
            times = at(run.forward_began, run.forward_ended or None, run.backward_began or None)
            scopes.append([names.index(run.key.name), run.key.micro_batch, *times])
        found = [(move, what) for what, moves in self._moves.items() for move in list(moves)]
        found = sorted((each for each in found if each[0].began >= began), key=lambda each: each[0].began)
        drives = sorted({(what, move.drive, move.place) for move, what in found})
        threads = list({move.thread: None for move, _ in found})
        moves: list[list[Any]] = []
        for move, what in found[:_MOST]:
            drive, times = drives.index((what, move.drive, move.place)), at(move.began, move.ended)
            moves.append([drive, move.writes, *times, move.nbytes, threads.index(move.thread)])
        stride = len(points) // _MOST + 1
        fullest = (max(points[i : i + stride], key=itemgetter(1)) for i in range(0, len(points), stride))
        return {
            "source": session.memory.figures.get("peak_source", ""),
            "names": names,
            "scopes": scopes,
            "backward_ends": at(*trace.backward_ends),
            "updates": [at(*update) for update in step.update_times(trace.backward_ends)],
            "stalls": [at(*wait) for wait in waits[:_MOST]],
            "budget": session.budget.limits.budget,
            # Other threads change the sums, so that one may be negative for a moment.
            "points": [
                [*at(when), *(max(n, 0) for n in (live - base, *held))] for when, live, *held in fullest
            ],
            "drives": [[drive, place, what] for what, drive, place in drives],
            "moves": moves,
        }


# Memory that lasts from step to step


def static_bytes(session: Session) -> dict[str, int]:
    """Return bytes of the session's device by what lasts there from step to step, each storage once."""
    modules, optimizers, device = session.modules, list(session.optimizers), session.device.torch_device
    parameters = [each for module in modules for each in torch.nn.Module.parameters(module)]
    buffers = chain.from_iterable(map(torch.nn.Module.buffers, modules))
    gradients = ((each.grad, getattr(each, "main_grad", None)) for each in parameters)
    states = (state for each in optimizers for state in each.state.values() if isinstance(state, dict))
    held = chain.from_iterable(state.values() for state in states)
    masters = chain.from_iterable(map(parameters_of, optimizers))  # what is not the model's own
    groups = {"parameters": (*parameters, *buffers), "gradients": gradients, "states": (*held, *masters)}
    seen: set[int] = set()
    nbytes = {name: sum(new_bytes(found, device, seen)) for name, found in groups.items()}
    nbytes["states"] += sum(states.device_bytes for states in session.states)
    return nbytes


def new_bytes(found: Iterable[object], device: torch.device, seen: set[int]) -> Iterator[int]:
    """Yield the bytes of storages of a device that are not among those that were seen."""
    for each in found:
        for tensor in each if isinstance(each, list | tuple) else (each,):  # LBFGS: a history
            storage = plain_storage(tensor)
            if storage is not None and storage.device == device and storage._cdata not in seen:
                seen.add(storage._cdata)
                yield storage.nbytes()
