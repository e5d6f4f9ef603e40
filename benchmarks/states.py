"""Measure the time of optimizer updates with offloaded optimizer states.

    python benchmarks/states.py DIRECTORY                 # only updates, with random gradients
    python benchmarks/states.py DIRECTORY --rows 1024     # whole steps: forward, backward and update
    python benchmarks/states.py DIRECTORY --deepspeed     # also with DeepSpeed's ZeRO-3
    python benchmarks/states.py DIRECTORY --device cuda --store host    # on a GPU, states in host memory

A *lane* is one of the compared optimizers. All lanes run in one process and alternate. Each lane has its own
parameters, with the same values and gradients. ``plain`` is the plain optimizer, ``again`` is a second plain
optimizer as a control, and ``offload`` has offloaded states.

The table has these columns: the seconds of an update; the ratio to ``plain``, round by round; the peak of the
allocator during an update, and during the first update, minus the live bytes before; the bytes that a lane
holds between updates, without its parameters; the bytes read from and written to drives; and the processor
time of all threads. The bound of a lane is the number of transferred bytes divided by the rate at which the
store reads and writes at once. After the last round, the parameters and states of all lanes are compared bit
for bit.

With ``--rows``, the matrices are the layers of a model that is trained on this number of rows, and whole
steps are timed. The lane ``backward`` updates parameters in backward and frees gradients.

On a GPU, with states in host memory, the CPU updates all sub-groups in the lane ``host``, and a part of the
sub-groups in the lane ``both``. The bits of these two lanes are not compared, because CPU kernels round
differently. The program also prints the ratio of the measured time to the predicted time.

With ``--deepspeed``, further lanes run DeepSpeed's ZeRO-3 with ``offload_optimizer`` on the same drive, and
with sub-groups of the same size. Each JSON object after the option adds a lane with these settings for
``aio``. Parameters of DeepSpeed are compared by value. Install DeepSpeed with

    DS_ACCELERATOR=cpu pip install deepspeed==0.19.8
    apt-get install libaio-dev g++                       # DeepSpeed compiles an operation at its first start
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import tba_offload as tba
from tba_lab.race import Spread, paired_ratio
from tba_offload.config import format_size, parse_size
from tba_offload.device import device_of
from tba_offload.device.meters import meter_of
from tba_offload.store.doctor import measure
from tba_offload.store.open import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tba_offload.device.meters import MemoryMeter
    from tba_offload.states import OptimizerStates

MIB = 2**20
BYTES_OF_STATES = 8
"""Bytes of Adam's fp32 states for each element of a parameter."""

SETTINGS: dict[str, dict[str, str] | None] = {
    "plain": None,
    "again": None,
    "offload": {},
    "backward": {"when": "backward"},
    "host": {"update": "host"},
    "both": {"update": "auto"},
}
"""For each lane, the section ``states`` of the policy; ``None`` if states are not offloaded."""

BY_PROCESSOR = ("host", "both")
"""Lanes in which the CPU updates sub-groups."""

LATER = ("backward",)
"""Lanes that need a backward pass."""

AIO = {"block_size": 2**18, "queue_depth": 32, "intra_op_parallelism": 1}
AIO |= {"single_submit": False, "overlap_events": True}
"""Settings of DeepSpeed's ``aio``. DeepSpeed's defaults are blocks of 1 MiB and a queue depth of 8."""

BUFFERS = 12
"""Number of DeepSpeed's buffers: four tensors for each of three sub-groups in an update."""


class Given(torch.nn.Linear):
    """Linear layer whose weight gets exactly ``gradient`` as its gradient in backward, if it is set."""

    gradient: Tensor | None = None

    def forward(self, rows: Tensor) -> Tensor:
        if self.gradient is None:
            return super().forward(rows)
        return rows + (self.weight * self.gradient).sum()


