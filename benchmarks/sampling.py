"""What measuring the activation peak costs a training step of the demo's GPT on a CPU, all layers offloaded.

    python benchmarks/sampling.py

The peak is the largest of samples of malloc's count of live bytes. The first figure is the processor time of
these samples, on whatever thread, as a share of that of the process: it does not depend on what else the
machine does. The others are ratios of lanes that measure in each step and in none, round by round. It needs
megatron-core.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, ClassVar

from cost import ON, Lane, Mechanism, MeteredTrainer, all_offloaded, cost_command, metered

from tba_offload.device.memory import MallocMeter

if TYPE_CHECKING:
    from cost import Lanes

WARM_UP = 3


class UnmeasuredTrainer(MeteredTrainer):
    """A strategy of the demo that measures memory in no step."""

    settings: ClassVar = {"measure_memory": False}


class MeasuredTrainer(MeteredTrainer):
    """A strategy of the demo that measures memory in each step, and says how often and what it took."""

    settings: ClassVar = {"measure_memory": True}

    def __init__(self, **arguments: Any) -> None:
        self._seconds: list[float] = []
        MallocMeter._sample = metered(MallocMeter._sample, self._seconds)  # type: ignore[method-assign]
        super().__init__(**arguments)

    def step(self) -> dict[str, Any]:
        """One training step; its figures, samples and their processor seconds."""
        self._seconds.clear()
        figures = super().step()
        return {**figures, "samples": len(self._seconds), "sampling_seconds": sum(self._seconds)}


def summarize(lanes: Lanes) -> dict[str, Any]:
    """Return the share of the steps after the warm-up."""
    steps = lanes[ON][WARM_UP:]
    return {
        "share_of_cpu": statistics.median(step["sampling_seconds"] / step["cpu_seconds"] for step in steps),
        "sampling_seconds_per_step": statistics.median(step["sampling_seconds"] for step in steps),
        "samples_per_step": statistics.median(step["samples"] for step in steps),
    }


def told(figures: dict[str, Any]) -> str:
    """Return the figures for people."""
    return (
        f"{figures['samples_per_step']:.0f} samples take {figures['share_of_cpu']:.2%} of the processor time "
        f"of a step, {figures['sampling_seconds_per_step'] * 1e3:.1f} ms"
    )


SAMPLING = Mechanism(
    "offload",
    on=Lane(MeasuredTrainer, all_offloaded),
    off=Lane(UnmeasuredTrainer, all_offloaded),
    summarize=summarize,
    told=told,
)

main = cost_command(__doc__ or "", SAMPLING, steps=13, warm_up=WARM_UP)

if __name__ == "__main__":
    main()
