"""One store over several drives, with host memory beside them."""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from around import put_around, taking_time
from harness import (
    CPU,
    KIB,
    MIB,
    PATIENCE,
    Drive,
    DrivenHostStore,
    assert_all_given_back,
    made,
    session_for,
    used_bytes,
)
from models import assert_same_history, make_model, train
from store_contract import Gate, descriptors, get, io_threads, pattern, put, write
from torch import nn

import tba_offload as tba
from tba_offload.errors import ConfigError, StoreError, StoreFullError, TransferError
from tba_offload.store import MultiStore, Transfer, open_store
from tba_offload.store.host import HostStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tba_offload.device import ByteRange as Bytes
    from tba_offload.store import Extent

DEAD = OSError(errno.ENODEV, "No such device")


class DriveInMemory(HostStore):
    """Host memory that passes for a drive; it fails with, or waits for, what a test puts there."""

    tier = "drive"

    def __init__(self, name: str = "a drive", **options: Any) -> None:
        super().__init__(device=CPU, slab_bytes=MIB, **options)
        self.name = name
        self.failure: BaseException | None = None
        self.seconds = 0.0
        self.gate: threading.Event | None = None
        self.reached = threading.Semaphore(0)

    def write(self, extent: Extent, source: Bytes) -> None:
        self.reached.release()
        time.sleep(self.seconds)
        if self.gate is not None:
            self.gate.wait(PATIENCE)
        if self.failure is not None:
            raise self.failure
        super().write(extent, source)


def wait_for_all(transfers: list[Transfer]) -> None:
    assert all(transfer.wait(PATIENCE) for transfer in transfers)


# Which place


def test_drives_share_what_is_written_and_bytes_come_back() -> None:
    with MultiStore([DriveInMemory(), DriveInMemory()], writers=2, readers=2) as store:
        for step in range(3):
            writes = [write(store, pattern(10_000 + i, step)) for i in range(40)]
            for transfer in writes:
                store.wait(transfer)
            extents = [transfer.extent for transfer in writes]
            drives = Counter(extent.drive for extent in extents if extent is not None)
            assert min(drives[0], drives[1]) >= 5
            for i, extent in enumerate(extents):
                assert extent is not None
                assert torch.equal(get(store, extent), pattern(10_000 + i, step))
                store.release(extent)
        assert used_bytes(store) == 0


def test_a_slow_drive_gets_less() -> None:
    slow, fast = DriveInMemory(), DriveInMemory()
    slow.seconds = 0.02
    with MultiStore([slow, fast]) as store:
        drives = Counter(put(store, pattern(100_000)).drive for _ in range(40))
    assert drives[1] > 3 * drives[0] > 0


def test_a_full_drive_is_passed_over() -> None:
    small, large = DriveInMemory(capacity=8 * 4096), DriveInMemory(capacity=64 * 4096)
    with MultiStore([small, large]) as store:
        assert Counter(put(store, pattern(8 * 4096)).drive for _ in range(9)) == {0: 1, 1: 8}
        with pytest.raises(StoreFullError, match=r"no room for 1 bytes: .*of 32768 bytes .*of 262144"):
            put(store, pattern(1))
        assert store.take_outages() == []


def test_host_memory_takes_what_drives_have_no_time_for() -> None:
    drive = DriveInMemory()
    drive.gate = threading.Event()
    with MultiStore([drive, HostStore(device=CPU, capacity=MIB, slab_bytes=MIB)]) as store:
        store.spill_bytes = 200 * KIB
        writes = [write(store, pattern(100 * KIB)) for _ in range(8)]
        assert [transfer.drive for transfer in writes] == [0, 0, 0, 1, 1, 1, 1, 1]
        drive.gate.set()
        for transfer in writes:
            store.wait(transfer)
        assert [load.tier for load in store.take_loads()] == ["drive", "host"]
        assert put(store, pattern(100 * KIB)).drive == 0


@pytest.mark.parametrize("held", [16, 8])
def test_host_memory_first_leaves_the_rest_to_drives_and_from_the_second_step_on_spreads_it(
    held: int,
) -> None:
    with MultiStore([HostStore(device=CPU, capacity=MIB, slab_bytes=MIB), DriveInMemory()]) as store:
        seen = []
        for _ in range(2):
            extents = [put(store, pattern(128 * KIB)) for _ in range(held)]
            seen.append([extent.drive for extent in extents])
            for extent in extents:
                store.release(extent)
            store.trim()
    assert seen == ([[0] * 8 + [1] * 8, [0, 1] * 8] if held == 16 else [[0] * 8] * 2)


