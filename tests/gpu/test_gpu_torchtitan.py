"""torchtitan's own trainer, attached to: the same bits, by FSDP2 and without it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
from example_on_gpu import outcomes
from example_outcomes import assert_same_outcome, losses_of, policy_file

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed"),
]

STEPS, LAYERS = 4, 6
MIB = 2**20
WINDOW = 64 * MIB
SAVED = 300 * MIB  # less than the layers save in a step, of which the window may stay
SIZE = [f"--training.steps={STEPS}", "--training.seq_len=2048", "--training.local_batch_size=4"]
ONE_RANK = ["--experimental.custom_import=titan_one_rank", "--model.name=llama3_one_rank"]


@pytest.mark.parametrize(
    ("options", "kind"),
    [pytest.param([], "Tensor", id="alone"), pytest.param(ONE_RANK, "DTensor", id="fsdp")],
)
def test_its_trainer_trains_to_the_same_bits(options: list[str], kind: str, tmp_path: Path) -> None:
    plain, again, found = trained(tmp_path, *SIZE, *options)
    (tmp_path / "figures.json").write_text(json.dumps(figures(plain, found), indent=1))
    assert plain["kinds"] == found["kinds"] == [kind]
    assert_same_outcome(plain, again, found)
    assert len(losses_of(plain)) == len(found["steps"]) == STEPS
    for step in found["steps"]:
        assert (step["scopes"], step["left_alone_scopes"]) == (LAYERS, 0)
        assert step["offloaded_bytes"] > SAVED - WINDOW
    assert found["peak"] < plain["peak"] - SAVED // 2


def trained(directory: Path, *options: str) -> list[dict[str, Any]]:
    from titan_text import options_with_text  # tokenizers need not be installed

    policy = policy_file(directory, directory, WINDOW)
    return outcomes(
        directory,
        "torchtitan",
        f"--placement={policy}",
        *options_with_text(directory),
        *options,
    )


def figures(plain: dict[str, Any], found: dict[str, Any]) -> dict[str, object]:
    """What a reader may want to know."""
    return {
        "losses": losses_of(found),
        "parameters": sum(parameter.numel() for parameter in found["parameters"].values()),
        "peak_bytes_without": plain["peak"],
        "peak_bytes_with": found["peak"],
        "steps": found["steps"],
        "printed": found["printed"].splitlines(),
    }
