"""The store over several drives."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from store_contract import CPU, READY, Gate, StoreContract, descriptors, get, io_threads, pattern, put

from tba_offload.device import ByteRange
from tba_offload.errors import ConfigError, StoreError, StoreFullError
from tba_offload.store import open_store
from tba_offload.store.base import ActivationStore, Extent
from tba_offload.store.file import FileStore
from tba_offload.store.host import HostStore
from tba_offload.store.striped import StripedStore

if TYPE_CHECKING:
    from pathlib import Path


class TestStripedStore(StoreContract):
    """A drive with files and one in memory, so that alignments and leads differ."""

    expression = "StripedStore([FileStore(directory, device=CPU), HostStore(device=CPU, drive=1)])"

    def make_store(self, directory: Path, *, capacity: int | None = None, **options: Any) -> ActivationStore:
        share = None if capacity is None else capacity // 2
        file = FileStore(directory, device=CPU, capacity=share, **options)
        return StripedStore([file, HostStore(share, device=CPU, drive=1, slab_bytes=1 << 16, **options)])

    def corrupt(self, store: ActivationStore, extent: Extent) -> None:
        assert isinstance(store, StripedStore)
        file, host = store.stores
        assert isinstance(file, FileStore)
        assert isinstance(host, HostStore)
        data = pattern(extent.nbytes)
        data[-1] ^= 1
        drive = store.stores[extent.drive]
        digest = drive._leases[extent.offset].digest  # type: ignore[attr-defined]
        store.write(extent, ByteRange.of(data), READY).wait(30)
        drive._leases[extent.offset].digest = digest  # type: ignore[attr-defined]


def hosts(count: int, **options: Any) -> StripedStore:
    return StripedStore([HostStore(device=CPU, drive=drive, **options) for drive in range(count)])


def test_idle_drives_take_turns() -> None:
    with hosts(3) as store:
        drives = [store.reserve(5000, 0).drive for _ in range(9)]
    assert Counter(drives) == {0: 3, 1: 3, 2: 3}
    assert len(set(drives[:3])) == 3


def test_the_drive_with_the_least_to_do_is_chosen() -> None:
    with hosts(3) as store:
        gates = [Gate() for _ in range(3)]
        futures = []
        for gate, nbytes in zip(gates, (30_000, 10_000, 20_000), strict=True):
            extent = store.reserve(nbytes, 0)
            futures.append(store.write(extent, ByteRange.of(pattern(nbytes)), gate))
        by_bytes = {extent_bytes: drive for drive, extent_bytes in enumerate(_pending(store))}
        assert [store.reserve(1, 0).drive for _ in range(4)] == [by_bytes[10_000]] * 4
        assert store.pending() == 3
        assert store.pending_bytes() == 60_000
        gates[0].open()
        futures[0].wait(30)
        assert store.reserve(1, 0).drive == by_bytes[30_000]
        for gate in gates:
            gate.open()


def _pending(store: StripedStore) -> list[int]:
    return [drive.pending_bytes() for drive in store.stores]


def test_a_full_drive_is_passed_over() -> None:
    small, large = HostStore(8 * 4096, device=CPU), HostStore(64 * 4096, device=CPU, drive=1)
    with StripedStore([small, large]) as store:
        drives = [store.reserve(8 * 4096, 0).drive for _ in range(9)]
        assert Counter(drives) == {0: 1, 1: 8}
        with pytest.raises(
            StoreFullError, match=r"none of 2 drives has room for 1 bytes: .*capacity.*; .*capacity"
        ):
            store.reserve(1, 0)


def test_capacity_and_alignment_are_those_of_all(tmp_path: Path) -> None:
    with hosts(2) as store:
        assert store.capacity_bytes is None
        assert store.alignment == 1
    file = FileStore(tmp_path, device=CPU, capacity=8 << 20)
    with StripedStore([file, HostStore(4 << 20, device=CPU, drive=1)]) as store:
        assert store.capacity_bytes == 12 << 20
        assert store.alignment == file.alignment
        assert store.description == {
            "kind": "striped",
            "alignment": file.alignment,
            "capacity": 12 << 20,
            "stores": [drive.description for drive in store.stores],
        }


def test_a_foreign_drive_is_refused() -> None:
    with hosts(2) as store, pytest.raises(ValueError, match="there are 2 drives"):
        store.release(Extent(offset=0, length=4096, nbytes=1, lead=0, drive=2))


def test_one_drive_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    class Stuck(HostStore):
        def close(self) -> None:
            super().close()
            raise StoreError("stuck")

    store = StripedStore([Stuck(device=CPU), FileStore(tmp_path, device=CPU, drive=1)])
    with pytest.raises(StoreError, match="stuck"):
        store.close()
    assert io_threads() == []


def test_it_needs_a_store() -> None:
    with pytest.raises(ValueError, match="at least one store"):
        StripedStore([])


def test_open_store_makes_one_file_a_directory(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    with open_store(directories=paths, capacity=8 << 20, device=CPU, checksum=True) as store:
        assert isinstance(store, StripedStore)
        assert [drive.description["directory"] for drive in store.stores] == [str(path) for path in paths]
        assert [drive.capacity_bytes for drive in store.stores] == [4 << 20, 4 << 20]
        extents = [put(store, pattern(100_000, seed)) for seed in range(4)]
        assert {extent.drive for extent in extents} == {0, 1}
        for seed, extent in enumerate(extents):
            assert torch.equal(get(store, extent), pattern(100_000, seed))


def test_open_store_refuses_one_place_twice(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    for other in (tmp_path / "a", tmp_path / "link", tmp_path / "a" / ".." / "a"):
        with pytest.raises(ConfigError, match="are the same place"):
            open_store(directories=[tmp_path / "a", other], device=CPU)


def test_open_store_leaves_nothing_open_when_a_directory_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = descriptors()
    with pytest.raises(StoreError, match="not a directory"):
        open_store(directories=[tmp_path / "a", tmp_path / "file"], device=CPU)
    assert descriptors() == before
    assert io_threads() == []
