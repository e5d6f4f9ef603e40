"""Plans in words: a new one in one line for logs, and why it places a layer as it does."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tba_offload.config.policy import Placement
from tba_offload.formatting import layers_by_placement, readable_size, significant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.plan.bandwidth import Bandwidth
    from tba_offload.plan.model import Plan
    from tba_offload.plan.profile import LayerKind, StepProfile, Timing
    from tba_offload.plan.writes import Writes


def describe_plan(
    names: Sequence[str], plan: Plan, before: Plan | None, why: str, writes: Writes | None = None
) -> str:
    """Return what a new plan does, what it is expected to bring, what it changes, and why it was made.

    Args:
        names: Module name of each layer.
        plan: The plan.
        before: The one that it replaces; ``None`` if it is the first.
        why: Why it was made.
        writes: What it writes in a day; ``None`` if nothing limits that.
    """
    told = [] if writes is None else [str(writes)]
    parts = [_placed(names, plan), *_predicted(plan), *told, *_changed(names, plan, before)]
    return "; ".join([*parts, f"made because {why}"])


def _placed(names: Sequence[str], plan: Plan) -> str:
    return layers_by_placement(names, [placement.value for placement in plan.placements])


def _predicted(plan: Plan) -> list[str]:
    expected = plan.prediction
    if expected is None:
        return []
    waits = f", {significant(expected.stall_seconds)} s of it waits" if expected.stall_seconds else ""
    peak = readable_size(expected.activation_peak)
    return [f"predicted peak {peak}, step {significant(expected.seconds)} s{waits}"]


def _changed(names: Sequence[str], plan: Plan, before: Plan | None) -> list[str]:
    if before is None:
        return []
    if before.placements != plan.placements:
        return [f"before: {_placed(names, before)}"]
    if before.window != plan.window:
        return [f"window {_window(plan)} instead of {_window(before)}"]
    return []


def _window(plan: Plan) -> str:
    return "without limit" if plan.window is None else readable_size(plan.window)


def explain(profile: StepProfile, plan: Plan, bandwidth: Bandwidth, layer: int) -> str:
    """Why a plan places a layer as it does, in one line."""
    return _Why(profile, plan, bandwidth, layer).words()


class _Why(NamedTuple):
    """The placement of a layer in words."""

    profile: StepProfile
    plan: Plan
    bandwidth: Bandwidth
    layer: int

    def words(self) -> str:
        placement = self.plan.placements[self.layer]
        if placement.recomputes:
            return self._recompute(placement)
        if not placement.offloads:
            return self._keep()
        return self._offload_remat() if placement.rebuilds else self._offload()

    def _keep(self) -> str:
        cost = _milliseconds(self._timing(Placement.OFFLOAD).whole - self._timing(Placement.KEEP).whole)
        return f"{self._size} have room; offloading takes {self._travel} of the drive and {cost} more compute"

    def _recompute(self, placement: Placement) -> str:
        if placement.spares_attention:
            moved = readable_size(self._kind.input_bytes + (self._kind.attention_bytes or 0))
            again = self._more(Placement.RECOMPUTE_EXCEPT_ATTENTION)
            all_of_it = f"{again} of compute, {self._again} with attention"
            return f"{all_of_it}, and {moved} travel instead of {self._size}"
        if placement.offloads:
            inputs = readable_size(self._kind.input_bytes)
            return f"{self._again} of compute, and {inputs} travel instead of {self._size}"
        return f"{self._again} of compute spare the drive {self._travel} for {self._size}"

    def _offload(self) -> str:
        is_part = self._moved < self._kind.nbytes
        what = f"{readable_size(self._moved)} of {self._size}" if is_part else self._size
        return f"{what} take {self._travel} of the drive, and recomputing takes {self._again} of compute"

    def _offload_remat(self) -> str:
        rebuilt = self._kind.rebuilt_bytes
        again = self._timing(Placement.OFFLOAD_REMAT).whole - self._timing(Placement.OFFLOAD).whole
        return (
            f"{_milliseconds(max(again, 0.0))} of compute spare the drive {self._moving(rebuilt)} for "
            f"{readable_size(rebuilt)}; {readable_size(self._moved - rebuilt)} travel"
        )

    @property
    def _kind(self) -> LayerKind:
        return self.profile.kind_of(self.layer)

    @property
    def _moved(self) -> int:
        return self._kind.nbytes - self.plan.kept_bytes(self.layer, self._kind)

    @property
    def _size(self) -> str:
        return readable_size(self._kind.nbytes)

    @property
    def _travel(self) -> str:
        return self._moving(self._moved)

    @property
    def _again(self) -> str:
        return self._more(Placement.RECOMPUTE)

    def _more(self, placement: Placement) -> str:
        """How much longer backward takes than of a kept layer."""
        kept = self._timing(Placement.KEEP)
        return _milliseconds(self._timing(placement).backward - kept.backward)

    def _timing(self, placement: Placement) -> Timing:
        return self.profile.timing(self.layer, placement)

    def _moving(self, nbytes: int) -> str:
        """How long the drive takes to write and to read so many bytes."""
        return _milliseconds(nbytes / self.bandwidth.write + nbytes / self.bandwidth.read)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
