"""Shared by commands: types of options, and what is said where."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tba_offload.errors import ConfigError
from tba_offload.formatting import visible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
"""An option for programs."""

DIRECTORIES = click.argument(
    "directories", metavar="[DIR]...", nargs=-1, type=click.Path(readable=False, path_type=Path)
)
"""Directories on drives, one for each."""


class Output(click.Path):
    """A file to write, whose suffix is checked before any work is done.

    Args:
        check: Raises ``ConfigError`` for a path of another suffix.
    """

    def __init__(self, check: Callable[[Path], object]) -> None:
        super().__init__(dir_okay=False, path_type=Path)
        self._check = check

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path of a file that can be written."""
        path: Any = super().convert(value, param, ctx)
        try:
            self._check(path)
        except ConfigError as error:
            self.fail(str(error), param, ctx)
        return path


def _check_picture(path: Path) -> None:
    from tba_offload.report.rok import picture_kind

    picture_kind(path)


PICTURE = Output(_check_picture)
"""A picture to write."""


def size(_context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """Return a size with its unit, as an option."""
    from tba_offload.config import parse_size

    try:
        found = None if text is None else parse_size(text)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error
    if found == 0 and parameter.name not in {"window", "host"}:
        raise click.BadParameter("must be more than 0")
    return found


def say(line: str) -> None:
    """Tells what went beside the output, on stderr."""
    click.echo(visible(line), err=True)


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Around the writing of a file; where that fails, the command ends with a line that names it.

    Raises:
        ClickException: It cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise click.ClickException(
            f"{os.fspath(path)}: cannot be written: {error.strerror or error}"
        ) from error


def spare_logs(output: Path, runs: Iterable[Path]) -> None:
    """Refuses to write over the logs that are read, of which there may be no other copy.

    Raises:
        ClickException: The file to write is one of them.
    """
    if any(output.exists() and run.exists() and output.samefile(run) for run in runs):
        raise click.ClickException(f"{output}: is a run log, and stays as it is; choose another name")
