"""What verifying recomputation costs a training step of the demo's GPT, all of whose layers are recomputed.

    python benchmarks/verification.py

The first figure is processor time that the training thread spends on verifying, as a share of the processor
time of all threads of the process; the others are ratios of lanes that verify and one that does not, round by
round. The first step, in which each layer is compared, is told apart. It needs megatron-core.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from cost import Lane, Mechanism, MeteredTrainer, cost_command

import tba_offload as tba
from tba_offload.recompute import verify
from tba_offload.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PARTS = ("Surroundings", "RandomState", "digests", "equal", "_fault_of")
"""What :mod:`tba_offload.recompute.verify` calls to take down and to compare."""


class VerifiedTrainer(MeteredTrainer):
    """A strategy of the demo that also says what verifying took."""

    def __init__(self, **arguments: Any) -> None:
        self._seconds = 0.0
        for part in PARTS:
            setattr(verify, part, partial(self._timed, getattr(verify, part)))
        super().__init__(**arguments)

    def _timed(self, function: Callable[..., object], *arguments: Any, **options: Any) -> object:
        began, before = time.thread_time(), self._seconds
        try:
            return function(*arguments, **options)
        finally:
            self._seconds = before + time.thread_time() - began  # what it called is in there

    def step(self) -> dict[str, Any]:
        """One training step; its figures and the processor seconds of verifying."""
        before = self._seconds
        figures = super().step()
        return {**figures, "verifying_seconds": self._seconds - before}


class TrustingTrainer(MeteredTrainer):
    """A strategy of the demo that recomputes without a look at what comes out."""

    def __init__(self, **arguments: Any) -> None:
        Session._forward_of = lambda _, site, __: site.forward  # type: ignore[method-assign]
        super().__init__(**arguments)


def config(scratch: Path) -> tba.OffloadConfig:
    """Every layer is recomputed."""
    return tba.OffloadConfig(default="recompute", store=tba.StoreConfig(kind="file", directories=(scratch,)))


def summarize(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares of the first step and of those after it."""
    first, *later = (step["verifying_seconds"] / step["cpu_seconds"] for step in steps)
    return {
        "share_of_cpu": statistics.mean(later),
        "share_of_cpu_unless_compared": statistics.median(later),
        "share_of_cpu_first_step": first,
    }


def told(figures: dict[str, Any]) -> str:
    """The figures for people."""
    return (
        f"verifying takes {figures['share_of_cpu']:.3%} of the processor time of a step, comparisons of "
        f"single layers included, {figures['share_of_cpu_unless_compared']:.3%} in one without, "
        f"{figures['share_of_cpu_first_step']:.1%} of the first step, in which each layer is compared"
    )


VERIFYING = Mechanism(
    "recompute",
    on=Lane(VerifiedTrainer, config),
    off=Lane(TrustingTrainer, config),
    summarize=summarize,
    told=told,
)

main = cost_command(__doc__ or "", VERIFYING, steps=2 * verify.COMPARED_EVERY + 1, warm_up=1)

if __name__ == "__main__":
    main()
