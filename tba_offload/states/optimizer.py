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

from tba_offload.config import ConfigLike, OffloadConfig, Paths, read_config, with_directories
from tba_offload.config.options import StatesConfig
from tba_offload.device import device_of
from tba_offload.device.peers import has_peers
from tba_offload.errors import UnsupportedError
from tba_offload.states.by_parameter import ByParameter
from tba_offload.states.checkpoints import Checkpoints
from tba_offload.states.early import Early
from tba_offload.states.home import Homes
from tba_offload.states.host_share import HostShare
from tba_offload.states.masters import MASTER, Masters
from tba_offload.states.own_step import OwnStep
from tba_offload.states.pieces import is_known, is_of_torch, parameters_of
from tba_offload.states.roster import Roster
from tba_offload.states.shards import is_distributed, is_fully_sharded
from tba_offload.states.stream import Stream
from tba_offload.states.takeover import Takeover, is_taken
from tba_offload.store import open_store
from tba_offload.store.base import close_after

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
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
        modules: Sequence[nn.Module] = (),
        masters: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        states, device = config.states or StatesConfig(), _device_of(optimizer)
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
        self._early: Early | None = None
        if in_backward:
            frees = states.gradients == "free"
            self._early = Early(
                optimizer, self._stream, self._roster, modules, frees=frees, device=homes.device
            )
        self._follow()
        on_host = partial(_on_host, self._roster, self._stream.exchange)
        with_masters = partial(on_host, masters=True)
        self._by_parameter = ByParameter(optimizer, with_masters, own_masters, self._stream.follow, most)
        self._checkpoints = Checkpoints(optimizer, on_host, self._is_saved, self._loaded)
        self._takeover.begin(self._step, None if self._early is None else self._early.zero_grad)

    def read(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The states of a parameter, those that are away as copies in host memory.

        Raises:
            TransferError: They cannot be read.
        """
        return {key: value for key, value in self.read_all(parameter).items() if key != MASTER}

    def read_all(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The states of a parameter, and the parameter itself, as ``MASTER``, if it is a master that travels.

        Raises:
            TransferError: They cannot be read.
        """
        self._take_back("reading states")
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
        self._take_back("setting states")
        with self._by_parameter.setting(parameter, states=states):
            yield

    def take(self, parameter: torch.Tensor) -> None:
        """Takes the states that a program has put into ``optimizer.state[parameter]`` itself.

        The next update would do so too; until then they would be in memory. They are taken when there are as
        many of them as a sub-group has.

        Raises:
            TransferError: States of other parameters, which travel together with these, cannot be read.
        """
        if self._is_open:
            self._take_back("setting states")
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
        """Has a number of sub-groups travel from now on, where ``states.when`` is ``step``; the others stay.

        They stay in slots, so that ``optimizer.state`` shows all of them as if they were away.

        Raises:
            TransferError: One of them cannot be read or written.
            UnsupportedError: The processor updates some of them, by ``states.update``.
        """
        self._stream.arrange(travelling)

    def expect(self, seconds: float) -> None:
        """Has the records of updates tell that they were expected to take so long."""
        self._expected = seconds

    def watch_moves(self, seen: Callable[[Moved], object] | None) -> None:
        """Has a function told of each call that moves bytes; see :meth:`ActivationStore.watch_moves`."""
        self._store.watch_moves(seen)

    def close(self, *, bring_back: bool = True) -> None:
        """Brings the states back into memory: the optimizer is as it was. May be called twice.

        Args:
            bring_back: Whether they are; without, the optimizer cannot be used any more.

        Raises:
            TransferError: They cannot be read.
            SessionError: What was updated in backward was changed since, and no step came; what was before
                is there again, and that change is lost.
        """
        if not self._is_open:
            return
        self._is_open = False
        try:
            try:
                if self._early is not None and bring_back:
                    self._early.end()
                else:
                    self._stream.take_back()
            finally:
                if bring_back:
                    self._stream.give_back()
        finally:
            if self._early is not None:
                self._early.close()
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
        if self._early is not None:
            self._early.step_begins(options)
        record = self._stream.step(options)
        if self._expected is not None:
            record = replace(record, predicted_seconds=self._expected)
        if self._early is not None:
            self._early.follow()
        self.records.append(record)
        self._updated(record)
        return loss

    def _follow(self) -> None:
        self._stream.follow()
        if self._early is not None:
            self._early.follow()

    def _take_back(self, reason: str) -> None:
        if self._early is not None and self._is_open:
            self._early.take_back(reason)

    def _is_saved(self) -> None:
        self._take_back("a checkpoint of the optimizer")
        self._stream.follow()

    def _loaded(self) -> None:
        self._by_parameter.forget()
        self._store.resume()  # a drive that has failed may have been seen to
        self._stream.forgive()
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
    """Copies of states of parameters in host memory, and of others that travel with them."""
    return exchange.on_host(roster.with_any(parameters), masters=masters)


def offload_optimizer(
    optimizer: torch.optim.Optimizer,
    config: ConfigLike = None,
    *,
    model: nn.Module | Sequence[nn.Module] = (),
    masters: Mapping[torch.Tensor, torch.Tensor] | None = None,
    directories: Paths | None = None,
    updated: Callable[[StatesRecord], object] | None = None,
) -> OptimizerStates:
    """Keeps the states of an optimizer in a store between its updates.

    An update goes through the parameters in sub-groups: while one is updated by the optimizer's own code, the
    states of the next are read and those of the last are written. So at most three sub-groups are in memory,
    however large the model is, and parameters and states get the bits that they would get without it.

    Args:
        optimizer: Any optimizer of ``torch.optim`` but LBFGS; another one that updates each parameter by
            itself where ``states.trust`` is set. It may have made updates before.
        config: As for :func:`tba_offload.attach`; its ``states``, ``store`` and ``on_full`` count.
        model: The model that it trains, or its chunks, which ``when: backward`` needs: if a forward begins
            before the step comes, what was updated in backward is taken back.
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
    optimizer = _innermost(optimizer)
    _check(optimizer, trusted=chosen.states is not None and chosen.states.trust)
    modules = model if isinstance(model, Sequence) else (model,)
    is_on_cpu = _device_of(optimizer).type == "cpu"
    if chosen.states is not None and chosen.states.update != "device" and not is_on_cpu:
        _check_host(optimizer, chosen.states.update)
    if chosen.states is not None and chosen.states.when == "backward":
        frees = chosen.states.gradients == "free"
        _check_backward(optimizer, modules, has_masters=bool(masters), frees=frees)
    store = open_store(chosen.store.options(), device=device_of(_device_of(optimizer)))
    try:
        return OptimizerStates(optimizer, chosen, store, updated or _nothing, modules, masters)
    except BaseException:
        store.close()
        raise


def _nothing(_: StatesRecord) -> None:
    """The record is kept, and nothing else is told."""


def _innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer itself, out of wrappers such as that of Accelerate."""
    inner = getattr(optimizer, "optimizer", None)
    while isinstance(inner, torch.optim.Optimizer):
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    return optimizer


def _check(optimizer: torch.optim.Optimizer, *, trusted: bool) -> None:
    """Checks that an optimizer can be updated in parts.

    Args:
        optimizer: The optimizer.
        trusted: Whether the user says so of a class that is not known.

    Raises:
        UnsupportedError: It cannot.
    """
    name = type(optimizer).__name__
    if is_taken(optimizer):
        raise UnsupportedError(f"the states of this {name} are offloaded already; close those first")
    if (attribute := _attribute_with_optimizers(optimizer)) is not None:
        raise UnsupportedError(
            f"{name} has other optimizers make its updates, which know nothing of parts of its parameters; "
            f"give what is in its attribute {attribute} instead"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError("LBFGS updates all parameters as one vector, so that nothing can be away")
    if not trusted and not is_known(optimizer):
        raise UnsupportedError(
            f"whether {name} updates each parameter by itself is not known; if it computes nothing over all "
            "of them, set states.trust to true"
        )
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.Adafactor) and _takes_eps_from_the_first(group):
            raise UnsupportedError(
                "Adafactor with parameters of several data types in one group cannot be updated in parts; "
                "give each data type a group of its own, or set eps"
            )
        for setting in ("capturable", "differentiable"):
            if group.get(setting):
                raise UnsupportedError(
                    f"{name} with {setting}=True cannot be updated in parts; set it to False"
                )


def _attribute_with_optimizers(optimizer: torch.optim.Optimizer) -> str | None:
    """Where an optimizer has others of its parameters, as ZeroRedundancyOptimizer; ``None`` if nowhere."""
    own = set(parameters_of(optimizer))
    for attribute, value in vars(optimizer).items():
        others = [each for each in _flat(value) if isinstance(each, torch.optim.Optimizer)]
        if any(each is not optimizer and not own.isdisjoint(parameters_of(each)) for each in others):
            return attribute
    return None


def _flat(value: object, depth: int = 2) -> Iterator[object]:
    """A value, or what is in it where that is a container, or a container of containers."""
    if isinstance(value, dict):
        value = [*value.values()]
    if depth and isinstance(value, (list, tuple, set)):
        for each in value:
            yield from _flat(each, depth - 1)
    else:
        yield value


def _check_backward(
    optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module], *, has_masters: bool, frees: bool
) -> None:
    """Checks that an optimizer can be updated in backward.

    Raises:
        UnsupportedError: It cannot.
    """
    if not modules:
        raise UnsupportedError("states.when: backward needs the model; give it to offload_optimizer()")
    if has_masters:
        raise UnsupportedError("masters get their gradients after backward; set states.when to step")
    parameters = parameters_of(optimizer)
    if has_peers() and not is_fully_sharded(modules, parameters):
        raise UnsupportedError(
            "with several processes gradients are final only when they are reduced, which is after backward "
            "has made them, unless fully_shard spreads all parameters; set states.when to step"
        )
    has_distributed = any(map(is_distributed, parameters))
    if has_distributed and _lie_on_host(parameters):
        raise UnsupportedError(
            "FSDP2 may tell of gradients that it copies to host memory before they are there; set "
            "states.when to step"
        )
    if frees and has_distributed:
        raise UnsupportedError(
            "gradients of distributed parameters cannot be freed in backward; set states.gradients to keep"
        )
    if not is_known(optimizer):
        raise UnsupportedError(f"whether {type(optimizer).__name__} can be updated in any order is not known")


