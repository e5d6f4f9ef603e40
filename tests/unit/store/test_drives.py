"""What a directory lies on: drives by ``/sys``, their wear by the tools that ask them, file systems."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from tba_offload.store import drives, location, posix, wear
from tba_offload.store.drives import Drive, drive_numbered, drive_of
from tba_offload.store.file_systems import FILE_SYSTEMS, UNKNOWN, Mount, Place, file_system_of, mount_of
from tba_offload.store.wear import wear_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NVME = Drive("nvme0n1", "NVMe", "Fast 9000", 10**12, "pcie")


# Drives


class Sys:
    """A tree as ``/sys`` is."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "dev" / "block").mkdir(parents=True)

    def add(self, name: str, **files: str) -> Path:
        disk = self.root / "devices" / name
        disk.mkdir(parents=True)
        self.write(disk, files)
        return disk

    def write(self, disk: Path, files: dict[str, str]) -> None:
        for path, text in files.items():
            file = disk / path.replace("__", "/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")

    def part(self, disk: Path, name: str) -> Path:
        part = disk / name
        part.mkdir()
        self.write(part, {"partition": "1"})
        return part

    def member(self, disk: Path, node: Path) -> None:
        (disk / "slaves").mkdir(exist_ok=True)
        (disk / "slaves" / node.name).symlink_to(node)

    def found(self, node: Path) -> Drive | None:
        """The drive of a file system that lies on a node."""
        (self.root / "dev" / "block" / "259:3").symlink_to(node)
        return drive_numbered(259, 3)


@pytest.fixture
def sys_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sys:
    monkeypatch.setattr(drives, "SYS", tmp_path / "sys")
    return Sys(tmp_path / "sys")


