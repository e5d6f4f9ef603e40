"""Functions that open the store of a policy: a store for each drive, and host memory if requested."""

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
from tba_offload.config.values import KINDS
from tba_offload.errors import MissingDependencyError, StoreError, UnsupportedError, warn
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
        config: Settings of the store.
        device: The device with the activations.
        settings: Arguments of :class:`tba_offload.StoreConfig`, such as ``kind``, ``directories`` and
            ``capacity``. The arguments have no effect if ``config`` is given.

    Raises:
        ConfigError: A setting is wrong.
        MissingDependencyError: The kind is "gds" and kvikio is missing.
        UnsupportedError: The kind is "gds" and activations are on the CPU.
        StoreError: A directory cannot be used.
    """
    config, usual = config or StoreConfig(**settings), threads_per_direction()
    readers, writers = config.readers or usual, config.writers or usual
    config = replace(config, readers=readers, writers=writers)
    if not config.directories and config.kind != "host":
        config = replace(config, directories=(Path(temporary_directory()),))
    with ExitStack() as stack:  # if one store cannot be opened, the other stores are closed
        places = [stack.enter_context(closing(place)) for place in _places(config, device)]
        if config.host_capacity and config.order != ("drive", "host"):
            places.insert(0, places.pop())  # opened last, because drives need pinned memory more
        store = MultiStore(places, readers=readers, writers=writers, stall_seconds=config.stall_seconds)
        stack.pop_all()
    return store


def _places(config: StoreConfig, device: Device) -> Iterator[Store]:
    if config.kind == "host":
        yield HostStore(device=device, capacity=config.capacity)
    elif (opener := _openers.get(config.kind)) is not None:
        yield opener(config, device=device)
    else:
        if config.kind == "gds" and not device.pins_memory:
            raise UnsupportedError("store.kind 'gds' needs a GPU. On a CPU, use 'file'")
        for directory in config.directories:
            yield _open_drive(str(directory), config, device)
    if config.host_capacity is not None:
        yield HostStore(device=device, capacity=config.host_capacity)


def _open_drive(directory: str, config: StoreConfig, device: Device) -> Store:
    """Return the store on one drive: for ``auto``, a file if cuFile cannot use the directory."""
    share = None if config.capacity is None else config.capacity // len(config.directories)
    settings: dict[str, Any] = {"device": device, "capacity": share, "checksum": config.checksum}
    why = None  # a file may already be the best path
    if config.kind == "gds":
        return GdsStore(directory, **settings)
    if config.kind == "auto" and device.pins_memory:
        why = "the nvidia-fs driver of GPUDirect Storage is not loaded. Load it: modprobe nvidia-fs"
        if gds.NVIDIA_FS.exists():
            try:
                return GdsStore(directory, **settings)
            except (StoreError, MissingDependencyError) as error:
                why = str(error)
    store = FileStore(directory, slabs=(config.readers or 0) + (config.writers or 0), **settings)
    store.reason = store.reason or why
    return store


def threads_per_direction() -> int:
    """Return the default number of I/O threads for each drive and direction.

    Two threads use the full bandwidth between an H200 and host memory. On a machine with two cores or fewer,
    one thread is as fast.
    """
    return 1 if len(os.sched_getaffinity(0)) <= _FEW_CORES else 2


def temporary_directory() -> str:
    """Return the directory for temporary files. Warn if ``TMPDIR`` names an unusable directory."""
    found = tempfile.gettempdir()
    named = os.environ.get("TMPDIR") or os.environ.get("TEMP") or os.environ.get("TMP")
    if named and not os.access(named, os.W_OK | os.X_OK):
        why = "not writable" if Path(named).exists() else "missing"
        remedy = f"Create a writable directory (mkdir -p {shlex.quote(named)}), or set store.directories"
        warn(f"the store uses {found}, because the directory in TMPDIR ({named!r}) is {why}. {remedy}")
    return found


def saves_nothing(config: StoreConfig) -> str | None:
    """Return the reason why a store frees no memory of a model on the CPU; ``None`` if it frees memory."""
    remedy = "choose a directory on a drive"
    if config.kind == "host":
        return f"kind: host keeps activations in host memory; {remedy}, with kind: file"
    for directory in config.directories or (tempfile.gettempdir(),):
        if posix.mount_of(str(Path(directory).expanduser())).place == posix.MEMORY:
            return f"the directory {directory} is in host memory; {remedy}"
    if config.host_capacity is not None:
        return "host_capacity keeps activations in host memory; remove this setting"
    return None


# ---- kinds of other projects -------------------------------------------------------------------------------


def register_kind(kind: str, opener: Opener) -> None:
    """Register a kind of store under a name for ``store.kind`` of a policy.

    Args:
        kind: Name of the kind.
        opener: Function that returns a new :class:`tba_offload.store.base.Store`, which the session closes.
            The first argument is a :class:`tba_offload.StoreConfig`, with directories and numbers of threads.
            The keyword argument ``device`` is the :class:`tba_offload.device.Device` of the activations.

    Raises:
        ValueError: The name is already taken.
    """
    if kind in KINDS:
        raise ValueError(f"a kind of store named {kind!r} is already registered")
    KINDS.append(kind)
    _openers[kind] = opener


def unregister_kind(kind: str) -> None:
    """Undo :func:`register_kind`. Kinds of tba-offload itself stay registered."""
    if _openers.pop(kind, None) is not None:
        KINDS.remove(kind)
