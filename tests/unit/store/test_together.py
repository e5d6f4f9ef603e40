"""Transfers that are queued together: neighbours go by one call, and each is still one for itself."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from faults import inject
from harness import in_time
from store_contract import CPU, PATIENCE, READY, Gate, at_lead, io_threads, pattern

from tba_offload.device import ByteRange, CpuDevice
from tba_offload.errors import ChecksumError, StoreError
from tba_offload.store import open_store, posix
from tba_offload.store.base import IoFuture, take_back
from tba_offload.store.file import JOINED_BYTES, FileStore
from tba_offload.store.host import HostStore
from tba_offload.store.striped import StripedStore
from tba_offload.store.tiered import TieredStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tba_offload.device import Event
    from tba_offload.store.base import ActivationStore, Extent

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


def test_so_many_bytes_go_by_one_call(store: FileStore, calls: Counter[str]) -> None:
    data = sources_of(store, [JOINED_BYTES // 4] * 9)
    await_all(write(store, reserve(store, data), data, READY))
    extents = sum(extent.length for extent in store.leased())
    assert calls["pwritev"] == extents // JOINED_BYTES + (0 if calls["pwrite"] else 1)
    assert calls["pwritev"] + calls["pwrite"] <= 4


def test_so_many_extents_go_by_one_call(store: FileStore, calls: Counter[str]) -> None:
    """The kernel takes a limited number of pieces: each extent has one, and one for its padding."""
    data = sources_of(store, [100] * 700)
    extents = reserve(store, data)
    await_all(write(store, extents, data, READY))
    rooms = rooms_for(store, data)
    await_all(read(store, extents, rooms))
    assert calls == {"pwritev": 2, "preadv": 2}
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


@pytest.mark.parametrize("outcome", ["fails", "is cut short"])
def test_what_cannot_go_together_goes_one_by_one(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    def call(fd: int, address: int, parts: int, offset: int) -> int:
        if outcome == "fails":
            raise OSError(5, "injected")
        return 4096

    monkeypatch.setattr(posix, "pwritev", call)
    monkeypatch.setattr(posix, "preadv", call)
    data = sources_of(store, SIZES)
    extents = reserve(store, data)
    await_all(write(store, extents, data, READY))
    rooms = rooms_for(store, data)
    await_all(read(store, extents, rooms))
    assert all(torch.equal(room, each) for room, each in zip(rooms, data, strict=True))
    assert store.take_outages() == []  # the drive did all that it was asked for


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


def test_each_that_goes_alone_may_take_as_long_as_the_limit(tmp_path: Path) -> None:
    """Delays of a third of the limit: none of them hangs."""
    with FileStore(tmp_path, device=CPU, writers=1, readers=1, stall_seconds=0.6) as store:
        store.prepare(1 << 20)
        data = sources_of(store, SIZES)
        with inject("nothing-write:n=1", "delay-write:seconds=0.2"):
            writes = write(store, reserve(store, data), data, READY)
            writes[3].wait(PATIENCE)
            store.close()  # it would give up what hangs
        await_all(writes[:4])


class Slow:
    """A system call that fails when the test says so; it also tells how often it was made."""

    def __init__(self) -> None:
        self.called, self.ends = threading.Event(), threading.Event()
        self.calls = 0

    def __call__(self, fd: int, address: int, parts: int, offset: int) -> int:
        self.calls += 1
        self.called.set()
        assert self.ends.wait(PATIENCE)
        raise OSError(5, "injected")


def read_slowly(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> tuple[list[IoFuture], Slow]:
    """Reads of neighbours that failed together; the first of those that go alone is under way."""
    data = sources_of(store, SIZES)
    extents = reserve(store, data)
    await_all(write(store, extents, data, READY))
    alone = Slow()
    monkeypatch.setattr(posix, "preadv", lambda *_: 0)
    monkeypatch.setattr(posix, "pread", alone)
    reads = read(store, extents, rooms_for(store, data))
    assert alone.called.wait(PATIENCE)
    return reads, alone


def test_what_goes_one_by_one_can_be_cancelled_until_its_turn(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, alone = read_slowly(store, monkeypatch)
    cancelled = [each.cancel() for each in reads]
    alone.ends.set()
    assert cancelled == [False] + [True] * (len(SIZES) - 1)
    with pytest.raises(StoreError, match="injected"):
        reads[0].wait(PATIENCE)
    assert alone.calls == 1
    assert store.pending() == 0


def test_a_store_that_closes_leaves_what_would_go_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drive that answers each call late must not make the end as late as all of them together."""
    store = FileStore(tmp_path, device=CPU, writers=1, readers=1)
    store.prepare(1 << 20)
    reads, alone = read_slowly(store, monkeypatch)
    extent = store.leased()[0]
    queued = store.read(extent, ByteRange.of(pattern(extent.nbytes)), READY, padded=False)
    closing = threading.Thread(target=store.close)
    closing.start()
    while not queued.cancelled():
        time.sleep(0.001)
    alone.ends.set()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert alone.calls == 1
    assert [each.cancelled() for each in reads] == [False] + [True] * (len(SIZES) - 1)


