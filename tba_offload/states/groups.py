"""Sub-groups: parameters whose states lie packed in one slot and travel as one."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.device import CACHE_LINE
from tba_offload.errors import UnsupportedError
from tba_offload.states.away import AwayMaster, is_away
from tba_offload.states.home import Home
from tba_offload.states.parameters import (
    can_be_cut,
    distributed,
    gathered,
    is_distributed,
    local,
    parameters_of,
    spec_of,
    travels,
)
from tba_offload.store.base import BLOCK, round_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tba_offload.states.home import Homes

    States = Mapping[torch.Tensor, Mapping[str, Any]]

Entry = dict[str, Any]
"""The states of one parameter by their names, as in ``optimizer.state[parameter]``."""

MASTER = "tba_offload.master"
"""Name of a master copy among the states of its own: no optimizer has one of that name."""

SLICE = 1024
"""Elements at whose multiples a parameter is cut, so that no kernel meets another alignment or remainder."""

_STATES = 2
"""States of a parameter that are as large as that, before an update has made them: what Adam has."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """A state of a checkpoint, which ``load_state_dict`` passes on as it passes on what is no tensor.

    Attributes:
        value: The state, wherever the checkpoint has it.
    """

    value: torch.Tensor


def held_back(value: Any) -> Any:
    """Return a state of a checkpoint as one that sub-groups bring to the device; a number is itself."""
    is_large = (type(value) is torch.Tensor or is_distributed(value)) and value.numel() > 1
    return Incoming(value) if is_large else value


@dataclass(frozen=True, slots=True)
class Place:
    """Where one state of one parameter lies in the bytes of its sub-group.

    Attributes:
        parameter: Whose state it is.
        key: Its name in ``state[parameter]``.
        start: Its first byte.
        size: Of the state; 1-D for a slice.
        stride: Likewise, elements.
        dtype: Likewise.
        spec: How a distributed tensor is spread, whose part on this rank the state is; else ``None``.
    """

    parameter: torch.Tensor
    key: str
    start: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    spec: Any

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the state in the bytes of its sub-group, of a distributed tensor the part on this rank."""
        end = self.start + self.size.numel() * self.dtype.itemsize
        return flat[self.start : end].view(self.dtype).as_strided(self.size, self.stride)