def test_host_memory_that_is_busy_shares_with_drives_by_their_rates() -> None:
    gate = Gate()
    with MultiStore([HostStore(device=CPU, capacity=8 * MIB), DriveInMemory()]) as store:
        store.spill_bytes = 200 * KIB
        writes = [write(store, pattern(100 * KIB), gate) for _ in range(12)]
        places = [transfer.drive for transfer in writes]
        gate.open()
        wait_for_all(writes)
    assert places[:7] == [0, 0, 0, 1, 1, 1, 0]
    assert places.count(1) == 6


# A drive that dies


def test_a_drive_that_fails_is_left_alone_and_tried_again() -> None:
    drive = DriveInMemory("/mnt/b")
    drive.failure = DEAD
    with MultiStore([drive, DriveInMemory("/mnt/a")]) as store:
        with pytest.raises(StoreError, match="No such device") as caught:
            put(store, pattern(5000))
        assert caught.value.errno == errno.ENODEV
        assert {put(store, pattern(5000)).drive for _ in range(20)} == {1}
        ((place, cause),) = store.take_outages()
        assert place == "/mnt/b"
        assert "No such device" in cause
        assert store.take_outages() == []
        assert [(load.in_service, load.room) for load in store.take_loads()] == [(False, 0), (True, None)]
        time.sleep(1.05)  # its first pause
        writes = [write(store, pattern(5000)) for _ in range(20)]
        wait_for_all(writes)
        assert sum(each.error is not None for each in writes) == 1  # one write tried it
        drive.failure = None
        store.resume()
        assert 0 in {put(store, pattern(5000)).drive for _ in range(40)}
        assert all(load.in_service for load in store.take_loads())


def test_training_goes_on_with_the_other_drive_when_one_refuses_writes() -> None:
    expected, model, drive = train(make_model(), steps=5), make_model(), DriveInMemory("/mnt/b")

    def before(step: int) -> None:
        if step == 2:
            drive.failure = DEAD

    store = MultiStore([drive, DriveInMemory("/mnt/a")])
    with session_for(model, store=store, in_flight=16 * KIB) as session:
        with pytest.warns(RuntimeWarning, match="/mnt/b") as told:
            found = train(model, session, steps=5, before_step=before)
        report = session.records
        assert_all_given_back(session)
    assert len([each for each in told if issubclass(each.category, RuntimeWarning)]) == 1
    assert_same_history(found, expected)
    assert [record.drives_out_of_service for record in report][:3] == [0, 0, 1]
    assert report[2].fallback_kept_bytes > 0
    assert all(record.offloaded_bytes > 0 for record in report)


# How it is opened, and its end


@pytest.mark.parametrize("order", [None, ("host", "drive"), ("drive", "host")])
def test_open_store_makes_one_file_a_directory_with_host_memory_before_or_after_them(
    order: tuple[str, str] | None, tmp_path: Path
) -> None:
    paths = [made(tmp_path / name) for name in ("a", "b")]
    settings: Any = {"capacity": 8 * MIB, "host_capacity": MIB, "order": order}
    with open_store(directories=paths, device=CPU, **settings) as store:
        places: Any = store.description["stores"]
        first = order != ("drive", "host")
        found = [(place.get("directory"), place["capacity"]) for place in places]
        assert found.pop(0 if first else -1) == (None, MIB)
        assert found == [(str(path), 4 * MIB) for path in paths]
        assert (store.kind, store.description["capacity"]) == ("host+file" if first else "file+host", 9 * MIB)
        extents = [put(store, pattern(100_000, seed)) for seed in range(8)]
        assert {extent.drive for extent in extents} == ({0} if first else {0, 1})
        for seed, extent in enumerate(extents):
            assert torch.equal(get(store, extent), pattern(100_000, seed))
    with pytest.raises(ConfigError, match="host_capacity: has no effect with kind: host"):
        open_store(kind="host", host_capacity=MIB, device=CPU)


def test_open_store_leaves_nothing_open_when_a_directory_fails(tmp_path: Path) -> None:
    made(tmp_path / "a")
    (tmp_path / "file").touch()
    before = descriptors()
    with pytest.raises(StoreError, match="is a file"):
        open_store(directories=[tmp_path / "a", tmp_path / "file"], device=CPU)
    assert descriptors() == before
    assert io_threads() == []


# Training


@contextmanager
def attached(model: Any, drive: Drive, *, host: int = 8 * MIB, **settings: Any) -> Iterator[tba.Session]:
    driven = DrivenHostStore(drive)
    driven.tier, driven.kind, driven.name = "drive", "file", "/mnt/a"
    store = MultiStore([driven, HostStore(device=CPU, capacity=host, slab_bytes=64 * KIB)])
    with session_for(model, store=store, **settings) as session:
        try:
            yield session
        finally:
            drive.release()


