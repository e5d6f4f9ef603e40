"""Figures of a step that its device comes to later than the host: nothing waits for them."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from tba_offload.device.streams import device_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from tba_offload.capture.trace import StepMarks
    from tba_offload.device import Device
    from tba_offload.report.run_log import StepRecord


class LateNumbers:
    """Numbers that a device is still to compute.

    Args:
        device: The device.
        groups: Small tensors with them; they are copied when the device has come to them.
    """

    def __init__(self, device: Device, groups: Sequence[Sequence[torch.Tensor]]) -> None:
        self._copies = [[device.to_host(tensor) for tensor in group] for group in groups]
        # Each is copied on a stream of its own device, as the last stage of a model may have another.
        others = {tensor.device for group in groups for tensor in group} - {device.torch_device}
        self._copied = [device.event(), *(device_of(other).event() for other in others)]

    def is_there(self) -> bool:
        """Whether :meth:`read` waits for nothing."""
        return all(event.query() for event in self._copied)

    def read(self) -> list[list[float]]:
        """The numbers, a list for each group; waits for them."""
        for event in self._copied:
            event.synchronize()
        return [[number for each in group for number in each.flatten().tolist()] for group in self._copies]


class LateLoss:
    """A loss that a device is still to compute.

    Args:
        device: The device.
        groups: Small tensors that it is made of.
        loss: Makes it of their numbers, a list for each group.
    """

    def __init__(
        self,
        device: Device,
        groups: Sequence[Sequence[torch.Tensor]],
        loss: Callable[[list[list[float]]], float | None],
    ) -> None:
        self._numbers = LateNumbers(device, groups)
        self._loss = loss

    def is_there(self) -> bool:
        """Whether :meth:`read` waits for nothing."""
        return self._numbers.is_there()

    def read(self) -> float | None:
        """The loss; waits for it."""
        return self._loss(self._numbers.read())


def of_one_element(device: Device, loss: torch.Tensor) -> LateLoss:
    """A loss that is a tensor.

    Raises:
        ValueError: It has more elements than one.
    """
    if loss.numel() != 1:
        raise ValueError(f"the loss of a step is one number, not {loss.numel()}; step.loss = loss.mean()")
    return LateLoss(device, [[loss]], lambda groups: groups[0][0])


class LateFigures:
    """What a record of a step is to be completed by.

    Args:
        loss: Its loss.
        marks: Where it began and ended in the work of its device; ``None`` to leave the host's time.
        overflows: Of each optimizer, other than 0 if a gradient scaler made it skip the update; ``None`` if
            that is known.
    """

    def __init__(
        self, loss: LateLoss | None, marks: StepMarks | None, overflows: LateNumbers | None = None
    ) -> None:
        self._loss = loss
        self._marks = marks
        self._overflows = overflows

    def are_there(self) -> bool:
        """Whether :meth:`complete` waits for nothing."""
        late = [each for each in (self._loss, self._overflows) if each is not None]
        return (self._marks is None or self._marks.are_reached()) and all(each.is_there() for each in late)

    def complete(self, record: StepRecord) -> StepRecord:
        """A record with these figures; waits for them."""
        found: dict[str, Any] = {}
        if self._loss is not None:
            found["loss"] = self._loss.read()
        if self._marks is not None:
            found["seconds"] = self._marks.seconds()
        if self._overflows is not None:
            found["skipped"] = all(chain.from_iterable(self._overflows.read()))
        return replace(record, **found)
