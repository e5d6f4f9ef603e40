"""Extents in one file on one drive, moved between GPU memory and drive by kvikio (GPUDirect Storage).

This is the only module that names kvikio. What kvikio does with a transfer depends on the machine: through
the nvidia-fs driver or PCIe peer-to-peer the bytes never touch the host; without them cuFile, or kvikio
itself, takes them through host memory. :attr:`GdsStore.description` says which it is in a directory.

No memory is registered with cuFile. That pays for a buffer that one owner uses again and again; here bytes
travel from and into the very tensors of the model, which come from PyTorch's caching allocator and go back to
it. Registering one would register the whole block of the allocator that it lies in, which would have to be
undone before the allocator may give the block back, and would take address space of the GPU's PCIe window
for memory of others. Unregistered memory passes through cuFile's own registered buffers on the GPU, a copy
within its memory.

kvikio orders its transfers with no stream of ours: an I/O thread waits for the event first, moves the bytes,
and returns when they have arrived. But it lets each transfer wait for all that CUDA's default stream was
given before, which is PyTorch's stream unless told otherwise. That is never wrong, and takes overlap away
where the host is far ahead of the device; a model that trains on a stream of its own
(``with torch.cuda.stream(...)``) is spared that.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from tba_offload.config.store import DriveSettings, StoreOptions
from tba_offload.device.checksum import sums
from tba_offload.errors import MissingDependencyError, StoreError, StoreFullError
from tba_offload.store import posix
from tba_offload.store.checksums import Checksums
from tba_offload.store.engine import QueuedStore
from tba_offload.store.run_file import RunFile, short_transfer

if TYPE_CHECKING:
    import torch

    from tba_offload.device import ByteRange, Device, Event
    from tba_offload.store.base import Extent

TASK_BYTES = 4 << 20
"""kvikio splits a transfer into tasks of this size, which its threads share."""

_NO_SPACE = os.strerror(errno.ENOSPC)
_THREADS = 8
_THREADS_VARIABLE = "KVIKIO_NTHREADS"
_NVIDIA_FS = Path("/proc/driver/nvidia-fs/stats")


class GdsBackend:
    """The bytes of one unlinked file that kvikio reads and writes.

    Args:
        directory: Where to create it.
        options: Capacity and checksum.
        device: The device that activations lie on.

    Attributes:
        name: The directory.
        device: As given.
        alignment: Kvikio takes any address.
        path: Which way bytes take.
        reason: Why not the direct one.
        threads: Of kvikio.
        version: Of kvikio.

    Raises:
        StoreError: The directory cannot be used, or kvikio cannot open files there.
        MissingDependencyError: kvikio, or the cuFile library that it needs, is missing.
    """

    alignment = 1

    def __init__(self, directory: str, options: StoreOptions, device: Device) -> None:
        kvikio = import_kvikio()
        self.name = directory
        self.device = device
        self._checksums = Checksums(on=options.checksum)
        self._file = _GdsFile(RunFile(directory, options.capacity), kvikio)
        try:
            self.path, self.reason = _path_of(kvikio, self._file)
            self.threads = _set_threads(kvikio)
        except BaseException:
            self._file.close()
            raise
        self.version = self._file.version

    @property
    def fd(self) -> int:
        """The descriptor of the file."""
        return self._file.fd

    @property
    def size(self) -> int:
        """Bytes that the file has been grown to."""
        return self._file.size

    def grow(self, size: int) -> None:
        """See :meth:`RunFile.grow`."""
        self._file.grow(size)

    def close(self) -> None:
        """Gives the handle back to kvikio and frees the blocks."""
        self._file.close()

    def abandon(self) -> None:
        """In a forked child: closes descriptors behind kvikio's back, which must not be called there."""
        self._file.abandon()

    def move_out(self, extent: Extent, source: ByteRange, after: Event) -> int | None:  # noqa: ARG002
        """See :meth:`Backend.move_out`."""
        data = source.tensor()
        self._transfer("write", self._file.write, data, extent)
        return self.digest(data)

    def move_in(self, extent: Extent, target: ByteRange, after: Event, *, padded: bool) -> int | None:  # noqa: ARG002
        """See :meth:`Backend.move_in`."""
        data = target.tensor()
        self._transfer("read", self._file.read, data, extent)
        return self.digest(data)

    def digest(self, data: torch.Tensor) -> int | None:
        """The checksum of bytes on the device, computed there."""
        hasher = self._checksums.hasher()
        if hasher is None:
            return None
        with self.device.on_side_stream():
            hasher.update(sums(data))
        return hasher.intdigest()

    def _transfer(self, verb: str, call: Any, data: torch.Tensor, extent: Extent) -> None:
        try:
            moved = int(call(data, extent.offset))
        except (OSError, RuntimeError) as error:  # kvikio tells everything by RuntimeError
            what = f"{verb} of {extent.nbytes} bytes at offset {extent.offset} failed in kvikio: {error}"
            if _NO_SPACE in str(error):
                remedy = "free some space, name another directory or set store.capacity"
                raise StoreFullError(errno.ENOSPC, f"{what}; {remedy}", self.name) from error
            remedy = "check the drive and the system log, or use store.kind: file"
            raise StoreError(errno.EIO, f"{what}; {remedy}", self.name) from error
        if moved != extent.nbytes:
            raise short_transfer(self.name, verb, extent.nbytes, extent.offset, moved)


