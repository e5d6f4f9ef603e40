"""The order in which backward uses activations, and what to read ahead.

A step repeats its order: whatever the schedule is (gradient accumulation, 1F1B, interleaved), the
activations that backward asked for in one step it asks for in the next, in the same order. So prefetch
follows the order recorded in the last step. Activations without a recorded use, as
of a layer that had another placement, are expected in the reverse order of saving within their micro-batch.
In the first step that is the order of all.

With several micro-batches under way backward passes take turns with forward passes. What is used after the
next forward pass is read ahead with restraint, because that pass needs the window for what it saves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from tba_offload.capture.trace import ActivationKey, ScopeKey
    from tba_offload.transfer.offloader import Offloader
    from tba_offload.transfer.saved import SavedRef


class PrefetchSchedule:
    """The expected order, and the position of backward in it.

    Args:
        offloader: Starts the reads; its window says when to stop.

    Attributes:
        saved: Takes each storage that was saved; a function without a frame, for the hot path.
    """

    def __init__(self, offloader: Offloader) -> None:
        self._offloader, self._window = offloader, offloader.window
        self._new: list[SavedRef] = []
        self.saved = self._new.append
        self._recorded: list[tuple[ActivationKey, int]] = []
        self.begin_step()

    def begin_step(self) -> None:
        """Expect the order that was recorded in the step before."""
        self._refs: dict[ActivationKey, SavedRef] = {}
        self._new.clear()
        self._expect(self._recorded)
        self._has_order = bool(self._recorded)
        self._recorded = []
        self._passes = 0  # how often forward came after backward in this step
        self._given_up = 0
        self._in_backward = False

    def _expect(self, order: list[tuple[ActivationKey, int]]) -> None:
        """Expect activations in this order; each with the number of the backward pass that uses it."""
        self._expected = order
        self._position = {key: position for position, (key, _) in enumerate(order)}
        self._next, self._last, self._pass = 0, -1, 0

    def abandon_step(self) -> None:
        """Forget a step that did not end; the order before it stands."""
        self._refs.clear()
        self._new.clear()
        self._recorded = self._expected

    def used(self, key: ActivationKey) -> None:
        """Backward used an activation for the first time: read ahead from the one after it."""
        if self._new:
            self._note_saved()
        begins, self._in_backward = not self._in_backward, True
        self._recorded.append((key, self._passes))
        position = self._position.get(key)
        if position is not None:
            self._follow(position)
        # When backward begins, what is still in memory is looked at, however full the window is.
        has_room = begins or self._window.in_flight <= self._window.fills_below
        if has_room and self._next < len(self._expected):
            self._offloader.prefetch(self)

    def reached(self) -> None:
        """Backward has come to a layer, perhaps one that saved nothing: reads start all the same."""
        if self._new:
            self._note_saved()
        has_room = not self._in_backward or self._window.in_flight <= self._window.fills_below
        # Before the first use of all, nothing tells which micro-batch comes first.
        if self._has_order and has_room and self._next < len(self._expected):
            self._offloader.prefetch(self)

    def __iter__(self) -> Self:
        self._was_taken = False
        return self

    def __next__(self) -> tuple[SavedRef, bool]:
        """Return what is expected next, and whether a forward pass comes before.

        What is taken last comes again. No generator: an interrupt while that is closed would be lost.
        """
        self._next += self._was_taken
        while self._next < len(self._expected):
            key, passes = self._expected[self._next]
            ref = self._refs.get(key)
            if ref is not None:
                self._was_taken = True
                return ref, passes > self._pass
            self._next += 1
        raise StopIteration

    def _note_saved(self) -> None:
        """Look at what was saved since backward used something.

        With several micro-batches the order runs ahead of what exists: come back for what appears.
        """
        if self._in_backward:
            self._in_backward = False
            self._passes += 1
        new, has_unexpected = self._new[:], False
        for ref in new:
            key: Any = ref.key
            self._refs[key] = ref
            position = self._position.get(key)
            if position is None:
                has_unexpected = True
            elif position < self._next:
                self._next = position
        del self._new[: len(new)]  # another thread may be saving
        if has_unexpected:
            self._insert_unexpected()

    def _follow(self, position: int) -> None:
        """Backward is at a position of the order: what comes after it is read next.

        A single activation that comes before its turn, such as a mask that the last layer shares with the
        first, does not mean that all between are left out.
        """
        self._pass = self._expected[position][1]
        given_up = self._window.stats.given_up
        is_next = position <= self._next or position == self._last + 1 or self._last < 0
        self._last = position
        if (position >= self._next and is_next) or given_up != self._given_up:
            self._given_up = given_up
            self._next = position + 1

    def _insert_unexpected(self) -> None:
        """Expect what the order does not have yet: of each micro-batch after what was saved later."""
        placed = [((place, 0), expected) for place, expected in enumerate(self._expected)]
        later: dict[int, int] = {}  # of each micro-batch, where in the order what was saved later is
        for number, key in enumerate(reversed(list(self._refs)), 1):
            position = self._position.get(key)
            if position is not None:
                later[key.scope.micro_batch] = position
                continue
            place = later.get(key.scope.micro_batch, -1)
            passes = self._passes if place < 0 else self._expected[place][1]
            placed.append(((place, number), (key, passes)))
        placed.sort()
        last = self._expected[self._last] if self._last >= 0 else None
        self._expect([expected for _, expected in placed])
        if last is not None:
            self._last, self._pass = self._position[last[0]], last[1]

    # ---- what was used, for the meter of memory ---------------------------------------------------

    @property
    def uses(self) -> int:
        """How many activations backward has used in this step."""
        return len(self._recorded)

    def used_bytes(self, scope: ScopeKey, since: int, until: int) -> int:
        """Return bytes of a scope that backward has used from one number of :attr:`uses` to another.

        Bytes that were found in memory do not count: the offloader still has them.
        """
        used = (self._refs.get(key) for key, _ in self._recorded[since:until] if key.scope == scope)
        return sum(ref.nbytes for ref in used if ref is not None and not (ref.charged or ref.settled))
