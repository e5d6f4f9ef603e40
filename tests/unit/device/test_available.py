"""Memory that is left: of the host, and of control groups."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tba_offload.device.meters import available_bytes
from tba_offload.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

GIB = 2**30
CPU = torch.device("cpu")


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., int]:
    """Writes the kernel's files and returns what is left."""

    def left(groups: str = "", **files: str) -> int:
        found = {
            "proc/meminfo": "MemTotal: 25165824 kB\nMemFree: 1 kB\nMemAvailable:   20971520 kB\n",
            "proc/self/cgroup": groups,
            **files,
        }
        for name, content in found.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return available_bytes(CPU, root=tmp_path)

    return left


def group(folder: str, limit: str, usage: int, cache: int = 0) -> dict[str, str]:
    root = f"sys/fs/cgroup{folder}"
    return {
        f"{root}/memory.max": f"{limit}\n",
        f"{root}/memory.current": f"{usage}\n",
        f"{root}/memory.stat": f"anon 3\ninactive_file {cache}\n",
    }


def test_what_a_group_has_left(machine: Callable[..., int]) -> None:
    assert machine("0::/user/mine\n", **group("/user/mine", str(8 * GIB), 3 * GIB)) == 5 * GIB


def test_page_cache_counts_as_free(machine: Callable[..., int]) -> None:
    assert machine("0::/mine\n", **group("/mine", str(8 * GIB), 3 * GIB, GIB)) == 6 * GIB


def test_a_group_above_may_be_the_limit(machine: Callable[..., int]) -> None:
    files = group("/user", str(4 * GIB), 3 * GIB) | group("/user/mine", str(8 * GIB), 1 * GIB)
    assert machine("0::/user/mine\n", **files) == 1 * GIB


def test_no_limit(machine: Callable[..., int]) -> None:
    assert machine("0::/mine\n", **group("/mine", "max", 3 * GIB)) == 20 * GIB
    assert machine("4:memory:/mine\n") == 20 * GIB


def test_in_a_container_the_mount_is_its_own_group(machine: Callable[..., int]) -> None:
    """The path is that of the host, which does not exist here."""
    groups = "9:name=systemd:/\n2:cpuacct,cpu:/elsewhere\n0::/docker/0123abc\n"
    assert machine(groups, **group("", str(3 * GIB), GIB)) == 2 * GIB


def test_a_kernel_that_does_not_say(machine: Callable[..., int]) -> None:
    with pytest.raises(UnsupportedError, match="MemAvailable"):
        machine("", **{"proc/meminfo": "MemTotal: 1 kB\n"})


def test_this_machine() -> None:
    assert 0 < available_bytes(CPU) <= 1024 * int(Path("/proc/meminfo").read_text().split()[1])
