"""Every private name of PyTorch that the package uses, and what is done with it.

No other file names one, beside attributes of tensors, storages and modules that every release has had, such
as ``_version`` and ``_parameters``. All are in use with PyTorch 2.10 to 2.13; where releases differ, the
function says how. ``tests/unit/test_torch_private.py`` tries each with the PyTorch that is installed.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from functools import partial
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch._C._dynamo import eval_frame
from torch.utils import _python_dispatch, _pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.autograd.graph import Node

    Function = TypeVar("Function", bound=Callable[..., Any])

_C: Any = torch._C
_autograd: Any = torch._C._autograd

# ---- autograd --------------------------------------------------------------------------------------

latest_node: Callable[[], int] = _autograd._get_sequence_nr
"""Return the number of the node of autograd that the calling thread made last, plus one."""

keeps_graph: Callable[[], bool] = _autograd._get_current_graph_task_keep_graph
"""Return whether the backward pass of the calling thread leaves the graph alive; true outside of one, too."""

push_hooks: Callable[..., None] = _autograd._push_saved_tensors_default_hooks
"""Save tensors by pack and unpack on the calling thread: ``saved_tensors_hooks`` without its frames."""

pop_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks
"""Take the innermost hooks of the calling thread off."""

hooks_are_allowed: Callable[[], bool] = _autograd._saved_tensors_hooks_is_enabled
"""Return whether hooks may be pushed; under a transform of ``torch.func`` they may not."""

hooks_on_top: Callable[[], tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None]
hooks_on_top = partial(_autograd._top_saved_tensors_default_hooks, True)  # noqa: FBT003 - positional in C++
"""Return pack and unpack of the innermost hooks of the calling thread; ``None`` if there are none."""

current_backward: Callable[[], int] = _C._current_graph_task_id
"""Return the number of the backward pass that the calling thread runs; -1 outside of one."""

_engine: Any = torch.autograd.Variable._execution_engine
call_after_backward: Callable[[Callable[[], object]], None] = _engine.queue_callback
"""Call a function when the backward pass of the calling thread has ended."""


def is_recomputation() -> bool:
    """Return True if the calling forward runs inside a backward pass.

    Holds for the checkpoints of PyTorch and Megatron alike: what is saved then is used at once and stays.
    """
    return current_backward() != -1


number_of: Callable[[Node], int] = methodcaller("_sequence_nr")
"""Return the number of a node of autograd, in the order in which a thread made them."""


def is_transformed() -> bool:
    """Return whether the calling code runs inside a transform of ``torch.func``."""
    return _C._functorch.peek_interpreter_stack() is not None


is_transform_wrapper: Callable[[torch.Tensor], bool] = _C._functorch.is_functorch_wrapped_tensor
"""Return whether a tensor stands for another one inside a transform; it has no storage."""

# ---- tensors ---------------------------------------------------------------------------------------

factories: Any = _C._VariableFunctions
"""Functions of ``torch`` that no program has replaced by its own."""

without_subclasses: Callable[[], contextlib.AbstractContextManager[None]] = _C.DisableTorchFunctionSubclass
"""Return a block in which subclasses of tensors are taken for plain ones."""


def shares_version(probe: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return True if two tensors have one version counter, so that a change of one is seen at the other.

    Tensors that share a storage need not share the counter: ``.data`` and ``from_numpy`` give a new one.
    PyTorch offers no question for that, so the counter is moved and moved back. No line of Python is run in
    between, where another thread might take the tensor for one that was changed.
    """
    version = probe._version
    if tensor._version != version:
        return False
    _, found, _ = map(_call, (
        partial(_move_version, (probe,), (version + 1,)),
        partial(_version_of, tensor),
        partial(_move_version, (probe,), (version,)),
    ))  # fmt: skip
    return bool(found != version)


_call, _version_of = methodcaller("__call__"), attrgetter("_version")
_move_version = _autograd._unsafe_set_version_counter


def users_of(storage: torch.UntypedStorage) -> int:
    """Return how many tensors have the memory of a storage."""
    return int(_C._storage_Use_Count(storage._cdata))


TorchDispatchMode = _python_dispatch.TorchDispatchMode
tree_leaves = _pytree.tree_leaves

