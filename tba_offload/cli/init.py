"""``tba-offload init``: asks the machine, and writes a policy with comments."""

from __future__ import annotations

import json
import math
import os
import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tba_offload.cli.shared import writing
from tba_offload.formatting import readable_size, visible
from tba_offload.writing import write_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tba_offload.store.location import Location


@click.command()
@click.argument("directories", metavar="[DIR]...", nargs=-1, type=click.Path(readable=False, path_type=Path))
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
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON and nothing else.")
def init(directories: tuple[Path, ...], output: Path, *, force: bool, as_json: bool) -> None:
    """Ask the machine for drives and memory, and write a policy with comments.

    DIR are directories on the drives to use, one for each; without them the best are looked for among those
    that are mounted, and that you may write to. Nothing is measured: tba-offload bench-io does that.
    """
    if output.exists() and not force:
        raise click.ClickException(
            f"{output}: exists already, and stays as it is; choose another name with -o, or replace it with "
            "--force"
        )
    found = [(str(path), looked_at(str(path))) for path in directories] or _best_places()
    memory = memory_of_machine()
    text = _policy(found, memory)
    _check(text)
    with writing(output):
        write_regular(output, text.encode())
    if as_json:
        places = [{"directory": path, **place.as_json()} for path, place in found]
        click.echo(json.dumps({"policy": str(output), "memory": memory, "directories": places}, indent=2))
        return
    click.echo(f"{output}: written, with {len(found)} {'directory' if len(found) == 1 else 'directories'}")
    for path, place in found:
        click.echo(visible(f"  {path}: {place.file_system_name}, {readable_size(place.free_bytes)} free"))
        for doubt in place.findings():
            click.echo(visible(f"  - {doubt.what}: {doubt.remedy}"))
    click.echo(f"Next: tba-offload check {shlex.quote(str(output))} --layers N, and tba-offload doctor DIR")


def looked_at(path: str) -> Location:
    """Return a directory that the user names.

    Raises:
        ClickException: It does not answer, cannot be reached, or is not to be written to.
    """
    from functools import partial

    from tba_offload.errors import StoreError
    from tba_offload.store.hanging import ask
    from tba_offload.store.location import location_of
    from tba_offload.store.probe import TRANSFER_SECONDS

    try:
        found = ask(partial(location_of, path), path, TRANSFER_SECONDS)
    except StoreError as error:
        raise click.ClickException(f"{path}: {error.strerror}") from error
    if not os.access(path, os.W_OK):
        raise click.ClickException(f"{path}: cannot be written to; name a directory that you may write to")
    return found


_RANKS = {"NVMe": 0, "SSD": 1, "virtual": 2, "mapped": 2}
"""Kinds of drives, the best first; arrays count as the best of what they are made of."""

_WORST = 3


def _best_places() -> list[tuple[str, Location]]:
    """Directories on the best local drives that are mounted; else that of temporary files."""
    found: dict[str, tuple[int, str, Location]] = {}
    for path in mounted():
        try:
            place = looked_at(path)
        except (OSError, click.ClickException):
            continue
        rank = _rank(place)
        if rank is not None and place.drive is not None and place.drive.name not in found:
            found[place.drive.name] = (rank, path, place)
    best = min((rank for rank, _, _ in found.values()), default=None)
    if best is None:
        path = tempfile.gettempdir()
        return [(path, looked_at(path))]
    return [(path, place) for rank, path, place in found.values() if rank == best]


def _rank(place: Location) -> int | None:
    from tba_offload.store.file_systems import Place

    if place.drive is None or place.is_remote or place.file_system.place is not Place.DRIVE:
        return None
    return min((_RANKS.get(leaf.kind, _WORST) for leaf in place.drive.leaves), default=_WORST)


def mounted() -> Iterator[str]:
    """Where local drives are mounted and this user may write; the directory for temporary files first."""
    yield tempfile.gettempdir()
    try:
        lines = os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).splitlines()
    except OSError:
        return
    for line in lines:
        path, source = line.split(" ")[4], line.partition(" - ")[2].split(" ")[1]
        if (
            source.startswith("/dev/")
            and "\\" not in path
            and os.access(path, os.W_OK)
            and Path(path).is_dir()
        ):
            yield path


