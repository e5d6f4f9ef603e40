"""Check that a session's resources do not grow over ten thousand steps.

::

    python benchmarks/soak.py                       # 10,000 steps, some minutes
    python benchmarks/soak.py --steps 300 --json    # a short run, with JSON output

Shapes and faults are drawn from a seed. Each step has another shape. Sometimes a drive fails for some steps,
or an exception ends a step. The program counts file descriptors, threads, extents in use, bytes in flight,
resident memory and the size of the run log twenty times.

The result is ``flat`` if no extents are in use and no bytes are in flight at each count, and if the other
counts are not higher in the second half of the run than in the second quarter. Resident memory may be 8 MiB
higher, and the run log may grow.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import tempfile
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click
import torch
from torch import Tensor, nn

import tba_offload as tba

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from faults import inject

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.session import Session

WIDTH = 32
PLACEMENTS = ("offload", "offload", "keep", "recompute", "recompute-offload", "offload-remat")
FAULTS = (
    *("fail-write:errno=EIO,times=2", "fail-write:errno=ENOSPC,times=3", "nothing-write:times=1"),
    *("fail-read:errno=EIO,times=2", "fail-read:errno=ENODEV,times=1", "flip-read:times=1"),
    *("flip-write:times=1", "delay-read:times=2,seconds=0.01"),
)
MOST_GROWTH = {"descriptors": 0, "threads": 0, "resident": 8 << 20}


class Block(nn.Module):
    """Residual block that saves views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.up(x).chunk(3, -1)
        return x + self.down(a.tanh() * b.sigmoid() * c)  # type: ignore[no-any-return]


class Soak:
    """Training of a tiny model with random faults, which counts the resources of the process."""

    def __init__(self, steps: int, seed: int, directory: Path) -> None:
        self.steps, self.directory = steps, directory
        self.chance = random.Random(seed)  # noqa: S311 - not for secrets
        self.model = nn.Sequential(*(Block() for _ in range(4)))
        self.log = directory / f"soak{os.getpid()}.jsonl"
        self.failed = 0
        self.looks: list[dict[str, int]] = []
        self._faults = ExitStack()

    def policy(self) -> dict[str, object]:
        """Return a policy with placements drawn at random."""
        rules = [{"match": str(n), "placement": self.chance.choice(PLACEMENTS)} for n in range(3)]
        return {
            "default": "offload",
            "layers": rules,
            "budget": {"in_flight_bytes": "64KiB"},
            "store": {"kind": "file", "directories": [str(self.directory)], "checksum": True},
            "min_tensor_bytes": 1024,
        }

    def run(self) -> None:
        """Run all steps."""
        every = max(self.steps // 20, 1)
        with tba.attach(
            self.model, self.policy(), layers=list(self.model), run_log=self.log, measure_memory=False
        ) as session:
            for number in range(self.steps):
                self.vary()
                self.step(session)
                if number % every == every - 1:
                    self.looks.append(self.look(session, number + 1))
            self._faults.close()

    def vary(self) -> None:
        """Change faults every twentieth step, on average."""
        if self.chance.random() < 0.05:
            self._faults.close()
            if self.chance.random() < 0.5:
                fault = f"{self.chance.choice(FAULTS)},seed={self.chance.randrange(1 << 16)}"
                self._faults.enter_context(inject(fault))

    def step(self, session: Session) -> None:
        """Run one step. The step may fail in a read, or end with an exception in the forward pass."""
        x = torch.ones(self.chance.randint(1, 64), WIDTH)
        try:
            with session.step():
                loss = self.model(x).pow(2).mean()
                if self.chance.random() < 0.02:
                    raise ZeroDivisionError  # noqa: TRY301 - the step is left half way
                loss.backward()
        except (tba.TransferError, ZeroDivisionError):
            self.failed += 1
        self.model.zero_grad()

    def look(self, session: Session, step: int) -> dict[str, int]:
        """Return the current counts. Sizes are in bytes."""
        gc.collect()
        session.offloader.make_room(sys.maxsize)  # waits for all that is in flight
        session.offloader.prefetch(())  # looks at dropped handles
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {
            "step": step,
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "threads": len(list(Path("/proc/self/task").iterdir())),
            "extents": sum(place.extents.used for place in session.store._places),
            "window": session.offloader.window.in_flight,
            "resident": pages * os.sysconf("SC_PAGESIZE"),
            "run_log": self.log.stat().st_size,
            "failed_steps": self.failed,
        }


def what_grew(looks: Sequence[dict[str, int]]) -> list[str]:
    """Return the names of the counts that have grown."""
    quarter, half = len(looks) // 4, len(looks) // 2
    grown = [name for name in ("extents", "window") if any(look[name] for look in looks)]
    for name, most in MOST_GROWTH.items():
        early, late = (max(look[name] for look in part) for part in (looks[quarter:half], looks[half:]))
        if late - early > most:
            grown.append(name)
    return grown


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--steps", type=click.IntRange(min=20), default=10_000, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--directory", type=click.Path(exists=True), help="Directory for the store and the run log.")
@click.option("--json", "as_json", is_flag=True)
def main(*, steps: int, seed: int, directory: str | None, as_json: bool) -> None:
    """Train, print all counts, and fail if a count has grown."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=directory) as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        soak = Soak(steps, seed, Path(place))
        soak.run()
    grown, seconds = what_grew(soak.looks), time.perf_counter() - began
    verdict = f"not flat: {', '.join(grown)}" if grown else "flat"
    if as_json:
        click.echo(json.dumps({"verdict": verdict, "seconds": seconds, "looks": soak.looks}, indent=2))
    else:
        for line in [list(soak.looks[0]), *(look.values() for look in soak.looks)]:
            click.echo("  ".join(f"{cell:>12}" for cell in line))
        click.echo(f"{steps} steps in {seconds:.0f} s: {verdict}")
    sys.exit(bool(grown))


if __name__ == "__main__":
    main()
