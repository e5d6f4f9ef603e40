"""What updates in backward were made with: whether a step would be made with the same."""

from __future__ import annotations

from copy import deepcopy
from itertools import chain, compress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tba_offload.device.digest import are_equal, digests_of
from tba_offload.states.away import FreedGradient
from tba_offload.states.shards import local

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from tba_offload.device.digest import Digest
    from tba_offload.states.pieces import Piece
    from tba_offload.states.subgroup import SubGroup

_SCALER = ("grad_scale", "found_inf")
"""Attributes of an optimizer by which a gradient scaler has its update divide gradients, or leave it out."""

_SMALL = 64 * 2**10
"""Bytes of a piece that is joined with others: copying it takes less time than a digest of its own."""


class Basis:
    """The gradients and settings that updates were made with, and the parameters after them.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._used: dict[SubGroup, _Used] = {}
        self._versions: dict[torch.Tensor, int] = {}
        self._freed: set[torch.Tensor] = set()
        self._settings: dict[int, dict[str, Any]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing was updated."""
        return not self._used

    def note(self, group: SubGroup, freed: AbstractSet[torch.Tensor]) -> None:
        """Record that a sub-group was updated.

        Args:
            group: The sub-group.
            freed: Those of its parameters whose gradients are freed now.
        """
        if group.number not in self._settings:
            self._settings[group.number] = deepcopy(self._settings_of(group.number))
        self._freed |= freed
        kept = [piece for piece in group.pieces if piece.parameter not in freed]
        joined = list(_joined(kept))
        tensors = chain(map(_gradient, joined), map(_parameter, _joined(group.pieces)))
        digests = digests_of(tensors)
        self._used[group] = _Used(kept, digests[: len(joined)], digests[len(joined) :])
        self._versions.update({piece.parameter: piece.parameter._version for piece in group.pieces})

    def what_differs(self) -> str | None:
        """Return what a step would be made with now that is not what the updates were made with."""
        if any(getattr(self._optimizer, name, None) is not None for name in _SCALER):
            return "a gradient scaler"
        if any(
            not _are_same(settings, self._settings_of(number)) for number, settings in self._settings.items()
        ):
            return "another setting of the optimizer"
        if any(type(parameter.grad) is not FreedGradient for parameter in self._freed):
            return "other gradients"
        return None if self._has_its_gradients() else "other gradients"

    def _has_its_gradients(self) -> bool:
        """Whether gradients have the bits of those that were used, but for those that were freed since."""
        kept = [
            (some, before)
            for used in self._used.values()
            for some, before in zip(_joined(used.kept), used.gradients, strict=True)
            if some[0].parameter not in self._freed
        ]
        if not all(is_plain(piece.parameter.grad) for some, _ in kept for piece in some):
            return False
        return are_equal(digests_of(_gradient(some) for some, _ in kept), [before for _, before in kept])

    def changed_since(self) -> Sequence[torch.Tensor]:
        """Parameters of which one at least is not as its update left it; none if all are."""
        for parameter, version in self._versions.items():
            if parameter._version != version:
                return [parameter]
        known = [digest for used in self._used.values() for digest in used.parameters]
        found = digests_of(_parameter(some) for group in self._used for some in _joined(group.pieces))
        if are_equal(found, known):
            return []
        some = (some for group in self._used for some in _joined(group.pieces))
        changed = (not now.equals(before) for now, before in zip(found, known, strict=True))
        return [piece.parameter for piece in next(compress(some, changed))]

    def clear(self) -> None:
        """Forget all."""
        self._used.clear()
        self._versions.clear()
        self._freed.clear()
        self._settings.clear()

    def _settings_of(self, number: int) -> dict[str, Any]:
        group = self._optimizer.param_groups[number]
        return {key: value for key, value in group.items() if key not in ("params", "param_names")}


class _Used(NamedTuple):
    """What the update of a sub-group was made with, and what it made.

    Attributes:
        kept: Its pieces whose gradients were not freed at once.
        gradients: Tell whether their gradients have the same bits; versions do not tell it, since a gradient
            scaler changes gradients and leaves these alone.
        parameters: Likewise of all its parameters, which ``.data`` changes without another version.
    """

    kept: Sequence[Piece]
    gradients: list[Digest]
    parameters: list[Digest]


def _gradient(pieces: Sequence[Piece]) -> torch.Tensor:
    return _join([piece.own(piece.parameter.grad) for piece in pieces])


def _parameter(pieces: Sequence[Piece]) -> torch.Tensor:
    return _join([piece.own(piece.parameter) for piece in pieces])


def _joined(pieces: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
    """Small pieces of a data type together, since a digest of them takes as long as one; others one by one.

    So are slices: the gradient of their parameter may be freed with another sub-group.
    """
    small: dict[torch.dtype, list[Piece]] = {}
    for piece in pieces:
        if piece.nbytes > _SMALL or not piece.is_whole:
            yield [piece]
        else:
            small.setdefault(piece.parameter.dtype, []).append(piece)
    yield from small.values()


def _join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([each.reshape(-1) for each in tensors])


def is_plain(gradient: torch.Tensor | None) -> bool:
    """Whether there is a gradient of which a digest can be made, of a distributed one this rank's part."""
    part = local(gradient)
    return type(part) is torch.Tensor and part.layout is torch.strided


def are_finite(pieces: Sequence[Piece]) -> torch.Tensor:
    """Return a boolean on the device of plain gradients: they have neither infinite elements nor NaN."""
    gradients = [_gradient(some) for some in _joined(pieces)]
    values = [torch.view_as_real(each.resolve_conj()) if each.is_complex() else each for each in gradients]
    bounds = [torch.stack(torch.aminmax(each)) for each in values if each.numel()]
    if not bounds:
        return torch.ones((), dtype=torch.bool, device=gradients[0].device)
    return torch.stack([each.isfinite().all() for each in bounds]).all()


def _are_same(settings: dict[str, Any], others: dict[str, Any]) -> bool:
    return settings.keys() == others.keys() and all(
        torch.equal(value, others[key])
        if isinstance(value, torch.Tensor) and isinstance(others[key], torch.Tensor)
        else value == others[key]
        for key, value in settings.items()
    )
