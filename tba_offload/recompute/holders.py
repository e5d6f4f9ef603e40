"""Holders of other objects at one moment: whether each holds the same now, and how it gets that back."""

from __future__ import annotations

import contextlib
import copy
import operator
from array import array
from collections import OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any, NamedTuple

from tba_offload.recompute.same import are_same

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable

    from tba_offload.recompute.code import Names

CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, set, deque, bytearray)
"""Each before those that it derives from: an ``OrderedDict`` has an order beside that of its dictionary."""

_MAPPINGS = (OrderedDict, dict)

_PLAIN_MAPPINGS = (dict, OrderedDict, defaultdict)
"""Classes themselves, and none that derives from them."""

_MISSING = object()


class Container(NamedTuple):
    """A container, or the dictionary of an object.

    Attributes:
        base: Which of :data:`CONTAINERS` it is or derives from, past whose own class it is read and filled.
        found: The container.
        content: What it held.
        owner: The object whose dictionary it is, if it is that.
    """

    base: Any
    found: Any
    content: Any
    owner: object = None

    @classmethod
    def of(cls, base: Any, found: Any, owner: object = None) -> Container:
        """Return a container as it is now."""
        content = dict(OrderedDict.items(found)) if base is OrderedDict else base.copy(found)
        return cls(base, found, content, owner)

    def parts(self) -> Iterable[Any]:
        """Return the objects that it held."""
        values: Iterable[Any] = self.content.values() if self.base in _MAPPINGS else self.content
        return values

    def is_plain(self) -> bool:
        """Whether it is a dictionary of no object, as :class:`Dictionaries` can compare."""
        return self.owner is None and type(self.found) in _PLAIN_MAPPINGS

    def holds_the_same(self) -> bool:
        """Whether it holds the very objects that it held, in their order."""
        base, found, content = self.base, self.found, self.content
        if base.__len__(found) != base.__len__(content):
            return False
        if base in _MAPPINGS:
            names = all(map(operator.is_, base.keys(found), content))
            return names and all(map(operator.is_, base.values(found), content.values()))
        if base is set:
            return bool(set.__eq__(found, content))
        return all(map(operator.is_, base.__iter__(found), base.__iter__(content)))

    def refill(self) -> None:
        """Have it hold what it held, past what its class may do about that."""
        if self.holds_the_same():
            return
        base, found, content = self.base, self.found, self.content
        base.clear(found)
        if base in _MAPPINGS:
            for name, value in content.items():
                base.__setitem__(found, name, value)
        elif base is set:
            set.update(found, content)
        else:
            base.extend(found, content)


class Attributes(NamedTuple):
    """Attributes of an object with slots, of a variable of a function, or of a class.

    Attributes:
        owner: What has them.
        names: Those that were looked for.
        content: Those that it had.
        whole: All that a class had, code as well.
    """

    owner: Any
    names: tuple[str, ...]
    content: dict[str, Any]
    whole: dict[str, Any] | None = None

    @classmethod
    def of(cls, owner: object, names: tuple[str, ...]) -> Attributes:
        """Return the attributes as they are now."""
        whole = dict(vars(owner)) if isinstance(owner, type) else None
        return cls(owner, names, _attributes_of(owner, names), whole)

    def is_as_found(self) -> bool:
        """Whether the owner has the same attributes."""
        if self.whole is not None:
            return are_same(vars(self.owner), self.whole)
        return are_same(_attributes_of(self.owner, self.names), self.content)

    def put_back(self, undo: Callable[..., object]) -> None:
        """Give the owner what it had; ``undo`` takes the call that undoes this."""
        now = _attributes_of(self.owner, self.names)
        undo(_put_attributes, self.owner, self.names, now)
        _put_attributes(self.owner, self.names, self.content)


class FileNames(NamedTuple):
    """Names of a file that code reads.

    Attributes:
        names: The names.
        values: What each stood for, code as well.
        content: Those that stood for something that may change.
    """

    names: Names
    values: list[Any]
    content: dict[str, Any]

    @classmethod
    def of(cls, names: Names, code: tuple[type, ...]) -> FileNames:
        """Return the names as they are now, without values of these classes."""
        found = {name: names.file[name] for name in names.read if name in names.file}
        content = {name: value for name, value in found.items() if not isinstance(value, code)}
        return cls(names, _values_of(names), content)

    def is_as_found(self) -> bool:
        """Whether the names stand for the same."""
        return all(map(operator.is_, _values_of(self.names), self.values))

    def put_back(self, undo: Callable[..., object]) -> None:
        """Have the names stand for what they stood for; ``undo`` takes the call that undoes this."""
        file = self.names.file
        undo(_put_names, file, {name: file.get(name, _MISSING) for name in self.content})
        _put_names(file, self.content)


