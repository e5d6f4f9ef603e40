"""What a session is in the midst of."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tba_offload.errors import SessionError

if TYPE_CHECKING:
    from tba_offload.device.memory import MemoryMeter
    from tba_offload.session.step import Step


class Ongoing:
    """Which step is open, and whether the session may be used at all.

    Attributes:
        step: The step that is open, if one is.
        meter: Of its memory; ``None`` if no step is open, or its memory is not measured.
        number: How many have ended well so far, which is the number of the one that is open.
        is_closed: Whether the session was closed.
        is_inert: Whether this is a forked child: locks, threads and descriptors are those of the parent.
        lock: Held while a step that opened by itself begins or ends: other threads ask whether it is over.
    """

    def __init__(self) -> None:
        self.step: Step | None = None
        self.meter: MemoryMeter | None = None
        self.number = 0
        self._opener = 0  # the thread that has opened the step
        self._seconds_between = 0.0  # of the steps that optimizers have made since the last step was open
        self.is_closed = False
        self.is_inert = False
        self.lock = threading.RLock()

    def opened(self, step: Step) -> None:
        """Record that a step is open."""
        step.updates.follow(self._seconds_between)
        self._seconds_between = 0.0
        self.step, self.meter = step, step.memory.meter
        self._opener = threading.get_ident()

    def fail(self) -> None:
        """Record that a forward has raised an exception: the step that is open comes to nothing."""
        if self.step is not None:
            self.step.state.fail()

    @property
    def is_of_another_thread(self) -> bool:
        """Whether another thread than the calling one has opened the step."""
        return self.step is not None and self._opener != threading.get_ident()

    def updated_between(self, seconds: float) -> None:
        """Record that an optimizer has made its step while no step was open."""
        self._seconds_between += seconds

    def ended(self) -> Step | None:
        """Close the step that was open, and return it."""
        step, self.step, self.meter = self.step, None, None
        return step

    def counted(self) -> None:
        """Record that it has ended well."""
        self.number += 1

    def close(self) -> None:
        """Record that the session is closed."""
        self.is_closed = True

    def become_inert(self) -> None:
        """Record that the process was forked, and this is the child."""
        self.is_inert = True
        self.step = self.meter = None
        self.lock = threading.RLock()  # another thread of the parent may have held it

    def check_usable(self) -> None:
        """Check that steps can be made.

        Raises:
            SessionError: The session is closed, or its process was forked and this is the child.
        """
        if self.is_inert:
            raise SessionError("this session belongs to the parent process; attach the model in the child")
        if self.is_closed:
            raise SessionError("this session is closed; attach the model again")

    @property
    def state_bytes(self) -> int:
        """Bytes by which optimizers have let memory grow in this step."""
        return self.step.memory.state_bytes if self.step is not None else 0

    def look_at_memory(self, grows_by: int = 0) -> None:
        """Note what is live, for a meter that sees only what it looks at."""
        if self.meter is not None:
            self.meter.sample(grows_by)
