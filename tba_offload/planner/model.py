"""Data classes of the planner: step profiles, rates, limits, plans and predictions.

:mod:`tba_offload.planner.measure` computes a step profile from the trace of a step. A step profile holds no
tensors, and is written to the run log as JSON.
"""

from __future__ import annotations

import functools
import math
import statistics
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import NamedTuple

from tba_offload.config.policy import Placement
from tba_offload.days import DAY
from tba_offload.formatting import readable_rate, readable_size

MARGIN = 0.02
"""Fraction of the budget that plans leave free, because predictions are not exact."""

SPARE = 1 / 64
"""Fraction of the device's free memory that plans leave unused, because the memory in use before a step may
grow slightly."""

LEAST_RECOMPUTED = 0.5
"""Smallest accepted time of a second forward, relative to the first forward. A smaller measurement is treated
as noise."""

HOOK_SECONDS = 10e-6
"""Assumed time in seconds in which the training thread saves or restores one offloaded activation."""


# ---- the profile of a step ------------------------------------------------------------------------


class Saved(NamedTuple):
    """One activation: a storage that a layer saves for backward.

    Attributes:
        nbytes: Size of the storage in bytes.
        at: Time at which the storage is saved, as a fraction of the layer's forward time.
        until: Time at which backward first uses the storage, as a fraction of the layer's backward time.
        rebuilt: True if ``offload-remat`` rebuilds the activation, False if ``offload-remat`` offloads the
            activation, ``None`` if unknown.
    """

    nbytes: int
    at: float
    until: float
    rebuilt: bool | None = None


class Beside(NamedTuple):
    """Largest memory while a layer runs, without the saved activations of layers.

    The memory consists of temporaries, gradients of activations, and other memory in use.

    Attributes:
        forward: Bytes in use from the start of the layer's forward to the start of the next layer's forward.
        backward: Bytes during the layer's backward, if saved activations are read back one after another.
        whole: Bytes during the layer's backward, if all saved activations are in memory from the start.
            ``whole`` may be less than ``backward``, because activations are freed before the peak.
    """

    forward: int = 0
    backward: int = 0
    whole: int = 0

    def at_least(self, other: Beside) -> Beside:
        """Return the larger value of each field."""
        return Beside(*map(max, self, other))


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Properties that similar layers share.

    Attributes:
        activations: The activations that one run of the layer saves, in order.
        small_bytes: Bytes of tensors that are too small to offload.
        input_bytes: Bytes of the layer's input, which stay in memory if the layer is recomputed.
        attention_bytes: Bytes of the output of the layer's fused attention; ``None`` if unknown.
        beside: Memory other than activations; ``None`` if memory was never measured.
        sources: Activations that ``offload-remat`` offloads only in order to rebuild other activations.
    """

    activations: tuple[Saved, ...]
    small_bytes: int
    input_bytes: int
    attention_bytes: int | None = None
    beside: Beside | None = None
    sources: tuple[Saved, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all activations of the layer that can be offloaded."""
        return sum(saved.nbytes for saved in self.activations)

    @property
    def whole_bytes(self) -> int:
        """Bytes of all saved tensors of the layer."""
        return self.nbytes + self.small_bytes

    @property
    def rebuilt_bytes(self) -> int:
        """Bytes that ``offload-remat`` rebuilds; 0 if unknown."""
        return sum(saved.nbytes for saved in self.activations if saved.rebuilt)


class Timing(NamedTuple):
    """Seconds of one run of a layer, without waits for I/O."""

    forward: float
    backward: float


Timings = dict[Placement, tuple[Timing, ...]]
"""Measured times of a layer kind under each placement in the last steps, oldest first."""


@functools.lru_cache
def median_of(timings: tuple[Timing, ...]) -> Timing:
    """Return the median times of forward and backward."""
    return Timing(*(statistics.median(values) for values in zip(*timings, strict=True)))


