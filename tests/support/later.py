"""Packages that are imported when a test first asks them for something: to collect the tests needs none."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import pytest


class Later:
    """Stands for a package; where it is not installed, the test that asks for a name in it is skipped.

    It has no names that begin with an underscore, for which pytest asks whatever a module holds.

    Args:
        name: Its name, with dots.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @cached_property
    def _package(self) -> Any:
        return pytest.importorskip(self._name)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return getattr(self._package, attribute)
