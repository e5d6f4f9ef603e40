"""What a machine offers to offloading: the way of bytes to each directory, its speed, and what would help."""

from __future__ import annotations

import os
import platform
import statistics
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.config import StoreConfig
from tba_offload.device import ByteRange
from tba_offload.errors import MissingDependencyError, StoreError
from tba_offload.formatting import readable_rate, visible
from tba_offload.store import gds
from tba_offload.store.checksums import Checksums
from tba_offload.store.file import FileStore
from tba_offload.store.gds import GdsStore
from tba_offload.store.hanging import ask, opened
from tba_offload.store.probe import TRANSFER_SECONDS, choose, end, measure
from tba_offload.store.run_file import open_directory
from tba_offload.store.thread_count import threads_that_pay

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tba_offload.device import Device
    from tba_offload.store.engine import QueuedStore

Findings = dict[str, Any]

_CHECKED = 64 << 20
"""Bytes: more than caches near a core hold, as of activations."""
_CHECKS = 3

_HANGS = "check driver and drive; choose the other kind with store.kind meanwhile"
_REMEDIES = {
    "buffered": "use a directory on a local drive whose file system offers direct I/O, such as ext4 or XFS",
    "cuFile compatibility": (
        "for GPUDirect Storage load the driver (modprobe nvidia-fs), or with CUDA 12.8 or later let cuFile "
        "use PCIe peer-to-peer (use_pci_p2pdma in cufile.json); gdscheck -p says what is missing"
    ),
}
"""Remedies where bytes take this path, if speed matters."""
_NO_GDS = (
    "GPUDirect Storage needs cuFile and a local ext4 or XFS: install libcufile, see that "
    "KVIKIO_COMPAT_MODE is not ON, and try gdscheck -p"
)


def examine(directories: Sequence[str | os.PathLike[str]], device: Device) -> Findings:
    """Tries every way to every directory.

    Some dozens of MiB are written to and read from each of them, on a GPU up to two GiB; nothing stays there,
    and none is made.

    Args:
        directories: One for each drive.
        device: The device that activations are going to lie on.

    Returns:
        JSON values: ``machine``, and of each directory its ``ways``, what ``auto`` takes, and ``advice``.
    """
    return {
        "machine": _machine(device),
        "directories": [_examine_directory(str(directory), device) for directory in directories],
    }


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
    try:
        ask(lambda: os.close(open_directory(directory)), directory, TRANSFER_SECONDS)
    except OSError as error:
        return {"directory": directory, "ways": {"file": {"error": str(error)}}, "auto": None, "advice": []}
    makers: dict[str, Callable[[], QueuedStore]] = {"file": partial(FileStore, directory, device=device)}
    if device.pins_memory:  # elsewhere there is no memory but the host's
        makers["gds"] = partial(GdsStore, directory, device=device)
    ways = {kind: _try(make, directory, device) for kind, make in makers.items()}
    if "error" in ways.get("gds", {}):
        ways["gds"].setdefault("remedy", _NO_GDS)
    found: Findings = {"directory": directory, "ways": ways}
    if "error" in ways["file"]:
        return found | {"auto": None, "advice": []}
    choice = choose(directory, device)
    threads = threads_that_pay(choice.kind, directory, device, StoreConfig().options())
    advice = [_REMEDIES[way["path"]] for way in ways.values() if way.get("path") in _REMEDIES]
    advice += [way["remedy"] for way in ways.values() if "remedy" in way]
    auto = {"kind": choice.kind, **choice.as_json(), **threads.as_json()}
    return found | {"auto": auto, "advice": advice}


def _try(make: Callable[[], QueuedStore], directory: str, device: Device) -> Findings:
    """One way to a directory: its path and why, and what it moves."""
    try:
        with ExitStack() as stack:
            store = opened(make, directory, device, TRANSFER_SECONDS)
            stack.push(partial(end, store))
            told = store.description
            rates = measure(store, device)
    except MissingDependencyError as error:
        return {"error": f"{error.package} is not installed", "remedy": str(error)}
    except TimeoutError:
        return {"error": "a transfer hangs", "remedy": _HANGS}
    except (StoreError, torch.OutOfMemoryError) as error:
        return {"error": str(error)}
    return {
        "path": told["path"],
        "reason": told["reason"],
        "alignment": told["alignment"],
        "bytes_per_second": rates._asdict(),
    }


def lines(findings: Findings) -> list[str]:
    """The findings in words."""
    machine = findings["machine"]
    known = [
        f"{name} {machine[key] or 'not found'}"
        for name, key in (("kvikio", "kvikio"), ("cuFile", "cufile"), ("nvidia-fs", "nvidia_fs"))
    ]
    said = [f"{machine['device']}; torch {machine['torch']}; {'; '.join(known)}"]
    rate = machine["checksum_bytes_per_second"]
    said.append(
        f"checksums: {readable_rate(rate)}, {2 * 2**30 / rate:.2f} s of processor time for each GiB that is "
        "written and read; store.checksum: false does without"
    )
    for each in findings["directories"]:
        said.append(each["directory"])
        said += [f"  {kind:5} {_in_words(way)}" for kind, way in each["ways"].items()]
        if each["auto"] is not None:
            auto = each["auto"]
            threads = f"readers: {auto['readers']}, writers: {auto['writers']}"
            said.append(f"  auto  takes {auto['kind']} ({threads}), because {auto['why']}")
        said += [f"  - {sentence}" for sentence in each["advice"]]
    return [visible(line) for line in said]


def _in_words(way: Findings) -> str:
    if "error" in way:
        return f"cannot be used: {way['error']}"
    rates = {name: readable_rate(rate) for name, rate in way["bytes_per_second"].items()}
    why = "" if way["reason"] is None else f", because {way['reason']}"
    return f"{way['path']}{why}: writes {rates['write']}, reads {rates['read']}, both at once {rates['both']}"
