"""Options of several commands, and how commands write files."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tba_offload.errors import ConfigError
from tba_offload.formatting import visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


FILE: Any = click.Path(dir_okay=False, path_type=Path)
"""A file, as a path."""

JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
"""An option for programs."""

DIRECTORIES = click.argument(
    "directories", metavar="[DIR]...", nargs=-1, type=click.Path(readable=False, path_type=Path)
)
"""Directories on drives, one for each."""


def size(_context: click.Context, _parameter: click.Parameter, text: str | None) -> int | None:
    """Return a size with its unit, as an option."""
    from tba_offload.config import parse_size

    try:
        found = None if text is None else parse_size(text)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error
    if found == 0:
        raise click.BadParameter("must be more than 0")
    return found


def say(line: str) -> None:
    """Print a line beside the output, on stderr."""
    click.echo(visible(line), err=True)


@contextlib.contextmanager
def writing(path: str | os.PathLike[str], logs: Iterable[Path] = ()) -> Iterator[None]:
    """Write a file within the block; a failure ends the command with a line that names the file.

    Args:
        path: The file.
        logs: Run logs, which are never written over: there may be no other copy.

    Raises:
        ClickException: The file cannot be written, or is one of the logs.
    """
    output = Path(path)
    if any(output.exists() and log.exists() and output.samefile(log) for log in logs):
        raise click.ClickException(f"{path}: is a run log, and stays as it is; choose another name")
    try:
        yield
    except OSError as error:
        raise click.ClickException(
            f"{os.fspath(path)}: cannot be written: {error.strerror or error}"
        ) from error
