"""The example of torchtitan, in torchtitan's own trainer on two ranks of a CPU; it imports triton, so that it
needs PyTorch's CUDA build: tests/run_megatron_training.sh runs this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from places import SUPPORT
from test_framework_examples import MIB, Example, check

if TYPE_CHECKING:
    from pathlib import Path

    from warm import Warm


@pytest.mark.parametrize(
    ("checkpoints", "least_bytes"),
    [
        pytest.param("none", 130 * MIB, id="no-checkpoints", marks=pytest.mark.full),
        pytest.param("selective", 65 * MIB, id="selective-checkpoints"),
        pytest.param("full", 5 * MIB, id="full-checkpoints", marks=pytest.mark.full),
    ],
)
def test_its_trainer_trains_to_the_same_bits_as_without_the_package(
    checkpoints: str, least_bytes: int, tmp_path: Path, python_with_torch: Warm
) -> None:
    """Beside its selective checkpointing there is less to offload; all other checkpointing is taken over."""
    example = Example(
        "torchtitan",
        ranks=2,
        scopes=6,
        least_bytes=least_bytes,
        losses=(0, 1),
        kind="DTensor",
        program=SUPPORT / "titan_on_cpu.py",
        recomputed=checkpoints == "full",
    )
    check(example, tmp_path, python_with_torch, f"--activation_checkpoint.mode={checkpoints}")
