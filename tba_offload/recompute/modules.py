"""The modules of a layer and the objects that they and their code reach: what these hold is put back.

To look through all of that takes most of the time of taking down what a layer finds; to see that it has not
changed takes a fifth. So the runs of a layer share one look, as long as everything is there as it was.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from tba_offload.layers.guards import loaded
from tba_offload.layers.nested import MOST, TooManyError
from tba_offload.recompute.code import PLAIN, reach_of_class
from tba_offload.recompute.contents import UNSEEN, Contents
from tba_offload.recompute.same import Dictionaries, are_same
from tba_offload.recompute.stand_ins import has_graph, without_graph

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_SHARDED = (
    ("torch.distributed.fsdp", "FSDPModule"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
)
"""Modules and classes whose parameters come and go while their own forward runs."""

_INTERNAL = frozenset(nn.Module().__dict__) - {"training"}
"""Attributes of every module; its parameters, buffers and hooks are in containers among them."""

_HOOKED = ("_forward_hooks", "_forward_pre_hooks")
"""Attributes of every module with the functions that are called around its forward."""

_HOOKS = (
    *_HOOKED,
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"),
)
"""The same, and how these functions are called."""

_MISSING = object()


class _Found(NamedTuple):
    """A module, and what was found in its dictionaries.

    Attributes:
        attributes: Of ``__dict__``.
        buffers: Of its buffers.
        hooks: Of those with hooks, by name; ``None`` if it has none.
        is_wrapper: Whether its attributes are left alone.
    """

    module: nn.Module
    attributes: dict[str, Any]
    buffers: dict[str, Any]
    hooks: dict[str, dict[Any, Any]] | None
    is_wrapper: bool

    def attributes_now(self) -> dict[str, Any]:
        """Return the attributes that the module has now; the very ones that were found if it has these."""
        own = self.module.__dict__
        return self.attributes if are_same(own, self.attributes) else own.copy()

    def put_back(self, undo: Callable[..., object]) -> None:
        """Give the module what it had but for attributes; ``undo`` takes the calls that undo this."""
        module = self.module
        if self.buffers or module._buffers:
            undo(_put_all, module._buffers, module._buffers.copy())
            _put_all(module._buffers, self.buffers)
        if self.hooks is not None or _is_hooked(module):
            for name in _HOOKS:
                hooks = getattr(module, name)
                undo(_put_all, hooks, hooks.copy())
                _put_all(hooks, {} if self.hooks is None else self.hooks[name])


class Modules:
    """The modules of a layer, those that lie in its attributes and arguments, and what they hold.

    Args:
        layer: The layer.
        given: Modules in the arguments of its forward.

    Attributes:
        contents: What lies in attributes, and what the code of the layer reaches.
        unknown: What the layer reaches whose state cannot be put back; ``None`` if there is no such thing.
        is_shared: Whether other runs may have this too, once :meth:`are_as_found` says so.
    """

    __slots__ = (
        *("_buffers", "_dictionaries", "_found"),
        *("contents", "is_shared", "unknown"),
    )

    def __init__(self, layer: nn.Module, given: Sequence[nn.Module] = ()) -> None:
        self._found: list[_Found] = []
        self.contents = Contents(copies=True)
        self.unknown: str | None = None
        self.is_shared = not given
        self._take_down_all(layer, given)
        self.contents.end()
        self.unknown = self.unknown or self.contents.unknown
        self.is_shared = self.is_shared and self.unknown is None and self.contents.is_fixed
        if self.is_shared:
            self._note_dictionaries()

    def __iter__(self) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
        """Return the modules and their buffers, without graphs."""
        return ((found.module, found.buffers) for found in self._found)

    # ---- taken down ------------------------------------------------------------------------------

    def _take_down_all(self, layer: nn.Module, given: Sequence[nn.Module]) -> None:
        wrappers, taken = _wrappers(), set()
        waiting = deque([layer, *given])
        while waiting:
            known = len(self.contents.modules)
            root = waiting.popleft()
            if root is not layer and _contains(root, layer):
                self.is_shared = False
                continue  # the model, whose other layers have a turn of their own
            for module in _modules_of(root):
                if module not in taken:
                    taken.add(module)
                    self._take_down(module, is_wrapper=isinstance(module, wrappers))
            waiting.extend(self.contents.modules[known:])
            if len(taken) > MOST:
                self.unknown = UNSEEN
                return

    def _take_down(self, module: nn.Module, *, is_wrapper: bool) -> None:
        buffers = {name: without_graph(buffer) for name, buffer in module._buffers.items()}
        attributes = module.__dict__.copy()
        hooks = {name: attributes[name].copy() for name in _HOOKS} if _is_hooked(module) else None
        self._found.append(_Found(module, attributes, buffers, hooks, is_wrapper))
        if not is_wrapper:  # whose attributes are not the model's
            self._look_into(module, attributes)

    def _look_into(self, module: nn.Module, attributes: dict[str, Any]) -> None:
        try:
            for name, value in attributes.items():
                if type(value) in PLAIN or name in _INTERNAL:
                    continue
                if _is_view(value):
                    self.is_shared = False
                    attributes[name] = without_graph(value)
                else:  # a forward of the instance's own among them
                    attributes[name] = self.contents.add(name, value)
            self.contents.add_reach(reach_of_class(type(module)))
            for hook in _hooks_of(module):
                self.contents.add("a hook", hook)
        except TooManyError:
            self.unknown = UNSEEN

    # ---- compared --------------------------------------------------------------------------------

    def _note_dictionaries(self) -> None:
        holders = self.contents.holders
        containers = holders.dictionaries()
        for module, _, buffers, hooks, _ in self._found:
            containers += [(module._modules, module._modules.copy()), (module._buffers, buffers)]
            names = _HOOKED if hooks is None else _HOOKS
            containers += [(getattr(module, name), {} if hooks is None else hooks[name]) for name in names]
        modules = [(found.module, found.attributes) for found in self._found if not found.is_wrapper]
        self._dictionaries = Dictionaries(containers, holders.objects(), modules, left_out=_INTERNAL)
        self._buffers = [each for found in self._found for each in found.buffers.values() if each is not None]

    def are_as_found(self) -> bool:
        """Whether another look would find the same."""
        return (
            self.is_shared
            and self._dictionaries.hold_the_same()
            and self.contents.holders.are_as_found()
            and not any(map(has_graph, self._buffers))
        )

    # ---- put back --------------------------------------------------------------------------------

    def put_back(self, undo: Callable[..., object]) -> None:
        """Have the modules hold what they held; ``undo`` takes the calls that undo this.

        It also takes those that undo what is changed in them later.
        """
        if self.are_as_found():
            undo(self.put_back, lambda *_: None)
            return
        own = [found for found in self._found if not found.is_wrapper]
        now = [(found.module.__dict__, found.attributes_now()) for found in own]
        undo(_put_each, now)
        _put_each(
            (attributes, found.attributes)
            for found, (attributes, held) in zip(own, now, strict=True)
            if held is not found.attributes
        )
        for found in self._found:
            found.put_back(undo)
        self.contents.holders.put_back(undo)


def _own_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a module that are its own.

    Sharded data parallelism has views of gathered parameters among the others, and makes them anew.
    """
    return {
        name: value for name, value in attributes.items() if name not in _INTERNAL and not _is_view(value)
    }


