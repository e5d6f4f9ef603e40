"""Opens the store that a user asked for: of its kind, on each of its drives, with host memory beside them."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import TYPE_CHECKING, TypedDict

from tba_offload.errors import ConfigError, UnsupportedError
from tba_offload.store.base import STALL_SECONDS
from tba_offload.store.file import FileStore
from tba_offload.store.gds import GdsStore, import_kvikio
from tba_offload.store.hanging import ask, opened
from tba_offload.store.host import HostStore
from tba_offload.store.probe import choose
from tba_offload.store.striped import StripedStore
from tba_offload.store.tiered import TieredStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.device import Device
    from tba_offload.store.base import ActivationStore
    from tba_offload.store.engine import QueuedStore

logger = logging.getLogger(__name__)

_FEW_CORES = 2
KINDS = ("auto", "gds", "file", "host")
"""The legal kinds of :func:`open_store`."""


class Threads(TypedDict):
    """How many threads of a store read and how many write, on each drive."""

    readers: int
    writers: int


def threads_per_direction() -> int:
    """Threads that read, or write, on each drive: one is enough for most, and spares the compute cores."""
    return 1 if len(os.sched_getaffinity(0)) <= _FEW_CORES else 2


def open_store(
    *,
    kind: str = "auto",
    directories: Sequence[str | os.PathLike[str]] = (),
    capacity: int | None = None,
    host_capacity: int | None = None,
    checksum: bool = True,
    stall_seconds: float | None = STALL_SECONDS,
    device: Device,
    readers: int | None = None,
    writers: int | None = None,
) -> ActivationStore:
    """Opens a store.

    Args:
        kind: "file" writes files; "host" keeps bytes in host memory; "gds" moves bytes between GPU and drive
            directly; "auto" is "host" where no directories are given, and elsewhere "file", or on a GPU the
            faster of "file" and "gds", which is measured on each drive.
        directories: Where to put files, one for each drive; several make a striped store.
        capacity: Bytes that extents may take in all, divided evenly among the directories; ``None`` for no
            limit but the drives' own.
        host_capacity: Bytes of host memory to use while the drives have too much to do; ``None`` for none.
        checksum: Verify every read from a drive against a checksum taken at the write. Host memory is not
            checked: there is no drive or driver that could change the bytes.
        stall_seconds: Seconds after which a drive that does not answer is an error, now and later; ``None``
            for never. See :meth:`ActivationStore.limit_waits`.
        device: The device that activations lie on.
        readers: Threads that read, for each directory; ``None`` for what suits the machine.
        writers: Threads that write, likewise.

    Raises:
        ConfigError: An unknown kind, a directory given twice, or directories or ``host_capacity`` that do not
            go with the kind.
        MissingDependencyError: "gds" without kvikio.
        UnsupportedError: "gds" for activations on the CPU.
        StoreError: A directory cannot be used, or does not answer (``errno.ETIMEDOUT``).
    """
    if kind not in KINDS:
        raise ConfigError(f"store kind {kind!r} is not one of {', '.join(KINDS)}")
    usual = threads_per_direction()
    threads = Threads(
        readers=usual if readers is None else readers, writers=usual if writers is None else writers
    )
    if kind == "host" or (kind == "auto" and not directories):
        if host_capacity is not None:
            raise ConfigError("host_capacity is for memory beside drives; a store in memory has capacity")
        return _open_host(directories, capacity, device, threads=threads)
    drives = _open_files(
        directories, capacity, device, kind=kind, checksum=checksum, limit=stall_seconds, threads=threads
    )
    if host_capacity is None:
        return drives
    try:
        return _with_host_memory(drives, host_capacity, device, len(directories))
    except BaseException:
        drives.close()
        raise


def _open_host(
    directories: Sequence[str | os.PathLike[str]],
    capacity: int | None,
    device: Device,
    *,
    threads: Threads,
) -> ActivationStore:
    if directories:
        raise ConfigError("store kind 'host' keeps bytes in memory; remove the directories or the kind")
    return HostStore(capacity, device=device, **threads)


def _open_files(
    directories: Sequence[str | os.PathLike[str]],
    capacity: int | None,
    device: Device,
    *,
    kind: str,
    checksum: bool,
    limit: float | None,
    threads: Threads,
) -> ActivationStore:
    paths = _distinct(directories, kind, limit)
    share = None if capacity is None else capacity // len(paths)
    if kind == "gds":
        import_kvikio()
        if device.torch_device.type == "cpu":
            raise UnsupportedError("store kind 'gds' moves GPU memory; on a CPU use 'file'")
    stores: list[QueuedStore] = []
    try:
        for drive, path in enumerate(paths):
            stores.append(
                _open_drive(path, kind, share, device, drive, checksum=checksum, limit=limit, threads=threads)
            )
    except BaseException:
        for store in stores:
            store.close()
        raise
    return stores[0] if len(stores) == 1 else StripedStore(stores)


def _open_drive(
    path: str,
    kind: str,
    capacity: int | None,
    device: Device,
    drive: int,
    *,
    checksum: bool,
    limit: float | None,
    threads: Threads,
) -> QueuedStore:
    """The store on one drive; "auto" is the faster kind where there are two ways to it."""
    choice = None
    if kind == "auto" and device.pins_memory:
        choice = choose(path, device, capacity=capacity, checksum=checksum, limit=limit, **threads)
        kind = choice.kind
        logger.info("%s: store kind %r, because %s", path, kind, choice.why)
    make = partial(GdsStore if kind == "gds" else FileStore, path, device=device, drive=drive, **threads)
    store = opened(partial(make, capacity=capacity, checksum=checksum), path, device, limit)
    if choice is not None:
        store.chosen = choice.as_json()
    return store


def _with_host_memory(drives: ActivationStore, capacity: int, device: Device, count: int) -> ActivationStore:
    """Puts host memory beside ``count`` drives, with one thread for each direction."""
    host = HostStore(capacity, device=device, drive=count, setting="store.host_capacity")
    return TieredStore(drives, host)


def _distinct(directories: Sequence[str | os.PathLike[str]], kind: str, limit: float | None) -> list[str]:
    """The directories as paths.

    Raises:
        ConfigError: There is none, or two are the same place.
        StoreError: One does not answer.
    """
    if not directories:
        raise ConfigError(f"store kind {'file' if kind == 'auto' else kind!r} needs at least one directory")
    paths = [os.fspath(directory) for directory in directories]
    seen: dict[str, str] = {}
    for path in paths:
        real = ask(partial(os.path.realpath, path), path, limit)
        if real in seen:
            raise ConfigError(
                f"directories {seen[real]!r} and {path!r} are the same place; give each drive one directory"
            )
        seen[real] = path
    return paths
