"""States of a checkpoint that wait to be put in their places, sub-group by sub-group."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Incoming:
    """A state of a checkpoint, which ``load_state_dict`` passes on as it passes on what is no tensor.

    Attributes:
        value: The state, wherever the checkpoint has it.
        dtype: The data type that the optimizer wants it in.
    """

    __slots__ = ("dtype", "value")

    def __init__(self, value: torch.Tensor, dtype: torch.dtype) -> None:
        self.value = value
        self.dtype = dtype

    @property
    def nbytes(self) -> int:
        """Bytes that it will have."""
        return self.value.numel() * self.dtype.itemsize
