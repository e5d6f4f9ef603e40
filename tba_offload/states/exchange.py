"""How states get from an optimizer into slots and back, and what ``optimizer.state`` shows meanwhile."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.states.away import AwayTensor, has_moved, is_away, memory_for, stands_for
from tba_offload.states.incoming import Incoming
from tba_offload.states.layout import travels
from tba_offload.states.masters import MASTER
from tba_offload.states.shards import local
from tba_offload.states.slots import SLOTS, Slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from tba_offload.states.home import Homes
    from tba_offload.states.layout import Place
    from tba_offload.states.masters import Masters
    from tba_offload.states.own_step import Entry
    from tba_offload.states.pieces import Piece
    from tba_offload.states.slots import Slot
    from tba_offload.states.subgroup import SubGroup


class Exchange:
    """Moves states between ``optimizer.state`` and the slots.

    Sub-groups that the processor updates are in slots of their own kind, and leave those before the device
    gets them.

    Args:
        optimizer: The optimizer.
        homes: Where sub-groups live.
        masters: The master copies among its parameters.
        next_use: When a sub-group is needed again; the greater, the later.
        name_of: Names a parameter, for messages.
        arrived: Called when a sub-group has got its states, which lie in a slot of the device.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        homes: Homes,
        masters: Masters,
        next_use: Callable[[SubGroup], int],
        name_of: Callable[[torch.Tensor], str],
        arrived: Callable[[SubGroup], object],
    ) -> None:
        self.slots: Slots[SubGroup] = Slots(homes)
        self.host_homes = homes.on_host()
        self.host_slots: Slots[SubGroup] = Slots(self.host_homes)
        self._optimizer = optimizer
        self._masters = masters
        self._next_use = next_use
        self._name_of = name_of
        self._arrived = weakref.WeakMethod(arrived)  # whose object has this one
        self._shared: dict[torch.Tensor, Entry] = {}

    # ---- for an update ---------------------------------------------------------------------------

    def load(self, group: SubGroup) -> Slot[SubGroup] | None:
        """Return the slot with the states of a sub-group, once they are there; ``None`` if it has none yet.

        Raises:
            TransferError: They cannot be read.
        """
        if group.layout is None:
            return None
        slot = self.slots.of(group)
        if slot is None:
            slot = self.slots.take(group.room, self._next_use, most=SLOTS - group.is_new)
            slot.read(group)
        slot.settle()
        return slot

    def entry(self, piece: Piece) -> Entry:
        """Return the states of a piece that are in memory.

        A slice gets copies, since others start from the same.
        """
        entry = self._optimizer.state.get(piece.parameter, {})
        resident = {key: value for key, value in entry.items() if not isinstance(value, AwayTensor)}
        return resident if piece.is_whole else {key: _copy(value) for key, value in resident.items()}

    def take(
        self,
        group: SubGroup,
        bound: Mapping[Piece, Mapping[str, torch.Tensor]],
        entries: Mapping[Piece, Entry],
    ) -> None:
        """Take the states that an update left.

        Args:
            group: The sub-group that was updated.
            bound: Its states as views of its slot, as the update got them.
            entries: The states that there are now.
        """
        if _has_moved(bound, entries):
            self._lay_out(group, bound, entries)
        for piece, entry in entries.items():
            self._show(group, piece, entry)

    def end(self) -> None:
        """Show what the slices of a parameter have in common, such as its count of steps."""
        for parameter, entry in self._shared.items():
            known = self._optimizer.state[parameter]
            self._optimizer.state[parameter] = {  # at once, so that nothing is lost between two calls
                key: known[key] if type(value) is AwayTensor else value for key, value in entry.items()
            }
        self._shared.clear()

    # ---- between updates -------------------------------------------------------------------------

    def is_current(self, group: SubGroup) -> bool:
        """Whether ``optimizer.state`` still shows what is away: states may be loaded, assigned or cleared."""
        return all(self._is_away(place) for place in group.places) and not any(
            isinstance(value, Incoming)
            or (key not in group.keys_of(piece) and travels(value, piece.parameter))
            for piece in group.pieces
            for key, value in self._optimizer.state.get(piece.parameter, {}).items()
        )

    def take_shown(self, groups: Iterable[SubGroup]) -> None:
        """Take the states that ``optimizer.state`` shows, and forget those that it shows no more.

        Args:
            groups: Sub-groups; where a slice of a parameter is in one, all others with slices of it too.

        Raises:
            TransferError: States that are still away cannot be read.
        """
        groups = list(groups)
        if not groups:
            return  # what slices have in common is shown when all of them are updated
        shown = {
            each: self._masters.with_states(each, self._optimizer.state.get(each, {}))
            for each in _parameters_of(groups)
        }
        of_slices: list[tuple[SubGroup, Piece, Entry]] = []
        for group in groups:
            of_slices += self._take_shown(group, shown)
            self.slots.write(group)
        for group, piece, entry in of_slices:  # which are away when all of them are taken
            self._show(group, piece, entry)
        for place in (place for group in groups for place in group.places):
            if place.key == MASTER:  # of slices, all of which are taken now
                master = place.piece.parameter
                self._masters.send_away(master, self._name_of(master))
        self.end()

    def _take_shown(
        self, group: SubGroup, shown: dict[torch.Tensor, Entry]
    ) -> list[tuple[SubGroup, Piece, Entry]]:
        """Take those of a sub-group; return what is to be shown of slices, whose bytes slots have then."""
        entries = {
            piece: {key: _of_piece(piece, value) for key, value in shown[piece.parameter].items()}
            for piece in group.pieces
        }
        bound = self._bound(group, entries)
        for piece, entry in entries.items():
            entry.update({key: bound[piece][key] for key in entry if is_away(entry[key])})
            if piece.is_whole:
                del shown[piece.parameter]  # so that its memory is free before the next one's is taken
        self._lay_out(group, bound, entries)
        for piece, entry in entries.items():
            if piece.is_whole:
                self._show(group, piece, entry)
        return [
            (group, piece, {key: _without_bytes(value) for key, value in entry.items()})
            for piece, entry in entries.items()
            if not piece.is_whole
        ]

    def _bound(
        self, group: SubGroup, entries: Mapping[Piece, Entry]
    ) -> Mapping[Piece, Mapping[str, torch.Tensor]]:
        """Return the states of a sub-group as views of its slot, if any of these are still away."""
        if not any(is_away(value) for entry in entries.values() for value in entry.values()):
            return {}
        slot = self.load(group)
        return {} if slot is None else group.views(slot.lend())

    def give_back(self, groups: Sequence[SubGroup]) -> None:
        """Put states back into ``optimizer.state``, in memory of their own; not those that were cleared.

        Args:
            groups: Sub-groups; where a slice of a parameter is in one, all others with slices of it too.

        Raises:
            TransferError: They cannot be read.
        """
        away = {place for group in groups for place in group.places if self._is_away(place)}
        wholes: dict[tuple[torch.Tensor, str], torch.Tensor] = {}
        of_slices: list[SubGroup] = []
        for group in groups:
            places = [place for place in group.places if place in away]
            slot = self._held(group)
            if slot is None and places:
                slot = self.load(group)
            if slot is not None:
                self._put_back(places, slot, wholes)
                if not all(piece.is_whole for piece in group.pieces):
                    of_slices.append(group)
                    continue
                self.slots.empty(group)
                self.host_slots.empty(group)
        for (parameter, key), whole in wholes.items():  # until all slices are there, all are away
            if key == MASTER:
                self._masters.bring_back(parameter)
            else:
                self._optimizer.state[parameter][key] = whole
        for group in of_slices:
            self.slots.empty(group)
            self.host_slots.empty(group)

    def _put_back(
        self,
        places: Iterable[Place],
        slot: Slot[SubGroup],
        wholes: dict[tuple[torch.Tensor, str], torch.Tensor],
    ) -> None:
        """Put states back that are whole; of others the slices into ``wholes``."""
        for place in places:
            parameter, view = place.piece.parameter, place.view(slot.lend())
            if place.key == MASTER:
                self._masters.fill(place.piece, view)
                if place.piece.is_whole:
                    self._masters.bring_back(parameter)
                else:
                    wholes[parameter, MASTER] = parameter
                continue
            known = self._optimizer.state[parameter]
            if place.piece.is_whole:
                known[place.key] = place.wrapped(view.to(local(parameter).device, copy=True))
                continue
            if (parameter, place.key) not in wholes:
                wholes[parameter, place.key] = memory_for(known[place.key])
            place.piece.part_of(wholes[parameter, place.key]).copy_(view)

    def drop_replaced(self, groups: Iterable[SubGroup]) -> None:
        """Give up what travels of sub-groups whose states were all replaced, written or not."""
        for group in groups:
            if not self.shows_any(group) and not self.slots.stays(group):
                self.slots.drop(group)

    def on_host(
        self, parameters: AbstractSet[torch.Tensor], groups: Iterable[SubGroup], *, masters: bool = False
    ) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Copy of states in host memory, read sub-group by sub-group.

        Args:
            parameters: Those whose states are wanted; what comes with them is copied too, but for slices of
                others, which are not all there.
            groups: The sub-groups that hold any of them.
            masters: Whether copies of master copies are wanted too.

        Raises:
            TransferError: They cannot be read.
        """
        found: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for group in groups:
            if group.layout is None:
                continue
            slot = self._held(group)
            flat = group.home.on_host(group.nbytes) if slot is None else slot.lend()
            for place in group.places:
                is_all = place.piece.is_whole or place.piece.parameter in parameters
                if is_all and (masters or place.key != MASTER):
                    _copy_to_host(place, place.view(flat), found)
        return found

    # ---- the parts of it -------------------------------------------------------------------------

    def _held(self, group: SubGroup) -> Slot[SubGroup] | None:
        """Return the slot that holds a sub-group, with its bytes; ``None`` if they are at home."""
        slot = self.host_slots.of(group) or self.slots.of(group)
        if slot is not None:
            slot.settle()
        return slot

    def shows_any(self, group: SubGroup) -> bool:
        """Whether ``optimizer.state`` shows some of its states as away, so that they are needed yet."""
        return any(map(self._is_away, group.places))

    def _is_away(self, place: Place) -> bool:
        """Whether ``optimizer.state`` shows that a state is away, or the master itself that it is."""
        if place.key == MASTER:
            return is_away(place.piece.parameter)
        parameter = place.piece.parameter
        return stands_for(self._optimizer.state.get(parameter, {}).get(place.key), parameter, place.key)

    def _lay_out(
        self,
        group: SubGroup,
        bound: Mapping[Piece, Mapping[str, torch.Tensor]],
        entries: Mapping[Piece, Entry],
    ) -> None:
        """Give the states of a sub-group places, and a slot."""
        stays = self.slots.stays(group)
        if self.slots.of(group) is not None:  # states in it are copied first, because their places change
            for piece, entry in entries.items():
                entry.update({key: _copy(entry[key]) for key in bound.get(piece, ()) if key in entry})
            self.slots.empty(group)
        group.home.release()
        if group.lay_out(entries):
            most = SLOTS - 1
            slot = self.slots.stay(group) if stays else self.slots.take(group.room, self._next_use, most=most)
            group.fill(slot.lend(), entries)
            slot.give_to(group)
            if (arrived := self._arrived()) is not None:
                arrived(group)

    def _show(self, group: SubGroup, piece: Piece, entry: Entry) -> None:
        """Show in ``optimizer.state`` the states of a piece: what is away as such, all else as it is."""
        away = group.keys_of(piece)
        if MASTER in away and piece.is_whole:
            self._masters.send_away(piece.parameter, self._name_of(piece.parameter))
        entry = {key: value for key, value in entry.items() if key != MASTER}
        if not entry and not self._optimizer.state.get(piece.parameter):
            return
        known = self._optimizer.state[piece.parameter]
        if piece.is_whole:
            for key in known.keys() - entry.keys():
                del known[key]
        for key, value in entry.items():
            if key in away:
                self._show_away(known, piece, key, value)
            elif piece.is_whole:
                known[key] = value
        if not piece.is_whole:
            self._shared[piece.parameter] = {key: known[key] if key in away else entry[key] for key in entry}

    def _show_away(self, known: Entry, piece: Piece, key: str, value: torch.Tensor) -> None:
        like = value if piece.is_whole else piece.parameter
        shown = known.get(key)
        if (
            stands_for(shown, piece.parameter, key)
            and shown.shape == like.shape
            and shown.dtype == value.dtype
        ):
            return
        name = f"{key!r} of {self._name_of(piece.parameter)}"
        away = AwayTensor(like.shape, like.stride(), value.dtype, value.device, name)
        known[key] = away.stands_for(piece.parameter, key)


def read_moved(
    optimizer: torch.optim.Optimizer,
    exchange: Exchange,
    with_any: Callable[[set[torch.Tensor]], Iterable[SubGroup]],
) -> None:
    """Read states that a program has given to another parameter, as to one in the place of the first.

    Args:
        optimizer: The optimizer.
        exchange: Reads them.
        with_any: The sub-groups of parameters.

    Raises:
        TransferError: They cannot be read.
        StatesAwayError: There are no such states any more.
    """
    moved = [
        (entry, key, value)
        for parameter, entry in optimizer.state.items()
        if isinstance(entry, dict)
        for key, value in entry.items()
        if has_moved(value, parameter, key)
    ]
    if not moved:
        return
    owners = {owner for _, _, value in moved if (owner := value.origin[0]) is not None}
    found = exchange.on_host(owners, with_any(owners))
    for entry, key, value in moved:
        owner, name = value.origin
        shown = None if owner is None else optimizer.state.get(owner, {}).get(name)
        has_another = owner is not None and stands_for(shown, owner, name) and shown is not value
        if owner is None or has_another or name not in found.get(owner, {}):
            raise value.refused("another parameter was given it when there was no such state any more")
        entry[key] = found[owner][name].to(value.device, copy=True)


def _copy_to_host(
    place: Place,
    view: torch.Tensor,
    found: dict[torch.Tensor, dict[str, torch.Tensor]],
) -> None:
    piece, key = place.piece, place.key
    entry = found.setdefault(piece.parameter, {})
    if piece.is_whole:
        entry[key] = place.wrapped(view.to("cpu", copy=True))
        return
    if key not in entry:
        entry[key] = torch.empty(piece.parameter.shape, dtype=view.dtype)
    piece.part_of(entry[key]).copy_(view)


def _has_moved(bound: Mapping[Piece, Mapping[str, torch.Tensor]], entries: Mapping[Piece, Entry]) -> bool:
    """Whether states came, went or changed their shape; one that was only replaced is copied back."""
    moved = False
    for piece, entry in entries.items():
        views = bound.get(piece, {})
        moved = moved or not views.keys() <= entry.keys()
        for key, value in entry.items():
            view = views.get(key)
            if view is None:
                moved = moved or travels(value, piece.parameter)
            elif value is not view:
                if is_alike(value, view):
                    view.copy_(value)
                    entry[key] = view
                else:
                    moved = True
    return moved


def is_alike(value: object, view: torch.Tensor) -> bool:
    """Whether a state could lie where another one does."""
    return (
        isinstance(value, torch.Tensor)
        and (value.shape, value.dtype, value.device) == (view.shape, view.dtype, view.device)
        and value.stride() == view.stride()
    )


def _of_piece(piece: Piece, value: Any) -> Any:
    """Return the part of a state that belongs to a piece.

    In memory of its own, but for the whole of a tensor.
    """
    if piece.is_whole and not isinstance(value, Incoming):
        return value
    device = piece.parameter.device
    if isinstance(value, Incoming):
        part = value.value if piece.is_whole else _part(piece, value.value)
        return part.to(device=device, dtype=value.dtype, copy=True)
    if is_away(value):
        return value
    if isinstance(value, torch.Tensor) and travels(value, piece.parameter):
        return _part(piece, value).clone()
    return _copy(value)


def _part(piece: Piece, value: torch.Tensor) -> torch.Tensor:
    return piece.part_of(value) if value.shape == piece.parameter.shape else value


def _parameters_of(groups: Iterable[SubGroup]) -> set[torch.Tensor]:
    return {piece.parameter for group in groups for piece in group.pieces}


def _without_bytes(value: Any) -> Any:
    return value.new_empty(0) if isinstance(value, torch.Tensor) and value.numel() > 1 else value


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
