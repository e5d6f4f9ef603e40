"""Models that ``torch.compile`` traces: what stands in front of a layer is not traced, the layer itself is.

Where the compiler comes to an attached layer it ends its graph, and goes on when the layer has returned. In
between its hook into the interpreter is off, so that it does not look at the session, and on again for the
layer's own forward, which becomes a graph of its own. Recomputation in backward puts the same hook on: there
it is off, because it belongs to a thread and a call, and the operations one by one may give other bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from torch._C._dynamo import eval_frame

if TYPE_CHECKING:
    from collections.abc import Callable

Function = TypeVar("Function", bound="Callable[..., Any]")

Tracer = Any
"""The compiler's hook into the interpreter, which is shown each call; ``None`` where nothing is compiled."""

_REASON = (
    "UnsupportedError: tba-offload is attached to this layer, and moves its activations when it runs. no "
    "graph can span an attached layer: leave out fullgraph=True, and each layer becomes a graph of its own, "
    "or compile the layers themselves (layer.compile()) before tba_offload.attach"
)


def not_traced(function: Function) -> Function:
    """Marks a function that the compiler has to leave alone, as ``torch.compiler.disable`` does.

    That would import the compiler, which takes seconds, for everybody. Where PyTorch has no such strategies
    the function is traced, as any other.
    """
    if _leave_alone(function, "DEFAULT"):
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    return function


def hook(function: Function) -> Function:
    """Marks a function that autograd calls while a graph runs: neither it nor what it calls is traced.

    Before 2.13 PyTorch leaves its hook into the interpreter on there.
    """
    _leave_alone(function, "SKIP")
    return function


def _leave_alone(function: Callable[..., Any], those_it_calls: str) -> bool:
    """Has the compiler skip a function; whether PyTorch has such strategies."""
    if not hasattr(eval_frame, "_FrameExecStrategy"):
        return False
    action = eval_frame._FrameAction
    strategy = eval_frame._FrameExecStrategy(action.SKIP, getattr(action, those_it_calls))
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return True


switch: Callable[[Tracer], Tracer] = eval_frame.set_eval_frame
"""Sets the hook of the calling thread; returns the one before. A frame of Python's would be shown to it."""
