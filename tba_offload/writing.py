"""Files that a user names are written only if they are new or regular files, and through no link.

A pipe that no process reads would block for ever, and a link may lead to a file that was never meant.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import suppress
from pathlib import Path

_STREAM = re.compile(r"/dev/(?:null|stdout|stderr|fd/[0-9]+)")
"""Paths of what a shell has opened for the program: to be written to is what they are for."""

_PLAINLY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
"""No link is followed, no pipe blocks, and no terminal takes the process over."""


def write_regular(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file whole, in place of what it held.

    Args:
        path: A regular file or the name of a new one, of which the last part is no link; or a stream that a
            shell has opened, such as ``/dev/stdout``.
        content: What the file is to hold.

    Raises:
        OSError: It cannot be written, or is a link or no regular file.
    """
    path = Path(path)
    opener = None if _STREAM.fullmatch(str(path)) else _open_regular
    is_new = not os.path.lexists(path)
    with open(path, "wb", opener=opener) as file:
        try:
            file.write(content)
            file.flush()
        except OSError:
            if is_new:
                path.unlink(missing_ok=True)  # or the next try would find it
            raise


def _open_regular(name: str, flags: int) -> int:
    try:
        fd = os.open(name, flags | _PLAINLY, 0o666)
    except OSError as error:
        raise _named(name, error) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _irregular(name)
    return fd


def _named(name: str, error: OSError) -> OSError:
    """Return the error of opening a file; of a link or a pipe the system's words are about something else."""
    with suppress(OSError):
        mode = os.lstat(name).st_mode
        if stat.S_ISLNK(mode):
            return OSError(errno.ELOOP, "a symbolic link; name the file itself", name)
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            return _irregular(name)
    return error


def _irregular(name: str) -> OSError:
    return OSError(errno.EINVAL, "not a regular file; name one", name)