@dataclass
class Lane:
    """One of the compared optimizers, with the figures of its updates.

    Attributes:
        name: Name in the table.
        model: Model of this lane.
        optimizer: Optimizer of the model.
        states: Offloaded states of the optimizer, if any.
        zero: Engine of DeepSpeed, in a lane of DeepSpeed.
        seconds: Duration of each update.
        peaks: Peak of live bytes during each update, minus the live bytes before.
        processor: Seconds of processor time of all threads in each update.
        travelled: For each update, the bytes read from drives and the bytes written to drives.
        held: Bytes that the lane holds between updates, without its parameters.
    """

    name: str
    model: torch.nn.Sequential
    optimizer: torch.optim.Optimizer
    states: OptimizerStates | None = None
    zero: Any = None
    seconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    travelled: list[tuple[int, int]] = field(default_factory=list)
    held: int = 0

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Parameters of the model."""
        return list(self.model.parameters())

    def update(self, gradients: Sequence[Tensor], meter: MemoryMeter) -> None:
        """Run one update with the given gradients. DeepSpeed gets the gradients in a backward pass."""
        if self.zero is not None:
            for layer, gradient in zip(self.model, gradients, strict=True):
                layer.gradient = gradient
            self.zero.backward(self.zero(torch.zeros(())))
            with self._measured(meter):
                self.zero.step()
            return
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        with self._measured(meter):
            self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, rows: Tensor, meter: MemoryMeter) -> None:
        """Run one training step."""
        with self._measured(meter):
            if self.zero is not None:
                self.zero.backward(self.zero(rows).square().mean())
                self.zero.step()
                return
            self.model(rows).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @contextlib.contextmanager
    def _measured(self, meter: MemoryMeter) -> Iterator[None]:
        self._finish()
        meter.reset()
        before, drives = meter.live(), drive_bytes()
        processor, began = time.process_time(), time.perf_counter()
        yield
        self._finish()
        self.seconds.append(time.perf_counter() - began)
        self.processor.append(time.process_time() - processor)
        self.peaks.append(meter.peak() - before)
        read, written = drive_bytes()
        self.travelled.append((read - drives[0], written - drives[1]))

    def _finish(self) -> None:
        device = self.parameters[0].device
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    @contextlib.contextmanager
    def holding(self, meter: MemoryMeter) -> Iterator[None]:
        """Add the growth of live bytes in the ``with`` block to ``held``."""
        before = meter.live()
        yield
        self.held += meter.live() - before

    def tensors(self) -> list[Tensor]:
        """Return the parameters and the states."""
        entries = self.optimizer.state_dict()["state"]
        states = [entries[number][key] for number in sorted(entries) for key in ("exp_avg", "exp_avg_sq")]
        return [*self.parameters, *states]


def drive_bytes() -> tuple[int, int]:
    """Return the bytes that this process has read from drives and written to drives, as Linux counts them."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])


def made(name: str, options: argparse.Namespace) -> Lane:
    """Return a lane. All lanes start with the same values of parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        sizes = {"in_features": options.width, "out_features": options.width, "bias": False}
        layers = [Given(**sizes, device=options.device) for _ in range(options.matrices)]
    model = torch.nn.Sequential(*layers)
    return Lane(name, model, torch.optim.AdamW(model.parameters(), fused=True))


def with_deepspeed(
    options: argparse.Namespace, meter: MemoryMeter, stack: contextlib.ExitStack
) -> Iterator[Lane]:
    """Yield the lanes of DeepSpeed, one for each JSON object of settings."""
    for number, aio in enumerate([] if options.deepspeed is None else options.deepspeed or [{}]):
        lane = made(f"deepspeed{number or ''}", options)
        print(f"{lane.name}: aio {json.dumps({**AIO, **aio})}, {BUFFERS} buffers")
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.directory))
        with lane.holding(meter):
            lane.zero = zero_engine(lane.model, folder, options.sub_group // BYTES_OF_STATES, aio)
        stack.callback(lane.zero.destroy)
        yield lane


def zero_engine(model: torch.nn.Sequential, directory: str, elements: int, aio: Mapping[str, object]) -> Any:
    """Return an engine of DeepSpeed's ZeRO-3 in one process, with optimizer states on a drive."""
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    deepspeed.utils.logger.setLevel("WARNING")
    if not torch.distributed.is_initialized():
        os.environ.setdefault("LOCAL_RANK", "0")  # otherwise DeepSpeed requires its launcher
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    defaults = torch.optim.AdamW([torch.zeros(1)]).defaults
    settings = {key: defaults[key] for key in ("lr", "betas", "eps", "weight_decay")}
    offload = {"device": "nvme", "nvme_path": directory, "buffer_count": BUFFERS}
    offload |= {"pipeline_read": True, "pipeline_write": True}
    zero = {"stage": 3, "sub_group_size": elements, "reduce_bucket_size": elements}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=DeepSpeedCPUAdam(model.parameters(), adamw_mode=True, **settings),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,  # its default is 1
            "zero_optimization": zero | {"offload_optimizer": offload},
            "aio": {**AIO, **aio},
        },
    )
    return engine


