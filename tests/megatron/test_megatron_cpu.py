"""megatron-core in one process without a GPU."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tba_offload.errors import MissingDependencyError
from tba_offload.megatron import require_core

if TYPE_CHECKING:
    from warm import Warm

pytestmark = pytest.mark.megatron


class TestWithoutMegatron:
    def test_the_package_imports_without_importing_it(self, python_with_torch: Warm) -> None:
        done = python_with_torch.run(
            "-c",
            "import sys, tba_lab.megatron_cpu, tba_lab.gpt, tba_offload.megatron.layers\n"
            "import tba_lab.demo\n"
            "assert not any(name.partition('.')[0] == 'megatron' for name in sys.modules)",
            is_strict=True,
        )
        assert done.returncode == 0, done.stderr

    def test_what_needs_it_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "megatron.core", None)
        with pytest.raises(MissingDependencyError) as caught:
            require_core("building a GPT model")
        assert "building a GPT model needs megatron-core" in str(caught.value)
        assert "pip install 'tba-offload[megatron]'" in str(caught.value)
