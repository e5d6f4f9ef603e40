"""What is promised of layers placed ``auto``, on a machine that no test waits for."""

from __future__ import annotations

import dataclasses
import random
import statistics
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from harness import MIB
from profiles import KEEP, all_of, steps_of

from tba_offload.capture.trace import (
    ActivationKey,
    ActivationTrace,
    ScopeKey,
    ScopeTrace,
    StepTrace,
    Treatment,
)
from tba_offload.config.policy import Placement
from tba_offload.planner.auto import Controller, Task
from tba_offload.planner.measure import StepObservation
from tba_offload.planner.model import (
    Bandwidth,
    LayerKind,
    Limits,
    Saved,
    Slot,
    StepProfile,
    Timing,
    computed_as,
)
from tba_offload.planner.play import play
from tba_offload.planner.solve import Case, solve
from tba_offload.report.log import StepRecord
from tba_offload.store.base import DriveLoad, Load

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tba_offload.planner.auto import Agree
    from tba_offload.planner.model import Plan

AUTO = Placement.AUTO


pytestmark = pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")


class Machine:
    """Trains under a controller, and answers each plan with the step that it makes."""

    def __init__(self, controller: Controller, profile: StepProfile, bandwidth: Bandwidth) -> None:
        self.controller = controller
        self.profile = profile
        self.bandwidth = bandwidth
        self.plan = controller.task.first()
        self.steps = 0
        self.never: frozenset[int] = frozenset()  # layers that must not run twice

    def run(self, steps: int) -> list[Plan]:
        """Steps that are all alike; the plan of each."""
        return [self.step() for _ in range(steps)]

    def step(self, *, bandwidth: Bandwidth | None = None, slower: float = 1.0, peak: float = 1.0) -> Plan:
        """Make one step, which may take longer or peak higher; return the plan that was in force."""
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
        )
        load = DriveLoad(
            Load(found.written_bytes, found.written_bytes / rates.write),
            Load(found.written_bytes, found.written_bytes / rates.read),
        )
        loads = [load]
        if (host := rates.host) is not None:
            moved = (Load(found.host_bytes, found.host_bytes / rate) for rate in (host.write, host.read))
            loads.insert(not rates.host_first, DriveLoad(*moved, "host", room=host.capacity))
        stalls = [(ended, ended + stall)] if stall else []
        seen = StepObservation(trace, stalls, loads, plan, record, 0.0, not_recomputed=self.never)
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


def kind_of(chance: random.Random, scale: int) -> LayerKind:
    sizes = [scale * chance.choice([4, 8, 8, 16, 32]) * MIB for _ in range(chance.randint(5, 9))]
    count = len(sizes)
    saved = (
        Saved(nbytes, (place + 0.5) / count, 1 - (place + 0.5) / count, chance.random() < 0.2)
        for place, nbytes in enumerate(sizes)
    )
    return LayerKind(tuple(saved), 4096, min(sizes), attention_bytes=0)


def drawn(
    chance: random.Random, *, layers: int | None = None, kinds: int = 1, passes: tuple[int, int] | None = None
) -> tuple[StepProfile, float]:
    """A step, and the rate in bytes a second at which a drive would keep up with it."""
    layers = layers or chance.choice([8, 12, 16, 24])
    micro_batches, ahead = passes or chance.choice([(1, 1), (1, 1), (4, 1), (4, 2)])
    forward, over = chance.uniform(0.01, 0.05), chance.uniform(1.0, 1.04)
    timings = []
    for one in (forward * (1 + kind) for kind in range(kinds)):
        offloaded = Timing(one * over, 2 * one * over)
        rebuilt = Timing(offloaded.forward, offloaded.backward + 0.1 * one)
        timings.append(
            {
                KEEP: (Timing(one, 2 * one),),
                Placement.OFFLOAD: (offloaded,),
                Placement.RECOMPUTE: (Timing(one, 3 * one),),
                Placement.OFFLOAD_REMAT: (rebuilt,),
            }
        )
    slots = tuple(
        Slot(layer, micro_batch, backward, 0.3 * forward if layer == (layers - 1) * backward else 0.0)
        for layer, micro_batch, backward in steps_of(layers, micro_batches, ahead)
    )
    profile = StepProfile(
        tuple(kind_of(chance, 1 + 2 * kind) for kind in range(kinds)),
        tuple(chance.randrange(kinds) for _ in range(layers)),
        tuple(timings),
        slots,
        tail=forward,
        headroom=32 * MIB,
    )
    saved = sum(profile.kind_of(layer).nbytes for layer in range(layers))
    return profile, saved / sum(profile.timing(layer, KEEP).forward for layer in range(layers))


def peak_of_keep(profile: StepProfile) -> int:
    return play(profile, all_of(profile, KEEP), Bandwidth(1e12, 1e12)).peak_bytes


