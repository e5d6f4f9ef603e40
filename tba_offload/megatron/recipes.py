"""Recipes for the outputs of megatron-core's fused activation functions.

They are autograd functions of its own. Each saves its arguments and calls one function, so its recipe calls
that once more.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tba_offload.capture.recipes import recipe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from tba_offload.capture.recipes import Finder, Maker, Recipe

_PACKAGE = "megatron.core.fusions"


class _Fused(NamedTuple):
    """An autograd function.

    Attributes:
        module: Where it lies in megatron-core's fusions.
        name: Of the class.
        function: What its forward calls.
        order: The arguments of that, by their place in what the class saves.
    """

    module: str
    name: str
    function: str
    order: tuple[int, ...]


_FUSED = (
    _Fused("fused_bias_gelu", "GeLUFunction", "bias_gelu", (1, 0)),
    _Fused("fused_bias_geglu", "GeGLUFunction", "geglu", (0,)),
    _Fused("fused_bias_geglu", "BiasGeGLUFunction", "bias_geglu", (1, 0)),
    _Fused("fused_bias_geglu", "WeightedQuickGeGLUFunction", "weighted_quick_geglu", (0, 1, 2)),
    _Fused("fused_bias_geglu", "WeightedBiasQuickGeGLUFunction", "weighted_bias_quick_geglu", (0, 1, 2, 3)),
    _Fused("fused_bias_swiglu", "SwiGLUFunction", "swiglu", (0,)),
    _Fused("fused_bias_swiglu", "BiasSwiGLUFunction", "bias_swiglu", (0, 1)),
    _Fused("fused_bias_swiglu", "WeightedSwiGLUFunction", "weighted_swiglu", (0, 1)),
    _Fused("fused_weighted_squared_relu", "WeightedSquaredReLUFunction", "weighted_squared_relu", (0, 1)),
)


def fused_functions() -> Mapping[type, Maker]:
    """Get the recipes by the classes of the functions, those which the installed megatron-core has loaded."""
    return dict(_loaded())


def _loaded() -> Iterator[tuple[type, Maker]]:
    for fused in _FUSED:
        module = sys.modules.get(f"{_PACKAGE}.{fused.module}")
        function = getattr(module, fused.function, None)
        if function is not None and hasattr(module, fused.name):
            yield getattr(module, fused.name), _maker(fused, function)


def _maker(fused: _Fused, function: Callable[..., Tensor]) -> Maker:
    def maker(finder: Finder, node: Any, _: int) -> Recipe | None:
        saved = finder.all_saved(node)
        if getattr(node, "fp8_input_store", False) or len(saved) != len(fused.order):
            return None  # what was saved is not what the function was given
        needs = tuple(edge is not None for edge, _ in node.next_functions)
        make = partial(_call, function, fused.order, needs)
        return recipe(fused.name, make, *saved)

    return maker


def _call(
    function: Callable[..., Tensor], order: tuple[int, ...], needs: tuple[bool, ...], *saved: Tensor
) -> Tensor:
    """Call a function with tensors that look like those of the forward pass.

    Compiled functions ask whether their arguments need a gradient, and may not compute the same otherwise.
    """
    tensors = [
        tensor if tensor.requires_grad is needed else tensor.detach().requires_grad_(needed)
        for tensor, needed in zip(saved, needs, strict=True)
    ]
    return function(*(tensors[place] for place in order))
