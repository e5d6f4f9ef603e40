"""The figures of a step that training frameworks hand on to TensorBoard, W&B and their like."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tba_offload.report.run_log import StepRecord

CURVES = (
    "activation_peak_bytes",
    "own_peak_bytes",
    "in_flight_peak_bytes",
    "offloaded_bytes",
    "read_bytes",
    "forwarded_bytes",
    "kept_bytes",
    "fallback_kept_bytes",
    "stall_seconds",
)
"""Fields of a step record that become curves."""

MAIN_CURVES = ("activation_peak_bytes", "offloaded_bytes", "read_bytes", "stall_seconds")
"""Those for frameworks that print the same figures that they hand on."""


def curves_of(record: StepRecord, names: Iterable[str] = CURVES) -> dict[str, float]:
    """The figures of a step that are known, under ``tba-offload/`` and the name of the field."""
    known = {f"tba-offload/{name}": getattr(record, name) for name in names}
    return {name: value for name, value in known.items() if value is not None}
