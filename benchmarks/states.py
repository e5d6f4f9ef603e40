"""What an update costs whose optimizer states lie on a drive.

    python benchmarks/states.py DIRECTORY                 # updates alone, with gradients that are there
    python benchmarks/states.py DIRECTORY --rows 1024     # steps: forward, backward and update
    python benchmarks/states.py DIRECTORY --deepspeed     # beside DeepSpeed's ZeRO-3: zero_lane.py
    python benchmarks/states.py DIRECTORY --device cuda --store host    # on a GPU, states in host memory

Lanes take turns in one process, each with parameters and an optimizer of its own and the same gradients: the
plain optimizer, the same once more as a control, and one whose states are offloaded. Printed are the seconds
of an update and the ratio to the plain one, round by round; what malloc, or the allocator of the device,
handed out more at the peak of an update than before it, and what a lane holds between updates beyond its
parameters; processor time of all threads; the bytes that the process read from drives and wrote there; and
the bound: the bytes that travelled over the rate at which the store reads and writes at once, measured
between the updates with transfers of the same size. After the last round the parameters and states of all
lanes are compared, bit for bit.

With ``--rows`` the matrices are the layers of a model, each step trains it on that number of rows, and
whole steps are timed. Two more lanes update in backward: one keeps gradients until the step, one
frees them at once.

On a GPU there are lanes in which the processor updates all sub-groups (``host``), half of them while the GPU
updates the others (``half``, as Deep Optimizer States with k = 2), or as many as let both end together
(``both``). Their bits are other ones, since the processor's kernels are, and are not compared. Printed is
what the lanes' rates predicted as well.

With ``--deepspeed`` one more lane, or one for each JSON object of settings for its ``aio``, is DeepSpeed's
ZeRO-3 with ``offload_optimizer`` on the same drive, with sub-groups of the same size. Its parameters are
compared with those of the plain optimizer by value, since its optimizer computes otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import zero_lane

import tba_offload as tba
from tba_lab.demo.race import Spread, paired_ratio
from tba_offload.config import format_size, parse_size
from tba_offload.device import READY, device_of
from tba_offload.device.memory import meter_of
from tba_offload.states.home import page_aligned, part_bytes_of
from tba_offload.store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zero_lane import Zero

    from tba_offload.device import Device
    from tba_offload.device.memory import MemoryMeter
    from tba_offload.states import OptimizerStates
    from tba_offload.store.base import ActivationStore

MIB = 2**20
BYTES_OF_STATES = 8
"""Bytes of Adam's states for each parameter in fp32."""

PARTS = 16
"""Parts that are read, and as many that are written, for one measurement of the drive."""


SETTINGS: dict[str, dict[str, str] | None] = {
    "plain": None,
    "again": None,
    "offload": {},
    "backward": {"when": "backward"},
    "free": {"when": "backward", "gradients": "free"},
    "host": {"update": "host"},
    "half": {"update": "host-50%"},
    "both": {"update": "auto"},
}
"""Settings of the states of each lane in the policy; ``None`` where they are not offloaded."""

BY_PROCESSOR = ("host", "half", "both")
"""Lanes in which the processor updates as well."""

LATER = ("backward", "free")
"""Lanes that need steps with a backward."""


