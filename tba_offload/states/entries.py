"""What ``optimizer.state`` shows, and how states get from there into slots and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tba_offload.states.away import AwayTensor, is_away, memory_for, stands_for
from tba_offload.states.groups import Incoming
from tba_offload.states.masters import MASTER
from tba_offload.states.pieces import local, travels
from tba_offload.states.slots import SLOTS, Slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from tba_offload.states.groups import Entry, Groups, Place, SubGroup
    from tba_offload.states.home import Homes
    from tba_offload.states.masters import Masters
    from tba_offload.states.pieces import Piece
    from tba_offload.states.slots import Slot

    Bound = Mapping[Piece, Mapping[str, torch.Tensor]]


class Entries:
    """Moves states between ``optimizer.state`` and the slots.

    Sub-groups that the processor updates are in slots of their own kind, and leave those before the device
    gets them.

    Args:
        optimizer: The optimizer.
        homes: Where sub-groups live.
        masters: The master copies among its parameters.
        groups: The sub-groups.
        next_use: When a sub-group is needed again; the greater, the later.

    Attributes:
        arrived: Returns what is called when a sub-group has got its states, in a slot of the device.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        homes: Homes,
        masters: Masters,
        groups: Groups,
        next_use: Callable[[SubGroup], int],
    ) -> None:
        self.slots = Slots(homes, next_use)
        self.host_homes = homes.on_host()
        self.host_slots = Slots(self.host_homes, lambda _: 1)
        self.arrived: Callable[[], Callable[[SubGroup], object] | None] = lambda: None
        self._optimizer = optimizer
        self._masters = masters
        self._groups = groups
        self._of_slices: dict[torch.Tensor, Entry] = {}

    # ---- for an update ---------------------------------------------------------------------------

    def resident(self, piece: Piece) -> Entry:
        """Return the states of a piece that are in memory; a slice gets copies, as others do."""
        entry = self._optimizer.state.get(piece.parameter, {})
        found = {key: value for key, value in entry.items() if not isinstance(value, AwayTensor)}
        return found if piece.is_whole else {key: _copy(value) for key, value in found.items()}

    def take(self, group: SubGroup, bound: Bound, left: Mapping[Piece, Entry]) -> None:
        """Take the states that an update left.

        Args:
            group: The sub-group that was updated.
            bound: Its states as views of its slot, as the update got them.
            left: The states that there are now.
        """
        if _have_moved(bound, left):
            self._lay_out(group, bound, left)
        for piece, entry in left.items():
            self._show(group, piece, entry)

    def end_update(self) -> None:
        """Show what slices have in common, such as their count of steps.

        A parameter whose first update ended between its slices has no states.
        """
        for parameter, shown in self._of_slices.items():
            if shown.keys() == self._optimizer.state.get(parameter, {}).keys():
                self._set(parameter, shown)
            else:  # with the order that the optimizer gave them
                self._optimizer.state[parameter] = shown
        self._of_slices.clear()
        for group in self._groups.half_done():
            self._optimizer.state.pop(group.pieces[0].parameter, None)

    def forget_slices(self) -> None:
        """Forget what the update of slices has left, since a checkpoint takes its place."""
        self._of_slices.clear()

    # ---- between updates -------------------------------------------------------------------------

    def check_owner(self, parameter: torch.Tensor) -> None:
        """Check that no program has given a parameter what stands for a state of another one.

        Raises:
            StatesAwayError: One has; nothing was changed.
        """
        entry = self._optimizer.state.get(parameter, {})
        for key, value in entry.items() if isinstance(entry, dict) else ():
            if type(value) is AwayTensor and not stands_for(value, parameter, key):
                raise value.refused(
                    f"it was given to {self._groups.name_of(parameter)} as {key!r}. give it back, or put a "
                    "tensor with bytes there"
                )

    def is_current(self, group: SubGroup) -> bool:
        """Return True if ``optimizer.state`` still shows what is away: states may be set or cleared."""
        return all(map(self._is_away, group.places)) and not any(
            isinstance(value, Incoming)
            or travels(value, piece.parameter)
            or (is_away(value) and self._is_gone(piece.parameter, key))
            for piece in group.pieces
            for key, value in self._optimizer.state.get(piece.parameter, {}).items()
            if key not in group.keys_of(piece)
        )

    def _is_gone(self, parameter: torch.Tensor, key: str) -> bool:
        """Whether what stands for a state was put back when the state was there no more."""
        groups = self._groups.holding([parameter])
        return not any(group.is_cut and key in group.keys_of(group.pieces[0]) for group in groups)

    def shows_any(self, group: SubGroup) -> bool:
        """Return True if ``optimizer.state`` shows some of its states as away: they are needed yet."""
        return any(map(self._is_away, group.places))

    def absorb(self, groups: Iterable[SubGroup]) -> None:
        """Take the states that ``optimizer.state`` shows, and forget those that it shows no more.

        Args:
            groups: Sub-groups, with all slices of each parameter.

        Raises:
            TransferError: States that are still away cannot be read.
        """
        of_slices: dict[torch.Tensor, Entry] = {}  # shown when all of them are taken
        for group in groups:
            self._absorb(group, of_slices)
            self.slots.write(group)
        for parameter, shown in of_slices.items():
            if parameter in self._masters:
                self._masters.send_away(parameter, self._groups.name_of(parameter))
            self._set(parameter, shown)

    def _absorb(self, group: SubGroup, of_slices: dict[torch.Tensor, Entry]) -> None:
        entries: dict[Piece, Entry] = {}
        for piece in group.pieces:
            entry = self._optimizer.state.get(piece.parameter, {})
            entry = self._masters.with_states(piece.parameter, entry)
            entries[piece] = {key: _part(piece, value) for key, value in entry.items()}
        away = [
            (piece, key) for piece, entry in entries.items() for key, value in entry.items() if is_away(value)
        ]
        bound = group.views(self.slots.load(group).lend()) if away and group.places else {}
        for piece, key in away:
            if key not in bound.get(piece, {}):
                raise entries[piece][key].refused("it was put back when it was there no more")
            entries[piece][key] = bound[piece][key]
        self._lay_out(group, bound, entries)
        for piece, entry in entries.items():
            if piece.is_whole:
                self._show(group, piece, entry)
            else:
                of_slices[piece.parameter] = self._shown(group, piece, entry)

    def restore(self, groups: Iterable[SubGroup]) -> None:
        """Put states back into ``optimizer.state``, in memory of their own; not those that were cleared.

        Args:
            groups: Sub-groups, with all slices of each parameter.

        Raises:
            TransferError: They cannot be read.
        """
        groups = list(groups)
        wholes: dict[tuple[torch.Tensor, str], torch.Tensor] = {}
        for group in groups:
            places = [place for place in group.places if self._is_away(place)]
            slot = self._held(group) or (self.slots.load(group) if places else None)
            if slot is not None:
                for place in places:
                    self._put_back(place, place.view(slot.lend()), wholes)
            if not group.is_cut:
                self._empty(group)
        for (parameter, key), whole in wholes.items():  # until all slices are there, all are away
            if key == MASTER:
                self._masters.bring_back(parameter)
            else:
                self._optimizer.state[parameter][key] = whole
        for group in groups:
            self._empty(group)

    def _put_back(
        self, place: Place, view: torch.Tensor, wholes: dict[tuple[torch.Tensor, str], torch.Tensor]
    ) -> None:
        """Put a state back that is whole; the slice of another one into ``wholes``."""
        piece, parameter, key = place.piece, place.piece.parameter, place.key
        if key == MASTER:
            self._masters.fill(piece, view)
            if piece.is_whole:
                self._masters.bring_back(parameter)
            else:
                wholes[parameter, MASTER] = parameter
            return
        known = self._optimizer.state[parameter]
        if piece.is_whole:
            known[key] = place.wrapped(view.to(local(parameter).device, copy=True))
            return
        if (parameter, key) not in wholes:
            wholes[parameter, key] = memory_for(known[key])
        piece.part_of(wholes[parameter, key]).copy_(view)

    def _empty(self, group: SubGroup) -> None:
        self.slots.empty(group)
        self.host_slots.empty(group)

    def on_host(
        self, parameters: AbstractSet[torch.Tensor], *, masters: bool = False
    ) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Return copies of states in host memory, read sub-group by sub-group.

        Args:
            parameters: Those whose states are wanted; states that travel together with these come too.
            masters: Whether copies of master copies are wanted too.

        Raises:
            TransferError: They cannot be read.
        """
        found: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for group in self._groups.holding(parameters):
            if not group.places:
                continue
            slot = self._held(group)
            flat = group.home.on_host(group.nbytes) if slot is None else slot.lend()
            for place in group.places:
                if masters or place.key != MASTER:
                    _copy_to_host(place, place.view(flat), found.setdefault(place.piece.parameter, {}))
        return found

    # ---- the parts of it -------------------------------------------------------------------------

    def _held(self, group: SubGroup) -> Slot | None:
        """Return the slot that holds a sub-group, with its bytes; ``None`` if they are at home."""
        slot = self.host_slots.of(group) or self.slots.of(group)
        if slot is not None:
            slot.settle()
        return slot

    def _is_away(self, place: Place) -> bool:
        """Whether ``optimizer.state`` shows that a state is away, or the master itself that it is."""
        parameter = place.piece.parameter
        if place.key == MASTER:
            return is_away(parameter)
        return stands_for(self._optimizer.state.get(parameter, {}).get(place.key), parameter, place.key)

    def _lay_out(self, group: SubGroup, bound: Bound, entries: Mapping[Piece, Entry]) -> None:
        """Give the states of a sub-group places, and a slot."""
        stays = self.slots.stays(group)
        if self.slots.of(group) is not None:  # states in it are copied first, because their places change
            for piece, entry in entries.items():
                entry.update({key: _copy(entry[key]) for key in bound.get(piece, ()) if key in entry})
            self.slots.empty(group)
        group.home.release()
        if group.lay_out(entries):
            slot = self.slots.own(group) if stays else self.slots.take(group.room, SLOTS - 1)
            group.fill(slot.lend(), entries)
            slot.hold(group)
            if (arrived := self.arrived()) is not None:
                arrived(group)

    def _show(self, group: SubGroup, piece: Piece, entry: Entry) -> None:
        """Show in ``optimizer.state`` the states of a piece, but not what slices have in common."""
        parameter, away = piece.parameter, group.keys_of(piece)
        shown = self._shown(group, piece, entry)
        if not piece.is_whole:
            self._of_slices[parameter] = shown
            known = self._optimizer.state.get(parameter, {})
            self._set(parameter, known | {key: value for key, value in shown.items() if key in away})
            return
        if MASTER in away:
            self._masters.send_away(parameter, self._groups.name_of(parameter))
        self._set(parameter, shown)

    def _shown(self, group: SubGroup, piece: Piece, entry: Entry) -> Entry:
        """Return the states of a piece with what is away as such, and all else as it is."""
        away = group.keys_of(piece)
        return {
            key: self._stand_in(piece, key, value) if key in away else value
            for key, value in entry.items()
            if key != MASTER
        }

    def _set(self, parameter: torch.Tensor, shown: Entry) -> None:
        known = self._optimizer.state.get(parameter, {})
        shown = {key: shown[key] for key in known if key in shown} | shown  # in the order that there was
        if known.keys() == shown.keys():
            known.update(shown)
        elif (
            shown or known or parameter in self._optimizer.state
        ):  # at once: an interrupt must find all of it
            self._optimizer.state[parameter] = shown

    def _stand_in(self, piece: Piece, key: str, value: torch.Tensor) -> AwayTensor:
        parameter = piece.parameter
        like, known = (
            value if piece.is_whole else parameter,
            self._optimizer.state.get(parameter, {}).get(key),
        )
        if stands_for(known, parameter, key) and (known.shape, known.dtype) == (like.shape, value.dtype):
            return known
        name = f"{key!r} of {self._groups.name_of(parameter)}"
        away = AwayTensor(like.shape, like.stride(), value.dtype, value.device, name)
        away.origin = parameter, key  # no weak reference: PyTorch swaps no tensors that have one
        return away


def _copy_to_host(place: Place, view: torch.Tensor, entry: dict[str, torch.Tensor]) -> None:
    piece, key = place.piece, place.key
    if piece.is_whole:
        entry[key] = place.wrapped(view.to("cpu", copy=True))
        return
    if key not in entry:
        entry[key] = torch.empty(piece.parameter.shape, dtype=view.dtype)
    piece.part_of(entry[key]).copy_(view)


def _have_moved(bound: Bound, left: Mapping[Piece, Entry]) -> bool:
    """Whether states came, went or changed their shape; one that was only replaced is copied back."""
    moved = False
    for piece, entry in left.items():
        views = bound.get(piece, {})
        moved = moved or not views.keys() <= entry.keys()
        for key, value in entry.items():
            view = views.get(key)
            if view is not None and value is not view and is_alike(value, view):
                view.copy_(value)
                entry[key] = view
            elif value is not view:
                moved = moved or view is not None or travels(value, piece.parameter)
    return moved


def is_alike(value: object, view: torch.Tensor) -> bool:
    """Return True if a state could lie where another one does."""
    return (
        isinstance(value, torch.Tensor)
        and (value.shape, value.dtype, value.device) == (view.shape, view.dtype, view.device)
        and value.stride() == view.stride()
    )


def _part(piece: Piece, value: Any) -> Any:
    """Return the part of a state that belongs to a piece, in memory of its own if that is not the whole."""

    def part_of(tensor: torch.Tensor) -> torch.Tensor:
        is_cut = not piece.is_whole and tensor.shape == piece.parameter.shape
        return piece.part_of(tensor) if is_cut else tensor

    if isinstance(value, Incoming):
        return part_of(value.value).to(device=piece.parameter.device, dtype=value.dtype, copy=True)
    if piece.is_whole or is_away(value):
        return value
    return _copy(part_of(value) if travels(value, piece.parameter) else value)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
