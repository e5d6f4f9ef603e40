"""What plans are made from, and what they are: the profile of a step, rates, limits, plans and predictions.

A profile holds no tensors. It is measured from the trace of a step (:mod:`tba_offload.planner.measure`), is
written to the run log as JSON, and is all that the simulator needs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from tba_offload.config.policy import Placement
from tba_offload.days import DAY
from tba_offload.formatting import readable_rate, readable_size
from tba_offload.placements import staying

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.config.policy import LayerId, Policy

MARGIN = 0.02
"""Share of the budget that plans leave free: a prediction is not exact, and a budget is hard."""

SPARE = 1 / 64
"""Share of what a device has left that plans do not use: a base that grows a little breaks nothing."""

LEAST_RECOMPUTED = 0.5
"""A second forward takes at least this share of the first one; a measurement of less is noise."""

HOOK_SECONDS = 10e-6
"""Offloading an activation takes at least this long on the training thread, in either direction."""


# ---- the profile of a step ------------------------------------------------------------------------


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


Timings = dict[Placement, tuple[Timing, ...]]
"""Measurements of a kind of layers under each placement in the last steps, oldest first."""


@functools.lru_cache
def median_of(timings: tuple[Timing, ...]) -> Timing:
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
        timings: For each kind, what was measured of it.
        slots: The compute of the step, in its order.
        tail: Seconds of compute after the last slot.
        loss_bytes: Bytes between the last forward and its backward beside what layers have saved.
        headroom: Bytes by which the measured peak was above what this profile predicts; may be negative.
    """

    kinds: tuple[LayerKind, ...]
    layers: tuple[int, ...]
    timings: tuple[Timings, ...]
    slots: tuple[Slot, ...]
    tail: float = 0.0
    loss_bytes: int = 0
    headroom: int = 0

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
        return replace(self, slots=slots)

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
            return median_of(own[placement])
        for other in self.timings:
            shared = next((way for way in own if way in other), None)
            if placement in other and shared is not None:
                mine, known, wanted = map(median_of, (own[shared], other[shared], other[placement]))
                scale = [a / b if b else 1.0 for a, b in zip(mine, known, strict=True)]
                return Timing(*(a * b for a, b in zip(wanted, scale, strict=True)))
        return None


