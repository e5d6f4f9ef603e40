"""Memory that a new process may still take, on a GPU or within the limits of a container."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tba_offload.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator

FITTING = 0.9
"""Share of a device that layers placed ``auto`` may fill where no budget is given."""

_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_bytes(device: torch.device, *, root: Path = Path("/")) -> int:
    """Memory of a device that is free or can be freed at once.

    Args:
        device: An accelerator, or the CPU, whose memory is that of the host within the limits of the control
            groups of this process.
        root: Where ``/proc`` and ``/sys`` are found.

    Raises:
        UnsupportedError: The kernel does not say it.
    """
    if device.type != "cpu":
        return int(torch.get_device_module(device).mem_get_info(device)[0])
    return min([_host_bytes(root), *_group_bytes(root)])


def fitting_bytes(device: torch.device) -> int:
    """Return nine tenths of the memory that this process may have on a device, bytes.

    Of an accelerator that is its size less what other processes hold, of a CPU the memory that this process
    has and may still take.

    Raises:
        UnsupportedError: The kernel, or PyTorch's module of the accelerator, does not say it.
    """
    if device.type != "cpu":
        module = torch.get_device_module(device)
        if not (hasattr(module, "mem_get_info") and hasattr(module, "memory_reserved")):
            raise UnsupportedError(
                f"layers placed auto cannot fit this device: torch.{device.type} does not tell how much "
                "memory is free. Set budget.activation_bytes."
            )
        return int(FITTING * (available_bytes(device) + module.memory_reserved(device)))
    free = available_bytes(device)
    resident = int(_read(Path("/proc/self/statm")).split()[1]) * resource.getpagesize()
    return int(FITTING * (free + resident))


def _host_bytes(root: Path) -> int:
    """``MemAvailable``: the page cache counts as free."""
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise UnsupportedError("/proc/meminfo has no MemAvailable, which Linux reports since 3.14")


def _group_bytes(root: Path) -> Iterator[int]:
    """Yield what each control group that this process is in, or under, has left; versions 1 and 2."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _left_along(root / "sys/fs/cgroup", path, _V2)
        elif "memory" in controllers.split(","):
            yield from _left_along(root / "sys/fs/cgroup/memory", path, _V1)


def _left_along(mount: Path, path: str, names: tuple[str, str, str]) -> Iterator[int]:
    """Yield a group and those above it: each may have a limit.

    Inside a container the path may be that of the host, which does not exist there; the mount is then the
    container's own group.
    """
    limit_name, usage_name, cache_name = names
    group = mount / path.lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(mount):
            return
        limit, usage = _read(folder / limit_name).strip(), _read(folder / usage_name).strip()
        if limit.isdecimal() and usage.isdecimal():
            yield int(limit) - int(usage) + _statistic(folder / "memory.stat", cache_name)


def _statistic(file: Path, name: str) -> int:
    """Page cache that the kernel gives up first when the group reaches its limit."""
    for line in _read(file).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _read(file: Path) -> str:
    """Return a file of the kernel, or nothing where there is none."""
    try:
        return file.read_text()
    except OSError:
        return ""
