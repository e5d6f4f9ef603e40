"""What updates with offloaded states were like."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tba_offload.states.home import Homes


@dataclass(frozen=True, slots=True)
class StatesRecord:
    """What one update of an optimizer with offloaded states was like.

    Attributes:
        seconds: The whole update, without the closure and hooks; with what of it was done in backward.
        waited_seconds: Of these, what the thread that trains waited for drives.
        read_bytes: Bytes of states that were read.
        written_bytes: Bytes of states that were written, and of parameters to take an update back.
        states_bytes: Bytes of all states that are away between updates.
        slot_bytes: Bytes of the slots, which stay on the device, and of buffers for parameters.
        sub_groups: Sub-groups that were updated.
        staying: Of all, how many stay in memory between updates.
        staying_bytes: Bytes of their states.
        in_backward: Of these, how many in backward.
        predicted_seconds: What ``states.default: auto`` predicted for ``seconds``, or what follows from the
            rates of device and processor where ``states.update`` has both work; None where nothing was.
        on_host: Of the sub-groups, how many the processor updated.
        host_bytes: Bytes of host memory that it has for that, for states and for copies.
    """

    seconds: float
    waited_seconds: float
    read_bytes: int
    written_bytes: int
    states_bytes: int
    slot_bytes: int
    sub_groups: int
    staying: int = 0
    staying_bytes: int = 0
    in_backward: int = 0
    predicted_seconds: float | None = None
    on_host: int = 0
    host_bytes: int = 0


@dataclass(slots=True)
class _Sums:
    """What was done since the last record."""

    seconds: float = 0.0
    waited: float = 0.0
    read: int = 0
    written: int = 0

    def add(self, seconds: float, waited: float, read: int, written: int) -> None:
        """Count what was done for a time."""
        self.seconds += seconds
        self.waited += waited
        self.read += read
        self.written += written


class Tally:
    """Counts what is done for one update, whenever that is.

    Args:
        homes: Count bytes, and seconds of waiting.
    """

    def __init__(self, homes: Homes) -> None:
        self._homes = homes
        self._sums = _Sums()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Return what is done within counts."""
        homes = self._homes
        began, waited = time.perf_counter(), homes.waited
        read, written = homes.read_bytes, homes.written_bytes
        try:
            yield
        finally:
            self._sums.add(
                time.perf_counter() - began,
                homes.waited - waited,
                homes.read_bytes - read,
                homes.written_bytes - written,
            )

    def record(self, sizes: Mapping[str, int], *, predicted: float | None = None) -> StatesRecord:
        """Return the record of an update that is done, and count anew.

        Args:
            sizes: What else the record says.
            predicted: Seconds that the update was expected to take.
        """
        sums, self._sums = self._sums, _Sums()
        return StatesRecord(
            seconds=sums.seconds,
            waited_seconds=sums.waited,
            read_bytes=sums.read,
            written_bytes=sums.written,
            predicted_seconds=predicted,
            **sizes,
        )
