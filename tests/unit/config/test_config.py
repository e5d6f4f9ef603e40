"""Configuration: sizes, strict YAML with lines, the same checks in Python, the example policies."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import EXAMPLES

from tba_offload.config import (
    BudgetConfig,
    OffloadConfig,
    StoreConfig,
    format_size,
    load_config,
    parse_size,
    read_config,
)
from tba_offload.config.policy import LayerId, Objective, Placement, Rule
from tba_offload.errors import ConfigError

KIB, MIB, GIB = 2**10, 2**20, 2**30
UNITS = "B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
TOP_KEYS = "default, layers, budget, store, states, weights, on_full, on_slow, min_tensor_bytes"
PLACEMENTS = (
    "one of keep, offload, recompute, recompute-offload, recompute-except-attention, offload-remat, "
    "auto, offload-N%"
)
STORE_KEYS = (
    "kind, directories, capacity, host_capacity, write_bytes_per_day, checksum, stall_seconds, readers, "
    "writers"
)
NO_TIME = "not a time; write seconds, such as 300, or 0 for no limit"
NO_DRIVES = (
    "this is memory beside drives, so it has no effect with kind: host; set capacity instead, or choose "
    "another kind"
)
POLICIES = EXAMPLES / "policies"

FULL = """\
default: auto
layers:
  - match: 3
    placement: recompute
  - match: 0-2

    placement: keep
budget:
  activation_bytes: 12GiB
  in_flight_bytes: 0
store:
  kind: file
  directories: [/mnt/nvme0/tba, relative]
  capacity: 1.5 GB
  host_capacity: 8GiB
  checksum: true
  stall_seconds: 60
