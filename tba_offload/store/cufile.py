"""cuFile's own calls for a file: GPUDirect Storage without what libraries put around it."""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache

_LIBRARY = "libcufile.so.0"
_DESCRIPTOR = 1  # CU_FILE_HANDLE_TYPE_OPAQUE_FD
_FIRST_ERROR = 5000  # CUFILEOP_BASE_ERR: what is beyond is cuFile's, what is below the system's


class _Status(ctypes.Structure):
    _fields_ = (("error", ctypes.c_int), ("driver_error", ctypes.c_int))


class _File(ctypes.Union):
    _fields_ = (("fd", ctypes.c_int), ("handle", ctypes.c_void_p))


class _Description(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("file", _File), ("operations", ctypes.c_void_p))


_ADDRESS, _SIZE, _OFFSET = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
_MOVE = ctypes.CFUNCTYPE(ctypes.c_ssize_t, _ADDRESS, _ADDRESS, _SIZE, _OFFSET, _OFFSET, use_errno=True)


class _Calls:
    """The functions of the library."""

    def __init__(self) -> None:
        library = ctypes.CDLL(_LIBRARY)
        self.register = ctypes.CFUNCTYPE(_Status, _ADDRESS, _ADDRESS)(("cuFileHandleRegister", library))
        self.deregister = ctypes.CFUNCTYPE(None, _ADDRESS)(("cuFileHandleDeregister", library))
        self.read = _MOVE(("cuFileRead", library))
        self.write = _MOVE(("cuFileWrite", library))


_calls = cache(_Calls)


class CuFile:
    """A file that cuFile has taken.

    A transfer is over when its call returns, and waits for no stream of CUDA: the caller has waited for the
    producer of the bytes. Other threads run meanwhile.

    Args:
        fd: A descriptor of the file, which has to have its name still: cuFile opens it by that once more.

    Raises:
        OSError: There is no cuFile, or it does not take the file.
    """

    def __init__(self, fd: int) -> None:
        self._calls = _calls()
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        self._handle = ctypes.c_void_p()
        description = _Description(_DESCRIPTOR, _File(fd=self._fd), None)
        status = self._calls.register(ctypes.addressof(self._handle), ctypes.addressof(description))
        if status.error:
            os.close(self._fd)
            raise _failure(status.error)

    def write(self, address: int, nbytes: int, offset: int) -> int:
        """Write bytes of the device's memory; return how many went.

        Raises:
            OSError: It failed.
        """
        return _moved(self._calls.write(self._handle, address, nbytes, offset, 0))

    def read(self, address: int, nbytes: int, offset: int) -> int:
        """Fill memory of the device; return how many bytes came.

        Raises:
            OSError: It failed.
        """
        return _moved(self._calls.read(self._handle, address, nbytes, offset, 0))

    def close(self) -> None:
        """Give the file back."""
        self._calls.deregister(self._handle)
        os.close(self._fd)


def _moved(result: int) -> int:
    if result < 0:
        # -1 stands for what errno says, which the system may not have set.
        raise _failure((ctypes.get_errno() or errno.EIO) if result == -1 else -result)
    return result


_MEANINGS = {
    5001: "the nvidia-fs driver is not loaded, and compatibility mode is off",
    5007: "this platform is not supported",
    5008: "this file is not supported",
    5009: "this GPU is not supported",
    5010: "the nvidia-fs driver failed",
    5011: "the CUDA driver failed",
    5018: "this kind of file is not supported",
    5025: "no permission",
    5027: "the file could not be registered",
    5030: "internal error",
    5033: "the nvidia-fs driver could not be set up",
    5034: "its configuration forbids it for this file",
}
"""Errors that a file may meet, as cufile.h explains them."""


def _failure(number: int) -> OSError:
    if number > _FIRST_ERROR:
        meaning = _MEANINGS.get(number, "which cufile.h explains")
        return OSError(errno.EIO, f"error {number} of cuFile, {meaning}")
    return OSError(number, os.strerror(number))
