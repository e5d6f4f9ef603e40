"""``offload_optimizer``: the states of an optimizer lie in a store between its updates."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch

from tba_offload.config import ConfigLike, OffloadConfig, Paths, StatesConfig, read_config, with_directories
from tba_offload.device import device_of
from tba_offload.states.backward import BackwardUpdates
from tba_offload.states.by_parameter import ByParameter
from tba_offload.states.checkpoints import Checkpoints
from tba_offload.states.checks import check, device_of_parameters, innermost
from tba_offload.states.home import Homes
from tba_offload.states.host_share import HostShare
from tba_offload.states.masters import MASTER, Masters
from tba_offload.states.own_step import OwnStep
from tba_offload.states.roster import Roster
from tba_offload.states.stream import Stream
from tba_offload.states.takeover import Takeover
from tba_offload.store import open_store
from tba_offload.store.base import close_after
from tba_offload.store.interrupts import put_off

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

    from torch import nn

    from tba_offload.states.exchange import Exchange
    from tba_offload.states.figures import StatesRecord
    from tba_offload.store.base import ActivationStore, Moved

_REMEMBERED = 10_000

logger = logging.getLogger(__name__)


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
        updated: Callable[[StatesRecord], object],
        masters: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        states, device = config.states or StatesConfig(), device_of_parameters(optimizer)
        most = states.sub_group_on(device.type)
        in_backward = states.when == "backward"
        self.optimizer = optimizer
        self.records: deque[StatesRecord] = deque(maxlen=_REMEMBERED)
        self._store = store
        self._updated = updated
        self._is_open = True
        self._expected: float | None = None
        homes = Homes(
            store,
            device_of(device),
            stall_limit=config.store.stall_seconds,
            keep_when_full=config.on_full == "keep",
            tell=logger.warning,
        )
        self._takeover = Takeover(optimizer)
        copies = masters if masters and states.masters == "offload" else {}
        own_masters = Masters(optimizer, copies)
        self._roster = Roster(optimizer, homes, own_masters, most)
        own = OwnStep(optimizer, self._takeover.kind)
        has_lanes = states.update != "device" and homes.device.runs_behind  # a CPU's memory is the host's
        share = HostShare(states.host_percent) if has_lanes else None
        self._stream = Stream(
            optimizer, own, self._roster, homes, own_masters, in_backward=in_backward, share=share
        )
        self._backward: BackwardUpdates | None = None
        if in_backward:
            self._backward = BackwardUpdates(
                optimizer, self._stream, self._roster, states.micro_batches, homes.device
            )
        try:
            self._follow()
        except BaseException:  # no room, or an interrupt: the optimizer is to go on without this
            if self._backward is not None:
                self._backward.close()
            self._stream.give_back(follows=False)
            raise
        on_host = partial(_on_host, self._roster, self._stream.exchange)
        with_masters = partial(on_host, masters=True)
        self._by_parameter = ByParameter(optimizer, with_masters, own_masters, self._stream.follow, most)
        self._checkpoints = Checkpoints(optimizer, on_host, self._is_saved, self._loaded)
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
        return self._by_parameter.read(parameter)

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
        with self._by_parameter.setting(parameter, states=states):
            yield

    def take(self, parameter: torch.Tensor) -> None:
        """Take the states that a program has put into ``optimizer.state[parameter]`` itself.

        The next update would do so too; until then they would be in memory. They are taken when there are as
        many of them as a sub-group has.

        Raises:
            TransferError: States of other parameters, which travel together with these, cannot be read.
        """
        if self._is_open:
            self._by_parameter.take(parameter)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the sub-groups that have states, in the order in which :meth:`arrange` has them leave."""
        return tuple(group.nbytes for group in self._roster.spread)

    @property
    def device_bytes(self) -> int:
        """Bytes that sub-groups and slots take on the device between updates."""
        return self._stream.exchange.slots.all_bytes

    @property
    def turns(self) -> bool:
        """Whether the next update goes in the reverse order of the last one."""
        return self._stream.line.turns

    def arrange(self, travelling: int) -> None:
        """Have a number of sub-groups travel from now on, where ``states.when`` is ``step``; the others stay.

        They stay in slots, so that ``optimizer.state`` shows all of them as if they were away.

        Raises:
            TransferError: One of them cannot be read or written.
            UnsupportedError: The processor updates some of them, by ``states.update``.
        """
        self._stream.arrange(travelling)

    def expect(self, seconds: float) -> None:
        """Have the records of updates tell that they were expected to take so long."""
        self._expected = seconds

    def watch_moves(self, seen: Callable[[Moved], object] | None) -> None:
        """Have a function told of each call that moves bytes; see :meth:`ActivationStore.watch_moves`."""
        self._store.watch_moves(seen)

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
                self._stream.give_back()
        except (KeyboardInterrupt, SystemExit):
            ends = False  # what is still away, the next call brings back
            raise
        finally:
            if ends:
                self._is_open = False
                if self._backward is not None:
                    self._backward.close()
                self._checkpoints.remove()
                del self._checkpoints  # it knows our methods: the model would live until garbage is collected
                self._takeover.end()
                self._store.close()

    def _step(self, closure: Callable[[], Any] | None, options: dict[str, Any]) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._by_parameter.forget()
        done = None if self._backward is None else self._backward.step_begins(options)
        record = self._stream.step(options) if done is None else done
        if self._expected is not None:
            record = replace(record, predicted_seconds=self._expected)
        if self._backward is not None:
            self._backward.follow()
        self.records.append(record)
        self._updated(record)
        return loss

    def _follow(self) -> None:
        self._stream.follow()
        if self._backward is not None:
            self._backward.follow()

    def _is_saved(self) -> None:
        with put_off(self):
            self._stream.follow()

    def _loaded(self) -> None:
        self._by_parameter.forget()
        self._store.resume()  # a drive that has failed may have been seen to
        with put_off(self):
            self._stream.forgive()
            if self._backward is not None:
                self._backward.forget()
            self._follow()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        close_after(error, self.close)

    def __repr__(self) -> str:
        state = "closed" if not self._is_open else f"{len(self.records)} updates"
        return f"<OptimizerStates of {self._takeover.kind.__name__}: {state}>"


def _on_host(
    roster: Roster, exchange: Exchange, parameters: set[torch.Tensor], *, masters: bool = False
) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """Copy of states of parameters in host memory, and of others that travel with them."""
    return exchange.on_host(parameters, roster.with_any(parameters), masters=masters)


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
        model: The model that it trains, or its chunks: ``when: backward`` with several processes needs to
            know that ``fully_shard`` has spread all of it.
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
    """
    chosen = with_directories(read_config(config), directories)
    optimizer = innermost(optimizer)
    modules = model if isinstance(model, Sequence) else (model,)
    check(optimizer, chosen.states or StatesConfig(), modules, has_masters=bool(masters))
    store = open_store(chosen.store, device=device_of(device_of_parameters(optimizer)))
    try:
        return OptimizerStates(optimizer, chosen, store, updated or _nothing, masters)
    except BaseException:
        store.close()
        raise


def _nothing(_: StatesRecord) -> None:
    """Record that the record is kept, and nothing else is told."""
