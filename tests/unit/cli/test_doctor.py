"""``tba-offload doctor``: the path to each directory, by the stand-in for kvikio."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fake_kvikio
import pytest
from commands import call
from fake_kvikio import PinningDevice
from harness import CPU
from store_contract import descriptors

from tba_offload import device as streams
from tba_offload.store import doctor, gds

if TYPE_CHECKING:
    import types


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, kvikio: types.ModuleType) -> None:
    monkeypatch.setattr(streams, "default_device", lambda: PinningDevice())


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "default_device", lambda: CPU)


def findings_of(*arguments: str) -> dict[str, Any]:
    result = call("doctor", "--json", *arguments)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("available", "kind", "path"),
    [(True, "gds", "GDS"), (None, "file", "O_DIRECT"), (False, "file", "O_DIRECT")],
)
def test_each_directory_has_its_path_its_rates_and_remedies(
    *, available: bool | None, kind: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the nvidia-fs driver, without it, and without a cuFile that takes files."""
    fake_kvikio.install(compat=available is False)
    (tmp_path / "driver").mkdir()
    monkeypatch.setattr(gds, "NVIDIA_FS", tmp_path / "driver" / "stats")
    if available is not None:
        (tmp_path / "driver" / "stats").touch()
    (tmp_path / "drive").mkdir()
    before = descriptors()
    found = findings_of(str(tmp_path / "drive"))
    assert descriptors() == before
    assert list((tmp_path / "drive").iterdir()) == []
    each = found["directories"][str(tmp_path / "drive")]
    assert (each["store"]["kind"], each["store"]["path"]) in {(kind, path), ("file", "buffered")}
    assert min(each["bytes_per_second"].values()) > 0
    remedy = {True: "None", None: "modprobe nvidia-fs", False: "KVIKIO_COMPAT_MODE"}[available]
    assert remedy in str(each["store"]["reason"]) or each["store"]["path"] == "buffered"


@pytest.mark.usefixtures("cpu")
def test_doubts_about_a_directory_are_told() -> None:
    found = findings_of("/dev/shm")["directories"]["/dev/shm"]
    assert "tmpfs on" in found["location"]["words"]
    assert found["store"]["path"] == "buffered"
    assert any("still use memory" in doubt for doubt in found["location"]["findings"])


@pytest.mark.usefixtures("cpu")
def test_a_directory_that_cannot_be_used_is_status_1(tmp_path: Path) -> None:
    missing = Path("/dev/shm") / f"tba-test-{uuid.uuid4().hex}"
    result = call("doctor", tmp_path, tmp_path / "not" / "there", missing)
    assert result.exit_code == 1
    assert "cannot be used: 'not' does not exist; mount the drive" in result.stdout
    assert f"mkdir -p {missing}" in result.stdout
    assert "by    kind file, path" in result.stdout
    assert not missing.exists()


@pytest.mark.usefixtures("cpu")
def test_bench_measures_by_block_and_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "BLOCKS", (4096, 1 << 20))
    rows = findings_of("--bench", str(tmp_path))["directories"][str(tmp_path)]["bench"]
    assert [(row["threads"], row["block_bytes"]) for row in rows] == [
        (threads, nbytes) for threads in doctor.THREADS for nbytes in (4096, 1 << 20)
    ]
    assert all(min(row[name] for name in ("write", "read", "both")) > 0 for row in rows)
    assert list(tmp_path.iterdir()) == []
