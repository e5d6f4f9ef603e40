"""Transfer of states between ``optimizer.state`` and the slots."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.states.away import AwayMaster, AwayTensor, is_away, stands_for
from tba_offload.states.groups import MASTER, Incoming
from tba_offload.states.parameters import distributed, is_offloadable, local
from tba_offload.states.slots import Slots
from tba_offload.torch_private import without_subclasses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from tba_offload.states.groups import Entry, Groups, Place, SubGroup

    Bound = Mapping[torch.Tensor, Mapping[str, torch.Tensor]]
    Left = Mapping[torch.Tensor, Entry]


class Entries:
    """The states of one optimizer, in ``optimizer.state`` and in the slots.

    If a parameter is cut into slices, its states get placeholders after all slices are updated.

    Args:
        groups: The sub-groups of the optimizer.
        next_use: Function that returns a number for a sub-group. A larger number means that the sub-group is
            needed later.

    Attributes:
        in_host_memory: States, in host memory, of the sub-groups that the CPU updates.
    """

    def __init__(self, groups: Groups, next_use: Callable[[SubGroup], int]) -> None:
        self.slots = Slots(groups, groups.homes, next_use)
        self.in_host_memory: dict[SubGroup, torch.Tensor] = {}
        self._groups = groups
        self._of_slices: dict[torch.Tensor, Entry] = {}
        self._copies: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    # ---- for an update ---------------------------------------------------------------------------

    def shown(self, parameter: torch.Tensor) -> Entry:
        """Return the entry of a parameter in ``optimizer.state``."""
        return self._groups.optimizer.state.get(parameter, {})  # type: ignore[no-any-return]

    def resident(self, group: SubGroup, parameter: torch.Tensor) -> Entry:
        """Return the states of a parameter that are in memory.

        If ``group`` has a slice of the parameter, return copies. The update of one slice must not change the
        states for the other slices.
        """
        entry = self.shown(parameter)
        found = {key: value for key, value in entry.items() if not isinstance(value, AwayTensor)}
        return found if group.part is None else {key: _copy(value) for key, value in found.items()}

    def bound(self, group: SubGroup) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the offloadable states of a sub-group as views of its slot, which the caller may change.

        Raises:
            TransferError: The states cannot be read.
        """
        if not group.places:
            return {}
        slot = self.slots.load(group)
        self.slots.hold(group, slot)
        return group.views(slot.lend())

    def take(self, group: SubGroup, bound: Bound, left: Left) -> None:
        """After an update, store the states in the slot, and put placeholders into ``optimizer.state``.

        For slices, :meth:`show_slices` puts the placeholders into ``optimizer.state`` later.

        Args:
            group: The updated sub-group.
            bound: The states before the update, as views of the slot.
            left: All states of the sub-group after the update.
        """
        self._copies.clear()
        if have_moved(bound, left):
            self._lay_out(group, bound, left)
        self._show(group, left)

    def show_slices(self) -> None:
        """Put the states of sliced parameters into ``optimizer.state``. All slices must be updated."""
        of_slices, self._of_slices = self._of_slices, {}
        for parameter, entry in of_slices.items():
            self._set(parameter, entry)

    def _show(self, group: SubGroup, left: Left) -> None:
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
                if shown.keys() - {MASTER}:  # keep the order of parameters that plain training gives
                    self._groups.optimizer.state.setdefault(parameter, {})

    def _set(self, parameter: torch.Tensor, entry: Entry) -> None:
        if MASTER in entry:
            self._groups.send_away(parameter)
        shown = {key: value for key, value in entry.items() if key != MASTER}
        known = self.shown(parameter)
        # Keep the previous order of states.
        shown = {key: shown[key] for key in known if key in shown} | shown
        if known.keys() == shown.keys():
            known.update(shown)
        else:  # one assignment, so that an interrupt never finds an incomplete entry
            self._groups.optimizer.state[parameter] = shown

    # ---- between updates -------------------------------------------------------------------------

    def check_owners(self) -> None:
        """Check that each placeholder in ``optimizer.state`` is at its own parameter and key.

        Raises:
            StatesAwayError: The program has moved a placeholder to another parameter or key, or has put back
                the placeholder of a removed state, whose bytes are freed.
        """
        for each in self._groups.optimizer.state:
            self._check_owner(each)

    def _check_owner(self, parameter: Any) -> None:
        entry = self.shown(parameter) if isinstance(parameter, torch.Tensor) else {}
        for key, value in entry.items():
            if type(value) is not AwayTensor:
                continue
            if not stands_for(value, parameter, key):
                owner = f"{key!r} of {self._groups.name_of(parameter)}"
                why = f"the program assigned the placeholder of this state to another state, {owner}"
                raise value.refused(f"{why}. Assign the values, not the placeholder")
            groups = self._groups.holding.get(parameter)
            if not groups or any(key not in group.keys[parameter] for group in groups):
                why = "the program removed the state, and then assigned its placeholder again"
                raise value.refused(f"{why}. Assign the values, not the placeholder")

    def is_current(self, group: SubGroup) -> bool:
        """Return True if the program has not set or cleared states of the sub-group since the last update."""
        return all(map(self._is_away, group.places)) and not any(
            isinstance(value, Incoming) or is_away(value) or is_offloadable(value, parameter)
            for parameter in group.parameters
            for key, value in self.shown(parameter).items()
            if key not in group.keys[parameter]
        )

    def shows_any(self, group: SubGroup) -> bool:
        """Return True if ``optimizer.state`` has a placeholder of this sub-group."""
        return any(map(self._is_away, group.places))

    def absorb(self, groups: Iterable[SubGroup]) -> None:
        """Offload states that the program has set, and free the bytes of states that the program has removed.

        The caller must call :meth:`check_owners` first.

        Args:
            groups: The sub-groups. If one slice of a parameter is included, all slices must be included.

        Raises:
            TransferError: Offloaded states cannot be read.
        """
        self._copies.clear()
        self._of_slices.clear()  # a failed update has left this entry
        for group in groups:
            self._absorb(group)
        self.show_slices()  # last, because all slices are cut from the same tensors

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
        """Put all offloaded states back into ``optimizer.state``, each in its own memory.

        States that the program has removed are not put back.

        Raises:
            StatesAwayError: A placeholder is at the wrong parameter or key, see :meth:`check_owners`. No
                state has changed.
            TransferError: The states cannot be read.
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
        """Return the states of a parameter, with copies of offloaded states in host memory.

        If the parameter is an offloaded master copy, the result also has its values, with the key ``MASTER``.

        Raises:
            StatesAwayError: The entry of this parameter has a placeholder of another parameter or key.
            TransferError: The states cannot be read.
        """
        self._check_owner(parameter)
        entry = self._groups.states_of(parameter)
        away = {key for key, value in entry.items() if is_away(value)}
        if away:
            if not away <= self._copies.get(parameter, {}).keys():
                # Callers usually read the other parameters of the sub-group next.
                self._copies = self._whole(self._groups.holding[parameter], torch.device("cpu"))
            copies = self._copies.pop(parameter)
            entry.update({key: copies[key] for key in away})
        return entry

    # ---- the parts of it -------------------------------------------------------------------------

    def _whole(
        self, groups: Iterable[SubGroup], device: torch.device | None = None
    ) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Return complete copies of offloaded states on ``device``. The states of slices are joined.

        By default, the device is the device of the parameters, and master copies get their own memory back.
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
        """Return the bytes of a sub-group. If only the store has the bytes, read the bytes into host memory.

        Raises:
            TransferError: The bytes cannot be read.
        """
        if (slot := self.slots.of(group)) is not None:
            slot.wait_for_reads()
            return slot.lend()
        flat = self.in_host_memory.get(group)
        return group.home.on_host(group.nbytes) if flat is None else flat

    def _is_away(self, place: Place) -> bool:
        if place.key == MASTER:
            return is_away(place.parameter)
        return stands_for(self.shown(place.parameter).get(place.key), place.parameter, place.key)

    def _lay_out(self, group: SubGroup, bound: Bound, entries: Left) -> None:
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
        away.origin = parameter, key  # swap_tensors refuses tensors with weak references
        return away


def have_moved(bound: Bound, left: Left) -> bool:
    """Return True if an update has added, removed or resized states.

    If an update has replaced a view by another tensor with the same layout, copy the tensor into the view,
    and put the view back into ``left``.

    Args:
        bound: The states before the update, as views.
        left: The states after the update.
    """
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
                moved = moved or view is not None or is_offloadable(value, parameter)
    return moved


def _is_alike(value: object, view: torch.Tensor) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and (value.shape, value.dtype, value.device) == (view.shape, view.dtype, view.device)
        and value.stride() == view.stride()
    )


def _arrived(group: SubGroup, parameter: torch.Tensor, value: Any) -> Any:
    if isinstance(value, Incoming):
        # PyTorch's own Optimizer.load_state_dict uses this data type.
        dtype = parameter.dtype if parameter.is_floating_point() else value.value.dtype
        return group.cut(value.value).to(device=parameter.device, dtype=dtype, copy=True)
    return value if group.part is None or is_away(value) else _copy(group.cut(value))


def _memory(group: SubGroup, place: Place, device: torch.device | None) -> torch.Tensor:
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
