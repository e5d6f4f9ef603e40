"""What updates in backward were made with: whether a step would be made with the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tba_offload.device.digest import Digest

if TYPE_CHECKING:
    from tba_offload.states.subgroup import SubGroup

_SCALER = ("grad_scale", "found_inf")
"""Attributes of an optimizer by which a gradient scaler has its update divide gradients, or leave it out."""


class Basis:
    """The gradients and settings that updates were made with, and the parameters after them.

    Args:
        optimizer: The optimizer.
        has_gradients: Whether gradients are there until the step, so that they can be compared.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, has_gradients: bool) -> None:
        self._optimizer = optimizer
        self._has_gradients = has_gradients
        self._used: dict[torch.Tensor, _Used] = {}
        self._settings: dict[int, dict[str, Any]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing was updated."""
        return not self._used

    def note(self, group: SubGroup) -> None:
        """A sub-group was updated."""
        self._settings.setdefault(group.number, self._settings_of(group.number))
        for parameter in {piece.parameter for piece in group.pieces}:
            used = self._used.get(parameter)
            digest = used.gradient if used is not None else self._digest(parameter)
            own = Digest.of(parameter, samples_only=True)
            self._used[parameter] = _Used(digest, own, parameter._version)

    def what_differs(self) -> str | None:
        """What a step would be made with now that is not what the updates were made with."""
        if any(getattr(self._optimizer, name, None) is not None for name in _SCALER):
            return "a gradient scaler"
        if any(
            not _are_same(settings, self._settings_of(number)) for number, settings in self._settings.items()
        ):
            return "another setting of the optimizer"
        if any(not used.is_same(parameter.grad) for parameter, used in self._used.items()):
            return "other gradients"
        return None

    def changed_since(self) -> torch.Tensor | None:
        """A parameter that is not as its update left it, if there is one."""
        return next((each for each, used in self._used.items() if not used.is_untouched(each)), None)

    def clear(self) -> None:
        """Forgets all."""
        self._used.clear()
        self._settings.clear()

    def _digest(self, parameter: torch.Tensor) -> Digest | None:
        gradient: Any = parameter.grad
        return Digest.of(gradient) if self._has_gradients else None

    def _settings_of(self, number: int) -> dict[str, Any]:
        return {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in self._optimizer.param_groups[number].items()
            if key != "params"
        }


class _Used(NamedTuple):
    """A gradient that an update was made with, and the parameter after it.

    Attributes:
        gradient: Tells whether another gradient has the same bits; its version does not tell whether it was
            changed, since a gradient scaler changes it and leaves that alone. ``None`` if it is freed.
        parameter: Samples of the parameter, which ``.data`` changes without another version.
        version: The version of the parameter.
    """

    gradient: Digest | None
    parameter: Digest
    version: int

    def is_same(self, gradient: torch.Tensor | None) -> bool:
        """Whether a gradient has the bits of the one that was used."""
        if self.gradient is None:
            return True
        return gradient is not None and is_plain(gradient) and Digest.of(gradient).equals(self.gradient)

    def is_untouched(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter is as the update left it."""
        if parameter._version != self.version:
            return False
        return Digest.of(parameter, samples_only=True).equals(self.parameter)


def is_plain(gradient: torch.Tensor | None) -> bool:
    """Whether there is a gradient of which a digest can be made."""
    return gradient is not None and type(gradient) is torch.Tensor and gradient.layout is torch.strided


def _are_same(settings: dict[str, Any], others: dict[str, Any]) -> bool:
    return settings.keys() == others.keys() and all(
        torch.equal(value, others[key])
        if isinstance(value, torch.Tensor) and isinstance(others[key], torch.Tensor)
        else value == others[key]
        for key, value in settings.items()
    )
