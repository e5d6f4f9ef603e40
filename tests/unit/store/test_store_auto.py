"""Which kind of store ``kind: auto`` takes, on each drive; and each kind on a GPU."""

from __future__ import annotations

import errno
import sys
from typing import TYPE_CHECKING, Any

import fake_kvikio
import pytest
import torch
from fake_kvikio import HAS_KVIKIO, PinningDevice
from harness import made
from store_contract import descriptors, get, pattern, put

from tba_offload.device import Accelerator, ByteRange
from tba_offload.store import Transfer, gds, open_store

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def device() -> PinningDevice:
    return PinningDevice()


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nvidia-fs driver is loaded."""
    (tmp_path / "driver").touch()
    monkeypatch.setattr(gds, "NVIDIA_FS", tmp_path / "driver")


@pytest.mark.usefixtures("kvikio", "driver")
def test_auto_is_gds_where_the_driver_is_loaded(device: PinningDevice, tmp_path: Path) -> None:
    before = descriptors()
    with open_store(directories=[tmp_path], device=device) as store:
        assert store.kind == "gds"
        assert (store.description["path"], store.description["reason"]) == ("GDS", None)
        data = pattern(100_003)
        assert torch.equal(get(store, put(store, data)), data)
    assert descriptors() == before


@pytest.mark.usefixtures("driver")
def test_auto_is_file_without_kvikio(
    device: PinningDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with open_store(directories=[tmp_path], device=device) as store:
        assert store.kind == "file"
        assert "needs kvikio (import of kvikio halted" in str(store.description["reason"])


@pytest.mark.usefixtures("kvikio", "driver")
def test_auto_is_file_on_each_drive_whose_files_cufile_refuses(
    device: PinningDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = [made(tmp_path / "refused"), made(tmp_path / "taken")]
    refusals = iter([OSError(errno.EOPNOTSUPP, "not taken")])
    original = fake_kvikio.CuFile.__init__

    def refusing(file: fake_kvikio.CuFile, fd: int) -> None:
        for error in refusals:
            raise error
        original(file, fd)

    monkeypatch.setattr(fake_kvikio.CuFile, "__init__", refusing)
    before = descriptors()
    with open_store(directories=directories, device=device) as store:
        parts: Any = store.description["stores"]
        assert [part["kind"] for part in parts] == ["file", "gds"]
        assert "GPUDirect Storage is not available in this directory: not taken" in parts[0]["reason"]
    assert descriptors() == before


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [1, 4097, 20_000_001])
@pytest.mark.parametrize("kind", ["file", "host", "gds"])
def test_gpu_memory_comes_back(kind: str, nbytes: int, tmp_path: Path) -> None:
    if kind == "gds" and not HAS_KVIKIO:
        pytest.skip("kvikio is not installed: pip install 'tba-offload[gds-cu13]'")
    device = Accelerator()
    places: dict[str, Any] = {} if kind == "host" else {"directories": [tmp_path]}
    with open_store(kind=kind, capacity=256 << 20, device=device, **places) as store:
        data = pattern(nbytes).cuda()
        written = Transfer(ByteRange.of(data), device.event())
        store.write([written])
        store.wait(written)
        target = torch.zeros_like(data)
        read = Transfer(ByteRange.of(target), device.event(), extent=written.extent)
        store.read([read])
        store.wait(read)
        assert torch.equal(target, data)
