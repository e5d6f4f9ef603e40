"""``tba-offload init``: write a commented policy for this machine."""

from __future__ import annotations

import math
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click
import yaml

from tba_offload.cli.shared import DIRECTORIES, FORCE, output, writing
from tba_offload.formatting import visible

if TYPE_CHECKING:
    from tba_offload.store.doctor import Location

_POLICY = Path(__file__).with_name("policy.yaml")
"""Template of the policy file, with names in braces for values of this machine."""


@click.command()
@DIRECTORIES
@output("Policy file to write.", default="policy.yaml", show_default=True)
@FORCE
def init(directories: tuple[Path, ...], output: Path, *, force: bool) -> None:
    """Write a commented policy file for the drives of this machine.

    With this policy, the planner chooses the fastest placements that fit the device.

    DIR is a directory on a drive. Pass one directory for each drive. By default, the policy names every
    mounted NVMe drive that you may write to. Without an NVMe drive, the policy names the directory for
    temporary files. To measure drives, use tba-offload doctor.
    """
    found = {path: _look_at(path) for path in map(str, directories or _drives())}
    with writing(output, force=force):
        output.write_bytes(_policy(found).encode())
    click.echo(f"{output}: the policy was written, with these directories:")
    for path, place in found.items():
        click.echo(visible(f"  {path}: {place.words}"))
        for doubt in place.findings:
            click.echo(visible(f"  - {doubt}"))
    click.echo(f"Now run tba-offload check {shlex.quote(str(output))} --layers N, and tba-offload doctor DIR")


def _drives() -> list[str]:
    """Return the mount points of NVMe drives; without NVMe drives, the temporary directory."""
    from tba_offload.store.open import temporary_directory

    temporary = temporary_directory()
    first = {Path(temporary).stat().st_dev: temporary}  # used if it is on the drive
    found = []
    for line in os.fsdecode(Path("/proc/self/mounts").read_bytes()).splitlines():
        source, path, *_ = line.split(" ")
        is_drive = source.startswith("/dev/nvme") and not path.startswith("/boot")
        if is_drive and os.access(path, os.W_OK) and Path(path).is_dir():
            found.append(first.setdefault(Path(path).stat().st_dev, path))
    return list(dict.fromkeys(found)) or [temporary]


def _look_at(path: str) -> Location:
    from tba_offload.errors import StoreError
    from tba_offload.store.doctor import location_of

    try:
        found = location_of(path)
    except StoreError as error:
        raise click.ClickException(f"{path}: {error.strerror}") from error
    if not os.access(path, os.W_OK):
        raise click.ClickException(f"{path}: you may not write to this directory. Pass another directory")
    return found


def _policy(found: dict[str, Location]) -> str:
    from tba_offload.config import SCHEMA_URL, OffloadConfig

    lines = []
    for path, place in found.items():  # bytes that are not text are escaped
        absolute = str(Path(path).absolute())
        quoted = yaml.safe_dump(absolute, default_style='"', allow_unicode=True, width=math.inf).rstrip()
        lines += [f"    # {visible(place.words)}", f"    - {quoted}"]
    text = _POLICY.read_text(encoding="utf-8").format(url=SCHEMA_URL, directories="\n".join(lines))
    OffloadConfig.from_yaml(text)
    return text
