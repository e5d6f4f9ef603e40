"""Plans for a task: the best under its budget, those that show what is not known, and what is wrong with one.

Pure: the same arguments give the same plan.
"""

from __future__ import annotations

import dataclasses
import math
from operator import itemgetter
from typing import TYPE_CHECKING

from tba_offload.config.policy import Objective, Placement
from tba_offload.days import bytes_per_day
from tba_offload.formatting import readable_size
from tba_offload.plan.goals import GOALS
from tba_offload.plan.model import Plan
from tba_offload.plan.profile import computed_as
from tba_offload.plan.search import make_plan
from tba_offload.plan.terms import Freedom
from tba_offload.plan.what_if import peak_of_keep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tba_offload.adapt.task import Case, Task
    from tba_offload.plan.model import Limits
    from tba_offload.plan.profile import StepProfile
    from tba_offload.plan.simulate import Outcome

_LOOKS = (
    Placement.OFFLOAD,
    Placement.KEEP,
    Placement.RECOMPUTE,
    Placement.OFFLOAD_REMAT,
    Placement.RECOMPUTE_EXCEPT_ATTENTION,
)
"""Placements that an excursion tries if the plan has none of it. Keep is among them, because plans without a
budget are held to its time."""


def bare(plan: Plan) -> Plan:
    """Return a plan without what is expected of it; layers that are still ``auto`` are offloaded."""
    placed = tuple(Placement.OFFLOAD if each is Placement.AUTO else each for each in plan.placements)
    return dataclasses.replace(plan, placements=placed, prediction=None)


def offloads_all(plan: Plan) -> bool:
    """Whether every layer runs with hooks."""
    return {Placement.AUTO, Placement.OFFLOAD}.issuperset(plan.placements)


def predicted(case: Case, plan: Plan) -> Plan:
    """Return a plan with what it does on a drive."""
    return dataclasses.replace(plan, prediction=case.play(plan).prediction)


# The best plan


def best_plan(case: Case) -> Plan:
    """Return the best plan that leaves free what was never measured, else the best within the budget."""
    task = case.task

    def within(limits: Limits) -> Plan:
        return make_plan(
            case.profile,
            case.bandwidth,
            limits,
            policy=task.policy,
            objective=task.objective,
            not_recomputed=case.not_recomputed,
            tuning=task.tuning,
        )

    plan = within(task.careful_limits)
    peak = plan.prediction.peak_bytes if plan.prediction is not None else 0
    if task.careful_limits.planned < peak <= task.limits.planned:
        plan = within(task.limits)
    return _sound(case, plan, within)


def _sound(case: Case, plan: Plan, within: Callable[[Limits], Plan]) -> Plan:
    """Return a plan that keeps to the budget however slow the drive is, if there is one.

    With a slow drive too, the plan leaves free what was never measured, if it can: the peak is at another
    moment then, and more may lie beside the layers than at the one that was measured.
    """
    budget = case.task.limits.budget
    if budget is None:
        return plan
    careful, found = case.task.careful_limits.budget or 0, []
    for each, peak in _for_ever_less(case, plan, within):
        sound = _narrowed(case, each, peak - careful)
        if sound is not None:
            return sound
        found.append((each, peak))
    narrowed = (_narrowed(case, each, peak - budget) for each, peak in found)
    lowest, _ = min(found, key=itemgetter(1))
    return next((each for each in narrowed if each is not None), lowest)


def _for_ever_less(case: Case, plan: Plan, within: Callable[[Limits], Plan]) -> Iterator[tuple[Plan, int]]:
    """Yield a plan, then others that keep less, with the worst peak of each.

    As much less as that was too high.
    """
    task = case.task
    careful = budget = task.careful_limits.budget or 0
    yield plan, (peak := worst_peak(case, plan))
    for _ in range(task.tuning.most_narrowed):
        budget -= peak - careful
        if budget <= 0:
            return
        plan = within(dataclasses.replace(task.limits, budget=budget))
        yield plan, (peak := worst_peak(case, plan))


def _narrowed(case: Case, plan: Plan, excess: int) -> Plan | None:
    """Return the plan, with a window that is smaller by the bytes by which its worst peak is too high.

    ``None`` if the largest activation would not fit into that window.
    """
    if excess <= 0:
        return plan
    if plan.window is None or plan.window - excess < case.profile.largest_bytes:
        return None
    return predicted(case, dataclasses.replace(plan, window=plan.window - excess))


