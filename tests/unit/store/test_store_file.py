"""The store in a file: on the tests' file system, on tmpfs, and with every fault that a drive can have."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import stat
import tempfile
import textwrap
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from faults import inject
from store_contract import (
    CPU,
    PATIENCE,
    StoreContract,
    descriptors,
    get,
    pattern,
    put,
)

import tba_offload as tba
from tba_offload.device import Accelerator, ByteRange
from tba_offload.errors import (
    ChecksumError,
    ConfigError,
    MissingDependencyError,
    ShortTransferError,
    StoreError,
)
from tba_offload.store import open_store
from tba_offload.store import run_file as directory
from tba_offload.store.file import FileStore
from tba_offload.store.run_file import check_directory, open_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from warm import Warm

    from tba_offload.store.base import ActivationStore, Extent


def flip_a_bit(fd: int, offset: int) -> None:
    """Changes one byte of a file through a descriptor of its own, which does not demand alignment."""
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    try:
        os.pwrite(other, bytes([os.pread(other, 1, offset)[0] ^ 1]), offset)
        os.fsync(other)
    finally:
        os.close(other)


class FileStoreContract(StoreContract):
    options = "slab_bytes=1 << 20"

    @property
    def expression(self) -> str:  # type: ignore[override]
        return f"FileStore(directory, device=CPU, {self.options})"

    def make_store(self, directory: Path, **options: Any) -> ActivationStore:
        return FileStore(directory, device=CPU, slab_bytes=1 << 20, **options)

    def corrupt(self, store: ActivationStore, extent: Extent) -> None:
        assert isinstance(store, FileStore)
        flip_a_bit(store._file.fd, extent.offset + extent.lead)


class TestFileStore(FileStoreContract):
    """With direct I/O where the tests' temporary directory has it."""


class TestFileStoreOnTmpfs(FileStoreContract):
    """Without direct I/O."""

    @pytest.fixture
    def tmp_path(self) -> Iterator[Path]:
        path = Path(tempfile.mkdtemp(dir="/dev/shm"))
        yield path
        shutil.rmtree(path)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with FileStore(tmp_path, device=CPU) as store:
        yield store


# Nothing is left behind, and nobody can interfere.


