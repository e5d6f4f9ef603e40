"""megatron-core in one process without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

from tba_lab.gpt import GptShape, build_gpt, gpt_loss, random_batch
from tba_lab.megatron_cpu import single_process
from tba_offload.errors import MissingDependencyError, UnsupportedError
from tba_offload.megatron import require_core

if TYPE_CHECKING:
    from warm import Warm

pytestmark = pytest.mark.megatron

SHAPE = GptShape(layers=1, hidden=16, heads=2, sequence=8, vocab=32, dtype="fp32")
LISTENING = "0A"


def one_loss() -> float:
    with single_process(seed=3):
        return gpt_loss(build_gpt(SHAPE, seed=0), random_batch(SHAPE, batch_size=2, seed=1)).item()


def listening_addresses() -> set[str]:
    """Addresses, in hexadecimal, on which sockets of this process listen."""
    links = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    own = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")}
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in rows if row[9] in own and row[3] == LISTENING}


class TestSingleProcess:
    def test_trains_and_can_be_entered_again(self) -> None:
        assert one_loss() == one_loss()
        with pytest.raises(KeyboardInterrupt), single_process():
            raise KeyboardInterrupt
        assert not dist.is_initialized()

    def test_listens_on_the_loopback_interface_only_and_not_for_longer(self) -> None:
        before = listening_addresses()
        with single_process():
            during = listening_addresses()
        assert during - before <= {"0100007F", "00000000000000000000000001000000"}
        assert during
        assert listening_addresses() == before

    def test_refuses_to_replace_a_process_group(self) -> None:
        with single_process():
            with pytest.raises(UnsupportedError, match="already belongs to a process group"):
                single_process().__enter__()
            assert dist.is_initialized()


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
