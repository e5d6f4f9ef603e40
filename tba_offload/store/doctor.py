"""Check of directories for a store: the I/O path, the reason for this path, its speed, and improvements."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tba_offload.device import ByteRange, aligned_range
from tba_offload.errors import StoreError
from tba_offload.formatting import readable_rate, readable_size, visible
from tba_offload.store import posix
from tba_offload.store.file import existing_directory
from tba_offload.store.open import open_store
from tba_offload.store.pool import Transfer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tba_offload.device import Device
    from tba_offload.store.multi import MultiStore

BLOCKS = (256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
"""Sizes of transfers in the benchmark, in bytes. These are typical sizes of activations, from small to large
models."""

THREADS = (1, 2, 4)
"""Numbers of threads for each direction in the benchmark."""


# ---- rates -------------------------------------------------------------------------------------------------


class Rates(NamedTuple):
    """Rates of a store in bytes per second.

    Attributes:
        write: Rate of writes while no reads run.
        read: Rate of reads while no writes run.
        both: Total rate while writes and reads run at the same time.
    """

    write: float
    read: float
    both: float


def measure(
    store: MultiStore, device: Device, *, extent_bytes: int = 16 << 20, extents: int = 2, seconds: float = 0.2
) -> Rates:
    """Measure the rates of a store, with a constant number of transfers in flight.

    All extents are freed after the measurement. PyTorch's random generators do not change.

    Args:
        store: The store.
        device: The device with the bytes.
        extent_bytes: Size of a transfer in bytes. The default is typical for activations of large layers.
        extents: Number of transfers in flight.
        seconds: Duration of each of the three measurements.

    Raises:
        StoreError: A transfer failed or hangs, or there is no room.
    """
    generator = torch.Generator().manual_seed(0)  # on the CPU, because some devices have no random generators
    data = torch.randint(256, (extent_bytes,), dtype=torch.uint8, generator=generator)
    source, after = ByteRange.of(data.to(device.torch_device)), device.event()
    targets = [aligned_range(extent_bytes, source.address, store.alignment, device) for _ in range(extents)]
    latest: list[Transfer] = []  # by extent
    after.synchronize()

    def rate(*verbs: str) -> float:
        began, number = time.perf_counter(), 0
        while number < 2 * extents or time.perf_counter() - began < seconds:
            index, verb = number % extents, verbs[number % len(verbs)]
            store.wait(latest[index])
            memory = source if verb == "write" else targets[index]
            latest[index] = Transfer(memory, after, extent=latest[index].extent)
            move = store.write if verb == "write" else store.read
            move([latest[index]])
            number += 1
        for transfer in latest:
            store.wait(transfer)
        return number * extent_bytes / (time.perf_counter() - began)

    try:
        for _ in range(extents):  # not measured: the file grows, memory is pinned, drivers start
            latest.append(Transfer(source, after))
            store.write(latest[-1:])
            store.wait(latest[-1])
        return Rates(rate("write"), rate("read"), rate("write", "read"))
    finally:
        for transfer in latest:
            if not store.cancel(transfer):
                transfer.wait(store.stall_seconds)
            if transfer.extent is not None:
                store.release(transfer.extent)
        store.take_loads()


# ---- directories -------------------------------------------------------------------------------------------


_DOUBTS = {
    posix.MEMORY: "offloaded bytes still use memory",
    posix.NETWORK: "files of a killed process may stay on the server, and a full server may lose data",
}


class Location(NamedTuple):
    """The file system of a directory.

    Attributes:
        words: Text with the kernel's name of the file system, the mounted device, and the free space.
        findings: Reasons why offloading to the directory is unsafe or uses host memory, with remedies.
    """

    words: str
    findings: list[str]


def location_of(directory: str) -> Location:
    """Return the location of a directory.

    Raises:
        StoreError: The directory does not exist, or cannot be reached.
    """
    here = existing_directory(directory)
    mount, room = posix.mount_of(str(here)), os.statvfs(here)
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    mounted = f"{mount.kind} on {mount.source or 'an unknown device'}"
    words = f"{mounted}; {readable_size(free)} free of {readable_size(total)}"
    if mount.place not in _DOUBTS:
        return Location(words, [])
    doubt = f"{mount.kind} is a {mount.place} file system: {_DOUBTS[mount.place]}"
    return Location(words, [f"{doubt}. Choose a directory on a local NVMe drive with ext4 or XFS"])


def examine(directories: Sequence[str], device: Device, *, bench: bool = False) -> dict[str, Any]:
    """Test the I/O path that a store uses for each directory. The files of the test are removed.

    Args:
        directories: One directory for each drive.
        device: The device of the activations.
        bench: Whether to also measure the rates for several block sizes and numbers of threads. For each
            directory, the benchmark takes about 15 seconds and half a GiB.

    Returns:
        JSON values for each directory, with the keys ``location``, ``bytes_per_second``, ``store`` and
            ``bench``. ``store`` has the kind and the path that ``auto`` chooses, and the reason. ``bench``
            has a row for each block size and number of threads. If a directory cannot be used, the key
            ``error`` has the message.
    """
    found: dict[str, dict[str, Any]] = {directory: {} for directory in directories}
    for directory, facts in found.items():
        try:
            facts["location"] = location_of(directory)._asdict()
            with open_store(directories=[directory], device=device) as store:
                facts["bytes_per_second"] = measure(store, device)._asdict()
            facts["store"] = store.description
            facts["bench"] = list(_bench(directory, device)) if bench else []
        except StoreError as error:
            facts["error"] = error.strerror or str(error)
    return {"directories": found}


def _bench(directory: str, device: Device) -> Iterator[dict[str, Any]]:
    """Yield the rates for each block size and number of threads. Each thread has two transfers in flight."""
    for threads in THREADS:
        with open_store(directories=[directory], device=device, readers=threads, writers=threads) as store:
            for nbytes in BLOCKS:
                rates = measure(store, device, extent_bytes=nbytes, extents=2 * threads)
                yield {"block_bytes": nbytes, "threads": threads, **rates._asdict()}


def lines(findings: dict[str, Any]) -> Iterator[str]:
    """Yield the result of :func:`examine` as lines of text."""
    for directory, found in findings["directories"].items():
        yield visible(directory)
        if "error" in found:
            yield visible(f"  cannot be used: {found['error']}")
            continue
        store = found["store"]
        yield visible(f"  on    {found['location']['words']}")
        why = "" if store["reason"] is None else f", because {store['reason']}"
        yield visible(f"  by    kind {store['kind']}, path {store['path']}{why}")
        yield f"  moves {_in_words(found['bytes_per_second'])}"
        for row in found["bench"]:
            size = f"{readable_size(row['block_bytes']):>8} blocks, {row['threads']} threads per direction"
            yield f"  {size}: {_in_words(row)}"
        for doubt in found["location"]["findings"]:
            yield visible(f"  - {doubt}")


def _in_words(rates: dict[str, float]) -> str:
    return ", ".join(f"{name} {readable_rate(rates[name]):>9}" for name in Rates._fields)
