"""The session, which offloads the activations of one model, step by step."""

from __future__ import annotations

from tba_offload.session.session import Session, World, session_of

__all__ = ["Session", "World", "session_of"]
