"""``tba-offload init``: write a policy with comments for this machine."""

from __future__ import annotations

import json
import math
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click
import yaml

from tba_offload.cli.shared import DIRECTORIES, JSON, writing
from tba_offload.files import write_regular
from tba_offload.formatting import readable_size, visible

if TYPE_CHECKING:
    from tba_offload.store.doctor import Location

_POLICY = Path(__file__).with_name("policy.yaml")
"""The policy with its comments, and names in braces for what goes by the machine."""

_LEAST_WINDOW, _MOST_WINDOW = 256 << 20, 4 << 30
"""Bytes in flight: an eighth of the device's memory, within these. A large window frees little."""


@click.command()
@DIRECTORIES
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("policy.yaml"),
    show_default=True,
    metavar="FILE",
    help="The policy to write.",
)
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@JSON
def init(directories: tuple[Path, ...], output: Path, *, force: bool, as_json: bool) -> None:
    """Write a policy with comments for this machine.

    DIR are directories on the drives to use, one for each. Without them, the policy names each mounted NVMe
    drive that you may write to, else the directory for temporary files. Nothing is measured: tba-offload
    doctor does that.
    """
    if output.exists() and not force:
        raise click.ClickException(
            f"{output}: exists already, and stays as it is; choose another name with -o, or use --force"
        )
    found = {path: _look_at(path) for path in map(str, directories or _drives())}
    memory = _device_bytes()
    with writing(output):
        write_regular(output, _policy(found, memory).encode())
    if as_json:
        places = [{"directory": path, **place._asdict()} for path, place in found.items()]
        click.echo(json.dumps({"policy": str(output), "device": memory, "directories": places}, indent=2))
        return
    click.echo(f"{output}: written, with {len(found)} {'directory' if len(found) == 1 else 'directories'}")
    for path, place in found.items():
        click.echo(visible(f"  {path}: {place.words}"))
        for doubt in place.findings:
            click.echo(visible(f"  - {doubt}"))
    click.echo(f"Next: tba-offload check {shlex.quote(str(output))} --layers N, and tba-offload doctor DIR")


def _drives() -> list[str]:
    """Return a directory on each NVMe drive that is mounted, by its mount point."""
    from tba_offload.store.open import temporary_directory

    temporary = temporary_directory()
    first = {Path(temporary).stat().st_dev: temporary}  # of its drive, a better name than the mount point
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
        raise click.ClickException(f"{path}: cannot be written to; name a directory that you may write to")
    return found


def _device_bytes() -> int | None:
    """Return the memory of the device; None on a CPU."""
    import torch

    from tba_offload import device as streams

    where = streams.default_device().torch_device
    if where.type == "cpu":
        return None
    return int(torch.get_device_module(where).get_device_properties(where).total_memory)


def _policy(found: dict[str, Location], memory: int | None) -> str:
    from tba_offload.config import SCHEMA_URL, OffloadConfig, format_size

    device = memory or 16 << 30
    window = min(max((memory or 0) // 8, _LEAST_WINDOW), _MOST_WINDOW)
    room = max(sum({place.device: place.free_bytes for place in found.values()}.values()) // 2, 1 << 20)
    unit = 1 << 30 if room >= 1 << 30 else 1 << 20
    lines = []
    for path, place in found.items():  # bytes that are no text become escapes, read back as the same bytes
        absolute = str(Path(path).absolute())
        quoted = yaml.safe_dump(absolute, default_style='"', allow_unicode=True, width=math.inf).rstrip()
        lines += [f"    # {visible(place.words)}", f"    - {quoted}"]
    text = _POLICY.read_text(encoding="utf-8").format(
        url=SCHEMA_URL,
        device="a CPU" if memory is None else f"a device with {readable_size(memory)}",
        window=format_size(window - window % (64 << 20)),
        activations=format_size(max(device // 2 >> 30, 1) << 30),
        all_bytes=format_size(max(device * 9 // 10 >> 30, 1) << 30),
        directories="\n".join(lines),
        capacity=format_size(room - room % unit),
    )
    OffloadConfig.from_yaml(text)
    return text
