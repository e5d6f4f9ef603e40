"""What a step looks like to the planner: layers, what they save, how long they take, in which order.

A profile holds no tensors. It is measured from the trace of a step (:mod:`tba_offload.planner.measure`), is
written to the run log as JSON, and is all that the simulator needs.
"""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import TypeAdapter

from tba_offload.config.policy import Placement
from tba_offload.placements import staying

if TYPE_CHECKING:
    from collections.abc import Iterable

LEAST_RECOMPUTED = 0.5
"""A second forward takes at least this share of the first one; a measurement of less is noise."""

HOOK_SECONDS = 10e-6
"""Offloading an activation takes at least this long on the training thread, in either direction."""


class Saved(NamedTuple):
    """One activation: a storage that a layer saves for backward.

    Attributes:
        nbytes: Its size.
        at: When it is saved, as a share of the layer's forward time.
        until: When backward first uses it, as a share of the layer's backward time.
        rebuilt: Whether ``offload-remat`` rebuilds it instead of offloading it; ``None`` if unknown.
    """

    nbytes: int
    at: float
    until: float
    rebuilt: bool | None = None


class Beside(NamedTuple):
    """Most bytes in memory while a layer runs, beside all that layers have saved.

    Temporaries, gradients of activations, and whatever lies there anyway.

    Attributes:
        forward: From the begin of its forward to that of the next layer's.
        backward: The same of its backward, where what it saved is read back bit by bit.
        whole: The same of its backward, where all that it saved is there from the begin: backward frees some
            of it before it needs most.
    """

    forward: int = 0
    backward: int = 0
    whole: int = 0

    def at_least(self, other: Beside) -> Beside:
        """Return the most of two, field by field."""
        return Beside(*map(max, self, other))


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What equal layers have in common.

    Attributes:
        activations: What one run saves, in the order of saving.
        small_bytes: Bytes in tensors too small to offload.
        input_bytes: Bytes of its input, which stay if it is recomputed.
        attention_bytes: Bytes of the output of its fused attention; ``None`` if unknown.
        beside: Bytes beside activations; ``None`` if memory was never looked at.
        sources: What ``offload-remat`` offloads only because it rebuilds others from it.
    """

    activations: tuple[Saved, ...]
    small_bytes: int
    input_bytes: int
    attention_bytes: int | None = None
    beside: Beside | None = None
    sources: tuple[Saved, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all activations that can be offloaded."""
        return sum(saved.nbytes for saved in self.activations)

    @property
    def whole_bytes(self) -> int:
        """Bytes of everything that it saves."""
        return self.nbytes + self.small_bytes

    def staying(self, percent: int) -> frozenset[int]:
        """Return the numbers of the activations that stay where that percentage of the bytes is offloaded."""
        return staying((saved.nbytes for saved in self.activations), percent)

    @property
    def rebuilt_bytes(self) -> int:
        """Bytes that ``offload-remat`` rebuilds; 0 if unknown."""
        return sum(saved.nbytes for saved in self.activations if saved.rebuilt)

    @property
    def spared_bytes(self) -> int:
        """Bytes by which ``offload-remat`` offloads less than ``offload``; 0 if unknown."""
        return self.rebuilt_bytes - sum(saved.nbytes for saved in self.sources)

    @property
    def knows_rebuilt(self) -> bool:
        """Whether a layer of this kind has run with ``offload-remat``."""
        return all(saved.rebuilt is not None for saved in self.activations)


class Timing(NamedTuple):
    """Seconds of one run of a layer, waits for I/O left out."""

    forward: float
    backward: float


Samples = dict[Placement, tuple[Timing, ...]]
"""Measurements of a kind of layers under each placement in the last steps, oldest first."""


def median_of(timings: Iterable[Timing]) -> Timing:
    """Return the median of each direction."""
    return Timing(*(statistics.median(values) for values in zip(*timings, strict=True)))


def computed_as(placement: Placement) -> Placement:
    """Return the measured placement that computes the same as ``placement``."""
    way = placement.as_run
    if way.percent < 100:
        return Placement.OFFLOAD
    return Placement.RECOMPUTE if way is Placement.RECOMPUTE_OFFLOAD else way


