"""One update of an optimizer whose states are away: sub-group after sub-group through the slots."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tba_offload.errors import SessionError, TransferError
from tba_offload.states.exchange import Exchange
from tba_offload.states.journal import Journal
from tba_offload.states.pieces import is_elementwise
from tba_offload.states.slots import SLOTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from tba_offload.states.home import Homes
    from tba_offload.states.own_step import OwnStep
    from tba_offload.states.roster import Roster
    from tba_offload.states.subgroup import SubGroup

_FAR = 2**62


@dataclass(frozen=True, slots=True)
class StatesRecord:
    """What one update of an optimizer with offloaded states was like.

    Attributes:
        seconds: The whole update, without the closure and hooks; what of it was done in backward too.
        waited_seconds: Of these, waiting for drives.
        read_bytes: Bytes of states that were read.
        written_bytes: Bytes of states that were written.
        states_bytes: Bytes of all states that are away between updates.
        slot_bytes: Bytes of the slots, which stay on the device, and of what is kept to take updates back.
        sub_groups: Sub-groups that were updated.
        in_backward: Of these, how many in backward.
        taken_back: How many had been updated in backward in vain: what they were updated with has changed.
    """

    seconds: float
    waited_seconds: float
    read_bytes: int
    written_bytes: int
    states_bytes: int
    slot_bytes: int
    sub_groups: int
    in_backward: int = 0
    taken_back: int = 0


@dataclass(slots=True)
class _Tally:
    """What was done since the last record."""

    seconds: float = 0.0
    waited: float = 0.0
    read: int = 0
    written: int = 0
    taken_back: int = 0


class Stream:
    """Updates an optimizer's parameters sub-group by sub-group, while the next is read and the last written.

    An optimizer that treats each element by itself is updated in one order and the next time in the reverse
    one: what was updated last is still in its slot then, and needs neither be written nor read.

    Args:
        optimizer: The optimizer.
        own: Its own update code.
        roster: Its sub-groups.
        homes: Where they live.
        in_backward: Whether sub-groups may be updated before the step; then an update is all or nothing.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        own: OwnStep,
        roster: Roster,
        homes: Homes,
        *,
        in_backward: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._own = own
        self._roster = roster
        self._homes = homes
        self.exchange = Exchange(optimizer, homes, self._next_use, roster.name_of)
        self._journal = Journal(optimizer, homes, self.exchange.slots) if in_backward else None
        self._is_elementwise = is_elementwise(optimizer)
        self._turns = self._is_elementwise and not in_backward
        self._is_reversed = False
        self._line: list[SubGroup] = []
        self._places: dict[SubGroup, int] = {}
        self._at = 0
        self._failure: TransferError | None = None
        self._tally = _Tally()

    def step(self, options: Mapping[str, Any]) -> StatesRecord:
        """Updates all parameters that have gradients.

        Args:
            options: Further arguments of the optimizer's ``step``.

        Raises:
            SessionError: An update before this one failed halfway.
            TransferError: States cannot be read; the parameters of some sub-groups are updated, as after an
                error inside any optimizer.
        """
        self._refuse_after_failure()
        early = () if self._journal is None else self._journal.noted
        try:
            with self._counted(), self._whole():
                self.follow()
                self._update_all(early, options)
                self._accept()
        finally:
            self._own.commit()
            self.exchange.end()
        return self._record(len(early))

    def update_in_backward(self, group: SubGroup) -> None:
        """Updates one sub-group before the step.

        Raises:
            TransferError: States cannot be read; nothing is changed by this update and those before it.
        """
        self._refuse_after_failure()
        with self._counted(), self._whole():
            self._at = self._places.get(group, len(self._line) - 1)
            self._read_ahead()
            self._update(group, {})
            self._write(group)
            self._read_ahead()

    def take_back(self) -> None:
        """Undoes what was updated in backward.

        Raises:
            TransferError: It cannot be read back.
        """
        if self._journal is None or not self._journal.noted:
            return
        self._tally.taken_back += len(self._journal.noted)
        try:
            self._journal.take_back()
        except TransferError as error:
            self._failure = error
            raise
        finally:
            self._own.discard()
            self.exchange.forget()

    def prefetch(self) -> None:
        """Begins to read what is updated next, as far as there are slots for it."""
        with self._counted():
            self._read_ahead()

    def follow(self) -> None:
        """Follows what was done to the optimizer since the last update: parameters and states may be others.

        Raises:
            TransferError: States cannot be read.
        """
        outdated = self._roster.outdated()
        self.exchange.give_back(outdated)
        self._remove(outdated)
        stale = [group for group in self._roster.groups if not self.exchange.is_current(group)]
        self.exchange.take_shown(self._roster.with_slices(stale))
        for number, parameters in self._roster.newcomers().items():
            having = [each for each in parameters if self._optimizer.state.get(each)]
            self._roster.learn_of(number, having)
            self.exchange.take_shown(self._roster.add(number, having))

    def give_back(self) -> None:
        """Puts all states back into ``optimizer.state``, and frees slots and extents.

        Raises:
            TransferError: They cannot be read.
        """
        self.follow()
        groups = list(self._roster.groups)
        self.exchange.give_back(groups)
        self._remove(groups)
        self.exchange.slots.clear()
        if self._journal is not None:
            self._journal.clear()

    def forgive(self) -> None:
        """Forgets that an update failed: a checkpoint was loaded."""
        self._failure = None

    def _remove(self, groups: Sequence[SubGroup]) -> None:
        self._roster.remove(groups)
        if self._journal is not None:
            self._journal.forget(groups)
        gone = set(groups)
        self._line_up([group for group in self._line if group not in gone])

    # ---- all or nothing --------------------------------------------------------------------------

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """What fails within is undone where that is possible; else further updates are refused."""
        try:
            yield
        except BaseException as error:
            if self._journal is not None:
                self.take_back()
            elif isinstance(error, TransferError):
                self._failure = error
            raise

    def _accept(self) -> None:
        if self._journal is not None:
            self._journal.accept()
            self._at = -1  # the next update goes in the same order

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise SessionError(
                f"an update before this one failed halfway ({self._failure}); load a checkpoint of the model "
                "and of the optimizer before the next"
            )

    # ---- figures ---------------------------------------------------------------------------------

    @contextmanager
    def _counted(self) -> Iterator[None]:
        homes, tally = self._homes, self._tally
        began, waited = time.perf_counter(), homes.waited
        read, written = homes.read_bytes, homes.written_bytes
        try:
            yield
        finally:
            tally.seconds += time.perf_counter() - began
            tally.waited += homes.waited - waited
            tally.read += homes.read_bytes - read
            tally.written += homes.written_bytes - written

    def _record(self, in_backward: int) -> StatesRecord:
        tally, self._tally = self._tally, _Tally()
        journal = 0 if self._journal is None else self._journal.nbytes
        return StatesRecord(
            seconds=tally.seconds,
            waited_seconds=tally.waited,
            read_bytes=tally.read,
            written_bytes=tally.written,
            states_bytes=sum(group.nbytes for group in self._roster.groups),
            slot_bytes=self.exchange.slots.nbytes + journal,
            sub_groups=len(self._line),
            in_backward=in_backward,
            taken_back=tally.taken_back,
        )

    # ---- the order -------------------------------------------------------------------------------

    def _update_all(self, early: Sequence[SubGroup], options: Mapping[str, Any]) -> None:
        """Updates all but those that were updated in backward."""
        done = set(early)
        groups = [group for group in self._roster.groups if group.has_gradient and group not in done]
        self._line_up([*early, *(groups[::-1] if self._is_reversed else groups)])
        newcomers = self._with_gradients()
        for place, group in enumerate(tuple(self._line[len(early) :]), len(early)):
            self._at = place
            self._read_ahead()
            self._update(group, options)
            self._read_ahead()
            if newcomers or self._journal is not None or self._is_crowded():
                self._write(group)
        for number, parameters in newcomers.items():
            self._update_newcomers(number, parameters, options)
        if not self._is_elementwise:
            self._update_empty(options)
        self._is_reversed = self._turns and not self._is_reversed

    def _line_up(self, groups: list[SubGroup]) -> None:
        self._line = groups
        self._places = {group: place for place, group in enumerate(groups)}

    def _with_gradients(self) -> dict[int, list[torch.Tensor]]:
        found = self._roster.newcomers()
        having = {number: [each for each in found[number] if each.grad is not None] for number in found}
        return {number: parameters for number, parameters in having.items() if parameters}

    def _update_newcomers(
        self, number: int, parameters: list[torch.Tensor], options: Mapping[str, Any]
    ) -> None:
        """Makes sub-groups of parameters that are in none yet, and updates them."""
        first = self._roster.add_first(number, parameters)
        for group in first:
            self._update_new(group, options)
        for group in self._roster.add(number, self._roster.without_group(parameters)):
            self._update_new(group, options)

    def _update_new(self, group: SubGroup, options: Mapping[str, Any]) -> None:
        self._at = self._places[group] = len(self._line)
        self._line.append(group)
        self._update(group, options)
        self._write(group)

    def _update_empty(self, options: Mapping[str, Any]) -> None:
        """Runs the update for parameter groups without gradients: it may count steps all the same."""
        for number in set(range(len(self._optimizer.param_groups))) - self._own.ran_for:
            self._own.run(number, {}, options)

    def _update(self, group: SubGroup, options: Mapping[str, Any]) -> None:
        slot = self.exchange.load(group)
        if self._journal is not None:
            self._journal.note(group)
        bound = {} if slot is None else group.views(slot.bytes)
        tensors = {piece: piece.tensor() for piece in group.pieces}
        entries = {
            tensor: self.exchange.entry(piece) | bound.get(piece, {}) for piece, tensor in tensors.items()
        }
        if slot is not None:
            slot.touch()
        try:
            self._own.run(group.number, entries, options)
        finally:
            states = self._own.states
            now = {piece: states.get(tensor, entries[tensor]) for piece, tensor in tensors.items()}
            self.exchange.take(group, bound, now)
        self._roster.learn(group)

    # ---- slots -----------------------------------------------------------------------------------

    def _read_ahead(self) -> None:
        """Begins to read what is updated next, as far as there are slots for it."""
        slots = self.exchange.slots
        for group in self._line[self._at + 1 : self._at + SLOTS]:
            if group.layout is not None and slots.of(group) is None:
                slot = slots.take_now(group, self._next_use)
                if slot is None:
                    return
                slot.read(group)

    def _write(self, group: SubGroup) -> None:
        slot = self.exchange.slots.of(group)
        if slot is not None:
            slot.write()

    def _is_crowded(self) -> bool:
        """Whether a sub-group that is still to be updated has no slot."""
        upcoming = len(self._line) - self._at - 1
        return upcoming > sum(self._places.get(held, -1) > self._at for held in self.exchange.slots.held())

    def _next_use(self, group: SubGroup) -> int:
        """When a sub-group is needed again: in this update, or later, in the order of the next one."""
        place = self._places.get(group)
        if place is None:
            return 2 * _FAR
        if place > self._at:
            return place
        if place == self._at:
            return -1  # it is being updated
        return _FAR - place if self._turns else _FAR + place
