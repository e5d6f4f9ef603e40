"""The path of bytes to each directory, why, how fast, what is missing, and the fix."""

from __future__ import annotations

import os
import platform
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tba_offload.device import ByteRange
from tba_offload.errors import MissingDependencyError, StoreError
from tba_offload.formatting import readable_rate, readable_size, visible
from tba_offload.store import gds
from tba_offload.store.bench import TRANSFER_SECONDS, measure, on_trial
from tba_offload.store.checksums import Checksums
from tba_offload.store.file_systems import file_system_of, mount_of
from tba_offload.store.hanging import ask
from tba_offload.store.open import STORES, kind_of_auto
from tba_offload.store.options import threads_per_direction
from tba_offload.store.run_file import open_directory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tba_offload.device import Device

Findings = dict[str, Any]

_CHECKED = 64 << 20
"""Bytes whose checksum is timed: more than caches near a core hold."""

_LITTLE_ROOM = 16 << 30
"""Bytes: activations of a step of a model of some billions of parameters, on one GPU."""

_LOCAL = "name a directory on a local NVMe drive, with ext4 or XFS, if there is one"
_ROOM = "free some, name another directory, or set store.capacity, so that others keep their room"
_NO_GDS = (
    "GPUDirect Storage needs cuFile and a local ext4 or XFS: install libcufile, see that "
    "KVIKIO_COMPAT_MODE is not ON, and try gdscheck -p"
)


def _finding(what: str, remedy: str) -> dict[str, str]:
    return {"what": what, "remedy": remedy}


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


class Location(NamedTuple):
    """Where a directory is.

    Attributes:
        file_system: The kernel's word for it, such as ``"ext4"`` or ``"fuse.sshfs"``.
        mounted: What is mounted there, such as ``"/dev/nvme0n1p1"``; ``None`` if the system does not tell.
        device: Number of the device; two directories with the same number share a drive.
        free_bytes: Room for this user.
        total_bytes: Size of the file system.
        findings: What slows offloading down there or endangers it: ``what`` and ``remedy``.
    """

    file_system: str
    mounted: str | None
    device: int
    free_bytes: int
    total_bytes: int
    findings: list[dict[str, str]]

    def __str__(self) -> str:
        mounted = "" if self.mounted is None else f" on {self.mounted}"
        room = f"{readable_size(self.free_bytes)} free of {readable_size(self.total_bytes)}"
        return f"{self.file_system}{mounted}; {room}"


def location_of(directory: str) -> Location:
    """Look at a directory.

    Raises:
        StoreError: It cannot be reached, or does not answer.
    """
    return ask(partial(_look, directory), directory, TRANSFER_SECONDS)


def _look(directory: str) -> Location:
    fd = open_directory(directory)
    try:
        mount, room, system, device = mount_of(fd), os.fstatvfs(fd), file_system_of(fd), os.fstat(fd).st_dev
    finally:
        os.close(fd)
    name, mounted = (system.name, None) if mount is None else (mount.kind, mount.source)
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    findings = []
    if doubts := system.limits():
        findings.append(_finding("; ".join(doubts), _LOCAL))
    if free < max(_LITTLE_ROOM, total // 10):
        findings.append(_finding(f"only {readable_size(free)} of {readable_size(total)} are free", _ROOM))
    return Location(name, mounted, device, free, total, findings)


def examine(directories: Sequence[str], device: Device) -> Findings:
    """Try every way to every directory; nothing is made there that stays.

    Args:
        directories: One for each drive.
        device: The device that activations are going to lie on.

    Returns:
        JSON values: ``machine``, the rate of checksums, and of each directory its ``location``, its ``ways``,
        what ``auto`` takes (``None`` if the directory cannot be used) and ``findings`` with a remedy each.
    """
    found = [_examine(directory, device) for directory in directories]
    first: dict[int, str] = {}
    for each in found:
        if (location := each["location"]) is not None:
            other = first.setdefault(location["device"], each["directory"])
            if other is not each["directory"]:
                remedy = "they share its speed: name one directory for each drive"
                each["findings"].append(_finding(f"it lies on the same device as {other}", remedy))
    checksums = Checksums(on=True)
    checksums.of_range(ByteRange.of(torch.ones(_CHECKED, dtype=torch.uint8)))
    rate = _CHECKED / checksums.take_seconds()
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
    kinds = STORES if device.pins_memory else ("file",)  # elsewhere there is no memory but the host's
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
    """One way to a directory: its path and why, and what it moves."""
    try:
        with on_trial(kind, directory, device, threads=threads_per_direction()) as store:
            path = {name: store.description[name] for name in ("path", "reason", "alignment")}
            return {**path, "bytes_per_second": measure(store, device)._asdict()}
    except MissingDependencyError as error:
        return {"error": f"{error.package} is not installed", "remedy": str(error)}
    except TimeoutError:
        return {"error": "a transfer hangs", "remedy": "check the drive and the system log"}
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