# ---- dispatcher ------------------------------------------------------------------------------------

KeySet = _C.DispatchKeySet
AFTER_BACKEND_SELECT = _C._dispatch_keyset_full_after(_C.DispatchKey.BackendSelect)
"""Keys of the dispatcher below the one at which a function can be put in front of any operation."""

sharing_versions = partial(_C._SetExcludeDispatchKeyGuard, _C.DispatchKey.ADInplaceOrView, False)  # noqa: FBT003
"""Return a block in which views share the version counter of their base, as they do above autograd."""

# ---- compiler --------------------------------------------------------------------------------------

CALLS = nn.Module._call_impl.__code__.co_filename
"""File of the function that calls the forward of a module."""

switch_tracer: Callable[[Any], Any] = eval_frame.set_eval_frame
"""Set the tracer of the calling thread; return the one before. A frame of Python's would be shown to it."""

_REASON = (
    "UnsupportedError: tba-offload is attached to this layer, and moves its activations when it runs. no "
    "graph can span an attached layer: leave out fullgraph=True, and each layer becomes a graph of its own, "
    "or compile the layers themselves (layer.compile()) before tba_offload.attach"
)


def untraced(function: Function, *, with_calls: bool = True) -> Function:
    """Have the compiler skip a function that autograd calls, and what the function calls.

    ``torch.compiler.disable`` would import the compiler, which takes seconds, for everybody.

    Args:
        function: The function.
        with_calls: Whether what it calls is skipped too.
    """
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


def is_compiled(forward: object) -> bool:
    """Return whether the compiler has made a function."""
    return hasattr(forward, "_torchdynamo_orig_callable")


def load_compiler() -> None:
    """Import what a first checkpoint would import inside a step: 70 MiB."""
    import torch._dynamo  # noqa: F401


def is_checkpoint_wrapper(module: nn.Module) -> bool:
    """Return whether PyTorch runs the forward of a module again in backward."""
    wrappers = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    return wrappers is not None and isinstance(module, wrappers.CheckpointWrapper)


def graph_node(device: torch.device) -> object:
    """Return the node that Inductor's trees of CUDA graphs are at; ``None`` if there is none."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return None
    try:
        manager = trees.get_manager(device.index, create_if_none_exists=False)
    except AssertionError:  # up to PyTorch 2.11, on a thread that has none although others have
        return None
    return None if manager is None else manager.current_node


# ---- functions of PyTorch that are wrapped while a session is open -------------------------------------


_guarded: weakref.WeakSet[Any] = weakref.WeakSet()
_resize = torch.UntypedStorage.resize_
_disable = torch.autograd.graph.disable_saved_tensors_hooks


@functools.wraps(_resize)
def _guarded_resize(storage: torch.UntypedStorage, size: int) -> object:
    """Ask sessions first: Megatron and FSDP empty a storage, and fill the same one again before backward.

    Holding a reference does not prevent that, so a write that is queued or running would read freed memory.
    """
    for each in list(_guarded):
        each.protect(storage)
    return _resize(storage, size)


@contextlib.contextmanager
def _disable_without_ours(error_message: str) -> Iterator[None]:
    """Take our hooks off meanwhile: transforms of ``torch.func`` raise if any are active where they start."""
    top, is_aside = hooks_on_top(), False
    try:
        if top is not None and getattr(getattr(top[0], "__self__", None), "is_of_tba_offload", False):
            pop_hooks()
            is_aside = True
        with _disable(error_message):
            yield
    finally:
        if is_aside and top is not None:
            push_hooks(*top)


def watch(capture: Any) -> None:
    """Call ``capture.protect`` before a storage is resized, and have transforms in its layers work."""
    _guarded.add(capture)
    torch.UntypedStorage.resize_ = _guarded_resize  # type: ignore[method-assign,assignment]
    torch.autograd.graph.disable_saved_tensors_hooks = _disable_without_ours


def unwatch(capture: Any) -> None:
    """End :func:`watch`; with the last one PyTorch's own functions are back."""
    _guarded.discard(capture)
    if not _guarded:
        torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
        torch.autograd.graph.disable_saved_tensors_hooks = _disable
