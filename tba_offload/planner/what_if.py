"""Plans that are computed from a run log for another budget, device, number of layers or number of drives."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from tba_offload.config import BudgetConfig, OffloadConfig
from tba_offload.config.policy import Objective, Placement, Rule
from tba_offload.days import bytes_per_day
from tba_offload.errors import ConfigError, RunLogError
from tba_offload.formatting import readable_size, renumbered, significant
from tba_offload.planner.describe import written_a_day
from tba_offload.planner.model import Bandwidth, DeviceShare, Limits, Plan, PlannedStep, Slot, StepProfile
from tba_offload.planner.play import play
from tba_offload.planner.solve import Case, solve
from tba_offload.report.log import PLAN, PlanEvent, read_run_log
from tba_offload.report.plans import PlanReport
from tba_offload.report.ranks import paths_of_ranks

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from tba_offload.report.log import RunLog, StepRecord

_PROFILE, _PLAN, _RATES = TypeAdapter(StepProfile), TypeAdapter(Plan), TypeAdapter(Bandwidth)

FRONTIER = (0.1, 0.15, 0.2, 0.25, 0.35, 0.5, 0.65, 0.8, 1.05)
"""Budgets for which ``tba-offload plan`` shows the best plan, as fractions of the memory peak with placement
``keep``."""


@dataclass(frozen=True, slots=True)
class Situation:
    """Measurements of a run, from which plans are made.

    Attributes:
        names: Module names of the layers.
        profile: Profile of a step. The profile's headroom is the measured peak minus the simulated peak.
        bandwidth: Rates of the store.
        config: Policy of the run.
        elsewhere: Layers of other processes, for example of other pipeline stages, and their placements.
        not_recomputed: Indices of the layers that must not be recomputed, because a recomputation of similar
            layers gave other results.
        beside: Bytes on the device other than activations: live bytes before a step, and the largest number
            of gradient bytes at one time; ``None`` if not measured. Offloaded optimizer states are not
            counted, except sub-groups in use.
    """

    names: tuple[str, ...]
    profile: StepProfile
    bandwidth: Bandwidth
    config: OffloadConfig
    elsewhere: tuple[tuple[str, Placement], ...] = ()
    not_recomputed: frozenset[int] = frozenset()
    beside: tuple[int, int] | None = None

    @classmethod
    def of(cls, path: str | os.PathLike[str], bandwidth: Bandwidth | None = None) -> Situation:
        """Return the situation from which the last plan in a run log was made.

        Args:
            path: The run log.
            bandwidth: Rates of the drives, which replace the measured rates.

        Raises:
            RunLogError: The run log cannot be read, has no plan, or has no drive rates although ``bandwidth``
                is ``None``. Several ranks have written a run log for ``path``.
            ConfigError: The policy in the run log cannot be read.
        """
        first, *others = paths_of_ranks(path)
        if others:
            raise RunLogError(
                f"{path}: {1 + len(others)} ranks wrote one log each. Pass the log of one rank: {first}"
            )
        log = read_run_log(path)
        log.events(PlanEvent)  # raises an error if a plan event is damaged
        event: Any = next((each for each in reversed(log.others) if each["event"] == PLAN), None)
        if event is None:
            raise RunLogError(
                f"{log.path}: the run log has no plan. Log three steps that keep all layers, or "
                "that offload more than budget.in_flight_bytes"
            )
        config = OffloadConfig.from_yaml(log.header.policy or "")
        in_backward = config.states is not None and config.states.when == "backward"
        updates: Any = [] if in_backward else [each for each in log.others if each["event"] == "states"]
        names = tuple(event["names"])
        try:
            profile = _PROFILE.validate_python(event["profile"])
            measured = _RATES.validate_python(event["drive"])
            profile = _as_measured(profile, measured, log, event)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise RunLogError(f"{log.path}: the plan event cannot be read: {error!r}") from error
        if bandwidth is None and measured.capacity == 0:
            raise RunLogError(
                f"{log.path}: the run wrote to no drive, so the drive rates are unknown. Pass --write and "
                "--read, or --dir"
            )
        if config.budget.in_flight_bytes is None:  # the session has derived the window from the step
            window = event["limits"].get("window")
            config = replace(config, budget=replace(config.budget, in_flight_bytes=window))
        odd = {profile.layers[layer] for layer in event.get("not_recomputed", ())}
        placed: Any = log.header.plan.items()
        return cls(
            names=names,
            profile=profile,
            bandwidth=replace(bandwidth or measured, host=measured.host, host_first=measured.host_first),
            config=config,
            elsewhere=tuple((name, Placement(its["placement"])) for name, its in placed if name not in names),
            not_recomputed=frozenset(layer for layer, kind in enumerate(profile.layers) if kind in odd),
            beside=_beside_activations(log.steps, updates),
        )

    def changed(self, *, layers: int | None = None, drives: float = 1) -> Situation:
        """Return the situation for another number of layers, or for ``drives`` times as many drives."""
        situation = replace(self, bandwidth=self.bandwidth.scaled(drives))
        if layers is None or layers == len(self.names):
            return situation
        likes = [layer * len(self.names) // layers for layer in range(layers)]
        return replace(
            situation,
            names=renumbered(self.names, likes),
            profile=stretched(self.profile, likes),
            elsewhere=(),
            not_recomputed=frozenset(n for n, like in enumerate(likes) if like in self.not_recomputed),
            beside=None,
        )

    def on_device(self, device_bytes: int) -> DeviceShare:
        """Return the memory that a device leaves for activations.

        If the run offloads optimizer states, the result assumes that all states are offloaded.

        Raises:
            ConfigError: The device has no memory left for activations, or the run log does not say how much
                memory the weights take.
        """
        if self.beside is None:
            raise ConfigError(
                "the run log does not say how much memory the weights take. Pass --budget, not --device-bytes"
            )
        device = DeviceShare(device_bytes, *self.beside)
        if device.left <= 0:
            raise ConfigError(f"no memory is left for activations: {device}. Raise --device-bytes")
        return device

    def case(self, budget: int | None) -> Case:
        """Return the solver input for a budget in bytes, with all layers ``auto``.

        Without a budget, the solver finds the lowest peak without I/O waits and without longer steps than
        with placement ``keep``.
        """
        limits = Limits(budget, self.config.budget.window(), self.config.store.write_bytes_per_day)
        objective = Objective.MEMORY if budget is None else Objective.TIME
        policy = (Placement.AUTO,) * len(self.names)
        return Case(self.profile, self.bandwidth, limits, policy, objective, self.not_recomputed)

    def report(
        self, budget: int | None = None, *, device_bytes: int | None = None, rated: int | None = None
    ) -> tuple[PlanReport, OffloadConfig]:
        """Return the report on the best plan, and a policy with the placements of this plan.

        Args:
            budget: Largest activation peak in bytes; ``None`` for no limit.
            device_bytes: Memory of a device in bytes. The memory that the device has left for activations
                replaces ``budget``.
            rated: Rated writes (TBW) of all drives together, in bytes, if known.
        """
        alone = replace(self, profile=self.profile.without_gradients())
        found, device = alone, None
        if device_bytes is not None:
            found, device = self, self.on_device(device_bytes)
            budget = device.budget
        case = found.case(budget)
        plan, keep = solve(case), alone.case(None).keep
        frontier = (alone.case(int(share * keep.peak_bytes)) for share in FRONTIER)
        report = PlanReport(
            names=self.names,
            plan=dataclasses.asdict(plan),
            step=_planned(case, plan),
            frontier=tuple(_planned(each, solve(each)) for each in frontier),
            keep_peak_bytes=keep.peak_bytes,
            keep_seconds=keep.seconds if self.profile.is_measured(Placement.KEEP) else None,
            notes=tuple(self._notes(case, plan, device, rated)),
            beside_bytes=None if device is None else device.device_bytes - device.budget,
        )
        return report, self._policy(plan, budget, device_bytes)

    def _notes(self, case: Case, plan: Plan, device: DeviceShare | None, rated: int | None) -> Iterator[str]:
        outcome = case.played(plan)
        yield f"{len(self.names)} layers. Rates of the store: {self.bandwidth}."
        if device is not None:
            yield f"{readable_size(device.budget)} are left for activations: {device}."
        if written := written_a_day(case, plan):
            yield f"The plan writes {written}."
        if day := bytes_per_day(outcome.written_bytes, outcome.seconds):
            years = f", and {rated / 1e12:g} TB in {significant(rated / day / 365)} years" if rated else ""
            yield f"Without pauses, training writes {significant(day / 1e12)} TB a day to the drives{years}."

    def _policy(self, plan: Plan, budget: int | None, device_bytes: int | None) -> OffloadConfig:
        placed = [*zip(self.names, plan.placements, strict=True), *self.elsewhere]
        counts = Counter(placement for _, placement in placed)
        ((default, _),) = counts.most_common(1)
        rules = tuple(Rule(name, placement) for name, placement in placed if placement is not default)
        states = self.config.states
        if states is not None and states.when != "backward":
            states = replace(states, default="offload" if device_bytes is None else "auto")
        # Layers of other ranks may still be auto. A budget has an effect only on auto layers, states and
        # on_slow.
        is_auto = Placement.AUTO in counts
        is_beside = states is not None and states.default == "auto"
        kept_to = is_auto or is_beside or self.config.on_slow == "keep"
        limits = [limit for limit in (plan.window, budget) if limit is not None]
        places = tuple(each for each in self.config.store.directories if Path(each).is_dir())
        return replace(
            self.config,
            store=replace(self.config.store, directories=places),
            default=default,
            layers=rules,
            states=states,
            budget=BudgetConfig(
                activation_bytes=budget if kept_to and device_bytes is None else None,
                device_bytes=device_bytes if kept_to else None,
                in_flight_bytes=min(limits, default=0),
                objective=self.config.budget.objective if is_auto else None,
            ),
        )


def _planned(case: Case, plan: Plan) -> PlannedStep:
    outcome, placements, budget = case.played(plan), plan.placements, case.limits.budget
    return PlannedStep(
        **dataclasses.asdict(outcome),
        budget_bytes=None if budget is None else budget + case.profile.gradient_bytes,
        fits=budget is None or outcome.peak_bytes <= budget,
        layers=", ".join(f"{placements.count(each)} {each}" for each in sorted(set(placements))),
        window_bytes=plan.window,
    )


def stretched(profile: StepProfile, likes: Sequence[int]) -> StepProfile:
    """Return the profile of a step of a model with other layers.

    The order of forward and backward passes, and the compute time outside layers, do not change.

    Args:
        profile: Profile of the measured step.
        likes: For each layer of the new list, the index of a layer in ``profile`` with the same figures.
    """
    slots: list[Slot] = []
    passes = itertools.groupby(profile.slots, key=lambda slot: (slot.micro_batch, slot.backward))
    for (micro_batch, backward), run in passes:
        first, *rest = run
        members = {slot.layer for slot in (first, *rest)}
        between = statistics.fmean(slot.gap for slot in rest) if rest else 0.0
        order = [layer for layer, like in enumerate(likes) if like in members]
        for place, layer in enumerate(reversed(order) if backward else order):
            slots.append(Slot(layer, micro_batch, backward, between if place else first.gap))
    layers = tuple(profile.layers[like] for like in likes)
    return replace(profile, layers=layers, slots=tuple(slots))


def _as_measured(
    profile: StepProfile, bandwidth: Bandwidth, log: RunLog, event: dict[str, Any]
) -> StepProfile:
    """Return the profile with the headroom of the highest measured peak, if any peak was measured.

    If layers are ``auto``, only steps after the last plan event count, because earlier steps had another
    plan.
    """
    is_fixed = Placement.AUTO not in event["policy"]
    steps = [step for step in log.steps if is_fixed or step.step > event.get("step", 0)] or log.steps
    peak = max((step.activation_peak_bytes or 0 for step in steps), default=0)
    if not peak:
        return profile
    found = play(replace(profile, headroom=0), _PLAN.validate_python(event["plan"]), bandwidth)
    return replace(profile, headroom=peak - found.activation_peak)


def _beside_activations(steps: Sequence[StepRecord], updates: Sequence[Any]) -> tuple[int, int] | None:
    """Return the largest live bytes before a step, and the largest bytes of gradients.

    The live bytes include the optimizer states that the step allocates. If states are offloaded, the live
    bytes are the bytes of the last step, without the optimizer states on the device.
    """
    measured = [step for step in steps if step.base_bytes is not None]
    if updates and measured:
        last = measured[-1]
        latest = {u["optimizer"]: u for u in updates if u["step"] < last.step} or {0: updates[-1]}
        there = sum(u.get("staying_bytes", 0) for u in latest.values())
        bases = [(last.base_bytes or 0) - there]
    else:
        bases = [(step.base_bytes or 0) + (step.state_bytes or 0) for step in measured]
    # In the first step, no optimizer frees gradients during backward.
    gradients = (step.gradient_peak_bytes or step.gradient_bytes or 0 for step in steps[1:] or steps)
    return (max(bases), max(gradients)) if bases else None
