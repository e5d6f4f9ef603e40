"""The simulator: plays a plan on a profile and tells how long the step takes and how much memory it needs.

It does what the offloader does, with the rules of :mod:`tba_offload.planner.window`: writes in the order of
saving, holds a part of the window back, reads ahead of backward, waits where the window is full. Compute is
one thread of slots; reads and writes are one queue each, with constant rates.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tba_offload.config.policy import Placement
from tba_offload.config.values import BLOCK
from tba_offload.planner.model import Plan, Prediction
from tba_offload.planner.profile import Beside, Timing
from tba_offload.planner.window import Window

if TYPE_CHECKING:
    from tba_offload.planner.profile import LayerKind, Slot, StepProfile
    from tba_offload.planner.rates import Bandwidth

INFINITY = float("inf")
Scope = tuple[int, int]
"""Layer and micro-batch."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of a simulated step.

    Attributes:
        seconds: Its duration.
        stall_seconds: Seconds of it in which compute waited for I/O.
        peak_bytes: Most bytes of the budget that are taken, with what lies beside activations and the
            headroom: the activation peak, less the room that gradients which come later leave.
        activation_peak: The activation peak, likewise.
        held_bytes: The same of what was not in flight.
        written_bytes: Bytes written to the store.
        read_bytes: Bytes read back.
        forwarded_bytes: Bytes of offloaded layers that backward found in memory.
        fallback_bytes: Bytes that stayed because the store had no room.
        write_seconds: How long writes kept the store busy.
        read_seconds: The same of reads.
    """

    seconds: float
    stall_seconds: float
    peak_bytes: int
    activation_peak: int
    held_bytes: int
    written_bytes: int
    read_bytes: int
    forwarded_bytes: int
    fallback_bytes: int
    write_seconds: float
    read_seconds: float

    @property
    def sent_bytes(self) -> int:
        """Most bytes that may be written: what backward finds in memory depends on the drive's mood."""
        return self.written_bytes + self.forwarded_bytes

    @property
    def prediction(self) -> Prediction:
        """The figures that a step is compared with."""
        return Prediction(
            self.seconds, self.stall_seconds, self.peak_bytes, self.written_bytes, self.activation_peak
        )


def play(profile: StepProfile, plan: Plan, bandwidth: Bandwidth) -> Outcome:
    """Play one step.

    Args:
        profile: The step.
        plan: A placement for each of its layers, and the window.
        bandwidth: The rates of the store.

    Raises:
        ValueError: The plan is for another number of layers.
    """
    if len(plan.placements) != len(profile.layers):
        raise ValueError(f"a plan for {len(plan.placements)} layers does not fit {len(profile.layers)}")
    step = _Step(profile, plan, bandwidth)
    for slot in profile.slots:
        step.run(slot)
    return step.outcome(profile.tail)


