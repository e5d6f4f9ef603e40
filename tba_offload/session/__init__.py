"""A session: offloading for one model, step by step."""

from tba_offload.session.session import Session
from tba_offload.session.world import World

__all__ = ["Session", "World"]
