"""Optimizer states that are offloaded to a store between updates."""

from __future__ import annotations

from tba_offload.states.optimizer import OptimizerStates, offload_optimizer
from tba_offload.states.updates import StatesRecord

__all__ = ["OptimizerStates", "StatesRecord", "offload_optimizer"]
