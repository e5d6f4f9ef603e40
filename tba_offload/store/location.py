"""Where a directory is: its file system, the drives below it, its room and its rights, what is doubtful."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Any, NamedTuple

from tba_offload.formatting import readable_size
from tba_offload.store.drives import drive_of
from tba_offload.store.file_systems import Place, file_system_of, mount_of
from tba_offload.store.run_file import open_directory
from tba_offload.store.wear import wear_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tba_offload.store.drives import Drive
    from tba_offload.store.file_systems import FileSystem, Mount
    from tba_offload.store.wear import Wear

LITTLE_ROOM = 16 << 30
"""Bytes; activations of a step of a model of some billions of parameters, on one GPU."""

_FULL_SHARE = 0.1
"""Share of a drive that is free below which SSDs are slower: they find no empty blocks to write to."""

_REACH = {
    Place.DRIVE: "local",
    Place.LAYERS: "over another file system",
    Place.MEMORY: "in host memory",
    Place.NETWORK: "through a network",
    Place.PROCESS: "through a process",
    Place.UNKNOWN: "not known to tba-offload",
}

_WORN = 90.0
"""Per cent of its rated life from which a drive is named as worn."""


class Finding(NamedTuple):
    """Something that is not as it should be.

    Attributes:
        what: What it is.
        remedy: What to do about it.
    """

    what: str
    remedy: str


class Location(NamedTuple):
    """Where a directory is.

    Attributes:
        file_system: Its kind.
        mount: How it is mounted; ``None`` if the system does not tell.
        drive: What it lies on; ``None`` if that is not a drive of this machine, or not known.
        free_bytes: Room for this user.
        total_bytes: Size of the file system.
        owner: User id of the owner.
        mode: Rights, as of ``chmod``.
        wear: Of each drive, how worn it is.
    """

    file_system: FileSystem
    mount: Mount | None
    drive: Drive | None
    free_bytes: int
    total_bytes: int
    owner: int
    mode: int
    wear: tuple[Wear, ...]

    @property
    def file_system_name(self) -> str:
        """The kernel's word for it, which is more exact, or that of the table."""
        return self.file_system.name if self.mount is None else self.mount.kind

    @property
    def is_remote(self) -> bool:
        """Whether bytes leave this machine."""
        drives = () if self.drive is None else self.drive.leaves
        return self.file_system.is_network or any(each.is_remote for each in drives)

    def findings(self) -> Iterator[Finding]:
        """Yield what is doubtful about it."""
        system, name = self.file_system, self.file_system_name
        on_drive = "a directory on a local NVMe drive, with ext4 or XFS"
        if system.is_network or system.place in {Place.MEMORY, Place.PROCESS, Place.LAYERS}:
            yield Finding("; ".join(system.limits()), f"name {on_drive}, if there is one")
        elif system.place is Place.UNKNOWN:
            yield Finding(
                f"{name} is not known to tba-offload, so every buffered write is flushed",
                f"name {on_drive}, or try this one with tba-offload bench-io",
            )
        for drive in () if self.drive is None else self.drive.leaves:
            if drive.kind == "hard disk":
                yield Finding(
                    f"{drive} is a hard disk, tens of times slower than an NVMe drive", f"name {on_drive}"
                )
            if drive.is_remote:
                yield Finding(
                    f"{drive} is reached through a network, which other traffic shares", f"name {on_drive}"
                )
        yield from self._of_room()
        yield from self._of_rights()
        for wear in self.wear:
            if wear.asked is not None and wear.trouble is not None:
                yield Finding(f"{wear.drive}: {wear.trouble}", wear.remedy or "replace the drive")
            if wear.used is not None and wear.used >= _WORN:
                yield Finding(
                    f"{wear.drive} has used {wear.used:g} % of its rated life",
                    "replace it, or spare it: store.write_bytes_per_day",
                )

    def _of_room(self) -> Iterator[Finding]:
        remedy = "free some, name another directory, or set store.capacity, so that others keep their room"
        if self.free_bytes < LITTLE_ROOM:
            yield Finding(f"{readable_size(self.free_bytes)} are free", remedy)
        elif self.free_bytes < _FULL_SHARE * self.total_bytes:
            yield Finding(
                f"{readable_size(self.free_bytes)} of {readable_size(self.total_bytes)} are free, and SSDs "
                "that are nearly full are slow to write",
                remedy,
            )

    def _of_rights(self) -> Iterator[Finding]:
        if self.mode & stat.S_IWOTH and not self.mode & stat.S_ISVTX:
            yield Finding(
                "every user may remove what is in it", "make a directory of your own in it, with chmod 700"
            )

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "file_system": {
                "name": self.file_system_name,
                "place": self.file_system.place.value,
                "is_remote": self.is_remote,
                "limits": self.file_system.limits(),
                "mounted": None if self.mount is None else self.mount.source,
            },
            "drive": None if self.drive is None else self.drive.as_json(),
            "free_bytes": self.free_bytes,
            "total_bytes": self.total_bytes,
            "owner": self.owner,
            "mode": f"{self.mode:o}",
            "wear": [{**wear._asdict(), "allowed_bytes": wear.allowed_bytes} for wear in self.wear],
            "findings": [found._asdict() for found in self.findings()],
        }

    def lines(self) -> Iterator[str]:
        """Yield the same in words."""
        where = "not known" if self.drive is None else str(self.drive)
        if self.drive is None and self.file_system.place in {Place.MEMORY, Place.NETWORK, Place.PROCESS}:
            where = "none of this machine"
        reach = "through a network" if self.is_remote else _REACH[self.file_system.place]
        yield f"on    {self.file_system_name}, {reach}; drive: {where}"
        yield (
            f"room  {readable_size(self.free_bytes)} free of {readable_size(self.total_bytes)}; of user "
            f"{self.owner}, mode {self.mode:04o}"
        )
        for wear in self.wear:
            yield f"wear  {wear}" + (f"; {wear.remedy}" if wear.asked is None and wear.remedy else "")


def location_of(directory: str) -> Location:
    """Look at a directory, and ask its drives how worn they are.

    Raises:
        StoreError: It cannot be reached.
        OSError: It cannot be looked at.
    """
    fd = open_directory(directory)
    try:
        mount = mount_of(fd)
        drive = drive_of(fd, mount)
        room, status = os.fstatvfs(fd), os.fstat(fd)
        return Location(
            file_system=file_system_of(fd),
            mount=mount,
            drive=drive,
            free_bytes=room.f_bavail * room.f_frsize,
            total_bytes=room.f_blocks * room.f_frsize,
            owner=status.st_uid,
            mode=stat.S_IMODE(status.st_mode),
            wear=() if drive is None else tuple(map(wear_of, drive.leaves)),
        )
    finally:
        os.close(fd)
