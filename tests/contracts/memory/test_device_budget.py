"""``budget.device_bytes``: all that lies on the device stays below it, in every step after the second.

Nothing is known of a device before the first step. In all but one test PyTorch's allocator counts, as on an
accelerator; in the other malloc does.

With ``states: {default: auto}`` what the plan for activations leaves is filled with sub-groups of states that
stay. In this small model states are two fifths of what lies on the device, and activations as much.
"""

from __future__ import annotations

import gc
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from commands import call
from covering import full, of_which
from exact_memory import counted_bytes, exact_memory
from harness import KIB
from models import loss_of, make_model, make_tokens, same_bits

import tba_offload as tba
from tba_offload.config import StatesConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor, nn

    from tba_offload.report.log import StepRecord
    from tba_offload.states import StatesRecord

STEPS = 8
BATCH = 16
LAYERS = 6


class Run(NamedTuple):
    """What came of a run; weights as copies that no allocator of PyTorch counts."""

    records: list[StepRecord]
    updates: list[StatesRecord]
    weights: list[Tensor]
    told: list[str]
    others: int
    """Bytes that lay in the process before."""

    @property
    def peaks(self) -> list[int]:
        found = [record.device_peak_bytes for record in self.records]
        assert None not in found
        return [peak for peak in found if peak is not None]

    def share(self, of_all: float) -> int:
        return self.others + int(of_all * (max(self.peaks) - self.others))

    @property
    def travelling(self) -> int:
        return self.updates[-1].sub_groups - self.updates[-1].staying


@pytest.fixture
def peaks_are_exact() -> Iterator[None]:
    """Peaks are known to the byte, and only what PyTorch allocates counts."""
    with exact_memory(slots_too=True):
        yield


