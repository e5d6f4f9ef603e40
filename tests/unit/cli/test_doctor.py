"""What ``tba-offload doctor`` finds: the way to each directory, by the stand-in for kvikio."""

from __future__ import annotations

import json
import re
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fake_kvikio
import pytest
from click.testing import CliRunner, Result
from ordered_device import OrderedDevice
from store_contract import CPU, descriptors

from tba_offload import cli
from tba_offload.device import streams
from tba_offload.report.log import RunHeader, RunLogWriter, StepRecord
from tba_offload.report.updates import Update
from tba_offload.store import doctor, gds, posix, probe
from tba_offload.store.wear import Wear

if TYPE_CHECKING:
    import types


@pytest.fixture(autouse=True)
def small_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "EXTENT_BYTES", 1 << 16)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, kvikio: types.ModuleType) -> None:
    """A device with memory of its own, and kvikio."""
    assert kvikio.__name__ == "kvikio"
    monkeypatch.setattr(streams, "default_device", lambda: OrderedDevice(seconds=0.0))


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


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("driver", "nvidia_fs", "path", "advice"),
    [
        ({}, True, "GDS", None),
        ({}, False, "GDS without nvidia-fs", None),
        ({"is_gds_available": False}, False, "cuFile compatibility", "modprobe nvidia-fs"),
    ],
)
def test_each_directory_has_its_path_its_rates_and_advice(
    driver: dict[str, bool],
    nvidia_fs: bool,
    path: str,
    advice: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_kvikio.install(**driver)
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
    assert found["machine"]["kvikio"] == "fake"
    assert found["machine"]["cufile"] == "1.15"
    assert found["machine"]["nvidia_fs"] == ("2.26.6" if nvidia_fs else None)
    (each,) = found["directories"]
    assert set(each["ways"]) == {"file", "gds"}
    assert each["ways"]["gds"]["path"] == path
    for way in each["ways"].values():
        assert min(way["bytes_per_second"].values()) > 0
    assert each["auto"]["kind"] in each["ways"]
    assert f"through cuFile ({path})" in each["auto"]["why"]
    said = [sentence for sentence in each["advice"] if "direct I/O" not in sentence]
    assert [advice in sentence for sentence in said if advice] == ([True] if advice else [])
    assert bool(said) == bool(advice)


@pytest.mark.usefixtures("gpu")
def test_directories_of_one_machine_may_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directories = [tmp_path / "drive", tmp_path / "memory"]
    for directory in directories:
        directory.mkdir()
    monkeypatch.setattr(gds, "NVIDIA_FS", tmp_path)
    opened: list[bool] = []
    original = gds.GdsBackend

    def opening(directory: str, *arguments: Any) -> Any:
        opened.append(directories[1].samefile(directory))
        return original(directory, *arguments)

    monkeypatch.setattr(gds, "GdsBackend", opening)
    monkeypatch.setattr(posix, "file_system_magic", lambda fd: 0x01021994 if opened and opened[-1] else 0)
    found = findings_of(*map(str, directories))["directories"]
    assert found[0]["ways"]["gds"]["path"] == "GDS"
    assert "lies in memory" in found[1]["ways"]["gds"]["error"]
    assert [each["auto"]["kind"] for each in found][1] == "file"
    assert any("gdscheck -p" in sentence for sentence in found[1]["advice"])


@pytest.mark.usefixtures("gpu")
def test_without_cufile_it_says_what_would_help(tmp_path: Path) -> None:
    fake_kvikio.install(compat=True)
    (each,) = findings_of(str(tmp_path))["directories"]
    assert "GPUDirect Storage cannot be had there" in each["ways"]["gds"]["error"]
    assert each["auto"]["kind"] == "file"
    assert any("KVIKIO_COMPAT_MODE" in sentence for sentence in each["advice"])


@pytest.mark.usefixtures("gpu")
def test_what_is_missing_is_said_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    found = findings_of(str(tmp_path))
    assert found["machine"]["kvikio"] is None
    (each,) = found["directories"]
    assert each["ways"]["gds"]["error"] == "kvikio is not installed"
    assert each["auto"]["kind"] == "file"
    assert any("pip install 'tba-offload[gds-cu1" in sentence for sentence in each["advice"])


@pytest.mark.usefixtures("cpu")
def test_what_checksums_cost_is_said(tmp_path: Path) -> None:
    rate = findings_of(str(tmp_path))["machine"]["checksum_bytes_per_second"]
    assert 1e8 < rate < 1e12
    assert re.search(
        r"^checksums: [\d.]+ [MG]B/s, [\d.]+ s of processor time for each GiB that is written and read; "
        r"store\.checksum: false does without$",
        call(str(tmp_path)).stdout,
        re.MULTILINE,
    )


@pytest.mark.usefixtures("cpu")
def test_on_a_cpu_there_is_one_way(tmp_path: Path) -> None:
    (each,) = findings_of(str(tmp_path))["directories"]
    assert set(each["ways"]) == {"file"}
    assert each["auto"]["why"] == "activations lie in host memory, which drives reach directly"


@pytest.mark.usefixtures("cpu")
def test_the_default_is_the_directory_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert [each["directory"] for each in findings_of()["directories"]] == [str(tmp_path)]


@pytest.mark.usefixtures("cpu")
def test_a_directory_that_cannot_be_used_is_status_1(tmp_path: Path) -> None:
    result = call(str(tmp_path), str(tmp_path / "not" / "there"))
    assert result.exit_code == 1
    assert "cannot be used: 'not' does not exist; mount its drive" in result.stdout
    assert "auto  takes file" in result.stdout


@pytest.mark.usefixtures("gpu")
def test_no_directory_is_made() -> None:
    """Not even where training would make it: right below the root of a mounted file system."""
    missing = Path("/dev/shm") / f"tba-test-{uuid.uuid4().hex}"
    result = call(str(missing))
    assert result.exit_code == 1
    assert f"mkdir -p {missing}" in result.stdout
    assert not missing.exists()


@pytest.mark.usefixtures("gpu")
def test_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gds, "NVIDIA_FS", tmp_path / "none")
    said = call(str(tmp_path)).stdout.splitlines()
    head, checksums, directory, on, room, *rest = said
    file, direct, auto, *_ = [line for line in rest if not line.startswith("  wear")]
    assert head.endswith("kvikio fake; cuFile 1.15; nvidia-fs not found")
    assert checksums.startswith("checksums: ")
    assert directory == str(tmp_path)
    assert on.startswith("  on    ")
    assert re.fullmatch(r"  room  .* free of .*; of user \d+, mode 0700", room)
    assert file.startswith("  file  ")
    assert direct.startswith(
        "  gds   GDS without nvidia-fs, because cuFile moves bytes by PCIe peer-to-peer: writes "
    )
    assert auto.startswith("  auto  takes ")


