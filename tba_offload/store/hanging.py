"""Calls to a drive that may never return: they are made on a thread of their own, and given up in time."""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING, Generic, TypeVar

from tba_offload.errors import HangingError
from tba_offload.store.base import in_ticks
from tba_offload.store.lanes import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from tba_offload.device import Device
    from tba_offload.store.engine import QueuedStore

Result = TypeVar("Result")


def ask(
    work: Callable[[], Result],
    place: str,
    limit: float | None,
    *,
    undo: Callable[[Result], object] = lambda _: None,
) -> Result:
    """Do some work with a drive, and return or raise what it does.

    Args:
        work: What to do, on another thread.
        place: The drive's directory, for the message.
        limit: Seconds that it may take; ``None`` for no limit.
        undo: Undoes the work should it end later, on that thread.

    Raises:
        HangingError: It takes longer.
        StoreError: The process may have no more threads.
    """
    question = _Question(work, undo)
    start_thread(question)
    try:
        in_ticks(question.ends_within, limit)
    except BaseException:
        question.give_up()
        raise
    if question.give_up():
        raise HangingError(
            errno.ETIMEDOUT,
            f"no answer for {limit:g} s; check the drive and the system log, or name another directory. "
            "store.stall_seconds sets the limit",
            place,
        )
    return question.result()


def opened(make: Callable[[], QueuedStore], place: str, device: Device, limit: float | None) -> QueuedStore:
    """Open a store.

    Args:
        make: Opens it.
        place: Its directory.
        device: The device that activations lie on.
        limit: Seconds that its drive may go without an answer; ``None`` for no limit.

    Raises:
        HangingError: The directory does not answer.
        StoreError: It cannot be used.
    """

    def work() -> QueuedStore:
        device.bind_thread()
        return make()

    return ask(work, place, limit, undo=_close)


def _close(store: QueuedStore) -> None:
    store.close()


class _Question(threading.Thread, Generic[Result]):
    """Work that may hang."""

    def __init__(self, work: Callable[[], Result], undo: Callable[[Result], object]) -> None:
        super().__init__(name="tba-ask", daemon=True)
        self._work = work
        self._undo = undo
        self._lock = threading.Lock()  # around the decision whether the result comes in time
        self._given_up = False
        self._results: list[Result] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work; if it was given up meanwhile, undoes it."""
        try:
            result = self._work()
        except BaseException as error:  # noqa: BLE001 - every failure reaches the thread that waits
            self._error = error
            return
        with self._lock:
            self._results.append(result)
            too_late = self._given_up
        if too_late:
            self._undo(result)

    def ends_within(self, seconds: float) -> bool:
        """Wait for the end of the work."""
        self.join(seconds)
        return not self.is_alive()

    def give_up(self) -> bool:
        """Wait no longer; whether the work has not ended."""
        with self._lock:
            self._given_up = not self._results and self._error is None
            return self._given_up

    def result(self) -> Result:
        """Return what the work gave."""
        try:
            if self._error is not None:
                raise self._error
            return self._results.pop()
        finally:
            self._error = None  # it knows this frame, and so all callers and what they hold
