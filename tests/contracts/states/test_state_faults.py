"""What a drive does to states never becomes wrong numbers: they stay in memory, or the error has a name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch
from covering import of_which
from faults import inject
from optimizers import Training, assert_same, copied, pair, policy, train
from torch import Tensor, optim

import tba_offload as tba
from tba_offload.errors import ChecksumError, HangingError, SessionError, StoreError, TransferError

if TYPE_CHECKING:
    from pathlib import Path


TIMED_OUT = "fail-write:n=1,errno=ETIMEDOUT"
"""A drive that answers that something within it has timed out, as NFS may, does not write any more."""

FULL = ["fail-write", "fail-write:n=2", "fail-write:chance=0.5,seed=3", "nothing-write", TIMED_OUT]


@pytest.mark.parametrize("fault", of_which(FULL, "fail-write", "fail-write:chance=0.5,seed=3", TIMED_OUT))
def test_states_that_cannot_be_written_are_an_error_that_loses_none(fault: str, tmp_path: Path) -> None:
    found, expected = pair("adamw")
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)):
        train(found, expected, 0)
        why = r"states of parameters? \d+.* cannot be written.*If training has started, load a checkpoint"
        with inject(fault) as faults, pytest.raises(TransferError, match=why):
            for seed in range(1, 4):
                found.step(seed)
        assert faults.fired
        with pytest.raises(SessionError, match="failed halfway"):
            found.step(4)
    steps = [each["step"] for each in found.optimizer.state.values()]
    assert len(steps) == len(expected.optimizer.state)
    assert {int(max(steps)), int(min(steps))} <= {1, 2, 3}
    assert all(type(value) is Tensor for each in found.optimizer.state.values() for value in each.values())


@pytest.mark.parametrize("when", ["step", "backward"])
def test_an_optimizer_whose_states_cannot_be_taken_is_as_it_was(when: str, tmp_path: Path) -> None:
    found, expected = pair("adamw")
    settings = policy(tmp_path, states={"when": when}, store={"capacity": "64KiB"})
    train(found, expected, 0)
    with pytest.raises(TransferError, match=r"cannot be written.* Free some space"):
        tba.offload_optimizer(found.optimizer, settings, model=found.model)
    train(found, expected, 1)
    assert_same(found, expected)
    settings["store"].pop("capacity")
    with tba.offload_optimizer(found.optimizer, settings, model=found.model):
        train(found, expected, 2)
        assert_same(found, expected)


@pytest.mark.parametrize(
    "fault", ["fail-read:n=2", "fail-read:n=1,errno=ETIMEDOUT", "flip-read:n=3", "short-read"]
)
def test_a_read_that_fails_once_is_tried_again(fault: str, tmp_path: Path) -> None:
    found, expected = pair("adamw")
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)), inject(fault) as faults:
        train(found, expected, *range(4))
        assert faults.fired
        assert_same(found, expected)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [("fail-read", StoreError), ("lost-write", ChecksumError), ("zeros-read", ChecksumError)],
)
def test_states_that_are_lost_are_an_error_until_a_checkpoint_is_loaded(
    fault: str, cause: type[Exception], tmp_path: Path
) -> None:
    found, expected = pair("adamw")
    train(found, expected, 0)
    torch.save((found.model.state_dict(), found.optimizer.state_dict()), tmp_path / "checkpoint")
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)):
        with inject(fault):
            with pytest.raises(TransferError, match=r"parameters? \d+.*cannot be read back") as raised:
                for seed in range(1, 4):
                    found.step(seed)
            assert isinstance(raised.value.__cause__, cause)
            with pytest.raises(SessionError, match="failed halfway"):
                found.step(4)
        model, optimizer = torch.load(tmp_path / "checkpoint")
        found.model.load_state_dict(model)
        found.optimizer.load_state_dict(optimizer)
        train(found, expected, 1)
        assert_same(found, expected)


def load(found: Training, expected: Training) -> None:
    found.model.load_state_dict(expected.model.state_dict())
    found.optimizer.load_state_dict(copied(expected.optimizer.state_dict()))


@pytest.mark.filterwarnings("ignore:.* made no progress")
@pytest.mark.parametrize("then", ["a checkpoint", "close"])
def test_what_comes_after_a_write_that_hangs(then: str, tmp_path: Path) -> None:
    found, expected = pair("adamw")
    states = tba.offload_optimizer(found.optimizer, policy(tmp_path, store={"stall_seconds": 0.5}))
    expected.step(0)
    with inject("hang-write:n=1") as faults:
        with pytest.raises(TransferError, match=r"store\.stall_seconds"):
            found.step(0)
        if then == "close":
            with pytest.raises(HangingError) as raised:
                states.close()
            assert raised.value.__context__ is None  # nothing else failed before
        else:
            with pytest.raises(TransferError, match=r"store\.stall_seconds"):
                load(found, expected)
            faults.release()
            load(found, expected)
            train(found, expected, 1)
            assert_same(found, expected)
            states.close()
    assert all(type(value) is Tensor for each in found.optimizer.state.values() for value in each.values())


def test_a_forked_child_cannot_use_them(tmp_path: Path) -> None:
    found, expected = pair("adamw")
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)):
        train(found, expected, 0)
        child = os.fork()
        if child == 0:
            try:
                found.optimizer.state_dict()
            except tba.SessionError:
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        train(found, expected, 1)
        assert_same(found, expected)


def test_what_a_block_raises_is_not_hidden_by_states_that_cannot_be_read(tmp_path: Path) -> None:
    found = Training(optim.AdamW)
    settings, layers = policy(tmp_path), list(found.model.layers)

    def program() -> None:
        with tba.attach(found.model, settings, layers=layers, optimizer=found.optimizer):
            found.step(0)
            raise KeyError("the program's own")

    with inject("fail-read"), pytest.warns(RuntimeWarning, match="cannot be read back"):
        with pytest.raises(KeyError, match="the program's own"):
            program()