class GdsStore(QueuedStore):
    """A store in one unlinked file that kvikio reads and writes.

    Args:
        directory: Where to create the file; made if it is missing.
        device: The device that activations lie on.
        drive: The ``drive`` of the extents.
        options: Capacity, checksum, threads and the limit of waits; checksums are computed on the device.
        settings: The same one by one, without options.

    Raises:
        StoreError: The directory cannot be used, or kvikio cannot open files there.
        MissingDependencyError: kvikio, or the cuFile library that it needs, is missing.
    """

    kind = "gds"

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        device: Device,
        drive: int = 0,
        options: StoreOptions | None = None,
        **settings: Unpack[DriveSettings],
    ) -> None:
        options = options or StoreOptions(**settings)
        self.directory = os.fspath(directory)
        self._options = options
        self._file = GdsBackend(self.directory, options, device)
        try:
            super().__init__(self._file, options, drive=drive)
        except BaseException:
            self._file.close()
            raise

    @property
    def description(self) -> dict[str, object]:
        """Kind, directory, I/O path and why, capacity, checksum, threads, choice, version of kvikio."""
        return {
            "kind": self.kind,
            "directory": self.directory,
            "path": self._file.path,
            "reason": self._file.reason,
            "alignment": self.alignment,
            "capacity": self.capacity_bytes,
            "checksum": self._options.checksum,
            "kvikio": self._file.version,
            "writers": self._options.writers,
            "readers": self._options.readers,
            "kvikio_threads": self._file.threads,
            **({} if self.chosen is None else {"chosen": self.chosen}),
        }


class _GdsFile:
    """A run file, and kvikio's handle of it.

    kvikio opens files by their path, and ours has none any more: its descriptor has one in ``/proc``.
    """

    def __init__(self, file: RunFile, kvikio: Any) -> None:
        self._file = file
        before = _descriptors_of(file.fd)
        try:
            self._handle = kvikio.CuFile(f"/proc/self/fd/{file.fd}", "r+")
        except (OSError, RuntimeError) as error:
            file.close()
            raise StoreError(
                getattr(error, "errno", None) or errno.EIO,
                f"kvikio cannot open files there: {error}; use store.kind: file",
                file.directory,
            ) from error
        self._opened = _descriptors_of(file.fd) - before
        self.version = str(getattr(kvikio, "__version__", "unknown"))
        self.fd = file.fd

    def write(self, data: torch.Tensor, offset: int) -> int:
        """Moves all bytes of a uint8 tensor to the file; returns how many went."""
        return int(self._handle.pwrite(_buffer(data), data.numel(), offset, TASK_BYTES).get())

    def read(self, data: torch.Tensor, offset: int) -> int:
        """Fills a uint8 tensor from the file; returns how many bytes came."""
        return int(self._handle.pread(_buffer(data), data.numel(), offset, TASK_BYTES).get())

    def direct_io_refusal(self) -> str | None:
        """Why there is no direct I/O in the directory, without which kvikio moves bytes by system calls."""
        magic = posix.file_system_magic(self.fd)
        if magic in posix.MEMORY_FILE_SYSTEMS:
            return f"{posix.MEMORY_FILE_SYSTEMS[magic]} lies in memory and has no direct I/O"
        if posix.direct_alignment(self.fd) == 0:
            return "the file system does not offer direct I/O"
        return None

    @property
    def size(self) -> int:
        """Bytes that the file has been grown to."""
        return self._file.size

    def grow(self, size: int) -> None:
        """See :meth:`RunFile.grow`."""
        self._file.grow(size)

    def close(self) -> None:
        """Gives the handle back to kvikio and frees the blocks."""
        self._handle.close()
        self._file.close()

    def abandon(self) -> None:
        """In a forked child: closes descriptors behind kvikio's back, which must not be called there."""
        _never_collected.append(self._handle)
        for fd in self._opened:
            os.close(fd)
        self._file.abandon()


