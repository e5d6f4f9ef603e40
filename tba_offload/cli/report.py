"""``tba-offload report``: a page on runs, in one file."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tba_offload.cli.shared import JSON, spare_logs, writing
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
@JSON
def report(runs: tuple[Path, ...], output: Path, *, as_json: bool) -> None:
    """Write a page on runs: what they cost, what happened in each step, what holds memory, what would help.

    One file of HTML that needs no network. Several runs are compared, with their ROK curve on top. Needs
    matplotlib and Jinja2: pip install 'tba-offload[report]'.
    """
    from tba_offload.report.page import page
    from tba_offload.report.ranks import read_runs

    spare_logs(output, runs)
    logs = read_runs(runs)
    content = page(logs)
    with writing(output):
        write_regular(output, content)
    if as_json:
        click.echo(json.dumps({"page": str(output), "bytes": len(content), "runs": list(map(str, runs))}))
    else:
        click.echo(f"{output}: {len(content) / 1e6:.1f} MB, {len(logs)} run{'s' if len(logs) > 1 else ''}")
