"""Transfers that are queued together: neighbours go by one call, and each is still one for itself."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from faults import inject
from store_contract import CPU, PATIENCE, READY, Gate, at_lead, pattern

from tba_offload.device import ByteRange
from tba_offload.errors import ChecksumError, StoreError
from tba_offload.store import posix
from tba_offload.store.file import FileStore
from tba_offload.store.host import HostStore
from tba_offload.store.striped import StripedStore
from tba_offload.store.tiered import TieredStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tba_offload.device import Event
    from tba_offload.store.base import ActivationStore, Extent, IoFuture

SIZES = (5000, 4096, 1, 70_000, 12_345, 65_536)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with FileStore(tmp_path, device=CPU, writers=1, readers=1) as store:
        store.prepare(64 << 20)
        yield store


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each system call was made."""
    counted = Counter[str]()

    def count(name: str) -> None:
        call = getattr(posix, name)

        def counting(*arguments: int) -> int:
            counted[name] += 1
            moved: int = call(*arguments)
            return moved

        monkeypatch.setattr(posix, name, counting)

    for name in ("pwrite", "pread", "pwritev", "preadv"):
        count(name)
    return counted


def sources_of(store: ActivationStore, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Memory at various places, with neighbours that belong to it."""
    return [memory_at(store, 64 * number, pattern(nbytes, number)) for number, nbytes in enumerate(sizes)]


def memory_at(store: ActivationStore, address: int, data: torch.Tensor) -> torch.Tensor:
    """A copy that lies there modulo the alignment."""
    return at_lead(data.nbytes, address % store.alignment, store.alignment).copy_(data)


def reserve(store: ActivationStore, data: Sequence[torch.Tensor]) -> list[Extent]:
    extents = store.reserve_many([(each.nbytes, each.data_ptr()) for each in data])
    assert len(extents) == len(data)
    return extents


def write(
    store: ActivationStore, extents: list[Extent], data: list[torch.Tensor], gate: Event
) -> list[IoFuture]:
    pairs = zip(extents, data, strict=True)
    return store.write_many([(extent, ByteRange.of(each), gate, None) for extent, each in pairs])


def rooms_for(store: ActivationStore, data: list[torch.Tensor]) -> list[torch.Tensor]:
    """Memory at the same places modulo the alignment."""
    return [memory_at(store, each.data_ptr(), torch.zeros_like(each)) for each in data]


def read(store: ActivationStore, extents: list[Extent], rooms: list[torch.Tensor]) -> list[IoFuture]:
    orders = [(extent, ByteRange.of(room), READY) for extent, room in zip(extents, rooms, strict=True)]
    return store.read_many(orders, padded=True)


def await_all(transfers: Sequence[IoFuture]) -> None:
    for transfer in transfers:
        transfer.wait(PATIENCE)


@pytest.mark.parametrize("backwards", [False, True])
def test_neighbours_go_by_one_call(store: FileStore, calls: Counter[str], backwards: bool) -> None:
    data = sources_of(store, SIZES)
    extents = reserve(store, data)
    await_all(write(store, extents, data, READY))
    rooms = rooms_for(store, data)
    if backwards:
        await_all(read(store, extents[::-1], rooms[::-1]))
    else:
        await_all(read(store, extents, rooms))
    assert calls == {"pwritev": 1, "preadv": 1}
    assert all(torch.equal(room, each) for room, each in zip(rooms, data, strict=True))


def test_one_of_several_can_be_cancelled(store: FileStore, calls: Counter[str]) -> None:
    data, gate, first = sources_of(store, SIZES), Gate(), pattern(100)
    running = store.write(store.reserve(100, 0), ByteRange.of(first), gate)
    extents = reserve(store, data)
    ended: list[IoFuture] = []
    pairs = zip(extents, data, strict=True)
    writes = store.write_many([(extent, ByteRange.of(each), READY, ended.append) for extent, each in pairs])
    assert writes[2].cancel()
    assert store.pending() == len(SIZES)  # the others, and the first one
    store.release(extents[2])
    gate.open()
    await_all([running, *writes[:2], *writes[3:]])
    with pytest.raises(StoreError, match="cancelled"):
        writes[2].wait(PATIENCE)
    assert calls["pwritev"] == 2  # before the gap and after it
    rest = [(extent, each) for extent, each in zip(extents, data, strict=True) if extent is not extents[2]]
    rooms = rooms_for(store, [each for _, each in rest])
    await_all(read(store, [extent for extent, _ in rest], rooms))
    assert all(torch.equal(room, each) for room, (_, each) in zip(rooms, rest, strict=True))
    assert writes[2] not in ended


def test_one_that_cannot_be_written_fails_alone(store: FileStore) -> None:
    data = sources_of(store, SIZES)
    with inject("nothing-write:n=1", "fail-write:n=3,errno=EINVAL"):
        writes = write(store, reserve(store, data), data, READY)
        for number, each in enumerate(writes):
            if number == 2:
                with pytest.raises(StoreError, match="Invalid argument"):
                    each.wait(PATIENCE)
            elif number < 2:
                each.wait(PATIENCE)


def test_one_whose_bytes_have_changed_fails_alone(store: FileStore) -> None:
    data = sources_of(store, SIZES)
    extents = reserve(store, data)
    await_all(write(store, extents, data, READY))
    flipped = bytes([int(data[3][0]) ^ 1])
    with Path(f"/proc/self/fd/{store.fileno()}").open("r+b") as file:
        file.seek(extents[3].offset + extents[3].lead)
        file.write(flipped)
    rooms = rooms_for(store, data)
    for number, each in enumerate(read(store, extents, rooms)):
        if number == 3:
            with pytest.raises(ChecksumError):
                each.wait(PATIENCE)
        else:
            each.wait(PATIENCE)


# Several drives and tiers


def hosts(number: int) -> StripedStore:
    return StripedStore([HostStore(device=CPU, drive=drive, slab_bytes=1 << 20) for drive in range(number)])


def test_each_drive_gets_its_share_of_a_batch() -> None:
    with hosts(2) as store:
        store.prepare(64 << 20)
        ranges = [(512 << 10, 0)] * 16
        taken = Counter[int]()
        while len(ranges) > 0:
            extents = store.reserve_many(ranges)
            assert len({extent.drive for extent in extents}) == 1
            assert sum(extent.nbytes for extent in extents) >= min(
                1 << 20, sum(nbytes for nbytes, _ in ranges)
            )
            taken[extents[0].drive] += len(extents)
            ranges = ranges[len(extents) :]
        assert abs(taken[0] - taken[1]) <= 2


def test_a_batch_goes_to_the_drives_until_they_have_too_much_to_do(tmp_path: Path) -> None:
    host = HostStore(1 << 30, device=CPU, drive=1)
    with TieredStore(FileStore(tmp_path, device=CPU), host, spill_bytes=1 << 20) as store:
        store.prepare(64 << 20)
        data, gate = [pattern(256 << 10)] * 12, Gate()
        ranges = [(each.nbytes, 0) for each in data]
        first = store.reserve_many(ranges)
        assert {extent.drive for extent in first} == {0}
        assert len(first) == 5  # one more than the drives may have to do
        writes = write(store, first, data[: len(first)], gate)
        then = store.reserve_many(ranges[len(first) :])
        assert [extent.drive for extent in then] == [1]
        gate.open()
        await_all(writes)
