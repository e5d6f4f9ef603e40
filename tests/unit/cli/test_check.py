"""``tba-offload check``: a policy is judged by a number of layers, without a model and without torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from commands import call

if TYPE_CHECKING:
    from pathlib import Path

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
        "states": "offload (optimizer states, updated in backward())",
        "weights": "offload-25% (frozen weights)",
        "not_judged": [],
        "warnings": [],
        "problems": [],
    }
    assert call("check", policy, "--layers", "6").stdout.splitlines()[-2:] == [
        "states: offload (optimizer states, updated in backward())",
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
        (["12", "decoder:12"], "give each stack its own name"),
    ],
)
def test_a_wrong_command_line_has_exit_status_2(layers: list[str], message: str, policy: Path) -> None:
    result = call("check", policy, *(word for number in layers for word in ("--layers", number)))
    assert result.exit_code == 2
    assert message in result.stderr
