"""Which activations of a layer, or weights of a model, stay where only a share of the bytes travels."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Staying:
    """Decides of one activation or weight after the other, in their order, whether it stays.

    They stay whole, so no byte is copied, and nothing has to be known of those to come. Those that travel lie
    as evenly between the others as their sizes allow, so that a drive is not given much at once. The share is
    met to within half of the largest.

    Args:
        percent: Of the bytes, how many travel.
    """

    __slots__ = ("_owed", "_percent")

    def __init__(self, percent: int) -> None:
        self._percent = 100 - percent
        self._owed = 0  # hundredths of bytes that should have stayed by now, less those that have

    def stays(self, nbytes: int) -> bool:
        """Whether the next one stays.

        Args:
            nbytes: Its size; 0 of one that counts neither way.
        """
        self._owed += self._percent * nbytes
        if not nbytes or self._owed <= 50 * nbytes:
            return False
        self._owed -= 100 * nbytes
        return True


def staying(sizes: Iterable[int], percent: int) -> frozenset[int]:
    """Numbers of the activations of a layer that stay.

    Args:
        sizes: Bytes of each, in the order of saving.
        percent: Of the bytes, how many travel.
    """
    rule = Staying(percent)
    return frozenset(number for number, nbytes in enumerate(sizes) if rule.stays(nbytes))
