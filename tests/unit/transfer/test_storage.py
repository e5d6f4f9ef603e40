"""Ranges, states and handles of one offloaded storage."""

from __future__ import annotations

import gc
import sys
import threading
from itertools import pairwise

import torch
from harness import state_of
from hypothesis import given
from hypothesis import strategies as st

from tba_offload.device.ranges import ByteRange
from tba_offload.plan.window import Window
from tba_offload.store.base import IoFuture
from tba_offload.transfer.ledger import Ledger
from tba_offload.transfer.storage import Drops, Handle, Piece, Record, forget, handed_over

SIZE = 1000

ranges = st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE)).map(
    lambda pair: (pair[0], min(pair[0] + pair[1], SIZE))
)


def make_record(nbytes: int = SIZE) -> tuple[Record, torch.Tensor]:
    """A record, and the tensor that keeps its storage alive."""
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    return Record(tensor.untyped_storage(), key="layer 3"), tensor


def save(record: Record, lo: int, hi: int) -> list[Piece]:
    """Has a range written that some view needs; returns what no earlier one covers."""
    storage = record.memory()
    assert storage is not None
    return record.save(storage, lo, hi, None)


def covered(pieces: list[Piece]) -> set[int]:
    return {byte for piece in pieces for byte in range(piece.lo, piece.hi)}


def assert_spans_are_whole(record: Record) -> None:
    """Each span is a run of pieces without gap or overlap, and no two spans overlap."""
    for span in record.spans:
        assert span.lo == span.pieces[0].lo
        assert span.hi == span.pieces[-1].hi
        assert all(left.hi == right.lo for left, right in pairwise(span.pieces))
    spans = sorted(record.spans, key=lambda span: span.lo)
    assert all(left.hi <= right.lo for left, right in pairwise(spans))


# Ranges


@given(st.lists(ranges, min_size=1, max_size=8))
def test_a_claim_writes_only_what_no_earlier_one_covers(wanted: list[tuple[int, int]]) -> None:
    record, _tensor = make_record()
    written: list[Piece] = []
    for lo, hi in wanted:
        before, missing = covered(written), save(record, lo, hi)
        assert covered(missing) == set(range(lo, hi)) - before
        written += missing
        span = record.span_over(lo, hi)
        assert span is not None
        assert span.lo <= lo < hi <= span.hi
        assert_spans_are_whole(record)
    assert set(record.pieces()) == set(written)


@given(st.lists(ranges, min_size=1, max_size=8))
def test_a_started_write_is_never_extended(wanted: list[tuple[int, int]]) -> None:
    record, _tensor = make_record()
    started: dict[Piece, tuple[int, int]] = {}
    for lo, hi in wanted:
        started |= {piece: (piece.lo, piece.hi) for piece in save(record, lo, hi)}
        assert all((piece.lo, piece.hi) == was for piece, was in started.items())


@given(st.lists(ranges, min_size=1, max_size=8), st.data())
def test_what_was_never_written_is_forgotten(wanted: list[tuple[int, int]], data: st.DataObject) -> None:
    record, _tensor = make_record()
    written = [piece for lo, hi in wanted for piece in save(record, lo, hi)]
    gone = set(data.draw(st.lists(st.sampled_from(written), unique=True)))
    record.lose(gone)
    assert set(record.pieces()) == set(written) - gone
    assert_spans_are_whole(record)
    for piece in gone:
        assert record.span_over(piece.lo, piece.hi) is None
    for piece in set(written) - gone:
        assert record.span_over(piece.lo, piece.hi) is not None


def test_overlapping_ranges_are_restored_into_one_buffer_and_distant_ones_are_not() -> None:
    record, _tensor = make_record()
    save(record, 0, 100)
    save(record, 200, 300)
    assert len(record.spans) == 2
    assert [(piece.lo, piece.hi) for piece in save(record, 50, 250)] == [(100, 200)]
    assert [(span.lo, span.hi) for span in record.spans] == [(0, 300)]


def test_a_covered_range_costs_nothing() -> None:
    record, _tensor = make_record()
    save(record, 0, 100)
    assert save(record, 20, 80) == []
    assert save(record, 0, 100) == []


# States


def restore(record: Record, read: IoFuture) -> torch.UntypedStorage:
    """Has a read fill a new buffer."""
    (span,) = record.spans
    buffer = torch.UntypedStorage(SIZE)
    span.restores_into(ByteRange(buffer, 0, SIZE), [read], None)
    return buffer


def test_the_states_follow_the_bytes() -> None:
    record, tensor = make_record()
    record.defer(tensor.untyped_storage())
    assert state_of(record) == "resident"
    (piece,) = save(record, 0, SIZE)
    record.decide()
    handed_over([piece], [IoFuture()])
    assert state_of(record) == "writing"
    record.written(piece)
    record.free()
    del tensor
    assert state_of(record) == "stored"
    read = IoFuture()
    restore(record, read)
    assert state_of(record) == "reading"
    read.finish()
    assert state_of(record) == "resident"
    record.spans[0].forget()
    assert state_of(record) == "stored"


