"""The bytes of a simulated step: what is in flight, what the tiers hold, and when compute waits for them.

It does what the offloader does: writes in the order of saving, a part of the window held back, reads ahead of
backward as the window allows, waiting where it is full. Its rules are those of
:mod:`tba_offload.plan.window`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING

from tba_offload.config.values import BLOCK
from tba_offload.plan.window import Window

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tba_offload.plan.bandwidth import Bandwidth
    from tba_offload.plan.model import Plan
    from tba_offload.plan.profile import Slot, StepProfile

INFINITY = float("inf")

Scope = tuple[int, int]
"""Layer and micro-batch."""


class Item:
    """An activation that is offloaded; times are infinite until they are certain.

    Args:
        nbytes: Its size.
        until: When backward first needs it, as a share of its layer's time.
    """

    __slots__ = (
        "arrives",
        "blocks",
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
        self.blocks = -(-nbytes // BLOCK) * BLOCK  # bytes that it takes of a tier
        self.goes = nbytes  # bytes that are free when backward has used it
        self.until = until
        self.in_memory = True  # the original, on the offloader's account
        self.waits = True  # in the outbox
        self.on_host = False
        self.stays = False  # no tier had room for it
        self.written = INFINITY
        self.arrives = INFINITY  # or when it was used, if that needed no read


class Tier:
    """The drives, or the host memory beside them: what they hold, and when each direction is free again.

    Args:
        write: Bytes a second to it.
        read: Bytes a second from it.
        latency: Seconds that a transfer takes beside its bytes.
        capacity: Bytes that it holds at most; ``None`` for no limit.
    """

    def __init__(self, write: float, read: float, latency: float, capacity: int | None) -> None:
        self._rates = write, read
        self._latency = latency
        self._capacity = INFINITY if capacity is None else capacity
        self._reader_free = 0.0
        self._held = 0
        self.peak = 0
        self.written = self.read = 0
        self.write_seconds = self.read_seconds = 0.0
        self.backlog = 0
        self.writing: deque[Item] = deque()

    def has_room(self, item: Item) -> bool:
        """Whether it holds one more."""
        return self._held + item.blocks <= self._capacity

    def write(self, item: Item, now: float) -> None:
        """Start a write, after those that it has."""
        nbytes = item.nbytes
        seconds = self._latency + nbytes / self._rates[0]
        begin = max(now, self.writing[-1].written) if self.writing else now
        item.written = begin + seconds
        self.write_seconds += seconds
        self.written += nbytes
        self.backlog += nbytes
        self._held += item.blocks
        if self._held > self.peak:
            self.peak = self._held
        self.writing.append(item)

    def end_write(self) -> Item:
        """End the write that ends first, and return it."""
        item = self.writing.popleft()
        self.backlog -= item.nbytes
        return item

    def start_read(self, item: Item, now: float) -> None:
        """Start a read, after those that it has, and after the item is written."""
        seconds = self._latency + item.nbytes / self._rates[1]
        self._reader_free = item.arrives = max(self._reader_free, now, item.written) + seconds
        self.read_seconds += seconds
        self.read += item.nbytes

    def release(self, item: Item) -> None:
        """Backward has what it holds of an item."""
        self._held -= item.blocks


class Tiers:
    """The drives, and host memory beside them for what they have no time for.

    Args:
        bandwidth: The rates of all.
        window: Says when host memory takes writes.

    Attributes:
        drive: The drives.
        host: Host memory; ``None`` if there is none.
        next_written: When the first of all writes ends.
    """

    def __init__(self, bandwidth: Bandwidth, window: Window) -> None:
        host = bandwidth.host
        self.drive = Tier(bandwidth.write, bandwidth.read, bandwidth.latency, bandwidth.capacity)
        self.host = None if host is None else Tier(host.write, host.read, 0.0, host.capacity)
        self.next_written = INFINITY
        self._spills_above = window.spills_above

    def write(self, item: Item, now: float) -> bool:
        """Start a write; tell whether any tier has room."""
        has_room = self.drive.has_room(item)
        tier = self.drive if has_room else None
        if self.host is not None:
            is_wanted = not has_room or self.drive.backlog > self._spills_above
            if is_wanted and self.host.has_room(item):
                item.on_host = True
                tier = self.host
        if tier is None:
            return False
        tier.write(item, now)
        if item.written < self.next_written:
            self.next_written = item.written
        return True

    def end_first(self) -> Item:
        """End the first of all writes, and return it."""
        item = self._first_to_end().end_write()
        following = self._first_to_end().writing
        self.next_written = following[0].written if following else INFINITY
        return item

    def _first_to_end(self) -> Tier:
        """Return the tier of which a write ends first."""
        if self.host is None or not self.host.writing:
            return self.drive
        is_host = not self.drive.writing or self.host.writing[0].written < self.drive.writing[0].written
        return self.host if is_host else self.drive

    def start_read(self, item: Item, now: float) -> None:
        """Start a read from where the item is."""
        self._tier_of(item).start_read(item, now)

    def release(self, item: Item) -> None:
        """Backward has what a tier holds of an item, if one does."""
        if item.written < INFINITY:
            self._tier_of(item).release(item)

    def _tier_of(self, item: Item) -> Tier:
        return self.host if self.host is not None and item.on_host else self.drive


class Outbox:
    """Writes that were not yet handed over, in the order of saving.

    Args:
        window: Says how many bytes wait.

    Attributes:
        nbytes: Bytes that wait.
        held_back: Bytes, the last ones, that are kept back in case that backward comes for them.
        batch_from: Bytes from which those before them are handed over.
    """

    def __init__(self, window: Window) -> None:
        self._items: deque[Item] = deque()
        self.nbytes = 0
        self.held_back = window.held_back
        self.batch_from = window.held_back + window.batch

    def add(self, item: Item) -> None:
        """One more waits."""
        self._items.append(item)
        self.nbytes += item.nbytes

    def take(self, held_back: int) -> Item | None:
        """Return the next one to be handed over; ``None`` if no more bytes wait than are held back."""
        if not self._items or (held_back and self.nbytes <= held_back):
            return None
        item = self._items.popleft()
        self.nbytes -= item.nbytes
        item.waits = False
        return item

    def take_back(self, item: Item) -> None:
        """Record that a write that was not handed over never is; one that was goes on."""
        if item.waits:
            item.waits = False
            self._items.remove(item)
            self.nbytes -= item.nbytes


class Memory:
    """The activations on the device, and the room that gradients leave them until they have come.

    Args:
        gradients: Most bytes of gradients that there are at one time.
        at_loss: Bytes that lie beside activations between the last forward and its backward.

    Attributes:
        in_flight: Bytes that wait for their write to end, or were read ahead.
        activations: Most bytes on the device, with what lies beside them at the time.
        peak_slot: What ran then.
        peak: Most of them that do not lie where gradients come later.
        held: As ``peak``, of those that were not in flight.
    """

    def __init__(self, gradients: int = 0, at_loss: int = 0) -> None:
        self.in_flight = self.activations = self.peak = self.held = 0
        self.peak_slot: Slot | None = None
        self._gradients = self._to_come = gradients
        self._settled = 0  # bytes that are not in flight
        self._at_loss = at_loss
        self._beside = 0  # beside activations, while this slot runs
        self._slot: Slot | None = None  # what runs
        self._leaving: dict[int, int] = defaultdict(int)  # bytes that are gone by the begin of a slot

    def begin(self, place: int, slot: Slot, beside: int) -> None:
        """Record that a slot begins: what was held until then goes.

        Args:
            place: Of the slot.
            slot: The slot.
            beside: Bytes that lie beside activations while it runs.
        """
        if self._leaving:
            self._settled -= self._leaving.pop(place, 0)
        if self._at_loss and slot.backward and self._slot is not None and not self._slot.backward:
            self._beside = self._at_loss
            self._note()
        self._slot = slot
        to_come = self._gradients - slot.gradients
        if to_come != self._to_come or beside != self._beside:
            self._to_come, self._beside = to_come, beside
            self._note()

    @property
    def outlives(self) -> bool:
        """Whether the graph of the layer that runs outlives its backward."""
        return self._slot is not None and self._slot.held_until is not None

    def hold(self, nbytes: int) -> None:
        """Something comes that is not in flight."""
        self._settled += nbytes
        self._note()

    def free(self, nbytes: int) -> None:
        """Something of that is gone."""
        self._settled -= nbytes

    def let_go(self, nbytes: int) -> None:
        """Record that the slot that runs has used what stays until the graph is gone."""
        held_until = self._slot.held_until if self._slot is not None else None
        if held_until is None:
            self._settled -= nbytes
        else:
            self._leaving[held_until] += nbytes

    def take_off(self, nbytes: int) -> None:
        """Something is in flight from now on."""
        self.in_flight += nbytes
        self._note_peak()

    def land(self, nbytes: int) -> None:
        """Something no longer is."""
        self.in_flight -= nbytes

    def _note(self) -> None:
        held = self._settled + self._beside - self._to_come
        if held > self.held:
            self.held = held
        self._note_peak()

    def _note_peak(self) -> None:
        there = self.in_flight + self._settled + self._beside
        if there > self.activations:
            self.activations = there
            self.peak_slot = self._slot
        if there - self._to_come > self.peak:
            self.peak = there - self._to_come


class ReadOrder:
    """What backward is going to use, in its order.

    Args:
        slots: Those of layers of which something travels.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._scopes = [(slot.layer, slot.micro_batch) for slot in slots if slot.backward]
        self._position = {scope: position for position, scope in enumerate(self._scopes)}
        self._pass_of = _backward_passes(slots)
        self._pass = 0  # the backward pass that runs, or ran last
        self._next = 0  # position from which to read ahead
        self._saved: dict[Scope, list[Item]] = {}  # of each scope, in the order of its use

    def add(self, scope: Scope, items: Sequence[Item]) -> None:
        """Record that a layer has run forward, and has saved these."""
        self._saved[scope] = sorted(items, key=_until)
        # With several micro-batches the order runs ahead of what exists; come back for what appears.
        self._next = min(self._next, self._position.get(scope, self._next))

    def begin(self, scope: Scope) -> list[Item]:
        """Begin the backward of a layer; return what the layer saved, in the order of use."""
        self._pass = self._pass_of[self._position[scope]]
        return self._saved[scope]

    def end(self, scope: Scope) -> None:
        """Nothing of a layer is left."""
        del self._saved[scope]

    def ahead(self) -> Iterator[tuple[Item, bool]]:
        """Yield what may be read next, and whether a forward pass comes before its use.

        Where it is left off it begins anew next time.
        """
        while self._next < len(self._scopes):
            across = self._pass_of[self._next] > self._pass
            for item in self._saved.get(self._scopes[self._next], ()):
                yield item, across
            self._next += 1