class SubGroup:
    """Some parameters of one parameter group, or one slice of a large parameter.

    Args:
        number: The number of the parameter group.
        parameters: The parameters.
        home: Where their states live between updates.
        part: The elements of the only parameter that belong to it; ``None`` for whole parameters.

    Attributes:
        elements: How many elements each parameter had when it came here.
        places: Where their states lie; empty before the first update that made some.
        keys: The names of the states that travel, of each parameter that has any.
        nbytes: Bytes that travel, padded to blocks: extents are cut at multiples of them, for direct I/O.
    """

    def __init__(
        self, number: int, parameters: Sequence[torch.Tensor], home: Home, part: slice | None = None
    ) -> None:
        self.number = number
        self.elements = {each: each.numel() for each in parameters}
        self.parameters = tuple(self.elements)
        self.home = home
        self.part = part
        self.places: tuple[Place, ...] = ()
        self.keys: defaultdict[torch.Tensor, set[str]] = defaultdict(set)
        self.nbytes = 0

    @property
    def moving(self) -> list[torch.Tensor]:
        """Its parameters that have gradients, so that an update changes them."""
        return [each for each in self.parameters if each.grad is not None]

    def cut(self, value: Any) -> Any:
        """Return the slice of a tensor of its parameter's shape, 1-D; anything else is itself."""
        if self.part is None or getattr(value, "shape", None) != self.parameters[0].shape:
            return value
        return value.reshape(-1)[self.part]

    def tensor(self, parameter: torch.Tensor, master: torch.Tensor | None) -> torch.Tensor:
        """Return what an update gets as a parameter: itself, or a slice of it.

        Args:
            parameter: The parameter.
            master: The bytes in a slot, if it is a master.
        """
        if self.part is None and master is None:
            return parameter
        made: torch.Tensor = self.cut(parameter.detach()) if master is None else master
        for name, value in vars(parameter).items():  # an optimizer may know a parameter by them
            setattr(made, name, value)
        made.grad = self.cut(parameter.grad)
        return made

    def views(self, flat: torch.Tensor) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Return its states as views of its bytes, parameter by parameter."""
        found: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for place in self.places:
            found.setdefault(place.parameter, {})[place.key] = distributed(place.view(flat), place.spec)
        return found

    def lay_out(self, states: States, bound: States) -> bool:
        """Plan the places of states, aligned as PyTorch aligns tensors; return False if none travels.

        Args:
            states: The states.
            bound: Those that lie in a slot so far.
        """
        views = {id(value) for entry in bound.values() for value in entry.values()}
        found = [
            (parameter, key, local(value), spec_of(value))
            for parameter, entry in states.items()
            for key, value in entry.items()
            if id(value) in views or travels(value, parameter)
        ]
        starts, end = side_by_side(own.nbytes for _, _, own, _ in found)
        self.places = tuple(
            Place(parameter, key, start, own.shape, own.stride(), own.dtype, spec)
            for start, (parameter, key, own, spec) in zip(starts, found, strict=True)
        )
        self.nbytes = round_up(end, BLOCK)
        self.keys.clear()
        for place in self.places:
            self.keys[place.parameter].add(place.key)
        return bool(found)


class Groups:
    """The sub-groups of one optimizer, kept up with its parameter groups, and its master copies.

    A parameter that has more states than a sub-group is cut into slices, where updates of them give the same
    bits.

    Between updates a master has no bytes, and is the same object. An update gets a tensor over the bytes in a
    slot in its place.

    Args:
        optimizer: The optimizer.
        homes: What the homes of sub-groups share.
        masters: Master copies that the optimizer updates, and the parameters of the model, or parts of them,
            that are set to their values.
        names: Names of parameters in the model, as far as it is known.
        most: Bytes of states in a sub-group; one of a single parameter that cannot be cut may have more.

    Attributes:
        optimizer: As given.
        homes: Likewise.
        most: Likewise.
        holding: The sub-group that holds a parameter, or those that hold its slices.

    Raises:
        UnsupportedError: A parameter has another shape than its master.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        homes: Homes,
        masters: Mapping[torch.Tensor, torch.Tensor],
        names: Mapping[torch.Tensor, str],
        most: int,
    ) -> None:
        self.optimizer = optimizer
        self.homes = homes
        own = set(parameters_of(optimizer))
        self._copies = {
            each: copy for each, copy in masters.items() if each in own and travels(each.detach(), each)
        }
        for master, copy in self._copies.items():
            if master.shape != copy.shape:
                raise UnsupportedError(
                    f"a master of {tuple(master.shape)} does not lie in memory like its parameter of "
                    f"{tuple(copy.shape)}; set states.masters to keep"
                )
        self._names = names
        self.most = most
        self.holding: dict[torch.Tensor, list[SubGroup]] = {}
        self._numbers: dict[torch.Tensor, int] = {}
        self._all: list[SubGroup] = []

    def __iter__(self) -> Iterator[SubGroup]:
        """Yield all in the order in which their parameters got states."""
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

    # ---- what was done to the optimizer ------------------------------------------------------------

    def are_current(self) -> bool:
        """Return True if the parameters of all sub-groups are in their parameter groups, as they were."""
        now = {each: n for n, group in enumerate(self.optimizer.param_groups) for each in group["params"]}
        return all(
            now.get(each) == group.number
            and each.numel() == elements
            and (group.part is None or self._can_be_cut(each))
            for group in self._all
            for each, elements in group.elements.items()
        )

    def add(self, wanted: Callable[[torch.Tensor], bool]) -> list[SubGroup]:
        """Make sub-groups of those parameters that are in none yet.

        Args:
            wanted: Says of which of them.
        """
        self._numbers = {each: number for number, each in enumerate(parameters_of(self.optimizer))}
        made: list[SubGroup] = []
        for number, group in enumerate(self.optimizer.param_groups):
            new = [each for each in group["params"] if each not in self.holding and wanted(each)]
            for some in gathered(new, self.most, self._states_bytes):
                names = list(dict.fromkeys(self.name_of(some[at]) for at in (0, -1)))
                for part in self._slices(some[0]) if len(some) == 1 else [None]:
                    made.append(SubGroup(number, some, Home(self.homes, " to ".join(names)), part))
                    for each in some:
                        self.holding.setdefault(each, []).append(made[-1])
        self._all += made
        return made

    def clear(self) -> None:
        """Forget all sub-groups, whose states are back in memory."""
        for group in self._all:
            group.home.release()
        self._all, self.holding = [], {}

    def _slices(self, parameter: torch.Tensor) -> Sequence[slice | None]:
        """Return the elements that each sub-group of a parameter gets; ``[None]`` for a whole one."""
        count, nbytes = parameter.numel(), self._states_bytes(parameter)
        step = max(self.most * count // nbytes // SLICE, 1) * SLICE
        if nbytes <= self.most or count <= step or not self._can_be_cut(parameter):
            return [None]
        starts = range(0, count - 1, step)  # the last has two elements at least: a state of one never travels
        return [slice(start, count if start == starts[-1] else start + step) for start in starts]

    def _can_be_cut(self, parameter: torch.Tensor) -> bool:
        states = self.optimizer.state.get(parameter, {}).values()
        return (
            can_be_cut(self.optimizer, parameter)
            and self._copies.get(parameter, parameter).is_contiguous()
            and all(_is_cut_alike(state, parameter) for state in states)
        )

    def _states_bytes(self, parameter: torch.Tensor) -> int:
        """Return the bytes of what travels for a parameter, as far as they are known; at least one."""
        own: int = local(parameter).nbytes
        known: int = sum(
            value.value.numel() * parameter.itemsize if isinstance(value, Incoming) else local(value).nbytes
            for value in self.optimizer.state.get(parameter, {}).values()
            if isinstance(value, Incoming) or travels(value, parameter)
        )
        return max((known or own * _STATES) + own * (parameter in self._copies), 1)

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return a parameter's name in the model; its number, as ``state_dict`` counts, if none is known."""
        known = self._names.get(parameter) or self._names.get(self._copies.get(parameter, parameter))
        return known or f"parameter {self._numbers.get(parameter)}"

    # ---- masters -----------------------------------------------------------------------------------

    def states_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return what ``optimizer.state`` shows, and the master if it is one, a plain tensor unless away."""
        entry = dict(self.optimizer.state.get(parameter, {}))
        return {**entry, MASTER: parameter.detach()} if parameter in self._copies else entry

    def model_part(self, group: SubGroup, parameter: torch.Tensor) -> torch.Tensor:
        """Return what an update of a sub-group changes of a parameter of the model, on this rank."""
        return group.cut(local(self._copies.get(parameter, parameter).detach()))  # type: ignore[no-any-return]

    def send_away(self, master: torch.Tensor) -> None:
        """Free the memory of a master, whose bytes lie in a slot or at home."""
        if type(master) is not AwayMaster:
            AwayMaster.begin(master, self.name_of(master))


def _is_cut_alike(state: object, parameter: torch.Tensor) -> bool:
    """Whether a state is cut like its parameter, or is a number that all slices share."""
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
