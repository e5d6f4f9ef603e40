"""Texts about plans: placements, predictions, reasons and warnings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tba_offload.config.policy import Objective, Placement
from tba_offload.days import bytes_per_day
from tba_offload.formatting import layers_by_placement, readable_rate, readable_size, significant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.planner.model import Limits, Plan
    from tba_offload.planner.solve import Case


def describe(names: Sequence[str], plan: Plan, occasion: str, case: Case) -> str:
    """Return a text with the placements, the prediction and the reasons of a new plan.

    Args:
        names: Module name of each layer.
        plan: The plan to describe.
        occasion: Event that caused the plan.
        case: Solver input from which the plan was made.
    """
    parts = [layers_by_placement(names, plan.placements)]
    expected = plan.prediction
    if expected is not None:
        waits = f" ({significant(expected.stall_seconds)} s of waits)" if expected.stall_seconds else ""
        peak = readable_size(expected.activation_peak)
        parts.append(f"Predicted peak {peak}, predicted step {significant(expected.seconds)} s{waits}")
    if written := written_a_day(case, plan):
        parts.append(f"The plan writes {written}")
    return ". ".join([*parts, reason(case), f"Reason for this plan: {occasion}"])


def reason(case: Case) -> str:
    """Return the reason for a plan as text: the memory for activations and the rates of the store."""
    keep = f"Keeping all layers needs {readable_size(case.keep.activation_peak)}"
    if case.objective is Objective.MEMORY:
        return f"{keep}. This plan has the lowest peak of all plans that keep the step time. {_store(case)}"
    budget = case.limits.budget
    if budget is None:
        return f"{keep}, and no limit is set"
    room = f"{readable_size(budget + case.profile.gradient_bytes)} is available for activations"
    room += " on the device" if case.limits.device is not None else ""
    room += ", until backward needs memory for gradients" if case.profile.gradient_bytes else ""
    if case.highest < budget:
        room = f"a plan may use {readable_size(case.highest)}, twice the highest peak so far"
    return f"{keep}, and {room}. {_store(case)}"


def _store(case: Case) -> str:
    profile, seconds, saved = case.profile, [0.0, 0.0], 0
    for slot in profile.slots:
        seconds[slot.backward] += profile.timing(slot.layer, Placement.KEEP)[slot.backward] + slot.gap
        saved += 0 if slot.backward else profile.kind_of(slot.layer).whole_bytes
    in_host = 0 if case.bandwidth.host is None else case.bandwidth.host.capacity or 0
    write, read = (readable_rate(max(saved - in_host, 0) / each if each else 0.0) for each in seconds)
    needed = f"To offload all layers without waits, the store needs to write {write} and read {read}"
    return f"Rates of the store: {case.bandwidth}. {needed}"


def written_a_day(case: Case, plan: Plan) -> str | None:
    """Return the bytes that a plan writes per day, and their limit; ``None`` if the policy sets no limit."""
    allowed, found = case.limits.written_per_day, case.played(plan)
    if allowed is None:
        return None
    day = readable_size(bytes_per_day(found.sent_bytes, found.seconds))
    return f"up to {day} per day (store.write_bytes_per_day: {readable_size(allowed)})"


def over_writes(case: Case, plan: Plan) -> str:
    """Return the warning that every plan exceeds ``store.write_bytes_per_day``."""
    allowed, written = readable_size(case.limits.written_per_day or 0), written_a_day(case, plan)
    least = f"even the plan that writes the fewest bytes writes {written}"
    what = f"store.write_bytes_per_day of {allowed} cannot be met: {least}"
    return f"{what}. Raise the limit, or offload fewer layers"


def over_budget(limits: Limits, plan: Plan, case: Case) -> str:
    """Return the warning that every plan exceeds the budget, with the sizes that make up the lowest peak."""
    profile, found = case.profile, case.played(plan)
    left, setting = "", "budget.activation_bytes"
    if limits.device is not None:
        left = f" (the device memory of {limits.device})"
        setting = "budget.device_bytes" if limits.budget == limits.device.budget else setting
    gradients = " together with gradients" if profile.gradient_bytes else ""
    beside = max(profile.loss_bytes, *(max(kind.beside or (0,)) for kind in profile.kinds)) + profile.headroom
    largest = max(kind.whole_bytes for kind in profile.kinds)
    return (
        f"the budget of {readable_size(limits.budget or 0)}{left} cannot be met: the lowest peak found is "
        f"{readable_size(found.peak_bytes + profile.gradient_bytes)}{gradients}. "
        f"The peak includes {readable_size(max(beside, 0))} outside layers (logits, loss, temporaries), "
        f"{readable_size(largest)} in the largest layer, and {readable_size(plan.window or 0)} in flight. "
        f"Raise {setting}, or use smaller micro-batches or shorter sequences"
    )
