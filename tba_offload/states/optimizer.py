"""``offload_optimizer``: the states of an optimizer lie in a store between its updates."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch

from tba_offload.config import ConfigLike, OffloadConfig, Paths, StatesConfig, read_config, with_directories
from tba_offload.errors import NoEffectWarning, StatesAwayError, warn
from tba_offload.states.away import AwayMaster, AwayTensor, is_away
from tba_offload.states.backward import BackwardUpdates
from tba_offload.states.groups import MASTER, held_back
from tba_offload.states.parameters import check, device_of_parameters, innermost, parameters_of
from tba_offload.states.twin import Takeover
from tba_offload.states.updates import StatesRecord, Updates, interrupts_put_off
from tba_offload.store.base import close_after
from tba_offload.store.open import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from tba_offload.store.base import Moved
    from tba_offload.store.multi import MultiStore

    StateDict = dict[str, Any]


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
        store: MultiStore,
        updated: Callable[[StatesRecord], object] | None = None,
        modules: Sequence[nn.Module] = (),
        masters: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.records: deque[StatesRecord] = deque(maxlen=10_000)
        self._store = store
        self._updated = updated
        self._is_open = True
        self._takeover = Takeover(optimizer)
        is_early = config.states is not None and config.states.when == "backward"
        made = BackwardUpdates if is_early else Updates
        names = _names_in(modules)
        self._updates = made(optimizer, self._takeover.kind, config, store, names, masters or {})
        self._set_bytes = 0
        try:
            self._updates.follow()
        except BaseException:  # no room, or an interrupt: the optimizer is to go on without this
            self._updates.close()
            self._updates.restore()
            raise
        self._handles: list[RemovableHandle] = [
            optimizer.register_state_dict_post_hook(self._fill, prepend=True),
            optimizer.register_load_state_dict_pre_hook(_hold_back),
            optimizer.register_load_state_dict_post_hook(lambda _: self._loaded(), prepend=True),
        ]
        self._takeover.begin(self._step, self._updates.clearing)

    def read(self, parameter: torch.Tensor, *, master: bool = False) -> dict[str, Any]:
        """Return the states of a parameter, those that are away as copies in host memory.

        Args:
            parameter: The parameter.
            master: Whether the parameter itself is wanted too, as ``MASTER``, if it is such a master.

        Raises:
            StatesAwayError: A program has put a state of another parameter there.
            TransferError: They cannot be read.
        """
        found = self._updates.entries.read(parameter)
        return found if master else {key: value for key, value in found.items() if key != MASTER}

    @contextmanager
    def setting(self, parameter: torch.Tensor, *, states: bool = True) -> Iterator[None]:
        """Within, what is away of a parameter has undefined memory, for a program to set; then it is taken.

        After an error it is away as before.

        Args:
            parameter: The parameter; if it is a master, that is set too.
            states: Whether its states are.

        Raises:
            TransferError: States of other parameters, which travel together with these, cannot be read.
        """
        entry = self.optimizer.state.get(parameter, {}) if states else {}
        away = {key: value for key, value in entry.items() if isinstance(value, AwayTensor)}
        was_away = is_away(parameter)
        for key, each in away.items():
            entry[key] = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device)
        if was_away:
            AwayMaster.end(parameter)
        try:
            yield
        except BaseException:
            entry.update(away)
            if was_away:
                self._updates.groups.send_away(parameter)
            raise
        self.take(parameter)

    def take(self, parameter: torch.Tensor) -> None:
        """Take the states, or the master, that a program has set, once they are as many as a sub-group has.

        The next update would do so too; until then they would be in memory.

        Raises:
            TransferError: States of other parameters, which travel together with these, cannot be read.
        """
        if not self._is_open:
            return
        entry = self._updates.groups.states_of(parameter)
        self._set_bytes += sum(
            each.nbytes for each in entry.values() if isinstance(each, torch.Tensor) and not is_away(each)
        )
        if self._set_bytes >= self._updates.groups.most:
            self._set_bytes = 0
            self._updates.follow()

    def _fill(self, optimizer: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
        """Return a state dict in which each state that is away is a tensor in host memory."""
        parameters = dict(enumerate(parameters_of(optimizer)))
        states = {
            key: self.read(parameters[key]) if key in parameters else entry
            for key, entry in state_dict["state"].items()
        }
        return state_dict | {"state": states}

    # ---- how many sub-groups stay ------------------------------------------------------------------

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the sub-groups that have states, in the order in which :meth:`arrange` has them leave."""
        return tuple(group.nbytes for group in self._updates.groups.spread)

    @property
    def device_bytes(self) -> int:
        """Bytes that sub-groups and slots take on the device between updates."""
        return self._updates.entries.slots.nbytes

    def arrange(self, travelling: int) -> None:
        """Have a number of sub-groups travel from now on, where ``states.when`` is ``step``; the others stay.

        They stay in slots, so that ``optimizer.state`` shows all of them as if they were away. This is what
        ``states.default: auto`` calls, which goes with ``states.update: device`` only.

        Raises:
            TransferError: One of them cannot be read or written; those that are not arranged go on as before.
        """
        slots = self._updates.entries.slots
        with interrupts_put_off():
            for number, group in enumerate(self._updates.groups.spread):
                if slots.stays(group) != (number >= travelling):
                    (slots.stay if number >= travelling else slots.leave)(group)

    def watch_moves(self, seen: Callable[[Moved], object] | None) -> None:
        """Have a function told of each call that moves bytes; see :meth:`MultiStore.watch_moves`."""
        self._store.watch_moves(seen)

    # ------------------------------------------------------------------------------------------------

    def close(self, *, bring_back: bool = True) -> None:
        """Bring the states back into memory: the optimizer is as it was. May be called twice.

        What a call that was interrupted has left is done by the next one.

        Args:
            bring_back: Whether they are; without, the optimizer cannot be used any more.

        Raises:
            StatesAwayError: A program has put what stands for a state where its bytes are not. All stays
                offloaded, for the program to put that right.
            TransferError: They cannot be read.
        """
        if not self._is_open:
            return
        try:
            if bring_back:
                self._updates.restore()
        except StatesAwayError:  # else the bytes would be lost
            raise
        except Exception:  # not an interrupt: the next call brings back what this one has left
            self._end()
            raise
        self._end()

    def _end(self) -> None:
        self._is_open = False
        self._updates.close()
        for handle in self._handles:
            handle.remove()
        self._takeover.end()
        self._store.close()

    def _step(self, closure: Callable[[], Any] | None, options: dict[str, Any]) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        record = self._updates.step(options)
        self.records.append(record)
        if self._updated is not None:
            self._updated(record)
        return loss

    def _loaded(self) -> None:
        self._store.resume()  # a drive that has failed may have been seen to
        self._updates.loaded()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        close_after(error, self.close)


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
        config: As for :func:`tba_offload.attach`; its ``states`` and ``store`` count.
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
            f"no parameter of this {type(optimizer).__name__} belongs to the model, so that offloading its "
            "states saves nothing. give the optimizer that updates the model",
            NoEffectWarning,
        )
    store = open_store(chosen.store, device=device_of_parameters(optimizer))
    try:
        return OptimizerStates(optimizer, chosen, store, updated, modules, masters)
    except BaseException:
        store.close()
        raise


def _names_in(modules: Sequence[nn.Module]) -> dict[torch.Tensor, str]:
    return {each: name for module in modules for name, each in module.named_parameters()}


def _hold_back(_: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
    """Return a state dict whose states come to the device by sub-groups, when all of it is checked.

    What belongs to no parameter is left as it is.
    """
    known = {each for group in state_dict["param_groups"] for each in group["params"]}
    states = {
        key: {name: held_back(value) for name, value in entry.items()} if key in known else entry
        for key, entry in state_dict["state"].items()
    }
    return state_dict | {"state": states}
