"""The updates of an optimizer whose states are offloaded, one sub-group after another."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tba_offload.config import OffloadConfig, StatesConfig
from tba_offload.errors import SessionError, TransferError
from tba_offload.states.entries import Entries
from tba_offload.states.groups import MASTER, Groups
from tba_offload.states.home import Homes
from tba_offload.states.host import HostUpdates
from tba_offload.states.parameters import device_of_parameters, is_known, is_of_torch
from tba_offload.states.slots import SLOTS, Order
from tba_offload.states.twin import Twin

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

    import torch

    from tba_offload.states.groups import SubGroup
    from tba_offload.store.multi import MultiStore


class Updates:
    """Updates of one optimizer, one sub-group after another.

    During the update of a sub-group, the next sub-group is read and the previous sub-group is written.

    Args:
        optimizer: The optimizer.
        kind: Class of the optimizer.
        config: The user's configuration.
        store: The store of the sub-groups.
        names: Names of parameters in the model, if known.
        masters: Maps each master copy among the parameters to its model parameter.
    """

    _is_early = False
    """Whether sub-groups are updated in backward, before ``step()``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kind: type[torch.optim.Optimizer],
        config: OffloadConfig,
        store: MultiStore,
        names: Mapping[torch.Tensor, str],
        masters: Mapping[torch.Tensor, torch.Tensor],
    ) -> None:
        states, device = config.states or StatesConfig(), device_of_parameters(optimizer)
        self.optimizer = optimizer
        self.homes = Homes(store, device)
        offloaded = masters if states.masters == "offload" else {}
        most = states.sub_group_on(device.torch_device.type)
        self.groups = Groups(optimizer, self.homes, offloaded, names, most)
        self.micro_batches = states.micro_batches
        self.order = Order(turns=is_known(optimizer) and not self._is_early)
        self.entries = Entries(self.groups, self.order.next_use)
        self._twin = Twin(optimizer, kind)
        self._host = HostUpdates(self, kind, states.update)
        self._record = StatesRecord()
        self._failure: TransferError | None = None

    def update(self, group: SubGroup, options: Mapping[str, Any]) -> None:
        """Update one sub-group: read its states, run the optimizer's own step, and write the states.

        Args:
            group: The sub-group.
            options: Further arguments of the optimizer's ``step``.
        """
        slots, entries = self.entries.slots, self.entries
        self.order.reach(group)
        self._read_ahead()
        bound = entries.bound(group)
        states = {each: entries.resident(group, each) | bound.get(each, {}) for each in group.parameters}
        masters = {each: entry.pop(MASTER) for each, entry in states.items() if MASTER in entry}
        tensors = {each: group.tensor(each, masters.get(each)) for each in group.parameters}
        try:
            self._twin.run(group.number, {tensors[each]: states[each] for each in tensors}, options)
            for parameter, master in masters.items():
                self.groups.model_part(group, parameter).copy_(master)
        finally:
            left = {each: self._twin.states.pop(tensors[each], states[each]) for each in group.parameters}
            for parameter, master in masters.items():
                left[parameter] = {**left[parameter], MASTER: master}
            entries.take(group, bound, left)
        self._twin.check_rest()
        self._read_ahead()
        if self._is_early or None in map(slots.of, self.order.upcoming()):  # another sub-group needs the slot
            slots.write(group)
        self._record.sub_groups += 1

    def step(self, options: Mapping[str, Any]) -> StatesRecord:
        """Update all parameters that have gradients.

        Args:
            options: Further arguments of the optimizer's ``step``.

        Raises:
            SessionError: An earlier update failed after some parameters were updated.
            TransferError: States cannot be read. Some parameters may already be updated.
        """
        return self._make(options)

    def _make(self, options: Mapping[str, Any], done: Sequence[SubGroup] = ()) -> StatesRecord:
        with self._guarded():
            self.follow()
            try:
                self._update_all(done, options)
                self.entries.show_slices()
            finally:
                self._twin.commit()
        record, self._record = self._record, StatesRecord()
        staying = [group.nbytes for group in self.groups if self.entries.slots.stays(group)]
        record.staying, record.staying_bytes = len(staying), sum(staying)
        record.states_bytes = sum(group.nbytes for group in self.groups) - record.staying_bytes
        record.slot_bytes = self.entries.slots.nbytes - record.staying_bytes
        record.in_backward = len(done)
        return record

    def _update_all(self, done: Sequence[SubGroup], options: Mapping[str, Any]) -> None:
        self.groups.add(lambda each: each.grad is not None)
        early = set(done)
        groups = [group for group in self.groups if group.moving and group not in early]
        with self._host.updating(groups, options, self._record) as rest:
            for group in self.order.begin(done, rest):
                self.update(group, options)
        # An unknown optimizer may count steps of groups without gradients.
        if not is_of_torch(self.optimizer):
            updated = {group.number for group in (*done, *groups)}
            for number in set(range(len(self.optimizer.param_groups))) - updated:
                self._twin.run(number, {}, options)
        self.order.end()

    def _read_ahead(self) -> None:
        slots = self.entries.slots
        offloaded = [group for group in self.order.upcoming() if not slots.stays(group)]
        for group in offloaded[: SLOTS - 1]:
            if group.places and slots.of(group) is None and not slots.read_ahead(group):
                return

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Count transfers in the ``with`` block. If a transfer fails, reject all later updates."""
        if self._failure is not None:
            why = f"an earlier update of the optimizer failed halfway: {self._failure}"
            raise SessionError(f"{why}. Load a checkpoint of the model and the optimizer")
        homes, record, began = self.homes, self._record, time.perf_counter()
        waited, read, written = homes.waited, homes.read_bytes, homes.written_bytes
        try:
            with interrupts_put_off():
                yield
        except TransferError as error:
            self._failure = error
            raise
        finally:
            record.seconds += time.perf_counter() - began
            record.waited_seconds += homes.waited - waited
            record.read_bytes += homes.read_bytes - read
            record.written_bytes += homes.written_bytes - written

    # ---- between updates -------------------------------------------------------------------------

    def follow(self) -> None:
        """Apply changes that the program has made to parameters and states since the last update.

        Raises:
            TransferError: States cannot be read.
            StatesAwayError: A placeholder is at the wrong parameter or key. No state has changed.
        """
        self.entries.check_owners()
        if not self.groups.are_current():
            self.restore()
        stale = [each for each in self.groups if not self.entries.is_current(each)]
        self._host.give_up(stale)
        self.entries.absorb(stale)
        self.entries.absorb(self.groups.add(lambda each: bool(self.groups.states_of(each))))

    def restore(self) -> None:
        """Put all states back into ``optimizer.state``, free slots and extents, and remove the sub-groups.

        Raises:
            TransferError: The states cannot be read.
        """
        self.entries.restore()
        self.groups.clear()
        self.order.begin((), ())

    def loaded(self) -> None:
        """Offload the states of a loaded checkpoint, and allow updates again after a failed update."""
        self._failure = None
        with interrupts_put_off():
            for group in self.groups:
                if not (self.entries.shows_any(group) or self.entries.slots.stays(group)):
                    self.entries.slots.drop(group)
            self.follow()

    def close(self) -> None:
        """End the helper threads."""
        self._host.close()


@contextmanager
def interrupts_put_off() -> Iterator[None]:
    """Delay the first Ctrl-C until the end of the ``with`` block, when states are consistent.

    A second Ctrl-C raises ``KeyboardInterrupt`` immediately. Outside of the main thread, or if the program
    has its own handler for Ctrl-C, nothing is delayed.
    """
    handler, came = signal.default_int_handler, False

    def put_off(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            handler(number, frame)
        came = True

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not handler:
        yield
        return
    signal.signal(signal.SIGINT, put_off)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came:
        raise KeyboardInterrupt


@dataclass(slots=True)
class StatesRecord:
    """Figures of one update of an optimizer with offloaded states.

    Attributes:
        seconds: Duration of the update, including updates in backward. The closure and the hooks of the
            optimizer step are excluded.
        waited_seconds: Seconds in which the training thread waited for transfers.
        read_bytes: Bytes of states that were read.
        written_bytes: Bytes of states that were written.
        states_bytes: Bytes of all states that are offloaded between updates.
        slot_bytes: Bytes of the slots on the device, without the sub-groups that stay in memory.
        sub_groups: Number of updated sub-groups.
        staying: Number of sub-groups that stay in memory between updates.
        staying_bytes: Bytes of the states that stay in memory between updates.
        in_backward: Number of sub-groups updated in backward.
        predicted_seconds: Predicted duration of the update, from measured rates of device and CPU; ``None``
            without a prediction.
        on_host: Number of sub-groups updated by the CPU.
    """

    seconds: float = 0.0
    waited_seconds: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0
    states_bytes: int = 0
    slot_bytes: int = 0
    sub_groups: int = 0
    staying: int = 0
    staying_bytes: int = 0
    in_backward: int = 0
    predicted_seconds: float | None = None
    on_host: int = 0
