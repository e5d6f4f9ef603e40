"""Sub-groups: pieces whose states lie packed in one slot and travel as one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.device.ranges import CACHE_LINE
from tba_offload.states.away import is_away
from tba_offload.states.home import Home
from tba_offload.states.masters import MASTER
from tba_offload.states.pieces import (
    SLICE,
    Piece,
    can_be_cut,
    gathered,
    is_elementwise,
    local,
    parameters_of,
    pieces_of,
    travels,
    wrap_of,
)
from tba_offload.store.extents import BLOCK, round_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from tba_offload.states.home import Homes
    from tba_offload.states.masters import Masters
    from tba_offload.states.pieces import Wrap

Entry = dict[str, Any]
"""The states of one parameter by their names, as in ``optimizer.state[parameter]``."""

USUAL = 2.0
"""Bytes of states for one byte of a parameter, until an update has told: what Adam has."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """A state of a checkpoint, which ``load_state_dict`` passes on as it passes on what is no tensor.

    Attributes:
        value: The state, wherever the checkpoint has it.
        dtype: The data type that the optimizer wants it in.
    """

    value: torch.Tensor
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Place:
    """Where one state of one piece lies in the bytes of its sub-group.

    Attributes:
        piece: Whose state it is.
        key: Its name in ``state[parameter]``.
        start: Its first byte.
        size: Of the state of the piece; of a slice it is 1-D.
        stride: Likewise, elements.
        dtype: Likewise.
        wrap: Makes the state of its bytes, where that is a distributed tensor.
    """

    piece: Piece
    key: str
    start: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    wrap: Wrap | None

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return self.size.numel() * self.dtype.itemsize

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the bytes of the state in those of its sub-group, with its size and data type."""
        part = flat[self.start : self.start + self.nbytes].view(self.dtype)
        return part.as_strided(self.size, self.stride)

    def wrapped(self, value: torch.Tensor) -> torch.Tensor:
        """Return the state whose local bytes these are."""
        return value if self.wrap is None else self.wrap(value)


class SubGroup:
    """Pieces of one parameter group: some parameters, or one slice.

    Args:
        number: The number of the parameter group.
        pieces: The pieces.
        home: Where their states live between updates.

    Attributes:
        places: Where their states lie; empty before the first update that made some.
        nbytes: Bytes that travel, padded to blocks: extents are cut at multiples of them, for direct I/O.
    """

    def __init__(self, number: int, pieces: Sequence[Piece], home: Home) -> None:
        self.number = number
        self.pieces = tuple(pieces)
        self.home = home
        self.places: tuple[Place, ...] = ()
        self.nbytes = 0
        self._keys: dict[Piece, set[str]] = {}

    @property
    def is_cut(self) -> bool:
        """Whether it is a slice of a parameter."""
        return not self.pieces[0].is_whole

    @property
    def is_new(self) -> bool:
        """Whether nothing but master copies lies there: the next update may give it more bytes."""
        return bool(self.places) and all(place.key == MASTER for place in self.places)

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

    def views(self, flat: torch.Tensor) -> dict[Piece, dict[str, torch.Tensor]]:
        """Return its states as views of its bytes, piece by piece."""
        found: dict[Piece, dict[str, torch.Tensor]] = {}
        for place in self.places:
            found.setdefault(place.piece, {})[place.key] = place.wrapped(place.view(flat))
        return found

    def lay_out(self, states: Mapping[Piece, Mapping[str, Any]]) -> bool:
        """Plan the places of states, aligned as PyTorch aligns tensors; return False if none travels."""
        found = [
            (piece, key, local(value), wrap_of(value))
            for piece, entry in states.items()
            for key, value in entry.items()
            if travels(value, piece.parameter)
        ]
        starts, end = side_by_side(own.nbytes for _, _, own, _ in found)
        self.places = tuple(
            Place(piece, key, start, own.shape, own.stride(), own.dtype, wrap)
            for start, (piece, key, own, wrap) in zip(starts, found, strict=True)
        )
        self.nbytes = round_up(end, BLOCK)
        self._keys = {}
        for place in self.places:
            self._keys.setdefault(place.piece, set()).add(place.key)
        return bool(found)

    def fill(self, flat: torch.Tensor, states: Mapping[Piece, Mapping[str, Any]]) -> None:
        """Copy all states to their places."""
        for place in self.places:
            place.view(flat).copy_(local(states[place.piece][place.key]))


