"""Opens the store that a user asked for: of its kind, on each of its drives, with host memory beside them."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tba_offload.config import StoreConfig
from tba_offload.errors import ConfigError, HangingError, MissingDependencyError, StoreError, UnsupportedError
from tba_offload.store import gds
from tba_offload.store.file import FileStore
from tba_offload.store.gds import GdsStore, import_kvikio
from tba_offload.store.hanging import ask, opened
from tba_offload.store.host import HostStore
from tba_offload.store.options import StoreOptions, opener_of, options_of
from tba_offload.store.striped import StripedStore
from tba_offload.store.tiered import TieredStore

if TYPE_CHECKING:
    from tba_offload.device import Device
    from tba_offload.store.base import ActivationStore
    from tba_offload.store.engine import QueuedStore

logger = logging.getLogger(__name__)

STORES: dict[str, type[FileStore | GdsStore]] = {"file": FileStore, "gds": GdsStore}
"""The two ways from a device to a drive."""

_LINK_THREADS = 2
"""Threads for each direction of the link to a device, so that the next copy is enqueued when one ends. A copy
within host memory takes all the bandwidth that there is."""


def open_store(
    options: StoreOptions | StoreConfig | None = None,
    *,
    device: Device,
    **settings: Any,
) -> ActivationStore:
    """Open a store.

    Args:
        options: What to open.
        device: The device that activations lie on.
        settings: Without options, those of a :class:`tba_offload.StoreConfig`: ``kind``, ``directories``,
            ``capacity`` and so on.

    Raises:
        ConfigError: A setting is wrong, or two directories are the same place.
        MissingDependencyError: "gds" without kvikio.
        UnsupportedError: "gds" for activations on the CPU.
        HangingError: A directory does not answer.
        StoreError: It cannot be used.
    """
    if not isinstance(options, StoreOptions):
        options = options_of(options or StoreConfig(**settings))
    if options.kind == "host":
        return HostStore(device=device, options=options)
    store = _open_drives(options, device)
    if options.host_capacity is not None:
        try:
            store = _with_host_memory(store, options, device)
        except BaseException:
            store.close()
            raise
    store.limit_waits(options.stall_seconds)  # one that is made of others does not know it yet
    return store


def _open_drives(options: StoreOptions, device: Device) -> ActivationStore:
    opener = opener_of(options.kind)
    if opener is not None:
        opened_by_another: ActivationStore = opener(replace(options, host_capacity=None), device=device)
        return opened_by_another
    _check_distinct(options)
    if options.kind == "gds":
        import_kvikio()
        if device.torch_device.type == "cpu":
            raise UnsupportedError("store kind 'gds' moves GPU memory; on a CPU use 'file'")
    stores: list[QueuedStore] = []
    try:
        for drive, path in enumerate(options.directories):
            stores.append(_open_drive(path, options.of_drive(path), device, drive))
    except BaseException:
        for store in stores:
            store.close()
        raise
    return stores[0] if len(stores) == 1 else StripedStore(stores)


def _open_drive(path: str, options: StoreOptions, device: Device, drive: int) -> QueuedStore:
    """Return the store on one drive; ``auto`` is ``file`` where cuFile does not take files there."""

    def open_as(kind: str) -> QueuedStore:
        make = partial(STORES[kind], path, device=device, drive=drive, options=options)
        return opened(make, path, device, options.stall_seconds)

    if options.kind != "auto" or not device.pins_memory:
        return open_as("gds" if options.kind == "gds" else "file")
    kind, why = kind_of_auto(device)
    try:
        store = open_as(kind)
    except StoreError as error:
        if kind == "file" or isinstance(error, HangingError):
            raise
        kind, why = "file", str(error)
        store = open_as(kind)
    logger.info("%s: store kind %r, because %s", path, kind, why)
    store.chosen = {"why": why}
    return store


def kind_of_auto(device: Device) -> tuple[str, str]:
    """Return the kind of store that ``kind: auto`` takes, and why, in words.

    Args:
        device: The device that activations lie on.
    """
    if not device.pins_memory:
        return "file", "activations lie in host memory, which drives reach directly"
    if not gds.NVIDIA_FS.exists():
        return "file", "the nvidia-fs driver of GPUDirect Storage is not loaded"
    try:
        import_kvikio()
    except MissingDependencyError as error:
        return "file", f"GPUDirect Storage needs {error.package}, which is not installed"
    return "gds", "the nvidia-fs driver is loaded"


def _with_host_memory(drives: ActivationStore, options: StoreOptions, device: Device) -> ActivationStore:
    host = HostStore(
        device=device,
        drive=len(options.directories),
        setting="store.host_capacity",
        options=options.of_host_memory(_LINK_THREADS if device.pins_memory else 1),
    )
    return TieredStore(drives, host)


def _check_distinct(options: StoreOptions) -> None:
    """Check that each directory is a place of its own, links followed.

    Raises:
        ConfigError: Two are the same place.
        StoreError: One does not answer.
    """
    seen: dict[str, str] = {}
    for path in options.directories:
        real = ask(partial(os.path.realpath, path), path, options.stall_seconds)
        if real in seen:
            raise ConfigError(
                f"directories {seen[real]!r} and {path!r} are the same place; give each drive one directory"
            )
        seen[real] = path
