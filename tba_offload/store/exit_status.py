"""An error at the end of the interpreter is one of the process: Python alone prints it and exits with 0."""

from __future__ import annotations

import sys
from functools import wraps
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Function = Callable[[], None]


class _FailingStream:
    """A stream that cannot be flushed once the interpreter ends, and until then is the one it stands for."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        """Flushes the stream."""
        if self._stream is not None:
            self._stream.flush()
        if sys.is_finalizing():
            raise OSError("an error at the exit was printed")


def failing(function: Function) -> Function:
    """Return an ``atexit`` callback after whose error the process does not exit with 0.

    Python prints what callbacks raise and drops it. ``os._exit`` would cut off the callbacks of others. But
    when all have run Python flushes the standard streams, and exits with 120 if that fails, as the
    documentation of ``sys.exit`` says.
    """

    @wraps(function)
    def callback() -> None:
        try:
            function()
        except BaseException:
            if not hasattr(sys, "last_value"):  # else an error has ended the program, and the status tells
                sys.stderr = _FailingStream(sys.stderr)
            raise

    return callback
