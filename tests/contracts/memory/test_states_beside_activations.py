"""``states: {default: auto}``: states and activations together keep to ``budget.device_bytes``.

As few sub-groups of states travel as let the whole step be fastest, and bits never change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from harness import MIB
from test_device_budget import Run, assert_below, assert_same_weights, run

from exact_memory import exact_memory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _peaks_are_exact() -> Iterator[None]:
    with exact_memory():
        yield
