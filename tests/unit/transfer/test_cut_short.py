"""Transfers are being queued when an interrupt comes: none is lost, and no extent goes back that one uses.

Ctrl-C waits until the ledgers are in order. Handlers of other signals, and debuggers, raise between any two
operations: at the points at which Python handles signals.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from around import put_around
from covering import of_which
from harness import CPU, KIB, MIB, Drive, DrivenHostStore, wait_until
from interrupts import Aim

from tba_offload.device import ByteRange
from tba_offload.store.file import FileStore
from tba_offload.store.host import HostStore
from tba_offload.store.striped import StripedStore
from tba_offload.store.tiered import TieredStore
from tba_offload.transfer.offloader import Offloader
from tba_offload.transfer.reads import Reads
from tba_offload.transfer.storage import Handle, Record
from tba_offload.transfer.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tba_offload.store.base import ActivationStore, Extent, IoFuture, ReadOrder, WriteOrder
    from tba_offload.store.engine import QueuedStore

SIZE = 16 * KIB
QUEUING = (Writer.flush.__code__, Reads.start.__code__)
TAKES = 0.0003
"""Seconds of a transfer: what was queued a moment ago still runs."""


@contextmanager
def slowly(verb: str, extent: Extent) -> Iterator[None]:
    time.sleep(TAKES)
    yield


def slow(store: QueuedStore) -> QueuedStore:
    put_around(store, slowly)
    return store


def host(drive: int = 0) -> QueuedStore:
    return slow(HostStore(8 * MIB, device=CPU, drive=drive, slab_bytes=MIB))


STORES: dict[str, Callable[[Path], ActivationStore]] = {
    "host": lambda _: host(),
    "file": lambda path: slow(FileStore(path, device=CPU, writers=1, readers=1)),
    "striped": lambda _: StripedStore([host(), host(1)]),
    "tiered": lambda _: TieredStore(StripedStore([host(), host(1)]), host(2), spill_bytes=SIZE),
}


@dataclass
class Saved:
    """What is left of a storage that was saved."""

    record: Record
    handles: list[Handle]
    expected: torch.Tensor


def save(offloader: Offloader, seed: int, *ranges: tuple[int, int]) -> Saved:
    """Packs views of a new storage."""
    data = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    record = Record(data.untyped_storage(), key=f"layer {seed}")
    saved = Saved(record, [], data.clone())
    for lo, hi in ranges or [(0, SIZE)]:
        saved.handles.append(Handle(record, lo, hi, offloader.drops))
        offloader.writer.save(record, data.untyped_storage(), lo, hi)
        if ranges:
            offloader.writer.flush()  # what a later view needs beyond it is a piece of its own
    return saved


def step(offloader: Offloader) -> None:
    """Saves, writes, reads ahead and compares; some come back from one piece, one from two."""
    some = [save(offloader, 0, (0, 9000), (5000, SIZE)), *(save(offloader, seed) for seed in (1, 2))]
    offloader.quiesce()
    offloader.ahead.start((saved.record, False) for saved in some)
    for saved in some:
        for handle in saved.handles:
            storage, shift = offloader.reader.fetch(handle)
            found = ByteRange(storage, handle.lo + shift, handle.hi - handle.lo).tensor()
            assert torch.equal(found, saved.expected[handle.lo : handle.hi])


def interrupt() -> None:
    raise KeyboardInterrupt


def cut_short(offloader: Offloader, at: int) -> str | None:
    """A step that is interrupted, and where; not by ``pytest.raises``, which would keep what it held.

    ``None`` if it had fewer points.
    """
    aim = Aim(at, within=QUEUING, strike=interrupt)
    try:
        with aim:
            step(offloader)
    except KeyboardInterrupt:
        return aim.struck
    assert aim.struck is None, f"swallowed: {aim.struck}"
    return None


@pytest.mark.parametrize("kind", of_which(STORES, "tiered"))
def test_an_interrupt_while_transfers_are_queued_loses_nothing(kind: str, tmp_path: Path) -> None:
    with STORES[kind](tmp_path) as store:
        offloader = Offloader(store, CPU)
        step(offloader)
        with Aim(within=QUEUING) as aim:
            step(offloader)
        assert aim.count > 100
        for at in range(1, aim.count + 1):
            struck = cut_short(offloader, at)
            offloader.abandon()
            assert_idle(offloader, struck)
            step(offloader)
            assert_idle(offloader, struck)


def assert_idle(offloader: Offloader, struck: str | None) -> None:
    offloader.quiesce()
    wait_until(lambda: offloader.store.pending() == 0, f"transfers are pending after {struck}")
    offloader.drain()
    assert offloader.store.leased() == [], struck
    assert (offloader.own_bytes, offloader.ledger.departing, offloader.ledger.ahead) == (0, 0, {}), struck


class Interrupted(DrivenHostStore):
    """Its writes are interrupted when they run; as it has to, it calls back when they have ended."""

    def write_many(self, orders: Sequence[WriteOrder]) -> list[IoFuture]:
        super().write_many(orders)
        self.drive.writes.wait_started()
        raise KeyboardInterrupt


def test_what_a_store_still_writes_when_it_was_interrupted_does_no_harm() -> None:
    drive = Drive()
    drive.writes.hold()
    with Interrupted(drive, device=CPU, slab_bytes=MIB) as store:
        offloader = Offloader(store, CPU)
        saved = save(offloader, 0)
        with pytest.raises(KeyboardInterrupt):
            offloader.writer.flush()
        offloader.abandon()
        assert len(store.leased()) == 1
        drive.writes.release()
        wait_until(lambda: store.pending() == 0, "the write does not end")
        assert saved.record.writes == 0
        storage, _ = offloader.reader.fetch(saved.handles[0])
        assert torch.equal(ByteRange(storage, 0, SIZE).tensor(), saved.expected)
        del storage, saved
        offloader.abandon()
        assert_idle(offloader, "a write")


class Short(DrivenHostStore):
    """Has no memory for reads of several pieces."""

    is_short = True
    waits = False

    def read_many(self, orders: Sequence[ReadOrder], *, padded: bool) -> list[IoFuture]:
        if self.is_short and not padded:
            if self.waits:
                self.drive.reads.wait_started()
            raise torch.OutOfMemoryError
        return super().read_many(orders, padded=padded)


def written(offloader: Offloader) -> list[Saved]:
    """One that comes back from one piece, and one from two."""
    saved = [save(offloader, 0), save(offloader, 1, (0, 9000), (5000, SIZE))]
    offloader.quiesce()
    return saved


def test_what_was_taken_back_does_not_count_as_read() -> None:
    with Short(Drive(), device=CPU, slab_bytes=MIB) as store:
        offloader = Offloader(store, CPU)
        saved = written(offloader)
        offloader.ahead.start((each.record, False) for each in saved)
        assert offloader.stats.read == 0
        store.is_short = False
        for each in saved:
            offloader.reader.fetch(each.handles[0])
        assert offloader.stats.read == 2 * SIZE


def test_a_read_that_hangs_while_it_is_taken_back_keeps_its_buffer_and_its_extent() -> None:
    drive = Drive()
    with Short(drive, device=CPU, slab_bytes=MIB) as store:
        offloader = Offloader(store, CPU, stall_limit=0.05)
        saved = written(offloader)
        drive.reads.hold()
        store.waits = True  # until the other one runs
        offloader.ahead.start((each.record, False) for each in saved)
        assert drive.reads.started == 1
        del saved
        offloader.drain()
        assert len(store.leased()) == 1
        drive.reads.release()
        wait_until(lambda: store.leased() == [], "the extent does not come back")
        assert_idle(offloader, "a read")
