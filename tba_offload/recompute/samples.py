"""A few elements of each tensor that a layer saves, by which its second run is compared with its first."""

from __future__ import annotations

from typing import Any

import torch

from tba_offload.layers.graph import latest_node

_ELEMENTS = 16
"""Of each tensor, at equal distances: state that a layer reads changes most of what it makes."""

_KINDS = (torch.Tensor, torch.nn.Parameter)


class Samples:
    """A few elements of each tensor that one run of a layer saves.

    Parameters and inputs of the model are left out: they are known by their versions.

    Args:
        number: Of the run: two runs that are to be compared have the same, and others look elsewhere.
    """

    __slots__ = ("_node", "_number", "_taken", "_waiting")

    def __init__(self, number: int) -> None:
        self._number = number
        self._taken: list[torch.Tensor | None] = []
        self._waiting: list[tuple[int, torch.Tensor]] = []
        self._node = -1

    def add(self, saved: torch.Tensor) -> None:
        """Takes samples of a tensor; of one that its operation may fill only now when the next one saves."""
        tensor: Any = getattr(saved, "_local_tensor", saved)
        if (node := latest_node()) != self._node:
            self._node = node
            self.end()
        if not _can_be_sampled(tensor):
            self._taken.append(None)
        elif saved.requires_grad:
            self._taken.append(self._sample(tensor))
        else:
            self._waiting.append((len(self._taken), tensor))
            self._taken.append(None)

    def leave_out(self) -> None:
        """Counts a tensor of which no samples are taken."""
        self._taken.append(None)

    def end(self) -> None:
        """Takes samples of what its operation has filled by now."""
        waiting, self._waiting = self._waiting, []
        for place, tensor in waiting:
            if tensor.untyped_storage().nbytes():  # gathered parameters may be gone
                self._taken[place] = self._sample(tensor)

    def agree_with(self, others: Samples) -> bool:
        """Whether all that was sampled in both runs has the same bits."""
        pairs = zip(self._taken, others._taken, strict=False)  # a run that fails, and says so, saves less
        return all(one is None or other is None or torch.equal(one, other) for one, other in pairs)

    def _sample(self, tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach()
        count, turn = min(plain.numel(), _ELEMENTS), self._number
        if plain.is_contiguous() or _fills_its_span(plain):
            step = plain.numel() // count
            start = turn % step
        else:
            step = start = 0  # a diagonal, that begins elsewhere in each run
            for size, stride in zip(plain.shape, plain.stride(), strict=True):
                step += size // _ELEMENTS * stride
                start += turn % (size - (_ELEMENTS - 1) * (size // _ELEMENTS)) * stride
                turn //= 2
        with torch.no_grad():
            samples = plain.as_strided((count,), (step,), plain.storage_offset() + start)
            return samples.clone().view(torch.uint8)


def _fills_its_span(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor lie side by side in its memory, in whatever order."""
    strides = tensor.stride()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    return span == tensor.numel() and 0 not in strides  # one that is expanded may have gaps


def _can_be_sampled(tensor: torch.Tensor) -> bool:
    """Whether a tensor was made by the layer, and has elements that can be taken."""
    return (
        type(tensor) in _KINDS
        and tensor.numel() > 0
        and not (tensor.is_leaf and (tensor.requires_grad or tensor._is_view()))
        and tensor.layout is torch.strided
        and not (tensor.is_complex() or tensor.is_quantized or tensor.is_nested or tensor.is_meta)
    )
