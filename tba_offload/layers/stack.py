"""The names of :mod:`tba_offload.layers.find`, for modules that still ask for them here."""

from tba_offload.layers.find import BlockList as LeftOut
from tba_offload.layers.find import (
    Layer,
    LayerStack,
    State,
    check_disjoint,
    chunks_of,
    explicit_layers,
    find_layers,
)

__all__ = [
    "Layer",
    "LayerStack",
    "LeftOut",
    "State",
    "check_disjoint",
    "chunks_of",
    "explicit_layers",
    "find_layers",
]
