"""A sub-group: pieces that are updated together, and whose states travel as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tba_offload.states.layout import Layout
from tba_offload.states.masters import MASTER
from tba_offload.states.shards import local

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    import torch

    from tba_offload.states.home import Home
    from tba_offload.states.layout import Place
    from tba_offload.states.pieces import Piece

USUAL = 2.0
"""Bytes of states for one byte of a parameter, until an update has told: what Adam has."""


class SubGroup:
    """Pieces of one parameter group.

    Args:
        number: The number of the parameter group.
        pieces: The pieces.
        home: Where their states live between updates.

    Attributes:
        layout: Where each state lies; ``None`` before the first update that made some.
    """

    def __init__(self, number: int, pieces: Sequence[Piece], home: Home) -> None:
        self.number = number
        self.pieces = tuple(pieces)
        self.home = home
        self.layout: Layout | None = None
        self._keys: dict[Piece, set[str]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return 0 if self.layout is None else self.layout.nbytes

    @property
    def is_new(self) -> bool:
        """Whether nothing but master copies lies there: the next update may give it more bytes."""
        return self.layout is not None and self.layout.keys == {MASTER}

    @property
    def room(self) -> int:
        """Bytes that its slot needs, those of states included that are to be expected."""
        return int(self.nbytes * (1 + USUAL)) if self.is_new else self.nbytes

    @property
    def has_gradient(self) -> bool:
        """Whether an update would change it."""
        return any(piece.parameter.grad is not None for piece in self.pieces)

    def keys_of(self, piece: Piece) -> AbstractSet[str]:
        """Return the names of the states of a piece that travel."""
        return self._keys.get(piece, frozenset())

    @property
    def places(self) -> tuple[Place, ...]:
        """Where its states lie in the bytes that travel; empty before the first update."""
        return () if self.layout is None else self.layout.places

    def release(self) -> None:
        """Give all extents back."""
        self.home.release()

    def views(self, flat: torch.Tensor) -> dict[Piece, dict[str, torch.Tensor]]:
        """Its states as views of its bytes, piece by piece."""
        found: dict[Piece, dict[str, torch.Tensor]] = {}
        for place in self.places:
            found.setdefault(place.piece, {})[place.key] = place.wrapped(place.view(flat))
        return found

    def lay_out(self, states: Mapping[Piece, Mapping[str, Any]]) -> bool:
        """Plan the places of states; False if none of them travels."""
        layout = Layout.of(states)
        self.layout = layout if layout.places else None
        self._keys = {}
        for place in layout.places:
            self._keys.setdefault(place.piece, set()).add(place.key)
        return self.layout is not None

    def fill(self, flat: torch.Tensor, states: Mapping[Piece, Mapping[str, Any]]) -> None:
        """Copy all states to their places."""
        for place in self.places:
            place.view(flat).copy_(local(states[place.piece][place.key]))
