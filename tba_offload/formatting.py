"""How figures and layers are printed, so that they look alike wherever they are."""

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
"""The last number in a module name, which is that of the layer."""

_BLANK = "\0"
"""Character in the place of that number in the name of a stack of layers."""


# Text


def visible(text: str) -> str:
    r"""Return the text with everything spelt out that a terminal would obey or not show.

    ``\x1b``, ``\u202e``.

    Names in files may hold anything: sequences that move the cursor, halves of characters, changes of the
    writing direction.
    """
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def shortened(text: str, most: int = 200) -> str:
    """Return what a user wrote, for a message that quotes it.

    Of a long text the beginning, and an ellipsis.
    """
    return text if len(text) <= most else f"{text[: most - 1]}…"


def quoted(value: object) -> str:
    """Return a value that a user gave, as a message quotes it."""
    return shortened(repr(value))


# Figures


def significant(value: float) -> str:
    """Three significant digits, and never an exponent: ``0.0912``, ``41.6``, ``1536``."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"


def scale(largest: float, units: Mapping[str, float]) -> tuple[str, float]:
    """Return the unit in which to show values up to the largest, and its size.

    Args:
        largest: The largest value.
        units: Name and size of each unit, the smallest first.
    """
    fitting = [(name, float(size)) for name, size in units.items() if size <= largest]
    return fitting[-1] if fitting else next((name, float(size)) for name, size in units.items())


def readable_size(nbytes: float) -> str:
    """Return a number of bytes for people: ``41.6 MiB``, three significant digits.

    It rounds. What is read back, as sizes in a policy file, is written exactly, by
    :func:`tba_offload.config.format_size`.
    """
    name, size = scale(nbytes, BYTES)
    return f"{significant(nbytes / size)} {name}"


def readable_rate(bytes_per_second: float) -> str:
    """Return a bandwidth for people, in powers of 1000 as those of drives are given: ``1.48 GB/s``."""
    name, size = scale(bytes_per_second, RATES)
    return f"{significant(bytes_per_second / size)} {name}"


# Layers


MANY_RANGES = 4
"""A list of more ranges of layers than this is longer than one line has room for."""


class LayerGroup(NamedTuple):
    """Layers that follow one another and are alike.

    Attributes:
        numbers: Their numbers, such as ``"0-7"``; names where a model has several stacks, or no numbers.
        name: Their module names as one, such as ``"decoder.layers.0-7"``.
        first: Index of the first of them.
        size: How many they are.
    """

    numbers: str
    name: str
    first: int
    size: int


def _stack_and_number(name: str) -> tuple[str, int]:
    """Return a module name with a blank for its number, and the number; a name without one, and 0."""
    found = _NUMBER.search(name)
    return (name, 0) if found is None else (_NUMBER.sub(_BLANK, name), int(found[0]))


def grouped(names: Sequence[str], alike: Sequence[Hashable]) -> list[LayerGroup]:
    """Layers in groups: each of layers that follow one another by number and are alike.

    Args:
        names: Module name of each layer, in their order.
        alike: Equal for layers that may be in one group.
    """
    parts = [_stack_and_number(name) for name in names]
    is_one_stack = len(dict(parts)) == 1

    def key(index: int) -> Hashable:
        stack, number = parts[index]
        # Layers that follow one another: number and index go up together. Without a number each is alone.
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
    """Return what is done with which layers, in one line: ``"offload layers 0-9, keep layers 10-11"``.

    Args:
        names: Module name of each layer.
        placements: The placement of each.
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
    """Return the layers of some groups, or how many there are if they are scattered."""
    count = sum(group.size for group in groups)
    if len(groups) > MANY_RANGES:
        return f"{count} layers from {groups[0].numbers} to {groups[-1].numbers}"
    return f"layer{'s' if count > 1 else ''} {', '.join(group.numbers for group in groups)}"


def renumbered(names: Sequence[str], chosen: Iterable[int]) -> tuple[str, ...]:
    """Return module names for a model with more layers, or fewer, of the same stacks.

    Args:
        names: Those of the layers that there are.
        chosen: For each layer of that model, the index of the one that it is like.
    """
    parts = [_stack_and_number(name) for name in names]
    following = dict(reversed(parts))  # begins with the first number of each stack
    made = []
    for stack in (parts[index][0] for index in chosen):
        number = following[stack]
        following[stack] += 1
        if _BLANK in stack:
            made.append(stack.replace(_BLANK, str(number)))
        else:
            made.append(f"{stack} ({number + 1})" if number else stack)
    return tuple(made)
