"""The public interface of offloaded optimizer states: ``offload_optimizer`` and ``OptimizerStates``."""

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
from tba_offload.states.groups import MASTER, as_incoming
from tba_offload.states.parameters import check, device_of_parameters, innermost, parameters_of
from tba_offload.states.slots import SLOTS
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
    """The offloaded states of one optimizer. :func:`offload_optimizer` returns this object.

    The states have their own store, with the kind and directories from the configuration. The optimizer stays
    the same object. Between updates, ``optimizer.state`` holds placeholders, which are tensors without bytes.
    Reading a placeholder raises an error that explains what to do.

    Attributes:
        optimizer: The optimizer.
        records: Records of the last 10,000 updates, oldest first.
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
        except BaseException:  # after a full store or Ctrl-C, the optimizer must work without offloading
            self._updates.close()
            self._updates.restore()
            raise
        self._handles: list[RemovableHandle] = [
            optimizer.register_state_dict_post_hook(self._fill, prepend=True),
            optimizer.register_load_state_dict_pre_hook(_wrap_states),
            optimizer.register_load_state_dict_post_hook(lambda _: self._loaded(), prepend=True),
        ]
        self._takeover.begin(self._step)

    def read(self, parameter: torch.Tensor, *, master: bool = False) -> dict[str, Any]:
        """Return the states of a parameter. Offloaded states are copied to host memory.

        Args:
            parameter: The parameter.
            master: Whether to include the values of the parameter, with the key ``MASTER``, if the parameter
                is an offloaded master copy.

        Raises:
            StatesAwayError: ``optimizer.state`` has the placeholder of another parameter for this parameter.
            TransferError: The states cannot be read.
        """
        found = self._updates.entries.read(parameter)
        return found if master else {key: value for key, value in found.items() if key != MASTER}

    @contextmanager
    def setting(self, parameter: torch.Tensor, *, states: bool = True) -> Iterator[None]:
        """Return a context manager in which the program sets the states of a parameter.

        Inside the ``with`` block, the states have memory with undefined contents. At the end of the block,
        the new values replace the offloaded values. If the block raises an error, the offloaded values are
        kept.

        Args:
            parameter: The parameter. If ``parameter`` is an offloaded master copy, the block must also set
                its values.
            states: Whether the block sets the states. If False, the block sets only the values of a master
                copy.

        Raises:
            TransferError: States of other parameters in the same sub-group cannot be read.
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
        """Offload the states or the master copy that the program has set.

        The states stay in memory until the program has set enough states for a sub-group, or until the next
        update.

        Raises:
            TransferError: States of other parameters in the same sub-group cannot be read.
        """
        if not self._is_open:
            return
        entry = self._updates.groups.states_of(parameter)
        tensors = filter(torch.is_tensor, entry.values())
        self._set_bytes += sum(each.nbytes for each in tensors if not is_away(each))
        if self._set_bytes >= self._updates.groups.most:
            self._set_bytes = 0
            self._updates.follow()

    def _fill(self, optimizer: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
        parameters = dict(enumerate(parameters_of(optimizer)))
        states = state_dict["state"]
        whole = {key: self.read(parameters[key]) for key in states if key in parameters}
        return state_dict | {"state": states | whole}

    # ---- how many sub-groups stay in memory --------------------------------------------------------

    what, slots = "sub-groups of optimizer states", SLOTS

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each sub-group that has states, in the order in which :meth:`arrange` offloads them."""
        return tuple(group.nbytes for group in self._updates.groups.spread)

    @property
    def device_bytes(self) -> int:
        """Bytes of all slots on the device, including the slots of sub-groups that stay in memory."""
        return self._updates.entries.slots.nbytes

    def arrange(self, offloaded: int) -> None:
        """Offload the first ``offloaded`` sub-groups from now on, and keep the other sub-groups in memory.

        The order of the sub-groups is the order of :attr:`sizes`. ``optimizer.state`` also has placeholders
        for the states of sub-groups that stay in memory. The method works only with ``states.when: step`` and
        ``states.update: device``.

        Raises:
            TransferError: A sub-group cannot be read or written. Later sub-groups are not moved.
        """
        slots = self._updates.entries.slots
        with interrupts_put_off():
            for number, group in enumerate(self._updates.groups.spread):
                if slots.stays(group) != (number >= offloaded):
                    (slots.stay if number >= offloaded else slots.leave)(group)

    def watch_moves(self, seen: Callable[[Moved], object] | None) -> None:
        """Set a function that is called after each transfer. See :meth:`MultiStore.watch_moves`."""
        self._store.watch_moves(seen)

    # ------------------------------------------------------------------------------------------------

    def close(self, *, bring_back: bool = True) -> None:
        """Bring the states back into memory, and restore the optimizer.

        If Ctrl-C interrupts ``close``, call ``close`` again. Otherwise, further calls do nothing.

        Args:
            bring_back: Whether to bring the states back. If False, the optimizer cannot be used any more.

        Raises:
            StatesAwayError: The program has moved a placeholder to the wrong parameter. All states stay
                offloaded, so that the program can move the placeholder back.
            TransferError: The states cannot be read.
        """
        if not self._is_open:
            return
        try:
            if bring_back:
                self._updates.restore()
        except StatesAwayError:  # closing the store would lose the bytes
            raise
        except Exception:  # after Ctrl-C, a second call brings back the rest
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
        self._store.resume()  # the user may have repaired a failed drive
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

    An update runs the optimizer's own code on one sub-group of parameters after another. During the update of
    a sub-group, the states of the next sub-group are read and the states of the previous sub-group are
    written. At most three sub-groups are therefore in memory, for any size of the model. Parameters and
    states get the same bits as without offloading.

    Args:
        optimizer: Any optimizer of ``torch.optim`` except LBFGS. With ``states.trust``, other optimizers are
            allowed if they update each parameter independently. The optimizer may already have made updates.
        config: The configuration, as for :func:`tba_offload.attach`. Only ``states`` and ``store`` are used.
        model: The model that the optimizer trains, or its chunks. Messages use the parameter names of the
            model. With ``when: backward`` and several processes, the model is needed to check that
            ``fully_shard`` has sharded all parameters.
        masters: Maps each master copy to its model parameter. A master copy is a high-precision copy of a
            model parameter, and the optimizer updates the copy. Master copies are offloaded with their
            states. After the update of a master copy, its value is copied to the model parameter.
        directories: Directories of the store: one path, or one path for each drive. ``directories`` replaces
            the directories in the configuration.
        updated: Function that is called with the record of each update.

    Returns:
        The offloaded states. Call ``close()``, or use the object as a context manager, to bring the states
        back into memory.

    Raises:
        ConfigError: The configuration is wrong.
        UnsupportedError: The optimizer cannot update one sub-group at a time.
        StoreError: The store cannot be opened.

    Warns:
        NoEffectWarning: The optimizer updates no parameter of the model.
    """
    chosen = with_directories(read_config(config), directories)
    optimizer = innermost(optimizer)
    modules = model if isinstance(model, Sequence) else (model,)
    check(optimizer, chosen.states or StatesConfig(), modules, has_masters=bool(masters))
    if modules and not masters and set(_names_in(modules)).isdisjoint(parameters_of(optimizer)):
        why = f"no parameter of this {type(optimizer).__name__} belongs to the model, so no memory is freed"
        warn(f"{why}. Pass the optimizer that updates the model", NoEffectWarning)
    store = open_store(chosen.store.drives, device=device_of_parameters(optimizer))
    try:
        return OptimizerStates(optimizer, chosen, store, updated, modules, masters)
    except BaseException:
        store.close()
        raise


def _names_in(modules: Sequence[nn.Module]) -> dict[torch.Tensor, str]:
    return {each: name for module in modules for name, each in module.named_parameters()}


def _wrap_states(_: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
    """Wrap the tensors of a state dict, so that ``load_state_dict`` does not copy all tensors to the device.

    Later, the tensors are copied to the device, one sub-group at a time.
    """
    known = {each for group in state_dict["param_groups"] for each in group["params"]}
    states = {
        key: {name: as_incoming(value) for name, value in entry.items()} if key in known else entry
        for key, entry in state_dict["state"].items()
    }
    return state_dict | {"state": states}
