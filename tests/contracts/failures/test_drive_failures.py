"""Training over drives that fail: the same bits, or a named error for one step."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest
from faults import inject
from harness import KIB, assert_all_given_back, made, session_for
from models import History, assert_same_history, loss_of, make_model, make_tokens, train

from tba_offload.errors import TransferError

if TYPE_CHECKING:
    from pathlib import Path

    from tba_offload.report.log import StepRecord

STEPS = 4


@pytest.fixture(scope="module")
def undisturbed() -> History:
    return train(make_model(layers=3), None, steps=STEPS)


def train_with(directory: Path, *faults: str) -> tuple[History, list[StepRecord], list[str]]:
    """Trains over one file; the history, the records, and what was told of drives."""
    model = make_model(layers=3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with session_for(model, directory=directory, in_flight=16 * KIB) as session, inject(*faults):
            history = train(model, session, steps=STEPS)
            assert_all_given_back(session)
            records = session.records
    texts = [str(warning.message) for warning in told]
    return history, records, [text for text in texts if "left alone" in text or "store is full" in text]


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


@pytest.mark.filterwarnings("ignore:a drive failed and is left alone:RuntimeWarning")
@pytest.mark.parametrize(("number", "attempts"), [("EIO", 4), ("ENODEV", 1)])
def test_a_read_is_made_again_a_few_times_only(tmp_path: Path, number: str, attempts: int) -> None:
    model = make_model(layers=3)
    with session_for(model, directory=tmp_path, in_flight=16 * KIB) as session:
        loss = loss_of(model, make_tokens(0))
        session.offloader.quiesce()
        with inject(f"fail-read:errno={number}") as faults:
            with pytest.raises(TransferError, match=rf"could not read .* layer .* from {tmp_path}, offset"):
                loss.backward()
        assert attempts <= len(faults.fired)  # others may have been read ahead
        del loss


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
