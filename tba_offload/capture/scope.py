"""Scopes, the activations in them, and the order in which backward uses those.

A step repeats its order: whatever the schedule is (gradient accumulation, 1F1B, interleaved), the
activations that backward asked for in one step it asks for in the next, in the same order. So prefetch
follows the order recorded in the last step. Where there is none yet, or the step departs from it, the
activations saved last are expected first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tba_offload.transfer.offloader import Offloader
    from tba_offload.transfer.record import Record


class ScopeKey(NamedTuple):
    """One execution of a layer.

    Attributes:
        layer: Global number of the layer, from 0.
        micro_batch: How often the layer ran before in this step, or the schedule's own number.
        chunk: Model chunk of an interleaved pipeline.
        name: Module name of the layer.
    """

    layer: int
    micro_batch: int
    chunk: int
    name: str

    def __str__(self) -> str:
        return f"layer {self.layer} ({self.name}), micro-batch {self.micro_batch}"


class ActivationKey(NamedTuple):
    """One storage that a scope saved; ``number`` counts them within the scope."""

    scope: ScopeKey
    number: int

    def __str__(self) -> str:
        return f"{self.scope}, activation {self.number}"


class Lookahead:
    """Feeds the prefetch window with the activations that backward is going to use next.

    Args:
        offloader: Starts the reads; its window says when to stop.
    """

    def __init__(self, offloader: Offloader) -> None:
        self._offloader = offloader
        self._records: dict[ActivationKey, Record] = {}
        self._recorded: list[ActivationKey] = []
        self._expected: list[ActivationKey] = []
        self._position: dict[ActivationKey, int] = {}
        self._next = 0
        self._given_up = 0

    def begin_step(self) -> None:
        """Expects the order that was recorded in the step before."""
        self._records.clear()
        self._expect(self._recorded)
        self._recorded = []

    def abandon_step(self) -> None:
        """Forgets a step that did not end; the order before it stands."""
        self._records.clear()
        self._recorded = self._expected

    def saved(self, record: Record) -> None:
        """An activation was saved."""
        key: ActivationKey = record.key  # type: ignore[assignment]
        self._records[key] = record
        # With several micro-batches the order runs ahead of what exists; come back for what appears.
        self._next = min(self._next, self._position.get(key, self._next))

    def used(self, key: ActivationKey) -> None:
        """Backward used an activation for the first time: read ahead from the one after it."""
        self._recorded.append(key)
        if key not in self._position and self._is_lost():
            self._expect(list(reversed(self._records)))
        position = self._position.get(key)
        given_up = self._offloader.stats.given_up
        if position is not None and (position >= self._next or given_up != self._given_up):
            self._given_up = given_up
            self._next = position + 1
        if self._offloader.has_room():
            self._read_ahead()

    def _is_lost(self) -> bool:
        """Whether the expected order says little about what was saved in this step."""
        saved = list(self._records)  # another thread may be saving
        known = sum(key in self._position for key in saved)
        return 2 * known < len(saved)

    def _expect(self, order: list[ActivationKey]) -> None:
        self._expected = order
        self._position = {key: position for position, key in enumerate(order)}
        self._next = 0

    def _read_ahead(self) -> None:
        while self._next < len(self._expected):
            record = self._records.get(self._expected[self._next])
            if record is not None and not self._offloader.prefetch(record):
                return
            self._next += 1
