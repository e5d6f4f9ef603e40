"""Attention that a layer's second run does not compute again: what it put out in the first run has travelled.

On the way from autograd to the kernels of a device PyTorch's dispatcher passes ``BackendSelect``, where there
is nothing to do for operations on tensors. There stands, for the operations that are fused attention, a
function that looks whether a layer runs in its thread that wants to spare them. All else runs as it would
without. A mode of the dispatcher, by which PyTorch's own selective checkpoints see all operations, would have
some of them choose other kernels.

Spared are calls that want a gradient and draw no random numbers, which the operations after them would miss.
"""

from __future__ import annotations

import functools
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tba_offload.layers.graph import is_recomputation, untraced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

OPERATIONS = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "flash_attn::_flash_attn_forward",
    "flash_attn::_flash_attn_varlen_forward",
)
"""Names of operations that take queries, keys and values, and put out what attention makes of them; those of
packages that are not loaded are unknown to PyTorch."""

_AFTER = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


class AttentionOnce:
    """The forward of one execution of a layer: calls of it after the first compute no attention.

    Args:
        forward: What runs the layer.
        pack: Takes what attention has put out in the first call.
        unpack: Gives back what was packed, whenever it is asked.
    """

    def __init__(
        self,
        forward: Callable[..., object],
        pack: Callable[[Tensor], Any],
        unpack: Callable[[Any], Tensor],
    ) -> None:
        _look_at_operations()
        self._forward = forward
        self._pack: Callable[[Tensor], Any] | None = pack
        self._unpack = unpack
        self._calls: list[_Call] = []

    def __call__(self, /, *args: Any, **kwargs: Any) -> object:
        """Run the layer."""
        pack, self._pack = self._pack, None  # which knows the scope of the first call
        instead = _Again(self._calls, self._unpack) if pack is None else _First(self._calls, pack)
        with _here.having(instead):
            return self._forward(*args, **kwargs)


class _Here(threading.local):
    """What a thread does instead of attention: it is given the operation, and what runs it."""

    instead: Callable[[Any, Callable[[], Any]], Any] | None = None

    @contextmanager
    def having(self, instead: Callable[[Any, Callable[[], Any]], Any] | None) -> Iterator[None]:
        """Return a block in which the thread does something else instead, or attention itself."""
        before, self.instead = self.instead, instead
        try:
            yield
        finally:
            self.instead = before


_here = _Here()


class _Call(NamedTuple):
    """A call of attention in the first run.

    Attributes:
        operation: Which operation it was.
        outputs: What it put out, tensors packed.
        are_tensors: Of each output, whether it is one.
    """

    operation: object
    outputs: Sequence[Any]
    are_tensors: Sequence[bool]


class _First:
    """Takes what attention puts out.

    Args:
        calls: Is given each call.
        pack: Takes a tensor.
    """

    def __init__(self, calls: list[_Call], pack: Callable[[Tensor], Any]) -> None:
        self._calls = calls
        self._pack = pack

    def __call__(self, operation: object, run: Callable[[], Any]) -> Any:
        outputs = run()
        if not is_recomputation():  # forward itself may go backward through what it has done so far
            are_tensors = [isinstance(output, torch.Tensor) for output in outputs]
            with _sharing_versions():
                packed = [
                    self._packed(output) if isinstance(output, torch.Tensor) else output for output in outputs
                ]
            self._calls.append(_Call(operation, packed, are_tensors))
        return outputs

    def _packed(self, output: Tensor) -> Any:
        alone = output.detach()  # or what is packed would hold the graph, which holds that
        # What wants a gradient is taken for filled by the operation that saves it, as this is.
        return self._pack(alone.requires_grad_(alone.is_floating_point()))


class _Again:
    """Gives that back.

    Args:
        calls: Those of the first run, in their order.
        unpack: Gives a tensor back.
    """

    def __init__(self, calls: Sequence[_Call], unpack: Callable[[Any], Tensor]) -> None:
        self._calls = calls
        self._unpack = unpack
        self._count = 0

    def __call__(self, operation: object, run: Callable[[], Any]) -> Any:
        number, self._count = self._count, self._count + 1
        if number >= len(self._calls) or self._calls[number].operation is not operation:
            return run()  # what the second run saves then differs from the first, which is noticed
        _, outputs, are_tensors = self._calls[number]
        with _sharing_versions():
            return tuple(
                self._unpack(output).detach() if is_tensor else output
                for output, is_tensor in zip(outputs, are_tensors, strict=True)
            )


def _sharing_versions() -> AbstractContextManager[object]:
    """Return a block in which views share the version counter of their base, as they do above autograd."""
    guard = torch._C._SetExcludeDispatchKeyGuard
    return guard(torch._C.DispatchKey.ADInplaceOrView, False)  # noqa: FBT003 - positional in C++


_looking: dict[str, Any] = {}
"""The library that keeps a function in front of an operation, by the name of the operation."""


_turn = threading.Lock()
"""Held while functions are put in front of operations: each is put there once."""


def _look_at_operations() -> None:
    """Put a function in front of each operation that is known by now: packages may be loaded later."""
    with _turn:
        for name in OPERATIONS:
            if name not in _looking:
                namespace, word = name.split("::")
                packet = getattr(getattr(torch.ops, namespace), word, None)
                if packet is not None:
                    _looking[name] = _look_at(namespace, word, packet.default)


def take_out() -> None:
    """Leave operations as they were; a layer that needs a function there puts it back."""
    with _turn:
        while _looking:
            _looking.popitem()[1]._destroy()


def _look_at(namespace: str, word: str, operation: Any) -> Any:
    # Those of other packages stand in the forward of a function, where gradients are off.
    wants_gradient = _saves_for_backward if namespace == "aten" else _has_gradient
    names = [argument.name for argument in operation._schema.arguments]
    drops = names.index("dropout_p") if "dropout_p" in names else None

    @untraced
    def attend(keys: torch._C.DispatchKeySet, /, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(operation.redispatch, keys & _AFTER, *args, **kwargs)
        instead = _here.instead
        if instead is None or not wants_gradient(args) or (drops is not None and _is_given(drops, args)):
            return run()
        # Its kernel may call another one of them, which is no call of the layer's.
        with _here.having(None):
            return instead(operation, run)

    library: Any = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
    library.impl(word, attend, "BackendSelect", with_keyset=True)
    return library


def _saves_for_backward(args: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and _has_gradient(args)


def _has_gradient(args: Sequence[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in args)


def _is_given(place: int, args: Sequence[Any]) -> bool:
    """Whether an argument is given, as the dispatcher gives it: by position, if it is not the default."""
    return place < len(args) and bool(args[place])
