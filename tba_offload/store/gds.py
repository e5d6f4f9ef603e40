"""Extents in one file on one drive, moved between GPU memory and drive by GPUDirect Storage, through kvikio.

This is the only module that names kvikio. What cuFile, below kvikio, does with a transfer depends on the
machine: through the nvidia-fs driver or PCIe peer-to-peer the bytes never touch the host; without them it
takes them through host memory. :attr:`GdsStore.description` says which it is in a directory. Where cuFile
does not take a file at all, kvikio would move its bytes by system calls, through the page cache, with
copies that kernels of training wait for. :mod:`tba_offload.store.file` does that better, so opening the
store is an error there.

A transfer waits for its producer and for nothing else. An I/O thread waits for the event, puts the transfer
on a stream of its own by kvikio's ``raw_write_async`` or ``raw_read_async``, and waits for that stream.
With kvikio's other calls (``pread``, ``pwrite``, ``raw_read``, ``raw_write``) each transfer would wait for
all that CUDA's default stream was given before, which is PyTorch's stream unless told otherwise, and the
first two take what is smaller than 16 KiB through host memory. The calls for a stream do all that, too,
where cuFile has no configuration file, so it is given one, ``cufile.json`` beside this module, if the
machine has none.

No memory is registered with cuFile. That pays for a buffer that one owner uses again and again; here bytes
travel from and into the very tensors of the model, which come from PyTorch's caching allocator and go back
to it. Registering one would register the whole block of the allocator that it lies in, which would have to
be undone before the allocator may give the block back, and would take address space of the GPU's PCIe
window for memory of others. Unregistered memory passes through cuFile's own registered buffers on the GPU,
a copy within its memory.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch

from tba_offload.config.store import DriveSettings, StoreOptions
from tba_offload.device.checksum import sums
from tba_offload.errors import MissingDependencyError, StoreError, StoreFullError
from tba_offload.store import posix
from tba_offload.store.checksums import Checksums
from tba_offload.store.engine import QueuedStore
from tba_offload.store.extents import BLOCK
from tba_offload.store.run_file import RunFile, short_transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tba_offload.device import ByteRange, Device, Event
    from tba_offload.store.base import Extent

_NO_SPACE = os.strerror(errno.ENOSPC)
NVIDIA_FS = Path("/proc/driver/nvidia-fs/stats")
"""File that is there if the nvidia-fs driver is loaded."""

UDEV = Path("/run/udev")
"""Directory that cuFile looks for drives in; kvikio asks no cuFile where it is missing."""

_CONFIGURATION = Path("/etc/cufile.json")
_CONFIGURATION_VARIABLE = "CUFILE_ENV_PATH_JSON"
_REMEDY = "use store.kind: file, or auto"


class GdsBackend:
    """The bytes of one unlinked file that cuFile reads and writes.

    One block is written and read back first: a file may be accepted and its transfers refused, and what
    cuFile allocates for its first transfer shall not be allocated inside a step.

    Args:
        directory: Where to create it.
        options: Capacity and checksum.
        device: The device that activations lie on.

    Attributes:
        name: The directory.
        device: As given.
        alignment: cuFile takes any address.
        path: Which way bytes take.
        reason: Why not the direct one.
        version: Of kvikio.

    Raises:
        StoreError: The directory cannot be used, or cuFile does not take files there.
        MissingDependencyError: kvikio, or a library that it needs, is missing.
    """

    alignment = 1

    def __init__(self, directory: str, options: StoreOptions, device: Device) -> None:
        kvikio = import_kvikio()
        self.name = directory
        self.device = device
        self._checksums = Checksums(on=options.checksum)
        self._file = _GdsFile(directory, options.capacity, kvikio)
        try:
            self._try()
            self.path, self.reason = _path_of(kvikio)
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
        self._transfer("write", self._file.write, data, extent.offset)
        return self.digest(data)

    def move_in(self, extent: Extent, target: ByteRange, after: Event, *, padded: bool) -> int | None:  # noqa: ARG002
        """See :meth:`Backend.move_in`."""
        data = target.tensor()
        self._transfer("read", self._file.read, data, extent.offset)
        return self.digest(data)

    def digest(self, data: torch.Tensor) -> int | None:
        """The checksum of bytes on the device, computed there."""
        hasher = self._checksums.hasher()
        if hasher is None:
            return None
        with self.device.on_side_stream():
            hasher.update(sums(data))
        return hasher.intdigest()

    def _transfer(
        self, verb: str, call: Callable[[torch.Tensor, int, int], Any], data: torch.Tensor, offset: int
    ) -> None:
        """Moves bytes on the calling thread's side stream, and waits for that stream only."""
        nbytes = data.numel()
        with self.device.on_side_stream():
            stream = getattr(self.device.stream(), "cuda_stream", None)
            if stream is None:
                raise _refused(f"cuFile moves memory of CUDA, not of {self.device.torch_device}", self.name)
            with self._failures(verb, nbytes, offset):
                transfer = call(data, offset, stream)
        with self._failures(verb, nbytes, offset):
            moved = int(transfer.check_bytes_done())
        if moved != nbytes:
            raise short_transfer(self.name, verb, nbytes, offset, moved)

    @contextmanager
    def _failures(self, verb: str, nbytes: int, offset: int) -> Iterator[None]:
        """Around a call of kvikio: its errors as a caller can use them."""
        try:
            yield
        except (OSError, RuntimeError) as error:  # kvikio tells everything by RuntimeError
            what = f"{verb} of {nbytes} bytes at offset {offset} failed in kvikio: {error}"
            if _NO_SPACE in str(error):
                remedy = "free some space, name another directory or set store.capacity"
                raise StoreFullError(errno.ENOSPC, f"{what}; {remedy}", self.name) from error
            remedy = "check the drive and the system log, or use store.kind: file"
            raise StoreError(errno.EIO, f"{what}; {remedy}", self.name) from error

    def _try(self) -> None:
        """Moves one block each way.

        Raises:
            StoreError: It cannot be moved, or comes back changed.
        """
        self.grow(BLOCK)
        block = torch.arange(BLOCK, device=self.device.torch_device).to(torch.uint8)
        back = torch.zeros_like(block)
        self.device.event().synchronize()  # they are made on another stream
        self._transfer("write", self._file.write, block, 0)
        self._transfer("read", self._file.read, back, 0)
        if not torch.equal(block, back):
            raise _refused("a block that was written comes back changed", self.name)


