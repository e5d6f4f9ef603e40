"""Memory measurements of a step: the peak, the kinds of data in memory at the peak, and a timeline.

A meter measures live bytes. The in-flight window counts the bytes that the offloader holds. The bytes that a
layer leaves in memory are measured when the next layer begins. All other bytes are attributed to the layer
that runs.

Detailed measurements read the allocator's statistics before each layer. On an accelerator, the statistics are
slow to read, so only some steps have detailed measurements: the first three, and steps whose number is a
power of two.
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
    from tba_offload.weights import FrozenWeights

FORWARD, LOSS, BACKWARD, EMBEDDINGS = "forward", "loss", "backward", "embeddings"
BETWEEN, UPDATE = "between", "update"
"""Phases of a step. ``between`` is the time from the end of a backward pass to the next forward or optimizer
step. ``update`` is an optimizer step."""

_FULLER = 1 + 1 / 64
"""A measurement replaces the peak of its phase only if the peak grows by at least this factor."""

_MOST = 20_000
"""Largest number of entries of one kind in a timeline, for example of transfers.

The limit keeps a timeline in the run log below a few MiB.
"""


class Memory:
    """Memory measurements of the open step.

    The bytes of activations are the live bytes minus the live bytes at the start of the step.

    Args:
        session: The session. ``Memory`` keeps no reference to the session.

    Attributes:
        meter: Meter of the open step; ``None`` if no step is open, or if memory is not measured.
        curve: Recorder of the timeline; ``None`` for a step without a timeline.
        base_bytes: Live bytes when the step began, without gradients and outputs of earlier steps; ``None``
            if memory is not measured.
        figures: Measured fields of the :class:`~tba_offload.report.log.StepRecord`.
        is_on: Whether memory is measured before each run of a layer.
        is_due: Whether the measurements of the open step are written to the run log.
        peaks: For each phase, the measurement with the most live bytes.
        left: Bytes that layers leave in memory for backward, by kind. Bytes that the offloader holds are
            excluded.
    """

    def __init__(self, session: Session) -> None:
        self._device, self._gradients = session.device, session.gradients.live
        self._outputs = LiveBytes(session.device.torch_device)
        self._capture, self._offloader, self._notices = session.capture, session.offloader, session.notices
        self._names = [layer.id.name for layer in session.layers]
        self._resident = ResidentPeak()
        self._store, self._states = session.store, session.states
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
        """Return the memory meter. If memory cannot be measured, warn and return ``None``."""
        if self._meter is None:
            try:
                self._meter = meter_of(self._device, lambda: self._gradients.nbytes + self._state_bytes)
                self._meter.seen = self._saw
            except UnsupportedError as error:
                self._notices.warn_once("meter", f"the activation peak is not measured: {error}")
        return self._meter

    def close(self) -> None:
        """Close the memory meter and its sampling thread."""
        if self._meter is not None:
            self._meter.close()
        self._meter = None  # in a cycle, the model would stay alive

    # ---- one step --------------------------------------------------------------------------------

    def begin_step(self, step: Step, weights: FrozenWeights | None, *, keeps: bool, wanted: bool) -> None:
        """Measure the live bytes at the start of a step.

        Args:
            step: The step.
            weights: The offloaded frozen weights; ``None`` without offloaded weights.
            keeps: Whether all layers keep their activations.
            wanted: Whether the planner or a timeline needs a measurement before each layer.
        """
        meter, number = step.meter, step.number
        self.stop()  # the start of the last step may have been interrupted
        self._resident.reset()
        self._forget()
        # The first step allocates optimizer states. From the third step, drives also have their usual speed.
        self.is_due = meter is not None and (number <= 3 or number.bit_count() == 1)
        if step.is_traced or (self.is_due and number >= 3):
            movers: list[tuple[str, Any]] = [("", self._store), ("frozen weights", weights)]
            movers += [("optimizer states", states) for states in self._states]
            self.curve = StepCurve(self._offloader.window, [each for each in movers if each[1] is not None])
        if meter is None:
            return
        self.meter = meter
        meter.returns_pages = not keeps or weights is not None or bool(self._states)
        meter.reset(closely=self.is_due or wanted)
        live = meter.live()
        self._earlier_outputs = self._outputs.nbytes
        self.base_bytes = self._base = live - self._earlier_outputs
        if self.is_due or wanted or meter.samples:  # a sampling meter reads at every tensor anyway
            self.is_on = True
            self.enter(EMBEDDINGS)

    def sample(self, grows_by: int = 0) -> None:
        """Sample the live bytes, if the meter needs samples."""
        if self.meter is not None:
            self.meter.sample(grows_by)

    def look(self, *_: object) -> None:
        """Measure memory before or after an operation of backward."""
        if self.meter is not None:
            self.meter.cut()

    def pause(self) -> None:
        """Stop measuring activations when an optimizer step begins."""
        if self.meter is not None and self._live_at_pause is None:
            self.meter.pause()
            self._live_at_pause = self.meter.live()
            self.enter(UPDATE)

    def resume(self) -> None:
        """Measure activations again after an optimizer step.

        Bytes that the optimizer step allocated count as states.
        """
        if self.meter is not None and self._live_at_pause is not None:
            self._state_bytes += max(self.meter.live() - self._live_at_pause, 0)
            self._live_at_pause = None
            self.meter.resume()
            self.enter(BETWEEN)

    def end(self) -> None:
        """Set :attr:`figures` at the end of the step."""
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
        """Stop measuring at the end of a step, or after an exception."""
        self.meter, self.is_on = None, False
        if self.curve is not None:
            self.curve.stop()

    @property
    def beside(self) -> SeenBeside | None:
        """Largest memory use in the step without saved activations; ``None`` if memory was not measured."""
        return None if self._at_loss < 0 else SeenBeside(self._at_loss, self._beside)

    # ---- phases of the step ----------------------------------------------------------------------

    def layer_ended(self, index: int, way: Placement) -> None:
        """Record that the forward of a layer has ended.

        The bytes that the layer leaves in memory are measured later, when the next layer or the loss begins,
        because the caller has then dropped the layer's inputs.

        Args:
            index: Index of the layer.
            way: Placement with which the layer ran.
        """
        self._now.way = way
        if index == len(self._names) - 1:
            self.enter(LOSS)

    def model_ended(self, output: object) -> None:
        """Record that the model's forward has ended, and the loss begins.

        Args:
            output: Output of the model, whose bytes are counted until the output is freed.
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
        """Measure memory at the end of the current section of the step, and begin the next section.

        Args:
            phase: Phase of the next section.
            index: Index of the layer that runs; ``None`` if no layer runs.
            scope: The run of the layer that backward has reached; ``None`` outside of backward.
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
            of_run["small" if now.way.offloads and now.way.percent == 100 else "kept"] += kept
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
        """Add a sample. The memory meter may call this method from another thread."""
        if self.is_on:
            self._note(live)
        if self.curve is not None:
            self.curve.seen(live, self.left.total())

    def _note(self, live: int) -> None:
        now, schedule = self._now, self._capture.schedule
        nbytes, held = max(live - self._base, 0), self._held()
        # A meter without samples returns the largest number of bytes in a section. Layers may have held more.
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
    """Section of a step between two measurements. Sizes are in bytes.

    Attributes:
        layer: Index of the layer that runs, or ran last.
        scope: The run of the layer that backward has reached.
        left: Bytes that the layer left in memory for backward.
        uses: Number of activations that backward had used at the start of the section.
        beside: Live bytes that belong to no known kind of data, at the start of the section.
        others: Live bytes that the offloader does not hold, at the start of the section.
        kept: Bytes that saved-tensor hooks had kept in memory at the start of the section.
        way: Placement of the layer; ``None`` before the end of its forward.
        planned: Bytes of data that the planner predicts, at the last measurement.
        unplanned: Largest number of bytes of data that the planner does not predict.
        whole: Like ``unplanned``, but without the activations that backward has used since the start of the
            section.
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


