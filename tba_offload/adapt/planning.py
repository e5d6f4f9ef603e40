"""The plan in force: what it is, when it is left for a step that outgrows it, and what follows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tba_offload.config.policy import Placement

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tba_offload.adapt.controller import AutoPlanner
    from tba_offload.capture.hooks import Capture
    from tba_offload.capture.trace import DeviceTimes
    from tba_offload.plan.model import Plan
    from tba_offload.plan.sizes import RunSize
    from tba_offload.report.run_log import StepRecord
    from tba_offload.store.base import DriveLoad
    from tba_offload.transfer.offloader import Offloader


class Planning:
    """Puts plans in force.

    Args:
        plan: That of the policy.
        layers: The number of each layer, as activations are named by it.
        capture: Tells what layers saved; forgets what it learned of those that are placed anew.
        offloader: Takes the window.

    Attributes:
        plan: In force.
        planner: Renews it; ``None`` if there is nothing to decide and nothing to learn.
        chosen: Layers that the planner may have recomputed.
    """

    def __init__(self, plan: Plan, layers: Sequence[int], capture: Capture, offloader: Offloader) -> None:
        self.plan = plan
        self.planner: AutoPlanner | None = None
        self.chosen: frozenset[int] = frozenset()
        self._outgrown: Plan | None = None  # what this step began with and was too large for
        self._layers = layers
        self._capture = capture
        self._offloader = offloader

    def start(self, plan: Plan, planner: AutoPlanner | None) -> None:
        """Starts with the plan of a policy, or with that of a new planner for its first step."""
        self.planner = planner
        self.plan = plan if planner is None else planner.first()
        self.chosen = frozenset(
            index
            for index, wanted in enumerate(() if planner is None else planner.policy)
            if wanted is Placement.AUTO
        )
        self._outgrown = None
        self._offloader.resize_window(self.plan.window)

    def begin_step(self) -> None:
        """A step that failed or was skipped after it had left its plan taught nothing: the plan stays."""
        if self.planner is not None:
            self.planner.sizes.begin_step()
        if self._outgrown is not None:
            self._put_in_force(self._outgrown)
            self._outgrown = None

    def leave_if_outgrown(self, planner: AutoPlanner, layer: int, size: RunSize) -> None:
        """Where a layer is given more than the plan is for, the rest of the step runs without it."""
        if not planner.fits(layer, size) and self._outgrown is None:
            self._outgrown = self.plan
            self._put_in_force(planner.least(self.plan))

    def learn(
        self,
        record: StepRecord,
        loads: Sequence[DriveLoad],
        *,
        began: float,
        rest_bytes: int,
        repeatable: Iterable[int],
        on_device: DeviceTimes | None,
    ) -> dict[str, object] | None:
        """Shows the planner what a step was like, and takes its plan for the next one.

        Args:
            record: The figures of the step.
            loads: What the drives moved.
            began: When it began, by :func:`time.perf_counter`.
            rest_bytes: Most bytes that were seen beside the activations of layers.
            repeatable: Layers that are the same if their forward runs twice.
            on_device: Its times by the clock of a device whose work ends later than the host gave it out.

        Returns:
            What there is to tell of a new plan, see :meth:`AutoPlanner.news`.
        """
        planner = self.planner
        if planner is None:
            return None
        planner.not_recomputed = self.chosen - frozenset(repeatable)
        plan = planner.learn(
            self._capture.trace,
            self._offloader.stats.stalls,
            loads,
            self.plan,
            record,
            began=began,
            rest_bytes=rest_bytes,
            on_device=on_device,
        )
        news = None
        if plan is not None:
            self._put_in_force(plan)
            self._outgrown = None
            news = planner.news()
        if planner.is_done:
            self.planner = None
        return news

    def _put_in_force(self, plan: Plan) -> None:
        self._forget_learned(plan)
        self.plan = plan
        self._offloader.resize_window(plan.window)

    def _forget_learned(self, plan: Plan) -> None:
        """What a layer saves may be kept elsewhere because of how it, or the one before it, was placed."""
        changed = [old is not new for old, new in zip(self.plan.placements, plan.placements, strict=True)]
        near = (index for index, is_new in enumerate(changed) if is_new or (index and changed[index - 1]))
        self._capture.registry.forget_learned({self._layers[index] for index in near})