@pytest.mark.usefixtures("cpu")
def test_a_way_that_hangs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hanging(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(doctor, "measure", hanging)
    result = call("--json", str(tmp_path))
    assert result.exit_code == 1
    (way,) = json.loads(result.stdout)["directories"][0]["ways"].values()
    assert way["error"] == "a transfer hangs"
    assert "store.kind" in way["remedy"]


@pytest.mark.usefixtures("cpu")
def test_it_says_where_a_directory_is_and_what_is_doubtful_there(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    own, others, memory = findings_of(str(tmp_path), str(tmp_path / "open"), "/dev/shm")["directories"]
    assert own["location"]["file_system"]["name"]
    assert own["location"]["free_bytes"] <= own["location"]["total_bytes"]
    assert own["location"]["mode"] == "700"
    assert not any("may remove what is in it" in found["what"] for found in own["findings"])
    assert any("every user may remove what is in it" in found["what"] for found in others["findings"])
    assert memory["location"]["file_system"] == {
        "name": "tmpfs",
        "place": "memory",
        "is_remote": False,
        "limits": ["tmpfs lies in host memory, so that what is offloaded still takes memory"],
        "mounted": memory["location"]["file_system"]["mounted"],
    }
    for each in (own, others, memory):
        assert each["advice"] == [found["remedy"] for found in each["findings"]]
    assert list((tmp_path / "open").iterdir()) == []


def log_of(path: Path, *, written: int, seconds: float) -> str:
    with RunLogWriter(path, RunHeader(strategy="offload")) as log:
        for number in range(1, 6):
            log.write(StepRecord(step=number, seconds=seconds, offloaded_bytes=written))
    return str(path)


def worn(used: float, written: int) -> Wear:
    return Wear("nvme0n1", "smartctl -j -a /dev/nvme0n1", used=used, written_bytes=written)


def with_wear(monkeypatch: pytest.MonkeyPatch, *wear: Wear) -> None:
    """Directories lie on drives that say this of themselves."""
    original = doctor.location_of
    monkeypatch.setattr(doctor, "location_of", lambda directory: original(directory)._replace(wear=wear))


@pytest.mark.usefixtures("cpu")
def test_how_long_drives_last_under_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terabyte in 86.4 s is a petabyte a day."""
    with_wear(monkeypatch, worn(10, 60 * 10**12))
    run = log_of(tmp_path / "run.jsonl", written=10**12, seconds=86.4)
    (tmp_path / "drive").mkdir()
    life = findings_of(str(tmp_path / "drive"), "--run", run)["life"]
    assert life["bytes_per_day"] == 10**15
    assert life["rated_bytes"] == 600 * 10**12
    assert life["used_bytes"] == 60 * 10**12
    assert life["days"] == 0.54
    life = findings_of(str(tmp_path / "drive"), "--run", run, "--rated", "2060TB", "--amplification", "2")[
        "life"
    ]
    assert (life["days"], life["rated_by"]) == (1.0, "as given")
    said = call(str(tmp_path / "drive"), "--written", "1TB", "--rated", "160TB").stdout
    assert (
        "life: 1.00 TB a day, times 1 that drives make of it, against 160 TB that they are rated for "
        "(as given), of which 60.0 TB are used up: 100 days\n"
    ) in said


@pytest.mark.usefixtures("cpu")
def test_a_drive_that_two_directories_share_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_wear(monkeypatch, worn(50, 10**12))
    directories = [tmp_path / "one", tmp_path / "other"]
    for directory in directories:
        directory.mkdir()
    assert findings_of(*map(str, directories), "--written", "1TB")["life"]["rated_bytes"] == 2 * 10**12


@pytest.mark.usefixtures("cpu")
def test_what_drives_do_not_tell_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_wear(
        monkeypatch, Wear("nvme0n1", trouble="neither smartctl nor nvme is installed", remedy="install")
    )
    assert findings_of(str(tmp_path), "--written", "1TB")["life"] is None
    said = call(str(tmp_path), "--written", "1TB").stdout
    assert "  wear  nvme0n1 does not tell: neither smartctl nor nvme is installed; install\n" in said
    assert "life: not known" in said


@pytest.mark.usefixtures("cpu")
def test_a_worn_drive_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_wear(monkeypatch, worn(97, 10**15))
    (each,) = findings_of(str(tmp_path))["directories"]
    (found,) = [found for found in each["findings"] if "rated life" in found["what"]]
    assert found["what"] == "nvme0n1 has used 97 % of its rated life"
    assert "store.write_bytes_per_day" in found["remedy"]


@pytest.mark.usefixtures("cpu")
def test_what_contradicts_is_refused(tmp_path: Path) -> None:
    run = log_of(tmp_path / "run.jsonl", written=1, seconds=1.0)
    assert call(str(tmp_path), "--run", run, "--written", "1TB").exit_code == 2
    assert call(str(tmp_path), "--amplification", "inf").exit_code == 2
    for alone in (("--rated", "600TB"), ("--amplification", "2")):
        assert "give --run or --written" in call(str(tmp_path), *alone).output
    assert "name each directory once" in call(str(tmp_path), str(tmp_path)).output
    assert call(str(tmp_path), "--run", str(tmp_path / "none.jsonl")).exit_code == 1


@pytest.mark.usefixtures("cpu")
def test_versions_that_were_not_tested_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings_of(str(tmp_path))["machine"]["findings"] == []
    monkeypatch.setattr("torch.__version__", "2.99.1+cpu")
    (found,) = findings_of(str(tmp_path))["machine"]["findings"]
    assert found["what"].startswith("torch 2.99.1+cpu was not tested")
    assert "but 2.10 to 2.15 were" in found["what"]


@pytest.mark.usefixtures("cpu")
def test_what_optimizer_states_cost_is_told_for_a_number_of_parameters(tmp_path: Path) -> None:
    directories = [tmp_path / "one", tmp_path / "other"]
    for directory in directories:
        directory.mkdir()
    found = findings_of(*map(str, directories), "--parameters", "1.5K")
    rates = [each["ways"]["file"]["bytes_per_second"]["both"] for each in found["directories"]]
    states = found["states"]
    assert states["states_bytes"] == 8 * 1500
    assert states["bytes_per_second"] == max(rates)  # both lie on one drive
    assert states["seconds"] == 2 * 8 * 1500 / max(rates)
    assert states["fits"] == ["step", "backward"]
    assert "; room in " in call(str(tmp_path), "--parameters", "1500").stdout.splitlines()[-1]


def test_states_that_have_no_room_are_told() -> None:
    assert Update(10**9, 10**9, free_bytes=8 * 10**9).fits == ("step",)
    too_many = Update(10**9, 10**9, free_bytes=8 * 10**9 - 1)
    assert too_many.fits == ()
    assert str(too_many).endswith("there is no room for them in 7.45 GiB")
    assert too_many.seconds == 16.0


@pytest.mark.parametrize("text", ["x", "-1", "0", "7 Q", "1e9", "0.0001"])
def test_what_is_no_number_of_parameters_is_refused(text: str, tmp_path: Path) -> None:
    result = call(str(tmp_path), "--parameters", text)
    assert result.exit_code == 2
    assert "is no number of parameters; write 7B" in result.output
