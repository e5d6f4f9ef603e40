"""Examples with frozen weights: equal losses with and without offloading, and few bytes that are read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from places import EXAMPLES

if TYPE_CHECKING:
    from pathlib import Path

    from warm import Warm

TWICE = """
import os, runpy, sys, warnings
folder, example = sys.argv[1:]
warnings.simplefilter("ignore")
os.chdir(folder)
os.environ["HF_HUB_OFFLINE"] = "1"
for frozen in ("keep", "offload"):
    sys.argv = [example, "--steps", "2", "--frozen", frozen]
    print("frozen:", frozen, flush=True)
    runpy.run_path(example, run_name="__main__")
"""

MOST = {"qlora": 1.0, "experts": 0.8}
"""Bytes read in a step, over those that the forward and the backward of all frozen weights need."""


@pytest.mark.parametrize("name", MOST)
def test_an_example(name: str, tmp_path: Path, python_with_torch: Warm) -> None:
    example = str(EXAMPLES / f"train_{name}.py")
    done = python_with_torch.run("-c", TWICE, str(tmp_path), example)
    assert done.returncode == 0, done.stderr[-4000:]
    runs = done.stdout.split("frozen: ")[1:]
    losses = [re.findall(r"^step .*loss ([\d.]+),", run, re.MULTILINE) for run in runs]
    read = [[float(each) for each in re.findall(r"([\d.]+) MiB of frozen weights read", run)] for run in runs]
    needed = [float(each) for each in re.findall(r"of ([\d.]+) MiB that forward", runs[1])]
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]
    assert not any(read[0])
    assert all(0 < each <= MOST[name] * most for each, most in zip(read[1], needed, strict=True))
