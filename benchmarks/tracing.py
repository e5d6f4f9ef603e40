"""What recording a step over time costs a training step of the demo's GPT, all of whose layers are offloaded.

    python benchmarks/tracing.py

The first figure is processor time that threads spend on recording, as a share of the processor time of the
process: it does not depend on what else the machine does. The others are ratios of lanes with and without,
round by round. Memory is measured in all lanes, since a recorded step has its memory measured; on a GPU that
is free. It needs megatron-core.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, ClassVar

from cost import ON, Lane, Mechanism, MeteredTrainer, all_offloaded, cost_command, metered

from tba_offload.session.conclusions import Conclusions
from tba_offload.session.step_curve import StepCurve

if TYPE_CHECKING:
    from cost import Lanes

WARM_UP = 3
"""Steps: the third is recorded without being asked for."""


class UntracedTrainer(MeteredTrainer):
    """A strategy of the demo that measures the memory of each step, and records none."""

    settings: ClassVar = {"measure_memory": True, "trace": False}


class TracedTrainer(MeteredTrainer):
    """A strategy of the demo that records each step, and says what recording took."""

    settings: ClassVar = {"measure_memory": True, "trace": True}

    def __init__(self, **arguments: Any) -> None:
        self._seconds: list[float] = []
        for owner, name in ((StepCurve, "seen"), (StepCurve, "begin_step"), (Conclusions, "_look_at_times")):
            setattr(owner, name, metered(getattr(owner, name), self._seconds))
        super().__init__(**arguments)

    def step(self) -> dict[str, Any]:
        """One training step; its figures and the processor seconds of recording."""
        self._seconds.clear()
        figures = super().step()
        return {**figures, "recording_seconds": sum(self._seconds)}


def summarize(lanes: Lanes) -> dict[str, Any]:
    """Return the share of the steps after the warm-up."""
    steps = lanes[ON][WARM_UP:]
    return {
        "share_of_cpu": statistics.median(step["recording_seconds"] / step["cpu_seconds"] for step in steps),
        "recording_seconds_per_step": statistics.median(step["recording_seconds"] for step in steps),
    }


def told(figures: dict[str, Any]) -> str:
    """Return the figures for people."""
    return (
        f"recording takes {figures['share_of_cpu']:.2%} of the processor time of a step, "
        f"{figures['recording_seconds_per_step'] * 1e3:.1f} ms"
    )


RECORDING = Mechanism(
    "offload",
    on=Lane(TracedTrainer, all_offloaded),
    off=Lane(UntracedTrainer, all_offloaded),
    summarize=summarize,
    told=told,
)

main = cost_command(__doc__ or "", RECORDING, steps=13, warm_up=WARM_UP)

if __name__ == "__main__":
    main()