def require_deepspeed(parser: argparse.ArgumentParser) -> None:
    """End the program if DeepSpeed or a package that DeepSpeed needs for drives is missing."""
    if importlib.util.find_spec("deepspeed") is None:
        parser.error("--deepspeed needs DeepSpeed: DS_ACCELERATOR=cpu pip install deepspeed==0.19.8")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        parser.error("DeepSpeed's async_io cannot be compiled: apt-get install libaio-dev g++")


def show(lanes: Sequence[Lane], rate: float, warm_up: int) -> None:
    """Print the table."""
    plain = lanes[0].seconds[warm_up:]
    columns = " ".join(f"{name:>8}" for name in ("peak", "first", "held", "read", "written"))
    print(f"{'lane':10} {'seconds':26} {'ratio to plain':24} {columns} {'processor':>9}   (sizes in MiB)")
    for lane in lanes:
        seconds = lane.seconds[warm_up:]
        moved = [statistics.median(each) for each in zip(*lane.travelled[warm_up:], strict=True)]
        figures = (max(lane.peaks[1:]), lane.peaks[0], lane.held, *moved)
        print(
            f"{lane.name:10} {Spread.of(seconds)!s:26} {paired_ratio(seconds, plain)!s:24} "
            f"{' '.join(f'{each / MIB:8.1f}' for each in figures)} "
            f"{statistics.median(lane.processor[warm_up:]):9.3f}"
        )
    print(f"store: {rate / 1e9:.2f} GB/s reading and writing at once")
    for lane in lanes:
        if lane.states is not None:
            show_states(lane, plain, rate, warm_up)
        if lane.zero is not None:
            show_zero(lane, lanes, warm_up)


def show_states(lane: Lane, plain: Sequence[float], rate: float, warm_up: int) -> None:
    """Print the transferred bytes of a lane, and the ratio of its time to the shortest possible time."""
    assert lane.states is not None
    records = list(lane.states.records)[warm_up:]
    bounds = [(each.read_bytes + each.written_bytes) / rate for each in records]
    least = [max(pair) for pair in zip(plain, bounds, strict=True)]
    last = records[-1]
    waits = Spread.of([record.waited_seconds for record in records])
    print(
        f"{lane.name}: states {last.states_bytes / MIB:.1f} MiB in {last.sub_groups} sub-groups, slots "
        f"{last.slot_bytes / MIB:.1f} MiB; read {last.read_bytes / MIB:.1f}, written "
        f"{last.written_bytes / MIB:.1f} MiB per update; waited {waits} s; {last.in_backward} sub-groups in "
        f"backward; time / max(plain, bytes / rate): {paired_ratio(lane.seconds[warm_up:], least)}"
    )
    if last.on_host:
        ratios = [each.seconds / each.predicted_seconds for each in records if each.predicted_seconds]
        print(
            f"{lane.name}: the CPU updated {last.on_host} sub-groups; measured time / predicted time: "
            f"{Spread.of(ratios)}"
        )


