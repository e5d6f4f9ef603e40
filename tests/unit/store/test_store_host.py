"""The store in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from store_contract import CPU, PATIENCE, StoreContract, get, pattern, put

from tba_offload.device import Accelerator, ByteRange, CpuDevice
from tba_offload.errors import StoreFullError
from tba_offload.store import open_store
from tba_offload.store.host import HostStore

if TYPE_CHECKING:
    from pathlib import Path

    from tba_offload.store.base import ActivationStore, Extent


class TestHostStore(StoreContract):
    """Slabs so small that most extents cross from one to the next."""

    expression = "HostStore(device=CPU, slab_bytes=1 << 16)"

    checks_what_it_reads = False

    def make_store(self, directory: Path, **options: Any) -> ActivationStore:
        return HostStore(device=CPU, slab_bytes=1 << 16, **options)

    def corrupt(self, store: ActivationStore, extent: Extent) -> None:
        assert isinstance(store, HostStore)
        next(store._slabs.parts(extent.offset, 1)).bitwise_xor_(1)


def test_memory_grows_by_slabs_is_reused_and_freed() -> None:
    store = HostStore(device=CPU, slab_bytes=1 << 20)
    assert store.host_bytes == 0
    for _ in range(3):
        extents = [put(store, pattern(700_000)) for _ in range(3)]
        assert store.host_bytes == 3 << 20
        for extent in extents:
            store.release(extent)
    store.close()
    assert store.host_bytes == 0


@pytest.mark.parametrize(("capacity", "taken"), [(10_000, 8192), (5 << 18, 5 << 18), (3 << 20, 3 << 20)])
def test_no_more_memory_is_taken_than_the_capacity(capacity: int, taken: int) -> None:
    """Only the last slab is smaller, and extents that reach into it are like all others."""
    with HostStore(capacity, device=CPU, slab_bytes=1 << 20) as store:
        for seed in range(3):
            extent = put(store, pattern(taken, seed))
            assert store.host_bytes == taken
            assert torch.equal(get(store, extent), pattern(taken, seed))
            with pytest.raises(StoreFullError, match="capacity"):
                store.reserve(1, 0)
            store.release(extent)
        assert store.host_bytes == taken


def test_no_more_memory_is_a_full_store_that_goes_on() -> None:
    class Small(CpuDevice):
        left = 2

        def host_memory(self, nbytes: int) -> torch.Tensor:
            if not self.left:
                raise MemoryError("no more pages")
            self.left -= 1
            return super().host_memory(nbytes)

    with HostStore(device=Small(), slab_bytes=1 << 20) as store:
        extent = put(store, pattern(2 << 20))
        with pytest.raises(StoreFullError, match=r"no more pages.*host memory"):
            store.reserve(1, 0)
        assert torch.equal(get(store, extent), pattern(2 << 20))
        store.release(extent)
        put(store, pattern(1))


def test_open_store_does_not_ignore_directories(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="directories: has no effect with kind: host"):
        open_store(kind="host", directories=[tmp_path], device=CPU)


@pytest.mark.gpu
def test_gpu_memory_goes_through_pinned_slabs() -> None:
    device = Accelerator()
    with HostStore(16 << 20, device=device, slab_bytes=1 << 20) as store:
        assert store.description["pinned"]
        data = pattern(5_000_001).cuda()
        extent = store.reserve(data.nbytes, data.data_ptr())
        store.write(extent, ByteRange.of(data), device.event()).wait(PATIENCE)
        target = torch.zeros_like(data)
        store.read(extent, ByteRange.of(target), device.event(), padded=False).wait(PATIENCE)
        assert torch.equal(target, data)
