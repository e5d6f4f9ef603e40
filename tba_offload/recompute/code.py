"""State that the code of a layer reaches and no object of the layer holds.

Names of its files, variables of enclosing functions, attributes of classes, values of default arguments: a
layer may count there, or draw from a generator that lies there.
"""

from __future__ import annotations

import functools
import sys
import weakref
from types import CellType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn

_T = TypeVar("_T")

_LIBRARIES = frozenset(
    {"torch", "megatron", "transformer_engine", "tba_offload", "tba_lab", *sys.stdlib_module_names}
)
"""Packages whose code keeps no state of a layer, beside all that are installed."""

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
"""Kinds of values that hold nothing and cannot change."""

_MOST = 500
"""Functions of one class that are looked through, with those that they call."""


class Names(NamedTuple):
    """Names of one file.

    Attributes:
        file: Its names and what they stand for.
        read: Those that code of a layer reads.
    """

    file: dict[str, Any]
    read: frozenset[str]


class Reach(NamedTuple):
    """The state that some functions reach.

    Attributes:
        files: Names of files.
        cells: Variables of enclosing functions.
        classes: Classes with attributes.
        values: Values of default arguments, and attributes of the functions themselves.
    """

    files: tuple[Names, ...]
    cells: tuple[CellType, ...]
    classes: tuple[type, ...]
    values: tuple[object, ...]


def remembered(of_class: Callable[[type], _T]) -> Callable[[type], _T]:
    """As ``functools.cache`` of a function of a class, which does not keep the class in memory.

    ``torch.nn.utils.parametrize`` makes a class for each module, by which the module would stay as well. What
    the function returns must not lead to the class.
    """
    known: weakref.WeakKeyDictionary[type, _T] = weakref.WeakKeyDictionary()

    @functools.wraps(of_class)
    def recall(kind: type) -> _T:
        if kind not in known:
            known[kind] = of_class(kind)
        return known[kind]

    return recall


def reach_of_class(kind: type[nn.Module]) -> Reach:
    """State that functions of a class reach, and functions of the same program that these call."""
    reach = _reach_beyond(kind)
    return reach._replace(classes=(kind, *reach.classes)) if is_own(kind) else reach


@remembered
def _reach_beyond(kind: type[nn.Module]) -> Reach:
    """Return the same but for the class itself."""
    reach = _reach_of(_functions_of(kind), _own_bases(kind))
    return reach._replace(classes=tuple(each for each in reach.classes if each is not kind))


def reach_of_function(function: FunctionType) -> Reach | None:
    """State that a function reaches; ``None`` of one of a library."""
    if not is_own(function):
        return None
    if function.__closure__ or vars(function) or not PLAIN.issuperset(map(type, _defaults_of(function))):
        return _reach_of([function], ())  # what it holds may lead to it, and it would be remembered for ever
    if function not in _reaches:
        _reaches[function] = _reach_of([function], ())
    return _reaches[function]


_reaches: weakref.WeakKeyDictionary[FunctionType, Reach] = weakref.WeakKeyDictionary()


def attributes_of_class(kind: type) -> list[str]:
    """Name of the attributes of a class that are no code."""
    return [name for name, value in vars(kind).items() if not name.startswith("__") and not _is_code(value)]


def _reach_of(functions: Iterable[FunctionType], classes: Iterable[type]) -> Reach:
    waiting, seen = list(functions), set[FunctionType]()
    files: dict[int, tuple[dict[str, Any], set[str]]] = {}
    cells, kinds, values = list[CellType](), dict.fromkeys(classes), list[object]()

    def read(file: dict[str, Any], names: set[str]) -> None:
        found = {name for name in names if name in file}
        files.setdefault(id(file), (file, set()))[1].update(found)
        for value in (file[name] for name in found):
            follow(value, names)

    def follow(value: object, names: set[str]) -> None:
        if isinstance(value, FunctionType) and is_own(value):
            waiting.append(value)
        elif isinstance(value, type) and is_own(value) and value not in kinds:
            kinds[value] = None
            waiting.extend(_functions_of(value))
        elif isinstance(value, ModuleType) and is_own(value) and id(vars(value)) not in files:
            read(vars(value), names)

    while waiting and len(seen) < _MOST:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        names = set(_names_in(function.__code__))
        read(function.__globals__, names)
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if variable != "__class__":  # that of super() is the class, which is followed
                cells.append(cell)
            follow(_content_of(cell), names)
        values += _defaults_of(function)
        if vars(function):
            values.append(vars(function))
        follow(vars(function).get("__wrapped__"), names)
    found = (Names(file, frozenset(names)) for file, names in files.values() if names)
    return Reach(tuple(found), tuple(cells), tuple(kinds), tuple(values))


def _defaults_of(function: FunctionType) -> tuple[object, ...]:
    return (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def _content_of(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def is_own(value: FunctionType | type | ModuleType) -> bool:
    """Whether something is the program's own, and no library's."""
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return _is_of_program(str(name))


@functools.cache
def _is_of_program(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    is_installed = "site-packages" in file or "dist-packages" in file
    return not is_installed and name.partition(".")[0] not in (_LIBRARIES - {"__main__"})


def _is_code(value: object) -> bool:
    is_function = isinstance(value, (FunctionType, type, ModuleType, classmethod, staticmethod, property))
    return is_function or hasattr(type(value), "__get__")


def _own_bases(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if is_own(base)]


def _functions_of(kind: type) -> Iterator[FunctionType]:
    for value in (value for base in _own_bases(kind) for value in list(vars(base).values())):
        inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(inner, FunctionType):
            yield inner


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
