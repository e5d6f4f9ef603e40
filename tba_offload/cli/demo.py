"""``tba-offload demo``: compare keep, recompute and offload on a small Megatron GPT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

_COUNT = click.IntRange(min=1)
_FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command()
@click.option(
    "--output",
    type=_FOLDER,
    default="tba-demo",
    show_default=True,
    help="Directory for the run logs, the pictures and the summary.",
)
@click.option("--layers", type=_COUNT, help="Layer count.  [default: depends on the machine, 8 on a CPU]")
@click.option("--hidden", type=_COUNT, help="Hidden size.  [default: depends on the machine]")
@click.option("--sequence", type=_COUNT, help="Sequence length in tokens.  [default: depends on the machine]")
@click.option(
    "--batch-size",
    "batch_sizes",
    type=_COUNT,
    multiple=True,
    help="Batch size in sequences. Repeat the option for several sizes.  [default: depends on the machine]",
)
@click.option("--steps", type=click.IntRange(min=8), help="Steps per run.  [default: 8, or 20 on a GPU]")
@click.option(
    "--dtype", type=click.Choice(["auto", "bf16", "fp32"]), default="auto", help="'auto': the faster dtype."
)
@click.option(
    "--directory", "directories", type=_FOLDER, multiple=True, help="Store directory. Repeat for each drive."
)
@click.option("--window", help="In-flight window at the smallest batch size.  [default: from the model]")
@click.option("--policy", type=click.Path(path_type=Path), help="Policy file of 'offload', or auto.")
@click.option(
    "--budget",
    metavar="SIZE|SHARE",
    help="Limit of the activation peak with --policy auto: 64MiB, or 35% of the peak of 'keep'.",
)
@click.option(
    "--device-budget", metavar="SIZE|SHARE", help="Device budget with --policy auto or --states auto."
)
@click.option(
    "--states",
    type=click.Choice(["keep", "offload", "auto", "backward"]),
    default="keep",
    help="Add a strategy that offloads optimizer states. With 'backward', backward() updates parameters.",
)
@click.option("--control", is_flag=True, help="Train with 'keep' twice, to show how much step times vary.")
@click.option("--time-limit", metavar="MINUTES", type=float, default=10, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print only the summary, as JSON.")
def demo(**options: Any) -> None:
    """Train a small Megatron GPT on real text with keep, recompute and offload, and compare the strategies.

    Each strategy runs in its own process. The processes take turns after each step. The command prints a
    table. The command writes run logs, rok.svg, rok.png and summary.json to the output directory. The command
    needs megatron-core and matplotlib: pip install 'tba-offload[megatron,plots]'.
    """
    from tba_lab.demo import run_on_console

    run_on_console(**options)
