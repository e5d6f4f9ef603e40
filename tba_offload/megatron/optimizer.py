"""Offloading of the states and masters of Megatron's optimizers.

Masters are fp32 copies of 16-bit parameters. Each optimizer of Megatron wraps a ``torch`` optimizer, which is
called its inner optimizer.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.errors import UnsupportedError
from tba_offload.states.away import is_away
from tba_offload.states.groups import MASTER

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from tba_offload.config import StatesConfig
    from tba_offload.states import OptimizerStates

_KINDS = frozenset(("DistributedOptimizer", "Float16OptimizerWithFloat16Params", "FP32Optimizer"))
"""Megatron's optimizer classes that keep all states in ``optimizer.optimizer.state``."""

_GROUPS = (
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
    ("float16_groups", "fp32_from_float16_groups"),
)
"""Names of the attributes with 16-bit parameters and with their masters. The first pair belongs to
``DistributedOptimizer``, and the second pair to ``Float16OptimizerWithFloat16Params``."""

_SAVED = "fp32_from_fp16_params"
"""Key of the masters in checkpoints of optimizers that are not distributed."""


def children_of(optimizer: Any, config: StatesConfig) -> list[Any]:
    """Return Megatron's optimizers that update parameters on this rank.

    Args:
        optimizer: Megatron's optimizer, which may contain several optimizers.
        config: The settings of offloaded states.

    Raises:
        UnsupportedError: The states of an optimizer class cannot be offloaded, or the configuration requests
            updates in backward.
    """
    if config.when == "backward":
        raise UnsupportedError(
            "states.when 'backward' does not work with Megatron, because Megatron reduces gradients after "
            "backward and updates copies of parameters. Set states.when to 'step'"
        )
    children = _children(optimizer)
    for child in children:
        if type(child).__name__ not in _KINDS:
            raise UnsupportedError(
                f"optimizer states of Megatron's {type(child).__name__} cannot be offloaded. Remove "
                "--tba-optimizer-states, and remove the states section from the policy"
            )
    return children


