"""Simulator that computes the time and the memory of a step under a plan.

Like the offloader, the simulator follows the rules of :mod:`tba_offload.planner.window`. Activations are
written in the order of saving. Backward prefetches activations. Layers run one after another, and wait when
the in-flight window is full. Drives have one queue of reads and one queue of writes, with constant rates.
Host memory has two queues of its own.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from tba_offload.config.policy import Placement
from tba_offload.config.values import BLOCK
from tba_offload.placements import staying
from tba_offload.planner.model import Beside, Prediction, Saved, Timing
from tba_offload.planner.window import Tier, Window, drives_share, is_for_host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.planner.model import Bandwidth, Plan, Slot, StepProfile

INFINITY = float("inf")
Scope = tuple[int, int]
"""Index of a layer, and number of a micro-batch."""


def play(profile: StepProfile, plan: Plan, bandwidth: Bandwidth) -> Prediction:
    """Simulate one step.

    Args:
        profile: Profile of the step.
        plan: The placement of each layer, and the in-flight window.
        bandwidth: Rates of the store.

    Raises:
        ValueError: The plan and the profile have different numbers of layers.
    """
    step = _Step(profile, plan, bandwidth)
    for slot in profile.slots:
        step.run(slot)
    return step.outcome(profile.tail)


class _Item:
    """One offloaded activation. The times of an activation are infinite until known."""

    __slots__ = ("arrives", "blocks", "in_memory", "nbytes", "stays", "tier", "until", "waits", "written")

    def __init__(self, nbytes: int, until: float) -> None:
        self.nbytes, self.until = nbytes, until
        self.blocks = -(-nbytes // BLOCK) * BLOCK  # bytes that the activation uses in the store
        self.in_memory = self.waits = True  # `waits`: the write is not submitted yet
        self.stays = False  # whether the activation stays in memory because the store is full
        self.written = self.arrives = INFINITY
        self.tier: _Tier


class _Tier(Tier):
    __slots__ = ("least_room", "read_rate", "reader_free", "room", "writing", "written")

    def __init__(self, rates: Bandwidth) -> None:
        super().__init__(0, 0, rates.write)
        self.room = self.least_room = INFINITY if rates.capacity is None else rates.capacity
        self.writing: deque[_Item] = deque()
        self.written, self.reader_free, self.read_rate = 0, 0.0, rates.read


class LayerUnder(NamedTuple):
    """Figures of a layer under a placement.

    Attributes:
        way: Placement of the layer.
        timing: Seconds of the layer's forward and backward.
        saves: The activations that forward saves, in order. The flag of an activation is True if the
            activation stays in memory.
        rebuilt: The activations that backward rebuilds.
        small: Bytes that stay in memory from the start of forward.
        after: Bytes that stay in memory from the end of forward.
        left: Bytes that stay in memory until the end of backward.
        again: Bytes that the layer saves when it is recomputed; 0 without recomputation.
        beside: Bytes of memory other than activations, in forward and in backward.
    """

    way: Placement
    timing: Timing
    saves: Sequence[tuple[Saved, bool]]
    rebuilt: Sequence[Saved]
    small: int
    after: int
    left: int
    again: int
    beside: tuple[int, int]


def layer_under(profile: StepProfile, number: int, placement: Placement) -> LayerUnder:
    """Return the figures of a layer of kind ``number`` under a placement."""
    kind, way, layer = profile.kinds[number], placement.as_run, profile.layers.index(number)
    sizes, timing = [saved.nbytes for saved in kind.activations], profile.timing(layer, way)
    in_memory = staying(sizes, way.percent)
    stays = sum(sizes[number] for number in in_memory)
    if stays:  # fewer bytes are offloaded, so offloading takes less extra time
        kept, share = profile.timing(layer, Placement.KEEP), stays / kind.nbytes
        timing = Timing(*(max(a - share * (a - b), b) for a, b in zip(timing, kept, strict=True)))
    beside = kind.beside or Beside()
    ran = beside.forward, beside.backward if way.is_offloaded else beside.whole
    if way.recomputes:  # a second forward needs as much memory as the first, plus its gradient
        attention = kind.attention_bytes or 0 if way is Placement.RECOMPUTE_EXCEPT_ATTENTION else 0
        moves = [kind.input_bytes, attention] if way.offloads else []
        saves = [(Saved(nbytes, 0.0, 0.0), False) for nbytes in moves if nbytes]
        after, again = 0 if moves else kind.input_bytes, kind.whole_bytes - kind.input_bytes - attention
        ran = beside.forward, max(ran[1], beside.forward + kind.input_bytes)
        return LayerUnder(way, timing, saves, (), 0, after, after, max(again, 0), ran)
    if not way.offloads:
        return LayerUnder(way, timing, (), (), 0, kind.whole_bytes, kind.whole_bytes, 0, ran)
    saves = [(saved, number in in_memory) for number, saved in enumerate(kind.activations)]
    rebuilt = [saved for saved in kind.activations if way.rebuilds and saved.rebuilt]
    if way.rebuilds:
        saves = [(saved, False) for saved in (*kind.activations, *kind.sources) if not saved.rebuilt]
        saves.sort(key=lambda save: save[0].at)
    return LayerUnder(way, timing, saves, rebuilt, kind.small_bytes, 0, kind.small_bytes + stays, 0, ran)


class _Step:
    def __init__(self, profile: StepProfile, plan: Plan, bandwidth: Bandwidth) -> None:
        placed = list(zip(profile.layers, plan.placements, strict=True))
        alike = {key: layer_under(profile, *key) for key in set(placed)}
        self._layers = [alike[key] for key in placed]
        self._window = Window(plan.window)
        self._drives = _Tier(bandwidth)
        self._host = None if bandwidth.host is None else _Tier(bandwidth.host)
        self._tiers = [tier for tier in (self._drives, self._host) if tier is not None]
        first = self._host if bandwidth.host_first else None
        self._share = None if first is None else drives_share(self._most_saved(profile), first.room)
        self._tight_above = self._window.tight_above(profile.largest_bytes)
        self._headroom, self._at_loss = profile.headroom, profile.loss_bytes
        self._now = self._stall = 0.0
        # memory
        self._in_flight = self._settled = self._beside = self._peak = self._held = self._activations = 0
        self._gradients = self._to_come = profile.gradient_bytes
        self._is_backward = True
        # writes: first pending, then submitted to the store
        self._pending: deque[_Item] = deque()
        self._pending_bytes = 0
        self._next_written = INFINITY
        self._forwarded = 0
        # reads, in the order of backward
        self._read_ahead_bytes = 0
        moving = [slot for slot in profile.slots if self._layers[slot.layer].way.offloads]
        self._order = [(slot.layer, slot.micro_batch) for slot in moving if slot.backward]
        self._position = {scope: place for place, scope in enumerate(self._order)}
        self._pass_of = _passes(moving)
        self._pass = self._next = 0
        self._saved: dict[Scope, list[_Item]] = {}

    def _most_saved(self, profile: StepProfile) -> int:
        nbytes = [sum(each.nbytes for each, stays in layer.saves if not stays) for layer in self._layers]
        saved = (nbytes[slot.layer] * (-1 if slot.backward else 1) for slot in profile.slots)
        return max(accumulate(saved), default=0)

    def outcome(self, tail: float) -> Prediction:
        """Return the figures of the step, after ``tail`` more seconds of compute."""
        spare = 0.0 if self._host is None or self._share is None else self._host.least_room
        return Prediction(
            self._now + tail,
            self._stall,
            max(self._peak + self._headroom, 0),
            self._drives.written,
            max(self._activations + self._headroom, 0),
            # A negative headroom was measured at the peak, so it may not apply at other times.
            self._held + max(self._headroom, 0),
            self._forwarded,
            self._drives.written + int(max(self._forwarded - spare, 0)),
            0 if self._host is None else self._host.written,
        )

    # ---- slots -----------------------------------------------------------------------------------

    def run(self, slot: Slot) -> None:
        """Simulate one forward or backward of a layer."""
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

    def _forward(self, layer: LayerUnder, scope: Scope) -> None:
        items, passed, seconds = [], 0.0, layer.timing.forward
        self._hold(layer.small)
        for saved, stays in layer.saves:
            self._now += (saved.at - passed) * seconds
            passed = saved.at
            if stays:
                self._hold(saved.nbytes)
            else:
                items.append(self._save(saved.nbytes, saved.until))
        self._now += (1.0 - passed) * seconds
        self._hold(layer.after)
        if layer.way.offloads:
            self._saved[scope] = sorted(items, key=lambda item: item.until)
            # With several micro-batches, the read position may have passed this scope before it was saved.
            self._next = min(self._next, self._position[scope])
            if not self._window.held_back:
                self._flush(0)

    def _backward(self, layer: LayerUnder, scope: Scope) -> None:
        passed, used, seconds = 0.0, 0, layer.timing.backward
        uses: list[tuple[float, int, _Item | None]]
        uses = [(item.until, item.nbytes, item) for item in self._saved.get(scope, ())]
        uses += [(saved.until, saved.nbytes, None) for saved in layer.rebuilt]
        if layer.way.offloads:
            self._pass = self._pass_of[self._position[scope]]
        for at, nbytes, offloaded in sorted(uses, key=lambda use: use[0]):
            self._now += (at - passed) * seconds
            passed = at
            if not layer.way.recomputes:
                self._settled -= used  # the previous activation is no longer used
                used = 0
            used += nbytes
            if offloaded is None:
                self._hold(nbytes)
            else:
                self._use(offloaded)
                self._fill_window()
        self._now += (1.0 - passed) * seconds
        self._hold(layer.again)
        self._saved.pop(scope, None)
        self._settled -= used + layer.left + layer.again

    # ---- memory and time -------------------------------------------------------------------------

    def _hold(self, nbytes: int) -> None:
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
        self._settle()
        while self._window.is_crowded(self._in_flight, nbytes):
            self._flush(0)
            if self._next_written == INFINITY:
                break  # only reads are in flight, and the offloader would drop one of them
            self._wait_until(self._next_written)
            self._settle()
        item = _Item(nbytes, until)
        self._pending.append(item)
        self._pending_bytes += nbytes
        self._in_flight += nbytes
        self._note()
        if self._in_flight > self._tight_above:
            self._flush(nbytes if nbytes <= self._tight_above else 0)
        elif self._pending_bytes >= self._window.due:
            self._flush(self._window.held_back)
        return item

    def _flush(self, held_back: int) -> None:
        while len(self._pending) > bool(held_back) and not 0 < self._pending_bytes <= held_back:
            item = self._pending.popleft()
            self._pending_bytes -= item.nbytes
            item.waits = False
            tier = self._drives if self._host is None else self._tier_for(item, self._host)
            if item.blocks > tier.room:
                item.stays, item.in_memory, item.arrives = True, False, self._now
                self._in_flight -= item.nbytes
                self._hold(item.nbytes)
                continue
            item.tier = tier
            begin = max(self._now, tier.writing[-1].written) if tier.writing else self._now
            item.written = begin + item.nbytes / tier.rate
            tier.writing.append(item)
            if item.written < self._next_written:
                self._next_written = item.written
            tier.room -= item.blocks
            if tier.room < tier.least_room:
                tier.least_room = tier.room
            tier.held += item.blocks
            tier.pending += item.nbytes
            tier.written += item.nbytes

    def _tier_for(self, item: _Item, host: _Tier) -> _Tier:
        """Return the tier (drives or host memory) for a write. If both are full, the result has no room."""
        drives = self._drives
        wants_host = is_for_host(host, drives, self._window.spills_above, self._share)
        tier, other = (host, drives) if wants_host else (drives, host)
        return tier if item.blocks <= tier.room else other

    def _settle(self) -> None:
        if self._next_written > self._now:
            return
        self._next_written = INFINITY
        for tier in self._tiers:
            while tier.writing and tier.writing[0].written <= self._now:
                item = tier.writing.popleft()
                tier.pending -= item.nbytes
                if item.in_memory:
                    item.in_memory = False
                    self._in_flight -= item.nbytes
            if tier.writing:
                self._next_written = min(self._next_written, tier.writing[0].written)

    def _take_back(self, item: _Item) -> None:
        if item.waits:
            item.waits = False
            self._pending.remove(item)
            self._pending_bytes -= item.nbytes

    # ---- reading ---------------------------------------------------------------------------------

    def _use(self, item: _Item) -> None:
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
            item.tier.room += item.blocks
            item.tier.held -= item.blocks
        self._hold(item.nbytes)

    def _start_read(self, item: _Item) -> None:
        tier = item.tier
        begin = max(tier.reader_free, self._now, item.written)
        tier.reader_free = item.arrives = begin + item.nbytes / tier.read_rate

    def _fill_window(self) -> None:
        self._settle()
        if self._in_flight > self._window.fills_below:
            return
        while self._next < len(self._order):
            across = self._pass_of[self._next] > self._pass
            for item in self._saved.get(self._order[self._next], ()):
                if item.in_memory:
                    if across:
                        return
                    self._take_back(item)  # the activation is still in memory, so no read is needed
                elif item.arrives == INFINITY and not self._reads_ahead(item, across=across):
                    return
            self._next += 1

    def _reads_ahead(self, item: _Item, *, across: bool) -> bool:
        if not self._window.may_read_ahead(
            self._in_flight, self._read_ahead_bytes, item.nbytes, across_forward=across
        ):
            if not across:
                self._flush(0)  # the pending writes are needed later than this read
            return False
        self._start_read(item)
        self._read_ahead_bytes += item.nbytes
        self._settle()
        self._in_flight += item.nbytes
        self._note()
        return True


def _passes(slots: list[Slot]) -> list[int]:
    """Return, for each backward slot, the number of earlier changes from a backward to a forward."""
    count, numbers, before = 0, [], False
    for slot in slots:
        count += before and not slot.backward
        if slot.backward:
            numbers.append(count)
        before = slot.backward
    return numbers
