"""Updates on the device of ``lagging.py``, by that, by the processor, and by both: what does ``auto`` choose?

    PYTHONPATH=.:tests/support python tests/support/lagging_lanes.py 0.5 1

The two numbers are milliseconds that the device takes longer than the processor, for each operation and for
each copy. Lanes take turns; written are medians of the updates after the fourth, and how long the host took
over what the rates of the two lanes predicted; it does not wait for the last operations of the device.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, field

import lagging
import torch
from torch import nn, optim

import tba_offload as tba

UPDATES, WARM_UP = 12, 4
MATRICES, WIDTH = 32, 256


@dataclass
class Lane:
    """One setting of ``states.update``, and what its updates took."""

    update: str
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        shape = (WIDTH, WIDTH)
        self.parameters = [nn.Parameter(torch.randn(shape).to(lagging.LAG)) for _ in range(MATRICES)]
        self.optimizer = optim.AdamW(self.parameters, foreach=False)
        policy = {
            "states": {"sub_group_bytes": "1MiB", "update": self.update},
            "store": {"kind": "host"},
        }
        self.states = tba.offload_optimizer(self.optimizer, policy)

    def step(self) -> None:
        """Makes one update."""
        for each in self.parameters:
            each.grad = torch.ones_like(each)
        torch.accelerator.synchronize()
        began = time.perf_counter()
        self.optimizer.step()
        torch.accelerator.synchronize()
        self.seconds.append(time.perf_counter() - began)

    def __str__(self) -> str:
        last = self.states.records[-1]
        known = [each for each in list(self.states.records)[WARM_UP:] if each.predicted_seconds]
        ratios = [each.seconds / each.predicted_seconds for each in known if each.predicted_seconds]
        told = f", {statistics.median(ratios):.2f} x predicted" if ratios else ""
        return (
            f"{self.update:9} {1000 * statistics.median(self.seconds[WARM_UP:]):6.1f} ms, "
            f"{last.on_host} of {last.sub_groups} sub-groups by the processor{told}"
        )


def main(operations: float, copies: float) -> None:
    """Races the lanes.

    Args:
        operations: Milliseconds that each operation of the device takes longer.
        copies: Milliseconds that each copy does.
    """
    lanes = [Lane(update) for update in ("device", "host", "auto")]
    with lagging.late(operations=operations / 1000, copies=copies / 1000):
        for _ in range(UPDATES):
            for lane in lanes:
                lane.step()
    for lane in lanes:
        sys.stdout.write(f"{lane}\n")
        lane.states.close()


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