class Slot(NamedTuple):
    """One run of a layer, in one direction.

    Attributes:
        layer: Index of the layer.
        micro_batch: Number of the forward pass.
        backward: The direction.
        gap: Seconds of other compute before it.
        gradients: Most bytes of gradients that exist while it runs; 0 where they do not matter.
    """

    layer: int
    micro_batch: int
    backward: bool
    gap: float
    gradients: int = 0


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One step of one process.

    Attributes:
        kinds: The kinds of layers.
        layers: For each layer, the index of its kind.
        timings: For each kind, seconds under each placement that was measured.
        slots: The compute of the step, in its order.
        tail: Seconds of compute after the last slot.
        loss_bytes: Bytes between the last forward and its backward beside what layers have saved.
        headroom: Bytes by which the measured peak was above what this profile predicts; may be negative.
        samples: What ``timings`` are the medians of.
    """

    kinds: tuple[LayerKind, ...]
    layers: tuple[int, ...]
    timings: tuple[dict[Placement, Timing], ...]
    slots: tuple[Slot, ...]
    tail: float = 0.0
    loss_bytes: int = 0
    headroom: int = 0
    samples: tuple[Samples, ...] = field(default=(), compare=False, repr=False)

    def kind_of(self, layer: int) -> LayerKind:
        """Return the kind of a layer."""
        return self.kinds[self.layers[layer]]

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest activation that can be offloaded."""
        return max((saved.nbytes for kind in self.kinds for saved in kind.activations), default=0)

    @property
    def gradient_bytes(self) -> int:
        """Most bytes of gradients that exist at one time; 0 where they do not matter."""
        return max((slot.gradients for slot in self.slots), default=0)

    def without_gradients(self) -> StepProfile:
        """Return the profile for a budget of activations alone."""
        slots = tuple(slot._replace(gradients=0) for slot in self.slots)
        return dataclasses.replace(self, slots=slots)

    def timing(self, layer: int, placement: Placement) -> Timing:
        """Return the seconds of a layer under a placement, estimated where they were not measured.

        Keeping takes no longer than offloading, and recomputing a forward more: a measurement that says
        otherwise is noise.
        """
        number, kind, way = self.layers[layer], self.kind_of(layer), computed_as(placement)
        offloaded, kept = self._measured(number, Placement.OFFLOAD), self._measured(number, Placement.KEEP)
        some = kept or offloaded or self._measured(number, Placement.OFFLOAD_REMAT) or Timing(0.0, 0.0)
        keep = Timing(*map(min, kept or some, offloaded or some))
        if way is Placement.KEEP:
            return keep
        if way is Placement.OFFLOAD:
            hooks = HOOK_SECONDS * len(kind.activations) if kept and offloaded else 0.0
            return Timing(
                *(max(own, least + hooks) for own, least in zip(offloaded or some, keep, strict=True))
            )
        measured = self._measured(number, way)
        if way is Placement.OFFLOAD_REMAT:
            share = kind.rebuilt_bytes / max(kind.nbytes, 1)
            forward, backward = self.timing(layer, Placement.OFFLOAD)
            return Timing(*map(max, measured or (forward, backward + share * forward), keep))
        whole = self._measured(number, Placement.RECOMPUTE)
        if whole is None or sum(whole) < sum(keep) + LEAST_RECOMPUTED * keep.forward:
            whole = Timing(keep.forward, keep.backward + keep.forward)
        if way is Placement.RECOMPUTE or measured is None:
            return whole
        return Timing(*(min(max(a, b), c) for a, b, c in zip(measured, keep, whole, strict=True)))

    def is_measured(self, placement: Placement) -> bool:
        """Return True if the times of all layers under a placement were measured, if only of another kind."""
        kinds = range(len(self.kinds))
        return all(self._measured(kind, computed_as(placement)) is not None for kind in kinds)

    def _measured(self, kind: int, placement: Placement) -> Timing | None:
        """Return what was measured of a kind, or of another kind in proportion."""
        own = self.timings[kind]
        if placement in own:
            return own[placement]
        for other in self.timings:
            shared = next((way for way in own if way in other), None)
            if placement in other and shared is not None:
                scale = [a / b if b else 1.0 for a, b in zip(own[shared], other[shared], strict=True)]
                return Timing(*(a * b for a, b in zip(other[placement], scale, strict=True)))
        return None

    def as_json(self) -> dict[str, Any]:
        """Return the profile for a run log."""
        return _ADAPTER.dump_python(self, mode="json", exclude={"samples"})  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, document: object) -> StepProfile:
        """Return the profile that :meth:`as_json` wrote.

        Raises:
            ValueError: The document is no profile.
        """
        return _ADAPTER.validate_python(document)


_ADAPTER = TypeAdapter(StepProfile)
