"""Models that ``torch.compile`` traces: what stands in front of a layer is not traced, the layer itself is.

Where the compiler comes to an attached layer it ends its graph, and goes on when the layer has returned. In
between its hook into the interpreter is off, so that it does not look at the session, and on again for the
layer's own forward, which becomes a graph of its own. Recomputation in backward puts the same hook on: there
it is off, because it belongs to a thread and a call, and the operations one by one may give other bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._C._dynamo import eval_frame

from tba_offload.layers.untraced import leave_alone

if TYPE_CHECKING:
    from collections.abc import Callable

    from tba_offload.layers.untraced import Function

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
