"""The least that a step can take whose bytes travel: the time that the drive needs for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tba_lab.demo.race import Spread
from tba_offload.device import CpuDevice
from tba_offload.store import open_store
from tba_offload.store.bench import measure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tba_offload.config import OffloadConfig


def mixed_rate(config: OffloadConfig) -> float:
    """Bytes a second that a store reads and writes at once, both together; the best of a few rounds.

    Raises:
        StoreError: It cannot be opened, or a transfer failed.
    """
    device = CpuDevice()
    with open_store(config.store.options(), device=device) as store:
        return measure(store, device).both


def travelled(step: Mapping[str, Any]) -> int:
    """Bytes of activations and of optimizer states that a step wrote and read."""
    states = sum(each["read_bytes"] + each["written_bytes"] for each in step["states"])
    return int(step["offloaded_bytes"] + step["read_bytes"] + states)


def over_bound(rounds: Sequence[tuple[Mapping[str, Any], ...]], rate: float) -> Spread:
    """Time of a lane over the larger of another one's and of what the drive takes for the bytes that travel.

    Args:
        rounds: The steps of both lanes, round by round.
        rate: Bytes a second that the drive reads and writes at once.
    """
    seconds = "whole_step_seconds"
    return Spread.of([ours[seconds] / max(other[seconds], travelled(ours) / rate) for ours, other in rounds])
