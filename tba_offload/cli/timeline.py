"""``tba-offload timeline``: one step over time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tba_offload.cli.shared import Output, say, spare_logs, writing
from tba_offload.formatting import visible

if TYPE_CHECKING:
    from tba_offload.report.timeline_event import TimelineEvent


def _check_suffix(path: Path) -> None:
    from tba_offload.report.timeline import kind_of_timeline

    kind_of_timeline(path)


@click.command()
@click.argument("run", metavar="RUN.jsonl", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    "outputs",
    metavar="FILE",
    multiple=True,
    required=True,
    type=Output(_check_suffix),
    help="What to write: .svg for a picture, .json for a trace; may be given several times.",
)
@click.option("--step", type=click.IntRange(min=1), metavar="N", help="Which step.  [default: the last one]")
@click.option(
    "--profile",
    metavar="TRACE.json",
    type=click.Path(path_type=Path),
    help="A profile of torch.profiler (export_chrome_trace): what is written holds it and the steps that lie "
    "in it, on one axis.",
)
def timeline(run: Path, outputs: tuple[Path, ...], step: int | None, profile: Path | None) -> None:
    """Draw one step over time: memory, the traffic of each drive, layers and waits.

    As a picture, or as a trace that ui.perfetto.dev and chrome://tracing open. A log tells the third step
    over time, and from the 16th on each whose number is a power of four, where memory is measured; and each
    step that was asked for by session.step(trace=True).
    """
    from tba_offload.report.digest import Digest
    from tba_offload.report.log_reader import read_run_log
    from tba_offload.report.ranks import paths_of_ranks
    from tba_offload.report.timeline import check_holds_profile, timeline_of, timelines, write_timeline

    for output in outputs:
        spare_logs(output, (run,))
        if profile is not None:
            check_holds_profile(output)
    logs = map(read_run_log, paths_of_ranks(run))
    log = max(logs, key=lambda each: Digest.of(each).peak_bytes or 0)  # of ranks the fullest, as why tells
    for complaint in log.complaints:
        say(complaint)
    found = [timeline_of(log, step)]
    if profile is not None:
        found = _merge(found if step is not None else timelines(log), outputs, profile)
    else:
        for output in outputs:
            with writing(output):
                write_timeline(found[0], output)
    for each in found:
        click.echo(f"step {each.step}: {', '.join(map(str, outputs))}")
    places = {
        each.label_of(drive): each.place_of(drive) for each in found for drive in range(len(each.drives))
    }
    for label, place in places.items():
        click.echo(f"{label}: {visible(place)}")


def _merge(steps: list[TimelineEvent], outputs: tuple[Path, ...], profile: Path) -> list[TimelineEvent]:
    from tba_offload.report.timeline import write_merged

    found = steps
    for output in outputs:
        with writing(output):
            found = write_merged(steps, output, profile)
    return found
