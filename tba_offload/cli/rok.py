"""``tba-offload rok``: runs compared by memory and speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tba_offload.cli.shared import JSON, PICTURE, say, spare_logs, writing
from tba_offload.writing import write_regular

if TYPE_CHECKING:
    from tba_offload.report.rok import Memory


@click.command()
@click.argument("runs", metavar="RUN.jsonl...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    "pictures",
    metavar="FILE",
    multiple=True,
    type=PICTURE,
    help="Draw the curve: .svg or .png; may be given several times.",
)
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
    runs: tuple[Path, ...],
    pictures: tuple[Path, ...],
    csv_file: str | None,
    *,
    as_json: bool,
    memory: Memory,
    warmup: int | None,
) -> None:
    """Compare runs by peak of memory and throughput: recompute, offload, keep.

    Each run log gives one point. Prints the table, the Pareto set and what follows from them.
    """
    if as_json and csv_file == "-":
        raise click.UsageError("--json and --csv - both want the standard output")
    if csv_file is not None:
        spare_logs(Path(csv_file), runs)
    from tba_offload.report import rok as report
    from tba_offload.report import text

    points = report.points(runs, memory=memory, warmup=warmup, left_out=say)
    for picture in pictures:
        with writing(picture):
            report.draw(points, picture)
    if csv_file is not None and csv_file != "-":
        with writing(csv_file):
            write_regular(csv_file, report.csv_text(points).encode())
    if as_json:
        click.echo(json.dumps({"points": report.rows(points), "advice": report.advice(points)}, indent=2))
    elif csv_file == "-":
        click.echo(report.csv_text(points), nl=False)
    else:
        text.show(*report.summary(points))
