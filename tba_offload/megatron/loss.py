"""The loss of a step as Megatron counts it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.session.step import Step


def report_loss(step: Step, losses: Any) -> None:
    """Has the loss of the micro-batches of this rank in the record of a step; nothing waits for the device.

    Args:
        step: The step.
        losses: What the schedule returned: of each micro-batch what its loss function reports. That is a
            mean, or a sum and the number of tokens in it. Stages without a loss report nothing.
    """
    reported = [_parts_of(each) for each in losses if each] if isinstance(losses, list) else []
    if reported:
        step.will_have_loss(reported, mean_of)


def mean_of(reported: Sequence[Sequence[float]]) -> float | None:
    """Return the mean of what micro-batches report; ``None`` if no token counts."""
    if len(reported[0]) == 1:
        return sum(mean for (mean,) in reported) / len(reported)
    total, tokens = (sum(column) for column in zip(*reported, strict=True))
    return total / tokens if tokens else None


def _parts_of(reported: dict[str, Any]) -> list[torch.Tensor]:
    """Return what a loss function reports first."""
    value = next(iter(reported.values()))
    parts = value if isinstance(value, (tuple, list)) else [value]
    return [torch.as_tensor(part) for part in parts]
