"""Meters of live and of resident bytes, and how malloc treats freed memory."""

from __future__ import annotations

import mmap
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from harness import CPU, KIB, MIB, PATIENCE
from test_cli import environment

from tba_offload.device.memory import CudaMeter, MallocMeter, ResidentPeak, keep_freed_pages, meter_of
from tba_offload.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIZE = 48 * MIB
SLACK = 4 * MIB
"""What the rest of the process may allocate or free meanwhile."""


class Observed(MallocMeter):
    """Tells when its own thread has taken a sample that began after a given moment."""

    def __init__(self, period: float = 0.002) -> None:
        super().__init__(period)
        self._begun = 0
        self._ended = 0
        self._changed = threading.Condition()

    def live(self) -> int:
        if threading.current_thread().name != "tba-memory":
            return super().live()
        with self._changed:
            self._begun += 1
            number = self._begun
        found = super().live()
        with self._changed:
            self._ended = number
            self._changed.notify_all()
        return found

    def wait_for_a_sample(self) -> None:
        # Not the one that may have begun already, and the one after that has been compared with the peak.
        self.wait_for_samples(self._begun + 2)

    def wait_for_samples(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._ended >= count, PATIENCE)


@pytest.fixture
def meter() -> Iterator[Observed]:
    meter = Observed()
    yield meter
    meter.close()


def memory_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tba-memory"]


def allocate(nbytes: int = SIZE) -> torch.Tensor:
    return torch.ones(nbytes, dtype=torch.uint8)


# Live bytes


def test_live_bytes_follow_allocations() -> None:
    meter = MallocMeter()
    before = meter.live()
    tensor = allocate()
    assert abs(meter.live() - before - SIZE) < SLACK
    del tensor
    assert abs(meter.live() - before) < SLACK
    assert memory_threads() == []


