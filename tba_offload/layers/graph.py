"""A layer in autograd's graph, and functions that the compiler leaves alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._C._dynamo import eval_frame

from tba_offload.errors import SavedTensorModifiedError
from tba_offload.layers.nested import TooManyError, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.autograd.graph import Node

    Function = TypeVar("Function", bound=Callable[..., Any])

latest_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number of the node of autograd that the calling thread made last, plus one."""

keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the backward pass of the calling thread leaves the graph alive; true outside of one, too."""


push_hooks: Callable[..., None] = torch._C._autograd._push_saved_tensors_default_hooks
"""Has tensors saved by pack and unpack on the calling thread: ``saved_tensors_hooks`` without its frames."""

pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
"""Takes the innermost hooks of the calling thread off."""


def is_recomputation() -> bool:
    """Return True if the calling forward runs inside a backward pass.

    Holds for the checkpoints of PyTorch and Megatron alike: what is saved then is used at once and stays.
    """
    return torch._C._current_graph_task_id() != -1


def first_differentiable(output: object) -> torch.Tensor | None:
    """Return the first tensor of a layer's output through which gradients will come back."""
    first = output[0] if isinstance(output, tuple) and output else output
    if isinstance(first, torch.Tensor) and first.requires_grad:  # nearly always: at once
        return first
    try:
        return next((tensor for tensor in tensors_in(output) if tensor.requires_grad), None)
    except TooManyError:
        return None


def nearest_nodes(root: Node, count: int, *, after: int) -> list[Node]:
    """Return the first nodes of a graph of autograd on the way from its root, breadth first.

    Nodes that accumulate gradients are left out: they belong to parameters. Where a loop holds its loss until
    the next one, they are part of the next graph too.

    Args:
        root: Where to begin.
        count: Most nodes.
        after: Only those that were made later than the one of this number in autograd's sequence.
    """
    found, seen = [root], {root}
    for node in found:
        for following, _ in node.next_functions:
            if following is None or following in seen or len(found) >= count:
                continue
            if following._sequence_nr() > after and not hasattr(following, "variable"):
                seen.add(following)
                found.append(following)
    return found


def hooks_on_top() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """Pack and unpack of the innermost hooks of the calling thread; ``None`` if there are none."""
    autograd: Any = torch._C._autograd
    return autograd._top_saved_tensors_default_hooks(True)  # type: ignore[no-any-return]  # noqa: FBT003


def check_version(witness: torch.Tensor, version: int, what: object) -> None:
    """Check that a saved tensor has not changed since.

    Raises:
        SavedTensorModifiedError: It was changed in place.
    """
    if witness._version != version:
        raise SavedTensorModifiedError(
            f"a tensor that backward needs was changed in place after it was saved ({what}): it is at "
            f"version {witness._version}, saved was version {version}; change a copy instead, or find the "
            "operation with torch.autograd.set_detect_anomaly(True)"
        )


# Functions that the compiler leaves alone


_REASON = (
    "UnsupportedError: tba-offload is attached to this layer, and moves its activations when it runs. no "
    "graph can span an attached layer: leave out fullgraph=True, and each layer becomes a graph of its own, "
    "or compile the layers themselves (layer.compile()) before tba_offload.attach"
)


def untraced(function: Function, *, with_calls: bool = True) -> Function:
    """Have the compiler skip a function that autograd calls, and what the function calls.

    ``torch.compiler.disable`` would import the compiler, which takes seconds, for everybody. Where PyTorch
    knows no such strategies, the function is traced as any other.

    Args:
        function: The function.
        with_calls: Whether what it calls is skipped too.
    """
    if hasattr(eval_frame, "_FrameExecStrategy"):
        skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
        strategy = eval_frame._FrameExecStrategy(skip, skip if with_calls else default)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def not_traced(function: Function, *, nor_what_it_calls: bool = False) -> Function:
    """Have the compiler end its graph at a function, as ``torch.compiler.disable`` does.

    Args:
        function: The function.
        nor_what_it_calls: Whether what it calls is skipped too; else that may be traced.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    return untraced(function, with_calls=nor_what_it_calls)
