"""Plans in words: a new one in one line for logs, and why it places a layer as it does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tba_offload.config.policy import Placement
from tba_offload.formatting import layers_by_placement, readable_size, significant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.plan.bandwidth import Bandwidth
    from tba_offload.plan.model import Plan
    from tba_offload.plan.profile import StepProfile


def describe_plan(names: Sequence[str], plan: Plan, before: Plan | None, why: str) -> str:
    """What a new plan does, what it is expected to bring, what it changes, and why it was made.

    Args:
        names: Module name of each layer.
        plan: The plan.
        before: The one that it replaces; ``None`` if it is the first.
        why: Why it was made.
    """
    parts = [_placed(names, plan), *_predicted(plan), *_changed(names, plan, before)]
    return "; ".join([*parts, f"made because {why}"])


def _placed(names: Sequence[str], plan: Plan) -> str:
    return layers_by_placement(names, [placement.value for placement in plan.placements])


def _predicted(plan: Plan) -> list[str]:
    expected = plan.prediction
    if expected is None:
        return []
    waits = f", {significant(expected.stall_seconds)} s of it waits" if expected.stall_seconds else ""
    return [
        f"predicted peak {readable_size(expected.peak_bytes)}, step {significant(expected.seconds)} s{waits}"
    ]


def _changed(names: Sequence[str], plan: Plan, before: Plan | None) -> list[str]:
    if before is None:
        return []
    if before.placements != plan.placements:
        return [f"before: {_placed(names, before)}"]
    changes = []
    if before.window != plan.window:
        changes.append(f"window {_window(plan)} instead of {_window(before)}")
    if before.kept != plan.kept:
        changes.append("other single activations stay in memory")
    return changes


def _window(plan: Plan) -> str:
    return "without limit" if plan.window is None else readable_size(plan.window)


def explain(profile: StepProfile, plan: Plan, drive: Bandwidth, layer: int) -> str:
    """Why a plan places a layer as it does, in one line."""
    kind, placement = profile.kind_of(layer), plan.placements[layer]
    moved = kind.nbytes - plan.kept_bytes(layer, kind)
    size, travel = readable_size(kind.nbytes), _milliseconds(moved / drive.write + moved / drive.read)
    kept = profile.timing(layer, Placement.KEEP)
    again = _milliseconds(profile.timing(layer, Placement.RECOMPUTE).backward - kept.backward)
    if placement is Placement.SELECTIVE:
        return _explain_selective(profile, drive, layer, moved)
    if placement is Placement.KEEP:
        cost = _milliseconds(profile.timing(layer, Placement.OFFLOAD).whole - kept.whole)
        return f"{size} have room; offloading takes {travel} of the drive and {cost} more compute"
    if placement is Placement.RECOMPUTE:
        return f"{again} of compute spare the drive {travel} for {size}"
    if placement is Placement.RECOMPUTE_OFFLOAD:
        return f"{again} of compute, and {readable_size(kind.input_bytes)} travel instead of {size}"
    what = f"{readable_size(moved)} of {size}" if moved < kind.nbytes else size
    return f"{what} take {travel} of the drive, and recomputing takes {again} of compute"


def _explain_selective(profile: StepProfile, drive: Bandwidth, layer: int, moved: int) -> str:
    kind = profile.kind_of(layer)
    spared = _milliseconds(kind.rebuilt_bytes / drive.write + kind.rebuilt_bytes / drive.read)
    again = profile.timing(layer, Placement.SELECTIVE).whole - profile.timing(layer, Placement.OFFLOAD).whole
    rebuilt, rest = readable_size(kind.rebuilt_bytes), readable_size(moved - kind.rebuilt_bytes)
    return (
        f"{_milliseconds(max(again, 0.0))} of compute spare the drive {spared} for {rebuilt}; {rest} travel"
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
