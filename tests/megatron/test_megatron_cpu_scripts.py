"""Training scripts without a GPU."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from children import environment
from pretrain_runs import slow

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(torch.cuda.is_available(), reason="refused where there is a GPU"),
]

SCRIPT = """
if __name__ != "__main__":
    raise SystemExit("the script was run once more")
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
    print("devices", pool.submit(eval, "__import__('torch').cuda.device_count()").result())
"""


@slow
def test_processes_that_a_script_starts_have_the_substitutions_and_leave_the_script_alone(
    tmp_path: Path,
) -> None:
    script = tmp_path / "pretrain.py"
    script.write_text(SCRIPT)
    finished = subprocess.run(
        [sys.executable, "-m", "tba_lab.megatron_cpu_scripts", str(script)],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines() == ["devices 1"]
