"""A session: offloading for one model, step by step."""

from __future__ import annotations

from tba_offload.session.session import Session, session_of
from tba_offload.session.world import World

__all__ = ["Session", "World", "session_of"]