def test_a_joined_call_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released, called = threading.Event(), threading.Event()

    def hang(fd: int, address: int, parts: int, offset: int) -> int:
        called.set()
        assert released.wait(PATIENCE)
        return 0

    monkeypatch.setattr(posix, "pwritev", hang)
    store = FileStore(tmp_path, device=CPU, writers=1, readers=1, stall_seconds=0.05)
    store.prepare(1 << 20)
    data = sources_of(store, SIZES)
    writes = write(store, reserve(store, data), data, READY)
    assert called.wait(PATIENCE)
    assert not any(each.cancel() for each in writes)
    with pytest.raises(StoreError, match=f"{len(SIZES)} transfers have not moved"):
        store.close()
    released.set()
    await_end_of_threads()
    assert [each.cancelled() for each in writes] == [True] * len(SIZES)


class Remote(CpuDevice):
    """A device whose memory no system call can reach."""

    pins_memory = True


def test_what_passes_through_slabs_does_not_wait_for_its_neighbours(tmp_path: Path) -> None:
    with FileStore(tmp_path, device=Remote(), writers=2, readers=1) as store:
        store.prepare(1 << 20)
        data, gate = sources_of(store, SIZES[:2]), Gate()
        (extent, other), (source, second) = reserve(store, data), data
        held, free = store.write_many(
            [
                (extent, ByteRange.of(source), gate, None),
                (other, ByteRange.of(second), READY, None),
            ]
        )
        free.wait(PATIENCE)
        assert not held.done()
        gate.open()
        held.wait(PATIENCE)


def await_end_of_threads() -> None:
    while io_threads():
        time.sleep(0.001)


def test_a_store_is_not_collected_before_its_batches_have_ended(tmp_path: Path) -> None:
    ended, all_ended = [], threading.Event()

    def end(future: IoFuture) -> None:
        ended.append(future)
        if len(ended) == len(SIZES):
            all_ended.set()

    store = FileStore(tmp_path, device=CPU, writers=1, readers=1)
    store.prepare(1 << 20)
    data, gate = sources_of(store, SIZES), Gate()
    pairs = zip(reserve(store, data), data, strict=True)
    store.write_many([(extent, ByteRange.of(each), gate, end) for extent, each in pairs])
    del store
    gate.open()
    with pytest.warns(ResourceWarning, match="was not closed"):
        await_end_of_threads()
    assert all_ended.is_set()
    assert all(each.error is None for each in ended)


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


# Taken back


def test_no_store_of_several_waits_for_ever_for_what_it_takes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with hosts(2) as store:
        store.limit_waits(0.05)
        gates = [Gate(), Gate()]
        extents = [store.reserve(5000, 0) for _ in gates]
        assert [extent.drive for extent in extents] == [0, 1]
        orders = [
            (extent, ByteRange.of(pattern(5000)), gate, None)
            for extent, gate in zip(extents, gates, strict=True)
        ]

        def fail(_: object) -> list[IoFuture]:
            assert gates[0].reached.acquire(timeout=PATIENCE)
            raise RuntimeError("as the test wants it")

        monkeypatch.setattr(store.stores[1], "write_many", fail)
        with pytest.raises(RuntimeError, match="as the test wants it"):
            in_time(lambda: store.write_many(orders))
        assert store.pending() == 1
        store.limit_waits(PATIENCE)
        gates[0].open()


def test_all_that_is_taken_back_is_waited_for_as_long_as_one() -> None:
    class Hanging(IoFuture):
        def wait(self, timeout: float | None = None) -> None:
            assert timeout is not None
            waited.append(timeout)
            time.sleep(max(timeout, 0.0))
            raise TimeoutError

    waited: list[float] = []
    hanging = [Hanging() for _ in range(3)]
    assert all(each.claim() for each in hanging)
    queued = IoFuture()
    take_back([*hanging, queued], 0.05)
    assert queued.cancelled()
    assert waited
    assert sum(max(seconds, 0.0) for seconds in waited) <= 0.05


def test_a_store_of_several_has_the_limit_that_it_was_opened_with(tmp_path: Path) -> None:
    made = [tmp_path / name for name in "ab"]
    for path in made:
        path.mkdir()
    with open_store(directories=made, host_capacity=1 << 20, stall_seconds=7.0, device=CPU) as store:
        assert isinstance(store, TieredStore)
        assert isinstance(store.drives, StripedStore)
        assert store.limit == store.drives.limit == 7.0
