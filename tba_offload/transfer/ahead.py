"""Reading ahead: what backward is going to use is read while the window has room for it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from tba_offload.transfer.storage import State

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tba_offload.transfer.reads import Reads
    from tba_offload.transfer.shared import Shared
    from tba_offload.transfer.storage import Record, Span
    from tba_offload.transfer.writer import Writer


class ReadAhead:
    """Reads records before they are asked for, in batches.

    Args:
        shared: The records.
        reads: Starts the reads.
        writer: Writes what must go to make room.

    Attributes:
        ledger: What is in memory, and what was read ahead in vain.
    """

    def __init__(self, shared: Shared, reads: Reads, writer: Writer) -> None:
        self._shared = shared
        self.ledger = shared.ledger
        self._reads = reads
        self._writer = writer
        self._memory = math.inf  # bytes in flight that the device turned out to have memory for in this step

    def is_worth_a_start(self, *, begins: bool) -> bool:
        """Whether to look at what backward is going to use: the window has room, and this is no forked child.

        Args:
            begins: Backward has only begun: what is still in memory is looked at, however full the window is.
        """
        ledger = self.ledger
        return (begins or ledger.in_flight <= ledger.fills_below) and not self._shared.inert

    def start(self, upcoming: Iterable[tuple[Record, bool]]) -> None:
        """Start reading what backward is going to use, until the window is full.

        A record that is still in memory is about to be used there: writes of it that have not started
        are taken back, and where one has, the memory stays all the same.

        Args:
            upcoming: What backward is going to use, in that order, each with whether a forward pass comes
                before that, which will need most of the window: only a part of it may be filled then, and
                writes go on. What is taken last has found no room.

        Raises:
            TransferError: To make room, something was written that the store had no room for.
        """
        shared = self._shared
        batch: list[Span] = []
        with shared.lock:
            try:
                needs_room = self._choose(upcoming, batch)
                self._start_ahead(batch)
            except BaseException:
                for span in batch:
                    self.ledger.uncharge(span)
                raise
        if needs_room:
            self._writer.flush()  # it is needed later than this record, or it would have been taken out

    def _choose(self, upcoming: Iterable[tuple[Record, bool]], batch: list[Span]) -> bool:
        """Collect spans to be read that the window has room for; whether it is full of what comes later."""
        for record, across_forward in upcoming:
            if record.state is State.WAITS:
                if across_forward:
                    return False
                self._shared.outbox.discard(record)
                continue
            if record.state is State.RELEASED or not record.unread:
                continue
            if (record.source is not None or record.origin() is not None) and record.memory() is not None:
                if across_forward and record.state is State.TRAVELS:
                    return False  # it may have to be read after all
                if record.source is not None and record.writes:
                    self._shared.stay(record)
            elif not self._has_room_for(record, batch, across_forward=across_forward):
                return not across_forward
        return False

    def _has_room_for(self, record: Record, batch: list[Span], *, across_forward: bool) -> bool:
        """Take the room that the spans of a record need in the window; whether there was enough."""
        ledger = self.ledger
        for span in record.unrestored():
            if span in ledger.ahead:  # a record that is expected twice is read once
                continue
            if ledger.in_flight + span.nbytes > self._memory or not ledger.window.may_read_ahead(
                ledger.in_flight, ledger.read_ahead, span.nbytes, across_forward=across_forward
            ):
                return False
            batch.append(span)
            ledger.charge(span)
        return True

    def _start_ahead(self, batch: list[Span]) -> None:
        """Submit reads for which the window has room; fewer where the device's memory has none."""
        is_short = False
        while batch:
            try:
                self._reads.start(batch)
                break
            except torch.OutOfMemoryError:
                is_short, fewer = True, len(batch) // 4  # a quarter: what computes needs memory as well
            for span in batch[fewer:]:  # those that are needed last
                self.ledger.uncharge(span, in_vain=True)
            del batch[fewer:]
        for span in batch:
            self._shared.ahead[span] = None
        if is_short:
            self._memory = self.ledger.in_flight

    def give_up(self) -> None:
        """Drop what was read ahead and not used in the step that is over."""
        shared = self._shared
        self._memory = math.inf
        with shared.lock:
            while shared.give_up_farthest():
                pass
