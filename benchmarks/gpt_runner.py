"""What the benchmarks race: one GPT under one way of keeping activations, a process each."""

from __future__ import annotations

import contextlib
import dataclasses
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
from tba_lab.demo.dtype import AUTO, CHOICES, choose_dtype
from tba_lab.demo.fit import MEMORY_SHARE, Job
from tba_lab.demo.progress import PlannedStep, shown
from tba_lab.demo.race import Entrant, measures_memory, median_interval, paired_ratio, race, turns
from tba_lab.gpt import GptShape, build_gpt, gpt_loss, random_batch
from tba_lab.megatron_cpu import single_process, training_device
from tba_offload.config import parse_size
from tba_offload.device.available import available_bytes
from tba_offload.device.malloc import FAST_ALLOCATOR, keep_freed_pages
from tba_offload.device.memory import meter_of
from tba_offload.device.streams import device_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn

WAYS = (
    "keep",
    "checkpoint",
    "save products",
    "save 2nd product",
    "torch.save hooks",
    "save_on_cpu",
    "offload",
)

CONTROL = "keep again"
"""Keep in a second process: its ratio to keep is what the machine's noise can do to any ratio."""


class GptRunner:
    """A GPT that trains on random tokens.

    Args:
        way: One of :data:`WAYS`.
        shape: The model.
        batch_size: Sequences in a step.
        directory: Where files go.
        in_flight_bytes: Window of ``offload``.
        kept_pages: Whether malloc keeps freed pages, see :func:`tba_offload.keep_freed_pages`.
        checksum: Whether ``offload`` takes checksums of what it writes and reads.
    """

    def __init__(
        self,
        way: str,
        *,
        shape: GptShape,
        batch_size: int,
        directory: str,
        in_flight_bytes: int,
        kept_pages: bool = True,
        checksum: bool = True,
    ) -> None:
        if kept_pages:
            keep_freed_pages()
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(single_process())
        self.model = build_gpt(shape, seed=1)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-4, fused=True)
        self._shape, self._batch_size, self._count = shape, batch_size, 0
        self._meter = meter_of(device_of(next(self.model.parameters()).device))
        self._stack.callback(self._meter.close)
        self._session: tba.Session | None = None
        self._forward_hooks: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        if way == "offload":
            config = tba.OffloadConfig(
                budget=tba.BudgetConfig(in_flight_bytes=in_flight_bytes),
                store=tba.StoreConfig(kind="file", directories=(directory,), checksum=checksum),
            )
            self._session = self._stack.enter_context(tba.attach(self.model, config, measure_memory=False))
        elif way == "checkpoint":
            _wrap_layers(self.model, checkpointed)
        elif way in SAVE_EVERY:
            _wrap_layers(self.model, partial(selectively_checkpointed, every=SAVE_EVERY[way]))
        elif way == "save_on_cpu":
            self._forward_hooks = save_on_cpu
        elif way == "torch.save hooks":
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(dir=directory))
            self._forward_hooks = lambda: saved_tensors_hooks(_save_to(folder), _load)

    def step(self) -> dict[str, Any]:
        """One step: seconds, loss, what was moved and, in some steps, the activation peak in bytes."""
        batch = random_batch(self._shape, batch_size=self._batch_size, seed=self._count)
        measure_memory, self._count = measures_memory(self._count), self._count + 1
        began = time.perf_counter()
        if measure_memory:
            self._meter.reset()
            base = self._meter.live()
        figures = self._forward_backward(batch)
        if measure_memory:
            figures["peak"] = self._meter.peak() - base
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        return {"seconds": time.perf_counter() - began, **figures}

    def _forward_backward(self, batch: Any) -> dict[str, Any]:
        with self._session.step() if self._session else contextlib.nullcontext():
            loss = self._loss(batch)
            loss.backward()
        figures: dict[str, Any] = {"loss": float(loss.detach())}
        if self._session is not None:
            record = self._session.report()[-1]
            figures |= {
                "stall": record.stall_seconds,
                "offloaded": record.offloaded_bytes,
                "read": record.read_bytes,
                "forwarded": record.forwarded_bytes,
            }
        return figures

    def _loss(self, batch: Any) -> torch.Tensor:
        with self._forward_hooks():
            return gpt_loss(self.model, batch)

    def close(self) -> None:
        """End session, meter and process group."""
        self._stack.close()


