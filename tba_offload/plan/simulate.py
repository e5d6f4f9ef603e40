"""Plays a plan against a profile: when compute waits, how long the step takes, where memory peaks.

The simulator does what the offloader does, activation by activation, with the rates of a drive instead of a
drive: writes in the order of saving, a part of the window held back, reads ahead of backward as the window
allows, waiting at its ceiling. Host memory beside the drive takes writes while the drive has too much to do.
Compute is a single thread of slots. Nothing else is modelled: rates are constant, and both directions of both
tiers have their own.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tba_offload.config.policy import Placement
from tba_offload.plan.model import Prediction
from tba_offload.plan.profile import Timing
from tba_offload.plan.window import Window

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.plan.bandwidth import Bandwidth, HostTier
    from tba_offload.plan.model import Plan
    from tba_offload.plan.profile import LayerKind, Slot, StepProfile

INFINITY = float("inf")

BLOCK = 4096
"""Host memory is taken in blocks of this many bytes."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What playing a plan showed.

    Attributes:
        seconds: Duration of the step.
        stall_seconds: How much of it compute waited for I/O.
        peak_bytes: Most bytes of activations on the device, the rest of the profile included.
        written_bytes: Bytes that went to the drive.
        read_bytes: Bytes that came back.
        forwarded_bytes: Bytes of offloaded layers that were still there when backward came.
        write_seconds: How long the drive was busy with writes.
        read_seconds: How long it was busy with reads.
        host_written_bytes: Bytes that went to host memory beside the drive.
        host_read_bytes: Bytes that came back from there.
        host_peak_bytes: Most bytes that it held.
        held_bytes: Most bytes of activations on the device that were not in flight, the rest left out.
        fallback_bytes: Bytes of offloaded layers that stayed because no tier had room for them.
        rebuild_seconds: Compute that layers placed ``selective`` took longer than kept ones.
        peak_slot: What ran when memory was at its peak; ``None`` for a step without activations.
    """

    seconds: float
    stall_seconds: float
    peak_bytes: int
    written_bytes: int
    read_bytes: int
    forwarded_bytes: int
    write_seconds: float
    read_seconds: float
    host_written_bytes: int = 0
    host_read_bytes: int = 0
    host_peak_bytes: int = 0
    held_bytes: int = 0
    fallback_bytes: int = 0
    rebuild_seconds: float = 0.0
    peak_slot: Slot | None = None

    @property
    def prediction(self) -> Prediction:
        """The figures that a step can be compared with."""
        return Prediction(self.seconds, self.stall_seconds, self.peak_bytes, self.written_bytes)


def simulate(profile: StepProfile, plan: Plan, drive: Bandwidth) -> Outcome:
    """Plays one step.

    Args:
        profile: The step.
        plan: A placement for each of its layers, and the window.
        drive: The rates, and the host memory beside the drive.

    Raises:
        ValueError: The plan is for another number of layers.
    """
    if len(plan.placements) != len(profile.layers):
        raise ValueError(
            f"a plan for {len(plan.placements)} layers does not fit a profile of {len(profile.layers)}"
        )
    return _Run(profile, plan, drive).play()


_Scope = tuple[int, int]
"""Layer and micro-batch."""


class _Item:
    """An activation that is offloaded; times are infinite until they are certain."""

    __slots__ = (
        "arrives",
        "goes",
        "in_memory",
        "nbytes",
        "on_host",
        "stays",
        "until",
        "waits",
        "written",
    )

    def __init__(self, nbytes: int, until: float) -> None:
        self.nbytes = nbytes
        self.goes = nbytes  # bytes that are free when backward has used it
        self.until = until  # when backward first needs it, as a share of its layer's time
        self.in_memory = True  # the original, on the offloader's account
        self.waits = True  # in the outbox
        self.on_host = False
        self.stays = False  # no tier had room for it
        self.written = INFINITY
        self.arrives = INFINITY  # or when it was used, if that needed no read


class _Event(NamedTuple):
    """Backward of a layer placed ``selective`` comes to an activation.

    Attributes:
        at: When, as a share of the layer's backward time.
        nbytes: Its size.
        item: If it travelled.
        needs: Whether that is needed for the first time.
        uses: Whether this is its own use, and not that something else is rebuilt from it.
        rebuilds: Whether it is rebuilt.
    """

    at: float
    nbytes: int
    item: _Item | None = None
    needs: bool = False
    uses: bool = True
    rebuilds: bool = False


class _HostMemory:
    """The host tier in a run: what it holds, and when each of its directions is free again."""

    def __init__(self, tier: HostTier, window: Window) -> None:
        self.tier = tier
        self.spills_above = window.spills_above
        self.backlog = 0  # bytes that the drive has still to write
        self.held = self.peak = 0
        self.written = self.read = 0
        self.writer_free = self.reader_free = 0.0
        self.writing: deque[_Item] = deque()

    def takes(self, item: _Item, *, is_last_resort: bool) -> bool:
        """Whether a write goes to host memory rather than to the drive."""
        is_wanted = is_last_resort or self.backlog > self.spills_above
        return is_wanted and self.held + _blocks(item) <= self.tier.capacity

    def write(self, item: _Item, now: float) -> None:
        self.writer_free = max(self.writer_free, now) + item.nbytes / self.tier.write
        self.written += item.nbytes
        self.held += _blocks(item)
        self.peak = max(self.peak, self.held)
        item.on_host = True
        item.written = self.writer_free
        self.writing.append(item)

    def start_read(self, item: _Item, now: float) -> None:
        self.reader_free = max(self.reader_free, now, item.written) + item.nbytes / self.tier.read
        self.read += item.nbytes
        item.arrives = self.reader_free


def _blocks(item: _Item) -> int:
    return -(-item.nbytes // BLOCK) * BLOCK


def _backward_passes(slots: Sequence[Slot]) -> list[int]:
    """Of each backward slot: how often forward came after backward before it."""
    passes, numbers, before = 0, [], False
    for slot in slots:
        if slot.backward:
            numbers.append(passes)
        elif before:
            passes += 1
        before = slot.backward
    return numbers


class _Run:
    def __init__(self, profile: StepProfile, plan: Plan, drive: Bandwidth) -> None:
        window = Window(plan.window)
        self.profile = profile
        self.plan = plan
        self.drive = drive
        self.window = window
        self.held_back = window.held_back
        self.batch_from = window.held_back + window.batch
        self.largest = max((saved.nbytes for kind in profile.kinds for saved in kind.activations), default=0)
        self.now = 0.0
        self.stall = 0.0
        self.rebuild_seconds = 0.0
        self.in_flight = 0
        self.settled = 0
        self.held = 0  # the most of that
        self.peak = 0
        self.leaving: dict[int, int] = defaultdict(int)  # bytes that are gone by the begin of a slot
        self.slot: Slot | None = None  # what runs
        self.peak_slot: Slot | None = None  # what ran at the peak
        self.written = self.read = self.forwarded = self.fallback = 0
        self.stored = 0  # bytes that the drive holds
        self.writer_free = self.reader_free = 0.0
        self.write_seconds = self.read_seconds = 0.0
        self.outbox: deque[_Item] = deque()
        self.outbox_bytes = 0
        self.writing: deque[_Item] = deque()
        self.next_written = INFINITY  # when the first of them is
        self.host = _HostMemory(drive.host, window) if drive.host is not None else None
        # What each execution of a layer has saved, in the order in which backward is going to use it.
        self.saved: dict[_Scope, list[_Item]] = {}
        # Of each layer, looked up once: there are many more slots than layers.
        self.timings = [self._timing_of(layer, placement) for layer, placement in enumerate(plan.placements)]
        self.rebuilding = [
            profile.rebuild_seconds(layer) if placement.rebuilds else 0.0
            for layer, placement in enumerate(plan.placements)
        ]
        moving = [slot for slot in profile.slots if plan.placements[slot.layer].travels]
        self.order = [(slot.layer, slot.micro_batch) for slot in moving if slot.backward]
        self.position = {scope: position for position, scope in enumerate(self.order)}
        self.pass_of = _backward_passes(moving)
        self.passes = 0  # the backward pass that runs, or ran last
        self.read_ahead = 0
        self.ahead = 0  # position in the order from which to read ahead

    def _timing_of(self, layer: int, placement: Placement) -> Timing:
        """What a layer takes: so much less as offloading takes for what stays in memory."""
        timing = self.profile.timing(layer, placement)
        if not placement.is_offloaded:
            return timing
        kind = self.profile.kind_of(layer)
        staying = self.plan.kept_bytes(layer, kind)
        if not staying:
            return timing
        offloaded = self.profile.timing(layer, Placement.OFFLOAD)
        kept = self.profile.timing(layer, Placement.KEEP)
        share = staying / kind.nbytes
        return Timing(
            *(max(own - share * (a - b), b) for own, a, b in zip(timing, offloaded, kept, strict=True))
        )

    def play(self) -> Outcome:
        for place, slot in enumerate(self.profile.slots):
            self.settled -= self.leaving.pop(place, 0)
            self.slot = slot
            self.now += slot.gap
            placement = self.plan.placements[slot.layer]
            kind = self.profile.kind_of(slot.layer)
            timing = self.timings[slot.layer]
            seconds = timing.backward if slot.backward else timing.forward
            if slot.backward:
                self._read_ahead()
            placement.take(_Stretch(self, slot, kind, seconds))
        self.now += self.profile.tail
        return Outcome(
            seconds=self.now,
            stall_seconds=self.stall,
            peak_bytes=self.peak + self.profile.rest_bytes,
            written_bytes=self.written,
            read_bytes=self.read,
            forwarded_bytes=self.forwarded,
            write_seconds=self.write_seconds,
            read_seconds=self.read_seconds,
            held_bytes=self.held,
            fallback_bytes=self.fallback,
            rebuild_seconds=self.rebuild_seconds,
            peak_slot=self.peak_slot,
            **self._host_figures(),
        )

    def _host_figures(self) -> dict[str, int]:
        if self.host is None:
            return {}
        return {
            "host_written_bytes": self.host.written,
            "host_read_bytes": self.host.read,
            "host_peak_bytes": self.host.peak,
        }

    # ---- layers that stay ------------------------------------------------------------------------

    def stays(self, nbytes: int, slot: Slot, seconds: float) -> None:
        if slot.backward:
            self.now += seconds
            self._let_go(nbytes, slot)
        else:
            self.now += seconds
            self._hold(nbytes)

    def recomputed(self, kind: LayerKind, slot: Slot, seconds: float) -> None:
        self.now += seconds
        if slot.backward:
            self._hold(kind.recomputed_bytes)
            self.settled -= kind.recomputed_bytes
            self._let_go(kind.input_bytes, slot)
        else:
            self._hold(kind.input_bytes)

    def _let_go(self, nbytes: int, slot: Slot) -> None:
        """Backward has used what stays until the graph is gone."""
        if slot.held_until is None:
            self.settled -= nbytes
        else:
            self.leaving[slot.held_until] += nbytes

    def _hold(self, nbytes: int) -> None:
        self.settled += nbytes
        self._note_peak()

    def _note_peak(self) -> None:
        if self.next_written <= self.now:
            self._settle()
        self.held = max(self.held, self.settled)
        if self.in_flight + self.settled > self.peak:
            self.peak = self.in_flight + self.settled
            self.peak_slot = self.slot

    # ---- layers that travel ----------------------------------------------------------------------

    def recomputed_from_store(self, kind: LayerKind, slot: Slot, seconds: float) -> None:
        scope = slot.layer, slot.micro_batch
        if slot.backward:
            self.passes = self.pass_of[self.position[scope]]
            used = 0
            for item in self.saved.pop(scope):
                self._use(item, slot)
                used += item.goes
                self._read_ahead()
            self.now += seconds
            self._hold(kind.recomputed_bytes)
            self.settled -= kind.recomputed_bytes + used
        else:
            items = [self._save(kind.input_bytes, 0.0)] if kind.input_bytes else []
            self.now += seconds
            self._end_scope(scope, items)

    def offloaded_forward(self, slot: Slot, kind: LayerKind, seconds: float, *, rebuilds: bool) -> None:
        kept = self.plan.kept_of(slot.layer)
        items: list[_Item] = []
        passed = 0.0
        self._hold(kind.small_bytes)
        for number, saved in enumerate(kind.activations):
            self.now += (saved.at - passed) * seconds
            passed = saved.at
            if number in kept:
                self._hold(saved.nbytes)
            elif not (rebuilds and saved.rebuilt):
                needed = saved.fetched if rebuilds else saved.until
                items.append(self._save(saved.nbytes, needed))
        self.now += (1.0 - passed) * seconds
        self._end_scope((slot.layer, slot.micro_batch), items)

    def _save(self, nbytes: int, until: float) -> _Item:
        """Something is saved for backward and is going to be written."""
        self._admit(nbytes)
        item = _Item(nbytes, until)
        self.in_flight += nbytes
        self.outbox.append(item)
        self.outbox_bytes += nbytes
        self._note_peak()
        if self.window.is_tight(self.in_flight, self.largest):
            self._flush(0)  # or the next one may find no room
        elif self.outbox_bytes >= self.batch_from:
            self._flush(self.held_back)
        return item

    def _end_scope(self, scope: _Scope, items: list[_Item]) -> None:
        self.saved[scope] = sorted(items, key=lambda item: item.until)
        # With several micro-batches the order runs ahead of what exists; come back for what appears.
        self.ahead = min(self.ahead, self.position.get(scope, self.ahead))
        if not self.held_back:
            self._flush(0)

    def _admit(self, nbytes: int) -> None:
        """Waits at the ceiling for writes to end."""
        while self.window.is_crowded(self.in_flight, nbytes):
            self._settle()
            if not self.window.is_crowded(self.in_flight, nbytes):
                return
            self._flush(0)
            if self.next_written == INFINITY:
                return  # only what was read ahead is in flight; it would be given up
            self._wait_until(self.next_written)
            self._settle()

    def _flush(self, held_back: int) -> None:
        while self.outbox and (not held_back or self.outbox_bytes > held_back):
            item = self.outbox.popleft()
            self.outbox_bytes -= item.nbytes
            item.waits = False
            is_full = self._is_full(item)
            if self.host is not None:
                self._settle()
                if self.host.takes(item, is_last_resort=is_full):
                    self.host.write(item, self.now)
                    self._note_next()
                    continue
            if is_full:
                self._fall_back(item)
                continue
            self.stored += _blocks(item)
            if self.host is not None:
                self.host.backlog += item.nbytes
            seconds = self.drive.latency + item.nbytes / self.drive.write
            self.writer_free = max(self.writer_free, self.now) + seconds
            self.write_seconds += seconds
            self.written += item.nbytes
            item.written = self.writer_free
            self.writing.append(item)
            self._note_next()

    def _is_full(self, item: _Item) -> bool:
        capacity = self.drive.capacity
        return capacity is not None and self.stored + _blocks(item) > capacity

    def _fall_back(self, item: _Item) -> None:
        """No tier has room for an activation: it is no longer in flight, and stays."""
        item.stays = True
        item.in_memory = False
        item.arrives = self.now
        self.fallback += item.nbytes
        self.in_flight -= item.nbytes
        self._hold(item.nbytes)

    def _settle(self) -> None:
        """Takes note of the writes that have ended by now."""
        while self.next_written <= self.now:
            item = self._first_to_end().popleft()
            self._note_next()
            if self.host is not None and not item.on_host:
                self.host.backlog -= item.nbytes
            if item.in_memory:
                item.in_memory = False
                self.in_flight -= item.nbytes

    def _first_to_end(self) -> deque[_Item]:
        """The writes of the tier that ends one before the other does."""
        if self.host is None or not self.host.writing:
            return self.writing
        is_host = not self.writing or self.host.writing[0].written < self.writing[0].written
        return self.host.writing if is_host else self.writing

    def _note_next(self) -> None:
        lane = self._first_to_end()
        self.next_written = lane[0].written if lane else INFINITY

    def _wait_until(self, when: float) -> None:
        if when > self.now:
            self.stall += when - self.now
            self.now = when

    def offloaded_backward(self, slot: Slot, kind: LayerKind, seconds: float) -> None:
        scope = slot.layer, slot.micro_batch
        passed, used = 0.0, 0
        self.passes = self.pass_of[self.position[scope]]
        for item in self.saved[scope]:
            self.now += (item.until - passed) * seconds
            passed = item.until
            self.settled -= used  # the activation before was used up
            self._use(item, slot)
            used = item.goes
            self._read_ahead()
        self.now += (1.0 - passed) * seconds
        self._end_backward(slot, kind, used)

    def selective_backward(self, slot: Slot, kind: LayerKind, seconds: float) -> None:
        """What is rebuilt comes into being when it is used; what it is made of stays until its own use."""
        passed, used = 0.0, 0
        self.rebuild_seconds += self.rebuilding[slot.layer]
        self.passes = self.pass_of[self.position[slot.layer, slot.micro_batch]]
        for event in self._selective_events(slot, kind):
            self.now += (event.at - passed) * seconds
            passed = event.at
            if event.uses:
                self.settled -= used
            if event.item is not None and event.needs:
                self._use(event.item, slot)
                self._read_ahead()
            elif event.rebuilds:
                self._hold(event.nbytes)
            if event.uses:
                used = event.nbytes if event.item is None else event.item.goes
        self.now += (1.0 - passed) * seconds
        self._end_backward(slot, kind, used)

    def _selective_events(self, slot: Slot, kind: LayerKind) -> list[_Event]:
        """Backward of a layer of which some activations are rebuilt, in its order."""
        kept = self.plan.kept_of(slot.layer)
        moved = [saved for number, saved in enumerate(kind.activations) if number not in kept]
        events = [_Event(saved.until, saved.nbytes, rebuilds=True) for saved in moved if saved.rebuilt]
        travelled = sorted((saved for saved in moved if not saved.rebuilt), key=lambda saved: saved.fetched)
        for saved, item in zip(travelled, self.saved[slot.layer, slot.micro_batch], strict=True):
            is_last = saved.fetched == saved.until
            events.append(_Event(saved.fetched, saved.nbytes, item, needs=True, uses=is_last))
            if not is_last:
                events.append(_Event(saved.until, saved.nbytes, item))
        return sorted(events, key=lambda event: event.at)

    def _end_backward(self, slot: Slot, kind: LayerKind, used: int) -> None:
        """A layer has gone backward: nothing of it is left, neither what was used last."""
        del self.saved[slot.layer, slot.micro_batch]
        self.settled -= used
        self._let_go(self.plan.kept_bytes(slot.layer, kind) + kind.small_bytes, slot)

    def _use(self, item: _Item, slot: Slot) -> None:
        """Backward needs an activation: it waits for it if it must, and holds it from now on.

        If the graph outlives that, what was read goes all the same, but the original only with the graph.
        """
        self._settle()
        if item.stays:
            self._outlives(item, slot)
            return
        if item.in_memory:
            self.forwarded += item.nbytes
            self._take_back(item)
            item.in_memory = False
            item.arrives = self.now
            self.in_flight -= item.nbytes
            self._outlives(item, slot)
        elif item.arrives < INFINITY:
            self._wait_until(item.arrives)
            self.in_flight -= item.nbytes
            self.read_ahead -= item.nbytes
        else:
            self._start_read(item)
            self._wait_until(item.arrives)
        if self.host is not None and item.on_host:
            self.host.held -= _blocks(item)
        elif item.written < INFINITY:
            self.stored -= _blocks(item)
        self.settled += item.nbytes
        self._note_peak()

    def _outlives(self, item: _Item, slot: Slot) -> None:
        """The original of an activation is there: where the graph outlives its use, it does so too."""
        if slot.held_until is not None:
            self._let_go(item.nbytes, slot)
            item.goes = 0

    def _take_back(self, item: _Item) -> None:
        """A write that was not handed over never is; one that was goes on."""
        if item.waits:
            item.waits = False
            self.outbox.remove(item)
            self.outbox_bytes -= item.nbytes

    def _start_read(self, item: _Item) -> None:
        if self.host is not None and item.on_host:
            self.host.start_read(item, self.now)
            return
        seconds = self.drive.latency + item.nbytes / self.drive.read
        self.reader_free = max(self.reader_free, self.now, item.written) + seconds
        self.read_seconds += seconds
        self.read += item.nbytes
        item.arrives = self.reader_free

    def _read_ahead(self) -> None:
        if self.next_written <= self.now:
            self._settle()
        if not self.window.is_worth_filling(self.in_flight):
            return
        while self.ahead < len(self.order):
            across = self.pass_of[self.ahead] > self.passes
            for item in self.saved.get(self.order[self.ahead], ()):
                if item.in_memory:
                    if across:
                        return
                    self._take_back(item)  # it is about to be used where it is
                elif item.arrives == INFINITY and not self._starts_early(item, across_forward=across):
                    return
            self.ahead += 1

    def _starts_early(self, item: _Item, *, across_forward: bool) -> bool:
        if not self.window.may_read_ahead(
            self.in_flight, self.read_ahead, item.nbytes, across_forward=across_forward
        ):
            if not across_forward:
                self._flush(0)  # what waits there is needed later
            return False
        self._start_read(item)
        self.in_flight += item.nbytes
        self.read_ahead += item.nbytes
        self._note_peak()
        return True


class _Stretch(NamedTuple):
    """A slot that is about to be played: the ways that its layer can go."""

    run: _Run
    slot: Slot
    kind: LayerKind
    seconds: float

    @property
    def layer(self) -> int:
        return self.slot.layer

    def keep(self) -> None:
        self.run.stays(self.kind.nbytes + self.kind.small_bytes, self.slot, self.seconds)

    def recompute(self, *, inputs_travel: bool = False) -> None:
        if inputs_travel:
            self.run.recomputed_from_store(self.kind, self.slot, self.seconds)
        else:
            self.run.recomputed(self.kind, self.slot, self.seconds)

    def offload(self, *, rebuilds: bool = False) -> None:
        if not self.slot.backward:
            self.run.offloaded_forward(self.slot, self.kind, self.seconds, rebuilds=rebuilds)
        elif rebuilds:
            self.run.selective_backward(self.slot, self.kind, self.seconds)
        else:
            self.run.offloaded_backward(self.slot, self.kind, self.seconds)
