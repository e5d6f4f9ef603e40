"""Which tests a run takes: those of the main lane, a sample of the others, or all."""

from __future__ import annotations

import os
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import pytest


def leave_out(config: pytest.Config, items: list[pytest.Item], variables: Mapping[str, str]) -> None:
    """Takes away what is marked ``full``, unless ``FULL``, a sample or the command line wants it."""
    named = [argument for argument in config.args if "::" in argument]
    left = [item for item in items if not is_wanted(item, named, variables)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]


def is_wanted(item: pytest.Item, named: Iterable[str], variables: Mapping[str, str]) -> bool:
    if item.get_closest_marker("full") is None or "FULL" in variables:
        return True
    if any(is_named(item, argument) for argument in named):
        return True
    share, seed = float(variables.get("SAMPLE", "0")), variables.get("SEED", "0")
    return is_in_sample(item.nodeid, share, int(seed))


def is_named(item: pytest.Item, argument: str) -> bool:
    path, _, name = argument.partition("::")
    if (item.config.invocation_params.dir / path).resolve() != item.path:
        return False
    own = item.nodeid.partition("::")[2]
    return own == name or own.startswith((f"{name}[", f"{name}::"))


def is_in_sample(nodeid: str, share: float, seed: int) -> bool:
    """Whether a test is among ``share`` per cent of all, others for each seed."""
    return zlib.crc32(f"{seed} {nodeid}".encode()) % 10000 < share * 100


def told(variables: Mapping[str, str] = os.environ) -> str:
    """One line on what this run takes."""
    if "FULL" in variables:
        return "lane: all tests"
    if float(variables.get("SAMPLE", "0")):
        sample = f"SAMPLE={variables['SAMPLE']} SEED={variables.get('SEED', '0')}"
        return f"lane: main, and a sample of the others ({sample})"
    return "lane: main; FULL=1 runs all tests, SAMPLE=10 SEED=1 ten per cent of the others"
