"""Commands that read run logs: ``why``, ``rok``, ``plan``, ``timeline`` and ``report``.

Each imports what it needs when it runs, so that reading a log never waits for torch.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from tba_offload.cli.shared import FILE, JSON, say, size, writing
from tba_offload.files import write_regular
from tba_offload.formatting import visible

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from click.decorators import FC

_RUN = click.argument("run", metavar="RUN.jsonl", type=FILE)
_RUNS = click.argument("runs", metavar="RUN.jsonl...", nargs=-1, required=True, type=FILE)


def _output(what: str, **more: Any) -> Callable[[FC], FC]:
    return click.option("-o", "--output", metavar="FILE", type=FILE, help=what, **more)


@click.command()
@_RUN
@JSON
def why(run: Path, *, as_json: bool) -> None:
    """Say why memory is where it is, and the one change that would help most.

    From a run log: the phase and the layer in which memory is at its peak, what holds it, what was planned
    and what was measured. Of several ranks the fullest counts.
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
@_output("Draw the curve: .svg or .png; may be given several times.", multiple=True)
@click.option("--csv", "csv_file", metavar="FILE|-", help="Write the points as CSV; - prints nothing else.")
@JSON
@click.option(
    "--memory",
    type=click.Choice(("activations", "device")),
    default="activations",
    show_default=True,
    help="What is compared: the activation peak, or the most live bytes of the device, with weights, "
    "gradients and optimizer states; on a CPU those of the process.",
)
@click.option(
    "--warmup",
    metavar="N",
    type=click.IntRange(min=0),
    help="Steps to skip at the start of each run.  [default: 3 of more than 6 steps, 1 of two to six]",
)
def rok(
    runs: tuple[Path, ...], output: tuple[Path, ...], csv_file: str | None, *, as_json: bool, **options: Any
) -> None:
    """Compare runs by peak of memory and throughput: recompute, offload, keep.

    Each run log gives one point. Prints the table, the Pareto set and what follows from them.
    """
    from tba_offload.report import rok as report
    from tba_offload.report import text

    if as_json and csv_file == "-":
        raise click.UsageError("--json and --csv - both want the standard output")
    for picture in output:
        report.picture_kind(picture)
    points = report.points(runs, left_out=say, **options)
    for picture in output:
        with writing(picture, runs):
            report.draw(points, picture)
    if csv_file is not None and csv_file != "-":
        with writing(csv_file, runs):
            write_regular(csv_file, report.csv_text(points).encode())
    if as_json:
        click.echo(json.dumps({"points": report.rows(points), "advice": report.advice(points)}, indent=2))
    elif csv_file == "-":
        click.echo(report.csv_text(points), nl=False)
    else:
        text.show(*report.summary(points))


@click.command()
@_RUN
@click.option("--budget", callback=size, metavar="SIZE", help="Plan for this activation peak, such as 12GiB.")
@click.option(
    "--device-bytes",
    callback=size,
    metavar="SIZE",
    help="Plan for what a device of this size has left beside what the run had on it, such as 70GiB.",
)
@click.option("--layers", type=click.IntRange(1, 10_000), help="What if there were this many layers.")
@click.option("--drives", type=float, default=1, help="What if there were this many times the drives.")
@click.option(
    "--rated",
    callback=size,
    metavar="SIZE",
    help="Say how long drives last whose makers allow this much to be written (TBW, the sum), such as 600TB.",
)
@_output("Write the plan as a policy file, in place of a planned one but of no other.")
@click.option("--force", is_flag=True, help="Replace whatever file --output names, unless it is RUN.jsonl.")
@click.option("--picture", type=FILE, metavar="FILE", help="Draw the frontier: .svg or .png.")
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
    """Say what the planner would do with a run, before running it.

    From the run log of one process: the best plans for a sweep of budgets, and the plan for one budget.
    Without --budget it is the plan with the lowest peak at which compute waits for nothing and a step takes
    no longer than if everything was kept; where that peak is hardly lower, everything is kept.
    """
    from tba_offload.planner.what_if import Situation
    from tba_offload.report import text
    from tba_offload.report.plans import draw_frontier
    from tba_offload.report.rok import picture_kind

    if goal["budget"] is not None and goal["device_bytes"] is not None:
        raise click.UsageError("--budget and --device-bytes both say what activations may take; give one")
    if picture is not None:
        picture_kind(picture)
    situation = Situation.of(run).changed(layers=layers, drives=drives)
    report, policy = situation.report(**goal)
    if picture is not None:
        with writing(picture, (run,)):
            draw_frontier(report, picture)
    if output is not None:
        with writing(output, (run,)):
            _write_policy(output, policy.to_yaml(), force=force)
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=2))
    else:
        text.show(*report.parts(None if output is None else str(output)))


