"""What updates of an optimizer whose states lie on drives cost: their room, and the time of the drives."""

from __future__ import annotations

from dataclasses import dataclass

from tba_offload.formatting import readable_rate, readable_size, significant

STATE_BYTES = 8
"""Bytes of Adam's two states for each parameter, in fp32."""

_VERSIONS = {"step": 1, "backward": 2}
"""Copies of the states that drives have room for, by ``states.when``: with ``backward`` an update can be
taken back until the step comes, so the states before it stay beside those after it."""


@dataclass(frozen=True, slots=True)
class Update:
    """One update of Adam with all states on drives.

    Attributes:
        parameters: That are trained by one process.
        bytes_per_second: Of the drives together, read and written at once, added.
        free_bytes: Free on them.
    """

    parameters: int
    bytes_per_second: float
    free_bytes: int

    @property
    def states_bytes(self) -> int:
        """Bytes of all states."""
        return STATE_BYTES * self.parameters

    @property
    def seconds(self) -> float:
        """Seconds in which the drives read all states and write them: no update is faster."""
        return 2 * self.states_bytes / self.bytes_per_second

    @property
    def fits(self) -> tuple[str, ...]:
        """The values of ``states.when`` for which there is room."""
        return tuple(
            when for when, copies in _VERSIONS.items() if copies * self.states_bytes <= self.free_bytes
        )

    def __str__(self) -> str:
        return (
            f"{readable_size(self.states_bytes)} of Adam, {STATE_BYTES} bytes for each of "
            f"{self.parameters:,} parameters; an update reads and writes them once, "
            f"{significant(self.seconds)} s at {readable_rate(self.bytes_per_second)}, beside backward and "
            f"the next forward as far as these take; {self._room()}"
        )

    def _room(self) -> str:
        free = readable_size(self.free_bytes)
        if not self.fits:
            return f"there is no room for them in {free}"
        return f"room in {free} for updates in {' and in '.join(self.fits)}"

    def as_json(self) -> dict[str, object]:
        """For programs."""
        return {
            "parameters": self.parameters,
            "states_bytes": self.states_bytes,
            "bytes_per_second": self.bytes_per_second,
            "seconds": self.seconds,
            "free_bytes": self.free_bytes,
            "fits": list(self.fits),
        }