def memory_of_machine() -> dict[str, int | None]:
    """Bytes of the device's memory, and of the host's."""
    from tba_offload.device import streams

    where = streams.default_device().torch_device
    total = None
    if where.type != "cpu":
        import torch

        properties: Any = torch.get_device_module(where).get_device_properties(where)
        total = int(properties.total_memory)
    return {"device": total, "host": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}


_DEVICE_SHARE = 8
"""Part of the device's memory that may be in flight: a window that is too large frees nothing."""
_LEAST_WINDOW, _MOST_WINDOW = 256 << 20, 4 << 30
_FREE_SHARE = 0.5
"""Share of the free room of the drives that one process may take."""


def _policy(found: Sequence[tuple[str, Location]], memory: dict[str, int | None]) -> str:
    """Return the policy as text."""
    from tba_offload.config import format_size
    from tba_offload.config.schema import URL

    window = min(max((memory["device"] or 0) // _DEVICE_SHARE, _LEAST_WINDOW), _MOST_WINDOW)
    window -= window % (64 << 20)
    room = int(_FREE_SHARE * sum(place.free_bytes for _, place in found))
    device = "a CPU" if memory["device"] is None else f"a device with {readable_size(memory['device'])}"
    host = readable_size(memory["host"] or 0)
    lines = [
        f"# yaml-language-server: $schema={URL}",
        f"# Written by tba-offload init for {device} and {host} of host memory.",
        "# Judge it with `tba-offload check FILE --layers N`, its drives with `tba-offload doctor DIR`.",
        "",
        "# keep | offload | recompute | recompute-offload | recompute-except-attention | offload-remat |",
        "# auto: the planner decides.",
        "default: auto",
        "",
        "# Layers of their own, the first rule that matches decides:",
        "# layers:",
        '#   - match: "last 2"',
        "#     placement: keep",
        "",
        "budget:",
        "  # Most bytes being written, or read back and not yet used.",
        f"  in_flight_bytes: {format_size(window)}",
        "  # The activation peak to plan for. Without it: the least memory at which nothing waits.",
        f"  # activation_bytes: {_some_budget(memory)}",
        "  # Or most bytes of all on the device, weights included: what is left is for activations.",
        f"  # device_bytes: {_most_of_device(memory)}",
        "",
        "store:",
        "  # On a GPU `auto` measures whether GPUDirect Storage (gds) or host memory (file) is faster.",
        "  kind: auto",
        "  # One for each drive.",
        "  directories:",
    ]
    for path, place in found:
        free = readable_size(place.free_bytes)
        what = visible(f"{place.file_system_name}; {place.drive or 'no drive of this machine'}; {free} free")
        lines += [f"    # {what}", f"    - {_as_yaml(str(Path(path).absolute()))}"]
    lines += [
        "  # Of one process; several on this machine share the room. Half of what is free now.",
        f"  capacity: {format_size(_rounded(room))}",
        "  # Spares the drives: bytes that plans may write in a day. How long they last tells",
        "  # `tba-offload doctor DIR --run RUN.jsonl`.",
        "  # write_bytes_per_day: 5TB",
        "  # Compares what drives give back with what they were given.",
        "  checksum: true",
        "",
        "# What cannot be written, to a full drive or one that fails, stays in memory; or is an error.",
        "on_full: keep",
        "",
    ]
    return "\n".join(lines)


def _as_yaml(path: str) -> str:
    """Return a path in quotes.

    Bytes that are no text become escapes, which are read back as what they were.
    """
    import yaml

    quoted: str = yaml.safe_dump(path, default_style='"', allow_unicode=True, width=math.inf)
    return quoted.rstrip("\n")


def _rounded(room: int) -> int:
    """Whole GiB, or where there is not one, MiB."""
    unit = 1 << 30 if room >= 1 << 30 else 1 << 20
    return max(room - room % unit, unit)


def _some_budget(memory: dict[str, int | None]) -> str:
    from tba_offload.config import format_size

    return format_size(max((memory["device"] or 16 << 30) // 2 // (1 << 30), 1) << 30)


def _most_of_device(memory: dict[str, int | None]) -> str:
    """Return a device less a tenth: what is not PyTorch's, and gaps between its blocks, take some of it."""
    from tba_offload.config import format_size

    return format_size(max((memory["device"] or 16 << 30) * 9 // 10 >> 30, 1) << 30)


def _check(text: str) -> None:
    """Record that what is written can be read, whatever directories are called."""
    from tba_offload.config import OffloadConfig

    OffloadConfig.from_yaml(text)
