"""What must not be needed to import or to train, what the package shows, and what scripts ask for."""

from __future__ import annotations

import re
import subprocess
import tomllib
from typing import TYPE_CHECKING

import pytest
import torch
from children import OPTIONAL, run_without
from places import EXAMPLES, ROOT, TESTS

import tba_offload

if TYPE_CHECKING:
    from pathlib import Path

    from warm import Warm


def test_every_public_name_has_a_docstring_and_is_on_the_page_of_the_api() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    for name in tba_offload.__all__:
        assert getattr(tba_offload, name).__doc__, name
        assert re.search(rf"[ .]{name}\b", page), name


def test_every_public_name_is_there_without_optional_packages(python_with_torch: Warm) -> None:
    code = "import tba_offload as t\nfor name in t.__all__: getattr(t, name)\nassert not t.attach is None"
    done = run_without(OPTIONAL | {"tba_lab"}, code, python=python_with_torch)
    assert done.returncode == 0, done.stderr


def test_training_needs_no_optional_package(tmp_path: Path) -> None:
    """Not even NumPy, which pictures, the demo and the programs that it is built on bring along."""
    code = f"""
import sys, warnings
warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's own, when it is imported
import torch, tba_offload as tba
torch.set_num_threads(1)
blocks = (torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(4))
model = torch.nn.Sequential(*blocks)
policy = {{"budget": {{"in_flight_bytes": "32KiB"}}, "min_tensor_bytes": 0}}
for checksum in (False, True):
    policy["store"] = {{"kind": "file", "checksum": checksum}}
    with tba.attach(model, policy, directories={str(tmp_path)!r}) as session:
        with session.step() as step:
            model(torch.randn(64, 64, requires_grad=True)).square().sum().backward()
    assert step.record.offloaded_bytes > 0 < step.record.read_bytes, step.record
assert sys.modules["numpy"] is None
"""
    done = run_without(OPTIONAL | {"numpy"}, code)
    assert done.returncode == 0, done.stderr


def test_policies_and_logs_need_no_torch() -> None:
    done = run_without(OPTIONAL | {"torch"}, "import tba_offload as t\nt.OffloadConfig()\nt.read_run_log")
    assert done.returncode == 0, done.stderr


MISSING = {
    "import tba_offload.integrations.transformers": "transformers",
    "import tba_offload.integrations.lightning": "lightning",
    "import tba_offload.integrations.pytorch_lightning": "lightning",
    "import tba_lab.demo, tba_offload.megatron.layers; tba_lab.demo.require_core('this')": "megatron",
    "from tba_offload.report.rok import require_matplotlib as r; r()": "plots",
    """
from tba_offload.store import open_store
from tba_offload.device import Device
class Gpu(Device): pins_memory = True
open_store(kind="gds", directories=["/tmp"], device=Gpu())
""": f"gds-cu{13 if (torch.version.cuda or '').startswith('13.') else 12}",
}
"""What needs an optional package, and the extra that brings the package."""


def test_a_missing_package_is_named_with_its_remedy(python_with_torch: Warm) -> None:
    script = f"""
from tba_offload.errors import MissingDependencyError
for code in {list(MISSING)!r}:
    try:
        exec(code)
    except MissingDependencyError as error:
        print(repr(str(error)))
    else:
        print("nothing is missing for", code)
"""
    done = run_without(OPTIONAL, script, python=python_with_torch)
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert len(told) == len(MISSING)
    for line, extra in zip(told, MISSING.values(), strict=True):
        assert f"pip install 'tba-offload[{extra}]'" in line


SCRIPTS = sorted([*EXAMPLES.rglob("*.sh"), *TESTS.rglob("*.sh"), ROOT / ".ci" / "run"])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_is_bash_and_asks_for_extras_that_exist(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = re.findall(r"^setup_venv ([\w,]+)", script.read_text(), re.MULTILINE)
    for extras in asked:
        assert set(extras.split(",")) <= set(project["optional-dependencies"])