def _check_host(optimizer: torch.optim.Optimizer, update: str) -> None:
    """Checks that the processor can update sub-groups of an optimizer.

    Raises:
        UnsupportedError: It cannot.
    """
    if not is_of_torch(optimizer):
        raise UnsupportedError(
            f"whether {type(optimizer).__name__} updates parameters in host memory is not known; set "
            "states.update to device"
        )
    if any(map(is_distributed, parameters_of(optimizer))):
        raise UnsupportedError(
            "distributed parameters, as fully_shard makes them, are updated on the device only; set "
            "states.update to device"
        )
    if update != "host" and has_peers():
        raise UnsupportedError(
            "with several processes each would choose for itself what its processor updates, and parameters "
            "that several of them hold would drift apart; set states.update to device, or to host"
        )


def _lie_on_host(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether parameters of a device are in host memory: there is one, and they are not on it."""
    on_host = any(parameter.device.type == "cpu" for parameter in parameters)
    return on_host and torch.accelerator.is_available()


def _takes_eps_from_the_first(group: dict[str, Any]) -> bool:
    """Whether PyTorch's Adafactor gives all parameters of a group an eps that depends on the first one."""
    return group["eps"][0] is None and len({each.dtype for each in group["params"]}) > 1


def _device_of(optimizer: torch.optim.Optimizer) -> torch.device:
    """The device of the parameters.

    Raises:
        UnsupportedError: They lie on several.
    """
    devices = {each.device for each in parameters_of(optimizer)}
    if len(devices) != 1:
        raise UnsupportedError(
            f"the parameters of this {type(optimizer).__name__} lie on {len(devices)} devices; use an "
            "optimizer for each"
        )
    return devices.pop()
