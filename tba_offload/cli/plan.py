"""``tba-offload plan``: what the planner would do with a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

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
@click.option(
    "--objective",
    type=click.Choice(["time", "memory"]),
    help="What the plan is for: least step time, least memory without waiting.  "
    "[default: time with --budget or --device-bytes, memory without]",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the plan as a policy file, in place of a planned one but of no other.",
)
@click.option("--force", is_flag=True, help="Replace whatever file --output names, unless it is RUN.jsonl.")
@click.option(
    "--picture",
    type=PICTURE,
    metavar="FILE",
    help="Draw the frontier: .svg or .png.",
)
@click.option(
    "--write", callback=size, metavar="SIZE", help="What if a second wrote this much, such as 3GiB."
)
@click.option("--read", callback=size, metavar="SIZE", help="What if a second read this much.")
@click.option(
    "--drives",
    type=click.FloatRange(min=0, min_open=True),
    default=1,
    callback=_finite,
    help="What if there were this many times the drives.",
)
@click.option("--window", callback=size, metavar="SIZE", help="What if this much were in flight.")
@click.option(
    "--host",
    callback=size,
    metavar="SIZE",
    help="What if host memory of this size took what the drives have no time for; 0 for none.",
)
@click.option("--layers", type=click.IntRange(min=1), help="What if there were this many layers.")
@click.option("--micro-batches", type=click.IntRange(min=1), help="What if there were this many.")
@JSON
def plan(
    run: Path,
    budget: int | None,
    device_bytes: int | None,
    objective: str | None,
    output: Path | None,
    picture: Path | None,
    *,
    force: bool,
    as_json: bool,
    **changes: Any,
) -> None:
    """Say what the planner would do with a run, before running it.

    From the run log of one process: the best plans for a sweep of budgets, and the plan for one budget.
    Without --budget it is the plan with the lowest peak at which compute waits for nothing and a step takes
    no longer than if everything was kept; where that peak is hardly lower, everything is kept.
    """
    from tba_offload.config.policy import Objective
    from tba_offload.report import plans
    from tba_offload.what_if import Situation, of_activations

    if output is not None:
        spare_logs(output, (run,))
    wanted = None if objective is None else Objective(objective)
    if budget is not None and device_bytes is not None:
        raise click.UsageError("--budget and --device-bytes both say what activations may take; give one")
    if budget is None and device_bytes is None and wanted is Objective.TIME:
        raise click.UsageError(
            f"--objective {wanted} needs --budget or --device-bytes: without one nothing would leave memory"
        )
    situation = Situation.of(run).changed(**changes)
    if device_bytes is None:
        situation = of_activations(situation)
    states = None if device_bytes is None else situation.states_on(device_bytes, wanted)
    travelling = 0 if states is None else states.travelling
    device = None if device_bytes is None else situation.left_on(device_bytes, travelling)
    budget = budget if device is None else device.budget
    choices, best = situation.frontier(wanted), situation.plan(budget, wanted)
    report = situation.report(budget, best, choices, device, states)
    if picture is not None:
        with writing(picture):
            plans.draw_frontier(report, picture)
    if output is not None:
        _write_policy(output, situation.policy_for(best, budget, device_bytes).to_yaml(), force=force)
    if as_json:
        click.echo(json.dumps(situation.as_json(best, report, states), indent=2))
    else:
        plans.show(report, None if output is None else str(output))


_PLANNED = "# Written by tba-offload plan, which replaces this file as long as this line stands here.\n"


def _write_policy(path: Path, text: str, *, force: bool) -> None:
    """Write a planned policy, not over one that was not planned."""
    with writing(path):
        if path.exists() and not force and not _was_planned(path):
            raise click.ClickException(
                f"{path}: was not written by this command, so it stays as it is; choose another name, or "
                "replace it with --force"
            )
        write_regular(path, (_PLANNED + text).encode())


def _was_planned(path: Path) -> bool:
    from tba_offload.config import MOST_TEXT
    from tba_offload.reading import UnreadableError, read_regular

    try:
        return read_regular(path, MOST_TEXT).startswith(_PLANNED.encode())
    except UnreadableError:
        return False
