"""Decides between steps on the layers that are placed ``auto``: learns from each step, and plans.

The first step offloads all of them, so that a budget holds from the start. The next two show what layers of
each kind cost if they are kept, recomputed, or rebuilt in part. Then there is a plan. It is renewed when a
step was not as predicted, or the drive is not what it was, and only if the new one is clearly better.

Under a budget plans are made for the largest step, with all layers that ran in any step. Where a layer is
given more than that, the rest of the step runs as the first one did, and what other steps needed is
forgotten; in smaller steps, and where layers are skipped, the plan stays.
"""

from __future__ import annotations

import dataclasses
import statistics
import warnings
from collections import deque
from typing import TYPE_CHECKING

from tba_offload.adapt.profiler import LayerKey, profile_of
from tba_offload.config.policy import Objective, Placement
from tba_offload.formatting import readable_rate, readable_size, significant
from tba_offload.plan.bandwidth import Bandwidth, DriveRates, MeasuredRate
from tba_offload.plan.describe import describe_plan
from tba_offload.plan.goals import default_objective
from tba_offload.plan.model import Limits, Plan
from tba_offload.plan.profile import computed_as
from tba_offload.plan.search import is_better, make_plan
from tba_offload.plan.simulate import simulate
from tba_offload.plan.sizes import Sizes, StepSize
from tba_offload.plan.skipped import with_skipped
from tba_offload.plan.what_if import peak_of_keep
from tba_offload.store.base import DRIVE_TIER, HOST_TIER

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from tba_offload.capture.trace import DeviceTimes, StepTrace
    from tba_offload.plan.profile import StepProfile
    from tba_offload.plan.sizes import RunSize
    from tba_offload.report.run_log import StepRecord
    from tba_offload.store.base import DriveLoad

ASTRAY = 0.1
"""Share of the predicted time by which a step that was not understood took more or less. Without it 1 of 10
simulated runs took 3 % longer; half or twice as much changed none."""

DRIFT = 0.15
"""Share by which a drive is faster or slower than when the plan was made, if it is another drive. Without it,
of 6 simulated runs one took 1.6 % longer, and one that wanted memory peaked 10 % higher; half or twice as
much changed times by 0.3 % and peaks by 2 % at most."""

BIG_DRIFT = 1 / 3
"""The same share where smaller doubts have turned out to be idle. With ``DRIFT`` there too, of 10
simulated runs one took 7 % less time, one peaked 30 % higher, and planning took up to 1.9 times as long."""

WORTH_IT = 0.02
"""Share by which a new plan must be better, or the old one stays: plans shall not alternate. No figure shows
what it gains: from 0 to 0.04, no plan of 34 simulated runs changed."""

WORTH_REFINING = 0.002
"""Share for which the first plan is changed once, when a step under it was measured. Without that change, of
22 simulated runs one took 5.7 % longer, one 0.2 %, and one 1 % less."""

WAITS = 0.02
"""Share of two steps: a session that waits for more, where nothing shall wait, plans for a slower drive. Nor
is something tried that would wait for longer than that, unless nothing is known of it or of the drive. In a
simulated run on a drive that gives 55 % of what it reports, 0.5 % of the time is waits, and 1.1 % without
this."""

CAUTION = 0.85
"""Factor of the planned rates, each time. In that run 0.7 leaves 0.3 % of waits, at a peak that is 2 %
higher, and 0.92 leaves 0.8 %, at one that is 8 % lower."""

MOST_CAUTION = 0.5
"""Least share of what was measured that plans count on. In that run 0.25 changes nothing, and with 0.75 steps
wait as if none were planned for a slower drive."""

UNMEASURED = 0.05
"""Share of the budget that new plans leave free too, if they can: no step under them was measured yet. Twice
as much costs a simulated run up to 5 % of its time. No figure shows what it gains: without it no budget broke
in 6 runs of a small GPT, nor in simulated ones, which took between 0.7 % less and 2.7 % more time."""

FIRST_WINDOW = 16
"""Divisor of the budget: the first steps have this part of it in flight, as what else they hold is not known
yet. Of small GPTs they peak at up to 0.79 of the budget, with a quarter in flight at 0.95, and with all of it
over the budget in 8 of 10 runs, by up to 59 %."""

MOST_NARROWED = 3
"""Times that a plan is made for less than the budget, because a full window would break it. Without that, it
would have under 16 of 89 plans for simulated steps, under 3 with one time, and under 2 with three; on drives
ten times slower than measured 4, 1 and 1 of them peaked over the budget."""

MOST_PEAKS = 16
"""Plans of which the measured peak is remembered, so that what is remembered does not grow with the steps."""

_ANY_RATE = 1e9
"""Bytes a second of drives that take nothing: no time depends on it."""

_WARM_UP = 1
"""Steps whose times do not count."""

_LEARNING = _WARM_UP + 2
"""Steps before there is a plan."""

_CLOSELY = 16
"""Steps that are all looked at closely: what is known of times is still rough. Without them, 2 of 9 simulated
runs broke their budget, one in 27 of 80 steps, by up to 1.7 %; half or twice as many changed no time under a
budget."""

