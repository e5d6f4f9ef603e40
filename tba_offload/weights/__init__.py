"""Offloading of frozen weights, which are in memory only while their layer computes."""

from __future__ import annotations

from tba_offload.weights.frozen import FrozenWeights

__all__ = ["FrozenWeights"]
