"""The versions of other packages that this version was tested with."""

from __future__ import annotations

import re
from typing import NamedTuple


class Tested(NamedTuple):
    """Versions that the tests have run with.

    Attributes:
        first: The earliest, as far as it matters.
        last: The latest, likewise.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]

    def covers(self, version: str) -> bool:
        """Whether a version lies within."""
        found = numbers_of(version)
        return self.first <= found[: len(self.first)] and found[: len(self.last)] <= self.last

    def __str__(self) -> str:
        first, last = (".".join(map(str, each)) for each in self)
        return first if first == last else f"{first} to {last}"


TESTED = {
    "python": Tested((3, 11), (3, 13)),
    "torch": Tested((2, 10), (2, 15)),
    "kvikio": Tested((26, 10), (26, 10)),
}
"""Versions of the combinations that the tests run with; kvikio without a GPU, on a driver of host memory."""


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: ``"2.13.0+cpu"`` is (2, 13, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found is not None else ()
