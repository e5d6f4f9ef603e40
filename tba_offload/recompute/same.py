"""Whether dictionaries still hold what they held: the very objects, for an equal one may be another."""

from __future__ import annotations

import operator
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    _Found = tuple[dict[Any, Any], Mapping[Any, Any]]


class Dictionaries:
    """Many dictionaries at one moment, compared without a line of Python for each of them.

    To look at an object costs a cache miss where a layer has computed in between. So of the dictionaries of
    modules only what counts is looked at.

    Args:
        whole: Dictionaries, each with its content.
        parts: Others, each with its content, whose order does not matter.
        left_out: Names of those that do not matter either.
    """

    __slots__ = (
        "_getters",
        "_lengths",
        "_live",
        "_names",
        "_part_names",
        "_part_values",
        "_values",
        "_whole",
    )

    def __init__(
        self, whole: Iterable[_Found], parts: Iterable[_Found], left_out: Collection[str] = ()
    ) -> None:
        whole, parts = list(whole), list(parts)
        self._whole = [live for live, _ in whole]
        self._names = [*chain.from_iterable(content for _, content in whole)]
        self._values = [*chain.from_iterable(content.values() for _, content in whole)]
        self._live = [live for live, _ in (*whole, *parts)]
        self._lengths = [len(content) for _, content in (*whole, *parts)]
        self._getters = [live.__getitem__ for live, _ in parts]
        self._part_names = [[name for name in content if name not in left_out] for _, content in parts]
        pairs = zip(parts, self._part_names, strict=True)
        self._part_values = [content[name] for (_, content), names in pairs for name in names]

    def hold_the_same(self) -> bool:
        """Whether each holds the very objects that it held, by the same names."""
        whole = self._whole
        looked_up = chain.from_iterable(map(map, self._getters, self._part_names))
        try:
            return (
                list(map(len, self._live)) == self._lengths
                and all(map(operator.is_, looked_up, self._part_values))
                and all(map(operator.is_, chain.from_iterable(whole), self._names))
                and all(map(operator.is_, chain.from_iterable(map(dict.values, whole)), self._values))
            )
        except KeyError:
            return False


def are_same(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    """Whether two dictionaries have the same names for the same objects."""
    return one.keys() == other.keys() and all(map(operator.is_, one.values(), other.values()))
