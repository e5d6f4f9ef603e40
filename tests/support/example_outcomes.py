"""What came out of an example without the package and with it, as the programs beside this leave it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from models import same_bits

if TYPE_CHECKING:
    from pathlib import Path


def policy_file(directory: Path, drive: Path, window: int) -> Path:
    """A policy by which everything travels to a drive, through a window of ``window`` bytes."""
    policy = directory / "policy.yaml"
    policy.write_text(
        "default: offload\n"
        f"budget: {{in_flight_bytes: {window}B}}\n"
        f"store: {{kind: file, directories: ['{drive}']}}\n"
    )
    return policy


def losses_of(run: dict[str, Any]) -> list[str]:
    """The losses that it has printed."""
    return re.findall(r"loss (\d[\d.]*(?:e[+-]?\d+)?)", run["printed"])


def assert_same_outcome(plain: dict[str, Any], *others: dict[str, Any]) -> None:
    """The losses that were printed and the parameters are the same to the last bit."""
    for number, other in enumerate(others):
        assert losses_of(other) == losses_of(plain), number
        assert other["kinds"] == plain["kinds"]
        assert other["parameters"].keys() == plain["parameters"].keys()
        different = [
            name
            for name, parameter in other["parameters"].items()
            if not same_bits(parameter, plain["parameters"][name])
        ]
        assert different == [], number
