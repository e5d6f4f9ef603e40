"""``tba-offload timeline``: one step over time."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tba_offload.cli.shared import JSON, Output, spare_logs, writing
from tba_offload.formatting import visible


def _check_suffix(path: Path) -> None:
    from tba_offload.report.timeline import timeline_kind

    timeline_kind(path)


@click.command()
@click.argument("run", metavar="RUN.jsonl", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    "outputs",
    metavar="FILE",
    multiple=True,
    type=Output(_check_suffix),
    help="Write a picture (.svg, .png) or a trace (.json); may be given several times.",
)
@click.option("--step", type=click.IntRange(min=1), metavar="N", help="Which step.  [default: the last one]")
@JSON
def timeline(run: Path, outputs: tuple[Path, ...], step: int | None, *, as_json: bool) -> None:
    """Draw one step over time: memory, the traffic of each drive, layers and waits.

    As a picture, or as a trace that ui.perfetto.dev and chrome://tracing open, which --json prints too. A log
    tells the third step over time, and from the 16th on each whose number is a power of four, where memory is
    measured; and each step that was asked for by session.step(trace=True).
    """
    from tba_offload.report.log import read_run_log
    from tba_offload.report.ranks import paths_of_ranks
    from tba_offload.report.timeline import timeline_of, trace_of, write_timeline

    if not outputs and not as_json:
        raise click.UsageError("nothing to write: name a picture or a trace with -o, or give --json")
    for output in outputs:
        spare_logs(output, (run,))
    logs = [read_run_log(path) for path in paths_of_ranks(run)]
    # Of ranks the fullest, as why tells.
    log = max(logs, key=lambda log: max((step.activation_peak_bytes or 0 for step in log.steps), default=0))
    found = timeline_of(log, step)
    for output in outputs:
        with writing(output):
            write_timeline(found, output)
    if as_json:
        click.echo(json.dumps(trace_of(found)))
        return
    click.echo(f"step {found.step}: {', '.join(map(str, outputs))}")
    for drive in range(len(found.drives)):
        click.echo(f"{found.label_of(drive)}: {visible(found.place_of(drive))}")
