"""What a step is like, as the planner sees it: layers, what they save, how long they take, in which order.

A profile knows nothing of tensors. It is made from the trace of a step, travels in the run log as plain JSON,
and is all that planner and simulator ask for.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tba_offload.config.policy import Placement
from tba_offload.placements import staying
from tba_offload.plan.beside import Beside
from tba_offload.plan.tuning import TUNING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Saved(NamedTuple):
    """One activation: a storage that a layer saves for backward.

    Attributes:
        nbytes: Its size.
        at: When it is saved, as a share of the layer's forward time, 0 to 1.
        until: When backward first uses it, as a share of the layer's backward time, 0 to 1.
        rebuilt: Whether it is rebuilt and not offloaded where a layer is placed ``offload-remat``; ``None``
            before a layer of its kind has run so.
        needed: When backward first needs it in such a layer, perhaps to rebuild another from it; ``None`` if
            that is not known, or it is rebuilt itself.
    """

    nbytes: int
    at: float
    until: float
    rebuilt: bool | None = None
    needed: float | None = None

    @property
    def fetched(self) -> float:
        """When it must be in memory in a layer placed ``offload-remat``, as far as that is known."""
        return self.until if self.needed is None else min(self.needed, self.until)

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Saved:
        """Return an activation of a run log.

        Before there was a placement ``offload-remat`` they said less of it.
        """
        nbytes, at, until, *more = values
        rebuilt, needed = more or (None, None)
        return cls(
            int(nbytes),
            float(at),
            float(until),
            rebuilt if rebuilt is None else bool(rebuilt),
            needed if needed is None else float(needed),
        )


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What equal layers have in common.

    Attributes:
        activations: What one execution saves, in the order of saving.
        small_bytes: Bytes that it saves in tensors too small to offload; they always stay.
        input_bytes: Bytes of its input: what is left of it between forward and backward if it is recomputed.
        at_once: If it stands for several layers: most bytes that are in memory at once, inputs not counted,
            if they are recomputed one after the other.
        attention_bytes: Bytes that its fused attention puts out; ``None`` before a layer of its kind has run
            with the placement ``recompute-except-attention``.
        beside: What there was beside all that layers have saved, by the placement under which it was seen.
    """

    activations: tuple[Saved, ...]
    small_bytes: int
    input_bytes: int
    at_once: int | None = None
    attention_bytes: int | None = None
    beside: dict[Placement, Beside] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all activations that can be offloaded."""
        return sum(saved.nbytes for saved in self.activations)

    def at_least(self, other: LayerKind) -> LayerKind:
        """Record that this kind with the sizes of another one where those are larger.

        If they do not save equally many activations, it is the one of the two that saves more.
        """
        if len(self.activations) != len(other.activations):
            return max(self, other, key=lambda kind: kind.nbytes)
        pairs = zip(self.activations, other.activations, strict=True)
        return dataclasses.replace(
            self,
            activations=tuple(mine._replace(nbytes=max(mine.nbytes, its.nbytes)) for mine, its in pairs),
            small_bytes=max(self.small_bytes, other.small_bytes),
            input_bytes=max(self.input_bytes, other.input_bytes),
            attention_bytes=_most_known(self.attention_bytes, other.attention_bytes),
            beside={
                placement: self.beside_as(placement).at_least(other.beside_as(placement))
                for placement in {**self.beside, **other.beside}
            },
        )

    def beside_as(self, placement: Placement) -> Beside:
        """Return what there is beside if it is placed so, as far as that was seen.

        Where all that a layer saves is in memory at once, backward frees some of it before it needs most, so
        that less lies beside it than where it is offloaded.

        Args:
            placement: One that :func:`computed_as` gives.
        """
        if placement in self.beside:
            return self.beside[placement]
        is_whole = placement is Placement.KEEP or placement.recomputes
        alike = [seen for way, seen in self.beside.items() if is_whole and way.recomputes]
        if not alike and is_whole:
            # Layers put out as much as they are given.
            again = self.input_bytes if placement.recomputes else None
            simple = (self.beside.get(way) for way in (Placement.KEEP, Placement.OFFLOAD))
            alike = [seen.if_whole(again=again) for seen in simple if seen is not None]
        if not alike and Placement.OFFLOAD in self.beside:
            return self.beside[Placement.OFFLOAD]
        return functools.reduce(Beside.at_least, alike or self.beside.values(), Beside())

    def staying(self, percent: int) -> frozenset[int]:
        """Numbers of the activations that stay where that percentage of the bytes travels."""
        return staying((saved.nbytes for saved in self.activations), percent)

    @property
    def rebuilt_bytes(self) -> int:
        """Bytes of those that are rebuilt if the layer is placed ``offload-remat``; 0 if not known."""
        return sum(saved.nbytes for saved in self.activations if saved.rebuilt)

    @property
    def knows_rebuilt(self) -> bool:
        """Whether it is known which are."""
        return all(saved.rebuilt is not None for saved in self.activations)

    @property
    def may_spare_attention(self) -> bool:
        """Whether it has fused attention, or that is not known."""
        return self.attention_bytes != 0

    @property
    def recomputed_bytes(self) -> int:
        """Bytes that recomputation brings into memory beside the input."""
        return self.nbytes + self.small_bytes - self.input_bytes if self.at_once is None else self.at_once


def _most_known(*sizes: int | None) -> int | None:
    """Return the largest of some sizes that are known; ``None`` if none is."""
    return max((size for size in sizes if size is not None), default=None)


def computed_as(placement: Placement) -> Placement:
    """Return the placement by which a layer computes the same, of those that are measured each for itself.

    A layer of which a share travels computes as one that offloads, less what that takes for what stays.
    """
    way = placement.as_run
    if way.percent < 100:
        return Placement.OFFLOAD
    return Placement.RECOMPUTE if way is Placement.RECOMPUTE_OFFLOAD else way  # the inputs travel meanwhile


class Timing(NamedTuple):
    """Seconds of one execution of a layer, waiting for I/O not counted."""

    forward: float
    backward: float

    @property
    def whole(self) -> float:
        """Both together."""
        return self.forward + self.backward


Samples = dict[Placement, tuple[Timing, ...]]
"""Measurements of a kind of layers under each placement, in the last steps that tell of it, oldest first."""


def median_of(timings: Iterable[Timing]) -> Timing:
    """Return the median of some timings, of each direction for itself."""
    return Timing(*(statistics.median(values) for values in zip(*timings, strict=True)))


class Slot(NamedTuple):
    """A stretch of compute time: one execution of a layer, in one direction.

    Attributes:
        layer: Index of the layer among those of this process.
        micro_batch: Number of the forward pass that it belongs to.
        backward: The direction.
        gap: Seconds of other compute before it: embedding, head, loss, communication.
        held_until: If what the layer saved outlives its backward, as with zero-bubble pipelines: the place of
            the slot by whose begin it is gone. ``None`` if backward frees it.
        gradients: Most bytes of gradients that there are in it; 0 if they are left out.
    """

    layer: int
    micro_batch: int
    backward: bool
    gap: float
    held_until: int | None = None
    gradients: int = 0

    def as_json(self) -> list[Any]:
        """Return the slot for a run log."""
        return list(self[:5] if self.held_until is not None else self[:4])

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Slot:
        """Return a slot of a run log, without gradients; most say nothing of what outlives backward."""
        layer, micro_batch, backward, gap, *held = values
        held_until = int(held[0]) if held else None
        return cls(int(layer), int(micro_batch), bool(backward), float(gap), held_until)


def moved_slots(slots: Iterable[Slot], places: Sequence[int]) -> tuple[Slot, ...]:
    """Slots with other places.

    Args:
        slots: The slots, which tell the old places.
        places: For each old place how many of the new slots begin before it.
    """
    return tuple(
        slot if slot.held_until is None else slot._replace(held_until=places[slot.held_until])
        for slot in slots
    )


def _gradients_in_forward(slots: Iterable[Slot]) -> int:
    return max((slot.gradients for slot in slots if not slot.backward), default=0)


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One step of one process.

    Attributes:
        kinds: The kinds of layers.
        layers: For each layer, the index of its kind.
        timings: For each kind, what was measured of it under each placement.
        samples: For each kind, the measurements that those are the medians of; nothing if they are not known.
        slots: The compute of the step, in its order.
        tail: Seconds of compute after the last slot.
        loss_bytes: Bytes that there are between the last forward and its backward beside what layers have
            saved: logits, temporaries.
        rest_bytes: Bytes that steps were seen to need beyond all that; of a step of which nothing else was
            seen, all that lies beside the layers.
    """

    kinds: tuple[LayerKind, ...]
    layers: tuple[int, ...]
    timings: tuple[dict[Placement, Timing], ...]
    slots: tuple[Slot, ...]
    tail: float = 0.0
    loss_bytes: int = 0
    rest_bytes: int = 0
    samples: tuple[Samples, ...] = field(default=(), compare=False, repr=False)

    def beside_bytes(self, placements: Sequence[Placement]) -> int:
        """Most bytes that lie beside the layers at one time, if they are placed so."""
        ways = {(self.layers[layer], computed_as(each)) for layer, each in enumerate(placements)}
        return self.rest_bytes + max(self.loss_bytes, *(max(self.kinds[k].beside_as(way)) for k, way in ways))

    def kind_of(self, layer: int) -> LayerKind:
        """Return the kind of a layer."""
        return self.kinds[self.layers[layer]]

    @property
    def gradient_bytes(self) -> int:
        """Most bytes of gradients that there are at one time; 0 if they are left out."""
        return max((slot.gradients for slot in self.slots), default=0)

    def without_gradients(self) -> StepProfile:
        """Return the step for a budget of activations alone, without the times at which gradients come."""
        if not self.gradient_bytes:
            return self
        return dataclasses.replace(self, slots=tuple(slot._replace(gradients=0) for slot in self.slots))

    def with_gradients_of(self, other: StepProfile) -> StepProfile:
        """Record that this step with the most gradients of two.

        Other parameters may be trained in the next one.

        Only if layers run in the same order in both, and gradients are known of both.
        """
        orders = [[slot[:3] for slot in slots] for slots in (self.slots, other.slots)]
        if orders[0] != orders[1] or not (self.gradient_bytes and other.gradient_bytes):
            return self
        pairs = zip(self.slots, other.slots, strict=True)
        slots = (mine._replace(gradients=max(mine.gradients, its.gradients)) for mine, its in pairs)
        return dataclasses.replace(self, slots=tuple(slots))

    def samples_of(self, layer: int) -> Samples:
        """Return the measurements of a layer's times; of one of which only those are known, its timings."""
        kind = self.layers[layer]
        if self.samples:
            return self.samples[kind]
        return {placement: (timing,) for placement, timing in self.timings[kind].items()}

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest activation that can be offloaded."""
        return max((saved.nbytes for kind in self.kinds for saved in kind.activations), default=0)

    @property
    def layer_bytes(self) -> int:
        """Bytes that one run of each layer saves."""
        return sum(self.kind_of(layer).nbytes for layer in range(len(self.layers)))

    def at_least(self, other: StepProfile) -> StepProfile:
        """Record that this profile with the sizes of another one of the same layers, where those are larger.

        If more gradients were there in forward in the other step, as those of other micro-batches are, it has
        the schedule of that.
        """
        of_layers = list(zip(self.layers, other.layers, strict=True))
        pairs = sorted(set(of_layers))
        return dataclasses.replace(
            self,
            kinds=tuple(self.kinds[mine].at_least(other.kinds[its]) for mine, its in pairs),
            layers=tuple(pairs.index(pair) for pair in of_layers),
            timings=tuple(self.timings[mine] for mine, _ in pairs),
            samples=tuple(self.samples[mine] for mine, _ in pairs) if self.samples else (),
            slots=max(self.slots, other.slots, key=_gradients_in_forward),
            loss_bytes=max(self.loss_bytes, other.loss_bytes),
            rest_bytes=max(self.rest_bytes, other.rest_bytes),
        )

    def timing(self, layer: int, placement: Placement) -> Timing:
        """Seconds of a layer under a placement; where it was not measured, estimated from what was.

        A layer that keeps its activations does what one that offloads them does, and less: a measurement that
        says otherwise is noise. Recomputation is a kept layer with one more forward, wherever its input was.
        Rebuilding activations takes no more of a forward than their share of its bytes: they are of its
        cheap parts. That doing something again takes much less than that, or nothing, is noise too.
        """
        kind = self.layers[layer]
        placement = computed_as(placement)
        if placement is Placement.RECOMPUTE:
            return self._timing_of_recompute(layer)
        if placement is Placement.RECOMPUTE_EXCEPT_ATTENTION:
            return self._timing_except_attention(layer)
        if placement is Placement.OFFLOAD_REMAT:
            return self._timing_of_remat(layer)
        offloaded = self._measured(kind, Placement.OFFLOAD)
        kept = self._measured(kind, Placement.KEEP)
        if kept is not None and offloaded is not None:
            least = Timing(*map(min, kept, offloaded))
            if placement is Placement.KEEP:
                return least
            hooks = TUNING.hook_seconds * len(self.kinds[kind].activations)
            return Timing(*(max(seconds, hooks + few) for seconds, few in zip(offloaded, least, strict=True)))
        if placement is Placement.KEEP and kept is None and offloaded is not None:
            return Timing(*map(min, offloaded, self._without_second_forward(kind) or offloaded))
        found = kept or offloaded
        if found is not None:
            return found
        remat = self._measured(kind, Placement.OFFLOAD_REMAT)
        if remat is not None:
            return remat
        return self._without_second_forward(kind) or Timing(0.0, 0.0)

    def _without_second_forward(self, kind: int) -> Timing | None:
        """Return what a layer that is recomputed takes, but for that; ``None`` if none was."""
        ways = Placement.RECOMPUTE, Placement.RECOMPUTE_EXCEPT_ATTENTION
        again = next((known for way in ways if (known := self._measured(kind, way)) is not None), None)
        return None if again is None else Timing(again.forward, max(again.backward - again.forward, 0.0))

    def is_measured(self, placement: Placement) -> bool:
        """Whether the times of all layers under a placement come from measurements, if only of another kind.

        Where keep was not measured, a layer that keeps is taken to compute for as long as one that offloads.
        """
        return all(
            self._measured(kind, computed_as(placement)) is not None for layer, kind in enumerate(self.layers)
        )

    def rebuild_seconds(self, layer: int) -> float:
        """Seconds that a layer placed ``offload-remat`` takes longer than a kept one.

        Who rebuilds a part to let the rest travel pays for both.
        """
        return self._timing_of_remat(layer).whole - self.timing(layer, Placement.KEEP).whole

    def _least_rebuilding(self, layer: int, forward: float) -> float:
        kind = self.kind_of(layer)
        return TUNING.least_rebuilt * kind.rebuilt_bytes / kind.nbytes * forward if kind.nbytes else 0.0

    def _timing_of_recompute(self, layer: int) -> Timing:
        measured = self._measured(self.layers[layer], Placement.RECOMPUTE)
        kept = self.timing(layer, Placement.KEEP)
        if measured is not None and measured.whole >= kept.whole + TUNING.least_recomputed * kept.forward:
            return measured
        estimated = Timing(kept.forward, kept.backward + kept.forward)
        # What runs all but attention again was seen to take so long: all of it takes no less.
        spared = self._measured(self.layers[layer], Placement.RECOMPUTE_EXCEPT_ATTENTION)
        return estimated if spared is None else Timing(*map(max, spared, estimated))

    def _timing_except_attention(self, layer: int) -> Timing:
        """At most that of recomputation, and at least that of a kept layer with hooks for what travels."""
        whole = self._timing_of_recompute(layer)
        measured = self._measured(self.layers[layer], Placement.RECOMPUTE_EXCEPT_ATTENTION)
        if measured is None:
            return whole
        least = self.timing(layer, Placement.KEEP)
        return Timing(*(min(max(a, b), c) for a, b, c in zip(measured, least, whole, strict=True)))

    def _timing_of_remat(self, layer: int) -> Timing:
        kind = self.kind_of(layer)
        share = kind.rebuilt_bytes / kind.nbytes if kind.nbytes else 0.0
        measured = self._measured(self.layers[layer], Placement.OFFLOAD_REMAT)
        if measured is not None:
            forward, backward = self.timing(layer, Placement.KEEP)
            least = Timing(forward, backward + self._least_rebuilding(layer, forward))
            return Timing(*map(max, measured, least))
        forward, backward = self.timing(layer, Placement.OFFLOAD)
        return Timing(forward, backward + share * forward)

    def _measured(self, kind: int, placement: Placement) -> Timing | None:
        """Return what was measured of a kind, or of another kind in proportion."""
        own = self.timings[kind]
        if placement in own:
            return own[placement]
        for other in self.timings:
            if placement in other and (shared := next((p for p in own if p in other), None)) is not None:
                scale = [a / b if b else 1.0 for a, b in zip(own[shared], other[shared], strict=True)]
                return Timing(*(a * b for a, b in zip(other[placement], scale, strict=True)))
        return None

    def as_json(self) -> dict[str, Any]:
        """Return the profile for a run log."""
        return {
            "kinds": [dataclasses.asdict(kind) for kind in self.kinds],
            "layers": list(self.layers),
            "timings": [
                {placement.value: list(timing) for placement, timing in known.items()}
                for known in self.timings
            ],
            "slots": [slot.as_json() for slot in self.slots],
            **({"gradients": [slot.gradients for slot in self.slots]} if self.gradient_bytes else {}),
            "tail": self.tail,
            "loss_bytes": self.loss_bytes,
            "rest_bytes": self.rest_bytes,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> StepProfile:
        """Return the profile that :meth:`as_json` made.

        Raises:
            ValueError: The document is none.
        """
        try:
            slots = [Slot.from_json(slot) for slot in document["slots"]]
            gradients = document.get("gradients") or [0] * len(slots)
            return cls(
                kinds=tuple(
                    LayerKind(
                        tuple(Saved.from_json(saved) for saved in kind["activations"]),
                        int(kind["small_bytes"]),
                        int(kind["input_bytes"]),
                        kind.get("at_once"),
                        kind.get("attention_bytes"),
                        {
                            Placement(name): Beside.from_json(seen)
                            for name, seen in kind.get("beside", {}).items()
                        },
                    )
                    for kind in document["kinds"]
                ),
                layers=tuple(int(kind) for kind in document["layers"]),
                timings=tuple(
                    {Placement(name): Timing(*map(float, timing)) for name, timing in known.items()}
                    for known in document["timings"]
                ),
                slots=tuple(
                    slot._replace(gradients=int(nbytes))
                    for slot, nbytes in zip(slots, gradients, strict=True)
                ),
                tail=float(document["tail"]),
                loss_bytes=int(document.get("loss_bytes", 0)),
                rest_bytes=int(document["rest_bytes"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a step profile: {error!r}") from error
