"""Which kind of store ``kind: auto`` takes, on each drive."""

from __future__ import annotations

import errno
import sys
from typing import TYPE_CHECKING, Any

import fake_kvikio
import pytest
import torch
from fake_kvikio import PinningDevice
from store_contract import CPU, descriptors, get, pattern, put

from tba_offload.errors import ConfigError
from tba_offload.store import gds, open_store

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
        assert store.description["chosen"] == {"why": "the nvidia-fs driver is loaded"}
        data = pattern(100_003)
        assert torch.equal(get(store, put(store, data)), data)
    assert descriptors() == before


@pytest.mark.usefixtures("kvikio")
def test_auto_is_file_without_the_driver(
    device: PinningDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gds, "NVIDIA_FS", tmp_path / "none")
    with open_store(directories=[tmp_path], device=device) as store:
        assert store.kind == "file"
        told: Any = store.description["chosen"]
        data = pattern((8 << 20) + 5)  # in two parts, by way of slabs
        assert torch.equal(get(store, put(store, data)), data)
    assert told["why"] == "the nvidia-fs driver of GPUDirect Storage is not loaded"


@pytest.mark.usefixtures("driver")
def test_auto_is_file_without_kvikio(
    device: PinningDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with open_store(directories=[tmp_path], device=device) as store:
        assert store.kind == "file"
        told: Any = store.description["chosen"]
    assert told["why"] == "GPUDirect Storage needs kvikio, which is not installed"


@pytest.mark.usefixtures("kvikio", "driver")
def test_auto_is_file_on_each_drive_whose_files_cufile_refuses(
    device: PinningDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = [tmp_path / "refused", tmp_path / "taken"]
    for directory in directories:
        directory.mkdir()
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
        assert "GPUDirect Storage cannot be had there: not taken" in parts[0]["chosen"]["why"]
    assert descriptors() == before


@pytest.mark.parametrize("value", [0, 257, 2.5, True, "many"])
def test_a_number_of_threads_is_a_number(value: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no number of threads; write one from 1 to 256"):
        open_store(kind="file", directories=[tmp_path], device=CPU, writers=value)
