"""The contract of a store: extents, futures and transfers; and the door through which one is opened.

A store keeps bytes of activations outside device memory. It reserves an extent, writes one tensor's bytes
into it, reads them back any number of times, and takes the extent back. Transfers run on threads of the
store; each gives an :class:`IoFuture`.
"""

from __future__ import annotations

import copy
import errno
import logging
import os
import warnings
from _thread import allocate_lock
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple, Self, TypedDict

from tba_offload import interrupts
from tba_offload.errors import ConfigError, StoreError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from tba_offload.device import ByteRange, Device, Event
    from tba_offload.store.engine import QueuedStore

logger = logging.getLogger(__name__)

DRIVE_TIER, HOST_TIER = "drive", "host"
"""The legal tiers of :class:`DriveLoad`."""

STALL_SECONDS = 300.0
"""Seconds that a transfer may run before its drive is taken to hang, unless told otherwise."""

_FEW_CORES = 2
KINDS = ("auto", "gds", "file", "host")
"""The legal kinds of :func:`open_store`."""


class Extent(NamedTuple):
    """A byte range of a store that holds one range of bytes of a storage.

    Attributes:
        offset: Where the range starts, bytes; a multiple of 4096.
        length: Bytes of the range; a multiple of 4096.
        nbytes: Bytes that it holds.
        lead: They start at ``offset + lead``; less than the store's alignment.
        drive: Which store of a striped store the range lies in; 0 elsewhere.
    """

    offset: int
    length: int
    nbytes: int
    lead: int
    drive: int = 0


