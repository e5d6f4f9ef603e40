"""The ranks that a model is spread over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tba_offload.adapt.agreement import Agree
    from tba_offload.config.policy import LayerId


@dataclass(frozen=True)
class World:
    """The ranks that a model is spread over, as one of them sees them.

    Attributes:
        layers: The layers of all ranks: by them the rules of a policy are judged.
        rank: This one.
        ranks: How many there are.
        run: A word that all of them share, by which their run logs are put together; ``None`` if alone.
        agree: Given what this rank proposes, name of a layer to its placement, and how much it needs it,
            tells the proposal that counts for each layer; all ranks call it at once. ``None`` if alone.
    """

    layers: tuple[LayerId, ...]
    rank: int = 0
    ranks: int = 1
    run: str | None = None
    agree: Agree | None = None

    @property
    def may_plan_recomputation(self) -> bool:
        """Whether the planner decides for all ranks that would have to take part in a second run."""
        return self.agree is not None or self.is_alone

    @property
    def is_alone(self) -> bool:
        """Whether no other rank would have to take part in a second run of a layer."""
        if self.ranks > 1:
            return False
        distributed = torch.distributed
        return not (distributed.is_available() and distributed.is_initialized()) or (
            distributed.get_world_size() == 1
        )
