"""Extents in one file on one drive, moved between GPU memory and drive by GPUDirect Storage.

This is the only module that names kvikio. What cuFile does with a transfer depends on the machine: through
the nvidia-fs driver or PCIe peer-to-peer the bytes never touch the host; without them it takes them through
host memory. :attr:`GdsStore.description` says which it is in a directory. Where cuFile does not take a file
at all, kvikio would move its bytes by system calls, through the page cache, with copies that kernels of
training wait for. :mod:`tba_offload.store.file` does that better, so opening the store is an error there.

A transfer waits for its producer and for nothing else: an I/O thread waits for the event, and then calls
cuFile, which copies on streams of its own that no other stream waits for. The bytes do not go through
kvikio's calls: ``pread``, ``pwrite``, ``raw_read`` and ``raw_write`` let each transfer wait for all that
CUDA's default stream was given before, which is PyTorch's stream unless told otherwise, and those for a
stream of the caller, ``raw_read_async`` and ``raw_write_async``, do so too unless cuFile has a
configuration file, and then have kernels copy, which take multiprocessors from training. kvikio finds the
library and its driver, and says whether the machine has what cuFile needs.

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
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.device.checksum import sums
from tba_offload.errors import MissingDependencyError, StoreError, StoreFullError
from tba_offload.store import posix
from tba_offload.store.cufile import CuFile
from tba_offload.store.engine import QueuedStore
from tba_offload.store.extents import BLOCK
from tba_offload.store.file_systems import Place, file_system_of
from tba_offload.store.options import StoreOptions
from tba_offload.store.run_file import FULL, RunFile, short_transfer
from tba_offload.store.run_file_backend import RunFileBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from tba_offload.device import ByteRange, Device, Event
    from tba_offload.store.base import Extent

NVIDIA_FS = Path("/proc/driver/nvidia-fs/stats")
"""File that is there if the nvidia-fs driver is loaded."""

UDEV = Path("/run/udev")
"""Directory that cuFile looks for drives in; kvikio asks no cuFile where it is missing."""

_REMEDY = "use store.kind: file, or auto"


class GdsBackend(RunFileBackend):
    """The bytes of one unlinked file that cuFile reads and writes.

    One block is written and read back first: a file may be accepted and its transfers refused, and what
    cuFile allocates for its first transfer shall not be allocated inside a step.

    Args:
        directory: Where to create it.
        options: Capacity and checksum.
        device: The device that activations lie on.

    Attributes:
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
        file = _GdsFile(directory, options.capacity, kvikio)
        super().__init__(file, options, device)
        self._cufile = file.cufile
        try:
            self._try()
            self.path, self.reason = _path_of(kvikio)
        except BaseException:
            self._file.close()
            raise
        self.version = str(getattr(kvikio, "__version__", "unknown"))

    def move_out(self, extent: Extent, source: ByteRange, after: Event) -> int | None:  # noqa: ARG002
        """See :meth:`Backend.move_out`."""
        data = source.tensor()
        self._transfer("write", self._cufile.write, data, extent.offset)
        return self.digest(data)

    def move_in(self, extent: Extent, target: ByteRange, after: Event, *, padded: bool) -> int | None:  # noqa: ARG002
        """See :meth:`Backend.move_in`."""
        data = target.tensor()
        self._transfer("read", self._cufile.read, data, extent.offset)
        return self.digest(data)

    def digest(self, data: torch.Tensor) -> int | None:
        """Return the checksum of bytes on the device, computed there."""
        hasher = self._checksums.hasher()
        if hasher is None:
            return None
        with self.device.on_side_stream():
            hasher.update(sums(data))
        return hasher.intdigest()

    def _transfer(
        self, verb: str, call: Callable[[int, int, int], int], data: torch.Tensor, offset: int
    ) -> None:
        nbytes = data.numel()
        try:
            moved = call(data.data_ptr(), nbytes, offset)
        except OSError as error:
            what = f"{verb} of {nbytes} bytes at offset {offset} failed in cuFile: {error.strerror}"
            if error.errno in FULL:
                remedy = "free some space, name another directory or set store.capacity"
                raise StoreFullError(error.errno, f"{what}; {remedy}", self.name) from error
            remedy = "check the drive and the system log, or use store.kind: file"
            raise StoreError(errno.EIO, f"{what}; {remedy}", self.name) from error
        if moved != nbytes:
            raise short_transfer(self.name, verb, nbytes, offset, moved)

    def _try(self) -> None:
        """Move one block each way.

        Raises:
            StoreError: It cannot be moved, or comes back changed.
        """
        self.grow(BLOCK)
        block = torch.arange(BLOCK, device=self.device.torch_device).to(torch.uint8)
        back = torch.zeros_like(block)
        self.device.event().synchronize()  # until they are made
        self._transfer("write", self._cufile.write, block, 0)
        self._transfer("read", self._cufile.read, back, 0)
        if not torch.equal(block, back):
            raise _refused("a block that was written comes back changed", self.name)


