"""Does anything grow over ten thousand steps? Shapes, placements and faults are drawn from a seed.

::

    python benchmarks/soak.py                       # 10,000 steps, some minutes
    python benchmarks/soak.py --steps 300 --json    # the short form, for programs

Every step has another shape; now and then the placements change, a drive fails for a while, or a step is left
half way. Now and then it is looked at descriptors, threads, extents in use, the window, the resident set, the
size of the store and of the run log. Flat means: after the first quarter, in which caches fill, descriptors
and threads never exceed what they were, extents and window are empty at each look, and resident set and store
exceed their most in the second quarter by less than 8 MiB and 1 MiB. The run log may grow, by a line a step.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import tempfile
import time
import warnings
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from faults import inject
from torch import Tensor, nn

import tba_offload as tba

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.session import Session

WIDTH = 32
PLACEMENTS = ("offload", "offload", "keep", "recompute", "recompute-offload", "offload-remat")
FAULTS = (
    "fail-write:errno=EIO,times=2",
    "fail-write:errno=ENOSPC,times=3",
    "nothing-write:times=1",
    "fail-read:errno=EIO,times=2",
    "fail-read:errno=ENODEV,times=1",
    "flip-read:times=1",
    "flip-write:times=1",
    "delay-read:times=2,seconds=0.01",
)
RESIDENT_GROWTH = 8 << 20
STORE_GROWTH = 1 << 20


class Block(nn.Module):
    """A residual block that saves views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.up(x).chunk(3, -1)
        return x + self.down(a.tanh() * b.sigmoid() * c)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Look:
    """What the process held after a number of steps; in bytes unless the name says otherwise."""

    step: int
    descriptors: int
    threads: int
    extents: int
    window: int
    resident: int
    store: int
    run_log: int
    failed_steps: int


class Soak:
    """Trains a tiny model, and looks at what the process holds.

    Args:
        steps: How many.
        seed: What shapes, placements and faults are drawn by.
        directory: Where files go.
    """

    def __init__(self, steps: int, seed: int, directory: Path) -> None:
        self.steps = steps
        self.chance = random.Random(seed)  # noqa: S311 - not for secrets
        self.model = nn.Sequential(*(Block() for _ in range(4)))
        self.log = directory / f"soak{os.getpid()}.jsonl"
        self.failed = 0
        self.looks: list[Look] = []
        self.directory = directory
        self._faults = ExitStack()

    def policy(self) -> dict[str, object]:
        """Placements for each layer."""
        rules = [{"match": str(n), "placement": self.chance.choice(PLACEMENTS)} for n in range(3)]
        return {
            "default": "offload",
            "layers": rules,
            "budget": {"in_flight_bytes": "64KiB"},
            "store": {"kind": "file", "directories": [str(self.directory)], "checksum": True},
            "min_tensor_bytes": 1024,
        }

    def run(self) -> None:
        """Make the steps."""
        with tba.attach(
            self.model, self.policy(), layers=list(self.model), run_log=self.log, measure_memory=False
        ) as session:
            for number in range(self.steps):
                self.vary(session)
                self.step(session)
                if number % self.every == self.every - 1:
                    self.looks.append(self.look(session, number + 1))
            self._faults.close()

    @property
    def every(self) -> int:
        """Steps between two looks."""
        return max(self.steps // 20, 1)

    def vary(self, session: Session) -> None:
        """Change placements every fiftieth step, and faults every twentieth, on average."""
        if self.chance.random() < 0.02:
            session.apply(self.policy())
        if self.chance.random() < 0.05:
            self._faults.close()
            if self.chance.random() < 0.5:
                fault = f"{self.chance.choice(FAULTS)},seed={self.chance.randrange(1 << 16)}"
                self._faults.enter_context(inject(fault))

    def step(self, session: Session) -> None:
        """One step; it may fail at a read, or be left half way."""
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

    def look(self, session: Session, step: int) -> Look:
        """Return what the process holds now."""
        gc.collect()
        session.offloader.quiesce()
        while session.store.pending():
            time.sleep(0.001)
        session.offloader.drain()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return Look(
            step=step,
            descriptors=len(list(Path("/proc/self/fd").iterdir())),
            threads=len(list(Path("/proc/self/task").iterdir())),
            extents=session.store.used_bytes,
            window=session.offloader.in_flight,
            resident=pages * os.sysconf("SC_PAGESIZE"),
            store=session.store.high_water_bytes,
            run_log=self.log.stat().st_size,
            failed_steps=self.failed,
        )


def what_grew(looks: Sequence[Look]) -> list[str]:
    """Return the names of what is not flat, by the rule above."""
    first, rest = looks[len(looks) // 4], looks[len(looks) // 2 :]
    early = looks[len(looks) // 4 : len(looks) // 2] or [first]
    last = {name: max(getattr(look, name) for look in rest) for name in asdict(first)}
    grown = [name for name in ("descriptors", "threads") if last[name] > max(getattr(e, name) for e in early)]
    grown += [name for name in ("extents", "window") if any(getattr(look, name) for look in looks)]
    for name, most in (("resident", RESIDENT_GROWTH), ("store", STORE_GROWTH)):
        if last[name] - max(getattr(look, name) for look in early) >= most:
            grown.append(name)
    return grown


def table(looks: Sequence[Look]) -> str:
    """All looks, a line each."""
    names = list(asdict(looks[0]))
    lines = [names, *([str(value) for value in asdict(look).values()] for look in looks)]
    return "\n".join("  ".join(f"{cell:>12}" for cell in line) for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; 1 if something grew."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="where the store and the run log go")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        soak = Soak(options.steps, options.seed, Path(directory))
        began = time.perf_counter()
        soak.run()
    grown = what_grew(soak.looks)
    verdict = f"not flat: {', '.join(grown)}" if grown else "flat"
    seconds = time.perf_counter() - began
    if options.json:
        found = {"verdict": verdict, "seconds": seconds, "looks": [asdict(look) for look in soak.looks]}
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        sys.stdout.write(f"{table(soak.looks)}\n{options.steps} steps in {seconds:.0f} s: {verdict}\n")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
