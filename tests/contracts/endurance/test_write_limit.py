"""``store.write_bytes_per_day``: ``auto`` writes no more, and changes no bit."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

import pytest
from harness import KIB
from models import assert_same_history, make_model, train

import tba_offload as tba
from tba_offload.config import BudgetConfig, OffloadConfig, Placement, StoreConfig
from tba_offload.report.log import read_run_log

if TYPE_CHECKING:
    from pathlib import Path

    from models import History

    from tba_offload.report.log import StepRecord

DAY = 24 * 60 * 60
LAYERS, STEPS = 8, 10


def run(
    directory: Path,
    *,
    default: Placement = Placement.AUTO,
    budget: int | None = None,
    limit: int | None = None,
) -> tuple[History, list[StepRecord]]:
    store = StoreConfig(kind="file", directories=(directory,), write_bytes_per_day=limit)
    budgets = BudgetConfig(in_flight_bytes=256 * KIB, activation_bytes=budget)
    config = OffloadConfig(default=default, budget=budgets, store=store, min_tensor_bytes=KIB)
    model = make_model(layers=LAYERS, dropout=0.1)
    with tba.attach(model, config, run_log=directory / f"{default}-{limit}.jsonl") as session:
        return train(model, session, steps=STEPS), session.records


def test_a_run_writes_no_more_than_its_share_of_a_day(tmp_path: Path) -> None:
    """By the step times that were measured, from which a plan sees what a day allows."""
    expected, kept = run(tmp_path, default=Placement.KEEP)
    budget = max(record.activation_peak_bytes or 0 for record in kept) // 2
    unlimited, records = run(tmp_path, budget=budget)
    assert_same_history(unlimited, expected)
    rate = median(record.offloaded_bytes / record.seconds for record in records[:3]) * DAY
    limit = int(rate / 20)
    found, records = run(tmp_path, budget=budget, limit=limit)
    assert_same_history(found, expected)
    events = read_run_log(tmp_path / f"{Placement.AUTO}-{limit}.jsonl").others
    event: Any = [event for event in events if event["event"] == "plan"][-1]
    expected_of_step = event["plan"]["prediction"]
    assert expected_of_step["written_bytes"] / expected_of_step["seconds"] * DAY <= limit
    assert records[-1].offloaded_bytes < records[0].offloaded_bytes / 4


@pytest.mark.filterwarnings("ignore:the budget of")
def test_a_limit_that_cannot_be_met_is_said(tmp_path: Path) -> None:
    """Half of the layers are placed offload, whatever is planned."""
    model = make_model(layers=LAYERS)
    policy = {
        "default": "auto",
        "layers": [{"match": "0-3", "placement": "offload"}],
        "budget": {"in_flight_bytes": "256KiB"},
        "store": {"kind": "file", "directories": str(tmp_path), "write_bytes_per_day": "1MB"},
        "min_tensor_bytes": "1KiB",
    }
    with tba.attach(model, policy) as session:
        with pytest.warns(
            RuntimeWarning, match=r"store\.write_bytes_per_day of .* cannot be met: .* per day"
        ):
            train(model, session, steps=8)
