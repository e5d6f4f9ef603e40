"""How long a wait for a drive may last: first it is named, in the end it is an error.

A drive that stops answering must not be found out by the timeout of some collective operation on another
rank, ten minutes later and without a word about drives.
"""

from __future__ import annotations

import errno
import warnings
from typing import TYPE_CHECKING

from tba_offload.errors import StoreError, TransferError
from tba_offload.store.base import WARN_AFTER

if TYPE_CHECKING:
    from collections.abc import Callable

HUNG = "check the drive and the system log. store.stall_seconds sets the limit"
"""The remedy where a drive has not answered."""


class Patience:
    """Waits for transfers, within a limit.

    Args:
        limit: Seconds that one wait may last while nothing moves; ``None`` for ever.
    """

    def __init__(self, limit: float | None) -> None:
        self.limit = limit
        self._first = None if limit is None else limit * WARN_AFTER

    def allows(self, seconds: float) -> bool:
        """Whether a wait may last so long."""
        return self.limit is None or seconds < self.limit

    def wait(
        self, ended: Callable[[float | None], bool], describe: Callable[[], str], *, spent: float = 0.0
    ) -> None:
        """Waits until something has ended.

        Args:
            ended: Waits for it, at most so many seconds, or for ever if ``None``; whether it has ended.
            describe: What is waited for: layer, bytes and drive.
            spent: Seconds of the limit that earlier attempts took.

        Raises:
            TransferError: It has not ended within the limit.
        """
        if ended(self._first) or self.limit is None or self._first is None:
            return
        warnings.warn(f"nothing has moved for {self._first:g} s: {describe()}", RuntimeWarning, stacklevel=2)
        if not ended(max(self.limit - self._first - spent, 0.0)):
            raise TransferError(f"nothing has moved for {self.limit:g} s: {describe()}; {HUNG}")

    def exhausted(self) -> StoreError:
        """Why a drive is left alone that has not answered within the limit."""
        return StoreError(errno.ETIMEDOUT, f"no answer within {self.limit:g} s")
