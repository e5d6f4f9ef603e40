"""Whether a store is open: closed, stopped by an error, or inert in a forked child."""

from __future__ import annotations

import threading

from tba_offload.errors import SessionError


class Life:
    """Of one store.

    Args:
        name: What messages call it.

    Attributes:
        closed: Whether it takes nothing any more; set under the lock of its leases.
        forked: Whether this is a forked child, in which it is inert.
        callback_error: What the first callback that failed on an I/O thread raised.
    """

    def __init__(self, name: str) -> None:
        self.closed = False
        self.forked = False
        self.callback_error: BaseException | None = None
        self._name = name

    def check_open(self) -> None:
        """Check that transfers may be queued.

        Raises:
            SessionError: They may not.
        """
        if self.closed:
            raise SessionError(f"the store {self._name} is closed")
        if self.callback_error is not None:
            raise SessionError(
                f"the store {self._name} stopped: a callback of a transfer failed"
            ) from self.callback_error

    def check_process(self) -> None:
        """Check that this is no forked child.

        Before a lock is taken: a thread that does not exist in the child may have held it at the fork.

        Raises:
            SessionError: It is one.
        """
        if self.forked:
            raise SessionError(
                f"the store {self._name} was opened before this process was forked; only the parent can use "
                "it, not a forked child"
            )

    def callback_failed(self, failure: BaseException) -> None:
        """Tell of a callback's error, which stops the store."""
        if self.callback_error is None:
            self.callback_error = failure
        hook_arguments = (type(failure), failure, failure.__traceback__, threading.current_thread())
        threading.excepthook(threading.ExceptHookArgs(hook_arguments))