def computed_as(placement: Placement) -> Placement:
    """Return the placement whose measured times also apply to ``placement``."""
    way = placement.as_run
    if way.percent < 100:
        return Placement.OFFLOAD
    return Placement.RECOMPUTE if way is Placement.RECOMPUTE_OFFLOAD else way


class Slot(NamedTuple):
    """One forward or backward of a layer.

    Attributes:
        layer: Index of the layer.
        micro_batch: Number of the micro-batch in the step.
        backward: True for a backward, False for a forward.
        gap: Seconds of compute outside layers before this forward or backward.
        gradients: Largest number of gradient bytes in the forward or backward; 0 if gradients are not
            included.
    """

    layer: int
    micro_batch: int
    backward: bool
    gap: float
    gradients: int = 0


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Profile of one step of one process.

    Attributes:
        kinds: The kinds of layers.
        layers: For each layer, the index of the layer's kind in ``kinds``.
        timings: For each kind of layer, the measured times.
        slots: The forwards and backwards of layers in the step, in order.
        tail: Seconds of compute after the last slot.
        loss_bytes: Bytes in use between the last forward and the first backward, without the tensors that
            layers have saved.
        headroom: Measured peak minus the peak that the profile predicts, in bytes. May be negative.
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
        """Largest number of gradient bytes at one time; 0 if gradients are not included."""
        return max((slot.gradients for slot in self.slots), default=0)

    def without_gradients(self) -> StepProfile:
        """Return the profile for a budget that covers activations only."""
        slots = tuple(slot._replace(gradients=0) for slot in self.slots)
        return replace(self, slots=slots)

    def timing(self, layer: int, placement: Placement) -> Timing:
        """Return the seconds of one run of a layer under a placement, measured or estimated.

        Two rules correct noisy measurements: keeping takes no longer than offloading, and recomputation adds
        at least half a forward.
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
        """Return True if, for every kind of layer, times were measured or can be scaled from another kind."""
        kinds = range(len(self.kinds))
        return all(self._measured(kind, computed_as(placement)) is not None for kind in kinds)

    def _measured(self, kind: int, placement: Placement) -> Timing | None:
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
    """Rates of all drives together, and the rates of host memory if the store also uses host memory.

    Attributes:
        write: Bytes written per second.
        read: Bytes read per second.
        capacity: Capacity in bytes; ``None`` for no limit.
        host: Rates of host memory; ``None`` if host memory is not used.
        host_first: Whether writes go to host memory before they go to drives.
        is_assumed: Whether the rates are assumed, because no step has measured them.
    """

    write: float
    read: float
    capacity: int | None = None
    host: Bandwidth | None = None
    host_first: bool = False
    is_assumed: bool = False

    def scaled(self, factor: float) -> Bandwidth:
        """Return the rates multiplied by ``factor``."""
        return replace(self, write=self.write * factor, read=self.read * factor)

    def differs_from(self, other: Bandwidth, share: float) -> bool:
        """Return True if a rate or the capacity differs from ``other`` by more than a fraction."""
        pairs = zip_longest(self._figures(), other._figures(), fillvalue=0.0)
        return any(not (1 - share) * old <= new <= (1 + share) * old for new, old in pairs)

    def _figures(self) -> list[float]:
        own = [self.write, self.read, math.inf if self.capacity is None else self.capacity]
        return own if self.host is None else own + self.host._figures()

    def __str__(self) -> str:
        host = "" if self.host is None else f"; host memory: {self.host}"
        assumed = " (assumed, not measured)" if self.is_assumed else ""
        return f"{readable_rate(self.write)} written, {readable_rate(self.read)} read{assumed}{host}"


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """Memory of a device, and how much of this memory activations cannot use.

    Attributes:
        device_bytes: Largest number of bytes that may be allocated on the device.
        base_bytes: Bytes in use before the forward of a step, without gradients.
        gradient_bytes: Largest number of bytes that gradients and frozen weights use at one time.
    """

    device_bytes: int
    base_bytes: int = 0
    gradient_bytes: int = 0

    @property
    def left(self) -> int:
        """Bytes that the device has left for activations; negative if other data does not fit."""
        return self.device_bytes - self.base_bytes - self.gradient_bytes

    @property
    def budget(self) -> int:
        """Largest activation peak that the device allows."""
        return max(int((1 - SPARE) * self.left), 0)

    def __str__(self) -> str:
        base, gradients = readable_size(self.base_bytes), readable_size(self.gradient_bytes)
        whole = readable_size(self.device_bytes)
        return f"{whole}, minus {base} in use before a step and {gradients} of gradients"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that a plan must keep; ``None`` for no limit.

    Attributes:
        budget: Largest activation peak in bytes.
        window: Largest number of bytes in flight.
        written_per_day: Largest number of bytes written to the drives per day.
        device: Device memory from which the budget was derived; ``None`` if the policy sets the budget.
        nets_gradients: Whether activations may use the memory that the budget reserves for later gradients.
            Backward creates most gradients after activations are freed.
        is_fit: Whether the free memory of the device is the limit, because the policy sets no limit.
    """

    budget: int | None = None
    window: int | None = None
    written_per_day: int | None = None
    device: DeviceShare | None = None
    nets_gradients: bool = False
    is_fit: bool = False

    def on_device(self, device: DeviceShare) -> Limits:
        """Return these limits, reduced to the memory that ``device`` leaves for activations."""
        # A budget of the user limits activations alone. Otherwise activations may use the memory of later
        # gradients.
        nets = self.nets_gradients or self.budget is None
        budget, window = (
            device.budget if limit is None else min(limit, device.budget)
            for limit in (self.budget, self.window)
        )
        return replace(self, budget=budget, window=window, device=device, nets_gradients=nets)

    @property
    def planned(self) -> float:
        """Largest peak in bytes for a new plan: the budget minus the margin."""
        return float("inf") if self.budget is None else self.budget * (1 - MARGIN)

    def planned_in(self, seconds: float) -> float:
        """Return how many bytes a step of ``seconds`` may write within the daily limit."""
        if self.written_per_day is None:
            return float("inf")
        return self.written_per_day * seconds / DAY * (1 - MARGIN)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Figures of a simulated step.

    Attributes:
        seconds: Duration of the step.
        stall_seconds: Seconds in which compute waits for I/O.
        peak_bytes: Largest use of the budget in bytes: memory in use and the headroom, minus the memory
            reserved for later gradients.
        written_bytes: Bytes written to drives.
        activation_peak: Peak memory in bytes, which includes activations, other memory in use, and the
            headroom.
        held_bytes: ``peak_bytes`` without bytes in flight.
        forwarded_bytes: Bytes of offloaded layers that backward found in memory.
        sent_bytes: Upper bound of ``written_bytes``: the bytes written if backward finds no offloaded bytes
            in memory.
        host_bytes: Bytes written to host memory, if the store uses both host memory and drives.
    """

    seconds: float
    stall_seconds: float
    peak_bytes: int
    written_bytes: int
    activation_peak: int
    held_bytes: int = 0
    forwarded_bytes: int = 0
    sent_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep(Prediction):
    """Predicted figures of a step under the plan for a budget.

    Attributes:
        budget_bytes: Largest activation peak that the budget allows; ``None`` for no limit.
        fits: Whether the plan stays within the budget.
        layers: Number of layers per placement, for example ``"4 keep, 8 offload"``.
        window_bytes: Largest number of bytes in flight; ``None`` for no limit.
    """

    budget_bytes: int | None
    fits: bool
    layers: str
    window_bytes: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """Placements of all layers of this process for a whole step.

    Attributes:
        placements: Placement of each layer, in the order of the session's layers.
        window: Largest number of bytes in flight; ``None`` for no limit.
        prediction: Predicted figures of a step; ``None`` if not computed.
    """

    placements: tuple[Placement, ...]
    window: int | None = field(default=None, kw_only=True)
    prediction: Prediction | None = field(default=None, kw_only=True, compare=False)
