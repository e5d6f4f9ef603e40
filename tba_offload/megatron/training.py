"""Puts a session into Megatron-LM's training loop, from outside and for every release.

Three names of ``megatron.training`` are wrapped: the function that adds its arguments (the flags), the one
that builds model and optimizer (the session attaches), and the one that gives the schedule (each call of a
schedule that goes backward is a step). A training script then runs untouched.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from tba_offload.errors import ConfigError
from tba_offload.megatron.arguments import add_arguments, config_of, is_on
from tba_offload.megatron.layers import find_stack
from tba_offload.session import Session

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from torch import nn

    from tba_offload.config import OffloadConfig
    from tba_offload.policy import LayerId, Policy


def install() -> None:
    """Wraps the names in ``megatron.training``; once, before the training script imports them.

    Raises:
        ModuleNotFoundError: There is no ``megatron.training``: it is part of a Megatron-LM checkout, and of
            the megatron-core package since 0.19.
    """
    from megatron.training import arguments, training

    if hasattr(training, _MARK):
        return
    setattr(training, _MARK, True)
    integration = _Integration()
    _wrap(arguments, "add_megatron_arguments", lambda add: lambda parser: add_arguments(add(parser)))
    _wrap(training, "setup_model_and_optimizer", integration.attaching)
    _wrap(training, "get_forward_backward_func", integration.stepping)


_MARK = "_tba_offload"


class _Integration:
    """The session of this process, from the moment there is a model."""

    def __init__(self) -> None:
        self.session: Session | None = None

    def attaching(self, setup: Callable[..., Any]) -> Callable[..., Any]:
        """Attaches a session to the model that ``setup`` builds."""

        def setup_and_attach(*args: Any, **kwargs: Any) -> Any:
            made = setup(*args, **kwargs)
            from megatron.training import get_args

            arguments = get_args()
            if is_on(arguments) and self.session is None:
                self.session = open_session(made[0], arguments)
                atexit.register(self.session.close)
            return made

        return setup_and_attach

    def stepping(self, get_schedule: Callable[..., Any]) -> Callable[..., Any]:
        """Makes every call of the schedule that trains a step."""

        def get_stepping_schedule(*args: Any, **kwargs: Any) -> Any:
            return self._stepping(get_schedule(*args, **kwargs))

        return get_stepping_schedule

    def _stepping(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(schedule)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.session is None or kwargs.get("forward_only", False):
                return schedule(*args, **kwargs)
            with self.session.step(**_work_of_a_step()) as step:
                losses = schedule(*args, **kwargs)
                step.loss = _mean_loss(losses)
            return losses

        return run


def open_session(model: nn.Module | Sequence[nn.Module], arguments: argparse.Namespace) -> Session:
    """Attaches to the model chunks of this rank, as the flags say.

    Args:
        model: What Megatron built on this rank.
        arguments: Megatron's arguments.

    Raises:
        ConfigError: A rule takes no effect on any rank, or the ranks were given different policies.
        StoreError: A directory cannot be used.
    """
    chunks: list[nn.Module] = list(model) if isinstance(model, Sequence) else [model]
    config = config_of(arguments)
    stack = find_stack(chunks)
    everywhere = _layers_of_all_ranks([layer.id for layer in stack.layers], config)
    session = Session(
        stack,
        chunks,
        _config_of_rank(config),
        run_log=_run_log_of_rank(arguments.tba_run_log),
        strategy=None,
        model_info=_model_info(arguments),
        everywhere=everywhere,
    )
    if _rank() == 0:
        _print_plan(config.policy, everywhere)
    return session


# What the ranks share


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _layers_of_all_ranks(own: list[LayerId], config: OffloadConfig) -> list[LayerId]:
    """The layers of the whole model, and a check that all ranks place them alike."""
    said: list[Any] = [None] * _ranks()
    if dist.is_initialized():
        dist.all_gather_object(said, (own, config.to_yaml()))
    else:
        said = [(own, config.to_yaml())]
    for rank, (_, text) in enumerate(said):
        if text != said[0][1]:
            raise ConfigError(
                f"rank {rank} was given another policy than rank 0, but the ranks of a model must agree; is "
                "the policy file the same on every node?"
            )
    layers = {layer for layers, _ in said for layer in layers}
    return sorted(layers, key=lambda layer: (layer.stack or "", layer.number))


def _config_of_rank(config: OffloadConfig) -> OffloadConfig:
    """Ranks of a node share out its drives: each gets as many as there are for it, at least one."""
    directories = config.store.directories
    rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    own = directories[rank::ranks] or directories[rank % len(directories) :][:1] if directories else ()
    return dataclasses.replace(config, store=dataclasses.replace(config.store, directories=own))


def _run_log_of_rank(path: str | None) -> Path | None:
    if path is None:
        return None
    name = Path(path)
    if _ranks() == 1:
        return name
    stem = name.name.removesuffix(".jsonl")
    return name.with_name(f"{stem}.rank{_rank()}.jsonl")


# What a step is


def _work_of_a_step() -> dict[str, Any]:
    """Tokens and operations of one step: this rank's share of the global batch."""
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size
    from megatron.training import get_args, training

    arguments, batch = get_args(), get_current_global_batch_size()
    share = _ranks()
    return {
        "tokens": round(batch * arguments.seq_length / share),
        "model_flops": float(training.num_floating_point_operations(arguments, batch)) / share,
    }


def _mean_loss(losses: Any) -> float | None:
    """The mean loss of the micro-batches, where this pipeline stage has it."""
    values = [_loss_of(each) for each in losses] if isinstance(losses, list) else []
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _loss_of(reduced: Any) -> float | None:
    """What a loss function reports: a mean, or a sum and the number of tokens in it."""
    value = next(iter(reduced.values()), None) if isinstance(reduced, dict) else None
    if value is None:
        return None
    if isinstance(value, (tuple, list)):
        value = value[0] / value[1]
    numbers = value.detach().flatten().tolist() if hasattr(value, "detach") else [float(value)]
    return numbers[0] / numbers[1] if len(numbers) > 1 else float(numbers[0])


def _model_info(arguments: argparse.Namespace) -> dict[str, object]:
    names = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    known = {name: getattr(arguments, name, None) for name in names}
    return {"name": "Megatron-LM", "batch_size": arguments.global_batch_size, **known}


# What the user sees


def _print_plan(policy: Policy, layers: Sequence[LayerId]) -> None:
    table = Table(title="tba-offload", title_justify="left")
    for head in ("layer", "name", "placement", "why"):
        table.add_column(head)
    for layer in layers:
        placement, why = policy.explain(layer)
        number = f"{layer.stack}:{layer.number}" if layer.stack else str(layer.number)
        table.add_row(number, layer.name, placement.value, why)
    Console(width=100).print(table)


def _wrap(module: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    original = getattr(module, name)
    setattr(module, name, functools.wraps(original)(wrapper(original)))
