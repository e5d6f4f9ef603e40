"""Placements: where the activations of a layer spend the time between forward and backward."""

from tba_offload.placements import builtin
from tba_offload.placements.base import LayerCall, Placement, register, unregister

__all__ = ["LayerCall", "Placement", "builtin", "register", "unregister"]
