"""The store over several drives."""

from __future__ import annotations

import errno
import threading
import warnings
from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from around import put_around
from harness import KIB, Drive, DrivenHostStore, assert_all_given_back, config_for, wait_until
from models import loss_of, make_model, make_tokens, same_bits
from store_contract import (
    CPU,
    PATIENCE,
    READY,
    Gate,
    StoreContract,
    descriptors,
    get,
    io_threads,
    pattern,
    put,
)

import tba_offload as tba
from tba_offload.adapt.rates import Rates
from tba_offload.adapt.task import Task
from tba_offload.config.policy import Objective, Placement
from tba_offload.device import ByteRange
from tba_offload.errors import ChecksumError, ConfigError, StoreError, StoreFullError, TransferError
from tba_offload.plan.bandwidth import Bandwidth
from tba_offload.plan.model import Limits
from tba_offload.store import open_store
from tba_offload.store.base import ActivationStore, DriveLoad, Extent, Load
from tba_offload.store.file import FileStore
from tba_offload.store.host import HostStore
from tba_offload.store.meters import Meter
from tba_offload.store.service import Service
from tba_offload.store.striped import StripedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tba_offload.store.base import IoFuture, WriteOrder


@dataclass
class Trained:
    """What came of some steps, by their numbers."""

    records: list[Any] = field(default_factory=list)
    gradients: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)


def grad_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad.clone()


def assert_same_gradients(some: Trained, others: Trained) -> None:
    """The steps that both have made, bit for bit."""
    for number in some.gradients.keys() & others.gradients.keys():
        pairs = zip(some.gradients[number], others.gradients[number], strict=True)
        assert all(same_bits(a, b) for a, b in pairs)


class TestStripedStore(StoreContract):
    """A drive with files and one in memory, so that alignments and leads differ."""

    splits_alike = False  # it follows the rates as they are measured

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
        digest = drive._leases.of(extent).digest  # type: ignore[attr-defined]
        store.write(extent, ByteRange.of(data), READY).wait(PATIENCE)
        drive._leases.of(extent).digest = digest  # type: ignore[attr-defined]

    def test_checksums_catch_a_changed_byte_unless_told_otherwise(self, tmp_path: Path) -> None:
        """Drives are checked, the memory among them is not."""
        with self.make_store(tmp_path) as store:
            for seed in range(4):
                data = pattern(5000, seed)
                extent = put(store, data)
                self.corrupt(store, extent)
                if extent.drive:
                    assert not torch.equal(get(store, extent), data)
                    continue
                with pytest.raises(ChecksumError, match="instead of"):
                    get(store, extent)


def hosts(count: int, **options: Any) -> StripedStore:
    return StripedStore([HostStore(device=CPU, drive=drive, **options) for drive in range(count)])


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
        futures[0].wait(PATIENCE)
        assert store.reserve(1, 0).drive == by_bytes[30_000]
        for gate in gates:
            gate.open()


def _pending(store: StripedStore) -> list[int]:
    return [drive.pending_bytes() for drive in store.stores]


# Drives of different speed