on_full: error
on_slow: keep
min_tensor_bytes: 0
"""


def complaint(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_yaml(text, file="policy.yaml")
    return str(caught.value)


# sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("0GiB", 0),
        ("7B", 7),
        ("2KB", 2000),
        ("2KiB", 2048),
        ("3MB", 3 * 10**6),
        ("3MiB", 3 * MIB),
        ("1GB", 10**9),
        ("12GiB", 12 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        (" 1.5 TB ", 15 * 10**11),
        ("1TiB", 2**40),
        ("1.1KiB", 1126),
    ],
)
def test_parse_size(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("12", "has no unit"),
        ("012", "has no unit"),
        ("-1GiB", "is negative"),
        ("-1", "is negative"),
        ("12G", "unknown unit 'G'"),
        ("12gib", "unknown unit 'gib'"),
        ("nan", "is not a size"),
        ("inf", "is not a size"),
        ("", "is not a size"),
        ("GiB", "is not a size"),
        ("1_000MB", "is not a size"),
        ("1,5GB", "is not a size"),
        ("1e3MB", "is not a size"),
        ("12:30", "is not a size"),
        ("0x10B", "is not a size"),
        ("\u0663GB", "is not a size"),
    ],
)
def test_what_is_not_a_size(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)
    assert problem in str(caught.value)
    assert UNITS in str(caught.value)


def test_a_size_below_one_byte_is_not_taken_for_off() -> None:
    with pytest.raises(ConfigError, match=r"'0\.3B' is less than one byte; write 0 for off"):
        parse_size("0.3B")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0"),
        (1, "1B"),
        (1000, "1000B"),
        (1536, "1536B"),
        (64 * KIB, "64KiB"),
        (2**40, "1TiB"),
        (2**50, "1024TiB"),
    ],
)
def test_format_size(size: int, text: str) -> None:
    assert format_size(size) == text


@given(
    st.integers(0, 2**60) | st.builds(lambda n, power: n << power, st.integers(0, 1024), st.integers(0, 50))
)
def test_sizes_survive_a_round_trip(size: int) -> None:
    assert parse_size(format_size(size)) == size


def test_a_negative_number_of_bytes_has_no_text() -> None:
    with pytest.raises(ConfigError, match="cannot be negative: -1"):
        format_size(-1)


# what is read


def test_every_key_is_read() -> None:
    assert OffloadConfig.from_yaml(FULL) == OffloadConfig(
        default=Placement.AUTO,
        layers=(Rule("3", Placement.RECOMPUTE), Rule("0-2", Placement.KEEP)),
        budget=BudgetConfig(activation_bytes=12 * GIB, in_flight_bytes=None),
        store=StoreConfig(
            kind="file",
            directories=(Path("/mnt/nvme0/tba"), Path("relative")),
            capacity=15 * 10**8,
            host_capacity=8 * GIB,
            checksum=True,
            stall_seconds=60,
        ),
        on_full="error",
        on_slow="keep",
        min_tensor_bytes=0,
    )


def test_defaults() -> None:
    config = OffloadConfig()
    assert (config.default, config.layers, config.on_full, config.on_slow) == ("offload", (), "keep", None)
    assert (config.budget.activation_bytes, config.budget.in_flight_bytes) == (None, 256 * MIB)
    assert dataclasses.astuple(config.store) == ("auto", (), None, None, None, True, 300.0, None, None)
    assert config.min_tensor_bytes == 64 * KIB


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n", "---\n", "{}"])
def test_an_empty_file_is_the_default_configuration(text: str) -> None:
    assert OffloadConfig.from_yaml(text) == OffloadConfig()


def test_the_policy_knows_file_and_lines() -> None:
    policy = OffloadConfig.from_yaml(FULL, file="policy.yaml").policy
    assert (policy.default, policy.file) == (Placement.AUTO, "policy.yaml")
    assert [(rule.match, rule.line) for rule in policy.rules] == [("3", 3), ("0-2", 5)]
    with pytest.raises(ConfigError, match=r"^policy.yaml:5: the rule '0-2' \(line 5\) matches no layer"):
        policy.resolve([LayerId(3, "layers.3")])


@pytest.mark.parametrize("text", ["", FULL, "layers: [{match: '012', placement: keep}]", "default: keep"])
def test_to_yaml_is_read_back_as_it_was(text: str) -> None:
    config = OffloadConfig.from_yaml(text)
    assert OffloadConfig.from_yaml(config.to_yaml()) == config


_LIMITS = st.none() | st.integers(1, 2**50)


@given(
    st.builds(
        OffloadConfig,
        default=st.sampled_from(list(Placement)),
        layers=st.lists(
            st.builds(
                Rule,
                st.sampled_from(["3", "0-3", "010", "true", "null", "*.1", "[3]", "e:1"]),
                st.sampled_from(list(Placement)),
            )
        ).map(tuple),
        budget=st.builds(BudgetConfig, _LIMITS, _LIMITS),
        store=st.builds(
            StoreConfig,
            kind=st.sampled_from(["auto", "gds", "file"]),
            directories=st.sets(st.sampled_from(["/a b", "no", "1", "/ü", "x: y", "- z", "null"])).map(tuple),
            capacity=st.none() | st.integers(1 << 20, 1 << 50),
            host_capacity=st.none() | st.integers(1 << 20, 1 << 50),
            checksum=st.booleans(),
            stall_seconds=st.none() | st.floats(0, 1e6),
        ),
        on_full=st.sampled_from(["keep", "error"]),
        on_slow=st.sampled_from([None, "wait", "keep"]),
        min_tensor_bytes=st.integers(0, 2**30),
    )
)
def test_any_configuration_survives_yaml(config: OffloadConfig) -> None:
    assert OffloadConfig.from_yaml(config.to_yaml()) == config


# what is refused, and in which words


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\ndefault: no", f"2: default: must be {PLACEMENTS}, not 'no'"),
        ("default: true", f"1: default: must be {PLACEMENTS}, not True"),
        ("default: 3", f"1: default: must be {PLACEMENTS}, not '3'"),
        ("default: null", f"1: default: must be {PLACEMENTS}, not None"),
        ("on_full: off", "1: on_full: must be 'keep' or 'error', not 'off'"),
        ("on_full: {a: b}", "1: on_full: must be 'keep' or 'error', not {'a': 'b'}"),
        ("on_slow: fast", "1: on_slow: must be 'wait' or 'keep', not 'fast'"),
        ("store:\n  kind: hots", "2: store.kind: must be 'auto', 'gds', 'file' or 'host', not 'hots'"),
        (
            "store:\n  kind: host\n  host_capacity: 1GiB",
            f"3: store.host_capacity: {NO_DRIVES}",
        ),
        (
            "store:\n  host_capacity: 8",
            f"2: store.host_capacity: '8' has no unit; write one of {UNITS} after the number, such as 12GiB",
        ),
        (
            "store: {host_capacity: 4095B}",
            "1: store.host_capacity: 4095 bytes hold no extent; the least is 4 KiB",
        ),
        ("store:\n  stall_seconds: soon", f"2: store.stall_seconds: 'soon' is {NO_TIME}"),
        ("store:\n  stall_seconds: -1", f"2: store.stall_seconds: '-1' is {NO_TIME}"),
        ("store:\n  stall_seconds: inf", f"2: store.stall_seconds: 'inf' is {NO_TIME}"),
        ("store:\n  checksum: yes", "2: store.checksum: must be true or false, not 'yes'"),
        (
            "store:\n  directories: {a: /mnt}",
            "2: store.directories: must be a path or a list of paths, not {'a': '/mnt'}",
        ),
        (
            "store: [a]",
            f"1: store: must be a mapping with the keys {STORE_KEYS}, not ['a']",
        ),
        ("layers: {match: 1}", "1: layers: must be a list, not {'match': '1'}"),
        ("layers:\n- 0-3", "2: layers[0]: must be a mapping with the keys match, placement, not '0-3'"),
        ("- a", f"1: must be a mapping with the keys {TOP_KEYS}, not ['a']"),
        (
            "default: keep\n\nlayers:",
            "3: layers: has no value; write one, or remove the line for the default",
        ),
        (
            "layers:\n- match: 3",
            "2: layers[0].placement: is missing; the keys match, placement are needed here",
        ),
        ("default: keep\n\ndefault: keep", "3: default: given twice, first in line 1; remove one"),
        ("? [a]\n: b", "1: a key must be a word"),
        (f"on_full: {'x' * 999}", f"1: on_full: must be 'keep' or 'error', not '{'x' * 198}…"),
    ],
)
def test_wrong_values(text: str, message: str) -> None:
    assert complaint(text) == f"policy.yaml:{message}"


@pytest.mark.parametrize(
    ("size", "problem"),
    [
        ("4096", "'4096' has no unit"),
        ("1.5", "'1.5' has no unit"),
        ("012", "'012' has no unit"),
        ("1_000", "'1_000' is not a size"),
        ("12:30", "'12:30' is not a size"),
        ("-1GiB", "'-1GiB' is negative"),
        ("nan", "'nan' is not a size"),
        (".inf", "'.inf' is not a size"),
        ("12Gb", "unknown unit 'Gb'"),
    ],
)
def test_wrong_sizes(size: str, problem: str) -> None:
    message = complaint(f"default: keep\nbudget:\n\n  activation_bytes: {size}\n")
    assert message.startswith("policy.yaml:4: budget.activation_bytes: ")
    assert problem in message
    assert UNITS in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("defautl: keep", f"1: defautl: unknown key; did you mean 'default'? (the keys here are {TOP_KEYS})"),
        ("file: x", f"1: file: unknown key (the keys here are {TOP_KEYS})"),
        ("<<: {default: keep}", f"1: <<: unknown key (the keys here are {TOP_KEYS})"),
        (
            "budget:\n  actvation_bytes: 1GiB",
            (
                "2: budget.actvation_bytes: unknown key; did you mean 'activation_bytes'? "
                "(the keys here are activation_bytes, device_bytes, in_flight_bytes, objective)"
            ),
        ),
        (
            "layers:\n- match: 3\n  placement: keep\n  line: 3",
            "4: layers[0].line: unknown key (the keys here are match, placement)",
        ),
        (
            "layers:\n- mach: 3\n  placement: keep",
            "2: layers[0].mach: unknown key; did you mean 'match'? (the keys here are match, placement)",
        ),
    ],
)
def test_unknown_keys(text: str, message: str) -> None:
    assert complaint(text) == f"policy.yaml:{message}"


def test_a_malformed_match_is_reported_in_its_own_line() -> None:
    message = complaint("layers:\n- placement: keep\n  match: 3-1\n")
    assert (
        message == "policy.yaml:3: layers[0].match: malformed match '3-1': '3-1' runs backwards, write '1-3'"
    )


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("default: &a keep", 1, "anchors and aliases are not allowed"),
        ("a: 1\nb: *a", 2, "anchors and aliases are not allowed"),
        ("a: 1\nb: !!python/object/apply:os.getcwd []", 2, "python/object/apply:os.getcwd' is not allowed"),
        ("default: !word keep", 1, "the tag '!word' is not allowed"),
        ("min_tensor_bytes: !!int 3", 1, "int' is not allowed"),
        ("default: keep\n---\ndefault: keep", 2, "another document"),
        ("default: keep\nlayers: [", 2, "expected the node content"),
        ("default: keep\n\tlayers: x", 2, "found character '\\t'"),
        ("default: keep\non_full: \x00", 2, "special characters are not allowed"),
    ],
)
def test_what_is_not_plain_yaml(text: str, line: int, problem: str) -> None:
    message = complaint(text)
    assert message.startswith(f"policy.yaml:{line}: cannot be read: ")
    assert problem in message


def test_endless_nesting_is_refused() -> None:
    assert complaint("[" * 5000) == "policy.yaml: cannot be read: nested too deeply"


def problems(text: str, layers: list[LayerId] | None = None) -> list[str]:
    """Each of the problems of a file, up to the first colon after its line."""
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_yaml(text, file="policy.yaml", layers=layers)
    assert str(caught.value) == "\n".join(map(str, caught.value.problems))
    assert (caught.value.file, caught.value.line) == ("policy.yaml", caught.value.problems[0].line)
    return [":".join(str(problem).split(":")[1:3]) for problem in caught.value.problems]


def test_all_problems_by_line() -> None:
    text = "on_full: off\nbudgt: 1\nstore:\n  capacity: 5\ndefault: no\n"
    assert problems(text) == ["1: on_full", "2: budgt", "4: store.capacity", "5: default"]
    assert problems("budgt: 1\n" + text)[1] == "3: budgt"  # given twice
    assert problems("layers:\non_full:\ndefault: no") == ["1: layers", "2: on_full", "3: default"]


def test_rules_that_take_no_effect_are_among_all_problems() -> None:
    layers = [LayerId(number, f"layers.{number}") for number in range(4)]
    rules = """\
