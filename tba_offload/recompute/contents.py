"""The objects that a layer can reach: taken down before its first run, put back for its second.

A layer may count its calls in an object that it shares with others, draw from a generator in a dictionary, or
read a scale from a settings object. So containers and plain objects are looked into, and get their content
back where it is another one by then.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
import threading
import types
from array import array
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tba_offload.layers.nested import DEPTH, LEAVES, MOST, TooManyError, slots_of
from tba_offload.layers.randomness import Generator
from tba_offload.recompute.code import PLAIN, attributes_of_class, is_own, reach_of_function, remembered
from tba_offload.recompute.holders import (
    CONTAINERS,
    Array,
    Attributes,
    Container,
    FileNames,
    Holders,
    Local,
)
from tba_offload.recompute.stand_ins import StandIns, has_graph

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from tba_offload.recompute.code import Names, Reach

    _Way = Callable[["Contents", Any], Any]

_LEFT_ALONE = frozenset({
    *("torch", "threading", "_thread", "logging", "multiprocessing", "concurrent", "asyncio", "queue"),
    *("weakref", "socket", "io", "typing", "enum", "tba_offload", "tba_lab"),
})  # fmt: skip
"""Packages of objects whose state is none of the layer's: to turn it back might do harm."""

_LEAVES = tuple(kind for kind in LEAVES if kind not in (types.MethodType, torch.nn.Module))

_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)

LARGE = 1_000
"""Items of a container that is not copied in each run of a layer: a table, which no layer should change."""

SMALL = 256 << 10
"""Bytes of a tensor from which on it is not copied in each run of a layer."""

UNSEEN = "more objects than are looked through"

_FORWARD = ("forward", "__call__")
"""Methods by which a layer may run a module that it does not register."""


class Held(NamedTuple):
    """A tensor that was found.

    Attributes:
        name: What holds it.
        version: How often it had been changed.
        copy: Of a small one, which the layer may change.
    """

    name: str
    tensor: torch.Tensor
    version: int
    copy: torch.Tensor | None