_EXCURSIONS = (6, 12, 64)
"""Steps after which, and later whenever the last has passed again, one step tries what the plan does not.
Without it, one simulated run that wanted memory peaked 9 % higher, and one 7 % lower."""

_LOOKS = (Placement.OFFLOAD, Placement.KEEP, Placement.RECOMPUTE, Placement.SELECTIVE)
"""What is tried then, if the plan has none of it. Keep is among them, because plans without a budget are held
to its time."""

_TURN = 8
"""Steps from one that is looked at closely to the next later on; those that surprise are, too. Ranks that
share layers agree after these, the first few, and those around one that tries something else. Half or twice
as many changed peaks and times of 9 simulated runs by at most 0.4 %."""

Need = tuple[float, float]
"""How much a rank needs its proposal: bytes over its budget and seconds of its step without recomputation."""


class AutoPlanner:
    """The plans of one session.

    Args:
        policy: What the user wants for each layer of this process.
        layers: Model chunk and module name of each layer.
        limits: What plans must keep to.
        objective: What is wanted of them; see :func:`make_plan`.
        host_capacity: Bytes of host memory beside the drives; ``None`` if there is none.
        drives: Tells the drives apart, so that planners of one process share what they find of one.
        agree: Where several ranks share layers: given this rank's proposal, name of a layer to its placement,
            and how much it needs it, returns the proposal that counts for each layer. Every rank calls it
            behind the same steps.
    """

    def __init__(
        self,
        policy: Sequence[Placement],
        layers: Sequence[LayerKey],
        limits: Limits,
        *,
        objective: Objective | None = None,
        host_capacity: int | None = None,
        drives: Sequence[Hashable] = (),
        agree: Callable[[dict[str, Placement], Need], dict[str, Placement]] | None = None,
    ) -> None:
        self.policy = tuple(policy)
        self.layers = tuple(layers)
        self.names = tuple(name for _, name in layers)
        self.not_recomputed: frozenset[int] = frozenset()
        """Layers that would not be the same if their forward ran twice; known behind the first step."""
        self.limits = limits
        self.has_budget = limits.budget is not None and Placement.AUTO in policy
        """Whether plans have to keep to one."""
        self.sizes = Sizes()
        """How large steps are, where there is a budget."""
        self.objective = objective or default_objective(limits)
        self.agree = agree
        self.profile: StepProfile | None = None
        self._host_capacity = host_capacity
        self._drives = tuple(drives)
        self._rates: list[DriveRates] = []
        self._resting: frozenset[int] = frozenset()  # numbers of drives out of service
        self._room: int | None = None  # bytes that drives hold at most, as far as that is known
        self._fell_back = False  # whether activations stayed because no drive took them
        self._host_rates = MeasuredRate(), MeasuredRate()
        self._planned_for: Bandwidth | None = None
        self._plan: Plan | None = None
        self._knows_rest = False
        self._seen_rest = 0  # in steps in which every layer ran with hooks
        self._is_measured = False  # the peak of a step under the plan in force
        self._peaks: dict[Plan, int] = {}  # the highest peak that was measured under a plan
        self._rests: deque[int] = deque(maxlen=8)  # of the last steps, beside what is known of layers
        self._rest_over = 0  # of steps that peaked over the budget
        self._is_refined = False
        self._told: Plan | None = None
        self._why = ""  # the plan in force was made
        self._on_excursion = False
        self._recent: deque[float] = deque(maxlen=3)  # seconds of the last steps under the plan
        self._waited: deque[float] = deque(maxlen=2)  # shares of them that compute waited for
        self._caution = 1.0  # plans count on this share of the measured rates
        self._unread: DeviceTimes | None = None  # of a step under the plan, while its device was not asked
        self._steps = 0
        self._size = StepSize()  # of the last step
        self._skips = False  # there were steps without layers that plans must hold for
        self._patience = 1  # steps before a plan that was confirmed is questioned again
        self._settled_until = 0
        self._warned = False

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to decide and nothing more to learn."""
        learned = self._plan is not None or self._steps >= _TURN
        return learned and self.agree is None and Placement.AUTO not in self.policy

    @property
    def has_planned(self) -> bool:
        """Whether a plan of its own is in force."""
        return self._plan is not None and Placement.AUTO in self.policy

    @property
    def wants_memory(self) -> bool:
        """Whether the next step's peak must be measured: none under this plan was, and there is a budget."""
        may_be_soon = self._plan is not None or self._steps < _CLOSELY
        return self.has_budget and not self._is_measured and may_be_soon

    def first(self) -> Plan:
        """The plan of the first steps: what memory holds beside activations of layers is not known yet."""
        window, budget = self.limits.window, self.limits.budget
        if budget is not None and self.has_budget:
            window = min(budget // FIRST_WINDOW, budget if window is None else window)
        return Plan(self.policy, window=window)

    def fits(self, layer: int, size: RunSize) -> bool:
        """Whether this step, now that a layer is going to run with a size, still is as was planned for."""
        return self.sizes.note(layer, size)

    def least(self, plan: Plan) -> Plan:
        """The plan for the rest of a step that is larger than what a plan was made for.

        It is that of the first step. But what several ranks have agreed to recompute they do recompute.
        """
        first = self.first()
        if self.agree is None:
            return first
        placements = tuple(
            Placement.RECOMPUTE_OFFLOAD if wanted is Placement.AUTO and now.recomputes else wanted
            for wanted, now in zip(self.policy, plan.placements, strict=True)
        )
        return dataclasses.replace(first, placements=placements)

    def news(self) -> dict[str, object] | None:
        """A new plan and everything that it was made from; ``None`` if there is none since last time.

        Under ``summary`` it is told in one line.
        """
        if self._plan is None or self.profile is None or self._planned_for is None:
            return None
        bare = dataclasses.replace(self._plan, prediction=None)
        if bare == self._told:
            return None
        summary = describe_plan(self.names, self._plan, self._told, self._why)
        self._told = bare
        return {
            "summary": summary,
            "names": list(self.names),
            "policy": [placement.value for placement in self.policy],
            "profile": self.profile.as_json(),
            "drive": dataclasses.asdict(self._planned_for),
            "rates": self._measured(),
            "caution": self._caution,
            "limits": dataclasses.asdict(self.limits),
            "plan": self._plan.as_json(),
        }

    def learn(
        self,
        trace: StepTrace,
        stalls: Sequence[tuple[float, float]],
        loads: Sequence[DriveLoad],
        plan: Plan,
        record: StepRecord,
        *,
        began: float,
        rest_bytes: int = 0,
        on_device: DeviceTimes | None = None,
    ) -> Plan | None:
        """Takes note of a step.

        Args:
            trace: What it recorded.
            stalls: When compute waited for I/O.
            loads: What the drives moved.
            plan: The plan that was in force.
            record: Its figures.
            began: When it began, by :func:`time.perf_counter`.
            rest_bytes: Most bytes that were seen beside the activations of layers.
            on_device: Its times by the clock of a device that runs behind the host. The device is waited for
                only behind the steps that are looked at closely.

        Returns:
            The plan for the next step, if it shall be another one.
        """
        self._steps += 1
        self._note_size(trace)
        if self._size.is_mixed:  # the peak is that of no plan
            record = dataclasses.replace(record, activation_peak_bytes=None)
        offloads_all = _offloads_all(plan)
        if self._has_warmed_up:
            self._rates = []
            self._host_rates = MeasuredRate(), MeasuredRate()
            if offloads_all:
                self._forget_first_peak()
        self._note_loads(loads)
        self._fell_back |= record.fallback_kept_bytes > 0
        if offloads_all:
            self._seen_rest = max(self._seen_rest, rest_bytes)
        drive = self.drive()
        self._note_peak(plan, record)
        self._note_seconds(record, on_device)
        if self._shows_plan and record.activation_peak_bytes is not None:
            self._is_measured = True
        is_turn = self._is_turn(plan, drive, record)
        if not (is_turn or self._size.has_grown):
            return None
        new: Plan | None = None
        try:
            new = self._look(trace, stalls, plan, record, drive, began=began, on_device=on_device)
        except Exception as error:  # noqa: BLE001 - a plan is advice: training goes on, and so do the other ranks
            self._warn(f"no plan could be made behind step {self._steps}: {error!r}; the one before stays")
            new = self._plan
        if self._size.has_grown:
            new = new or plan
        if self.agree is None:
            return new
        return self._agreed(new or plan, drive, before=None if is_turn else plan)

    @property
    def _shows_plan(self) -> bool:
        """Whether the last step tells what the plan does, if only without the layers that it skipped."""
        is_as_planned = self._size.is_full and not self._size.has_grown
        return self._plan is not None and not self._on_excursion and is_as_planned

    def _note_size(self, trace: StepTrace) -> None:
        """Finds out how large a step was; of one that has grown, nothing that was measured before tells."""
        if not self.has_budget:
            return
        self._size = self.sizes.end_step(max((scope.input_bytes for scope in trace.scopes), default=0))
        if self._size.has_grown:
            self._on_excursion = self._is_measured = self._is_refined = self._skips = False
            self._unread = None
            self._recent.clear()
            self._waited.clear()
            self._peaks.clear()
            self._rests.clear()
            self._rest_over = self._settled_until = 0

    def _look(
        self,
        trace: StepTrace,
        stalls: Sequence[tuple[float, float]],
        plan: Plan,
        record: StepRecord,
        drive: Bandwidth | None,
        *,
        began: float,
        on_device: DeviceTimes | None,
    ) -> Plan | None:
        times = on_device.read() if on_device is not None else None
        if times is not None and self._unread is not None:
            self._unread = None
            self._recent.append(times.ended - times.began)
            if self._plan is not None:
                self._waited.append(times.waited)
        profile = profile_of(
            trace,
            stalls,
            self.layers,
            began=began,
            ended=began + record.seconds,
            on_device=times,
            before=self._known_before(),
            has_grown=self._size.has_grown,
        )
        if profile is None or drive is None:
            self._on_excursion = False
            return self._plan
        self.profile = self._of_largest(profile, plan, drive, record)
        return self._decide(self.profile, drive, plan, record)

    def _of_largest(
        self, profile: StepProfile, plan: Plan, drive: Bandwidth, record: StepRecord
    ) -> StepProfile:
        """The profile that plans are made from: of the largest step, with what another one tells of times.

        What lies beside the layers is found with those that ran; then the ones that were skipped are added.
        """
        before, size = self.profile, self._size
        if before is not None and size.has_grown and before.layer_bytes:
            # What lies beside the layers is taken to have grown as they have, unless it was measured.
            growth = max(profile.layer_bytes / before.layer_bytes, 1.0)
            profile = dataclasses.replace(profile, rest_bytes=int(growth * profile.rest_bytes))
        if before is None or size.is_full or size.has_grown:
            profile = self._with_rest(profile, plan, drive, record)
        elif not size.is_large:
            return before
        if before is not None and not size.is_full:
            profile = profile.at_least(before)
        if not self.has_budget:
            return profile
        whole = with_skipped(profile, None if size.is_new else before)
        self._skips |= len(whole.slots) > len(profile.slots)
        return whole

    def _note_seconds(self, record: StepRecord, on_device: DeviceTimes | None) -> None:
        """Notes how long a step under the plan took.

        A device that runs behind the host tells it of the step before, when it has mostly come to the end of
        that one: nobody waits for it here.
        """
        before, self._unread = self._unread, None
        if before is not None and before.are_known():
            self._recent.append(before.step_seconds())
        if self._on_excursion or self._size.has_grown or not self._size.is_full:
            return
        if on_device is None:
            self._recent.append(record.seconds)
            if self._plan is not None:
                self._waited.append((record.stall_seconds or 0.0) / record.seconds)
        else:
            self._unread = on_device

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(what, RuntimeWarning, stacklevel=2)

    def _is_turn(self, plan: Plan, drive: Bandwidth | None, record: StepRecord) -> bool:
        """Whether to look at a step closely: not at each, because that takes time."""
        if self.agree is not None:  # the ranks talk behind the same steps
            is_soon = _has_excursion(self._steps) or _has_excursion(self._steps - 1)
            return self._steps <= _LEARNING + 1 or self._steps % _TURN == 0 or is_soon
        if self._plan is None or self._steps <= _CLOSELY or self._steps % _TURN == 0 or self._on_excursion:
            return True
        if self._retreat(plan) is not None:
            return True
        return drive is not None and self._doubt(plan, drive, record) is not None

    def _note_peak(self, plan: Plan, record: StepRecord) -> None:
        """Remembers what a plan needs in the largest step; a smaller one over the budget tells as well."""
        peak = record.activation_peak_bytes
        if not self.has_budget or peak is None:
            return
        if self._size.is_largest or peak > (self.limits.budget or 0):
            known = _bare(plan)
            self._peaks[known] = max(self._peaks.pop(known, 0), peak)
            if len(self._peaks) > MOST_PEAKS:
                del self._peaks[next(iter(self._peaks))]

    def _retreat(self, plan: Plan) -> Plan | None:
        """A plan that was seen to need less than one that was seen to break the budget; ``None`` if none was.

        Among those that kept to the budget it is the last one, because the first ones were made to learn.
        """
        budget, peak = self.limits.budget, self._peaks.get(_bare(plan), 0)
        if budget is None or peak <= budget:
            return None
        fitting = [known for known, needed in self._peaks.items() if needed <= budget]
        lowest = fitting[-1] if fitting else min(self._peaks, key=self._peaks.__getitem__)
        return lowest if self._peaks[lowest] < (1 - WORTH_IT) * peak else None

    def _decide(self, profile: StepProfile, drive: Bandwidth, plan: Plan, record: StepRecord) -> Plan | None:
        if self._steps < _LEARNING:
            return self._probe(profile, drive) if Placement.AUTO in self.policy else None
        if self._plan is None:
            return self._replan(profile, drive, plan, f"{self._steps} steps were measured")
        if self._size.has_grown:
            why = "a layer was given more than the plan was made for"
            return self._replan(profile, drive, _bare(plan), why, worth=WORTH_REFINING)
        retreat = self._retreat(plan)
        if retreat is not None and not self._on_excursion:
            peak, budget = self._peaks[_bare(plan)], self.limits.budget or 0
            self._why = f"a step peaked at {readable_size(peak)}, over the budget of {readable_size(budget)}"
            self._is_measured = False
            self._recent.clear()
            self._plan = self._known(retreat, profile, drive)
            return self._plan
        doubt = "a step tried other placements" if self._on_excursion else self._doubt(plan, drive, record)
        if doubt is not None:
            self._on_excursion = False
            return self._replan(profile, drive, self._plan, doubt)
        if self.has_budget and self._is_measured and not self._is_refined:
            self._is_refined = True
            why = "a step under the plan was measured"
            return self._replan(profile, drive, self._plan, why, worth=WORTH_REFINING)
        self._plan = _predicted(plan, profile, drive)
        if self._caution < 1.0 and self._steps % _EXCURSIONS[-1] == 0:
            self._caution = min(self._caution / CAUTION, 1.0)  # a slow hour ends some time
            return self._replan(profile, drive, self._plan, "the drives may have recovered")
        if _has_excursion(self._steps):
            return self._excursion(profile, drive, self._plan)
        return self._plan

    def _excursion(self, profile: StepProfile, drive: Bandwidth, plan: Plan) -> Plan:
        """The plan, but with one layer of each kind under a placement that has none now.

        What it costs was measured when memory and files still grew, or on another drive. Without a look at it
        now and then, a bad measurement would be believed for ever. But what a drive costs that moves bytes
        anyway is known. Where several ranks share layers, what is recomputed is not tried: that would be
        everybody's business.
        """
        bare = look = dataclasses.replace(plan, kept=(), prediction=None)
        now = simulate(profile, bare, drive)
        drive_is_known = now.written_bytes > 0
        for layer, placement in self._untried(profile, plan):
            placements = list(look.placements)
            placements[layer] = placement
            wider = dataclasses.replace(look, placements=tuple(placements))
            then = simulate(profile, wider, drive)
            waits = then.stall_seconds - now.stall_seconds > WAITS * now.seconds
            is_known = drive_is_known and placement in profile.timings[profile.layers[layer]]
            fits = self._worst(profile, wider, drive) <= self._careful_limits.planned
            if fits and not (is_known and waits):
                look = wider
        if look is bare:
            return plan
        self._on_excursion = True
        return look

    def _untried(self, profile: StepProfile, plan: Plan) -> Iterator[tuple[int, Placement]]:
        """One layer of each kind for each placement that the plan has none of."""
        for kind in set(profile.layers):
            free = [
                layer
                for layer in self._free_layers(profile, kind)
                if self.agree is None or not plan.placements[layer].recomputes
            ]
            measured = {computed_as(plan.placements[layer], layer) for layer in free}
            missing = [
                placement
                for placement in _LOOKS
                if placement not in measured and (self.agree is None or not placement.recomputes)
            ]
            # What was never seen comes first: there may be fewer layers than placements.
            missing.sort(key=lambda placement: placement in profile.timings[kind])
            for layer in free:
                placement = next((each for each in missing if self._may_try(profile, layer, each)), None)
                if placement is not None:
                    missing.remove(placement)
                    yield layer, placement

    def _agreed(self, proposed: Plan, drive: Bandwidth | None, *, before: Plan | None = None) -> Plan:
        """The proposal of this rank, with the recomputed layers of all that share them.

        What is kept and what is offloaded is nobody else's business, and may differ from rank to rank.
        Where it is not the time to talk, what is recomputed is what was in the plan ``before``.
        """
        if self.agree is None:
            return proposed
        if before is not None:
            agreed = dict(zip(self.names, before.placements, strict=True))
        else:
            agreed = self.agree(
                dict(zip(self.names, proposed.placements, strict=True)), self._need(proposed, drive)
            )
        wanted = [agreed[name] for name in self.names]
        plan = proposed
        if any(a.recomputes != b.recomputes for a, b in zip(wanted, proposed.placements, strict=True)):
            plan = self._with_recomputed(wanted, proposed, drive)
            self._on_excursion = False
            self._is_measured = False
        if self._plan is not None and not self._on_excursion:
            if plan is not proposed:
                self._why = "the ranks agreed on what is recomputed"
            self._plan = plan
            if self.profile is not None:
                self._check_budget(plan, self.profile)
        return plan

    def _need(self, proposed: Plan, drive: Bandwidth | None) -> Need:
        """How far this rank would be over its budget, and how long its step, if nothing were recomputed."""
        if self._plan is None or self.profile is None or drive is None:
            return 0.0, 0.0
        without = tuple(
            Placement.OFFLOAD if mine.recomputes and wanted is Placement.AUTO else mine
            for mine, wanted in zip(proposed.placements, self.policy, strict=True)
        )
        found = simulate(self.profile, dataclasses.replace(proposed, placements=without), drive)
        return max(found.peak_bytes - self.limits.planned, 0.0), found.seconds

    def _with_recomputed(self, wanted: Sequence[Placement], proposed: Plan, drive: Bandwidth | None) -> Plan:
        """The best that this rank can do if exactly those layers are recomputed that shall be."""
        placements = [
            placement if not agreed.recomputes else mine if mine.recomputes else agreed
            for agreed, mine, placement in zip(wanted, proposed.placements, self.policy, strict=True)
        ]
        if self._plan is not None and self.profile is not None and drive is not None:
            try:
                everything = frozenset(range(len(placements)))
                plan = self._made(self.profile, drive, policy=placements, not_recomputed=everything)
                return _predicted(plan, self.profile, drive)
            except Exception as error:  # noqa: BLE001 - the other ranks have agreed and go on
                self._warn(f"no plan could be made of what the ranks agreed on: {error!r}")
        known = zip(placements, proposed.placements, strict=True)
        placements = [
            mine if placement is Placement.AUTO and not mine.recomputes else placement
            for placement, mine in known
        ]
        return dataclasses.replace(proposed, placements=tuple(placements), kept=(), prediction=None)

    def drive(self) -> Bandwidth | None:
        """What all drives in service do together, and host memory beside them; ``None`` if nothing moved."""
        in_service = [drive for number, drive in enumerate(self._rates) if number not in self._resting]
        write = sum(drive.write.rate or 0.0 for drive in in_service)
        read = sum(drive.read.rate or 0.0 for drive in in_service)
        if write:
            read = read or write  # all may have been forwarded so far
            drives = Bandwidth(write, read, capacity=self._room)
        elif self._fell_back:
            drives = Bandwidth(_ANY_RATE, _ANY_RATE, capacity=0)
        else:
            return None
        to_host, from_host = self._host_rates
        return drives.with_host(self._host_capacity, write=to_host.rate, read=from_host.rate)

    def _measured(self) -> list[dict[str, object]]:
        """What each drive was found to do, and host memory beside them."""
        tiers = [(DRIVE_TIER, drive.write, drive.read) for drive in self._rates]
        if self._host_capacity is not None:
            tiers.append((HOST_TIER, *self._host_rates))
        return [
            {"tier": tier, "write": write.as_json(), "read": read.as_json()} for tier, write, read in tiers
        ]

    def _note_loads(self, loads: Sequence[DriveLoad]) -> None:
        drives = [load for load in loads if load.tier == DRIVE_TIER]
        self._resting = frozenset(number for number, load in enumerate(drives) if not load.in_service)
        self._note_room([load.room for load in drives])
        while len(self._rates) < len(drives):
            number = len(self._rates)
            self._rates.append(DriveRates.of(self._drives[number] if number < len(self._drives) else None))
        rates = iter((drive.write, drive.read) for drive in self._rates)
        for load in loads:
            write, read = next(rates) if load.tier == DRIVE_TIER else self._host_rates
            write.add(*load.write)
            read.add(*load.read)

    def _note_room(self, rooms: Sequence[int | None]) -> None:
        """Notes what drives hold; peaks that were measured while they held more, or less, tell nothing."""
        room = None if None in rooms else sum(each or 0 for each in rooms)
        if _differ_in_room(room, self._room, DRIFT):
            self._peaks.clear()
        self._room = room

    @property
    def _has_warmed_up(self) -> bool:
        """Whether all earlier times say nothing: memory and files grew, caches were cold."""
        return self._steps == _WARM_UP + 1

    def _forget_first_peak(self) -> None:
        """Forgets the memory of the first step, in which a process allocates much that it needs once.

        The second step shows anew what there is beside the layers, if it offloads them all too.
        """
        self._peaks.clear()
        self._rests.clear()
        self._seen_rest = self._rest_over = 0

    def _known_before(self) -> StepProfile | None:
        """What the last step adds to."""
        if self.profile is None or not self._has_warmed_up:
            return self.profile
        return dataclasses.replace(self.profile, timings=({},) * len(self.profile.kinds))

    def _probe(self, profile: StepProfile, drive: Bandwidth) -> Plan:
        """Has some layers of each kind kept, recomputed and rebuilt, as many as the budget allows, to see."""
        first = self.first()
        has_room = drive.capacity is None or not simulate(profile, first, drive).fallback_bytes
        if self.has_budget and (self._has_warmed_up or not has_room):
            found = self._made(profile, drive, policy=self.policy, not_recomputed=self.not_recomputed)
            found = self._within_budget(found, profile, drive)
            if self._has_warmed_up:  # the first step needs much that others do not
                self._check_budget(found, profile)
            if not has_room:
                return found
        fewest = 3 if self.objective is Objective.MEMORY else 4  # one offloads beside each that is a choice
        for parts in (fewest, 6, 12, max(len(self.policy), 2)):
            plan = dataclasses.replace(first, placements=self._mixed(profile, parts))
            if self._worst(profile, plan, drive) <= self._careful_limits.planned:
                return plan
        return first

    def _mixed(self, profile: StepProfile, parts: int) -> tuple[Placement, ...]:
        """Of every so many layers of a kind one gets each placement that is a choice, the others offload."""
        placements = list(self.policy)
        for kind in set(profile.layers):
            free = self._free_layers(profile, kind)
            if len(free) < 3:  # it is measured by the others
                continue
            for place, layer in enumerate(reversed(free)):
                turn = (place + self._steps) % parts
                if turn == 0:
                    placements[layer] = Placement.KEEP
                elif turn == 1 and self._may_try(profile, layer, Placement.RECOMPUTE):
                    placements[layer] = Placement.RECOMPUTE
                elif turn == 2 and self._may_try(profile, layer, Placement.SELECTIVE):
                    placements[layer] = Placement.SELECTIVE
        return tuple(placements)

    def _free_layers(self, profile: StepProfile, kind: int) -> list[int]:
        """The layers of a kind that the planner decides on."""
        return [
            layer
            for layer, wanted in enumerate(self.policy)
            if wanted is Placement.AUTO and profile.layers[layer] == kind
        ]

    def _may_try(self, profile: StepProfile, layer: int, placement: Placement) -> bool:
        """Whether the planner may have a layer run so, and there is something to learn from it."""
        if placement is Placement.RECOMPUTE:
            return self.objective is not Objective.MEMORY and layer not in self.not_recomputed
        if placement is Placement.SELECTIVE:
            kind = profile.kind_of(layer)
            return kind.rebuilt_bytes > 0 or not kind.knows_rebuilt
        return True

    def _doubt(self, plan: Plan, drive: Bandwidth, record: StepRecord) -> str | None:
        """Why the plan in force may not be the best any longer; ``None`` if nothing speaks against it."""
        if plan.prediction is None or self._planned_for is None:
            return "nothing was predicted of the one before"
        then = self._planned_for
        share = BIG_DRIFT if self._steps < self._settled_until else DRIFT
        if _drifted(drive, then, share):
            return f"drives or host memory are not what they were: {_rates(drive)} instead of {_rates(then)}"
        if self._waits_too_long():
            return f"steps waited for more than {WAITS:.0%} of their time"
        if self._steps < self._settled_until:
            return None
        peak, budget = record.activation_peak_bytes or 0, self.limits.budget
        if budget is not None and peak > budget:
            return f"a step peaked at {readable_size(peak)}, over the budget of {readable_size(budget)}"
        # One step says nothing.
        if len(self._recent) > 1:
            found, expected = statistics.median(self._recent), plan.prediction.seconds
            skipped = self._skips and found < expected  # which takes no time
            if not skipped and _differ(found, expected, ASTRAY):
                return f"steps took {significant(found)} s instead of {significant(expected)} s"
        return None

    def _waits_too_long(self) -> bool:
        """Whether compute waits under a plan by which it should not: compute and drives have their moods."""
        is_settled = self.objective is not Objective.MEMORY or self._caution <= MOST_CAUTION
        return not is_settled and len(self._waited) > 1 and min(self._waited) > WAITS

    def _replan(
        self,
        profile: StepProfile,
        drive: Bandwidth,
        old: Plan,
        why: str,
        *,
        worth: float = WORTH_IT,
    ) -> Plan | None:
        if self._planned_for is not None and _drifted(drive, self._planned_for, DRIFT):
            self._caution = 1.0
        elif self._waits_too_long():
            self._caution = max(CAUTION * self._caution, MOST_CAUTION)
        self._waited.clear()
        self._planned_for = drive
        if Placement.AUTO not in self.policy:
            # Where memory was never measured, nobody knows what it holds beside activations of layers.
            found = simulate(profile, old, drive).prediction if self._knows_rest else None
            self._plan, self._why = dataclasses.replace(old, prediction=found), why
            return self._plan
        new = self._made(profile, drive, policy=self.policy, not_recomputed=self.not_recomputed)
        careful = drive.scaled(self._caution)
        if self._plan is not None and not is_better(
            profile, careful, self.limits, new, old, policy=self.policy, objective=self.objective, worth=worth
        ):
            new = old
            # It was in doubt without need: the next doubt has to wait longer.
            self._patience = min(2 * self._patience, _EXCURSIONS[-1])
            self._settled_until = self._steps + self._patience
        else:
            self._why = why
            self._patience = 1
            self._recent.clear()
            self._is_measured = False
        if new is old or self._caution < 1.0:
            new = _predicted(new, profile, drive)
        new = self._within_budget(new, profile, drive)
        self._check_budget(new, profile)
        self._plan = new
        return new

    def _within_budget(self, new: Plan, profile: StepProfile, drive: Bandwidth) -> Plan:
        """A plan, or one that was seen to need less if this one is expected or known to break the budget."""
        budget = self.limits.budget
        if budget is None or new.prediction is None or not self._peaks:
            return new
        expected = max(new.prediction.peak_bytes, self._peaks.get(_bare(new), 0))
        lowest = min(self._peaks, key=self._peaks.__getitem__)
        if expected <= budget or self._peaks[lowest] >= expected:
            return new
        fitting = [known for known, needed in self._peaks.items() if needed <= budget]
        return self._known(fitting[-1] if fitting else lowest, profile, drive)

    def _known(self, plan: Plan, profile: StepProfile, drive: Bandwidth) -> Plan:
        """A plan of which the peak was measured, with what it does."""
        found = simulate(profile, plan, drive).prediction
        return dataclasses.replace(plan, prediction=dataclasses.replace(found, peak_bytes=self._peaks[plan]))

    def _made(
        self,
        profile: StepProfile,
        drive: Bandwidth,
        *,
        policy: Sequence[Placement],
        not_recomputed: frozenset[int],
    ) -> Plan:
        """The best plan for a drive that is as much slower as caution says."""
        careful = drive.scaled(self._caution)

        def within(limits: Limits) -> Plan:
            return make_plan(
                profile,
                careful,
                limits,
                policy=policy,
                objective=self.objective,
                not_recomputed=not_recomputed,
            )

        plan = within(self._careful_limits)
        peak = plan.prediction.peak_bytes if plan.prediction is not None else 0
        if self._careful_limits.planned < peak <= self.limits.planned:
            plan = within(self.limits)
        return self._sound(plan, within, profile, careful)

    def _sound(
        self, plan: Plan, within: Callable[[Limits], Plan], profile: StepProfile, drive: Bandwidth
    ) -> Plan:
        """A plan that keeps to the budget however slow the drive is, if there is one.

        Less in flight is enough as long as the largest activation has room there; then less is kept.
        """
        if self.limits.budget is None:
            return plan
        largest = max((saved.nbytes for kind in profile.kinds for saved in kind.activations), default=0)
        budget, found = self._careful_limits.budget or 0, [plan]
        while len(found) <= MOST_NARROWED:
            excess = self._worst(profile, plan, drive) - self.limits.budget
            if excess <= 0:
                return plan
            if plan.window is not None and plan.window - excess >= largest:
                narrower = dataclasses.replace(plan, window=plan.window - excess)
                return _predicted(narrower, profile, drive)
            budget -= excess
            if budget <= 0:
                break
            plan = within(Limits(budget, self.limits.window))
            found.append(plan)
        return min(found, key=lambda each: self._worst(profile, each, drive))

    @staticmethod
    def _worst(profile: StepProfile, plan: Plan, drive: Bandwidth) -> int:
        """The peak under a plan if the window is full when most is held: drives have their moods."""
        found = simulate(profile, plan, drive)
        if plan.window is None:
            return found.peak_bytes
        full = found.held_bytes + plan.window + profile.rest_bytes
        return max(found.peak_bytes, min(full, peak_of_keep(profile, drive)))

    @property
    def _careful_limits(self) -> Limits:
        """Those of what was never measured."""
        budget = self.limits.budget
        return self.limits if budget is None else Limits(int((1 - UNMEASURED) * budget), self.limits.window)

    def _check_budget(self, plan: Plan, profile: StepProfile) -> None:
        """Says it if the lowest peak that was found is over the budget, and what it consists of."""
        budget, peak = self.limits.budget, plan.prediction.peak_bytes if plan.prediction is not None else 0
        if budget is None or peak <= budget:
            return
        layer = max(kind.nbytes + kind.small_bytes for kind in profile.kinds)
        window = "" if plan.window is None else f", up to {readable_size(plan.window)} in flight"
        room = "" if self._room is None else f", room for {readable_size(self._room)} on the drives"
        self._warn(
            f"the budget of {readable_size(budget)} cannot be met: the lowest peak found is "
            f"{readable_size(peak)}, with {readable_size(profile.rest_bytes)} beside the layers (logits, "
            f"loss, temporaries), {readable_size(layer)} in the largest layer{window}{room}; raise "
            "budget.activation_bytes, or take smaller micro-batches or shorter sequences"
        )

    def _with_rest(
        self, profile: StepProfile, plan: Plan, drive: Bandwidth, record: StepRecord
    ) -> StepProfile:
        """The profile with what the allocator's peak holds beside what is known of layers."""
        peak = record.activation_peak_bytes
        if peak is None:
            return profile
        played = simulate(dataclasses.replace(profile, rest_bytes=0), plan, drive)
        if not record.fallback_kept_bytes or played.fallback_bytes:
            known = played.peak_bytes
        elif _offloads_all(plan):
            known = record.own_peak_bytes or 0  # what was kept in need is in no plan, but counts there
        else:
            return profile
        self._knows_rest = True
        rest = max(peak - known, 0)
        if self.has_budget:
            rest = self._most_rest(rest, is_over=peak > (self.limits.budget or 0))
        if self._plan is None:
            # Little of the layers may have been in memory at the loss, and a first plan may keep much.
            rest = max(rest, self._seen_rest)
        return dataclasses.replace(profile, rest_bytes=rest)

    def _most_rest(self, rest: int, *, is_over: bool) -> int:
        """What is planned with under a budget: the most of the last steps, since samples may miss a peak.

        What was found when a step broke the budget stays, or what broke it would be planned again.
        """
        self._rests.append(rest)
        most = max(*self._rests, self._rest_over)
        if is_over:
            self._rest_over = most
        return most


def _offloads_all(plan: Plan) -> bool:
    return {Placement.AUTO, Placement.OFFLOAD}.issuperset(plan.placements)


def _bare(plan: Plan) -> Plan:
    """A plan without what is expected of it; layers that are still ``auto`` are offloaded."""
    placed = tuple(Placement.OFFLOAD if each is Placement.AUTO else each for each in plan.placements)
    return dataclasses.replace(plan, placements=placed, prediction=None)


def _predicted(plan: Plan, profile: StepProfile, drive: Bandwidth) -> Plan:
    """A plan with what it does on a drive."""
    return dataclasses.replace(plan, prediction=simulate(profile, plan, drive).prediction)


def _has_excursion(step: int) -> bool:
    """Whether the step behind this one may try what the plan does not."""
    return step in _EXCURSIONS or (step > 0 and step % _EXCURSIONS[-1] == 0)


def _drifted(now: Bandwidth, then: Bandwidth, share: float) -> bool:
    """Whether a tier is no longer what it was, or was taken to be."""
    if _differ(now.write, then.write, share) or _differ(now.read, then.read, share):
        return True
    if _differ_in_room(now.capacity, then.capacity, share):
        return True
    if now.host is None or then.host is None:
        return False
    # A processor with much else to do copies at a rate that varies, and little may depend on it.
    share = max(share, BIG_DRIFT)
    return _differ(now.host.write, then.host.write, share) or _differ(now.host.read, then.host.read, share)


def _differ(found: float, expected: float, share: float) -> bool:
    return abs(found - expected) > share * expected


def _differ_in_room(found: int | None, expected: int | None, share: float) -> bool:
    if found is None or expected is None:
        return found is not expected
    return _differ(found, expected, share)


def _rates(drive: Bandwidth) -> str:
    rates = [(drive.write, drive.read), *([(drive.host.write, drive.host.read)] if drive.host else [])]
    room = "" if drive.capacity is None else f", room for {readable_size(drive.capacity)}"
    return " and ".join(f"{readable_rate(write)} / {readable_rate(read)}" for write, read in rates) + room
