"""What a machine offers to offloading: where directories are, the ways of bytes to them, what would help."""

from __future__ import annotations

import platform
import statistics
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.config import StoreConfig
from tba_offload.device import ByteRange
from tba_offload.errors import MissingDependencyError, StoreError
from tba_offload.formatting import readable_rate, visible
from tba_offload.store import gds
from tba_offload.store.checksums import Checksums
from tba_offload.store.hanging import ask
from tba_offload.store.location import Finding, location_of
from tba_offload.store.probe import TRANSFER_SECONDS, choose, measure, on_trial
from tba_offload.store.tested import TESTED, numbers_of
from tba_offload.store.thread_count import STORES, threads_that_pay

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from tba_offload.device import Device

Findings = dict[str, Any]

_CHECKED = 64 << 20
"""Bytes: more than caches near a core hold, as of activations."""
_CHECKS = 3

_HANGS = "check driver and drive; choose the other kind with store.kind meanwhile"
_REMEDIES = {
    "buffered": Finding(
        "bytes pass through the page cache, which takes memory and processor time",
        "use a directory on a local drive whose file system offers direct I/O, such as ext4 or XFS",
    ),
    "cuFile compatibility": Finding(
        "cuFile moves bytes through host memory",
        "for GPUDirect Storage load the driver (modprobe nvidia-fs), or with CUDA 12.8 or later let cuFile "
        "use PCIe peer-to-peer (use_pci_p2pdma in cufile.json); gdscheck -p says what is missing",
    ),
}
"""Doubts where bytes take this path, if speed matters."""
_NO_GDS = (
    "GPUDirect Storage needs cuFile and a local ext4 or XFS: install libcufile, see that "
    "KVIKIO_COMPAT_MODE is not ON, and try gdscheck -p"
)


def examine(directories: Sequence[str | os.PathLike[str]], device: Device) -> Findings:
    """Try every way to every directory.

    Some dozens of MiB are written to and read from each of them, on a GPU up to two GiB; nothing stays there,
    and none is made.

    Args:
        directories: One for each drive.
        device: The device that activations are going to lie on.

    Returns:
        JSON values: ``machine``, and of each directory its ``location``, its ``ways``, what ``auto`` takes,
        ``findings`` with a remedy each, and ``advice``, the remedies alone.
    """
    machine = _machine(device)
    return {
        "machine": machine | {"findings": [found._asdict() for found in _of_versions(machine)]},
        "directories": [_examine_directory(str(directory), device) for directory in directories],
    }


def is_usable(findings: Findings) -> bool:
    """Whether activations can go to each directory that was examined."""
    return all(each["auto"] is not None for each in findings["directories"])


def _of_versions(machine: Findings) -> Iterator[Finding]:
    for name, tested in TESTED.items():
        version = machine[name]
        if version is not None and numbers_of(version) and not tested.covers(version):
            yield Finding(
                f"{name} {version} was not tested with this version of tba-offload, but {tested} were",
                "compare a few steps of your model with and without offloading, or take one that was tested",
            )


def _machine(device: Device) -> Findings:
    where = device.torch_device
    is_gpu = where.type == "cuda"
    return {
        "device": torch.get_device_module(where).get_device_name(where) if is_gpu else "cpu",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "checksum_bytes_per_second": _checksum_rate(),
        **gds.driver_versions(),
    }


def _checksum_rate() -> float:
    """Bytes of host memory that a thread takes the checksum of in a second of its processor time."""
    data = ByteRange.of(torch.ones(_CHECKED, dtype=torch.uint8))
    checksums = Checksums(on=True)
    seconds = []
    for _ in range(_CHECKS):
        checksums.of_range(data)
        seconds.append(checksums.take_seconds())
    return _CHECKED / statistics.median(seconds)


