"""``tba-offload timeline``: one step over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tba_offload.cli.shared import say, writing
from tba_offload.errors import ConfigError


class _Timeline(click.Path):
    """A file to write, whose suffix is checked before any work is done."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from tba_offload.report.timeline import kind_of_timeline

        path: Any = super().convert(value, param, ctx)
        try:
            kind_of_timeline(path)
        except ConfigError as error:
            self.fail(str(error), param, ctx)
        return path


@click.command()
@click.argument("run", metavar="RUN.jsonl", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    "outputs",
    metavar="FILE",
    multiple=True,
    required=True,
    type=_Timeline(),
    help="What to write: .svg for a picture, .json for a trace; may be given several times.",
)
@click.option("--step", type=click.IntRange(min=1), metavar="N", help="Which step.  [default: the last one]")
def timeline(run: Path, outputs: tuple[Path, ...], step: int | None) -> None:
    """Draw one step over time: memory, traffic, layers and waits.

    As a picture, or as a trace that ui.perfetto.dev and chrome://tracing open. A log tells the third step
    over time, and from the 16th on each whose number is a power of four, where memory is measured.
    """
    from tba_offload.report.run_log import read_run_log
    from tba_offload.report.timeline import timeline_of, write_timeline

    log = read_run_log(run)
    for complaint in log.complaints:
        say(complaint)
    found = timeline_of(log, step)
    for output in outputs:
        with writing(output):
            write_timeline(found, output)
    click.echo(f"step {found.step}: {', '.join(map(str, outputs))}")
