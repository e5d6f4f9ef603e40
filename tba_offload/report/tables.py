"""Tables that fit where they are printed: whole columns are left out before a digit is."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tba_offload.formatting import visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.measure import Measurement

Side = Literal["left", "right"]
GivesWay = Literal["never", "shortened", "wrapped"]

GAP = 2
"""Columns of the terminal between two columns of a table."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        heading: What stands above it.
        cells: Its cells from above.
        side: Where they are aligned: text ``left``, numbers ``right``.
        rank: Importance: where there is no room, the column with the highest rank is left out first; one with
            rank 0 never is.
        gives_way: How cells make room: names are shortened, sentences take several lines, numbers do not.
        least: Characters that are left of one that is shortened; names can mostly still be told apart by 8.
        brief: Shorter cells for a terminal, such as names of files without their directories; empty for the
            same.
    """

    heading: str
    cells: tuple[str, ...]
    side: Side = "right"
    rank: int = 0
    gives_way: GivesWay = "never"
    least: int = 8
    brief: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("cells", "brief"):
            object.__setattr__(self, name, tuple(map(visible, getattr(self, name))))

    @property
    def on_terminal(self) -> tuple[str, ...]:
        """Its cells on a terminal."""
        return self.brief or self.cells

    @property
    def width(self) -> int:
        """What a terminal needs to show everything."""
        from rich.cells import cell_len

        return max(map(cell_len, (self.heading, *self.on_terminal)))

    @property
    def least_width(self) -> int:
        """What a terminal needs at least."""
        from rich.cells import cell_len

        if self.gives_way == "never":
            return self.width
        words = [word for cell in (self.heading, *self.on_terminal) for word in cell.split()]
        return min(self.width, max(map(cell_len, words)) if self.gives_way == "wrapped" else self.least)


@dataclass(frozen=True, slots=True)
class Fitted:
    """The columns of a table for which there is room.

    Attributes:
        columns: They, in their order.
        widths: The width of each.
        left_out: Headings of the others, in their order.
    """

    columns: tuple[Column, ...]
    widths: tuple[int, ...]
    left_out: tuple[str, ...]


def fitted(columns: Sequence[Column], width: int) -> Fitted:
    """Chooses the columns for which there is room: as many as possible, the most important ones.

    Args:
        columns: All of the table.
        width: Characters in a line.
    """
    shown = list(columns)
    while _total([column.least_width for column in shown]) > width:
        least = max(shown, key=lambda column: column.rank)
        if least.rank == 0:
            break
        shown.remove(least)
    left_out = tuple(column.heading for column in columns if column not in shown)
    return Fitted(tuple(shown), tuple(_widths(shown, width)), left_out)


def _widths(columns: Sequence[Column], width: int) -> list[int]:
    """Return the width of each column: text gives way, the widest first."""
    widths, least = [column.width for column in columns], [column.least_width for column in columns]
    if _total(least) > width:  # a label of one letter is better than a number that lacks a digit
        least = [1 if column.gives_way == "shortened" else column.least_width for column in columns]
    while _total(widths) > width:
        room = [have - needed for have, needed in zip(widths, least, strict=True)]
        if not any(room):
            break
        widths[max(range(len(columns)), key=lambda place: (room[place] > 0, widths[place]))] -= 1
    return widths


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


@dataclass(frozen=True, slots=True)
class FittedTable:
    """A table that rich prints as wide as the terminal is; it says which columns had no room.

    Attributes:
        columns: Its columns.
        title: What stands above it.
        caption: What stands below it.
        elsewhere: Where the columns are that have no room, such as ``"--csv"``.
    """

    columns: tuple[Column, ...]
    title: str | None = None
    caption: str | None = None
    elsewhere: str = "--json"

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """Its cells, row by row."""
        return tuple(zip(*(column.cells for column in self.columns), strict=True))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield what rich asks a renderable for."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        chosen = fitted(self.columns, options.max_width)
        table = Table(box=box.SIMPLE_HEAD, padding=(0, GAP - 1, 0, 0), show_edge=False, pad_edge=False)
        for column, width in zip(chosen.columns, chosen.widths, strict=True):
            no_wrap = column.gives_way != "wrapped"
            table.add_column(
                column.heading, justify=column.side, width=width, no_wrap=no_wrap, overflow="ellipsis"
            )
        for cells in zip(*(column.on_terminal for column in chosen.columns), strict=True):
            table.add_row(*map(Text, cells))  # Text: labels are not markup
        if self.title is not None:
            yield Text(visible(self.title), style="bold")
        yield table
        if chosen.left_out:
            yield Text(f"No room here for {', '.join(chosen.left_out)}: see {self.elsewhere}.")
        if self.caption is not None:
            yield Text(visible(self.caption))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return it takes whatever width there is."""
        from rich.measure import Measurement

        return Measurement(1, options.max_width)

    def markdown(self) -> str:
        """Return the same as Markdown, for files and pipes: nothing shortened or left out, no colours."""
        grid = [[_one_line(cell) for cell in (column.heading, *column.cells)] for column in self.columns]
        widths = [max(map(len, cells)) for cells in grid]
        for cells, column, width in zip(grid, self.columns, widths, strict=True):
            cells.insert(1, "-" * width if column.side == "left" else "-" * (width - 1) + ":")
        rows = zip(*(_padded(*each) for each in zip(grid, self.columns, widths, strict=True)), strict=True)
        body = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        title, caption = (visible(part or "") for part in (self.title, self.caption))
        return "\n\n".join(part for part in (title, body, caption) if part) + "\n"


def _one_line(cell: str) -> str:
    return " ".join(cell.split()).replace("|", "\\|")


def _padded(cells: Sequence[str], column: Column, width: int) -> list[str]:
    return [cell.ljust(width) if column.side == "left" else cell.rjust(width) for cell in cells]


def spaced(parts: Sequence[FittedTable | str]) -> Iterator[FittedTable | str]:
    """Tables and lines, tables between empty lines."""
    for place, part in enumerate(parts):
        if place and not (isinstance(part, str) and isinstance(parts[place - 1], str)):
            yield ""
        yield part


def text_of(part: FittedTable | str) -> str:
    """Return a table as Markdown, or a line, with the end of the line."""
    return f"{visible(part)}\n" if isinstance(part, str) else part.markdown()


def show(*parts: FittedTable | str) -> None:
    """Print tables and lines: fitted to a terminal, as Markdown elsewhere."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for part in spaced(parts):
        if console.is_terminal:
            console.print(Text(visible(part)) if isinstance(part, str) else part)
        else:
            sys.stdout.write(text_of(part))
