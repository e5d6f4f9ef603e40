"""Options of several commands, and functions that write files."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tba_offload.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from click.decorators import FC

    from tba_offload.planner.model import Bandwidth

COUNT = click.IntRange(min=1)
"""Type of an option whose value is a number of 1 or more."""

FILE: Any = click.Path(dir_okay=False, path_type=Path)
"""Type of an option whose value is the path of a file."""

JSON = click.option("--json", "as_json", is_flag=True, help="Print only the result, as one JSON object.")
FORCE = click.option("--force", is_flag=True, help="Replace an existing file.")
DIRECTORIES = click.argument(
    "directories", metavar="[DIR]...", nargs=-1, type=click.Path(readable=False, path_type=Path)
)


def output(what: str, **more: Any) -> Callable[[FC], FC]:
    """Return the option ``-o`` of a command that writes files."""
    return click.option("-o", "--output", type=FILE, help=what, **more)


def size(text: str) -> int:
    """Return the number of bytes for an option value such as ``12GiB``."""
    from tba_offload.config import parse_size

    try:
        found = parse_size(text)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error
    if found == 0:
        raise click.BadParameter("the size must be more than 0")
    return found


def rate(text: str) -> int:
    """Return the bytes per second for an option value such as ``6GB/s``."""
    return size(text.removesuffix("/s"))


RATED = click.option("--rated", type=size, help="Rated writes (TBW) of all drives together, such as 600TB.")


def rates(command: FC) -> FC:
    """Add the options for drive rates to a command. :func:`bandwidth_of` reads these options."""
    write = click.option("--write", type=rate, help="Write rate of all drives together, such as 6GB/s.")
    read = click.option("--read", type=rate, help="Read rate of all drives together.  [default: write rate]")
    place = click.option("--dir", "place", metavar="DIR", help="Measure rates of the drive that holds DIR.")
    return write(read(place(command)))


def bandwidth_of(options: dict[str, Any]) -> Bandwidth | None:
    """Remove the options of :func:`rates` from ``options``, and return the drive rates.

    Return ``None`` if ``options`` has none of these options.
    """
    from tba_offload.planner.model import Bandwidth

    write, read, place = (options.pop(name) for name in ("write", "read", "place"))
    if write is not None:
        return Bandwidth(write, read or write)
    return None if place is None else Bandwidth(*_measured(directories=place))


def with_host_memory(drives: Bandwidth, capacity: int) -> Bandwidth:
    """Measure the rates of host memory on this machine, and add them to the rates of drives.

    Args:
        drives: The rates of drives.
        capacity: Maximum bytes in host memory.
    """
    from tba_offload.planner.model import Bandwidth

    host = Bandwidth(*_measured(kind="host", capacity=64 << 20), capacity)
    return replace(drives, host=host, host_first=True)


def _measured(**settings: Any) -> tuple[float, float]:
    from tba_offload.device import default_device
    from tba_offload.store.doctor import measure
    from tba_offload.store.open import open_store

    device = default_device()
    with open_store(**settings, device=device) as store:
        return measure(store, device)[:2]


@contextlib.contextmanager
def writing(path: Path, logs: Iterable[Path] = (), *, force: bool = True) -> Iterator[None]:
    """Raise a ``ClickException`` if the ``with`` block cannot write the file.

    Args:
        path: The file to write.
        logs: Run logs that the command reads. The output file must not be one of these run logs.
        force: Whether to replace an existing file.

    Raises:
        ClickException: The file cannot be written, exists without ``force``, or is one of the run logs.
    """
    if any(path.exists() and log.exists() and path.samefile(log) for log in logs):
        why = f"{path}: the file is a run log and was not replaced"
        raise click.ClickException(f"{why}. Name another output file")
    if path.exists() and not force:
        why = f"{path}: the file exists and was not replaced"
        raise click.ClickException(f"{why}. Name another output file, or replace the file with --force")
    try:
        yield
    except OSError as error:
        why = f"the file cannot be written: {error.strerror or error}"
        raise click.ClickException(f"{path}: {why}") from error
