"""``tba-offload doctor``: which I/O path each directory gets and why, how fast, and what would help."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from tba_offload.cli.shared import DIRECTORIES, JSON

if TYPE_CHECKING:
    from pathlib import Path


@click.command()
@DIRECTORIES
@click.option("--bench", is_flag=True, help="Measure by size of blocks and number of threads too.")
@JSON
def doctor(directories: tuple[Path, ...], *, bench: bool, as_json: bool) -> None:
    """Say how bytes reach each directory, how fast, and what would help.

    The default is the system's directory for temporary files. The path that ``store.kind: auto`` takes is
    measured for about a second, with 64 MiB. --bench writes and reads for about 15 seconds more in each
    directory, with up to half a GiB: it shows what store.readers, store.writers and min_tensor_bytes should
    be. Nothing stays in the directories. Exit status 1 if one of them cannot be used.
    """
    from tba_offload.device import default_device
    from tba_offload.store.doctor import examine, lines
    from tba_offload.store.open import temporary_directory

    places = [*dict.fromkeys(map(str, directories))] or [temporary_directory()]
    findings = examine(places, default_device(), bench=bench)
    click.echo(json.dumps(findings, indent=2) if as_json else "\n".join(lines(findings)))
    if any("error" in found for found in findings["directories"].values()):
        raise click.exceptions.Exit(1)
