"""What a plan would bring, told from a run log alone: the engine of ``tba-offload plan``."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tba_offload.config import BudgetConfig, OffloadConfig
from tba_offload.config.options import StatesConfig
from tba_offload.config.policy import Objective, Placement, Rule
from tba_offload.errors import ConfigError, RunLogError
from tba_offload.formatting import readable_size, renumbered
from tba_offload.plan.bandwidth import Bandwidth
from tba_offload.plan.describe import explain
from tba_offload.plan.device_share import DeviceShare
from tba_offload.plan.model import Limits, Plan
from tba_offload.plan.profile import StepProfile
from tba_offload.plan.search import make_plan
from tba_offload.plan.simulate import simulate
from tba_offload.plan.states_share import StatesLoad, choose, in_words
from tba_offload.plan.what_if import Choice, peak_of_keep, stretched
from tba_offload.plan.writes import writes_of
from tba_offload.report.log import PLAN, PlanEvent, read_run_log
from tba_offload.report.plans import HostUse, PlannedStep, PlanReport, Tier, advice, title_of
from tba_offload.report.points import peak_and_seconds
from tba_offload.report.ranks import paths_of_ranks

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from tba_offload.plan.bandwidth import HostTier
    from tba_offload.plan.model import Prediction
    from tba_offload.plan.simulate import Outcome
    from tba_offload.plan.states_share import Expected
    from tba_offload.plan.writes import Writes
    from tba_offload.report.log import StepRecord

_MOST_SCOPES = 200_000
"""Executions of layers in a step that is planned: some minutes of work."""

FRONTIER = (0.1, 0.15, 0.2, 0.25, 0.35, 0.5, 0.65, 0.8, 1.05)
"""Budgets of the frontier, as shares of the peak of keep."""

_HOST_TIER = "host"
"""Name of host memory beside the drives in run logs."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What a run has measured.

    Attributes:
        names: Module names of the layers.
        profile: Its step.
        bandwidth: The rates of its drives.
        window: Most bytes in flight, as it was configured.
        config: Its policy.
        measured: What each drive, and host memory beside them, was found to do: tier, write and read, with
            rate and spread.
        elsewhere: Layers of other processes, as those of other pipeline stages, and what they were placed.
        run: Activation peak and seconds of a step of the run; ``None`` where they were not measured, or this
            is another situation.
        title: The model and the machine.
        not_recomputed: Layers whose forward was not the same when it ran twice, or would not be.
        beside: Bytes on the device beside activations: those live before a step, and gradients at one time;
            ``None`` where they were not measured, or there would be others.
        states: States of optimizers that are offloaded in ``step``, which are not among those bytes then.
    """

    names: tuple[str, ...]
    profile: StepProfile
    bandwidth: Bandwidth
    window: int | None
    config: OffloadConfig
    measured: tuple[dict[str, Any], ...] = ()
    elsewhere: tuple[tuple[str, Placement], ...] = ()
    run: tuple[int, float] | None = None
    title: str = ""
    not_recomputed: frozenset[int] = frozenset()
    beside: tuple[int, int] | None = None
    states: StatesLoad | None = None

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Situation:
        """Return what the run log tells, by the last time that it was planned.

        Args:
            path: The run log.

        Raises:
            RunLogError: It cannot be read, stands for those of several ranks, or nothing in it was captured:
                no layer was offloaded in its first steps, or all that was saved stayed in the window.
        """
        first, *others = paths_of_ranks(path)
        if others:
            raise RunLogError(
                f"{path}: each of the {1 + len(others)} ranks has a log of its own, and pipeline stages have "
                f"different layers: name one of them, such as {first}"
            )
        log = read_run_log(path)
        log.events(PlanEvent)  # checked before anything is computed from one
        events = [event for event in log.others if event["event"] == PLAN]
        if not events:
            raise RunLogError(
                f"{log.path}: nothing to plan from: log at least three steps in which layers are placed "
                "offload or auto, and save more than budget.in_flight_bytes, so that drives are measured"
            )
        event: dict[str, Any] = events[-1]
        try:
            config = OffloadConfig.from_yaml(log.header.policy or "")
        except ConfigError as error:
            raise RunLogError(f"{log.path}: the policy in it cannot be read: {error}") from error
        updates = [] if _updates_in_backward(config) else [e for e in log.others if e["event"] == "states"]
        try:
            profile = StepProfile.from_json(event["profile"])
            states = StatesLoad.of_updates(updates)
            limits = event["limits"]
            return cls(
                names=tuple(event["names"]),
                profile=profile,
                bandwidth=Bandwidth.from_json(event["drive"]),
                window=config.budget.window if limits.get("device") else limits["window"],
                config=config,
                measured=tuple(event.get("rates", ())),
                elsewhere=tuple(_placed_elsewhere(log.header.plan, event["names"])),
                run=peak_and_seconds(log),
                title=title_of(log.header.model, log.header.hardware),
                not_recomputed=frozenset(_not_recomputed(event, profile)),
                beside=_beside_activations(log.steps, updates if states is not None else []),
                states=states,
            )
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise RunLogError(f"{log.path}: its plan event cannot be read: {error!r}") from error

    def changed(
        self,
        *,
        layers: int | None = None,
        micro_batches: int | None = None,
        write: float | None = None,
        read: float | None = None,
        drives: float = 1,
        window: int | None = None,
        host: int | None = None,
    ) -> Situation:
        """Another situation.

        Args:
            layers: Number of layers.
            micro_batches: Number of micro-batches.
            write: Bytes a second to the drive.
            read: Bytes a second from it.
            drives: So many times the drives there are.
            window: Most bytes in flight; 0 for no limit.
            host: Bytes of host memory for what the drives have no time for; 0 for none. Unless the run had
                some, its rates are a guess by those that were measured of the drives.

        Raises:
            ConfigError: The step would be too large to plan.
        """
        bandwidth = dataclasses.replace(
            self.bandwidth,
            write=self.bandwidth.write if write is None else write,
            read=self.bandwidth.read if read is None else read,
        ).scaled(drives)
        if host is not None:
            tier = self.bandwidth.host or self.bandwidth.with_host(host).host
            bandwidth = bandwidth.with_host(
                host or None, write=tier.write if tier else None, read=tier.read if tier else None
            )
        old = len(self.names)
        count = old if layers is None else layers
        profile = self.profile
        passes = (
            max(slot.micro_batch for slot in profile.slots) + 1 if micro_batches is None else micro_batches
        )
        if count * passes > _MOST_SCOPES:
            raise ConfigError(
                f"a step of {count} layers and {passes} micro-batches is too large to plan; the most are "
                f"{_MOST_SCOPES} executions of layers"
            )
        likes = [layer * old // count for layer in range(count)]  # as the profile is stretched
        names = self.names if count == old else renumbered(self.names, likes)
        if (layers, micro_batches) != (None, None):
            profile = stretched(profile, layers=layers, micro_batches=micro_batches)
        window = self.window if window is None else window or None
        is_same = (profile, bandwidth, window) == (self.profile, self.bandwidth, self.window)
        return dataclasses.replace(
            self,
            names=names,
            profile=profile,
            bandwidth=bandwidth,
            window=window,
            elsewhere=self.elsewhere if count == old else (),
            run=self.run if is_same else None,
            title=self.title if count == old else f"{self.title}; what if it had {count} layers",
            not_recomputed=frozenset(n for n, like in enumerate(likes) if like in self.not_recomputed),
            beside=self.beside if count == old else None,
            states=self.states if count == old else None,
        )

    def left_on(self, device_bytes: int, travelling: int = 0) -> DeviceShare:
        """Return what a device of that size has left for activations.

        Args:
            device_bytes: The size.
            travelling: How many sub-groups of optimizer states travel, where :attr:`states` are known.

        Raises:
            ConfigError: Nothing, or it is not known what lies beside them.
        """
        if self.beside is None:
            raise ConfigError(
                "what lies on the device beside activations is not known: the run did not measure its "
                "memory, or had other layers; give --budget instead"
            )
        device = self._share(device_bytes, travelling)
        if device.left <= 0:
            least = readable_size(device.base_bytes + device.gradient_bytes)
            raise ConfigError(
                f"nothing is left for activations {device}; give a device of more than {least}, or offload "
                "the states of optimizers"
            )
        return device

    def _share(self, device_bytes: int, travelling: int) -> DeviceShare:
        base, gradients = self.beside or (0, 0)
        staying = 0 if self.states is None else self.states.device_bytes(travelling)
        return DeviceShare(device_bytes, base + staying, gradients)

    def states_on(self, device_bytes: int, objective: Objective | None = None) -> Expected | None:
        """How many sub-groups of optimizer states travel on a device of that size; ``None`` if none do.

        Args:
            device_bytes: The size.
            objective: What plans for activations are for.
        """
        if self.states is None or self.beside is None:
            return None

        def limits_of(travelling: int) -> Limits:
            return self._limits(None).on_device(self._share(device_bytes, travelling))

        def plan_of(limits: Limits) -> Prediction:
            return self.outcome(self.plan(limits.budget, objective)).prediction

        return choose(self.states, limits_of, plan_of)[0]

    @property
    def peak_of_keep(self) -> int:
        """The activation peak if nothing were offloaded, bytes."""
        return peak_of_keep(self.profile.without_gradients(), self.bandwidth)

    @property
    def seconds_of_keep(self) -> float | None:
        """The step time if nothing were offloaded; ``None`` where no layer of the run was kept."""
        if not self.profile.is_measured(Placement.KEEP):
            return None
        return self.outcome(Plan((Placement.KEEP,) * len(self.names))).seconds

    def frontier(self, objective: Objective | None = None) -> list[Choice]:
        """Return the best plans from a tenth of what keep needs up to all of it; by default the fastest."""
        others, whole = of_activations(self), self.peak_of_keep
        choices: list[Choice] = []
        for budget in (int(share * whole) for share in FRONTIER):
            # What is good for less memory is good for more; the search is not perfect.
            known = [choices[-1].plan] if choices else []
            choices.append(Choice(budget, others.plan(budget, objective, known)))
        return choices

    def plan(
        self, budget: int | None, objective: Objective | None = None, known: Sequence[Plan] = ()
    ) -> Plan:
        """Return the best plan for a budget in bytes.

        Without one the lowest peak that takes no longer than keep.
        """
        return make_plan(
            self.profile,
            self.bandwidth,
            self._limits(budget),
            policy=self._policy,
            objective=objective,
            not_recomputed=self.not_recomputed,
            known=known,
        )

    def _limits(self, budget: int | None) -> Limits:
        return Limits(budget, self.window, self.config.store.write_bytes_per_day)

    def outcome(self, plan: Plan) -> Outcome:
        """Return what a plan does in a step, tier by tier."""
        return simulate(self.profile, plan, self.bandwidth)

    def peak_in(self, outcome: Outcome) -> str | None:
        """Return what runs when memory is at its peak; ``None`` if nothing is saved."""
        slot = outcome.peak_slot
        if slot is None:
            return None
        what = "backward" if slot.backward else "forward"
        return f"{what} of layer {slot.layer} ({self.names[slot.layer]}), micro-batch {slot.micro_batch}"

    def why(self, plan: Plan) -> list[str]:
        """For each layer, why the plan places it so, in one line."""
        return [explain(self.profile, plan, self.bandwidth, layer) for layer in range(len(self.names))]

    def report(
        self,
        budget: int | None,
        best: Plan,
        choices: Sequence[Choice],
        device: DeviceShare | None = None,
        states: Expected | None = None,
    ) -> PlanReport:
        """All that there is to say of a plan.

        Args:
            budget: What it was made for.
            best: The plan.
            choices: The best plans for other budgets.
            device: What the budget was derived from, if it was.
            states: What is chosen of optimizer states, if anything is.
        """
        outcome, coming = self.outcome(best), self.profile.gradient_bytes
        fits = budget is None or outcome.peak_bytes <= budget
        allowed = None if budget is None else budget + coming
        others = of_activations(self)
        return PlanReport(
            names=self.names,
            placements=tuple(placement.value for placement in best.placements),
            whys=tuple(self.why(best)),
            step=_planned_step(allowed, best, outcome.prediction, fits=fits),
            peak_in=self.peak_in(outcome),
            keep_peak_bytes=self.peak_of_keep,
            keep_seconds=self.seconds_of_keep,
            write=self.bandwidth.write,
            read=self.bandwidth.read,
            tiers=tuple(self._tiers()),
            host=_host_use(self.bandwidth.host, outcome),
            frontier=tuple(
                _planned_step(
                    choice.budget, choice.plan, others.outcome(choice.plan).prediction, fits=choice.fits
                )
                for choice in choices
            ),
            run=self.run,
            title=self.title,
            writes=None if (writes := self._writes(best)) is None else str(writes),
            device=None if device is None else str(device),
            states=None if states is None or self.states is None else in_words(states, self.states),
            beside_bytes=0
            if device is None
            else device.device_bytes - device.budget - (outcome.activation_bytes - outcome.peak_bytes),
            coming_bytes=coming,
        )

    def _writes(self, best: Plan) -> Writes | None:
        return writes_of(self.profile, best, self.bandwidth, self._limits(None), self._policy)

    def as_json(self, best: Plan, report: PlanReport, states: Expected | None = None) -> dict[str, Any]:
        """Return a plan and its report for programs."""
        outcome = self.outcome(best)
        return {
            "frontier": [dataclasses.asdict(step) for step in report.frontier],
            "names": self.names,
            "measured": self.measured,
            "keep": {"peak_bytes": report.keep_peak_bytes, "seconds": report.keep_seconds},
            "peak_in": report.peak_in,
            "plan": best.as_json(),
            "why": report.whys,
            "written_bytes": {"drives": outcome.written_bytes, "host": outcome.host_written_bytes},
            "written_per_day": None if (writes := self._writes(best)) is None else writes._asdict(),
            "states": None if states is None else states.as_json(),
            "advice": advice(report, None),
        }

    def _tiers(self) -> Iterator[Tier]:
        """Yield what each drive was found to do, under its name."""
        places = itertools.chain(self.config.store.directories, itertools.repeat("the store"))
        for tier, directory in zip(self.measured, places, strict=False):
            place = "host memory" if tier["tier"] == _HOST_TIER else str(directory)
            yield Tier(place=place, write=tier["write"], read=tier["read"])

    def _states_for(self, device_bytes: int | None) -> StatesConfig | None:
        """How states are offloaded: on a device of some size as few travel as may."""
        states = self.config.states
        if states is None and self.states is not None:
            states = StatesConfig()
        if states is None or states.when == "backward":
            return states
        return dataclasses.replace(states, default="offload" if device_bytes is None else "auto")

    @property
    def _policy(self) -> tuple[Placement, ...]:
        """Everything is open: the question is what would be best."""
        return (Placement.AUTO,) * len(self.names)

    def policy_for(self, plan: Plan, budget: int | None, device_bytes: int | None = None) -> OffloadConfig:
        """Return a policy that places layers as the plan does, otherwise as the run was configured.

        Args:
            plan: The plan.
            budget: What it was made for.
            device_bytes: What that was derived from, if it was.

        Raises:
            ConfigError: There is host memory beside drives in this situation, and the run had no drives.
        """
        placed = [*zip(self.names, plan.placements, strict=True), *self.elsewhere]
        placements = [placement for _, placement in placed]
        default = max(set(placements), key=lambda placement: (placements.count(placement), placement))
        rules = tuple(Rule(name, placement) for name, placement in placed if placement is not default)
        # Other ranks may have layers that are still auto; nothing else keeps to a budget.
        is_auto = Placement.AUTO in placements
        limits = [limit for limit in (plan.window, budget) if limit is not None]
        host = self.bandwidth.host
        states = self._states_for(device_bytes)
        shares = states is not None and states.default == "auto"
        kept_to = is_auto or shares or self.config.on_slow == "keep"
        return dataclasses.replace(
            self.config,
            default=default,
            layers=rules,
            states=states,
            store=dataclasses.replace(self.config.store, host_capacity=host.capacity if host else None),
            budget=BudgetConfig(
                activation_bytes=budget if kept_to and device_bytes is None else None,
                device_bytes=device_bytes if kept_to else None,
                in_flight_bytes=min(limits, default=None),
                objective=self.config.budget.objective if is_auto and budget is not None else None,
            ),
        )


def _updates_in_backward(config: OffloadConfig) -> bool:
    return config.states is not None and config.states.when == "backward"


_TRIED = {Placement.AUTO, *(placement for placement in Placement if placement.recomputes)}
"""Words of a policy by which a layer was run a second time, and compared."""


def _not_recomputed(event: dict[str, Any], profile: StepProfile) -> Iterator[int]:
    """Yield the layers that a run found not to be the same when they ran twice.

    A layer that the policy placed otherwise was not tried. It counts as those of its kind.
    """
    found = set(event.get("not_recomputed", ()))
    kinds = {profile.layers[layer] for layer in found}
    for layer, wanted in enumerate(event.get("policy", ())):
        if layer in found or (wanted not in _TRIED and profile.layers[layer] in kinds):
            yield layer


def _beside_activations(
    steps: Sequence[StepRecord], updates: Sequence[Mapping[str, Any]]
) -> tuple[int, int] | None:
    """Most bytes that were live before a step, with states that it made, and of gradients at one time.

    Where states are offloaded it is the last step that counts, without them: how many stay may have changed.
    """
    measured = [step for step in steps if step.base_bytes is not None]
    if updates and measured:
        last = measured[-1]
        latest = {u["optimizer"]: u for u in updates if u["step"] < last.step} or {0: updates[-1]}
        there = sum(u["slot_bytes"] + u.get("staying_bytes", 0) for u in latest.values())
        bases = [(last.base_bytes or 0) - there]
    else:
        bases = [(step.base_bytes or 0) + (step.state_bytes or 0) for step in measured]
    # In the first step no optimizer can free them in backward.
    gradients = (step.gradient_peak_bytes or step.gradient_bytes or 0 for step in steps[1:] or steps)
    return (max(bases), max(gradients)) if bases else None


def _placed_elsewhere(placed: dict[str, Any], names: Sequence[str]) -> Iterator[tuple[str, Placement]]:
    for name, entry in placed.items():
        if name not in names:
            yield name, Placement(entry["placement"])


def of_activations(situation: Situation) -> Situation:
    """Return a situation with a budget of activations alone."""
    return dataclasses.replace(situation, profile=situation.profile.without_gradients())


def _planned_step(budget: int | None, plan: Plan, expected: Prediction, *, fits: bool) -> PlannedStep:
    return PlannedStep(
        budget_bytes=budget,
        fits=fits,
        layers=composition(plan.placements),
        window_bytes=plan.window,
        seconds=expected.seconds,
        stall_seconds=expected.stall_seconds,
        peak_bytes=expected.activation_peak,
        written_bytes=expected.written_bytes,
    )


def _host_use(tier: HostTier | None, outcome: Outcome) -> HostUse | None:
    if tier is None:
        return None
    return HostUse(
        capacity=tier.capacity,
        write=tier.write,
        read=tier.read,
        written_bytes=outcome.host_written_bytes,
        peak_bytes=outcome.host_peak_bytes,
    )


def composition(placements: Sequence[Placement]) -> str:
    """How many layers have which placement: ``4 keep, 8 offload``."""
    known = {placement: placements.count(placement) for placement in Placement}
    counts = known | {placement: placements.count(placement) for placement in sorted(set(placements))}
    return ", ".join(f"{count} {placement}" for placement, count in counts.items() if count)
