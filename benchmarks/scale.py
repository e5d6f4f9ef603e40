"""Whether an activation costs the same when there are many: from 100 of them in a step to 100,000.

    python benchmarks/scale.py

Tiny layers save three tensors of 4 KiB each, for up to 32 micro-batches whose graphs are all alive when
backward begins, and up to 1,000 layers, over four directories. Everything is written, and read back. The
machine may be busy with other things, so costs are counted in calls of Python and in processor time of the
training thread, less that of the same model without offloading; steps of all sizes take turns.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
import tracemalloc
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from calls import Calls
from hooks import Chain
from torch import nn

import tba_offload as tba

SAVED = 3
"""Tensors that a layer saves."""

TENSOR = 4096
"""Bytes of each."""

WINDOW = 4 << 20
"""Bytes in flight: the same in steps of every size, so that as many activations are in memory."""

PACKAGE = str(Path(tba.__file__).parent / "*")


class Size(NamedTuple):
    """How large a step is."""

    layers: int
    micro_batches: int

    @property
    def activations(self) -> int:
        """How many a step saves; the first layer's input is one more in each micro-batch."""
        return (self.layers * SAVED + 1) * self.micro_batches


SIZES = (Size(33, 1), Size(333, 1), Size(1000, 3), Size(1000, 33))