class GdsStore(QueuedStore):
    """A store in one unlinked file that cuFile reads and writes, through kvikio.

    Args:
        directory: Where to create the file; made if it is missing.
        device: The device that activations lie on.
        drive: The ``drive`` of the extents.
        options: Capacity, checksum, threads and the limit of waits; checksums are computed on the device.
        settings: The same one by one, without options.

    Raises:
        StoreError: The directory cannot be used, or cuFile does not take files there.
        MissingDependencyError: kvikio, or a library that it needs, is missing.
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

    def fileno(self) -> int:
        """The descriptor of the file, for tools that look at it or measure its drive."""
        return self._file.fd

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
            **({} if self.chosen is None else {"chosen": self.chosen}),
        }


class _GdsFile:
    """A run file, and kvikio's handle of it, which is cuFile's.

    cuFile opens files by their path, a second time for what is not aligned, even those that it is given a
    descriptor of. So it has to take the file before that loses its name.
    """

    def __init__(self, directory: str, capacity: int | None, kvikio: Any) -> None:
        self._directory = directory
        self._kvikio = kvikio
        self._handles: list[Any] = []
        try:
            self._file = RunFile(directory, capacity, self._take)
        except BaseException:
            for handle in self._handles:
                handle.close()
            raise
        self._handle = self._handles.pop()
        self.version = str(getattr(kvikio, "__version__", "unknown"))
        self.fd = self._file.fd

    def _take(self, fd: int) -> None:
        """Has cuFile take the file of a descriptor."""
        if refusal := _refusal(self._kvikio, fd):
            raise _refused(refusal, self._directory)
        before = _descriptors_of(fd)
        try:
            # Unless told so, kvikio takes a file that cuFile refuses by system calls, and does not tell.
            with self._kvikio.defaults.set("compat_mode", self._kvikio.CompatMode.OFF):
                self._handles.append(self._kvikio.CuFile(f"/proc/self/fd/{fd}", "r+"))
        except (OSError, RuntimeError) as error:
            raise _refused(str(error), self._directory, getattr(error, "errno", None)) from error
        self._opened = _descriptors_of(fd) - before

    def write(self, data: torch.Tensor, offset: int, stream: int) -> Any:
        """Puts a write of all bytes of a uint8 tensor on a stream; returns kvikio's future."""
        return self._handle.raw_write_async(_Memory(data), stream, data.numel(), offset)

    def read(self, data: torch.Tensor, offset: int, stream: int) -> Any:
        """Puts a read of all bytes of a uint8 tensor on a stream; returns kvikio's future."""
        return self._handle.raw_read_async(_Memory(data), stream, data.numel(), offset)

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


