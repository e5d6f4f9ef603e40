"""File systems, recognized by their magic number: where they are, and what they do not promise.

A store needs little of a file system: one process writes and reads one open file that has no name. What
network and user-space file systems make of that differs, and this table says how.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from tba_offload.store import posix


class Place(StrEnum):
    """Where the bytes of a file system are."""

    DRIVE = "drive"
    MEMORY = "memory"
    NETWORK = "network"
    LAYERS = "layers"
    PROCESS = "process"
    UNKNOWN = "unknown"


class FileSystem(NamedTuple):
    """What is known of a kind of file system.

    Attributes:
        name: Its name, such as ``"ext4"``.
        place: Where the bytes are.
        keeps_names: Whether a file that is removed while it is open may keep a name, so that a crash of the
            process leaves it there.
    """

    name: str
    place: Place
    keeps_names: bool = False

    @property
    def is_network(self) -> bool:
        """Whether another machine has the bytes."""
        return self.place is Place.NETWORK

    def limits(self) -> list[str]:
        """Return what a store cannot rely on there, and what follows, in sentences."""
        told = []
        if self.place is Place.MEMORY:
            told.append(f"{self.name} lies in host memory, so that what is offloaded still takes memory")
        if self.is_network:
            told.append(f"{self.name} is a network file system: ranks and jobs share its bandwidth")
        if self.place is Place.PROCESS:
            told.append(f"{self.name} is served by a process, which copies every byte once more")
        if self.place is Place.LAYERS:
            told.append(f"{self.name} lies on another file system, that of a container's layers")
        if self.keeps_names:
            told.append("a process that is killed may leave its files there: nothing removes them")
        if self.place in {Place.NETWORK, Place.PROCESS, Place.UNKNOWN}:
            told.append("a full or failing server may lose a write and say so only when the bytes are read")
        return told


def _network(name: str, *, keeps_names: bool = True) -> FileSystem:
    return FileSystem(name, Place.NETWORK, keeps_names=keeps_names)


FILE_SYSTEMS = {
    0x01021994: FileSystem("tmpfs", Place.MEMORY),
    0x858458F6: FileSystem("ramfs", Place.MEMORY),
    0x958458F6: FileSystem("hugetlbfs", Place.MEMORY),
    0xEF53: FileSystem("ext4", Place.DRIVE),
    0x58465342: FileSystem("xfs", Place.DRIVE),
    posix.BTRFS: FileSystem("btrfs", Place.DRIVE),
    0xCA451A4E: FileSystem("bcachefs", Place.DRIVE),
    0xF2F52010: FileSystem("f2fs", Place.DRIVE),
    0x2FC12FC1: FileSystem("zfs", Place.DRIVE),
    0x3153464A: FileSystem("jfs", Place.DRIVE),
    0x2011BAB0: FileSystem("exfat", Place.DRIVE),
    0x4D44: FileSystem("vfat", Place.DRIVE),
    0x7366746E: FileSystem("ntfs3", Place.DRIVE),
    0x794C7630: FileSystem("overlay", Place.LAYERS),
    0x65735546: FileSystem("fuse", Place.PROCESS, keeps_names=True),
    0x6969: _network("nfs"),
    0x517B: _network("smb"),
    0xFF534D42: _network("cifs"),
    0xFE534D42: _network("smb2"),
    0x0BD00BD0: _network("lustre", keeps_names=False),
    0x00C36400: _network("ceph", keeps_names=False),
    0x19830326: _network("beegfs"),
    0x47504653: _network("gpfs", keeps_names=False),
    0x5346414F: _network("afs"),
    0x01021997: _network("9p"),
    0x20030528: _network("orangefs"),
    0x01161970: _network("gfs2", keeps_names=False),
    0x7461636F: _network("ocfs2", keeps_names=False),
}
"""Kinds of file systems by magic number, those of ``linux/magic.h`` and of file systems out of the tree."""

UNKNOWN = FileSystem("unknown", Place.UNKNOWN)
"""Kind of a file system that is not in the table."""


class Mount(NamedTuple):
    """Where a file system is mounted.

    Attributes:
        kind: Its type by the kernel, such as ``"nfs4"`` or ``"fuse.sshfs"``.
        source: What is mounted, such as ``"/dev/nvme0n1p1"`` or ``"server:/export"``.
        options: The options of the file system.
    """

    kind: str
    source: str
    options: str


def file_system_of(fd: int) -> FileSystem:
    """Return the kind of file system that an open file or directory lies on."""
    return FILE_SYSTEMS.get(posix.file_system_magic(fd), UNKNOWN)


def mount_id_of(fd: int) -> str:
    """Return the kernel's number of the mount of an open file.

    Unlike the device it also tells bind mounts apart.
    """
    lines = Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="ascii").splitlines()
    return next(line.split()[1] for line in lines if line.startswith("mnt_id:"))


def mount_of(fd: int) -> Mount | None:
    """How the file system of an open file or directory is mounted; ``None`` if the system does not tell."""
    try:
        number = mount_id_of(fd)
        mounts = os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).splitlines()
    except (OSError, StopIteration):
        return None
    for line in mounts:
        before, _, after = line.partition(" - ")
        if before.split(maxsplit=1)[0] == number and len(after.split(" ")) >= 3:
            kind, source, options = after.split(" ")[:3]
            return Mount(_unescaped(kind), _unescaped(source), _unescaped(options))
    return None


def _unescaped(text: str) -> str:
    """Return a word of ``mountinfo``, in which white space and backslashes are octal."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text
