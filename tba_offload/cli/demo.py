"""``tba-offload demo``: compare keep, recompute and offload on a small Megatron GPT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tba_offload.cli.shared import COUNT, JSON

_FOLDER = click.Path(file_okay=False, path_type=Path)
_STATES = click.Choice(["keep", "offload", "auto", "backward"])


@click.command()
@click.option(
    "--output", type=_FOLDER, default="tba-demo", show_default=True, help="Directory for all output files."
)
@click.option("--layers", type=COUNT, help="Number of layers.  [default: chosen for the machine]")
@click.option("--hidden", type=COUNT, help="Hidden size.  [default: chosen for the machine]")
@click.option("--sequence", type=COUNT, help="Sequence length.  [default: 1024 on a GPU, 128 on a CPU]")
@click.option("--batch-size", "batch_sizes", type=COUNT, multiple=True, help="Batch size. Can be repeated.")
@click.option("--steps", type=click.IntRange(8), help="Steps per run.  [default: 20 on a GPU, 8 on a CPU]")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bf16", "fp32"]),
    default="auto",
    help="Data type of the training. With 'auto', the demo uses the faster data type.",
)
@click.option(
    "--directory",
    "directories",
    type=_FOLDER,
    multiple=True,
    help="Directory for offloaded bytes. Repeat this option for each drive.",
)
@click.option("--window", help="In-flight window at the smallest batch size, in bytes, for example 64MiB.")
@click.option(
    "--policy",
    type=click.Path(path_type=Path),
    help="Policy to use instead of 'offload': the path of a file, or 'auto'.",
)
@click.option("--budget", metavar="SIZE|SHARE", help="Limit of the activation peak. Needs --policy auto.")
@click.option(
    "--device-budget", metavar="SIZE|SHARE", help="Limit of the device memory in use. Needs --policy auto."
)
@click.option(
    "--states", type=_STATES, default="keep", help="Also run a strategy that offloads optimizer states."
)
@click.option("--control", is_flag=True, help="Run 'keep' a second time, to show how much step times vary.")
@click.option("--time-limit", metavar="MINUTES", type=float, default=10, show_default=True)
@JSON
def demo(**options: Any) -> None:
    """Train a small Megatron GPT on real text with three strategies: 'keep', 'recompute' and 'offload'.

    Each strategy runs in its own process, and the processes run their steps in turn. The command prints a
    table, and writes run logs, rok.svg, rok.png and summary.json to the output directory. The command
    needs megatron-core and matplotlib: pip install 'tba-offload[megatron,plots]'.

    With --policy, a policy replaces the third strategy 'offload'. With --policy auto, the planner chooses the
    placements. A budget is a size such as 64MiB, or a percentage of the peak with 'keep', such as 35%.

    With --states, a fourth strategy offloads optimizer states. With --states offload, all states are
    offloaded. With --states auto, as many states stay in memory as --device-budget allows. With --states
    backward, each parameter is updated in backward(), and not in optimizer.step().
    """
    from tba_lab.demo import run_on_console

    run_on_console(**options)