class Clock:
    """Time as the test has it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class PacedStore(HostStore):
    """A drive of known speed on a clock that only :func:`pass_one` sets: nothing here takes real time."""

    def __init__(self, clock: Clock, speed: float, *, drive: int, capacity: int | None = None) -> None:
        super().__init__(capacity, device=CPU, drive=drive, slab_bytes=1 << 20)
        self.clock, self.speed = clock, speed
        self.running: deque[tuple[float, threading.Semaphore]] = deque()
        self.futures: deque[IoFuture] = deque()
        self.began = threading.Semaphore(0)
        condition = self._condition
        condition.writes, condition.reads, condition.service = Meter(clock), Meter(clock), Service(clock)
        put_around(self, self.paced)

    @contextmanager
    def paced(self, verb: str, extent: Extent) -> Iterator[None]:
        if verb == "read":
            yield
            return
        gate = threading.Semaphore(0)
        self.running.append((self.clock.now + extent.nbytes / self.speed, gate))
        self.began.release()
        assert gate.acquire(timeout=PATIENCE)
        yield

    def write_many(self, orders: Sequence[WriteOrder]) -> list[IoFuture]:
        first, writes = not self.futures, super().write_many(orders)
        self.futures.extend(writes)
        if first:
            assert self.began.acquire(timeout=PATIENCE)
        return writes


def paced(clock: Clock, *speeds: float) -> StripedStore:
    return StripedStore([PacedStore(clock, speed, drive=drive) for drive, speed in enumerate(speeds)])


def drives_of(store: StripedStore) -> list[PacedStore]:
    assert all(isinstance(drive, PacedStore) for drive in store.stores)
    return list(store.stores)  # type: ignore[arg-type]


def pass_one(store: StripedStore) -> None:
    """Lets the clock run until the next write ends."""
    drive = min((drive for drive in drives_of(store) if drive.running), key=lambda each: each.running[0][0])
    drive.clock.now, gate = drive.running.popleft()
    future = drive.futures.popleft()
    gate.release()
    future.wait(PATIENCE)
    if drive.futures:
        assert drive.began.acquire(timeout=PATIENCE)


def drain(store: StripedStore) -> None:
    while store.pending():
        pass_one(store)


def feed(store: StripedStore, count: int, *, depth: int, nbytes: int = 100_000) -> Counter[int]:
    """Writes ``count`` extents with ``depth`` queued or running; how many went to each drive."""
    data, taken = pattern(nbytes), Counter[int]()
    for _ in range(count):
        extent = store.reserve(nbytes, 0)
        taken[extent.drive] += 1
        store.write(extent, ByteRange.of(data), READY, done=lambda _, extent=extent: store.release(extent))
        while store.pending() >= depth:
            pass_one(store)
    return taken


@pytest.mark.parametrize("depth", [1, 12])
@pytest.mark.parametrize("speeds", [(1e9, 1e9), (1e9, 3e9), (4e9, 1e9, 3e9)])
def test_the_split_of_bytes_follows_the_rates(speeds: tuple[float, ...], depth: int) -> None:
    """With queues as with one write at a time."""
    with paced(Clock(), *speeds) as store:
        feed(store, 40, depth=depth)
        taken = feed(store, 400, depth=depth)
        drain(store)
        for drive, speed in enumerate(speeds):
            assert taken[drive] == pytest.approx(400 * speed / sum(speeds), abs=6)
        assert store.write_rate() == pytest.approx(sum(speeds))


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


# A drive that dies


def on_clock(store: StripedStore) -> Clock:
    """The drives rest by this clock."""
    clock = Clock()
    for drive in store.stores:
        assert isinstance(drive, HostStore)
        drive._condition.service = Service(clock)
    return clock


def dead() -> StoreError:
    return StoreError(errno.ENODEV, "No such device", "/mnt/b")


def two_drives(drive: Drive) -> StripedStore:
    """The first one does what it is told."""
    driven = DrivenHostStore(drive, device=CPU, slab_bytes=1 << 20)
    return StripedStore([driven, HostStore(device=CPU, drive=1, slab_bytes=1 << 20)])


def test_the_share_of_a_drive_that_dies_goes_to_the_others_at_once() -> None:
    drive = Drive()
    with two_drives(drive) as store:
        clock = on_clock(store)
        drive.writes.fail_with(dead)
        extents = [store.reserve(5000, 0) for _ in range(2)]
        for extent in extents:
            future = store.write(extent, ByteRange.of(pattern(5000)), READY)
            wait_until(future.done, "a write")
        assert [store.reserve(5000, 0).drive for _ in range(20)] == [1] * 20
        assert [load.in_service for load in store.take_loads()] == [False, True]
        clock.now = 1.0
        drives = [store.reserve(5000, 0).drive for _ in range(20)]
        assert sorted(drives) == [0] + [1] * 19  # one write is let through to try it
        drive.writes.recover()
        trial = store.reserve(5000, 0)
        clock.now = 3.0
        while trial.drive == 1:
            trial = store.reserve(5000, 0)
        store.write(trial, ByteRange.of(pattern(5000)), READY).wait(PATIENCE)
        assert {store.reserve(5000, 0).drive for _ in range(40)} == {0, 1}
        assert [load.in_service for load in store.take_loads()] == [True, True]


def train_on(store: StripedStore, steps: int, before: Callable[[int], None], **settings: Any) -> Trained:
    """Trains over a store; which steps failed, with what, and the gradients and records of the others."""
    model, trained = make_model(layers=4), Trained()
    config = config_for(in_flight=16 * KIB, **settings)
    with (
        mock.patch("tba_offload.session.parts.open_store", return_value=store),
        tba.attach(model, config, measure_memory=False) as session,
    ):
        for number in range(steps):
            before(number)
            try:
                with session.step() as step:
                    loss = loss_of(model, make_tokens(number))
                    session.offloader.quiesce()
                    before(-number - 1)
                    loss.backward()
                trained.records.append(step.record)
                trained.gradients[number] = [grad_of(parameter) for parameter in model.parameters()]
            except TransferError as error:
                trained.failures[number] = str(error)
            del loss
            model.zero_grad()
        assert_all_given_back(session)
    return trained


def test_training_goes_on_with_the_other_drive_when_one_refuses_writes() -> None:
    drive = Drive()

    def before(number: int) -> None:
        if number == 2:
            drive.writes.fail_with(dead)

    whole = train_on(hosts(2, slab_bytes=1 << 20), 5, lambda _: None)
    store = two_drives(drive)
    on_clock(store)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trained = train_on(store, 5, before)
    (warning,) = [each for each in told if issubclass(each.category, RuntimeWarning)]
    assert "/mnt/b" in str(warning.message)
    assert trained.failures == {}
    assert_same_gradients(trained, whole)
    assert [record.drives_out_of_service for record in trained.records] == [0, 0, 1, 1, 1]
    kept = [record.fallback_kept_bytes for record in trained.records]
    assert kept[2] > 0
    assert kept[3:] == [0, 0]
    assert all(record.offloaded_bytes > 0 for record in trained.records)


@pytest.mark.filterwarnings("ignore:a drive failed and is left alone:RuntimeWarning")
def test_what_a_dead_drive_has_fails_one_step_only() -> None:
    drive = Drive()

    def before(number: int) -> None:
        if number == -2:  # after the forward pass of step 1
            drive.writes.fail_with(dead)
            drive.reads.fail_with(dead)

    whole = train_on(hosts(2, slab_bytes=1 << 20), 5, lambda _: None)
    store = two_drives(drive)
    on_clock(store)
    with mock.patch.object(HostStore, "write_rate", return_value=1e9):  # each has its half
        trained = train_on(store, 5, before)
    assert list(trained.failures) == [1]
    for part in ("could not read", "layer ", "micro-batch 0", "host memory", "offset", "/mnt/b"):
        assert part in trained.failures[1]
    assert_same_gradients(trained, whole)
    assert [record.drives_out_of_service for record in trained.records] == [0, 1, 1, 1]


def test_planners_count_on_the_drives_in_service() -> None:
    rates = Rates(Task((Placement.AUTO,), ((0, "layers.0"),), Limits(None, None), Objective.MEMORY))

    def drive_after(*loads: DriveLoad) -> Bandwidth | None:
        rates.note(loads, fell_back=False)
        return rates.bandwidth()

    both = [DriveLoad(Load(4000, 1.0), Load(2000, 1.0)), DriveLoad(Load(1000, 1.0), Load(500, 1.0))]
    assert drive_after(*both) == Bandwidth(5000, 2500)
    nothing = Load(0, 0.0)
    idle = DriveLoad(nothing, nothing, in_service=False)
    assert drive_after(idle, both[1]) == Bandwidth(1000, 500)
    assert drive_after(DriveLoad(nothing, nothing), both[1]) == Bandwidth(5000, 2500)
    full = DriveLoad(nothing, nothing, room=3000)
    assert drive_after(full, both[1]) == Bandwidth(5000, 2500)
    assert drive_after(full, both[1]._replace(room=4096)) == Bandwidth(5000, 2500, capacity=7096)


def test_it_needs_a_store() -> None:
    with pytest.raises(ValueError, match="at least one store"):
        StripedStore([])


def test_open_store_makes_one_file_a_directory(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    with open_store(directories=paths, capacity=8 << 20, device=CPU) as store:
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
        with pytest.raises(ConfigError, match=r"are the same place|is given twice"):
            open_store(directories=[tmp_path / "a", other], device=CPU)


def test_open_store_leaves_nothing_open_when_a_directory_fails(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "file").touch()
    before = descriptors()
    with pytest.raises(StoreError, match="not a directory"):
        open_store(directories=[tmp_path / "a", tmp_path / "file"], device=CPU)
    assert descriptors() == before
    assert io_threads() == []
