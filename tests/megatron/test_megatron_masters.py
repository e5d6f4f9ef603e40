"""Masters of Megatron's own optimizers lie in the store with their states; nothing else is different."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import megatron_masters
import pytest
from megatron_masters import KINDS, SUB_GROUP
from pretrain_runs import slow

if TYPE_CHECKING:
    from pathlib import Path

    from warm import Warm

pytestmark = pytest.mark.megatron

SMALL = 20_000
"""Bytes that counts of steps and stand-ins may take."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[slow] * (not kind.distributed)) for name, kind in KINDS.items()]
)
def test_parameters_masters_and_checkpoints_have_the_bits_of_plain_training(
    name: str, python_with_megatron: Warm, tmp_path: Path
) -> None:
    done = python_with_megatron.run(megatron_masters.__file__, name, str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    trained, reloaded, saved = json.loads(done.stdout.splitlines()[-1])
    masters = trained["masters"]
    assert masters > 6 * SUB_GROUP
    assert trained["away"] == masters * 3
    assert trained["updates"] == (4 if "fp16" in name else 5)
    assert trained["slots"] <= 3 * SUB_GROUP
    assert max(trained["grown"]) <= 4 * SUB_GROUP + SMALL  # slots, and what Adam makes for a moment
    assert max(reloaded["grown"]) <= 4 * SUB_GROUP + SMALL
    assert saved["tensors"] > 0
    assert max(saved["loaded"]) <= 2 * SUB_GROUP  # until enough is there for a sub-group