class Local(NamedTuple):
    """What a thread has in an object that is another one for each thread."""

    local: threading.local
    content: dict[str, Any]

    def is_as_found(self) -> bool:
        """Never taken for granted: the next run may be in another thread."""
        return False

    def put_back(self, undo: Callable[..., object]) -> None:
        """Give it to the calling thread, which may be another; ``undo`` takes the call that undoes this."""
        own = Container(dict, self.local.__dict__, self.content)
        undo(Container.of(dict, own.found).refill)
        own.refill()


class Array(NamedTuple):
    """An array, of Python's or of NumPy's kind."""

    found: Any
    values: Any

    def is_as_found(self) -> bool:
        """Never taken for granted: what its values were is copied before each run."""
        return False

    def put_back(self, undo: Callable[..., object]) -> None:
        """Give it its values; ``undo`` takes the call that undoes this."""
        undo(_overwrite, self.found, copy.copy(self.found))
        _overwrite(self.found, self.values)


class Holders:
    """Many of them.

    Attributes:
        containers: Containers, and dictionaries of objects.
        others: What holds objects in another way.
    """

    __slots__ = ("containers", "others")

    def __init__(self) -> None:
        self.containers: list[Container] = []
        self.others: list[Attributes | FileNames | Local | Array] = []

    def dictionaries(self) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
        """Containers that :class:`Dictionaries` can compare, each with what it held."""
        return [(each.found, each.content) for each in self.containers if each.is_plain()]

    def objects(self) -> list[tuple[object, dict[str, Any]]]:
        """Objects with dictionaries, each with what that held."""
        return [(each.owner, each.content) for each in self.containers if each.owner is not None]

    def are_as_found(self) -> bool:
        """Whether all but the :meth:`dictionaries` and :meth:`objects` hold the same."""
        containers = (each for each in self.containers if each.owner is None and not each.is_plain())
        return all(each.holds_the_same() for each in containers) and all(
            each.is_as_found() for each in self.others
        )

    def put_back(self, undo: Callable[..., object]) -> None:
        """Have each hold what it held.

        Args:
            undo: Takes the calls that undo this, and all that is changed in these objects later.
        """
        changed = [each for each in self.containers if not each.holds_the_same()]
        now = {id(each): Container.of(each.base, each.found) for each in changed}
        undo(_refill_all, [now.get(id(each), each) for each in self.containers])
        _refill_all(changed)
        for each in self.others:
            each.put_back(undo)


def _refill_all(containers: Iterable[Container]) -> None:
    for container in containers:
        container.refill()


def _attributes_of(owner: object, names: tuple[str, ...]) -> dict[str, Any]:
    """Those of the attributes that the object, cell or class has."""
    if isinstance(owner, type):
        return {name: vars(owner)[name] for name in names if name in vars(owner)}
    found = {}
    for name in names:
        with contextlib.suppress(AttributeError, ValueError):  # or a cell is empty
            found[name] = getattr(owner, name)
    return found


def _put_attributes(owner: Any, names: tuple[str, ...], content: dict[str, Any]) -> None:
    now = _attributes_of(owner, names)
    kind: Any = type if isinstance(owner, type) else object
    for name in now.keys() - content.keys():
        kind.__delattr__(owner, name)
    for name, value in content.items():
        if now.get(name, _MISSING) is not value:
            kind.__setattr__(owner, name, value)


def _values_of(names: Names) -> list[Any]:
    return [*map(names.file.get, names.read)]


def _put_names(file: dict[str, Any], content: dict[str, Any]) -> None:
    for name, value in content.items():
        if value is _MISSING:
            file.pop(name, None)
        elif file.get(name, _MISSING) is not value:
            file[name] = value


def _overwrite(found: Any, values: Any) -> None:
    if found.tobytes() != values.tobytes():
        found[slice(None) if isinstance(found, array) else ...] = values
