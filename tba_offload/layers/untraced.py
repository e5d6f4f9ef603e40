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


def leave_alone(function: Callable[..., Any], *, with_calls: bool) -> bool:
    """Have the compiler skip a function.

    ``torch.compiler.disable`` would import the compiler, which takes seconds, for everybody.

    Args:
        function: The function.
        with_calls: Whether that goes for what it calls, too.

    Returns:
        Whether PyTorch knows such strategies; where it does not, the function is traced, as any other.
    """
    if not hasattr(eval_frame, "_FrameExecStrategy"):
        return False
    action = eval_frame._FrameAction
    strategy = eval_frame._FrameExecStrategy(action.SKIP, action.SKIP if with_calls else action.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return True


def hook(function: Function) -> Function:
    """Mark a function that autograd calls when a tensor is saved: neither it nor what it calls is traced.

    What the compiler leaves alone of a layer that it has come to runs with its hook into the interpreter on.
    """
    leave_alone(function, with_calls=True)
    return function


Tracer = Any
"""The compiler's hook into the interpreter, which is shown each call; ``None`` where nothing is compiled."""

_REASON = (
    "UnsupportedError: tba-offload is attached to this layer, and moves its activations when it runs. no "
    "graph can span an attached layer: leave out fullgraph=True, and each layer becomes a graph of its own, "
    "or compile the layers themselves (layer.compile()) before tba_offload.attach"
)


def not_traced(function: Function, *, nor_what_it_calls: bool = False) -> Function:
    """Mark a function that the compiler has to leave alone, as ``torch.compiler.disable`` does.

    Args:
        function: The function.
        nor_what_it_calls: Whether it has to leave alone what this calls, too; else that may be traced.
    """
    if leave_alone(function, with_calls=nor_what_it_calls):
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    return function


switch: Callable[[Tracer], Tracer] = eval_frame.set_eval_frame
"""Sets the hook of the calling thread; returns the one before. A frame of Python's would be shown to it."""
