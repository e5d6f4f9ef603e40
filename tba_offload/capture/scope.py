"""The names of scopes and of the activations that they save."""

from __future__ import annotations

from typing import NamedTuple


class ScopeKey(NamedTuple):
    """One execution of a layer.

    Attributes:
        layer: Global number of the layer, from 0.
        micro_batch: How often the layer ran before in this step, or the schedule's own number.
        chunk: Model chunk of an interleaved pipeline.
        name: Module name of the layer.
    """

    layer: int
    micro_batch: int
    chunk: int
    name: str

    def __str__(self) -> str:
        return f"layer {self.layer} ({self.name}), micro-batch {self.micro_batch}"


class ActivationKey(NamedTuple):
    """One storage that a scope saved; ``number`` counts them within the scope."""

    scope: ScopeKey
    number: int

    def __str__(self) -> str:
        return f"{self.scope}, activation {self.number}"
