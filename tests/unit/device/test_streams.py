"""Devices: the CPU twin everywhere, CUDA where there is a GPU."""

from __future__ import annotations

import gc
import mmap
import threading
import time
from typing import Any

import pytest
import torch

from tba_offload.device import READY, Accelerator, CpuDevice, device_of
from tba_offload.errors import UnsupportedError

MIB = 1 << 20


def test_ready_is_ready() -> None:
    READY.synchronize()
    READY.wait()
    assert READY.query()
    assert CpuDevice().event() is READY


def test_device_of_names_the_twin() -> None:
    device = device_of("cpu")
    assert isinstance(device, CpuDevice)
    assert device.torch_device == torch.device("cpu")
    assert not device.pins_memory
    device.bind_thread()


def test_other_devices_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="'meta' device cannot be offloaded"):
        device_of("meta")


@pytest.mark.parametrize("nbytes", [1, 4097, MIB])
def test_cpu_copies_bytes_between_any_addresses(nbytes: int) -> None:
    source = torch.randint(0, 256, (nbytes + 3,), dtype=torch.uint8)[3:]
    room = torch.zeros(nbytes + 10, dtype=torch.uint8)
    CpuDevice().copy(room[5 : 5 + nbytes], source, READY)
    assert torch.equal(room[5 : 5 + nbytes], source)
    assert not bool(room[:5].any())
    assert not bool(room[5 + nbytes :].any())


def test_cpu_copies_after_the_event() -> None:
    source, target = torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)

    class Producer:
        def synchronize(self) -> None:
            source.fill_(7)

        def wait(self, stream: Any = None) -> None:
            raise AssertionError

        def query(self) -> bool:
            return False

    CpuDevice().copy(target, source, Producer())
    assert target.tolist() == [7] * 8


def test_copies_of_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot copy 8 bytes into 7"):
        CpuDevice().copy(torch.zeros(7, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8), READY)


def test_host_memory_is_whole_pages_outside_malloc() -> None:
    memory = CpuDevice().host_memory(MIB + 5)
    assert memory.data_ptr() % mmap.PAGESIZE == 0
    assert (memory.dtype, memory.shape) == (torch.uint8, (MIB + 5,))
    memory.fill_(3)
    address = memory.data_ptr()
    assert _is_mapped(address)
    view = memory[5:]
    del memory
    gc.collect()
    assert view[0] == 3


def test_host_memory_is_unmapped_with_its_tensor() -> None:
    size = 512 * MIB
    before = _mapped_bytes()
    memory = CpuDevice().host_memory(size)
    assert _mapped_bytes() >= before + size
    del memory
    assert _mapped_bytes() < before + size


def _is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:  # noqa: PTH123
        ranges = [line.split(" ", 1)[0].split("-") for line in maps]
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


def _mapped_bytes() -> int:
    with open("/proc/self/statm") as statm:  # noqa: PTH123
        return int(statm.read().split()[0]) * mmap.PAGESIZE


@pytest.mark.gpu
class TestAccelerator:
    def test_event_is_that_of_the_current_stream(self) -> None:
        device = Accelerator()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            event = device.event()
        assert not event.query()
        event.synchronize()
        assert event.query()
        assert stream.query()

    def test_marks_tell_when_the_device_got_there(self) -> None:
        device = Accelerator()
        torch.cuda._sleep(1)  # the first has to be loaded
        torch.cuda.synchronize()
        began = time.perf_counter()
        marks = [device.mark()]
        for _ in range(2):
            torch.cuda._sleep(100_000_000)
            marks.append(device.mark())
        given = time.perf_counter() - began
        assert not device.is_reached(marks[-1])
        first, middle, last = device.seconds(marks)
        done = time.perf_counter() - began
        assert device.is_reached(marks[-1])
        assert first == 0.0
        assert given < 0.01 < middle < last < done
        assert last - middle == pytest.approx(middle, rel=0.2)

    def test_a_mark_is_on_the_current_stream(self) -> None:
        device = Accelerator()
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        before = device.mark()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            aside = device.mark()
        here = device.mark()
        times = dict(zip(("before", "aside", "here"), device.seconds([before, aside, here]), strict=True))
        assert times["here"] < 0.01 < times["aside"]

    @pytest.mark.parametrize("to_gpu", [True, False])
    def test_copies_wait_for_the_event(self, to_gpu: bool) -> None:
        device = Accelerator()
        on_gpu = torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda")
        on_host = device.host_memory(4 * MIB).fill_(5)
        torch.cuda._sleep(100_000_000)
        on_gpu.fill_(7)
        source, target = (on_host, on_gpu) if to_gpu else (on_gpu, on_host)
        expected = 5 if to_gpu else 7
        thread = threading.Thread(target=self._copy, args=(device, target, source, device.event()))
        thread.start()
        thread.join()
        assert bool((target == expected).all())

    def _copy(self, device: Accelerator, target: torch.Tensor, source: torch.Tensor, after: Any) -> None:
        device.bind_thread()
        device.copy(target, source, after)

    def test_each_thread_has_a_side_stream_of_its_own(self) -> None:
        device, streams = Accelerator(), []

        def enter() -> None:
            with device.on_side_stream():
                streams.append(torch.cuda.current_stream())

        thread = threading.Thread(target=enter)
        enter()
        enter()
        thread.start()
        thread.join()
        assert streams[0] == streams[1] != streams[2]
        assert torch.cuda.default_stream() not in streams

    def test_host_memory_is_pinned(self) -> None:
        device = Accelerator()
        memory = device.host_memory(MIB)
        assert device.pins_memory
        assert memory.is_pinned()
        assert memory.data_ptr() % mmap.PAGESIZE == 0

    def test_device_of_keeps_the_index(self) -> None:
        device = device_of("cuda:0")
        assert device.torch_device == torch.device("cuda", 0)
