"""Random programs: whatever a layer computes, it computes the same with a session, or fails the same way.

Each program is a list of operations on a pool of tensors: arithmetic, views of all kinds, changes in place,
copies, dropout. Where PyTorch finds a saved tensor changed in place, so do we.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from covering import of_which
from harness import KIB, Drive, assert_all_given_back, session_for
from models import same_bits
from programs import (
    SAFE,
    change_what_may_be_saved,
    make_layers,
    run,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tba_offload.session import Session


# Some programs get a store that is too small for them.
pytestmark = pytest.mark.filterwarnings("ignore:the store is full:UserWarning")


def session_over(layers: nn.ModuleList, seed: int, default: str = "offload") -> Session:
    """Thresholds, ceilings and speeds vary with the seed."""
    chance = random.Random(seed)
    drive = Drive()
    drive.writes.seconds = chance.choice([0, 0, 0.0003])
    drive.reads.seconds = chance.choice([0, 0, 0.0003])
    return session_for(
        layers,
        layers=list(layers),
        drive=drive,
        default=default,
        min_tensor_bytes=chance.choice([0, 64, 512, 2 * KIB]),
        in_flight=chance.choice([None, 4 * KIB, 20 * KIB]),
        capacity=chance.choice([None, None, 60 * KIB]),
    )


@pytest.mark.parametrize("seed", of_which(range(30), *range(15)))
def test_a_program_gives_the_same_bits(seed: int) -> None:
    expected = run(make_layers(seed, SAFE), None, 3)
    layers = make_layers(seed, SAFE)
    with session_over(layers, seed) as session:
        found = run(layers, session, 3)
        assert_all_given_back(session)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("seed", of_which(range(15), *range(8)))
def test_a_program_that_is_recomputed_gives_the_same_bits(seed: int) -> None:
    expected = run(make_layers(seed, SAFE), None, 3)
    layers = make_layers(seed, SAFE)
    with session_over(layers, seed, "recompute-offload") as session:
        found = run(layers, session, 3)
        assert {record.recomputed_scopes for record in session.report()} == {3}
        assert_all_given_back(session)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("seed", of_which(range(20), *range(10)))
def test_a_program_that_changes_saved_tensors_fails_the_same_way(seed: int) -> None:
    operations = [*SAFE, *[change_what_may_be_saved] * 2]
    layers = make_layers(seed, operations)
    expected = run_or_error(make_layers(seed, operations))
    with session_over(layers, seed) as session:
        if isinstance(expected, RuntimeError):
            with pytest.raises(RuntimeError, match="in place"):
                run(layers, session, 2)
            return
        found = run(layers, session, 2)
        assert_all_given_back(session)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def run_or_error(layers: nn.ModuleList) -> list[Tensor] | RuntimeError:
    """What two steps give without a session, or that PyTorch found a saved tensor changed."""
    try:
        return run(layers, None, 2)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return error
