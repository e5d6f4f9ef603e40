"""Ranges of a step in the profile of :mod:`torch.profiler`: the step, and each run of a layer.

They are those of :class:`torch.profiler.record_function`, which ``torch.autograd.profiler.emit_nvtx`` turns
into ranges of NVTX: so the same serve Nsight Systems.
"""

from __future__ import annotations

import threading

import torch
from torch.autograd.profiler import record_function


class Ranges:
    """Marks what a step is at, where that is wanted.

    Attributes:
        is_on: Whether it is, and a profile is made on this thread.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._step: record_function | None = None
        self._backward: tuple[record_function, int] | None = None

    def begin_step(self, number: int, *, wanted: bool) -> None:
        """Record that a step begins.

        Args:
            number: Of the step.
            wanted: Whether it is to be marked, if a profile is made.
        """
        self.end_step()
        self.is_on = wanted and torch._C._autograd._profiler_enabled()
        if self.is_on:
            self._step = _entered(f"tba-offload: step {number}")

    def forward(self, name: str) -> record_function:
        """Return a context manager around the forward of a layer."""
        return record_function(f"tba-offload: forward {name}")

    def backward_reached(self, name: str) -> None:
        """Backward comes to a run of a layer, and so is done with the one before."""
        self.backward_ended()
        self._backward = _entered(f"tba-offload: backward {name}"), threading.get_ident()

    def backward_ended(self) -> None:
        """Record that a backward pass is over.

        A range ends on the thread that it began on: another one, as autograd's of a device, may have had a
        range of its own in between, and NVTX ends the latest.
        """
        if self._backward is not None and self._backward[1] == threading.get_ident():
            self._backward[0].__exit__(None, None, None)
        self._backward = None

    def end_step(self) -> None:
        """Record that the step is over, or was left."""
        self.backward_ended()
        self.is_on = False
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None


def _entered(name: str) -> record_function:
    found: record_function = record_function(name).__enter__()  # type: ignore[no-untyped-call]
    return found
