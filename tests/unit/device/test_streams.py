"""Devices: the CPU twin everywhere, CUDA where there is a GPU."""

from __future__ import annotations

import mmap
import threading
import time
from typing import Any

import pytest
import torch

from tba_offload.device import Accelerator, device_of
from tba_offload.errors import UnsupportedError

MIB = 1 << 20


@pytest.mark.parametrize("name", ["meta", "mps", "xpu"])
def test_other_devices_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"'{name}' device cannot be offloaded"):
        device_of(name)


@pytest.mark.gpu
class TestAccelerator:
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
        assert not device.event().query()
        first, middle, last = device.seconds(marks)
        done = time.perf_counter() - began
        assert device.event().query()
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

    def test_host_memory_is_pinned(self) -> None:
        device = Accelerator()
        memory = device.host_memory(MIB)
        assert device.pins_memory
        assert memory.is_pinned()
        assert memory.data_ptr() % mmap.PAGESIZE == 0
