"""Limits, plans and predictions: the words in which session and planner talk to each other."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tba_offload.config.policy import Placement
from tba_offload.days import DAY
from tba_offload.formatting import readable_rate, readable_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tba_offload.config.policy import LayerId, Policy

MARGIN = 0.02
"""Share of the budget that plans leave free: a prediction is not exact, and a budget is hard."""

SPARE = 1 / 64
"""Share of what a device has left that plans do not use: a base that grows a little breaks nothing."""


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
    def setting(self) -> str:
        """Name of the setting that the budget comes from."""
        is_derived = self.device is not None and self.budget == self.device.budget
        return "budget.device_bytes" if is_derived else "budget.activation_bytes"

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

    def as_json(self) -> dict[str, Any]:
        """Return the plan for a run log."""
        return {
            "placements": [placement.value for placement in self.placements],
            "window": self.window,
            "prediction": None if self.prediction is None else dataclasses.asdict(self.prediction),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Plan:
        """Return the plan of a run log, without its prediction."""
        return cls(tuple(map(Placement, document["placements"])), window=document["window"])

    @property
    def strategy(self) -> str:
        """One word for run logs: the placement that all layers share, or ``mixed``."""
        used = set(self.placements)
        return used.pop().value if len(used) == 1 else "mixed"
