"""Whether settings of threads make the same step faster or slower: affinity, waiting of OpenMP, their number.

    python benchmarks/threads.py

Each way trains a GPT in a process of its own; single steps alternate. Times are of whole steps; beside each
stands the processor time of all threads of its process. Ratios are to keep, with quartiles; keep runs twice,
and so does offload: how far these are apart is what the machine does by itself. For each way it also says, of
a step, how long I/O threads ran, how long the training thread ran, and how long that had work but no core.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import click
import torch
from gpt_runner import CONTROL, SHAPE, GptRunner, dtype_option, settings_of, settled_dtype, shown_race

from tba_lab.demo.race import Entrant, paired_ratio
from tba_offload.config import options
from tba_offload.device.malloc import FAST_ALLOCATOR

if TYPE_CHECKING:
    from collections.abc import Mapping

_WARM_UP = 2


class Way(NamedTuple):
    """What a lane does with activations, and its threads.

    Attributes:
        way: One of :data:`gpt_runner.WAYS`.
        environment: Of its process.
        compute: Threads that compute; 0 for as many as there are cores.
        io: Threads that write, and that read; 0 for the usual number.
        pinned: Whether the I/O threads have the last core to themselves as far as they run.
    """

    way: str
    environment: Mapping[str, str] = {}
    compute: int = 0
    io: int = 0
    pinned: bool = False


LANES = {
    "keep": Way("keep"),
    CONTROL: Way("keep"),
    "offload": Way("offload"),
    "offload again": Way("offload"),
    "I/O threads on the last core": Way("offload", pinned=True),
    "two I/O threads each way": Way("offload", io=2),
    "a compute thread less": Way("offload", compute=max((os.cpu_count() or 2) - 1, 1)),
    "OMP_WAIT_POLICY=passive": Way("offload", {"OMP_WAIT_POLICY": "passive"}),
    "the same, keep": Way("keep", {"OMP_WAIT_POLICY": "passive"}),
    "GOMP_SPINCOUNT=10000": Way("offload", {"GOMP_SPINCOUNT": "10000"}),
}
"""PyTorch's CPU builds bring GNU's OpenMP, which ``KMP_BLOCKTIME`` says nothing to."""


class ThreadsRunner(GptRunner):
    """A GPT whose threads are set up in some way.

    Args:
        compute: As of :class:`Way`.
        io: Likewise.
        pinned: Likewise.
        settings: Of :class:`gpt_runner.GptRunner`.
    """

    def __init__(self, way: str, *, compute: int, io: int, pinned: bool, **settings: Any) -> None:
        if compute:
            torch.set_num_threads(compute)
        with contextlib.ExitStack() as stack:
            if io:
                stack.enter_context(mock.patch.object(options, "threads_per_direction", return_value=io))
            super().__init__(way, **settings)
        if pinned:
            last = {max(os.sched_getaffinity(0))}
            for thread in threading.enumerate():
                if thread.name.startswith("tba-") and thread.native_id is not None:
                    os.sched_setaffinity(thread.native_id, last)

    def step(self) -> dict[str, Any]:
        """One step; also the processor seconds of the process, of I/O threads and of the training thread."""
        began, before = time.process_time(), _threads()
        figures = super().step()
        threads = {name: seconds - before[name] for name, seconds in _threads().items()}
        return {**figures, "cpu": time.process_time() - began, **threads}


def _threads() -> dict[str, float]:
    """Seconds that I/O threads ran, and that this thread ran, and waited for a core, since they began."""
    ran, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    clocks = [
        time.pthread_getcpuclockid(thread.ident)
        for thread in threading.enumerate()
        if thread.name.startswith(("tba-write", "tba-read")) and thread.ident is not None
    ]
    return {
        "io": sum(map(time.clock_gettime, clocks)),
        "training": int(ran) / 1e9,
        "no_core": int(waited) / 1e9,
    }


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--layers", default=12, show_default=True)
@click.option("--hidden", default=512, show_default=True)
@click.option("--sequence", default=256, show_default=True)
@click.option("--batch-size", default=2, show_default=True)
@click.option("--steps", type=click.IntRange(min=5), default=20, show_default=True, help="Steps of each way.")
@click.option("--window", default="10MiB", show_default=True, help="Bytes in flight.")
@dtype_option
@click.option("--directory", default=None, help="Where files go.  [default: a temporary directory]")
@click.option("--json", "json_file", type=click.Path(path_type=Path), default=None, help="For figures.")
def main(
    *,
    batch_size: int,
    steps: int,
    window: str,
    dtype: str,
    directory: str | None,
    json_file: Path | None,
    **shape: int,
) -> None:
    """Print a line for each way."""
    model = SHAPE | shape | {"dtype": settled_dtype(dtype)}
    with tempfile.TemporaryDirectory(dir=directory) as place:
        settings = settings_of(model, batch_size=batch_size, window=window, directory=place)
        entrants = {}
        for name, (way, environment, compute, io, pinned) in LANES.items():
            own = {"way": way, "compute": compute, "io": io, "pinned": pinned}
            entrants[name] = Entrant(ThreadsRunner, own | settings, FAST_ALLOCATOR | environment)
        results = shown_race(entrants, steps)
    figures = {}
    for name, steps_of in results.items():
        rounds = list(zip(steps_of, results["keep"], strict=True))[_WARM_UP:]
        found = {}
        for figure in ("seconds", "cpu"):
            pairs = [(ours[figure], base[figure]) for ours, base in rounds if "peak" not in ours]
            found[figure] = paired_ratio([ours for ours, _ in pairs], [base for _, base in pairs])
        usual = {
            figure: statistics.median(ours[figure] for ours, _ in rounds if "peak" not in ours)
            for figure in ("seconds", "io", "training", "no_core")
        }
        click.echo(
            f"{name:30} {usual['seconds']:.3f} s, x keep {found['seconds']}; processor time x keep "
            f"{found['cpu']}; I/O threads {usual['io']:.3f} s, training thread {usual['training']:.3f} s and "
            f"{usual['no_core']:.3f} s without a core"
        )
        figures[name] = {key: dataclasses.asdict(spread) for key, spread in found.items()} | {"usual": usual}
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
