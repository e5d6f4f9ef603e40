"""Ctrl-C comes when the ledgers are in order: an interrupt inside them is put off until they are.

Python raises ``KeyboardInterrupt`` between any two operations of the main thread. No code that changes two
things which belong together stands that everywhere, and an error in a finalizer is printed and forgotten. So
while a step or an update is open the handler of the signal looks at the stack: where the ledger of an
offloader or of a store is being changed, it has the signal sent again a moment later. Waits are no such
place.
"""

from __future__ import annotations

import _thread
import _weakrefset
import signal
import threading
import time
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

AGAIN_AFTER = 0.001
"""Seconds after which an interrupt that was put off is tried again."""

AT_MOST = 1.0
"""Seconds that an interrupt is put off at most, in case that something hangs where nothing should."""

_PACKAGE = Path(__file__).parents[1]
_CHANGES_LEDGERS = (
    "transfer/",
    "store/",
    "device/",
    "capture/hooks.py",
    "capture/gradients.py",
    "capture/registry.py",
    "capture/scope.py",
    "capture/trace.py",
    "session/loop.py",
    "states/entries.py",
    "states/home.py",
    "states/host.py",
    "states/slots.py",
)
_LEDGERS = (weakref.__file__, _weakrefset.__file__, *(f"{_PACKAGE}/{part}" for part in _CHANGES_LEDGERS))
"""Files of which no function calls a layer: that may hang, and then an interrupt must get through.

Those of the standard library hold finalizers, in which an interrupt would be lost.
"""

_waits: set[CodeType] = set()
_owners: weakref.WeakSet[object] = weakref.WeakSet()
_put_off_since: float | None = None


def waits(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Mark a function that waits and change nothing: inside it an interrupt is raised at once."""
    _waits.add(function.__code__)
    return function


def put_up(owner: object) -> bool:
    """From now on interrupts are put off where they must be.

    Args:
        owner: Until it takes the shield down, or is no more, the shield stays up.

    Returns:
        Whether they are: not on other threads, nor where the program has a handler of its own, which stays.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    handler = signal.getsignal(signal.SIGINT)
    if handler not in {signal.default_int_handler, _interrupted}:
        return False
    _owners.add(owner)
    if handler is not _interrupted:
        _install(_interrupted)
    return True


def take_down(owner: object) -> None:
    """End :func:`put_up` when no other owner is left, unless the program has set a handler since."""
    _owners.discard(owner)
    if (
        not _owners
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is _interrupted
    ):
        _install(signal.default_int_handler)


@contextmanager
def put_off(owner: object) -> Iterator[None]:
    """Within the block interrupts are put off where they must be; see :func:`put_up`."""
    put_up(owner)
    try:
        yield
    finally:
        take_down(owner)


def _install(handler: Callable[[int, FrameType | None], object]) -> None:
    """Set the handler; an interrupt that was put off comes to this one, and its time is over."""
    global _put_off_since  # noqa: PLW0603 - a process has one main thread
    _put_off_since = None
    signal.signal(signal.SIGINT, handler)


def _interrupted(number: int, frame: FrameType | None) -> None:
    global _put_off_since  # noqa: PLW0603 - a process has one main thread
    now = time.monotonic()
    since = now if _put_off_since is None else _put_off_since
    if now - since < AT_MOST and _is_in_ledger(frame):
        _put_off_since = since
        _thread.start_new_thread(_send_again, (number,))
        return
    _put_off_since = None
    signal.default_int_handler(number, frame)


def _is_in_ledger(frame: FrameType | None) -> bool:
    """Whether a function that changes a ledger is being executed, and does not wait."""
    if frame is not None and frame.f_code in _waits:
        return False
    while frame is not None:
        if frame.f_code.co_filename.startswith(_LEDGERS) or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _send_again(number: int) -> None:
    time.sleep(AGAIN_AFTER)
    main = threading.main_thread().ident
    if main is not None:
        signal.pthread_kill(main, number)  # unlike interrupt_main() it also ends a wait