@dataclass
class Lane:
    """One optimizer, and what its updates took.

    Attributes:
        name: For the table.
        model: Its own.
        optimizer: Likewise.
        states: Those of the optimizer, if they are offloaded.
        seconds: Of each update.
        peaks: Bytes that were handed out at the peak of each update, above those before it.
        processor: Seconds of processor time of each update, of all threads.
        travelled: Bytes that each update read from drives, and wrote to drives.
        held: Bytes that are its own between updates, beyond its parameters.
        zero: DeepSpeed's engine, if it is one of DeepSpeed.
    """

    name: str
    model: torch.nn.Sequential
    optimizer: torch.optim.Optimizer
    states: OptimizerStates | None = None
    seconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    travelled: list[tuple[int, int]] = field(default_factory=list)
    held: int = 0
    zero: Zero | None = None

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Those of the model."""
        return list(self.model.parameters())

    def update(self, gradients: Sequence[torch.Tensor], meter: MemoryMeter) -> None:
        """Make one update."""
        if self.zero is not None:
            self.zero.backward(gradients)
            with self._measured(meter):
                self.zero.update()
            return
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        with self._measured(meter):
            self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, rows: torch.Tensor, meter: MemoryMeter) -> None:
        """Make one step of training."""
        with self._measured(meter):
            if self.zero is not None:
                self.zero.backward_of(rows)
                self.zero.update()
                return
            self.model(rows).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @contextmanager
    def _measured(self, meter: MemoryMeter) -> Iterator[None]:
        finish(self.parameters)
        meter.reset()
        before = meter.live()
        drives = drive_bytes()
        processor, began = time.process_time(), time.perf_counter()
        yield
        finish(self.parameters)
        self.seconds.append(time.perf_counter() - began)
        self.processor.append(time.process_time() - processor)
        self.peaks.append(meter.peak() - before)
        read, written = drive_bytes()
        self.travelled.append((read - drives[0], written - drives[1]))

    @contextmanager
    def holding(self, meter: MemoryMeter) -> Iterator[None]:
        """Return what is live after the block and was not before it is the lane's."""
        before = meter.live()
        yield
        self.held += meter.live() - before


def finish(parameters: Sequence[torch.Tensor]) -> None:
    """Wait for what a device has to do yet."""
    if parameters[0].device.type != "cpu":
        torch.accelerator.synchronize(parameters[0].device)


def drive_bytes() -> tuple[int, int]:
    """Bytes that this process has read from drives and written to them, by Linux."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])


def made(name: str, arguments: argparse.Namespace) -> Lane:
    """Return a lane with parameters as all lanes have them."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        width = arguments.width
        where = {"bias": False, "device": arguments.device}
        layers = [zero_lane.Given(width, width, **where) for _ in range(arguments.matrices)]
    model = torch.nn.Sequential(*layers)
    return Lane(name, model, torch.optim.AdamW(model.parameters(), fused=True))


