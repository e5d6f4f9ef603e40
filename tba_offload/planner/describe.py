"""Plans in words: what a plan does, why it is as it is, and why a layer is placed as it is."""

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
    """Return what a new plan does, what is expected of it, why it is so, and what it was made after.

    Args:
        names: Module name of each layer.
        plan: The plan.
        occasion: What it was made after.
        case: What it was made from.
    """
    parts = [layers_by_placement(names, plan.placements)]
    expected = plan.prediction
    if expected is not None:
        waits = f", {significant(expected.stall_seconds)} s of it waits" if expected.stall_seconds else ""
        peak = readable_size(expected.activation_peak)
        parts.append(f"predicted peak {peak}, step {significant(expected.seconds)} s{waits}")
    if written := written_a_day(case, plan):
        parts.append(written)
    return "; ".join([*parts, reason(case), f"made because {occasion}"])


def reason(case: Case) -> str:
    """Return why plans are as they are: what there is room for, and what the store takes."""
    keep = f"keeping all takes {readable_size(case.keep.activation_peak)}"
    if case.objective is Objective.MEMORY:
        return f"{keep}; the peak is the lowest that costs no time, {_store(case)}"
    budget = case.limits.budget
    if budget is None:
        return f"{keep}, and there is no limit"
    room = f"there is {readable_size(budget + case.profile.gradient_bytes)}"
    room += " until gradients come" if case.profile.gradient_bytes else ""
    room += " on the device" if case.limits.device is not None else ""
    if case.highest < budget:
        room = f"up to {readable_size(case.highest)} may be tried, twice as much as was seen to fit"
    if case.keep.peak_bytes <= case.limits.planned and case.keep.activation_peak <= case.highest:
        return f"{keep}, and {room}"
    return f"{keep}, and {room}; {_store(case)}"


def _store(case: Case) -> str:
    """Return the rate that the store gives, and the rate at which writing all would delay nothing."""
    profile, given = case.profile, readable_rate(case.bandwidth.write)
    slots = [slot for slot in profile.slots if not slot.backward]
    seconds = sum(profile.timing(slot.layer, Placement.KEEP).forward + slot.gap for slot in slots)
    saved = sum(profile.kind_of(slot.layer).whole_bytes for slot in slots)
    needed = saved / seconds if seconds else 0.0
    if needed > case.bandwidth.write:
        return f"the store takes {given}, and offloading all without waits needs {readable_rate(needed)}"
    return f"the store takes {given}, enough to offload all without waits ({readable_rate(needed)})"


def written_a_day(case: Case, plan: Plan) -> str | None:
    """Return what a plan writes in a day; ``None`` without a limit."""
    allowed, found = case.limits.written_per_day, case.played(plan)
    if allowed is None:
        return None
    day = readable_size(bytes_per_day(found.sent_bytes, found.seconds))
    return f"writes up to {day} a day of the {readable_size(allowed)} that store.write_bytes_per_day allows"


def over_writes(case: Case, plan: Plan) -> str:
    """Return the warning that no plan keeps to the limit of writes."""
    allowed, written = readable_size(case.limits.written_per_day or 0), written_a_day(case, plan)
    what = f"store.write_bytes_per_day of {allowed} cannot be met: what is found {written}"
    return f"{what}. Raise the limit, or place fewer layers offload"


def over_budget(limits: Limits, plan: Plan, case: Case) -> str:
    """Return the warning that no plan keeps to the budget, and what the lowest peak consists of."""
    profile, found = case.profile, case.played(plan)
    left, setting = "", "budget.activation_bytes"
    if limits.device is not None:
        left = f" that a device has left ({limits.device})"
        setting = "budget.device_bytes" if limits.budget == limits.device.budget else setting
    gradients = " together with gradients" if profile.gradient_bytes else ""
    beside = max(profile.loss_bytes, *(max(kind.beside or (0,)) for kind in profile.kinds)) + profile.headroom
    largest = max(kind.whole_bytes for kind in profile.kinds)
    return (
        f"the budget of {readable_size(limits.budget or 0)}{left} cannot be met: the lowest peak found is "
        f"{readable_size(found.peak_bytes + profile.gradient_bytes)}{gradients}, with "
        f"{readable_size(max(beside, 0))} beside the layers (logits, loss, temporaries), "
        f"{readable_size(largest)} in the largest layer, up to {readable_size(plan.window or 0)} in flight. "
        f"Raise {setting}, or take smaller micro-batches or shorter sequences"
    )
