"""The example of DeepSpeed at each stage of ZeRO, on two ranks of a CPU, and its lane in the benchmark of
optimizer states; tests/run_deepspeed.sh runs this.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
from places import BENCHMARKS
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


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_trainer_of_transformers_trains_to_the_same_bits_by_zero(
    stage: int, tmp_path: Path, python_with_torch: Warm
) -> None:
    configuration = tmp_path / "zero.json"
    zero = {"stage": stage, "reduce_bucket_size": MIB}  # buckets are allocated in backward
    batch = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    configuration.write_text(json.dumps(batch | {"zero_optimization": zero}))
    example = Example("huggingface", ranks=2, scopes=8, least_bytes=40 * MIB, losses=(0, 1))
    check(example, tmp_path, python_with_torch, "--deepspeed", str(configuration))


@pytest.mark.parametrize("rows", ["0", "16"], ids=["updates", "steps"])
def test_the_benchmark_of_states_updates_from_a_drive_as_the_plain_optimizer_does(
    rows: str, tmp_path: Path, python_with_torch: Warm
) -> None:
    options = ("--matrices", "4", "--width", "512", "--sub-group", "4MiB", "--rounds", "3", "--rows", rows)
    done = python_with_torch.run(
        str(BENCHMARKS / "states.py"), str(tmp_path), *options, "--deepspeed", timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert "tensors with different bits: 0" in done.stdout
    lane = re.search(r"^deepspeed .*\) +(\S+) +(\S+) +(\S+) +(\S+) +(\S+) +\S+$", done.stdout, re.MULTILINE)
    assert lane is not None, done.stdout
    read, written = map(float, lane.groups()[-2:])
    assert read >= 4 * 4  # MiB: masters, gradients and two states
    assert written >= 3 * 4
    apart = re.search(r"of 1048576 elements of parameters .* by at most (\S+)", done.stdout)
    assert apart is not None, done.stdout
    assert float(apart[1]) < 1e-5, "an update of Adam moves a parameter by 1e-3"
    assert list(tmp_path.iterdir()) == []
