"""The JSON Schema of policies allows what the package reads, and forbids misspelled keys and wrong values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tba_offload.config import OffloadConfig
from tba_offload.config.schema import URL, policy_schema
from tba_offload.errors import ConfigError

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))

WRONG = """
budgets: {}
default: kept
default: null
on_full: wait
budget: {activation_bytes: 12}
budget: {activation_bytes: 12 Gb}
budget: {in_flight_byte: 1GiB}
budget: {objective: speed}
store: {kind: disk}
store: {directories: [[]]}
store: {checksum: "yes"}
store: {stall_seconds: -1}
states: {when: later}
states: {sub_group_bytes: 512KB, trust: null}
layers: [{match: 0}]
layers: [{match: 0, placement: keep, line: 3}]
layers: {match: 0, placement: keep}
default: offload-0%
default: offload-100%
default: offload-50
min_tensor_bytes: 64
""".strip().splitlines()

RIGHT = """
{}
default: auto
on_slow: null
budget: {activation_bytes: 0, in_flight_bytes: 1.5 GB, objective: memory}
store: {directories: /tmp, capacity: 200GiB, stall_seconds: 0}
store: {kind: host}
states: null
states: {sub_group_bytes: 32MiB, when: backward, gradients: free}
states: {masters: keep}
layers: [{match: 0, placement: keep}, {match: last 2, placement: recompute}]
layers: [{match: 0, placement: offload-1%}, {match: last 2, placement: offload-99%}]
min_tensor_bytes: 0
""".strip().splitlines()


def problems(document: object) -> list[str]:
    validator = jsonschema.Draft202012Validator(policy_schema())
    return [error.message for error in validator.iter_errors(document)]


def test_it_is_a_schema_and_each_setting_is_described() -> None:
    schema = policy_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for part in (schema, *schema["$defs"].values()):
        for name, setting in part.get("properties", {}).items():
            assert setting.get("description", "").endswith("."), name


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_name_the_schema_and_follow_it(path: Path) -> None:
    text = path.read_text()
    assert text.splitlines()[0] == f"# yaml-language-server: $schema={URL}"
    assert problems(yaml.safe_load(text)) == []


@pytest.mark.parametrize("text", RIGHT)
def test_what_is_right(text: str) -> None:
    OffloadConfig.from_yaml(text)
    assert problems(yaml.safe_load(text)) == []


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong(text: str) -> None:
    with pytest.raises(ConfigError):
        OffloadConfig.from_yaml(text)
    assert problems(yaml.safe_load(text)) != []


VALUES = st.sampled_from(
    [0, 1, -1, None, True, "", "keep", "auto", "1GiB", "0", "host", "/tmp", [], {}, ["/a"]]
)
KEYS = [
    part.split(".")
    for part in ("default", "on_full", "on_slow", "min_tensor_bytes", "budget.in_flight_bytes")
]
KEYS += [["store", name] for name in ("kind", "directories", "capacity", "checksum", "stall_seconds")]
KEYS += [["states", name] for name in ("default", "sub_group_bytes", "trust", "when", "gradients", "masters")]


@given(st.lists(st.tuples(st.sampled_from(KEYS), VALUES), max_size=3))
def test_what_the_package_reads_follows_the_schema(settings: list[tuple[list[str], Any]]) -> None:
    document: dict[str, Any] = {}
    for keys, value in settings:
        inner = document
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = value
    try:
        OffloadConfig.from_yaml(yaml.safe_dump(document))
    except ConfigError:
        return
    assert problems(document) == []


def test_the_documentation_has_it() -> None:
    assert json.loads((ROOT / "docs" / "policy.schema.json").read_text()) == policy_schema()
