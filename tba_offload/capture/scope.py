"""Scopes, the activations in them, and the order in which backward uses those.

A step repeats its order: whatever the schedule is (gradient accumulation, 1F1B, interleaved), the
activations that backward asked for in one step it asks for in the next, in the same order. So prefetch
follows the order recorded in the last step. Where there is none yet, or the step departs from it, the
activations saved last are expected first. What was not saved in the last step, because its layer had another
placement, is expected after what was saved later.

With several micro-batches under way backward passes take turns with forward passes. What is used after the
next forward pass is read ahead with restraint, because that pass needs the window for what it saves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tba_offload.transfer.ahead import ReadAhead
    from tba_offload.transfer.storage import Record


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
        ahead: Starts the reads; its window says when to stop.

    Attributes:
        saved: Tells of an activation that was saved; a function without a frame, for the hot path.
    """

    def __init__(self, ahead: ReadAhead) -> None:
        self._ahead = ahead
        self._ledger = ahead.ledger
        self._records: dict[ActivationKey, Record] = {}
        self._new: list[Record] = []
        self.saved = self._new.append
        self._recorded: list[tuple[ActivationKey, int]] = []
        self._expected: list[tuple[ActivationKey, int]] = []
        self._position: dict[ActivationKey, int] = {}
        self._next = 0
        self._last = -1  # position of what was used last
        self._has_new = False  # something was saved that is not expected
        self._given_up = 0
        self._passes = 0  # how often forward came after backward in this step
        self._in_backward = False
        self._pass = 0  # the same when what is used now was used in the step before

    def begin_step(self) -> None:
        """Expect the order that was recorded in the step before."""
        self._records.clear()
        self._new.clear()
        self._expect(self._recorded)
        self._recorded = []
        self._has_new = False
        self._passes = 0
        self._in_backward = False

    def abandon_step(self) -> None:
        """Forget a step that did not end; the order before it stands."""
        self._records.clear()
        self._new.clear()
        self._recorded = self._expected

    def _note_saved(self) -> None:
        """Take note of what was saved since backward used something."""
        if self._in_backward:
            self._in_backward = False
            self._passes += 1
        new = self._new[:]
        for record in new:
            key: ActivationKey = record.key  # type: ignore[assignment]
            self._records[key] = record
            # With several micro-batches the order runs ahead of what exists; come back for what appears.
            position = self._position.get(key)
            if position is None:
                self._has_new = True
            elif position < self._next:
                self._next = position
        del self._new[: len(new)]  # another thread may be saving

    @property
    def uses(self) -> int:
        """How many activations backward has used in this step."""
        return len(self._recorded)

    def used_bytes(self, scope: ScopeKey, since: int, until: int) -> int:
        """Bytes of a scope that backward has used from one number of :attr:`uses` to another.

        What it has found in memory does not count: the ledger still has that.
        """
        used = (self._records.get(key) for key, _ in self._recorded[since:until] if key.scope == scope)
        noted = self._ledger.noted
        return sum(record.nbytes for record in used if record is not None and record not in noted)

    def used(self, key: ActivationKey) -> None:
        """Backward used an activation for the first time: read ahead from the one after it."""
        if self._new:
            self._note_saved()
        self._recorded.append((key, self._passes))
        begins, self._in_backward = not self._in_backward, True
        if key not in self._position and self._is_lost():
            self._has_new = False
            self._expect([(saved, self._passes) for saved in reversed(self._records)])
        elif self._has_new:
            self._insert_new()
        position = self._position.get(key)
        if position is not None:
            self._follow(position)
        if self._next < len(self._expected) and self._ahead.is_worth_a_start(begins=begins):
            self._read_ahead()

    def _follow(self, position: int) -> None:
        """Backward is at a position of the order: what comes after it is read next.

        A single activation that comes before its turn, such as a mask that the last layer shares with the
        first, does not mean that all between are left out.
        """
        self._pass = self._expected[position][1]
        given_up = self._ledger.stats.given_up
        is_next = position <= self._next or position == self._last + 1 or self._last < 0
        self._last = position
        if (position >= self._next and is_next) or given_up != self._given_up:
            self._given_up = given_up
            self._next = position + 1

    def reached(self) -> None:
        """Backward has come to a layer, perhaps one of which nothing travels: reads start all the same."""
        if self._new:
            self._note_saved()
        if self._has_new and not self._is_lost():  # or there is nothing yet to go by
            self._insert_new()
        if self._next < len(self._expected) and self._ahead.is_worth_a_start(begins=not self._in_backward):
            self._read_ahead()

    def _is_lost(self) -> bool:
        """Whether the expected order says little about what was saved in this step."""
        saved = list(self._records)  # another thread may be saving
        known = sum(key in self._position for key in saved)
        return 2 * known <= len(saved)

    def _insert_new(self) -> None:
        """Expect what is new: of each micro-batch after what was saved later."""
        self._has_new = False
        followers: dict[ActivationKey, ActivationKey] = {}
        order: list[tuple[ActivationKey, int]] = []
        later: dict[int, ActivationKey] = {}
        for key in reversed(list(self._records)):
            if key not in self._position:
                after = later.get(key.scope.micro_batch)
                if after is None:
                    order.append((key, self._passes))
                else:
                    followers[after] = key
            later[key.scope.micro_batch] = key
        order = [(key, passes) for first, passes in order + self._expected for key in _run(first, followers)]
        now = self._pass
        last = self._expected[self._last][0] if self._last >= 0 else None
        self._expect(order)
        self._pass = now
        self._last = self._position[last] if last is not None else -1

    def _expect(self, order: list[tuple[ActivationKey, int]]) -> None:
        """Expect activations in this order; each with the number of the backward pass that uses it."""
        self._expected = order
        self._position = {key: position for position, (key, _) in enumerate(order)}
        self._next = 0
        self._last = -1
        self._pass = 0

    def _read_ahead(self) -> None:
        self._ahead.start(self._upcoming())

    def _upcoming(self) -> Iterator[tuple[Record, bool]]:
        """Yield what is expected next, and whether forward passes come before.

        What is taken last comes again.
        """
        while self._next < len(self._expected):
            key, passes = self._expected[self._next]
            record = self._records.get(key)
            if record is not None:
                yield record, passes > self._pass
            self._next += 1


def _run(first: ActivationKey, followers: dict[ActivationKey, ActivationKey]) -> Iterator[ActivationKey]:
    """Yield an activation and those that follow it."""
    key: ActivationKey | None = first
    while key is not None:
        yield key
        key = followers.get(key)