# ---- limits and plans -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Rates of the store, all drives and host memory together.

    Attributes:
        write: Bytes a second to it.
        read: Bytes a second from it.
        capacity: Bytes that it holds at most; ``None`` for no limit.
    """

    write: float
    read: float
    capacity: int | None = None

    def __post_init__(self) -> None:
        if not (self.write > 0 and self.read > 0 and (self.capacity or 0) >= 0):
            raise ValueError(f"rates must be positive, and the capacity not negative: {self}")

    def scaled(self, factor: float) -> Bandwidth:
        """Return the same store, ``factor`` times as fast."""
        return replace(self, write=self.write * factor, read=self.read * factor)

    def differs_from(self, other: Bandwidth, share: float) -> bool:
        """Return True if a rate or the room is more than ``share`` away from that of ``other``."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        figures = ([math.inf if figure is None else figure for figure in pair] for pair in pairs)
        return any(not (1 - share) * old <= new <= (1 + share) * old for new, old in figures)

    def __str__(self) -> str:
        return f"{readable_rate(self.write)} written, {readable_rate(self.read)} read"


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """Bytes on a device beside activations.

    Attributes:
        device_bytes: The most that may be allocated there.
        base_bytes: Live before the forward of a step, without gradients.
        gradient_bytes: The most gradients at one time, and frozen weights that come and go.
    """

    device_bytes: int
    base_bytes: int = 0
    gradient_bytes: int = 0

    @property
    def left(self) -> int:
        """Bytes left for activations; negative if the device is too small already."""
        return self.device_bytes - self.base_bytes - self.gradient_bytes

    @property
    def budget(self) -> int:
        """Largest activation peak."""
        return max(int((1 - SPARE) * self.left), 0)

    def holds_for(self, other: DeviceShare) -> bool:
        """Return True if the budget made from this share still fits ``other`` and wastes little of it."""
        left = max(other.left, 0)
        return (1 - 2 * SPARE) * left <= self.budget <= left

    def __str__(self) -> str:
        base, gradients = readable_size(self.base_bytes), readable_size(self.gradient_bytes)
        whole = readable_size(self.device_bytes)
        return f"of {whole}, less {base} live before a step and {gradients} of gradients"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan must keep to; ``None`` means no limit.

    Attributes:
        budget: Largest activation peak, bytes.
        window: Most bytes in flight.
        written_per_day: Most bytes written to the drives in a day.
        device: Where the budget comes from, if it was derived from a device.
        nets_gradients: Whether activations may use the room of gradients that come later. A budget derived
            from a device leaves room for all gradients, most of which come when activations have gone.
        is_fit: Whether no limit was set, so that the planner fits the device.
    """

    budget: int | None = None
    window: int | None = None
    written_per_day: int | None = None
    device: DeviceShare | None = None
    nets_gradients: bool = False
    is_fit: bool = False

    def on_device(self, device: DeviceShare) -> Limits:
        """Return these limits on a device that has no more left than ``device`` says."""
        nets = self.nets_gradients or self.budget is None  # no limit is of activations alone
        budget, window = (
            device.budget if limit is None else min(limit, device.budget)
            for limit in (self.budget, self.window)
        )
        return replace(self, budget=budget, window=window, device=device, nets_gradients=nets)

    @property
    def planned(self) -> float:
        """Peak in bytes that plans are made for: the budget less the margin."""
        return float("inf") if self.budget is None else self.budget * (1 - MARGIN)

    def planned_in(self, seconds: float) -> float:
        """Return the bytes that a step of ``seconds`` may write."""
        if self.written_per_day is None:
            return float("inf")
        return self.written_per_day * seconds / DAY * (1 - MARGIN)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Figures of a simulated step.

    Attributes:
        seconds: Its duration.
        stall_seconds: Seconds of it in which compute waits for I/O.
        peak_bytes: Most bytes of the budget that are taken, with what lies beside activations and the
            headroom: the activation peak, less the room that gradients which come later leave.
        written_bytes: Bytes written to the store.
        activation_peak: The activation peak, bytes.
        held_bytes: The most of ``peak_bytes`` that was not in flight.
        read_bytes: Bytes read back.
        forwarded_bytes: Bytes of offloaded layers that backward found in memory.
        fallback_bytes: Bytes that stayed because the store had no room.
    """

    seconds: float
    stall_seconds: float
    peak_bytes: int
    written_bytes: int
    activation_peak: int
    held_bytes: int = 0
    read_bytes: int = 0
    forwarded_bytes: int = 0
    fallback_bytes: int = 0

    @property
    def sent_bytes(self) -> int:
        """Most bytes that may be written: what backward finds in memory depends on the drive's mood."""
        return self.written_bytes + self.forwarded_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep(Prediction):
    """Expected figures of a step under the plan for a budget.

    Attributes:
        budget_bytes: The activation peak that the plan was made for; ``None`` for no limit.
        fits: Whether the plan keeps to the budget.
        layers: The number of layers of each placement, such as ``"4 keep, 8 offload"``.
        window_bytes: Most bytes in flight; ``None`` for no limit.
    """

    budget_bytes: int | None
    fits: bool
    layers: str
    window_bytes: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """A placement for every layer of this process, fixed before a step begins.

    Attributes:
        placements: One for each layer, in the order of the session's layers.
        window: Most bytes in flight; ``None`` for no limit.
        prediction: Expected figures; ``None`` if they were not computed.
    """

    placements: tuple[Placement, ...]
    window: int | None = field(default=None, kw_only=True)
    prediction: Prediction | None = field(default=None, kw_only=True, compare=False)

    @classmethod
    def from_policy(
        cls,
        policy: Policy,
        layers: Sequence[LayerId],
        everywhere: Sequence[LayerId] | None = None,
        *,
        window: int | None = None,
    ) -> Plan:
        """Return the plan that a policy asks for.

        Args:
            policy: The rules.
            layers: The layers of this process.
            everywhere: Those of all processes, by which rules are judged.
            window: Most bytes in flight; ``None`` for no limit.

        Raises:
            ConfigError: A rule takes no effect.
        """
        resolved = policy.resolve(layers, everywhere)
        return cls(tuple(resolved[index] for index in range(len(layers))), window=window)

    @property
    def strategy(self) -> str:
        """One word for run logs: the placement that all layers share, or ``mixed``."""
        used = set(self.placements)
        return used.pop().value if len(used) == 1 else "mixed"
