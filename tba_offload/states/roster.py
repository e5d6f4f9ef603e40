"""Which parameter belongs to which sub-group, kept up with the parameter groups of the optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tba_offload.states.away import is_away
from tba_offload.states.home import Home
from tba_offload.states.incoming import Incoming
from tba_offload.states.layout import travels
from tba_offload.states.pieces import (
    SLICE,
    Piece,
    can_be_cut,
    gathered,
    is_elementwise,
    parameters_of,
    pieces_of,
)
from tba_offload.states.shards import local
from tba_offload.states.spread import evenly
from tba_offload.states.subgroup import USUAL, SubGroup

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tba_offload.states.home import Homes
    from tba_offload.states.masters import Masters


class Roster:
    """The sub-groups of one optimizer.

    How many bytes of states a parameter has is known after its first update only. So in each parameter group
    the first ones go alone, and tell how large the sub-groups of the others may be.

    Args:
        optimizer: The optimizer.
        homes: What the homes of sub-groups share.
        masters: The master copies among its parameters, which lie in sub-groups before they have states.
        most: Bytes of states in a sub-group; one of a single piece may have more.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, homes: Homes, masters: Masters, most: int) -> None:
        self._optimizer = optimizer
        self._homes = homes
        self._masters = masters
        self._most = most
        self._sliced = is_elementwise(optimizer)
        self._ratios: dict[int, float] = {}
        self._members: dict[torch.Tensor, tuple[int, int]] = {}
        self._numbers: dict[torch.Tensor, int] = {}
        self.groups: list[SubGroup] = []

    @property
    def spread(self) -> list[SubGroup]:
        """The sub-groups that have states, in the order in which they leave memory.

        However many have left, they lie evenly among the others in the line of an update: while those that
        stay are updated, the next ones are read and the last ones written.
        """
        groups = [group for group in self.groups if group.layout is not None]
        return [groups[place] for place in evenly(len(groups))]

    def outdated(self) -> list[SubGroup]:
        """Get the sub-groups that hold a parameter which left its parameter group or can be cut no more."""
        now = self._now()
        self._numbers = {each: number for number, each in enumerate(parameters_of(self._optimizer))}
        gone = {each for each, place in self._members.items() if now.get(each) != place}
        cut = {piece.parameter for group in self.groups for piece in group.pieces if not piece.is_whole}
        gone |= {parameter for parameter in cut if not self._can_be_cut(parameter)}
        if not gone:
            return []
        return self.with_slices(
            [group for group in self.groups if any(piece.parameter in gone for piece in group.pieces)]
        )

    def with_any(self, parameters: set[torch.Tensor]) -> list[SubGroup]:
        """Return the sub-groups that hold any of some parameters."""
        return [
            group for group in self.groups if any(piece.parameter in parameters for piece in group.pieces)
        ]

    def with_slices(self, groups: Sequence[SubGroup]) -> list[SubGroup]:
        """Return the same sub-groups, and all others with slices of parameters that have slices in these."""
        found = set(groups)
        while True:
            cut = {piece.parameter for group in found for piece in group.pieces if not piece.is_whole}
            if not cut:
                return list(groups)
            more = {group for group in self.groups if any(piece.parameter in cut for piece in group.pieces)}
            if more <= found:
                return [group for group in self.groups if group in found]
            found |= more

    def halves(self) -> list[torch.Tensor]:
        """Parameters of which some slices have states and others none: a first update ended between them."""
        keys: dict[torch.Tensor, set[frozenset[str]]] = {}
        for group in self.groups:
            for piece in group.pieces:
                if not piece.is_whole:
                    keys.setdefault(piece.parameter, set()).add(frozenset(group.keys_of(piece)))
        return [parameter for parameter, found in keys.items() if len(found) > 1]

    def remove(self, groups: Iterable[SubGroup]) -> None:
        """Forget sub-groups whose states are back in memory; their parameters count as new ones."""
        for group in groups:
            group.release()
            self.groups.remove(group)
            for piece in group.pieces:
                self._members.pop(piece.parameter, None)

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

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return a parameter by its number, as ``state_dict`` counts them."""
        return f"parameter {self._numbers.get(parameter)}"

    def arrivals(self, number: int, parameters: Sequence[torch.Tensor]) -> Iterator[SubGroup]:
        """Make sub-groups of parameters, each of which is updated before the next is asked for.

        Args:
            number: The number of their parameter group.
            parameters: The parameters, in its order.
        """
        yield from self._add_first(number, parameters)
        yield from self.add(number, [each for each in parameters if each not in self._members])

    def _add_first(self, number: int, parameters: Sequence[torch.Tensor]) -> list[SubGroup]:
        """Make sub-groups of the first parameters only, or of all if the size of states is known."""
        count = 0
        for place, parameter in enumerate(parameters, 1):
            count += parameter.numel()
            if count >= SLICE and number not in self._ratios:
                return self.add(number, parameters[:place])
        return self.add(number, parameters)

    def add(self, number: int, parameters: Sequence[torch.Tensor]) -> list[SubGroup]:
        """Make sub-groups of parameters.

        Args:
            number: The number of their parameter group.
            parameters: The parameters, in its order.
        """
        usual = USUAL + any(each in self._masters for each in parameters)
        most = max(int(self._most / self._ratios.get(number, usual)), 1)
        pieces = [
            piece
            for each in parameters
            for piece in pieces_of(each, most, sliced=self._sliced and self._can_be_cut(each))
        ]
        made = [
            SubGroup(number, some, Home(self._homes, self._name(some))) for some in gathered(pieces, most)
        ]
        self._members.update({each: (number, each.numel()) for each in parameters})
        self.groups += made
        self.groups.sort(key=self._rank)
        return made

    def learn(self, group: SubGroup) -> None:
        """Take over how many bytes of states a byte of parameters has, from a sub-group that has them."""
        # States of single numbers stay: they say nothing of those of others.
        nbytes = sum(piece.nbytes for piece in group.pieces if piece.parameter.numel() > 1)
        if group.number not in self._ratios and nbytes and not group.is_new:
            states = sum(place.nbytes for place in group.layout.places) if group.layout else 0
            self._ratios[group.number] = max(states / nbytes, 1 / 16)

    def learn_of(self, number: int, parameters: Iterable[torch.Tensor]) -> None:
        """Likewise, from states that lie in memory."""
        having = [each for each in parameters if self._optimizer.state.get(each) and each.numel() > 1]
        nbytes = sum(local(each).nbytes for each in having)
        if number in self._ratios or not nbytes:
            return
        states = sum(
            local(value).nbytes
            for each in having
            for value in self._optimizer.state[each].values()
            if isinstance(value, Incoming) or travels(value, each)
        )
        states += sum(each.nbytes for each in having if each in self._masters)
        self._ratios[number] = max(states / nbytes, 1 / 16)

    def _can_be_cut(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter, what it is copied to and its states can be cut alike."""
        states = self._optimizer.state.get(parameter, {}).values()
        return (
            can_be_cut(parameter)
            and self._masters.can_be_cut(parameter)
            and all(_is_cut_alike(value, parameter) for value in states)
        )

    def _now(self) -> dict[torch.Tensor, tuple[int, int]]:
        return {
            parameter: (number, parameter.numel())
            for number, group in enumerate(self._optimizer.param_groups)
            for parameter in group["params"]
        }

    def _rank(self, group: SubGroup) -> tuple[int, int]:
        first = group.pieces[0]
        return self._numbers.get(first.parameter, len(self._numbers)), first.start

    def _name(self, pieces: Sequence[Piece]) -> str:
        numbers = self._numbers
        first, last = numbers.get(pieces[0].parameter), numbers.get(pieces[-1].parameter)
        return f"parameter {first}" if first == last else f"parameters {first} to {last}"


def _is_cut_alike(state: object, parameter: torch.Tensor) -> bool:
    """Whether a state is cut with its parameter, or is a number, of which each slice has a copy."""
    value = state.value if isinstance(state, Incoming) else state
    if not isinstance(value, torch.Tensor) or value.numel() <= 1:
        return True
    is_taken = isinstance(state, Incoming) or is_away(value) or travels(value, parameter)
    return is_taken and value.shape == parameter.shape
