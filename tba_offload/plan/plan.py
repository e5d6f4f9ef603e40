"""The plan of a step: a placement for every layer, fixed before the step begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.policy import LayerId, Placement, Policy


@dataclass(frozen=True, slots=True)
class Plan:
    """What every layer of this process does; never changes inside a step.

    Attributes:
        placements: One for each layer, in the order of the session's layers.
    """

    placements: tuple[Placement, ...]

    @classmethod
    def from_policy(
        cls, policy: Policy, layers: Sequence[LayerId], everywhere: Sequence[LayerId] | None = None
    ) -> Plan:
        """Applies the rules of a policy.

        Raises:
            ConfigError: A rule takes no effect.
        """
        resolved = policy.resolve(layers, everywhere)
        return cls(tuple(resolved[index] for index in range(len(layers))))

    @property
    def strategy(self) -> str:
        """One word for run logs: the placement that all layers share, or ``mixed``."""
        used = set(self.placements)
        return used.pop().value if len(used) == 1 else "mixed"
