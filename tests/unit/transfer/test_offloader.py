"""Bytes in motion: ceilings, forwarding, prefetch, failures, and books that balance."""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
import warnings
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from harness import (
    CPU,
    KIB,
    MIB,
    PATIENCE,
    Drive,
    DrivenFileStore,
    DrivenHostStore,
    host_store,
    state_of,
    wait_until,
)

from tba_offload.errors import ChecksumError, ShortTransferError, StoreError, StoreFullError, TransferError
from tba_offload.store import run_file
from tba_offload.store.service import Service
from tba_offload.transfer.offloader import Offloader
from tba_offload.transfer.storage import Handle, Record
from tba_offload.transfer.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor


SIZE = 64 * KIB
LEFT_ALONE = pytest.mark.filterwarnings("ignore:a drive failed and is left alone:RuntimeWarning")


@dataclass
class Saved:
    """A storage that was packed: all that is left of it are its record, its handles and a copy to compare."""

    record: Record
    handles: list[Handle]
    expected: Tensor
    memory: weakref.ref[torch.UntypedStorage]
    owner: torch.UntypedStorage | None = None


class Bench:
    """An offloader over a store that obeys a drive."""

    def __init__(
        self,
        drive: Drive,
        store: DrivenHostStore | DrivenFileStore,
        window: int | None,
        *,
        keep: bool,
        stall_limit: float | None,
    ) -> None:
        self.drive = drive
        self.store = store
        self.offloader = Offloader(store, CPU, window=window, keep_when_full=keep, stall_limit=stall_limit)
        self.eager = True
        self._count = 0

    def save(self, *ranges: tuple[int, int], nbytes: int = SIZE, owned: bool = False) -> Saved:
        """Packs views of a new storage, as a layer does; nobody else keeps the storage unless it is owned.

        Args:
            ranges: First and last byte of each view; by default one of all.
            nbytes: Size of the storage.
            owned: Whether somebody else keeps it.
        """
        self._count += 1
        generator = torch.Generator().manual_seed(self._count)
        tensor = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
        storage = tensor.untyped_storage()
        key = f"layer {self._count} (layers.{self._count}), micro-batch 0"
        self.offloader.writer.admit(nbytes)
        record = Record(storage, key=key)
        handles = [self.add(record, storage, *span) for span in ranges or [(0, nbytes)]]
        owner = storage if owned else None
        return Saved(record, handles, tensor.clone(), weakref.ref(storage), owner)

    def add(self, record: Record, storage: torch.UntypedStorage, lo: int, hi: int) -> Handle:
        handle = Handle(record, lo, hi, self.offloader.drops)
        self.offloader.writer.save(record, storage, lo, hi)
        if self.eager:
            self.offloader.writer.flush()
        return handle

    def prefetch(self, record: Record, *, across_forward: bool = False) -> bool:
        """Starts reading a record; whether the next one may be tried."""
        taken: list[Record] = []

        def upcoming() -> Iterator[tuple[Record, bool]]:
            yield record, across_forward
            taken.append(record)

        self.offloader.ahead.start(upcoming())
        return bool(taken)

    def fetch(self, saved: Saved, index: int = 0) -> torch.UntypedStorage:
        """Unpacks a view and compares its bytes."""
        handle = saved.handles[index]
        storage, shift = self.offloader.reader.fetch(handle)
        found = torch.empty(0, dtype=torch.uint8).set_(storage)[handle.lo + shift : handle.hi + shift]
        assert torch.equal(found, saved.expected[handle.lo : handle.hi])
        return storage

    def drop(self, *saved: Saved) -> None:
        """Autograd frees the saved tensors."""
        for one in saved:
            one.handles.clear()
        self.offloader.drain()

    def assert_idle(self) -> None:
        """Nothing is in flight, nothing is stored, and our own count of resident bytes is back at zero."""
        self.offloader.quiesce()
        wait_until(lambda: self.store.pending() == 0, "transfers pending")
        wait_until(lambda: self.offloader.in_flight == 0, "bytes in flight")
        wait_until(lambda: self.store.used_bytes == 0, "extents taken")
        self.offloader.reset_stats()
        assert self.offloader.stats.own_peak == 0


@pytest.fixture
def drive() -> Drive:
    return Drive()


