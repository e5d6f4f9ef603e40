"""Commands that read run logs: ``why``, ``rok``, ``plan``, ``timeline`` and ``report``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from tba_offload.cli.shared import FILE, FORCE, JSON, RATED, bandwidth_of, output, rates, size, writing
from tba_offload.formatting import visible

if TYPE_CHECKING:
    from pathlib import Path

    from tba_offload.report.rok import Memory

_RUN = click.argument("run", metavar="RUN.jsonl", type=FILE)
_PEAKS = click.Choice(("activations", "device"))
_RUNS = click.argument("runs", metavar="RUN.jsonl...", nargs=-1, required=True, type=FILE)


@click.command()
@_RUN
@JSON
def why(run: Path, *, as_json: bool) -> None:
    """Print what holds memory at the memory peak of a run, and the one change that lowers the peak most.

    The output also names the phase and the layer in which memory peaks, and compares the measured peak with
    the planned peak. For a run with several ranks, the command uses the rank with the highest peak.
    """
    from tba_offload.report import text
    from tba_offload.report.why import why as diagnose

    diagnosis = diagnose(run)
    if as_json:
        click.echo(json.dumps(diagnosis.as_json(), indent=2))
    else:
        text.show(*diagnosis.parts())


@click.command()
@_RUNS
@output("File for a picture of the ROK curve (.svg or .png). Can be repeated.", multiple=True)
@JSON
@click.option("--memory", type=_PEAKS, default="activations", show_default=True, help="Peak to compare.")
def rok(runs: tuple[Path, ...], output: tuple[Path, ...], *, as_json: bool, memory: Memory) -> None:
    """Compare runs by memory peak and throughput, as a ROK curve (recompute, offload, keep).

    Each run is one point of the curve. The output is a table of the runs, the Pareto set and advice. A run is
    in the Pareto set if every faster run has a higher memory peak.

    By default, the memory peak is the peak of activations. With --memory device, the memory peak also
    includes weights, gradients and optimizer states. For a model on a CPU, --memory device means all memory
    of the process.
    """
    from tba_offload.report import rok as report
    from tba_offload.report import text

    for picture in output:
        report.picture_kind(picture)
    points = report.points(runs, memory=memory)
    for picture in output:
        with writing(picture, runs):
            report.draw(points, picture)
    if as_json:
        click.echo(json.dumps({"points": report.rows(points), "advice": report.advice(points)}, indent=2))
    else:
        text.show(*report.summary(points))


@click.command()
@_RUN
@click.option("--budget", type=size, help="Limit of the activation peak, such as 12GiB.")
@click.option("--device-bytes", type=size, help="Limit of the device memory in use (instead of --budget).")
@click.option("--layers", type=click.IntRange(1, 10_000), help="Plan for a model with this number of layers.")
@click.option("--drives", type=click.FloatRange(0.1), default=1, help="Multiply drive rates by this number.")
@rates
@RATED
@output("Policy file to write, with the placements of the plan.")
@click.option("--picture", type=FILE, help="File for a picture of the plans (.svg or .png).")
@FORCE
@JSON
def plan(
    run: Path,
    layers: int | None,
    drives: float,
    output: Path | None,
    picture: Path | None,
    *,
    force: bool,
    as_json: bool,
    **goal: Any,
) -> None:
    """Print the plans that the planner would make for a recorded run, without running the model again.

    The output has a table with the best plan for each of several budgets, and one chosen plan. With --budget,
    the chosen plan is the best plan for the budget.
    Without --budget, the chosen plan has the lowest peak at which a step takes no longer than with 'keep' and
    does not wait for drives. If this peak is almost as high as with 'keep', the chosen plan keeps all layers.

    By default, plans use the drive rates in the run log. To use other rates, pass --write and --read, or
    --dir. If the run kept all layers, the run log has no drive rates, and --write or --dir is required. To
    plan for twice as many drives, pass --drives 2. With --rated, the output also has the life of the drives
    in years.
    """
    from tba_offload.planner.what_if import Situation
    from tba_offload.report import text
    from tba_offload.report.log import read_run_log
    from tba_offload.report.plans import plans_figure
    from tba_offload.report.ranks import paths_of_ranks
    from tba_offload.report.rok import picture_kind, write_picture

    if goal["budget"] is not None and goal["device_bytes"] is not None:
        raise click.UsageError("--budget and --device-bytes cannot be combined. Use one of the two")
    if picture is not None:
        picture_kind(picture)
    situation = Situation.of(run, bandwidth_of(goal)).changed(layers=layers, drives=drives)
    report, policy = situation.report(**goal)
    if output is not None:
        with writing(output, (run,), force=force):
            output.write_bytes(policy.to_yaml().encode())
    if picture is not None:
        log = read_run_log(paths_of_ranks(run)[0])
        with writing(picture, (run,)):
            write_picture(picture, lambda: plans_figure(report, log))
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=2))
    else:
        text.show(*report.parts(None if output is None else str(output)))


@click.command()
@_RUN
@output("File for a picture (.svg, .png) or a trace (.json). Can be repeated.", multiple=True, required=True)
@click.option("--step", type=click.IntRange(1), help="Step to draw.  [default: last step with a timeline]")
def timeline(run: Path, output: tuple[Path, ...], step: int | None) -> None:
    """Draw the timeline of one step: memory, traffic of each drive, layers and waits.

    The output is a picture, or a trace for ui.perfetto.dev and chrome://tracing. If the run measures memory,
    its run log has timelines of the steps 3, 4, 8, 16 and so on. The run log also has a timeline of each step
    that the program opens with session.step(trace=True) or lists in attach(trace_steps=...).
    """
    from tba_offload.report.log import read_run_log
    from tba_offload.report.ranks import paths_of_ranks
    from tba_offload.report.rok import picture_kind
    from tba_offload.report.timeline import TRACE, timeline_of

    for file in output:
        picture_kind(file, TRACE)
    logs = [read_run_log(path) for path in paths_of_ranks(run)]
    # Use the rank with the highest peak, as ``why`` does.
    log = max(logs, key=lambda log: max((step.activation_peak_bytes or 0 for step in log.steps), default=0))
    found = timeline_of(log, step)
    for file in output:
        with writing(file, (run,)):
            found.write(file)
    click.echo(f"step {found.step}: {', '.join(map(str, output))}")
    for drive in found.drives:
        click.echo(f"{drive.label}: {visible(drive.place)}")


@click.command()
@_RUNS
@output("HTML file to write. An existing file is replaced.", default="report.html", show_default=True)
def report(runs: tuple[Path, ...], output: Path) -> None:
    """Write an HTML page about runs: the cost of each run, all steps, what holds memory, and advice.

    The page is one file that needs no network. For several runs, the page begins with a ROK curve. The
    command needs matplotlib and Jinja2: pip install 'tba-offload[report]'.
    """
    from tba_offload.report.page import page
    from tba_offload.report.ranks import read_runs

    logs = read_runs(runs)
    content = page(logs)
    with writing(output, runs):
        output.write_bytes(content)
    click.echo(f"{output}: {len(content) / 1e6:.1f} MB, {len(logs)} run{'s' if len(logs) > 1 else ''}")
