"""megatron-core without a GPU, in one training process on the CPU.

megatron-core assumes that a GPU is present. :func:`install` replaces the few functions that depend on a GPU.
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
    """Import megatron-core without warnings about missing accelerators.

    If megatron-core is not installed, raise a :class:`MissingDependencyError` that names the purpose.
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
    """Return the device of megatron-core in this process: the current GPU, or the CPU without a GPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return CPU


def install() -> None:
    """Make megatron-core train on the CPU until the process ends. A second call does nothing.

    If a GPU is present, raise an :class:`UnsupportedError`.
    """
    if torch.cuda.is_available():
        raise UnsupportedError(
            "megatron-core cannot train on the CPU, because this process has a GPU. Train on the GPU, or "
            "hide the GPU with CUDA_VISIBLE_DEVICES=''"
        )
    require_core("training on the CPU")
    from megatron.core.tensor_parallel import random

    # Parameters, masks and buffers are created on the current device. megatron-core seeds its random number
    # regions through torch.cuda, but on a CPU dropout draws from the CPU's generator. Without CUDA, PyTorch
    # would queue a region's change of state, and dropout would not repeat.
    replace(torch.cuda, "current_device", lambda: CPU)
    replace(torch.cuda, "manual_seed", torch.default_generator.manual_seed)
    replace(torch.cuda, "get_rng_state", lambda *_, **__: torch.default_generator.get_state())
    replace(random, "_get_cuda_rng_state", torch.cuda.get_rng_state)
    replace(random, "_set_cuda_rng_state", lambda state, *_, **__: torch.default_generator.set_state(state))
    # At the end of a region megatron-core warns if the CPU's generator changed, as is intended here.
    logging.getLogger(random.__name__).addFilter(_is_news)


@contextlib.contextmanager
def single_process(*, seed: int = 1234) -> Iterator[None]:
    """Set up megatron-core for one process within the block, on the GPU or, without a GPU, on the CPU.

    Leaving the context destroys all process groups, so the context can be entered again. If the process
    already belongs to a group, raise an :class:`UnsupportedError`.
    """
    require_core("training in a single process")
    if dist.is_initialized():
        raise UnsupportedError(
            "a single process cannot be set up, because this process belongs to a process group. Call "
            "torch.distributed.destroy_process_group() first"
        )
    if not torch.cuda.is_available():
        install()
    from megatron.core import parallel_state

    # Even for a group of one, gloo opens a port, by default on the host's public address.
    with warnings.catch_warnings(), patch.dict(os.environ, GLOO_SOCKET_IFNAME="lo"):
        # megatron-core's own layers cause this warning.
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
    """Seed all random number generators of a model. Call this function inside :func:`single_process`."""
    from megatron.core import tensor_parallel

    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def replace(owner: object, name: str, value: object) -> None:
    """Set an attribute of a module or class, in a form that type checkers accept."""
    setattr(owner, name, value)


def _is_news(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed" not in record.getMessage()
