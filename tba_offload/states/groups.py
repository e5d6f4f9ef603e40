"""Sub-groups of parameters. The states of a sub-group share one slot, and are read and written together."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.device import CACHE_LINE
from tba_offload.errors import UnsupportedError
from tba_offload.placements import spread
from tba_offload.states.away import AwayMaster, is_away
from tba_offload.states.home import Home
from tba_offload.states.parameters import (
    can_be_cut,
    distributed,
    gathered,
    is_distributed,
    is_offloadable,
    local,
    parameters_of,
    spec_of,
)
from tba_offload.store.base import BLOCK, round_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tba_offload.states.home import Homes

    States = Mapping[torch.Tensor, Mapping[str, Any]]

Entry = dict[str, Any]
"""The states of one parameter by name, as in ``optimizer.state[parameter]``."""

MASTER = "tba_offload.master"
"""Key under which a master copy is stored among its states. No optimizer uses this key."""

SLICE = 1024
"""Slices of a parameter begin at multiples of this number of elements.

Vectorized kernels therefore split a slice at the same elements as the whole parameter.
"""

_STATES = 2
"""Assumed number of states of a parameter before its first update. Adam has two states per parameter."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """Wrapper of a state from a checkpoint.

    ``Optimizer.load_state_dict`` copies tensors to the device, but does not copy wrapped tensors.

    Attributes:
        value: The state, on the device of the checkpoint.
    """

    value: torch.Tensor


def as_incoming(value: Any) -> Any:
    """Wrap a state from a checkpoint. Return numbers and tensors of one element unchanged."""
    is_large = (type(value) is torch.Tensor or is_distributed(value)) and value.numel() > 1
    return Incoming(value) if is_large else value


@dataclass(frozen=True, slots=True)
class Place:
    """Position of one state of one parameter in the bytes of its sub-group.

    Attributes:
        parameter: The parameter.
        key: Name of the state in ``optimizer.state[parameter]``.
        start: Offset of the first byte.
        size: Size of the state. The state of a slice is 1-D.
        stride: Strides of the state in elements.
        dtype: Data type of the state.
        spec: Spec of the ``DTensor``, if the state is the local part of a ``DTensor``; ``None`` for a plain
            tensor.
    """

    parameter: torch.Tensor
    key: str
    start: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    spec: Any

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the state as a view of the bytes of its sub-group.

        For a distributed tensor, return the local part.
        """
        end = self.start + self.size.numel() * self.dtype.itemsize
        return flat[self.start : end].view(self.dtype).as_strided(self.size, self.stride)


