"""Buffers in which a layer counts where gradients are computed, and only there.

Megatron-LM's checkpoint runs a layer without gradients first, and with them when backward comes to it. Its
routers count tokens and micro-batches in the run with gradients alone, so that each is counted once. What is
counted there stays, and the next count goes on from it.
"""

from __future__ import annotations

from typing import Any

Place = tuple[int, str]
"""The address of a module's dictionary of buffers, which lives as long as the module, and a name in it."""


def place_of(buffers: dict[str, Any], name: str) -> Place:
    """Where a buffer lies."""
    return id(buffers), name


class Tallies:
    """Which buffers of one layer are such; the first second run that writes to one tells."""

    __slots__ = ("_places",)

    def __init__(self) -> None:
        self._places: set[Place] = set()

    def add(self, place: Place) -> None:
        """Take note of one: second runs find it as it is from now on, and what they write to it stays."""
        self._places.add(place)

    def __contains__(self, place: Place) -> bool:
        return place in self._places
