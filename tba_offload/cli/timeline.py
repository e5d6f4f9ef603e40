"""``tba-offload timeline``: one step over time."""

from __future__ import annotations

from pathlib import Path

import click

from tba_offload.cli.shared import Output, spare_logs, writing
from tba_offload.formatting import visible


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
def timeline(run: Path, outputs: tuple[Path, ...], step: int | None) -> None:
    """Draw one step over time: memory, the traffic of each drive, layers and waits.

    As a picture, or as a trace that ui.perfetto.dev and chrome://tracing open. A log tells the third step
    over time, and from the 16th on each whose number is a power of four, where memory is measured; and each
    step that was asked for by session.step(trace=True).
    """
    from tba_offload.report.digest import Digest
    from tba_offload.report.log import read_run_log
    from tba_offload.report.ranks import paths_of_ranks
    from tba_offload.report.timeline import timeline_of, write_timeline

    for output in outputs:
        spare_logs(output, (run,))
    logs = map(read_run_log, paths_of_ranks(run))
    log = max(logs, key=lambda each: Digest.of(each).peak_bytes or 0)  # of ranks the fullest, as why tells
    found = timeline_of(log, step)
    for output in outputs:
        with writing(output):
            write_timeline(found, output)
    click.echo(f"step {found.step}: {', '.join(map(str, outputs))}")
    for drive in range(len(found.drives)):
        click.echo(f"{found.label_of(drive)}: {visible(found.place_of(drive))}")
