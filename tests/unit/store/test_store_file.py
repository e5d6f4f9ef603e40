"""The store in a file: who can reach the file, the path of its bytes, its size, and what it refuses."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from faults import inject
from harness import CPU, MIB
from store_contract import StoreContract, get, pattern, put

from tba_offload.device import ByteRange, Device
from tba_offload.errors import ChecksumError, StoreError, StoreFullError, UnsupportedError
from tba_offload.store import Extent, MultiStore, open_store
from tba_offload.store.file import FileStore, existing_directory
from tba_offload.store.host import HostStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tba_offload.store import Extent, Store


class FileStoreContract(StoreContract):
    def make_store(self, directory: Path, **options: Any) -> Store:
        return FileStore(directory, device=CPU, **options)

    def corrupt(self, store: Store, extent: Extent) -> None:
        assert isinstance(store, FileStore)
        flip_a_bit(store.fd, extent.offset + extent.lead)


class TestFileStore(FileStoreContract):
    """With direct I/O where the tests' temporary directory has it."""


class TestFileStoreOnTmpfs(FileStoreContract):
    """Through the page cache."""

    @pytest.fixture
    def tmp_path(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
            yield Path(path)


def flip_a_bit(fd: int, offset: int) -> None:
    """Changes one byte of a file through a descriptor of its own, which does not demand alignment."""
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    try:
        os.pwrite(other, bytes([os.pread(other, 1, offset)[0] ^ 1]), offset)
    finally:
        os.close(other)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MultiStore]:
    with open_store(kind="file", directories=[tmp_path], device=CPU) as store:
        yield store


@pytest.fixture
def file(tmp_path: Path) -> Iterator[FileStore]:
    store = FileStore(tmp_path, device=CPU)
    yield store
    store.close()


# Nothing is left behind, and nobody can interfere.


def test_the_file_is_private_and_has_no_name(file: FileStore, tmp_path: Path) -> None:
    status = os.fstat(file.fd)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0
    assert list(tmp_path.iterdir()) == []


def test_a_planted_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one that a link of one's own leads to."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "shared" / "link"
    link.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "own").symlink_to(link)
    if os.geteuid() == 0:
        os.lchown(link, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    existing_directory(str(tmp_path / "own"))  # nobody else may write here: the links are the owner's choice
    link.parent.chmod(0o777)
    for path in (link, tmp_path / "own"):
        with pytest.raises(StoreError, match="the link 'link' of another user"):
            open_store(kind="file", directories=[path], device=CPU)
    assert list((tmp_path / "elsewhere").iterdir()) == []


# The path that bytes take.


def test_the_path_is_told(store: MultiStore, tmp_path: Path) -> None:
    description = store.description
    assert description["kind"] == "file"
    assert description["directory"] == str(tmp_path)
    assert (description["path"], description["reason"] is None) in {("O_DIRECT", True), ("buffered", False)}
    assert description["alignment"] == store.alignment
    assert (description["alignment"] == 1) == (description["path"] == "buffered")


def test_tmpfs_is_buffered_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        with open_store(kind="file", directories=[path], device=CPU) as store:
            assert store.description["path"] == "buffered"
    assert f"{path}: the store uses buffered I/O instead of direct I/O" in caplog.text
    assert "tmpfs is in memory" in caplog.text


# Integrity and faults.


def test_what_is_read_is_checked_unless_told_otherwise(tmp_path: Path) -> None:
    """A bit that the drive flips would otherwise become a number."""
    with open_store(kind="file", directories=[tmp_path], device=CPU) as store:
        extent = put(store, pattern(100_003))
        with inject("flip-read:n=1"), pytest.raises(ChecksumError, match="reads back with"):
            get(store, extent)
        assert torch.equal(get(store, extent), pattern(100_003))
    with open_store(kind="file", directories=[tmp_path], device=CPU, checksum=False) as store:
        assert store.description["checksum"] is False
        with inject("flip-read"):
            assert not torch.equal(get(store, put(store, pattern(100_003))), pattern(100_003))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_drive_without_room_is_full_and_the_file_is_as_long_as_before(file: FileStore, number: int) -> None:
    file.grow(1 << 20)
    size = os.fstat(file.fd).st_size
    with inject(f"fail-grow:errno={errno.errorcode[number]}"):
        with pytest.raises(StoreFullError, match=r"the file cannot grow from .* free some space"):
            file.grow(1 << 30)
    assert os.fstat(file.fd).st_size == size
    file.grow(1 << 30)  # there is room again


# Arguments.


def test_open_store_explains_what_it_cannot_do(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"needs a GPU. On a CPU, use 'file'"):
        open_store(kind="gds", directories=[tmp_path], device=CPU)


# The store in host memory


class TestHostStore(StoreContract):
    checks_what_it_reads = False

    def make_store(self, directory: Path, **options: Any) -> Store:
        return HostStore(device=CPU, slab_bytes=MIB, **options)

    def corrupt(self, store: Store, extent: Extent) -> None:
        bit = torch.zeros(extent.nbytes, dtype=torch.uint8)
        store.read(extent, ByteRange.of(bit))
        bit[0] ^= 1
        store.write(extent, ByteRange.of(bit))


def test_memory_grows_by_slabs_and_shrinks_when_no_step_needs_it() -> None:
    host = HostStore(device=CPU, slab_bytes=MIB)
    with MultiStore([host]) as store:
        extents = [put(store, pattern(MIB - 5)) for _ in range(3)]
        assert host.host_bytes == 3 * MIB
        assert torch.equal(get(store, extents[2]), pattern(MIB - 5))
        for extent in extents:
            store.release(extent)
        for _ in range(4):
            store.trim()
        assert host.host_bytes == 0
        assert torch.equal(get(store, put(store, pattern(5))), pattern(5))
    assert host.host_bytes == 0


def test_no_more_memory_is_taken_than_the_capacity() -> None:
    host = HostStore(device=CPU, capacity=5 * MIB // 2, slab_bytes=2 * MIB)
    with MultiStore([host]) as store:
        put(store, pattern(5 * MIB // 2))
        assert host.host_bytes == 5 * MIB // 2


class Meagre(Device):
    left = 2

    def host_memory(self, nbytes: int) -> torch.Tensor:
        if not self.left:
            raise MemoryError
        self.left -= 1
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def test_no_more_memory_is_a_full_store_that_goes_on() -> None:
    with MultiStore([HostStore(device=Meagre(), slab_bytes=MIB)]) as store:
        extents = [put(store, pattern(MIB, seed)) for seed in range(2)]
        with pytest.raises(StoreFullError, match=r"lower store\.capacity or store\.host_capacity"):
            put(store, pattern(1))
        (load,) = store.take_loads()
        assert (load.room, load.in_service) == (2 * MIB, True)
        store.release(extents[0])
        assert torch.equal(get(store, put(store, pattern(MIB, 7))), pattern(MIB, 7))
        assert torch.equal(get(store, extents[1]), pattern(MIB, 1))
