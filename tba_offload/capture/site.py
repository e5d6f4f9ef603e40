"""The callable that replaces the forward of an attached layer.

``torch.compile`` ends its graph at an attached layer, and starts a new graph after the layer returns. The
layer's own forward becomes a separate graph. The tracer, which is the compiler's hook into the Python
interpreter, is off in the session's code and on in the layer's own forward. Backward runs without a tracer.
If backward recomputes a layer, the tracer of the first forward is set again, because compiled and uncompiled
forwards may give different bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.capture.trace import ScopeKey
from tba_offload.errors import SessionError, warn
from tba_offload.torch_private import CALLS, is_compiled, is_recomputation, not_traced, switch_tracer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from torch import nn

    from tba_offload.layers.find import Layer, Switch

Tracer = Any
"""The compiler's hook into the Python interpreter; ``None`` if nothing is compiled."""

_COPIES = "copies of layers are not offloaded, and nn.DataParallel makes copies. Use DistributedDataParallel"


Run = Callable[["Site", tuple[object, ...], dict[str, object]], object]
"""A function that runs a layer in place of the layer's own forward."""


class Site:
    """The callable that replaces a layer's forward while a session is open.

    A module hook would not run after a ``KeyboardInterrupt``, but the ``finally`` block of a replaced forward
    does. A session belongs to one model, so copies and pickles of the layer get the layer's own forward.
    Copies by ``nn.DataParallel`` share the ``Site`` of the layer. Only the calling frame shows whether the
    layer or a copy is called.

    Args:
        layer: The layer.
        index: Index of the layer in the session.

    Attributes:
        own: The layer's own forward.
        runs: Number of forwards of the layer in this step.
        waiting: Number of forwards of the layer in this step whose backward has not started.
        tracer: The tracer in the last call of the layer.
        switch: The switch that enables the framework's own checkpointing of this layer; ``None`` without
            such a switch.
        checkpoint: The framework's own checkpoint function for this layer; ``None`` if the framework does not
            recompute the layer.
    """

    def __init__(self, layer: Layer, index: int) -> None:
        self.own: Callable[..., Any] = layer.module.forward
        update_wrapper(self, self.own)
        self.layer, self.index = layer, index
        self.runs = self.waiting = 0
        self.tracer: Tracer = None
        self.checkpoint: Callable[..., object] | None = None
        self.switch: Switch | None = None

    def install(self, run: Run) -> None:
        """Replace the layer's forward by ``run``.

        Args:
            run: Function that runs the layer. ``run`` gets this ``Site``, and the layer's positional and
                keyword arguments.
        """
        self._run = run
        self.layer.module.forward = self

    def uninstall(self) -> None:
        """Restore the layer's own forward, which is a method of its class or an attribute of the layer."""
        module = self.layer.module
        if module.forward is not self:
            return  # another library has wrapped this object: stay inside the wrapper and pass calls through
        if self.is_method:
            del module.forward
        else:
            module.forward = self.own

    @not_traced
    def __call__(self, /, *args: object, **kwargs: object) -> object:
        """Run the layer through the session."""
        tracer = switch_tracer(None)
        try:
            copied = self._copy_in(sys._getframe(1))
            if copied is not None:
                warn(_COPIES)
                switch_tracer(tracer)
                return self.run_plainly(partial(type(copied).forward, copied), args, kwargs)
            if tracer is not self.tracer and (tracer is not None or not is_recomputation()):
                self.tracer = tracer  # recomputation is never called from compiled code
            return self._run(self, args, kwargs)
        finally:
            switch_tracer(tracer)

    def _copy_in(self, caller: FrameType) -> nn.Module | None:
        called = caller.f_locals.get("self") if caller.f_code.co_filename == CALLS else None
        layer = self.layer.module
        is_copy = called is not layer and type(called) is type(layer) and self.is_method
        return called if is_copy else None

    def next_run(self, micro_batch: Callable[[nn.Module], int | None] | None) -> ScopeKey:
        """Start a run of the layer, and return its key.

        Args:
            micro_batch: Function that takes the layer and returns the number of the micro-batch. If
                ``micro_batch`` is ``None``, the runs of the layer are counted instead.
        """
        layer, count = self.layer, self.runs
        number = micro_batch(layer.module) if micro_batch is not None else None
        self.runs += 1
        return ScopeKey(layer.id.number, count if number is None else number, layer.chunk, layer.id.name)

    def forward(self, /, *args: object, **kwargs: object) -> object:
        """Run the layer's own forward with the tracer of the layer's last call."""
        if self.switch is not None:  # the program may have switched checkpointing on again
            self.switch.set_aside()
        if self.tracer is None:
            return self.own(*args, **kwargs)
        before = switch_tracer(self.tracer)
        try:
            return self.own(*args, **kwargs)
        finally:
            switch_tracer(before)

    def run_plainly(self, forward: Callable[..., object], args: Sequence[object], kwargs: Any) -> object:
        """Run a forward inside the framework's own checkpoint function, if the layer has one.

        Reentrant checkpoints need tensors as positional arguments, so tensors in keyword arguments are passed
        by position.
        """
        if self.checkpoint is None or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]

        def run(*given: object) -> object:
            named = zip(names, given[len(args) :], strict=True)
            return forward(*given[: len(args)], **{**kwargs, **dict(named)})

        return self.checkpoint(run, *args, *(kwargs[name] for name in names))

    @property
    def is_compiled(self) -> bool:
        """Whether the layer runs as a compiled graph."""
        return self.tracer is not None or is_compiled(self.own)

    @property
    def is_method(self) -> bool:
        """Whether the layer's forward is the method of its class, and not an attribute of the instance."""
        return getattr(self.own, "__self__", None) is self.layer.module

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (getattr, (self.layer.module, "forward")) if self.is_method else (partial, (self.own,))


def check_unattached(layers: Sequence[Layer]) -> None:
    """Check that none of the layers is attached to a session.

    Raises:
        SessionError: A layer is already attached.
    """
    for layer in layers:
        if isinstance(layer.module.forward, Site):
            remedy = "Close that session first: tba_offload.session_of(model).close()"
            raise SessionError(f"{layer.id} is already attached to a session. {remedy}")
