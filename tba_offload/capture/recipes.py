"""Recipes: how outputs of the cheap parts of a layer are computed anew from what was saved anyway.

The autograd graph knows what made a tensor, and it holds what that operation saved. Where this is enough to
do the operation a second time (an activation function, a product with a dropout mask, a norm whose eps a
module tells) there is a recipe for its output. Recipes run the same operation on the same bytes, below
autocast, because the nodes of the graph come after the casts that autocast has put in.

The graph does not tell everything: what lies between two nodes and was saved by neither may have been changed
without autograd's notice. So recipes should be tried before they are used.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from torch.utils.hooks import RemovableHandle

Node = Any
"""A node of the autograd graph, or the context of a custom function, which is one."""

Unpack = Callable[[Any], Tensor]
"""Gives back a saved tensor, as :meth:`Capture.unpack` does."""

Share = Callable[[object], object | None]
"""Another hold on what was saved, or ``None`` if it cannot be had."""

_DEEPEST = 4
"""Operations that a recipe does at most between what was saved and its result."""

_EPS = "tba-offload: eps"

NOTHING = object()
"""Stands for an argument that an operation was not given."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to compute a tensor anew.

    Attributes:
        name: The operations, by which recipes are told apart.
        make: The last operation.
        sources: What it takes: saved tensors as they were packed, recipes, or :data:`NOTHING`.
    """

    name: str
    make: Callable[..., Tensor]
    sources: tuple[object, ...]

    def leaves(self) -> Iterator[object]:
        """Yield what it takes of what was saved."""
        for source in self.sources:
            if isinstance(source, Recipe):
                yield from source.leaves()
            else:
                yield source

    def compute(self, unpack: Unpack, device: torch.device) -> Tensor:
        """Return the tensor, contiguous and with a storage of its own."""
        with torch.no_grad(), _without_autocast(device):
            # What operations leave in another order than that of the tensor only copies have put in order.
            made = self._compute(unpack).contiguous()
        return made if _fills_its_storage(made) else made.clone()

    def _compute(self, unpack: Unpack) -> Tensor:
        return self.make(*(_value(source, unpack) for source in self.sources))


def _value(source: object, unpack: Unpack) -> Tensor | None:
    if source is NOTHING:
        return None
    return source._compute(unpack) if isinstance(source, Recipe) else unpack(source)


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


class Finder:
    """Finds recipes in the autograd graph.

    Args:
        share: Gives a recipe a hold of its own on what was saved.
        functions: Recipes for the outputs of custom functions, by the class of the function.
    """

    def __init__(self, share: Share, functions: Mapping[type, Maker]) -> None:
        self._share = share
        self._functions = functions

    def recipe_of(self, tensor: Tensor) -> Recipe | None:
        """Return a recipe for all of the storage of ``tensor``, or ``None``."""
        whole = tensor._base if tensor._base is not None else tensor
        # A version means that it was changed since it was made.
        if whole._version or not _fills_its_storage(whole):
            return None
        found = self._made_by(whole.grad_fn, whole.output_nr, _DEEPEST)
        return found if isinstance(found, Recipe) else None

    def saved(self, node: Node, name: str) -> object | None:
        """Return what a node has saved under a name, or ``None`` if it cannot be had."""
        packed = getattr(node, f"_raw_saved_{name}").data
        return self._share(packed) if packed is not None else None

    def saved_or_nothing(self, node: Node, name: str) -> object | None:
        """Return the same of an argument that an operation may do without."""
        is_given = getattr(node, f"_raw_saved_{name}").data is not None
        return self.saved(node, name) if is_given else NOTHING

    def all_saved(self, node: Node) -> list[object | None]:
        """Return what a custom function has saved; ``None`` for what cannot be had, or was never given."""
        try:
            saved = node._raw_saved_tensors
        except RuntimeError:  # backward is over, and has freed it
            return []
        return [self._share(raw.data) for raw in saved]

    def given(self, node: Node, index: int, depth: int) -> object | None:
        """Return an argument that a node has not saved.

        The result of another one, which did, or can be computed.
        """
        maker, output = node.next_functions[index]
        return self._made_by(maker, output, depth - 1)

    def _made_by(self, node: Node | None, output: int, depth: int) -> object | None:
        """Return the output of a node: what was saved, or a recipe."""
        if node is None or output or not depth:
            return None
        name = node.name()
        if name in _SAVE_THEIR_RESULT:
            return self.saved(node, "result")
        if name == _LEAF:
            return self._share(node.variable)
        function = getattr(type(node), "_forward_cls", None)
        make = _MAKERS.get(name) if function is None else self._functions.get(function)
        return make(self, node, depth) if make is not None else None


Maker = Callable[[Finder, Node, int], Recipe | None]
"""Makes the recipe for the output of a node, of so many operations at most."""


def _fills_its_storage(tensor: Tensor) -> bool:
    return (
        tensor.is_contiguous()
        and tensor.storage_offset() == 0
        and tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()
    )


def recipe(name: str, make: Callable[..., Tensor], *sources: object | None) -> Recipe | None:
    """Return a recipe, if all of its sources can be had."""
    if any(source is None for source in sources):
        return None
    parts = ", ".join(source.name if isinstance(source, Recipe) else "" for source in sources)
    return Recipe(f"{name}({parts})", make, sources)


# ---- operations of PyTorch -----------------------------------------------------------------------


_LEAF = "torch::autograd::AccumulateGrad"

_SAVE_THEIR_RESULT = frozenset(
    f"{name}Backward0" for name in ("Exp", "Relu", "Rsqrt", "Sigmoid", "Softmax", "Sqrt", "Tanh")
)


def _of_self(make: Callable[..., Tensor], **settings: str) -> Maker:
    """For an operation that saves its argument; ``settings`` are names of arguments and of what is saved."""

    def maker(finder: Finder, node: Node, _: int) -> Recipe | None:
        values = {argument: _signed(getattr(node, f"_saved_{saved}")) for argument, saved in settings.items()}
        name = ":".join((node.name(), *map(str, values.values())))
        return recipe(name, partial(make, **values), finder.saved(node, "self"))

    return maker


def _signed(value: Any) -> Any:
    """Nodes tell negative dimensions as if they had no sign."""
    return value - (1 << 64) if isinstance(value, int) and value >= 1 << 63 else value


def _product(finder: Finder, node: Node, depth: int) -> Recipe | None:
    """Return a factor is saved only where the other one needs a gradient."""
    factors = []
    for index, name in enumerate(("self", "other")):
        factor = finder.saved(node, name)
        factors.append(factor if factor is not None else finder.given(node, index, depth))
    return recipe(node.name(), torch.mul, *factors)


def _copied(finder: Finder, node: Node, depth: int) -> Recipe | None:
    """Return a copy of another type, as casts make it."""
    result = node._input_metadata[0]
    # The same object twice must not become one storage for two.
    make = partial(Tensor.to, device=result.device, dtype=result.dtype, copy=True)
    return recipe(f"{node.name()}:{result.dtype}", make, finder.given(node, 0, depth))


def _viewed(finder: Finder, node: Node, depth: int) -> Recipe | None:
    """Between two others, or a view that does not tell of what, as products of many dimensions put it out."""
    shape = tuple(node._input_metadata[0].shape)
    return recipe(node.name(), partial(Tensor.view, size=shape), finder.given(node, 0, depth))


def _dropped_out(finder: Finder, node: Node, depth: int) -> Recipe | None:
    rate = node._saved_p
    make = partial(_drop_out, rate=rate)
    return recipe(f"{node.name()}:{rate}", make, finder.given(node, 0, depth), finder.saved(node, "result1"))


def _drop_out(tensor: Tensor, mask: Tensor, *, rate: float) -> Tensor:
    kept = 1 - rate
    if tensor.device.type == "cuda" and tensor.dtype is not torch.float64:
        (kept,) = struct.unpack("f", struct.pack("f", kept))  # the kernel computes the scale from this
    scale = 1 / kept if kept else 0.0
    return torch.ops.aten.native_dropout_backward(tensor, mask, scale)  # type: ignore[no-any-return]


def _normalized(make: Callable[..., Tensor], *parameters: str) -> Maker:
    """For a norm over the last dimensions whose module told its eps."""

    def maker(finder: Finder, node: Node, _: int) -> Recipe | None:
        if _EPS not in node.metadata:
            return None
        eps, shape = node.metadata[_EPS], tuple(node._saved_normalized_shape)
        given = [finder.saved_or_nothing(node, name) for name in parameters]
        return recipe(
            f"{node.name()}:{eps}", partial(make, shape=shape, eps=eps), finder.saved(node, "input"), *given
        )

    return maker


def _layer_norm(
    tensor: Tensor, weight: Tensor | None, bias: Tensor | None, *, shape: tuple[int, ...], eps: float
) -> Tensor:
    return functional.layer_norm(tensor, shape, weight, bias, eps)


def _rms_norm(tensor: Tensor, weight: Tensor | None, *, shape: tuple[int, ...], eps: float | None) -> Tensor:
    return functional.rms_norm(tensor, shape, weight, eps)


_MAKERS: dict[str, Maker] = {
    "GeluBackward0": _of_self(functional.gelu, approximate="approximate"),
    "SiluBackward0": _of_self(functional.silu),
    "MishBackward0": _of_self(functional.mish),
    "HardswishBackward0": _of_self(functional.hardswish),
    "LeakyReluBackward0": _of_self(functional.leaky_relu, negative_slope="negative_slope"),
    "GluBackward0": _of_self(functional.glu, dim="dim"),
    "MulBackward0": _product,
    "ToCopyBackward0": _copied,
    "ViewBackward0": _viewed,
    "UnsafeViewBackward0": _viewed,
    "NativeDropoutBackward0": _dropped_out,
    "NativeLayerNormBackward0": _normalized(_layer_norm, "weight", "bias"),
    "FusedRmsNormBackward0": _normalized(_rms_norm, "weight"),
}


# ---- norms ---------------------------------------------------------------------------------------


def norms_of(layer: nn.Module) -> tuple[nn.Module, ...]:
    """Return the parts of a layer that tell the eps of the norms that they compute."""
    return tuple(_norms(layer))


def _norms(layer: nn.Module) -> Iterator[nn.Module]:
    for module in layer.modules():
        for norm in (nn.LayerNorm, nn.RMSNorm):
            # A subclass with a forward of its own may compute something else.
            if isinstance(module, norm) and type(module).forward is norm.forward:
                yield module


def watch_norm(norm: nn.Module) -> RemovableHandle:
    """Note the eps of a norm at each of its results, which do not tell it themselves."""
    return norm.register_forward_hook(_note_eps)


def _note_eps(norm: nn.Module, _: object, output: Tensor) -> None:
    node: Node = getattr(output, "grad_fn", None)  # a hook of the program may have made anything of it
    if node is not None:
        node.metadata[_EPS] = norm.eps
