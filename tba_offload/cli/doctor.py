"""``tba-offload doctor``: which I/O path each directory gets and why, how fast, what is missing, the fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import yaml

from tba_offload.cli.shared import DIRECTORIES, JSON
from tba_offload.formatting import readable_rate, readable_size, visible


@click.command()
@DIRECTORIES
@click.option(
    "--bench",
    is_flag=True,
    help="Measure by size of blocks and number of threads too, and print the settings that follow.",
)
@JSON
def doctor(directories: tuple[Path, ...], *, bench: bool, as_json: bool) -> None:
    """Say how bytes reach each directory, how fast, and what would help.

    The default is the system's directory for temporary files. The path that ``store.kind: auto`` takes is
    measured for about a second, with 64 MiB. --bench writes and reads for about 15 seconds more in each
    directory, with up to half a GiB, and ends with a policy. Nothing stays in the directories. Exit status 1
    if one of them cannot be used.
    """
    from tba_offload import device as devices
    from tba_offload.store.doctor import examine, lines
    from tba_offload.store.open import temporary_directory

    places = [*dict.fromkeys(map(str, directories))] or [temporary_directory()]
    device = devices.default_device()
    findings = examine(places, device)
    if not as_json:
        click.echo("\n".join(lines(findings)))
    is_usable = not any("error" in found for found in findings["directories"].values())
    policy = ""
    if bench and is_usable:
        findings["bench"] = {place: _bench(place, device, as_json=as_json) for place in places}
        policy = _policy(findings["bench"])
        findings["policy"] = yaml.safe_load(policy)
    click.echo(json.dumps(findings, indent=2) if as_json else policy, nl=as_json)
    if not is_usable:
        raise click.exceptions.Exit(1)


def _bench(directory: str, device: Any, *, as_json: bool) -> list[dict[str, Any]]:
    """Measure one directory, and print each row as it comes."""
    from tba_offload.store.doctor import bench

    if not as_json:
        click.echo(visible(directory))
        click.echo(f"  {'block':>8} {'threads':>8}{'write':>11}{'read':>11}{'both':>11}")
    rows = []
    for row in bench(directory, device):
        rows.append(row)
        if not as_json:
            rates = "".join(f"{readable_rate(row[name]):>11}" for name in ("write", "read", "both"))
            click.echo(f"  {readable_size(row['block_bytes']):>8} {row['threads']:>8}{rates}")
    return rows


def _policy(measured: dict[str, list[dict[str, Any]]]) -> str:
    """Return the settings that follow as a policy: for several drives, the largest of each."""
    from tba_offload.config import format_size
    from tba_offload.store.doctor import advised

    advice = [advised(rows) for rows in measured.values()]
    most = {name: max(each[name] for each in advice) for name in advice[0]}
    least = format_size(most.pop("min_tensor_bytes"))
    store = {"directories": [str(Path(directory).absolute()) for directory in measured], **most}
    return yaml.safe_dump({"store": store, "min_tensor_bytes": least}, sort_keys=False, allow_unicode=True)
