"""Peaks of memory, held against an observer outside: a preloaded library that counts allocations.

The loop is the README's, word for word, on models of Hugging Face at PyTorch's defaults: gradients are None
before each backward, and the states of the optimizer are made in the first step.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
from children import environment
from covering import sorted_out
from places import SUPPORT
from warm import warm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from warm import Warm

KINDS = ["gpt2", "llama", "bert", "t5", "vit", "qwen3"]
MODELS = [f"transformers.models.{kind}.modeling_{kind}" for kind in KINDS]
BUSY = 4
"""Processes that keep the processor busy meanwhile: threads that sample memory get few turns."""


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """Runs programs under the observer, which have Hugging Face's models imported."""
    library = tmp_path_factory.mktemp("observer") / "observer.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", library, SUPPORT / "observer.c", "-ldl"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    with warm("torch", "torch._dynamo", *MODELS, env=environment() | {"LD_PRELOAD": str(library)}) as found:
        yield found


def run(observed: Warm, kind: str, policy: str, directory: Path, *, steps: int) -> dict[str, Any]:
    file = directory / "policy.yaml"
    file.write_text(policy)
    done = observed.run(str(SUPPORT / "observed_loop.py"), kind, str(file), str(steps), timeout=280)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert len(found["reported"]) == len(found["observed"]) == steps
    assert found["gradients"] == [found["parameters"]] * steps
    assert "mallinfo2" in found["source"]
    return found


@contextmanager
def busy(count: int) -> Iterator[None]:
    forever = [sys.executable, "-S", "-c", "while True: pass"]
    processes = [subprocess.Popen(forever) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize(("kind", "load"), sorted_out([("gpt2", 0)], product(KINDS, (0, BUSY))))
def test_the_loop_of_the_readme_reports_the_peak_that_an_observer_sees(
    observed: Warm, tmp_path: Path, kind: str, load: int
) -> None:
    peaks = {}
    for placement, window, steps in (("keep", "", 1), ("offload", "budget: {in_flight_bytes: 16MiB}\n", 3)):
        with busy(load):
            found = run(observed, kind, f"default: {placement}\n{window}", tmp_path, steps=steps)
        reported, seen = found["reported"], found["observed"]
        ratios = [ours / theirs for ours, theirs in zip(reported, seen, strict=True) if ours is not None]
        assert len(ratios) > steps // 2, found
        assert all(0.95 < ratio < 1.05 for ratio in ratios), ratios
        peaks[placement] = max(seen)
    assert peaks["offload"] < 0.5 * peaks["keep"]
