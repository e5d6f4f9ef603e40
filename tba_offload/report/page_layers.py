"""The layers of a run as a table: how each is placed, why, and what it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tba_offload.formatting import grouped, readable_size
from tba_offload.report.tables import Column, FittedTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tba_offload.report.evidence import Evidence

_CAPTION = (
    "Sizes are those of the layer of each row that takes most, in one run of it: what its forward leaves in "
    "memory beside what the offloader holds, and the most that forward and backward need at once."
)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer: its name, the placement that it was given, why, how it runs, and what it takes in bytes."""

    name: str
    placement: str
    why: str
    runs_as: str
    takes: tuple[int, int, int] | None

    @property
    def look(self) -> tuple[str, ...]:
        """Equal for layers that are one row if they are neighbours."""
        return self.placement, self.why, self.runs_as


@dataclass(frozen=True, slots=True)
class _Row:
    """Layers that are alike."""

    numbers: str
    name: str
    layers: list[_Layer]

    def largest(self, place: int) -> str:
        """Return the largest of what they take."""
        sizes = [layer.takes[place] for layer in self.layers if layer.takes is not None]
        return readable_size(max(sizes)) if sizes else ""


def layers_table(evidence: Evidence) -> FittedTable | None:
    """Return the placement of each layer, why it has it, and what it takes; equal neighbours are one row."""
    rows = list(_rows(list(_layers(evidence))))
    if not rows:
        return None
    numbers = _text("Layers", rows, lambda row: row.numbers)
    columns = [
        *([] if all(row.numbers == row.name for row in rows) else [numbers]),  # as of several stacks
        _text("Name", rows, lambda row: row.name),
        _text("Placement", rows, lambda row: row.layers[0].placement),
        _text("Runs as", rows, lambda row: row.layers[0].runs_as),
        _text("Why", rows, lambda row: row.layers[0].why),
        Column("Leaves in memory", tuple(row.largest(0) for row in rows)),
        Column("Forward takes", tuple(row.largest(1) for row in rows)),
        Column("Backward takes", tuple(row.largest(2) for row in rows)),
    ]
    return FittedTable(tuple(column for column in columns if any(column.cells)), caption=_CAPTION)


def _text(heading: str, rows: list[_Row], cell: Callable[[_Row], str]) -> Column:
    return Column(heading, tuple(map(cell, rows)), "left")


def _layers(evidence: Evidence) -> Iterator[_Layer]:
    """Those of all ranks, as the header of the log has them."""
    memory = evidence.memory
    now = dict(zip(memory.names, memory.placements, strict=True)) if memory is not None else {}
    takes = dict(zip(memory.names, memory.layers, strict=True)) if memory is not None else {}
    for name, entry in evidence.log.header.plan.items():
        if isinstance(entry, dict):
            placement, why = str(entry.get("placement")), str(entry.get("why"))
            yield _Layer(name, placement, why, now.get(name, ""), takes.get(name))


def _rows(layers: list[_Layer]) -> Iterator[_Row]:
    groups = grouped([layer.name for layer in layers], [layer.look for layer in layers])
    for group in groups:
        yield _Row(group.numbers, group.name, layers[group.first : group.first + group.size])