def test_what_every_handle_has_read_lives_as_long_as_something_else_holds_it() -> None:
    record, _tensor = make_record()
    save(record, 0, SIZE)
    (span,) = record.spans
    buffer = torch.UntypedStorage(SIZE)
    span.restores_into(ByteRange(buffer, 0, SIZE), [], None)
    record.all_read()
    assert span.buffer is None
    assert span.restored() is buffer
    assert record.unrestored() == []
    del buffer
    assert span.restored() is None
    assert record.unrestored() == [span]


def test_what_is_in_flight_is_charged_until_it_is_written_or_kept() -> None:
    ledger, (record, _tensor) = Ledger(Window()), make_record()

    def sums() -> tuple[int, int, int]:
        ledger.note(record)
        return ledger.in_flight, ledger.departing, ledger.settled

    assert sums() == (0, 0, 0)
    save(record, 0, 100)
    assert sums() == (SIZE, SIZE, 0)
    assert record.keep()
    assert not record.keep()
    assert sums() == (0, 0, SIZE)
    assert save(record, 100, SIZE) == []  # its memory stays anyway
    assert record.release() == []  # a write still reads it
    assert sums() == (0, 0, 0)


def test_what_is_not_decided_is_in_flight_and_not_departing() -> None:
    ledger, (record, tensor) = Ledger(Window()), make_record()
    record.defer(tensor.untyped_storage())
    save(record, 0, 100)
    ledger.note(record)
    assert (ledger.in_flight, ledger.departing) == (SIZE, 0)
    record.decide()
    ledger.recount([record])
    assert (ledger.in_flight, ledger.departing) == (SIZE, SIZE)


def test_what_backward_has_read_is_held_until_every_handle_was_unpacked() -> None:
    record, tensor = make_record()
    drops = Drops(threading.Lock())
    first, second = Handle(record, 0, 10, drops), Handle(record, 10, SIZE, drops)
    (piece,) = save(record, 0, SIZE)
    record.written(piece)
    record.free()
    del tensor
    (span,) = record.spans
    assert record.hand_out(first) == (None, 0, span)
    read = IoFuture()
    buffer = restore(record, read)
    assert record.hand_out(first) == (None, 0, span)
    read.finish()
    assert record.hand_out(first) == (buffer, 0, span)
    assert span.buffer is buffer
    assert record.hand_out(second) == (buffer, 0, span)
    assert span.buffer is None
    assert record.hand_out(second) == (buffer, 0, span)  # once more, as long as something else holds it
    del buffer
    assert record.hand_out(second) == (None, 0, span)


# Memory and versions


def test_the_memory_is_found_as_long_as_anybody_keeps_it() -> None:
    record, tensor = make_record()
    assert record.memory() is tensor.untyped_storage()
    del tensor
    assert record.memory() is None


def test_an_emptied_storage_is_no_memory() -> None:
    record, tensor = make_record()
    tensor.untyped_storage().resize_(0)
    assert record.memory() is None
    tensor.untyped_storage().resize_(SIZE)
    assert record.memory() is tensor.untyped_storage()


# Handles


def test_a_dropped_handle_says_so_and_whether_it_was_read() -> None:
    record, _tensor = make_record()
    drops = Drops(threading.Lock())
    first, second = Handle(record, 0, 10, drops), Handle(record, 10, 20, drops)
    assert (record.handles, record.unread) == (2, 2)
    assert record.hand_out(second) is not None
    assert (second.drop.read, record.unread) == (True, 1)
    del first
    (drop,) = drops.queue
    assert (drop.record, drop.read) == (record, False)
    for _ in range(2):  # an interrupt may have it done again
        assert forget(drops, 1) == [record]  # every handle that is left was read
        assert (record.handles, record.unread) == (1, 0)
    del second
    assert (drops.queue[1].record, drops.queue[1].read) == (record, True)
    assert forget(drops, 2) == [record]
    assert (record.handles, record.unread, drops.awaited) == (0, 0, set())


def test_no_python_code_runs_when_a_handle_ends() -> None:
    """An interrupt in a finalizer would be printed and forgotten, and the drop with it."""
    record, _tensor = make_record()
    drops = Drops(threading.Lock())
    handle = Handle(record, 0, 10, drops)
    seen: list[str] = []
    sys.setprofile(lambda frame, event, _: seen.append(f"{event} {frame.f_code.co_name}"))
    try:
        del handle
    finally:
        sys.setprofile(None)
    assert len(drops.queue) == 1
    assert [event for event in seen if event.startswith("call ")] == []


def test_the_finalizer_of_a_handle_takes_no_lock() -> None:
    """The cyclic collector may run it while this very thread holds any lock, also the queue's."""
    record, _tensor = make_record()
    drops = Drops(threading.Lock())
    cycle: list[object] = [Handle(record, 0, 10, drops) for _ in range(100)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert len(drops.queue) == 100
