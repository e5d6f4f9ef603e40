"""What a controller has to decide, and by which rules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tba_offload.config.policy import Placement
from tba_offload.plan.goals import GOALS
from tba_offload.plan.model import Plan
from tba_offload.plan.simulate import simulate
from tba_offload.plan.tuning import TUNING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from tba_offload.adapt.profiler import LayerKey
    from tba_offload.config.policy import Objective
    from tba_offload.plan.bandwidth import Bandwidth
    from tba_offload.plan.model import Limits
    from tba_offload.plan.profile import StepProfile
    from tba_offload.plan.simulate import Outcome
    from tba_offload.plan.tuning import Tuning


@dataclass(frozen=True, slots=True)
class Task:
    """The layers of a session and what is wanted of their plans.

    Attributes:
        policy: What the user wants for each layer of this process.
        layers: Model chunk and module name of each layer.
        limits: What plans must keep to.
        objective: What is wanted of them; see :func:`make_plan`.
        host_capacity: Bytes of host memory beside the drives; ``None`` if there is none.
        drives: Tells the drives apart, so that controllers of one process share what they find of one.
        is_shared: Whether other ranks have these layers too, so that what is recomputed is agreed on.
        tuning: The numbers that plans are made with.
    """

    policy: tuple[Placement, ...]
    layers: tuple[LayerKey, ...]
    limits: Limits
    objective: Objective
    host_capacity: int | None = None
    drives: tuple[Hashable, ...] = ()
    is_shared: bool = False
    tuning: Tuning = TUNING

    @property
    def names(self) -> tuple[str, ...]:
        """Module name of each layer."""
        return tuple(name for _, name in self.layers)

    @property
    def decides(self) -> bool:
        """Whether there are layers to decide on."""
        return Placement.AUTO in self.policy

    @property
    def may_recompute(self) -> bool:
        """Whether the planner may choose to recompute a layer."""
        ways = GOALS[self.objective].choices
        return self.decides and any(placement.recomputes for placement in ways)

    @property
    def has_budget(self) -> bool:
        """Whether plans have to keep to one."""
        return self.limits.budget is not None and self.decides

    @property
    def careful_limits(self) -> Limits:
        """The limits of a plan under which no step was measured yet."""
        budget = self.limits.budget
        if budget is None:
            return self.limits
        return replace(self.limits, budget=int((1 - self.tuning.unmeasured) * budget))

    def first(self) -> Plan:
        """Return the plan of the first steps.

        What memory holds beside activations of layers is not known yet.
        """
        window, budget = self.limits.window, self.limits.budget
        if budget is not None and self.has_budget:
            window = min(budget // self.tuning.first_window, budget if window is None else window)
        return Plan(self.policy, window=window)


@dataclass(frozen=True, slots=True)
class Case:
    """A task with all that plans for it are made from.

    Attributes:
        task: What is wanted.
        profile: The step.
        bandwidth: How fast offloaded bytes travel.
        not_recomputed: Layers that must not be recomputed unless the policy says so.
    """

    task: Task
    profile: StepProfile
    bandwidth: Bandwidth
    not_recomputed: frozenset[int]

    def play(self, plan: Plan) -> Outcome:
        """Return what comes of a step under a plan."""
        return simulate(self.profile, plan, self.bandwidth)

    def counting_on(self, share: float) -> Case:
        """Return the same with drives that have only a share of their rates."""
        return replace(self, bandwidth=self.bandwidth.scaled(share))