@pytest.fixture
def make(drive: Drive) -> Iterator[Callable[..., Bench]]:
    stores: list[DrivenHostStore] = []

    def make_bench(
        window: int | None = None,
        *,
        capacity: int | None = None,
        keep: bool = True,
        stall_limit: float | None = None,
        extent: int | None = None,
    ) -> Bench:
        stores.append(host_store(drive, capacity=capacity))
        stores[-1].extent_bytes = extent
        return Bench(drive, stores[-1], window, keep=keep, stall_limit=stall_limit)

    yield make_bench
    for store in stores:
        store.close()


@pytest.fixture
def bench(make: Callable[..., Bench]) -> Bench:
    return make()


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@contextmanager
def noticing_waits() -> Iterator[threading.Event]:
    """An event that is set when a thread is about to wait for a change, of which it must be told."""
    waits = threading.Event()
    wait = Watchdog.wait_until_changed

    def notice(*arguments: Any) -> None:
        waits.set()
        wait(*arguments)

    with mock.patch.object(Watchdog, "wait_until_changed", notice):
        yield waits


def finish(thread: threading.Thread) -> None:
    thread.join(PATIENCE)
    assert not thread.is_alive()


# The way out and back


def test_bytes_leave_memory_and_come_back(bench: Bench) -> None:
    saved = bench.save()
    bench.offloader.quiesce()
    assert state_of(saved.record) == "stored"
    assert saved.memory() is None
    assert bench.offloader.in_flight == 0
    bench.fetch(saved)
    stats = bench.offloader.stats
    assert (stats.offloaded, stats.read, stats.forwarded, stats.held) == (SIZE, SIZE, 0, 0)
    bench.drop(saved)
    bench.assert_idle()


def test_what_is_being_written_is_forwarded_from_memory(bench: Bench, drive: Drive) -> None:
    drive.writes.hold()
    saved = bench.save()
    drive.writes.wait_started()
    assert state_of(saved.record) == "writing"
    assert bench.fetch(saved) is saved.memory()
    stats = bench.offloader.stats
    assert (stats.forwarded, stats.read, stats.held) == (SIZE, 0, 0)
    drive.writes.release()
    bench.drop(saved)
    bench.assert_idle()


def test_a_queued_write_is_taken_back_when_its_bytes_are_forwarded(bench: Bench, drive: Drive) -> None:
    drive.writes.hold()
    running = bench.save()
    drive.writes.wait_started()
    queued = bench.save()
    bench.fetch(queued)
    drive.writes.release()
    bench.offloader.quiesce()
    assert drive.writes.started == 1
    bench.drop(running, queued)
    bench.assert_idle()


def test_what_somebody_else_keeps_alive_is_forwarded_and_reported(bench: Bench) -> None:
    saved = bench.save(owned=True)
    bench.offloader.quiesce()
    assert bench.fetch(saved) is saved.owner
    assert saved.record.held
    assert bench.offloader.stats.held == SIZE


# Ranges


def test_a_later_view_writes_only_what_is_missing(bench: Bench) -> None:
    saved = bench.save((0, 6000), (2000, 10_000), (3000, 4000))
    bench.offloader.quiesce()
    assert bench.offloader.stats.offloaded == 10_000
    for index in range(3):
        bench.fetch(saved, index)
    assert bench.offloader.stats.read == 10_000
    bench.drop(saved)
    bench.assert_idle()


def test_views_share_one_restored_storage(bench: Bench) -> None:
    saved = bench.save((0, SIZE), (100, 200))
    bench.offloader.quiesce()
    assert bench.fetch(saved, 0) is bench.fetch(saved, 1)
    assert bench.offloader.stats.read == SIZE


# Restored bytes are held while they are needed, and no longer


def test_restored_bytes_are_held_until_every_handle_was_unpacked(bench: Bench) -> None:
    saved = bench.save((0, SIZE), (0, SIZE))
    bench.offloader.quiesce()
    restored = weakref.ref(bench.fetch(saved, 0))
    assert restored() is not None
    bench.fetch(saved, 1)
    assert restored() is None
    assert bench.offloader.stats.read == SIZE


def test_a_dropped_handle_is_not_waited_for(bench: Bench) -> None:
    saved = bench.save((0, SIZE), (0, SIZE))
    bench.offloader.quiesce()
    restored = weakref.ref(bench.fetch(saved, 0))
    del saved.handles[1]
    bench.offloader.drain()
    assert restored() is None


# What is held back


