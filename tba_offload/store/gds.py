"""A store in one unlinked file that GPUDirect Storage writes and reads.

The path of a transfer depends on the machine. With the nvidia-fs driver or with PCIe peer-to-peer, bytes move
directly between GPU and drive. On other machines, cuFile copies the bytes through host memory.
:attr:`GdsStore.path` tells which path is used. If cuFile does not accept the file, opening the store raises
an error, because :class:`tba_offload.store.file.FileStore` is faster than kvikio's copy through host memory.

Transfers call cuFile directly, because these calls wait for no CUDA stream. Before a transfer, the I/O thread
waits for the kernel that computes the bytes. In kvikio, ``pread``, ``pwrite``, ``raw_read`` and ``raw_write``
wait for all work on CUDA's default stream, which PyTorch uses by default. The functions ``raw_read_async``
and ``raw_write_async`` also wait for the default stream unless cuFile has a configuration file. These two
functions also copy with kernels, which take multiprocessors from training. The package uses kvikio only to
find the cuFile library, and to check that the machine meets the requirements of cuFile.

No memory is registered with cuFile. Registration makes transfers faster only if the same buffer is used many
times, but PyTorch's caching allocator gives each tensor another address.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from xxhash import xxh3_64_intdigest

from tba_offload.device.digest import sums
from tba_offload.errors import MissingDependencyError, StoreError
from tba_offload.store.base import BLOCK
from tba_offload.store.file import FileStore

if TYPE_CHECKING:
    from tba_offload.device import ByteRange
    from tba_offload.store.base import Extent

NVIDIA_FS = Path("/proc/driver/nvidia-fs/stats")
"""File that exists if the nvidia-fs driver is loaded."""

UDEV = Path("/run/udev")
"""Directory in which cuFile looks for drives. Without this directory, kvikio does not use cuFile."""


class GdsStore(FileStore):
    """A store in one unlinked file that cuFile writes and reads.

    When the store is opened, one block is written and read back, because cuFile may accept a file but refuse
    transfers. The first transfer also allocates memory, which must not happen inside a step. Checksums are
    computed on the device.

    Args:
        directory: The directory in which to create the file.
        device: The device with the activations.
        capacity: Largest size of the file in bytes.
        checksum: Whether to compute checksums.

    Raises:
        StoreError: The directory cannot be used, or cuFile does not accept files in the directory.
        MissingDependencyError: kvikio is missing, or a library that kvikio needs is missing.
    """

    kind = "gds"
    _cufile: Any = None

    def start(self) -> None:
        """Register the file with cuFile, and test the store with one block."""
        try:  # these imports do not load the cuFile library
            import kvikio
            import kvikio.cufile_driver
            import kvikio.defaults
        except (ImportError, RuntimeError) as error:  # kvikio raises RuntimeError if a library is missing
            extra = "gds-cu13" if (torch.version.cuda or "").startswith("13.") else "gds-cu12"
            raise MissingDependencyError(f"kvikio ({error})", "store kind 'gds'", extra=extra) from error
        if kvikio.defaults.is_compat_mode_preferred():
            why = f"KVIKIO_COMPAT_MODE is ON, libcufile is not found, or the container does not mount {UDEV}"
            raise self._refused(f"kvikio is in compatibility mode. Possible reasons: {why}")
        try:
            self._cufile = CuFile(self.fd)
        except OSError as error:
            needs = f"direct I/O and udev. In a container, mount the host's {UDEV}"
            raise self._refused(f"{error.strerror or error}: cuFile needs {needs}") from error
        self.grow(BLOCK)
        block = torch.arange(BLOCK, device=self.device.torch_device).to(torch.uint8)
        back = torch.zeros_like(block)
        self.device.event().synchronize()  # wait until both tensors are computed
        self._move("write", self._cufile.write, block.data_ptr(), BLOCK, 0)
        self._move("read", self._cufile.read, back.data_ptr(), BLOCK, 0)
        if not torch.equal(block, back):
            raise self._refused("the bytes of a test block changed between write and read")
        if not kvikio.cufile_driver.get("is_gds_available"):
            self.path = "cuFile compatibility"
            self.reason = "the nvidia-fs driver is not loaded, so bytes are copied through host memory"
        elif NVIDIA_FS.exists():
            self.path = "GDS"
        else:
            self.path, self.reason = "GDS without nvidia-fs", "cuFile moves bytes by PCIe peer-to-peer"

    def write(self, extent: Extent, source: ByteRange) -> int | None:
        """Write the bytes of an extent from the device's memory. See :meth:`Store.write`."""
        checksum = self._checksum_of(source)
        self._move("write", self._cufile.write, source.address, source.nbytes, extent.offset)
        return checksum

    def read(self, extent: Extent, target: ByteRange) -> int | None:
        """Read the bytes of an extent into the device's memory. See :meth:`Store.read`."""
        self._move("read", self._cufile.read, target.address, target.nbytes, extent.offset)
        return self._checksum_of(target)

    def _checksum_of(self, memory: ByteRange) -> int | None:
        if not self.checksum:
            return None
        with self.device.on_side_stream():
            return xxh3_64_intdigest(sums(memory.tensor()))

    def _refused(self, why: str) -> StoreError:
        text = f"GPUDirect Storage is not available in this directory: {why}. Use store.kind: file, or auto"
        return StoreError(errno.EOPNOTSUPP, text, self.name)

    def close(self) -> None:
        """Deregister the file from cuFile, and free the file's blocks."""
        if self._cufile is not None:
            self._cufile.close()
        super().close()


