"""PyTorch's operators, each as a layer, on the samples by which PyTorch tests its gradients.

The tests are those of ``on_operators.py``, run by a pytest of their own: what they import of PyTorch's tests
forbids the process to choose its kernels.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from children import run_tests

TESTS = Path(__file__).with_name("on_operators.py")


@pytest.mark.timeout(1900)
@pytest.mark.parametrize("lane", ["main", pytest.param("full", marks=pytest.mark.full)])
def test_operators_have_the_bits_of_plain_training(lane: str) -> None:
    workers = "2" if lane == "full" else "0"
    done = run_tests(TESTS, lane, "-n", workers, timeout=1800, OMP_NUM_THREADS="1")  # the tensors are small
    assert done.returncode == 0, done.stdout + done.stderr
