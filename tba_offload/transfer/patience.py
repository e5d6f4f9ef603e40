"""How long a wait for a drive may last: first it is named, in the end it is an error.

A drive that stops answering must not be found out by the timeout of some collective operation on another
rank, ten minutes later and without a word about drives.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from tba_offload.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Callable

WARN_AFTER = 0.1
"""A wait is named in a warning after this share of the limit."""


class Patience:
    """Waits for transfers, within a limit.

    Args:
        limit: Seconds that one wait may last while nothing moves; ``None`` for ever.
    """

    def __init__(self, limit: float | None) -> None:
        self.limit = limit
        self._first = None if limit is None else limit * WARN_AFTER

    def wait(self, ended: Callable[[float | None], bool], describe: Callable[[], str]) -> None:
        """Waits until something has ended.

        Args:
            ended: Waits for it, at most so many seconds, or for ever if ``None``; whether it has ended.
            describe: What is waited for: layer, bytes and drive.

        Raises:
            TransferError: It has not ended within the limit.
        """
        if ended(self._first) or self.limit is None or self._first is None:
            return
        warnings.warn(f"nothing has moved for {self._first:g} s: {describe()}", RuntimeWarning, stacklevel=2)
        if not ended(self.limit - self._first):
            raise TransferError(
                f"nothing has moved for {self.limit:g} s: {describe()}; check the drive and the system log. "
                "store.stall_seconds sets the limit"
            )
