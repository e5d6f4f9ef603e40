"""``init`` writes a policy for what the machine has; ``check`` judges one by a number of layers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from commands import call
from harness import CPU

from tba_offload import device as streams
from tba_offload.config import SCHEMA_URL, load_config

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "default_device", lambda: CPU)
    monkeypatch.chdir(tmp_path)


POLICY = """\
default: offload
layers:
  - match: "0-3"
    placement: recompute
  - match: "last 2"
    placement: keep
"""


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    return path


def test_json_is_one_object_and_nothing_else(policy: Path) -> None:
    policy.write_text(f"{POLICY}states:\n  when: backward\nweights:\n  frozen: offload-25%\n")
    result = call("check", policy, "--layers", "6", "--json")
    assert json.loads(result.stdout) == {
        "layers": [
            {"layers": "0-3", "placement": "recompute", "why": "rule '0-3' (line 3)"},
            {"layers": "4-5", "placement": "keep", "why": "rule 'last 2' (line 5)"},
        ],
        "states": "offload (optimizer updates run in backward())",
        "weights": "offload-25% (frozen weights)",
        "not_judged": [],
        "warnings": [],
        "problems": [],
    }
    assert call("check", policy, "--layers", "6").stdout.splitlines()[-2:] == [
        "states: offload (optimizer updates run in backward())",
        "weights: offload-25% (frozen weights)",
    ]


def test_everything_wrong_is_told_by_line(policy: Path) -> None:
    policy.write_text(POLICY.replace("last 2", "30") + "on_full: drop\nbudget: {activation: 1GiB}\n")
    result = call("check", policy, "--layers", 24)
    assert (result.exit_code, result.stdout) == (1, "")
    messages = result.stderr.splitlines()
    assert [message.split(": ")[1] for message in messages] == [f"{policy}:{line}" for line in (5, 7, 8)]
    assert "the rule '30' (line 5) matches no layer; the layers are 0-23" in messages[0]
    result = call("check", policy, "--layers", 24, "--json")
    assert result.exit_code == 1
    problems = json.loads(result.stdout)["problems"]
    assert [(problem["line"], f"Error: {problem['message']}") for problem in problems] == [
        *zip((5, 7, 8), messages, strict=True)
    ]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "Missing option '--layers'"),
        (["many"], "'many' must be a number of layers"),
        (["12", "decoder:12"], "name each stack of layers"),
    ],
)
def test_a_wrong_command_line_has_exit_status_2(layers: list[str], message: str, policy: Path) -> None:
    result = call("check", policy, *(word for number in layers for word in ("--layers", number)))
    assert result.exit_code == 2
    assert message in result.stderr


# init


def test_it_writes_a_policy_that_check_takes(tmp_path: Path) -> None:
    result = call("init", tmp_path, "-o", "own.yaml")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "own.yaml").read_text()
    assert text.startswith(f"# yaml-language-server: $schema={SCHEMA_URL}\n")
    assert sum(line.lstrip().startswith("#") for line in text.splitlines()) >= 10
    config = load_config(tmp_path / "own.yaml")
    assert [str(each) for each in config.store.directories] == [str(tmp_path)]
    assert (config.default, config.store.kind, config.on_full) == ("auto", "auto", "keep")
    assert call("check", "own.yaml", "--layers", 8).exit_code == 0


def test_what_is_commented_out_can_be_taken_in(tmp_path: Path) -> None:
    call("init", tmp_path)
    policy = tmp_path / "policy.yaml"
    settings = ("layers:", '  - match: "last 2"', "    placement: keep", "budget:", "  in_flight_bytes")
    text = policy.read_text()
    for setting in (*settings, "  activation_bytes", "  device_bytes", "capacity", "write_bytes_per_day"):
        assert f"# {setting}" in text
        text = text.replace(f"# {setting}", setting)
    policy.write_text(text)
    config = load_config(policy)
    assert config.store.write_bytes_per_day == 5 * 10**12
    assert None not in {config.budget.activation_bytes, config.budget.device_bytes}
    assert [rule.match for rule in config.layers] == ["last 2"]


def test_a_directory_that_cannot_be_used_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "away")
    for path, message in {
        tmp_path / "not" / "there": "'not' does not exist; mount the drive",
        tmp_path / "file": "'file' is a file; choose a directory",
        tmp_path / "link": f"mkdir -p {tmp_path / 'away'}",
    }.items():
        result = call("init", path)
        assert result.exit_code == 1
        assert message in result.stderr
        assert "Errno" not in result.stderr
    assert not (tmp_path / "policy.yaml").exists()


def test_without_directories_it_is_that_of_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or mount points of NVMe drives, where there are some: no more than one for each."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = call("init")
    assert result.exit_code == 0, result.output
    found = load_config(tmp_path / "policy.yaml").store.directories
    devices = {each.stat().st_dev: each for each in found}
    assert len(devices) == len(found)
    assert devices.get(tmp_path.stat().st_dev, tmp_path) == tmp_path
    assert all(f"  {each}: " in result.stdout for each in found)