def test_what_was_saved_last_is_not_written_while_the_window_has_room(make: Callable[..., Bench]) -> None:
    bench = make(16 * SIZE)
    bench.eager = False
    saved = [bench.save() for _ in range(7)]
    bench.offloader.writer.end_scope(at_once=False)
    assert bench.store.used_bytes == 0
    saved.append(bench.save())
    wait_until(lambda: bench.offloader.stats.offloaded == 4 * SIZE, "the older half is not written")
    assert [state_of(one.record) for one in saved] == ["stored"] * 4 + ["writing"] * 4
    for one in reversed(saved):
        bench.fetch(one)
    stats = bench.offloader.stats
    assert (stats.offloaded, stats.read, stats.forwarded) == (4 * SIZE, 4 * SIZE, 4 * SIZE)
    bench.drop(*saved)
    bench.assert_idle()


def test_what_is_held_back_makes_room_at_the_ceiling(make: Callable[..., Bench], drive: Drive) -> None:
    bench = make(4 * SIZE)
    bench.eager = False
    drive.writes.seconds = 0.002
    saved = [bench.save() for _ in range(4)]
    large = bench.save(nbytes=4 * SIZE)
    assert bench.offloader.stats.in_flight_peak <= 4 * SIZE
    for one in (large, *reversed(saved)):
        bench.fetch(one)
    bench.drop(large, *saved)
    bench.assert_idle()


def test_what_is_dropped_while_it_is_held_back_is_never_written(make: Callable[..., Bench]) -> None:
    bench = make(16 * SIZE)
    bench.eager = False
    for _ in range(3):  # more in all than may be held back
        saved = [bench.save() for _ in range(4)]
        bench.drop(*saved)
        assert all(one.memory() is None for one in saved)
    bench.offloader.quiesce()
    assert bench.offloader.stats.offloaded == 0
    bench.assert_idle()


# The ceiling


def test_the_ceiling_is_never_exceeded_while_writes_can_be_waited_for(
    make: Callable[..., Bench], drive: Drive
) -> None:
    bench = make(3 * SIZE)
    drive.writes.seconds = 0.005
    saved = [bench.save() for _ in range(12)]
    assert bench.offloader.stats.in_flight_peak <= 3 * SIZE
    for one in reversed(saved):
        bench.fetch(one)
    bench.drop(*saved)
    bench.assert_idle()


def test_at_the_ceiling_pack_waits_for_a_running_write(make: Callable[..., Bench], drive: Drive) -> None:
    bench = make(SIZE)
    drive.writes.hold()
    first = bench.save()
    admitted = threading.Event()
    with noticing_waits() as waits:
        thread = in_thread(lambda: (bench.offloader.writer.admit(SIZE), admitted.set()))
        assert waits.wait(PATIENCE)
    assert not admitted.wait(0.05)
    drive.writes.release()
    finish(thread)
    assert admitted.is_set()
    assert bench.offloader.stats.stall_seconds > 0.04
    bench.drop(first)


