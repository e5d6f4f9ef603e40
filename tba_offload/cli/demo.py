"""``tba-offload demo``: three strategies, side by side, on a small Megatron GPT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


class _PolicyType(click.Path):
    """A file that exists, or the word auto."""

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return Path(value) if value == "auto" else super().convert(value, param, ctx)


@click.command()
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("tba-demo"),
    show_default=True,
    help="Directory for run logs, pictures and summary.",
)
@click.option("--layers", type=click.IntRange(min=1), help="[default: 12; with --states 4]")
@click.option(
    "--hidden", type=click.IntRange(min=1), help="Width.  [default: what fits the machine, at most 1536]"
)
@click.option(
    "--heads", type=click.IntRange(min=1), help="Of attention.  [default: what divides the width, at most 12]"
)
@click.option(
    "--sequence", type=click.IntRange(min=1), help="Tokens.  [default: what fits the machine, at most 160]"
)
@click.option(
    "--batch-size",
    "batch_sizes",
    type=click.IntRange(min=1),
    multiple=True,
    help="Sequences in a step; may be given several times.  [default: 2 and 3; with --states 16, since all "
    "states travel in each step]",
)
@click.option(
    "--steps",
    type=click.IntRange(min=5),
    help="Steps of each strategy and batch size.  [default: what fits the machine, at most 20]",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bf16", "fp32"]),
    default="auto",
    show_default=True,
    help="auto measures which is faster on this machine.",
)
@click.option("--style", type=click.Choice(["gpt", "llama"]), default="gpt", show_default=True)
@click.option("--dropout", type=click.FloatRange(0, 1, max_open=True), default=0.1, show_default=True)
@click.option(
    "--directory",
    "directories",
    type=click.Path(file_okay=False, path_type=Path),
    multiple=True,
    help="Where offloaded bytes go, one for each drive.  [default: a directory under the output]",
)
@click.option(
    "--window",
    help="Bytes in flight at the smallest batch size; grows with the batch size.  [default: 10MiB at width "
    "1536, sequence 160 and batch size 2 in bf16, else in proportion]",
)
@click.option(
    "--policy",
    type=_PolicyType(),
    help="YAML file with the policy of the offload strategy, whose budget replaces --window; or auto.",
)
@click.option(
    "--budget", metavar="SIZE|SHARE", help="Activation peak for auto: 64MiB, or 35% of keep's peak."
)
@click.option(
    "--device-budget",
    metavar="SIZE|SHARE",
    help="For auto, most bytes of weights, gradients, states and activations: 2GiB, or 75% of keep's; with "
    "--states for the lane that offloads these.",
)
@click.option(
    "--states",
    type=click.Choice(["keep", "offload", "auto", "backward"]),
    default="keep",
    show_default=True,
    help="One more lane, whose optimizer states are offloaded too, and updated in its step or in backward; "
    "auto: as few as let a step with --device-budget be fastest.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Compute threads of each process.")
@click.option(
    "--control",
    is_flag=True,
    help="Let keep race twice: what the two differ by is the noise of the machine.",
)
@click.option(
    "--time-limit",
    metavar="MINUTES",
    type=click.FloatRange(min=0, min_open=True),
    default=10,
    show_default=True,
    help="Stop early if it is going to take longer.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON and nothing else.")
def demo(*, as_json: bool, time_limit: float, **options: Any) -> None:
    """Train a small Megatron GPT on real text three ways at once and compare them.

    keep, recompute and offload (or auto) alternate step by step, each in a process of its own; with --states
    a fourth one that offloads the optimizer's states as well. Prints the table, and writes run logs, rok.svg,
    rok.png and summary.json to the output directory. Width, sequence and steps that are not given are chosen
    so that it takes 80 seconds for each way at most and fits memory and disk. Needs megatron-core and
    matplotlib: pip install 'tba-offload[megatron,plots]'.
    """
    from tba_lab.demo.console import run_on_console

    run_on_console(as_json=as_json, time_limit=time_limit, **options)
