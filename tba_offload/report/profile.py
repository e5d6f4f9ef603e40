"""Profiles of ``torch.profiler``, and steps of a run log put into them: kernels and transfers on one axis.

``prof.export_chrome_trace("trace.json")`` writes times in microseconds since ``baseTimeNanoseconds``, which
counts from the epoch, by the system's clock. A step tells by the same clock when it began.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba_offload.errors import RunLogError
from tba_offload.reading import UnreadableError, open_regular

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from tba_offload.report.timeline_event import TimelineEvent

_MOST_BYTES = 2**31
"""Bytes of the largest profile that is read: some minutes of a training."""

_GZIP = b"\x1f\x8b"
"""Bytes that a compressed file begins with."""


class Profile:
    """A profile that was read.

    Args:
        document: What the file holds.
        path: The file, for messages.

    Raises:
        RunLogError: It holds no profile.
    """

    def __init__(self, document: Any, path: Path) -> None:
        events = document.get("traceEvents") if isinstance(document, dict) else None
        base = document.get("baseTimeNanoseconds", 0) if isinstance(document, dict) else 0
        if not isinstance(events, list) or not isinstance(base, int):
            raise _no_profile(path)
        self._document: dict[str, Any] = document
        self._path = path
        self._events: list[Any] = events
        self._base_ns = base
        spans = [span for event in events if (span := _span(event)) is not None]
        if not spans:
            raise _no_profile(path)
        self._since = min(since for since, _ in spans)
        self._until = max(until for _, until in spans)

    def begin_of(self, step: TimelineEvent) -> float | None:
        """When a step began, on the axis of the profile; ``None`` if that is not known."""
        if step.began_unix_ns is None:
            return None
        return (step.began_unix_ns - self._base_ns) / 1000

    def holds(self, step: TimelineEvent) -> bool:
        """Whether a step, or a part of it, was profiled."""
        began = self.begin_of(step)
        return began is not None and began < self._until and began + step.seconds * 1e6 > self._since

    def those_in(self, steps: Sequence[TimelineEvent]) -> list[TimelineEvent]:
        """Return the steps that were profiled.

        Raises:
            RunLogError: None was.
        """
        found = [step for step in steps if self.holds(step)]
        if not found:
            numbers = ", ".join(str(step.step) for step in steps)
            raise RunLogError(
                f"{self._path}: the profile is of another time than step {numbers}: profile a step that is "
                "told over time, as each of session.step(trace=True) is, on the same machine"
            )
        return found

    @property
    def free_process(self) -> int:
        """Number of a process that no event is of."""
        taken = {event.get("pid") for event in self._events if isinstance(event, dict)}
        return max((pid for pid in taken if isinstance(pid, int)), default=0) + 1

    def with_events(self, events: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Return the profile with more events."""
        return self._document | {"traceEvents": [*self._events, *events]}


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile that ``export_chrome_trace`` or ``tensorboard_trace_handler`` wrote.

    Args:
        path: The file; it may be compressed by gzip.

    Raises:
        RunLogError: It cannot be read, or is no profile.
    """
    path = Path(path)
    try:
        with open_regular(path, _MOST_BYTES) as file:
            is_compressed = file.read(len(_GZIP)) == _GZIP
            file.seek(0)
            content = (gzip.GzipFile(fileobj=file) if is_compressed else file).read(_MOST_BYTES + 1)
    except (UnreadableError, OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunLogError(f"{path}: the profile cannot be read: {reason}") from error
    if len(content) > _MOST_BYTES:
        raise RunLogError(f"{path}: the profile cannot be read: larger than {_MOST_BYTES} bytes")
    try:
        document = json.loads(content.decode(errors="replace"), strict=False)
    except (ValueError, RecursionError):
        raise _no_profile(path) from None
    return Profile(document, path)


def _span(event: Any) -> tuple[float, float] | None:
    """When an event began and ended, in microseconds; ``None`` of one without a duration."""
    if not isinstance(event, dict) or event.get("ph") != "X":
        return None
    began, duration = event.get("ts"), event.get("dur", 0)
    if not all(isinstance(each, int | float) and math.isfinite(each) for each in (began, duration)):
        return None
    return float(began), float(began) + float(duration)  # type: ignore[arg-type]


def _no_profile(path: Path) -> RunLogError:
    return RunLogError(f"{path}: no profile of torch.profiler; write one with prof.export_chrome_trace")
