"""The meter of live bytes, memory that is left, and how malloc treats freed memory."""

from __future__ import annotations

import gc
import subprocess
from typing import TYPE_CHECKING

import pytest
import torch
from children import run_python
from harness import MIB, session_for, wait_until
from models import loss_of, make_model, make_tokens

import tba_offload as tba
from tba_offload.device.meters import MallocMeter, available_bytes
from tba_offload.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


SIZE = 48 * MIB
SLACK = 4 * MIB
"""What the rest of the process may allocate or free meanwhile."""


@pytest.fixture(autouse=True)
def nothing_is_left_to_collect() -> None:
    """What tests before this one left in cycles must not be freed while bytes are counted."""
    gc.collect()


def allocate() -> torch.Tensor:
    return torch.ones(SIZE, dtype=torch.uint8)


def test_a_peak_is_seen_though_it_was_freed() -> None:
    meter = MallocMeter()
    meter.reset()
    before = meter.live()
    tensor = allocate()
    enough = (meter.samples_taken or 0) + 2  # one sample of the thread may have begun before
    wait_until(lambda: (meter.samples_taken or 0) >= enough, "the thread samples")
    del tensor
    assert abs(meter.live() - before) < SLACK
    assert abs(meter.peak() - before - SIZE) < SLACK
    meter.close()


# Other allocators

COUNTED = """
import torch
from tba_offload.device.meters import MallocMeter
from tba_offload.errors import UnsupportedError
try:
    meter = MallocMeter(period=3600)
except UnsupportedError as error:
    print("not measured")
else:
    meter.reset()
    before = meter.live()
    tensor = torch.ones(64 << 20, dtype=torch.uint8)
    print(meter.source.partition(",")[0], abs(meter.peak() - before - (64 << 20)) < (4 << 20))
"""

NO_COUNTS = (
    "#include <malloc.h>\nstruct mallinfo2 mallinfo2(void) { struct mallinfo2 none = {0}; return none; }"
)
"""What glibc counts where another allocator gives out the memory: nothing."""


def test_an_allocator_that_does_not_count_is_never_measured_wrongly(tmp_path: Path) -> None:
    library = tmp_path / "strange.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=NO_COUNTS, text=True, check=True, timeout=60)
    done = run_python("-c", COUNTED, LD_PRELOAD=str(library))
    assert (done.returncode, done.stdout.strip()) == (0, "not measured"), done.stderr


def test_training_goes_on_where_memory_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise UnsupportedError("no allocator that counts")

    monkeypatch.setattr("tba_offload.session.memory.meter_of", refuse)
    model = make_model(layers=2)
    with session_for(model, measure_memory=True) as session:
        with pytest.warns(UserWarning, match="the activation peak is not measured: no allocator that counts"):
            loss_of(model, make_tokens(0)).backward()
    policy = {"default": "offload", "budget": {"device_bytes": "1GiB"}}
    refused = pytest.raises(UnsupportedError, match="the memory of this device cannot be measured")
    with pytest.warns(UserWarning, match="is not measured"), refused:
        tba.attach(make_model(layers=2), policy)
    assert [record.activation_peak_bytes for record in session.records] == [None]


# Memory that is left: of the host, and of control groups

GIB = 2**30
CPU = torch.device("cpu")


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., int]:
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


def first_version(folder: str, limit: int, usage: int, cache: int) -> dict[str, str]:
    root = f"sys/fs/cgroup/memory{folder}"
    return {
        f"{root}/memory.limit_in_bytes": f"{limit}\n",
        f"{root}/memory.usage_in_bytes": f"{usage}\n",
        f"{root}/memory.stat": f"inactive_file 7\ntotal_inactive_file {cache}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "4096\n",
    }


@pytest.mark.parametrize(
    ("groups", "files", "left"),
    [
        ("0::/user/my\n", group("/user/my", str(8 * GIB), 3 * GIB), 5),
        ("0::/mine\n", group("/mine", str(8 * GIB), 3 * GIB, GIB), 6),
        ("0::/user/my\n", group("/user", str(4 * GIB), 3 * GIB) | group("/user/my", str(8 * GIB), GIB), 1),
        ("0::/mine\n", group("/mine", "max", 3 * GIB), 20),
        ("4:memory:/mine\n", {}, 20),
        ("1:cpu:/\n4:memory:/my/own\n0::/\n", first_version("/my", 5 * GIB, 4 * GIB, GIB), 2),
        # The mount is the container's own group: the path is that of the host, which does not exist here.
        ("9:name=systemd:/\n2:cpuacct,cpu:/elsewhere\n0::/docker/0123abc\n", group("", str(3 * GIB), GIB), 2),
    ],
    ids=[
        "a group",
        "page cache is free",
        "a group above",
        "no limit",
        "no group of memory",
        "version 1",
        "a container",
    ],
)
def test_what_a_group_has_left(
    groups: str, files: dict[str, str], left: int, machine: Callable[..., int]
) -> None:
    assert machine(groups, **files) == left * GIB


def test_a_kernel_that_does_not_say(machine: Callable[..., int]) -> None:
    with pytest.raises(UnsupportedError, match="MemAvailable"):
        machine("", **{"proc/meminfo": "MemTotal: 1 kB\n"})
