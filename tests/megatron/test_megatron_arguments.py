"""The flags of the training scripts: what they mean, and what they refuse."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tba_offload.config import BudgetConfig, OffloadConfig, StatesConfig, StoreConfig
from tba_offload.config.policy import Objective, Placement, Rule
from tba_offload.errors import ConfigError
from tba_offload.megatron.arguments import (
    CONFLICTS,
    MASTERS_CONFLICTS,
    STATES_CONFLICTS,
    Conflict,
    add_arguments,
    config_of,
    refuse_conflicts,
)

GIB = 2**30


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("pretrain_gpt.py", allow_abbrev=False)
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--recompute-granularity", choices=["full", "selective"])
    parser.add_argument("--cpu-offloading", action="store_true")
    parser.add_argument("--distribute-saved-activations", action="store_true")
    parser.add_argument("--cuda-graph-impl", default="none")
    return add_arguments(parser)


def read(*flags: str) -> argparse.Namespace:
    return make_parser().parse_args(flags)


def test_flags_alone_make_a_policy(tmp_path: Path) -> None:
    directories = [str(tmp_path / name) for name in "ab"]
    for directory in directories:
        Path(directory).mkdir()
    flags = read(
        *("--tba-placement", "auto", "--tba-activation-bytes", "12GiB", "--tba-in-flight-bytes", "1GiB"),
        *("--tba-device-bytes", "70GiB"),
        *("--tba-store", "file", "--tba-checksum", "--tba-directory", *directories),
        *("--tba-objective", "memory", "--tba-host-capacity", "2GiB"),
    )
    assert config_of(flags) == OffloadConfig(
        default=Placement.AUTO,
        budget=BudgetConfig(
            activation_bytes=12 * GIB, device_bytes=70 * GIB, in_flight_bytes=GIB, objective=Objective.MEMORY
        ),
        store=StoreConfig(kind="file", directories=tuple(directories), host_capacity=2 * GIB, checksum=True),
    )


def test_one_flag_fits_the_device() -> None:
    assert config_of(read("--tba-placement", "fit")) == OffloadConfig(default=Placement.AUTO)


def test_flags_override_the_file_and_leave_the_rest(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        "default: recompute\nlayers:\n  - match: 0-3\n    placement: keep\n"
        "budget:\n  in_flight_bytes: 2GiB\n  activation_bytes: 8GiB\nmin_tensor_bytes: 1MiB\n"
    )
    config = config_of(
        read("--tba-policy", str(policy), "--tba-placement", "offload", "--tba-in-flight-bytes", "1GiB")
    )
    assert (config.default, config.layers) == (Placement.OFFLOAD, (Rule("0-3", Placement.KEEP),))
    assert config.budget == BudgetConfig(activation_bytes=8 * GIB, in_flight_bytes=GIB)
    assert (config.min_tensor_bytes, config.policy.file) == (2**20, str(policy))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tba-policy", "{tmp}/none.yaml"), "none.yaml"),
        (("--tba-in-flight-bytes", "1000"), "--tba- flags: in_flight_bytes: '1000' has no unit"),
        (("--tba-directory", "/a", "/a"), "'/a' is given twice"),
        (("--tba-directory", "{tmp}", "{tmp}/a"), "'a' does not exist"),
        (("--tba-policy", "{tmp}/policy.yaml"), "'nvme0' does not exist"),
        (("--tba-store", "host", "--tba-directory", "/a"), "has no effect with kind: host"),
        (("--tba-store", "tape"), "not 'tape'"),
        (("--tba-placement", "recomput"), "recomput"),
        (("--tba-placement", "offload", "--distribute-saved-activations"), "--distribute-saved-activations"),
        (("--tba-checksum", "--cpu-offloading"), "Remove --cpu-offloading, or the --tba- flags"),
        (("--tba-checksum", "--cuda-graph-impl", "local"), "--cuda-graph-impl"),
    ],
)
def test_what_cannot_be_is_refused_when_the_command_line_is_read(
    flags: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "policy.yaml").write_text(f"store: {{directories: {tmp_path}/nvme0/tba}}")
    with pytest.raises(SystemExit) as stopped:
        read(*(flag.replace("{tmp}", str(tmp_path)) for flag in flags))
    assert stopped.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("states", "conflict"),
    [
        *((None, conflict) for conflict in CONFLICTS),
        *((StatesConfig(masters="keep"), conflict) for conflict in STATES_CONFLICTS),
        *((StatesConfig(), conflict) for conflict in MASTERS_CONFLICTS),
    ],
)
def test_each_conflict_names_the_flag_to_change(states: StatesConfig | None, conflict: Conflict) -> None:
    name, _, value = conflict.flag.removeprefix("--").replace("-", "_").partition(" ")
    in_the_way = argparse.Namespace(**{name: value or "muon"})
    with pytest.raises(ConfigError, match=f"{conflict.flag}.* or {conflict.instead}"):
        refuse_conflicts(in_the_way, OffloadConfig(states=states))
    allowed = [{}, {name: None}, {name: False}, *({name: each} for each in conflict.allowed)]
    for settings in allowed:
        refuse_conflicts(argparse.Namespace(**settings), OffloadConfig(states=states))
    if states is not None:
        refuse_conflicts(in_the_way, OffloadConfig())
    if states == StatesConfig():
        refuse_conflicts(in_the_way, OffloadConfig(states=StatesConfig(masters="keep")))


def test_states_are_offloaded_as_the_policy_or_the_flag_says(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("states: {sub_group_bytes: 1MiB}\n")
    small = StatesConfig(sub_group_bytes=2**20)
    assert config_of(read("--tba-placement", "keep")).states is None
    assert config_of(read("--tba-optimizer-states", "offload")).states == StatesConfig()
    assert config_of(read("--tba-policy", str(policy))).states == small
    assert config_of(read("--tba-policy", str(policy), "--tba-optimizer-states", "offload")).states == small
    assert config_of(read("--tba-policy", str(policy), "--tba-optimizer-states", "keep")).states is None
