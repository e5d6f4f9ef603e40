"""Attention that a layer's second run does not compute again: what it put out in the first run has travelled.

On the way from autograd to the kernels of a device PyTorch's dispatcher passes ``BackendSelect``, where there
is nothing to do for operations on tensors. There stands, for the operations that are fused attention, a
function that looks whether a layer runs in its thread that wants to spare them. All else runs as it would
without. A mode of the dispatcher, by which PyTorch's own selective checkpoints see all operations, would have
some of them choose other kernels.

Spared are calls that want a gradient and draw no random numbers, which the operations after them would miss.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.torch_private import (
    AFTER_BACKEND_SELECT,
    KeySet,
    is_recomputation,
    sharing_versions,
    untraced,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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
        self._forward, self._unpack = forward, unpack
        self._pack: Callable[[Tensor], Any] | None = pack
        # Calls of attention in the first run: the operation, and each output with whether it is packed.
        self._calls: list[tuple[object, list[tuple[bool, Any]]]] = []

    def __call__(self, /, *args: Any, **kwargs: Any) -> object:
        """Run the layer."""
        pack, self._pack = self._pack, None  # which knows the scope of the first call
        give_back = partial(self._give_back, iter(self._calls))
        with _having(give_back if pack is None else partial(self._take, pack)):
            return self._forward(*args, **kwargs)

    def _take(self, pack: Callable[[Tensor], Any], operation: object, run: Callable[[], Any]) -> Any:
        """Run attention, and pack what it puts out."""

        def taken(output: Any) -> tuple[bool, Any]:
            if not isinstance(output, torch.Tensor):
                return False, output
            alone = output.detach()  # or what is packed would hold the graph, which holds that
            # What wants a gradient is taken for filled by the operation that saves it, as this is.
            return True, pack(alone.requires_grad_(alone.is_floating_point()))

        outputs = run()
        if not is_recomputation():  # forward itself may go backward through what it has done so far
            with sharing_versions():
                self._calls.append((operation, list(map(taken, outputs))))
        return outputs

    def _give_back(self, calls: Iterator[Any], operation: object, run: Callable[[], Any]) -> Any:
        """Return what attention has put out in the first run."""
        before, outputs = next(calls, (None, []))
        if before is not operation:
            return run()  # what the second run saves then differs from the first, which is noticed
        with sharing_versions():
            return tuple(
                self._unpack(output).detach() if is_packed else output for is_packed, output in outputs
            )


_here = threading.local()
"""A replacement for attention on this thread, if set: called with the operation and its implementation."""


@contextmanager
def _having(instead: Callable[[Any, Callable[[], Any]], Any] | None) -> Iterator[None]:
    """Return a block in which the thread does something else instead, or attention itself."""
    before, _here.instead = getattr(_here, "instead", None), instead
    try:
        yield
    finally:
        _here.instead = before


_looking: dict[str, Any] = {}
"""The library that keeps a function in front of an operation, by the name of the operation."""


def _look_at_operations() -> None:
    """Put a function in front of each operation that is known by now: packages may be loaded later."""
    for name in OPERATIONS:
        if name not in _looking:
            namespace, word = name.split("::")
            packet = getattr(getattr(torch.ops, namespace), word, None)
            if packet is not None:
                _looking[name] = _look_at(namespace, word, packet.default)


def take_out() -> None:
    """Leave operations as they were; a layer that needs a function there puts it back."""
    while _looking:
        _looking.popitem()[1]._destroy()


def _look_at(namespace: str, word: str, operation: Any) -> Any:
    names = [argument.name for argument in operation._schema.arguments]
    drops = names.index("dropout_p") if "dropout_p" in names else len(names)

    def saves_for_backward(args: Sequence[Any]) -> bool:
        # Those of other packages stand in the forward of a function, where gradients are off.
        is_on = torch.is_grad_enabled() or namespace != "aten"
        return is_on and any(isinstance(value, torch.Tensor) and value.requires_grad for value in args)

    @untraced
    def attend(keys: KeySet, /, *args: Any, **kwargs: Any) -> Any:
        run = partial(operation.redispatch, keys & AFTER_BACKEND_SELECT, *args, **kwargs)
        instead = getattr(_here, "instead", None)
        if instead is None or any(args[drops : drops + 1]) or not saves_for_backward(args):
            return run()
        # Its kernel may call another one of them, which is no call of the layer's.
        with _having(None):
            return instead(operation, run)

    library: Any = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
    library.impl(word, attend, "BackendSelect", with_keyset=True)
    return library
