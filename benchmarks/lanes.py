"""Training runs of a Megatron GPT that benchmarks compare, each in its own process.

A *lane* is one of the compared runs. A *way* is a method that keeps, recomputes or offloads activations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import tba_offload as tba
from tba_lab.gpt import GptShape, build_gpt, choose_dtype, gpt_loss, random_batch
from tba_lab.megatron_cpu import single_process, training_device
from tba_lab.race import Entrant, Spread, measures_memory, paired_ratio, race, timed_rounds
from tba_offload.config import parse_size
from tba_offload.device import device_of
from tba_offload.device.host_memory import keep_freed_pages
from tba_offload.device.meters import meter_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    Figures = dict[str, Any]

CONTROL = "keep again"
"""Name of a second run with keep. The ratio of its times to the first run with keep is noise."""

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
"""Matrix products whose results a selective checkpoint may save. Megatron changes the results of ``baddbmm``
in place, so these results are not saved."""

SAVE_EVERY = {"save products": 1, "save 2nd product": 2}
"""For each way with a selective checkpoint, the number n: the result of every n-th product is saved."""

WAYS = ("keep", "checkpoint", *SAVE_EVERY, "torch.save hooks", "save_on_cpu", "offload")
WARM_UP = 3


class GptRunner:
    """GPT that trains on random tokens in one of :data:`WAYS`."""

    def __init__(self, way: str, *, shape: GptShape, batch_size: int, directory: str, window: str) -> None:
        keep_freed_pages()
        self._shape, self._batch_size, self._count = shape, batch_size, 0
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(single_process())
        self.model = build_gpt(shape, seed=1)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-4, fused=True)
        self._meter = meter_of(device_of(training_device()))
        self._stack.callback(self._meter.close)
        self._session: tba.Session | None = None
        self._hooks: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        if way == "offload":
            config = {
                "budget": {"in_flight_bytes": window},
                "store": {"kind": "file", "directories": [directory]},
            }
            self._session = self._stack.enter_context(tba.attach(self.model, config, measure_memory=False))
        elif way == "checkpoint":
            wrap_layers(self.model, checkpointed)
        elif way in SAVE_EVERY:
            wrap_layers(self.model, partial(selectively_checkpointed, every=SAVE_EVERY[way]))
        elif way == "save_on_cpu":
            self._hooks = save_on_cpu
        elif way == "torch.save hooks":
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(dir=directory)))
            self._hooks = lambda: saved_tensors_hooks(saving_to(folder), load)
        self.close = self._stack.close

    def step(self) -> Figures:
        """Run one step. Return its duration in seconds, its loss and, in some steps, the activation peak."""
        batch = random_batch(self._shape, batch_size=self._batch_size, seed=self._count)
        is_measured, self._count = measures_memory(self._count), self._count + 1
        began = time.perf_counter()
        if is_measured:
            self._meter.reset()
            base = self._meter.live()
        with self._session.step() if self._session else contextlib.nullcontext():
            with self._hooks():
                loss = gpt_loss(self.model, batch)
            loss.backward()
        peak = self._meter.peak() - base if is_measured else None
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        return {"loss": float(loss.detach()), "peak": peak, "seconds": time.perf_counter() - began}


def decoder_of(model: nn.Module) -> Any:
    """Return the module of a Megatron GPT that contains its layers."""
    return next(module for name, module in model.named_modules() if name.split(".")[-1] == "decoder")


def wrap_layers(model: nn.Module, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the forward of each layer of a Megatron GPT."""
    for layer in decoder_of(model).layers:
        layer.forward = wrapped(layer.forward)


def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a layer's forward, recomputed in backward by ``torch.utils.checkpoint``."""
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def selectively_checkpointed(forward: Callable[..., Any], *, every: int) -> Callable[..., Any]:
    """Return a layer's forward that saves some matrix products and recomputes all other tensors."""

    def contexts() -> tuple[Any, Any]:
        counts = {False: 0, True: 0}  # of the forward and of its repetition

        def policy(context: Any, operation: Any, *_: object, **__: object) -> CheckpointPolicy:
            if operation in PRODUCTS:
                counts[context.is_recompute] += 1
                if counts[context.is_recompute] % every == 0:
                    return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return lambda *args, **kwargs: checkpoint(
        forward, *args, use_reentrant=False, context_fn=contexts, **kwargs
    )


