"""File systems that report a lost write only when a file is flushed or closed: no byte is lost silently."""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import TYPE_CHECKING

import late_fuse
import pytest
import torch
from harness import KIB, MIB
from models import assert_same_history, make_model, train
from store_contract import CPU, descriptors

import tba_offload as tba
from tba_offload.config import BudgetConfig, OffloadConfig, StoreConfig
from tba_offload.device import READY
from tba_offload.device.ranges import ByteRange, aligned_range
from tba_offload.errors import StoreFullError
from tba_offload.store import file_systems, posix
from tba_offload.store.file import FileStore
from tba_offload.store.file_systems import FILE_SYSTEMS, UNKNOWN
from tba_offload.store.late import LateErrors
from tba_offload.store.location import location_of
from tba_offload.store.run_file import RunFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tba_offload.store.base import Extent

NFS = next(each for each in FILE_SYSTEMS.values() if each.name == "nfs")
EXT4 = FILE_SYSTEMS[0xEF53]


def put_back(store: FileStore) -> None:
    """A drive that has failed is left alone for a while, from a moment after the write has ended on."""
    while store.write_rate() is not None:
        time.sleep(0.001)
    store.resume()


# A real one

on_fuse = pytest.mark.skipif(
    not late_fuse.can_mount(), reason="mounting by FUSE needs /dev/fuse and CAP_SYS_ADMIN; the others run"
)


