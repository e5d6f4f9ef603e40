"""A profile takes no longer for each run of a layer where there are more layers."""

from __future__ import annotations

import sys
from typing import Any

from tba_offload.adapt.profiler import profile_of
from tba_offload.capture.scope import ActivationKey, ScopeKey
from tba_offload.capture.trace import ActivationTrace, ScopeTrace, StepTrace, Treatment


def trace_of(layers: int, micro_batches: int) -> StepTrace:
    """A step of layers that all save another number of bytes."""
    trace = StepTrace(backward_ends=[1e6])
    for layer in range(layers):
        for micro_batch in range(micro_batches):
            key = ScopeKey(layer, micro_batch, 0, str(layer))
            number = micro_batch * layers + layer
            began, back = 2.0 * number + 1, 1e6 - 2.0 * number - 2
            trace.scopes.append(ScopeTrace(key, "offload", began, 0, began + 1, back))
            saved = ActivationTrace(ActivationKey(key, 0), 2**layer, Treatment.OFFLOADED, began, back)
            trace.activations.append(saved)
    return trace


def calls_for_each_run(layers: int, micro_batches: int) -> float:
    """Calls of Python and of C."""
    trace, count = trace_of(layers, micro_batches), 0

    def look(_: object, event: str, __: Any) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(look)
    try:
        found = profile_of(trace, [], [(0, str(layer)) for layer in range(layers)], began=0.0, ended=1e6)
    finally:
        sys.setprofile(None)
    assert found is not None
    assert len(found.kinds) == layers
    return count / (layers * micro_batches)


def test_layers_of_which_none_is_like_another_are_told_apart_without_a_search() -> None:
    assert calls_for_each_run(layers=80, micro_batches=16) <= 1.5 * calls_for_each_run(10, 16)