class SavedFile:
    """File that is deleted together with this object."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __del__(self) -> None:
        self.path.unlink(missing_ok=True)


def saving_to(folder: Path) -> Callable[[torch.Tensor], Any]:
    """Return a pack hook that writes each tensor to a file. Parameters stay in memory."""
    numbers = itertools.count()

    def pack(tensor: torch.Tensor) -> Any:
        if isinstance(tensor, torch.nn.Parameter) or tensor.numel() == 0:
            return tensor.detach()
        file = SavedFile(folder / f"{next(numbers)}.pt")
        torch.save(tensor, file.path)
        return file

    return pack


def load(packed: Any) -> torch.Tensor:
    """Return the tensor that a hook of :func:`saving_to` has saved."""
    return torch.load(packed.path) if isinstance(packed, SavedFile) else packed


# The command line

dtype_option = click.option(
    "--dtype",
    type=click.Choice(["auto", "bf16", "fp32"]),
    default="auto",
    help="'auto' takes the faster one.",
)
directory_option = click.option(
    "--directory", type=click.Path(exists=True), help="Directory for files.  [default: a temporary directory]"
)
json_option = click.option("--json", "json_file", default=None, help="Also write the figures to this file.")


def shape_of(*, hidden: int, dtype: str, **shape: Any) -> GptShape:
    """Return the shape of a model with heads of width 128, and print its dtype and the reason."""
    chosen, why = choose_dtype(dtype, training_device())
    click.echo(why)
    return GptShape(
        **{"hidden": hidden, "heads": max(hidden // 128, 1), "dtype": chosen, "dropout": 0.0} | shape
    )


def race_ways(
    lanes: Mapping[str, tuple[str, GptShape]],
    *,
    steps: int,
    batch_size: int,
    window: str,
    directory: str | None,
    base: str = "keep",
) -> list[Figures]:
    """Train all lanes in alternating steps. Return a row for each lane, with ratios to the lane ``base``.

    ``lanes`` has the way and the model of each lane.
    """
    parse_size(window)
    with contextlib.ExitStack() as stack:
        place = directory or stack.enter_context(tempfile.TemporaryDirectory(prefix="tba-bench-"))
        common = {"batch_size": batch_size, "directory": place, "window": window}
        results = shown_race(
            {
                name: Entrant(GptRunner, {"way": way, "shape": shape, **common})
                for name, (way, shape) in lanes.items()
            },
            steps,
        )
    return [row_of(name, results[name], results[base]) for name in lanes]


def shown_race(entrants: Mapping[str, Entrant], rounds: int) -> dict[str, list[Figures]]:
    """Return the results of a race, and show its progress on stderr."""
    return race(entrants, rounds, say=partial(click.echo, err=True))


def row_of(name: str, steps: Sequence[Figures], base: Sequence[Figures]) -> Figures:
    """Return peak, time and the ratios to another lane. Rounds that measure memory have no times."""
    rounds = timed_rounds(steps[WARM_UP:], base[WARM_UP:], measured=lambda step: step["peak"] is not None)
    seconds, others = ([step[lane]["seconds"] for step in rounds] for lane in range(2))
    peak, base_peak = (max(step["peak"] or 0 for step in each[WARM_UP:]) for each in (steps, base))
    return {
        "name": name,
        "peak_bytes": peak,
        "peak_ratio": peak / base_peak,
        "seconds_median": statistics.median(seconds),
        "time_ratio": dataclasses.asdict(paired_ratio(seconds, others)),
        "same_losses": [step["loss"] for step in steps] == [step["loss"] for step in base],
    }


def print_table(rows: Sequence[Figures], json_file: str | None) -> None:
    """Print the rows of :func:`row_of`, and write the rows to a file if a file is given."""
    show(
        ("", "peak MiB", "x keep", "step s", "x keep (quartiles)", "losses"),
        [
            (
                row["name"],
                f"{row['peak_bytes'] / 2**20:.1f}",
                f"{row['peak_ratio']:.3f}",
                f"{row['seconds_median']:.3f}",
                str(Spread(**row["time_ratio"])),
                "same bits" if row["same_losses"] else "differ",
            )
            for row in rows
        ],
    )
    write_json(rows, json_file)


def show(heads: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """Print a table. If the output is not a terminal, no cell is cut."""
    table = Table(title=title, box=None)
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console = Console()
    (console if console.is_terminal else Console(width=210)).print(table)


def write_json(document: object, json_file: str | None) -> None:
    """Write a document to a JSON file if a file is given."""
    if json_file is not None:
        Path(json_file).write_text(json.dumps(document, indent=2, default=vars) + "\n")
