"""PyTorch's operators, each as a layer, on the samples by which PyTorch tests its gradients.

The tests are those of ``on_operators.py``, run by a pytest of their own: what they import of PyTorch's tests
forbids the process to choose its kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from children import environment
from places import SUPPORT

TESTS = Path(__file__).with_name("on_operators.py")


@pytest.mark.timeout(1900)
@pytest.mark.parametrize("lane", ["main", pytest.param("full", marks=pytest.mark.full)])
def test_operators_have_the_bits_of_plain_training(lane: str) -> None:
    variables = environment()
    variables["PYTHONPATH"] += f"{os.pathsep}{SUPPORT}"
    for name in ("FULL", "SAMPLE", "SEED"):
        variables.pop(name, None)
    variables["OMP_NUM_THREADS"] = "1"  # the tensors are small
    workers = 0
    if lane == "full":
        variables["FULL"], workers = "1", 2
    options = ["-p", "no:cacheprovider", "-n", str(workers)]
    command = [sys.executable, "-m", "pytest", "-q", *options, str(TESTS)]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
