"""One sub-group updated in host memory: copies of what the device has, and the optimizer's code over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tba_offload.states.away import AwayMaster
from tba_offload.states.entries import is_alike
from tba_offload.states.groups import side_by_side
from tba_offload.states.masters import MASTER
from tba_offload.states.pieces import is_dense
from tba_offload.states.twin import Twin

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tba_offload.device import Device
    from tba_offload.states.groups import Entry, SubGroup
    from tba_offload.states.masters import Masters
    from tba_offload.states.pieces import Piece

    Pair = tuple[torch.Tensor, torch.Tensor]

_HOST = torch.device("cpu")


class HostStep(Twin):
    """The update of an optimizer over tensors in host memory.

    Where the optimizer leaves the implementation to PyTorch, the fused one is taken if there is one: the loop
    that PyTorch chooses for tensors of a CPU goes through memory some ten times. It takes no parameters of
    which some have states and others are about to get theirs.
    """

    def _settings(self, number: int, entries: Mapping[torch.Tensor, Entry]) -> dict[str, Any]:
        settings = on_host(super()._settings(number, entries))
        if "fused" in settings and settings["fused"] is None and settings.get("foreach") is None:
            settings["fused"] = all(entry for each, entry in entries.items() if each.grad is not None) or None
        return settings

    @property
    def unscales(self) -> bool:
        """Whether a gradient scaler has the update divide gradients, which fused kernels do in place."""
        return getattr(self._optimizer, "grad_scale", None) is not None

    def _own_attributes(self) -> dict[str, Any]:
        return on_host(super()._own_attributes())


class Desk:
    """Host memory for the parameters and gradients of a sub-group; the device copies from and to it fast.

    Args:
        device: The device.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return self._memory.numel()

    def lay(self, likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors side by side, like others that are dense; not filled."""
        starts, end = side_by_side(like.nbytes for like in likes)
        if end > self.nbytes:
            self._memory = self._device.host_memory(end)
        return [
            self._memory[start : start + like.nbytes].view(like.dtype).as_strided(like.size(), like.stride())
            for start, like in zip(starts, likes, strict=True)
        ]


class _Part:
    """One piece: what the device has of it, and copies of that.

    Args:
        piece: The piece.
        model: What is set on the device.
        gradient: Its gradient there; ``None`` if it has none, and is not updated.
        copy: A copy of ``model``, not filled.
        gradient_copy: A copy of the gradient, not filled.
        master: The master in a slot, if the piece belongs to one.
    """

    def __init__(
        self,
        piece: Piece,
        model: torch.Tensor,
        gradient: torch.Tensor | None,
        copy: torch.Tensor,
        gradient_copy: torch.Tensor,
        master: torch.Tensor | None,
    ) -> None:
        self.piece = piece
        self.tensor = copy if master is None else master
        self.tensor.grad = None if gradient is None else gradient_copy
        self._model = model
        self._gradient = gradient
        self._copy = copy
        self._master = master

    def arriving(self) -> list[Pair]:
        """Return what is copied to host memory: target and source."""
        if self._gradient is None or self.tensor.grad is None:
            return []
        pairs = [(self.tensor.grad, self._gradient)]
        return pairs if self._master is not None else [*pairs, (self._copy, self._model)]

    def cast(self) -> None:
        """Round a master to what the model has, before that is copied."""
        if self._master is not None and self._gradient is not None:
            self._copy.copy_(self._master)

    def leaving(self, *, with_gradient: bool) -> list[Pair]:
        """Return what is copied to the device: target and source."""
        if self._gradient is None or self.tensor.grad is None:
            return []
        pairs = [(self._model, self._copy)]
        return [*pairs, (self._gradient, self.tensor.grad)] if with_gradient else pairs


class HostUpdate:
    """The update of one sub-group.

    Args:
        group: The sub-group.
        states: Its bytes in host memory, 1-D uint8.
        resident: States of its pieces that do not travel; those on the device are copied.
        masters: The master copies among the parameters.
        desk: Where copies go.

    Attributes:
        bound: The states as views of the bytes.
        entries: All states of each piece, after :meth:`run` those that it has left.
        is_as_before: Whether these are the same ones, of the same shapes.
    """

    def __init__(
        self,
        group: SubGroup,
        states: torch.Tensor,
        resident: Mapping[Piece, Entry],
        masters: Masters,
        desk: Desk,
    ) -> None:
        self._number = group.number
        self._resident = resident
        self.bound = group.views(states)
        self.entries = {
            piece: on_host(entry) | self.bound.get(piece, {}) for piece, entry in resident.items()
        }
        self.is_as_before = True
        models = [masters.model_part(piece) for piece in group.pieces]
        gradients = [piece.gradient() for piece in group.pieces]
        copies = desk.lay([*models, *map(_dense_like, gradients)])
        self._parts = [
            _Part(piece, model, gradient, copy, gradient_copy, self.entries[piece].get(MASTER))
            for piece, model, gradient, copy, gradient_copy in zip(
                group.pieces, models, gradients, copies[: len(models)], copies[len(models) :], strict=True
            )
        ]

    def fetch(self) -> None:
        """Copy parameters and gradients to host memory, on the calling thread's stream."""
        _copy([pair for part in self._parts for pair in part.arriving()])

    def give_back(self, *, with_gradients: bool) -> None:
        """Copy parameters to the device, on the calling thread's stream, and states that lay there.

        Args:
            with_gradients: Whether gradients are as well, as the update has changed them.
        """
        _copy([pair for part in self._parts for pair in part.leaving(with_gradient=with_gradients)])
        for piece, entry in self.entries.items():
            before, bound = self._resident[piece], self.bound.get(piece, {})
            entry.update({key: _like(entry[key], before.get(key)) for key in entry.keys() - bound.keys()})

    def entries_on(self, device: torch.device) -> dict[Piece, Entry]:
        """Return the states of all pieces, with those of more than one element on a device."""
        return {
            piece: {
                key: value.to(device) if isinstance(value, torch.Tensor) and value.numel() > 1 else value
                for key, value in entry.items()
            }
            for piece, entry in self.entries.items()
        }

    def run(self, own: Twin, options: Mapping[str, Any]) -> None:
        """Run the optimizer's code.

        Args:
            own: The code.
            options: Further arguments of the optimizer's ``step``.
        """
        given = {
            part.piece: {key: value for key, value in self.entries[part.piece].items() if key != MASTER}
            for part in self._parts
        }
        try:
            own.run(self._number, {part.tensor: given[part.piece] for part in self._parts}, options)
            for part in self._parts:
                part.cast()
                self._take(part, own.states.get(part.tensor, given[part.piece]))
            if not self.is_as_before:
                self._let_go_of_bytes()
        finally:
            own.discard()

    def _let_go_of_bytes(self) -> None:
        """Copy what lies in the bytes, which are those of another sub-group by the time it is taken."""
        for piece, bound in self.bound.items():
            entry = self.entries[piece]
            entry.update({key: view.clone() for key, view in bound.items() if entry.get(key) is view})

    def _take(self, part: _Part, left: Entry) -> None:
        """Note the states of a piece."""
        piece, bound = part.piece, self.bound.get(part.piece, {})
        now = dict(left)
        if MASTER in bound:
            now[MASTER] = bound[MASTER]
        self.is_as_before = self.is_as_before and now.keys() == self.entries[piece].keys()
        for key in now.keys() & bound.keys():
            if now[key] is not bound[key]:
                if is_alike(now[key], bound[key]):
                    now[key] = bound[key].copy_(now[key])
                else:
                    self.is_as_before = False
        self.entries[piece] = now


def can_be_copied(group: SubGroup) -> bool:
    """Whether a sub-group has states, and the processor can update all of its pieces."""
    if not group.places or group.is_new:
        return False
    return all(_is_plain(piece.parameter) for piece in group.pieces)


def _is_plain(parameter: torch.Tensor) -> bool:
    """Whether a parameter and its gradient are plain tensors of real numbers, which fused kernels need."""
    kind, gradient = type(parameter.data), parameter.grad
    if kind is not AwayMaster and not (kind is torch.Tensor and is_dense(parameter)):
        return False
    if not parameter.is_floating_point():
        return False
    return gradient is None or (type(gradient) is torch.Tensor and gradient.layout == torch.strided)


def _dense_like(gradient: torch.Tensor | None) -> torch.Tensor:
    """Return a gradient, or a tensor without bytes that says how a copy of it is to lie in memory."""
    if gradient is None:
        return torch.empty(0, device="meta")
    if is_dense(gradient):
        return gradient
    return torch.empty_like(gradient, device="meta", memory_format=torch.contiguous_format)


def on_host(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same, with tensors of a device copied to host memory; also those in tuples, as betas are."""
    return {name: _on_host(value) for name, value in values.items()}


def _on_host(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_on_host, value))
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        return value.to(_HOST)
    return value


def _copy(pairs: Sequence[Pair]) -> None:
    for target, source in pairs:
        target.copy_(source, non_blocking=True)


def _like(value: Any, before: Any) -> Any:
    """Return a state on the device that had it before."""
    if isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor):
        return value.to(before.device)
    return value
