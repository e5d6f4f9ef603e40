"""One update of an optimizer whose states are away: sub-group after sub-group through the slots."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tba_offload.errors import SessionError, TransferError
from tba_offload.states.exchange import Exchange, read_moved
from tba_offload.states.figures import Tally
from tba_offload.states.host_lane import HostLane, NoHostLane
from tba_offload.states.line import Line
from tba_offload.states.masters import MASTER
from tba_offload.states.pieces import is_elementwise
from tba_offload.states.slots import SLOTS
from tba_offload.store.interrupts import put_off

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from tba_offload.states.figures import StatesRecord
    from tba_offload.states.home import Homes
    from tba_offload.states.host_share import HostShare
    from tba_offload.states.masters import Masters
    from tba_offload.states.own_step import OwnStep
    from tba_offload.states.roster import Roster
    from tba_offload.states.subgroup import SubGroup


class Stream:
    """Updates an optimizer's parameters sub-group by sub-group, while the next is read and the last written.

    Args:
        optimizer: The optimizer.
        own: Its own update code.
        roster: Its sub-groups.
        homes: Where they live.
        masters: The master copies among its parameters.
        in_backward: Whether sub-groups may be updated before the step.
        share: How many the processor updates; ``None`` if all are updated on the device.

    Attributes:
        own: As given.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        own: OwnStep,
        roster: Roster,
        homes: Homes,
        masters: Masters,
        *,
        in_backward: bool = False,
        share: HostShare | None = None,
    ) -> None:
        self._optimizer = optimizer
        self.own = own
        self._roster = roster
        self._is_elementwise = is_elementwise(optimizer)
        self.line = Line(turns=self._is_elementwise and not in_backward)
        self._masters = masters
        self.exchange = Exchange(optimizer, homes, masters, self.line.next_use, roster.name_of, self._arrived)
        self._in_backward = in_backward
        self._host: NoHostLane = NoHostLane()
        if share is not None:
            self._host = HostLane(optimizer, own.kind, homes, self.exchange, roster, masters, share)
        self._tally = Tally(homes)
        self._failure: TransferError | None = None

    def step(self, options: Mapping[str, Any], done: Sequence[SubGroup] = ()) -> StatesRecord:
        """Update all parameters that have gradients.

        Args:
            options: Further arguments of the optimizer's ``step``.
            done: Sub-groups that were updated in backward.

        Raises:
            SessionError: An update before this one failed halfway.
            TransferError: States cannot be read. The parameters of some sub-groups are updated, as after an
                error inside any optimizer.
        """
        self._refuse_after_failure()
        is_followed = False
        with put_off(self):
            try:
                with self._tally.counted(), self._whole():
                    self.follow()
                    is_followed = True
                    self._update_all(done, options)
                    self.own.commit()
                    self.exchange.end()
            finally:
                self.own.commit()
                self.exchange.end()
                if is_followed:  # before that, what slices lack may lie in memory still
                    for parameter in self._roster.halves():
                        self._optimizer.state.pop(parameter, None)
        sizes = self._sizes() | {"in_backward": len(done)}
        return self._tally.record(sizes, predicted=self._host.predicted_seconds)

    def update_in_backward(self, group: SubGroup) -> None:
        """Update one sub-group before the step.

        Raises:
            TransferError: States cannot be read; this sub-group is not updated.
        """
        self._refuse_after_failure()
        with put_off(self), self._tally.counted(), self._whole():
            self.line.reach(group)
            self._read_ahead()
            self._update(group, {})
            self.exchange.slots.write(group)
            self._read_ahead()

    def prefetch(self) -> None:
        """Begin to read what is updated next, as far as there are slots for it."""
        with self._tally.counted():
            self._read_ahead()

    # ---- between updates -------------------------------------------------------------------------

    @property
    def is_current(self) -> bool:
        """Whether ``optimizer.state`` shows what is away, and nothing that others have put there."""
        return all(map(self.exchange.is_current, self._roster.groups))

    def follow(self) -> None:
        """Follow what was done to the optimizer since the last update: parameters and states may be others.

        Raises:
            TransferError: States cannot be read.
        """
        outdated = self._roster.outdated()
        read_moved(self._optimizer, self.exchange, self._roster.with_any)
        self.exchange.give_back(outdated)
        self._remove(outdated)
        stale = [group for group in self._roster.groups if not self.exchange.is_current(group)]
        stale = self._roster.with_slices(stale)
        self._host.give_up(stale)
        self.exchange.take_shown(stale)
        for number, parameters in self._roster.newcomers().items():
            having = [each for each in parameters if self._optimizer.state.get(each) or each in self._masters]
            self._roster.learn_of(number, having)
            self.exchange.take_shown(self._roster.add(number, having))

    def arrange(self, travelling: int) -> None:
        """Have the first sub-groups of :attr:`Roster.spread` travel, and the others stay in memory.

        Raises:
            TransferError: One of them cannot be read or written; those that are not arranged go on as before.
        """
        self._host.check_may_stay()
        slots, groups = self.exchange.slots, self._roster.spread
        with put_off(self):
            for group in groups[:travelling]:
                if slots.stays(group):
                    slots.leave(group)
            coming = [group for group in groups[travelling:] if not slots.stays(group)]
            for group in coming:
                slots.stay(group)
            for group in coming:
                slots.came(group)
            if all(map(slots.stays, groups)):
                slots.clear()

    def give_back(self, *, follows: bool = True) -> None:
        """Put all states back into ``optimizer.state``, and free slots and extents.

        Args:
            follows: Whether states that others have put there are taken first.

        Raises:
            TransferError: They cannot be read.
        """
        self._host.close()
        if follows:
            self.follow()
        groups = list(self._roster.groups)
        self.exchange.give_back(groups)
        self._remove(groups)
        self.exchange.slots.clear()
        self.exchange.host_slots.clear()

    def forgive(self) -> None:
        """Forget that an update failed: a checkpoint was loaded."""
        self._failure = None
        self.exchange.drop_replaced(self._roster.groups)

    def _remove(self, groups: Sequence[SubGroup]) -> None:
        self._roster.remove(groups)
        self.line.remove(groups)
        self._host.forget(groups)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Have further updates refused if states cannot be read or written within."""
        try:
            yield
        except TransferError as error:
            self._failure = error
            raise

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise SessionError(
                f"an update before this one failed halfway ({self._failure}); load a checkpoint of the model "
                "and of the optimizer before the next"
            )

    # ---- the update ------------------------------------------------------------------------------

    def _update_all(self, done: Sequence[SubGroup], options: Mapping[str, Any]) -> None:
        """Update all but those that were updated in backward."""
        early = set(done)
        groups = [group for group in self._roster.groups if group.has_gradient and group not in early]
        newcomers = self._roster.newcomers(with_gradients=True)
        with self._host.updating(groups, options) as rest:
            for group in self.line.begin(done, rest):
                self._read_ahead()
                self._update(group, options)
                self._read_ahead()
                if newcomers or self._in_backward or self.line.needs_more_than(self.exchange.slots.held()):
                    self.exchange.slots.write(group)
            for number, parameters in newcomers.items():
                self._update_newcomers(number, parameters, options)
        if not self._is_elementwise:
            self._update_empty(options)
        self.line.end()

    def _update_newcomers(
        self, number: int, parameters: list[torch.Tensor], options: Mapping[str, Any]
    ) -> None:
        """Make sub-groups of parameters that are in none yet, and update them."""
        for group in self._roster.arrivals(number, parameters):
            self.line.reach(group)
            self._update(group, options)
            self.exchange.slots.write(group)

    def _update_empty(self, options: Mapping[str, Any]) -> None:
        """Run the update for parameter groups without gradients: it may count steps all the same."""
        for number in set(range(len(self._optimizer.param_groups))) - self.own.ran_for:
            self.own.run(number, {}, options)

    def _update(self, group: SubGroup, options: Mapping[str, Any]) -> None:
        slot = self.exchange.load(group)
        bound = {} if slot is None else group.views(slot.lend())
        entries = {piece: self.exchange.entry(piece) | bound.get(piece, {}) for piece in group.pieces}
        masters = {piece: entry.pop(MASTER) for piece, entry in entries.items() if MASTER in entry}
        tensors = {piece: self._masters.tensor(piece, masters.get(piece)) for piece in group.pieces}
        if slot is not None:
            slot.touch()
        try:
            self.own.run(group.number, {tensors[piece]: entries[piece] for piece in tensors}, options)
            for piece, master in masters.items():
                self._masters.copy(piece, master)
        finally:
            states = self.own.states
            now = {piece: states.get(tensor, entries[piece]) for piece, tensor in tensors.items()}
            for piece, master in masters.items():
                now[piece] = {**now[piece], MASTER: master}
            self.exchange.take(group, bound, now)
        self._roster.learn(group)

    def _arrived(self, group: SubGroup) -> None:
        self._host.welcome(group)

    # ---- slots -----------------------------------------------------------------------------------

    def _read_ahead(self) -> None:
        """Begin to read what is updated next, as far as there are slots for it."""
        slots = self.exchange.slots
        for group in self.line.next(SLOTS - 1, slots.stays):
            if group.layout is not None and slots.of(group) is None:
                most = SLOTS - group.is_new  # new states are in memory too, before they get their places
                slot = slots.take_now(group, group.room, self.line.next_use, most)
                if slot is None:
                    return
                slot.read(group)

    def _sizes(self) -> dict[str, int]:
        slots = self.exchange.slots
        staying = [group.nbytes for group in self._roster.groups if slots.stays(group)]
        return {
            "states_bytes": sum(group.nbytes for group in self._roster.groups) - sum(staying),
            "slot_bytes": slots.nbytes,
            "sub_groups": len(self.line) + self._host.updated,
            "on_host": self._host.updated,
            "host_bytes": self._host.nbytes,
            "staying": len(staying),
            "staying_bytes": sum(staying),
        }
