"""How long a wait for a drive may last: first it is named, in the end it is an error.

A drive that stops answering must not be found out by the timeout of some collective operation on another
rank, ten minutes later and without a word about drives.
"""

from __future__ import annotations

import errno
import time
from _thread import LockType, allocate_lock
from functools import partial
from typing import TYPE_CHECKING

from tba_offload.errors import HangingError, StoreError, TransferError, warn
from tba_offload.store import interrupts
from tba_offload.store.base import WARN_AFTER, acquired

if TYPE_CHECKING:
    from collections.abc import Callable

    from tba_offload.store.base import IoFuture

HUNG = "check the drive and the system log. store.stall_seconds sets the limit"
"""The remedy where a drive has not answered."""


class Watchdog:
    """Waits for transfers, and for changes that they bring about, within a limit.

    Attributes:
        limit: Seconds that one wait may last while nothing moves; ``None`` for ever.
        waiters: What :meth:`notify` lets go of.
    """

    def __init__(self, limit: float | None) -> None:
        self.limit = limit
        self.waiters: list[LockType] = []

    def allows(self, seconds: float) -> bool:
        """Whether a wait may last so long."""
        return self.limit is None or seconds < self.limit

    def exhausted(self) -> HangingError:
        """Why a drive is left alone that has not answered within the limit."""
        return HangingError(errno.ETIMEDOUT, f"no answer within {self.limit:g} s")

    # ---- transfers -------------------------------------------------------------------------------

    def wait_for(self, transfer: IoFuture, describe: Callable[[], str], *, spent: float = 0.0) -> None:
        """Wait until a transfer has ended, failed or not.

        Args:
            transfer: The transfer.
            describe: What is waited for: layer, bytes and drive.
            spent: Seconds of the limit that earlier attempts took.

        Raises:
            TransferError: It has not ended within the limit.
        """
        if not transfer.done():
            self._wait(partial(has_ended, transfer), describe, spent)

    # ---- changes ---------------------------------------------------------------------------------

    def next_change(self) -> LockType:
        """Return a lock that is let go of at the next :meth:`notify`; the lock of the records is held.

        No condition variable: an interrupt in its Python code may leave it without the lock that the caller
        believes to hold.
        """
        change = allocate_lock()
        change.acquire()
        self.waiters.append(change)
        return change

    def wait_until_changed(self, change: LockType, describe: Callable[[], str]) -> None:
        """Wait for a change that :meth:`next_change` told of; no lock is held.

        Raises:
            TransferError: Nothing has changed within the limit.
        """
        self._wait(partial(acquired, change), describe, 0.0)

    def notify(self) -> None:
        """Wake the threads that wait for a change; the lock of the records is held."""
        while self.waiters:
            self.waiters.pop().release()

    def _wait(self, ended: Callable[[float | None], bool], describe: Callable[[], str], spent: float) -> None:
        limit = self.limit
        first = None if limit is None else limit * WARN_AFTER
        if ended(first) or limit is None or first is None:
            return
        warn(f"nothing has moved for {first:g} s: {describe()}", RuntimeWarning)
        if not ended(max(limit - first - spent, 0.0)):
            raise TransferError(f"nothing has moved for {limit:g} s: {describe()}; {HUNG}")


@interrupts.waits
def has_ended(transfer: IoFuture, timeout: float | None) -> bool:
    """Wait for a transfer; one that failed has ended too."""
    try:
        transfer.wait(timeout)
    except TimeoutError:
        return False
    except StoreError:
        return True
    return True


@interrupts.waits
def pause(seconds: float) -> None:
    """Wait before another attempt."""
    time.sleep(seconds)
