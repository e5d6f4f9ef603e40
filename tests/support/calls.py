"""Counts calls of Python on the training thread: what a hook costs, however busy the machine is."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

WAITS = {"_read_to_end", "_make_room", "quiesce"}
"""Functions in which the training thread waits for drives: how often it asks there is their affair."""


class Calls:
    """Counts calls of Python on this thread, those while it waits for a drive left out; a block each time."""

    def __init__(self) -> None:
        self.count = 0
        self._waits: FrameType | None = None

    def __enter__(self) -> None:
        sys.setprofile(self._look)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, _: object) -> None:
        if self._waits is not None:
            if event == "return" and frame is self._waits:
                self._waits = None
        elif event == "call":
            if frame.f_code.co_name in WAITS:
                self._waits = frame
            else:
                self.count += 1
