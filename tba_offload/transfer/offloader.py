"""The offloader, which writes saved storages to a store and reads the bytes back for backward.

One lock guards all state of the offloader. A training thread may wait for I/O while it holds the lock,
because I/O threads never take the lock. An I/O thread appends each finished transfer to ``completed``. A
training thread processes finished transfers in its next call of the offloader.

If a step fails or is interrupted, :meth:`Offloader.abandon` discards the whole step. Other methods therefore
do not repair state after an interrupt.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.device import ByteRange, aligned_range, check_not_captured
from tba_offload.errors import (
    DeviceError,
    HangingError,
    SessionError,
    StoreError,
    StoreFullError,
    TransferError,
    is_of_drive,
    warn,
)
from tba_offload.store.pool import Transfer
from tba_offload.torch_private import keeps_graph
from tba_offload.transfer.saved import SavedRef, SavedStorage, State
from tba_offload.transfer.window import NOTICEABLE, InFlightWindow

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from tba_offload.device import Device, Mark
    from tba_offload.store.multi import MultiStore

READ_AGAIN = (0.01, 0.1, 1.0)
"""Waiting times in seconds before the second, third and fourth attempt to read bytes that backward needs."""


class Offloader:
    """Transfer of saved storages from memory to a store, and back to memory for backward.

    Args:
        store: The store, which no other code may use. The offloader does not close the store.
        device: The device with the activations.
        window: Upper limit of the bytes in flight; ``None`` for no limit.
        keep_when_full: Whether bytes stay in memory if a drive fails or is full. If False, a failed write
            raises a :class:`~tba_offload.errors.TransferError`.

    Attributes:
        store: The store.
        device: The device with the activations.
        window: The in-flight window, which counts bytes in memory.
        keep_when_full: The argument ``keep_when_full``, which the caller may change between two steps.
        marks_stalls: Whether to record marks on the device before and after each wait for I/O.
    """

    def __init__(
        self, store: MultiStore, device: Device, *, window: int | None = None, keep_when_full: bool = True
    ) -> None:
        self.store, self.device, self.keep_when_full = store, device, keep_when_full
        self.window = InFlightWindow(window)
        self.marks_stalls = self.is_inert = self._is_open = False
        self._epoch = 0
        self._lock = Lock()
        store.completed = self._completed = deque[Transfer]()
        self._dead = deque[SavedRef]()
        self._died = self._dead.append  # the finalizer
        self._refs = set[SavedRef]()  # keeps the weak references alive, so that their callbacks run
        self._pending = deque[SavedRef]()  # oldest first
        self._pending_bytes = 0
        self._writes: dict[Transfer, SavedRef] = {}  # queued and running, oldest first
        self._ahead: dict[SavedRef, None] = {}  # read ahead and not used yet
        self._failures = deque[TransferError]()

    # ---- forward: save and flush -----------------------------------------------------------------

    def save(
        self, storage: torch.UntypedStorage, key: Hashable, *, at_once: bool = False, is_filling: bool = False
    ) -> SavedStorage:
        """Save a storage, and add its write to the pending writes.

        Args:
            storage: The storage.
            key: Name of the activation.
            at_once: Whether to queue the pending writes as soon as they fill a batch. By default, the latest
                writes stay pending, because backward uses the latest storages first.
            is_filling: Whether the operation of autograd may still write to the storage. If True, the
                write to the store starts only after the caller sets :attr:`SavedStorage.is_filling` to False.

        Raises:
            TransferError: The in-flight window is full, and a drive hangs or a transfer has failed.
        """
        nbytes, window = storage.nbytes(), self.window
        with self._lock:
            if self._completed or self._dead:
                self._drain()
            if window.nbytes is not None and window.in_flight and window.in_flight + nbytes > window.nbytes:
                self._make_room(nbytes)
            saved = SavedStorage(storage, nbytes, key, self._epoch, self._died)
            saved.is_filling = is_filling
            if self.device.runs_behind:
                saved.stream = self.device.stream()
            self._refs.add(saved.ref)
            self._pending.append(saved.ref)
            self._pending_bytes += nbytes
            window.add(nbytes)
            if window.in_flight > window.all_above or (at_once and self._pending_bytes >= window.batch):
                # By default, the last storage stays pending, if the next storage need not wait for its write.
                self._flush(0 if at_once or nbytes > window.all_above else nbytes)
            elif self._pending_bytes >= window.due:
                self._flush(window.held_back)
        return saved

    def make_room(self, nbytes: int) -> None:
        """Wait until the in-flight window has room for a new saved storage of ``nbytes`` bytes.

        Raises:
            TransferError: A drive hangs, or a transfer has failed.
        """
        with self._lock:
            if self.window.is_crowded(self.window.in_flight, nbytes):
                self._make_room(nbytes)

    def flush(self) -> None:
        """Queue all pending writes."""
        if self._pending and not self.is_inert:
            with self._lock:
                self._flush(0)

    def _flush(self, held_back: int) -> None:
        """Queue the oldest pending writes until at most ``held_back`` bytes or one storage are pending.

        One loop queues all writes, so that the code of the loop stays in the processor's caches.
        """
        pending, batch, events = self._pending, list[Transfer](), dict[Any, Any]()
        while len(pending) > bool(held_back) and (not held_back or self._pending_bytes > held_back):
            ref = pending[0]
            saved = ref()
            if saved is not None and ref.state is State.PENDING and saved.memory is not None:
                if saved.is_filling:
                    break
                if (after := events.get(saved.stream)) is None:
                    check_not_captured(self.device)
                    after = events[saved.stream] = self.device.event(saved.stream)
                memory = ByteRange(saved.memory, 0, ref.nbytes)
                saved.address, saved.memory, ref.state = memory.address, None, State.WRITING
                ref.write = transfer = Transfer(memory, after)
                self._writes[transfer] = ref
                self._pending_bytes -= ref.nbytes
                batch.append(transfer)
            pending.popleft()
        if batch:
            self.store.write(batch)

    def _make_room(self, nbytes: int) -> None:
        window, began = self.window, time.perf_counter()
        mark = self.device.mark() if self.marks_stalls else None
        while window.is_crowded(window.in_flight, nbytes):
            self._flush(0)
            # All other bytes in memory are in use, or only this thread can free them: a deadlock.
            if not self._finish_writes() and not self._give_up_farthest():
                break
        self._stalled(began, mark)
        self.raise_failures()

    # ---- backward: fetch -------------------------------------------------------------------------

    def fetch(self, saved: SavedStorage) -> tuple[torch.UntypedStorage, int]:
        """Return the bytes of a saved storage. If necessary, read the bytes from the store.

        Args:
            saved: The saved storage.

        Returns:
            A storage, and the index of the first saved byte in this storage.

        Raises:
            SessionError: The step that saved the storage was discarded, or the process is a forked child.
            TransferError: The bytes could not be read.
        """
        if self.is_inert:  # a thread of the parent may have held the lock
            raise SessionError(
                f"{saved.key} was saved before this process was forked. Only the parent process can run "
                "backward with this activation"
            )
        with self._lock:
            if self._completed or self._dead:
                self._drain()
            ref = saved.ref
            if ref.epoch != self._epoch:
                raise SessionError(
                    f"{saved.key} was discarded, because its step failed or was interrupted. Run "
                    "forward again before backward"
                )
            memory = saved.alive()
            if memory is not None and memory.nbytes() < saved.nbytes:  # the owner has resized it
                memory = None
            saved.uses += 1
            if saved.is_restored and saved.uses >= saved.tensors:
                saved.memory = None
            if ref.read is not None:
                memory = self._arrived(saved)
            elif memory is None:
                memory = self._read_now(saved)
            elif not saved.is_restored:
                self._forward(saved, memory)
            if saved.is_restored and self.device.runs_behind and self.device.stream() != saved.stream:
                self.device.use(ByteRange(memory, 0, memory.nbytes()).tensor(), self.device.stream())
            return memory, saved.start

    def _forward(self, saved: SavedStorage, memory: torch.UntypedStorage) -> None:
        """Record that backward uses a saved storage that is still in memory.

        If no other saved tensor needs the storage, keep its memory and cancel its write.
        """
        ref, stats = saved.ref, self.window.stats
        if saved.uses == 1:
            stats.forwarded += saved.nbytes
            if ref.state is State.STORED:
                saved.was_held = True
                stats.held += saved.nbytes
        # A retained graph may need the bytes again much later.
        if ref.state is not State.STORED and saved.uses >= saved.tensors and not keeps_graph():
            if ref.state is not State.KEPT:
                self._stay(saved, memory)
            self.window.settle(ref)

    def _stay(self, saved: SavedStorage, memory: torch.UntypedStorage) -> None:
        self._cancel_write(saved.ref)
        saved.memory, saved.ref.state = memory, State.KEPT

    def _read_now(self, saved: SavedStorage) -> torch.UntypedStorage:
        """Read bytes that were not prefetched. The in-flight window does not limit this read."""
        ref = saved.ref
        if ref.write is not None:  # the write ended a moment ago
            self._wait(ref.write, ref)
            self._drain()
        if ref.extent is None:
            raise _transfer_error("keep", ref, "the program has freed or resized the saved tensor's memory")
        try:
            room = self._allocate(saved)
        except torch.OutOfMemoryError:
            while self._give_up_farthest() or self._finish_writes():
                pass
            room = self._allocate(saved)
        self._start_reads([(saved, room)])
        return self._arrived(saved)

    def _allocate(self, saved: SavedStorage) -> ByteRange:
        return aligned_range(saved.nbytes, saved.address, self.store.alignment, self.device)

    def _start_reads(self, rooms: list[tuple[SavedStorage, ByteRange]]) -> None:
        device = self.device
        check_not_captured(device)
        # Record the event after the allocations, because earlier work may still use the memory.
        after, reads = device.event(), list[Transfer]()
        for saved, room in rooms:
            if device.runs_behind:
                saved.stream = device.stream()
            saved.ref.read = read = Transfer(room, after, extent=saved.ref.extent)
            self.window.stats.read += saved.nbytes
            reads.append(read)
        self.store.read(reads)

    def _arrived(self, saved: SavedStorage) -> torch.UntypedStorage:
        ref = saved.ref
        read: Any = ref.read
        if not read.is_done or read.error is not None:
            read = self._read_to_end(ref, read)
        room: ByteRange = read.memory
        self._end_ahead(ref)
        memory = room.storage
        saved.start, saved.alive = room.start, weakref.ref(memory)
        saved.is_restored = True
        if saved.uses < saved.tensors:
            saved.memory = memory
        return memory

    def _read_to_end(self, ref: SavedRef, read: Any) -> Any:
        extent: Any = ref.extent
        began = time.perf_counter()
        mark = self.device.mark() if self.marks_stalls else None
        if ref in self._ahead:
            self._wait_for_batch(self._ahead, "read")
        for pause in (*READ_AGAIN, None):
            self._wait(read, ref)
            if (error := read.error) is None:
                break
            if pause is None or isinstance(error, DeviceError):
                self._end_ahead(ref)
                if is_of_drive(error):
                    self.store.suspend(extent, error)
                where = f" from {self.store.place(extent)}, offset {extent.offset}"
                raise _transfer_error("read", ref, error, where)
            time.sleep(pause)
            ref.read = read = Transfer(read.memory, self.device.event(), extent=extent)
            self.store.read([read])
            self.window.stats.reread += ref.nbytes
        self._stalled(began, mark)
        return read

    # ---- reading ahead ---------------------------------------------------------------------------

    def prefetch(self, upcoming: Iterable[tuple[SavedRef, bool]]) -> None:
        """Start reads of the storages that backward uses next, until the in-flight window is full.

        Storages that are still in memory stay in memory, and their queued writes are cancelled.

        Args:
            upcoming: Saved storages in the order in which backward uses them, each with a flag. The flag is
                True if a forward pass comes before the use. Storages with this flag fill only a part of the
                in-flight window, because the forward pass needs the rest.
        """
        rooms = list[tuple[SavedStorage, ByteRange]]()
        if self.is_inert:
            return
        with self._lock:
            if self._completed or self._dead:
                self._drain()
            for ref, across_forward in upcoming:
                saved = ref()
                if saved is None or ref.state is State.KEPT or ref.epoch != self._epoch:
                    continue
                memory = saved.alive()
                if ref.state is not State.STORED:
                    if across_forward:
                        break  # the write may still run, and frees the memory before the use
                    if memory is not None and not keeps_graph():
                        self._stay(saved, memory)
                elif (
                    memory is None
                    and ref.read is None
                    and not ref.charged
                    and saved.uses < saved.tensors
                    and not self._find_room(saved, rooms, across_forward=across_forward)
                ):
                    break
            if rooms:
                self.window.add(0)  # updates the peaks
                self._start_reads(rooms)

    def _find_room(
        self, saved: SavedStorage, rooms: list[tuple[SavedStorage, ByteRange]], *, across_forward: bool
    ) -> bool:
        """Allocate memory for a prefetch; return False if the window or the device has no room."""
        window, ref, in_flight = self.window, saved.ref, self.window.in_flight
        if in_flight + ref.nbytes > window.most_read_ahead or not window.may_read_ahead(
            in_flight, window.read_ahead, ref.nbytes, across_forward=across_forward
        ):
            if not across_forward:
                self._flush(0)  # backward uses the pending bytes later than these bytes
            return False
        try:
            room = self._allocate(saved)
        except torch.OutOfMemoryError:
            for _ in range(len(rooms) // 4, len(rooms)):  # leave memory for compute
                self._give_up_farthest()
                del rooms[-1]
            window.most_read_ahead = window.in_flight
            return False
        rooms.append((saved, room))
        ref.charged = ref.nbytes
        self._ahead[ref] = None
        window.read_ahead += ref.nbytes
        window.in_flight += ref.nbytes
        return True

    def _end_ahead(self, ref: SavedRef) -> None:
        if ref.read is not None and ref.read.is_done:
            ref.read.memory = None  # the transfer may still be in the queue of completed transfers
        ref.read = None
        if ref in self._ahead:
            del self._ahead[ref]
            self.window.read_ahead -= ref.charged
            self.window.in_flight -= ref.charged
            ref.charged = 0

    def _give_up_farthest(self) -> bool:
        """Drop the prefetched storage that backward uses last; return False if no storage is prefetched."""
        if not self._ahead:
            return False
        ref = next(reversed(self._ahead))
        if ref.read is not None and not self.store.cancel(ref.read):
            self._wait(ref.read, ref)
        self._end_ahead(ref)
        self.window.stats.given_up += ref.nbytes
        return True

    # ---- the ends of I/O and of saved storages -------------------------------------------------------

    def _drain(self) -> None:
        """Process completed transfers, and saved storages that autograd has released."""
        completed, dead, window = self._completed, self._dead, self.window
        while completed:
            transfer = completed.popleft()
            ref = self._writes.pop(transfer, None)
            if ref is None:
                continue  # a read, or a write of a discarded step
            ref.write = None
            saved = ref()
            if transfer.error is not None:
                self._not_written(transfer, ref, saved)
                continue
            window.stats.offloaded += ref.nbytes
            if saved is not None and ref.state is State.WRITING:
                ref.state, ref.extent = State.STORED, transfer.extent
                window.free(ref)
                continue
            if transfer.extent is not None:
                self.store.release(transfer.extent)
            if saved is None:
                window.free(ref)
        while dead:
            ref = dead.popleft()
            self._refs.discard(ref)
            if ref.epoch != self._epoch:
                continue
            if ref.charged or ref.settled or ref.write is not None or ref.read is not None:
                self._let_go(ref)
            elif ref.extent is not None:
                self.store.release(ref.extent)

    def _let_go(self, ref: SavedRef) -> None:
        if not self._cancel_write(ref):
            return  # the write holds the memory until the write ends
        if ref.read is not None:
            self.store.cancel(ref.read)
            self._end_ahead(ref)
        self.window.free(ref)
        if ref.extent is not None:
            self.store.release(ref.extent)

    def _cancel_write(self, ref: SavedRef) -> bool:
        """Cancel a pending or queued write; return False if the write is running or has just ended."""
        if ref.state is State.PENDING:
            self._pending_bytes -= ref.nbytes
        elif ref.write is not None:
            if not self.store.cancel(ref.write):
                return False
            del self._writes[ref.write]
            ref.write = None
        return True

    def _not_written(self, transfer: Any, ref: SavedRef, saved: SavedStorage | None) -> None:
        """Keep bytes in memory after a failed write. ``keep_when_full`` decides whether to raise an error."""
        error, memory, transfer.memory = transfer.error, transfer.memory, None
        if saved is None:
            self.window.free(ref)
            return
        is_new, ref.state, saved.memory = ref.state is State.WRITING, State.KEPT, memory.storage
        self.window.settle(ref)
        if self.keep_when_full and is_of_drive(error):
            self.window.stats.fallback_kept += ref.nbytes if is_new else 0
            self.window.stats.full |= type(error) is StoreFullError  # a drive out of service is not full
        elif is_new:
            self._failures.append(_transfer_error("write", ref, error))

    def release_memory(self, saved: SavedStorage, storage: torch.UntypedStorage) -> None:
        """Cancel or end the write of a saved storage, before other code frees the memory of the storage.

        The other code must fill the storage again before backward, as FSDP2 does with parameters.

        Raises:
            TransferError: The write of the storage does not end.
        """
        if self.is_inert:  # a thread of the parent may have held the lock
            return
        with self._lock:
            self._drain()
            ref, memory = saved.ref, saved.alive()
            is_there = memory is not None and memory.nbytes() >= saved.nbytes
            if is_there and ref.state is not State.STORED and ref.epoch == self._epoch:
                self._stay(saved, storage)
                if ref.write is not None:
                    self._wait(ref.write, ref)
                    self._drain()
                self.window.settle(ref)

    # ---- waiting ---------------------------------------------------------------------------------

    def _wait(self, transfer: Transfer, ref: SavedRef) -> None:
        """Wait until a transfer has ended or failed. Raise an error only if the transfer does not end."""
        if transfer.is_done:
            return
        try:
            self.store.wait(transfer)
        except HangingError as error:
            raise _transfer_error("write" if transfer.is_write else "read", ref, error) from error
        except StoreError:
            pass  # the caller checks the error of the transfer

    def _wait_for_batch(self, refs: Iterable[SavedRef], verb: str) -> None:
        """Wait for the oldest transfers, up to the size of one batch.

        Separate waits would take longer, because waking a thread takes as long as a small transfer.
        """
        left = self.window.batch
        for ref in refs:
            left -= ref.nbytes
            if left <= 0:
                break
        self._wait(getattr(ref, verb), ref)

    def _finish_writes(self) -> bool:
        """Process ended writes, or wait for the oldest writes; return False if there are no writes."""
        if not self._completed and self._writes:
            refs: Iterable[SavedRef] = self._writes.values()
            beside = self.store.beside
            if beside is not None:  # a drive may hang while writes to host memory succeed
                refs = [ref for write, ref in self._writes.items() if write.drive == beside] or refs
            self._wait_for_batch(refs, "write")
        has_ended = bool(self._completed)
        self._drain()
        return has_ended

    def _stalled(self, began: float, mark: Mark) -> None:
        ended, stats = time.perf_counter(), self.window.stats
        stats.stall_seconds += ended - began
        if ended - began >= NOTICEABLE:
            stats.stalls.append((began, ended))
        if mark is not None:
            stats.marked_stalls.append((mark, self.device.mark()))

    # ---- steps -----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin a step, and discard the previous step if an interrupt has left the previous step open.

        Raises:
            TransferError: A transfer has failed since the last step.
        """
        if self._is_open:
            self.abandon()
        self._is_open = True
        if not self.keep_when_full:
            self.store.resume()  # with on_full: error, only a new write shows whether the drive still fails
        with self._lock:
            self._drain()
        self.raise_failures()
        self.window.reset_stats()

    def end_step(self) -> None:
        """End a step, and drop prefetched bytes. All saved storages stay valid."""
        with self._lock:
            self._drain()
            self.window.most_read_ahead = float("inf")
            while self._give_up_farthest():
                pass
        self.store.trim()
        self._is_open = False

    def abandon(self) -> None:
        """Discard a step: cancel queued I/O and wait for running I/O.

        A later backward of the discarded step raises an error.
        """
        with self._lock:
            self._is_open = True
            self.store.reset()
            self._epoch += 1
            for each in (self._completed, self._refs, self._pending, self._writes, self._ahead):
                each.clear()
            self._failures.clear()
            self._pending_bytes = 0
            self.window.reset()
            self._is_open = False

    def raise_failures(self) -> None:
        """Warn about drives that failed for the first time, and raise the error of a failed transfer.

        Raises:
            TransferError: A transfer failed.
        """
        for place, cause in self.store.take_outages():
            if self.keep_when_full:
                warn(
                    f"a drive failed and takes no writes for a while: {place}: {cause}. Activations are "
                    "written to other drives or stay in memory, even beyond budget.activation_bytes. Check "
                    "the drive, or choose another directory",
                    RuntimeWarning,
                )
        if self._failures:
            try:  # a variable for the error would form a cycle and keep the graph of the step alive
                raise self._failures[0]
            finally:
                self._failures.clear()  # the next step must not raise other failures of this step

    def resize_window(self, window: int | None) -> None:
        """Set the upper limit of the bytes in flight, between two steps."""
        self.window.resize(window)
        self.store.spill_bytes = self.window.spills_above


_REMEDIES = {
    "write": "check the drive and the system log. Free some space on the drive, set store.directories to "
    "another directory, or set on_full to 'keep'",
    "read": "training cannot continue without these bytes. Check the drive with the tools of its vendor",
    "keep": "change a copy of the tensor instead, or set the placement of the layer to 'keep'",
}


def _transfer_error(verb: str, ref: SavedRef, cause: BaseException | str, where: str = "") -> TransferError:
    # A ``HangingError`` and a ``DeviceError`` have their own remedy.
    ending = "" if isinstance(cause, (HangingError, DeviceError)) else f"; {_REMEDIES[verb]}"
    error = TransferError(f"could not {verb} {ref.nbytes} bytes of {ref.key}{where}: {cause}{ending}")
    error.__cause__ = cause if isinstance(cause, BaseException) else None
    return error
