"""The example of DeepSpeed at each stage of ZeRO, on two ranks of a CPU; tests/run_deepspeed.sh runs this."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from test_framework_examples import MIB, Example, check

if TYPE_CHECKING:
    from pathlib import Path

    from warm import Warm


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_zero_trains_to_the_same_bits_as_without_the_package(
    stage: str, tmp_path: Path, python_with_torch: Warm
) -> None:
    example = Example("deepspeed", ranks=2, scopes=2 * 8, least_bytes=45 * MIB, losses=(0, 1))
    check(example, tmp_path, python_with_torch, "--stage", stage)
