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
@click.option(
    "--layers", type=_COUNT, help="Number of layers.  [default: 12 on a GPU, 8 on a CPU, 4 with --states]"
)
@click.option("--hidden", type=_COUNT, help="Hidden size.  [default: chosen for the machine]")
@click.option(
    "--sequence", type=_COUNT, help="Sequence length in tokens.  [default: 1024 on a GPU, 128 on a CPU]"
)
@click.option(
    "--batch-size",
    "batch_sizes",
    type=_COUNT,
    multiple=True,
    help="Batch size in sequences. For several sizes, repeat the option.  [default: chosen for the machine]",
)
@click.option(
    "--steps", type=click.IntRange(min=8), help="Steps per run.  [default: 20 on a GPU, 8 on a CPU]"
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bf16", "fp32"]),
    default="auto",
    help="Data type of the training. With 'auto', the faster one is used.",
)
@click.option(
    "--directory",
    "directories",
    type=_FOLDER,
    multiple=True,
    help="Store directory. For several drives, repeat the option.",
)
@click.option(
    "--window",
    help="In-flight window at the smallest batch size, such as 64MiB.  [default: computed from the model]",
)
@click.option(
    "--policy",
    type=click.Path(path_type=Path),
    help="Policy of the third strategy: a policy file, or 'auto' to let the planner choose placements.  "
    "[default: offload]",
)
@click.option(
    "--budget",
    metavar="SIZE|SHARE",
    help="Limit of the activation peak. Needs --policy auto. A size such as 64MiB, or a share of the peak "
    "with 'keep', such as 35%.",
)
@click.option(
    "--device-budget",
    metavar="SIZE|SHARE",
    help="Limit of all device memory. Needs --policy auto. A size, or a share of the peak with 'keep'.",
)
@click.option(
    "--states",
    type=click.Choice(["keep", "offload", "auto", "backward"]),
    default="keep",
    help="Also run a strategy that offloads optimizer states. keep: do not run it. offload: offload all of "
    "them. auto: keep as many in memory as --device-budget allows. backward: update within backward().",
)
@click.option(
    "--control", is_flag=True, help="Train with 'keep' a second time, to show how much step times vary."
)
@click.option("--time-limit", metavar="MINUTES", type=float, default=10, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print only the summary, as JSON.")
def demo(**options: Any) -> None:
    """Train a small Megatron GPT on real text with keep, recompute and offload, and compare the strategies.

    Each strategy runs in its own process. The processes take turns after each step. The command prints a
    table, and writes run logs, rok.svg, rok.png and summary.json to the output directory. The command
    needs megatron-core and matplotlib: pip install 'tba-offload[megatron,plots]'.
    """
    from tba_lab.demo import run_on_console

    run_on_console(**options)