class Lane:
    """A model of one size, with a session or without.

    Args:
        size: How many layers and micro-batches.
        directories: Where its activations go; none for a model that is trained plainly.
        placement: Of its layers.
        run_log: Where to write one; with it each step is profiled for the planner.
    """

    def __init__(
        self,
        size: Size,
        directories: tuple[Path, ...],
        *,
        placement: str = "offload",
        run_log: Path | None = None,
    ) -> None:
        self.size = size
        self.attach_seconds = 0.0
        self.session: tba.Session | None = None
        self._model = nn.Sequential(*(Chain(SAVED) for _ in range(size.layers)))
        self._x = torch.full((TENSOR // 4,), 0.5, requires_grad=True)
        if directories:
            config = tba.OffloadConfig(
                default=placement,
                min_tensor_bytes=TENSOR,
                budget=tba.BudgetConfig(in_flight_bytes=WINDOW),
                store=tba.StoreConfig(kind="file", directories=directories),
            )
            began = time.process_time()
            self.session = tba.attach(
                self._model, config, layers=list(self._model), measure_memory=False, run_log=run_log
            )
            self.attach_seconds = time.process_time() - began

    def forward(self) -> list[torch.Tensor]:
        """Return the losses of all micro-batches.

        What they saved is in the store, and nothing is held back.
        """
        losses = [self._model(self._x).sum() for _ in range(self.size.micro_batches)]
        if self.session is not None:
            self.session.offloader.writer.flush()
            self.session.offloader.quiesce()
        return losses

    def backward(self, losses: list[torch.Tensor]) -> None:
        """Backward of each, the first first, as a pipeline's schedule has it."""
        while losses:
            losses.pop(0).backward()

    def seconds(self) -> tuple[float, float]:
        """Processor time of this thread for forward and backward, and for the end of the step."""
        began = time.thread_time()
        if self.session is None:
            self.backward(self.forward())
            return time.thread_time() - began, 0.0
        with self.session.step():
            began = time.thread_time()  # what begins a step is counted with its end
            self.backward(self.forward())
            ended = time.thread_time()
        return ended - began, time.thread_time() - ended

    def calls(self) -> int:
        """Call of Python on this thread for forward and backward of one step."""
        assert self.session is not None
        counter = Calls()
        with self.session.step(), counter:
            self.backward(self.forward())
        return counter.count

    def held(self) -> tuple[int, int]:
        """Return what is held when all is saved and backward begins, beyond what was before.

        Returns:
            Bytes of Python objects that the package has made, and objects that the cyclic collector looks at.
        """
        assert self.session is not None
        gc.collect()
        ours = tracemalloc.Filter(inclusive=True, filename_pattern=PACKAGE)
        with self.session.step():
            before = len(gc.get_objects())
            tracemalloc.start()
            losses = self.forward()
            snapshot = tracemalloc.take_snapshot()
            tracemalloc.stop()
            gc.collect()
            objects = len(gc.get_objects()) - before
            nbytes = sum(trace.size for trace in snapshot.filter_traces([ours]).traces)
            self.backward(losses)
        return nbytes, objects

    def written(self) -> int:
        """Bytes that the last step wrote."""
        assert self.session is not None
        return self.session.report()[-1].offloaded_bytes

    def close(self) -> None:
        """End the session."""
        if self.session is not None:
            self.session.close()


def directories_in(place: Path, name: object) -> tuple[Path, ...]:
    """Four directories."""
    made = tuple(place / f"{name}-{number}" for number in range(4))
    for directory in made:
        directory.mkdir()
    return made


class Counts(NamedTuple):
    """What an activation takes, whatever else the machine does."""

    calls: float
    nbytes: float
    objects: float


def counts_of(size: Size, place: Path) -> Counts:
    """Return the counts of each activation of a step, after two that warm up."""
    lane = Lane(size, directories_in(place, f"{size.layers}-{size.micro_batches}"))
    try:
        lane.seconds()
        lane.seconds()
        return Counts(*(found / size.activations for found in (lane.calls(), *lane.held())))
    finally:
        lane.close()


def measure(sizes: tuple[Size, ...], place: Path, rounds: int) -> list[dict[str, Any]]:
    """Return the figures of each size."""
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        lanes = []
        for size in sizes:
            lane, plain = Lane(size, directories_in(place, size.activations)), Lane(size, ())
            stack.callback(lane.close)
            first, plain_first = lane.seconds()[0], plain.seconds()[0]
            lanes.append((lane, plain, first - plain_first))
        times: list[list[tuple[float, float]]] = [[] for _ in sizes]
        for _ in range(rounds):
            for (lane, plain, _), its in zip(lanes, times, strict=True):
                repeats = max(1, 3000 // lane.size.activations)
                for _ in range(repeats):
                    (step, end), (bare, _) = lane.seconds(), plain.seconds()
                    its.append((step - bare, end))
        for (lane, _, first), its in zip(lanes, times, strict=True):
            steps = [step for step, _ in its]
            usual, count = statistics.median(steps), lane.size.activations
            assert lane.written() >= 0.99 * count * TENSOR
            nbytes, objects = lane.held()
            rows.append(
                {
                    "layers": lane.size.layers,
                    "micro_batches": lane.size.micro_batches,
                    "activations": count,
                    "us": 1e6 * usual / count,
                    "us_quartiles": [
                        1e6 * each / count for each in statistics.quantiles([a for a, _ in its])
                    ],
                    "calls": lane.calls() / count,
                    "bytes": nbytes / count,
                    "objects": objects / count,
                    "attach_ms": 1e3 * lane.attach_seconds,
                    "first_us": 1e6 * (first - usual) / count,
                    "end_ms": 1e3 * statistics.median(end for _, end in its),
                }
            )
    return rows


def plan_times(size: Size, place: Path, steps: int) -> list[float]:
    """Processor time of this thread at the end of each step, milliseconds, where all layers are auto."""
    lane = Lane(size, directories_in(place, f"auto-{size.activations}"), placement="auto")
    try:
        return [1e3 * lane.seconds()[1] for _ in range(steps)]
    finally:
        lane.close()


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--rounds", default=5, show_default=True, help="Steps of the largest size; smaller take more.")
@click.option("--plan-steps", default=6, show_default=True, help="Steps that are planned; 0 for none.")
@click.option("--largest", default=100_000, show_default=True, help="Leave larger steps out.")
@click.option("--directory", type=click.Path(path_type=Path), default=None, help="Where activations go.")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), default=None, help="Write figures here."
)
def main(rounds: int, plan_steps: int, largest: int, directory: Path | None, json_file: Path | None) -> None:
    """Print a line for each size."""
    torch.set_num_threads(1)
    tba.keep_freed_pages()
    sizes = tuple(size for size in SIZES if size.activations <= largest * 1.01)
    with tempfile.TemporaryDirectory(dir=directory) as place:
        rows = measure(sizes, Path(place), rounds)
        for row in rows:
            low, _, high = row["us_quartiles"]
            click.echo(
                f"{row['activations']:>7} activations ({row['layers']} layers, {row['micro_batches']} "
                f"micro-batches): {row['us']:.1f} us ({low:.1f} to {high:.1f}), {row['calls']:.1f} calls, "
                f"{row['bytes']:.0f} bytes, {row['objects']:.1f} objects each; "
                f"first step {row['first_us']:+.1f} us; attach {row['attach_ms']:.0f} ms; "
                f"end of step {row['end_ms']:.1f} ms"
            )
        for size, row in zip(sizes, rows, strict=True):
            if plan_steps:
                row["plan_ms"] = plan_times(size, Path(place), plan_steps)
                ends = ", ".join(f"{each:.0f}" for each in row["plan_ms"])
                click.echo(f"{size.activations:>7} activations, auto: ends of steps {ends} ms")
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