class GdsStore(QueuedStore):
    """A store in one unlinked file that cuFile reads and writes.

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
        **settings: Any,
    ) -> None:
        options = options or StoreOptions(**settings)
        self.directory = os.fspath(directory)
        self._options = options
        self._file = GdsBackend(self.directory, options, device)
        super().__init__(self._file, options, drive=drive)

    def fileno(self) -> int:
        """Return the descriptor of the file, for tools that look at it or measure its drive."""
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


class _GdsFile(RunFile):
    """A run file that cuFile has taken, which it does while the file has a name."""

    def __init__(self, directory: str, capacity: int | None, kvikio: Any) -> None:
        self._kvikio = kvikio
        self._taken: list[CuFile] = []
        try:
            super().__init__(directory, capacity, self._take)
        except BaseException:
            for taken in self._taken:
                taken.close()
            raise
        self.cufile = self._taken.pop()

    def _take(self, fd: int) -> None:
        """Have cuFile take the file of a descriptor."""
        if refusal := _refusal(self._kvikio, fd):
            raise _refused(refusal, self.directory)
        before = _descriptors_of(fd)
        try:
            self._taken.append(CuFile(fd))
        except OSError as error:
            why = str(error.strerror or error) + _missing_in_udev(fd)
            raise _refused(why, self.directory, error.errno) from error
        self._opened = _descriptors_of(fd) - before  # by cuFile, too

    def close(self) -> None:
        """Give the file back to cuFile and free the blocks."""
        self.cufile.close()
        super().close()

    def abandon(self) -> None:
        """In a forked child: closes descriptors and calls no cuFile, which must not be called there."""
        for fd in self._opened:
            os.close(fd)
        super().abandon()


def import_kvikio() -> Any:
    """Return the module; the cuFile library is loaded afterwards.

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
    return kvikio


def _needed_by_kvikio() -> str:
    """Return the package that kvikio does not find its library without."""
    if find_spec("rapids_logger") is None:
        return "rapids-logger"
    try:
        return "libkvikio" if find_spec("cuda.pathfinder") else "cuda-pathfinder"
    except ModuleNotFoundError:  # nor any other package of that name
        return "cuda-pathfinder"


def _extra() -> str:
    """Return the extra of tba-offload that brings kvikio for the CUDA of this PyTorch."""
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
    system = file_system_of(fd)
    if system.place is Place.MEMORY:
        return f"{system.name} lies in memory and has no direct I/O, which cuFile needs"
    if posix.direct_alignment(fd) == 0:
        return "the file system does not offer direct I/O, which cuFile needs"
    if not kvikio.defaults.is_compat_mode_preferred():
        return None
    if not UDEV.is_dir():
        return f"cuFile looks for drives in {UDEV}, which is not there: in a container, mount it or make it"
    return "kvikio is in compatibility mode: KVIKIO_COMPAT_MODE is ON, or libcufile is not found"


def _missing_in_udev(fd: int) -> str:
    """Return what to do where udev does not know the drive of a file, for which cuFile asks it.

    Or nothing.
    """
    device = os.fstat(fd).st_dev
    entry = UDEV / "data" / f"b{os.major(device)}:{os.minor(device)}"
    if not os.major(device) or entry.exists():
        return ""
    return f": it asks udev for the drive, and there is no {entry}; in a container, mount the host's {UDEV}"


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