layers:
- {match: 0-1, placement: keep}
- {match: 1, placement: auto}
- {match: 9, placement: keep}
- {match: 2-1, placement: keep}
- {match: 2, placement: drop}
"""
    rule_problems = [
        "3: the rule '1' (line 3) never takes effect",
        "4: the rule '9' (line 4) matches no layer; the layers are 0-3 (layers.0 ... layers.3)",
    ]
    found = problems(rules + "on_full: off\n", layers)
    assert found == [*rule_problems, "5: layers[3].match", "6: layers[4].placement", "7: on_full"]
    sound = "".join(rules.splitlines(keepends=True)[:4]) + "budget: {objective: memory}\n"
    assert problems(sound.replace("auto", "keep"), layers) == [*rule_problems, "5: budget.objective"]
    OffloadConfig.from_yaml(sound.replace("9", "last 1").replace("0-1", "0"), layers=layers)


def test_an_objective_needs_a_layer_that_is_planned() -> None:
    layers = [LayerId(0, "layers.0")]
    with pytest.raises(ConfigError, match=r"^policy.yaml:2: budget.objective: memory is what layers placed"):
        OffloadConfig.from_yaml("budget:\n  objective: memory", file="policy.yaml", layers=layers)
    for rules in ("default: auto", "layers: [{match: 0, placement: auto}]"):
        OffloadConfig.from_yaml(f"{rules}\nbudget: {{objective: memory}}", layers=layers)


def test_text_without_a_file_still_has_lines() -> None:
    with pytest.raises(ConfigError, match=r"^line 2: on_full: ") as caught:
        OffloadConfig.from_yaml("default: keep\non_full: off")
    assert (caught.value.file, caught.value.line) == (None, 2)


# directories


def test_directories_are_expanded_but_need_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    store = OffloadConfig.from_yaml("store: {directories: [~/tba, /no/such/place, here]}").store
    assert store.directories == (Path("/home/someone/tba"), Path("/no/such/place"), Path("here"))
    assert StoreConfig(directories=("~/tba",)).directories == (Path("/home/someone/tba"),)


def test_one_directory_may_be_a_word() -> None:
    assert OffloadConfig.from_yaml("store: {directories: /mnt}").store.directories == (Path("/mnt"),)
    assert StoreConfig(directories="/mnt") == StoreConfig(directories=Path("/mnt"))  # type: ignore[arg-type]


def test_directories_may_name_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch/of me")
    store = OffloadConfig.from_yaml("store: {directories: ['$SCRATCH/tba', '/a/${SCRATCH}b', /c$/d]}").store
    assert store.directories == (Path("/scratch/of me/tba"), Path("/a/scratch/of meb"), Path("/c$/d"))


@pytest.mark.parametrize("path", ["$SCRATCH/tba", "/a/${SCRATCH}"])
@pytest.mark.parametrize(("value", "state"), [(None, "not set"), ("", "empty")])
def test_a_variable_without_a_value_is_named(
    path: str, value: str | None, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty one would make it a directory of the root."""
    monkeypatch.delenv("SCRATCH", raising=False)
    if value is not None:
        monkeypatch.setenv("SCRATCH", value)
    message = complaint(f"\nstore: {{directories: '{path}'}}")
    assert message.startswith(f"policy.yaml:2: store.directories[0]: '{path}' names the environment variable")
    assert f"'SCRATCH', which is {state}; set it" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("['']", "[0]: a directory must not be empty; write its path"),
        ("[/a, ~]", "[1]: a directory must be a path, not None"),
        ("[/a, [/b]]", "[1]: a directory must be a path, not ['/b']"),
        ("[/a, /b, /a/]", ": '/a' is given twice; name each directory once"),
    ],
)
def test_wrong_directories(text: str, message: str) -> None:
    assert complaint(f"store:\n  directories: {text}") == f"policy.yaml:2: store.directories{message}"


