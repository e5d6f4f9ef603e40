"""Puts a session into Megatron-LM's training loop, from outside and for every release.

There are three places: where arguments are added (the flags), where model and optimizer are built (the
session attaches), and where the schedule is chosen (each call of it that goes backward is a step). The
launcher wraps the three functions of ``megatron.training`` by :func:`install`, and the script runs untouched;
a patched checkout calls :func:`add_arguments`, :func:`attach_model` and :func:`stepping` itself. Both may
come together.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from tba_offload.errors import ConfigError
from tba_offload.megatron.arguments import add_arguments, config_of, is_on
from tba_offload.megatron.layers import find_stack
from tba_offload.report.ranks import path_of_rank
from tba_offload.session import Session, World

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from torch import nn

    from tba_offload.config import OffloadConfig
    from tba_offload.policy import LayerId, Policy
    from tba_offload.report.run_log import StepRecord


_Item = TypeVar("_Item")


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
    _wrap(arguments, "add_megatron_arguments", lambda add: lambda parser: add_arguments(add(parser)))
    _wrap(training, "setup_model_and_optimizer", _attaching)
    _wrap(training, "get_forward_backward_func", lambda get: lambda *a, **k: stepping(get(*a, **k)))


def attach_model(model: nn.Module | Sequence[nn.Module]) -> None:
    """Attaches the session of this process, if a flag asks for one; once.

    Args:
        model: The chunks of this rank, as ``setup_model_and_optimizer`` returns them.

    Raises:
        ConfigError: A rule takes no effect on any rank, or the ranks were given different policies.
        StoreError: A directory cannot be used.
    """
    from megatron.training.global_vars import get_args

    global _session  # noqa: PLW0603 - Megatron trains one model in a process
    arguments = get_args()
    if is_on(arguments) and _session is None:
        _session = open_session(model, arguments)
        atexit.register(_session.close)


def stepping(schedule: Callable[..., Any]) -> Callable[..., Any]:
    """Makes every call of a schedule that goes backward a step of the session.

    Args:
        schedule: What ``get_forward_backward_func`` returns; one that steps already is returned as it is.
    """
    if hasattr(schedule, _MARK):
        return schedule

    @functools.wraps(schedule)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _session is None or kwargs.get("forward_only", False):
            return schedule(*args, **kwargs)
        with _session.step(**_work_of_a_step()) as step:
            losses = schedule(*args, **kwargs)
            step.loss = _mean_loss(losses)
        if step.record is not None:
            draw_curves(step.record)
        return losses

    setattr(run, _MARK, True)
    return run


_MARK = "_tba_offload"
_session: Session | None = None


def _attaching(setup: Callable[..., Any]) -> Callable[..., Any]:
    def setup_and_attach(*args: Any, **kwargs: Any) -> Any:
        made = setup(*args, **kwargs)
        attach_model(made[0])
        return made

    return setup_and_attach


def _wrap(module: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    original = getattr(module, name)
    setattr(module, name, functools.wraps(original)(wrapper(original)))


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
    stack = find_stack(chunks, _of_all_ranks)
    world = _world_of([layer.id for layer in stack.layers], config)
    session = Session(
        stack,
        chunks,
        _config_of_rank(config),
        run_log=_run_log_of_rank(arguments.tba_run_log),
        model_info=_model_info(arguments),
        world=world,
    )
    if world.rank == 0:
        _print_plan(config.policy, world.layers)
    return session


# What the ranks share


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _of_all_ranks(own: list[_Item]) -> list[_Item]:
    """What each rank has, in the order of the ranks; every rank must come here."""
    if not dist.is_initialized():
        return own
    gathered: list[list[_Item]] = [[]] * _ranks()
    dist.all_gather_object(gathered, own)
    return [each for part in gathered for each in part]


def _world_of(own: list[LayerId], config: OffloadConfig) -> World:
    """What the ranks tell each other: their layers, and a check that all place them alike."""
    policies = _of_all_ranks([config.to_yaml()])
    for rank, policy in enumerate(policies):
        if policy != policies[0]:
            raise ConfigError(
                f"rank {rank} was given another policy than rank 0, but the ranks of a model must agree; is "
                "the policy file the same on every node?"
            )
    layers = sorted(set(_of_all_ranks(own)), key=lambda layer: (layer.stack or "", layer.number))
    run = _of_all_ranks([uuid.uuid4().hex])[0]
    return World(tuple(layers), _rank(), _ranks(), run if _ranks() > 1 else None)


def _config_of_rank(config: OffloadConfig) -> OffloadConfig:
    """Ranks of a node share out its drives: each gets as many as there are for it, at least one."""
    directories = config.store.directories
    rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    own = directories[rank::ranks] or directories[rank % len(directories) :][:1] if directories else ()
    return dataclasses.replace(config, store=dataclasses.replace(config.store, directories=own))


def _run_log_of_rank(path: str | None) -> Path | None:
    if path is None:
        return None
    return Path(path) if _ranks() == 1 else path_of_rank(path, _rank())


# What a step is


def _work_of_a_step() -> dict[str, Any]:
    """Tokens and operations of one step: this rank's share of the global batch."""
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size
    from megatron.training import training
    from megatron.training.global_vars import get_args

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


CURVES = (
    "activation_peak_bytes",
    "own_peak_bytes",
    "in_flight_peak_bytes",
    "offloaded_bytes",
    "read_bytes",
    "forwarded_bytes",
    "kept_bytes",
    "fallback_kept_bytes",
    "stall_seconds",
)
"""Figures of a step that Megatron's TensorBoard and W&B writers get, under ``tba-offload/``."""


def draw_curves(record: StepRecord) -> None:
    """Hands the main figures of a step to Megatron's own writers, where this rank has them.

    They come at the iteration under which Megatron logs the loss of the step, as often as its own curves.
    """
    from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer

    arguments, board, wandb = get_args(), get_tensorboard_writer(), get_wandb_writer()
    iteration = getattr(arguments, "curr_iteration", record.step - 1) + 1
    if (not board and not wandb) or iteration % arguments.tensorboard_log_interval:
        return
    known = {f"tba-offload/{name}": getattr(record, name) for name in CURVES}
    figures = {name: value for name, value in known.items() if value is not None}
    if board:
        for name, value in figures.items():
            board.add_scalar(name, value, iteration)
    if wandb:
        wandb.log(figures, iteration)
