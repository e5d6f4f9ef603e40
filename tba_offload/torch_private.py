"""All private names of PyTorch that tba-offload uses, except attributes that all releases have.

All names in this module exist in PyTorch 2.10 to 2.13. Comments describe differences between releases.
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
"""Return the number of the last autograd node that the calling thread created, plus one."""

keeps_graph: Callable[[], bool] = _autograd._get_current_graph_task_keep_graph
"""Return True if the calling thread's backward pass retains its graph, or if no backward pass runs."""

push_hooks: Callable[..., None] = _autograd._push_saved_tensors_default_hooks
"""Push pack and unpack hooks on the calling thread, as ``saved_tensors_hooks`` does, but without adding
Python frames."""

pop_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks
"""Pop the innermost hooks of the calling thread."""

hooks_are_allowed: Callable[[], bool] = _autograd._saved_tensors_hooks_is_enabled
"""Return True if saved-tensor hooks may be pushed. Transforms of ``torch.func`` forbid these hooks."""

hooks_on_top: Callable[[], tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None]
hooks_on_top = partial(_autograd._top_saved_tensors_default_hooks, True)  # noqa: FBT003 - positional in C++
"""Return the innermost pack and unpack hooks of the calling thread; ``None`` if there are none."""

current_backward: Callable[[], int] = _C._current_graph_task_id
"""Return the number of the calling thread's backward pass; -1 if no backward pass runs."""

_engine: Any = torch.autograd.Variable._execution_engine
call_after_backward: Callable[[Callable[[], object]], None] = _engine.queue_callback
"""Call a function at the end of the calling thread's backward pass."""


def is_recomputation() -> bool:
    """Return True if the calling forward runs inside a backward pass, as in activation checkpointing.

    Backward uses the recomputed tensors immediately, so these tensors are not offloaded.
    """
    return current_backward() != -1


number_of: Callable[[Node], int] = methodcaller("_sequence_nr")
"""Return the sequence number of an autograd node. Later nodes of the same thread have higher numbers."""


def is_transformed() -> bool:
    """Return True if the calling code runs inside a transform of ``torch.func``."""
    return _C._functorch.peek_interpreter_stack() is not None


is_transform_wrapper: Callable[[torch.Tensor], bool] = _C._functorch.is_functorch_wrapped_tensor
"""Return True if a tensor is a wrapper inside a transform of ``torch.func``. Wrappers have no storage."""

# ---- tensors ---------------------------------------------------------------------------------------

factories: Any = _C._VariableFunctions
"""PyTorch's own C++ functions, also if a program has replaced a function such as ``torch.empty``."""

without_subclasses: Callable[[], contextlib.AbstractContextManager[None]] = _C.DisableTorchFunctionSubclass
"""Return a context manager under which tensor subclasses are treated as plain tensors."""


