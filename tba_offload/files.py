"""Functions that read and write files of the user. Only regular files are accepted.

Reading a pipe may block forever, and a device has no end. A link may refer to a file that the user does not
want to use.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

_STREAM = re.compile(r"/dev/(?:null|stdout|stderr|fd/[0-9]+)")
"""Paths of streams that a shell has opened for the program. The program may write to these paths."""


def read_regular(path: Path, most: int) -> bytes:
    """Read a whole file. Links are followed.

    Args:
        path: The file.
        most: Maximum size in bytes.

    Raises:
        OSError: The file cannot be read, is not a regular file, or is larger.
    """
    with open(path, "rb", opener=_open_regular) as file:
        content = file.read(most + 1)
    if len(content) > most:
        why = f"larger than the limit of {most} bytes; is it the right file?"
        raise OSError(errno.EFBIG, why, str(path))
    return content


def write_regular(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a whole file, and replace its old content.

    Args:
        path: Path of a regular file or of a new file. Links are refused. A stream that a shell has opened,
            such as ``/dev/stdout``, is also accepted.
        content: Bytes of the whole file.

    Raises:
        OSError: The file cannot be written, is a link, or is not a regular file.
    """
    is_new = not os.path.lexists(path)
    with open(path, "wb", opener=None if _STREAM.fullmatch(os.fspath(path)) else _open_regular) as file:
        try:
            file.write(content)
            file.flush()
        except OSError:
            if is_new:
                Path(path).unlink(missing_ok=True)  # otherwise the next attempt would find the file
            raise


def _open_regular(name: str, flags: int) -> int:
    """Open a file without waiting. Never write through a link."""
    flags |= os.O_NONBLOCK | os.O_NOCTTY | (os.O_NOFOLLOW if flags & os.O_WRONLY else 0)
    try:
        fd = os.open(name, flags, 0o666)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO}:  # the system's message would be misleading
            raise OSError(error.errno, "a link, a pipe or a socket; use a regular file", name) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file; use a regular file", name)
    return fd
