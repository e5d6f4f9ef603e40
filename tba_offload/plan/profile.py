"""What a step is like, as the planner sees it: layers, what they save, how long they take, in which order.

A profile knows nothing of tensors. It is made from the trace of a step, travels in the run log as plain JSON,
and is all that planner and simulator ask for.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from tba_offload.policy import Placement


class Saved(NamedTuple):
    """One activation: a storage that a layer saves for backward.

    Attributes:
        nbytes: Its size.
        at: When it is saved, as a share of the layer's forward time, 0 to 1.
        until: When backward first uses it, as a share of the layer's backward time, 0 to 1.
    """

    nbytes: int
    at: float
    until: float


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What equal layers have in common.

    Attributes:
        activations: What one execution saves, in the order of saving.
        small_bytes: Bytes that it saves in tensors too small to offload; they always stay.
        input_bytes: Bytes of its input: what is left of it between forward and backward if it is recomputed.
        at_once: If it stands for several layers: most bytes that are in memory at once, inputs not counted,
            if they are recomputed one after the other.
    """

    activations: tuple[Saved, ...]
    small_bytes: int
    input_bytes: int
    at_once: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all activations that can be offloaded."""
        return sum(saved.nbytes for saved in self.activations)

    @property
    def recomputed_bytes(self) -> int:
        """Bytes that recomputation brings into memory beside the input."""
        return self.nbytes + self.small_bytes - self.input_bytes if self.at_once is None else self.at_once


def computed_as(placement: Placement) -> Placement:
    """The placement among keep, offload and recompute that computes the same."""
    if placement is Placement.AUTO:
        return Placement.OFFLOAD
    return Placement.RECOMPUTE if placement.recomputes else placement


class Timing(NamedTuple):
    """Seconds of one execution of a layer, waiting for I/O not counted."""

    forward: float
    backward: float

    @property
    def whole(self) -> float:
        """Both together."""
        return self.forward + self.backward


class Slot(NamedTuple):
    """A stretch of compute time: one execution of a layer, in one direction.

    Attributes:
        layer: Index of the layer among those of this process.
        micro_batch: Which of its executions.
        backward: The direction.
        gap: Seconds of other compute before it: embedding, head, loss, communication.
    """

    layer: int
    micro_batch: int
    backward: bool
    gap: float


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One step of one process.

    Attributes:
        kinds: The kinds of layers.
        layers: For each layer, the index of its kind.
        timings: For each kind, what was measured of it under each placement.
        slots: The compute of the step, in its order.
        tail: Seconds of compute behind the last slot.
        rest_bytes: What the activation peak holds beside activations of layers: logits, temporaries.
    """

    kinds: tuple[LayerKind, ...]
    layers: tuple[int, ...]
    timings: tuple[dict[Placement, Timing], ...]
    slots: tuple[Slot, ...]
    tail: float = 0.0
    rest_bytes: int = 0

    def kind_of(self, layer: int) -> LayerKind:
        """The kind of a layer."""
        return self.kinds[self.layers[layer]]

    def timing(self, layer: int, placement: Placement) -> Timing:
        """Seconds of a layer under a placement; where it was not measured, estimated from what was.

        A layer that keeps its activations does what one that offloads them does, and less: a measurement that
        says otherwise is noise. Recomputation is a kept layer with one more forward, wherever its input was.
        """
        kind = self.layers[layer]
        placement = computed_as(placement)
        if placement is not Placement.RECOMPUTE:
            offloaded = self._measured(kind, Placement.OFFLOAD)
            kept = self._measured(kind, Placement.KEEP)
            if placement is Placement.KEEP and kept is not None and offloaded is not None:
                return Timing(*map(min, kept, offloaded))
            found = kept or offloaded if placement is Placement.KEEP else offloaded or kept
            if found is not None:
                return found
            forward, backward = self.timings[kind][Placement.RECOMPUTE]
            return Timing(forward, max(backward - forward, 0.0))
        measured = self._measured(kind, Placement.RECOMPUTE)
        if measured is None:
            forward, backward = self.timing(layer, Placement.KEEP)
            return Timing(forward, backward + forward)
        return measured

    def _measured(self, kind: int, placement: Placement) -> Timing | None:
        """What was measured of a kind, or of another kind in proportion."""
        own = self.timings[kind]
        if placement in own:
            return own[placement]
        for other in self.timings:
            if placement in other and (shared := next((p for p in own if p in other), None)) is not None:
                scale = [a / b if b else 1.0 for a, b in zip(own[shared], other[shared], strict=True)]
                return Timing(*(a * b for a, b in zip(other[placement], scale, strict=True)))
        return None

    def as_json(self) -> dict[str, Any]:
        """The profile for a run log."""
        return {
            "kinds": [dataclasses.asdict(kind) for kind in self.kinds],
            "layers": list(self.layers),
            "timings": [
                {placement.value: list(timing) for placement, timing in known.items()}
                for known in self.timings
            ],
            "slots": [list(slot) for slot in self.slots],
            "tail": self.tail,
            "rest_bytes": self.rest_bytes,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> StepProfile:
        """The profile that :meth:`as_json` made.

        Raises:
            ValueError: The document is none.
        """
        try:
            return cls(
                kinds=tuple(
                    LayerKind(
                        tuple(Saved(int(n), float(at), float(until)) for n, at, until in kind["activations"]),
                        int(kind["small_bytes"]),
                        int(kind["input_bytes"]),
                        kind.get("at_once"),
                    )
                    for kind in document["kinds"]
                ),
                layers=tuple(int(kind) for kind in document["layers"]),
                timings=tuple(
                    {Placement(name): Timing(*map(float, timing)) for name, timing in known.items()}
                    for known in document["timings"]
                ),
                slots=tuple(
                    Slot(int(layer), int(micro_batch), bool(backward), float(gap))
                    for layer, micro_batch, backward, gap in document["slots"]
                ),
                tail=float(document["tail"]),
                rest_bytes=int(document["rest_bytes"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a step profile: {error!r}") from error