def worst_peak(case: Case, plan: Plan) -> int:
    """Return the peak in bytes if the window is full when most is held: drives have their moods."""
    found = case.play(plan)
    if plan.window is None:
        return found.peak_bytes
    full = found.held_bytes + plan.window + case.profile.rest_bytes
    return max(found.peak_bytes, min(full, peak_of_keep(case.profile, case.bandwidth)))


# Plain plans


def is_plain(plan: Plan, policy: Sequence[Placement]) -> bool:
    """Whether a plan gives one placement to all layers that are free."""
    pairs = zip(plan.placements, policy, strict=True)
    return len({placed for placed, wanted in pairs if wanted is Placement.AUTO}) == 1


def rival(case: Case, plan: Plan) -> Plan | None:
    """Return the fastest other plan that gives all layers one placement; None if none keeps to the limits."""
    task = case.task
    freedom = Freedom.all_of(case.profile, task.policy, case.not_recomputed)
    found, least = None, math.inf
    for placement in GOALS[task.objective].choices:
        other = Plan(freedom.uniform(placement), window=plan.window)
        if bare(other) == bare(plan) or worst_peak(case, other) > task.careful_limits.planned:
            continue
        if writes_too_much(case, other):
            continue
        other = predicted(case, other)
        if other.prediction is not None and other.prediction.seconds < least:
            found, least = other, other.prediction.seconds
    return found


# Plans that show what is not known


def probing_plan(case: Case, *, step: int) -> Plan:
    """Return some layers of each kind kept, recomputed and rebuilt, as many as the budget allows."""
    task, first = case.task, case.task.first()
    fewest = 3 if task.objective is Objective.MEMORY else 4  # one offloads beside each that is a choice
    for parts, keeps in ((fewest, True), (fewest, False), (6, True), (12, True), (len(task.policy), True)):
        plan = dataclasses.replace(first, placements=_mixed(case, max(parts, 2), step=step, keeps=keeps))
        if worst_peak(case, plan) <= task.careful_limits.planned:
            return plan
    return first


def _mixed(case: Case, parts: int, *, step: int, keeps: bool) -> tuple[Placement, ...]:
    """One layer of a kind in each group gets each placement that is a choice, the others offload.

    Where a layer of each kind that keeps is too much, one that is recomputed may fit: that is what keeps to
    tight budgets.
    """
    task, profile = case.task, case.profile
    placements = list(task.policy)
    is_last = step + 1 >= task.tuning.learning  # before there is a plan
    for kind in set(profile.layers):
        spares = is_last and keeps and profile.kinds[kind].may_spare_attention
        again = Placement.RECOMPUTE_EXCEPT_ATTENTION if spares else Placement.RECOMPUTE
        turns = (*([Placement.KEEP] if keeps else []), again, Placement.OFFLOAD_REMAT)
        free = _free_layers(case, kind)
        if len(free) < 3:  # it is measured by the others
            continue
        for place, layer in enumerate(reversed(free)):
            turn = (place + step * keeps) % parts
            if turn < len(turns) and _may_try(case, layer, turns[turn]):
                placements[layer] = turns[turn]
    return tuple(placements)


def excursion(case: Case, plan: Plan) -> Plan | None:
    """Return the plan, but with one layer of each kind under a placement that has none now.

    None if none fits.

    What a placement costs was measured when memory and files still grew, or on another drive. Without a look
    at it now and then, a bad measurement would be believed for ever. But what a drive costs that moves bytes
    anyway is known. Where several ranks share layers, what is recomputed is not tried: that would have to be
    agreed on.
    """
    task, profile = case.task, case.profile
    begin = look = dataclasses.replace(plan, prediction=None)
    now = case.play(begin)
    drive_is_known = now.written_bytes > 0
    for layer, placement in _untried(case, plan):
        placements = list(look.placements)
        placements[layer] = placement
        wider = dataclasses.replace(look, placements=tuple(placements))
        then = case.play(wider)
        waits = then.stall_seconds - now.stall_seconds > task.tuning.waits * now.seconds
        is_known = drive_is_known and placement in profile.timings[profile.layers[layer]]
        fits = worst_peak(case, wider) <= task.careful_limits.planned
        if fits and not (is_known and waits) and not writes_too_much(case, wider):
            look = wider
    return None if look is begin else look


def writes_too_much(case: Case, plan: Plan) -> bool:
    """Whether a step under a plan may write more than its share of a day."""
    return _that_writes_too_much(case, plan) is not None