# ---- cuFile's own calls --------------------------------------------------------------------------


class _Status(ctypes.Structure):
    _fields_ = (("error", ctypes.c_int), ("driver_error", ctypes.c_int))


class _Description(ctypes.Structure):
    # The second field is a union of a descriptor and a pointer. All machines with GPUs are little-endian.
    _fields_ = (("type", ctypes.c_int), ("file", ctypes.c_int64), ("operations", ctypes.c_void_p))


@cache
def _library() -> ctypes.CDLL:
    """Return the cuFile library that kvikio has loaded, with the types of its functions."""
    library, address, number = ctypes.CDLL("libcufile.so.0", use_errno=True), ctypes.c_void_p, ctypes.c_int64
    library.cuFileHandleRegister.restype = _Status
    library.cuFileHandleDeregister.argtypes = [address]
    for move in (library.cuFileRead, library.cuFileWrite):
        move.argtypes = [address, address, ctypes.c_size_t, number, number]
        move.restype = ctypes.c_ssize_t
    return library


class CuFile:
    """A file that is registered with cuFile. Each call returns when the transfer has ended.

    Args:
        fd: Descriptor of a file that is not yet unlinked, because cuFile opens files by name.

    Raises:
        OSError: The cuFile library is missing, or cuFile does not accept the file.
    """

    def __init__(self, fd: int) -> None:
        self._library = _library()
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        self._handle = ctypes.c_void_p()
        description = _Description(1, self._fd, None)  # CU_FILE_HANDLE_TYPE_OPAQUE_FD
        status = self._library.cuFileHandleRegister(ctypes.byref(self._handle), ctypes.byref(description))
        if status.error:
            os.close(self._fd)
            raise _failure(status.error)

    def write(self, _: int, address: int, nbytes: int, offset: int) -> int:
        """Write bytes from the device's memory, and return the number of bytes written.

        Raises:
            OSError: The write failed.
        """
        return _moved(self._library.cuFileWrite(self._handle, address, nbytes, offset, 0))

    def read(self, _: int, address: int, nbytes: int, offset: int) -> int:
        """Read bytes into the device's memory, and return the number of bytes read.

        Raises:
            OSError: The read failed.
        """
        return _moved(self._library.cuFileRead(self._handle, address, nbytes, offset, 0))

    def close(self) -> None:
        """Deregister the file."""
        self._library.cuFileHandleDeregister(self._handle)
        os.close(self._fd)


def _moved(result: int) -> int:
    if result < 0:
        # -1 means an error of the system, but errno may not be set.
        raise _failure((ctypes.get_errno() or errno.EIO) if result == -1 else -result)
    return result


def _failure(number: int) -> OSError:
    if number > 5000:  # CUFILEOP_BASE_ERR: larger numbers are cuFile's errors, smaller ones the system's
        return OSError(errno.EIO, f"cuFile error {number} (see cufile.h)")
    return OSError(number, os.strerror(number))
