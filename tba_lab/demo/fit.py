"""Width, sequence and steps of the demo's job, so that it fits the time, memory and disk of a machine.

Pure functions: what was measured goes in, a job comes out. What the user gave is kept; of the rest the
largest job that fits is taken. It becomes smaller in this order: fewer steps cost precision only, a shorter
sequence leaves the model as it is, a narrower model computes less for each byte that it saves, so that
offloading looks worse than it is. Where optimizer states travel, a shorter sequence does the same.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tba_lab.demo.progress import duration
from tba_lab.gpt import GptShape, model_flops
from tba_offload.config import format_size
from tba_offload.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

HIDDEN = 1536
SEQUENCES = (160, 128, 96, 64)
"""The longest is the sequence of the published figures; with the shortest, two sequences still fill a tile of
every kernel (128 rows)."""

LAYERS = 12
BATCH_SIZES = (2, 3)

LAYERS_WITH_STATES = 4
BATCH_SIZES_WITH_STATES = (16,)
"""A job with optimizer states: all of them travel in each step, however few tokens it computes, so that a
step of few is the drive's. Four layers leave time for many. In bf16 on AVX-512 (EPYC, two cores, a drive of
2 GB/s) that lane took 1.59 and 1.38 x keep's step with 12 layers and two or three sequences of 160 tokens,
1.05 x with six layers and 16, where offloading activations alone took 1.03 x."""

MOST_STEPS = 20
FEWEST_STEPS = 10
"""Steps of each strategy. The fewest leave five rounds whose time counts (three warm up, two measure memory),
and of five values the quartiles are not yet the extremes."""

TARGET_SECONDS = 80.0
"""Seconds that all steps of a strategy may take: four minutes for three."""

MEMORY_SHARE = 0.6
"""Part of the available memory, and of the free disk, that the job may take; the rest is for the page cache,
for what estimates miss, and for others."""

PROCESS_BYTES = 500 * 2**20
"""Resident memory of a process that has imported torch and megatron-core, and some for their kernels."""

STRATEGY_COSTS = {
    "keep": 1.0,
    "recompute": 4 / 3,
    "offload": 1.1,
    "auto": 4 / 3,
    "states": 1.5,
    "control": 1.0,
}
"""Forward and backward, relative to keep: recomputation repeats the forward, a third of both; offloading is
given a tenth. What auto does is unknown, recomputation the most. Optimizer states take the drive half as long
as forward and backward take on a fast processor."""

_STATES = 4
"""Of each parameter there is itself, its gradient and two moments of Adam, all in its dtype."""

MOST_HEADS = 12

_HEAD_WIDTH = 16
"""Widths that are tried are multiples of this, for each head."""

ITEM_BYTES = {"bf16": 2, "fp32": 4}
"""Bytes of a number in each dtype."""


@dataclass(frozen=True)
class Probe:
    """One training step of a single layer, measured.

    Attributes:
        hidden: Its width.
        flops: Floating-point operations of its forward and backward.
        seconds: What those took.
        parameters: How many the optimizer updates.
        optimizer_seconds: What that took.
    """

    hidden: int
    flops: float
    seconds: float
    parameters: int
    optimizer_seconds: float


@dataclass(frozen=True)
class Limits:
    """What the job may take.

    Attributes:
        seconds: All steps of all strategies and batch sizes together.
        memory_bytes: All processes together.
        disk_bytes: The offloaded bytes.
    """

    seconds: float
    memory_bytes: int
    disk_bytes: int


@dataclass(frozen=True)
class Job:
    """What the demo trains.

    Attributes:
        shape: The model.
        steps: Steps of each strategy and batch size.
        batch_sizes: Sequences in a step; one race for each.
        strategies: What races; each in a process of its own.
    """

    shape: GptShape
    steps: int
    batch_sizes: tuple[int, ...]
    strategies: tuple[str, ...]

    def seconds(self, probes: Sequence[Probe]) -> float:
        """All steps together, at the best rates of the probes that are not wider, or of the narrowest.

        Rates grow with the width, and whatever else the machine does only lowers them.
        """
        narrowest = min(probe.hidden for probe in probes)
        known = [probe for probe in probes if probe.hidden <= max(self.shape.hidden, narrowest)]
        compute = min(probe.seconds / probe.flops for probe in known)
        compute *= sum(model_flops(self.shape, size) for size in self.batch_sizes)
        compute *= sum(STRATEGY_COSTS[name] for name in self.strategies)
        update = parameters_of(self.shape) * min(
            probe.optimizer_seconds / probe.parameters for probe in known
        )
        return self.steps * (compute + update * len(self.batch_sizes) * len(self.strategies))

    @property
    def memory_bytes(self) -> int:
        """All processes of the largest batch size; each is given the activations of keep."""
        states = _STATES * ITEM_BYTES[self.shape.dtype] * parameters_of(self.shape)
        return len(self.strategies) * (PROCESS_BYTES + states + self.activation_bytes)

    @property
    def disk_bytes(self) -> int:
        """What all strategies write; of optimizer states, where they are offloaded, at most two versions."""
        states = 6 * ITEM_BYTES[self.shape.dtype] * parameters_of(self.shape)
        return self.activation_bytes + (self.activation_bytes + states) * ("states" in self.strategies)

    @property
    def activation_bytes(self) -> int:
        """What keep holds, and offload writes, in a step of the largest batch size, generously.

        A token has some 20 numbers in each position of the hidden states (Korthikanti et al. 2022 count
        17 of two bytes; kernels of a CPU keep some more), and a score for each head and token of its
        sequence: in fp32 before and after the softmax, in the dtype before, after and as dropout's mask.
        """
        shape, item = self.shape, ITEM_BYTES[self.shape.dtype]
        scores = shape.heads * shape.sequence * (2 * 4 + 3 * item)
        a_token = shape.layers * (20 * item * shape.hidden + scores)
        return max(self.batch_sizes) * shape.sequence * a_token

    def exceeds(self, limits: Limits, probes: Sequence[Probe]) -> list[str]:
        """Which limits it does not keep to, in words; the time only if there are probes."""
        found = []
        if probes and (seconds := self.seconds(probes)) > limits.seconds:
            found.append(f"{duration(seconds)} (at most {duration(limits.seconds)})")
        for what, needed, limit in (
            ("memory", self.memory_bytes, limits.memory_bytes),
            ("disk", self.disk_bytes, limits.disk_bytes),
        ):
            if needed > limit:
                found.append(f"{_size(needed)} of {what} (at most {_size(limit)})")
        return found

    def __str__(self) -> str:
        return f"width {self.shape.hidden}, sequence {self.shape.sequence}, {self.steps} steps"


@dataclass(frozen=True)
class Fit:
    """The job that was chosen.

    Attributes:
        job: The largest that fits, or where none does the smallest.
        largest: The one that would have been taken with no limits.
        exceeded: Limits that the largest does not keep to, in words.
        broken: Limits that the chosen one does not keep to.
    """

    job: Job
    largest: Job
    exceeded: tuple[str, ...]
    broken: tuple[str, ...]

    def __str__(self) -> str:
        if not self.exceeded:
            return f"{self.job}: fits this machine"
        needs = f"would need {' and '.join(self.exceeded)}"
        if self.job == self.largest:
            return f"{self.job}, as given: {needs}"
        rest = f"; this still needs {' and '.join(self.broken)}" if self.broken else ""
        return f"{self.job}, fitted to this machine: {self.largest} {needs}{rest}"


def heads_for(hidden: int | None) -> int:
    """Attention heads of a model, at most :data:`MOST_HEADS`, each of an even width for rotary positions.

    Args:
        hidden: Width of the model; ``None`` if it is going to be a multiple of what is returned.
    """
    counts = range(MOST_HEADS, 0, -1)
    return next((count for count in counts if hidden is None or hidden % (2 * count) == 0), 1)


def layers_for(strategies: Sequence[str]) -> int:
    """Layers of the model where the user gives none."""
    return LAYERS_WITH_STATES if "states" in strategies else LAYERS


def sizes_for(strategies: Sequence[str]) -> tuple[int, ...]:
    """Sequences in a step, for each race, where the user gives none."""
    return BATCH_SIZES_WITH_STATES if "states" in strategies else BATCH_SIZES


@dataclass(frozen=True)
class Wish:
    """The job as far as the user gave it.

    Attributes:
        hidden: Width; ``None`` to fit it.
        sequence: Tokens in a sequence; likewise.
        steps: Steps of each strategy and batch size; likewise.
        batch_sizes: Sequences in a step.
        strategies: What races.
        model: The other fields of :class:`GptShape`.
    """

    hidden: int | None
    sequence: int | None
    steps: int | None
    batch_sizes: tuple[int, ...]
    strategies: tuple[str, ...]
    model: dict[str, Any]

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing to fit."""
        return None not in (self.hidden, self.sequence, self.steps)

    @property
    def widths(self) -> tuple[int, ...]:
        """What may be tried, the widest first."""
        if self.hidden is not None:
            return (self.hidden,)
        unit = _HEAD_WIDTH * self.model["heads"]
        return tuple(unit * count for count in range(max(HIDDEN // unit, 1), 0, -1))

    @property
    def _sequences(self) -> tuple[int, ...]:
        """What may be tried; with states only the longest, since they travel for few tokens as for many."""
        return SEQUENCES[:1] if "states" in self.strategies else SEQUENCES

    def jobs(self) -> Iterator[Job]:
        """All that may be tried, in the order in which they are preferred.

        Raises:
            ConfigError: They make no model.
        """
        sequences = self._sequences if self.sequence is None else (self.sequence,)
        steps = range(MOST_STEPS, FEWEST_STEPS - 1, -1) if self.steps is None else (self.steps,)
        for hidden, sequence in itertools.product(self.widths, sequences):
            shape = GptShape(hidden=hidden, sequence=sequence, **self.model)
            for count in steps:
                yield Job(shape, count, self.batch_sizes, self.strategies)

    def probe_shapes(self) -> list[GptShape]:
        """One layer at the longest sequence; the width doubles up to the widest that may be tried."""
        largest = next(self.jobs()).shape
        widths = [largest.hidden]
        while widths[0] >= 2 * _HEAD_WIDTH * largest.heads:
            narrower = widths[0] // 2 // (2 * largest.heads) * (2 * largest.heads)  # rotary: even heads
            widths.insert(0, narrower)
        return [dataclasses.replace(largest, layers=1, hidden=width) for width in widths]


class DoesNotFitError(ConfigError):
    """The smallest job that the options allow needs more memory or disk than there is."""


def fit(jobs: Iterable[Job], limits: Limits, probes: Sequence[Probe]) -> Fit:
    """Return the first job that keeps to all limits.

    Args:
        jobs: What may be tried, by preference; at least one.
        limits: What it may take.
        probes: Measured steps; without any, time does not count.

    Returns:
        The choice. Where no job keeps to the limits it is the last one.
    """
    by_preference = list(jobs)
    fitting = (job for job in by_preference if not job.exceeds(limits, probes))
    largest, chosen = by_preference[0], next(fitting, by_preference[-1])
    exceeded, broken = (tuple(job.exceeds(limits, probes)) for job in (largest, chosen))
    return Fit(chosen, largest, exceeded, broken)


def check_room(job: Job, available: Limits) -> None:
    """Refuses what would be killed for its memory or fill the disk.

    Args:
        job: What is going to be trained.
        available: All that there is.

    Raises:
        DoesNotFitError: It needs more.
    """
    if broken := job.exceeds(available, ()):
        raise DoesNotFitError(
            f"{job} needs {' and '.join(broken)}; give a smaller --hidden, --sequence, --layers or "
            "--batch-size"
        )


def parameters_of(shape: GptShape) -> int:
    """Weights of a model; biases and norms, a thousandth of them, left out."""
    key_value_width = shape.hidden * shape.key_value_heads // shape.heads
    attention = 2 * shape.hidden * (shape.hidden + key_value_width)
    mlp = (2 if shape.style == "gpt" else 3) * shape.hidden * shape.ffn_width
    return shape.layers * (attention + mlp) + (shape.vocab + shape.sequence) * shape.hidden


def _size(nbytes: int) -> str:
    return format_size(nbytes) if nbytes < 2**20 else f"{nbytes / 2**30:.1f} GiB"
