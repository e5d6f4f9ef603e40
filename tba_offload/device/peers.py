"""Other processes that train together with this one."""

from __future__ import annotations

import torch.distributed as dist


def has_peers() -> bool:
    """Whether other ranks may be running the same layer, and its collective operations."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
