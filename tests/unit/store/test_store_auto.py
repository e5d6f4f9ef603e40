"""Which kind of store ``kind: auto`` takes, on each drive; and each kind on a GPU."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_kvikio
import pytest
import stub_driver
import torch
from fake_kvikio import HAS_KVIKIO, PinningDevice
from harness import made
from places import ROOT
from store_contract import at_lead, descriptors, get, pattern, put

from tba_offload.device import Accelerator, ByteRange
from tba_offload.device.digest import sums
from tba_offload.store import Transfer, gds, open_store


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


# The real kvikio on a stub driver


# The real kvikio


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    assert stub_driver.PACKAGES.is_dir(), (
        f"bash tests/run.sh installs kvikio, and so does: {stub_driver.INSTALL}"
    )
    folder = tmp_path_factory.mktemp("driver")
    stub_driver.build(folder)
    return stub_driver.variables(folder)


def test_the_contract_and_every_fault_on_the_real_kvikio(variables: dict[str, str]) -> None:
    """The tests of ``gds_on_stub_driver.py``."""
    tests = Path(__file__).with_name("gds_on_stub_driver.py")
    alone = ["-p", "no:xdist", "-p", "no:cacheprovider"]
    # A CUDA build of PyTorch asks the stub for devices, and warns that its own calls are not there.
    no_gpu = ["-W", "ignore:CUDA initialization:UserWarning"]
    command = [sys.executable, "-m", "pytest", "-q", *alone, *no_gpu, tests]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    (passed,) = re.findall(r"^(\d+) passed", done.stdout, re.MULTILINE)
    assert int(passed) > 30
    assert "skipped" not in done.stdout


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