def _that_writes_too_much(case: Case, plan: Plan) -> Outcome | None:
    """Return what comes of such a plan; ``None`` of others."""
    limits = case.task.limits
    if limits.written_per_day is None:
        return None  # a step with many activations takes long to play
    found = case.play(plan)
    return found if found.sent_bytes > limits.written_in(found.seconds) else None


def _untried(case: Case, plan: Plan) -> Iterator[tuple[int, Placement]]:
    """One layer of each kind for each placement that the plan has none of."""
    task, profile = case.task, case.profile
    for kind in set(profile.layers):
        free = [
            layer
            for layer in _free_layers(case, kind)
            if not (task.is_shared and plan.placements[layer].recomputes)
        ]
        measured = {computed_as(plan.placements[layer]) for layer in free}
        missing = [
            placement
            for placement in _LOOKS
            if placement not in measured and not (task.is_shared and placement.recomputes)
        ]
        # What was never seen comes first: there may be fewer layers than placements.
        missing.sort(key=lambda placement: placement in profile.timings[kind])
        for placement in missing:
            allowed = (layer for layer in free if _may_try(case, layer, placement))
            # One that is recomputed already has the memory to be recomputed in another way.
            layer = min(allowed, key=lambda layer: _changes(plan, layer, placement), default=None)
            if layer is not None:
                free.remove(layer)
                yield layer, placement


def _changes(plan: Plan, layer: int, placement: Placement) -> bool:
    """Whether a layer is recomputed under one of a plan and a placement, and not under the other."""
    return plan.placements[layer].recomputes != placement.recomputes


def _free_layers(case: Case, kind: int) -> list[int]:
    """Return the layers of a kind that the planner decides on."""
    pairs = enumerate(zip(case.task.policy, case.profile.layers, strict=True))
    return [layer for layer, (wanted, its) in pairs if wanted is Placement.AUTO and its == kind]


def _may_try(case: Case, layer: int, placement: Placement) -> bool:
    """Whether the planner may have a layer run so, and there is something to learn from it."""
    kind = case.profile.kind_of(layer)
    if placement is Placement.RECOMPUTE_EXCEPT_ATTENTION and not kind.may_spare_attention:
        return False
    if placement.recomputes:
        return case.task.objective is not Objective.MEMORY and layer not in case.not_recomputed
    if placement is Placement.OFFLOAD_REMAT:
        return kind.rebuilt_bytes > 0 or not kind.knows_rebuilt
    return True


# What is wrong with a plan


def over_writes(case: Case, plan: Plan) -> str | None:
    """Return that the best plan that was found writes more than its share of a day; None if it does not."""
    found, limit = _that_writes_too_much(case, plan), case.task.limits.written_per_day
    if found is None or limit is None:
        return None
    day = bytes_per_day(found.sent_bytes, found.seconds)
    return (
        f"store.write_bytes_per_day of {readable_size(limit)} cannot be met: the plan with the fewest bytes "
        f"that was found writes up to {readable_size(day)} a day; raise it, place more layers auto, or raise "
        f"{case.task.limits.setting}"
    )


def over_budget(task: Task, plan: Plan, profile: StepProfile, room: int | None) -> str | None:
    """Return that the lowest peak that was found is over the budget, and what it consists of.

    None if it is not.

    Args:
        task: Has the budget.
        plan: The best plan that was found.
        profile: The step.
        room: Bytes that the drives hold at most.
    """
    budget = task.limits.budget
    peak = plan.prediction.peak_bytes if plan.prediction is not None else 0
    if budget is None or peak <= budget:
        return None
    layer = max(kind.nbytes + kind.small_bytes for kind in profile.kinds)
    window = "" if plan.window is None else f", up to {readable_size(plan.window)} in flight"
    drives = "" if room is None else f", room for {readable_size(room)} on the drives"
    device = task.limits.device
    if device is not None and device.left <= 0:
        return None  # that is told, with what takes it all
    left = "" if device is None else f" that a device has left ({device})"
    beside = readable_size(profile.beside_bytes(plan.placements))
    needed = f"the lowest peak found is {readable_size(peak)}"
    if coming := profile.gradient_bytes:
        needed = (
            f"the lowest peak found needs {readable_size(peak + coming)} together with gradients, where "
            f"{readable_size(budget + coming)} are left for both"
        )
    return (
        f"the budget of {readable_size(budget)}{left} cannot be met: {needed}, with "
        f"{beside} beside the layers (logits, loss, temporaries), "
        f"{readable_size(layer)} in the largest layer{window}{drives}; raise "
        f"{task.limits.setting}, or take smaller micro-batches or shorter sequences"
    )
