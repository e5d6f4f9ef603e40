"""What is said where megatron-core, or a training script of Megatron-LM, is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from warm import Warm

pytestmark = pytest.mark.megatron


def test_what_is_no_script_of_megatron_is_one_line(tmp_path: Path, python_with_torch: Warm) -> None:
    run = python_with_torch.run
    finished = run("-m", "tba_offload", "launch", str(tmp_path / "none.py"))
    assert finished.returncode == 1
    assert finished.stderr.startswith("Error: no script")
    alone = tmp_path / "alone.py"
    alone.write_text("raise SystemExit(7)\n")
    inner = tmp_path / "megatron" / "training"
    inner.mkdir(parents=True)
    (tmp_path / "megatron" / "__init__.py").touch()
    (inner / "__init__.py").write_text("raise ModuleNotFoundError('gone', name='six')\n")
    finished = run("-m", "tba_offload", "launch", str(alone))
    assert finished.returncode == 1
    said = "megatron.training needs the module six, which is missing. Run pip install 'tba-offload[scripts]'"
    assert finished.stderr == f"Error: alone.py: {said}\n"