def _wrap_layers(model: nn.Module, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    for layer in decoder_of(model).layers:
        layer.forward = wrapped(layer.forward)


def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a layer's forward that is recomputed, as ``torch.utils.checkpoint`` does it."""
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
"""What computes matrix products whose results may be saved: Megatron masks attention's scores in place."""

SAVE_EVERY = {"save products": 1, "save 2nd product": 2}
"""The ways that checkpoint selectively: every how many products one is saved."""


def selectively_checkpointed(forward: Callable[..., Any], *, every: int) -> Callable[..., Any]:
    """Return a layer's forward of which matrix products are saved and all else is recomputed."""

    def contexts() -> tuple[Any, Any]:
        counts = {False: 0, True: 0}  # of the forward and of its repetition

        def policy(context: Any, operation: Any, *_: object, **__: object) -> CheckpointPolicy:
            if operation not in PRODUCTS:
                return CheckpointPolicy.PREFER_RECOMPUTE
            counts[context.is_recompute] += 1
            is_saved = counts[context.is_recompute] % every == 0
            return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return lambda *args, **kwargs: checkpoint(
        forward, *args, use_reentrant=False, context_fn=contexts, **kwargs
    )


def decoder_of(model: nn.Module) -> Any:
    """Return the part of a Megatron GPT that has its layers."""
    return next(module for name, module in model.named_modules() if name.split(".")[-1] == "decoder")


def _save_to(folder: str) -> Callable[[torch.Tensor], Any]:
    """One file a tensor, as tutorials show it; parameters stay, since the file would be a second copy."""
    names = (Path(folder) / f"{number}.pt" for number in _count())

    def pack(tensor: torch.Tensor) -> Any:
        if isinstance(tensor, torch.nn.Parameter) or tensor.numel() == 0:
            return tensor.detach()
        file = _File(next(names))
        torch.save(tensor, file.path)
        return file

    return pack


def _count() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


class _File:
    """A file that goes with the object."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __del__(self) -> None:
        self.path.unlink(missing_ok=True)


def _load(packed: Any) -> torch.Tensor:
    return torch.load(packed.path) if isinstance(packed, _File) else packed


SHAPE: dict[str, Any] = {"layers": 12, "hidden": 512, "sequence": 256, "dropout": 0.0}
"""What the benchmarks train unless told otherwise; without dropout, whose random states plain
``torch.utils.checkpoint`` does not know in Megatron's layers."""

HEAD_WIDTH = 128

_WARM_UP = 2


dtype_option = click.option(
    "--dtype",
    type=click.Choice(CHOICES),
    default=AUTO,
    show_default=True,
    help="auto measures which is faster on this machine.",
)


def settled_dtype(dtype: str) -> str:
    """Return the dtype of the option, measured where it is auto; says which and why."""
    chosen = choose_dtype(dtype, device=training_device())
    click.echo(str(chosen))
    return chosen.dtype


def settled_hidden(hidden: int | None, *, most: int, processes: int, batch_size: int, **shape: Any) -> int:
    """Return the width of the option.

    Where none is given, the widest model of which all lanes fit into memory.

    Args:
        hidden: The option.
        most: The widest that is tried.
        processes: How many lanes race at a time, each with a model and an optimizer of its own.
        batch_size: Sequences in a step.
        shape: The other fields of :class:`GptShape`.
    """
    if hidden is not None:
        return hidden
    room = int(MEMORY_SHARE * available_bytes(training_device()))
    for width in range(most, HEAD_WIDTH, -HEAD_WIDTH):
        model = GptShape(hidden=width, heads=width // HEAD_WIDTH, **shape)
        needed = Job(model, 1, (batch_size,), ("keep",) * processes).memory_bytes
        if needed <= room:
            break
    else:
        width = HEAD_WIDTH
    click.echo(f"width {width}: the widest of at most {most} of which {processes} lanes fit into memory")
    return width


def settings_of(shape: Mapping[str, Any], *, batch_size: int, window: str, directory: str) -> dict[str, Any]:
    """Arguments of :class:`GptRunner`.

    Args:
        shape: The fields of :class:`GptShape` but its heads.
        batch_size: Sequences in a step.
        window: Bytes in flight, in words.
        directory: Where files go.
    """
    return {
        "shape": GptShape(heads=shape["hidden"] // HEAD_WIDTH, **shape),
        "batch_size": batch_size,
        "directory": directory,
        "in_flight_bytes": parse_size(window),
    }


def lanes(
    entrants: dict[str, tuple[str, dict[str, Any]]],
    *,
    steps: int,
    batch_size: int,
    window: str,
    directory: str | None,
) -> dict[str, list[dict[str, Any]]]:
    """Races entrants, name → (way, shape), and returns the figures of every step."""
    with contextlib.ExitStack() as stack:
        place = directory or stack.enter_context(tempfile.TemporaryDirectory(prefix="tba-bench-"))
        runners = {
            name: Entrant(
                GptRunner,
                {"way": way, **settings_of(shape, batch_size=batch_size, window=window, directory=place)},
                FAST_ALLOCATOR,
            )
            for name, (way, shape) in entrants.items()
        }
        return shown_race(runners, steps)


def shown_race(entrants: Mapping[str, Entrant], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Return a race whose progress is shown on stderr, see :func:`tba_lab.demo.race.race`."""
    with shown() as progress:
        progress.phase(f"starting {len(entrants)} processes: {', '.join(entrants)}")
        progress.plan(
            [
                PlannedStep(name, 1.0, opens=round_ == turn == 0)
                for round_ in range(rounds)
                for turn, name in enumerate(turns(list(entrants), round_))
            ]
        )
        return race(entrants, rounds, watch=progress)


def report(results: dict[str, list[dict[str, Any]]], *, base: dict[str, str]) -> list[dict[str, Any]]:
    """One row a lane: peak, time, the ratios to its base, and between what the median of that one is."""
    rows = []
    for name, steps in results.items():
        other = results[base[name]]
        peak, base_peak = (max(step.get("peak", 0) for step in each[_WARM_UP:]) for each in (steps, other))
        seconds, base_seconds = _seconds(steps), _seconds(other)
        rows.append(
            {
                "name": name,
                "peak_bytes": peak,
                "seconds_median": statistics.median(seconds),
                "peak_ratio": peak / base_peak,
                "time_ratio": paired_ratio(seconds, base_seconds),
                "time_interval": median_interval(
                    [ours / its for ours, its in zip(seconds, base_seconds, strict=True)]
                ),
                "same_losses": [step["loss"] for step in steps] == [step["loss"] for step in other],
            }
        )
    return rows


def _seconds(steps: list[dict[str, Any]]) -> list[float]:
    """Time of the steps after the warm-up in which nothing was sampled."""
    return [step["seconds"] for step in steps[_WARM_UP:] if "peak" not in step]


def print_table(rows: list[dict[str, Any]], json_file: str | None) -> None:
    """Print the rows, and write them if asked."""
    table = Table()
    for head in ("", "peak MiB", "x keep", "step s", "x keep (quartiles)", "95 % of the median", "losses"):
        table.add_column(head, justify="left" if not head else "right")
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['peak_bytes'] / 2**20:.1f}",
            f"{row['peak_ratio']:.3f}",
            f"{row['seconds_median']:.3f}",
            str(row["time_ratio"]),
            "{:.3f} to {:.3f}".format(*row["time_interval"]),
            "same bits" if row["same_losses"] else "differ",
        )
    console = Console()
    (console if console.is_terminal else Console(width=110)).print(table)
    if json_file is not None:
        plain = [{**row, "time_ratio": dataclasses.asdict(row["time_ratio"])} for row in rows]
        Path(json_file).write_text(json.dumps(plain, indent=2) + "\n")
