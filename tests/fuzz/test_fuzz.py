"""Random trainings have the same bits with offloading; and what runs them finds a fault, and shrinks it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from covering import of_which
from faults import inject

import tba_offload as tba
from fuzz.choices import Layer, Program, choices_of, draw
from fuzz.comparing import judge
from fuzz.shrinking import shrunk


@pytest.mark.parametrize("seed", of_which(range(300), *range(8)))
def test_a_random_training_has_the_same_bits(seed: int) -> None:
    program = draw(seed)
    verdict = judge(program)
    assert not verdict.is_fault, f"{program}\n{verdict}"


# ---- what finds the faults -----------------------------------------------------------------------

MOVED = Program(
    layers=(Layer("gelu", placement="offload"), Layer("mlp", placement="offload")),
    width=32,
    length=16,
    steps=2,
    optimizer="adam",
    window=4096,
    store="file",
    checksum=False,
    clip="norm",
    scheduler="step",
)
"""A program whose activations go to a drive."""


def test_all_choices_are_drawn() -> None:
    programs = [draw(seed) for seed in range(700)]
    for each in choices_of(Program()):
        assert {getattr(program, each.name) for program in programs} == set(each.metadata["values"]), (
            each.name
        )
    for each in choices_of(Layer()):
        found = {getattr(layer, each.name) for program in programs for layer in program.layers}
        assert found == set(each.metadata["values"]), each.name


@pytest.mark.parametrize("fault", ["flip-read", "zeros-write"])
def test_a_drive_that_changes_bytes_is_found(fault: str) -> None:
    with inject(fault) as faults:
        assert judge(MOVED).kind == "differs"
        assert faults.fired
        assert judge(replace(MOVED, checksum=True)).kind == "error"


def test_a_refusal_is_no_fault() -> None:
    program = replace(MOVED, layers=(Layer("counts", placement="recompute"),), states="auto")
    assert judge(program).kind == "refused"


def test_a_planted_fault_is_shrunk() -> None:
    program = replace(MOVED, checksum=True, window=0, width=8, length=4, steps=1)
    with mock.patch.object(tba, "attach", spoiling(tba.attach)):
        smallest = shrunk(program, lambda other: judge(other).kind == "differs")
    assert smallest == Program(store="file")


def spoiling(attach: Any) -> Any:
    """A way to attach that changes a parameter where there is a file."""

    def attached(model: Any, policy: Any, **options: Any) -> tba.Session:
        if policy["store"]["kind"] == "file":
            model.head.bias.data += 1
        session: tba.Session = attach(model, policy, **options)
        return session

    return attached