class IoFuture:
    """The outcome of one transfer.

    One is created for each transfer on the training thread, so it is light: two raw locks and no condition
    variable. ``_claim`` is taken once, by whoever decides whether the transfer runs: the I/O thread or the
    canceller. ``_ended`` is held until the outcome is known.

    Attributes:
        error: What made the transfer fail; ``None`` while it is not done and after success.
    """

    __slots__ = ("_callbacks", "_cancelled", "_claim", "_done", "_ended", "error")

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._done = False
        self._cancelled = False
        self._callbacks: list[Callable[[IoFuture], object]] = []
        self._claim = allocate_lock()
        self._ended = allocate_lock()
        self._ended.acquire()

    def done(self) -> bool:
        """Whether the transfer has ended, failed or been cancelled."""
        return self._done

    def cancelled(self) -> bool:
        """Whether the transfer was cancelled before it started."""
        return self._cancelled

    def wait(self, timeout: float | None = None) -> None:
        """Blocks until the transfer has ended.

        Args:
            timeout: Seconds to wait at most; ``None`` for no limit.

        Raises:
            StoreError: The transfer failed, or was cancelled (``errno.ECANCELED``). A new one each time.
            TimeoutError: It has not ended in time; it goes on.
        """
        if not self._done:
            self._block(timeout)
        if self.error is not None:
            raise _anew(self.error)
        if self._cancelled:
            raise StoreError(errno.ECANCELED, "the transfer was cancelled before it started")

    def cancel(self) -> bool:
        """Keeps the transfer from running if it has not started.

        Returns:
            True if it has not started and now never will; its callbacks are then not called. False if it is
            running or has ended.
        """
        if self._claim.acquire(blocking=False):
            self._cancelled = True
            self._callbacks.clear()
            self._drop()
            self._done = True
            self._ended.release()
        return self._cancelled

    def add_done_callback(self, callback: Callable[[IoFuture], object]) -> None:
        """Has ``callback(self)`` called once when the transfer has ended.

        It is called on the I/O thread, or at once on this thread if the transfer has ended already; never for
        a cancelled transfer. An exception from a callback on an I/O thread makes the store refuse further
        transfers, and ``close()`` raises it.
        """
        if self._cancelled:
            return
        # Append first, look second: the I/O thread sets _done first and empties the list second. Whatever the
        # order of the four, one of the two sees the callback, and pop() gives it to only one of them.
        self._callbacks.append(callback)
        if self._done and not self._cancelled:
            self._call_back()

    def claim(self) -> bool:
        """For the store: decides that the transfer runs; False if it was cancelled."""
        return self._claim.acquire(blocking=False)

    def finish(self, error: BaseException | None = None) -> None:
        """For the store: makes the outcome known, wakes the waiters and runs the callbacks."""
        self._conclude(error)
        self._call_back()

    def _conclude(self, error: BaseException | None) -> None:
        self.error = error
        self._done = True
        self._ended.release()

    def _drop(self) -> None:
        """What a store does with a transfer that is cancelled: forget it and its tensor."""

    @interrupts.waits
    def _block(self, timeout: float | None) -> None:
        if not self._ended.acquire(timeout=-1 if timeout is None else max(timeout, 0.0)):
            raise TimeoutError(f"the transfer has not ended within {timeout} s")
        self._ended.release()

    def _call_back(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:  # the other thread took the last one
                return
            callback(self)


def _anew(error: BaseException) -> BaseException:
    """The same error, to be raised.

    One that is raised comes to know the frames of all callers and what they hold, such as the graph of a
    step. A future that kept it would keep them.
    """
    new = copy.copy(error)
    new.__cause__ = error.__cause__
    return new


class Load(NamedTuple):
    """What one direction of one drive has moved.

    Attributes:
        nbytes: Bytes.
        seconds: How long at least one transfer was under way, waiting for the device not counted.
    """

    nbytes: int
    seconds: float


class DriveLoad(NamedTuple):
    """What one drive has moved, or the host memory beside drives.

    Attributes:
        write: To it.
        read: From it.
        tier: Which of the two it is, "drive" or "host"; a store in host memory alone is its own drive.
        in_service: Whether it takes writes; one that failed does not, for a while.
        room: Most bytes that it holds, as far as that is known: its capacity, what it had grown to when it
            was found full, or nothing while it is out of service; ``None`` for no known limit.
    """

    write: Load
    read: Load
    tier: str = DRIVE_TIER
    in_service: bool = True
    room: int | None = None


class ActivationStore(ABC):
    """A place outside device memory for the bytes of activations.

    ``source`` and ``target`` of a transfer are ranges of exactly ``extent.nbytes`` bytes, on any device. The
    caller keeps their memory untouched until the future is done. The store holds a reference while the
    transfer is queued or running and drops it before it runs the callbacks, so that a callback can free the
    memory.

    Use it as a context manager or call :meth:`close`. In a forked child it is inert: its descriptors are
    closed there and every use raises ``SessionError``.

    Attributes:
        kind: "file", "host", "gds", "striped" or "tiered".
        alignment: What addresses must match for a transfer without a copy, bytes; 1 where nothing is needed.
        capacity_bytes: The most bytes that extents may take; ``None`` if only the drive sets a limit.
    """

    kind: str
    alignment: int
    capacity_bytes: int | None

    @property
    @abstractmethod
    def description(self) -> dict[str, object]:
        """What the store is and which I/O path it really uses, for the run log; plain JSON values."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes that extents take now, padding included."""

    @property
    @abstractmethod
    def high_water_bytes(self) -> int:
        """What the store has grown to: the largest end that an extent ever had, on each drive."""

    @abstractmethod
    def reserve(self, nbytes: int, address: int) -> Extent:
        """Takes an extent for a range of bytes.

        Args:
            nbytes: Length of the range, at least 1.
            address: Address of its first byte. A write from an address that is congruent to it modulo the
                alignment, and a read into one, can go without a copy.

        Raises:
            StoreFullError: The capacity is reached or the drive is full.
            OutOfServiceError: The drive failed, now or before, and it is not time to try it again.
            TimeoutError: The drive hangs; from now on it is out of service.
            SessionError: The store is closed, or this is a forked child.
        """

    @abstractmethod
    def release(self, extent: Extent) -> None:
        """Gives an extent back; may be called from any thread and from a callback.

        After :meth:`close` it does nothing: the extents are gone with the store.

        Raises:
            ValueError: The extent is not reserved, or a transfer of it has not ended.
        """

    @abstractmethod
    def write(
        self,
        extent: Extent,
        source: ByteRange,
        after: Event,
        *,
        done: Callable[[IoFuture], object] | None = None,
    ) -> IoFuture:
        """Queues a write of a whole extent.

        If this raises, an interrupt included, no transfer is queued or running that would not call ``done``.

        Args:
            extent: Where to; no other transfer of it may be queued or running.
            source: The bytes.
            after: The write starts when this point of the device's work is reached.
            done: Called as by :meth:`IoFuture.add_done_callback`, and known before the write can start.

        Raises:
            ValueError: The extent is released or busy, or the range does not fit it.
            SessionError: The store is closed, or this is a forked child.
        """

    @abstractmethod
    def read(self, extent: Extent, target: ByteRange, after: Event, *, padded: bool) -> IoFuture:
        """Queues a read of a whole extent; several reads of one extent may overlap.

        Args:
            extent: Where from; its last write must have ended without an error.
            target: Where to.
            after: The read starts when this point is reached: the last use of the target's memory.
            padded: The bytes of the target's storage down to the previous and up to the next multiple of the
                alignment belong to the target and may be overwritten. If ``extent.lead`` is also the target's
                address modulo the alignment, the read goes without a copy.

        Raises:
            ValueError: The extent is released, being written, or was never written; the range does not fit
                it; or ``padded`` is set and the storage has no room for the padding.
            SessionError: The store is closed, or this is a forked child.
        """

    @abstractmethod
    def place(self, extent: Extent) -> str:
        """Where an extent lies, for messages: the directory, or what else the store is."""

    def holds(self, extent: Extent, source: ByteRange) -> bool | None:  # noqa: ARG002 - as below
        """Whether these are the bytes that were written to an extent, by their checksum.

        Returns:
            ``None`` if there is no checksum of them.
        """
        return None

    @abstractmethod
    def take_loads(self) -> list[DriveLoad]:
        """What each drive has moved since the last call."""

    @abstractmethod
    def write_rate(self) -> float | None:
        """Bytes a second that writes went at of late, of all drives in service; ``None`` before the first.

        Looking does not disturb :meth:`take_loads`, and costs next to nothing.
        """

    @abstractmethod
    def pending(self) -> int:
        """Transfers that are queued or running; one whose future is done no longer counts."""

    @abstractmethod
    def pending_bytes(self) -> int:
        """Bytes whose transfers are queued or running."""

    @abstractmethod
    def pending_write_bytes(self) -> int:
        """Bytes whose writes are queued or running."""

    def suspend(self, extent: Extent, cause: BaseException) -> None:  # noqa: B027 - as below
        """Takes the drive that an extent lies on out of service: a read of it failed for good.

        A failed write does that by itself. The drive is tried again by one write, after one second, and twice
        as long after each further failure.
        """

    def take_outages(self) -> list[tuple[str, str]]:
        """The drives that were taken out of service since the last call, each with the cause.

        That a drive is full is none of them.
        """
        return []

    def resume(self) -> None:  # noqa: B027 - as below
        """Puts every drive back in service: the next transfer tells whether it works."""

    def expect(self, in_flight: int | None) -> None:  # noqa: B027 - most stores have no use for it
        """Tells the store how many bytes may be in flight at most; ``None`` for no limit.

        Called between steps, whenever that changes.
        """

    def limit_waits(self, seconds: float | None) -> None:  # noqa: B027 - without threads nothing hangs
        """Tells the store how long a transfer may run before :meth:`close` gives it up; ``None`` for ever.

        :meth:`reserve` waits as long for a file to grow. Without this it is :data:`STALL_SECONDS`.
        """

    @abstractmethod
    def prepare(self, nbytes: int) -> None:
        """Makes room for extents of ``nbytes`` in all, so that no step has to wait while the store grows.

        Raises:
            StoreFullError: There is no such room.
            TimeoutError: The drive hangs.
        """

    @abstractmethod
    def close(self) -> None:
        """Cancels what is queued, waits for what is running, ends the threads and frees everything.

        Idempotent. Not to be called from a callback. A transfer that has run for longer than the limit, see
        :meth:`limit_waits`, is not waited for: its thread, its memory and the file stay until the process
        ends.

        Raises:
            StoreError: A transfer hangs (``errno.ETIMEDOUT``).
            BaseException: What the first callback that failed on an I/O thread raised.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_after(error, self.close)


def close_after(error: BaseException | None, close: Callable[[], None]) -> None:
    """Closes a store at the end of a block; after an error of the block its own is only a warning.

    Args:
        error: What the block raised.
        close: Closes the store.

    Raises:
        StoreError: The store says so, and the block raised nothing.
    """
    try:
        close()
    except StoreError as failure:
        if error is None:
            raise
        warnings.warn(str(failure), RuntimeWarning, stacklevel=3)


def open_store(
    *,
    kind: str = "auto",
    directories: Sequence[str | os.PathLike[str]] = (),
    capacity: int | None = None,
    host_capacity: int | None = None,
    checksum: bool = True,
    device: Device,
    readers: int | None = None,
    writers: int | None = None,
) -> ActivationStore:
    """Opens a store.

    Args:
        kind: "file" writes files; "host" keeps bytes in host memory; "gds" moves bytes between GPU and drive
            directly; "auto" is "host" where no directories are given, and elsewhere "file", or on a GPU the
            faster of "file" and "gds", which is measured on each drive.
        directories: Where to put files, one for each drive; several make a striped store.
        capacity: Bytes that extents may take in all, divided evenly among the directories; ``None`` for no
            limit but the drives' own.
        host_capacity: Bytes of host memory to use while the drives have too much to do; ``None`` for none.
        checksum: Verify every read from a drive against a checksum taken at the write. Host memory is not
            checked: there is no drive or driver that could change the bytes.
        device: The device that activations lie on.
        readers: Threads that read, for each directory; ``None`` for what suits the machine.
        writers: Threads that write, likewise.

    Raises:
        ConfigError: An unknown kind, a directory given twice, or directories or ``host_capacity`` that do not
            go with the kind.
        MissingDependencyError: "gds" without kvikio.
        UnsupportedError: "gds" for activations on the CPU.
        StoreError: A directory cannot be used.
    """
    if kind not in KINDS:
        raise ConfigError(f"store kind {kind!r} is not one of {', '.join(KINDS)}")
    usual = threads_per_direction()
    threads = Threads(
        readers=usual if readers is None else readers, writers=usual if writers is None else writers
    )
    if kind == "host" or (kind == "auto" and not directories):
        if host_capacity is not None:
            raise ConfigError("host_capacity is for memory beside drives; a store in memory has capacity")
        return _open_host(directories, capacity, device, threads=threads)
    drives = _open_files(directories, capacity, device, kind=kind, checksum=checksum, threads=threads)
    if host_capacity is None:
        return drives
    try:
        return _with_host_memory(drives, host_capacity, device, len(directories))
    except BaseException:
        drives.close()
        raise


class Threads(TypedDict):
    """How many threads of a store read and how many write, on each drive."""

    readers: int
    writers: int


def threads_per_direction() -> int:
    """Threads that read, or write, on each drive: one is enough for most, and spares the compute cores."""
    return 1 if len(os.sched_getaffinity(0)) <= _FEW_CORES else 2


def _open_host(
    directories: Sequence[str | os.PathLike[str]],
    capacity: int | None,
    device: Device,
    *,
    threads: Threads,
) -> ActivationStore:
    from tba_offload.store.host import HostStore

    if directories:
        raise ConfigError("store kind 'host' keeps bytes in memory; remove the directories or the kind")
    return HostStore(capacity, device=device, **threads)


def _open_files(
    directories: Sequence[str | os.PathLike[str]],
    capacity: int | None,
    device: Device,
    *,
    kind: str,
    checksum: bool,
    threads: Threads,
) -> ActivationStore:
    from tba_offload.store.gds import import_kvikio
    from tba_offload.store.striped import StripedStore

    paths = _distinct(directories, kind)
    share = None if capacity is None else capacity // len(paths)
    if kind == "gds":
        import_kvikio()
        if device.torch_device.type == "cpu":
            raise UnsupportedError("store kind 'gds' moves GPU memory; on a CPU use 'file'")
    stores: list[QueuedStore] = []
    try:
        for drive, path in enumerate(paths):
            stores.append(_open_drive(path, kind, share, device, drive, checksum=checksum, threads=threads))
    except BaseException:
        for store in stores:
            store.close()
        raise
    return stores[0] if len(stores) == 1 else StripedStore(stores)


def _open_drive(
    path: str,
    kind: str,
    capacity: int | None,
    device: Device,
    drive: int,
    *,
    checksum: bool,
    threads: Threads,
) -> QueuedStore:
    """The store on one drive; "auto" is the faster kind where there are two ways to it."""
    from tba_offload.store.file import FileStore
    from tba_offload.store.gds import GdsStore
    from tba_offload.store.probe import choose

    choice = None
    if kind == "auto" and device.pins_memory:
        choice = choose(path, device, capacity=capacity, checksum=checksum, **threads)
        kind = choice.kind
        logger.info("%s: store kind %r, because %s", path, kind, choice.why)
    make = GdsStore if kind == "gds" else FileStore
    store: QueuedStore = make(
        path, capacity=capacity, device=device, checksum=checksum, drive=drive, **threads
    )
    if choice is not None:
        store.chosen = choice.as_json()
    return store


def _with_host_memory(drives: ActivationStore, capacity: int, device: Device, count: int) -> ActivationStore:
    """Puts host memory beside ``count`` drives, with one thread for each direction."""
    from tba_offload.store.host import HostStore
    from tba_offload.store.tiered import TieredStore

    host = HostStore(capacity, device=device, drive=count, setting="store.host_capacity")
    return TieredStore(drives, host)


def _distinct(directories: Sequence[str | os.PathLike[str]], kind: str) -> list[str]:
    """The directories as paths.

    Raises:
        ConfigError: There is none, or two are the same place.
    """
    if not directories:
        raise ConfigError(f"store kind {'file' if kind == 'auto' else kind!r} needs at least one directory")
    paths = [os.fspath(directory) for directory in directories]
    seen: dict[str, str] = {}
    for path in paths:
        real = os.path.realpath(path)
        if real in seen:
            raise ConfigError(
                f"directories {seen[real]!r} and {path!r} are the same place; give each drive one directory"
            )
        seen[real] = path
    return paths