def test_nothing_is_waited_for_that_only_the_waiting_thread_can_release(
    make: Callable[..., Bench], drive: Drive
) -> None:
    """What was forwarded stays in flight until backward has used it: no I/O will ever free it."""
    bench = make(2 * SIZE)
    drive.writes.hold()
    running = bench.save(nbytes=SIZE // 2)
    drive.writes.wait_started()
    queued = bench.save()
    bench.prefetch(queued.record)  # takes the write back
    drive.writes.release()
    bench.offloader.quiesce()
    assert bench.offloader.in_flight == SIZE
    more = [bench.save() for _ in range(3)]
    bench.fetch(queued)
    bench.drop(running, queued, *more)
    bench.assert_idle()


def test_what_is_larger_than_the_ceiling_is_admitted_alone(make: Callable[..., Bench], drive: Drive) -> None:
    bench = make(SIZE)
    drive.writes.seconds = 0.01
    small = bench.save()
    large = bench.save(nbytes=3 * SIZE)
    assert bench.offloader.stats.in_flight_peak == 3 * SIZE
    bench.fetch(large)
    bench.fetch(small)
    bench.drop(small, large)
    bench.assert_idle()


# Prefetch


def store_all(bench: Bench, count: int) -> list[Saved]:
    saved = [bench.save() for _ in range(count)]
    bench.offloader.quiesce()
    return saved


def wait_for_reads(*saved: Saved) -> None:
    """Also until the offloader knows of them, for which a store does not wait."""
    spans = [span for one in saved for span in one.record.spans]
    wait_until(lambda: all(span.arrived() for span in spans), "reads pending")


def test_the_prefetch_window_is_counted_in_bytes(make: Callable[..., Bench], drive: Drive) -> None:
    bench = make(3 * SIZE)
    saved = store_all(bench, 6)
    accepted = [bench.prefetch(one.record) for one in saved]
    assert accepted == [True] * 3 + [False] * 3
    assert bench.offloader.in_flight == 3 * SIZE
    drive.reads.wait_started(3)
    bench.fetch(saved[0])
    assert bench.offloader.in_flight == 2 * SIZE
    assert bench.prefetch(saved[3].record)
    for one in saved[1:]:
        bench.fetch(one)
    assert bench.offloader.stats.read == 6 * SIZE
    bench.drop(*saved)
    bench.assert_idle()


def test_in_a_forked_child_nothing_is_read_ahead(bench: Bench) -> None:
    """The lock may be held for ever there; backward comes to layers of which nothing travels all the same."""
    ahead = bench.offloader.ahead
    assert ahead.is_worth_a_start(begins=False)
    bench.offloader.become_inert()
    assert not any(ahead.is_worth_a_start(begins=begins) for begins in (False, True))


def test_what_was_read_ahead_and_not_used_is_given_up_with_the_step(make: Callable[..., Bench]) -> None:
    bench = make(8 * SIZE)
    unused, used = store_all(bench, 2)
    for one in (unused, used):
        assert bench.prefetch(one.record)
    bench.fetch(used)
    wait_for_reads(unused, used)
    bench.offloader.ahead.give_up()
    assert bench.offloader.in_flight == 0
    assert state_of(unused.record) == "stored"
    bench.fetch(unused)  # a later step may still ask for it
    bench.drop(unused, used)
    bench.assert_idle()


def test_a_prefetched_activation_is_read_once(bench: Bench, drive: Drive) -> None:
    (saved,) = store_all(bench, 1)
    assert bench.prefetch(saved.record)
    assert bench.prefetch(saved.record)
    bench.fetch(saved)
    assert bench.prefetch(saved.record)
    assert drive.reads.started == 1
    bench.drop(saved)
    bench.assert_idle()


def test_pack_gives_up_the_prefetch_that_is_needed_last(make: Callable[..., Bench]) -> None:
    bench = make(2 * SIZE)
    near, far = store_all(bench, 2)
    for one in (near, far):
        assert bench.prefetch(one.record)
    wait_for_reads(near, far)
    new = bench.save()
    assert bench.offloader.stats.given_up == SIZE
    assert state_of(near.record) == "resident"
    assert state_of(far.record) == "stored"
    for one in (new, near, far):
        bench.fetch(one)
    bench.drop(new, near, far)
    bench.assert_idle()


def test_what_backward_asks_for_bypasses_the_ceiling(make: Callable[..., Bench], drive: Drive) -> None:
    bench = make(SIZE)
    (stored,) = store_all(bench, 1)
    drive.writes.hold()
    packed = bench.save()
    drive.writes.wait_started(2)  # a write that has not started would be taken back
    bench.fetch(stored)
    assert not bench.prefetch(packed.record) or state_of(packed.record) == "writing"
    drive.writes.release()
    bench.drop(stored, packed)
    bench.assert_idle()


# The end of handles


def test_extents_come_back_when_nothing_was_ever_unpacked(bench: Bench) -> None:
    saved = store_all(bench, 4)
    bench.drop(*saved)
    bench.assert_idle()


def test_handles_that_end_in_the_collector_are_noticed(bench: Bench) -> None:
    (saved,) = store_all(bench, 1)
    cycle: list[object] = [saved.handles.pop()]
    cycle.append(cycle)
    del cycle
    gc.collect()
    bench.assert_idle()


def test_handles_that_end_before_the_write_has_started_take_it_back(bench: Bench, drive: Drive) -> None:
    drive.writes.hold()
    running = bench.save()
    drive.writes.wait_started()
    queued = bench.save()
    bench.drop(running, queued)
    drive.writes.release()
    bench.assert_idle()
    assert drive.writes.started == 1


def test_the_extent_of_a_running_read_comes_back_when_the_read_ends(bench: Bench, drive: Drive) -> None:
    (saved,) = store_all(bench, 1)
    drive.reads.hold()
    assert bench.prefetch(saved.record)
    drive.reads.wait_started()
    bench.drop(saved)
    assert bench.store.used_bytes > 0
    drive.reads.release()
    wait_until(lambda: bench.store.used_bytes == 0, "extent not released")
    bench.assert_idle()


def test_prefetches_of_a_failed_step_are_dropped(bench: Bench) -> None:
    saved = store_all(bench, 3)
    for one in saved:
        bench.prefetch(one.record)
    wait_for_reads(*saved)
    bench.offloader.abandon()
    assert bench.offloader.in_flight == 0
    assert all(state_of(one.record) == "stored" for one in saved)


# Storages that are about to be emptied


@pytest.mark.parametrize("stage", ["queued", "running", "stored"])
def test_a_protected_storage_is_emptied_and_filled_again(bench: Bench, drive: Drive, stage: str) -> None:
    if stage != "stored":
        drive.writes.hold()
    blocking = [bench.save()] if stage == "queued" else []
    drive.writes.wait_started(len(blocking))
    saved = bench.save(owned=True)
    assert saved.owner is not None
    if stage == "running":
        drive.writes.wait_started()
        threading.Timer(0.05, drive.writes.release).start()
    if stage == "stored":
        bench.offloader.quiesce()
    bench.offloader.protect(saved.owner, saved.record)
    assert bench.store.pending() == len(blocking)
    saved.owner.resize_(0)
    drive.writes.release()
    bench.offloader.quiesce()
    saved.owner.resize_(SIZE)
    torch.empty(0, dtype=torch.uint8).set_(saved.owner).copy_(saved.expected)
    bench.fetch(saved)
    bench.drop(saved, *blocking)
    bench.assert_idle()


# A full store


def test_a_full_store_keeps_in_memory_and_counts_it(make: Callable[..., Bench]) -> None:
    bench = make(capacity=2 * SIZE, keep=True)
    saved = [bench.save() for _ in range(3)]
    bench.offloader.quiesce()
    assert bench.offloader.stats.fallback_kept == SIZE
    assert saved[2].memory() is not None
    for one in saved:
        bench.fetch(one)
    bench.drop(*saved)
    bench.assert_idle()


def test_a_full_store_is_an_error_where_the_policy_says_so(make: Callable[..., Bench]) -> None:
    bench = make(capacity=SIZE, keep=False)
    first = bench.save()
    with pytest.raises(TransferError) as caught:
        bench.save()
    assert isinstance(caught.value.__cause__, StoreFullError)
    for part in ("layer 2 (layers.2)", f"{SIZE} bytes", "on_full: keep"):
        assert part in str(caught.value)
    del caught  # its traceback
    gc.collect()
    bench.drop(first)
    bench.assert_idle()


# Failures


FAILURES = {
    **{
        errno.errorcode[number]: StoreError(number, os.strerror(number), "/drive/f")
        for number in (errno.EIO, errno.EROFS, errno.ENODEV, errno.EAGAIN, errno.ENOMEM)
    },
    "short": ShortTransferError(errno.EIO, "write of 65536 bytes stopped after 4096", "/drive/f"),
    "nothing": ShortTransferError(errno.EIO, "write of 65536 bytes stopped after 0", "/drive/f"),
    "unknown": OSError("/drive/f: as the test wants it"),
    "memory": MemoryError("/drive/f: as the test wants it"),
}
"""What a write may fail with, besides a full drive."""


def test_a_fault_of_the_program_is_not_the_drives(make: Callable[..., Bench], drive: Drive) -> None:
    """It is raised, whatever is to be kept, and the drive goes on."""
    bench = make()
    drive.writes.fail(RuntimeError("a kernel went wrong"), at=1)
    saved = bench.save()
    with pytest.raises(TransferError, match="a kernel went wrong"):
        bench.offloader.quiesce()
    assert bench.store.take_loads()[0].in_service
    del saved


class Moment:
    """Time as a test has it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def on_clock(bench: Bench) -> Moment:
    """The drive of a bench rests by this clock."""
    clock = Moment()
    bench.store._condition.service = Service(clock)
    return clock


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES.keys())
def test_what_cannot_be_written_stays_in_memory(
    make: Callable[..., Bench], drive: Drive, failure: BaseException
) -> None:
    bench = make(2 * SIZE, keep=True)
    on_clock(bench)
    drive.writes.fail(failure, at=2)
    saved = [bench.save()]
    bench.offloader.quiesce()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        saved += [bench.save() for _ in range(5)]
        bench.offloader.quiesce()
    (warning,) = told
    for part in ("left alone: host memory: ", "/drive/f", "directories", "on_full: error", "stays in memory"):
        assert part in str(warning.message)
    stats = bench.offloader.stats
    assert (stats.fallback_kept, stats.full, drive.writes.started) == (5 * SIZE, False, 2)
    assert bench.offloader.in_flight == 0
    for one in saved:
        bench.fetch(one)
    bench.drop(*saved)
    bench.assert_idle()


@LEFT_ALONE
def test_a_drive_that_fails_is_tried_again_at_growing_intervals(bench: Bench, drive: Drive) -> None:
    clock = on_clock(bench)
    drive.writes.fail_with(lambda: StoreError(errno.EIO, "Input/output error", "/drive/f"))
    saved = bench.save()  # is not dropped, and so is written for certain
    bench.offloader.quiesce()
    assert drive.writes.started == 1
    tried = []
    for _ in range(4 * 40):
        clock.now += 0.25
        before = drive.writes.started
        held = bench.save()
        bench.offloader.quiesce()
        if drive.writes.started > before:
            tried.append(clock.now)
        bench.drop(held)
    assert tried == [1.0, 3.0, 7.0, 15.0, 31.0]
    drive.writes.recover()
    clock.now = 63.0
    trial = bench.save()
    bench.offloader.quiesce()
    kept, bench.offloader.stats.fallback_kept = bench.offloader.stats.fallback_kept, 0
    assert kept > 100 * SIZE
    later = [bench.save() for _ in range(3)]
    bench.offloader.quiesce()
    assert bench.offloader.stats.fallback_kept == 0  # it is back in service
    bench.drop(saved, trial, *later)
    bench.assert_idle()


@pytest.fixture
def growing(drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DrivenFileStore]:
    """A file that grows with every extent."""
    monkeypatch.setattr(run_file, "_GROWTH", 4096)
    with DrivenFileStore(drive, tmp_path, device=CPU) as store:
        yield store


def bench_over(store: DrivenFileStore, *, keep: bool = True) -> Bench:
    return Bench(store.drive, store, None, keep=keep, stall_limit=None)


def written_or_kept(bench: Bench, count: int) -> list[Saved]:
    """So many storages, of each of which it is known whether it is stored."""
    saved = [bench.save() for _ in range(count)]
    bench.offloader.quiesce()
    return saved


def test_a_write_that_hangs_leaves_its_drive_alone_and_its_bytes_in_memory(
    growing: DrivenFileStore,
) -> None:
    bench = Bench(growing.drive, growing, 4 * SIZE, keep=True, stall_limit=None)
    growing.drive.writes.hold()
    hanging = [bench.save() for _ in range(4)]
    growing.drive.writes.wait_started()
    growing.limit_waits(0.1)
    with (
        impatient(bench),
        pytest.warns(RuntimeWarning, match="nothing has moved for"),
        pytest.raises(TransferError, match=r"nothing has moved for 0\.2 s: .* first layer 1 "),
    ):
        bench.save()
    assert bench.offloader.in_flight == 0
    started = growing.drive.writes.started
    with pytest.warns(RuntimeWarning, match=r"left alone.*no answer within"):
        saved = written_or_kept(bench, 20)
    for one in (*hanging, *saved):
        bench.fetch(one)
    bench.drop(*hanging, *saved)
    assert growing.drive.writes.started == started
    growing.drive.writes.release()
    wait_until(lambda: growing.pending() == 0, "the writes do not end")
    growing.limit_waits(PATIENCE)
    growing.resume()
    later = bench.save()
    bench.offloader.quiesce()
    assert later.memory() is None
    bench.drop(later)
    bench.assert_idle()


def test_a_drive_that_still_hangs_is_not_tried_again(growing: DrivenFileStore) -> None:
    bench = bench_over(growing)
    clock = on_clock(bench)
    growing.drive.writes.hold()
    hanging = bench.save()
    growing.drive.writes.wait_started()
    growing.limit_waits(0.1)
    with (
        impatient(bench),
        pytest.warns(RuntimeWarning, match="nothing has moved for"),
        pytest.raises(TransferError, match="nothing has moved for"),
    ):
        bench.offloader.quiesce()
    clock.now = 1000.0
    with pytest.warns(RuntimeWarning, match="left alone"):
        (kept,) = written_or_kept(bench, 1)
    assert kept.memory() is not None
    growing.drive.writes.release()
    wait_until(lambda: growing.pending() == 0, "the write does not end")
    growing.limit_waits(PATIENCE)
    trial = bench.save()
    bench.offloader.quiesce()
    assert trial.memory() is None
    bench.drop(hanging, kept, trial)
    bench.assert_idle()


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES.keys())
def test_a_failed_write_is_raised_once_on_the_training_thread(
    make: Callable[..., Bench], drive: Drive, failure: BaseException
) -> None:
    bench = make(keep=False)
    drive.writes.fail(failure, at=2)
    first, second = bench.save(), bench.save()
    wait_until(lambda: bench.store.pending() == 0, "writes pending")
    with pytest.raises(TransferError) as caught:
        bench.offloader.quiesce()
    cause = caught.value.__cause__
    assert cause is failure or (cause is not None and cause.__cause__ is failure)
    for part in (
        "could not write",
        "layer 2 (layers.2), micro-batch 0",
        "/drive/f",
        "directories",
        "on_full",
    ):
        assert part in str(caught.value)
    bench.offloader.raise_failures()
    bench.fetch(second)  # its memory was kept
    third = bench.save()  # where a drive's failure is an error, the drive is asked each time
    bench.offloader.quiesce()
    assert third.memory() is None
    bench.drop(first, second, third)
    bench.assert_idle()


@LEFT_ALONE
@pytest.mark.parametrize("ahead", [True, False], ids=["prefetched", "on demand"])
def test_a_failed_read_is_raised_where_the_bytes_are_needed(bench: Bench, drive: Drive, ahead: bool) -> None:
    (saved,) = store_all(bench, 1)
    failure = ShortTransferError(errno.EIO, "read of 65536 bytes stopped after 4096", "/drive/f")
    drive.reads.fail(failure)
    if ahead:
        assert bench.prefetch(saved.record)
        wait_until(lambda: bench.store.pending() == 0, "reads pending")
    bench.offloader.raise_failures()
    for _ in range(2):  # garbage is not handed out at the second attempt either
        with pytest.raises(TransferError) as caught:
            bench.fetch(saved)
        assert repr(caught.value.__cause__) == repr(failure)
        for part in ("could not read", "layer 1 (layers.1)", "/drive/f", "check the drive"):
            assert part in str(caught.value)
    bench.drop(saved)
    del caught
    bench.assert_idle()


PASSING = {
    "EIO": lambda: StoreError(errno.EIO, "Input/output error", "/drive/f"),
    "EAGAIN": lambda: StoreError(errno.EAGAIN, "Resource temporarily unavailable", "/drive/f"),
    "ENOMEM": lambda: StoreError(errno.ENOMEM, "Cannot allocate memory", "/drive/f"),
    "short": lambda: ShortTransferError(errno.EIO, "read of 65536 bytes stopped after 4096", "/drive/f"),
    "checksum": lambda: ChecksumError(errno.EIO, "reads back with another checksum", "/drive/f"),
}
LASTING = {
    "ENODEV": lambda: StoreError(errno.ENODEV, "No such device", "/drive/f"),
    "EBADF": lambda: StoreError(errno.EBADF, "Bad file descriptor", "/drive/f"),
    "unknown": lambda: RuntimeError("/drive/f: as the test wants it"),
}


def failing(make_error: Callable[[], BaseException], times: int, drive: Drive) -> None:
    """Fails so many reads from now on."""
    left = iter([make_error] * times)
    drive.reads.fail_with(lambda: (next(left, None) or (lambda: None))())  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("ahead", [True, False], ids=["prefetched", "on demand"])
@pytest.mark.parametrize("make_error", PASSING.values(), ids=PASSING.keys())
def test_a_read_that_fails_once_is_made_again(
    make: Callable[..., Bench], drive: Drive, make_error: Callable[[], BaseException], ahead: bool
) -> None:
    bench = make(4 * SIZE)
    saved, other = bench.save((0, 5000), (5000, SIZE)), bench.save()
    bench.offloader.quiesce()
    failing(make_error, 1, drive)
    if ahead:
        assert bench.prefetch(saved.record)
    bench.fetch(saved)
    bench.fetch(saved, 1)
    bench.fetch(other)
    assert bench.offloader.stats.reread > 0
    bench.drop(saved, other)
    bench.assert_idle()


@LEFT_ALONE
@pytest.mark.parametrize(
    ("make_error", "attempts"),
    [
        *((make_error, 4) for name, make_error in PASSING.items() if name != "checksum"),
        (PASSING["checksum"], 2),
        *((make_error, 1) for make_error in LASTING.values()),
    ],
    ids=[*(name for name in PASSING if name != "checksum"), "checksum", *LASTING],
)
def test_a_read_is_made_again_a_few_times_only(
    make: Callable[..., Bench], drive: Drive, make_error: Callable[[], BaseException], attempts: int
) -> None:
    bench = make(4 * SIZE)
    (saved,) = store_all(bench, 1)
    drive.reads.fail_with(make_error)
    with (
        mock.patch("tba_offload.transfer.reader.READ_AGAIN", (0.0, 0.0, 0.0)),
        pytest.raises(TransferError) as caught,
    ):
        bench.fetch(saved)
    for part in (
        "could not read 65536 bytes of layer 1 (layers.1), micro-batch 0",
        "from host memory, offset 0",
    ):
        assert part in str(caught.value)
    assert "/drive/f" in str(caught.value)
    assert drive.reads.started == attempts
    assert bench.offloader.in_flight == 0
    del caught
    bench.drop(saved)
    bench.assert_idle()


# A drive that stops


def impatient(bench: Bench) -> Any:
    """Only where it shall: a busy machine may well do nothing for that long."""
    return mock.patch.object(bench.offloader.watchdog, "limit", 0.2)


@LEFT_ALONE
def test_a_wait_for_a_stuck_write_is_named_and_then_an_error(
    make: Callable[..., Bench], drive: Drive
) -> None:
    bench = make(SIZE)
    drive.writes.hold()
    saved = bench.save()
    drive.writes.wait_started()
    named = r"nothing has moved for 0\.02 s: 65536 bytes wait to be written, first layer 1 .*, at host memory"
    with (
        impatient(bench),
        pytest.warns(RuntimeWarning, match=named),
        pytest.raises(TransferError, match=r"nothing has moved for 0\.2 s: .*store\.stall_seconds"),
    ):
        bench.offloader.writer.admit(SIZE)
    drive.writes.release()
    bench.fetch(saved)
    bench.drop(saved)
    bench.assert_idle()


@pytest.mark.filterwarnings("ignore:a drive failed:RuntimeWarning")
def test_a_wait_for_a_stuck_read_is_named_and_then_an_error(make: Callable[..., Bench], drive: Drive) -> None:
    bench = make()
    (saved,) = store_all(bench, 1)
    drive.reads.hold()
    with (
        impatient(bench),
        pytest.warns(RuntimeWarning, match="65536 bytes wait to be read, first layer 1 "),
        pytest.raises(TransferError, match="check the drive"),
    ):
        bench.fetch(saved)
    drive.reads.release()
    bench.fetch(saved)
    bench.drop(saved)
    bench.assert_idle()


def test_a_slow_drive_that_moves_is_waited_for(make: Callable[..., Bench], drive: Drive) -> None:
    """The limit counts from the last transfer that ended, not from the beginning of the wait."""
    bench = make(8 * SIZE, stall_limit=20.0)
    drive.writes.bytes_per_second = SIZE / 0.4
    drive.writes.hold()
    saved = [bench.save() for _ in range(8)]
    drive.writes.release()
    bench.offloader.writer.admit(8 * SIZE)  # longer than the two seconds after which a standstill is named
    assert bench.offloader.stats.stall_seconds > 2.0
    bench.drop(*saved)
    bench.assert_idle()


# Anything, in any order


@pytest.mark.parametrize("extent", [None, SIZE // 5])
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_events_gives_the_same_bytes(
    make: Callable[..., Bench], drive: Drive, seed: int, extent: int | None
) -> None:
    chance = random.Random(seed)
    bench = make(4 * SIZE, capacity=MIB if seed % 2 else None, extent=extent)
    drive.writes.seconds = drive.reads.seconds = 0.0005
    alive: list[Saved] = []

    def save() -> None:
        cuts = sorted(chance.sample(range(SIZE), 4))
        ranges = [(cuts[0], cuts[2]), (cuts[1], cuts[3])][: chance.randint(1, 2)]
        alive.append(bench.save(*ranges))

    def fetch() -> None:
        saved = chance.choice(alive)
        bench.fetch(saved, chance.randrange(len(saved.handles)))

    def prefetch() -> None:
        for saved in reversed(alive):
            if not bench.prefetch(saved.record):
                break

    def drop() -> None:
        bench.drop(alive.pop(chance.randrange(len(alive))))

    for _ in range(250):
        work = chance.choice([save, save, fetch, fetch, prefetch, drop]) if alive else save
        work()
    for saved in reversed(alive):
        for index in range(len(saved.handles)):
            bench.fetch(saved, index)
    bench.drop(*alive)
    bench.assert_idle()
