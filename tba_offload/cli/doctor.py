"""``tba-offload doctor``: the ways that bytes take to drives."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("directories", metavar="[DIR]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def doctor(directories: tuple[Path, ...], *, as_json: bool) -> None:
    """Say which way bytes take to each directory, how fast, and what would help.

    By default the directory is the system's for temporary files. Some dozens of MiB are written to and read
    from each, on a GPU up to two GiB, by every way that there is: through host memory, and on a GPU by
    GPUDirect Storage, through the nvidia-fs driver or by PCIe peer-to-peer, where kvikio and cuFile offer it.
    """
    import tempfile

    from tba_offload.device import streams
    from tba_offload.store.doctor import examine, lines

    findings = examine(directories or (Path(tempfile.gettempdir()),), streams.default_device())
    click.echo(json.dumps(findings, indent=2) if as_json else "\n".join(lines(findings)))
    if any(each["auto"] is None for each in findings["directories"]):
        raise click.exceptions.Exit(1)
