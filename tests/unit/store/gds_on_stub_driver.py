"""The store on the real kvikio, in a process with a driver and a cuFile of host memory.

``test_store_auto.py`` starts it; see there, and ``stub_driver.py``.
"""

from __future__ import annotations

import errno
import inspect
import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fake_kvikio
import kvikio
import pytest
import stub_driver
import torch
from store_contract import StoreContract, descriptors, get, pattern, put
from stub_driver import StubDevice, count, tell, told

from tba_offload.errors import ShortTransferError, StoreError, StoreFullError
from tba_offload.store import MultiStore, gds, open_store
from tba_offload.store.gds import CuFile, GdsStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tba_offload.store import Extent, Store

DEVICE = StubDevice()
EIO, ENOSPC = -errno.EIO, -errno.ENOSPC
HANDLE_REFUSED, GPU_MEMORY_NOT_TAKEN = 5027, -5024  # of cuFile: the file is not registered; nor the memory


@pytest.fixture(autouse=True)
def no_fault() -> Iterator[None]:
    """A fault that a test asks for ends with it, and no file stays registered."""
    stub_driver.start_counting()
    yield
    for name in ("refuse", "result", "most", "driver"):
        tell(name, 0)
    assert told("handles") == 0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MultiStore]:
    with MultiStore([GdsStore(tmp_path, device=DEVICE)]) as store:
        stub_driver.start_counting()
        yield store


WAITS = ("default_stream_waits", "blocking_streams", "copies", "pinned")
"""What training and transfers would wait for each other by."""
NONE = dict.fromkeys(WAITS, 0)


def waits() -> dict[str, int]:
    return {name: count(name) for name in WAITS}


class TestGdsStore(StoreContract):
    def make_store(self, directory: Path, **options: Any) -> Store:
        return GdsStore(directory, device=DEVICE, **options)

    def corrupt(self, store: Store, extent: Extent) -> None:
        assert isinstance(store, GdsStore)
        at = extent.offset + extent.lead
        os.pwrite(store.fd, bytes([os.pread(store.fd, 1, at)[0] ^ 1]), at)


def test_it_is_the_real_one() -> None:
    assert Path(kvikio.__file__).is_relative_to(stub_driver.PACKAGES)
    assert kvikio.cufile_driver.libcufile_version() == (1, 15)


# What transfers wait for


@pytest.mark.parametrize("nbytes", [1, 4095, 16 << 10, 5_000_001, 40 << 20])
def test_a_transfer_waits_for_nothing_of_the_device(nbytes: int, store: MultiStore) -> None:
    data = pattern(nbytes)
    assert torch.equal(get(store, put(store, data)), data)
    assert waits() == NONE
    assert told("transfers") == 2


# Which way bytes take


@pytest.mark.parametrize(
    ("driver", "nvidia_fs", "path"),
    [(2, True, "GDS"), (2, False, "GDS without nvidia-fs"), (0, False, "cuFile compatibility")],
)
def test_the_path_is_told(
    driver: int, nvidia_fs: bool, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell("driver", driver)
    # kvikio asks for the properties once in a process
    monkeypatch.setattr(kvikio.cufile_driver, "get", lambda _: told("driver") > 0)
    stats = tmp_path / "stats"
    if nvidia_fs:
        stats.touch()
    monkeypatch.setattr(gds, "NVIDIA_FS", stats)
    with closing(GdsStore(tmp_path, device=DEVICE)) as store:
        assert store.description["path"] == path
        assert (store.description["reason"] is None) == (path == "GDS")


def test_a_file_that_cufile_refuses_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not go by system calls, and by the page cache, under the name of cuFile."""
    tell("refuse", HANDLE_REFUSED)
    before = descriptors()
    with pytest.raises(
        StoreError, match=r"GPUDirect Storage is not available in this directory: .*Use store\.kind: file"
    ) as caught:
        GdsStore(tmp_path, device=DEVICE)
    assert f"cuFile error {HANDLE_REFUSED}" in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert descriptors() == before
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(gds, "NVIDIA_FS", tmp_path)
    with open_store(kind="auto", directories=[tmp_path], device=DEVICE) as store:
        assert store.kind == "file"
    assert waits() == NONE


def test_where_kvikio_would_not_ask_cufile_it_says_why(tmp_path: Path) -> None:
    with kvikio.defaults.set("compat_mode", kvikio.CompatMode.ON):
        with pytest.raises(StoreError, match="KVIKIO_COMPAT_MODE is ON, libcufile is not found, or"):
            GdsStore(tmp_path, device=DEVICE)
    assert waits() == NONE


def test_a_file_that_is_taken_but_not_served_is_an_error_when_it_is_opened(tmp_path: Path) -> None:
    tell("result", EIO)
    before = descriptors()
    with pytest.raises(StoreError, match="write of 4096 bytes at offset 0 failed: Input/output error"):
        GdsStore(tmp_path, device=DEVICE)
    assert descriptors() == before
    assert list(tmp_path.iterdir()) == []


# Faults of a drive


def test_a_short_transfer_goes_on_until_nothing_moves(tmp_path: Path) -> None:
    file = GdsStore(tmp_path, device=DEVICE)
    with MultiStore([file]) as store:
        tell("most", 4096)
        extent = put(store, pattern(10_000))
        assert torch.equal(get(store, extent), pattern(10_000))
        os.ftruncate(file.fd, extent.offset + 5000)
        with pytest.raises(ShortTransferError, match=r"read of 10000 bytes at .* stopped after 5000"):
            get(store, extent)


@pytest.mark.parametrize(
    ("result", "kind", "said"),
    [
        (EIO, StoreError, "Input/output error"),
        (ENOSPC, StoreFullError, "No space left on device"),
        (GPU_MEMORY_NOT_TAKEN, StoreError, "cuFile error 5024"),
    ],
)
def test_what_cufile_says_reaches_the_waiter(
    result: int, kind: type[StoreError], said: str, store: GdsStore
) -> None:
    extent = put(store, pattern(5000))
    tell("result", result)
    with pytest.raises(kind, match=said) as caught:
        put(store, pattern(5000))
    assert caught.value.errno == (errno.ENOSPC if kind is StoreFullError else errno.EIO)
    assert store.place(extent) in str(caught.value)
    with pytest.raises(kind, match=said):
        get(store, extent)
    assert waits() == NONE


# The stand-in of other tests


def test_the_stand_in_has_the_names_and_arguments_of_the_real_ones() -> None:
    for name in ("__init__", "read", "write", "close"):
        real, fake = (inspect.signature(getattr(kind, name)) for kind in (CuFile, fake_kvikio.CuFile))
        assert real == fake
    assert isinstance(kvikio.defaults.is_compat_mode_preferred(), bool)
    assert isinstance(kvikio.cufile_driver.get("is_gds_available"), bool)
    assert len(kvikio.cufile_driver.libcufile_version()) == 2
