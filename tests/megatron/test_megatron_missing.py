"""What is said where megatron-core, or a training script of Megatron-LM, is missing."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tba_lab.megatron_cpu import require_core
from tba_offload.errors import MissingDependencyError

if TYPE_CHECKING:
    from pathlib import Path

    from warm import Warm

pytestmark = pytest.mark.megatron


def test_the_package_imports_without_importing_it(python_with_torch: Warm) -> None:
    done = python_with_torch.run(
        "-c",
        "import sys, warnings\n"
        "warnings.simplefilter('error')\n"
        "import tba_lab.megatron_cpu, tba_lab.gpt, tba_offload.megatron.layers\n"
        "import tba_lab.demo\n"
        "assert not any(name.partition('.')[0] == 'megatron' for name in sys.modules)",
    )
    assert done.returncode == 0, done.stderr


def test_what_needs_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(MissingDependencyError) as caught:
        require_core("building a GPT model")
    assert "building a GPT model needs megatron-core" in str(caught.value)
    assert "pip install 'tba-offload[megatron]'" in str(caught.value)


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