class SubGroup:
    """Some parameters of one parameter group, or one slice of a large parameter.

    Args:
        number: Index of the parameter group.
        parameters: The parameters.
        home: Extents in which the states are stored between updates.
        part: The range of elements, if this sub-group is a slice of a single parameter; ``None`` for whole
            parameters.

    Attributes:
        elements: Number of elements of each parameter at the creation of the sub-group.
        places: Positions of the states. The list is empty before the first update that creates states.
        keys: For each parameter, the names of its offloadable states.
        nbytes: Number of bytes to transfer, rounded up to whole blocks for direct I/O.
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
        """The parameters that have gradients. An update changes only parameters with gradients."""
        return [each for each in self.parameters if each.grad is not None]

    def cut(self, value: Any) -> Any:
        """Return the part of a tensor that belongs to this sub-group.

        If this sub-group is a slice, tensors with the shape of the parameter are cut to the 1-D slice. Other
        values are returned unchanged.
        """
        if self.part is None or getattr(value, "shape", None) != self.parameters[0].shape:
            return value
        return value.reshape(-1)[self.part]

    def tensor(self, parameter: torch.Tensor, master: torch.Tensor | None) -> torch.Tensor:
        """Return the tensor that an update gets for a parameter: the parameter, its slice, or its master.

        Args:
            parameter: The parameter.
            master: The master's bytes in a slot, if the parameter is an offloaded master; ``None`` otherwise.
        """
        if self.part is None and master is None:
            return parameter
        made: torch.Tensor = self.cut(parameter.detach()) if master is None else master
        for name, value in vars(parameter).items():  # an optimizer may identify a parameter by its attributes
            setattr(made, name, value)
        made.grad = self.cut(parameter.grad)
        return made

    def views(self, flat: torch.Tensor) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the states of each parameter as views of the sub-group's bytes."""
        found: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for place in self.places:
            found.setdefault(place.parameter, {})[place.key] = distributed(place.view(flat), place.spec)
        return found

    def lay_out(self, states: States, bound: States) -> bool:
        """Assign each offloadable state a position in the sub-group. Return False if no state is offloadable.

        Each state starts at a multiple of 64 bytes, like PyTorch's CPU allocations.

        Args:
            states: The states of each parameter.
            bound: Views of the states that are already in a slot.
        """
        views = {id(value) for entry in bound.values() for value in entry.values()}
        found = [
            (parameter, key, local(value), spec_of(value))
            for parameter, entry in states.items()
            for key, value in entry.items()
            if id(value) in views or is_offloadable(value, parameter)
        ]
        sizes = (round_up(own.nbytes, CACHE_LINE) for _, _, own, _ in found)
        *starts, end = accumulate(sizes, initial=0)
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
    """The sub-groups of one optimizer and its master copies.

    A parameter whose states are larger than a sub-group is cut into slices, if updates of slices give the
    same bits as updates of the whole parameter.

    Between updates, an offloaded master copy has no bytes. During an update, the optimizer gets a tensor in
    slot memory instead of the master copy.

    Args:
        optimizer: The optimizer.
        homes: The shared store.
        masters: Maps each master copy to its model parameter, or to a part of the parameter with the same
            shape. The optimizer updates the master copies.
        names: Names of parameters in the model, if known.
        most: Largest number of bytes of states in a sub-group. The states of a parameter that cannot be cut
            may have more bytes.

    Attributes:
        optimizer: The optimizer.
        homes: The shared store.
        most: Largest number of bytes of states in a sub-group.
        holding: For each parameter, its sub-group, or the sub-groups of its slices.

    Raises:
        UnsupportedError: A parameter and its master have different shapes.
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
        own = [each for each in parameters_of(optimizer) if each in masters]
        self._copies = {each: masters[each] for each in own if is_offloadable(each.detach(), each)}
        for master, copy in self._copies.items():
            if master.shape != copy.shape:
                shapes = f"{tuple(master.shape)}, but its model parameter has shape {tuple(copy.shape)}"
                raise UnsupportedError(f"a master copy has shape {shapes}. Set states.masters to 'keep'")
        self._names = names
        self.most = most
        self.holding: dict[torch.Tensor, list[SubGroup]] = {}
        self._numbers: dict[torch.Tensor, int] = {}
        self._all: list[SubGroup] = []

    def __iter__(self) -> Iterator[SubGroup]:
        """Yield all sub-groups in the order in which their parameters got states."""
        return iter(tuple(self._all))

    @property
    def spread(self) -> list[SubGroup]:
        """The sub-groups that have states, in the order in which sub-groups are chosen for offloading.

        The first sub-groups in this order are spread evenly over an update, so that transfers overlap with
        updates in memory.
        """
        groups = [group for group in self._all if group.places]
        return [groups[number] for number in spread(len(groups))]

    # ---- changes of the optimizer ------------------------------------------------------------------

    def are_current(self) -> bool:
        """Return True if all parameters still have their parameter group and size."""
        now = {each: n for n, group in enumerate(self.optimizer.param_groups) for each in group["params"]}
        return all(
            now.get(each) == group.number
            and each.numel() == elements
            and (group.part is None or self._can_be_cut(each))
            for group in self._all
            for each, elements in group.elements.items()
        )

    def add(self, wanted: Callable[[torch.Tensor], bool]) -> list[SubGroup]:
        """Create sub-groups for parameters that do not belong to a sub-group yet.

        Args:
            wanted: Function that returns True for parameters to include.
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
        """Remove all sub-groups, whose states the caller has brought back into memory."""
        for group in self._all:
            group.home.release()
        self._all, self.holding = [], {}

    def _slices(self, parameter: torch.Tensor) -> Sequence[slice | None]:
        count, nbytes = parameter.numel(), self._states_bytes(parameter)
        step = max(self.most * count // nbytes // SLICE, 1) * SLICE
        if nbytes <= self.most or count <= step or not self._can_be_cut(parameter):
            return [None]
        # The last slice has at least two elements, because states of one element are not offloaded.
        starts = range(0, count - 1, step)
        return [slice(start, count if start == starts[-1] else start + step) for start in starts]

    def _can_be_cut(self, parameter: torch.Tensor) -> bool:
        states = self.optimizer.state.get(parameter, {}).values()
        return (
            can_be_cut(self.optimizer, parameter)
            and self._copies.get(parameter, parameter).is_contiguous()
            and all(_is_cut_alike(state, parameter) for state in states)
        )

    def _states_bytes(self, parameter: torch.Tensor) -> int:
        own: int = local(parameter).nbytes
        known: int = sum(
            value.value.numel() * parameter.itemsize if isinstance(value, Incoming) else local(value).nbytes
            for value in self.optimizer.state.get(parameter, {}).values()
            if isinstance(value, Incoming) or is_offloadable(value, parameter)
        )
        return max((known or own * _STATES) + own * (parameter in self._copies), 1)

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return a parameter's name in the model.

        If the name is unknown, return the index in ``state_dict``.
        """
        known = self._names.get(parameter) or self._names.get(self._copies.get(parameter, parameter))
        return known or f"parameter {self._numbers.get(parameter)}"

    # ---- masters -----------------------------------------------------------------------------------

    def states_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return a copy of a parameter's entry in ``optimizer.state``.

        If the parameter is a master copy, the result includes the master copy, with the key ``MASTER``.
        """
        entry = dict(self.optimizer.state.get(parameter, {}))
        return {**entry, MASTER: parameter.detach()} if parameter in self._copies else entry

    def model_part(self, group: SubGroup, parameter: torch.Tensor) -> torch.Tensor:
        """Return the local part of a model parameter, cut to the slice of a sub-group.

        Args:
            group: The sub-group.
            parameter: The model parameter, or its master copy.
        """
        return group.cut(local(self._copies.get(parameter, parameter).detach()))  # type: ignore[no-any-return]

    def send_away(self, master: torch.Tensor) -> None:
        """Free the memory of a master whose bytes are in a slot or in the store."""
        if type(master) is not AwayMaster:
            AwayMaster.begin(master, self.name_of(master))


def _is_cut_alike(state: object, parameter: torch.Tensor) -> bool:
    value = state.value if isinstance(state, Incoming) else state
    if not isinstance(value, torch.Tensor) or value.numel() <= 1:
        return True
    is_taken = isinstance(state, Incoming) or is_away(value) or is_offloadable(value, parameter)
    return is_taken and value.shape == parameter.shape
