"""What is known of a drive: whether it is in service, whether it is full, and how fast it is."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from tba_offload.errors import OutOfServiceError, StoreFullError, is_of_drive
from tba_offload.store.base import DriveLoad
from tba_offload.store.meters import Meter
from tba_offload.store.service import Service

if TYPE_CHECKING:
    from tba_offload.errors import StoreError


class Refusal:
    """What a store found no room for: it is not asked for again for a while.

    Attributes:
        service: How long.
    """

    def __init__(self, name: str) -> None:
        self.service = Service()
        self._size = 0
        self._name = name

    def check(self, size: int) -> None:
        """Check that growing to ``size`` is worth a try.

        Raises:
            StoreFullError: There was no room a moment ago.
        """
        if size >= self._size and not self.service.admits():
            raise StoreFullError(errno.ENOSPC, f"no room, as a moment ago: {self.service.cause}", self._name)

    def note(self, size: int, error: StoreFullError) -> None:
        """There is no room for ``size`` bytes."""
        self._size = size
        self.service.failed(error)


class Condition:
    """Of the drive of one store.

    Args:
        name: Its name, for messages.

    Attributes:
        service: Whether it takes writes.
        refusal: What it had no room for.
        writes: How fast it is written.
        reads: How fast it is read.
    """

    def __init__(self, name: str) -> None:
        self.service = Service()
        self.refusal = Refusal(name)
        self.writes = Meter()
        self.reads = Meter()
        self._name = name
        self._outage: str | None = None

    def fail(self, error: BaseException) -> None:
        """Take the drive out of service; that there was no room is told elsewhere."""
        self.service.failed(error)
        if self._outage is None and not isinstance(error, StoreFullError):
            self._outage = str(error)

    def note_write(self, error: StoreError | None) -> None:
        """Record that a write has ended: tells whether the drive is in service."""
        if error is None:
            self.service.succeeded()
        elif is_of_drive(error):
            self.fail(error)

    def out_of_service(self) -> OutOfServiceError:
        """Return the error of what is refused meanwhile."""
        cause = self.service.cause
        return OutOfServiceError(
            errno.EIO, f"left alone since it failed, to be tried again: {cause}", self._name
        )

    def resume(self) -> None:
        """Put the drive back in service."""
        self.service.resume()
        self.refusal.service.resume()

    def take_outages(self) -> list[tuple[str, str]]:
        """Return what took the drive out of service since the last call."""
        if self._outage is None:
            return []
        outage, self._outage = self._outage, None
        return [(self._name, outage)]

    def take_load(self, capacity: int | None, high_water: int) -> DriveLoad:
        """Return what the drive has moved since the last call.

        Args:
            capacity: The most bytes that it may hold, as far as that is known.
            high_water: The most that it has held.
        """
        in_service = self.service.cause is None
        room = capacity if self.refusal.service.cause is None else high_water
        return DriveLoad(
            self.writes.take(), self.reads.take(), in_service=in_service, room=room if in_service else 0
        )
