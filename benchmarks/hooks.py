"""Measure the processor time of the saved-tensor hooks for each saved tensor.

    python benchmarks/hooks.py

In a chain of operations, each operation saves one tensor. The chain runs alternately in these ways:

* ``plain`` and ``plain again``: without hooks.
* ``kept``: each tensor is smaller than ``min_tensor_bytes`` and stays in memory.
* ``offloaded``: the in-flight window holds all tensors, so backward uses most tensors before their write.
* ``read back``: the in-flight window holds a quarter of the tensors, so most tensors are read.

Each result is the processor time of the training thread for pack and unpack, minus the time of ``plain``. The
time includes copies, but not waiting for the drive.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack, nullcontext

import click
import torch
from torch import nn

import tba_offload as tba
from tba_offload.config import parse_size

SAVED = 64
LIMITS = {"plain again": None, "kept": 5.0, "offloaded": 40.0, "read back": None}


class Chain(nn.Module):
    """Layer with a chain of operations that save their outputs for backward.

    Args:
        saved: Number of saved tensors.
    """

    def __init__(self, saved: int = SAVED) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.saved = saved

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for _ in range(self.saved):
            x = torch.relu(x)
        return x


def make(
    min_tensor_bytes: int | None, window: int, directory: str, stack: ExitStack
) -> tuple[nn.Module, tba.Session | None]:
    """Return a chain and its session. Without ``min_tensor_bytes``, the chain has no session."""
    model = nn.Sequential(Chain())
    if min_tensor_bytes is None:
        return model, None
    config = tba.OffloadConfig(
        min_tensor_bytes=min_tensor_bytes,
        budget=tba.BudgetConfig(in_flight_bytes=window),
        store=tba.StoreConfig(kind="file", directories=(directory,)),
    )
    return model, stack.enter_context(tba.attach(model, config, layers=list(model), measure_memory=False))


def seconds_per_pass(model: nn.Module, session: tba.Session | None, x: torch.Tensor) -> float:
    """Return the processor time of this thread for forward and backward."""
    with session.step() if session else nullcontext():
        began = time.thread_time()
        model(x).sum().backward()
        return time.thread_time() - began


@click.command()
@click.option("--rounds", default=200, show_default=True, help="Number of passes in each way.")
@click.option("--size", default="64KiB", show_default=True, help="Bytes of each saved tensor.")
@click.option(
    "--directory", default=None, help="Directory for offloaded bytes.  [default: a temporary directory]"
)
def main(rounds: int, size: str, directory: str | None) -> None:
    """Measure the processor time of pack and unpack."""
    torch.set_num_threads(1)
    tba.keep_freed_pages()
    nbytes = parse_size(size)
    x = torch.full((nbytes // 4,), 0.5, requires_grad=True)
    with ExitStack() as stack:
        place = directory or stack.enter_context(tempfile.TemporaryDirectory())
        kinds = {
            "plain": make(None, 0, place, stack),
            "plain again": make(None, 0, place, stack),
            "kept": make(2 * nbytes, 4 * SAVED * nbytes, place, stack),
            "offloaded": make(nbytes, 4 * SAVED * nbytes, place, stack),
            "read back": make(nbytes, SAVED * nbytes // 4, place, stack),
        }
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for round_ in range(rounds + 5):
            for kind, (model, session) in kinds.items():
                seconds = seconds_per_pass(model, session, x)
                if round_ >= 5:
                    times[kind].append(seconds)
    for kind, limit in LIMITS.items():
        extra = [1e6 * (a - b) / SAVED for a, b in zip(times[kind], times["plain"], strict=True)]
        low, median, high = statistics.quantiles(extra, n=4)
        goal = f" (goal: at most {limit:g})" if limit is not None else ""
        click.echo(f"{kind:11} {median:6.1f} us per saved tensor, quartiles {low:.1f} to {high:.1f}{goal}")


if __name__ == "__main__":
    main()
