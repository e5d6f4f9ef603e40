"""Functions that open a session in Megatron-LM's training loop.

The launcher calls :func:`install`, which wraps functions of ``megatron.training``.
``add_megatron_arguments`` then also adds the ``--tba-`` flags. ``setup_model_and_optimizer`` also attaches
the model. ``load_checkpoint`` first offloads optimizer states. ``get_forward_backward_func`` returns a
wrapped schedule. Each call of the wrapped schedule that runs backward is a step of the session.

A patched checkout calls :func:`add_arguments`, :func:`attach_model` and :func:`stepping` itself. A patched
checkout also works with the launcher.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import socket
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from tba_offload.config import OffloadConfig, read_config
from tba_offload.errors import ConfigError, TbaError, UnsupportedError
from tba_offload.formatting import grouped
from tba_offload.layers.find import chunks_of
from tba_offload.megatron.arguments import add_arguments, config_of, is_on
from tba_offload.megatron.layers import find_stack
from tba_offload.megatron.optimizer import children_of, follow, inner_of, masters_of
from tba_offload.report.log import curves_of
from tba_offload.report.text import Table, show
from tba_offload.session import Session, World
from tba_offload.session.notices import warn_of_doubts
from tba_offload.session.record import explained, rank_of_process, run_log_path

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from tba_offload.config.policy import LayerId, Placement
    from tba_offload.report.log import StepRecord
    from tba_offload.session.loop import Step

_Item = TypeVar("_Item")

_MARK = "_tba_offload"
_session: Session | None = None
_chunks: list[nn.Module] = []


def install() -> None:
    """Wrap the functions of ``megatron.training`` at which offloading starts.

    Call ``install`` before the training script imports these functions.

    Raises:
        ModuleNotFoundError: The package ``megatron.training`` is missing. Megatron-LM checkouts and
            megatron-core since 0.19 have this package.
    """
    from megatron.training import arguments, training

    _wrap(arguments, "add_megatron_arguments", lambda add: lambda parser: add_arguments(add(parser)))
    _wrap(training, "setup_model_and_optimizer", _attaching)
    _wrap(training, "load_checkpoint", attaching_first)
    _wrap(training, "get_forward_backward_func", lambda get: lambda *a, **k: stepping(get(*a, **k)))


def _wrap(module: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    original = getattr(module, name)
    setattr(module, name, functools.wraps(original)(wrapper(original)))


def _attaching(setup: Callable[..., Any]) -> Callable[..., Any]:
    def setup_and_attach(*args: Any, **kwargs: Any) -> Any:
        made = setup(*args, **kwargs)
        attach_model(made[0], made[1])
        return made

    return setup_and_attach


def attaching_first(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's ``load_checkpoint``, so that states and masters are offloaded before loading.

    Loading a checkpoint then needs less memory, because the states of only a few parameters are in memory.

    Args:
        load: Megatron's ``load_checkpoint``.
    """

    def attach_and_load(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.training.global_vars import get_args

        arguments = get_args()
        if optimizer is not None and is_on(arguments):
            config = config_of(arguments)
            # Frozen weights must be loaded before they are offloaded.
            if config.states is not None and not config.frozen_percent:
                attach_model(model, optimizer)
        return load(model, optimizer, *args, **kwargs)

    return attach_and_load


def attach_model(model: nn.Module | Sequence[nn.Module], optimizer: Any = None) -> None:
    """Attach the model if a ``--tba-`` flag was given and the model is not attached yet.

    Args:
        model: The model chunks that ``setup_model_and_optimizer`` returns on this rank.
        optimizer: The optimizer that ``setup_model_and_optimizer`` returns. The states of the optimizer are
            offloaded if a flag or the policy requests this.

    Raises:
        SystemExit: The session cannot be opened on this rank or on another rank. The message is printed
            without a traceback.
    """
    from megatron.training.global_vars import get_args

    global _session, _chunks
    arguments, chunks = get_args(), chunks_of(model)
    if not is_on(arguments) or (_session is not None and _chunks == chunks):
        return
    if _session is not None:  # training was started again in this process
        atexit.unregister(_close_at_exit)
        _session.close()
    try:
        _session, _chunks = open_session(chunks, arguments, optimizer), chunks
    except TbaError as error:
        raise SystemExit(f"tba-offload: {_place()}: {error}") from None
    atexit.register(_close_at_exit)


def _close_at_exit() -> None:
    if _session is not None:
        for states in _session.states:
            # The states are no longer needed, and memory may be too small for them.
            states.close(bring_back=False)
        _session.close()


def stepping(schedule: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a schedule of Megatron, so that each call that runs backward is a step of the session.

    Args:
        schedule: The function that ``get_forward_backward_func`` returns. A schedule that is already wrapped
            is returned unchanged.
    """
    if hasattr(schedule, _MARK):
        return schedule

    @functools.wraps(schedule)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _session is None or kwargs.get("forward_only", False):
            return schedule(*args, **kwargs)
        with _session.step(**_work_of_a_step()) as step:
            losses = schedule(*args, **kwargs)
            report_loss(step, losses)
        if step.record is not None:
            draw_curves(step.record)
        return losses

    setattr(run, _MARK, True)
    return run


def open_session(
    model: nn.Module | Sequence[nn.Module], arguments: argparse.Namespace, optimizer: Any = None
) -> Session:
    """Open a session for the model chunks of this rank, as the flags request.

    All ranks must call ``open_session``.

    Args:
        model: The model, or the model chunks, that Megatron built on this rank.
        arguments: Megatron's parsed arguments.
        optimizer: Megatron's optimizer, or ``None``.

    Raises:
        ConfigError: A rule of the policy matches no layer on any rank, or the ranks have different policies.
        UnsupportedError: No rank has a transformer layer of megatron-core.
        TbaError: Another rank failed. The message names the rank.
        StoreError: A store directory cannot be used.
    """
    chunks = chunks_of(model)
    with _failing_together():
        config = config_of(arguments)
        find_stack(chunks)  # raise errors of this rank before other ranks wait for this rank
    stack = find_stack(chunks, _of_all_ranks)
    world = _world_of([layer.id for layer in stack.layers], config)
    with _failing_together():
        read_config(config, layers=world.layers)
    if world.rank == 0:
        on_gpu = any(parameter.is_cuda for chunk in chunks for parameter in chunk.parameters())
        warn_of_doubts(config, world.layers, on_cpu=not on_gpu)
    own = _of_this_rank(config, arguments)
    run_log = arguments.tba_run_log
    if run_log is not None:
        run_log = run_log_path(run_log, agreed=lambda number: max(_of_all_ranks([number])))
    with contextlib.ExitStack() as undo:
        with _failing_together():
            children = [] if own.states is None or optimizer is None else children_of(optimizer, own.states)
            session = Session(
                stack,
                chunks,
                own,
                run_log=run_log,
                model_info=_model_info(arguments),
                world=world,
                steps_by_hand=True,
                optimizers=[child.optimizer for child in children],
                trace_steps=arguments.tba_trace_steps or (),
                masters=masters_of(children),
                updated_by=inner_of(optimizer),
            )
            undo.enter_context(session)
            for child, states in zip(children, session.states, strict=True):
                follow(child, states)
        undo.pop_all()
    if world.rank == 0:
        _print_plan(session)
    return session


# Communication between ranks


def _place() -> str:
    return f"rank {rank_of_process()[0]} on {socket.gethostname()}"


def _of_all_ranks(own: list[_Item]) -> list[_Item]:
    """Return the items of all ranks in rank order. All ranks must call this function."""
    if not dist.is_initialized():
        return own
    gathered: list[list[_Item]] = [[]] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return [each for part in gathered for each in part]


def _world_of(own: list[LayerId], config: OffloadConfig) -> World:
    """Check that all ranks have the same placements, and return the layers of all ranks.

    Directories and budgets may differ between nodes. Placements must be equal, because ranks that share a
    layer must recompute the layer together.
    """
    placements = OffloadConfig(default=config.default, layers=config.layers).to_yaml()
    own_rank, ranks = rank_of_process()
    for rank, others in enumerate(_of_all_ranks([placements])):
        if others != placements:
            raise ConfigError(
                f"rank {rank} has a different policy from rank {own_rank}. Use the same file on every node"
            )
    layers = _of_all_ranks(own)
    if not layers:
        raise UnsupportedError("found no transformer layers of megatron-core in the model, on any rank")
    stacks = list(dict.fromkeys(layer.stack for layer in layers))
    layers = sorted(set(layers), key=lambda layer: (stacks.index(layer.stack), layer.number))
    run = _of_all_ranks([uuid.uuid4().hex])[0]
    return World(tuple(layers)) if ranks == 1 else World(tuple(layers), own_rank, ranks, run, _agree)


def _agree(proposed: dict[str, Placement], need: tuple[float, float]) -> dict[str, Placement]:
    """Agree with all ranks on the placement of each layer.

    Several ranks may propose a placement for the same layer. The rank with the highest need decides.

    Args:
        proposed: This rank's proposal: a placement for each of its layers.
        need: How much this rank needs recomputation. The first number is the bytes over the budget in a
            predicted step that offloads all ``auto`` layers. The second number is the duration of this step
            in seconds, which decides between ranks with equal bytes.
    """
    agreed: dict[str, Placement] = {}
    proposals = reversed(_of_all_ranks([(need, proposed)]))  # if needs are equal, the lowest rank wins
    for _, proposal in sorted(proposals, key=lambda each: each[0]):
        agreed.update(proposal)
    return agreed


@contextlib.contextmanager
def _failing_together() -> Iterator[None]:
    """Raise an error on all ranks if one rank fails in the ``with`` block.

    Otherwise, the other ranks would wait forever.

    Raises:
        TbaError: Another rank failed.
    """
    failure: TbaError | OSError | None = None
    try:
        yield
    except (TbaError, OSError) as error:
        failure = error
    said = f"{_place()}: {failure}" if failure is not None else None
    failures = [each for each in _of_all_ranks([said]) if each is not None]
    if failure is not None:
        raise failure
    if failures:
        raise TbaError(f"activation offloading could not start on {failures[0]}")


def _of_this_rank(config: OffloadConfig, arguments: argparse.Namespace) -> OffloadConfig:
    """Return the config for this rank.

    The store directories of a node are divided among its ranks, and each rank gets at least one. The limit
    for a hanging transfer is at most half the timeout of collective operations. With a longer limit, other
    ranks would fail first, and their error would not name the drive.
    """
    hosts, own_rank = _of_all_ranks([socket.gethostname()]), rank_of_process()[0]
    neighbours = [rank for rank, host in enumerate(hosts) if host == hosts[own_rank]]
    place, directories = neighbours.index(own_rank), config.store.directories
    own = directories[place :: len(neighbours)]
    if directories and not own:
        own = (directories[place % len(directories)],)
    minutes = getattr(arguments, "distributed_timeout_minutes", None) or 0
    waits = 60 * minutes, getattr(arguments, "distributed_timeout_seconds_after_init", None) or 0
    stall = (limit := config.store.stall_seconds) and min(limit, *(s / 2 for s in (*waits, 2 * limit) if s))
    return replace(config, store=replace(config.store, directories=own, stall_seconds=stall))


# Figures of a step


def _work_of_a_step() -> dict[str, Any]:
    """Return this rank's share of the tokens and FLOPs of one step."""
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size
    from megatron.training import training
    from megatron.training.global_vars import get_args

    arguments, batch, (_, ranks) = get_args(), get_current_global_batch_size(), rank_of_process()
    flops = float(training.num_floating_point_operations(arguments, batch))
    return {"tokens": round(batch * arguments.seq_length / ranks), "model_flops": flops / ranks}


def report_loss(step: Step, losses: Any) -> None:
    """Add this rank's loss to the record of a step, without waiting for the device.

    Args:
        step: Step whose record gets the loss.
        losses: The return value of the schedule: a list with one dict for each micro-batch. The first value
            of a dict is the mean loss, or a pair of the summed loss and the number of tokens. With 0 tokens,
            the loss is NaN. On a pipeline stage without a loss, the list is empty.
    """
    first = [next(iter(each.values())) for each in losses if each] if isinstance(losses, list) else []
    parts = [value if isinstance(value, tuple | list) else [value] for value in first]
    if not parts:
        return
    device = next((each.device for each in parts[0] if isinstance(each, torch.Tensor)), "cpu")
    numbers = [[torch.as_tensor(n, device=device).detach().double().view(-1) for n in part] for part in parts]
    total, *tokens = torch.stack([torch.cat(part) for part in numbers]).sum(0)
    step.loss = total / (tokens[0] if tokens else len(parts))


def _model_info(arguments: argparse.Namespace) -> dict[str, object]:
    names = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    known = {name: getattr(arguments, name, None) for name in names}
    return {"name": "Megatron-LM", "batch_size": arguments.global_batch_size, **known}


# Output for the user


def _print_plan(session: Session) -> None:
    """Print a table with the placement of each layer and the reason for the placement.

    Consecutive layers with the same placement and reason share a row.
    """
    plan: Any = explained(session)
    layers, reasons = session.world.layers, [(each["placement"], each["why"]) for each in plan.values()]
    groups = grouped([layer.name for layer in layers], reasons)
    rows = [(layers[each.first].numbers(each.size), each.name, *reasons[each.first]) for each in groups]
    show(Table(("Layers", "Name", "Placement", "Why"), rows, title="tba-offload"))


def draw_curves(record: StepRecord) -> None:
    """Write the main figures of a step to Megatron's TensorBoard and W&B writers, if this rank has a writer.

    The figures have the same iteration numbers as Megatron's own curves, and the same logging interval.
    """
    from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer

    arguments, board, wandb = get_args(), get_tensorboard_writer(), get_wandb_writer()
    iteration = getattr(arguments, "curr_iteration", record.step - 1) + 1
    if (not board and not wandb) or iteration % arguments.tensorboard_log_interval:
        return
    figures = curves_of(record)
    if board:
        for name, value in figures.items():
            board.add_scalar(name, value, iteration)
    if wandb:
        wandb.log(figures, iteration)