class Traffic:
    """The clock of a step, and all its transfers.

    Args:
        profile: The step.
        plan: The plan.
        bandwidth: The rates, and the host memory beside the drive.

    Attributes:
        memory: What is on the device.
        tiers: What is elsewhere.
        now: Seconds since the step began.
        stall: Seconds of them that compute waited.
        forwarded: Bytes that were still there when backward came.
        fallback: Bytes that stayed because no tier had room for them.
    """

    def __init__(self, profile: StepProfile, plan: Plan, bandwidth: Bandwidth) -> None:
        moves = [placement.offloads for placement in plan.placements]
        self._window = Window(plan.window)
        self.memory = Memory(profile.gradient_bytes, profile.loss_bytes)
        self.tiers = Tiers(bandwidth, self._window)
        self.now = self.stall = 0.0
        self.forwarded = self.fallback = 0
        self._largest = profile.largest_bytes
        self._outbox = Outbox(self._window)
        self._order = ReadOrder([slot for slot in profile.slots if moves[slot.layer]])
        self._read_ahead = 0  # bytes that were read ahead and not yet used

    # ---- time and memory -------------------------------------------------------------------------

    def begin(self, place: int, slot: Slot, beside: int) -> None:
        """Record that a slot begins, after other compute.

        ``beside`` bytes lie beside activations while it runs.
        """
        self.memory.begin(place, slot, beside)
        self.now += slot.gap

    def compute(self, seconds: float) -> None:
        """Compute takes time."""
        self.now += seconds

    def hold(self, nbytes: int) -> None:
        """Something comes into memory that is not in flight."""
        if self.tiers.next_written <= self.now:
            self._settle()
        self.memory.hold(nbytes)

    def _wait_until(self, when: float) -> None:
        if when > self.now:
            self.stall += when - self.now
            self.now = when

    # ---- writing ---------------------------------------------------------------------------------

    def save(self, nbytes: int, until: float, after: float = 0.0) -> Item:
        """Something is saved for backward and is going to be written.

        Args:
            nbytes: Its size.
            until: When backward first needs it, as a share of its layer's time.
            after: Seconds of compute before.
        """
        self.now += after
        memory = self.memory
        if self._window.is_crowded(memory.in_flight, nbytes):
            self._admit(nbytes)
        if self.tiers.next_written <= self.now:
            self._settle()
        item = Item(nbytes, until)
        self._outbox.add(item)
        memory.take_off(nbytes)
        if self._window.is_tight(memory.in_flight, self._largest):
            self._flush(0)  # or the next one may find no room
        elif self._outbox.nbytes >= self._outbox.batch_from:
            self._flush(self._outbox.held_back)
        return item

    def end_forward(self, scope: Scope, items: Sequence[Item]) -> None:
        """Record that a layer has run forward, and has saved these."""
        self._order.add(scope, items)
        if not self._outbox.held_back:
            self._flush(0)

    def _admit(self, nbytes: int) -> None:
        """Wait for writes to end where the window is full."""
        while self._window.is_crowded(self.memory.in_flight, nbytes):
            self._settle()
            if not self._window.is_crowded(self.memory.in_flight, nbytes):
                return
            self._flush(0)
            if self.tiers.next_written == INFINITY:
                return  # only what was read ahead is in flight; it would be given up
            self._wait_until(self.tiers.next_written)
            self._settle()

    def _flush(self, held_back: int) -> None:
        """Hand writes over, but for the last ones, which may not have to travel."""
        while (item := self._outbox.take(held_back)) is not None:
            if self.tiers.host is not None:
                self._settle()  # which tier it goes to depends on what others have still to write
            if not self.tiers.write(item, self.now):
                self._fall_back(item)

    def _fall_back(self, item: Item) -> None:
        """No tier has room for an activation: it is no longer in flight, and stays."""
        item.stays = True
        item.in_memory = False
        item.arrives = self.now
        self.fallback += item.nbytes
        self.memory.land(item.nbytes)
        self.hold(item.nbytes)

    def _settle(self) -> None:
        """Take note of the writes that have ended by now."""
        while self.tiers.next_written <= self.now:
            item = self.tiers.end_first()
            if item.in_memory:
                item.in_memory = False
                self.memory.land(item.nbytes)

    # ---- reading ---------------------------------------------------------------------------------

    def begin_backward(self, scope: Scope) -> list[Item]:
        """Return a layer of which something travelled begins its backward.

        What it saved, in the order of use.
        """
        return self._order.begin(scope)

    def end_backward(self, scope: Scope) -> None:
        """Nothing of a layer is left."""
        self._order.end(scope)

    def use(self, item: Item, after: float = 0.0) -> None:
        """Backward needs an activation: it waits for it if it must, and holds it from now on.

        If the graph outlives that, what was read goes all the same, but the original only with the graph.

        Args:
            item: The activation.
            after: Seconds of compute before.
        """
        self.now += after
        if self.tiers.next_written <= self.now:
            self._settle()
        if item.stays:
            self._outlives(item)
            return
        if item.in_memory:
            self.forwarded += item.nbytes
            self._outbox.take_back(item)
            item.in_memory = False
            item.arrives = self.now
            self.memory.land(item.nbytes)
            self._outlives(item)
        elif item.arrives < INFINITY:
            self._wait_until(item.arrives)
            self.memory.land(item.nbytes)
            self._read_ahead -= item.nbytes
        else:
            self.tiers.start_read(item, self.now)
            self._wait_until(item.arrives)
        self.tiers.release(item)
        self.hold(item.nbytes)

    def _outlives(self, item: Item) -> None:
        """Record that the original of an activation is there.

        Where the graph outlives its use, it does so too.
        """
        if self.memory.outlives:
            self.memory.let_go(item.nbytes)
            item.goes = 0

    def read_ahead(self) -> None:
        """Read what backward is going to use next, as far as the window allows."""
        if self.tiers.next_written <= self.now:
            self._settle()
        if not self._window.is_worth_filling(self.memory.in_flight):
            return
        for item, across in self._order.ahead():
            if item.in_memory:
                if across:
                    return
                self._outbox.take_back(item)  # it is about to be used where it is
            elif item.arrives == INFINITY and not self._starts_early(item, across_forward=across):
                return

    def _starts_early(self, item: Item, *, across_forward: bool) -> bool:
        memory = self.memory
        if not self._window.may_read_ahead(
            memory.in_flight, self._read_ahead, item.nbytes, across_forward=across_forward
        ):
            if not across_forward:
                self._flush(0)  # what waits there is needed later
            return False
        self.tiers.start_read(item, self.now)
        self._read_ahead += item.nbytes
        if self.tiers.next_written <= self.now:
            self._settle()
        memory.take_off(item.nbytes)
        return True


def _until(item: Item) -> float:
    return item.until


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