def test_the_home_of_nobody_cannot_be_expanded() -> None:
    assert "'~no-such-user/tba' cannot be expanded" in complaint("store: {directories: [~no-such-user/tba]}")


def test_the_same_directory_in_two_spellings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is given twice"):
        StoreConfig(directories=("store", tmp_path / "store"))


def test_directories_have_no_effect_on_host_memory() -> None:
    message = complaint("store:\n  directories: [/a]\n  kind: host")
    assert message.startswith("policy.yaml:2: store.directories: these have no effect with kind: host")


# Python


def test_python_users_may_write_text_and_numbers() -> None:
    budget = BudgetConfig(activation_bytes="1.5GiB", in_flight_bytes=0)  # type: ignore[arg-type]
    assert budget == BudgetConfig(activation_bytes=3 * GIB // 2, in_flight_bytes=None)
    config = OffloadConfig(layers=[{"match": "0-3", "placement": "keep"}], min_tensor_bytes=4096)  # type: ignore[arg-type]
    assert config.layers == (Rule("0-3", Placement.KEEP),)
    assert config.min_tensor_bytes == 4096


def test_a_device_is_a_budget_too() -> None:
    text = "default: auto\nbudget: {device_bytes: 70GiB, objective: time, in_flight_bytes: 1GiB}\n"
    config = OffloadConfig.from_yaml(text)
    assert config.budget == BudgetConfig(device_bytes=70 * GIB, objective=Objective.TIME, in_flight_bytes=GIB)
    assert config.budget.limits == (None, GIB)
    assert OffloadConfig.from_yaml(config.to_yaml()) == config
    with pytest.raises(ConfigError, match="time needs activation_bytes or device_bytes: without a budget"):
        BudgetConfig(objective=Objective.TIME)


def test_a_dict_says_what_a_file_would() -> None:
    document = {
        "default": "auto",
        "layers": [{"match": 3, "placement": "recompute"}, {"match": "0-2", "placement": Placement.KEEP}],
        "budget": {"activation_bytes": "12GiB", "in_flight_bytes": 0},
        "store": {
            "kind": "file",
            "directories": (Path("/mnt/nvme0/tba"), "relative"),
            "capacity": 1_500_000_000,
            "host_capacity": "8GiB",
            "checksum": True,
            "stall_seconds": 60,
        },
        "on_full": "error",
        "on_slow": "keep",
        "min_tensor_bytes": 0,
    }
    assert OffloadConfig.from_dict(document) == OffloadConfig.from_yaml(FULL)
    assert OffloadConfig.from_dict({}) == OffloadConfig()


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({"defautl": "keep", "budget": {"activation": 1}}, "defautl: keep\nbudget:\n  activation: 1"),
        ({"layers": [{"match": "3-1", "placement": "kep"}]}, "layers:\n- match: 3-1\n  placement: kep"),
        ({"store": {"kind": "tape"}, "on_full": "drop"}, "store:\n  kind: tape\non_full: drop"),
        ({"store": ["a"]}, "store: [a]"),
        ({"layers": [{"match": "7", "placement": "keep"}]}, "layers: [{match: 7, placement: keep}]"),
    ],
)
def test_a_dict_gets_the_messages_of_a_file_without_its_lines(document: dict[str, object], text: str) -> None:
    layers = [LayerId(0, "layers.0")]
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_dict(document, layers=layers)
    with pytest.raises(ConfigError) as from_text:
        OffloadConfig.from_yaml(text, layers=layers)
    expected = {
        re.sub(r"^line \d+: | \(line \d+\)", "", str(problem)) for problem in from_text.value.problems
    }
    assert {str(problem) for problem in caught.value.problems} == expected
    assert {problem.line for problem in caught.value.problems} == {None}


