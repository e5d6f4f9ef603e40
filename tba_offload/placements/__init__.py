"""Placements: where the activations of a layer spend the time between forward and backward."""

from tba_offload.placements import builtin
from tba_offload.placements.base import Placement, Ways, names, register, unregister

__all__ = ["Placement", "Ways", "builtin", "names", "register", "unregister"]
