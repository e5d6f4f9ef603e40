"""What a training step costs whose frozen weights lie on a drive, as LoRA trains it.

    python benchmarks/frozen.py DIRECTORY

Three models with the same weights take turns, step by step: one keeps its weights, one does so once more as a
control, and one has its frozen weights offloaded. Printed are the ratios of step times to the first, round by
round; how much memory malloc has handed out before and after the weights were taken over; and the most bytes
of them that were in memory. Losses and what is trained are compared bit for bit.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field

import click
import torch
from torch import Tensor, nn

import tba_offload as tba
from tba_lab.demo.race import paired_ratio
from tba_offload.device.memory import MallocMeter
from tba_offload.formatting import readable_size

RANK = 8
WARM_UP = 2


class Adapted(nn.Module):
    """A frozen matrix and two small ones that are trained."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.base = nn.Linear(rows, columns, bias=False).requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(rows, RANK, bias=False), nn.Linear(RANK, columns, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Layer(nn.Module):
    """A residual layer of two matrices, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.one, self.two = (
            nn.LayerNorm(width),
            Adapted(width, 4 * width),
            Adapted(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(nn.functional.gelu(self.one(self.norm(x))))


@dataclass
class Lane:
    """A model that trains; its losses and the seconds of its steps."""

    model: nn.Sequential
    losses: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-3)

    def step(self, x: Tensor) -> None:
        """Forward, backward and update."""
        began = time.perf_counter()
        loss = self.model(x).pow(2).mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - began)
        self.losses.append(loss.detach())

    def results(self) -> list[Tensor]:
        """Losses and trained parameters."""
        return [*self.losses, *(p.detach() for p in self.model.parameters() if p.requires_grad)]


def make(layers: int, width: int) -> Lane:
    """A model that is the same each time."""
    torch.manual_seed(0)
    return Lane(nn.Sequential(*(Layer(width) for _ in range(layers))))


@click.command(help=(__doc__ or "").splitlines()[0])
@click.argument("directory")
@click.option("--layers", default=12, show_default=True)
@click.option("--width", default=1024, show_default=True)
@click.option("--rows", default=512, show_default=True, help="Of a micro-batch.")
@click.option("--steps", default=12, show_default=True)
def main(*, directory: str, layers: int, width: int, rows: int, steps: int) -> None:
    """Measures and prints."""
    meter = MallocMeter()
    with ExitStack() as stack:
        lanes = [make(layers, width) for _ in range(3)]
        before = meter.live()
        policy = {"store": {"directories": [directory]}}
        weights = stack.enter_context(tba.offload_frozen(lanes[2].model, policy, layers=list(lanes[2].model)))
        taken, weights.peak_bytes = before - meter.live(), 0
        for number in range(steps):
            x = torch.randn(rows, width)
            for lane in lanes if number % 2 else lanes[::-1]:
                lane.step(x)
        same = [
            a.view(torch.int32).equal(b.view(torch.int32))
            for a, b in zip(lanes[0].results(), lanes[2].results(), strict=True)
        ]
        peak, nbytes = weights.peak_bytes, weights.nbytes
    kept, control, away = (lane.seconds[WARM_UP:] for lane in lanes)
    where = f"fp32 on {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    click.echo(
        f"{where}; {layers} layers of width {width}, {rows} rows: {sorted(kept)[len(kept) // 2]:.2f} s a step"
    )
    click.echo(
        f"frozen weights: {readable_size(nbytes)}, malloc's live bytes fell by {readable_size(taken)}; "
        f"at most {readable_size(peak)} of them were in memory\n"
        f"step time over keep: {paired_ratio(away, kept)}; keep over keep: {paired_ratio(control, kept)}\n"
        f"losses and trained parameters identical: {all(same)}"
    )


if __name__ == "__main__":
    main()