# The timeline of memory


class StepCurve:
    """Recorder of the timeline of a step: memory use and transfers.

    Args:
        window: The in-flight window.
        movers: Objects that report transfers, each with the name of the transferred data. Activations have an
            empty name.
    """

    def __init__(self, window: InFlightWindow, movers: Sequence[tuple[str, Any]]) -> None:
        self._window, self._movers = window, movers
        self._points: list[tuple[float, int, int, int, int, int]] = []  # as ``Moment`` of the log
        self._moves: dict[str, list[Moved]] = {what: [] for what, _ in movers}
        for what, each in movers:
            each.watch_moves(self._moves[what].append)

    def stop(self) -> None:
        """Stop recording transfers."""
        for _, each in self._movers:
            each.watch_moves(None)

    def seen(self, live: int, left: int) -> None:
        """Add a point to the memory timeline.

        Args:
            live: Live bytes.
            left: Bytes that layers keep in memory for backward.
        """
        window = self._window
        held = window.in_flight, window.read_ahead, window.settled, left
        self._points.append((time.perf_counter(), live, *held))

    def figures(self, session: Session, step: Step, waits: Sequence[tuple[float, float]]) -> dict[str, Any]:
        """Return the timeline for the run log.

        Args:
            session: The session, after the step.
            step: The step.
            waits: Start and end of each wait for I/O.
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
            # Other threads change these sums, so a sum may be negative for a moment.
            "points": [
                [*at(when), *(max(n, 0) for n in (live - base, *held))] for when, live, *held in fullest
            ],
            "drives": [[drive, place, what] for what, drive, place in drives],
            "moves": moves,
        }


# Memory that lasts from step to step


def static_bytes(session: Session) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer states on the session's device.

    Each storage is counted once.
    """
    modules, optimizers, device = session.modules, list(session.optimizers), session.device.torch_device
    parameters = [each for module in modules for each in torch.nn.Module.parameters(module)]
    buffers = chain.from_iterable(map(torch.nn.Module.buffers, modules))
    gradients = ((each.grad, getattr(each, "main_grad", None)) for each in parameters)
    states = (state for each in optimizers for state in each.state.values() if isinstance(state, dict))
    held = chain.from_iterable(state.values() for state in states)
    masters = chain.from_iterable(map(parameters_of, optimizers))  # those of the model were counted before
    groups = {"parameters": (*parameters, *buffers), "gradients": gradients, "states": (*held, *masters)}
    seen: set[int] = set()
    nbytes = {name: sum(new_bytes(found, device, seen)) for name, found in groups.items()}
    nbytes["states"] += sum(states.device_bytes for states in session.states)
    return nbytes


def new_bytes(found: Iterable[object], device: torch.device, seen: set[int]) -> Iterator[int]:
    """Yield the size of each storage on a device in bytes, except storages whose address is in ``seen``."""
    for each in found:
        for tensor in each if isinstance(each, list | tuple) else (each,):  # the history of LBFGS is a list
            storage = plain_storage(tensor)
            if storage is not None and storage.device == device and storage._cdata not in seen:
                seen.add(storage._cdata)
                yield storage.nbytes()