_PLANNED = "# Written by tba-offload plan, which replaces this file as long as this line stands here.\n"


def _write_policy(path: Path, text: str, *, force: bool) -> None:
    """Write a planned policy, not over one that was not planned."""
    was_planned = path.is_file() and path.read_bytes().startswith(_PLANNED.encode())
    if path.exists() and not force and not was_planned:
        raise click.ClickException(
            f"{path}: was not written by this command, so it stays as it is; choose another name, or replace "
            "it with --force"
        )
    write_regular(path, (_PLANNED + text).encode())


@click.command()
@_RUN
@_output("Write a picture (.svg, .png) or a trace (.json); may be given several times.", multiple=True)
@click.option("--step", type=click.IntRange(min=1), metavar="N", help="Which step.  [default: the last one]")
@JSON
def timeline(run: Path, output: tuple[Path, ...], step: int | None, *, as_json: bool) -> None:
    """Draw one step over time: memory, the traffic of each drive, layers and waits.

    As a picture, or as a trace that ui.perfetto.dev and chrome://tracing open, which --json prints too. A log
    tells the third step over time, and each later one whose number is a power of two, where memory is
    measured; and each step that was asked for by session.step(trace=True).
    """
    from tba_offload.report.log import read_run_log
    from tba_offload.report.ranks import paths_of_ranks
    from tba_offload.report.rok import picture_kind
    from tba_offload.report.timeline import TRACE, timeline_of, trace_of

    if not output and not as_json:
        raise click.UsageError("nothing to write: name a picture or a trace with -o, or give --json")
    for file in output:
        picture_kind(file, TRACE)
    logs = [read_run_log(path) for path in paths_of_ranks(run)]
    # Of ranks the fullest, as why tells.
    log = max(logs, key=lambda log: max((step.activation_peak_bytes or 0 for step in log.steps), default=0))
    found = timeline_of(log, step)
    for file in output:
        with writing(file, (run,)):
            found.write(file)
    if as_json:
        click.echo(json.dumps(trace_of(found)))
        return
    click.echo(f"step {found.step}: {', '.join(map(str, output))}")
    for drive in found.drives:
        click.echo(f"{drive.label}: {visible(drive.place)}")


@click.command()
@_RUNS
@_output("The page to write, in place of what the file held.", default="report.html", show_default=True)
@JSON
def report(runs: tuple[Path, ...], output: Path, *, as_json: bool) -> None:
    """Write a page on runs: what they cost, what happened in each step, what holds memory, what would help.

    One file of HTML that needs no network. Several runs are compared, with their ROK curve on top. Needs
    matplotlib and Jinja2: pip install 'tba-offload[report]'.
    """
    from tba_offload.report.page import page
    from tba_offload.report.ranks import read_runs

    logs = read_runs(runs)
    content = page(logs)
    with writing(output, runs):
        write_regular(output, content)
    if as_json:
        click.echo(json.dumps({"page": str(output), "bytes": len(content), "runs": len(logs)}))
    else:
        click.echo(f"{output}: {len(content) / 1e6:.1f} MB, {len(logs)} run{'s' if len(logs) > 1 else ''}")
