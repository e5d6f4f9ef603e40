"""Number of bytes written in one day of training without pauses."""

from __future__ import annotations

DAY = 86_400
"""Number of seconds in a day."""


def bytes_per_day(written: float, seconds: float) -> float:
    """Return the number of bytes written in one day; 0 if the duration of a step is unknown.

    Args:
        written: Number of bytes that a step writes.
        seconds: Duration of a step; 0 if unknown.
    """
    return written / seconds * DAY if seconds else 0.0
