"""The drives that a directory lies on, by what the kernel tells of them in ``/sys``."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tba_offload.store.file_systems import Mount

SYS = Path("/sys")

_SECTOR = 512
"""Bytes; the unit of ``size`` in ``/sys/block``, whatever the drive's own is."""
_DEEPEST = 8
"""Devices that lie on each other at most: a partition of a mapped array, encrypted, on partitions, …"""


class Drive(NamedTuple):
    """A block device.

    Attributes:
        name: The kernel's name, such as ``"nvme0n1"``.
        kind: ``"NVMe"``, ``"SSD"``, ``"hard disk"``, ``"virtual"`` (its host knows what it is), or what it is
            made of others by: ``"raid0"``, ``"mapped"``, ``"loop"``.
        model: The maker's name for it; ``None`` if it does not tell.
        nbytes: Its size; ``None`` if that is not known.
        transport: How an NVMe drive is reached: ``"pcie"``, ``"tcp"``, ``"rdma"``; ``None`` for others.
        members: The devices that it is made of.
    """

    name: str
    kind: str
    model: str | None = None
    nbytes: int | None = None
    transport: str | None = None
    members: tuple[Drive, ...] = ()

    @property
    def leaves(self) -> Iterator[Drive]:
        """The devices that are made of no others."""
        for member in self.members:
            yield from member.leaves
        if not self.members:
            yield self

    @property
    def is_remote(self) -> bool:
        """Whether an NVMe drive is reached through a network."""
        return self.transport not in {None, "pcie"}

    def as_json(self) -> dict[str, object]:
        """For programs."""
        return {**self._asdict(), "members": [member.as_json() for member in self.members]}

    def __str__(self) -> str:
        what = self.kind if self.model is None else f"{self.kind} {self.model}"
        if self.is_remote:
            what += f" by {self.transport}"
        if not self.members:
            return f"{self.name} ({what})"
        return f"{self.name} ({what} of {', '.join(map(str, self.members))})"


def drive_of(fd: int, mount: Mount | None) -> Drive | None:
    """Return the drive that an open file or directory lies on.

    Args:
        fd: The file or directory.
        mount: How its file system is mounted.

    Returns:
        ``None`` if it is on none, or that cannot be found out, as in a container whose drives are elsewhere.
    """
    device = os.fstat(fd).st_dev
    if os.major(device) != 0:
        return drive_numbered(os.major(device), os.minor(device))
    if mount is None or not mount.source.startswith("/"):
        return None
    try:
        device = Path(mount.source).stat().st_rdev
    except OSError:
        return None
    return _of_btrfs(_node(device)) or _at(_node(device))


def drive_numbered(major: int, minor: int) -> Drive | None:
    """Return the drive of a number of a block device.

    Of a partition its disk, None if the system shows none.
    """
    return _at(_node(os.makedev(major, minor)))


def _node(device: int) -> Path:
    return SYS / "dev" / "block" / f"{os.major(device)}:{os.minor(device)}"


def _of_btrfs(node: Path) -> Drive | None:
    """Return the drives of a Btrfs, which has a number of its own, if they are several.

    By one of its devices.
    """
    one = node.resolve().name
    for devices in (SYS / "fs" / "btrfs").glob("*/devices"):
        nodes: list[Path] = []
        with suppress(OSError):  # it is unmounted meanwhile
            nodes = sorted(devices.iterdir())
        if len(nodes) > 1 and one in {each.name for each in nodes}:
            members = tuple(drive for each in nodes if (drive := _at(each, 1)) is not None)
            return Drive(name="btrfs", kind="Btrfs", members=members)
    return None


def _at(node: Path, depth: int = 0) -> Drive | None:
    """Return the device of a node in ``/sys``; of a partition its disk."""
    try:
        disk = node.resolve(strict=True)
    except (OSError, RuntimeError):
        return None
    if (disk / "partition").exists():
        disk = disk.parent
    found: list[Drive] = []
    if depth < _DEEPEST:
        with suppress(OSError):
            nodes = sorted((disk / "slaves").iterdir())
            found = [drive for each in nodes if (drive := _at(each, depth + 1)) is not None]
    sectors = _word(disk / "size")
    return Drive(
        name=disk.name,
        kind=_kind_of(disk),
        model=_word(disk / "device" / "model") or _word(disk / "dm" / "name"),
        nbytes=int(sectors) * _SECTOR if sectors is not None and sectors.isdecimal() else None,
        transport=_word(disk / "device" / "transport") if disk.name.startswith("nvme") else None,
        members=tuple(found),
    )


_BY_NAME = {
    "loop": "loop",
    "zram": "compressed memory",
    "nbd": "network block device",
    "rbd": "Ceph block device",
}
_VIRTUAL = ("vd", "xvd")
"""Names of drives of virtual machines: what is below them only the host knows."""


def _kind_of(disk: Path) -> str:
    if (disk / "md").exists():
        return _word(disk / "md" / "level") or "array"
    if (disk / "dm").exists():
        return "mapped"
    for start, kind in _BY_NAME.items():
        if disk.name.startswith(start):
            return kind
    if disk.name.startswith("nvme"):
        return "NVMe"
    if disk.name.startswith(_VIRTUAL):
        return "virtual"
    return "hard disk" if _word(disk / "queue" / "rotational") == "1" else "SSD"


def _word(path: Path) -> str | None:
    """Return what a file of ``/sys`` says; ``None`` if it is not there, or empty."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:
        return None