def test_training_goes_on_while_the_drive_stands_still() -> None:
    """Half the window lies in front of the drive, the rest goes to host memory; nobody waits for ever."""
    expected, drive = train(make_model(dropout=0.1), steps=3, micro_batches=2), Drive()
    model = make_model(dropout=0.1)

    def before(step: int) -> None:
        if step == 0:
            drive.writes.hold()
        if step == 1:
            drive.release()

    with attached(model, drive, in_flight=400 * KIB) as session:
        found = train(model, session, steps=3, micro_batches=2, before_step=before)
        first = session.records[0]
        assert_all_given_back(session)
    assert_same_history(found, expected)
    assert first.in_flight_peak_bytes <= 400 * KIB
    assert first.offloaded_bytes > 400 * KIB  # to host memory: the drive wrote nothing
    assert first.fallback_kept_bytes == 0


def test_a_drive_that_is_full_leaves_the_next_writes_to_host_memory() -> None:
    """What was queued for it stays in memory; two full tiers keep all, or are an error."""

    def no_space() -> StoreFullError:
        return StoreFullError(errno.ENOSPC, "no space on the drive")

    expected, drive = train(make_model(), steps=2), Drive()
    drive.reservations.fail_with(no_space)
    for host in (8 * MIB, 64 * KIB):
        model = make_model()
        with attached(model, drive, host=host, in_flight=400 * KIB, on_full="keep") as session:
            with pytest.warns(UserWarning, match="the store is full"):
                assert_same_history(train(model, session, steps=2), expected)
            first, last = session.records
            assert first.fallback_kept_bytes > 0 < first.offloaded_bytes
            assert (last.fallback_kept_bytes > 0) is (host == 64 * KIB)
            assert_all_given_back(session)
    model = make_model()
    with attached(model, drive, host=64 * KIB, on_full="error") as session, pytest.raises(TransferError):
        train(model, session, steps=1)


def test_what_host_memory_holds_is_not_written_to_drives_and_the_bits_are_the_same(tmp_path: Path) -> None:
    expected, moved = train(make_model(), steps=4, micro_batches=2), {}
    for order in (("host", "drive"), ("drive", "host")):
        model = make_model()
        settings: Any = {"directory": tmp_path, "host_capacity": 128 * KIB, "order": order}
        with session_for(model, in_flight=64 * KIB, **settings) as session:
            assert_same_history(train(model, session, steps=4, micro_batches=2), expected)
            record = session.records[-1]
            moved[order[0]] = record.host_bytes, record.offloaded_bytes - record.host_bytes
            assert_all_given_back(session)
    (host, drive), (spilled, first) = moved["host"], moved["drive"]
    assert 200 * KIB < host <= 2 * 128 * KIB  # of two micro-batches
    assert drive < first - 100 * KIB
    assert spilled < host


# Drives held to rates


SECONDS, DEPTH, INPUT = 0.05, 16, MIB


class _Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(SECONDS)
        ctx.save_for_backward(x)
        return x * 1.5

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        assert ctx.saved_tensors
        time.sleep(2 * SECONDS)
        return gradient * 1.5


class Sleeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleeps.apply(x) * self.scale


def waits(directory: Path, share: float, **store: Any) -> tuple[float, float]:
    """The wait of a step on a drive with a share of the rate that is needed, and the wait that this says."""
    model, rate = nn.Sequential(*(Sleeper() for _ in range(DEPTH))), share * INPUT / SECONDS

    policy = {"default": "recompute-offload", "budget": {"in_flight_bytes": 3 * INPUT}}
    where = {"kind": "file", "directories": [directory], "readers": 1, "writers": 1, **store}
    with tba.attach(model, policy | {"store": where}, layers=list(model), measure_memory=False) as session:
        put_around(session.store, partial(taking_time, rate), tier="drive")
        found = []
        for _ in range(4):
            began = time.perf_counter()
            with session.step():
                output = model(torch.ones(INPUT // 4, requires_grad=True) * 1)
                forward = time.perf_counter() - began
                output.sum().backward()
            wait = session.records[-1].stall_seconds
            # All inputs but a window are written at the rate, from the second save on.
            computes = (forward - wait) * (DEPTH - 2) / DEPTH
            found.append((wait, max((DEPTH - 3) * INPUT / rate - computes, 0.0)))
    return min(found[1:])


@pytest.mark.full
def test_a_drive_with_too_low_a_rate_costs_what_the_rate_says_and_host_memory_first_takes_it_away(
    tmp_path: Path,
) -> None:
    wait, _ = waits(tmp_path, 1.2)
    assert wait < SECONDS / 2
    wait, expected = waits(tmp_path, 0.4)
    assert wait == pytest.approx(expected, abs=2 * SECONDS)
    assert expected > 4 * SECONDS
    first = {"order": ["host", "drive"], "host_capacity": DEPTH * INPUT * 3 // 4}
    wait, _ = waits(tmp_path, 0.4, **first)
    assert wait < SECONDS / 2