class _Memory:
    """A uint8 tensor as kvikio takes memory of a device, whatever calls itself a device here."""

    def __init__(self, data: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (data.numel(),),
            "strides": None,
            "data": (data.data_ptr(), False),
        }


def import_kvikio() -> Any:
    """The module; cuFile has a configuration file afterwards.

    Raises:
        MissingDependencyError: It is not installed, or a library that it needs is missing.
    """
    try:
        import kvikio
        import kvikio.cufile_driver
        import kvikio.defaults
    except ModuleNotFoundError as error:
        package = (error.name or "kvikio").partition(".")[0]
        raise MissingDependencyError(package, "store kind 'gds'", extra=_extra()) from error
    except ImportError as error:  # a library that is not found
        raise MissingDependencyError(_needed_by_kvikio(), "store kind 'gds'") from error
    except RuntimeError as error:  # what kvikio raises where it does not find the library
        raise MissingDependencyError("libcufile", "store kind 'gds'", extra=_extra()) from error
    # Both look for it when a file is opened, kvikio once in a process.
    if _CONFIGURATION_VARIABLE not in os.environ and not _CONFIGURATION.exists():
        os.environ[_CONFIGURATION_VARIABLE] = str(Path(__file__).with_name("cufile.json"))
    return kvikio


def _needed_by_kvikio() -> str:
    """The package that kvikio does not find its library without."""
    if find_spec("rapids_logger") is None:
        return "rapids-logger"
    try:
        return "libkvikio" if find_spec("cuda.pathfinder") else "cuda-pathfinder"
    except ModuleNotFoundError:  # nor any other package of that name
        return "cuda-pathfinder"


def _extra() -> str:
    """The extra of tba-offload that brings kvikio for the CUDA of this PyTorch."""
    return "gds-cu13" if (torch.version.cuda or "").startswith("13.") else "gds-cu12"


def driver_versions() -> dict[str, str | None]:
    """Versions of kvikio, of cuFile and of the nvidia-fs driver; ``None`` for what is not there."""
    found: dict[str, str | None] = {"kvikio": None, "cufile": None, "nvidia_fs": None}
    with suppress(OSError):
        found["nvidia_fs"] = NVIDIA_FS.with_name("version").read_text().strip().removeprefix("version: ")
    with suppress(MissingDependencyError):
        kvikio = import_kvikio()
        found["kvikio"] = str(getattr(kvikio, "__version__", "unknown"))
        with suppress(RuntimeError, AttributeError):  # no library, or a kvikio that does not tell
            found["cufile"] = ".".join(map(str, kvikio.cufile_driver.libcufile_version()))
    return found


def _refusal(kvikio: Any, fd: int) -> str | None:
    """Why cuFile does not take a file, as far as it can be known beforehand."""
    magic = posix.file_system_magic(fd)
    if magic in posix.MEMORY_FILE_SYSTEMS:
        return f"{posix.MEMORY_FILE_SYSTEMS[magic]} lies in memory and has no direct I/O, which cuFile needs"
    if posix.direct_alignment(fd) == 0:
        return "the file system does not offer direct I/O, which cuFile needs"
    if not kvikio.defaults.is_compat_mode_preferred():
        return None
    if not UDEV.is_dir():
        return f"cuFile looks for drives in {UDEV}, which is not there: in a container, mount it or make it"
    return "kvikio is in compatibility mode: KVIKIO_COMPAT_MODE is ON, or libcufile is not found"


def _refused(why: str, directory: str, number: int | None = None) -> StoreError:
    return StoreError(
        number or errno.EOPNOTSUPP, f"GPUDirect Storage cannot be had there: {why}; {_REMEDY}", directory
    )


def _path_of(kvikio: Any) -> tuple[str, str | None]:
    """Which way the bytes of a file take that cuFile has taken, and why not the direct one."""
    try:
        through_driver = bool(kvikio.cufile_driver.get("is_gds_available"))
    except (RuntimeError, KeyError) as error:
        return "cuFile", f"cuFile does not say how it works: {error}"
    if through_driver and NVIDIA_FS.exists():
        return "GDS", None
    if through_driver:
        return "GDS without nvidia-fs", "cuFile moves bytes by PCIe peer-to-peer"
    return "cuFile compatibility", "the nvidia-fs driver is not loaded, so bytes pass through host memory"


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