def _examine_directory(directory: str, device: Device) -> Findings:
    found: Findings = {"directory": directory}
    try:
        location = ask(partial(location_of, directory), directory, TRANSFER_SECONDS)
    except OSError as error:
        ways = {"file": {"error": _said(error)}}
        return found | {"location": None, "ways": ways, "auto": None, "findings": [], "advice": []}
    kinds = STORES if device.pins_memory else ("file",)  # elsewhere there is no memory but the host's
    ways = {kind: _try(kind, directory, device) for kind in kinds}
    if "error" in ways.get("gds", {}):
        ways["gds"].setdefault("remedy", _NO_GDS)
    told = [*_of_ways(ways), *location.findings()]
    found |= {
        "location": location.as_json(),
        "where": list(location.lines()),
        "ways": ways,
        "findings": [each._asdict() for each in told],
        "advice": [each.remedy for each in told],
    }
    if "error" in ways["file"]:
        return found | {"auto": None}
    choice = choose(directory, device)
    threads = threads_that_pay(choice.kind, directory, device, StoreConfig().options())
    return found | {"auto": {"kind": choice.kind, **choice.as_json(), **threads.as_json()}}


def _of_ways(ways: dict[str, Findings]) -> Iterator[Finding]:
    """Yield what is doubtful about the ways to a directory."""
    for way in ways.values():
        if way.get("path") in _REMEDIES:
            yield _REMEDIES[way["path"]]
        if "remedy" in way:
            yield Finding(way["error"], way["remedy"])


def _try(kind: str, directory: str, device: Device) -> Findings:
    """One way to a directory: its path and why, and what it moves."""
    try:
        with on_trial(STORES[kind], directory, device, None, TRANSFER_SECONDS) as store:
            told = store.description
            rates = measure(store, device)
    except MissingDependencyError as error:
        return {"error": f"{error.package} is not installed", "remedy": str(error)}
    except TimeoutError:
        return {"error": "a transfer hangs", "remedy": _HANGS}
    except (StoreError, torch.OutOfMemoryError) as error:
        return {"error": _said(error)}
    return {
        "path": told["path"],
        "reason": told["reason"],
        "alignment": told["alignment"],
        "bytes_per_second": rates._asdict(),
    }


def _said(error: BaseException) -> str:
    """Return an error without number and path: what is said of a directory stands below its name."""
    return getattr(error, "strerror", None) or str(error)


def lines(findings: Findings) -> list[str]:
    """Return the findings in words."""
    machine = findings["machine"]
    known = [
        f"{name} {machine[key] or 'not found'}"
        for name, key in (("kvikio", "kvikio"), ("cuFile", "cufile"), ("nvidia-fs", "nvidia_fs"))
    ]
    system = f"torch {machine['torch']}; Python {machine['python']}; Linux {machine['kernel']}"
    said = [f"{machine['device']}; {system}; {'; '.join(known)}"]
    rate = machine["checksum_bytes_per_second"]
    said.append(
        f"checksums: {readable_rate(rate)}, {2 * 2**30 / rate:.2f} s of processor time for each GiB that is "
        "written and read; store.checksum: false does without"
    )
    said += map(_finding, machine["findings"])
    for each in findings["directories"]:
        said.append(each["directory"])
        said += [f"  {line}" for line in each.get("where", ())]
        said += [f"  {kind:5} {_in_words(way)}" for kind, way in each["ways"].items()]
        if each["auto"] is not None:
            auto = each["auto"]
            threads = f"readers: {auto['readers']}, writers: {auto['writers']}"
            said.append(f"  auto  takes {auto['kind']} ({threads}), because {auto['why']}")
        said += [f"  {_finding(found)}" for found in each["findings"]]
    return [visible(line) for line in said]


def _finding(found: Findings) -> str:
    return f"- {found['what']}: {found['remedy']}"


def _in_words(way: Findings) -> str:
    if "error" in way:
        return f"cannot be used: {way['error']}"
    rates = {name: readable_rate(rate) for name, rate in way["bytes_per_second"].items()}
    why = "" if way["reason"] is None else f", because {way['reason']}"
    aligned = f" aligned to {way['alignment']} bytes" if way["alignment"] > 1 else ""
    moved = f"writes {rates['write']}, reads {rates['read']}, both at once {rates['both']}"
    return f"{way['path']}{aligned}{why}: {moved}"
