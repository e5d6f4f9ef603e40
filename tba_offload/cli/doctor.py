"""``tba-offload doctor``: the I/O path of each directory, its speed, and advice."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from tba_offload.cli.shared import DIRECTORIES, JSON

if TYPE_CHECKING:
    from pathlib import Path


@click.command()
@DIRECTORIES
@click.option("--bench", is_flag=True, help="Also measure rates for several block sizes and thread counts.")
@JSON
def doctor(directories: tuple[Path, ...], *, bench: bool, as_json: bool) -> None:
    """Print the I/O path of each directory, the reason for the path, the speed of the drive, and advice.

    DIR is a directory on a drive. The default is the directory for temporary files. The command measures the
    I/O path that the setting 'store.kind: auto' selects. For each directory, the test needs 64 MiB of free
    space and about a second. With --bench, the test needs about 15 seconds more and up to 512 MiB of space.
    The output of --bench helps to choose store.readers, store.writers and min_tensor_bytes. The command
    deletes all files that it writes. The exit status is 1 if a directory cannot be used.
    """
    from tba_offload.device import default_device
    from tba_offload.store.doctor import examine, lines
    from tba_offload.store.open import temporary_directory

    places = [*dict.fromkeys(map(str, directories))] or [temporary_directory()]
    findings = examine(places, default_device(), bench=bench)
    click.echo(json.dumps(findings, indent=2) if as_json else "\n".join(lines(findings)))
    if any("error" in found for found in findings["directories"].values()):
        raise click.exceptions.Exit(1)
