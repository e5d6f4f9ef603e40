"""An order of places in which the first ones, however many, lie evenly among all."""

from __future__ import annotations


def evenly(count: int) -> list[int]:
    """Return the places 0 to ``count`` - 1 in that order.

    By their bits in the reverse order (van der Corput).
    """
    bits = max(count - 1, 1).bit_length()
    return sorted(range(count), key=lambda place: int(f"{place:0{bits}b}"[::-1], 2))
