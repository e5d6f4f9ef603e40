"""What a session says while it trains, and to whom."""

from __future__ import annotations

import logging
import re
import warnings
from typing import TYPE_CHECKING

import pytest
from harness import KIB, MIB, config_for, session_for
from models import make_model, train

import tba_offload as tba

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
        told = [record.getMessage() for record in caplog.records if record.name == "tba_offload.session"]
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
    assert "predicted peak" in told[0]


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


@pytest.mark.parametrize(("layers", "window"), [(4, 64 * MIB), (2, 1 * MIB)])
def test_a_window_that_holds_most_of_a_step_is_told_with_a_better_one(layers: int, window: int) -> None:
    model = make_model(layers=layers)
    with session_for(model, in_flight=window) as session:
        with pytest.warns(tba.NothingSavedWarning, match="frees little here") as said:
            train(model, steps=2)
        assert len(said) == 1
        assert session.report()[-1].in_flight_peak_bytes
    named = re.search(r"with in_flight_bytes: (\d+)KiB", str(said[0].message))
    assert named is not None
    with session_for(model, in_flight=int(named[1]) * KIB), warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, steps=2)
