"""The plan of a step: a placement for every layer, fixed before the step begins.

One that turns out to be larger than planned is the exception: its rest has another plan.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tba_offload.days import DAY
from tba_offload.plan.tuning import TUNING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.config.policy import LayerId, Placement, Policy
    from tba_offload.plan.device_share import DeviceShare
    from tba_offload.plan.profile import LayerKind


@dataclass(frozen=True, slots=True)
class Limits:
    """The bytes that a plan must keep to.

    Attributes:
        budget: Most bytes of the activation peak; ``None`` for no limit.
        window: Most bytes in flight; ``None`` for no limit.
        written_per_day: Most bytes that may be written to the drives in a day; ``None`` for no limit.
        device: What the budget was derived from, if it was.
        nets_gradients: Whether activations may lie where gradients come later: the budget leaves room for
            all gradients, most of which come when most activations have gone.
    """

    budget: int | None = None
    window: int | None = None
    written_per_day: int | None = None
    device: DeviceShare | None = None
    nets_gradients: bool = False

    def on_device(self, device: DeviceShare) -> Limits:
        """Return these limits where a device has no more left than that."""
        nets = self.nets_gradients or self.budget is None  # no limit is of activations alone
        budget, window = (
            device.budget if limit is None else min(limit, device.budget)
            for limit in (self.budget, self.window)
        )
        return replace(self, budget=budget, window=window, device=device, nets_gradients=nets)

    @property
    def setting(self) -> str:
        """What of a policy the budget comes from."""
        is_derived = self.device is not None and self.budget == self.device.budget
        return "budget.device_bytes" if is_derived else "budget.activation_bytes"

    @property
    def planned(self) -> float:
        """Bytes of the peak that plans are made for: the budget less the margin."""
        return float("inf") if self.budget is None else self.budget * (1 - TUNING.margin)

    def written_in(self, seconds: float) -> float:
        """Bytes that a step may write, if such steps follow each other day and night.

        Args:
            seconds: How long it takes.
        """
        return float("inf") if self.written_per_day is None else self.written_per_day * seconds / DAY

    def planned_in(self, seconds: float) -> float:
        """Bytes that plans are made to write in a step: those that it may write, less the margin."""
        return self.written_in(seconds) * (1 - TUNING.margin)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan is expected to do.

    Attributes:
        seconds: Duration of the step.
        stall_seconds: How much of it compute waits for I/O.
        peak_bytes: Bytes of the budget that it takes: the activation peak, or less where the budget leaves
            room for gradients that come later.
        written_bytes: Bytes that go to the drives.
        activation_bytes: The activation peak, if it is not ``peak_bytes``.
    """

    seconds: float
    stall_seconds: float
    peak_bytes: int
    written_bytes: int
    activation_bytes: int | None = None

    @property
    def activation_peak(self) -> int:
        """The activation peak, bytes."""
        return self.peak_bytes if self.activation_bytes is None else self.activation_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep(Prediction):
    """What a plan is predicted to do.

    Attributes:
        budget_bytes: The activation peak that the plan was made for; ``None`` for none.
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
    """What every layer of this process does.

    Attributes:
        placements: One for each layer, in the order of the session's layers.
        window: Most bytes in flight; ``None`` for no limit.
        prediction: What it is expected to do, if that was found out.
    """

    placements: tuple[Placement, ...]
    window: int | None = field(default=None, kw_only=True)
    prediction: Prediction | None = field(default=None, kw_only=True)

    @classmethod
    def from_policy(
        cls,
        policy: Policy,
        layers: Sequence[LayerId],
        everywhere: Sequence[LayerId] | None = None,
        *,
        window: int | None = None,
    ) -> Plan:
        """Apply the rules of a policy.

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

    def staying(self, layer: int, kind: LayerKind) -> frozenset[int]:
        """Numbers of the activations of an offloaded layer that stay in memory."""
        percent = self.placements[layer].percent
        return kind.staying(percent) if percent < 100 else frozenset()

    def kept_bytes(self, layer: int, kind: LayerKind) -> int:
        """Bytes of an offloaded layer's activations that stay in memory."""
        return sum(kind.activations[number].nbytes for number in self.staying(layer, kind))

    def as_json(self) -> dict[str, Any]:
        """Return the plan for a run log."""
        return {
            "placements": [placement.value for placement in self.placements],
            "kept": [],  # earlier plans kept single activations
            "window": self.window,
            "prediction": dataclasses.asdict(self.prediction) if self.prediction is not None else None,
        }

    @property
    def strategy(self) -> str:
        """One word for run logs: the placement that all layers share, or ``mixed``."""
        used = set(self.placements)
        return used.pop().value if len(used) == 1 else "mixed"
