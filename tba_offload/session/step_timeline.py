"""One step over time, for its user."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tba_offload.errors import SessionError
from tba_offload.report.log import TimelineEvent, read_event

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping


class StepTimeline:
    """A step over time, once it has ended, if it was recorded.

    Args:
        wanted: Whether the user asked for it.

    Attributes:
        is_wanted: As given.
    """

    def __init__(self, *, wanted: bool) -> None:
        self.is_wanted = wanted
        self._figures: Mapping[str, object] | None = None

    def tell(self, figures: Mapping[str, object]) -> None:
        """Record that the step has ended, and was recorded."""
        self._figures = figures

    @property
    def event(self) -> TimelineEvent:
        """What was recorded.

        Raises:
            SessionError: The step was not recorded, has not ended, or was left by an exception.
        """
        if self._figures is None:
            raise SessionError(
                "this step was not recorded over time: ask for it with session.step(trace=True), and look at "
                "it after its end"
            )
        return read_event(TimelineEvent, self._figures)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the step as a picture (``.svg``) or as a trace (``.json``).

        Args:
            path: The file.

        Raises:
            SessionError: The step was not recorded.
            ConfigError: Another suffix.
            MissingDependencyError: A picture needs matplotlib, which is not installed.
            OSError: The file cannot be written.
        """
        from tba_offload.report.timeline import write_timeline

        write_timeline(self.event, path)
