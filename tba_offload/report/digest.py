"""A run in figures: what a page and its tables say of all steps together."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tba_offload.formatting import readable_size
from tba_offload.report.log import counted_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tba_offload.report.log import RunLog, StepRecord


@dataclass(frozen=True, slots=True)
class Digest:
    """Figures of a run.

    Attributes:
        log: The run.
        steps: The steps that count for figures of speed: without warm-up, and without those whose gradients
            were dropped.
    """

    log: RunLog
    steps: Sequence[StepRecord]

    @classmethod
    def of(cls, log: RunLog) -> Digest:
        """Return the figures of a run."""
        return cls(log, counted_steps(log) or log.steps)

    def median(self, value: Callable[[StepRecord], float | None]) -> float | None:
        """Return the median over the steps of which a value is known."""
        known = [found for step in self.steps if (found := value(step)) is not None]
        return statistics.median(known) if known else None

    @property
    def peak_bytes(self) -> int | None:
        """The largest activation peak."""
        return max((p for s in self.steps if (p := s.activation_peak_bytes) is not None), default=None)

    @property
    def device_peak_bytes(self) -> int | None:
        """The most bytes on the device, weights and gradients included."""
        return max((p for s in self.steps if (p := s.device_peak_bytes) is not None), default=None)

    @property
    def device_bytes(self) -> str | None:
        """What the policy lets lie on the device, as it says that; ``None`` if it says nothing."""
        found = re.search(r"^  device_bytes: (\d\w*)$", self.log.header.policy or "", re.MULTILINE)
        return None if found is None else found[1]

    @property
    def seconds(self) -> float:
        """The median time of a step, with that of optimizers."""
        return self.median(lambda step: step.seconds_with_update) or 0.0

    @property
    def counts_optimizer(self) -> bool:
        """Whether the time of a step has that of optimizers in it: not where none was seen."""
        return any(step.optimizer_seconds is not None for step in self.steps)

    @property
    def waits(self) -> float | None:
        """The median share of steps that training waited for I/O."""
        return self.median(_waits)

    @property
    def written_bytes(self) -> int:
        """The median of the bytes that a step writes to drives: activations, and states of optimizers."""
        activations = self.median(lambda step: step.offloaded_bytes - step.host_offloaded_bytes) or 0
        states = [
            whole(event.get("written_bytes")) for event in self.log.others if event["event"] == "states"
        ]
        return int(activations + (statistics.median(states) if states else 0))

    @property
    def read_bytes(self) -> int:
        """The median of the bytes that a step reads back."""
        return int(self.median(lambda step: step.read_bytes) or 0)

    @property
    def tokens_per_second(self) -> float | None:
        """The throughput, where tokens are known."""
        tokens = self.median(lambda step: step.tokens)
        return tokens / self.seconds if tokens and self.seconds else None


def _waits(step: StepRecord) -> float | None:
    if step.stall_seconds is None or not step.seconds:
        return None
    return (step.stall_seconds + (step.weights_waited_seconds or 0.0)) / step.seconds


def whole(value: object) -> int:
    """Return a number of an event that nothing has checked; 0 where it is none."""
    return value if isinstance(value, int) else 0


# Faults


def faults(log: RunLog) -> list[tuple[str, str, str]]:
    """Return what went wrong in a run: what, how much of it, and when first; empty if nothing did."""
    return [*_of_steps(log.steps), *_of_log(log)]


_FAULTS: dict[str, tuple[str, bool]] = {
    "reread_bytes": ("read again, because the first read failed", True),
    "rescued_bytes": ("lost by a drive, and made again by repeating a layer's forward", True),
    "fallback_kept_bytes": ("kept in memory, because drives were full, failed or slow", True),
    "held_bytes": ("offloaded in vain, because something else held them", True),
    "left_alone_scopes": ("runs of layers inside hooks of other code, not captured", False),
}
"""Fields of a step that tell of a fault: what they tell, and whether they are bytes."""


def _of_steps(steps: Sequence[StepRecord]) -> Iterator[tuple[str, str, str]]:
    for name, (what, is_bytes) in _FAULTS.items():
        hit = [(step.step, getattr(step, name)) for step in steps if getattr(step, name)]
        if hit:
            total = sum(amount for _, amount in hit)
            yield what, readable_size(total) if is_bytes else str(total), _when(number for number, _ in hit)
    down = [step.step for step in steps if step.drives_out_of_service]
    if down:
        yield "drives out of service", str(max(step.drives_out_of_service for step in steps)), _when(down)
    skipped = [step.step for step in steps if step.skipped]
    if skipped:
        yield "steps without an update, as a gradient scaler skips them", str(len(skipped)), _when(skipped)


def _when(numbers: Iterable[int]) -> str:
    found = list(numbers)
    return f"step {found[0]}" if len(found) == 1 else f"{len(found)} steps, the first of them {found[0]}"


def _of_log(log: RunLog) -> Iterator[tuple[str, str, str]]:
    if log.truncated:
        yield "last line of the log cut off, as by a crash", "1", "at the end"


# Settings


def settings(log: RunLog) -> list[tuple[str, str]]:
    """Return what was set, and on what, as far as the header tells."""
    header = log.header
    ranks = f"{header.rank} of {header.ranks}" if header.ranks > 1 else ""
    rows = [
        ("Log", str(log.path)),
        ("Strategy", header.strategy),
        ("Started", header.started),
        ("Rank", ranks),
        *((f"Model: {key}", _in_words(value)) for key, value in header.model.items()),
        *((f"Machine: {key}", _in_words(value)) for key, value in header.hardware.items()),
        *((f"Version: {key}", _in_words(value)) for key, value in header.versions.items()),
        *((f"Store: {key}", _in_words(value)) for key, value in header.store.items()),
    ]
    return [(name, value) for name, value in rows if value]


def _in_words(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return "; ".join(map(_in_words, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_in_words(each)}" for key, each in value.items() if each is not None)
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