_never_collected: list[Any] = []


def import_kvikio() -> Any:
    """The module.

    Raises:
        MissingDependencyError: It is not installed, or the cuFile library that it needs is missing.
    """
    try:
        import kvikio
        import kvikio.cufile_driver
        import kvikio.defaults
    except ImportError as error:
        raise MissingDependencyError("kvikio", "store kind 'gds'", extra=_extra()) from error
    except RuntimeError as error:  # what kvikio raises where it does not find the library
        raise MissingDependencyError("libcufile", "store kind 'gds'", extra=_extra()) from error
    return kvikio


def _extra() -> str:
    """The extra of tba-offload that brings kvikio for the CUDA of this PyTorch."""
    import torch

    return "gds-cu13" if (torch.version.cuda or "").startswith("13.") else "gds-cu12"


def driver_versions() -> dict[str, str | None]:
    """Versions of kvikio, of cuFile and of the nvidia-fs driver; ``None`` for what is not there."""
    found: dict[str, str | None] = {"kvikio": None, "cufile": None, "nvidia_fs": None}
    with suppress(OSError):
        found["nvidia_fs"] = _NVIDIA_FS.with_name("version").read_text().strip().removeprefix("version: ")
    with suppress(MissingDependencyError):
        kvikio = import_kvikio()
        found["kvikio"] = str(getattr(kvikio, "__version__", "unknown"))
        with suppress(RuntimeError, AttributeError):  # no library, or a kvikio that does not tell
            found["cufile"] = ".".join(map(str, kvikio.cufile_driver.libcufile_version()))
    return found


def _path_of(kvikio: Any, file: _GdsFile) -> tuple[str, str | None]:
    """Which way bytes take in the directory of a file, and why not the direct one."""
    if kvikio.defaults.is_compat_mode_preferred():
        return "kvikio POSIX", "kvikio is in compatibility mode: cuFile is not usable here"
    refusal = file.direct_io_refusal()
    if refusal is not None:
        return "kvikio POSIX", f"{refusal}, which cuFile needs"
    try:
        through_driver = bool(kvikio.cufile_driver.get("is_gds_available"))
    except (RuntimeError, KeyError) as error:
        return "cuFile", f"cuFile does not say how it works: {error}"
    if through_driver and _NVIDIA_FS.exists():
        return "GDS", None
    if through_driver:
        return "GDS without nvidia-fs", "cuFile moves bytes by PCIe peer-to-peer"
    return "cuFile compatibility", "the nvidia-fs driver is not loaded, so bytes pass through host memory"


def _set_threads(kvikio: Any) -> int:
    """Kvikio's one thread would move the tasks of a transfer one by one; the user's own setting stays."""
    if _THREADS_VARIABLE not in os.environ and kvikio.defaults.get("num_threads") < _THREADS:
        kvikio.defaults.set("num_threads", _THREADS)
    return int(kvikio.defaults.get("num_threads"))


def _buffer(data: torch.Tensor) -> Any:
    """What kvikio takes: CUDA tensors as they are, host memory as an array."""
    return data.numpy() if data.is_cpu else data


def _descriptors_of(fd: int) -> set[int]:
    """All descriptors of this process for the file that ``fd`` is open on."""
    status = os.fstat(fd)
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            other = path.stat()
        except OSError:  # the listing's own
            continue
        if (other.st_dev, other.st_ino) == (status.st_dev, status.st_ino):
            found.add(int(path.name))
    return found
