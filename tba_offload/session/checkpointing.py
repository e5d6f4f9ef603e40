"""The session's own recomputation, in place of the framework's activation checkpointing."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tba_offload.layers.find import Switch, value_of_switch
from tba_offload.placements import Placement
from tba_offload.torch_private import is_checkpoint_wrapper

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from tba_offload.capture.site import Site
    from tba_offload.config.policy import LayerId
    from tba_offload.layers.find import LayerStack


class Checkpointing:
    """The layers that the session recomputes instead of the framework.

    A switch is a module attribute that enables checkpointing in a framework. The switches stay on, but the
    session replaces the framework's checkpoint function. Each :class:`Site` keeps the original function.

    Args:
        stack: The layers of the session.
        sites: The :class:`Site` of each layer.
        may_plan: Whether the planner may recompute layers.

    Attributes:
        taken: The layers that the framework checkpoints, on all ranks.
    """

    def __init__(self, stack: LayerStack, sites: Sequence[Site], *, may_plan: bool) -> None:
        self._stack, self._sites, self._may_plan = stack, sites, may_plan
        self.taken = stack.checkpointed
        self._set_aside: dict[tuple[int, str], Switch] = {}

    def take_over(self) -> Counter[str]:
        """Replace the checkpoint functions of all switches that are on.

        Returns:
            For each switch name, the number of layers whose checkpoint function this call has replaced.
        """
        found, switched = Counter[str](), dict["nn.Module", Switch]()
        for switch in (*self._switches(), *self._stack.switches()):
            self._set_aside[id(switch.owner), switch.attribute] = switch
            switch.set_aside()
            switched |= dict.fromkeys(switch.layers, switch)
        for site in self._sites:
            on = switched.get(site.layer.module)
            if on is not None and site.checkpoint is None:
                found[on.name] += 1
            site.switch, site.checkpoint = on, None if on is None else on.checkpoint
        self.taken = self._stack.checkpointed | {each.layer.id for each in self._sites if each.checkpoint}
        return found

    def close(self) -> None:
        """Restore the functions that the program has set last."""
        for switch in self._set_aside.values():
            setattr(switch.owner, switch.attribute, value_of_switch(switch.owner, switch.attribute))
        self._set_aside.clear()
        for site in self._sites:
            site.switch = None

    def placed(self, layer: LayerId, placement: Placement) -> Placement:
        """Return the placement with which a layer runs.

        The session recomputes each layer that the framework checkpoints. The planner may choose another
        placement for a layer with ``auto``.

        Args:
            layer: The layer.
            placement: The placement of the layer in the policy.
        """
        is_planned = placement is Placement.AUTO and self._may_plan
        if layer not in self.taken or placement.recomputes or is_planned:
            return placement
        return Placement.RECOMPUTE_OFFLOAD if placement.offloads else Placement.RECOMPUTE

    def _switches(self) -> Iterator[Switch]:
        for layer in self._stack.layers:
            for part in _wrapped(layer.module):
                name, attribute = "gradient_checkpointing", "_gradient_checkpointing_func"
                if is_checkpoint_wrapper(part):
                    name, attribute = "checkpoint_wrapper", "checkpoint_fn"
                elif not vars(part).get(name):
                    continue
                function = value_of_switch(part, attribute)
                # A function with a context_fn saves more than the inputs of the layer.
                if function is not None and "context_fn" not in getattr(function, "keywords", {}):
                    yield Switch(name, part, attribute, {layer.module}, function)


def _wrapped(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for name, child in module.named_children():
        if name in {"_fsdp_wrapped_module", "_orig_mod"} or is_checkpoint_wrapper(module):
            yield from _wrapped(child)