def test_the_file_is_private_and_has_no_name(store: FileStore, tmp_path: Path) -> None:
    put(store, pattern(100_000))
    status = os.fstat(store._file.fd)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_leaves_nothing(tmp_path: Path, python_with_torch: Warm) -> None:
    (tmp_path / "neighbour").write_bytes(b"untouched")
    program = f"""
        import os, signal, torch
        from tba_offload.device import ByteRange, CpuDevice, READY
        from tba_offload.store.file import FileStore
        store = FileStore({str(tmp_path)!r}, device=CpuDevice())
        data = torch.ones(4 << 20, dtype=torch.uint8)
        for _ in range(20):
            store.write(store.reserve(data.nbytes, data.data_ptr()), ByteRange.of(data), READY)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = python_with_torch.run("-c", textwrap.dedent(program))
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["neighbour"]
    assert (tmp_path / "neighbour").read_bytes() == b"untouched"


@pytest.mark.parametrize("path", ["offload", "drive/offload"])
def test_a_directory_that_is_missing_is_not_made(path: str, tmp_path: Path) -> None:
    """It is mistyped, or its drive is not mounted, and bytes would go to another one."""
    missing, where = path.split("/", maxsplit=1)[0], tmp_path / path
    for look in (partial(FileStore, device=CPU), lambda path: check_directory(str(path))):
        with pytest.raises(StoreError) as caught:
            look(where)
        assert f"{missing!r} does not exist; mount its drive" in str(caught.value)
        assert f"mkdir -p {where}" in str(caught.value)
        assert list(tmp_path.iterdir()) == []


def test_a_planted_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    if os.geteuid() == 0:
        os.lchown(link, 12345, -1)
    else:
        monkeypatch.setattr(directory.os, "geteuid", lambda: os.getuid() + 1)
    open_and_close(tmp_path / "link")  # nobody else may write here, so the link is the owner's choice
    tmp_path.chmod(0o1777)
    before = descriptors()
    with pytest.raises(StoreError, match="another user put the link"):
        open_directory(str(tmp_path / "link" / "new"))
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert descriptors() == before


def open_and_close(path: Path) -> None:
    os.close(open_directory(str(path)))


def test_a_file_is_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = descriptors()
    with pytest.raises(StoreError, match="'file' is not a directory"):
        FileStore(tmp_path / "file", device=CPU)
    assert descriptors() == before


# The path that bytes take.


def test_the_path_is_told(store: FileStore, tmp_path: Path) -> None:
    description = store.description
    assert description["kind"] == "file"
    assert description["directory"] == str(tmp_path)
    assert (description["path"], description["reason"] is None) in {("O_DIRECT", True), ("buffered", False)}
    assert description["alignment"] == store.alignment
    assert (description["alignment"] == 1) == (description["path"] == "buffered")


def test_tmpfs_is_buffered_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path, caplog.at_level(logging.INFO):
        with FileStore(path, device=CPU) as store:
            assert store.description["path"] == "buffered"
            assert store.alignment == 1
    assert f"{path}: buffered I/O instead of direct I/O, because tmpfs lies in memory" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [1, 4097, 5_000_001])
def test_gpu_memory_goes_through_slabs(tmp_path: Path, nbytes: int) -> None:
    device = Accelerator()
    with FileStore(tmp_path, device=device, slab_bytes=1 << 20) as store:
        data = pattern(nbytes).cuda()
        extent = store.reserve(nbytes, data.data_ptr())
        store.write(extent, ByteRange.of(data), device.event()).wait(PATIENCE)
        target = torch.zeros_like(data)
        store.read(extent, ByteRange.of(target), device.event(), padded=True).wait(PATIENCE)
        assert torch.equal(target, data)
        assert store.staging_bytes > 0


# Integrity.


def test_what_is_read_is_checked_unless_told_otherwise(tmp_path: Path) -> None:
    """A bit that the drive flips would otherwise become a number."""
    with open_store(kind="file", directories=[tmp_path], device=CPU) as store:
        assert store.description["checksum"] is True
        extent = put(store, pattern(100_003))
        with (
            inject("flip-read:n=1"),
            pytest.raises(
                ChecksumError, match=r"the extent of \d+ bytes at offset \d+ reads back with"
            ) as caught,
        ):
            get(store, extent)
        assert caught.value.filename == str(tmp_path)
        assert torch.equal(get(store, extent), pattern(100_003))
    with open_store(kind="file", directories=[tmp_path], device=CPU, checksum=False) as store:
        assert store.description["checksum"] is False
        with inject("flip-read"):
            assert not torch.equal(get(store, put(store, pattern(100_003))), pattern(100_003))


# Faults.


@pytest.mark.parametrize("padded", [True, False])
def test_a_truncated_file_is_a_short_read(store: FileStore, padded: bool) -> None:
    extent = put(store, pattern(300_001))
    os.ftruncate(store._file.fd, 8192)
    with pytest.raises(ShortTransferError, match=r"read of .* stopped after"):
        get(store, extent, padded=padded)


# Growing.


# Arguments.


@pytest.mark.parametrize("kind", ["auto", "file"])
def test_open_store_takes_the_same_directory_as_attach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """That for temporary files, where none is named."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with (
        open_store(kind=kind, device=CPU) as store,
        tba.attach(model, {"store": {"kind": kind}}, layers=list(model), measure_memory=False) as session,
    ):
        assert store.description == session.store.description
        assert store.description["directory"] == str(tmp_path)


def test_open_store_explains_what_it_cannot_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kind"):
        open_store(kind="tape", device=CPU)
    with pytest.raises(ConfigError, match="color"):
        open_store(color="red", device=CPU)
    with pytest.raises(MissingDependencyError, match="needs kvikio"):
        open_store(kind="gds", directories=[tmp_path], device=CPU)
