"""Where optimizer states are updated: the model of Deep Optimizer States, beside its authors' logs.

    python benchmarks/states.py --simulate h100

Nothing is measured here. Sub-groups of states lie in host memory. The CPU updates one after the other; on
their way through the GPU three engines work on up to three of them at once: one reads, one updates, one
writes. Simulated are four ways to choose: all on the CPU, every second on the GPU (k = 2, as the authors'
code does it), all on the GPU, as this package does it, and the next sub-group to the lane that ends it first.
The time is that of the lane that ends last, or that of host memory, if all bytes together take longer.

Where the inputs come from. Marks in this file: [published] stands in the authors' logs
(github.com/mauryaavinash95/deep-optimizer-states-results; medians of steps 3 to 10), or where the comment
says; [derived] follows from published figures, the comment says how; [assumed] is ours. The paper is arXiv
2410.21316. The rate of the CPU is taken from the runs that have all updates there, so these agree by
construction; the runs with k = 2 and other values of k are what the model can be held against. There is no
run of the last two ways: their code has a fixed k of at least 2.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

STATE_BYTES = 12
"""[derived] Of a parameter, in each direction: master, and two states of Adam, in fp32."""

CPU_DRAM_BYTES = 30
"""[derived] That an update on the CPU moves in host memory: 12 read, 12 written, a gradient, a new weight."""

GPU_DRAM_BYTES = 24
"""[derived] That one on the GPU does: 12 read, 12 written."""

SLOTS = 3
"""Sub-groups that are on the GPU at once: one on its way in, one in work, one on its way out."""


@dataclass(frozen=True)
class Run:
    """A model as the authors ran it on four GPUs, which share parameters, micro-batches of one sequence.

    Attributes:
        name: As they call it.
        parameters: Of one rank, [published].
        sub_groups: Of one rank, [published]; of about 100 M parameters.
        away: Share of the sub-groups that lie in host memory, [published]; the others never leave the GPU.
        cpu: Seconds of an update with all of those on the CPU, [published].
        every: The same with every k-th of them on the GPU, by k, [published].
    """

    name: str
    parameters: int
    sub_groups: int
    away: float
    cpu: float
    every: Mapping[int, float]

    @property
    def work(self) -> list[float]:
        """Parameters of each sub-group that lies in host memory."""
        count = max(round(self.away * self.sub_groups), 1)
        return [self.away * self.parameters / count] * count

    @property
    def cpu_rate(self) -> float:
        """Parameters that the CPU updates in a second for one rank, [derived]."""
        return self.away * self.parameters / self.cpu


@dataclass(frozen=True)
class Machine:
    """What one rank has of a machine.

    Attributes:
        name: For the table.
        link: Bytes a second between host memory and the GPU, in each direction.
        gpu: Parameters that the GPU updates in a second.
        dram: Bytes a second of host memory, for one of four ranks.
        compute: Floating-point operations a second in forward and backward.
        drive: Bytes a second of drives for one rank, in each direction.
        runs: What the authors ran on it.
    """

    name: str
    link: float
    gpu: float
    dram: float
    compute: float
    drive: float
    runs: Sequence[Run]


H100 = Machine(
    "H100 80 GB",
    link=55e9,  # [assumed] of 64 that PCIe 5.0 x16 has by its specification
    gpu=0.7 * 3.35e12 / 30,  # [derived] 3.35 TB/s by the data sheet; [assumed] 70 % of that are reached
    dram=0.8 * 614e9 / 4,  # [assumed] two sockets of eight channels of DDR5-4800, 80 % of that are reached
    compute=400e12,  # [assumed] 40 % of 989 TFLOP/s in bf16
    drive=12e9,  # [assumed] two drives of PCIe 5.0
    # The logs do not name the GPU: 80 GB, [published], stand in the monitor's files; [assumed] an H100, since
    # forward is twice as fast as in the runs that are named A100.
    runs=(
        Run("7B", 1_487_209_472, 14, 0.8, 0.714, {2: 0.413}),
        Run("8.3B", 2_285_679_360, 22, 0.8, 1.111, {2: 0.646}),
        Run("10B", 2_479_625_216, 23, 0.8, 1.205, {2: 0.667}),
        Run("13B", 2_828_965_120, 21, 0.8, 1.295, {2: 0.722}),
        Run("20B", 3_831_665_920, 31, 0.8, 1.787, {2: 1.000}),
        Run("20B, all away", 3_831_665_920, 31, 1.0, 2.272, {2: 1.296}),
        Run("30B", 6_966_317_696, 62, 0.65, 2.744, {2: 1.564}),
    ),
)

A100 = Machine(
    "A100 40 GB",
    link=25e9,  # [assumed] of 32 that PCIe 4.0 x16 has by its specification
    gpu=0.7 * 1.555e12 / 30,  # [derived] 1,555 GB/s by the data sheet; [assumed] 70 % of that are reached
    dram=0.8 * 204e9 / 4,  # [assumed] one socket of eight channels of DDR4-3200, 80 % of that are reached
    compute=125e12,  # [assumed] 40 % of 312 TFLOP/s in bf16
    drive=6e9,  # [assumed] one drive of PCIe 4.0
    runs=(
        Run(
            *("7B", 1_487_209_472, 14, 1.0, 1.993),
            {2: 1.338, 3: 1.449, 4: 1.462, 6: 1.485, 8: 1.509, 10: 1.474},
        ),
        Run(
            *("8.3B", 2_285_679_360, 22, 1.0, 3.065),
            {2: 2.069, 3: 2.192, 4: 2.243, 6: 2.324, 8: 2.351, 10: 2.308},
        ),
        Run(
            *("13B", 2_828_965_120, 21, 1.0, 3.762),
            {2: 2.596, 3: 2.680, 4: 2.821, 6: 2.921, 8: 2.922, 10: 3.006},
        ),
        Run(
            *("20B", 3_894_805_504, 33, 1.0, 5.200),
            {2: 3.499, 3: 3.602, 4: 3.818, 6: 3.932, 8: 3.940, 10: 3.950},
        ),
    ),
)

MACHINES = {"h100": H100, "a100": A100}


class Lanes:
    """The CPU and the GPU in the midst of an update.

    Args:
        machine: Where.
        cpu_rate: Parameters that the CPU updates in a second.

    Attributes:
        cpu: When the CPU has ended what it was given, in seconds.
        on_gpu: Parameters that the GPU was given.
        on_cpu: Parameters that the CPU was given.
    """

    def __init__(self, machine: Machine, cpu_rate: float) -> None:
        self._machine = machine
        self._cpu_rate = cpu_rate
        self.cpu = 0.0
        self._read = self._updated = 0.0  # when these engines have ended what they were given
        self._written: list[float] = []  # when each sub-group has left the GPU
        self.on_gpu = self.on_cpu = 0.0

    @property
    def gpu(self) -> float:
        """When the last sub-group has left the GPU."""
        return self._written[-1] if self._written else 0.0

    def cpu_would_end(self, work: float) -> float:
        """When the CPU would have ended a sub-group of that number of parameters."""
        return self.cpu + work / self._cpu_rate

    def gpu_would_end(self, work: float) -> float:
        """When the GPU would have."""
        return self._through_gpu(work)[2]

    def give_cpu(self, work: float) -> None:
        """Record that the CPU is given a sub-group."""
        self.cpu = self.cpu_would_end(work)
        self.on_cpu += work

    def give_gpu(self, work: float) -> None:
        """Record that the GPU is given one."""
        self._read, self._updated, written = self._through_gpu(work)
        self._written.append(written)
        self.on_gpu += work

    def _through_gpu(self, work: float) -> tuple[float, float, float]:
        """When a sub-group would be read, updated and written."""
        travel = STATE_BYTES * work / self._machine.link
        slot_is_free = self._written[-SLOTS] if len(self._written) >= SLOTS else 0.0
        read = max(self._read, slot_is_free) + travel
        updated = max(self._updated, read) + work / self._machine.gpu
        return read, updated, max(self.gpu, updated) + travel

    @property
    def seconds(self) -> float:
        """When everything has ended: lanes, or host memory."""
        moved = CPU_DRAM_BYTES * self.on_cpu + GPU_DRAM_BYTES * self.on_gpu
        return max(self.cpu, self.gpu, moved / self._machine.dram)


# ---- ways to choose: whether the GPU gets a sub-group, by the lanes, its number and its parameters -------


def never(_lanes: Lanes, _number: int, _work: float) -> bool:
    """All on the CPU."""
    return False


def every(k: int) -> Callable[[Lanes, int, float], bool]:
    """Every k-th on the GPU; with k = 1 all."""
    return lambda _lanes, number, _work: number % k == k - 1


def ends_first(lanes: Lanes, _number: int, work: float) -> bool:
    """To the lane that ends it first."""
    return lanes.gpu_would_end(work) < lanes.cpu_would_end(work)


def simulate(machine: Machine, run: Run, choose: Callable[[Lanes, int, float], bool]) -> Lanes:
    """Return an update of one rank."""
    lanes = Lanes(machine, run.cpu_rate)
    for number, work in enumerate(run.work):
        if choose(lanes, number, work):
            lanes.give_gpu(work)
        else:
            lanes.give_cpu(work)
    return lanes


def tokens_that_hide(machine: Machine) -> tuple[float, float]:
    """Tokens of a rank's batch from which no update is waited for, however many parameters there are.

    With states in host memory that are updated in backward, of 4 operations for each parameter and token;
    with states on drives that are read and written in forward and backward, of 6. Both directions go on at
    once.
    """
    in_backward = STATE_BYTES / machine.link * machine.compute / 4
    on_drives = STATE_BYTES / machine.drive * machine.compute / 6
    return in_backward, on_drives


def show(machine: Machine) -> None:
    """Print what was published and what is simulated."""
    console = Console(width=120)
    console.print(compared(machine))
    console.print(sweep(A100))
    for known in (machine, A100):
        ratios = [
            simulate(known, run, every(k)).seconds / t for run in known.runs for k, t in run.every.items()
        ]
        console.print(
            f"{known.name}: simulated over logged, of all runs with k: median "
            f"{statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}"
        )
    in_backward, on_drives = tokens_that_hide(machine)
    console.print(
        f"{machine.name}: no update is waited for from {in_backward / 1e3:.0f} thousand tokens on (states in "
        f"host memory, updates in backward); from {on_drives / 1e3:.0f} thousand (on drives, all of a step)"
    )


def compared(machine: Machine) -> Table:
    """Return a table: the CPU alone, k = 2, the GPU alone, and the lane that ends first."""
    table = Table(title=f"seconds of an update, one of four {machine.name}; nothing measured here")
    for title in (
        "model",
        "CPU, logged",
        "k = 2, logged",
        "simulated",
        "GPU, simulated",
        "k = 2 over it",
        "ends first, simulated",
        "on GPU",
    ):
        table.add_column(title, justify="left" if title == "model" else "right")
    for run in machine.runs:
        two, alone, best = (simulate(machine, run, way) for way in (every(2), every(1), ends_first))
        table.add_row(
            *(run.name, f"{run.cpu:.2f}", f"{run.every[2]:.2f}", f"{two.seconds:.2f}"),
            *(f"{alone.seconds:.2f}", f"{two.seconds / alone.seconds:.2f} x", f"{best.seconds:.2f}"),
            f"{best.on_gpu / (best.on_gpu + best.on_cpu):.0%}",
        )
    return table


def sweep(machine: Machine) -> Table:
    """Return a table: what the authors logged for each k, and what is simulated."""
    ks = list(machine.runs[0].every)
    table = Table(title=f"every k-th on the GPU, {machine.name}: logged / simulated")
    table.add_column("model")
    for k in ks:
        table.add_column(f"k = {k}", justify="right")
    for run in machine.runs:
        cells = (f"{run.every[k]:.2f} / {simulate(machine, run, every(k)).seconds:.2f}" for k in ks)
        table.add_row(run.name, *cells)
    return table
