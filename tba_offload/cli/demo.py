"""``tba-offload demo``: three strategies, side by side, on a small Megatron GPT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

_COUNT = click.IntRange(min=1)
_FOLDER = click.Path(file_okay=False, path_type=Path)


class _PolicyType(click.Path):
    """A file that exists, or the word auto."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return Path(value) if value == "auto" else super().convert(value, param, ctx)


@click.command()
@click.option(
    "--output",
    type=_FOLDER,
    default="tba-demo",
    show_default=True,
    help="For run logs, pictures and summary.",
)
@click.option("--layers", type=_COUNT, help="[default: 12; with --states 4]")
@click.option("--hidden", type=_COUNT, help="Width.  [default: by machine, 1536 on a CPU with bf16]")
@click.option("--sequence", type=_COUNT, help="Tokens.  [default: by machine, 160 on a CPU with bf16]")
@click.option(
    "--batch-size",
    "batch_sizes",
    type=_COUNT,
    multiple=True,
    help="Sequences in a step; may be given several times.  [default: 2 and 3; with --states 16]",
)
@click.option("--steps", type=click.IntRange(min=8), help="Of each strategy.  [default: 10; on a GPU 20]")
@click.option(
    "--dtype", type=click.Choice(["auto", "bf16", "fp32"]), default="auto", help="auto: the faster one."
)
@click.option(
    "--directory", "directories", type=_FOLDER, multiple=True, help="For offloaded bytes, one a drive."
)
@click.option("--window", help="Bytes in flight at the smallest batch size.  [default: by the model]")
@click.option(
    "--policy", type=_PolicyType(exists=True, path_type=Path), help="File for offload's policy, or auto."
)
@click.option("--budget", metavar="SIZE|SHARE", help="Activation peak for auto: 64MiB, or 35% of keep's.")
@click.option(
    "--device-budget", metavar="SIZE|SHARE", help="Device peak for auto, or for the lane of --states."
)
@click.option(
    "--states",
    type=click.Choice(["keep", "offload", "auto", "backward"]),
    default="keep",
    help="One more lane, whose optimizer states are offloaded too.",
)
@click.option("--threads", type=_COUNT, help="Compute threads of each process.")
@click.option("--control", is_flag=True, help="Let keep race twice, for the noise of the machine.")
@click.option("--time-limit", metavar="MINUTES", type=float, default=10, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON and nothing else.")
def demo(**options: Any) -> None:
    """Train a small Megatron GPT on real text three ways at once and compare them.

    keep, recompute and offload (or auto) alternate step by step, each in a process of its own. Prints the
    table, and writes run logs, rok.svg, rok.png and summary.json to the output directory. Needs megatron-core
    and matplotlib: pip install 'tba-offload[megatron,plots]'.
    """
    from tba_lab.demo import run_on_console

    run_on_console(**options)
