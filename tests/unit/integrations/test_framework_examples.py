"""Examples of frameworks train to the same bits with the package as without it, and activations travel."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import example_ranks
import pytest
import torch
from models import assert_same_tensors
from places import EXAMPLES, SUPPORT

if TYPE_CHECKING:
    from pathlib import Path

    from warm import Warm

STEPS = 2
MIB = 2**20
WINDOW = 4 * MIB  # bytes whose writes may still run when backward begins, which then takes them back


@dataclass(frozen=True)
class Example:
    """A file of examples, or a program that runs one."""

    name: str
    ranks: int
    scopes: int  # runs of layers in a step of one rank
    least_bytes: int  # that such a step offloads or takes back
    losses: tuple[int, ...]  # ranks that know the loss
    kind: str = "Tensor"  # class of the parameters
    program: Path | None = None
    options: tuple[str, ...] = ()
    recomputed: bool = False  # whether the framework checkpoints the layers, so that only inputs travel


ACCELERATE: dict[str, Any] = {"ranks": 2, "scopes": 2 * 8, "losses": (0, 1), "kind": "DTensor"}
ACCELERATE["program"] = SUPPORT / "accelerate_fsdp2.py"
EXAMPLES_OF_FRAMEWORKS = [
    Example("pipeline", ranks=2, scopes=4 * 4, least_bytes=45 * MIB, losses=(1,)),
    Example("fsdp", ranks=2, scopes=8, least_bytes=25 * MIB, losses=(0, 1), kind="DTensor"),
    Example("accelerate", least_bytes=50 * MIB, **ACCELERATE),
    Example("accelerate", least_bytes=2 * MIB, options=("--checkpointing",), recomputed=True, **ACCELERATE),
    Example("trl", ranks=1, scopes=8, least_bytes=8 * 258_048, losses=(0,), recomputed=True),
]
LONG = {"accelerate", "trl"}


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(
            example,
            id="".join((example.name, *example.options)),
            marks=[pytest.mark.full] * (example.name in LONG),
        )
        for example in EXAMPLES_OF_FRAMEWORKS
    ],
)
def test_an_example_trains_to_the_same_bits_as_without_the_package(
    example: Example, tmp_path: Path, python_with_torch: Warm
) -> None:
    check(example, tmp_path, python_with_torch, *example.options)


def check(example: Example, directory: Path, python: Warm, *options: str) -> None:
    for rank, (plain, found) in enumerate(ran(example, directory, python, *options)):
        assert len(losses_of(found)) == (STEPS if rank in example.losses else 0)
        assert losses_of(found) == losses_of(plain)
        assert found["kinds"] == plain["kinds"] == {example.kind}
        assert list(found["parameters"]) == list(plain["parameters"])
        assert_same_tensors(found["parameters"].values(), plain["parameters"].values())
        assert len(found["steps"]) == STEPS
        assert found["steps"][-1]["scopes"] == example.scopes  # the first one's may be more
        for step in found["steps"]:
            assert step["left_alone_scopes"] == 0
            assert (step["recomputed_scopes"] == example.scopes) == example.recomputed
            if example.recomputed:  # all inputs fit into the window; tables of positions are kept
                assert step["offloaded_bytes"] + step["forwarded_bytes"] >= example.least_bytes
                assert step["kept_bytes"] < example.least_bytes // 3
                continue
            assert step["offloaded_bytes"] + WINDOW > example.least_bytes
            assert step["read_bytes"] > example.least_bytes // 2  # the rest was still in memory
            assert step["kept_bytes"] < example.least_bytes // 20  # what a framework holds itself


def ran(
    example: Example, directory: Path, python: Warm, *options: str
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    drive, policy = directory / "drive", directory / "policy.yaml"
    drive.mkdir()
    policy.write_text(
        "default: offload\n"
        f"budget: {{in_flight_bytes: {WINDOW}B}}\n"
        f"store: {{kind: file, directories: ['{drive}']}}\n"
    )
    program = example.program or EXAMPLES / f"train_{example.name}.py"
    arguments = map(str, (program, example.ranks, directory, policy, "--steps", STEPS, *options))
    done = python.run(example_ranks.__file__, *arguments, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return [
        (torch.load(directory / f"without-{rank}.pt"), torch.load(directory / f"with-{rank}.pt"))
        for rank in range(example.ranks)
    ]


def losses_of(run: dict[str, Any]) -> list[str]:
    return re.findall(r"loss (\d[\d.]*(?:e[+-]?\d+)?)", run["printed"])
