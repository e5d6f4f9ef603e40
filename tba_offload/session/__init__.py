"""Sessions, which offload for one model."""

from __future__ import annotations

from tba_offload.session.session import Session, World, session_of

__all__ = ["Session", "World", "session_of"]