def inner_of(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the ``torch`` optimizers that Megatron's optimizer wraps.

    Args:
        optimizer: Megatron's optimizer, or ``None``.
    """
    inner = [child.optimizer for child in _children(optimizer)]
    return [each for each in inner if isinstance(each, torch.optim.Optimizer)]


def _children(optimizer: Any) -> list[Any]:
    found = []
    for child in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(child, "optimizer", None)  # None on a rank that has no parameters of an expert group
        if inner is not None and any(group["params"] for group in inner.param_groups):
            found.append(child)
    return found


def masters_of(children: Sequence[Any]) -> dict[torch.Tensor, torch.Tensor]:
    """Return a dict from each master to its parameter, or to this rank's shard of the parameter.

    Masters of FP8 and FP4 parameters are left out, because Megatron quantizes these parameters together.

    Args:
        children: Result of :func:`children_of`.
    """
    return {
        main: part
        for child in children
        if not getattr(child.config, "reuse_grad_buf_for_mxfp8_param_ag", False)
        for model_param, main in _pairs(child)
        if main is not None and type(model_param.data) is torch.Tensor
        for part in [_part(child, model_param)]
    }


def _pairs(child: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    names = _groups_of(child)
    if names is not None:
        for some, masters in zip(*(getattr(child, name) for name in names), strict=True):
            yield from zip(some, masters, strict=True)


def _groups_of(child: Any) -> tuple[str, str] | None:
    """Return an item of :data:`_GROUPS`; ``None`` if the optimizer has no masters."""
    return next((names for names in _GROUPS if all(hasattr(child, name) for name in names)), None)


def _part(child: Any, model_param: torch.Tensor) -> torch.Tensor:
    """Return the parameter, or the shard of the parameter for which this rank has a master."""
    if not hasattr(child, "_get_model_param_range_map"):
        return model_param
    shard = child._get_model_param_range_map(model_param)["param"]
    return model_param.detach().view(-1)[shard.start : shard.end]


def follow(child: Any, states: OptimizerStates) -> None:
    """Make one of Megatron's optimizers work with offloaded states and masters.

    This function replaces methods of the optimizer: methods that create, save and load states, and methods
    that copy between masters and parameters.

    Args:
        child: An item of the result of :func:`children_of`.
        states: The offloaded states of the inner ``torch`` optimizer.
    """
    if child.init_state_fn is not None:  # SGD has no function for this
        _make_states_one_by_one(child, states)
    if hasattr(child, "_get_main_param_and_optimizer_states"):
        _follow_distributed_checkpoints(child, states)
    elif _groups_of(child) is not None:
        _follow_checkpoints_of_masters(child, states)
    if _groups_of(child) is not None:
        _follow_copies(child, states)


def _make_states_one_by_one(child: Any, states: OptimizerStates) -> None:
    """Before a checkpoint is loaded, create and offload the states of one parameter after another.

    Megatron would create the states of all parameters together, which needs much memory.
    """
    make_plain = child.init_state_fn

    def make(inner: Any, *settings: Any) -> None:
        for group in inner.param_groups:
            for main in group["params"]:
                if not inner.state.get(main):
                    one = SimpleNamespace(param_groups=[{**group, "params": [main]}], state=inner.state)
                    make_plain(one, *settings)
                    states.take(main)

    vars(child)["init_state_fn"] = make


def _follow_distributed_checkpoints(child: Any, states: OptimizerStates) -> None:
    """Save and load offloaded states of a distributed optimizer, one parameter at a time.

    Saved tensors are copies in host memory, so training can continue while a checkpoint is written.
    """
    set_plain, load_plain = child._set_main_param_and_optimizer_states, child.load_state_dict

    def main_of(model_param: torch.Tensor) -> torch.Tensor:
        group, order = child.model_param_group_index_map[model_param]
        main: torch.Tensor = child.optimizer.param_groups[group]["params"][order]
        return main

    def get(model_param: torch.Tensor) -> dict[str, Any]:
        main = main_of(model_param)
        found = states.read(main, master=True)
        return {"param": found.pop(MASTER, main), **found}

    def put(model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        # Megatron copies states into new memory. At the end of the block, the states are offloaded.
        with states.setting(main_of(model_param)):
            set_plain(model_param, tensors)

    def load(state_dict: dict[str, Any]) -> None:
        if not child.optimizer.state:  # else Megatron would create the states of all parameters at once
            child.init_state_fn(child.optimizer, child.config)
        load_plain(state_dict)

    vars(child).update(
        load_state_dict=load,
        _get_main_param_and_optimizer_states=get,
        _set_main_param_and_optimizer_states=put,
    )


def _follow_checkpoints_of_masters(child: Any, states: OptimizerStates) -> None:
    """Save and load offloaded masters of an optimizer that is not distributed.

    Saved masters are copies in host memory.
    """
    save_plain, load_plain = child.state_dict, child.load_state_dict

    def read(main: torch.Tensor) -> torch.Tensor:
        return states.read(main, master=True)[MASTER] if is_away(main) else main

    def save(*arguments: Any, **options: Any) -> dict[str, Any]:
        saved: dict[str, Any] = save_plain(*arguments, **options)
        return saved | {_SAVED: [[*map(read, group)] for group in saved[_SAVED]]}

    def load(state_dict: dict[str, Any]) -> None:
        with _narrowed(child, set()):
            load_plain(state_dict)
        for group, values in zip(child.fp32_from_float16_groups, state_dict[_SAVED], strict=True):
            for main, value in zip(group, values, strict=True):
                with states.setting(main, states=False):
                    main.data.copy_(value.data)

    vars(child).update(state_dict=save, load_state_dict=load)


def _follow_copies(child: Any, states: OptimizerStates) -> None:
    """Replace the methods that copy between masters and parameters.

    Masters in memory are copied to parameters as in Megatron. The update of an offloaded master already
    copies the master to its parameter. Parameters are copied to one offloaded master at a time.
    """
    to_model, to_masters = child._copy_main_params_to_model_params, child._copy_model_params_to_main_params

    def copy_to_model() -> None:
        with _narrowed(child, {main for _, main in _pairs(child) if not is_away(main)}):
            to_model()

    def copy_to_masters(*arguments: Any, **options: Any) -> None:
        # After loading a checkpoint without optimizer: copy one master at a time.
        mains = [main for _, main in _pairs(child)]
        for main in mains:
            if main is not None and is_away(main):
                with states.setting(main, states=False), _narrowed(child, {main}):
                    to_masters(*arguments, **options)
        with _narrowed(child, {main for main in mains if not is_away(main)}):
            to_masters(*arguments, **options)

    vars(child).update(
        _copy_main_params_to_model_params=copy_to_model, _copy_model_params_to_main_params=copy_to_masters
    )


@contextmanager
def _narrowed(child: Any, masters: AbstractSet[torch.Tensor | None]) -> Iterator[None]:
    """Within the ``with`` block, let an optimizer see only some masters and their parameters."""
    names = _groups_of(child) or ()
    whole = [getattr(child, name) for name in names]
    pairs = [[p for p in zip(*groups, strict=True) if p[1] in masters] for groups in zip(*whole, strict=True)]
    try:
        for place, name in enumerate(names):
            vars(child)[name] = [[pair[place] for pair in group] for group in pairs]
        yield
    finally:
        vars(child).update(zip(names, whole, strict=True))
