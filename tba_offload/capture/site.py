"""Where a session stands: in front of a layer's forward, and on no copy of the layer.

Where the compiler comes to an attached layer it ends its graph, and goes on when the layer has returned. In
between its hook into the interpreter is off, so that it does not look at the session, and on again for the
layer's own forward, which becomes a graph of its own. Recomputation in backward puts the same hook on: there
it is off, because it belongs to a thread and a call, and the operations one by one may give other bits.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from tba_offload.capture.trace import ScopeKey
from tba_offload.errors import SessionError, warn
from tba_offload.torch_private import CALLS, is_compiled, is_recomputation, not_traced, switch_tracer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import FrameType

    from torch import nn

    from tba_offload.layers.find import Layer

Tracer = Any
"""The compiler's hook into the interpreter, which is shown each call; ``None`` where nothing is compiled."""

_COPIES = (
    "copies of layers that share their attributes, as nn.DataParallel makes them, run as they are: nothing "
    "of them travels. to train on several devices use DistributedDataParallel, one process for each"
)


Run = Callable[["Site", tuple[object, ...], dict[str, object]], object]
"""Runs a layer in the place of its own forward."""


class InstalledHook:
    """A hook on a module, or a function among its attributes, that belongs to one session.

    Attributes:
        replaced: The attribute that stood in its place; ``None`` for none.
    """

    replaced: object = None

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        # Modules that copy themselves by methods of their own get a function of Python's that does nothing.
        return getattr, (nullcontext(), "__exit__")


def copy_without_hooks(modules: Iterable[nn.Module]) -> None:
    """Have copies and pickles of modules come without any :class:`InstalledHook`.

    A file that was saved from an attached model is that of the bare model: ``torch.load`` needs no other safe
    globals, and no package. Python's registry of reducers is by class, and tells the reducer which object is
    copied, also where copies share the attributes of another module. Classes stay in the registry: a module
    without such hooks is copied as ever.
    """
    for kind in set(map(type, modules)) - copyreg.dispatch_table.keys():
        copyreg.pickle(kind, _reduce_without_hooks)


def _reduce_without_hooks(module: nn.Module) -> Any:
    reduced = module.__reduce_ex__(2)
    if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    hooks = {name: held for name, held in reduced[2].items() if type(held) is OrderedDict and "hooks" in name}
    ours = {
        key
        for held in hooks.values()
        for key, hook in held.items()
        if isinstance(getattr(hook, "hook", hook), InstalledHook)  # PyTorch wraps some
    }
    state: dict[str, object] = {}
    for name, value in reduced[2].items():
        if name in hooks and not ours.isdisjoint(value):  # there are dictionaries of the keys of hooks, too
            state[name] = OrderedDict((key, hook) for key, hook in value.items() if key not in ours)
        elif not isinstance(value, InstalledHook):
            state[name] = value
        elif value.replaced is not None:
            state[name] = value.replaced
    return (*reduced[:2], state, *reduced[3:])


class Site(InstalledHook):
    """The callable that replaces a layer's forward while a session is open.

    A callable rather than module hooks, because its ``finally`` also runs on KeyboardInterrupt. Copies and
    pickles of the layer get the layer's own forward: a session belongs to one model. A copy that shares the
    layer's attributes, as ``nn.DataParallel`` and meta-learning make them, has this object too, and only its
    caller tells.

    Args:
        layer: The layer.
        index: Its place among those of the session.

    Attributes:
        own: Its own forward.
        runs: How often it ran in this step.
        waiting: How many of these runs wait for their backward.
        tracer: What compiles the model that called it last.
    """

    def __init__(self, layer: Layer, index: int) -> None:
        self.own: Callable[..., Any] = layer.module.forward
        functools.update_wrapper(self, self.own)
        self.layer, self.index = layer, index
        self.runs = self.waiting = 0
        self.tracer: Tracer = None

    def install(self, run: Run) -> None:
        """Have calls of the layer go through ``run``.

        Args:
            run: Called with the site and the layer's arguments, by position and by name; returns its output.
        """
        self._run = run
        self.layer.module.forward = self
        copy_without_hooks([self.layer.module])

    def uninstall(self) -> None:
        """Put the layer's own forward back: the class's method, or what stood on the instance."""
        module = self.layer.module
        if module.forward is not self:
            return  # wrapped since by another library; ours stays below and passes everything through
        if self.is_method:
            del module.forward
        else:
            module.forward = self.own

    @not_traced
    def __call__(self, /, *args: object, **kwargs: object) -> object:
        """Run the layer as the session says."""
        tracer = switch_tracer(None)
        try:
            copied = self._copy_in(sys._getframe(1))
            if copied is not None:
                warn(_COPIES)
                switch_tracer(tracer)
                return type(copied).forward(copied, *args, **kwargs)
            if tracer is not self.tracer and (tracer is not None or not is_recomputation()):
                self.tracer = tracer  # in backward nothing compiles the caller
            return self._run(self, args, kwargs)
        finally:
            switch_tracer(tracer)

    def _copy_in(self, caller: FrameType) -> nn.Module | None:
        """Return the copy of the layer whose forward a frame calls; ``None`` for the layer itself."""
        called, layer = None, self.layer.module
        if caller.f_code.co_filename == CALLS:
            called = caller.f_locals.get("self")
        is_copy = called is not layer and type(called) is type(layer) and self.is_method
        return called if is_copy else None

    def next_run(self, micro_batch: Callable[[nn.Module], int | None] | None) -> ScopeKey:
        """Begin a run of the layer, and return its key.

        Args:
            micro_batch: Tells its number, where the framework has one; otherwise runs are counted.
        """
        layer, count = self.layer, self.runs
        told = micro_batch(layer.module) if micro_batch is not None else None
        self.runs += 1
        return ScopeKey(layer.id.number, count if told is None else told, layer.chunk, layer.id.name)

    def forward(self, /, *args: object, **kwargs: object) -> object:
        """Run the layer's own forward, compiled if its caller is, and so in backward too."""
        if self.tracer is None:
            return self.own(*args, **kwargs)
        before = switch_tracer(self.tracer)
        try:
            return self.own(*args, **kwargs)
        finally:
            switch_tracer(before)

    @property
    def is_compiled(self) -> bool:
        """Whether the layer runs as a graph of the compiler."""
        return self.tracer is not None or is_compiled(self.own)

    @property
    def is_method(self) -> bool:
        """Whether the layer's forward is its class's, not something that stood on the instance."""
        return getattr(self.own, "__self__", None) is self.layer.module

    @property
    def replaced(self) -> object:  # type: ignore[override]
        """The forward that stood on the instance."""
        return None if self.is_method else self.own

    def __deepcopy__(self, memo: dict[int, Any]) -> object:
        return copy.deepcopy(self.own, memo)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return getattr, (self.layer.module, "forward")


def check_unattached(layers: Sequence[Layer]) -> None:
    """Check that no session stands in front of one of the layers.

    Raises:
        SessionError: Names the layer.
    """
    for layer in layers:
        if isinstance(layer.module.forward, Site):
            raise SessionError(
                f"{layer.id} is attached already; close that session first: "
                "tba_offload.session_of(model).close()"
            )
