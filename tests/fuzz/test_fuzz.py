"""Random trainings have the same bits with offloading; and what runs them finds a fault."""

from __future__ import annotations

from dataclasses import replace

import pytest
from covering import of_which
from faults import inject

from fuzz.choices import Layer, Program, choices_of, draw
from fuzz.comparing import judge


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
