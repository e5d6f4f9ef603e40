"""The demo on a terminal: a progress bar while it trains, a table at the end."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from tba_lab.demo.progress import Progress, shown
from tba_offload.config import StatesConfig, parse_size
from tba_offload.errors import ConfigError, TbaError
from tba_offload.formatting import readable_size
from tba_offload.megatron import require_core
from tba_offload.report.rok import require_matplotlib

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tba_lab.demo.run import DemoSettings

_HEADS = (
    *("batch", "strategy", "peak MiB", "device MiB", "step s", "tokens/s"),
    *("written MiB", "read MiB", "forwarded MiB", "dedup MiB", "kept MiB", "stall s", "last loss"),
)
_REMEDY = (
    "give fewer --steps, a shorter --sequence, a smaller --hidden, --layers or --batch-size, or leave them "
    "out to have them fitted to this machine; take --dtype auto; or allow more minutes by --time-limit"
)
_STATES = {
    "keep": None,
    "offload": StatesConfig(),
    "auto": StatesConfig(),
    "backward": StatesConfig(when="backward", gradients="free"),
}
_WIDTH = 150  # of the table where the output is not a terminal

_WAITS = 0.1
"""Share of a step that waits for the drive from which on the output says so."""


def run_on_console(*, as_json: bool, time_limit: float, **options: Any) -> None:
    """Run the demo with the options of the command line and print what it found.

    Args:
        as_json: Print the summary and nothing else.
        time_limit: Minutes that it may take.
        options: Those of the command line, ``None`` for what is to be fitted to the machine.

    Raises:
        ConfigError: Options that contradict each other, or a job that does not fit.
        TooLongError: It would take longer than ``time_limit``.
        TbaError: The losses of the strategies differ, or the demo could not run.
    """
    if options["window"] is not None and options["policy"] is not None:
        raise ConfigError("--window has no effect with --policy; set budget.in_flight_bytes in the policy")
    limits: dict[str, Any] = {"time_limit": 60 * time_limit, "remedy": _REMEDY}
    if as_json:
        summary, _ = _run(Progress(_nothing, **limits), _nothing, **options)
        click.echo(json.dumps(summary, indent=2))
    else:
        with shown(**limits) as progress:
            summary, settings = _run(progress, click.echo, **options)
        _print(summary, settings)
    if not (summary["identical_losses"] and summary["identical_parameters"]):
        raise TbaError(_why_losses_differ())


def _why_losses_differ() -> str:
    return "the losses of the strategies differ: this must not happen, please report it"


def _nothing(_line: str) -> None:
    """Print nothing."""


def _run(
    progress: Progress, say: Callable[[str], object], **options: Any
) -> tuple[dict[str, Any], DemoSettings]:
    """Chooses dtype and job, says which, and runs it."""
    progress.phase("loading PyTorch and megatron-core")
    require_core("the demo")
    require_matplotlib()
    from tba_lab.demo.run import describe, run_demo

    settings = _settings(progress, say, **options)
    say(describe(settings))
    progress.plan(settings.planned_steps())
    return run_demo(settings, watch=progress), settings


def _settings(
    progress: Progress,
    say: Callable[[str], object],
    *,
    window: str | None,
    budget: str | None,
    device_budget: str | None,
    dtype: str,
    layers: int | None,
    hidden: int | None,
    heads: int | None,
    sequence: int | None,
    steps: int | None,
    batch_sizes: tuple[int, ...],
    control: bool,
    states: str,
    output: Path,
    directories: tuple[Path, ...],
    policy: Path | None,
    threads: int | None,
    **model: Any,
) -> DemoSettings:
    """Return the job that the options, and where they say nothing the machine, ask for."""
    from tba_lab.demo.dtype import choose_dtype
    from tba_lab.demo.fit import TARGET_SECONDS, Wish, heads_for, layers_for, sizes_for
    from tba_lab.demo.run import DemoSettings, read_policy, refuse_budgets, refuse_run_logs, strategies_of
    from tba_lab.demo.sizing import fitted
    from tba_lab.megatron_cpu import training_device

    in_flight_bytes = None if window is None else parse_size(window)
    peak, on_device = (None if each is None else _budget(each) for each in (budget, device_budget))
    refuse_budgets(policy, peak, on_device, fewest_states=states == "auto")
    strategies = strategies_of(policy, states=states != "keep", control=control)
    layers, sizes = layers or layers_for(strategies), tuple(sorted(set(batch_sizes))) or sizes_for(strategies)
    read_policy(policy, layers)
    refuse_run_logs(output)
    chosen = choose_dtype(dtype, device=training_device())
    say(str(chosen))
    model |= {"layers": layers, "heads": heads or heads_for(hidden), "dtype": chosen.dtype}
    wish = Wish(hidden, sequence, steps, sizes, strategies, model)
    seconds = min(TARGET_SECONDS * len(strategies), progress.time_limit)
    found = fitted(wish, directories or (output,), seconds=seconds, threads=threads, watch=progress)
    say(str(found))
    return DemoSettings(
        shape=found.job.shape,
        batch_sizes=sizes,
        steps=found.job.steps,
        output=output,
        directories=directories,
        in_flight_bytes=in_flight_bytes,
        policy=policy,
        budget=peak,
        device_budget=on_device,
        fewest_states=states == "auto",
        threads=threads,
        control=control,
        states=_STATES[states],
    )


def _budget(text: str) -> int | float:
    """Return a size, or a share of keep's peak in per cent.

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
        _print_drive(summary["batch_sizes"][size], ours)
        if "device_budget" in summary:
            _print_device_budget(summary["device_budget"][size])
        if settings.states is not None:
            _print_states(summary, size)
        if settings.control:
            _print_control(summary["spread"][size])
    for what in ("losses", "parameters"):
        same = "identical to the last bit" if summary[f"identical_{what}"] else "DIFFERENT"
        click.echo(f"{what} of the {len(settings.strategies)} strategies over {settings.steps} steps: {same}")
    click.echo(f"activation peak: {summary['measured']['activation_peak_bytes']}")
    click.echo(f"curve: {settings.output / 'rok.png'}; figures: {settings.output / 'summary.json'}")


