"""The demo on a terminal: a progress bar while it trains, a table at the end."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tba_offload.config import parse_size
from tba_offload.demo.run import DemoSettings, describe, run_demo
from tba_offload.errors import ConfigError, TbaError
from tba_offload.megatron import require_core
from tba_offload.report.rok import require_matplotlib

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_HEADS = (
    *("batch", "strategy", "peak MiB", "step s", "tokens/s"),
    *("written", "read", "forwarded", "deduplicated", "kept MiB", "stall s", "last loss"),
)
_WIDTH = 150  # of the table where the output is not a terminal


def run_on_console(
    *,
    as_json: bool,
    window: str | None,
    output: Path,
    batch_sizes: tuple[int, ...],
    steps: int,
    directories: tuple[Path, ...],
    policy: Path | None,
    budget: str | None,
    threads: int | None,
    **shape: Any,
) -> None:
    """Runs the demo with the options of the command line and prints what it found.

    Raises:
        ConfigError: Options that contradict each other.
        TbaError: The losses of the strategies differ, or the demo could not run.
    """
    if window is not None and policy is not None:
        raise ConfigError("--window has no effect with --policy; set budget.in_flight_bytes in the policy")
    require_core("the demo")
    require_matplotlib()
    from tba_offload.megatron.gpt import GptShape

    settings = DemoSettings(
        shape=GptShape(**shape),
        batch_sizes=tuple(sorted(set(batch_sizes))),
        steps=steps,
        output=output,
        directories=directories,
        **({} if window is None else {"in_flight_bytes": parse_size(window)}),
        policy=policy,
        budget=None if budget is None else _budget(budget),
        threads=threads,
    )
    if not as_json:
        click.echo(describe(settings))
    summary = _with_progress(settings, quiet=as_json)
    if as_json:
        click.echo(json.dumps(summary, indent=2))
    else:
        _print(summary, settings)
    if not summary["identical_losses"]:
        raise TbaError("the losses of the strategies differ: this must not happen, please report it")


def _budget(text: str) -> int | float:
    """A size, or a share of keep's peak in per cent.

    Raises:
        ConfigError: It is neither.
    """
    if not text.endswith("%"):
        return parse_size(text)
    try:
        share = float(text[:-1]) / 100
    except ValueError:
        share = 0.0
    if not 0 < share < math.inf:
        raise ConfigError(f"a budget is a size such as 64MiB, or a share such as 35%, and not {text!r}")
    return share


def _with_progress(settings: DemoSettings, *, quiet: bool) -> dict[str, Any]:
    console = Console(stderr=True)
    if quiet:
        return run_demo(settings)
    if not console.is_terminal:
        return run_demo(settings, on_step=_dots(settings.total_steps))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=settings.total_steps)
        return run_demo(settings, on_step=lambda: progress.advance(task))


def _dots(total: int) -> Callable[[], None]:
    """A line every tenth of the way, where a bar would fill a log file with control characters."""
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if done == total or done % math.ceil(total / 10) == 0:
            click.echo(f"{done} of {total} steps", err=True)

    return advance


def _print(summary: dict[str, Any], settings: DemoSettings) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print(_table(summary))
    for size, ratios in summary["ratios"].items():
        ours = settings.ours
        spread = summary["spread"][size][f"time_{ours}_over_keep"]
        click.echo(
            f"batch size {size}: {ours} needs {ratios[f'peak_{ours}_over_keep']:.3f} x the activation peak "
            f"of keep and {ratios[f'peak_{ours}_over_recompute']:.3f} x that of recompute, "
            f"{ratios[f'time_{ours}_over_keep']:.3f} x the step time of keep "
            f"(quartiles {spread['low']:.3f} to {spread['high']:.3f}) and "
            f"{ratios[f'time_{ours}_over_recompute']:.3f} x that of recompute"
        )
        _print_prediction(summary["batch_sizes"][size][ours])
    same = "identical to the last bit" if summary["identical_losses"] else "DIFFERENT"
    click.echo(f"losses of the {len(settings.strategies)} strategies over {settings.steps} steps: {same}")
    click.echo(f"activation peak: {summary['measured']['activation_peak_bytes']}")
    click.echo(f"curve: {settings.output / 'rok.png'}; figures: {settings.output / 'summary.json'}")


def _print_prediction(figures: dict[str, Any]) -> None:
    errors = figures["predicted_peak_error"], figures["predicted_seconds_error"]
    if None in errors:
        return
    peak, seconds = (f"{error:+.1%}" for error in errors)
    click.echo(
        f"  predicted last: peak {figures['predicted_peak_bytes'] / 2**20:.1f} MiB, forward and backward "
        f"{figures['predicted_seconds']:.3f} s; each step against its own: {peak} and {seconds} (medians)"
    )


def _table(summary: dict[str, Any]) -> Table:
    table = Table(title="Recompute, offload, keep")
    for head in _HEADS:
        table.add_column(head, justify="left" if head == "strategy" else "right")
    for size, lanes in summary["batch_sizes"].items():
        for name, figures in lanes.items():
            table.add_row(size, name, *_cells(name, figures))
        table.add_section()
    return table


def _cells(strategy: str, figures: dict[str, Any]) -> list[str]:
    def mib(name: str) -> str:
        if strategy in {"keep", "recompute"} and name != "activation_peak_bytes":
            return ""  # such layers run without hooks, nothing is known of them
        return f"{figures[name] / 2**20:.1f}"

    return [
        mib("activation_peak_bytes"),
        f"{figures['step_seconds_median']:.3f}",
        f"{figures['tokens_per_second']:.0f}",
        *(mib(f"{what}_bytes") for what in ("offloaded", "read", "forwarded", "deduplicated", "kept")),
        f"{figures['stall_seconds_median']:.3f}",
        f"{figures['losses'][-1]:.6f}",
    ]
