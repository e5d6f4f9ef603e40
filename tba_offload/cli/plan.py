"""``tba-offload plan``: what the planner would do with a run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import click

from tba_offload.cli.shared import JSON, PICTURE, size, spare_logs, writing
from tba_offload.writing import write_regular


def _finite(_context: click.Context, _parameter: click.Parameter, number: float) -> float:
    if not math.isfinite(number):
        raise click.BadParameter(f"{number} is no number of drives")
    return number


@click.command()
@click.argument("run", metavar="RUN.jsonl", type=click.Path(path_type=Path))
@click.option("--budget", callback=size, metavar="SIZE", help="Plan for this activation peak, such as 12GiB.")
@click.option(
    "--device-bytes",
    callback=size,
    metavar="SIZE",
    help="Plan for what a device of this size has left beside what the run had on it, such as 70GiB.",
)
@click.option("--layers", type=click.IntRange(min=1), help="What if there were this many layers.")
@click.option(
    "--drives",
    type=click.FloatRange(min=0, min_open=True),
    default=1,
    callback=_finite,
    help="What if there were this many times the drives.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the plan as a policy file, in place of a planned one but of no other.",
)
@click.option("--force", is_flag=True, help="Replace whatever file --output names, unless it is RUN.jsonl.")
@click.option("--picture", type=PICTURE, metavar="FILE", help="Draw the frontier: .svg or .png.")
@JSON
def plan(
    run: Path,
    budget: int | None,
    device_bytes: int | None,
    layers: int | None,
    drives: float,
    output: Path | None,
    picture: Path | None,
    *,
    force: bool,
    as_json: bool,
) -> None:
    """Say what the planner would do with a run, before running it.

    From the run log of one process: the best plans for a sweep of budgets, and the plan for one budget.
    Without --budget it is the plan with the lowest peak at which compute waits for nothing and a step takes
    no longer than if everything was kept; where that peak is hardly lower, everything is kept.
    """
    from tba_offload.plan.what_if import Situation
    from tba_offload.report import text
    from tba_offload.report.plans import draw_frontier

    if output is not None:
        spare_logs(output, (run,))
    if budget is not None and device_bytes is not None:
        raise click.UsageError("--budget and --device-bytes both say what activations may take; give one")
    situation = Situation.of(run).changed(layers=layers, drives=drives)
    device = states = None
    if device_bytes is None:
        situation = situation.of_activations()
    else:
        device, states = situation.on_device(device_bytes)
        budget = device.budget
    best = situation.plan(budget)
    report = situation.report(best, budget, device, states)
    if picture is not None:
        with writing(picture):
            draw_frontier(report, picture)
    if output is not None:
        _write_policy(output, situation.policy_for(best, budget, device_bytes).to_yaml(), force=force)
    if as_json:
        click.echo(json.dumps(situation.as_json(best, report, states), indent=2))
    else:
        text.show(*report.parts(None if output is None else str(output)))


_PLANNED = "# Written by tba-offload plan, which replaces this file as long as this line stands here.\n"


def _write_policy(path: Path, text: str, *, force: bool) -> None:
    """Write a planned policy, not over one that was not planned."""
    with writing(path):
        was_planned = path.is_file() and path.read_bytes().startswith(_PLANNED.encode())
        if path.exists() and not force and not was_planned:
            raise click.ClickException(
                f"{path}: was not written by this command, so it stays as it is; choose another name, or "
                "replace it with --force"
            )
        write_regular(path, (_PLANNED + text).encode())
