"""Functions that format figures, layers and quoted text for messages, tables and plots."""

from __future__ import annotations

import math
import re
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
RATES = {"B/s": 1, "KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}
_NUMBER = re.compile(r"\d+(?=\D*\Z)")
"""Pattern of the last number in a module name, which is the number of the layer."""

_BLANK = "\0"
"""Placeholder for the number of a layer in a module name."""


# Text


def visible(text: str) -> str:
    r"""Escape all characters of a text that a terminal interprets or does not show.

    For example, the character ``\x1b`` may move the cursor, and ``\u202e`` changes the writing direction.
    """
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def shortened(text: str, most: int = 200) -> str:
    """Shorten a long text for a message. The shortened text ends with an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def quoted(value: object) -> str:
    """Return a value as quoted text for a message. Long text is shortened."""
    return shortened(repr(value))


# Figures


def significant(value: float) -> str:
    """Format a number with three significant digits and no exponent: ``0.0912``, ``41.6``, ``1536``."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"


def scale(largest: float, units: Mapping[str, float]) -> tuple[str, float]:
    """Return the name and size of the largest unit that is not larger than a value; else the smallest unit.

    Args:
        largest: The largest value that is formatted with the unit.
        units: Sizes of the units by name, the smallest first.
    """
    fitting = [(name, float(size)) for name, size in units.items() if size <= largest]
    return fitting[-1] if fitting else next((name, float(size)) for name, size in units.items())


def readable_size(nbytes: float) -> str:
    """Format a number of bytes for people, with three significant digits: ``41.6 MiB``.

    The result is rounded. For exact sizes in a policy file, use :func:`tba_offload.config.format_size`.
    """
    name, size = scale(nbytes, BYTES)
    return f"{significant(nbytes / size)} {name}"


def readable_rate(bytes_per_second: float) -> str:
    """Format a bandwidth for people, in powers of 1000: ``1.48 GB/s``."""
    name, size = scale(bytes_per_second, RATES)
    return f"{significant(bytes_per_second / size)} {name}"


# Layers


MANY_RANGES = 4
"""Largest number of layer ranges that a message lists."""


class LayerGroup(NamedTuple):
    """A group of consecutive layers with the same value, for example the same placement.

    Attributes:
        numbers: The numbers of the layers, such as ``"0-7"``. In a model with several stacks, and in a model
            whose layers have no numbers, ``numbers`` equals ``name``.
        name: The module names as one text, such as ``"decoder.layers.0-7"``.
        first: Index of the first layer.
        size: Number of layers.
    """

    numbers: str
    name: str
    first: int
    size: int


def _stack_and_number(name: str) -> tuple[str, int]:
    """Return a module name with a placeholder for the layer number, and the number; 0 if there is none."""
    found = _NUMBER.search(name)
    return (name, 0) if found is None else (_NUMBER.sub(_BLANK, name), int(found[0]))


def grouped(names: Sequence[str], alike: Sequence[Hashable]) -> list[LayerGroup]:
    """Group consecutive layers of one stack that have equal values in ``alike``.

    Args:
        names: Module name of each layer, in order.
        alike: Value of each layer, for example its placement. All layers of a group have the same value.
    """
    parts = [_stack_and_number(name) for name in names]
    is_one_stack = len(dict(parts)) == 1

    def key(index: int) -> Hashable:
        stack, number = parts[index]
        # For consecutive layers, number and index increase together. A layer without a number forms its own
        # group.
        return stack, number - index if _BLANK in stack else index, alike[index]

    groups = []
    for _, found in groupby(range(len(names)), key=key):
        members = list(found)
        (stack, first), (_, last) = parts[members[0]], parts[members[-1]]
        numbers = f"{first}" if first == last else f"{first}-{last}"
        name = stack.replace(_BLANK, numbers)
        has_number = is_one_stack and _BLANK in stack
        groups.append(LayerGroup(numbers if has_number else name, name, members[0], len(members)))
    return groups


def layers_by_placement(names: Sequence[str], placements: Sequence[str]) -> str:
    """Return the placements of all layers in one line: ``"offload layers 0-9, keep layers 10-11"``.

    Args:
        names: Module name of each layer.
        placements: The placement of each layer.
    """
    groups = grouped(names, placements)
    ways = dict.fromkeys(placements[group.first] for group in groups)
    of_way = {way: [group for group in groups if placements[group.first] == way] for way in ways}
    if len(ways) == 1:
        return f"{_as_verb(placements[0])} {f'all {len(names)} layers' if len(names) > 1 else 'the layer'}"
    return ", ".join(f"{_as_verb(way)} {_listed(members)}" for way, members in of_way.items())


def _as_verb(placement: str) -> str:
    return "auto for" if placement == "auto" else placement


def _listed(groups: Sequence[LayerGroup]) -> str:
    """Return the layer numbers of groups as text.

    For more than :data:`MANY_RANGES` groups, return the number of layers, the first group and the last group.
    """
    count = sum(group.size for group in groups)
    if len(groups) > MANY_RANGES:
        return f"{count} layers from {groups[0].numbers} to {groups[-1].numbers}"
    return f"layer{'s' if count > 1 else ''} {', '.join(group.numbers for group in groups)}"


def renumbered(names: Sequence[str], chosen: Iterable[int]) -> tuple[str, ...]:
    """Return the layer names of a new model whose layers are copies of the layers of an existing model.

    Args:
        names: Module names of the layers of the existing model.
        chosen: For each layer of the new model, the index of the copied layer in ``names``.
    """
    parts = [_stack_and_number(name) for name in names]
    following = dict(reversed(parts))  # the next number of each stack
    made = []
    for stack in (parts[index][0] for index in chosen):
        number = following[stack]
        following[stack] += 1
        if _BLANK in stack:
            made.append(stack.replace(_BLANK, str(number)))
        else:
            made.append(f"{stack} ({number + 1})" if number else stack)
    return tuple(made)
