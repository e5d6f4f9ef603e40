"""What is made of a step that has ended: its record, warnings, and a plan for the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tba_offload.capture.trace import DeviceTimes
from tba_offload.config.policy import Placement
from tba_offload.report.log import MEMORY, PLAN, TIMELINE
from tba_offload.session.notices import tell
from tba_offload.session.record import LateFigures, LateValue, record_of
from tba_offload.session.static_memory import frozen_bytes, largest_trained, static_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from tba_offload.report.log import StepRecord
    from tba_offload.session.figures import Times
    from tba_offload.session.parts import Parts
    from tba_offload.session.record import Journal
    from tba_offload.session.step import Step
    from tba_offload.store.base import DriveLoad

_LOOKED_AT = 3
"""Steps in which it is looked whether the window is too wide: later ones save as much."""

_LEAST_STATES = 32 << 10
"""Bytes of states of which an eighth, the sub-groups that are advised, is as much as a sub-group may be."""

_SKIPPED = 17
"""Steps without an update after which an optimizer is missed: a gradient scaler that begins at 2**16 has come
down to 1 after 16."""


class Conclusions:
    """Records steps, and learns from them.

    Args:
        parts: What worked in them.
        journal: Is given the record of each, and what else there is to tell of it.
        learned: Is given the record of each step that gradients came of, when the next one is planned.
    """

    def __init__(
        self,
        parts: Parts,
        journal: Journal,
        *,
        learned: Callable[[StepRecord], object],
    ) -> None:
        self._parts = parts
        self._journal = journal
        self._learned = learned

    def draw(self, step: Step, times: Times, number: int) -> StepRecord:
        """Record a step that has ended, and have the next one planned by what it was like.

        Args:
            step: The step.
            times: How long it took.
            number: How many steps have ended well, this one included.
        """
        parts = self._parts
        parts.gradients.count()
        self._warn_if_full(number)
        self._warn_of_wide_window(number)
        self._warn_of_wide_slots(number)
        loads = parts.store.take_loads()
        loss, late = self._figures_of(step, times)
        weights = parts.weights.take()
        record = record_of(step, times, number, loads, weights, parts, loss=loss)
        self._journal.record(record, late)
        self._look_at_memory(number)
        self._look_at_times(step, number, [] if weights is None else weights.waits)
        if record.gradient_bytes and not (record.scopes or record.left_alone_scopes):
            warn_of_no_layer(parts, number)
        parts.budget.end_step(record)
        if not step.state.skipped:
            self._learn(step, record, loads)
            self._learned(record)
        elif number == _SKIPPED and not parts.optimizers:
            parts.notices.no_update()
        return record

    def _look_at_memory(self, number: int) -> None:
        parts, figures = self._parts, self._parts.memory_watch.figures()
        if figures is None:
            return
        device, plan = parts.device.torch_device, parts.planning.plan
        layers = [site.layer.module for site in parts.sites]
        outside, inside = largest_trained(parts.modules, layers)
        left_out = [
            (str(each), len(each.blocks))
            for each in parts.left_out
            if any(map(parts.gradients.reached, each.blocks))
        ]
        if alike := _not_attached(parts.modules, layers):
            left_out.append((f"{alike} modules of the layers' class", alike))
        self._journal.note(
            MEMORY,
            {
                "step": number,
                "names": [site.layer.id.name for site in parts.sites],
                "placements": [str(placement) for placement in plan.placements],
                "window": parts.offloader.ledger.window.nbytes,
                "static": static_bytes(parts.modules, parts.optimizers, parts.states, device),
                "outside": outside,
                "inside": inside,
                "frozen_weights": frozen_bytes(layers, device),
                "left_out": left_out,
                **figures,
            },
        )

    def _look_at_times(
        self, step: Step, number: int, waits_for_weights: Sequence[tuple[float, float]]
    ) -> None:
        parts = self._parts
        names = [site.layer.id.name for site in parts.sites]
        waits = sorted([*parts.offloader.stats.stalls, *waits_for_weights])
        found = parts.curve.figures(step, parts.capture.trace, waits, names, parts.budget.limits)
        if found is not None:
            figures: dict[str, object] = {"step": number, **found}
            step.timeline.tell(figures)
            self._journal.note(TIMELINE, figures)

    def _figures_of(self, step: Step, times: Times) -> tuple[float | None, LateFigures | None]:
        """Return the loss if it is known by now, and what is not."""
        device, marks, loss = self._parts.device, self._parts.capture.trace.marks, step.loss
        if isinstance(loss, torch.Tensor):
            if loss.numel() != 1:
                raise ValueError(
                    f"the loss of a step is one number, not {loss.numel()}; step.loss = loss.mean()"
                )
            loss = LateValue(device, [[loss]], lambda groups: groups[0][0])
        if isinstance(loss, LateValue) and loss.is_there():
            loss = loss.read()
        if marks is not None and (marks.ended is None or times.had_optimizer):
            marks = None  # the time of optimizers, which is none of the step, is the host's
        undecided = step.updates.undecided if step.opened_itself else []  # others tell no skipped update
        skipped = LateValue(device, [undecided], lambda groups: all(groups[0])) if undecided else None
        if isinstance(loss, LateValue):
            return None, LateFigures(loss, marks, skipped)
        is_known = marks is None and skipped is None
        return loss, None if is_known else LateFigures(None, marks, skipped)

    def _warn_if_full(self, number: int) -> None:
        parts, stats = self._parts, self._parts.offloader.stats
        if not stats.full:
            return
        budget = parts.budget.of_activations
        beyond = 0 if budget is None else stats.own_peak + parts.capture.trace.kept_bytes - budget
        parts.notices.full(stats.fallback_kept, number, beyond)

    def _warn_of_wide_window(self, number: int) -> None:
        """Record that a window that holds most of what a step saves leaves most of it in memory."""
        planning, window = self._parts.planning, self._parts.budget.limits.window
        if number > _LOOKED_AT or window is None:
            return
        if Placement.OFFLOAD not in planning.plan.placements or planning.chosen:
            return
        saved = sum(activation.nbytes for activation in self._parts.capture.trace.activations)
        if saved and window > saved / 2:
            self._parts.notices.wide_window(saved, window)

    def _warn_of_wide_slots(self, number: int) -> None:
        """Slots that hold all states leave them in memory; all optimizers count together."""
        records = [states.records[-1] for states in self._parts.states if states.records]
        if number != _LOOKED_AT or not records:
            return
        states = sum(each.states_bytes for each in records)
        slots = sum(each.slot_bytes for each in records)
        if _LEAST_STATES <= states <= slots and not any(each.staying for each in records):
            self._parts.notices.wide_slots(states, slots)

    def _learn(self, step: Step, record: StepRecord, loads: Sequence[DriveLoad]) -> None:
        """Have the next step planned by what this one was like."""
        parts = self._parts
        controller, chosen = parts.planning.controller, parts.planning.chosen
        if controller is None:
            return
        may_plan = parts.world.may_plan_recomputation
        if not may_plan and chosen:
            parts.notices.other_ranks()
        trace, stalls = parts.capture.trace, parts.offloader.stats.marked_stalls
        news = parts.planning.learn(
            record,
            loads,
            began=step.began,
            beside=step.memory.beside,
            repeatable=[index for index in chosen if may_plan and parts.verifier.may_plan(index)],
            on_device=DeviceTimes(trace, stalls) if trace.marks is not None else None,
        )
        if news is None:
            return
        if controller.has_planned and parts.world.rank == 0:
            tell(f"plan after step {record.step}: {news['summary']}")
        self._journal.note(PLAN, {"step": record.step, **news})


def warn_of_no_layer(parts: Parts, number: int) -> None:
    """Warn that a step has trained the model and none of its layers, where that is no whim of the model.

    Args:
        parts: What works in steps.
        number: Of the step, from 1.
    """
    if parts.notices.said("layers replaced"):
        return
    present = {module for model in parts.modules for module in model.modules()}
    gone = [site.layer.id.name for site in parts.sites if site.layer.module not in present]
    if gone:
        parts.notices.layers_replaced(gone)
    elif number == 1:
        parts.notices.no_layer_ran()


def _not_attached(modules: Sequence[nn.Module], layers: Sequence[nn.Module]) -> int:
    """How many modules are of the classes of the layers and not among these."""
    kinds = set(map(type, layers))
    known = {id(inner) for layer in layers for inner in layer.modules()}
    found = {id(inner) for module in modules for inner in module.modules() if type(inner) in kinds}
    return len(found - known)