def machine_of(
    profile: StepProfile, rate: float, budget: int, *, agree: Agree | None = None, fits: bool = False
) -> Machine:
    """A machine whose drive writes and reads at a rate; ``fits``: what the device has is the budget."""
    names = tuple((0, f"layers.{layer}") for layer in range(len(profile.layers)))
    limits = Limits(budget, 64 * MIB if fits else 512 * MIB, is_fit=fits)
    task = Task((AUTO,) * len(names), names, limits, agree=agree)
    return Machine(Controller(task), profile, Bandwidth(rate, rate))


def run(
    chance: random.Random,
    profile: StepProfile,
    rate: float,
    budget: int,
    steps: int,
    before: Callable[[int, Machine], object] = lambda _step, _machine: None,
) -> list[tuple[float, int, Plan]]:
    """Steps on a busy machine: seconds and peak of each, and the plan that was in force."""
    machine = machine_of(profile, rate, budget)
    found = []
    for step in range(steps):
        before(step, machine)
        rates = Bandwidth(
            machine.bandwidth.write * chance.uniform(0.9, 1.1),
            machine.bandwidth.read * chance.uniform(0.9, 1.1),
        )
        slower = chance.uniform(0.97, 1.03) * (1.5 if chance.random() < 0.01 else 1)
        plan = machine.step(bandwidth=rates, slower=slower, peak=chance.uniform(0.99, 1.01))
        outcome = play(machine.profile, plan, rates)
        found.append((outcome.seconds, outcome.peak_bytes, plan))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_no_step_is_over_the_budget_and_plans_settle(seed: int) -> None:
    """Of 40 steps; a race of two plans is decided once."""
    chance = random.Random(seed)
    profile, needed = drawn(chance, kinds=chance.choice([1, 1, 2]))
    rate = needed * chance.uniform(0.15, 1.2)
    budget = int(peak_of_keep(profile) * chance.choice([0.3, 0.4, 0.5, 0.65, 0.8]))
    found = run(chance, profile, rate, budget, 40)
    assert max(peak for _, peak, _ in found) <= budget
    plans = [dataclasses.replace(plan, prediction=None) for _, _, plan in found]
    assert len(set(plans[3:])) <= 5
    assert len(set(plans[12:])) <= 2
    keep = play(profile, all_of(profile, KEEP), Bandwidth(rate, rate)).seconds
    assert statistics.mean(seconds for seconds, *_ in found[8:]) <= 1.25 * keep


