"""What a device has left for activations: all that it may hold, less what lies there beside them."""

from __future__ import annotations

from dataclasses import dataclass

from tba_offload.formatting import readable_size

SPARE = 1 / 64
"""Share of what is left that is not given to activations, so that a base which grows a little from step to
step breaks nothing, and no plan is made for it. By malloc's count that of a small GPT on a CPU grew by 0.2
MiB in six steps, 0.4 % of the 54 MiB that were left."""


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """What lies on a device beside activations, in bytes.

    Attributes:
        device_bytes: The most that may lie there.
        base_bytes: Live before the forward of a step, without gradients: parameters, buffers, states of
            optimizers or the slots of offloaded ones, and whatever else outlives steps.
        gradient_bytes: The most gradients at one time in a step, and frozen weights that come and go.
    """

    device_bytes: int
    base_bytes: int = 0
    gradient_bytes: int = 0

    @property
    def left(self) -> int:
        """Bytes that are left for activations; negative if what lies there is too much already."""
        return self.device_bytes - self.base_bytes - self.gradient_bytes

    @property
    def budget(self) -> int:
        """Most bytes of the activation peak."""
        return max(int((1 - SPARE) * self.left), 0)

    def holds_for(self, other: DeviceShare) -> bool:
        """Whether the budget made of this keeps to what is left now, and leaves little of it unused.

        Args:
            other: What lies there now.
        """
        left = max(other.left, 0)
        return (1 - 2 * SPARE) * left <= self.budget <= left

    def __str__(self) -> str:
        base, gradients = readable_size(self.base_bytes), readable_size(self.gradient_bytes)
        whole = readable_size(self.device_bytes)
        return f"of {whole}, less {base} live before a step and {gradients} of gradients"