@pytest.mark.parametrize("document", [3, ["default"]])
def test_what_is_no_dict_is_refused(document: object) -> None:
    with pytest.raises(ConfigError, match=r"^must be a mapping with the keys default, "):
        OffloadConfig.from_dict(document)  # type: ignore[arg-type]


def test_read_config_takes_all_that_users_give(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(FULL)
    assert read_config(path) == read_config(str(path)) == OffloadConfig.from_yaml(FULL)
    assert read_config({"default": "keep"}) == OffloadConfig(default=Placement.KEEP)
    assert read_config(None) == OffloadConfig()
    config = OffloadConfig(layers=(Rule("7", Placement.KEEP),))
    assert read_config(config) is config
    with pytest.raises(ConfigError, match="'7' matches no layer"):
        read_config(config, layers=[LayerId(0, "layers.0")])


@pytest.mark.parametrize("policy", [5, [], ("policy.yaml",)])
def test_what_is_no_policy_is_named(policy: object) -> None:
    with pytest.raises(ConfigError, match=r"the policy is .*: give the path of a YAML file, a dict"):
        read_config(policy)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activation_bytes": "12"}, "activation_bytes: '12' has no unit"),
        ({"activation_bytes": -1}, "activation_bytes: -1 is negative; write a positive size, or 0 for off"),
        ({"activation_bytes": 1.5}, "activation_bytes: 1.5 is not a size"),
        ({"activation_bytes": True}, "activation_bytes: True is not a size"),
        ({"activation": 1}, "activation: unknown key; did you mean 'activation_bytes'?"),
    ],
)
def test_python_users_get_the_same_errors(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BudgetConfig(**arguments)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)
    assert (caught.value.file, caught.value.line) == (None, None)


