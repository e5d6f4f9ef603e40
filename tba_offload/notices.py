"""What a session tells while it trains, by the logger ``tba_offload.session``: new plans; steps if asked.

A program that sets logging up decides what becomes of it. Where none has, it goes to stderr, a line each.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from tba_offload.formatting import readable_size, significant

if TYPE_CHECKING:
    from tba_offload.report.run_log import StepRecord

logger = logging.getLogger("tba_offload.session")


class _UntilConfigured(logging.Handler):
    """Writes to stderr as long as nothing else would handle the record."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one line."""
        if not any(logging.getLogger(name).handlers for name in (None, "tba_offload")):
            sys.stderr.write(f"tba-offload: {self.format(record)}\n")


logger.addHandler(_UntilConfigured(logging.INFO))
if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)


def tell(line: str) -> None:
    """Says one line."""
    logger.info("%s", line)


def describe_step(record: StepRecord) -> str:
    """The main figures of a step in one line."""
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
    if record.recomputed_scopes:
        parts.append(f"{record.recomputed_scopes} of {record.scopes} layers recomputed")
    if record.loss is not None:
        parts.append(f"loss {record.loss:.6g}")
    return "; ".join(parts)
