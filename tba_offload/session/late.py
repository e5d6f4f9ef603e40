"""Figures of a step that its device comes to later than the host: nothing waits for them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tba_offload.device.streams import device_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from tba_offload.capture.trace import StepMarks
    from tba_offload.device import Device
    from tba_offload.report.log import StepRecord


Value = TypeVar("Value")


class LateValue(Generic[Value]):
    """What is made of numbers that a device is still to compute.

    Args:
        device: The device.
        groups: Small tensors with the numbers; they are copied when the device has come to them.
        made: Makes it of the numbers, a list for each group.
    """

    def __init__(
        self,
        device: Device,
        groups: Sequence[Sequence[torch.Tensor]],
        made: Callable[[list[list[float]]], Value],
    ) -> None:
        self._copies = [[device.to_host(tensor) for tensor in group] for group in groups]
        # Each is copied on a stream of its own device, as the last stage of a model may have another.
        others = {tensor.device for group in groups for tensor in group} - {device.torch_device}
        self._copied = [device.event(), *(device_of(other).event() for other in others)]
        self._made = made

    def is_there(self) -> bool:
        """Whether :meth:`read` waits for nothing."""
        return all(event.query() for event in self._copied)

    def read(self) -> Value:
        """Return what is made of the numbers; waits for them."""
        for event in self._copied:
            event.synchronize()
        return self._made(
            [[number for each in group for number in each.flatten().tolist()] for group in self._copies]
        )


def of_one_element(device: Device, loss: torch.Tensor) -> LateValue[float | None]:
    """Return a loss that is a tensor.

    Raises:
        ValueError: It has more elements than one.
    """
    if loss.numel() != 1:
        raise ValueError(f"the loss of a step is one number, not {loss.numel()}; step.loss = loss.mean()")
    return LateValue(device, [[loss]], lambda groups: groups[0][0])


class LateFigures:
    """What a record of a step is to be completed by.

    Args:
        loss: Its loss.
        marks: Where it began and ended in the work of its device; ``None`` to leave the host's time.
        skipped: Whether gradient scalers made all optimizers skip the update; ``None`` if that is known.
    """

    def __init__(
        self,
        loss: LateValue[float | None] | None,
        marks: StepMarks | None,
        skipped: LateValue[bool] | None,
    ) -> None:
        self._loss = loss
        self._marks = marks
        self._skipped = skipped

    def are_there(self) -> bool:
        """Whether :meth:`complete` waits for nothing."""
        late = [each for each in (self._loss, self._skipped) if each is not None]
        return (self._marks is None or self._marks.are_reached()) and all(each.is_there() for each in late)

    def complete(self, record: StepRecord) -> StepRecord:
        """Return a record with these figures; waits for them."""
        found: dict[str, Any] = {}
        if self._loss is not None:
            found["loss"] = self._loss.read()
        if self._marks is not None:
            found["seconds"] = self._marks.seconds()
        if self._skipped is not None:
            found["skipped"] = self._skipped.read()
        return replace(record, **found)
