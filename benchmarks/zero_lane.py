"""DeepSpeed's ZeRO-3 with its optimizer states on a drive, on a CPU: a lane of states.py.

    DS_ACCELERATOR=cpu pip install deepspeed==0.19.8     # beside tba-offload
    apt-get install libaio-dev g++                       # what it compiles at its first start

One process, so nothing is partitioned. What lies on the drive is a sub-group's master parameters, gradients
and both states, each in a file of its own; parameters and gradients are in memory as well. It takes gradients
from a backward pass only and writes them to the drive there; without ``--rows`` that is no part of an update.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

BUFFERS = 12
"""Buffers of a sub-group's size. An update has three sub-groups in them, each with four tensors: one is read,
one is updated, one is written."""

AIO = {
    "block_size": 2**18,
    "queue_depth": 32,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
}
"""The fastest of three in docs/measurements.md. Its defaults are blocks of 1 MiB and a depth of 8."""


class CannotRunError(RuntimeError):
    """What is missing, and how to install it."""


class Given(torch.nn.Linear):
    """A layer whose weight can be given a gradient: a backward pass then yields it, to the bit.

    Attributes:
        gradient: Of the next passes; without one it is a linear layer.
    """

    gradient: torch.Tensor | None = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.gradient is None:
            return super().forward(rows)
        return rows + (self.weight * self.gradient).sum()


def require() -> None:
    """Sees to it that DeepSpeed and what it needs for a drive are there.

    Raises:
        CannotRunError: They are not.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise CannotRunError(
            "--deepspeed needs DeepSpeed: DS_ACCELERATOR=cpu pip install deepspeed==0.19.8, and libaio's "
            "headers and a C++ compiler (apt-get install libaio-dev g++)"
        )
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        raise CannotRunError("DeepSpeed's async_io cannot be compiled: apt-get install libaio-dev g++")


class Zero:
    """DeepSpeed's engine around a model of :class:`Given` layers.

    Args:
        model: Its parameters become DeepSpeed's.
        directory: Of files on the drive, its own.
        elements: Parameters in a sub-group.
        aio: Settings that differ from :data:`AIO`.
    """

    def __init__(
        self, model: torch.nn.Sequential, directory: Path, elements: int, aio: Mapping[str, object]
    ) -> None:
        import deepspeed
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        deepspeed.utils.logger.setLevel("WARNING")
        if not torch.distributed.is_initialized():
            os.environ.setdefault("LOCAL_RANK", "0")  # else DeepSpeed asks for its launcher
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        self._deepspeed = deepspeed
        self._layers = list(model)
        defaults = torch.optim.AdamW([torch.zeros(1)]).defaults
        settings = {key: defaults[key] for key in ("lr", "betas", "eps", "weight_decay")}
        self._engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=DeepSpeedCPUAdam(model.parameters(), adamw_mode=True, **settings),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_clipping": 0.0,  # its default is 1
                "zero_optimization": {
                    "stage": 3,
                    "sub_group_size": elements,
                    "reduce_bucket_size": elements,
                    "offload_optimizer": {
                        "device": "nvme",
                        "nvme_path": str(directory),
                        "buffer_count": BUFFERS,
                        "pipeline_read": True,
                        "pipeline_write": True,
                    },
                },
                "aio": {**AIO, **aio},
            },
        )

    def backward(self, gradients: Sequence[torch.Tensor]) -> None:
        """Make a backward pass that yields these gradients."""
        for layer, gradient in zip(self._layers, gradients, strict=True):
            layer.gradient = gradient
        self._engine.backward(self._engine(torch.zeros(())))

    def backward_of(self, rows: torch.Tensor) -> None:
        """Make a forward and a backward pass of training."""
        self._engine.backward(self._engine(rows).square().mean())

    def update(self) -> None:
        """Make an update with the gradients of the last backward pass."""
        self._engine.step()

    def parameters(self) -> list[torch.Tensor]:
        """Return what they are now, in tensors of their own."""
        found = []
        for layer in self._layers:
            with self._deepspeed.zero.GatheredParameters(layer.weight):
                found.append(layer.weight.detach().clone())
        return found

    def close(self) -> None:
        """Frees what it holds, and waits for its threads."""
        self._engine.destroy()
