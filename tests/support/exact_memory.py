"""Peaks of memory on a CPU without samples: the twin of an accelerator's statistics.

On a CPU the package samples what malloc has given out: a short peak may be missed, the more so the busier the
machine is, and what else the process allocates counts too. Here PyTorch's allocator counts
(``counting_allocator.cpp``), and the meter is the one that accelerators have.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING
from unittest import mock

import torch
from compiled import library_of
from places import SUPPORT

from tba_offload.device import new_storage
from tba_offload.device.meters import MemoryMeter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def exact_memory(*, slots_too: bool = False) -> Iterator[None]:
    """Sessions that are attached in this context know each peak to the byte.

    Args:
        slots_too: Whether storages count that are made without a tensor: slots of optimizer states,
            frozen weights, and what is read back. PyTorch takes them from its default allocator, whichever
            is set. They are not told from those of a store that has its bytes in host memory.
    """
    library = _library()
    live, peak, reset = library.live_bytes, library.peak_bytes, library.reset_peak
    statistics = {
        "memory_allocated": lambda _: live(),
        "max_memory_allocated": lambda _: peak(),
        "max_memory_reserved": lambda _: peak(),
        "reset_peak_memory_stats": lambda _: reset(),
    }

    def meter_of(_: object, static: Callable[[], int]) -> MemoryMeter:
        return MemoryMeter(torch.device("cpu"), static)

    def counted(nbytes: int, device: torch.device) -> torch.UntypedStorage:
        return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()

    library.count(1)
    try:
        with (
            mock.patch.multiple(torch.cpu, create=True, **statistics),
            mock.patch("tba_offload.session.memory.meter_of", meter_of),
            mock.patch("tba_offload.device.new_storage", counted if slots_too else new_storage),
            mock.patch("tba_offload.weights.pieces.new_storage", counted if slots_too else new_storage),
        ):
            yield
    finally:
        library.count(0)


def counted_bytes() -> int:
    """Return the bytes that are counted as live now: also those that tests before this one have left."""
    return int(_library().live_bytes())


@cache
def _library() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(library_of(SUPPORT / "counting_allocator.cpp")))
    for name in ("live_bytes", "peak_bytes"):
        getattr(loaded, name).restype = ctypes.c_long
    return loaded