def shares_version(probe: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return True if two tensors share a version counter.

    Tensors that share a storage may have different version counters, because ``.data`` and ``from_numpy``
    create a new counter. This function increases the version of ``probe``, reads the version of ``tensor``,
    and restores the version of ``probe``. Only C code runs between these operations, so no other thread sees
    the changed version.
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
    """Return the number of tensors that use the memory of a storage."""
    return int(_C._storage_Use_Count(storage._cdata))


_allow_uses = getattr(
    _C, "_clear_storage_data_ptr_access_error_msg", None
)  # older releases cannot resize then
_forbid_uses: Any = _allow_uses and _C._set_storage_data_ptr_access_error_msg


def resize(storage: torch.UntypedStorage, nbytes: int, error: str) -> None:
    """Resize a storage. While a storage has 0 bytes, uses of its tensors raise a ``RuntimeError``.

    In PyTorch's builds without CUDA, and in old releases, a use of a storage with 0 bytes can crash instead.

    Args:
        storage: The storage.
        nbytes: The new size of the storage in bytes.
        error: Text of the error.
    """
    if _allow_uses:
        _allow_uses(storage._cdata)
    storage.resize_(nbytes)
    if _forbid_uses and not nbytes:
        _forbid_uses(storage._cdata, error)


TorchDispatchMode = _python_dispatch.TorchDispatchMode
tree_leaves, tree_map = _pytree.tree_leaves, _pytree.tree_map


def tensors_without_data() -> Any:
    """Return a context manager under which new tensors have a shape, no memory, and the address 0."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # the import takes half a second

    return FakeTensorMode(allow_non_fake_inputs=True)


# ---- dispatcher ------------------------------------------------------------------------------------

KeySet = _C.DispatchKeySet
AFTER_BACKEND_SELECT = _C._dispatch_keyset_full_after(_C.DispatchKey.BackendSelect)
"""The dispatch keys that follow ``BackendSelect``. A function that is registered at ``BackendSelect`` calls
the original operation with these keys."""

_NAME = "TESTING_ONLY_GenericWrapper"
_UNREADABLE = KeySet(_C._dispatch_key_parse(_NAME))  # no tensor of PyTorch has this key
_library: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]

without_dispatch = partial(_C._ExcludeDispatchKeyGuard, _UNREADABLE)
"""Return a context manager under which operations may be called with unreadable tensors."""


class _Unreadable(torch.Tensor):
    __torch_dispatch__: Any = torch.Tensor.__torch_function__  # required, but never called


def unreadable(like: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the metadata of another tensor, but without bytes.

    After ``tensor.data = unreadable(tensor)``, all operations on ``tensor`` call the function of
    :func:`call_for_unreadable`, also operations of C++ code or TorchScript. PyTorch does not allow the
    assignment on devices of ``PrivateUse1``. On these devices, the tensor has one element with all bits set.
    """
    tensor: Any = torch.Tensor
    made: torch.Tensor = tensor._make_wrapper_subclass(
        *(_Unreadable, like.shape, like.stride()),
        dtype=like.dtype, device=like.device, storage_size=0, _extra_dispatch_keys=_UNREADABLE,
    )  # fmt: skip
    with without_dispatch():
        is_allowed = factories._has_compatible_shallow_copy_type(like, made)
    if not is_allowed:
        bits = torch.full((like.itemsize,), 255, dtype=torch.uint8, device=like.device)
        return bits.view(like.dtype).expand(like.shape)
    _C._set_throw_on_mutable_data_ptr(made)
    return made


def call_for_unreadable(function: Callable[..., Any]) -> None:
    """Call ``function(operation, *args, **kwargs)`` instead of operations with unreadable tensors."""
    _library.fallback(function, _NAME)


sharing_versions = partial(_C._SetExcludeDispatchKeyGuard, _C.DispatchKey.ADInplaceOrView, False)  # noqa: FBT003
"""Return a context manager under which a view shares the version counter of its base. Inside an operation
that autograd has dispatched, views would otherwise get their own version counters."""

# ---- compiler --------------------------------------------------------------------------------------

CALLS = nn.Module._call_impl.__code__.co_filename
"""Source file of ``torch.nn.Module``. A Python frame of this file may be a call of a module's forward."""

switch_tracer: Callable[[Any], Any] = eval_frame.set_eval_frame
"""Set the calling thread's compiler callback, and return the previous callback. The function is written in C,
because the compiler would trace a Python function."""

_REASON = (
    "UnsupportedError: tba-offload is attached to this layer, and no graph can span an attached layer. Omit "
    "fullgraph=True, so that each layer becomes a separate graph, or compile each layer (layer.compile()) "
    "before tba_offload.attach"
)


def untraced(function: Function, *, with_calls: bool = True) -> Function:
    """Make the compiler skip a function, and by default all functions that this function calls.

    ``torch.compiler.disable`` would import the compiler, which takes seconds even if the program compiles
    nothing.

    Args:
        function: The function to skip.
        with_calls: Whether the functions that ``function`` calls are skipped too.
    """
    skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
    strategy = eval_frame._FrameExecStrategy(skip, skip if with_calls else default)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def not_traced(function: Function, *, nor_what_it_calls: bool = False) -> Function:
    """Make the compiler end its graph at a function, as ``torch.compiler.disable`` does.

    Args:
        function: The function at which the graph ends.
        nor_what_it_calls: Whether the functions that ``function`` calls are skipped too. By default, the
            compiler may trace these functions.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    return untraced(function, with_calls=nor_what_it_calls)


def is_compiled(forward: object) -> bool:
    """Return True if the compiler created the function ``forward``."""
    return hasattr(forward, "_torchdynamo_orig_callable")


def load_compiler() -> None:
    """Import the compiler (70 MiB) before the first step, and not during the first recomputation."""
    import torch._dynamo  # noqa: F401


def is_checkpoint_wrapper(module: nn.Module) -> bool:
    """Return True if a module is a ``CheckpointWrapper``, which runs its forward again in backward."""
    wrappers = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    return wrappers is not None and isinstance(module, wrappers.CheckpointWrapper)


def save_arguments_again(hooks: contextlib.AbstractContextManager[object]) -> None:
    """Save the arguments of the innermost running ``torch.utils.checkpoint`` again, inside ``hooks``.

    Only positional arguments are saved again, once for each call of ``checkpoint``. This function does
    nothing before PyTorch 2.13, or if ``checkpoint`` runs inside other saved-tensor hooks, which have already
    received the arguments.
    """
    top: Any = hooks_on_top()
    cells = top[0].__closure__ if top and top[0].__module__ == "torch.utils.checkpoint" else ()
    frame = next((each.cell_contents for each in cells if hasattr(each.cell_contents, "save_inputs")), None)
    if frame is None or hasattr(frame, "is_of_tba_offload"):
        return
    frame.is_of_tba_offload = True
    pop_hooks()
    try:
        if hooks_on_top() is None:
            with hooks:
                frame.save_inputs(*frame.get_inputs())
    finally:
        push_hooks(*top)


def graph_node(device: torch.device) -> object:
    """Return the current node of Inductor's CUDA graph trees; ``None`` if there is none."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return None
    try:
        manager = trees.get_manager(device.index, create_if_none_exists=False)
    except AssertionError:  # up to PyTorch 2.11, if only other threads have a manager
        return None
    return None if manager is None else manager.current_node


# ---- functions of PyTorch that are replaced while a session is open ------------------------------------


_guarded: weakref.WeakSet[Any] = weakref.WeakSet()
_resize = torch.UntypedStorage.resize_
_disable = torch.autograd.graph.disable_saved_tensors_hooks


@functools.wraps(_resize)
def _guarded_resize(storage: torch.UntypedStorage, size: int) -> object:
    """Notify open sessions, then resize a storage.

    Megatron and FSDP resize storages to 0 bytes, even while a session writes the storage to a drive. Without
    the notice, the session would read freed memory.
    """
    for each in list(_guarded):
        each.protect(storage)
    return _resize(storage, size)


@contextlib.contextmanager
def _disable_without_ours(error_message: str) -> Iterator[None]:
    """Remove tba-offload's saved-tensor hooks for a ``with`` block, because ``torch.func`` forbids hooks."""
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
    """Replace two functions of PyTorch while a session is open.

    PyTorch then calls ``capture.protect`` before a storage is resized, and transforms of ``torch.func`` work
    in attached layers.

    Args:
        capture: The :class:`~tba_offload.capture.hooks.Capture` of the session.
    """
    _guarded.add(capture)
    torch.UntypedStorage.resize_ = _guarded_resize  # type: ignore[method-assign,assignment]
    torch.autograd.graph.disable_saved_tensors_hooks = _disable_without_ours


def unwatch(capture: Any) -> None:
    """Undo :func:`watch` for one capture. After the last capture, restore PyTorch's own functions."""
    _guarded.discard(capture)
    if not _guarded:
        torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
        torch.autograd.graph.disable_saved_tensors_hooks = _disable
