"""``offload_optimizer``: the states of an optimizer lie in a store between its updates.

An update goes through the sub-groups of the optimizer. :meth:`Updates.update` is the way of one of them.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from tba_offload.config import ConfigLike, OffloadConfig, Paths, StatesConfig, read_config, with_directories
from tba_offload.device import device_of
from tba_offload.errors import NoEffectWarning, SessionError, TransferError, warn
from tba_offload.states.backward import BackwardUpdates
from tba_offload.states.checkpoints import Checkpoints
from tba_offload.states.checks import check, device_of_parameters, innermost
from tba_offload.states.entries import Entries
from tba_offload.states.groups import MASTER, Groups
from tba_offload.states.home import Homes
from tba_offload.states.host import HostLane
from tba_offload.states.parameters import is_known, is_of_torch, parameters_of
from tba_offload.states.slots import SLOTS, Order
from tba_offload.states.twin import Takeover, Twin
from tba_offload.store import open_store
from tba_offload.store.base import close_after
from tba_offload.store.interrupts import put_off

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

    from torch import nn

    from tba_offload.states.groups import SubGroup
    from tba_offload.store.base import ActivationStore, Moved

_REMEMBERED = 10_000

logger = logging.getLogger(__name__)


class Updates:
    """Updates an optimizer's parameters sub-group by sub-group, while the next is read and the last written.

    Args:
        optimizer: The optimizer.
        kind: Its class.
        config: What the user wanted.
        store: Where sub-groups live.
        names: Names of parameters in the model, as far as it is known.
        masters: The master copies among its parameters, and what they are copies of.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kind: type[torch.optim.Optimizer],
        config: OffloadConfig,
        store: ActivationStore,
        names: Mapping[torch.Tensor, str],
        masters: Mapping[torch.Tensor, torch.Tensor],
    ) -> None:
        states, device = config.states or StatesConfig(), device_of(device_of_parameters(optimizer))
        self.optimizer = optimizer
        self.homes = Homes(
            store,
            device,
            stall_limit=config.store.stall_seconds,
            keep_when_full=config.on_full == "keep",
            tell=logger.warning,
        )
        travelling = masters if states.masters == "offload" else {}
        most = states.sub_group_on(device.torch_device.type)
        self.groups = Groups(optimizer, self.homes, travelling, names, most)
        self._in_backward = states.when == "backward"
        self.order = Order(turns=is_known(optimizer) and not self._in_backward)
        self.entries = Entries(self.groups, self.order.next_use)
        self._twin = Twin(optimizer, kind)
        self._host = HostLane(self, kind, states.update)
        self._counts = _Counts()
        self._failure: TransferError | None = None

    def update(self, group: SubGroup, options: Mapping[str, Any], *, writes: bool = True) -> None:
        """Update one sub-group: read, bind, the optimizer's own step, unbind, write.

        Args:
            group: The sub-group.
            options: Further arguments of the optimizer's ``step``.
            writes: Whether it is written in any case; else only if others need its slot.
        """
        slots, entries = self.entries.slots, self.entries
        self.order.reach(group)
        self._read_ahead()
        slot = slots.load(group) if group.places else None
        bound = {} if slot is None else group.views(slot.lend())
        states = {each: entries.resident(group, each) | bound.get(each, {}) for each in group.parameters}
        masters = {each: entry.pop(MASTER) for each, entry in states.items() if MASTER in entry}
        tensors = {each: group.tensor(each, masters.get(each)) for each in group.parameters}
        if slot is not None:
            slot.hold(group)
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
        self.groups.learn(group)
        self._read_ahead()
        if writes or self.order.needs_more_than(slots.held()):
            slots.write(group)

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
        with self._guarded():
            self.follow()
            try:
                self._update_all(done, options)
                self.entries.show_slices()
            finally:
                self._twin.commit()
        counts, self._counts = self._counts, _Counts()
        slots = self.entries.slots
        staying = [group.nbytes for group in self.groups if slots.stays(group)]
        return StatesRecord(
            **asdict(counts),
            states_bytes=sum(group.nbytes for group in self.groups) - sum(staying),
            slot_bytes=slots.nbytes,
            sub_groups=len(self.order) + self._host.updated,
            staying=len(staying),
            staying_bytes=sum(staying),
            in_backward=len(done),
            predicted_seconds=self._host.predicted_seconds,
            on_host=self._host.updated,
            host_bytes=self._host.nbytes,
        )

    def _update_all(self, done: Sequence[SubGroup], options: Mapping[str, Any]) -> None:
        early = set(done)
        groups = [group for group in self.groups if group.has_gradient and group not in early]
        newcomers = self.groups.newcomers(with_gradients=True)
        with self._host.updating(groups, options) as rest:
            for group in self.order.begin(done, rest):
                self.update(group, options, writes=bool(newcomers) or self._in_backward)
            for number, parameters in newcomers.items():
                for group in self.groups.arrivals(number, parameters):
                    self.update(group, options)
        if not is_of_torch(
            self.optimizer
        ):  # one that counts steps may do so for groups without gradients too
            for number in set(range(len(self.optimizer.param_groups))) - self._twin.ran_for:
                self._twin.run(number, {}, options)
        self.order.end()

    def update_in_backward(self, group: SubGroup) -> None:
        """Update one sub-group before the step.

        Raises:
            TransferError: States cannot be read; this sub-group is not updated.
        """
        with self._guarded():
            self.update(group, {})

    def prefetch(self) -> None:
        """Begin to read what is updated next, as far as there are slots for it."""
        with self._counted():
            self._read_ahead()

    def _read_ahead(self) -> None:
        slots = self.entries.slots
        for group in self.order.next(SLOTS - 1, slots.stays):
            if group.places and slots.of(group) is None and not slots.read_ahead(group):
                return

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Count what is done within, and have further updates refused if a transfer fails."""
        if self._failure is not None:
            raise SessionError(
                f"an update before this one failed halfway ({self._failure}); load a checkpoint of the model "
                "and of the optimizer before the next"
            )
        try:
            with put_off(self), self._counted():
                yield
        except TransferError as error:
            self._failure = error
            raise

    @contextmanager
    def _counted(self) -> Iterator[None]:
        homes, counts, began = self.homes, self._counts, time.perf_counter()
        waited, read, written = homes.waited, homes.read_bytes, homes.written_bytes
        try:
            yield
        finally:
            counts.seconds += time.perf_counter() - began
            counts.waited_seconds += homes.waited - waited
            counts.read_bytes += homes.read_bytes - read
            counts.written_bytes += homes.written_bytes - written

    # ---- between updates -------------------------------------------------------------------------

    @property
    def is_current(self) -> bool:
        """Whether ``optimizer.state`` shows what is away, and nothing that others have put there."""
        return all(map(self.entries.is_current, self.groups))

    def follow(self) -> None:
        """Follow what was done to the optimizer since the last update: parameters and states may be others.

        Raises:
            TransferError: States cannot be read.
            StatesAwayError: A program has given what stands for a state to another parameter.
        """
        for parameter in self.optimizer.state:
            self.entries.check_owner(parameter)
        self.restore(self.groups.outdated())
        stale = [each for each in self.groups if not self.entries.is_current(each)]
        self._host.give_up(stale)
        self.entries.absorb(stale)
        for number, parameters in self.groups.newcomers().items():
            having = [each for each in parameters if self.groups.states_of(each)]
            self.entries.absorb(self.groups.add(number, having))

    def restore(self, groups: Sequence[SubGroup]) -> None:
        """Put the states of sub-groups back into ``optimizer.state``; their parameters count as new ones.

        Raises:
            TransferError: They cannot be read.
        """
        self.entries.restore(groups)
        self.groups.remove(groups)
        self.order.remove(groups)

    def restore_all(self) -> None:
        """Put all states back into ``optimizer.state``, and free slots and extents.

        Raises:
            TransferError: They cannot be read.
        """
        self._host.close()
        self.restore([*self.groups])
        self.entries.slots.clear()

    def loaded(self) -> None:
        """Take a checkpoint that was loaded, and forget that an update failed."""
        self._failure = None
        with put_off(self):
            for group in self.groups:
                if not (self.entries.shows_any(group) or self.entries.slots.stays(group)):
                    self.entries.slots.empty(group, drops=True)
            self.follow()

    def arrange(self, travelling: int) -> None:
        """Have the first sub-groups of :attr:`Groups.spread` travel, and the others stay in memory.

        Raises:
            TransferError: One of them cannot be read or written; those that are not arranged go on as before.
        """
        slots, groups = self.entries.slots, self.groups.spread
        with put_off(self):
            for number, group in enumerate(groups):
                if slots.stays(group) != (number >= travelling):
                    (slots.stay if number >= travelling else slots.leave)(group)
            if all(map(slots.stays, groups)):
                slots.clear()


@dataclass(slots=True)
class _Counts:
    """What was done for an update so far."""

    seconds: float = 0.0
    waited_seconds: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StatesRecord:
    """What one update of an optimizer with offloaded states was like.

    Attributes:
        seconds: The whole update, without the closure and hooks; with what of it was done in backward.
        waited_seconds: Of these, what the thread that trains waited for drives.
        read_bytes: Bytes of states that were read.
        written_bytes: Bytes of states that were written.
        states_bytes: Bytes of all states that are away between updates.
        slot_bytes: Bytes of the slots, which stay on the device.
        sub_groups: Sub-groups that were updated.
        staying: Of all, how many stay in memory between updates.
        staying_bytes: Bytes of their states.
        in_backward: Of these, how many in backward.
        predicted_seconds: What follows for ``seconds`` from the rates of device and processor, where
            ``states.update`` has both work; None elsewhere.
        on_host: Of the sub-groups, how many the processor updated.
        host_bytes: Bytes of host memory that it has for that, for states and for copies.
    """

    seconds: float
    waited_seconds: float
    read_bytes: int
    written_bytes: int
    states_bytes: int
    slot_bytes: int
    sub_groups: int
    staying: int = 0
    staying_bytes: int = 0
    in_backward: int = 0
    predicted_seconds: float | None = None
    on_host: int = 0
    host_bytes: int = 0


class OptimizerStates:
    """The offloaded states of one optimizer; made by :func:`offload_optimizer`.

    They have a store of their own, of the kind and in the directories that the configuration says. The
    optimizer stays the object that it was. Between updates ``optimizer.state`` shows tensors that have sizes
    and no bytes; whatever reads them gets an error that says what to do.

    Attributes:
        optimizer: The optimizer.
        records: What the last 10,000 updates were like, the oldest first.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OffloadConfig,
        store: ActivationStore,
        updated: Callable[[StatesRecord], object] = lambda _: None,
        modules: Sequence[nn.Module] = (),
        masters: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.records: deque[StatesRecord] = deque(maxlen=_REMEMBERED)
        self._store = store
        self._updated = updated
        self._is_open = True
        self._takeover = Takeover(optimizer)
        self._updates = Updates(
            optimizer, self._takeover.kind, config, store, _names_in(modules), masters or {}
        )
        self._backward: BackwardUpdates | None = None
        if config.states is not None and config.states.when == "backward":
            self._backward = BackwardUpdates(self._updates, config.states.micro_batches)
        try:
            self._follow()
        except BaseException:  # no room, or an interrupt: the optimizer is to go on without this
            if self._backward is not None:
                self._backward.close()
            self._updates.restore_all()
            raise
        self._checkpoints = Checkpoints(self._updates, self._loaded)
        self._takeover.begin(self._step, None if self._backward is None else self._backward.zero_grad)

    def read(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the states of a parameter, those that are away as copies in host memory.

        Raises:
            TransferError: They cannot be read.
        """
        return {key: value for key, value in self.read_all(parameter).items() if key != MASTER}

    def read_all(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the states of a parameter, and the parameter itself, as ``MASTER``, if it is such a master.

        Raises:
            TransferError: They cannot be read.
        """
        return self._checkpoints.read(parameter)

    @contextmanager
    def setting(self, parameter: torch.Tensor, *, states: bool = True) -> Iterator[None]:
        """Within, what is away of a parameter has memory, for a program to set all of it; then it is taken.

        Args:
            parameter: The parameter; if it is a master, that is set too.
            states: Whether its states are.

        Raises:
            TransferError: States of other parameters, which travel together with these, cannot be read.
        """
        if not self._is_open:  # nothing is away
            yield
            return
        with self._checkpoints.setting(parameter, states=states):
            yield

    def take(self, parameter: torch.Tensor) -> None:
        """Take the states that a program has put into ``optimizer.state[parameter]`` itself.

        The next update would do so too; until then they would be in memory. They are taken when there are as
        many of them as a sub-group has.

        Raises:
            TransferError: States of other parameters, which travel together with these, cannot be read.
        """
        if self._is_open:
            self._checkpoints.take(parameter)

    # ---- how many sub-groups stay ------------------------------------------------------------------

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the sub-groups that have states, in the order in which :meth:`arrange` has them leave."""
        return tuple(group.nbytes for group in self._updates.groups.spread)

    @property
    def device_bytes(self) -> int:
        """Bytes that sub-groups and slots take on the device between updates."""
        return self._updates.entries.slots.all_bytes

    def arrange(self, travelling: int) -> None:
        """Have a number of sub-groups travel from now on, where ``states.when`` is ``step``; the others stay.

        They stay in slots, so that ``optimizer.state`` shows all of them as if they were away. This is what
        ``states.default: auto`` calls, which goes with ``states.update: device`` only.

        Raises:
            TransferError: One of them cannot be read or written.
        """
        self._updates.arrange(travelling)

    def watch_moves(self, seen: Callable[[Moved], object] | None) -> None:
        """Have a function told of each call that moves bytes; see :meth:`ActivationStore.watch_moves`."""
        self._store.watch_moves(seen)

    # ------------------------------------------------------------------------------------------------

    def close(self, *, bring_back: bool = True) -> None:
        """Bring the states back into memory: the optimizer is as it was. May be called twice.

        What a call that was interrupted has left is done by the next one.

        Args:
            bring_back: Whether they are; without, the optimizer cannot be used any more.

        Raises:
            TransferError: They cannot be read.
        """
        if not self._is_open:
            return
        ends = True
        try:
            if bring_back:
                try:
                    self._updates.follow()
                finally:
                    self._updates.restore_all()
        except (KeyboardInterrupt, SystemExit):
            ends = False  # what is still away, the next call brings back
            raise
        finally:
            if ends:
                self._is_open = False
                if self._backward is not None:
                    self._backward.close()
                self._checkpoints.remove()
                self._takeover.end()
                self._store.close()

    def _step(self, closure: Callable[[], Any] | None, options: dict[str, Any]) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._checkpoints.forget()
        done = None if self._backward is None else self._backward.step_begins(options)
        record = self._updates.step(options) if done is None else done
        if self._backward is not None:
            self._backward.follow()
        self.records.append(record)
        self._updated(record)
        return loss

    def _follow(self) -> None:
        self._updates.follow()
        if self._backward is not None:
            self._backward.follow()

    def _loaded(self) -> None:
        self._checkpoints.forget()
        self._store.resume()  # a drive that has failed may have been seen to
        self._updates.loaded()
        if self._backward is not None:
            self._backward.forget()
            self._backward.follow()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        close_after(error, self.close)

    def __repr__(self) -> str:
        state = "closed" if not self._is_open else f"{len(self.records)} updates"
        return f"<OptimizerStates of {self._takeover.kind.__name__}: {state}>"


def offload_optimizer(
    optimizer: torch.optim.Optimizer,
    config: ConfigLike = None,
    *,
    model: nn.Module | Sequence[nn.Module] = (),
    masters: Mapping[torch.Tensor, torch.Tensor] | None = None,
    directories: Paths | None = None,
    updated: Callable[[StatesRecord], object] | None = None,
) -> OptimizerStates:
    """Keep the states of an optimizer in a store between its updates.

    An update goes through the parameters in sub-groups: while one is updated by the optimizer's own code, the
    states of the next are read and those of the last are written. So at most three sub-groups are in memory,
    however large the model is, and parameters and states get the bits that they would get without it.

    Args:
        optimizer: Any optimizer of ``torch.optim`` but LBFGS; another one that updates each parameter by
            itself where ``states.trust`` is set. It may have made updates before.
        config: As for :func:`tba_offload.attach`; its ``states``, ``store`` and ``on_full`` count.
        model: The model that it trains, or its chunks: messages name parameters as the model does, and
            ``when: backward`` with several processes needs to know that ``fully_shard`` has spread all of it.
        masters: Copies in high precision, which the optimizer updates, and the parameters of the model that
            they are copies of. Masters travel with their states, and each parameter is set to its master as
            soon as that is updated.
        directories: Where the bytes go, instead of where the policy says: one path, or one for each drive.
        updated: Called after each update with what it was like.

    Returns:
        The states. Close them, or use them as a context manager: states come back into memory then.

    Raises:
        ConfigError: The configuration is wrong.
        UnsupportedError: The optimizer cannot be updated in parts.
        StoreError: The store cannot be opened.

    Warns:
        NoEffectWarning: The optimizer updates no parameter of the model.
    """
    chosen = with_directories(read_config(config), directories)
    optimizer = innermost(optimizer)
    modules = model if isinstance(model, Sequence) else (model,)
    check(optimizer, chosen.states or StatesConfig(), modules, has_masters=bool(masters))
    if modules and not masters and set(_names_in(modules)).isdisjoint(parameters_of(optimizer)):
        warn(
            f"no parameter of this {type(optimizer).__name__} belongs to the model: offloading its states "
            "saves nothing of this training. give the optimizer that updates the model, made from "
            "model.parameters()",
            NoEffectWarning,
        )
    store = open_store(chosen.store, device=device_of(device_of_parameters(optimizer)))
    try:
        return OptimizerStates(optimizer, chosen, store, updated or (lambda _: None), modules, masters)
    except BaseException:
        store.close()
        raise


def _names_in(modules: Sequence[nn.Module]) -> dict[torch.Tensor, str]:
    return {each: name for module in modules for name, each in module.named_parameters()}
