"""Training over drives that fail: the same bits, or a named error for one step."""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING, Any

import pytest
from blocks import SCHEDULES, assert_same, forward_backward, make_net, run, schedule
from faults import inject
from harness import KIB, assert_all_given_back, made, quiesce, session_for
from models import History, assert_same_history, make_model, train

import tba_offload as tba
from tba_offload.errors import TbaError, TransferError

if TYPE_CHECKING:
    from pathlib import Path

    from tba_offload.report.log import StepRecord

STEPS = 4


@pytest.fixture(scope="module")
def undisturbed() -> History:
    return train(make_model(layers=3), None, steps=STEPS)


def train_with(directory: Path, *faults: str) -> tuple[History, list[StepRecord], list[str]]:
    model = make_model(layers=3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with session_for(model, directory=directory, in_flight=16 * KIB) as session, inject(*faults):
            history = train(model, session, steps=STEPS)
            assert_all_given_back(session)
            records = session.records
    texts = [str(warning.message) for warning in told]
    return history, records, [text for text in texts if "a drive failed" in text or "store is full" in text]


@pytest.mark.parametrize(
    "fault",
    [
        *(f"fail-write:errno={name}" for name in ("EIO", "EROFS", "ENODEV", "EAGAIN", "ENOMEM", "ENOSPC")),
        "fail-write:n=7",
        "fail-write:errno=ENOSPC,after=9",
        "nothing-write:after=5",
        "fail-write:chance=0.2,seed=5",
    ],
)
def test_what_cannot_be_written_changes_no_bit_and_is_told_once(
    tmp_path: Path, undisturbed: History, fault: str
) -> None:
    history, records, told = train_with(tmp_path, fault)
    assert_same_history(history, undisturbed)
    assert sum(record.fallback_kept_bytes for record in records) > 0
    assert len(told) == 1
    assert str(tmp_path) in told[0] or "the store is full" in told[0]


@pytest.mark.parametrize(
    "fault", ["fail-read:n=5", "short-read", "nothing-read:n=3", "flip-read:n=4", "zeros-read:n=4"]
)
def test_a_read_that_fails_once_changes_no_bit(tmp_path: Path, undisturbed: History, fault: str) -> None:
    history, records, told = train_with(tmp_path, fault)
    assert_same_history(history, undisturbed)
    assert told == []
    assert (sum(record.reread_bytes for record in records) > 0) is (fault != "short-read")


def test_a_changed_byte_in_the_drive_is_a_named_error(tmp_path: Path) -> None:
    with pytest.raises(
        TransferError, match=rf"could not read .* layer .* from {tmp_path}/drive, offset .*checksum"
    ):
        train_with(made(tmp_path / "drive"), "flip-write:n=6")


@pytest.mark.filterwarnings("ignore:a drive failed and takes no writes for a while:RuntimeWarning")
@pytest.mark.parametrize(("number", "attempts"), [("EIO", 4), ("ENODEV", 1)])
def test_a_read_is_made_again_a_few_times_only_and_the_next_step_is_right(
    tmp_path: Path, number: str, attempts: int
) -> None:
    net = make_net()
    named = rf"could not read .*layer 2 \(layers.2\), micro-batch 0, activation .* from {tmp_path}, offset"
    with session_for(net, directory=tmp_path, in_flight=16 * KIB) as session:
        net.layers[-1].register_forward_hook(lambda *_: quiesce(session.offloader))
        expected = run(net, forward_backward, session, 1)
        with inject(f"fail-read:errno={number}") as faults, pytest.raises(TransferError, match=named):
            run(net, forward_backward, session, 1)
        assert attempts <= len(faults.fired)  # others may have been read ahead
        net.zero_grad()
        assert_same(run(net, forward_backward, session, 1), expected)
        assert_all_given_back(session)


@pytest.mark.parametrize("fault", ["fail-write:errno=EROFS", "nothing-write"])
def test_where_the_policy_says_so_a_failed_write_is_an_error(tmp_path: Path, fault: str) -> None:
    model = make_model(layers=3)
    with session_for(model, directory=tmp_path, in_flight=16 * KIB, on_full="error") as session:
        with (
            inject(fault),
            pytest.raises(TransferError, match=r"could not write .* layer .*on_full") as caught,
        ):
            train(model, session, steps=1)
        assert str(tmp_path) in str(caught.value)
        history = train(model, session, steps=1)
    assert len(history.losses) == 1


FAULTS = (
    *("fail-write:n=3", "fail-write:after=3,errno=EROFS", "fail-write:after=3,errno=ENODEV"),
    *("fail-write:n=3,errno=EAGAIN", "fail-write:n=3,errno=ENOMEM", "fail-write:bytes=256KiB,errno=ENOSPC"),
    *("fail-read:n=2", "fail-read:after=2", "fail-read:n=2,errno=EAGAIN"),
    *("short-write:n=2", "short-read:n=2", "nothing-write:n=2", "nothing-read:n=2"),
    *("zeros-write:n=2", "zeros-read:n=2", "flip-write:n=2", "flip-read:n=2", "flip-read", "lost-write:n=2"),
    *("delay-write:seconds=0.01", "delay-read:seconds=0.01", "hang-write:n=2", "hang-read:n=2"),
)
MIXED = {0: "keep", 2: "recompute", 3: "recompute-offload"}
PLACEMENTS: tuple[dict[str, Any], ...] = (
    {"default": "offload"},
    {"layers": [{"match": number, "placement": name} for number, name in MIXED.items()]},
    {"default": "auto"},
)
WAYS = itertools.cycle(itertools.product(PLACEMENTS, (1, 2), SCHEDULES.values()))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("fault", "placement", "drives", "order"), [(fault, *next(WAYS)) for fault in FAULTS], ids=FAULTS
)
def test_no_fault_is_silent(
    fault: str, placement: dict[str, Any], drives: int, order: str, tmp_path: Path
) -> None:
    """A step on healthy drives, one with the fault, done again if a named error ended it, and one after."""
    directories = [str(made(tmp_path / str(number))) for number in range(drives)]
    seconds = 0.5 if fault.startswith("hang") else 60
    policy = placement | {
        "budget": {"in_flight_bytes": "64KiB"},
        "store": {"kind": "file", "directories": directories, "checksum": True, "stall_seconds": seconds},
        "min_tensor_bytes": 0,
        "on_slow": "wait",
    }
    work, net = schedule(order), make_net(layers=5)
    second, third = (lambda net, _: work(net, 1)), (lambda net, _: work(net, 2))
    with tba.attach(net, policy, layers=list(net.layers), measure_memory=False) as session:
        found = run(net, work, session, 1)
        with inject(fault) as faults:
            try:
                found += run(net, second, session, 1)
            except TbaError:
                net.zero_grad()
        if len(found) == 1:
            found += run(net, second, session, 1)
        assert faults.fired
        found += run(net, third, session, 1)
        assert_all_given_back(session)
    assert_same(found, run(make_net(layers=5), work, None, 3))
    assert all(list((tmp_path / str(number)).iterdir()) == [] for number in range(drives))
