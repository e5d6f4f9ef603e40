"""Figures of a step that its device comes to later than the host: nothing waits for them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tba_offload.device.streams import device_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from tba_offload.capture.trace import StepMarks
    from tba_offload.device import Device
    from tba_offload.report.run_log import StepRecord


class LateLoss:
    """A loss that a device is still to compute.

    Args:
        device: The device.
        groups: Small tensors that it is made of; they are copied when the device has come to them.
        loss: Makes it of their numbers, a list for each group.
    """

    def __init__(
        self,
        device: Device,
        groups: Sequence[Sequence[torch.Tensor]],
        loss: Callable[[list[list[float]]], float | None],
    ) -> None:
        self._copies = [[device.to_host(tensor) for tensor in group] for group in groups]
        # Each is copied on a stream of its own device, as the last stage of a model may have another.
        others = {tensor.device for group in groups for tensor in group} - {device.torch_device}
        self._copied = [device.event(), *(device_of(other).event() for other in others)]
        self._loss = loss

    def is_there(self) -> bool:
        """Whether :meth:`read` waits for nothing."""
        return all(event.query() for event in self._copied)

    def read(self) -> float | None:
        """The loss; waits for it."""
        for event in self._copied:
            event.synchronize()
        return self._loss([_numbers(group) for group in self._copies])


def of_one_element(device: Device, loss: torch.Tensor) -> LateLoss:
    """A loss that is a tensor.

    Raises:
        ValueError: It has more elements than one.
    """
    if loss.numel() != 1:
        raise ValueError(f"the loss of a step is one number, not {loss.numel()}; step.loss = loss.mean()")
    return LateLoss(device, [[loss]], lambda groups: groups[0][0])


def _numbers(group: Sequence[torch.Tensor]) -> list[float]:
    return [number for tensor in group for number in tensor.flatten().tolist()]


class LateFigures:
    """What a record of a step is to be completed by.

    Args:
        loss: Its loss.
        marks: Where it began and ended in the work of its device; ``None`` to leave the host's time.
    """

    def __init__(self, loss: LateLoss | None, marks: StepMarks | None) -> None:
        self._loss = loss
        self._marks = marks

    def are_there(self) -> bool:
        """Whether :meth:`complete` waits for nothing."""
        marks, loss = self._marks, self._loss
        return (marks is None or marks.are_reached()) and (loss is None or loss.is_there())

    def complete(self, record: StepRecord) -> StepRecord:
        """A record with these figures; waits for them."""
        found: dict[str, Any] = {}
        if self._loss is not None:
            found["loss"] = self._loss.read()
        if self._marks is not None:
            found["seconds"] = self._marks.seconds()
        return replace(record, **found)
