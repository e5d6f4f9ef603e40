"""Processes that tests start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import tba_offload

if TYPE_CHECKING:
    from warm import Warm

FRAMEWORKS = {"transformers", "accelerate", "lightning", "pytorch_lightning"}
OPTIONAL = {"kvikio", "cupy", "megatron", "transformer_engine", "matplotlib", "cuda", *FRAMEWORKS}


def environment() -> dict[str, str]:
    """Of a child that finds the package where this test found it, and what tests import."""
    folders = (Path(tba_offload.__file__).parents[1], Path(__file__).parent)
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}


def run_python(
    *arguments: object, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    own = environment() | variables
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=own)


def run_tests(
    path: Path, lane: str, *options: str, timeout: float, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run tests by a pytest of their own: what they import or set would stay in this process."""
    own = environment()
    for name in ("FULL", "SAMPLE", "SEED"):
        own.pop(name, None)
    if lane == "full":
        own["FULL"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(path)]
    return subprocess.run(
        command, capture_output=True, text=True, env=own | variables, check=False, timeout=timeout
    )


BLOCK = """
import sys, warnings
warnings.simplefilter("error")
sys.modules |= dict.fromkeys({missing!r})
"""
"""Makes Python take packages for missing, and warnings for errors."""


def run_without(
    missing: set[str], code: str, *, python: Warm | None = None
) -> subprocess.CompletedProcess[str]:
    """Run code in a process, new or forked, in which some packages cannot be imported."""
    script = BLOCK.format(missing=missing) + code
    if python is not None:
        return python.run("-c", script)
    return run_python("-c", script)
