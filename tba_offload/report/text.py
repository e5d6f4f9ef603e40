"""Tables and sentences: fitted to a terminal by rich, and as Markdown in files and pipes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tba_offload.formatting import visible

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table as RichTable


@dataclass(frozen=True, slots=True)
class Table:
    """A table, the most important columns first.

    On a terminal, numbers are never cut: columns without room are left out from the right, and named.

    Attributes:
        headings: The heading of each column.
        rows: The cells of each row.
        right: Headings of the columns of numbers, which are aligned to the right.
        title: A line above the table.
        caption: A line below the table.
        elsewhere: Where the columns are that have no room.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Collection[str] = ()
    title: str | None = None
    caption: str | None = None
    elsewhere: str = "--json"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield what rich prints."""
        from rich.text import Text

        shown, wide = len(self.headings), options.update(max_width=10_000)
        while shown > 1 and console.measure(self._fitted(shown), options=wide).minimum > options.max_width:
            shown -= 1
        if self.title is not None:
            yield Text(visible(self.title), style="bold")
        yield self._fitted(shown)
        if shown < len(self.headings):
            yield Text(f"No room here for {', '.join(self.headings[shown:])}: see {self.elsewhere}.")
        if self.caption is not None:
            yield Text(visible(self.caption))

    def _fitted(self, columns: int) -> RichTable:
        from rich import box
        from rich.cells import cell_len
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
        for heading, *cells in list(zip(self.headings, *self.rows, strict=True))[:columns]:
            if heading in self.right:
                least = max(map(cell_len, (heading, *cells)))
                table.add_column(heading, justify="right", no_wrap=True, min_width=least)
            else:
                table.add_column(heading, overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(visible(cell)) for cell in row[:columns]))  # Text: labels are not markup
        return table

    def __str__(self) -> str:
        """Return the table as Markdown, with every column."""
        grid = [[_one_line(cell) for cell in row] for row in (self.headings, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
        is_number = [heading in self.right for heading in self.headings]
        rules = [
            "-" * (width - 1) + ":" if right else "-" * width
            for width, right in zip(widths, is_number, strict=True)
        ]
        lines = [
            [
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(row, widths, is_number, strict=True)
            ]
            for row in (grid[0], rules, *grid[1:])
        ]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join(filter(None, (visible(self.title or ""), body, visible(self.caption or ""))))


def _one_line(cell: str) -> str:
    return " ".join(visible(cell).split()).replace("|", "\\|")


def as_text(*parts: Table | str) -> str:
    """Return tables and sentences as Markdown, with empty lines around tables."""
    said = ""
    for place, part in enumerate(parts):
        is_apart = place and not (isinstance(part, str) and isinstance(parts[place - 1], str))
        said += ("\n" if is_apart else "") + (visible(part) if isinstance(part, str) else str(part)) + "\n"
    return said


def show(*parts: Table | str) -> None:
    """Print tables and sentences: fitted to a terminal, or as Markdown."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        sys.stdout.write(as_text(*parts))
        return
    for place, part in enumerate(parts):
        if place and not (isinstance(part, str) and isinstance(parts[place - 1], str)):
            console.print()
        console.print(Text(visible(part)) if isinstance(part, str) else part)
