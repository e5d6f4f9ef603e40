"""Graphs that a backward pass leaves alive: when they are gone, and that looking costs nothing until then."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from tba_offload.capture.retained import Life
from tba_offload.capture.scope import ScopeKey
from tba_offload.capture.trace import StepTrace

if TYPE_CHECKING:
    from tba_offload.capture.trace import ScopeTrace


class Asked(weakref.ref[Life]):
    """A life that counts how often it was asked whether it is over."""

    times = 0

    def __call__(self) -> Life | None:
        Asked.times += 1
        return super().__call__()


def retain(trace: StepTrace, scope: ScopeTrace) -> Life:
    """Another backward pass has reached the scope and leaves its graph alive."""
    life = Life()
    trace.retained(scope, Asked(life, trace.gone.append))
    return life


def test_a_scope_is_gone_with_the_last_of_its_lives() -> None:
    trace = StepTrace()
    scope = trace.begin_scope(ScopeKey(0, 0, 0, "layer"), "offload")
    lives = [retain(trace, scope) for _ in range(2)]
    assert not trace.note_gone()
    lives.pop()
    assert trace.note_gone()
    assert scope.gone_by is None
    lives.pop()
    assert trace.note_gone()
    assert scope.gone_by is not None
    assert not trace.note_gone()


def test_what_is_alive_is_not_asked_at_each_layer() -> None:
    trace = StepTrace()
    scopes = [trace.begin_scope(ScopeKey(0, number, 0, "layer"), "offload") for number in range(100)]
    lives = [retain(trace, scope) for scope in scopes]
    for _ in scopes:
        lives.pop()
        assert trace.note_gone()
    assert Asked.times == 0
    assert all(scope.gone_by is not None for scope in scopes)