def test_a_partition_is_on_its_drive(sys_: Sys) -> None:
    files = {"device__model": "Fast 9000", "device__transport": "pcie", "size": str(10**12 // 512)}
    disk = sys_.add("nvme0n1", **files, queue__rotational="0")
    assert sys_.found(sys_.part(disk, "nvme0n1p1")) == NVME
    assert str(NVME) == "nvme0n1 (NVMe Fast 9000)"


@pytest.mark.parametrize(
    ("name", "files", "kind"),
    [
        ("sda", {"queue__rotational": "1"}, "hard disk"),
        ("sda", {"queue__rotational": "0"}, "SSD"),
        ("vda", {"queue__rotational": "1"}, "virtual"),
        ("loop3", {}, "loop"),
        ("rbd0", {}, "Ceph block device"),
    ],
)
def test_kinds_of_drives(name: str, files: dict[str, str], kind: str, sys_: Sys) -> None:
    drive = sys_.found(sys_.add(name, **files))
    assert drive is not None
    assert (drive.name, drive.kind, drive.model, drive.nbytes) == (name, kind, None, None)


def test_an_encrypted_array_is_made_of_drives(sys_: Sys) -> None:
    array = sys_.add("md0", md__level="raid0")
    mapped = sys_.add("dm-0", dm__name="crypt")
    sys_.member(mapped, array)
    for number in (0, 1):
        disk = sys_.add(f"nvme{number}n1", device__transport="pcie" if number else "tcp")
        sys_.member(array, sys_.part(disk, f"nvme{number}n1p1"))
    drive = sys_.found(mapped)
    assert drive is not None
    assert str(drive) == "dm-0 (mapped crypt of md0 (raid0 of nvme0n1 (NVMe by tcp), nvme1n1 (NVMe)))"
    assert [(each.name, each.is_remote) for each in drive.leaves] == [("nvme0n1", True), ("nvme1n1", False)]
    assert json.loads(json.dumps(drive.as_json()))["members"][0]["members"][1]["name"] == "nvme1n1"


def test_devices_that_lie_on_each_other_end(sys_: Sys) -> None:
    one, other = sys_.add("dm-0", dm__name="one"), sys_.add("dm-1", dm__name="other")
    sys_.member(one, other)
    sys_.member(other, one)
    assert sys_.found(one) is not None


def test_a_drive_that_the_kernel_does_not_show_is_not_known(sys_: Sys) -> None:
    assert sys_.found(sys_.root / "devices" / "gone") is None


def test_a_btrfs_is_on_all_of_its_drives(sys_: Sys, tmp_path: Path) -> None:
    """It has a number of its own, as ``/proc`` has, and is mounted by one of them."""
    (tmp_path / "source").touch()
    mount = Mount("btrfs", str(tmp_path / "source"), "rw")
    one, other = (sys_.add(f"nvme{number}n1", device__transport="pcie") for number in (0, 1))
    part = sys_.part(other, "nvme1n1p1")
    (sys_.root / "dev" / "block" / "0:0").symlink_to(one)  # the number of what is no device
    proc = os.open("/proc", os.O_RDONLY)
    try:
        alone = drive_of(proc, mount)
        members = sys_.root / "fs" / "btrfs" / "0a1b" / "devices"
        members.mkdir(parents=True)
        for node in (one, part):
            (members / node.name).symlink_to(node)
        both = drive_of(proc, mount)
    finally:
        os.close(proc)
    assert alone == Drive("nvme0n1", "NVMe", transport="pcie")
    assert str(both) == "btrfs (Btrfs of nvme0n1 (NVMe), nvme1n1 (NVMe))"


# Wear


def tool(folder: Path, name: str, says: object, *, status: int = 0) -> None:
    """A program of that name, which prints JSON, or a sentence on stderr."""
    text = f"echo {says!r} >&2" if isinstance(says, str) else f"cat <<'END'\n{json.dumps(says)}\nEND"
    (folder / name).write_text(f"#!/bin/sh\n{text}\nexit {status}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of programs beside the system's shell."""
    (tmp_path / "tools").mkdir()
    for name in ("sh", "cat"):
        (tmp_path / "tools" / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(tmp_path / "tools"))
    return tmp_path / "tools"


SMART = {"percentage_used": 4, "data_units_written": 2_000_000, "media_errors": 0}


def test_an_nvme_drive_by_smartctl(tools: Path) -> None:
    tool(tools, "smartctl", {"nvme_smart_health_information_log": SMART})
    found = wear_of(NVME)
    assert (found.used, found.written_bytes, found.media_errors) == (4, 1_024_000_000_000, 0)
    assert found.allowed_bytes == 25_600_000_000_000
    assert str(found) == (
        "nvme0n1: 4 % of its rated life used, 1.02 TB written so far (smartctl -j -a /dev/nvme0n1)"
    )


def test_an_nvme_drive_by_nvme_where_smartctl_may_not(tools: Path) -> None:
    tool(tools, "smartctl", {"smartctl": {"messages": [{"string": "Permission denied"}]}}, status=2)
    tool(tools, "nvme", {"percent_used": 0, "data_units_written": 5, "critical_warning": {"value": 0}})
    found = wear_of(NVME)
    assert (found.asked, found.used, found.trouble) == ("nvme smart-log -o json /dev/nvme0n1", 0, None)
    assert found.allowed_bytes is None  # the share is rounded


def test_a_drive_of_sata_counts_sectors(tools: Path) -> None:
    table = [
        {"name": "Power_On_Hours", "raw": {"value": 9}},
        {"name": "Total_LBAs_Written", "raw": {"value": 8}},
    ]
    told = {"logical_block_size": 4096, "ata_smart_attributes": {"table": table}}
    tool(tools, "smartctl", told | {"endurance_used": {"current_percent": 50}})
    found = wear_of(Drive("sda", "SSD"))
    assert (found.used, found.written_bytes, found.allowed_bytes) == (50, 8 * 4096, 16 * 4096)


def test_a_drive_that_fails_is_named(tools: Path) -> None:
    tool(tools, "nvme", {**SMART, "critical_warning": 4})
    found = wear_of(NVME)
    assert found.trouble == "it warns of its own failure"
    assert found.remedy == "replace the drive"


def test_what_could_not_be_asked_is_said_and_how_to(tools: Path) -> None:
    found = wear_of(NVME)
    assert str(found) == "nvme0n1 does not tell: neither smartctl nor nvme is installed"
    assert found.remedy == "install smartmontools, and run tba-offload doctor as root"
    tool(tools, "nvme", "nvme0n1: Permission denied", status=1)
    found = wear_of(NVME)
    assert "nvme smart-log -o json /dev/nvme0n1 says: nvme0n1: Permission denied" in str(found)
    assert found.remedy == "ask as root: sudo smartctl -a /dev/nvme0n1"
    assert wear_of(Drive("vda", "virtual")).remedy == "ask the machine that has it"


@pytest.mark.parametrize(
    "says", [[], {}, {"smartctl": 1}, {"nvme_smart_health_information_log": {"data_units_written": []}}]
)
def test_what_makes_no_sense_is_no_error(says: object, tools: Path) -> None:
    tool(tools, "smartctl", says)
    assert wear_of(Drive("sda", "SSD")).used is None


def test_a_tool_that_hangs_is_left(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tools / "sleep").symlink_to("/bin/sleep")
    (tools / "smartctl").write_text("#!/bin/sh\nexec sleep 600\n")
    (tools / "smartctl").chmod(0o755)
    monkeypatch.setattr(wear, "TOOL_SECONDS", 0.1)
    assert "timed out" in str(wear_of(Drive("sda", "SSD")))


# File systems


def test_a_file_system_is_known_by_its_magic_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for magic, expected in FILE_SYSTEMS.items():
        monkeypatch.setattr(posix, "file_system_magic", lambda fd, magic=magic: magic)
        assert file_system_of(0) is expected
    monkeypatch.setattr(posix, "file_system_magic", lambda fd: 0)
    assert file_system_of(0) is UNKNOWN


def test_file_systems_that_a_store_cannot_rely_on_say_so() -> None:
    names = {each.name: each for each in FILE_SYSTEMS.values()}
    assert {"ext4", "xfs", "btrfs", "tmpfs", "overlay", "nfs", "lustre", "ceph", "beegfs", "fuse"} <= set(
        names
    )
    for each in names.values():
        assert bool(each.limits()) == (each.place is not Place.DRIVE), each.name
        assert each.reports_late == (each.place in {Place.NETWORK, Place.PROCESS}), each.name
    assert any("may leave its files" in told for told in names["nfs"].limits())
    assert any("every buffered write is flushed" in told for told in names["lustre"].limits())
    assert any("every write is flushed" in told for told in names["fuse"].limits())


def test_a_mount_is_found_by_its_number(tmp_path: Path) -> None:
    fd = os.open("/proc", os.O_RDONLY)
    try:
        mount = mount_of(fd)
    finally:
        os.close(fd)
    assert mount is not None
    assert mount.kind == "proc"
    assert mount_of(10**6) is None


LOOKS: dict[str, Callable[[location.Location], location.Location]] = {
    "hard disk": lambda where: where._replace(drive=Drive("sda", "hard disk")),
    "through a network, which other traffic": lambda where: where._replace(
        drive=NVME._replace(transport="rdma")
    ),
    "nfs is a network file system": lambda where: where._replace(
        file_system=next(each for each in FILE_SYSTEMS.values() if each.name == "nfs"),
        mount=Mount("nfs4", "server:/home", "rw"),
    ),
    "not known to tba-offload": lambda where: where._replace(file_system=UNKNOWN),
    "SSDs that are nearly full": lambda where: where._replace(free_bytes=10**12, total_bytes=11 * 10**12),
    "are free": lambda where: where._replace(free_bytes=1 << 20),
}


@pytest.mark.parametrize("what", LOOKS)
def test_what_is_doubtful_has_a_remedy(what: str, tmp_path: Path) -> None:
    sound = location.location_of(str(tmp_path))._replace(
        file_system=FILE_SYSTEMS[0xEF53], drive=NVME, free_bytes=10**12, total_bytes=10**12, wear=()
    )
    assert list(sound.findings()) == []
    (found,) = LOOKS[what](sound).findings()
    assert what in found.what
    assert found.remedy
    assert list(LOOKS[what](sound).lines())