def test_errors_name_arguments_that_were_given_by_position() -> None:
    with pytest.raises(ConfigError, match=r"^default: must be one of keep, "):
        OffloadConfig("no")  # type: ignore[arg-type]


def test_configurations_are_frozen_values() -> None:
    config = OffloadConfig(on_full="error")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.on_full = "keep"  # type: ignore[misc]
    assert hash(config) == hash(OffloadConfig(on_full="error"))
    assert pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, on_full="keep") == OffloadConfig()


# files


def test_load_config(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("\ufeff" + FULL, encoding="utf-8")
    config = load_config(path)
    assert config == OffloadConfig.from_yaml(FULL)
    assert config.file == str(path)


def test_load_config_names_the_file_it_cannot_read(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == f"{path}: cannot be read: No such file or directory"
    path.write_bytes(b"default: \xff")
    with pytest.raises(ConfigError, match=r"policy\.yaml: is not UTF-8 text"):
        load_config(str(path))


_DECODER = [LayerId(number, f"decoder.layers.{number}") for number in range(24)]
_TWO_STACKS = [
    LayerId(n, f"{stack}.layers.{n}", stack) for stack in ("encoder", "decoder") for n in range(12)
]


_EXPECTED = {
    "offload_all": (_DECODER, {"offload": 24}),
    "auto_within_budget": (_DECODER, {"auto": 24}),
    "keep_last_layers": (_DECODER, {"offload": 22, "keep": 2}),
    "recompute_some": (_DECODER, {"offload": 21, "keep": 1, "recompute": 2}),
    "recompute_offload_inputs": (_DECODER, {"recompute-offload": 22, "keep": 2}),
    "recompute_except_attention": (_DECODER, {"recompute-except-attention": 23, "keep": 1}),
    "rebuild_cheap_parts": (_DECODER, {"offload-remat": 22, "keep": 2}),
    "share_of_each_layer": (_DECODER, {"offload-50%": 24}),
    "encoder_decoder": (_TWO_STACKS, {"offload": 20, "keep": 2, "recompute": 2}),
    "host_memory": (_DECODER, {"offload": 24}),
}


@pytest.mark.parametrize("name", _EXPECTED)
def test_example_policies(name: str) -> None:
    layers, expected = _EXPECTED[name]
    config = load_config(POLICIES / f"{name}.yaml")
    placements = list(config.policy.resolve(layers).values())
    assert {placement.value: placements.count(placement) for placement in placements} == expected
    assert OffloadConfig.from_yaml(config.to_yaml()) == config


def test_no_example_is_forgotten() -> None:
    assert {path.stem for path in POLICIES.glob("*.yaml")} == set(_EXPECTED)


# What is out of all bounds


HUGE = "9" * 5000


@pytest.mark.parametrize(
    "text",
    [
        f"min_tensor_bytes: {HUGE}GiB",
        "min_tensor_bytes: 2000000000000TiB",
        "budget: {activation_bytes: 99999999999TB}",
        "budget: {in_flight_bytes: -1GiB}",
        "store: {capacity: 1e400}",
        "store: {host_capacity: nan}",
        "store: {stall_seconds: 1e12}",
        f"store: {{stall_seconds: {HUGE}}}",
        "store: {stall_seconds: nan}",
        f"layers: [{{match: '{HUGE}', placement: keep}}]",
        f"layers: [{{match: 'last {HUGE}', placement: keep}}]",
        'store: {directories: "/tmp/\\0"}',
        'store: {directories: "/tmp/\\ud800"}',
        "[" * 5000,
        "a: " + "{a: " * 2000,
    ],
)
def test_no_value_is_out_of_bounds(text: str) -> None:
    assert len(complaint(text)) < 500


@pytest.mark.parametrize("setting", ["activation_bytes", "in_flight_bytes"])
@pytest.mark.parametrize("value", [-1, 10**400, 2**60 + 1, 1.5, float("nan"), float("inf"), True])
def test_no_number_of_python_is_out_of_bounds(setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=setting):
        BudgetConfig(**{setting: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-1, 10**400, 1e12, float("nan"), float("inf"), True])
def test_no_time_is_out_of_bounds(value: object) -> None:
    with pytest.raises(ConfigError, match="stall_seconds"):
        StoreConfig(stall_seconds=value)  # type: ignore[arg-type]


def test_the_longest_time_is_one_that_can_be_waited() -> None:
    seconds = StoreConfig(stall_seconds=1e9).stall_seconds
    assert seconds is not None
    assert seconds < threading.TIMEOUT_MAX


def test_a_document_that_holds_itself_is_an_error() -> None:
    document: dict[str, object] = {}
    document["layers"] = [document]
    with pytest.raises(ConfigError, match="nested too deeply"):
        OffloadConfig.from_dict(document)


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "too large"])
def test_only_a_regular_file_of_some_size_is_a_policy(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "policy.yaml"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    else:
        path.write_text("# so much\n" * 200_000)
    with pytest.raises(ConfigError, match=f"{path}: cannot be read: (not a regular|a directory|larger than)"):
        load_config(path)
