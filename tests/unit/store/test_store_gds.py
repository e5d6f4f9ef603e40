"""The store on kvikio: with a stand-in on host memory everywhere, with kvikio itself where there is a GPU."""

from __future__ import annotations

import builtins
import errno
import inspect
from typing import TYPE_CHECKING, Any

import fake_kvikio
import pytest
import torch
from fake_kvikio import HAS_KVIKIO
from places import SUPPORT
from test_store_file import flip_a_bit

from tba_offload.device import Accelerator, ByteRange
from tba_offload.device.checksum import sums
from tba_offload.errors import (
    MissingDependencyError,
    ShortTransferError,
    StoreError,
    StoreFullError,
    UnsupportedError,
)
from tba_offload.store import gds, open_store
from tba_offload.store.gds import GdsStore
from tba_offload.testing.store_contract import (
    CPU,
    PATIENCE,
    StoreContract,
    at_lead,
    descriptors,
    get,
    pattern,
    put,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tba_offload.store.base import ActivationStore, Extent


@pytest.mark.usefixtures("kvikio")
class TestGdsStore(StoreContract):
    expression = (
        f"(__import__('sys').path.append({str(SUPPORT)!r}), "
        "__import__('fake_kvikio').install(), "
        "__import__('tba_offload.store.gds').store.gds.GdsStore(directory, device=CPU))[2]"
    )

    def make_store(self, directory: Path, **options: Any) -> ActivationStore:
        return GdsStore(directory, device=CPU, **options)

    def corrupt(self, store: ActivationStore, extent: Extent) -> None:
        assert isinstance(store, GdsStore)
        flip_a_bit(store._file.fd, extent.offset + extent.lead)


# Which way bytes take


@pytest.mark.parametrize(
    ("driver", "nvidia_fs", "path"),
    [
        ({"compat": True}, True, "kvikio POSIX"),
        ({}, True, "GDS"),
        ({}, False, "GDS without nvidia-fs"),
        ({"is_gds_available": False}, False, "cuFile compatibility"),
    ],
)
def test_the_path_is_told(
    driver: dict[str, bool],
    nvidia_fs: bool,
    path: str,
    kvikio: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_kvikio.install(**driver)
    stats = tmp_path / "stats"
    if nvidia_fs:
        stats.touch()
    monkeypatch.setattr(gds, "_NVIDIA_FS", stats)
    with GdsStore(tmp_path, device=CPU) as store:
        assert store.description["path"] == path
        assert (store.description["reason"] is None) == (path == "GDS")
        assert store.description["kvikio"] == "fake"


@pytest.mark.usefixtures("kvikio")
@pytest.mark.parametrize(("own", "expected"), [(None, 8), ("3", 1)])
def test_threads_are_set_unless_the_user_did(
    own: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVIKIO_NTHREADS", raising=False)
    if own is not None:
        monkeypatch.setenv("KVIKIO_NTHREADS", own)
    with GdsStore(tmp_path, device=CPU) as store:
        assert store.description["kvikio_threads"] == expected


# Faults


def test_a_short_transfer_is_an_error(kvikio: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with GdsStore(tmp_path, device=CPU) as store:
        extent = put(store, pattern(10_000))
        monkeypatch.setattr(kvikio.CuFile, "limit", 4096)
        with pytest.raises(ShortTransferError, match="read of 10000 bytes at offset 0 stopped after 4096"):
            get(store, extent)
        with pytest.raises(ShortTransferError, match=r"write of 10000 bytes .* stopped after 4096"):
            put(store, pattern(10_000))


@pytest.mark.parametrize(
    ("said", "kind"),
    [("KvikIO failure: Input/output error", StoreError), ("No space left on device", StoreFullError)],
)
def test_what_kvikio_says_reaches_the_waiter(
    said: str, kind: type[StoreError], kvikio: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError(said)

    with GdsStore(tmp_path, device=CPU) as store:
        monkeypatch.setattr(kvikio.CuFile, "pwrite", failing)
        with pytest.raises(kind, match=said) as caught:
            put(store, pattern(5000))
        assert caught.value.errno == (errno.ENOSPC if kind is StoreFullError else errno.EIO)
        assert str(tmp_path) in str(caught.value)


def test_a_file_that_kvikio_cannot_open_is_an_error_and_leaves_nothing(
    kvikio: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("KvikIO failure: no cuFile here")

    monkeypatch.setattr(kvikio.CuFile, "__init__", failing)
    before = descriptors()
    with pytest.raises(StoreError, match=r"cannot open files there: .*no cuFile here; use store\.kind: file"):
        GdsStore(tmp_path, device=CPU)
    assert descriptors() == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "missing"), [(ImportError("no module"), "kvikio"), (RuntimeError("cannot open"), "libcufile")]
)
def test_a_library_that_is_missing_is_named(
    error: Exception, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def failing(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("kvikio"):
            raise error
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", failing)
    for version, extra in ((None, "gds-cu12"), ("12.9", "gds-cu12"), ("13.0", "gds-cu13")):
        monkeypatch.setattr(torch.version, "cuda", version)
        with pytest.raises(MissingDependencyError, match=rf"{missing}, .* 'tba-offload\[{extra}\]'"):
            gds.import_kvikio()


@pytest.mark.usefixtures("kvikio")
def test_activations_on_the_cpu_need_no_gds(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="moves GPU memory; on a CPU use 'file'"):
        open_store(kind="gds", directories=[tmp_path], device=CPU)


# Sums


@pytest.mark.parametrize("nbytes", [1, 7, 8, 4095, 4096, 4097, 100_003])
def test_sums_tell_every_changed_byte_and_no_address(nbytes: int) -> None:
    data = pattern(nbytes)
    expected = sums(data)
    moved = at_lead(nbytes, 3, 4096).copy_(data)
    assert sums(moved) == expected
    assert len(expected) <= 4096 + 8 * (nbytes // 4096) + 4096
    for place in {0, nbytes // 2, nbytes - 1}:
        changed = data.clone()
        changed[place] ^= 1
        assert sums(changed) != expected


def test_sums_tell_blocks_that_changed_places() -> None:
    data = pattern(5 * 4096)
    assert sums(data.view(5, 4096)[[0, 2, 1, 3, 4]].flatten()) != sums(data)


# kvikio itself


@pytest.mark.skipif(not HAS_KVIKIO, reason="kvikio is not installed: pip install 'tba-offload[gds-cu13]'")
def test_the_stand_in_has_the_names_and_arguments_of_kvikio() -> None:
    kvikio = gds.import_kvikio()
    for name in ("pread", "pwrite"):
        real = inspect.signature(getattr(kvikio.CuFile, name))
        fake = inspect.signature(getattr(fake_kvikio.CuFile, name))
        assert list(real.parameters) == list(fake.parameters)
    assert callable(kvikio.defaults.get)
    assert callable(kvikio.defaults.set)
    assert kvikio.defaults.get("num_threads") >= 1
    assert isinstance(kvikio.defaults.is_compat_mode_preferred(), bool)
    assert isinstance(kvikio.cufile_driver.get("is_gds_available"), bool)
    assert len(kvikio.cufile_driver.libcufile_version()) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_KVIKIO, reason="kvikio is not installed: pip install 'tba-offload[gds-cu13]'")
@pytest.mark.parametrize("nbytes", [1, 4097, 5_000_001, 64 << 20])
def test_gpu_memory_comes_back(tmp_path: Path, nbytes: int) -> None:
    device = Accelerator()
    with GdsStore(tmp_path, device=device) as store:
        data = pattern(nbytes).cuda()
        extent = store.reserve(nbytes, data.data_ptr())
        store.write(extent, ByteRange.of(data), device.event()).wait(PATIENCE)
        target = torch.zeros_like(data)
        store.read(extent, ByteRange.of(target), device.event(), padded=True).wait(PATIENCE)
        assert torch.equal(target, data)
