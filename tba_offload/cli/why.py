"""``tba-offload why``: where memory is at its peak, what holds it, and what would help."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tba_offload.cli.shared import JSON


@click.command()
@click.argument("run", metavar="RUN.jsonl", type=click.Path(path_type=Path))
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
