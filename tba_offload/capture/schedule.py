"""The order in which backward uses activations, and prefetch in this order.

Backward uses activations in the same order in each step, also with gradient accumulation and with the
pipeline schedules 1F1B and interleaved. Prefetch therefore follows the order that the last step recorded.
Activations without a recorded position, for example in the first step, are expected in the reverse order of
saving.

If a forward pass comes next, fewer activations are prefetched, because the forward pass needs room in the
in-flight window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from tba_offload.capture.trace import ActivationKey, ScopeKey
    from tba_offload.transfer.offloader import Offloader
    from tba_offload.transfer.saved import SavedRef


class PrefetchSchedule:
    """The order in which backward is expected to use activations, and the position of backward in this order.

    Args:
        offloader: Reads activations while the in-flight window has room.

    Attributes:
        saved: Function to call with each new saved storage.
    """

    def __init__(self, offloader: Offloader) -> None:
        self._offloader, self._window = offloader, offloader.window
        self._new: list[SavedRef] = []
        self.saved = self._new.append
        self._recorded: list[tuple[ActivationKey, int]] = []
        self.begin_step()

    def begin_step(self) -> None:
        """Start a step. The expected order is the order that the last step recorded."""
        self._refs: dict[ActivationKey, SavedRef] = {}
        self._new.clear()
        self._expect(self._recorded)
        self._has_order = bool(self._recorded)
        self._recorded = []
        self._passes = 0  # backward passes of this step that a forward pass followed
        self._given_up = 0
        self._in_backward = False

    def _expect(self, order: list[tuple[ActivationKey, int]]) -> None:
        self._expected = order  # each activation with the number of its backward pass
        self._position = {key: position for position, (key, _) in enumerate(order)}
        self._next, self._last, self._pass = 0, -1, 0

    def abandon_step(self) -> None:
        """Discard the records of a failed step. The next step expects the same order as the failed step."""
        self._refs.clear()
        self._new.clear()
        self._recorded = self._expected

    def used(self, key: ActivationKey) -> None:
        """Record the first use of an activation in backward, and prefetch the next activations."""
        if self._new:
            self._note_saved()
        begins, self._in_backward = not self._in_backward, True
        self._recorded.append((key, self._passes))
        position = self._position.get(key)
        if position is not None:
            self._follow(position)
        # When backward begins, cancel writes of activations that are still in memory, even if the window is
        # full.
        has_room = begins or self._window.in_flight <= self._window.fills_below
        if has_room and self._next < len(self._expected):
            self._offloader.prefetch(self)

    def reached(self) -> None:
        """Prefetch activations when backward reaches a layer, even if the layer has saved no activation."""
        if self._new:
            self._note_saved()
        has_room = not self._in_backward or self._window.in_flight <= self._window.fills_below
        # Before the first use, only a recorded order shows which micro-batch comes first.
        if self._has_order and has_room and self._next < len(self._expected):
            self._offloader.prefetch(self)

    def __iter__(self) -> Self:
        self._was_taken = False
        return self

    def __next__(self) -> tuple[SavedRef, bool]:
        """Return the next activation to prefetch, and whether a forward pass comes before its use.

        If a loop over the schedule stops early, the next loop returns the last activation again. The schedule
        is not a generator, because Python drops a ``KeyboardInterrupt`` that arrives while a generator is
        closed.
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
        """Add the storages that were saved since backward last used an activation.

        With several micro-batches, prefetch skips activations that are not saved yet. When a skipped
        activation is saved, prefetch returns to the position of this activation.
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
        del self._new[: len(new)]  # another thread may append to the list at the same time
        if has_unexpected:
            self._insert_unexpected()

    def _follow(self, position: int) -> None:
        """Set the position of backward in the expected order, and let prefetch continue after this position.

        If backward uses an activation much earlier than expected, prefetch continues where it was. For
        example, the last layer may use a mask of the first layer.
        """
        self._pass = self._expected[position][1]
        given_up = self._window.stats.given_up
        is_next = position <= self._next or position == self._last + 1 or self._last < 0
        self._last = position
        if (position >= self._next and is_next) or given_up != self._given_up:
            self._given_up = given_up
            self._next = position + 1

    def _insert_unexpected(self) -> None:
        """Insert activations without a recorded position into the expected order.

        Backward uses the activations of a micro-batch in the reverse order of saving. An activation is
        therefore inserted after the activation that the same micro-batch saved next.
        """
        placed = [((place, 0), expected) for place, expected in enumerate(self._expected)]
        later: dict[int, int] = {}  # for each micro-batch, the position of the activation that was saved next
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

    # ---- uses, for the memory meter ---------------------------------------------------------------

    @property
    def uses(self) -> int:
        """Number of activations that backward has used in this step."""
        return len(self._recorded)

    def used_bytes(self, scope: ScopeKey, since: int, until: int) -> int:
        """Return the bytes of activations that one run of a layer saved and that backward used in a period.

        Activations that the offloader still counts as in memory are left out.

        Args:
            scope: The run of the layer.
            since: Value of :attr:`uses` at the start of the period.
            until: Value of :attr:`uses` at the end of the period.
        """
        used = (self._refs.get(key) for key, _ in self._recorded[since:until] if key.scope == scope)
        return sum(ref.nbytes for ref in used if ref is not None and not (ref.charged or ref.settled))
