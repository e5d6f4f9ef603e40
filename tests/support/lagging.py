"""Builds the device of ``lagging_device.cpp`` and registers it with PyTorch under the name ``lag``.

Importing this changes the process for good: ``torch.accelerator`` is that device then. So it is the plugin of
a process of pytest's own (``-p lagging``), and the other tests keep PyTorch's CPU only.
"""

from __future__ import annotations

import ctypes
import resource
import types
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from compiled import library_of

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(__file__).with_name("lagging_device.cpp")
COUNTS = ("overwritten", "reused", "copies", "host_waits", "calls_in_child", "pinned_bytes")
LAG = "lag"
DEVICES = 2
_CYCLES = 1500
"""Clock cycles in a microsecond, as the package takes them where a device does not tell its clock."""


class Event:
    """Makes events of the device, and counts them, and those for which a thread would spin."""

    made = 0
    spinning = 0

    def __new__(cls, enable_timing: bool = False, blocking: bool = False) -> torch.Event:  # type: ignore[misc]
        Event.made += 1
        Event.spinning += not (blocking or enable_timing)
        return torch.Event(LAG, enable_timing=enable_timing)


@contextmanager
def _on(device: Any) -> Iterator[None]:
    """A device is the current one: by its number, or as PyTorch names it; without any it stays."""
    before = torch.accelerator.current_device_index()
    number = device if isinstance(device, int) or device is None else torch.device(device).index
    torch.accelerator.set_device_index(before if number is None else number)
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


class _Module(types.ModuleType):
    """``torch.lag``: the functions that modules of accelerators have in common."""

    Event = Event
    Stream = torch.Stream
    current_stream = staticmethod(torch.accelerator.current_stream)
    current_device = staticmethod(torch.accelerator.current_device_index)
    memory_allocated = staticmethod(torch.accelerator.memory_allocated)
    memory_reserved = staticmethod(torch.accelerator.memory_reserved)
    max_memory_allocated = staticmethod(torch.accelerator.max_memory_allocated)
    max_memory_reserved = staticmethod(torch.accelerator.max_memory_reserved)
    reset_peak_memory_stats = staticmethod(torch.accelerator.reset_peak_memory_stats)
    device = staticmethod(_on)
    size = 2**30
    synchronize = staticmethod(torch.accelerator.synchronize)
    is_capturing = False

    @staticmethod
    @contextmanager
    def stream(stream: torch.Stream) -> Iterator[None]:
        """As CUDA's; in PyTorch 2.10 two threads cannot enter one ``torch.Stream`` at a time."""
        before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    @staticmethod
    def device_count() -> int:
        return DEVICES

    @staticmethod
    def is_available() -> bool:
        return True

    is_initialized = is_available
    _initialized = True  # or checkpoints would not restore its generator

    @classmethod
    def mem_get_info(cls, device: Any = None) -> tuple[int, int]:
        return max(cls.size - torch.accelerator.memory_reserved(device), 0), cls.size

    @staticmethod
    def _lazy_init() -> None:
        """Does nothing, but up to PyTorch 2.11 ``torch.accelerator.synchronize`` does nothing without it."""

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def set_device(device: Any) -> None:
        torch.accelerator.set_device_index(torch.device(device).index or 0)

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return "a device that lags"

    @staticmethod
    def get_device_properties(device: Any = None) -> None:
        """Nothing is known of it."""

    @staticmethod
    def _sleep(cycles: int) -> None:
        library.lag_sleep(cycles // _CYCLES)

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        for device in range(DEVICES):
            with _on(device):
                library.lag_set_seed(seed & 0xFFFFFFFF)

    manual_seed = manual_seed_all

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        with _on(device):
            return torch.tensor([library.lag_seed()]).view(torch.uint8)

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        with _on(device):
            library.lag_set_seed(int(state.view(torch.int64)))

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing


def _registered() -> ctypes.CDLL:
    library_file = library_of(SOURCE)
    torch.utils.rename_privateuse1_backend(LAG)
    torch.ops.load_library(str(library_file))
    torch._register_device_module(LAG, _Module("torch.lag"))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    loaded = ctypes.CDLL(str(library_file))
    for name in ("lag_count", "lag_seed"):
        getattr(loaded, name).restype = ctypes.c_long
    for name in ("lag_sleep", "lag_limit", "lag_obey", "lag_set_seed"):
        getattr(loaded, name).argtypes = [ctypes.c_long]
    loaded.lag_by.argtypes = [ctypes.c_long, ctypes.c_long]
    return loaded


library = _registered()


def count(name: str) -> int:
    """One of :data:`COUNTS`, since the process began."""
    return int(library.lag_count(COUNTS.index(name)))


@contextmanager
def late(*, operations: float = 0.0, copies: float = 0.0) -> Iterator[None]:
    library.lag_by(int(operations * 1e6), int(copies * 1e6))
    try:
        yield
    finally:
        library.lag_by(0, 0)


@contextmanager
def memory_of(nbytes: int) -> Iterator[None]:
    library.lag_limit(max(nbytes, 1))  # 0 is no limit
    _Module.size, before = nbytes, _Module.size
    try:
        yield
    finally:
        library.lag_limit(0)
        _Module.size = before


@contextmanager
def locked_memory_of(nbytes: int) -> Iterator[None]:
    """The limit of locked memory, as by ``ulimit -l``, which the device's driver obeys meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (nbytes, before[1]))
    library.lag_obey(1)
    try:
        yield
    finally:
        library.lag_obey(0)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


def sleep(seconds: float) -> None:
    library.lag_sleep(int(seconds * 1e6))


def fail() -> None:
    """Has the work of the current stream fail when its turn comes; nothing works then until :func:`heal`."""
    library.lag_fail()


def heal() -> None:
    library.lag_heal()
