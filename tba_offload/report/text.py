"""Output of tables and sentences: in the width of a terminal, or as Markdown in files and pipes."""

from __future__ import annotations

import io
import random
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tba_offload.formatting import visible

_state = random.getstate()  # importing rich draws a random number, which would change a seeded program

from rich import box  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table as Grid  # noqa: E402
from rich.text import Text  # noqa: E402

random.setstate(_state)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from rich.console import ConsoleOptions, RenderableType

_WIDE = 100_000
"""Line width at which no line is wrapped."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table that is printed on a terminal, or written as Markdown.

    Attributes:
        headings: Heading of each column.
        rows: Cells of each row.
        right: Headings of columns that are aligned to the right.
        title: Line above the table.
        caption: Line below the table.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Collection[str] = ()
    title: str | None = None
    caption: str | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield the parts of the table that rich prints."""
        is_markdown = not console.is_terminal
        grid = Grid(box=box.MARKDOWN if is_markdown else box.SIMPLE_HEAD, show_edge=is_markdown)
        for heading in self.headings:
            grid.add_column(heading, justify="right" if heading in self.right else "left", overflow="fold")
        for row in self.rows:
            texts = [visible(cell).replace("|", r"\|" if is_markdown else "|") for cell in row]
            grid.add_row(*map(Text, texts))  # Text, since rich would read brackets in labels as markup
        if self.title is not None:
            yield Text(visible(self.title), style="bold")
        yield grid
        if self.caption is not None:
            yield Text(visible(self.caption))


def as_text(*parts: Table | str) -> str:
    """Return tables and sentences as Markdown, with blank lines around tables."""
    file = io.StringIO()
    _print(Console(file=file, width=_WIDE, force_terminal=False, color_system=None), parts)
    lines = "\n".join(line.rstrip() for line in file.getvalue().splitlines())
    return re.sub(r"\n{3,}", "\n\n", lines).strip("\n") + "\n"


def show(*parts: Table | str) -> None:
    """Print tables and sentences in the width of a terminal, or as Markdown in files and pipes."""
    console = Console()
    if console.is_terminal:
        _print(console, parts)
    else:
        sys.stdout.write(as_text(*parts))


def _print(console: Console, parts: Sequence[Table | str]) -> None:
    for place, part in enumerate(parts):
        if place and not (isinstance(part, str) and isinstance(parts[place - 1], str)):
            console.print()
        console.print(Text(visible(part)) if isinstance(part, str) else part)
