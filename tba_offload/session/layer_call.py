"""One call of a layer: the ways in which a placement may have it run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tba_offload.capture.hooks import LayerHooks, SharingHooks
from tba_offload.capture.rematerialize import RematerializingHooks
from tba_offload.placements import Placement, Staying
from tba_offload.recompute.attention import AttentionOnce
from tba_offload.recompute.run import Run
from tba_offload.recompute.trial import Trial

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tba_offload.capture.saved import Kept, Packed
    from tba_offload.capture.site import Site
    from tba_offload.capture.trace import ScopeTrace
    from tba_offload.config import OffloadConfig
    from tba_offload.layers.stack import LayerStack
    from tba_offload.recompute.verdicts import Mode
    from tba_offload.session.session import Session


class Call:
    """One call of a layer, run as its placement says.

    Args:
        parts: What works in a step.
        config: What the user wanted.
        stack: How layers are checkpointed.
        site: Where the layer is.
        placement: Its placement.
        scope: The run that this is.
        args: What its forward is given by position.
        kwargs: What it is given by name.
    """

    def __init__(
        self,
        parts: Session,
        config: OffloadConfig,
        stack: LayerStack,
        site: Site,
        placement: Placement,
        scope: ScopeTrace,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> None:
        self._parts = parts
        self._config = config
        self._stack = stack
        self._site = site
        self._placement = placement
        self._scope = scope
        self._args = args
        self._kwargs = kwargs

    def run(self) -> object:
        """Run the layer: in a checkpoint, with hooks that offload what the layer saves, or plainly."""
        if self._placement.recomputes:
            return self._recompute()
        if not self._placement.offloads:
            return self._site.forward(*self._args, **self._kwargs)
        if self._parts.planning.chosen or self._parts.verifier.verdicts:
            return self._offload_repeatable()
        with self._hooks():
            return self._site.forward(*self._args, **self._kwargs)

    def _offload_repeatable(self) -> object:
        """Offload, with what runs the layer a second time, if that is of use."""
        forward = self._forward()
        hooks = self._hooks()
        if isinstance(forward, Trial):
            hooks.wrap_unpack(forward.noticing)
        with hooks:
            output = forward(*self._args, **self._kwargs)
        if isinstance(forward, Trial):
            forward.saved(hooks.saved)
        return output

    def _recompute(self) -> object:
        """Run the layer in a checkpoint: backward runs it again on its inputs."""
        if not self._placement.offloads:
            return self._checkpoint(self._site.forward)
        hooks = self._hooks()
        forward = self._site.forward
        if self._placement.spares_attention:
            forward = AttentionOnce(forward, self._packing(hooks), self._parts.capture.unpack)
        with hooks:
            # Checkpoints save the inputs through the hooks around them, and nothing else.
            return self._checkpoint(forward)

    def _packing(self, hooks: LayerHooks) -> Callable[[Tensor], Kept | Packed]:
        """Pack what attention puts out as if it were saved, and count its bytes."""

        def pack(output: Tensor) -> Kept | Packed:
            self._scope.attended(output.numel() * output.itemsize)
            return hooks.pack(output)

        return pack

    def _checkpoint(self, forward: Callable[..., object]) -> object:
        """Run the layer in a checkpoint, with what verifies that its second run is the same."""
        verifier, index = self._parts.verifier, self._site.index
        run = Run(verifier, verifier.mode_of(index), forward, is_planned=self._is_choice)
        return self._stack.checkpoint(run, *self._args, **self._kwargs)

    # ---- forwards that may be run again ----------------------------------------------------------

    @property
    def _is_choice(self) -> bool:
        """Whether the planner decides on the layer."""
        return self._site.index in self._parts.planning.chosen

    def _forward(self) -> Callable[..., object]:
        """Return the layer's forward; with what runs it a second time, if that is of use."""
        verifier, world = self._parts.verifier, self._parts.world
        if not self._is_choice and not verifier.verdicts:
            return self._site.forward  # a layer of many modules would be asked for their modes in vain
        mode = verifier.mode_of(self._site.index)
        if self._is_choice and world.may_plan_recomputation and verifier.may_try(mode):
            return self._tried(mode)
        return self._site.forward

    def _tried(self, mode: Mode) -> Trial:
        """To see whether the planner may have the layer recomputed."""
        return Trial(
            *(self._parts.verifier, mode, self._site.forward),
            device=self._parts.device.torch_device,
            hold=self._parts.capture.hold,
            fetch=self._parts.capture.held,
        )

    # ---- hooks -----------------------------------------------------------------------------------

    def _hooks(self) -> LayerHooks:
        key, slow = self._scope.key, self._keeps_when_slow
        if self._placement.rebuilds and not self._site.is_compiled:  # modes do not see into a compiled graph
            return RematerializingHooks(self._parts.capture, key, self._parts.second_runs, when_slow=slow)
        if self._placement.percent < 100:
            stays = Staying(self._placement.percent).stays
            return SharingHooks(self._parts.capture, key, stays, when_slow=slow)
        return LayerHooks(self._parts.capture, key, when_slow=slow)

    @property
    def _keeps_when_slow(self) -> bool:
        """``offload`` waits for a slow drive unless told otherwise, ``auto`` keeps until there is a plan."""
        planning, on_slow = self._parts.planning, self._config.on_slow
        has_budget = self._parts.budget.limits.budget is not None
        if on_slow is None:
            # Under a budget nothing is kept before it is known what else a step holds.
            on_slow = "keep" if self._placement is Placement.AUTO and not has_budget else "wait"
        if on_slow == "wait" or planning.has_planned:
            return False  # what a plan keeps was decided with the budget in view
        # What layers hold that do not travel is not counted.
        return not has_budget or all(placement.is_offloaded for placement in planning.plan.placements)
