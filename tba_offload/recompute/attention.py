"""Recomputation of a layer without its attention: the output of attention is saved and reused.

For each operation of fused attention, this module registers a function at the dispatch key ``BackendSelect``,
which PyTorch does not use for operations on tensors. The first run of a layer offloads the output of
attention. The second run reads the output back. Attention of other layers runs unchanged. A dispatch mode, as
in PyTorch's selective checkpoint, would make some operations choose other kernels.

The output is not reused if attention draws random numbers, because later operations would then draw other
random numbers. The output is also not reused if no input of attention requires a gradient.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tba_offload import torch_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

_KINDS = "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"
OPERATIONS = (
    *(f"aten::_scaled_dot_product_{kind}" for kind in (*_KINDS, "fused_attention_overrideable")),
    *("aten::_flash_attention_forward", "aten::_efficient_attention_forward"),
    *("flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward"),
)
"""Names of operations that compute fused attention from queries, keys and values. PyTorch knows an operation
of another package only after that package is imported."""


class AttentionOnce:
    """Callable for one run of a layer, in forward and in each recomputation.

    The first call computes attention. Later calls, which recompute the layer, reuse the output of attention.

    Args:
        forward: Function that runs the layer.
        pack: Function that saves an output of attention, and returns a handle of the saved output.
        unpack: Function that takes a handle and returns the saved output.

    Attributes:
        nbytes: Bytes of the saved outputs.
    """

    def __init__(
        self, forward: Callable[..., object], pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> None:
        _register_all()
        self._forward, self._unpack, self.nbytes = forward, unpack, 0
        self._pack: Callable[[Tensor], Any] | None = pack
        # For each call of attention in the first run: the operation and its outputs. The flag of an output is
        # True if the output is packed.
        self._calls: list[tuple[object, list[tuple[bool, Any]]]] = []

    def __call__(self, /, *args: Any, **kwargs: Any) -> object:
        """Run the layer."""
        pack, self._pack = self._pack, None  # later calls do not pack
        give_back = partial(self._give_back, iter(self._calls))
        with _attention_replaced(give_back if pack is None else partial(self._take, pack)):
            return self._forward(*args, **kwargs)

    def _take(self, pack: Callable[[Tensor], Any], operation: object, run: Callable[[], Any]) -> Any:
        def taken(output: Any) -> tuple[bool, Any]:
            if not isinstance(output, torch.Tensor):
                return False, output
            self.nbytes += output.nbytes
            alone = output.detach()  # otherwise the packed output and its graph would hold each other
            # A tensor that requires a gradient is regarded as complete when it is saved. This output is
            # complete.
            return True, pack(alone.requires_grad_(alone.is_floating_point()))

        outputs = run()
        if not torch_private.is_recomputation():  # forward may run a backward pass
            with torch_private.sharing_versions():
                self._calls.append((operation, list(map(taken, outputs))))
        return outputs

    def _give_back(self, calls: Iterator[Any], operation: object, run: Callable[[], Any]) -> Any:
        before, outputs = next(calls, (None, []))
        if before is not operation:
            return run()  # the second run then saves other tensors, which the comparison finds
        with torch_private.sharing_versions():
            return tuple(self._unpack(each).detach() if is_packed else each for is_packed, each in outputs)


_thread = threading.local()
"""``_thread.instead`` is the function that replaces attention on the current thread, or ``None``. Its
arguments are the operation, and a function that runs the original kernel."""


@contextmanager
def _attention_replaced(instead: Callable[[Any, Callable[[], Any]], Any] | None) -> Iterator[None]:
    before, _thread.instead = getattr(_thread, "instead", None), instead
    try:
        yield
    finally:
        _thread.instead = before


_registered: dict[str, Any] = {}
"""For each operation of fused attention, the ``torch.library.Library`` that replaces the operation."""


def _register_all() -> None:
    for name in OPERATIONS:
        if name not in _registered:
            namespace, word = name.split("::")
            packet = getattr(getattr(torch.ops, namespace), word, None)
            if packet is not None:
                _registered[name] = _register(namespace, word, packet.default)


def take_out() -> None:
    """Restore PyTorch's attention. The next :class:`AttentionOnce` replaces the operations again."""
    while _registered:
        _registered.popitem()[1]._destroy()


def _register(namespace: str, word: str, operation: Any) -> Any:
    names = [argument.name for argument in operation._schema.arguments]
    drops = names.index("dropout_p") if "dropout_p" in names else len(names)

    def saves_for_backward(args: Sequence[Any]) -> bool:
        # Operations of other packages run in the forward of an autograd function, where gradients are off.
        is_on = torch.is_grad_enabled() or namespace != "aten"
        return is_on and any(isinstance(value, torch.Tensor) and value.requires_grad for value in args)

    @torch_private.untraced
    def attend(keys: torch_private.KeySet, /, *args: Any, **kwargs: Any) -> Any:
        run = partial(operation.redispatch, keys & torch_private.AFTER_BACKEND_SELECT, *args, **kwargs)
        instead = getattr(_thread, "instead", None)
        if instead is None or any(args[drops : drops + 1]) or not saves_for_backward(args):
            return run()
        # The kernel may call another of these operations, but that call is not the layer's own.
        with _attention_replaced(None):
            return instead(operation, run)

    library: Any = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
    library.impl(word, attend, "BackendSelect", with_keyset=True)
    return library
