"""Which devices are refused; and pinned host memory, with a stand-in for CUDA's runtime."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
from pathlib import Path

import pytest
import torch

from tba_offload.device import Accelerator, ByteRange, device_of
from tba_offload.device.host_memory import PORTABLE
from tba_offload.errors import StoreFullError, UnsupportedError
from tba_offload.store.base import BLOCK, Extent
from tba_offload.store.file import SLAB_BYTES
from tba_offload.store.host import HostStore


class Runtime:
    def __init__(self) -> None:
        self.status = 0
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        assert flags == PORTABLE
        if not self.status:
            self.registered[address] = nbytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        assert is_mapped(address)  # pages that are not there any more cannot be unpinned
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, status: int) -> str:  # noqa: N802
        return {2: "out of memory", 700: "an illegal memory access was encountered"}[status]


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        lo, hi = (int(bound, 16) for bound in line.split()[0].split("-"))
        if lo <= address < hi:
            return True
    return False


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


@pytest.mark.parametrize("name", ["meta", "mps", "xpu"])
def test_other_devices_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"'{name}' device cannot be offloaded"):
        device_of(name)


@pytest.mark.parametrize("nbytes", [1, 4096, 10_000, SLAB_BYTES])
def test_memory_is_exactly_that_size_on_pages_and_pinned(nbytes: int, runtime: Runtime) -> None:
    memory = Accelerator("cuda:0").host_memory(nbytes)
    assert (memory.dtype, memory.shape) == (torch.uint8, (nbytes,))
    assert memory.data_ptr() % mmap.PAGESIZE == 0
    assert runtime.registered == {memory.data_ptr(): nbytes}
    memory.fill_(7)
    assert int(memory.sum(dtype=torch.int64)) == 7 * nbytes


def test_where_pinning_is_refused_memory_is_pageable_and_one_warning_is_given(runtime: Runtime) -> None:
    runtime.status, device = 2, Accelerator("cuda:0")
    with pytest.warns(RuntimeWarning, match=r"cannot be pinned: .*out of memory.*ulimit -l"):
        store = HostStore(device=device, capacity=2 * SLAB_BYTES, slab_bytes=SLAB_BYTES)
    slab = device.host_memory(SLAB_BYTES)  # a second warning would be an error
    assert (slab.numel(), store.host_bytes, runtime.registered) == (SLAB_BYTES, 2 * SLAB_BYTES, {})
    assert store.description["path"] == "pageable memory"
    source, back = torch.randint(256, (BLOCK,), dtype=torch.uint8), torch.empty(BLOCK, dtype=torch.uint8)
    extent = Extent(SLAB_BYTES, BLOCK, BLOCK)
    store.write(extent, ByteRange.of(source))
    store.read(extent, ByteRange.of(back))
    assert torch.equal(source, back)


LAST_ERROR = "int last = 2; int cudaGetLastError(void) { int found = last; last = 0; return found; }"


def test_the_error_of_refused_pinning_is_read_so_that_no_kernel_reports_it(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build of PyTorch for CUDA depends on the library with this function."""
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / "libcudart.so")]
    subprocess.run(command, input=LAST_ERROR, text=True, check=True)
    library = ctypes.CDLL(str(tmp_path / "libcudart.so"))
    monkeypatch.setattr(ctypes, "CDLL", {"libtorch_python.so": library}.__getitem__)
    runtime.status = 2
    with pytest.warns(RuntimeWarning, match="cannot be pinned"):
        Accelerator("cuda:0").host_memory(BLOCK)
    assert ctypes.c_int.in_dll(library, "last").value == 0


def test_an_error_of_earlier_work_is_no_refusal(runtime: Runtime) -> None:
    runtime.status, device = 700, Accelerator("cuda:0")
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        HostStore(device=device, capacity=SLAB_BYTES, slab_bytes=SLAB_BYTES)
    assert not device.refuses_pinning


def test_no_more_host_memory_is_taken_than_is_free(runtime: Runtime) -> None:
    with pytest.raises(StoreFullError, match=r"bytes are free; lower .*store\.host_capacity"):
        HostStore(device=Accelerator("cuda:0"), capacity=1 << 50)
    assert runtime.registered == {}