@pytest.mark.parametrize("host_first", [True, False])
def test_plans_count_host_memory_beside_a_slow_drive(*, host_first: bool) -> None:
    profile, needed = drawn(random.Random(2), layers=16)
    saved = sum(profile.kind_of(layer).nbytes for layer in range(16))
    budget, seconds = int(0.35 * peak_of_keep(profile)), []
    for host in (None, Bandwidth(10 * needed, 10 * needed, saved // 2)):
        machine = machine_of(profile, 0.3 * needed, budget)
        machine.bandwidth = dataclasses.replace(machine.bandwidth, host=host, host_first=host_first)
        machine.run(24)
        found = play(profile, machine.plan, machine.bandwidth)
        assert found.peak_bytes <= budget
        assert machine.plan.prediction is not None
        assert machine.plan.prediction.seconds == pytest.approx(found.seconds, rel=0.03)
        assert (found.host_bytes > 0) is (host is not None)
        seconds.append(found.seconds)
    assert seconds[1] < 0.95 * seconds[0]


def test_a_plan_is_predicted_within_three_percent() -> None:
    chance = random.Random(1)
    profile, needed = drawn(chance, layers=16)
    for share in (0.3, 0.5, 0.8):
        machine = machine_of(profile, 0.5 * needed, int(share * peak_of_keep(profile)))
        machine.run(12)
        assert machine.plan.prediction is not None
        outcome = play(profile, machine.plan, machine.bandwidth)
        assert machine.plan.prediction.activation_peak == pytest.approx(outcome.activation_peak, rel=0.03)
        assert machine.plan.prediction.seconds == pytest.approx(outcome.seconds, rel=0.03)


@pytest.mark.parametrize("seed", range(3))
def test_a_drive_that_falls_to_a_quarter_is_answered_within_a_few_steps(seed: int) -> None:
    chance = random.Random(seed)
    profile, needed = drawn(chance)
    budget = int(0.45 * peak_of_keep(profile))

    def before(step: int, machine: Machine) -> None:
        if step == 16:
            machine.bandwidth = machine.bandwidth.scaled(0.25)

    found = run(chance, profile, needed, budget, 48, before)
    assert max(peak for _, peak, _ in found) <= budget
    later = statistics.median(seconds for seconds, *_ in found[36:])
    assert next(step for step, each in enumerate(found[16:]) if each[0] < 1.1 * later) <= 4


def scaled(profile: StepProfile, factor: float) -> StepProfile:
    """The same step with larger layers."""
    kinds = (
        dataclasses.replace(
            kind,
            activations=tuple(each._replace(nbytes=int(factor * each.nbytes)) for each in kind.activations),
            input_bytes=int(factor * kind.input_bytes),
        )
        for kind in profile.kinds
    )
    timings = (
        {way: (Timing(*(factor * each for each in timing)),) for way, (timing,) in known.items()}
        for known in profile.timings
    )
    return dataclasses.replace(profile, kinds=tuple(kinds), timings=tuple(timings))


@pytest.mark.parametrize("seed", range(3))
def test_a_larger_step_keeps_to_the_budget(seed: int) -> None:
    """It leaves its plan in the middle."""
    chance = random.Random(seed)
    profile, needed = drawn(chance, passes=(1, 1))
    large = scaled(profile, 1.6)
    budget = int(0.5 * peak_of_keep(large))

    def before(step: int, machine: Machine) -> None:
        machine.profile = large if step in (12, 13) or step > 20 else profile

    found = run(chance, profile, 0.8 * needed, budget, 40, before)
    assert max(peak for _, peak, _ in found) <= budget


def test_ranks_with_unlike_drives_recompute_the_same_layers() -> None:
    chance, size = random.Random(5), 4
    profile, needed = drawn(chance, layers=12, passes=(1, 1))
    budget = int(0.45 * peak_of_keep(profile))
    wanted: dict[int, Any] = {}
    barrier = threading.Barrier(size)
    recomputed: list[list[tuple[bool, ...]]] = [[] for _ in range(size)]
    peaks: list[list[int]] = [[] for _ in range(size)]

    def work(rank: int) -> None:
        def agree(mine: dict[str, Placement], need: tuple[float, float]) -> dict[str, Placement]:
            wanted[rank] = need, mine
            barrier.wait(60)
            _, found = max(wanted.values(), key=lambda each: each[0])
            barrier.wait(60)
            return found  # type: ignore[no-any-return]

        machine = machine_of(profile, needed * (0.3, 0.6, 1.0, 0.2)[rank], budget, agree=agree)
        for _ in range(24):
            plan = machine.step()
            recomputed[rank].append(tuple(way.recomputes for way in plan.placements))
            peaks[rank].append(play(profile, plan, machine.bandwidth).peak_bytes)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(set(ranks)) == 1 for ranks in zip(*recomputed, strict=True))
    assert any(recomputed[0][-1])
    assert max(map(max, peaks)) <= budget


@pytest.mark.parametrize("seed", [0, 2])
def test_first_steps_that_are_slow_decide_nothing(seed: int) -> None:
    """In them the drive seems fast enough for plans that wait for it later."""
    chance = random.Random(seed)
    profile, needed = drawn(chance, layers=12, passes=(1, 1))
    machine = machine_of(profile, 0.4 * needed, int(0.4 * peak_of_keep(profile)))
    plans = [machine.step(slower=slower) for slower in (3.0, 2.0, 1.8, *[1.0] * 13)]
    best = solve(Case(profile, machine.bandwidth, machine.controller.task.limits, (AUTO,) * 12)).prediction
    assert best is not None
    assert play(profile, plans[-1], machine.bandwidth).seconds <= 1.03 * best.seconds
    assert not any(way.recomputes for way in plans[3].placements)
    assert any(all(way.recomputes or way is KEEP for way in plan.placements) for plan in plans[4:])


def test_without_a_limit_each_plan_peaks_at_most_twice_as_high_as_what_was_seen() -> None:
    """Until everything is kept."""
    profile, needed = drawn(random.Random(6), layers=12, passes=(1, 1))
    machine = machine_of(profile, needed, 4 * peak_of_keep(profile), fits=True)
    peaks = [play(profile, plan, machine.bandwidth).peak_bytes for plan in machine.run(16)]
    assert all(peak <= 2 * max(peaks[:step]) for step, peak in enumerate(peaks) if step)
    assert set(machine.plan.placements) == {KEEP}


def test_without_a_limit_the_device_is_filled() -> None:
    profile, needed = drawn(random.Random(7), layers=12, passes=(1, 1))
    device = int(0.6 * peak_of_keep(profile))
    machine = machine_of(profile, needed, device, fits=True)
    peaks = [play(profile, plan, machine.bandwidth).peak_bytes for plan in machine.run(24)]
    assert max(peaks) <= device
    assert peaks[-1] >= 0.8 * device


def test_layers_that_must_not_run_twice_are_not_recomputed() -> None:
    profile, needed = drawn(random.Random(8), layers=12, passes=(1, 1))
    machine = machine_of(profile, 0.2 * needed, int(0.3 * peak_of_keep(profile)))
    machine.never = frozenset({2, 7})
    plans = machine.run(10)
    assert any(way.recomputes for way in plans[-1].placements)
    assert not any(plan.placements[layer].recomputes for plan in plans for layer in (2, 7))


def test_an_error_of_the_planner_ends_no_step_and_is_told_once() -> None:
    profile, needed = drawn(random.Random(9), layers=8, passes=(1, 1))
    machine = machine_of(profile, needed, int(0.5 * peak_of_keep(profile)))
    machine.run(2)
    before = machine.plan
    seen: Any = SimpleNamespace(plan=before, loads=None)  # a record that nothing can be made of
    with pytest.warns(RuntimeWarning, match="no plan could be made after step 3: .*Please report") as told:
        assert [machine.controller.observe(seen) for _ in range(2)] == [before] * 2
    assert len(told) == 1
