"""Decisions that are made little by little, after steps.

A search for a plan plays hundreds of steps on the simulator. It has a thread of its own only so that it can
be left off anywhere and gone on with: of the threads of a process one runs Python at a time, and a search
beside training would make every hook wait. So that thread runs while the training thread waits for it, and
for no longer than it is told.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import TYPE_CHECKING, Generic, TypeVar

from tba_offload.plan.simulate import pausing

if TYPE_CHECKING:
    from collections.abc import Callable

Answer = TypeVar("Answer")


_INTERRUPTED = 1.0
"""Seconds after an interrupt after which the search has certainly stopped: it looks every 50 microseconds."""


class DroppedError(Exception):
    """No answer is wanted any longer."""


class Thinking(ABC, Generic[Answer]):
    """Something that is being found out."""

    @abstractmethod
    def go_on(self, seconds: float) -> bool:
        """Go on with it for so long at most; tell whether the answer is known then."""

    @abstractmethod
    def answer(self) -> Answer:
        """Return the answer, however long it takes.

        Raises:
            Exception: Whatever was raised instead of giving one.
        """

    @abstractmethod
    def give_up(self) -> None:
        """No answer is wanted any longer."""


class AtOnce(Thinking[Answer]):
    """Is found out as soon as it is asked, however long it takes.

    Args:
        work: Finds the answer.
    """

    def __init__(self, work: Callable[[], Answer]) -> None:
        self._work = work

    def go_on(self, seconds: float) -> bool:  # noqa: ARG002 - see above
        """Return True: the answer is known when it is asked for."""
        return True

    def answer(self) -> Answer:
        """Find it."""
        return self._work()

    def give_up(self) -> None:
        """Nothing has begun."""


class InSlices(Thinking[Answer]):
    """Is found out in slices of time. What is left when this is forgotten is given up.

    Args:
        work: Finds the answer; plays plans on the simulator, and changes nothing.
    """

    def __init__(self, work: Callable[[], Answer]) -> None:
        self._future: Future[Answer] = Future()
        self._gate = _Gate()
        self._thread = threading.Thread(
            target=_run, args=(self._gate, self._future, work), name="tba-plan", daemon=True
        )
        self._thread.start()
        self._give_up = weakref.finalize(self, self._gate.give_up)

    def go_on(self, seconds: float) -> bool:
        """Let the thread run for so long at most."""
        if not self._future.done():
            self._gate.open_for(seconds)
        return self._future.done()

    def answer(self) -> Answer:
        """Let the thread run to its end."""
        self.go_on(math.inf)
        return self._future.result()

    def give_up(self) -> None:
        """Record that the thread ends now."""
        self._give_up()
        self._thread.join()


class _Gate:
    """Two locks by which one of two threads runs at a time; a lock that is free says whose turn it is."""

    def __init__(self) -> None:
        self._worker = threading.Lock()
        self._trainer = threading.Lock()
        self._worker.acquire()
        self._trainer.acquire()
        self._until = 0.0
        self._is_given_up = False

    def open_for(self, seconds: float) -> None:
        """Record that the training thread lets the other one run, and waits until that has come back."""
        self._until = time.perf_counter() + seconds
        try:
            self._worker.release()
            self._trainer.acquire()
        except BaseException:  # an interrupt: the other thread comes back at once, unless it did not go yet
            self._until = 0.0
            self._trainer.acquire(timeout=_INTERRUPTED)
            raise

    def give_up(self) -> None:
        """Record that the other thread ends, as soon as it is its turn: now."""
        self._is_given_up = True
        self._worker.release()

    def enter(self) -> None:
        """Record that the other thread waits until it is its turn."""
        self._worker.acquire()
        if self._is_given_up:
            raise DroppedError

    def leave(self) -> None:
        """Record that the other thread has nothing more to do, or has run for long enough."""
        self._trainer.release()

    def pause(self) -> None:
        """Record that the other thread calls it all the time."""
        if time.perf_counter() >= self._until:
            self.leave()
            self.enter()


def _run(gate: _Gate, future: Future[Answer], work: Callable[[], Answer]) -> None:
    pausing.set(gate.pause)
    try:
        gate.enter()
        try:
            answer = work()
        except DroppedError:
            raise
        except BaseException as error:  # noqa: BLE001 - raised where the answer is taken, which waits
            future.set_exception(error)
        else:
            future.set_result(answer)
        gate.leave()
    except DroppedError:
        return
