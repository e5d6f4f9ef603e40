"""Whether dictionaries still hold what they held: the very objects, for an equal one may be another."""

from __future__ import annotations

import operator
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping


class Dictionaries:
    """Many dictionaries at one moment, compared without a line of Python for each of them.

    To look at an object costs a cache miss where a layer has computed in between, so as few as possible are
    looked at.

    Args:
        containers: Dictionaries, each with its content: names, values and their order count.
        objects: Objects, each with what its dictionary held. A new name comes last, so the last one stands
            for all of them.
        modules: Modules, each with what its dictionary held. The order does not matter.
        left_out: Names in the dictionaries of modules that do not matter either.
    """

    __slots__ = ("_known", "_lengths", "_live", "_look")

    def __init__(
        self,
        containers: Iterable[tuple[dict[Any, Any], dict[Any, Any]]],
        objects: Iterable[tuple[object, dict[str, Any]]],
        modules: Iterable[tuple[object, dict[str, Any]]],
        left_out: Collection[str] = (),
    ) -> None:
        objects, modules = list(objects), list(modules)
        filled = [(vars(owner), content) for owner, content in objects if content]
        whole = [*containers, *((vars(owner), content) for owner, content in objects if not content)]
        parts = [(vars(owner), content) for owner, content in modules]
        self._live = [live for live, _ in (*whole, *filled, *parts)]
        self._lengths = [len(content) for _, content in (*whole, *filled, *parts)]
        names = [[name for name in content if name not in left_out] for _, content in parts]
        owners, kinds = [owner for owner, _ in objects], [owner for owner, _ in modules]
        self._look = (
            [live for live, _ in whole],
            [live for live, _ in filled],
            [live.__getitem__ for live, _ in parts],
            *(names, owners, kinds),
        )
        self._known = [
            *_looked_at(
                [content for _, content in whole],
                [content for _, content in filled],
                [content.__getitem__ for _, content in parts],
                *(names, owners, kinds),
            )
        ]

    def hold_the_same(self) -> bool:
        """Whether each holds the very objects that it held, by the same names."""
        try:
            is_same = list(map(len, self._live)) == self._lengths
            return is_same and all(map(operator.is_, _looked_at(*self._look), self._known))
        except KeyError:
            return False


def _looked_at(
    whole: list[dict[Any, Any]],
    filled: list[dict[str, Any]],
    getters: list[Callable[[str], Any]],
    names: list[list[str]],
    owners: list[object],
    kinds: list[object],
) -> Iterable[object]:
    """Return what is compared, one after the other."""
    return chain(
        chain.from_iterable(whole),
        chain.from_iterable(map(dict.values, whole)),
        map(vars, owners),
        map(next, map(reversed, filled)),
        chain.from_iterable(map(dict.values, filled)),
        map(type, kinds),
        chain.from_iterable(map(map, getters, names)),
    )


def are_same(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    """Whether two dictionaries have the same names for the same objects."""
    return one.keys() == other.keys() and all(map(operator.is_, one.values(), other.values()))