def with_deepspeed(
    arguments: argparse.Namespace, meter: MemoryMeter, stack: contextlib.ExitStack
) -> Iterator[Lane]:
    """Yield the lanes of DeepSpeed, one for each setting."""
    settings = [] if arguments.deepspeed is None else arguments.deepspeed or [{}]
    for number, aio in enumerate(settings):
        lane = made(f"deepspeed{number or ''}", arguments)
        print(f"{lane.name}: aio {json.dumps({**zero_lane.AIO, **aio})}, {zero_lane.BUFFERS} buffers")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.directory)))
        with lane.holding(meter):
            lane.zero = zero_lane.Zero(lane.model, folder, arguments.sub_group // BYTES_OF_STATES, aio)
        stack.callback(lane.zero.close)
        yield lane


def offloaded(lane: Lane, arguments: argparse.Namespace, **states: str) -> OptimizerStates:
    """Has the states of a lane offloaded."""
    policy = {
        "states": {"sub_group_bytes": arguments.sub_group, **states},
        "store": store_of(arguments),
    }
    return tba.offload_optimizer(lane.optimizer, policy, model=lane.model)


def store_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Where states go, as a policy says it."""
    directories = [] if arguments.store == "host" else [str(arguments.directory)]
    return {"kind": arguments.store, "directories": directories}


def mixed_rate(store: ActivationStore, device: Device) -> float:
    """Bytes a second, both directions together, with transfers of the size that states travel in."""
    size = part_bytes_of(store)
    memory = page_aligned(2 * PARTS * size, device, store.alignment)
    parts = [memory.part(number * size, size) for number in range(2 * PARTS)]
    extents = [store.reserve(size, part.address) for part in parts]
    pairs = list(zip(extents, parts, strict=True))
    for future in store.write_many([(extent, part, READY, None) for extent, part in pairs]):
        future.wait()
    began = time.perf_counter()
    writes = store.write_many([(extent, part, READY, None) for extent, part in pairs[:PARTS]])
    reads = store.read_many([(extent, part, READY) for extent, part in pairs[PARTS:]], padded=True)
    for future in (*writes, *reads):
        future.wait()
    seconds = time.perf_counter() - began
    for extent in extents:
        store.release(extent)
    return 2 * PARTS * size / seconds


def random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Numbers on the generator's device."""
    return torch.randn(shape, generator=generator, device=generator.device)


def differing(lanes: Sequence[Lane]) -> int:
    """How many tensors of parameters and states differ by a bit from those of the first lane."""
    first, *others = [[*lane.parameters, *_states_of(lane)] for lane in lanes]
    return sum(
        not torch.equal(a.detach().cpu().view(torch.int32), b.detach().cpu().view(torch.int32))
        for other in others
        for a, b in zip(first, other, strict=True)
    )


def _states_of(lane: Lane) -> list[torch.Tensor]:
    entries = lane.optimizer.state_dict()["state"]
    return [entries[number][key] for number in sorted(entries) for key in ("exp_avg", "exp_avg_sq")]


def show(lanes: Sequence[Lane], rates: Sequence[float], warm_up: int) -> None:
    """Print the table."""
    plain = lanes[0].seconds[warm_up:]
    columns = " ".join(f"{name:>8}" for name in ("peak", "first", "held", "read", "written"))
    print(f"{'lane':10} {'seconds':26} {'ratio to plain':24} {columns} {'processor':>9}   (sizes in MiB)")
    for lane in lanes:
        ratios = [own / other for own, other in zip(lane.seconds[warm_up:], plain, strict=True)]
        figures = (max(lane.peaks[1:]), lane.peaks[0], lane.held, *medians(lane.travelled[warm_up:]))
        print(
            f"{lane.name:10} {Spread.of(lane.seconds[warm_up:])!s:26} {Spread.of(ratios)!s:24} "
            f"{' '.join(f'{each / MIB:8.1f}' for each in figures)} "
            f"{statistics.median(lane.processor[warm_up:]):9.3f}"
        )
    rate = statistics.median(rates)
    print(f"store: {rate / 1e9:.2f} GB/s reading and writing at once")
    for lane in lanes:
        if lane.states is not None:
            show_states(lane, plain, rate, warm_up)
        if lane.zero is not None:
            show_zero(lane, lanes, warm_up)


def machine(arguments: argparse.Namespace) -> str:
    """Return what computes."""
    if arguments.device == "cpu":
        return f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    name = torch.get_device_module(arguments.device).get_device_name()
    return f"{name}, {arguments.precision} precision, states in a {arguments.store} store"


def medians(pairs: Sequence[tuple[int, int]]) -> list[float]:
    """Return the median of the first of all pairs, and of the second."""
    return [statistics.median(values) for values in zip(*pairs, strict=True)]


def show_zero(lane: Lane, lanes: Sequence[Lane], warm_up: int) -> None:
    """Print what DeepSpeed took beside the lanes of ours, and how far its parameters are from the plain."""
    for own in lanes:
        if own.states is not None:
            ratio = paired_ratio(lane.seconds[warm_up:], own.seconds[warm_up:])
            spent = paired_ratio(lane.processor[warm_up:], own.processor[warm_up:])
            print(f"{lane.name}: seconds over those of {own.name} {ratio}, processor time {spent}")
    assert lane.zero is not None
    pairs = list(zip(lane.zero.parameters(), lanes[0].parameters, strict=True))
    apart = [(one - other.detach()).abs() for one, other in pairs]
    count = sum(int((each > 0).sum()) for each in apart)
    print(
        f"{lane.name}: {count} of {sum(each.numel() for each in apart)} elements of parameters differ from "
        f"those of plain, by {max(float(each.max()) for each in apart):.2e} at most"
    )


def show_states(lane: Lane, plain: Sequence[float], rate: float, warm_up: int) -> None:
    """Print what travelled, and what the lane took beside the least that it could have taken."""
    assert lane.states is not None
    records = list(lane.states.records)[warm_up:]
    bounds = [(each.read_bytes + each.written_bytes) / rate for each in records]
    bounded = [
        seconds / max(update, bound)
        for seconds, update, bound in zip(lane.seconds[warm_up:], plain, bounds, strict=True)
    ]
    last = records[-1]
    waits = Spread.of([record.waited_seconds for record in records])
    print(
        f"{lane.name}: states {last.states_bytes / MIB:.1f} MiB in {last.sub_groups} sub-groups, slots "
        f"{last.slot_bytes / MIB:.1f} MiB; read {last.read_bytes / MIB:.1f}, written "
        f"{last.written_bytes / MIB:.1f} MiB an update; waited {waits} s; {last.in_backward} sub-groups in "
        "backward"
    )
    print(f"{lane.name}: time over max(plain, bytes / rate): {Spread.of(bounded)}")
    if last.on_host:
        ratios = [each.seconds / each.predicted_seconds for each in records if each.predicted_seconds]
        print(
            f"{lane.name}: the processor updated {last.on_host} sub-groups, with {last.host_bytes / MIB:.1f} "
            f"MiB of host memory; time over what the rates predicted: {Spread.of(ratios)}"
        )


def main() -> None:
    """Run the lanes and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="a directory on the drive")
    parser.add_argument("--matrices", type=int, default=48, help="parameters (default %(default)s)")
    parser.add_argument(
        "--width", type=int, default=1024, help="rows and columns of each (default %(default)s)"
    )
    parser.add_argument(
        "--sub-group", type=parse_size, default=32 * MIB, help="bytes of states that travel as one"
    )
    parser.add_argument(
        "--rows", type=int, default=0, help="rows that a step trains the matrices on; 0 for updates alone"
    )
    parser.add_argument("--device", default="cpu", help="where parameters are (default %(default)s)")
    parser.add_argument(
        "--store",
        choices=("file", "host", "gds"),
        default="file",
        help="where states go (default %(default)s)",
    )
    parser.add_argument(
        "--lanes",
        nargs="*",
        choices=SETTINGS,
        default=list(SETTINGS),
        help="those that take turns beside plain; all by default, as far as they can run",
    )
    parser.add_argument(
        "--precision",
        choices=("highest", "high", "medium"),
        default="highest",
        help="of matrix products in fp32; high is TF32 on a GPU",
    )
    parser.add_argument("--rounds", type=int, default=9, help="updates of each lane (default %(default)s)")
    parser.add_argument(
        "--deepspeed",
        type=json.loads,
        nargs="*",
        metavar="AIO",
        help="a lane of DeepSpeed, or one for each JSON object of settings of its aio",
    )
    arguments = parser.parse_args()
    if arguments.deepspeed is not None:
        try:
            zero_lane.require()
        except zero_lane.CannotRunError as error:
            parser.error(str(error))
    warm_up = min(3, arguments.rounds - 1)  # in the second update lanes are split, in the third as they pay
    torch.set_float32_matmul_precision(arguments.precision)
    device = device_of(arguments.device)
    generator = torch.Generator(arguments.device).manual_seed(2)
    shape = (arguments.width, arguments.width)
    number = 0 if arguments.rows else arguments.matrices
    gradients = [random(shape, generator) for _ in range(number)]
    rows = random((arguments.rows, arguments.width), generator)
    wanted = {"plain", *arguments.lanes} - set(() if arguments.rows else LATER)
    wanted -= set(BY_PROCESSOR if arguments.device == "cpu" else ())
    lanes = [made(name, arguments) for name in SETTINGS if name in wanted]
    rates: list[float] = []
    meter = meter_of(device)
    store = open_store(**store_of(arguments), device=device)
    print(
        f"{arguments.matrices} matrices of {arguments.width} x {arguments.width}, fp32, fused AdamW, "
        f"{machine(arguments)}; sub-groups of {format_size(arguments.sub_group)}"
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(store)
        for lane in lanes:
            states = SETTINGS[lane.name]
            if states is not None:
                with lane.holding(meter):
                    lane.states = stack.enter_context(offloaded(lane, arguments, **states))
        own = [lane for lane in lanes if lane.name not in BY_PROCESSOR]
        lanes += with_deepspeed(arguments, meter, stack)
        for _ in range(arguments.rounds):
            for lane in lanes:
                with lane.holding(meter):
                    if arguments.rows:
                        lane.step(rows, meter)
                    else:
                        lane.update(gradients, meter)
            rates.append(mixed_rate(store, device))
        meter.close()
        show(lanes, rates, warm_up)
        print(f"tensors that differ by a bit: {differing(own)}")


if __name__ == "__main__":
    main()
