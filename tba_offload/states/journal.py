"""What an update has changed so far, so that all of it can be taken back until all of it is done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tba_offload.errors import TransferError
from tba_offload.states.away import AwayTensor
from tba_offload.states.layout import side_by_side
from tba_offload.states.slots import Slots
from tba_offload.store.extents import BLOCK, round_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.states.home import Homes
    from tba_offload.states.own_step import Entry
    from tba_offload.states.subgroup import SubGroup

_BUFFERS = 2
"""Parameters of one sub-group are copied while those of the last are written."""


class NoJournal:
    """Updates are made in place, and cannot be taken back."""

    is_kept = False

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return 0

    @property
    def noted(self) -> Sequence[SubGroup]:
        """The sub-groups whose update can be taken back."""
        return ()

    def note(self, group: SubGroup) -> None:
        """Its update is about to begin."""

    def accept(self) -> None:
        """Record that the update is done."""

    def take_back(self) -> None:
        """There is nothing to be taken back."""

    def forget(self, groups: Sequence[SubGroup]) -> None:
        """Record that these sub-groups are no more."""

    def clear(self) -> None:
        """There is nothing to be freed."""


class Journal(NoJournal):
    """Keeps what sub-groups had before the update that is under way.

    States are not overwritten: an updated sub-group is written beside what it was. The parameters, which the
    update changes in place, are written before. What stays in memory, as counts of steps, is copied.

    Args:
        optimizer: The optimizer.
        homes: Where sub-groups live.
        slots: The slots of the states.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, homes: Homes, slots: Slots[SubGroup]) -> None:
        self._optimizer = optimizer
        self._slots = slots
        self._buffers: Slots[_Undo] = Slots(homes)
        self._noted: dict[SubGroup, dict[torch.Tensor, Entry | None]] = {}
        self._undo: dict[SubGroup, _Undo] = {}
        self._count = 0

    is_kept = True

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, which stay on the device."""
        return self._buffers.nbytes

    @property
    def noted(self) -> Sequence[SubGroup]:
        """The sub-groups that were updated, in the order of it."""
        return tuple(self._noted)

    def note(self, group: SubGroup) -> None:
        """Take down what a sub-group has whose update is about to begin.

        Raises:
            TransferError: Something cannot be written, and the policy says that this is an error.
        """
        slot = self._slots.of(group)
        if slot is not None:  # so that what it holds lies at home as well
            slot.write()
            slot.settle()
        undo = self._undo.setdefault(group, _Undo(group))
        held = self._buffers.of(undo)
        if held is not None:  # since its last update
            held.clear()
        self._count += 1
        undo.begin(self._count)
        buffer = self._buffers.take(undo.nbytes, _Undo.age, most=_BUFFERS)
        buffer.give_to(undo)
        undo.save(buffer.lend())
        buffer.write()
        self._noted[group] = {piece.parameter: self._entry_of(piece.parameter) for piece in group.pieces}
        group.begin_version()

    def accept(self) -> None:
        """Record that the update is done as a whole."""
        noted, self._noted = self._noted, {}
        for group in noted:
            group.end_version()

    def take_back(self) -> None:
        """Put back what was noted, the latest first.

        Raises:
            TransferError: Parameters of some sub-groups cannot be read back; all else was put back.
        """
        failed: TransferError | None = None
        while self._noted:
            group = next(reversed(self._noted))
            self._take_states_back(group)
            try:
                self._take_parameters_back(group)
            except TransferError as error:
                failed = error
            del self._noted[group]
        if failed is not None:
            raise failed

    def _take_states_back(self, group: SubGroup) -> None:
        slot = self._slots.of(group)
        if slot is not None:
            slot.drop()
        for parameter, entry in self._noted[group].items():
            self._put_back(parameter, entry)
        group.take_back()

    def _take_parameters_back(self, group: SubGroup) -> None:
        undo = self._undo[group]
        buffer = self._buffers.of(undo)
        if buffer is None:
            buffer = self._buffers.take(undo.nbytes, _Undo.age, most=_BUFFERS)
            buffer.read(undo)
        buffer.settle()
        undo.restore(buffer.lend())

    def forget(self, groups: Sequence[SubGroup]) -> None:
        """Give up what belongs to sub-groups that are no more."""
        for group in groups:
            undo = self._undo.pop(group, None)
            if undo is not None:
                buffer = self._buffers.of(undo)
                if buffer is not None:
                    buffer.clear()
                undo.home.release()

    def clear(self) -> None:
        """Give up everything, and free the memory."""
        self.forget(tuple(self._undo))
        self._buffers.clear()

    # ---- what stays in memory --------------------------------------------------------------------

    def _entry_of(self, parameter: torch.Tensor) -> Entry | None:
        entry = self._optimizer.state.get(parameter)
        if entry is None:
            return None
        return {key: _Value(value, _copy(value)) for key, value in entry.items()}

    def _put_back(self, parameter: torch.Tensor, entry: Entry | None) -> None:
        if entry is None:
            self._optimizer.state.pop(parameter, None)
            return
        self._optimizer.state[parameter] = {key: value.as_it_was() for key, value in entry.items()}


class _Value(NamedTuple):
    """A state that stays in memory: the object, and a copy if an update may change it in place."""

    value: Any
    copy: torch.Tensor | None

    def as_it_was(self) -> Any:
        if self.copy is not None:
            self.value.copy_(self.copy)
        return self.value


def _copy(value: Any) -> torch.Tensor | None:
    if not isinstance(value, torch.Tensor) or isinstance(value, AwayTensor):
        return None
    return value.detach().clone()


class _Undo:
    """The parameters of a sub-group as they were before an update.

    Args:
        group: The sub-group.

    Attributes:
        home: Where they live.
    """

    def __init__(self, group: SubGroup) -> None:
        self.home = group.home.another("old values")
        self._pieces = group.pieces
        self._number = 0

    def begin(self, number: int) -> None:
        """Record that an update begins, whose number is greater than those before.

        Data types may be others by now.
        """
        self._number = number
        starts, end = side_by_side(piece.nbytes for piece in self._pieces)
        self._places = list(zip(self._pieces, starts, strict=True))
        self.nbytes = max(round_up(end, BLOCK), BLOCK)

    def age(self) -> int:
        """Return the greater, the older."""
        return -self._number

    def save(self, flat: torch.Tensor) -> None:
        """Copy the parameters there."""
        for piece, start in self._places:
            own = piece.own(piece.parameter)
            _view(flat, start, own).copy_(own)

    def restore(self, flat: torch.Tensor) -> None:
        """Copy them back."""
        for piece, start in self._places:
            own = piece.own(piece.parameter)
            own.copy_(_view(flat, start, own))


def _view(flat: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    return flat[start : start + like.nbytes].view(like.dtype).view(like.shape)
