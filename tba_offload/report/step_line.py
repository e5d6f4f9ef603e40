"""A step in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tba_offload.formatting import readable_size, significant

if TYPE_CHECKING:
    from tba_offload.report.run_log import StepRecord


def describe_step(record: StepRecord) -> str:
    """Return the main figures of a step in one line."""
    parts = [f"step {record.step}" + (" (skipped)" if record.skipped else "")]
    if record.activation_peak_bytes is not None:
        parts.append(f"activation peak {readable_size(record.activation_peak_bytes)}")
    if record.gradient_bytes:
        parts.append(f"gradients {readable_size(record.gradient_bytes)}")
    waits = f", {significant(record.stall_seconds)} s of it waits" if record.stall_seconds else ""
    parts.append(f"{significant(record.seconds)} s{waits}")
    moved = {
        "written": record.offloaded_bytes,
        "read": record.read_bytes,
        "forwarded": record.forwarded_bytes,
        "kept": (record.kept_bytes or 0) + (record.fallback_kept_bytes or 0),
    }
    parts += [f"{readable_size(nbytes)} {what}" for what, nbytes in moved.items() if nbytes]
    if record.weights_read_bytes:
        waited = record.weights_waited_seconds
        waits = f", waited for {significant(waited)} s" if waited else ""
        parts.append(f"{readable_size(record.weights_read_bytes)} of frozen weights read{waits}")
    if record.recomputed_scopes:
        parts.append(f"{record.recomputed_scopes} of {record.scopes} layers recomputed")
    if record.loss is not None:
        parts.append(f"loss {record.loss:.6g}")
    return "; ".join(parts)