def run(
    directory: Path,
    policy: dict[str, object],
    *,
    by_hand: bool = False,
    states: bool = False,
    steps: int = STEPS,
    before: Callable[[int, nn.Module], object] = lambda _step, _model: None,
    clears_late: bool = False,
    batch: int = BATCH,
    passes: Callable[[int], int] = lambda _step: 1,
    log: Path | None = None,
) -> Run:
    """Trains a small GPT with AdamW; by hand the optimizer works outside of the steps.

    Gradients go before the next step, or late, between its forward and its backward. Each step has as many
    passes as ``passes`` tells.
    """
    keeps = policy["default"] == "keep"
    gc.collect()  # what an earlier run has left would lie there until some step
    others = counted_bytes()
    torch.manual_seed(0)
    model = make_model(layers=LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    store = {"kind": "file", "directories": str(directory)}
    policy = {"min_tensor_bytes": KIB, "store": store, **policy}
    updated = optimizer if states else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Memory is measured all the same.
        with tba.attach(model, policy, run_log=log, optimizer=updated, measure_memory=keeps) as session:
            for step in range(steps):
                before(step, model)
                clear = optimizer.zero_grad
                between = clear if clears_late else int
                for number in range(passes(step)):
                    with session.step() if by_hand else nullcontext():
                        loss = loss_of(model, make_tokens(10 * step + number, batch))
                        between()
                        loss.backward()
                optimizer.step()
                if not clears_late:
                    clear()
            records = session.records
            updates = [record for each in session.states for record in each.records]
    told = [str(each.message) for each in caught if each.category is RuntimeWarning]
    weights = [torch.from_numpy(each.detach().numpy().copy()) for each in model.parameters()]
    return Run(records, updates, weights, told, others)


def assert_same_weights(found: Run, expected: Run) -> None:
    assert all(map(same_bits, found.weights, expected.weights))


def assert_below(found: Run, budget: int) -> None:
    assert max(found.peaks[2:]) <= budget, (budget, found.peaks)


SHARES = (0.9, 0.75, 0.6)


@pytest.mark.usefixtures("peaks_are_exact")
@pytest.mark.parametrize("share", of_which(SHARES, 0.9, 0.6))
@pytest.mark.parametrize("by_hand", of_which([False, True], False))
def test_no_step_after_the_second_is_over_what_a_device_may_hold(
    share: float, tmp_path: Path, *, by_hand: bool
) -> None:
    kept = run(tmp_path, {"default": "keep"}, by_hand=by_hand)
    budget = int(share * max(kept.peaks))
    found = run(tmp_path, {"default": "auto", "budget": {"device_bytes": budget}}, by_hand=by_hand)
    assert_below(found, budget)
    assert max(found.peaks[2:]) > 0.5 * budget  # and something is made of it
    assert found.told == []
    assert_same_weights(found, kept)


FEW = 4
"""Sequences in a step with which gradients are a third of what activations are."""


def run_within(directory: Path, share: float, **how: Any) -> tuple[Run, Run, int]:
    """A run that keeps all, one with a share of what that takes in its steps, and the budget of that."""
    kept = run(directory, {"default": "keep"}, batch=FEW, steps=2 * STEPS, **how)
    base = kept.records[-1].base_bytes or 0
    budget = base + int(share * (max(kept.peaks) - base))
    policy: dict[str, object] = {"default": "auto", "budget": {"device_bytes": budget}}
    found = run(directory, policy, batch=FEW, steps=2 * STEPS, **how)
    return kept, found, budget


@pytest.mark.usefixtures("peaks_are_exact")
@pytest.mark.parametrize(
    "passes",
    [
        pytest.param(lambda _step: 2, id="two"),
        pytest.param(lambda step: 1 + (step >= STEPS), id="more", marks=full),
        pytest.param(lambda step: 1 + (step < STEPS), id="fewer", marks=full),
        pytest.param(lambda step: 1 + step % 2, id="in turn"),
    ],
)
def test_gradients_of_earlier_passes_are_there_in_forward(
    passes: Callable[[int], int], tmp_path: Path
) -> None:
    """A pass that finds more of them than its plan was made for goes on without that."""
    kept, found, budget = run_within(tmp_path, 0.8, passes=passes)
    assert_below(found, budget)
    assert_same_weights(found, kept)


@pytest.mark.usefixtures("peaks_are_exact")
def test_layers_that_are_placed_offload_have_less_in_flight(tmp_path: Path) -> None:
    kept = run(tmp_path, {"default": "keep"})
    budget = int(0.6 * max(kept.peaks))
    wide = {"device_bytes": budget, "in_flight_bytes": "1GiB"}
    found = run(tmp_path, {"default": "offload", "budget": wide})
    for record in found.records:
        assert 0 < record.in_flight_peak_bytes <= (record.activation_budget_bytes or 0)
    assert found.records[-1].offloaded_bytes > 0
    assert_same_weights(found, kept)


@pytest.mark.usefixtures("peaks_are_exact")
@pytest.mark.parametrize("when", [pytest.param("step", marks=full), "backward"])
def test_states_that_are_offloaded_leave_room_to_activations(when: str, tmp_path: Path) -> None:
    kept = run(tmp_path, {"default": "keep"})
    budget = int(0.6 * max(kept.peaks))
    policy: dict[str, object] = {"default": "auto", "budget": {"device_bytes": budget}}
    beside = run(tmp_path, policy)
    found = run(tmp_path, {**policy, "states": {"sub_group_bytes": "64KiB", "when": when}}, states=True)
    assert_below(found, budget)
    grown = min(
        (ours.activation_budget_bytes or 0) - (theirs.activation_budget_bytes or 0)
        for ours, theirs in zip(found.records[2:], beside.records[2:], strict=True)
    )
    size = sum(weight.nbytes for weight in found.weights)
    assert grown > 0.5 * size
    of_gradients = max(record.gradient_peak_bytes or 0 for record in found.records[1:])
    assert (of_gradients < 0.6 * size) is (when == "backward")
    assert_same_weights(found, kept)


@pytest.mark.usefixtures("peaks_are_exact")
@pytest.mark.parametrize("default", of_which(["auto", "offload"], "auto"))
def test_where_nothing_is_left_that_is_said_and_training_goes_on(default: str, tmp_path: Path) -> None:
    found = run(tmp_path, {"default": default, "budget": {"device_bytes": "1MiB"}})
    (told,) = found.told
    assert told.startswith("budget.device_bytes of 1.00 MiB leaves nothing for activations: ")
    assert ": other memory on the device takes " in told
    assert "Offload optimizer states (states:)" in told
    assert_same_weights(found, run(tmp_path, {"default": "keep"}))


def test_by_the_count_of_malloc_too(tmp_path: Path) -> None:
    """All of the process counts there, and peaks are samples."""
    kept = run(tmp_path, {"default": "keep"})
    base = max(record.base_bytes or 0 for record in kept.records)
    budget = base + int(0.6 * (max(kept.peaks) - base))
    log = tmp_path / "run.jsonl"
    found = run(tmp_path, {"default": "auto", "budget": {"device_bytes": budget}}, log=log)
    assert_below(found, budget)
    assert_same_weights(found, kept)
    written = tba.read_run_log(log)
    assert [step.device_peak_bytes for step in written.steps] == found.peaks
    plans = [event for event in written.others if event["event"] == "plan"]
    for plan in plans:
        limits = plan["limits"]
        assert isinstance(limits, dict)
        device = limits["device"]
        assert device["device_bytes"] == budget
        left = budget - device["base_bytes"] - device["gradient_bytes"]
        assert 0.98 * left < limits["budget"] < left
    assert plans


# States and activations together

AUTO = {"default": "auto", "sub_group_bytes": "128KiB"}


def run_both(directory: Path, budget: int | None, *, default: str = "auto", **how: Any) -> Run:
    """Train with states that are offloaded as far as they have to be; without a budget everything is kept."""
    policy: dict[str, object] = {"default": "keep"}
    if budget is not None:
        policy = {"default": default, "budget": {"device_bytes": budget}, "states": AUTO}
    found = run(directory, policy, batch=FEW, steps=10, states=budget is not None, **how)
    assert found.told == []
    return found


@pytest.mark.usefixtures("peaks_are_exact")
@pytest.mark.parametrize("by_hand", [False, pytest.param(True, marks=full)])
def test_fewer_states_travel_where_a_device_has_more(tmp_path: Path, *, by_hand: bool) -> None:
    """All may stay; times decide, and it depends on the drive how many do; hardly any can stay."""
    kept = run_both(tmp_path, None, by_hand=by_hand)
    travelling = []
    for share in (2.0, 0.8, 0.5):
        budget = kept.share(share)
        found = run_both(tmp_path, budget, by_hand=by_hand)
        assert_below(found, budget)
        assert_same_weights(found, kept)
        travelling.append(found.travelling)
        last = found.updates[-1]
        assert (last.read_bytes == 0) is (found.travelling == 0)
    assert travelling[0] == 0
    assert travelling[-1] > 0.8 * last.sub_groups


@pytest.mark.usefixtures("peaks_are_exact")
def test_the_run_log_tells_which_states_stay(tmp_path: Path) -> None:
    """And a plan from it for a device has states fill what it leaves."""
    log, policy = tmp_path / "run.jsonl", tmp_path / "policy.yaml"
    kept = run_both(tmp_path, None)
    found = run_both(tmp_path, kept.share(0.8), log=log)
    others, last = tba.read_run_log(log).others, found.records[-1].step
    # A choice after the last step is for an update that never comes.
    events = [each for each in others if each["event"] == "resident_plan" and each["step"] < last]
    assert events[-1]["offloaded"] == found.travelling
    assert events[-1]["parts"] == found.updates[-1].sub_groups
    assert found.records[-1].predicted_device_peak_bytes == pytest.approx(found.peaks[-1], rel=0.1)
    result = call("plan", log, "--device-bytes", f"{max(kept.peaks)}B", "-o", policy)
    assert "are left for activations" in result.output
    assert tba.load_config(policy).states == StatesConfig(**AUTO)
