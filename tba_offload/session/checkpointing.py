"""Checkpointing of layers by their framework, which a session takes over until the session closes."""

from __future__ import annotations

import copy
from collections import Counter
from typing import TYPE_CHECKING, Any

from tba_offload.layers.find import Switch
from tba_offload.placements import Placement
from tba_offload.torch_private import is_checkpoint_wrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from tba_offload.config.policy import LayerId, Policy
    from tba_offload.layers.find import LayerStack


class _Off:
    """The value of a switch that is set aside.

    Used as a flag, the value is false. Used as a checkpoint function, the value only calls the layer.
    """

    def __init__(self, replaced: Any) -> None:
        self.replaced = replaced

    def __bool__(self) -> bool:
        return False

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return copy.copy, (self.replaced,)  # copies of the model have the switch of the program


class Checkpointing:
    """The layers whose checkpointing a session has taken over.

    Args:
        stack: The layers of the session.
        may_plan: Whether the planner may recompute layers.
    """

    def __init__(self, stack: LayerStack, *, may_plan: bool) -> None:
        self._stack, self._may_plan = stack, may_plan
        self._taken = set(stack.checkpointed)
        self._set_aside: dict[tuple[int, str], tuple[Switch, _Off]] = {}

    def take_over(self) -> Counter[str]:
        """Set aside all switches that are on. Return the number of new layers for each name of a switch."""
        found = Counter[str]()
        for switch in (*self._switches(), *self._stack.switches()):
            if type(value := getattr(switch.owner, switch.attribute)) is _Off:
                continue
            off = _Off(value)
            self._set_aside[id(switch.owner), switch.attribute] = switch, off
            setattr(switch.owner, switch.attribute, off)
            layers = {layer.id for layer in self._stack.layers if layer.module in switch.layers}
            found[switch.name] += len(layers - self._taken)
            self._taken |= layers
        return +found

    def close(self) -> None:
        """Restore the switches that the program has not changed in the meantime."""
        for switch, off in self._set_aside.values():
            if getattr(switch.owner, switch.attribute, None) is off:
                setattr(switch.owner, switch.attribute, off.replaced)
        self._set_aside.clear()

    def placed(self, layer: LayerId, placement: Placement) -> Placement:
        """Return the placement of a layer. ``placement`` is the layer's placement in the policy."""
        is_planned = placement is Placement.AUTO and self._may_plan
        if layer not in self._taken or placement.recomputes or is_planned:
            return placement
        return Placement.RECOMPUTE_OFFLOAD if placement.offloads else Placement.RECOMPUTE

    def placements(self, policy: Policy) -> list[Placement]:
        """Return the different placements of the layers that were taken over."""
        layers = (layer.id for layer in self._stack.layers if layer.id in self._taken)
        return list(dict.fromkeys(self.placed(each, policy.explain(each)[0]) for each in layers))

    def _switches(self) -> Iterator[Switch]:
        """Yield the switches of transformers and of PyTorch that are on."""
        for layer in self._stack.layers:
            for part in _wrapped(layer.module):
                function = getattr(part, "_gradient_checkpointing_func", None)
                if vars(part).get("gradient_checkpointing") and not _is_selective(function):
                    yield Switch("gradient_checkpointing", part, "gradient_checkpointing", {layer.module})
                if is_checkpoint_wrapper(part) and not _is_selective(part.checkpoint_fn):
                    yield Switch("checkpoint_wrapper", part, "checkpoint_fn", {layer.module})


def _wrapped(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and, if the module is a wrapper of FSDP or ``torch.compile``, the wrapped modules."""
    yield module
    for name, child in module.named_children():
        if name in {"_fsdp_wrapped_module", "_orig_mod"} or is_checkpoint_wrapper(module):
            yield from _wrapped(child)


def _is_selective(function: Any) -> bool:
    """Return True if a checkpoint function saves more than the inputs of the layer."""
    return "context_fn" in getattr(function, "keywords", {})
