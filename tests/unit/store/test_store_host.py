"""The store in host memory."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import pytest
import torch
from harness import CPU, MIB
from store_contract import StoreContract, get, pattern, put

from tba_offload.device import ByteRange, Device
from tba_offload.errors import StoreFullError
from tba_offload.store import MultiStore
from tba_offload.store.host import HostStore

if TYPE_CHECKING:
    from pathlib import Path

    from tba_offload.store import Extent, Store


class TestHostStore(StoreContract):
    checks_what_it_reads = False

    def make_store(self, directory: Path, **options: Any) -> Store:
        return HostStore(device=CPU, slab_bytes=MIB, **options)

    def corrupt(self, store: Store, extent: Extent) -> None:
        bit = torch.zeros(extent.nbytes, dtype=torch.uint8)
        store.read(extent, ByteRange.of(bit))
        bit[0] ^= 1
        store.write(extent, ByteRange.of(bit))


def test_memory_grows_by_slabs_and_shrinks_when_no_step_needs_it() -> None:
    host = HostStore(device=CPU, slab_bytes=MIB)
    with MultiStore([host]) as store:
        extents = [put(store, pattern(MIB - 5)) for _ in range(3)]
        assert host.host_bytes == 3 * MIB
        assert torch.equal(get(store, extents[2]), pattern(MIB - 5))
        for extent in extents:
            store.release(extent)
        for _ in range(4):
            store.trim()
        assert host.host_bytes == 0
        assert torch.equal(get(store, put(store, pattern(5))), pattern(5))
    assert host.host_bytes == 0


def test_no_more_memory_is_taken_than_the_capacity() -> None:
    host = HostStore(device=CPU, capacity=5 * MIB // 2, slab_bytes=2 * MIB)
    with MultiStore([host]) as store:
        put(store, pattern(5 * MIB // 2))
        assert host.host_bytes == 5 * MIB // 2


class Meagre(Device):
    left = 2

    def host_memory(self, nbytes: int) -> torch.Tensor:
        if not self.left:
            raise MemoryError
        self.left -= 1
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def test_no_more_memory_is_a_full_store_that_goes_on() -> None:
    with MultiStore([HostStore(device=Meagre(), slab_bytes=MIB)]) as store:
        extents = [put(store, pattern(MIB, seed)) for seed in range(2)]
        with pytest.raises(StoreFullError, match=r"lower store\.capacity or store\.host_capacity"):
            put(store, pattern(1))
        (load,) = store.take_loads()
        assert (load.room, load.in_service) == (2 * MIB, True)
        store.release(extents[0])
        assert torch.equal(get(store, put(store, pattern(MIB, 7))), pattern(MIB, 7))
        assert torch.equal(get(store, extents[1]), pattern(MIB, 1))
