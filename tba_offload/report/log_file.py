"""The file under a run log: lines are appended whole or not at all, whatever the drive does.

A drive that is full takes part of a line. That part is cut off again, so that the next line begins on a line
of its own: a file holds a torn line at its end only, if the process was killed there.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shlex
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from tba_offload.errors import RunLogError

if TYPE_CHECKING:
    from pathlib import Path

_NEW = os.O_NOFOLLOW | os.O_NONBLOCK
"""No link is followed, and a pipe that no process reads does not block."""


class LogFile:
    """A file of lines that is ours alone.

    Args:
        path: The file, readable by its owner only (0600). Its directory has to exist. An empty file that
            exists already is used, and keeps its mode.
        head: Its first line; the same again should the file vanish and have to be made anew.

    Raises:
        RunLogError: The file is not empty, a link, no regular file, another process is writing it, or it
            cannot be opened or written.
    """

    def __init__(self, path: Path, head: bytes) -> None:
        self._path = path
        self._head = head
        self._end = 0
        self._file = _open_new(path)
        try:
            self.append(b"")
        except OSError as error:
            self._file.close()
            raise RunLogError(f"{path}: the run log cannot be written: {error.strerror or error}") from error

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._file.closed

    def append(self, lines: bytes) -> None:
        """Append whole lines, all of them or nothing.

        Raises:
            OSError: They could not be written; what was written of them is cut off again, at the latest
                before the next lines.
        """
        self._cut_off()
        if self._end == 0:
            lines = self._head + lines
        try:
            left = memoryview(lines)
            while left:
                left = left[self._file.write(left) :]
        except BaseException:
            with suppress(OSError):
                self._cut_off()
            raise
        self._end += len(lines)

    def append_again(self, lines: bytes) -> None:
        """Append after a failure: if the file is gone, to a new one where its directory is there again.

        Of a file that another program has shortened the whole lines stay, if its first line is among them;
        otherwise it begins anew.

        Raises:
            OSError: As :meth:`append` does, or the new file cannot be made, or another program has written
                to the file.
        """
        if self._is_gone():
            self._open_anew()
        elif self._is_shorter():
            self._end = self._whole_lines()
        self.append(lines)

    def close(self) -> None:
        """Close the file; once is enough, more does no harm.

        Raises:
            OSError: The file system could not keep what was written, as one on a network may find late.
        """
        self._file.close()

    def _open_anew(self) -> None:
        try:
            file = _open_new(self._path)
        except RunLogError as error:
            raise OSError(errno.ENOENT, str(error)) from error
        with suppress(OSError):
            self._file.close()
        self._file, self._end = file, 0

    def _is_gone(self) -> bool:
        try:
            return os.fstat(self._file.fileno()).st_nlink == 0
        except OSError:  # a network file system lost it
            return True

    def _is_shorter(self) -> bool:
        return os.fstat(self._file.fileno()).st_size < self._end

    def _whole_lines(self) -> int:
        """Bytes of the whole lines that another program has left of the file; 0 without the first one."""
        left = os.pread(self._file.fileno(), self._end, 0)
        if self._head.startswith(left):
            return 0
        if not left.startswith(self._head):
            raise OSError(errno.EEXIST, "another program has written to the file")
        return left.rfind(b"\n") + 1

    def _cut_off(self) -> None:
        """Give the file its length without lines that were not written whole."""
        status = os.fstat(self._file.fileno())
        if status.st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "the file was removed")
        if status.st_size < self._end:
            raise OSError(errno.ENODATA, "another program has shortened the file")
        if status.st_size > self._end:
            os.ftruncate(self._file.fileno(), self._end)


def _open_new(path: Path) -> io.FileIO:
    """Open a file that is ours alone, at its (empty) end and without a buffer."""
    try:
        file = io.FileIO(path, "a+b", opener=lambda name, flags: os.open(name, flags | _NEW, 0o600))
    except OSError as error:
        raise _unopened(path, error) from error
    try:
        _claim(file, path)
    except RunLogError:
        file.close()
        raise
    return file


def _unopened(path: Path, error: OSError) -> RunLogError:
    if _is_link(path):
        return RunLogError(f"{path}: a symbolic link, and run logs follow none; name the file itself")
    reason = error.strerror or str(error)
    if error.errno == errno.ENOENT:
        reason = f"its directory does not exist; make it: mkdir -p {shlex.quote(str(path.absolute().parent))}"
    return RunLogError(f"{path}: the run log cannot be opened: {reason}")


def _is_link(path: Path) -> bool:
    try:
        return path.is_symlink()
    except OSError:  # its name is too long
        return False


def _claim(file: io.FileIO, path: Path) -> None:
    # Without the lock, two ranks that were given one path could both find the file empty.
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise RunLogError(f"{path}: not a regular file; name a new one for the run log")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RunLogError(
            f"{path}: another process is writing this run log; give each its own path, as "
            f"{path.stem}.rank0{path.suffix} for rank 0"
        ) from error
    except OSError:
        pass  # a file system without locks: the check for an empty file has to do
    if os.fstat(file.fileno()).st_size > 0:
        raise RunLogError(f"{path}: not empty, and run logs are never overwritten; choose another path")