def test_small_blocks_count_as_large_ones_do() -> None:
    meter = MallocMeter()
    before = meter.live()
    tensors = [allocate(16 * KIB) for _ in range(SIZE // (16 * KIB))]
    assert SIZE - SLACK < meter.live() - before < 1.2 * SIZE
    del tensors
    assert abs(meter.live() - before) < SLACK


def test_memory_of_other_threads_counts() -> None:
    meter = MallocMeter()
    before = meter.live()
    made: list[torch.Tensor] = []
    thread = threading.Thread(
        target=lambda: made.extend(allocate(64 * KIB) for _ in range(SIZE // (64 * KIB)))
    )
    thread.start()
    thread.join(PATIENCE)
    assert SIZE - SLACK < meter.live() - before < 1.2 * SIZE


# The peak


def test_a_peak_is_seen_though_it_was_freed(meter: Observed) -> None:
    meter.reset()
    before = meter.live()
    tensor = allocate()
    meter.wait_for_a_sample()
    del tensor
    assert abs(meter.live() - before) < SLACK
    assert abs(meter.peak() - before - SIZE) < SLACK


def test_reset_forgets_the_peak() -> None:
    meter = Observed(period=3600)
    meter.reset()
    meter.wait_for_samples(1)
    before = meter.live()
    tensor = allocate()
    assert meter.peak() - before > SIZE - SLACK
    del tensor
    meter.reset()
    assert abs(meter.peak() - before) < SLACK
    meter.close()


def test_what_is_live_at_the_end_counts_without_a_sample_of_the_thread() -> None:
    meter = MallocMeter(period=3600)
    meter.reset()
    before = meter.live()
    tensor = allocate()
    assert abs(meter.peak() - before - SIZE) < SLACK
    del tensor
    meter.close()  # does not wait for the period to end
    assert memory_threads() == []


def test_what_is_live_at_the_reset_counts() -> None:
    meter = MallocMeter(period=3600)
    before = meter.live()
    tensor = allocate()
    meter.reset()
    del tensor
    assert abs(meter.peak() - before - SIZE) < SLACK
    meter.close()


def test_the_source_says_how_often_it_is_sampled() -> None:
    assert MallocMeter().source == "mallinfo2, sampled every 0.5 ms"
    assert MallocMeter(period=0.002).source == "mallinfo2, sampled every 2 ms"


# Its thread


def test_one_thread_serves_all_resets_and_ends_with_close() -> None:
    meter = MallocMeter()
    assert memory_threads() == []
    for _ in range(3):
        meter.reset()
        assert len(memory_threads()) == 1
        meter.peak()
    (thread,) = memory_threads()
    assert thread.daemon
    meter.close()
    assert not thread.is_alive()


@pytest.mark.parametrize("watching", [False, True])
def test_a_meter_can_be_closed_at_any_time_and_twice(watching: bool) -> None:
    meter = MallocMeter()
    if watching:
        meter.reset()
    meter.close()
    meter.close()
    assert memory_threads() == []


# Other C libraries


def test_a_c_library_without_mallinfo2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba_offload.device.memory.ctypes.CDLL", lambda _: SimpleNamespace())
    for make in (MallocMeter, lambda: meter_of(CPU)):
        with pytest.raises(UnsupportedError, match=r"glibc \(2\.33 or later\).*measure_memory=False"):
            make()


@pytest.mark.parametrize(
    "libc", [SimpleNamespace(), SimpleNamespace(mallopt=lambda *_: 0)], ids=["lacks it", "refuses"]
)
def test_keep_freed_pages_says_when_it_had_no_effect(
    monkeypatch: pytest.MonkeyPatch, libc: SimpleNamespace
) -> None:
    monkeypatch.setattr("tba_offload.device.memory.ctypes.CDLL", lambda _: libc)
    assert keep_freed_pages() is False


def test_keep_freed_pages_needs_both_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    libc = SimpleNamespace(mallopt=lambda name, _: asked.append(name) or name == -3)
    monkeypatch.setattr("tba_offload.device.memory.ctypes.CDLL", lambda _: libc)
    assert keep_freed_pages() is False
    assert sorted(asked) == [-3, -1]


FREED = """
import sys
import torch
from tba_offload.device.memory import keep_freed_pages

def resident():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS:"))

assert sys.argv[1] == "default" or keep_freed_pages() is True
before = resident()
tensor = torch.ones(96 << 20, dtype=torch.uint8)
assert resident() - before > 90
del tensor
print(resident() - before)
"""


@pytest.mark.parametrize(("setting", "stays"), [("default", False), ("keep", True)])
def test_keep_freed_pages_keeps_them_in_a_process_of_its_own(setting: str, stays: bool) -> None:
    command = [sys.executable, "-c", FREED, setting]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment())
    assert (int(done.stdout) > 90) is stays


# Resident memory


def touch(nbytes: int) -> None:
    """Makes pages resident and gives them back to the operating system."""
    with mmap.mmap(-1, nbytes) as pages:
        for start in range(0, nbytes, mmap.PAGESIZE):
            pages[start] = 1


def test_the_resident_peak_outlives_its_memory_until_it_is_reset() -> None:
    resident = ResidentPeak()
    resident.reset()
    before = resident.read()
    assert before is not None
    touch(SIZE)
    peak = resident.read()
    assert peak is not None
    assert peak - before > SIZE - SLACK
    resident.reset()
    after = resident.read()
    assert after is not None
    assert peak - after > SIZE - SLACK


def test_a_peak_that_cannot_be_reset_is_that_of_the_whole_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ResidentPeak, "_CLEAR", tmp_path)  # a directory: it cannot be written
    resident = ResidentPeak()
    touch(SIZE)
    before = resident.read()
    resident.reset()
    after = resident.read()
    assert before is not None
    assert after is not None
    assert after >= before


def test_the_resident_peak_is_read_in_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status = tmp_path / "status"
    monkeypatch.setattr(ResidentPeak, "_STATUS", status)
    resident = ResidentPeak()
    assert resident.read() is None
    status.write_text("Name:\tpython\nVmRSS:\t    5 kB\n")
    assert resident.read() is None
    status.write_text("Name:\tpython\nVmHWM:\t   12 kB\nVmRSS:\t    5 kB\n")
    assert resident.read() == 12 * KIB


# The meter of a device


def test_a_cpu_is_measured_by_malloc() -> None:
    meter = meter_of(CPU)
    assert isinstance(meter, MallocMeter)
    assert memory_threads() == []


def test_a_gpu_is_measured_by_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 1)
    asked: list[tuple[str, torch.device]] = []
    for number, name in enumerate(
        ("memory_allocated", "reset_peak_memory_stats", "max_memory_allocated"), start=1
    ):
        monkeypatch.setattr(
            torch.cuda, name, lambda where, name=name, number=number: asked.append((name, where)) or number
        )
    meter = meter_of(SimpleNamespace(torch_device=device))  # type: ignore[arg-type]
    assert isinstance(meter, CudaMeter)
    assert meter.source == "cuda allocator"
    assert meter.live() == 1
    meter.reset()
    assert meter.peak() == 3
    meter.close()
    assert asked == [
        ("memory_allocated", device),
        ("reset_peak_memory_stats", device),
        ("max_memory_allocated", device),
    ]
