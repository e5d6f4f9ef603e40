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
        waited_seconds: Of these, waiting for drives.
        read_bytes: Bytes of states that were read.
        written_bytes: Bytes of states that were written, and of parameters to take an update back.
        states_bytes: Bytes of all states that are away between updates.
        slot_bytes: Bytes of the slots, which stay on the device, and of buffers for parameters.
        sub_groups: Sub-groups that were updated.
        in_backward: Of these, how many in backward.
        taken_back: Updates of sub-groups in backward that were in vain, since the step was another one.
    """

    seconds: float
    waited_seconds: float
    read_bytes: int
    written_bytes: int
    states_bytes: int
    slot_bytes: int
    sub_groups: int
    in_backward: int = 0
    taken_back: int = 0


class Tally:
    """Counts what is done for one update, whenever that is.

    Args:
        homes: Count bytes, and seconds of waiting.
    """

    def __init__(self, homes: Homes) -> None:
        self._homes = homes
        self._seconds = self._waited = 0.0
        self._read = self._written = self._taken_back = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """What is done within counts."""
        homes = self._homes
        began, waited = time.perf_counter(), homes.waited
        read, written = homes.read_bytes, homes.written_bytes
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - began
            self._waited += homes.waited - waited
            self._read += homes.read_bytes - read
            self._written += homes.written_bytes - written

    def took_back(self, sub_groups: int) -> None:
        """Updates were in vain."""
        self._taken_back += sub_groups

    def record(self, sizes: Mapping[str, int]) -> StatesRecord:
        """The update is done; counting begins anew.

        Args:
            sizes: What else the record says.
        """
        record = StatesRecord(
            seconds=self._seconds,
            waited_seconds=self._waited,
            read_bytes=self._read,
            written_bytes=self._written,
            taken_back=self._taken_back,
            **sizes,
        )
        self.__init__(self._homes)  # type: ignore[misc]
        return record