@pytest.fixture
def late(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system with room for 1 MiB, which refuses direct I/O."""
    (tmp_path / "late").mkdir()
    with late_fuse.mounted(tmp_path / "late", MIB):
        yield tmp_path / "late"


def block(value: int, nbytes: int = 256 * KIB) -> ByteRange:
    return ByteRange.of(torch.full((nbytes,), value, dtype=torch.uint8))


def read_back(store: FileStore, extent: Extent) -> torch.Tensor:
    target = aligned_range(extent.nbytes, extent.lead, store.alignment, CPU)
    store.read(extent, target, READY, padded=True).wait(60)
    return target.tensor()


@on_fuse
@pytest.mark.parametrize("writers", [1, 3])
def test_a_write_that_was_lost_fails_though_it_returned(writers: int, late: Path) -> None:
    """Without checksums, by which reading it would tell."""
    with FileStore(str(late), device=CPU, checksum=False, writers=writers) as store:
        assert store.description["path"] == "buffered"
        assert "refuses direct I/O" in str(store.description["reason"])
        assert store.description["file_system"] == "fuse"
        assert store.description["confirms_writes"]
        kept: list[tuple[int, Extent]] = []
        for value in range(1, 13):
            source = block(value)
            extent = store.reserve(source.nbytes, source.address)
            write = store.write(extent, source, READY)
            if value <= 4:
                write.wait(60)
                kept.append((value, extent))
            else:
                with pytest.raises(StoreFullError, match=f"Errno {errno.ENOSPC}.*{late}"):
                    write.wait(60)
                put_back(store)
        for value, extent in kept:
            assert torch.equal(read_back(store, extent), block(value).tensor())


@on_fuse
@pytest.mark.parametrize("checksum", [True, False])
def test_training_keeps_what_was_lost_and_its_bits(checksum: bool, late: Path) -> None:
    config = OffloadConfig(
        budget=BudgetConfig(in_flight_bytes=MIB),
        store=StoreConfig(kind="file", directories=(late,), checksum=checksum, writers=2),
        min_tensor_bytes=KIB,
    )
    expected = train(make_model(layers=4), steps=3)
    before = descriptors()
    model = make_model(layers=4)
    with tba.attach(model, config) as session:
        with pytest.warns(UserWarning, match="the store is full: .* of activations stayed in memory"):
            found = train(model, session, steps=3)
        records = session.report()
    assert_same_history(found, expected)
    assert records[0].offloaded_bytes > 0
    assert records[0].fallback_kept_bytes > 0
    assert sum(record.rescued_bytes + record.reread_bytes for record in records) == 0
    assert list(late.iterdir()) == []
    assert len(descriptors()) == len(before)


@on_fuse
def test_the_doctor_knows_what_holds_there(late: Path) -> None:
    found = location_of(str(late))
    assert found.file_system_name == "fuse.late"
    assert found.drive is None
    told = "; ".join(each.what for each in found.findings())
    assert "served by a process" in told
    assert "every write is flushed" in told
    assert "may leave its files there" in told


# Everywhere


@pytest.fixture
def on_nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories are taken to be on NFS, without direct I/O."""
    monkeypatch.setattr("tba_offload.store.run_file.file_system_of", lambda fd: NFS)
    monkeypatch.setattr(posix, "direct_alignment", lambda fd: 0)


@pytest.mark.usefixtures("on_nfs")
def test_a_late_error_is_that_of_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    confirm, asked = posix.confirm, []

    def confirming(fd: int) -> None:
        asked.append(fd)
        confirm(fd)
        if len(asked) == 2:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(posix, "confirm", confirming)
    with FileStore(str(tmp_path), device=CPU) as store:
        assert store.description["confirms_writes"]
        for number in range(1, 4):
            source = block(number)
            extent = store.reserve(source.nbytes, source.address)
            write = store.write(extent, source, READY)
            if number == 2:
                with pytest.raises(StoreFullError, match="or of others at that time, failed: Disk quota"):
                    write.wait(60)
                put_back(store)
            else:
                write.wait(60)
                assert torch.equal(read_back(store, extent), source.tensor())
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("system", "is_direct", "confirms"),
    [
        (EXT4, True, False),
        (EXT4, False, False),
        (NFS, True, False),
        (NFS, False, True),
        (UNKNOWN, False, True),
        (FILE_SYSTEMS[0x65735546], True, True),
    ],
)
def test_only_file_systems_that_report_late_are_asked(
    system: file_systems.FileSystem,
    is_direct: bool,
    confirms: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tba_offload.store.run_file.file_system_of", lambda fd: system)
    if not is_direct:
        monkeypatch.setattr(posix, "direct_alignment", lambda fd: 0)
    asked: list[int] = []
    monkeypatch.setattr(posix, "confirm", asked.append)
    with FileStore(str(tmp_path), device=CPU) as store:
        if (store.description["path"] == "O_DIRECT") is not is_direct:
            pytest.fail("these tests need a directory for temporary files whose file system has direct I/O")
        source = block(1)
        store.write(store.reserve(source.nbytes, source.address), source, READY).wait(60)
        assert store.description["confirms_writes"] is confirms
    assert bool(asked) is confirms


def test_an_error_that_is_told_to_one_thread_fails_all_writes_of_that_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system tells it once, to whichever write asks first."""
    monkeypatch.setattr("tba_offload.store.run_file.file_system_of", lambda fd: NFS)
    told: list[OSError] = [OSError(errno.EIO, os.strerror(errno.EIO))]

    def confirming(fd: int) -> None:
        if told:
            raise told.pop()

    monkeypatch.setattr(posix, "confirm", confirming)
    file = RunFile(str(tmp_path), None)
    try:
        late = LateErrors(file, is_direct=False)
        one, other = late.begin(), late.begin()
        with pytest.raises(OSError, match="Input/output error"):
            late.check(one)
        failures: list[OSError] = []

        def check() -> None:
            try:
                late.check(other)
            except OSError as error:
                failures.append(error)

        thread = threading.Thread(target=check)
        thread.start()
        thread.join()
        assert [error.errno for error in failures] == [errno.EIO]
        late.check(late.begin())  # the next one is sound
    finally:
        file.close()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_without_flushing_is_asked_by_closing(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fdatasync", refusing)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        posix.confirm(fd)
        os.fstat(fd)
    finally:
        os.close(fd)


def test_an_error_of_the_last_close_is_of_bytes_that_are_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descriptors()
    file = RunFile(str(tmp_path), None)
    close = os.close

    def failing(fd: int) -> None:
        close(fd)
        if fd == file.fd:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "close", failing)
    file.close()
    monkeypatch.undo()
    assert descriptors() == before
    assert list(tmp_path.iterdir()) == []