class Groups:
    """The sub-groups of one optimizer, kept up with its parameter groups.

    How many bytes of states a parameter has is known after its first update only. So in each parameter group
    the first parameters go alone, and tell how large the sub-groups of the others may be.

    Args:
        optimizer: The optimizer.
        homes: What the homes of sub-groups share.
        masters: The master copies among its parameters, which lie in sub-groups before they have states.
        names: Names of parameters in the model, as far as it is known.
        most: Bytes of states in a sub-group; one of a single piece may have more.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        homes: Homes,
        masters: Masters,
        names: Mapping[torch.Tensor, str],
        most: int,
    ) -> None:
        self._optimizer = optimizer
        self._homes = homes
        self._masters = masters
        self._names = names
        self._most = most
        self._sliced = is_elementwise(optimizer)
        self._ratios: dict[int, float] = {}
        self._of: dict[torch.Tensor, list[SubGroup]] = {}
        self._members: dict[torch.Tensor, tuple[int, int]] = {}
        self._numbers: dict[torch.Tensor, int] = {}
        self._all: list[SubGroup] = []

    def __iter__(self) -> Iterator[SubGroup]:
        """Yield all in the order of their parameters."""
        return iter(tuple(self._all))

    @property
    def spread(self) -> list[SubGroup]:
        """The sub-groups that have states, in the order in which they leave memory.

        However many have left, they lie evenly among the others in the order of an update (van der Corput):
        while sub-groups that stay are updated, the next ones are read and the last ones written.
        """
        groups = [group for group in self._all if group.places]
        bits = max(len(groups) - 1, 1).bit_length()
        return [
            groups[at] for at in sorted(range(len(groups)), key=lambda at: int(f"{at:0{bits}b}"[::-1], 2))
        ]

    @property
    def widest(self) -> tuple[str, int]:
        """A parameter with more states than ``sub_group_bytes``, and their bytes; ("", 0) if none has."""
        alone = [group for group in self._all if len(group.pieces) == 1 and group.nbytes > self._most]
        group = max(alone, key=lambda each: each.nbytes, default=None)
        return ("", 0) if group is None else (self.name_of(group.pieces[0].parameter), group.nbytes)

    def holding(self, parameters: Iterable[torch.Tensor]) -> list[SubGroup]:
        """Return the sub-groups that hold any of some parameters, with all slices of each."""
        return list(dict.fromkeys(group for each in parameters for group in self._of.get(each, ())))

    def with_slices(self, groups: Iterable[SubGroup]) -> list[SubGroup]:
        """Return the same sub-groups, and all others with slices of parameters of these."""
        return self.holding(piece.parameter for group in groups for piece in group.pieces)

    # ---- what was done to the optimizer ------------------------------------------------------------

    def outdated(self) -> list[SubGroup]:
        """Return the sub-groups of a parameter that has left its parameter group or can be cut no more."""
        now = self._now()
        self._numbers = {each: number for number, each in enumerate(parameters_of(self._optimizer))}
        gone = [each for each, place in self._members.items() if now.get(each) != place]
        cut = [groups[0].pieces[0].parameter for groups in self._of.values() if groups[0].is_cut]
        return self.holding([*gone, *(parameter for parameter in cut if not self._can_be_cut(parameter))])

    def newcomers(self, *, with_gradients: bool = False) -> dict[int, list[torch.Tensor]]:
        """Return the parameters that are in no sub-group yet, by the number of their parameter group.

        Args:
            with_gradients: Only those that have one.
        """
        found: dict[int, list[torch.Tensor]] = {}
        for parameter, (number, _) in self._now().items():
            if parameter not in self._members and not (with_gradients and parameter.grad is None):
                found.setdefault(number, []).append(parameter)
        return found

    def half_done(self) -> list[SubGroup]:
        """Return the slices of parameters of which some have states and others none.

        A first update ended between them.
        """
        cut = [groups for groups in self._of.values() if groups[0].is_cut]
        return [
            group for groups in cut if len({bool(each.places) for each in groups}) > 1 for group in groups
        ]

    def arrivals(self, number: int, parameters: Sequence[torch.Tensor]) -> Iterator[SubGroup]:
        """Yield new sub-groups of parameters, each of which is updated before the next is asked for.

        Args:
            number: The number of their parameter group.
            parameters: The parameters, in its order.
        """
        counts = accumulate(each.numel() for each in parameters)
        first = sum(count < SLICE for count in counts) + 1 if number not in self._ratios else len(parameters)
        yield from self.add(number, parameters[:first])
        yield from self.add(number, parameters[first:])

    def add(self, number: int, parameters: Sequence[torch.Tensor]) -> list[SubGroup]:
        """Make sub-groups of parameters.

        Args:
            number: The number of their parameter group.
            parameters: The parameters, in its order.
        """
        made: list[SubGroup] = []
        for is_cut, some in groupby(parameters, lambda each: self._is_cut(number, each)):
            for each in some if is_cut else ():
                most = self._most * each.nbytes // self._states_bytes(number, each)
                made += [self._made(number, (piece,)) for piece in pieces_of(each, most)]
            wholes = (Piece(each, 0, each.numel()) for each in some)
            by_size = gathered(wholes, self._most, lambda each: self._states_bytes(number, each.parameter))
            made += [self._made(number, pieces) for pieces in by_size]
        self._members.update({each: (number, each.numel()) for each in parameters})
        self._all = sorted([*self._all, *made], key=self._rank)
        return made

    def remove(self, groups: Iterable[SubGroup]) -> None:
        """Forget sub-groups whose states are back in memory; their parameters count as new ones."""
        gone = set(groups)
        self._all = [group for group in self._all if group not in gone]
        for group in gone:
            group.home.release()
            for piece in group.pieces:
                self._members.pop(piece.parameter, None)
                self._of.pop(piece.parameter, None)

    def learn(self, group: SubGroup) -> None:
        """Note how many bytes of states a byte of parameters has, from a sub-group that has them."""
        # States of single numbers stay: they say nothing of those of others.
        nbytes = sum(piece.nbytes for piece in group.pieces if piece.parameter.numel() > 1)
        if group.number not in self._ratios and not group.is_new and nbytes:
            states = sum(place.nbytes for place in group.places if place.key != MASTER)
            self._ratios[group.number] = max(states / nbytes, 1 / 16)

    def _states_bytes(self, number: int, parameter: torch.Tensor) -> int:
        """Return the bytes of what travels for a parameter, as far as they are known; at least one."""
        own: int = local(parameter).nbytes
        known: int = sum(
            value.value.numel() * value.dtype.itemsize if isinstance(value, Incoming) else local(value).nbytes
            for value in self._optimizer.state.get(parameter, {}).values()
            if isinstance(value, Incoming) or travels(value, parameter)
        )
        states: int = known or int(own * self._ratios.get(number, USUAL))
        return max(states + own * (parameter in self._masters), 1)

    # ---- names -------------------------------------------------------------------------------------

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return a parameter's name in the model; its number, as ``state_dict`` counts, if none is known."""
        known = self._names.get(parameter) or self._names.get(self._masters.copy_of(parameter))
        return known or f"parameter {self._numbers.get(parameter)}"

    def _made(self, number: int, pieces: Sequence[Piece]) -> SubGroup:
        first, last = (self.name_of(pieces[at].parameter) for at in (0, -1))
        group = SubGroup(number, pieces, Home(self._homes, first if first == last else f"{first} to {last}"))
        for piece in pieces:
            self._of.setdefault(piece.parameter, []).append(group)
        return group

    # ------------------------------------------------------------------------------------------------

    def _is_cut(self, number: int, parameter: torch.Tensor) -> bool:
        return self._can_be_cut(parameter) and self._states_bytes(number, parameter) > self._most

    def _can_be_cut(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter, what it is copied to and its states can be cut alike."""
        states = self._optimizer.state.get(parameter, {}).values()
        return (
            self._sliced
            and can_be_cut(parameter)
            and self._masters.can_be_cut(parameter)
            and all(_is_cut_alike(value, parameter) for value in states)
        )

    def _now(self) -> dict[torch.Tensor, tuple[int, int]]:
        groups = enumerate(self._optimizer.param_groups)
        return {each: (number, each.numel()) for number, group in groups for each in group["params"]}

    def _rank(self, group: SubGroup) -> tuple[int, int]:
        first = group.pieces[0]
        return self._numbers.get(first.parameter, len(self._numbers)), first.start


def _is_cut_alike(state: object, parameter: torch.Tensor) -> bool:
    """Whether a state is cut with its parameter, or is a number, of which each slice has a copy."""
    value = state.value if isinstance(state, Incoming) else state
    if not isinstance(value, torch.Tensor) or value.numel() <= 1:
        return True
    is_taken = isinstance(state, Incoming) or is_away(value) or travels(value, parameter)
    return is_taken and value.shape == parameter.shape


def side_by_side(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return the offset of each of consecutive tensors of these sizes, and the end of the last.

    Each begins at a cache line, as PyTorch's own do.
    """
    *starts, end = accumulate((round_up(size, CACHE_LINE) for size in sizes), initial=0)
    return starts, end