def _print_states(summary: dict[str, Any], size: str) -> None:
    ratios, spread = summary["ratios"][size], summary["spread"][size]["time_states_over_keep"]
    figures = summary["batch_sizes"][size]["states"]
    click.echo(
        f"  with optimizer states offloaded too: {ratios['device_peak_states_over_keep']:.3f} x the device "
        f"peak of keep (weights, gradients, states and activations), {spread['median']:.3f} x its step time "
        f"(quartiles {spread['low']:.3f} to {spread['high']:.3f}); of states "
        f"{readable_size(figures['states_read_bytes'])} are read in a step and "
        f"{readable_size(figures['states_written_bytes'])} written"
    )
    of_drive = summary["drive"][size]
    spread, rate = of_drive["time_states_over_bound"], of_drive["both_bytes_per_second"]
    click.echo(
        f"  in such a step {readable_size(of_drive['travelled_bytes'])} travel, which the drive reads and "
        f"writes at {rate / 1e9:.2f} GB/s; over the larger of the time for that and of keep's it took "
        f"{spread['median']:.3f} (quartiles {spread['low']:.3f} to {spread['high']:.3f})"
    )


def _print_drive(lanes: dict[str, dict[str, Any]], ours: str) -> None:
    """Says so where the drive is what a step waits for, as with a small model on a fast GPU."""
    figures = lanes[ours]
    if figures["stall_seconds_median"] < _WAITS * figures["step_seconds_median"]:
        return
    moved = figures["offloaded_bytes"] + figures["read_bytes"]
    rate = moved / lanes["keep"]["step_seconds_median"]
    click.echo(
        f"  {ours} waits for the drive, which would have to read and write {rate / 1e9:.1f} GB/s to move "
        f"{readable_size(moved)} in keep's step time. --policy auto offloads what there is time for; a wider "
        "model computes longer for each byte"
    )


def _print_device_budget(found: dict[str, Any]) -> None:
    kept = "kept" if found["kept"] else "NOT kept"
    errors = [found[f"{name}_error"] for name in ("peak", "seconds")]
    peak, seconds = ("not predicted" if error is None else f"{error:+.1%}" for error in errors)
    travelling = "" if found["travelling"] is None else f"; {found['travelling']} of "
    travelling += "" if found["travelling"] is None else f"{found['sub_groups']} sub-groups of states travel"
    click.echo(
        f"  device budget of {readable_size(found['bytes'])} {kept} by {found['lane']}: "
        f"{readable_size(found['peak_bytes'])} at most{travelling}; predicted against measured: peak "
        f"{peak}, whole step {seconds} (medians)"
    )


def _print_control(spreads: dict[str, dict[str, float]]) -> None:
    spread = spreads["time_control_over_keep"]
    click.echo(
        f"  noise: keep once more, in a process of its own, took {spread['median']:.3f} x the step time of "
        f"keep (quartiles {spread['low']:.3f} to {spread['high']:.3f})"
    )


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
    trained = summary["trained"]
    table = Table(title=f"Recompute, offload, keep ({trained['dtype']}, {trained['instruction_set']})")
    for head in _HEADS:
        table.add_column(head, justify="left" if head == "strategy" else "right")
    for size, lanes in summary["batch_sizes"].items():
        for name, figures in lanes.items():
            table.add_row(size, name, *_cells(name, figures))
        table.add_section()
    return table


def _cells(strategy: str, figures: dict[str, Any]) -> list[str]:
    def mib(name: str) -> str:
        if strategy in {"keep", "recompute", "control"} and name != "activation_peak_bytes":
            return ""  # such layers run without hooks, nothing is known of them
        return f"{figures[name] / 2**20:.1f}"

    return [
        mib("activation_peak_bytes"),
        f"{figures['device_peak_bytes'] / 2**20:.0f}",
        f"{figures['step_seconds_median']:.3f}",
        f"{figures['tokens_per_second']:.0f}",
        *(mib(f"{what}_bytes") for what in ("offloaded", "read", "forwarded", "deduplicated", "kept")),
        f"{figures['stall_seconds_median']:.3f}",
        f"{figures['losses'][-1]:.6f}",
    ]
