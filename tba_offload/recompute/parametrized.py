"""Weights that a layer found cached: inside ``torch.nn.utils.parametrize.cached()`` each is computed once.

Of two forwards of a layer in such a block the first computes its parametrized weights, and saves tensors for
that; the second finds them. When backward comes to them the block may have ended. So each is repeated with
the cache as it found it: the same weights in it, or none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.utils import parametrize

from tba_offload.recompute.contents import version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn

_cache: Any = parametrize  # whose two variables are all that tells


class CachedWeights:
    """What the cache of parametrized weights held for some modules.

    It holds weights that were computed, as the operations do that used them.

    Args:
        modules: The modules.
    """

    __slots__ = ("_blocks", "_weights")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._blocks: int = _cache._cache_enabled  # within how many the run began
        self._weights: dict[tuple[int, str], tuple[Tensor, int]] = {}
        if self._blocks and _cache._cache:
            known = set(map(id, modules))
            for key, weight in _cache._cache.items():
                if key[0] in known:
                    self._weights[key] = weight, version_of(weight)

    def __bool__(self) -> bool:
        """Whether there was any."""
        return bool(self._weights)

    def changed_in_place(self) -> str | None:
        """Which of them has changed in place since; ``None`` for none of them."""
        for (_, name), (weight, version) in self._weights.items():
            if version_of(weight) != version:
                return f"the cached weight {name}"
        return None

    def put_back(self, undo: Callable[..., object]) -> None:
        """Have the cache hold these and no others; ``undo`` takes the call that undoes it."""
        if self._blocks or _cache._cache_enabled:
            undo(_put, _cache._cache_enabled, _cache._cache)
            _put(self._blocks, {key: weight for key, (weight, _) in self._weights.items()})


def _put(blocks: int, weights: dict[tuple[int, str], Tensor]) -> None:
    _cache._cache_enabled, _cache._cache = blocks, weights