class _Item:
    """An offloaded activation; times are infinite until they are certain."""

    __slots__ = ("arrives", "blocks", "in_memory", "nbytes", "stays", "until", "waits", "written")

    def __init__(self, nbytes: int, until: float) -> None:
        self.nbytes, self.until = nbytes, until
        self.blocks = -(-nbytes // BLOCK) * BLOCK  # bytes that it takes of the store
        self.in_memory = self.waits = True  # waits: its write was not handed over
        self.stays = False  # the store had no room for it
        self.written = self.arrives = INFINITY


class _Layer(NamedTuple):
    """A layer under the plan."""

    kind: LayerKind
    way: Placement
    timing: Timing
    stays: frozenset[int]
    stay_bytes: int
    beside: tuple[int, int]


def _layer(profile: StepProfile, number: int, placement: Placement) -> _Layer:
    """Return a layer of a kind under a placement."""
    kind, way, layer = profile.kinds[number], placement.as_run, profile.layers.index(number)
    timing, stays = profile.timing(layer, way), kind.stay_bytes(way.percent)
    if stays:  # as much less as offloading takes for what stays
        kept, share = profile.timing(layer, Placement.KEEP), stays / kind.nbytes
        timing = Timing(*(max(a - share * (a - b), b) for a, b in zip(timing, kept, strict=True)))
    beside = kind.beside or Beside()
    in_backward = beside.backward if way.is_offloaded else beside.whole
    if way.recomputes:  # its second forward needs what the first one did, beside the gradient of its output
        in_backward = max(in_backward, beside.forward + kind.input_bytes)
    return _Layer(kind, way, timing, kind.staying(way.percent), stays, (beside.forward, in_backward))


class _Step:
    """The clock of a step, its memory and its transfers."""

    def __init__(self, profile: StepProfile, plan: Plan, bandwidth: Bandwidth) -> None:
        placed = list(zip(profile.layers, plan.placements, strict=True))
        alike = {key: _layer(profile, *key) for key in set(placed)}
        self._layers = [alike[key] for key in placed]
        self._window = Window(plan.window)
        self._bandwidth = bandwidth
        self._room = INFINITY if bandwidth.capacity is None else bandwidth.capacity
        self._largest = profile.largest_bytes
        self._headroom, self._at_loss = profile.headroom, profile.loss_bytes
        self._now = self._stall = 0.0
        # memory
        self._in_flight = self._settled = self._beside = self._peak = self._held = self._activations = 0
        self._gradients = self._to_come = profile.gradient_bytes
        self._is_backward = True
        # writes: first in the outbox, then with the store
        self._outbox: deque[_Item] = deque()
        self._outbox_bytes = 0
        self._batch_from = self._window.held_back + self._window.batch
        self._writing: deque[_Item] = deque()
        self._next_written = INFINITY
        self._written = self._read = self._forwarded = self._fallback = 0
        self._write_seconds = self._read_seconds = 0.0
        # reads, in the order of backward
        self._reader_free = 0.0
        self._read_ahead_bytes = 0
        moving = [slot for slot in profile.slots if self._layers[slot.layer].way.offloads]
        self._order = [(slot.layer, slot.micro_batch) for slot in moving if slot.backward]
        self._position = {scope: place for place, scope in enumerate(self._order)}
        self._pass_of = _passes(moving)
        self._pass = self._next = 0
        self._saved: dict[Scope, list[_Item]] = {}

    def outcome(self, tail: float) -> Outcome:
        """Return the figures; ``tail`` seconds of compute come last."""
        peaks = max(self._peak + self._headroom, 0), max(self._activations + self._headroom, 0)
        held = self._held + max(self._headroom, 0)  # at another moment nothing may be spare
        moved = self._written, self._read, self._forwarded, self._fallback
        busy = self._write_seconds, self._read_seconds
        return Outcome(self._now + tail, self._stall, *peaks, held, *moved, *busy)

    # ---- slots -----------------------------------------------------------------------------------

    def run(self, slot: Slot) -> None:
        """Play one slot."""
        layer = self._layers[slot.layer]
        if slot.backward and not self._is_backward:
            self._beside = self._at_loss
            self._note()
        self._is_backward, self._beside = slot.backward, layer.beside[slot.backward]
        self._to_come = self._gradients - slot.gradients
        self._note()
        self._now += slot.gap
        if slot.backward:
            self._fill_window()
            self._backward(layer, (slot.layer, slot.micro_batch))
        else:
            self._forward(layer, (slot.layer, slot.micro_batch))

    def _forward(self, layer: _Layer, scope: Scope) -> None:
        kind, way, seconds = layer.kind, layer.way, layer.timing.forward
        if not way.offloads:
            self._now += seconds
            self._hold(kind.input_bytes if way.recomputes else kind.whole_bytes)
            return
        items: list[_Item] = []
        if way.recomputes:
            items = [self._save(nbytes, 0.0) for nbytes in (kind.input_bytes, _attention(layer)) if nbytes]
            self._now += seconds
        else:
            passed = 0.0
            self._hold(kind.small_bytes)
            for number, saved in enumerate(kind.activations):
                self._now += (saved.at - passed) * seconds
                passed = saved.at
                if number in layer.stays:
                    self._hold(saved.nbytes)
                elif not (way.rebuilds and saved.rebuilt):
                    items.append(self._save(saved.nbytes, saved.until))
            self._now += (1.0 - passed) * seconds
        self._saved[scope] = sorted(items, key=lambda item: item.until)
        # With several micro-batches the order runs ahead of what exists: come back for what appears.
        self._next = min(self._next, self._position[scope])
        if not self._window.held_back:
            self._flush(0)

    def _backward(self, layer: _Layer, scope: Scope) -> None:
        kind, way, seconds = layer.kind, layer.way, layer.timing.backward
        if way.offloads:
            self._pass = self._pass_of[self._position[scope]]
        if way.offloads and way.recomputes:
            for item in self._saved[scope]:
                self._use(item)
                self._fill_window()
            del self._saved[scope]
        if way.recomputes or not way.offloads:
            self._now += seconds
            if way.recomputes:
                again = max(kind.whole_bytes - kind.input_bytes - _attention(layer), 0)
                self._hold(again)
                self._settled -= again + kind.input_bytes + _attention(layer)
            else:
                self._settled -= kind.whole_bytes
            return
        passed, used = 0.0, 0
        uses: list[tuple[float, int, _Item | None]]
        uses = [(item.until, item.nbytes, item) for item in self._saved[scope]]
        if way.rebuilds:
            uses += [(saved.until, saved.nbytes, None) for saved in kind.activations if saved.rebuilt]
            uses.sort(key=lambda use: use[0])
        for at, nbytes, offloaded in uses:
            self._now += (at - passed) * seconds
            passed = at
            self._settled -= used  # the activation before was used up
            used = nbytes
            if offloaded is None:
                self._hold(nbytes)
            else:
                self._use(offloaded)
                self._fill_window()
        self._now += (1.0 - passed) * seconds
        del self._saved[scope]
        self._settled -= used + layer.stay_bytes + kind.small_bytes

    # ---- memory and time -------------------------------------------------------------------------

    def _hold(self, nbytes: int) -> None:
        """Add bytes that are not in flight."""
        self._settle()
        self._settled += nbytes
        self._note()

    def _note(self) -> None:
        held = self._settled + self._beside
        if held + self._in_flight > self._activations:
            self._activations = held + self._in_flight
        held -= self._to_come
        if held > self._held:
            self._held = held
        if held + self._in_flight > self._peak:
            self._peak = held + self._in_flight

    def _wait_until(self, when: float) -> None:
        if when > self._now:
            self._stall += when - self._now
            self._now = when

    # ---- writing ---------------------------------------------------------------------------------

    def _save(self, nbytes: int, until: float) -> _Item:
        if self._window.is_crowded(self._in_flight, nbytes):
            self._admit(nbytes)
        self._settle()
        item = _Item(nbytes, until)
        self._outbox.append(item)
        self._outbox_bytes += nbytes
        self._in_flight += nbytes
        self._note()
        if self._window.is_tight(self._in_flight, self._largest):
            self._flush(0)  # or the next one may find no room
        elif self._outbox_bytes >= self._batch_from:
            self._flush(self._window.held_back)
        return item

    def _admit(self, nbytes: int) -> None:
        """Wait for writes to end where the window is full."""
        while True:
            self._settle()
            if not self._window.is_crowded(self._in_flight, nbytes):
                return
            self._flush(0)
            if self._next_written == INFINITY:
                return  # only reads are in flight, and one of them would be given up
            self._wait_until(self._next_written)

    def _flush(self, held_back: int) -> None:
        """Hand writes over to the store, but for the last ``held_back`` bytes."""
        while self._outbox and not (held_back and self._outbox_bytes <= held_back):
            item = self._outbox.popleft()
            self._outbox_bytes -= item.nbytes
            item.waits = False
            if item.blocks > self._room:
                item.stays, item.in_memory, item.arrives = True, False, self._now
                self._fallback += item.nbytes
                self._in_flight -= item.nbytes
                self._hold(item.nbytes)
                continue
            seconds = item.nbytes / self._bandwidth.write
            begin = max(self._now, self._writing[-1].written) if self._writing else self._now
            item.written = begin + seconds
            self._writing.append(item)
            self._next_written = self._writing[0].written
            self._room -= item.blocks
            self._written += item.nbytes
            self._write_seconds += seconds

    def _settle(self) -> None:
        """Take note of the writes that have ended by now."""
        while self._next_written <= self._now:
            item = self._writing.popleft()
            self._next_written = self._writing[0].written if self._writing else INFINITY
            if item.in_memory:
                item.in_memory = False
                self._in_flight -= item.nbytes

    def _take_back(self, item: _Item) -> None:
        """Cancel a write that was not handed over."""
        if item.waits:
            item.waits = False
            self._outbox.remove(item)
            self._outbox_bytes -= item.nbytes

    # ---- reading ---------------------------------------------------------------------------------

    def _use(self, item: _Item) -> None:
        """Backward needs an activation, waits for it if it must, and holds it from now on."""
        self._settle()
        if item.stays:
            return
        if item.in_memory:
            self._forwarded += item.nbytes
            self._take_back(item)
            item.in_memory = False
            item.arrives = self._now
            self._in_flight -= item.nbytes
        elif item.arrives < INFINITY:
            self._wait_until(item.arrives)
            self._in_flight -= item.nbytes
            self._read_ahead_bytes -= item.nbytes
        else:
            self._start_read(item)
            self._wait_until(item.arrives)
        if item.written < INFINITY:
            self._room += item.blocks
        self._hold(item.nbytes)

    def _start_read(self, item: _Item) -> None:
        seconds = item.nbytes / self._bandwidth.read
        self._reader_free = item.arrives = max(self._reader_free, self._now, item.written) + seconds
        self._read += item.nbytes
        self._read_seconds += seconds

    def _fill_window(self) -> None:
        """Read what backward uses next, as far as the window allows."""
        self._settle()
        if not self._window.is_worth_filling(self._in_flight):
            return
        while self._next < len(self._order):
            across = self._pass_of[self._next] > self._pass  # a forward pass comes before its use
            for item in self._saved.get(self._order[self._next], ()):
                if item.in_memory:
                    if across:
                        return
                    self._take_back(item)  # it is about to be used where it is
                elif item.arrives == INFINITY and not self._reads_ahead(item, across=across):
                    return
            self._next += 1

    def _reads_ahead(self, item: _Item, *, across: bool) -> bool:
        if not self._window.may_read_ahead(
            self._in_flight, self._read_ahead_bytes, item.nbytes, across_forward=across
        ):
            if not across:
                self._flush(0)  # what waits there is needed later
            return False
        self._start_read(item)
        self._read_ahead_bytes += item.nbytes
        self._settle()
        self._in_flight += item.nbytes
        self._note()
        return True


def _attention(layer: _Layer) -> int:
    """Bytes of attention's output that are offloaded beside the input of a recomputed layer."""
    return layer.kind.attention_bytes or 0 if layer.way is Placement.RECOMPUTE_EXCEPT_ATTENTION else 0


def _passes(slots: list[Slot]) -> list[int]:
    """Of each backward slot: how often forward came after backward before it."""
    count, numbers, before = 0, [], False
    for slot in slots:
        count += before and not slot.backward
        if slot.backward:
            numbers.append(count)
        before = slot.backward
    return numbers
