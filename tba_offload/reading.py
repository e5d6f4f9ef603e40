"""Files that a user names are read only if they are regular files of a size that makes sense.

A pipe would block for ever, a device never ends, and a file by mistake may be larger than memory.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from pathlib import Path


class UnreadableError(Exception):
    """Says what is wrong with a file and what to do about it; the caller adds what the file was for."""


def open_regular(path: Path, most: int) -> BinaryIO:
    """Open a file without waiting for anything.

    Args:
        path: The file; links are followed.
        most: Bytes that it may have.

    Raises:
        UnreadableError: It cannot be opened, is no regular file, or is larger.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise UnreadableError(getattr(error, "strerror", None) or str(error)) from error
    try:
        _check(os.fstat(fd), most)
    except BaseException:
        os.close(fd)
        raise
    return os.fdopen(fd, "rb")


def read_regular(path: Path, most: int) -> bytes:
    """Read a file whole.

    Args:
        path: The file; links are followed.
        most: Bytes that it may have.

    Raises:
        UnreadableError: It cannot be read, is no regular file, or is larger.
    """
    with open_regular(path, most) as file:
        try:
            content = file.read(most + 1)
        except OSError as error:
            raise UnreadableError(error.strerror or str(error)) from error
    if len(content) > most:  # files of /proc say that they are empty
        raise UnreadableError(_too_large(most))
    return content


def _check(status: os.stat_result, most: int) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise UnreadableError("a directory; name a file in it")
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableError("not a regular file; name one")
    if status.st_size > most:
        raise UnreadableError(_too_large(most))


def _too_large(most: int) -> str:
    return f"larger than {most} bytes, the most that is read; is it the right file?"
