"""What holds for all tests."""

from __future__ import annotations

import pytest
import torch


def pytest_configure() -> None:
    # Two threads everywhere: the tests must not depend on how many cores a machine has.
    torch.set_num_threads(2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
