"""The path of bytes to each directory, why, how fast, what is missing, and the fix."""

from __future__ import annotations

import os
import platform
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tba_offload.device.device import ByteRange, aligned_range
from tba_offload.errors import MissingDependencyError, StoreError, StoreFullError
from tba_offload.formatting import readable_rate, readable_size, visible
from tba_offload.store import gds, posix
from tba_offload.store.base import Checksum
from tba_offload.store.file import explained, left_to_others, open_directory
from tba_offload.store.open import kind_of_auto, open_store, threads_per_direction
from tba_offload.store.pool import Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tba_offload.device import Device
    from tba_offload.store.base import Extent
    from tba_offload.store.multi import MultiStore

Findings = dict[str, Any]

STALL_SECONDS = 60.0
"""Seconds after which a transfer of a measurement is taken to hang."""

EXTENT_BYTES = 16 << 20
"""Bytes of one activation of a large layer."""

BLOCKS = (256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
"""Sizes of transfers that :func:`bench` tries: activations from small to large models."""

THREADS = (1, 2, 4)
"""Numbers of threads for each direction that :func:`bench` tries."""

_MOST_MEMORY = 1 << 30  # bytes that transfers in flight take
_ENOUGH = 0.95  # share of the highest rate that counts as the highest: drives differ by that from run to run
_WORTH_IT = 0.5  # share of the highest rate below which a size of blocks is not worth a transfer
_MOST_LEFT = 1 << 20  # bytes up to which activations may stay in memory because they are small
_CHECKED = 64 << 20  # bytes whose checksum is timed: more than caches near a core hold
_LITTLE_ROOM = (
    16 << 30
)  # bytes of activations of a step of a model of some billions of parameters, on one GPU


# ---- rates -------------------------------------------------------------------------------------------------


class Rates(NamedTuple):
    """Bytes a second of a store.

    Attributes:
        write: To the store.
        read: From the store.
        both: To and from the store at once, added.
    """

    write: float
    read: float
    both: float


class Row(NamedTuple):
    """Rates of transfers of one size with one number of threads.

    Attributes:
        block_bytes: Size of a transfer.
        threads: Threads in each direction.
        write: As of :class:`Rates`, likewise the others.
        read: Likewise.
        both: Likewise.
    """

    block_bytes: int
    threads: int
    write: float
    read: float
    both: float


def measure(
    store: MultiStore,
    device: Device,
    *,
    extent_bytes: int = EXTENT_BYTES,
    extents: int = 2,
    seconds: float = 0.2,
) -> Rates:
    """Return the rates of a store, with a constant number of transfers in flight.

    The store is left as empty as it was. The random generators of PyTorch keep their state.

    Args:
        store: The store.
        device: The device that the bytes are on.
        extent_bytes: Size of a transfer.
        extents: Transfers in flight.
        seconds: How long each of the three rates is measured.

    Raises:
        StoreError: A transfer failed or hangs, or there is no room.
    """
    source = random_bytes(extent_bytes, device)
    targets = [aligned_range(extent_bytes, source.address, store.alignment, device) for _ in range(extents)]
    held: list[Extent] = []
    in_flight: deque[Transfer] = deque()
    after = device.event()
    after.synchronize()

    def wait_for(most: int) -> None:
        while len(in_flight) > most:
            store.wait(in_flight[0])
            in_flight.popleft()

    def rate(writes: Callable[[int], bool]) -> float:
        began, number = time.perf_counter(), 0
        while number < 2 * extents or time.perf_counter() - began < seconds:
            wait_for(extents - 1)  # then the last transfer of this extent, and into this target, has ended
            extent = held[number % len(held)]
            if writes(number):
                in_flight.append(Transfer(source, after, extent=extent))
                store.write([in_flight[-1]])
            else:
                in_flight.append(Transfer(targets[number % extents], after, extent=extent))
                store.read([in_flight[-1]])
            number += 1
        wait_for(0)
        return number * extent_bytes / (time.perf_counter() - began)

    try:
        for _ in range(2 * extents):  # not counted: the file grows, memory is pinned, drivers start
            in_flight.append(Transfer(source, after))
            store.write([in_flight[-1]])
            store.wait(in_flight[-1])
            if (extent := in_flight.pop().extent) is not None:
                held.append(extent)
        return Rates(
            write=rate(lambda _: True),
            read=rate(lambda _: False),
            both=rate(lambda number: bool((number + number // len(held)) % 2)),  # each extent in turn
        )
    finally:
        for transfer in in_flight:
            if not store.cancel(transfer):
                transfer.wait(STALL_SECONDS)
        for extent in held:
            store.release(extent)
        store.take_loads()


def random_bytes(nbytes: int, device: Device) -> ByteRange:
    """Return bytes on a device that no drive can compress, from a generator of their own."""
    generator = torch.Generator().manual_seed(0)  # of the CPU: not every device has generators
    words = torch.randint(-(2**63), 2**63 - 1, (-(-nbytes // 8),), generator=generator)
    return ByteRange.of(words.view(torch.uint8)[:nbytes].to(device.torch_device))


def bench(
    directory: str, device: Device, kind: str, *, seconds: float = 0.2, show: Callable[[Row], object]
) -> list[Row]:
    """Measure a directory by size of blocks and number of threads, with two transfers in flight a thread.

    Nothing stays in the directory. Larger blocks are left out where there is no room for them.

    Args:
        directory: Where to write.
        device: The device that the bytes are on.
        kind: ``"file"`` or ``"gds"``.
        seconds: How long each rate is measured.
        show: Called with each row when it is known.

    Raises:
        StoreError: The directory cannot be used, or a transfer failed or hangs.
    """
    rows: list[Row] = []
    for count in THREADS:
        with _on_trial(kind, directory, device, count) as store:
            for nbytes in BLOCKS:
                extents = max(min(2 * count, _MOST_MEMORY // nbytes), 1)
                try:
                    rates = measure(store, device, extent_bytes=nbytes, extents=extents, seconds=seconds)
                except StoreFullError:
                    if not rows:
                        raise
                    break
                rows.append(Row(nbytes, count, *rates))
                show(rows[-1])
    return rows


def advised(rows: Sequence[Row]) -> dict[str, int]:
    """Return the settings that follow from a measurement.

    Returns:
        ``writers`` and ``readers``, the fewest threads within 5 % of the highest rate, and
        ``min_tensor_bytes``, the smallest block that reaches half of that rate both ways, at most 1 MiB.
    """
    threads, least = {}, 0
    for name in ("write", "read"):
        rates = {row: getattr(row, name) for row in rows}
        best = max(rows, key=lambda row: rates[row])
        same = (row for row in rows if row.block_bytes == best.block_bytes)
        threads[name] = min(row.threads for row in same if rates[row] >= _ENOUGH * rates[best])
        worth = min(row.block_bytes for row in rows if rates[row] >= _WORTH_IT * rates[best])
        least = max(least, min(worth, _MOST_LEFT))
    return {"writers": threads["write"], "readers": threads["read"], "min_tensor_bytes": least}


def _on_trial(kind: str, directory: str, device: Device, threads: int) -> MultiStore:
    settings: Findings = {"readers": threads, "writers": threads, "stall_seconds": STALL_SECONDS}
    return open_store(kind=kind, directories=[directory], device=device, **settings)


# ---- directories -------------------------------------------------------------------------------------------


def _finding(what: str, remedy: str) -> dict[str, str]:
    return {"what": what, "remedy": remedy}


_LOCAL = "name a directory on a local NVMe drive, with ext4 or XFS, if there is one"
_ROOM = "free some, name another directory, or set store.capacity"
_NO_GDS = (
    "GPUDirect Storage needs cuFile and a local ext4 or XFS: install libcufile, see that "
    "KVIKIO_COMPAT_MODE is not ON, and try gdscheck -p"
)
_OF_PATHS = {
    "buffered": _finding(
        "bytes pass through the page cache, which takes memory and processor time",
        "use a directory on a local drive whose file system offers direct I/O, such as ext4 or XFS",
    ),
    "cuFile compatibility": _finding(
        "cuFile moves bytes through host memory",
        "for GPUDirect Storage load the driver (modprobe nvidia-fs), or with CUDA 12.8 or later let cuFile "
        "use PCIe peer-to-peer (use_pci_p2pdma in cufile.json); gdscheck -p says what is missing",
    ),
}
_SERVER = (
    "a process that is killed may leave its files there; a full or failing server may lose a write and tell "
    "it only when the bytes are read"
)
_DOUBTS = {
    posix.MEMORY: "{} lies in host memory, so that what is offloaded still takes memory",
    posix.NETWORK: f"{{}} is a network file system: ranks and jobs share its bandwidth; {_SERVER}",
    posix.PROCESS: f"{{}} is served by a process, which copies every byte once more; {_SERVER}",
    posix.LAYERS: "{} lies on another file system, that of a container's layers",
    posix.UNKNOWN: f"{{}} is no file system that is known; {_SERVER}",
}
"""What a store cannot rely on, by the place of the file system, whose name comes first."""


class Location(NamedTuple):
    """Where a directory is.

    Attributes:
        file_system: The kernel's word for it, such as ``"ext4"`` or ``"fuse.sshfs"``.
        mounted: What is mounted there, such as ``"/dev/nvme0n1p1"``; empty if the system does not tell.
        device: Number of the device; two directories with the same number share a drive.
        free_bytes: Room for this user.
        total_bytes: Size of the file system.
        findings: What slows offloading down there or endangers it: ``what`` and ``remedy``.
    """

    file_system: str
    mounted: str
    device: int
    free_bytes: int
    total_bytes: int
    findings: list[dict[str, str]]

    def __str__(self) -> str:
        mounted = f" on {self.mounted}" if self.mounted else ""
        room = f"{readable_size(self.free_bytes)} free of {readable_size(self.total_bytes)}"
        return f"{self.file_system}{mounted}; {room}"


def location_of(directory: str) -> Location:
    """Look at a directory.

    Raises:
        StoreError: It cannot be reached.
    """
    with explained(directory):
        fd = open_directory(directory)
    try:
        mount, room, device = posix.mount_of(fd), os.fstatvfs(fd), os.fstat(fd).st_dev
    finally:
        os.close(fd)
    free, total, spared = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize, left_to_others(room)
    findings = []
    if mount.place in _DOUBTS:
        findings.append(_finding(_DOUBTS[mount.place].format(mount.kind), _LOCAL))
    if free - spared < max(_LITTLE_ROOM, total // 10):
        what = f"only {readable_size(free)} of {readable_size(total)} are free"
        findings.append(_finding(f"{what}, and a store leaves {readable_size(spared)} to others", _ROOM))
    return Location(mount.kind, mount.source, device, free, total, findings)


def examine(directories: Sequence[str], device: Device) -> Findings:
    """Try every way to every directory; nothing is made there that stays.

    Args:
        directories: One for each drive.
        device: The device that activations are going to be on.

    Returns:
        JSON values: ``machine``, the rate of checksums, and of each directory its ``location``, its ``ways``,
        the choice of ``auto`` (``None`` if the directory cannot be used) and ``findings`` with a remedy each.
    """
    found = [_examine(directory, device) for directory in directories]
    first: dict[int, str] = {}
    for each in found:
        if (location := each["location"]) is not None:
            other = first.setdefault(location["device"], each["directory"])
            if other is not each["directory"]:
                remedy = "they share its speed: name one directory for each drive"
                each["findings"].append(_finding(f"it lies on the same device as {other}", remedy))
    checksum = Checksum(on=True)
    data = torch.ones(_CHECKED, dtype=torch.uint8)
    checksum.add(checksum.begin(), data.data_ptr(), _CHECKED)
    rate = _CHECKED / checksum.seconds
    return {"machine": _machine(device), "checksum_bytes_per_second": rate, "directories": found}


def _machine(device: Device) -> Findings:
    where = device.torch_device
    return {
        "device": torch.get_device_module(where).get_device_name(where) if where.type == "cuda" else "cpu",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **gds.driver_versions(),
    }


def _examine(directory: str, device: Device) -> Findings:
    try:
        location = location_of(directory)
    except StoreError as error:
        ways: Findings = {"file": {"error": error.strerror}}
        return {"directory": directory, "location": None, "ways": ways, "auto": None, "findings": []}
    kinds = ("file", "gds") if device.pins_memory else ("file",)  # elsewhere all memory is the host's
    ways = {kind: _try(kind, directory, device) for kind in kinds}
    kind, why = kind_of_auto(device)
    if "error" in ways[kind]:
        kind, why = "file", ways[kind]["error"]
    auto = {"kind": kind, "why": why, "threads": threads_per_direction()}
    findings = [*location.findings]
    for way in ways.values():
        if way.get("path") in _OF_PATHS:
            findings.append(_OF_PATHS[way["path"]])
        if "remedy" in way:
            findings.append(_finding(way["error"], way["remedy"]))
    return {
        "directory": directory,
        "location": {**location._asdict(), "words": str(location)},
        "ways": ways,
        "auto": None if "error" in ways["file"] else auto,
        "findings": findings,
    }


def _try(kind: str, directory: str, device: Device) -> Findings:
    """Return the path of one way to a directory, the reason, and its rates; or why it cannot be used."""
    try:
        with _on_trial(kind, directory, device, threads_per_direction()) as store:
            path = {name: store.description[name] for name in ("path", "reason", "alignment")}
            return {**path, "bytes_per_second": measure(store, device)._asdict()}
    except MissingDependencyError as error:
        return {"error": f"{error.package} is not installed", "remedy": str(error)}
    except StoreError as error:
        return {"error": error.strerror, **({"remedy": _NO_GDS} if kind == "gds" else {})}


def lines(findings: Findings) -> Iterator[str]:
    """Yield the findings in words."""
    yield "; ".join(f"{name} {value or 'not found'}" for name, value in findings["machine"].items())
    rate = findings["checksum_bytes_per_second"]
    seconds = f"{2 * 2**30 / rate:.2f} s of processor time for each GiB that is written and read"
    yield f"checksums: {readable_rate(rate)}, {seconds}; store.checksum: false does without"
    for each in findings["directories"]:
        yield visible(each["directory"])
        if each["location"] is not None:
            yield visible(f"  on    {each['location']['words']}")
        for kind, way in each["ways"].items():
            yield visible(f"  {kind:5} {_in_words(way)}")
        if auto := each["auto"]:
            threads = f"{auto['threads']} {'thread' if auto['threads'] == 1 else 'threads'} each way"
            yield visible(f"  auto  takes {auto['kind']} ({threads}), because {auto['why']}")
        for found in each["findings"]:
            yield visible(f"  - {found['what']}: {found['remedy']}")


def _in_words(way: Findings) -> str:
    if "error" in way:
        return f"cannot be used: {way['error']}"
    rates = {name: readable_rate(rate) for name, rate in way["bytes_per_second"].items()}
    why = "" if way["reason"] is None else f", because {way['reason']}"
    aligned = f" aligned to {way['alignment']} bytes" if way["alignment"] > 1 else ""
    moved = f"writes {rates['write']}, reads {rates['read']}, both at once {rates['both']}"
    return f"{way['path']}{aligned}{why}: {moved}"
