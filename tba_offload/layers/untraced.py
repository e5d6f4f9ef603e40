"""Functions that ``torch.compile`` is not to trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from torch._C._dynamo import eval_frame

if TYPE_CHECKING:
    from collections.abc import Callable

Function = TypeVar("Function", bound="Callable[..., Any]")


def leave_alone(function: Callable[..., Any], *, with_calls: bool) -> bool:
    """Has the compiler skip a function.

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
