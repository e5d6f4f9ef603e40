"""A drive that hangs ends in a named error and a process that ends, however the script is written."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from covering import full
from harness import CPU, PATIENCE, made
from store_contract import Gate, pattern, write

from tba_offload.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from warm import Warm

LIMIT = 2.0
"""Seconds that the drive may stand still."""

SETUP = """
import atexit, sys, time, warnings
import torch
began = []
atexit.register(lambda: began and print(f"ended after {time.monotonic() - began[0]:.1f} s", file=sys.stderr))
import tba_offload as tba
from faults import inject

torch.manual_seed(0)
layers = (torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh()) for _ in range(4))
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
policy = {
    "budget": {"in_flight_bytes": "512KiB"},
    "store": {"kind": "file", "directories": [DIRECTORY], "stall_seconds": LIMIT},
}

def train(steps):
    for _ in range(steps):
        model(torch.randn(256, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

def hang():
    began.append(time.monotonic())
    return inject(FAULT).start()
"""

ENDS = {
    "plain script": """
session = tba.attach(model, policy)
train(2)
hang()
train(3)
""",
    "with": """
with tba.attach(model, policy):
    train(2)
    hang()
    train(3)
""",
}


def run(python: Warm, script: str) -> tuple[int, str, float]:
    """Exit code, error output, and seconds from the moment that the drive hung to the very end."""
    ended = python.run("-c", script, timeout=PATIENCE)
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("ended after "), ended.stderr
    return ended.returncode, ended.stderr, float(last.split()[2])


def told(directory: Path, fault: str) -> str:
    return f"DIRECTORY, LIMIT, FAULT = {str(made(directory))!r}, {LIMIT!r}, {fault!r}\n{SETUP}"


@pytest.mark.parametrize(
    ("fault", "end"),
    [
        ("hang-write", "with"),
        *(pytest.param("hang-write", end, marks=full) for end in ENDS if end != "with"),
        ("hang-read", "plain script"),
        pytest.param("hang-read", "with", marks=full),
    ],
)
def test_a_script_ends_with_the_named_error(
    tmp_path: Path, python_with_torch: Warm, fault: str, end: str
) -> None:
    code, errors, seconds = run(python_with_torch, told(tmp_path / "drive", fault) + ENDS[end])
    assert code == 1
    assert f"made no progress for {LIMIT / 10:g} s" in errors
    assert "TransferError: could not" in errors
    assert f"made no progress for {LIMIT:g} s" in errors
    assert str(tmp_path / "drive") in errors
    assert seconds < LIMIT + 5 + 20  # a busy machine may take long for the rest


def test_a_session_that_was_never_closed(tmp_path: Path, python_with_torch: Warm) -> None:
    """The program ends, and callbacks of others run: one of them says how long."""
    script = (
        told(tmp_path / "drive", "hang-write")
        + """
policy["budget"]["in_flight_bytes"] = "64MiB"
session = tba.attach(model, policy)
faults = hang()
loss = model(torch.randn(256, 256)).square().mean()
session.offloader.flush()
while not faults.fired:  # what no thread has taken up yet is dropped at the end, and hangs nowhere
    time.sleep(0.01)
"""
    )
    code, errors, seconds = run(python_with_torch, script)
    assert code == 0
    assert errors.count("stay until the process ends. Check the drive") == 1
    assert seconds < LIMIT + 5 + 20


def test_no_drive_is_to_blame_for_a_device_that_is_late(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    gate = Gate()
    with open_store(kind="file", directories=[tmp_path], device=CPU, stall_seconds=0.5) as store:
        transfer = write(store, pattern(10_000), gate)
        threading.Timer(1.5, gate.open).start()
        store.wait(transfer)
        assert transfer.extent is not None
        assert not recwarn.list
