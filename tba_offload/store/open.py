"""Opens the store that a user asked for: of its kind, on each of its drives, with host memory beside them."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba_offload.config import StoreConfig
from tba_offload.config.values import BLOCK, KINDS
from tba_offload.errors import ConfigError, MissingDependencyError, StoreError, UnsupportedError, warn
from tba_offload.store import gds, posix
from tba_offload.store.file import FileStore
from tba_offload.store.gds import GdsStore
from tba_offload.store.host import HostStore
from tba_offload.store.multi import MultiStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tba_offload.device import Device
    from tba_offload.store.base import Store

Opener = Callable[..., "Store"]

_FEW_CORES = 2
_openers: dict[str, Opener] = {}


def open_store(config: StoreConfig | None = None, *, device: Device, **settings: Any) -> MultiStore:
    """Open a store.

    Args:
        config: What to open.
        device: The device that activations are on.
        settings: Without a config, those of a :class:`tba_offload.StoreConfig`: ``kind``, ``directories``,
            ``capacity`` and so on.

    Raises:
        ConfigError: A setting is wrong, or two directories are the same place.
        MissingDependencyError: "gds" without kvikio.
        UnsupportedError: "gds" for activations on the CPU.
        StoreError: A directory cannot be used.
    """
    config, usual = config or StoreConfig(**settings), threads_per_direction()
    readers, writers = config.readers or usual, config.writers or usual
    config = replace(config, readers=readers, writers=writers)
    if not config.directories and config.kind != "host":
        config = replace(config, directories=(Path(temporary_directory()),))
    with ExitStack() as stack:  # the open places are closed again if the next one cannot be opened
        places = [stack.enter_context(closing(place)) for place in _places(config, device)]
        store = MultiStore(places, readers=readers, writers=writers, stall_seconds=config.stall_seconds)
        stack.pop_all()
    return store


def _places(config: StoreConfig, device: Device) -> Iterator[Store]:
    """Open one place after the other."""
    if config.kind == "host":
        yield HostStore(device=device, capacity=config.capacity)
    elif (opener := _openers.get(config.kind)) is not None:
        yield opener(config, device=device)
    else:
        _check_drives(config)
        if config.kind == "gds" and not device.pins_memory:
            raise UnsupportedError("store kind 'gds' moves GPU memory; on a CPU use 'file'")
        for directory in config.directories:
            yield _open_drive(str(directory), config, device)
    if config.host_capacity is not None:
        yield HostStore(device=device, capacity=config.host_capacity)


def _open_drive(directory: str, config: StoreConfig, device: Device) -> Store:
    """Return the store on one drive; ``auto`` is ``file`` where cuFile does not take files there."""
    share = None if config.capacity is None else config.capacity // len(config.directories)
    settings: dict[str, Any] = {"device": device, "capacity": share, "checksum": config.checksum}
    why = None  # no better path than that of a file
    if config.kind == "gds":
        return GdsStore(directory, **settings)
    if config.kind == "auto" and device.pins_memory:
        why = "the nvidia-fs driver of GPUDirect Storage is not loaded: modprobe nvidia-fs"
        if gds.NVIDIA_FS.exists():
            try:
                return GdsStore(directory, **settings)
            except (StoreError, MissingDependencyError) as error:
                why = str(error)
    store = FileStore(directory, slabs=(config.readers or 0) + (config.writers or 0), **settings)
    store.reason = store.reason or why
    return store


def _check_drives(config: StoreConfig) -> None:
    """Check that each directory is a place of its own, links followed, and has room for an extent.

    Raises:
        ConfigError: Two are the same place, or the capacity is too small for their number.
    """
    real = [os.path.realpath(path) for path in config.directories]
    if twice := next((path for path in real if real.count(path) > 1), None):
        raise ConfigError(f"two directories are the same place, {twice!r}; give each drive one directory")
    if config.capacity is not None and config.capacity // len(real) < BLOCK:
        least = f"the least is {BLOCK} bytes a drive"
        raise ConfigError(f"a capacity of {config.capacity} bytes holds no extent; {least}")


def threads_per_direction() -> int:
    """Return how many threads read, and how many write, on each drive.

    Two, or one on up to two cores. Beside an H200 two threads carried 52 GB/s, all that its link to host
    memory has. On two cores that also compute, a step took 1.13 times a plain one with either number.
    """
    return 1 if len(os.sched_getaffinity(0)) <= _FEW_CORES else 2


# ---- directories -------------------------------------------------------------------------------------------


def temporary_directory() -> str:
    """Return the directory for temporary files; warn if the environment names one of no use."""
    found = tempfile.gettempdir()
    named = os.environ.get("TMPDIR") or os.environ.get("TEMP") or os.environ.get("TMP")
    if named and not os.access(named, os.W_OK | os.X_OK):
        why = "cannot be written to" if Path(named).exists() else "does not exist"
        remedy = f"mkdir -p {shlex.quote(named)}, or set store.directories"
        warn(f"TMPDIR names {named!r}, which {why}, so files go to {found}. {remedy}")
    return found


def saves_nothing(config: StoreConfig) -> str | None:
    """Return why offloading frees no memory of a model on the CPU; None if it does."""
    remedy = "name a directory on a drive"
    if config.kind == "host":
        return f"kind: host moves activations from host memory to host memory; {remedy}, with kind: file"
    for directory in config.directories or (tempfile.gettempdir(),):
        if posix.mount_of(str(Path(directory).expanduser())).place == posix.MEMORY:
            return f"{directory} lies in host memory; {remedy}"
    if config.host_capacity is not None:
        return "host_capacity takes host memory for what the drives have no time for; remove it"
    return None


# ---- kinds of other projects -------------------------------------------------------------------------------


def register_kind(kind: str, opener: Opener) -> None:
    """Make a kind of store known by its name: ``store.kind`` of a policy.

    Args:
        kind: The name.
        opener: Called with the :class:`tba_offload.StoreConfig`, whose directories and numbers of threads are
            filled in, and ``device=``, the :class:`tba_offload.device.Device` that activations are on.
            Returns a new :class:`tba_offload.store.base.Store`, which the session closes.

    Raises:
        ValueError: The name is taken.
    """
    if kind in KINDS:
        raise ValueError(f"a kind of store of the name {kind!r} is known already")
    KINDS.append(kind)
    _openers[kind] = opener


def unregister_kind(kind: str) -> None:
    """Undo :func:`register_kind`; the kinds of the package stay."""
    if _openers.pop(kind, None) is not None:
        KINDS.remove(kind)
