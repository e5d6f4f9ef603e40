"""Settings of PyTorch that choose a layer's kernels: those of its first run hold in its second."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_cuda: Any = torch.backends.cuda
_C: Any = torch._C

_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
    (_C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
    (_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (torch.get_default_dtype, torch.set_default_dtype),
)
"""What reads each of them, and what sets it."""

Settings = tuple[Any, ...]


def current() -> Settings:
    """The settings in force."""
    return tuple(read() for read, _ in _SETTINGS)


@contextlib.contextmanager
def in_force(wanted: Settings) -> Iterator[None]:
    """Has these settings hold inside the block, for all threads of the process."""
    before = current()
    _change(before, wanted)
    try:
        yield
    finally:
        _change(wanted, before)


def _change(now: Settings, wanted: Settings) -> None:
    for (_, put), found, value in zip(_SETTINGS, now, wanted, strict=True):
        if found != value:
            put(value)
