"""Fully sharded data parallelism as accelerate sets it up, which does so on a GPU alone: the same bits."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from example_on_gpu import outcomes
from example_outcomes import assert_same_outcome, losses_of, policy_file

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed"),
]

STEPS, MIB = 4, 2**20
WINDOW = 4 * MIB
WRAPPED = {"1": ("Tensor", "FullyShardedDataParallel"), "2": ("DTensor", "FSDP")}
LAUNCH = ("-m", "accelerate.commands.launch", "--use_fsdp", "--num_processes=1", "--num_machines=1")
SETTINGS = ("--dynamo_backend=no", "--main_process_port=0", "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP")


@pytest.mark.parametrize(
    ("example", "version", "precision", "least"),
    [
        ("accelerate", "1", "bf16", 20 * MIB),
        ("accelerate", "2", "no", 50 * MIB),
        ("huggingface", "1", "no", 20 * MIB),
        ("huggingface", "2", "bf16", 10 * MIB),
    ],
)
def test_its_launcher_shards_to_the_same_bits(
    example: str, version: str, precision: str, least: int, tmp_path: Path
) -> None:
    policy = policy_file(tmp_path, tmp_path, WINDOW)
    settings = (*SETTINGS, f"--fsdp_version={version}", f"--mixed_precision={precision}")
    plain, again, found = outcomes(
        tmp_path,
        example,
        f"--placement={policy}",
        f"--steps={STEPS}",
        launcher=(sys.executable, *LAUNCH, *settings),
    )
    (tmp_path / "figures.json").write_text(json.dumps({"steps": found["steps"], "losses": losses_of(found)}))
    kind, wrapper = WRAPPED[version]
    assert found["kinds"] == [kind]
    assert found["wrapper"].startswith(wrapper)
    assert_same_outcome(plain, again, found)
    assert len(losses_of(plain)) == len(found["steps"]) == STEPS
    for step in found["steps"]:
        assert step["left_alone_scopes"] == 0
        assert step["offloaded_bytes"] + WINDOW > least