class Contents:
    """What containers and plain objects hold.

    Args:
        copies: Whether small tensors among it are copied.

    Attributes:
        unknown: What lies there whose state cannot be put back; ``None`` if there is no such thing.
        modules: Modules among it.
        tensors: Tensors among it.
        generators: Generators of random numbers among it.
        holders: Containers and objects among it that hold others.
        is_fixed: Whether another look finds the same as long as no object holds others. Tensors, arrays and
            what each thread has are looked at anew: their values were copied, or their graphs left out.
    """

    __slots__ = (
        *("_all", "_copies", "_large", "_seen", "_stand_ins"),
        *("generators", "holders", "is_fixed", "modules", "tensors", "unknown"),
    )

    def __init__(self, *, copies: bool) -> None:
        self._copies = copies
        self.is_fixed = True
        self.unknown: str | None = None
        self.tensors: list[Held] = []
        self.generators: list[Generator] = []
        self.modules: list[torch.nn.Module] = []
        self.holders = Holders()
        self._large: list[Any] = []
        self._seen: dict[int, None] = {}
        self._stand_ins = StandIns()
        self._all: tuple[list[Any] | dict[int, None], ...] = (
            *(self.tensors, self.generators, self.modules),
            *(self.holders.containers, self.holders.others, self._large, self._seen),
        )

    def add(self, name: str, value: Any, *, saves_tuples: bool = False) -> Any:
        """Take down what a value holds.

        Args:
            name: What to call the value.
            value: The value.
            saves_tuples: Tensors that are the value, or lie in it in tuples alone, are saved elsewhere.

        Returns:
            The value; or one that stands for it, without the graphs that it holds.

        Raises:
            TooManyError: There are more objects than can be looked through.
        """
        kind: Any = type(value)
        if kind in PLAIN or (_way_of(kind) is _only_wraps and not hasattr(value, "__wrapped__")):
            return value
        if id(value) in self._seen:
            return self._stand_ins.known(value)
        mark = [len(found) for found in self._all]
        if not self._look_through(name, value, saves_tuples=saves_tuples):
            return value
        self._roll_back(mark)
        self.is_fixed = False
        try:
            stand_in = self._stand_ins.of(value)
        except Exception:  # noqa: BLE001 - whatever its class raises
            self.unknown = f"an object that cannot be copied ({type(value).__name__})"
            return None
        self._look_through(name, stand_in, saves_tuples=saves_tuples)
        return stand_in

    def end(self) -> None:
        """Nothing is added any more: lets go of what only served to tell objects from each other."""
        self._seen.clear()
        self._stand_ins.clear()

    def _roll_back(self, mark: list[int]) -> None:
        """Forget what was found since a mark."""
        for found, length in zip(self._all, mark, strict=True):
            while len(found) > length:
                found.pop() if isinstance(found, list) else found.popitem()

    def _look_through(self, name: str, value: object, *, saves_tuples: bool) -> bool:
        """Take down what a value holds; whether it holds graphs that are not the layer's own."""
        holds_graphs = False
        waiting = deque([(value, 0, saves_tuples)])
        while waiting:
            found, depth, is_saved = waiting.popleft()
            kind: Any = type(found)  # settings objects may take long to tell their class
            if issubclass(kind, torch.Tensor):
                if not is_saved:
                    tensor: Any = found
                    copied = copy_of(tensor) if self._copies else None
                    self.tensors.append(Held(name, tensor, version_of(tensor), copied))
                    self.is_fixed = False
                    holds_graphs = holds_graphs or (self._copies and has_graph(tensor))
            elif id(found) not in self._seen and kind not in PLAIN and issubclass(kind, torch.nn.Module):
                self._seen[id(found)] = None
                self.modules.append(found)  # type: ignore[arg-type]
            elif issubclass(kind, types.FunctionType):
                self._add_function(found)  # type: ignore[arg-type]
            elif id(found) not in self._seen and (take_down := _way_of(kind)) is not None:
                self._seen[id(found)] = None
                if len(self._seen) > MOST:
                    raise TooManyError
                if depth < DEPTH:
                    is_saved = is_saved and kind is tuple
                    parts = [part for part in take_down(self, found) if type(part) not in PLAIN]
                    waiting.extend([(part, depth + 1, is_saved) for part in parts])
        return holds_graphs

    def add_reach(self, reach: Reach) -> None:
        """Take down the state that code reaches.

        Raises:
            TooManyError: There are more objects than can be looked through.
        """
        for names in reach.files:
            self._add_names(names)
        for cell in reach.cells:
            self._add_attributes(cell, ("cell_contents",))
        for kind in reach.classes:
            self._add_attributes(kind, tuple(attributes_of_class(kind)))
        for value in reach.values:
            self.add("a default", value)

    def _add_function(self, function: types.FunctionType) -> None:
        if id(function) not in self._seen:
            self._seen[id(function)] = None
            if (reach := reach_of_function(function)) is not None:
                self.add_reach(reach)

    def _add_attributes(self, owner: object, names: tuple[str, ...]) -> None:
        """Take down some attributes of an object, and what they hold."""
        if id(owner) not in self._seen:
            self._seen[id(owner)] = None
            self._hold(Attributes.of(owner, names))

    def _add_names(self, names: Names) -> None:
        self._hold(FileNames.of(names, _CODE))

    def _hold(self, holder: Attributes | FileNames | Local) -> None:
        """Note something with names for objects, and take down what these hold."""
        self.holders.others.append(holder)
        content = holder.content
        content.update({name: self.add(name, value) for name, value in content.items()})

    def _take_down_container(self, base: Any, value: object) -> Any:
        """Note what a container holds now; return its parts, as other ways to take something down do."""
        if base.__len__(value) > LARGE:
            self.unknown = UNSEEN
            return ()
        container = Container.of(base, value)
        self.holders.containers.append(container)
        return container.parts()

    def _take_down_generator(self, value: object) -> Any:
        self.generators.append(_generator_of(value))
        return ()

    def _take_down_iterator(self, value: object) -> Any:
        kind: Any = type(value)
        if hasattr(value, "__dict__") or _slots_of(kind):
            return _way_of_object(kind)(self, value)
        self.unknown = f"an iterator or generator ({kind.__name__})"
        return ()

    def _take_down_system(self, _: object) -> Any:
        self.unknown = "random numbers of the operating system"
        return ()

    def _take_down_array(self, found: Any) -> Any:
        """Copy a small array, of Python's or of NumPy's kind; leaves a large one to :meth:`large`."""
        self.is_fixed = False
        is_numpys = not isinstance(found, array)
        if is_numpys and not found.flags.writeable:
            return ()
        if is_numpys and found.dtype.hasobject:
            self.unknown = "an array of objects"
        elif (found.nbytes if is_numpys else len(found) * found.itemsize) < SMALL:
            self.holders.others.append(Array(found, copy.copy(found)))
        else:
            self._large.append(found)
        return ()

    def _take_down_local(self, value: Any) -> Any:
        self.is_fixed = False
        self._hold(Local(value, value.__dict__.copy()))
        return ()

    def _take_down_object(self, value: object) -> Any:
        try:
            kind: Any = type(value)
            names = _slots_of(kind)
            own, slots = getattr(value, "__dict__", None), Attributes.of(value, names)
        except Exception:  # noqa: BLE001 - a stand-in for something that is not there
            self.is_fixed = False
            return ()
        if type(own) is dict:
            self.holders.containers.append(Container.of(dict, own, value))
        if names:
            self.holders.others.append(slots)
        return (*(own or {}).values(), *slots.content.values())

    def leave_out(self, addresses: Collection[int]) -> None:
        """Forget the tensors whose memory is at these addresses."""
        self.tensors[:] = [held for held in self.tensors if address_of(held.tensor) not in addresses]

    def large(self) -> dict[str, torch.Tensor]:
        """Return what is not copied, and may be changed past any version."""
        tensors = {held.name: held.tensor for held in self.tensors if held.copy is None}
        bits = (torch.frombuffer(bytearray(found.tobytes()), dtype=torch.uint8) for found in self._large)
        return {**tensors, **{f"a large array ({number})": each for number, each in enumerate(bits)}}

    def changed_in_place(self) -> str | None:
        """Return the name of a tensor that has changed in place since; ``None`` for none of them."""
        large = (held for held in self.tensors if held.copy is None)
        return next((held.name for held in large if version_of(held.tensor) != held.version), None)


