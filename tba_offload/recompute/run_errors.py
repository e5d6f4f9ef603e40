"""The errors of layers that backward runs again, and what the planner learns from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tba_offload.errors import RecomputationError, TbaError, UnsupportedError

if TYPE_CHECKING:
    from tba_offload.recompute.verdicts import Mode, Verifier


class RunErrors:
    """Makes the errors of one execution of a layer.

    Args:
        verifier: What the session knows of second runs.
        mode: The layer, and what it is in.
        is_planned: Whether the planner has chosen to recompute it, which it does not do again after an error.
    """

    def __init__(self, verifier: Verifier, mode: Mode, *, is_planned: bool) -> None:
        self._verifier = verifier
        self._mode = mode
        self._is_planned = is_planned

    def refused(self, fault: str) -> TbaError:
        """Return the error of a layer that must not run a second time."""
        self._verifier.judge(self._mode, fault)
        self.withdraw(fault)
        return UnsupportedError(self._sentence(fault))

    def failed(self, fault: str) -> TbaError:
        """Return the error of a layer whose second run is of no use."""
        self.withdraw(fault)
        return RecomputationError(self._sentence(fault))

    def withdraw(self, fault: str) -> None:
        """Have the planner do without recomputing such layers from now on."""
        if self._is_planned:
            self._verifier.withdraw(self._mode, fault)

    def _sentence(self, fault: str) -> str:
        name = self._verifier.name_of(self._mode.layer)
        remedy = "place it keep or offload"
        if self._is_planned:
            remedy += ", or repeat the step: the planner keeps or offloads layers of its kind now"
        return f"{name} cannot be recomputed: {fault}; {remedy}"
