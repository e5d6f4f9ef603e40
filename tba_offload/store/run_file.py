"""The file of one store: made where no other user can interfere, and unlinked at once so that it cannot stay.

The directory that the user names may lie in a place where others can write, ``/tmp`` say. So the path is
walked one name at a time and every step is relative to a descriptor: what was checked is what is used.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shlex
import stat
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tba_offload.errors import ShortTransferError, StoreError, StoreFullError
from tba_offload.store import posix
from tba_offload.store.extents import round_up
from tba_offload.store.file_systems import UNKNOWN, Place, file_system_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tba_offload.store.file_systems import FileSystem

logger = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of the system when a file cannot grow."""

_IN_USE = {errno.ENOTEMPTY, errno.EBUSY}
"""Error numbers where the name of an open file keeps its directory from being removed."""
_GONE_AFTER = (0.001, 0.01, 0.1)
"""Seconds after which a removal is tried again: file systems in user space hear of a close later."""
_GROWTH = 256 << 20
_LEAST_GROWTH = 1 << 20
_SHARE = 8
"""Part of the room by which a file grows at most, beyond what is needed."""
_MAX_LINKS = 40
_SEARCH = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class RunFile:
    """An open file without a name, in a directory of its own that is gone again.

    Both exist for the moment between their creation and their removal only; after that the kernel frees the
    blocks when the last descriptor is closed, however the process ends.

    Args:
        directory: Where to create it: a directory that exists.
        capacity: The file never grows beyond this, bytes; ``None`` for no limit.
        while_named: Is called with the descriptor while the file has its name, and may be called again; for
            libraries that open a file by its path.

    Attributes:
        directory: The directory, as given.
        fd: The descriptor, open for reading and writing.
        size: Bytes that the file has been grown to.

    Raises:
        StoreError: The directory cannot be used, or others could tamper with the way to it.
    """

    def __init__(
        self, directory: str, capacity: int | None, while_named: Callable[[int], None] | None = None
    ) -> None:
        self.directory = directory
        self.size = 0
        self._capacity = capacity
        self._while_named = while_named
        self._left_behind: str | None = None
        with _named(directory):
            self._parent = open_directory(directory)
            try:
                self.fd = self._create()
            except BaseException:
                os.close(self._parent)
                raise

    def grow(self, size: int) -> None:
        """Make the file at least this long, with blocks allocated where the file system can.

        Raises:
            StoreFullError: There is no room; the file is as long as before.
        """
        if size <= self.size:
            return
        free = self.free_bytes()
        # Where little is left, other stores may need it as much.
        goal = round_up(size, min(_GROWTH, round_up(max(free // _SHARE, 1), _LEAST_GROWTH)))
        if self._capacity is not None:
            goal = max(size, min(goal, self._capacity))
        if goal - self.size > free:
            goal = size  # an attempt would take all that is left, for a moment
        if not self._extend(goal) and not (goal > size and self._extend(size)):
            raise StoreFullError(
                errno.ENOSPC,
                f"the file cannot grow from {self.size} to {size} bytes: {self.free_bytes()} bytes are free, "
                "of which a quota or `ulimit -f` may allow less; free some, name another directory or set "
                "store.capacity",
                self.directory,
            )

    def free_bytes(self) -> int:
        """Bytes that the file system has left for this user."""
        try:
            statistics = os.fstatvfs(self.fd)
        except OSError:  # one in user space, such as mergerfs, may tell it of what has a name only
            statistics = os.fstatvfs(self._parent)
        return statistics.f_bavail * statistics.f_frsize

    def file_system(self) -> FileSystem:
        """Where the file is."""
        found = file_system_of(self.fd)
        return file_system_of(self._parent) if found is UNKNOWN else found  # as in free_bytes()

    def close(self) -> None:
        """Close the descriptors, which frees the blocks.

        An error that the file system has left to be told now is of bytes that are not needed any more; and
        the run directory may be gone, or the server that has it.
        """
        with suppress(OSError):
            os.close(self.fd)
        if self._left_behind is not None:
            self._remove_left_behind(self._left_behind)
        os.close(self._parent)

    def _remove_left_behind(self, name: str) -> None:
        for seconds in (*_GONE_AFTER, 0.0):
            try:
                os.rmdir(name, dir_fd=self._parent)
            except FileNotFoundError:
                return
            except OSError as error:
                why = error.strerror
                if error.errno not in _IN_USE:
                    break
                time.sleep(seconds)
            else:
                return
        logger.warning("%s: %s stays: %s", self.directory, name, why)

    def abandon(self) -> None:
        """Close the descriptors in a forked child, which would keep the disk space; the parent goes on."""
        os.close(self.fd)
        os.close(self._parent)

    def _extend(self, size: int) -> bool:
        """Try one size; false if there is no room for it."""
        try:
            try:
                self._allocate(size)
            except OSError as error:
                os.ftruncate(self.fd, self.size)  # gives back what a failed attempt did get
                if error.errno in FULL:
                    return False
                raise
        except OSError as error:
            raise StoreError(
                error.errno, f"the file cannot grow: {error.strerror}", self.directory
            ) from error
        self.size = size
        return True

    def _allocate(self, size: int) -> None:
        try:
            posix.fallocate(self.fd, self.size, size - self.size)
        except OSError as error:
            # A container may forbid what it does not know.
            if error.errno not in {errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM}:
                raise
            os.ftruncate(self.fd, size)

    def _create(self) -> int:
        name = f"tba-{secrets.token_hex(8)}"
        os.mkdir(name, 0o700, dir_fd=self._parent)
        try:
            run = os.open(
                name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._parent
            )
            try:
                self._check_own(run)
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                fd = os.open("extents", flags, 0o600, dir_fd=run)
                try:
                    posix.overwrite_in_place(fd)
                    if self._while_named is not None:
                        self._while_named(fd)
                except BaseException:
                    with suppress(OSError):  # as in close()
                        os.close(fd)
                    raise
                finally:
                    os.unlink("extents", dir_fd=run)
            finally:
                os.close(run)
        finally:
            self._remove_directory(name)
        return fd

    def _check_own(self, run: int) -> None:
        status = os.fstat(run)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise StoreError(
                errno.EPERM,
                f"the new run directory has mode {stat.S_IMODE(status.st_mode):04o} and belongs to user "
                f"{status.st_uid}: either the file system keeps no modes (mount it with umask=077 and "
                f"uid={os.geteuid()}), or another process replaced it (name a directory that only you may "
                "write to)",
                self.directory,
            )

    def _remove_directory(self, name: str) -> None:
        """Remove the run directory, unless an unlinked file keeps it from being empty until the end."""
        try:
            os.rmdir(name, dir_fd=self._parent)
        except OSError as error:
            if error.errno not in _IN_USE:
                raise
            logger.warning(
                "%s: the file system keeps the names of open files, as those of networks do, so %s stays "
                "until the store is closed, and after a crash for good",
                self.directory,
                name,
            )
            self._left_behind = name


def short_transfer(directory: str, verb: str, nbytes: int, offset: int, moved: int) -> ShortTransferError:
    """Return the error of a transfer that moved fewer bytes than it should."""
    return ShortTransferError(
        errno.EIO,
        f"{verb} of {nbytes} bytes at offset {offset} stopped after {moved}; the drive or the file system is "
        "failing, or another process truncated the file: check the system log",
        directory,
    )


def check_directory(path: str) -> None:
    """Check that :func:`open_directory` would open a directory.

    Raises:
        StoreError: It would not; the message says what to do.
    """
    with _named(path):
        os.close(open_directory(path))


@contextmanager
def _named(directory: str) -> Iterator[None]:
    """Give an error of the system the directory's name and a remedy."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(
            error.errno, f"cannot create a file there: {error.strerror}; {_remedy_of(error)}", directory
        ) from error


def _remedy_of(error: OSError) -> str:
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return "raise `ulimit -n`"
    if error.errno in FULL:
        return "free some space or inodes there, or name another directory"
    return "name a directory that you may write to"


def lies_in_memory(path: str) -> bool:
    """Whether a directory, or the place where it would be made, is on a file system in host memory."""
    here = Path(path).expanduser().absolute()
    try:
        while not here.is_dir() and here != here.parent:
            here = here.parent
        fd = os.open(here, _SEARCH & ~os.O_NOFOLLOW)
    except OSError:
        return False  # what is wrong with it, opening the store says
    try:
        return file_system_of(fd).place is Place.MEMORY
    finally:
        os.close(fd)


def open_directory(path: str) -> int:
    """Open a directory, one name of its path at a time.

    Symbolic links are followed, except one that another user has put into a directory that everybody may
    write to. A directory that is missing is not made: its path is likely mistyped, or on a drive that is not
    mounted, and files would fill the disk of the system.

    Args:
        path: The directory; ``~`` is expanded.

    Returns:
        A descriptor that serves as ``dir_fd``.

    Raises:
        StoreError: A part of the path does not exist, a link on the way is not to be trusted, or there are
            too many.
        OSError: The directory cannot be reached.
    """
    names = [*reversed(Path(path).expanduser().absolute().parts[1:])]
    here = os.open("/", _SEARCH)
    links = 0
    try:
        while names:
            name = names.pop()
            try:
                below = os.open(name, _SEARCH, dir_fd=here)
            except FileNotFoundError:
                raise _missing(name, path) from None
            except NotADirectoryError:
                links += 1
                target = Path(_read_link(here, name, path, links))
                names += reversed(target.parts[1:] if target.is_absolute() else target.parts)
                if not target.is_absolute():
                    continue
                below = os.open("/", _SEARCH)
            os.close(here)
            here = below
    except BaseException:
        os.close(here)
        raise
    return here


def _missing(name: str, path: str) -> StoreError:
    missing = os.path.realpath(path) if Path(path).is_symlink() else path
    return StoreError(
        errno.ENOENT,
        f"{name!r} does not exist; mount its drive, or, if the path is right, make it: "
        f"mkdir -p {shlex.quote(missing)}",
        path,
    )


def _read_link(here: int, name: str, path: str, links: int) -> str:
    """Return the target of a link that may be followed."""
    link = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
    try:
        status = os.fstat(link)
        if not stat.S_ISLNK(status.st_mode):
            raise StoreError(errno.ENOTDIR, f"{name!r} is not a directory; name one", path)
        if links > _MAX_LINKS:
            raise StoreError(
                errno.ELOOP, f"more than {_MAX_LINKS} links lead there; name the directory itself", path
            )
        shared = os.fstat(here).st_mode & stat.S_IWOTH
        if shared and status.st_uid not in {0, os.geteuid()}:
            raise StoreError(
                errno.ELOOP,
                f"another user put the link {name!r} into a directory that everybody may write to; name the "
                "directory that it points to",
                path,
            )
        return os.readlink("", dir_fd=link)
    finally:
        os.close(link)
