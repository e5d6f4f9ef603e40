"""Random trainings have the same bits with offloading; and what runs them finds a fault, and shrinks it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from covering import of_which
from faults import inject

import tba_offload as tba
from fuzz.choices import DENIED, Layer, Program, choices_of, draw, simpler
from fuzz.comparing import judge
from fuzz.shrinking import shrunk
from tba_offload.capture import hooks

if TYPE_CHECKING:
    from torch import Tensor


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


def test_a_program_is_the_same_each_time() -> None:
    assert draw(5) == draw(5) != draw(6)


def test_all_choices_are_drawn() -> None:
    programs = [draw(seed) for seed in range(400)]
    for each in choices_of(Program()):
        assert {getattr(program, each.name) for program in programs} == set(each.metadata["values"]), (
            each.name
        )
    for each in choices_of(Layer()):
        found = {getattr(layer, each.name) for program in programs for layer in program.layers}
        assert found == set(each.metadata["values"]), each.name


def test_what_is_known_is_not_drawn() -> None:
    programs = [draw(seed) for seed in range(100)]
    smaller = [other for program in programs[:10] for other in simpler(program)]
    for why, denies in DENIED.items():
        assert not any(map(denies, programs + smaller)), why


def test_a_healthy_program_has_no_fault() -> None:
    assert judge(MOVED).kind == "same"


@pytest.mark.parametrize("fault", ["flip-read", "zeros-write"])
def test_a_drive_that_changes_bytes_is_found(fault: str) -> None:
    with inject(fault) as faults:
        assert judge(MOVED).kind == "differs"
        assert faults.fired
        assert judge(replace(MOVED, checksum=True)).kind == "error"


def test_another_tensor_at_unpack_is_found() -> None:
    with mock.patch.object(hooks, "restore", shifted(hooks.restore)):
        assert judge(MOVED).kind == "differs"


def shifted(restore: Any) -> Any:
    """A way to restore that gives the elements in another order."""

    def restored(*args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = restore(*args, **kwargs)
        return found.roll(1) if found.is_floating_point() else found

    return restored


def test_what_is_left_is_found() -> None:
    held: list[object] = []
    with mock.patch.object(hooks, "restore", holding(hooks.restore, held)):
        verdict = judge(MOVED)
    assert verdict.kind == "left"
    assert "storages" in verdict.text


def holding(restore: Any, held: list[object]) -> Any:
    """A way to restore that keeps a tensor each time."""

    def restored(*args: Any, **kwargs: Any) -> Tensor:
        held.append(torch.ones(9))
        found: Tensor = restore(*args, **kwargs)
        return found

    return restored


def test_a_refusal_is_no_fault() -> None:
    program = replace(MOVED, layers=(Layer("counts", placement="recompute"),), states="auto")
    assert judge(program).kind == "refused"


def test_the_same_error_is_no_fault() -> None:
    program = replace(MOVED, layers=(Layer("changes what was saved", placement="offload"),))
    assert judge(program).kind == "same error"


def test_shrinking_leaves_what_the_fault_needs() -> None:
    def fails(program: Program) -> bool:
        kinds = [layer.kind for layer in program.layers]
        return program.width == 32 and "mlp" in kinds and program.clip != "none"

    smallest = shrunk(MOVED, fails)
    assert smallest == Program(layers=(Layer("mlp"),), width=32, clip="norm")


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