def show_zero(lane: Lane, lanes: Sequence[Lane], warm_up: int) -> None:
    """Print the ratio of DeepSpeed's time to each offloading lane, and the difference of its parameters."""
    import deepspeed

    for own in lanes:
        if own.states is not None:
            ratio = paired_ratio(lane.seconds[warm_up:], own.seconds[warm_up:])
            spent = paired_ratio(lane.processor[warm_up:], own.processor[warm_up:])
            print(f"{lane.name} / {own.name}: seconds {ratio}, processor time {spent}")
    apart = []
    for layer, other in zip(lane.model, lanes[0].parameters, strict=True):
        with deepspeed.zero.GatheredParameters(layer.weight):
            apart.append((layer.weight.detach() - other.detach()).abs())
    count = sum(int((each > 0).sum()) for each in apart)
    print(
        f"{lane.name}: {count} of {sum(each.numel() for each in apart)} elements of parameters differ from "
        f"the elements of plain, by at most {max(float(each.max()) for each in apart):.2e}"
    )


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="directory on the drive")
    parser.add_argument("--matrices", type=int, default=48, help="number of matrices (default %(default)s)")
    parser.add_argument("--width", type=int, default=1024, help="rows and columns of a matrix")
    parser.add_argument("--sub-group", type=parse_size, default=32 * MIB, help="bytes of a sub-group")
    parser.add_argument("--rows", type=int, default=0, help="rows of a step; 0: only updates")
    parser.add_argument("--device", default="cpu", help="device of the parameters (default %(default)s)")
    parser.add_argument("--store", choices=("file", "host", "gds"), default="file", help="kind of store")
    lanes = list(SETTINGS)
    parser.add_argument(
        "--lanes", nargs="*", choices=lanes, default=lanes, help="lanes besides plain (default all)"
    )
    parser.add_argument("--precision", choices=("highest", "high", "medium"), default="highest")
    parser.add_argument("--rounds", type=int, default=9, help="updates of each lane (default %(default)s)")
    parser.add_argument(
        "--deepspeed", type=json.loads, nargs="*", metavar="AIO", help="add lanes of DeepSpeed"
    )
    options = parser.parse_args()
    if options.deepspeed is not None:
        require_deepspeed(parser)
    return options


def main() -> None:
    """Run the lanes and print the table."""
    options = parse()
    warm_up = min(3, options.rounds - 1)  # in the second update lanes are split, in the third as they pay
    torch.set_float32_matmul_precision(options.precision)
    device = device_of(options.device)
    meter = meter_of(device)
    generator = torch.Generator(options.device).manual_seed(2)
    where = {"generator": generator, "device": options.device}
    count = 0 if options.rows else options.matrices
    gradients = [torch.randn(options.width, options.width, **where) for _ in range(count)]
    rows = torch.randn(options.rows, options.width, **where)
    wanted = {"plain", *options.lanes} - set(() if options.rows else LATER)
    is_able = options.device != "cpu" and options.store == "host"
    wanted -= set(() if is_able else BY_PROCESSOR)
    lanes = [made(name, options) for name in SETTINGS if name in wanted]
    places = [] if options.store == "host" else [str(options.directory)]
    store = {"kind": options.store, "directories": places}
    name = torch.backends.cpu.get_cpu_capability()
    if options.device != "cpu":
        name = torch.get_device_module(options.device).get_device_name()
    print(
        f"{options.matrices} matrices of {options.width} x {options.width}, fp32, fused AdamW, {name}, "
        f"{torch.get_num_threads()} threads; sub-groups of {format_size(options.sub_group)}"
    )
    with contextlib.ExitStack() as stack:
        for lane in lanes:
            states = SETTINGS[lane.name]
            if states is not None:
                policy = {"states": {"sub_group_bytes": options.sub_group, **states}, "store": store}
                with lane.holding(meter):
                    away = tba.offload_optimizer(lane.optimizer, policy, model=lane.model)
                    lane.states = stack.enter_context(away)
        own = [lane for lane in lanes if lane.name not in BY_PROCESSOR]
        lanes += with_deepspeed(options, meter, stack)
        bare = stack.enter_context(open_store(**store, device=device))
        rates = []
        for _ in range(options.rounds):
            for lane in lanes:
                with lane.holding(meter):
                    if options.rows:
                        lane.step(rows, meter)
                    else:
                        lane.update(gradients, meter)
            rates.append(measure(bare, device).both)
        meter.close()
        show(lanes, statistics.median(rates), warm_up)
        first, *others = [lane.tensors() for lane in own]
        pairs = [pair for other in others for pair in zip(first, other, strict=True)]
        bits = [[each.detach().cpu().view(torch.int32) for each in pair] for pair in pairs]
        print(f"tensors with different bits: {sum(not torch.equal(*pair) for pair in bits)}")


if __name__ == "__main__":
    main()
