"""megatron-core without a GPU: one training process on the CPU.

megatron-core assumes that a GPU is there. ``install`` replaces the few assumptions that matter here.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import warnings
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch
import torch.distributed as dist

from tba_offload.errors import MissingDependencyError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = torch.device("cpu")


def require_core(purpose: str) -> None:
    """Import megatron-core without its warnings of accelerators that are absent.

    Where it is missing, that is a :class:`MissingDependencyError`, which names the purpose.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"megatron\.|torch\.jit\.")
            for part in ("", ".models.gpt.gpt_layer_specs", ".models.bert.bert_layer_specs", ".datasets"):
                importlib.import_module(f"megatron.core{part}")
    except ModuleNotFoundError as error:
        if error.name not in ("megatron", "megatron.core"):
            raise
        raise MissingDependencyError("megatron-core", purpose, extra="megatron") from error


def training_device() -> torch.device:
    """Return the device that megatron-core trains on in this process: the current GPU, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return CPU


def install() -> None:
    """Make megatron-core train on the CPU for the rest of the process; calling it again changes nothing.

    Where a GPU is present, which the substitutions would hide, that is an :class:`UnsupportedError`.
    """
    if torch.cuda.is_available():
        raise UnsupportedError(
            "the CPU substitutions for megatron-core would hide the GPU that is present; "
            "megatron-core needs none of them here, or hide the GPU with CUDA_VISIBLE_DEVICES=''"
        )
    require_core("training on the CPU")
    from megatron.core.tensor_parallel import random

    # Parameters, masks and buffers are created on the current device. Random number regions are seeded
    # through torch.cuda; on a CPU dropout draws from the CPU's generator. A region swaps its state by
    # functions of its own: without CUDA, PyTorch would queue the change, and dropout would not repeat.
    for owner, name, value in (
        (torch.cuda, "current_device", lambda: CPU),
        (torch.cuda, "manual_seed", _seed_generator),
        (torch.cuda, "get_rng_state", _get_state),
        (random, "_get_cuda_rng_state", _get_state),
        (random, "_set_cuda_rng_state", _set_state),
    ):
        replace(owner, name, value)
    # Leaving a region warns when the CPU's generator has moved, which here it must.
    logging.getLogger(random.__name__).addFilter(_is_news)


@contextlib.contextmanager
def single_process(*, seed: int = 1234) -> Iterator[None]:
    """Set megatron-core up for one process, on the GPU where there is one, else on the CPU.

    On exit all process groups are gone, so that the context can be entered again. A process that belongs to a
    group already is an :class:`UnsupportedError`.
    """
    require_core("training in a single process")
    if dist.is_initialized():
        raise UnsupportedError(
            "this process already belongs to a process group; leave it with "
            "torch.distributed.destroy_process_group() before training in a single process"
        )
    if not torch.cuda.is_available():
        install()
    from megatron.core import parallel_state

    # gloo opens a port even for a group of one, on the host's address by default.
    with warnings.catch_warnings(), patch.dict(os.environ, GLOO_SOCKET_IFNAME="lo"):
        # megatron-core's own layers call each other in a way that it deprecates.
        warnings.filterwarnings("ignore", "Warning: tp_group is None", DeprecationWarning, r"megatron\.")
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            parallel_state.initialize_model_parallel()
            seed_all(seed)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def seed_all(seed: int) -> None:
    """Seed every random number generator that a model uses, inside :func:`single_process`."""
    from megatron.core import tensor_parallel

    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def replace(owner: object, name: str, value: object) -> None:
    """Put a substitute in the place of what ``owner`` calls ``name``."""
    setattr(owner, name, value)


def _seed_generator(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _get_state(*_ignored: object, **_also: object) -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_state(new_state: torch.Tensor, *_ignored: object, **_also: object) -> None:
    torch.default_generator.set_state(new_state)


def _is_news(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed" not in record.getMessage()
