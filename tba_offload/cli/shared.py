"""Options of several commands, and functions that write files."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tba_offload.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from click.decorators import FC

    from tba_offload.planner.model import Bandwidth

FILE: Any = click.Path(dir_okay=False, path_type=Path)
"""Type of an option whose value is the path of a file."""

JSON = click.option("--json", "as_json", is_flag=True, help="Print only the result, as one JSON object.")
"""Option ``--json``, for output that programs read."""

FORCE = click.option("--force", is_flag=True, help="Replace an existing file. Run logs are never replaced.")
"""Option ``--force``, which replaces an existing output file."""

DIRECTORIES = click.argument(
    "directories", metavar="[DIR]...", nargs=-1, type=click.Path(readable=False, path_type=Path)
)
"""Argument ``DIR``, which can be repeated: a directory on each drive."""


def size(_context: click.Context, _parameter: click.Parameter, text: str | None) -> int | None:
    """Return the number of bytes for an option value such as ``12GiB``."""
    from tba_offload.config import parse_size

    try:
        found = None if text is None else parse_size(text)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error
    if found == 0:
        raise click.BadParameter("the size must be more than 0")
    return found


def rate(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """Return the bytes per second for an option value such as ``6GB/s``."""
    return size(context, parameter, text and text.removesuffix("/s"))


RATED = click.option(
    "--rated",
    callback=size,
    metavar="SIZE",
    help="Rated writes (TBW) of all drives together, such as 600TB. The command uses them to compute the "
    "life of the drives.",
)
"""Option ``--rated``: the rated endurance of the drives."""


def rates(command: FC) -> FC:
    """Add the options for drive rates to a command. :func:`bandwidth_of` reads these options."""
    write = click.option(
        "--write", callback=rate, metavar="RATE", help="Write rate of all drives together, such as 6GB/s."
    )
    read = click.option("--read", callback=rate, metavar="RATE", help="Total read rate.  [default: --write]")
    place = click.option(
        "--dir",
        "place",
        metavar="DIR",
        help="Directory on a drive. The command measures the rates of this drive.",
    )
    return write(read(place(command)))


def bandwidth_of(options: dict[str, Any]) -> Bandwidth | None:
    """Remove the options of :func:`rates` from ``options``, and return the drive rates that they give.

    Return ``None`` if none of these options was given.
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
    """Return the measured write and read rates of a store."""
    from tba_offload.device import default_device
    from tba_offload.store.doctor import measure
    from tba_offload.store.open import open_store

    device = default_device()
    with open_store(**settings, device=device) as store:
        return measure(store, device)[:2]


def must_be_new(path: Path, *, force: bool) -> None:
    """Raise ClickException if a file exists and ``--force`` is not given."""
    if path.exists() and not force:
        raise click.ClickException(
            f"{path}: the file exists and was not replaced. Pass another file with -o, or pass --force to "
            "replace this one"
        )


@contextlib.contextmanager
def writing(path: str | os.PathLike[str], logs: Iterable[Path] = ()) -> Iterator[None]:
    """Turn an ``OSError`` in the block, which writes a file, into a ``ClickException``.

    Args:
        path: The file to write.
        logs: Run logs that the command reads. These files must not be replaced.

    Raises:
        ClickException: The file cannot be written, or is one of the run logs.
    """
    output = Path(path)
    if any(output.exists() and log.exists() and output.samefile(log) for log in logs):
        raise click.ClickException(
            f"{path}: the file is a run log and was not replaced. Pass another file with -o"
        )
    try:
        yield
    except OSError as error:
        raise click.ClickException(
            f"{os.fspath(path)}: the file cannot be written: {error.strerror or error}"
        ) from error
