"""A plan in one line, for logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tba_offload.formatting import layers_by_placement, readable_size, significant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.plan.model import Plan


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