def address_of(tensor: torch.Tensor) -> int:
    """Return what the tensors have in common that share memory."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except RuntimeError:  # a sparse tensor, or one under a transform, has no storage to ask for
        return id(tensor)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; always 0 where nothing counts that."""
    try:
        return tensor._version
    except RuntimeError:  # a tensor of inference mode has none
        return 0


def copy_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of a small tensor without a graph, which a layer may change, as batch norm does."""
    is_small = tensor.layout is torch.strided and tensor.numel() * tensor.itemsize < SMALL
    is_plain = type(tensor) is torch.Tensor and not tensor.requires_grad and not tensor.is_quantized
    return tensor.detach().clone() if is_small and is_plain and not tensor.is_inference() else None


@remembered
def _slots_of(kind: type) -> tuple[str, ...]:
    """Name of the slots of objects of a class."""
    return tuple(_mangled(base, name) for base in kind.__mro__ for name in slots_of(base))


def _mangled(kind: type, name: str) -> str:
    """Return the name of a slot as Python has it.

    One with two leading underscores is private to its class.
    """
    is_private = name.startswith("__") and not name.endswith("__")
    return f"_{kind.__name__.lstrip('_')}{name}" if is_private else name


@remembered
def _way_of(kind: type) -> _Way | None:
    """Return what takes an object of a class down; ``None`` for one that has nothing to take down."""
    if kind in PLAIN or issubclass(kind, (torch.Tensor, torch.nn.Module, *_LEAVES)):
        return None
    base = next((base for base in CONTAINERS if issubclass(kind, base)), None)
    if base is not None:
        return lambda contents, value: contents._take_down_container(base, value)
    ways: tuple[tuple[Any, _Way], ...] = (
        ((tuple, frozenset), lambda _, value: value),
        (types.MethodType, lambda _, value: (value.__self__, value.__func__) if _may_run(value) else ()),
        (functools.partial, lambda _, value: (value.func, value.args, value.keywords)),
        ((array, *_arrays_of_numpy()), Contents._take_down_array),
        (random.SystemRandom, Contents._take_down_system),
        ((torch.Generator, random.Random, *_generators_of_numpy()), Contents._take_down_generator),
        (Iterator, Contents._take_down_iterator),
        (threading.local, Contents._take_down_local),
    )
    return next((way for kinds, way in ways if issubclass(kind, kinds)), _way_of_object(kind))


def _way_of_object(kind: type) -> _Way:
    is_left_alone = kind.__module__.partition(".")[0] in _LEFT_ALONE
    return _only_wraps if is_left_alone else Contents._take_down_object


def _only_wraps(_: Contents, value: object) -> Any:
    """Return what an object that is left alone is a wrapper of."""
    return (getattr(value, "__wrapped__", None),)


def _may_run(method: types.MethodType) -> bool:
    """Whether a layer may run what a method belongs to.

    Settings may hold methods of what trains the layer, as those of Megatron-LM do of its optimizer and of
    data parallelism. Their state changes while a step goes on, and is none of the layer's.
    """
    if isinstance(method.__self__, torch.nn.Module) and method.__name__ in _FORWARD:
        return True
    return not isinstance(method.__func__, types.FunctionType) or is_own(method.__func__)


def _arrays_of_numpy() -> tuple[type, ...]:
    """NumPy's array, if NumPy is loaded: no object is one if it is not."""
    numpy = sys.modules.get("numpy")
    return () if numpy is None else (numpy.ndarray,)


def _generators_of_numpy() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    return () if numpy is None else (numpy.random.RandomState, numpy.random.Generator)


def _generator_of(value: Any) -> Generator:
    """Return an object that draws random numbers as a source of them."""
    if isinstance(value, torch.Generator):
        return Generator(value.get_state, value.set_state)
    if isinstance(value, random.Random):
        return Generator(value.getstate, value.setstate)
    if hasattr(value, "get_state"):  # NumPy's old kind
        return Generator(value.get_state, value.set_state)
    bits = value.bit_generator
    return Generator(lambda: bits.state, lambda state: setattr(bits, "state", state))
