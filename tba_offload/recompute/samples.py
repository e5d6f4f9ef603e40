"""A few elements of each tensor that a layer saves, by which its second run is compared with its first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tba_offload.layers.graph import latest_node

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_ELEMENTS = 16
"""Of each tensor, at equal distances: state that a layer reads changes most of what it makes."""

_KINDS = (torch.Tensor, torch.nn.Parameter)


class Differences(NamedTuple):
    """Where two runs of a layer have saved other bits.

    Attributes:
        places: In the order of saving.
        may_be_unfilled: Whether these may be memory that a kernel reserves and does not fill: none of them is
            part of the graph.
    """

    places: frozenset[int]
    may_be_unfilled: bool


class Samples:
    """A few elements of each tensor that one run of a layer saves.

    Parameters and inputs of the model are left out: they are known by their versions.

    Args:
        number: Of the run: two runs that are to be compared have the same, and others look elsewhere.
        left_out: Places, in the order of saving, of tensors that are not looked at.
    """

    __slots__ = ("_count", "_left_out", "_node", "_number", "_taken", "_waiting", "_with_graph")

    def __init__(self, number: int, left_out: Collection[int] = ()) -> None:
        self._number = number
        self._left_out = left_out
        self._count = 0
        self._taken: dict[int, torch.Tensor] = {}
        self._with_graph: set[int] = set()
        self._waiting: list[tuple[int, torch.Tensor]] = []
        self._node = -1

    def add(self, saved: torch.Tensor) -> None:
        """Take samples of a tensor; of one that its operation may fill only now when the next one saves."""
        tensor: Any = saved if type(saved) in _KINDS else getattr(saved, "_local_tensor", saved)
        if (node := latest_node()) != self._node:
            self._node = node
            self.end()
        place = self._count
        self._count += 1
        if place in self._left_out or not _can_be_sampled(tensor):
            return
        if saved.requires_grad:
            self._taken[place] = self._sample(tensor)
            self._with_graph.add(place)
        else:
            self._waiting.append((place, tensor))

    def leave_out(self) -> None:
        """Count a tensor of which no samples are taken."""
        self._count += 1

    def end(self) -> None:
        """Take samples of what its operation has filled by now."""
        waiting, self._waiting = self._waiting, []
        for place, tensor in waiting:
            if tensor.untyped_storage().nbytes():  # gathered parameters may be gone
                self._taken[place] = self._sample(tensor)

    def differences(self, others: Samples) -> Differences | None:
        """Where two runs have saved other bits, as far as that was sampled; ``None`` if nowhere."""
        # A run that fails, and says so, saves less.
        shared = sorted(self._taken.keys() & others._taken.keys())
        of_device: dict[torch.device, list[int]] = {}
        for place in shared:
            of_device.setdefault(self._taken[place].device, []).append(place)
        if all(torch.equal(self._joined(some), others._joined(some)) for some in of_device.values()):
            return None  # the host has waited for each device once
        pairs = ((place, self._joined([place]), others._joined([place])) for place in shared)
        places = {place for place, mine, its in pairs if not torch.equal(mine, its)}
        return Differences(frozenset(places), may_be_unfilled=places.isdisjoint(self._with_graph))

    def _joined(self, places: Sequence[int]) -> torch.Tensor:
        """Return the bits of samples of one device in one tensor, ordered by their type."""
        of_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for place in places:
            of_type.setdefault(self._taken[place].dtype, []).append(self._taken[place])
        return torch.cat([torch.cat(some).view(torch.uint8) for some in of_type.values()])

    def _sample(self, tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach()
        count, turn = min(plain.numel(), _ELEMENTS), self._number
        if plain.is_contiguous() or _fills_its_span(plain):
            step = plain.numel() // count
            start = turn % (plain.numel() - (count - 1) * step)
        else:
            step = start = 0  # a diagonal, that begins elsewhere in each run
            for size, stride in zip(plain.shape, plain.stride(), strict=True):
                step += size // _ELEMENTS * stride
                start += turn % (size - (_ELEMENTS - 1) * (size // _ELEMENTS)) * stride
                turn //= 2
        return plain.as_strided((count,), (step,), plain.storage_offset() + start).clone()


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
