"""What recomputing layers takes with attention and without it, by the length of the sequence.

    python benchmarks/sequences.py                          a Llama of width 256, 512 to 4096 tokens
    python benchmarks/sequences.py --sequence 8192          another length; may be given several times

Layers are kept, kept once more, recomputed (recompute-offload), recomputed except for attention, and
offloaded, step by step in turn, each in a process of its own. The first ratios are of processor time of all
threads, which depends least on what else the machine does.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any

import click
import torch
from gpt_runner import shown_race
from planner import PlanRunner, policy
from rich.console import Console
from rich.table import Table

from tba_lab.demo.race import Entrant, paired_ratio
from tba_lab.gpt import GptShape
from tba_offload.config.policy import Placement
from tba_offload.device.malloc import FAST_ALLOCATOR

if TYPE_CHECKING:
    from collections.abc import Sequence

    Steps = list[dict[str, Any]]

WARM_UP = 3
WINDOW = 10 << 20
HEAD_WIDTH = 64
LANES = {
    "keep": Placement.KEEP,
    "keep again": Placement.KEEP,
    "recompute-offload": Placement.RECOMPUTE_OFFLOAD,
    "recompute-except-attention": Placement.RECOMPUTE_EXCEPT_ATTENTION,
    "offload": Placement.OFFLOAD,
}


class MeteredRunner(PlanRunner):
    """One that also says how much processor time a step took, and what it wrote."""

    def step(self) -> dict[str, Any]:
        """One step and its figures."""
        began = time.process_time()
        figures = super().step()
        seconds = time.process_time() - began
        return {**figures, "cpu_seconds": seconds, "written": self._session.report()[-1].offloaded_bytes}


def race_at(sequence: int, *, layers: int, hidden: int, steps: int, dtype: str) -> dict[str, Steps]:
    """Races the lanes at one length."""
    heads = max(hidden // HEAD_WIDTH, 1)
    shape = GptShape(layers=layers, hidden=hidden, heads=heads, sequence=sequence, dtype=dtype)
    with tempfile.TemporaryDirectory() as scratch:
        entrants = {
            name: Entrant(
                MeteredRunner,
                {
                    "config": policy(scratch, placement, window=WINDOW),
                    "shape": shape,
                    "batch_size": 1,
                    "family": "llama",
                },
                FAST_ALLOCATOR,
            )
            for name, placement in LANES.items()
        }
        return shown_race(entrants, steps)


def table(sequence: int, lanes: dict[str, Steps]) -> Table:
    """Return the lanes of one length."""
    made = Table(title=f"{sequence} tokens")
    for title in ("placement", "processor time, x keep", "step, x keep", "peak, x keep", "written MiB"):
        made.add_column(title, justify="left" if title == "placement" else "right")
    peak_of_keep = _peak(lanes["keep"])
    for name, steps in lanes.items():
        ratios = (str(_ratio(steps, lanes["keep"], figure)) for figure in ("cpu_seconds", "seconds"))
        written = statistics.median(step["written"] for step in steps[WARM_UP:]) / 2**20
        made.add_row(name, *ratios, f"{_peak(steps) / peak_of_keep:.2f}", f"{written:.0f}")
    return made


def _ratio(steps: Steps, base: Steps, figure: str) -> object:
    return paired_ratio(*([step[figure] for step in each[WARM_UP:]] for each in (steps, base)))


def _peak(steps: Steps) -> int:
    return max(step["peak"] or 0 for step in steps[WARM_UP:])


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--sequence", type=click.IntRange(min=16), multiple=True, default=(512, 2048, 4096))
@click.option("--layers", default=6, show_default=True)
@click.option("--hidden", default=256, show_default=True)
@click.option("--steps", type=click.IntRange(min=WARM_UP + 4), default=12, show_default=True)
@click.option("--dtype", type=click.Choice(["bf16", "fp32"]), default="fp32", show_default=True)
def main(*, sequence: Sequence[int], **model: Any) -> None:
    """Measures and prints."""
    console = Console(width=130)
    cpu = torch.backends.cpu.get_cpu_capability()
    console.print(f"{model['dtype']} on {cpu}, {torch.get_num_threads()} threads")
    for length in sequence:
        lanes = race_at(length, **model)
        console.print(table(length, lanes))
        spared, whole = lanes["recompute-except-attention"], lanes["recompute-offload"]
        console.print(f"processor time x recompute-offload: {_ratio(spared, whole, 'cpu_seconds')}")
        losses = {tuple(step["loss"] for step in steps) for steps in lanes.values()}
        console.print(f"losses identical: {len(losses) == 1}")


if __name__ == "__main__":
    main()
