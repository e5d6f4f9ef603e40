"""Configuration: sizes, strict YAML with lines, the same checks in Python, the JSON schema, the examples."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from places import EXAMPLES, ROOT

from tba_offload import (
    BudgetConfig,
    ConfigError,
    LayerId,
    OffloadConfig,
    Placement,
    Rule,
    StatesConfig,
    StoreConfig,
    load_config,
)
from tba_offload.config import SCHEMA_URL, parse_size, policy_schema, read_config

GIB = 2**30
LAYERS = [LayerId(number, f"layers.{number}") for number in range(4)]

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
  stall_seconds: 60
on_full: error
min_tensor_bytes: 0
"""


def complaint(text: str, **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_yaml(text, file="policy.yaml", **options)  # type: ignore[arg-type]
    return str(caught.value)


# Sizes


NO_SIZES = """
has no unit: 12 012 1.5
has an unknown unit: 12G 12gib
is not between 1 and: 0.3B 99999999999TB
is not a size: -1GiB nan GiB 1_000MB 1,5GB 1e3MB 12:30 \u0663GB 99999999999999999999999999999999999999999GiB
""".strip().splitlines()


def test_sizes() -> None:
    texts = ["0", "7B", "2KB", "2KiB", "1.5GiB", " 1.5 TB ", "1.1KiB"]
    assert [parse_size(text) for text in texts] == [0, 7, 2000, 2048, 3 * GIB // 2, 15 * 10**11, 1126]


@pytest.mark.parametrize(
    ("problem", "text"),
    [(line.split(": ")[0], text) for line in NO_SIZES for text in line.split(": ")[1].split()],
)
def test_what_is_not_a_size(text: str, problem: str) -> None:
    message = complaint(f"default: keep\nbudget:\n\n  activation_bytes: {json.dumps(text)}\n")
    assert message.startswith("policy.yaml:4: budget.activation_bytes: ")
    assert problem in message
    assert "B, KB, MB, GB, TB, KiB, MiB, GiB, TiB" in message
    with pytest.raises(ConfigError, match=problem):
        BudgetConfig(activation_bytes=text)  # type: ignore[arg-type]


# What is read


def test_every_key_is_read() -> None:
    assert OffloadConfig.from_yaml(FULL) == OffloadConfig(
        default=Placement.AUTO,
        layers=(Rule("3", Placement.RECOMPUTE), Rule("0-2", Placement.KEEP)),
        budget=BudgetConfig(activation_bytes=12 * GIB, in_flight_bytes=0),
        store=StoreConfig(
            kind="file",
            directories=(Path("/mnt/nvme0/tba"), Path("relative")),
            capacity=15 * 10**8,
            stall_seconds=60,
        ),
        on_full="error",
        min_tensor_bytes=0,
    )


_LIMITS = st.none() | st.integers(1 << 20, 1 << 50)


@given(
    st.builds(
        OffloadConfig,
        default=st.sampled_from([*Placement, Placement("offload-25%")]),
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
            capacity=_LIMITS,
            host_capacity=st.just(1 << 30),
            order=st.sampled_from([None, ("host", "drive"), ("drive", "host")]),
            write_bytes_per_day=_LIMITS,
            checksum=st.booleans(),
            stall_seconds=st.none() | st.floats(0, 1e6),
        ),
        states=st.none() | st.builds(StatesConfig, sub_group_bytes=_LIMITS, update=st.just("host")),
        on_full=st.sampled_from(["keep", "error"]),
        on_slow=st.sampled_from([None, "wait", "keep"]),
        min_tensor_bytes=st.integers(0, 2**30),
    )
)
def test_any_configuration_survives_yaml_and_follows_the_schema(config: OffloadConfig) -> None:
    assert OffloadConfig.from_yaml(config.to_yaml()) == config
    assert pickle.loads(pickle.dumps(config)) == dataclasses.replace(config) == config
    jsonschema.validate(yaml.safe_load(config.to_yaml()), policy_schema())


# What is refused, and in which words


WRONG_VALUES = r"""
on_full: off => 1: on_full: must be 'keep' or 'error', not 'off'
store: {capacity: 4095B} => 1: store.capacity: must be 4096 or more, not 4095
store:\n  stall_seconds: soon => 2: store.stall_seconds: 'soon' is not a time; write seconds
store: {directories: [/a, /b], capacity: 4KiB} => 1: store.capacity: must be 4096 B or more for each of 2
store:\n  readers: 0 => 2: store.readers: must be 1 or more, not 0
layers: {match: 1} => 1: layers: must be a list, not {'match': '1'}
default: keep\n\nlayers: => 3: layers: has no value; write a value, or remove the line to use the default
layers:\n- match: 3 => 2: layers[0].placement: is missing; this section needs the keys match, placement
default: keep\n\ndefault: keep => 3: default: is given twice, first in line 1; remove one of the two lines
budget:\n  actvation_bytes: 1GiB => 2: budget.actvation_bytes: unknown key; did you mean 'activation_bytes'?
layers: [{match: 3, placement: keep, line: 3}] => 1: layers[0].line: unknown key
on_full: !!python/object/apply:os.getcwd [] => 1: on_full: the YAML tag 'tag:yaml.org,2002:python/object/apply
default: keep\n---\ndefault: keep => 2: the YAML cannot be read: expected a single document in the stream
store:\n  kind: host\n  host_capacity: 1GiB => 3: store.host_capacity: has no effect with kind: host
store:\n  directories: [/a]\n  kind: host => 2: store.directories: has no effect with kind: host
store: {order: [host, host]} => 1: store.order: must be [host, drive] or [drive, host], not ['host', 'host']
store: {order: [drive, host]} => 1: store.order: has no effect without host_capacity
store: {kind: host, write_bytes_per_day: 1TB} => 1: store.write_bytes_per_day: has no effect with kind: host
store: {directories: ['']} => 1: store.directories: a directory must be a path, not ''
store: {directories: "/tmp/\0"} => 1: store.directories: a directory must be a path, not '/tmp/\x00'
store: {directories: [/a, /b, /a/]} => 1: store.directories: '/a' is given twice; write each directory once
states: {when: backward, micro_batches: two} => 1: states.micro_batches: must be a whole number, not 'two'
states: {when: backward, update: host} => 1: states.update: 'host' needs 'when: step'
"""


@pytest.mark.parametrize("case", WRONG_VALUES.strip("\n").splitlines())
def test_wrong_values(case: str) -> None:
    text, message = case.replace("\\n", "\n").split(" => ")
    assert complaint(text).startswith(f"policy.yaml:{message}")


def test_all_problems_are_told_by_line() -> None:
    text = "on_full: off\nbudgt: 1\nstore:\n  capacity: 5\ndefault: no\non_full: 2\nlayers:\n"
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_yaml(text, file="policy.yaml")
    assert str(caught.value) == "\n".join(map(str, caught.value.problems))
    assert (caught.value.file, caught.value.line) == ("policy.yaml", 1)
    assert [problem.line for problem in caught.value.problems] == [1, 2, 4, 5, 6, 7]


def test_rules_are_judged_by_the_layers_of_a_model() -> None:
    rules = (
        "layers:\n- {match: 0-1, placement: keep}\n"
        "- {match: 1, placement: auto}\n- {match: 9, placement: keep}"
    )
    first, second = complaint(rules, layers=LAYERS).splitlines()
    assert first.startswith("policy.yaml:3: the rule '1' (line 3) has no effect, because earlier rules match")
    assert second.startswith(
        "policy.yaml:4: the rule '9' (line 4) matches no layer; the layers are 0-3 (layers."
    )
    with pytest.raises(ConfigError, match=r"^line 1: the rule '9' \(line 1\) matches no layer"):
        OffloadConfig.from_yaml("layers: [{match: 9, placement: keep}]", layers=LAYERS)


NO_EFFECT = r"""
budget: {activation_bytes: 1GiB} => budget.activation_bytes
default: keep\nbudget: {activation_bytes: 2TiB} => budget.activation_bytes: has no effect: no layer has
default: keep\nbudget: {device_bytes: 2TiB} => budget.device_bytes: has no effect: no layer has
default: recompute\nbudget: {activation_bytes: 2TiB} => budget.activation_bytes: has no effect: no layer
default: recompute\nbudget: {device_bytes: 2TiB} => budget.device_bytes: has no effect: no layer has
budget: {objective: memory} => budget.objective
store: {write_bytes_per_day: 1TB} => store.write_bytes_per_day
budget: {activation_bytes: 1MiB} =>
default: auto\nbudget: {activation_bytes: 1GiB, objective: time} =>
layers: [{match: last 1, placement: auto}]\nstore: {write_bytes_per_day: 1TB} =>
""".strip().splitlines()


@pytest.mark.parametrize("case", NO_EFFECT)
def test_what_has_no_effect_is_told(case: str) -> None:
    text, setting = case.replace("\\n", "\n").split(" =>")
    found = OffloadConfig.from_yaml(text, file="policy.yaml").doubts(LAYERS)
    assert [each.startswith("policy.yaml:") and setting in each for each in found] == [True] * bool(setting)


# Directories


def test_directories_are_expanded_but_need_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("SCRATCH", "/scratch/of me")
    text = "store: {directories: [~/tba, /no/such/place, here, '$SCRATCH/a', '/a/${SCRATCH}b', /c$/d]}"
    assert list(map(str, OffloadConfig.from_yaml(text).store.directories)) == [
        *("/home/someone/tba", "/no/such/place", "here"),
        *("/scratch/of me/a", "/a/scratch/of meb", "/c$/d"),
    ]
    assert StoreConfig(directories="/mnt") == StoreConfig(directories=Path("/mnt"))  # type: ignore[arg-type]


# Python


def test_a_dict_says_what_a_file_would() -> None:
    document = yaml.safe_load(FULL) | {
        "layers": [{"match": 3, "placement": "recompute"}, Rule("0-2", "keep")]
    }  # type: ignore[arg-type]
    document["store"]["directories"] = (Path("/mnt/nvme0/tba"), "relative")
    document["budget"]["activation_bytes"] = 12 * GIB
    assert OffloadConfig.from_dict(document) == OffloadConfig.from_yaml(FULL)
    wrong: dict[str, object] = {"defautl": "keep", "layers": [{"match": "3-1", "placement": "kep"}]}
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_dict(wrong)
    expected = complaint(yaml.safe_dump(wrong)).splitlines()
    assert {str(each) for each in caught.value.problems} == {
        re.sub("^policy.yaml:[0-9]: ", "", each) for each in expected
    }


# Files


def test_load_config(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    with pytest.raises(ConfigError, match=f"^{path}: cannot be read: No such file or directory$"):
        load_config(path)
    path.write_text("\ufeff" + FULL, encoding="utf-8")
    config = load_config(path)
    assert config == OffloadConfig.from_yaml(FULL) == read_config(str(path))
    assert config.policy.file == str(path)
    assert [rule.line for rule in config.layers] == [3, 5]
    path.write_bytes(b"default: \xff")
    with pytest.raises(ConfigError, match=r"policy\.yaml: the file is not UTF-8 text"):
        load_config(str(path))


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: path.name)
def test_examples_follow_the_schema_and_take_effect(path: Path) -> None:
    text = path.read_text()
    assert text.startswith(f"# yaml-language-server: $schema={SCHEMA_URL}\n")
    jsonschema.validate(yaml.safe_load(text), policy_schema())
    stacks = ("encoder", "decoder") if "encoder:" in text else (None,)
    layers = [LayerId(n, f"{stack or 'decoder'}.layers.{n}", stack) for stack in stacks for n in range(24)]
    config = OffloadConfig.from_yaml(text, layers=layers)
    placements = set(config.policy.resolve(layers).values())
    assert {rule.placement for rule in config.layers} <= placements


# The JSON schema


def test_the_schema_of_the_documentation_is_that_of_the_package() -> None:
    schema = policy_schema()
    assert json.loads((ROOT / "docs" / "policy.schema.json").read_text()) == schema
    for part in (schema, *schema["$defs"].values()):
        for name, setting in part.get("properties", {}).items():
            assert setting.get("description", "").endswith("."), name
