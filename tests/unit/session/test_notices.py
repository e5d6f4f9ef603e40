"""What a session says while it trains, and to whom."""

from __future__ import annotations

import io
import logging
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from harness import KIB, MIB, config_for
from models import loss_of, make_model, make_tokens, train

import tba_offload as tba
from tba_offload.formatting import readable_size

if TYPE_CHECKING:
    from warm import Warm


def test_each_step_is_told_on_request(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model(layers=2)
    for status in (False, True):
        with (
            caplog.at_level(logging.INFO, logger="tba_offload.session"),
            tba.attach(model, config_for(), status=status),
        ):
            train(model, steps=2)
        said = [record.getMessage() for record in caplog.records if record.name == "tba_offload.session"]
        told = [line for line in said if line.startswith("step")]
        assert len(told) == (2 if status else 0)
    for number, line in enumerate(told, start=1):
        assert line.startswith(f"step {number}; activation peak ")
        assert "; gradients " in line


def test_each_new_plan_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model(layers=4)
    config = config_for(default=tba.Placement.AUTO, in_flight=256 * KIB)
    with caplog.at_level(logging.INFO, logger="tba_offload.session"), tba.attach(model, config):
        train(model, steps=6)
    told = [record.getMessage() for record in caplog.records if "plan after step" in record.getMessage()]
    assert told
    assert told[0].startswith("plan after step 3: ")
    assert "layer" in told[0]
    assert "Predicted peak" in told[0]


SCRIPT = """
import logging, sys
import torch
import tba_offload as tba

if sys.argv[1] == "configured":
    logging.basicConfig(format="MINE %(message)s", level=logging.INFO, stream=sys.stderr)
layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(3)]
model = torch.nn.Sequential(*layers)
with tba.attach(model, tba.OffloadConfig(min_tensor_bytes=0), status=True):
    model(torch.ones(32, 64)).sum().backward()
"""


@pytest.mark.parametrize(("logging_is", "prefix"), [("default", "tba-offload: "), ("configured", "MINE ")])
def test_a_program_without_logging_sees_it_on_stderr(
    logging_is: str, prefix: str, python_with_torch: Warm
) -> None:
    done = python_with_torch.run("-c", SCRIPT, logging_is)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    lines = [line for line in done.stderr.splitlines() if "step 1" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"{prefix}step 1; activation peak ")


BY_DEFAULT = tba.OffloadConfig(min_tensor_bytes=KIB, store=tba.StoreConfig(kind="host"))


# What a run has cost


def test_a_run_ends_with_one_line_of_what_it_cost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory = Path("/dev/shm")
    for steps, place in ((1, tmp_path), (4, memory), (4, tmp_path)):
        caplog.clear()
        model, config = make_model(layers=6), config_for(in_flight=64 * KIB, directory=place)
        with (
            caplog.at_level(logging.INFO, logger="tba_offload.session"),
            tba.attach(model, config) as session,
        ):
            train(model, steps=steps)
            peaks = [record.activation_peak_bytes for record in session.records]
        told = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
        assert len(told) == (steps > 1)
        assert ("TB per year" in str(told)) == (steps > 1 and place != memory)
    size = r"[\d.]+ [KM]iB"
    shape = (
        rf"activation peak {size} \(keep: {size}\), step time [\d.]+ x the prediction for 'keep', "
        rf"{size} written per step: [\d.]+ TB per year at this rate"
    )
    assert re.fullmatch(shape, told[0]), told
    assert readable_size(max(peak for peak in peaks[1:] if peak is not None)) in told[0]


def test_no_line_lands_inside_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar is cleared before a line and drawn again after it."""
    screen = io.StringIO()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    bar = pytest.importorskip("tqdm").tqdm(total=4, file=screen, mininterval=0)
    with tba.attach(make_model(layers=2), config_for(), status=True) as session:
        with session.step():
            pass
        with pytest.warns(tba.NoEffectWarning, match="^no such thing$"):
            tba.errors.warn("no such thing", tba.NoEffectWarning)
        tba.errors.log_warning("tba_offload", "tba-offload: %s", "slow drive")
    bar.close()
    for line in re.split(r"\r|\n", screen.getvalue()):
        assert ("tba-offload: " in line) <= line.startswith("tba-offload: "), screen.getvalue()
    assert "tba-offload: step 1" in screen.getvalue()
    assert "tba-offload: slow drive" in screen.getvalue()


# The in-flight window


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_by_default_an_eighth_of_what_is_saved_at_a_time_is_in_flight(micro_batches: int) -> None:
    """From the second step on, and at least the largest storage."""
    model = make_model(layers=8)
    with tba.attach(model, BY_DEFAULT) as session, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert session.plan.window == 256 * MIB
        train(model, steps=3, micro_batches=micro_batches)
        first, *others = session.records
    saved = (first.offloaded_bytes + first.forwarded_bytes) // micro_batches
    assert session.plan.window == pytest.approx(saved / 8, rel=0.01)
    assert first.in_flight_peak_bytes > saved / 2
    assert all(record.in_flight_peak_bytes <= session.plan.window for record in others)


def test_a_larger_step_widens_the_window_again() -> None:
    model = make_model(layers=8)
    with tba.attach(model, BY_DEFAULT) as session:
        windows = []
        for batch in (2, 8, 4):
            loss_of(model, make_tokens(0, batch)).backward()
            torch.optim.SGD(model.parameters(), lr=1e-3).step()
            model.zero_grad()
            windows.append((session.records and session.plan.window) or 0)
    assert windows[1] == windows[2] == pytest.approx(4 * windows[0], rel=0.01)
