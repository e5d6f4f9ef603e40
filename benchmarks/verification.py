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

from cost import ON, Lane, Mechanism, MeteredTrainer, cost_command, metered

import tba_offload as tba
from tba_offload.capture import site
from tba_offload.recompute import run
from tba_offload.recompute.samples import Samples
from tba_offload.session.layer_call import Call

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cost import Lanes


class VerifiedTrainer(MeteredTrainer):
    """A strategy of the demo that also says what verifying took: all that a run does beside the layer."""

    def __init__(self, **arguments: Any) -> None:
        self._seconds: list[float] = []
        self._is_compared = False
        run.Run.__call__ = metered(run.Run.__call__, self._seconds)  # type: ignore[method-assign]
        run.fault_of = self._comparing(run.fault_of)
        Samples.add = metered(Samples.add, self._seconds)  # type: ignore[method-assign]
        forward = site.Site.forward
        site.Site.forward = property(  # type: ignore[assignment]
            lambda each: self._left_out(partial(forward, each))
        )
        super().__init__(**arguments)

    def _comparing(self, function: Callable[..., object]) -> Callable[..., Any]:
        """Return the same, and the runs of the layer within it are not left out."""

        def comparing(*arguments: Any, **options: Any) -> object:
            self._is_compared = True
            try:
                return function(*arguments, **options)
            finally:
                self._is_compared = False

        return comparing

    def _left_out(self, function: Callable[..., object]) -> Callable[..., Any]:
        """Return the same, and its time does not count, but for that of samples taken within it."""

        def left_out(*arguments: Any, **options: Any) -> object:
            if self._is_compared:
                return function(*arguments, **options)
            began = time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                self._seconds.append(began - time.thread_time())

        return left_out

    def step(self) -> dict[str, Any]:
        """One training step; its figures and the processor seconds of verifying."""
        self._seconds.clear()
        figures = super().step()
        return {**figures, "verifying_seconds": sum(self._seconds)}


def _unverified(call: Call, forward: Callable[..., object]) -> object:
    return call._stack.checkpoint(forward, *call._args, **call._kwargs)


class TrustingTrainer(MeteredTrainer):
    """A strategy of the demo that recomputes without a look at what comes out."""

    def __init__(self, **arguments: Any) -> None:
        Call._checkpoint = _unverified  # type: ignore[method-assign]
        super().__init__(**arguments)


def config(scratch: Path) -> tba.OffloadConfig:
    """Every layer is recomputed."""
    return tba.OffloadConfig(default="recompute", store=tba.StoreConfig(kind="file", directories=(scratch,)))


def summarize(lanes: Lanes) -> dict[str, Any]:
    """Shares of the first step and of those after it."""
    first, *later = (step["verifying_seconds"] / step["cpu_seconds"] for step in lanes[ON])
    return {
        "share_of_cpu": statistics.mean(later),
        "share_of_cpu_first_step": first,
    }


def told(figures: dict[str, Any]) -> str:
    """Return the figures for people."""
    return (
        f"verifying takes {figures['share_of_cpu']:.3%} of the processor time of a step, "
        f"{figures['share_of_cpu_first_step']:.1%} of the first one, in which each layer is compared"
    )


VERIFYING = Mechanism(
    "recompute",
    on=Lane(VerifiedTrainer, config),
    off=Lane(TrustingTrainer, config),
    summarize=summarize,
    told=told,
)

main = cost_command(__doc__ or "", VERIFYING, steps=11, warm_up=1)

if __name__ == "__main__":
    main()
