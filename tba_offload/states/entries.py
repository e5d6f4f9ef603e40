"""What ``optimizer.state`` shows, and how states get from there into slots and back."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.states.away import AwayMaster, AwayTensor, is_away, stands_for
from tba_offload.states.groups import MASTER, Incoming
from tba_offload.states.parameters import distributed, local, travels
from tba_offload.states.slots import Slots
from tba_offload.torch_private import without_subclasses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from tba_offload.states.groups import Entry, Groups, Place, SubGroup

    Bound = Mapping[torch.Tensor, Mapping[str, torch.Tensor]]
    Left = Mapping[torch.Tensor, Entry]


class Entries:
    """Moves states between ``optimizer.state`` and the slots.

    A state is shown as away when all slices of its parameter are.

    Args:
        groups: The sub-groups of the optimizer.
        next_use: When a sub-group is needed again; the greater, the later.

    Attributes:
        in_host_memory: The states of sub-groups that the processor updates.
    """

    def __init__(self, groups: Groups, next_use: Callable[[SubGroup], int]) -> None:
        self.slots = Slots(groups, groups.homes, next_use)
        self.in_host_memory: dict[SubGroup, torch.Tensor] = {}
        self._groups = groups
        self._of_slices: dict[torch.Tensor, Entry] = {}
        self._copies: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    # ---- for an update ---------------------------------------------------------------------------

    def shown(self, parameter: torch.Tensor) -> Entry:
        """Return what ``optimizer.state`` shows of a parameter."""
        return self._groups.optimizer.state.get(parameter, {})  # type: ignore[no-any-return]

    def resident(self, group: SubGroup, parameter: torch.Tensor) -> Entry:
        """Return the states of a parameter that are in memory; a slice gets copies, as others do."""
        entry = self.shown(parameter)
        found = {key: value for key, value in entry.items() if not isinstance(value, AwayTensor)}
        return found if group.part is None else {key: _copy(value) for key, value in found.items()}

    def bound(self, group: SubGroup) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the states of a sub-group that travel as views of its slot, for the caller to change.

        Raises:
            TransferError: They cannot be read.
        """
        if not group.places:
            return {}
        slot = self.slots.load(group)
        self.slots.hold(group, slot)
        return group.views(slot.lend())

    def take(self, group: SubGroup, bound: Bound, left: Left) -> None:
        """Take the states that an update left, and show them; those of slices with :meth:`show_slices`.

        Args:
            group: The sub-group that was updated.
            bound: Its states as views of its slot, as the update got them.
            left: The states that there are now.
        """
        self._copies.clear()
        if have_moved(bound, left):
            self._lay_out(group, bound, left)
        self._show(group, left)

    def show_slices(self) -> None:
        """Show what the update of slices has left: with the states, what slices have in common."""
        of_slices, self._of_slices = self._of_slices, {}
        for parameter, entry in of_slices.items():
            self._set(parameter, entry)

    def _show(self, group: SubGroup, left: Left) -> None:
        """Show what stands for states that are away, and the others; of slices when all have been updated."""
        for parameter, entry in left.items():
            keys = group.keys[parameter]
            shown = {
                key: self._stand_in(group, parameter, key, value) if key in keys else value
                for key, value in entry.items()
            }
            if group.part is None:
                self._set(parameter, shown)
            else:
                self._of_slices[parameter] = shown
                if shown.keys() - {MASTER}:  # in the order in which a plain step has them
                    self._groups.optimizer.state.setdefault(parameter, {})

    def _set(self, parameter: torch.Tensor, entry: Entry) -> None:
        if MASTER in entry:
            self._groups.send_away(parameter)
        shown = {key: value for key, value in entry.items() if key != MASTER}
        known = self.shown(parameter)
        shown = {key: shown[key] for key in known if key in shown} | shown  # in the order that there was
        if known.keys() == shown.keys():
            known.update(shown)
        else:  # at once: an interrupt must find all of it
            self._groups.optimizer.state[parameter] = shown

    # ---- between updates -------------------------------------------------------------------------

    def check_owners(self) -> None:
        """Check of all states that no program has put what stands for one where its bytes are not.

        Raises:
            StatesAwayError: One was given to another parameter, or put back after it was forgotten.
        """
        for each in self._groups.optimizer.state:
            self._check_owner(each)

    def _check_owner(self, parameter: Any) -> None:
        entry = self.shown(parameter) if isinstance(parameter, torch.Tensor) else {}
        for key, value in entry.items():
            if type(value) is not AwayTensor:
                continue
            if not stands_for(value, parameter, key):
                raise value.refused(
                    f"it was given to {self._groups.name_of(parameter)} as {key!r}. give it back, or put a "
                    "tensor with bytes there"
                )
            groups = self._groups.holding.get(parameter)
            if not groups or any(key not in group.keys[parameter] for group in groups):
                raise value.refused(
                    "it was put back when it was there no more. put a tensor with bytes there"
                )

    def is_current(self, group: SubGroup) -> bool:
        """Return True if ``optimizer.state`` still shows what is away: states may be set or cleared."""
        return all(map(self._is_away, group.places)) and not any(
            isinstance(value, Incoming) or is_away(value) or travels(value, parameter)
            for parameter in group.parameters
            for key, value in self.shown(parameter).items()
            if key not in group.keys[parameter]
        )

    def shows_any(self, group: SubGroup) -> bool:
        """Return True if ``optimizer.state`` shows some of its states as away: they are needed yet."""
        return any(map(self._is_away, group.places))

    def absorb(self, groups: Iterable[SubGroup]) -> None:
        """Take the states that ``optimizer.state`` shows, and forget those that it shows no more.

        Args:
            groups: Sub-groups, with all slices of each parameter; :meth:`check_owners` was called.

        Raises:
            TransferError: States that are still away cannot be read.
        """
        self._copies.clear()
        self._of_slices.clear()  # left by an update that failed
        for group in groups:
            self._absorb(group)
        self.show_slices()  # only now: each slice takes its part of the same tensors

    def _absorb(self, group: SubGroup) -> None:
        entries = {
            each: {key: _arrived(group, each, value) for key, value in self._groups.states_of(each).items()}
            for each in group.parameters
        }
        away = [(each, key) for each, entry in entries.items() for key in entry if is_away(entry[key])]
        bound = self.bound(group) if away else {}
        for parameter, key in away:
            entries[parameter][key] = bound[parameter][key]
        self._lay_out(group, bound, entries)
        self.slots.write(group)
        self._show(group, entries)

    def restore(self) -> None:
        """Put all states back into ``optimizer.state``, in memory of their own; not those that were cleared.

        Raises:
            StatesAwayError: As of :meth:`check_owners`; nothing has changed.
            TransferError: They cannot be read.
        """
        self.check_owners()
        for _, slices in groupby(self._groups, lambda group: id(group.parameters[0])):
            some = list(slices)
            found = self._whole(some)
            for parameter, entry in found.items():
                if entry.pop(MASTER, None) is not None:
                    AwayMaster.end(parameter)
                self.shown(parameter).update(entry)
            for group in some:
                self.slots.drop(group)
                self.in_host_memory.pop(group, None)

    def read(self, parameter: torch.Tensor) -> Entry:
        """Return the states of a parameter, and itself if it is a master; what is away is copied to the host.

        Raises:
            StatesAwayError: As of :meth:`check_owners`, for this parameter.
            TransferError: They cannot be read.
        """
        self._check_owner(parameter)
        entry = self._groups.states_of(parameter)
        away = {key for key, value in entry.items() if is_away(value)}
        if away:
            if (
                not away <= self._copies.get(parameter, {}).keys()
            ):  # others of its sub-group are likely to be asked for next
                self._copies = self._whole(self._groups.holding[parameter], torch.device("cpu"))
            copies = self._copies.pop(parameter)
            entry.update({key: copies[key] for key in away})
        return entry

    # ---- the parts of it -------------------------------------------------------------------------

    def _whole(
        self, groups: Iterable[SubGroup], device: torch.device | None = None
    ) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Return copies of states that are away, each put together of its slices.

        Args:
            groups: The sub-groups.
            device: Where to; by default that of the parameters, where masters are filled themselves.
        """
        found: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for group in groups:
            places = [*filter(self._is_away, group.places)]
            flat = self.bytes_of(group) if places else torch.empty(0)
            for place in places:
                entry = found.setdefault(place.parameter, {})
                if place.key not in entry:
                    entry[place.key] = _memory(group, place, device)
                with without_subclasses():
                    group.cut(local(entry[place.key])).copy_(place.view(flat))
        return found

    def bytes_of(self, group: SubGroup) -> torch.Tensor:
        """Return the bytes of a sub-group, wherever they are; those at home are read into host memory.

        Raises:
            TransferError: They cannot be read.
        """
        if (slot := self.slots.of(group)) is not None:
            slot.wait_for_reads()
            return slot.lend()
        flat = self.in_host_memory.get(group)
        return group.home.on_host(group.nbytes) if flat is None else flat

    def _is_away(self, place: Place) -> bool:
        """Whether ``optimizer.state`` shows that a state is away, or the master itself that it is."""
        if place.key == MASTER:
            return is_away(place.parameter)
        return stands_for(self.shown(place.parameter).get(place.key), place.parameter, place.key)

    def _lay_out(self, group: SubGroup, bound: Bound, entries: Left) -> None:
        """Give the states of a sub-group other places, in another slot; views of the old one live on."""
        stays = self.slots.stays(group)
        self.slots.drop(group)
        group.home.release()
        if group.lay_out(entries, bound):
            slot = self.slots.take(group, stays=stays)
            for place in group.places:
                place.view(slot.lend()).copy_(local(entries[place.parameter][place.key]))
            self.slots.hold(group, slot)

    def _stand_in(
        self, group: SubGroup, parameter: torch.Tensor, key: str, value: torch.Tensor
    ) -> AwayTensor:
        like = value if group.part is None else parameter
        known = self.shown(parameter).get(key)
        if stands_for(known, parameter, key) and (known.shape, known.dtype) == (like.shape, value.dtype):
            return known
        name = f"{key!r} of {self._groups.name_of(parameter)}"
        away = AwayTensor(like.shape, like.stride(), value.dtype, value.device, name)
        away.origin = parameter, key  # no weak reference: PyTorch swaps no tensors that have one
        return away


def have_moved(bound: Bound, left: Left) -> bool:
    """Return True if states came, went or changed their shape; copy those back that were only replaced."""
    moved = False
    for parameter, entry in left.items():
        views = bound.get(parameter, {})
        moved = moved or not views.keys() <= entry.keys()
        for key, value in entry.items():
            view = views.get(key)
            if view is not None and value is not view and _is_alike(value, view):
                view.copy_(value)
                entry[key] = view
            elif value is not view:
                moved = moved or view is not None or travels(value, parameter)
    return moved


def _is_alike(value: object, view: torch.Tensor) -> bool:
    """Whether a state could lie where another one does."""
    return (
        isinstance(value, torch.Tensor)
        and (value.shape, value.dtype, value.device) == (view.shape, view.dtype, view.device)
        and value.stride() == view.stride()
    )


def _arrived(group: SubGroup, parameter: torch.Tensor, value: Any) -> Any:
    """Return a state, or a copy of a slice of it; those of a checkpoint come to the parameter's device."""
    if isinstance(value, Incoming):
        # The data type in which PyTorch itself loads a state, in Optimizer.load_state_dict.
        dtype = parameter.dtype if parameter.is_floating_point() else value.value.dtype
        return group.cut(value.value).to(device=parameter.device, dtype=dtype, copy=True)
    return value if group.part is None or is_away(value) else _copy(group.cut(value))


def _memory(group: SubGroup, place: Place, device: torch.device | None) -> torch.Tensor:
    """Return memory for a whole state; that of the master itself, unless a device is given."""
    parameter = place.parameter
    if place.key == MASTER and device is None:
        AwayMaster.allocate(parameter)
        return parameter.detach()
    device = device or local(parameter).device
    if group.part is not None:
        return torch.empty(parameter.shape, dtype=place.dtype, device=device)
    empty = torch.empty_strided(place.size, place.stride, dtype=place.dtype, device=device)
    return distributed(empty, place.spec)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
