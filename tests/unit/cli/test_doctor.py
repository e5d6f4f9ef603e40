"""``tba-offload doctor``: the path to each directory, by the stand-in for kvikio."""

from __future__ import annotations

import json
import re
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fake_kvikio
import pytest
import yaml
from click.testing import CliRunner, Result
from fake_kvikio import PinningDevice
from store_contract import CPU, descriptors

from tba_offload import cli
from tba_offload.config import OffloadConfig
from tba_offload.device import device as streams
from tba_offload.store import doctor, gds

if TYPE_CHECKING:
    import types


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, kvikio: types.ModuleType) -> None:
    """A device with memory of its own, and kvikio."""
    monkeypatch.setattr(streams, "default_device", lambda: PinningDevice())


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "default_device", lambda: CPU)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["doctor", *arguments])


def findings_of(*arguments: str) -> dict[str, Any]:
    result = call("--json", *arguments)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def remedies(directory: dict[str, Any]) -> str:
    return "; ".join(found["remedy"] for found in directory["findings"])


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("available", "nvidia_fs", "path", "auto"),
    [
        (True, True, "GDS", "gds"),
        (True, False, "GDS without nvidia-fs", "file"),
        (False, False, "cuFile compatibility", "file"),
    ],
)
def test_each_directory_has_its_path_its_rates_and_remedies(
    *,
    available: bool,
    nvidia_fs: bool,
    path: str,
    auto: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_kvikio.install(is_gds_available=available)
    monkeypatch.setattr(gds, "NVIDIA_FS", tmp_path / "driver" / "stats")
    if nvidia_fs:
        (tmp_path / "driver").mkdir()
        (tmp_path / "driver" / "stats").touch()
        (tmp_path / "driver" / "version").write_text("version: 2.26.6\n")
    (tmp_path / "drive").mkdir()
    before = descriptors()
    found = findings_of(str(tmp_path / "drive"))
    assert descriptors() == before
    assert list((tmp_path / "drive").iterdir()) == []
    machine = found["machine"]
    assert (machine["kvikio"], machine["cufile"]) == ("fake", "1.15")
    assert machine["nvidia_fs"] == ("2.26.6" if nvidia_fs else None)
    (each,) = found["directories"]
    assert (each["ways"]["gds"]["path"], each["auto"]["kind"]) == (path, auto)
    assert all(min(way["bytes_per_second"].values()) > 0 for way in each["ways"].values())
    assert ("modprobe nvidia-fs" in remedies(each)) == (path == "cuFile compatibility")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("missing", ["kvikio", "cuFile"])
def test_what_is_missing_is_told_with_its_remedy(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "kvikio":
        monkeypatch.setitem(sys.modules, "kvikio", None)
    else:
        fake_kvikio.install(compat=True)
    (each,) = findings_of(str(tmp_path))["directories"]
    assert each["auto"]["kind"] == "file"
    error, remedy = {
        "kvikio": ("kvikio is not installed", "pip install 'tba-offload[gds-cu1"),
        "cuFile": ("GPUDirect Storage cannot be had there", "KVIKIO_COMPAT_MODE"),
    }[missing]
    assert error in each["ways"]["gds"]["error"]
    assert remedy in remedies(each)


@pytest.mark.usefixtures("cpu")
def test_doubts_about_a_directory_are_told(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    one, other, memory = findings_of(str(tmp_path), str(tmp_path / "other"), "/dev/shm")["directories"]
    assert one["location"]["device"] == other["location"]["device"]
    assert f"it lies on the same device as {tmp_path}" in [found["what"] for found in other["findings"]]
    assert memory["location"]["file_system"] == "tmpfs"
    assert memory["ways"]["file"]["path"] == "buffered"
    assert any("takes memory" in found["what"] for found in memory["findings"])


@pytest.mark.usefixtures("cpu")
def test_a_directory_that_cannot_be_used_is_status_1(tmp_path: Path) -> None:
    """None is made, not even where training would make one: right below a mounted file system."""
    missing = Path("/dev/shm") / f"tba-test-{uuid.uuid4().hex}"
    result = call(str(tmp_path), str(tmp_path / "not" / "there"), str(missing), "--bench")
    assert result.exit_code == 1
    assert "cannot be used: 'not' does not exist; mount its drive" in result.stdout
    assert f"mkdir -p {missing}" in result.stdout
    assert "auto  takes file" in result.stdout
    assert "block" not in result.stdout
    assert not missing.exists()


@pytest.mark.usefixtures("cpu")
def test_bench_ends_with_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "BLOCKS", (4096, 1 << 20))
    said = call("--bench", str(tmp_path)).stdout
    assert re.search(
        r"^  1\.00 MiB +4 +[\d.]+ [KMG]B/s +[\d.]+ [KMG]B/s +[\d.]+ [KMG]B/s$", said, re.MULTILINE
    )
    config = OffloadConfig.from_yaml(said[said.index("store:") :])
    assert config.store.directories == (tmp_path,)
    assert config.store.writers in doctor.THREADS
    found = findings_of("--bench", str(tmp_path))
    assert len(found["bench"][str(tmp_path)]) == 2 * len(doctor.THREADS)
    OffloadConfig.from_yaml(yaml.safe_dump(found["policy"]))
    assert list(tmp_path.iterdir()) == []
