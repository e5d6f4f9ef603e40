"""In which order transfers end that were asked for in another, maybe."""

from __future__ import annotations


class Ends:
    """The order in which transfers of one direction end; those that end tell it, from any thread."""

    def __init__(self) -> None:
        self._order: list[int] = []

    def __len__(self) -> int:
        return len(self._order)

    def note(self, number: int) -> None:
        """Record that that transfer ends, numbered from 0 in the order of asking."""
        self._order.append(number)

    def places(self) -> int:
        """Return the most that ended before one that was asked for earlier: 0 if all ended in order."""
        order = self._order
        return max(
            (sum(later > number for later in order[:at]) for at, number in enumerate(order)), default=0
        )
