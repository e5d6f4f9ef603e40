"""Measure the step time of LoRA training with frozen weights on a drive.

    python benchmarks/frozen.py DIRECTORY

Models with the same weights train in alternating steps. The first model keeps its frozen weights in memory.
The second model does the same, as a control. Each further model offloads a share of its frozen weights. The
comparison is made for base weights in fp32, and in nf4 of bitsandbytes.

The output has the ratio of step times to the first model, the bytes by which malloc's live bytes fell when
the weights were offloaded, the largest number of offloaded bytes in memory, and the bytes read in a step.
Losses and trained parameters are compared bit for bit.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

import click
import torch
from torch import Tensor, nn

import tba_offload as tba
from tba_lab.race import paired_ratio
from tba_offload.device.meters import MallocMeter
from tba_offload.formatting import readable_size

RANK = 8
WARM_UP = 2


class Adapted(nn.Module):
    """Linear layer with a frozen matrix and the two small trained matrices of LoRA."""

    def __init__(self, rows: int, columns: int, kind: str) -> None:
        super().__init__()
        whole = nn.Linear(rows, columns, bias=False)
        self.base = (in_four_bits(whole) if kind == "nf4" else whole).requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(rows, RANK, bias=False), nn.Linear(RANK, columns, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def in_four_bits(linear: nn.Linear) -> nn.Module:
    """Return the layer in nf4, as QLoRA loads it, with matrix products in fp32."""
    from bitsandbytes.nn import Linear4bit

    sizes = linear.in_features, linear.out_features
    packed = Linear4bit(*sizes, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    packed.load_state_dict(linear.state_dict())
    return packed.to("cpu")  # which quantizes


class Layer(nn.Module):
    """Residual layer with two linear layers and four times the width between them."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.norm, self.one, self.two = (
            nn.LayerNorm(width),
            Adapted(width, 4 * width, kind),
            Adapted(4 * width, width, kind),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(nn.functional.gelu(self.one(self.norm(x))))


@dataclass
class Lane:
    """Model, with the losses and the durations in seconds of its steps."""

    model: nn.Sequential
    losses: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-3)

    def step(self, x: Tensor) -> None:
        """Run forward, backward and the optimizer's update."""
        began = time.perf_counter()
        loss = self.model(x).pow(2).mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - began)
        self.losses.append(loss.detach())

    def results(self) -> list[Tensor]:
        """Return the losses and the trained parameters."""
        return [*self.losses, *(p.detach() for p in self.model.parameters() if p.requires_grad)]


def make(layers: int, width: int, kind: str) -> Lane:
    """Return a model. Equal arguments give equal weights."""
    torch.manual_seed(0)
    return Lane(nn.Sequential(*(Layer(width, kind) for _ in range(layers))))


def taken_over(lane: Lane, directory: str, share: int, meter: MallocMeter) -> tuple[tba.Session, int]:
    """Offload a percentage of a model's frozen weights. Return the session and the freed bytes."""
    frozen = "offload" if share == 100 else f"offload-{share}%"
    store = {"directories": [directory]}
    policy = {"default": "keep", "store": store, "weights": {"frozen": frozen}}
    before = meter.live()
    session = tba.attach(lane.model, policy, layers=list(lane.model), measure_memory=False)
    taken, weights_of(session).peak_bytes = before - meter.live(), 0
    return session, taken


def weights_of(session: tba.Session) -> tba.FrozenWeights:
    """Return the offloaded weights of a session."""
    assert session.weights is not None
    return session.weights


@click.command(help=(__doc__ or "").splitlines()[0])
@click.argument("directory")
@click.option("--layers", default=12, show_default=True)
@click.option("--width", default=1024, show_default=True)
@click.option("--rows", default=512, show_default=True, help="Rows of a micro-batch.")
@click.option("--steps", type=click.IntRange(WARM_UP + 1), default=12, show_default=True)
@click.option(
    "--share",
    "shares",
    type=click.IntRange(1, 100),
    multiple=True,
    default=[100],
    show_default=True,
    help="Percentage of the frozen bytes to offload. Can be given several times.",
)
@click.option(
    "--base",
    "kinds",
    type=click.Choice(["fp32", "nf4"]),
    multiple=True,
    default=["fp32", "nf4"],
    show_default=True,
)
def main(
    *,
    directory: str,
    layers: int,
    width: int,
    rows: int,
    steps: int,
    shares: tuple[int, ...],
    kinds: tuple[str, ...],
) -> None:
    """Measure and print the results."""
    groups = {kind: [make(layers, width, kind) for _ in range(2 + len(shares))] for kind in kinds}
    lanes = [lane for group in groups.values() for lane in group]
    with ExitStack() as stack:
        away = []
        for group in groups.values():
            for lane, share in zip(group[2:], shares, strict=True):
                away.append(taken_over(lane, directory, share, MallocMeter()))
                stack.enter_context(away[-1][0])
        for number in range(steps):
            x = torch.randn(rows, width)
            for lane in lanes if number % 2 else lanes[::-1]:
                lane.step(x)
        told = [told_of(session, taken) for session, taken in away]
    where = f"on {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    for kind, (kept, control, *others) in groups.items():
        usual = statistics.median(kept.seconds[WARM_UP:])
        click.echo(f"{kind} {where}; {layers} layers of width {width}, {rows} rows: {usual:.2f} s a step")
        click.echo(f"keep over keep: {paired_ratio(control.seconds[WARM_UP:], kept.seconds[WARM_UP:])}")
        for lane, share in zip(others, shares, strict=True):
            same = all(
                a.view(torch.int32).equal(b.view(torch.int32))
                for a, b in zip(kept.results(), lane.results(), strict=True)
            )
            click.echo(
                f"{share} %, {told.pop(0)}; step time over keep: "
                f"{paired_ratio(lane.seconds[WARM_UP:], kept.seconds[WARM_UP:])}; "
                f"losses and trained parameters identical: {same}"
            )


def told_of(session: tba.Session, taken: int) -> str:
    """Return a text with the freed bytes, the largest number of bytes in memory, and the bytes read."""
    weights, read = weights_of(session), session.records[-1].weights_read_bytes or 0
    return (
        f"{readable_size(weights.nbytes)}: malloc's live bytes fell by {readable_size(taken)}; at most "
        f"{readable_size(weights.peak_bytes)} of them were in memory; {readable_size(read)} read a step"
    )


if __name__ == "__main__":
    main()
