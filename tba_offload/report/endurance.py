"""How long drives last: bytes that a run writes, held against what their makers allow to be written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tba_offload.days import bytes_per_day
from tba_offload.formatting import readable_size, significant
from tba_offload.report.log import PLAN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tba_offload.report.digest import Digest
    from tba_offload.report.log import RunLog

_AT_MOST = 10**18
"""Days of life that are told; of a drive that is hardly written there would be no end."""


@dataclass(frozen=True, slots=True)
class Life:
    """How long drives last that are written day and night.

    Attributes:
        bytes_per_day: What is written to all of them in a day.
        rated_bytes: What their makers allow to be written to them together (TBW).
        amplification: What a drive writes to its cells for each byte that it is given, as a factor beside the
            one that the rating has in it already.
        used_bytes: What of the rating is used up.
        rated_by: Where the rating comes from, in words.
    """

    bytes_per_day: float
    rated_bytes: float
    amplification: float = 1.0
    used_bytes: float = 0.0
    rated_by: str = "as given"

    @property
    def days(self) -> float:
        """Days until the rating is reached."""
        left = max(self.rated_bytes - self.used_bytes, 0.0)
        worn = self.bytes_per_day * self.amplification
        return min(left / worn, _AT_MOST) if worn else _AT_MOST

    def __str__(self) -> str:
        used = f", of which {terabytes(self.used_bytes)} are used up" if self.used_bytes else ""
        return (
            f"{terabytes(self.bytes_per_day)} a day, times {self.amplification:g} that drives make of it, "
            f"against {terabytes(self.rated_bytes)} that they are rated for ({self.rated_by}){used}: "
            f"{self.span}"
        )

    @property
    def span(self) -> str:
        """How long that is."""
        return (
            f"{significant(self.days)} days" if self.days < 730 else f"{significant(self.days / 365)} years"
        )

    def as_json(self) -> dict[str, object]:
        """For programs."""
        return {
            "bytes_per_day": self.bytes_per_day,
            "rated_bytes": self.rated_bytes,
            "rated_by": self.rated_by,
            "amplification": self.amplification,
            "used_bytes": self.used_bytes,
            "days": self.days,
        }


def endurance(digest: Digest, rated: int | None) -> list[str]:
    """Return what the run does to drives, in sentences.

    Args:
        digest: The run.
        rated: Bytes that the drives together may be written in their life, by their maker; ``None`` if that
            is not known.
    """
    written, seconds = digest.written_bytes, digest.seconds
    if not written:
        return ["The median step writes nothing to drives."]
    if not seconds:
        return [f"The median step writes {readable_size(written)} to drives."]
    day = bytes_per_day(written, seconds)
    told = (
        f"The median step writes {readable_size(written)} to drives in {significant(seconds)} s. Day and "
        f"night that would be {terabytes(day)} a day, on all drives of this log together."
    )
    if rated is None:
        ask = (
            "How long drives last follows from the bytes that their maker allows to be written (TBW): "
            "tba-offload report --rated 600TB takes their sum, and tba-offload doctor DIR --run RUN.jsonl "
            "asks drives how worn they are."
        )
        return [told, *_limit(digest), ask]
    span = Life(day, rated).span
    return [
        told,
        *_limit(digest),
        f"Drives that are rated for {terabytes(rated)} together would have reached that after {span}.",
    ]


def _limit(digest: Digest) -> Iterator[str]:
    """Yield what the policy allows, and whether the plan would write more without that."""
    writes = limit_in(digest.log)
    if writes is None:
        return
    bound = "It keeps the plan from offloading more." if writes["bounds"] else "It does not bound the plan."
    yield (
        f"The policy allows {terabytes(writes['allowed'])} a day (store.write_bytes_per_day), of which the "
        f"last plan writes up to {terabytes(writes['bytes_per_day'])}. {bound}"
    )


def limit_in(log: RunLog) -> dict[str, Any] | None:
    """Return the ``writes`` of the last plan of a run; None if nothing limits that, or there is no plan."""
    plans = [event for event in log.others if event["event"] == PLAN]
    writes: Any = plans[-1].get("writes") if plans else None
    return writes  # type: ignore[no-any-return]


def terabytes(nbytes: float) -> str:
    """Return a number of bytes as makers of drives give it."""
    return f"{significant(nbytes / 1e12)} TB"
