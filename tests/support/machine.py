"""A machine that no test waits for: it answers to the plans of a controller with the steps they make."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tba_offload.capture.trace import (
    ActivationKey,
    ActivationTrace,
    ScopeKey,
    ScopeTrace,
    StepTrace,
    Treatment,
)
from tba_offload.config.policy import Placement
from tba_offload.planner.measure import StepObservation
from tba_offload.planner.model import computed_as
from tba_offload.planner.play import play
from tba_offload.report.log import StepRecord
from tba_offload.store.base import DriveLoad, Load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.planner.auto import Controller
    from tba_offload.planner.model import Bandwidth, LayerKind, Plan, StepProfile


class Machine:
    """Trains under a controller.

    Args:
        controller: It plans.
        profile: What the steps are like.
        bandwidth: How fast the drive is.

    Attributes:
        never: Layers that must not run twice.
    """

    def __init__(self, controller: Controller, profile: StepProfile, bandwidth: Bandwidth) -> None:
        self.controller = controller
        self.profile = profile
        self.bandwidth = bandwidth
        self.plan = controller.task.first()
        self.steps = 0
        self.never: frozenset[int] = frozenset()

    def run(self, steps: int) -> list[Plan]:
        """Steps that are all alike; the plan of each."""
        return [self.step() for _ in range(steps)]

    def step(self, *, bandwidth: Bandwidth | None = None, slower: float = 1.0, peak: float = 1.0) -> Plan:
        """One step, and what the controller makes of it.

        Args:
            bandwidth: Other rates than usual.
            slower: By which factor the step takes longer than it should.
            peak: By which factor its peak is higher than it should be.

        Returns:
            The plan that was in force.
        """
        self.steps += 1
        self.controller.sizes.begin_step()
        plan = self._fitting()
        rates = bandwidth or self.bandwidth
        found = play(self.profile, plan, rates)
        trace, ended = trace_of_step(self.profile, plan, slower)
        stall = found.stall_seconds
        record = StepRecord(
            step=self.steps,
            seconds=ended + stall,
            stall_seconds=stall,
            activation_peak_bytes=int(peak * found.peak_bytes),
            own_peak_bytes=found.peak_bytes - self.profile.headroom,
            fallback_kept_bytes=found.fallback_bytes,
        )
        load = DriveLoad(
            Load(found.written_bytes, found.written_bytes / rates.write),
            Load(found.read_bytes, found.read_bytes / rates.read),
        )
        stalls = [(ended, ended + stall)] if stall else []
        seen = StepObservation(trace, stalls, [load], plan, record, 0.0, not_recomputed=self.never)
        self.plan = self.controller.observe(seen)
        return plan

    def _fitting(self) -> Plan:
        """The plan, unless a layer is given more than it was made for."""
        plan = self.plan
        if self.controller.task.has_budget:
            for slot in self.profile.slots:
                size = (1, self.profile.kind_of(slot.layer).input_bytes)
                if not slot.backward and not self.controller.sizes.note(slot.layer, size):
                    plan = self.controller.least(self.plan)
        return plan


def trace_of_step(profile: StepProfile, plan: Plan, slower: float = 1.0) -> tuple[StepTrace, float]:
    """What a step under a plan records, and when it ends; it begins at 0, and nothing in it waits."""
    trace, now = StepTrace(), 0.0
    begun: dict[tuple[int, int], tuple[ScopeTrace, list[tuple[ActivationTrace, float]]]] = {}
    for slot in profile.slots:
        now += slower * slot.gap
        placement = plan.placements[slot.layer]
        forward, backward = profile.timing(slot.layer, computed_as(placement))
        if slot.backward:
            scope, saved = begun[slot[:2]]
            scope.backward_began = now
            for activation, until in saved:
                activation.unpacked_at = now + until * slower * backward
            now += slower * backward
            continue
        kind = profile.kind_of(slot.layer)
        key = ScopeKey(slot.layer, slot.micro_batch, 0, f"layers.{slot.layer}")
        scope = ScopeTrace(key, placement, now, kind.input_bytes, now + slower * forward)
        saved = _saved(kind, kind.staying(placement.percent), key, placement, now, slower * forward)
        trace.scopes.append(scope)
        trace.activations += [activation for activation, _ in saved]
        trace.kept_bytes += sum(a.nbytes for a, _ in saved if a.treatment is Treatment.PLANNED_KEEP)
        begun[slot[:2]] = scope, saved
        now += slower * forward
    trace.backward_ends.append(now)
    return trace, now + slower * profile.tail


def _saved(
    kind: LayerKind,
    kept: frozenset[int],
    key: ScopeKey,
    placement: Placement,
    began: float,
    seconds: float,
) -> Sequence[tuple[ActivationTrace, float]]:
    """The activations of a run of a layer, and when backward uses each, as a share of its time."""
    if placement is not Placement.AUTO and not placement.is_offloaded:
        return []
    saved = []
    for number, each in enumerate(kind.activations):
        treatment = Treatment.PLANNED_KEEP if number in kept else Treatment.OFFLOADED
        if placement is Placement.OFFLOAD_REMAT and each.rebuilt:
            treatment = Treatment.REBUILT
        activation = ActivationTrace(
            ActivationKey(key, number), each.nbytes, treatment, began + each.at * seconds
        )
        saved.append((activation, each.until))
    return saved
