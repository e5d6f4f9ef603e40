"""What the controller is shown of a step that has ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.adapt.beside import SeenBeside
    from tba_offload.capture.trace import DeviceTimes, StepTrace
    from tba_offload.plan.model import Plan
    from tba_offload.report.log import StepRecord
    from tba_offload.store.base import DriveLoad


@dataclass(frozen=True, slots=True)
class StepObservation:
    """One step.

    Attributes:
        trace: What it recorded.
        stalls: When compute waited for I/O.
        loads: What the drives moved.
        plan: The plan that was in force.
        record: Its figures.
        began: When it began, by :func:`time.perf_counter`.
        beside: Bytes that were seen beside the activations of layers; ``None`` if nothing looked.
        on_device: Its times by the clock of a device that runs behind the host. The device is waited for only
            after the steps that are looked at closely.
        not_recomputed: Layers that would not be the same if their forward ran twice, or may not be.
    """

    trace: StepTrace
    stalls: Sequence[tuple[float, float]]
    loads: Sequence[DriveLoad]
    plan: Plan
    record: StepRecord
    began: float
    beside: SeenBeside | None = None
    on_device: DeviceTimes | None = None
    not_recomputed: frozenset[int] = frozenset()
