"""What updates in backward were made with: whether a step would be made with the same."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tba_offload.device.digest import Digest
from tba_offload.states.away import FreedGradient

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

    from tba_offload.states.pieces import Piece
    from tba_offload.states.subgroup import SubGroup

_SCALER = ("grad_scale", "found_inf")
"""Attributes of an optimizer by which a gradient scaler has its update divide gradients, or leave it out."""


class Basis:
    """The gradients and settings that updates were made with, and the parameters after them.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._used: dict[Piece, _Used] = {}
        self._versions: dict[torch.Tensor, int] = {}
        self._freed: set[torch.Tensor] = set()
        self._settings: dict[int, dict[str, Any]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing was updated."""
        return not self._used

    def note(self, group: SubGroup, freed: AbstractSet[torch.Tensor]) -> None:
        """A sub-group was updated.

        Args:
            group: The sub-group.
            freed: Those of its parameters whose gradients are freed now.
        """
        if group.number not in self._settings:
            self._settings[group.number] = deepcopy(self._settings_of(group.number))
        self._freed |= freed
        for piece in group.pieces:
            parameter = piece.parameter
            gradient = None if parameter in freed else Digest.of(_own(piece, parameter.grad))
            self._used[piece] = _Used(gradient, Digest.of(_own(piece, parameter)))
            self._versions[parameter] = parameter._version

    def what_differs(self) -> str | None:
        """What a step would be made with now that is not what the updates were made with."""
        if any(getattr(self._optimizer, name, None) is not None for name in _SCALER):
            return "a gradient scaler"
        if any(
            not _are_same(settings, self._settings_of(number)) for number, settings in self._settings.items()
        ):
            return "another setting of the optimizer"
        if any(not self._has_gradient(piece, used) for piece, used in self._used.items()):
            return "other gradients"
        return None

    def changed_since(self) -> torch.Tensor | None:
        """A parameter that is not as its update left it, if there is one."""
        for parameter, version in self._versions.items():
            if parameter._version != version:
                return parameter
        for piece, used in self._used.items():
            if not Digest.of(_own(piece, piece.parameter)).equals(used.parameter):
                return piece.parameter
        return None

    def clear(self) -> None:
        """Forgets all."""
        self._used.clear()
        self._versions.clear()
        self._freed.clear()
        self._settings.clear()

    def _has_gradient(self, piece: Piece, used: _Used) -> bool:
        """Whether a piece has the gradient that was used, or one that says that it was freed."""
        gradient = piece.parameter.grad
        if piece.parameter in self._freed:
            return type(gradient) is FreedGradient
        if used.gradient is None or not is_plain(gradient):
            return False
        return Digest.of(_own(piece, gradient)).equals(used.gradient)

    def _settings_of(self, number: int) -> dict[str, Any]:
        group = self._optimizer.param_groups[number]
        return {key: value for key, value in group.items() if key not in ("params", "param_names")}


class _Used(NamedTuple):
    """A gradient that an update was made with, and the parameter after it.

    Attributes:
        gradient: Tells whether another gradient has the same bits; its version does not tell whether it was
            changed, since a gradient scaler changes it and leaves that alone. ``None`` if it is freed.
        parameter: Likewise of the parameter, which ``.data`` changes without another version.
    """

    gradient: Digest | None
    parameter: Digest


def is_plain(gradient: torch.Tensor | None) -> bool:
    """Whether there is a gradient of which a digest can be made."""
    return gradient is not None and type(gradient) is torch.Tensor and gradient.layout is torch.strided


def are_finite(pieces: Iterable[Piece]) -> bool:
    """Whether plain gradients have neither infinite elements nor NaN; waits for the device, once."""
    gradients = [_own(piece, piece.parameter.grad) for piece in pieces]
    values = [torch.view_as_real(each.resolve_conj()) if each.is_complex() else each for each in gradients]
    bounds = [torch.stack(torch.aminmax(each)) for each in values if each.numel()]
    return not bounds or bool(torch.stack([each.isfinite().all() for each in bounds]).all())


def _own(piece: Piece, value: Any) -> torch.Tensor:
    """The part of a parameter or gradient that belongs to a piece."""
    plain: torch.Tensor = value.detach()
    return plain if piece.is_whole else piece.part_of(plain)


def _are_same(settings: dict[str, Any], others: dict[str, Any]) -> bool:
    return settings.keys() == others.keys() and all(
        torch.equal(value, others[key])
        if isinstance(value, torch.Tensor) and isinstance(others[key], torch.Tensor)
        else value == others[key]
        for key, value in settings.items()
    )
