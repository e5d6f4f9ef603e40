"""The order in which sub-groups are updated, and so the order in which they are needed again."""

from __future__ import annotations

from itertools import filterfalse, islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tba_offload.states.subgroup import SubGroup

_FAR = 2**62


class Line:
    """Sub-groups in the order of one update.

    Args:
        turns: Whether the next update goes in the reverse order. What was updated last is still in its slot
            then, and needs neither be written nor read.

    Attributes:
        turns: As given.
    """

    def __init__(self, *, turns: bool) -> None:
        self.turns = turns
        self._is_reversed = False
        self._groups: list[SubGroup] = []
        self._places: dict[SubGroup, int] = {}
        self._at = -1
        self._next: Sequence[SubGroup] = ()

    def __len__(self) -> int:
        return len(self._groups)

    def begin(self, done: Sequence[SubGroup], groups: Sequence[SubGroup]) -> Iterator[SubGroup]:
        """Lines sub-groups up, after those that are updated already; reaches one after the other."""
        self._line_up([*done, *(reversed(groups) if self._is_reversed else groups)])
        for group in self._groups[len(done) :]:
            self.reach(group)
            yield group

    def reach(self, group: SubGroup) -> None:
        """Record that a sub-group is updated now; a new one is the last in line."""
        if group not in self._places:
            self._places[group] = len(self._groups)
            self._groups.append(group)
        self._at = self._places[group]

    def end(self) -> None:
        """All are updated; the next update turns round, or may begin in the same order at any time."""
        if self.turns:
            self._is_reversed = not self._is_reversed
        else:
            self._at = -1

    def remove(self, groups: Iterable[SubGroup]) -> None:
        """Forget sub-groups."""
        gone = set(groups)
        self._line_up([group for group in self._groups if group not in gone])

    def next(self, count: int, stays: Callable[[SubGroup], bool]) -> Sequence[SubGroup]:
        """Those that are updated next and do not stay in memory, ``count`` at most; they keep their slots."""
        upcoming = islice(self._groups, self._at + 1, None)
        # A generator that is left half-way would swallow an interrupt that comes while it is closed.
        self._next = list(islice(filterfalse(stays, upcoming), count))
        return self._next

    def needs_more_than(self, held: Iterable[SubGroup]) -> bool:
        """Whether some that are still to be updated are not among these."""
        upcoming = len(self._groups) - self._at - 1
        return upcoming > sum(self._places.get(group, -1) > self._at for group in held)

    def next_use(self, group: SubGroup) -> int:
        """When a sub-group is needed again: in this update, or later, in the order of the next one.

        An order that never turns is another matter: there the first to make room is what the last update has
        left in memory, then what this one updated first, although both are needed before what was updated
        last. It costs as many reads as there are slots. But their writes are over, whereas each read into the
        slot of what was updated last would wait for that write first, and none would run beside another.
        """
        place = self._places.get(group)
        if place is None:
            return 2 * _FAR
        if place == self._at:
            return -1  # it is being updated
        if place < self._at:
            return _FAR - place
        return place if self.turns or group in self._next else _FAR + place

    def _line_up(self, groups: list[SubGroup]) -> None:
        self._groups, self._next = groups, ()
        self._places = {group: place for place, group in enumerate(groups)}
