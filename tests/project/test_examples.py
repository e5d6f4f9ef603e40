"""The scripts are bash and ask for extras that exist."""

from __future__ import annotations

import re
import subprocess
import tomllib
from typing import TYPE_CHECKING

import pytest
from places import EXAMPLES, ROOT, TESTS

if TYPE_CHECKING:
    from pathlib import Path

SCRIPTS = sorted([*EXAMPLES.rglob("*.sh"), *TESTS.rglob("*.sh"), ROOT / ".ci" / "run"])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_is_bash_and_asks_for_extras_that_exist(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = re.findall(r"^setup_venv ([\w,]+)", script.read_text(), re.MULTILINE)
    for extras in asked:
        assert set(extras.split(",")) <= set(project["optional-dependencies"])
