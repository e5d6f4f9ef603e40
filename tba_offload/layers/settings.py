"""Settings of PyTorch that choose a layer's kernels: those of its first run hold in its second."""

from __future__ import annotations

import contextlib
import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_cuda: Any = torch.backends.cuda
_C: Any = torch._C

_Setting = tuple["Callable[[], Any]", "Callable[[Any], object]"]


def _precision(backend: str, operation: str) -> _Setting:
    return (
        partial(_C._get_fp32_precision_getter, backend, operation),
        partial(_C._set_fp32_precision_setter, backend, operation),
    )


def _precisions() -> tuple[_Setting, ...]:
    """How exactly kernels compute in fp32."""
    kinds = itertools.product(("cuda", "mkldnn"), ("matmul", "conv", "rnn"))
    return tuple(_precision(*kind) for kind in kinds)


_FP16, _BF16 = (f"allow_{kind}_reduced_precision_reduction" for kind in ("fp16", "bf16"))

_SETTINGS: tuple[_Setting, ...] = (
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
    (torch.get_num_threads, torch.set_num_threads),
    (_C._get_cublas_allow_fp16_reduced_precision_reduction, partial(setattr, _cuda.matmul, _FP16)),
    (_C._get_cublas_allow_bf16_reduced_precision_reduction, partial(setattr, _cuda.matmul, _BF16)),
    *_precisions(),
)
"""Functions that read each of them, and set it."""

_READS = [read for read, _ in _SETTINGS]

Settings = tuple[Any, ...]


def current() -> Settings:
    """Return the settings in force."""
    return tuple([read() for read in _READS])


@contextlib.contextmanager
def in_force(wanted: Settings) -> Iterator[None]:
    """Have these settings hold inside the block, for all threads of the process."""
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
