"""Errors that come after a write has returned: they are asked for before the write counts as done.

A network file system may take bytes into a cache of this machine and find out later that the server is full,
or gone. The system tells so once, by the next ``fsync`` or ``close`` of the file, whichever thread makes that
call, and it does not tell which bytes were lost. So all writes that were under way then count as failed.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from tba_offload.store import posix

if TYPE_CHECKING:
    from tba_offload.store.run_file import RunFile


class LateErrors:
    """Of one file.

    Args:
        file: The file.
        is_direct: Whether it is written by direct I/O.

    Attributes:
        file_system: Where it is.
        wanted: Whether that reports errors late; else nothing is asked for.
    """

    def __init__(self, file: RunFile, *, is_direct: bool) -> None:
        system = file.file_system()
        self.file_system = system
        self.wanted = system.reports_late_directly or (system.reports_late and not is_direct)
        self._file = file
        self._lock = threading.Lock()  # so that no write looks between an error and its note
        self._number = 0
        self._errno = 0

    def begin(self) -> int:
        """Before a write: what :meth:`check` has to be given after it."""
        return self._number

    def check(self, before: int) -> None:
        """After a write: has the file system say whether it has the bytes.

        Args:
            before: What :meth:`begin` returned before the write.

        Raises:
            OSError: It does not have them, or not those of another write that was under way meanwhile.
        """
        if not self.wanted:
            return
        with self._lock:
            try:
                posix.confirm(self._file.fd)
            except OSError as error:
                self._number += 1
                self._errno = error.errno or 0
                raise
            if self._number != before:
                raise OSError(self._errno, os.strerror(self._errno))
