"""``tba-offload report``: a page on runs, in one file."""

from __future__ import annotations

from pathlib import Path

import click

from tba_offload.cli.shared import size, spare_logs, writing
from tba_offload.writing import write_regular


@click.command()
@click.argument("runs", metavar="RUN.jsonl...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("report.html"),
    show_default=True,
    metavar="FILE",
    help="The page to write, in place of what the file held.",
)
@click.option(
    "--rated",
    callback=size,
    metavar="SIZE",
    help="Bytes that the drives together may be written in their life (TBW), such as 600TB.",
)
def report(runs: tuple[Path, ...], output: Path, rated: int | None) -> None:
    """Write a page on runs: what was set, what happened, what holds memory, and what would help.

    One file of HTML that needs no network: memory, traffic and time over steps, layers with their placements,
    prediction against measurement, faults, endurance of the drives. Several runs are compared. Needs
    matplotlib and Jinja2: pip install 'tba-offload[report]'.
    """
    from tba_offload.report.page import page
    from tba_offload.report.ranks import read_runs

    spare_logs(output, runs)
    logs = read_runs(runs)
    content = page(logs, rated=rated)
    with writing(output):
        write_regular(output, content)
    click.echo(f"{output}: {len(content) / 1e6:.1f} MB, {len(logs)} run{'s' if len(logs) > 1 else ''}")
