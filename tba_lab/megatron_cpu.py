"""megatron-core without a GPU: one training process on the CPU.

megatron-core assumes that a GPU is there. Few of these assumptions matter when one process trains a GPT,
Llama-style, BERT or T5 model on the CPU; each function below replaces one of them, and says why.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tba_offload.errors import UnsupportedError
from tba_offload.megatron import require_core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CPU = torch.device("cpu")


def training_device() -> torch.device:
    """Return the device that megatron-core trains on in this process: the current GPU, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return CPU


def install() -> None:
    """Make megatron-core train on the CPU for the rest of the process; calling it again changes nothing.

    The substitutions reach into ``torch.cuda`` and megatron-core for the whole process, which is why
    they are refused where a GPU could be meant.

    Raises:
        MissingDependencyError: megatron-core is not installed.
        UnsupportedError: A GPU is present.
    """
    if torch.cuda.is_available():
        raise UnsupportedError(
            "the CPU substitutions for megatron-core would hide the GPU that is present; "
            "megatron-core needs none of them here, or hide the GPU with CUDA_VISIBLE_DEVICES=''"
        )
    require_core("training on the CPU")
    for substitute in _SUBSTITUTIONS:
        substitute()


@contextlib.contextmanager
def single_process(*, seed: int = 1234) -> Iterator[None]:
    """Set megatron-core up for one process, on the GPU where there is one, else on the CPU.

    The process group of one is made without a rendezvous, and gloo listens on the loopback interface
    only. On exit all groups are gone, so that the context can be entered again.

    Args:
        seed: Start of the random number generators; see :func:`seed_all`.

    Raises:
        MissingDependencyError: megatron-core is not installed.
        UnsupportedError: This process already belongs to a process group.
    """
    require_core("training in a single process")
    if dist.is_initialized():
        raise UnsupportedError(
            "this process already belongs to a process group; leave it with "
            "torch.distributed.destroy_process_group() before training in a single process"
        )
    if not torch.cuda.is_available():
        install()
    with _quiet_layers(), _loopback_only(), _group_of_one():
        seed_all(seed)
        yield


def seed_all(seed: int) -> None:
    """Start every random number generator that a model uses, inside :func:`single_process`.

    Args:
        seed: The seed of PyTorch's generators, from which megatron-core derives those of its own
            random number regions (dropout within a model-parallel group).
    """
    from megatron.core import tensor_parallel

    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def random_state() -> Callable[[], None]:
    """Remembers where all generators of :func:`seed_all` are; what it returns sets them back there."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker, on_gpu = get_cuda_rng_tracker(), torch.cuda.is_available()
    drawn, regions = torch.get_rng_state(), tracker.get_states()
    drawn_on_gpu = torch.cuda.get_rng_state() if on_gpu else None

    def go_back() -> None:
        torch.set_rng_state(drawn)
        tracker.set_states(regions)
        if drawn_on_gpu is not None:
            torch.cuda.set_rng_state(drawn_on_gpu)

    return go_back


@contextlib.contextmanager
def _group_of_one() -> Iterator[None]:
    from megatron.core import parallel_state

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@contextlib.contextmanager
def _quiet_layers() -> Iterator[None]:
    """Silences a deprecation between megatron-core's own layers that every forward would report."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: tp_group is None", DeprecationWarning, r"megatron\.")
        yield


@contextlib.contextmanager
def _loopback_only() -> Iterator[None]:
    """Hides the process: gloo opens a port even for a group of one, on the host's address by default."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        yield
    finally:
        if before is None:
            del os.environ["GLOO_SOCKET_IFNAME"]
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = before


def _current_device() -> None:
    """Parameters, masks and buffers are created on the current CUDA device; without one, asking raises."""
    replace(torch.cuda, "current_device", _cpu)


def _public_generator() -> None:
    """Record that the random number regions are seeded through ``torch.cuda``.

    On a CPU dropout draws from the CPU's generator, so that is the one to seed and to read.
    """
    replace(torch.cuda, "manual_seed", _seed_generator)
    replace(torch.cuda, "get_rng_state", _get_state)


def _private_generator() -> None:
    """Entering a random number region swaps the generator's state through two helpers of megatron-core.

    Without CUDA, PyTorch queues such a change until CUDA starts: it would never be made, dropout would
    not be repeated in a recomputation, and the queue would grow for ever.
    """
    from megatron.core.tensor_parallel import random

    replace(random, "_get_cuda_rng_state", _get_state)
    replace(random, "_set_cuda_rng_state", _set_state)


def _quiet_generator() -> None:
    """Leaving a random number region warns when the CPU's generator has moved, which here it must."""
    from megatron.core.tensor_parallel import random

    logging.getLogger(random.__name__).addFilter(_is_news)


_SUBSTITUTIONS: tuple[Callable[[], None], ...] = (
    _current_device,
    _public_generator,
    _private_generator,
    _quiet_generator,
)


def replace(owner: object, name: str, value: object) -> None:
    """Put a substitute in the place of what ``owner`` calls ``name``."""
    setattr(owner, name, value)


def _cpu() -> torch.device:
    return CPU


def _seed_generator(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _get_state(*_ignored: object, **_also: object) -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_state(new_state: torch.Tensor, *_ignored: object, **_also: object) -> None:
    torch.default_generator.set_state(new_state)


def _is_news(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed" not in record.getMessage()
