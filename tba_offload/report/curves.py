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


FIGURES = {
    "seconds": "s",
    "optimizer_seconds": "s",
    "stall_seconds": "s",
    "checksum_seconds": "s",
    "planning_seconds": "s",
    "tokens": "tokens",
    "loss": "as given",
    "activation_peak_bytes": "bytes",
    "own_peak_bytes": "bytes",
    "in_flight_peak_bytes": "bytes",
    "resident_peak_bytes": "bytes",
    "reserved_peak_bytes": "bytes",
    "offloaded_bytes": "bytes",
    "read_bytes": "bytes",
    "forwarded_bytes": "bytes",
    "rebuilt_bytes": "bytes",
    "kept_bytes": "bytes",
    "fallback_kept_bytes": "bytes",
    "given_up_bytes": "bytes",
    "held_bytes": "bytes",
    "recomputed_scopes": "runs of layers",
    "drives_out_of_service": "drives",
    "device_peak_bytes": "bytes",
    "activation_budget_bytes": "bytes",
    "weights_read_bytes": "bytes",
    "weights_waited_seconds": "s",
}
"""Fields of a step record that sinks write, and the unit of each; names stay, and more come at the end."""

PREFIX = "tba-offload/"
"""Beginning of the names of curves."""


def curves_of(record: StepRecord, names: Iterable[str] = CURVES) -> dict[str, float]:
    """Return the figures of a step that are known, under ``tba-offload/`` and the name of the field."""
    known = {f"{PREFIX}{name}": getattr(record, name) for name in names}
    return {name: value for name, value in known.items() if value is not None}
