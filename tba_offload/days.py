"""What steps come to in a day that follow each other without a pause."""

from __future__ import annotations

DAY = 86_400
"""Seconds."""


def bytes_per_day(written: float, seconds: float) -> float:
    """Return what is written in a day; nothing by steps that take no time, of which nothing is known.

    Args:
        written: Bytes that a step writes.
        seconds: How long it takes.
    """
    return written / seconds * DAY if seconds else 0.0