def _is_view(value: Any) -> bool:
    return issubclass(type(value), torch.Tensor) and value._is_view()


def _put_each(wanted: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Make the attributes of modules those that are wanted."""
    for attributes, content in wanted:
        _put(attributes, content)


def _put(now: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Make a module's own attributes those that are wanted."""
    if are_same(now, wanted):
        return
    own, wanted = _own_attributes(now), _own_attributes(wanted)
    for name in own.keys() - wanted.keys():
        del now[name]
    for name, value in wanted.items():
        if own.get(name, _MISSING) is not value and not _is_view(now.get(name)):
            now[name] = value


def _put_all(owner: dict[Any, Any], wanted: dict[Any, Any]) -> None:
    if not are_same(owner, wanted):
        owner.clear()
        owner.update(wanted)


def _hooks_of(module: nn.Module) -> list[Callable[..., object]]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _modules_of(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a layer, without those whose parameters are gathered by a wrapper inside of it."""
    sharded = loaded(_SHARDED)
    waiting = [layer]
    while waiting:
        module = waiting.pop()
        yield module
        waiting += (
            child
            for child in module._modules.values()
            if child is not None and not isinstance(child, sharded)
        )


def _contains(module: nn.Module, layer: nn.Module) -> bool:
    return any(each is layer for each in module.modules())


def _wrappers() -> tuple[type, ...]:
    """Classes of modules that keep books of their own about a step; FSDP2's are the model's own modules."""
    return tuple(kind for kind in loaded(_SHARDED) if kind.__name__ == "FullyShardedDataParallel")
