"""Figures for a day of steps without a pause."""

from __future__ import annotations

DAY = 86_400
"""Seconds."""


def bytes_per_day(written: float, seconds: float) -> float:
    """Return the bytes that steps write in a day; 0 if the time of a step is unknown.

    Args:
        written: Bytes that a step writes.
        seconds: Time of a step; 0 if unknown.
    """
    return written / seconds * DAY if seconds else 0.0
