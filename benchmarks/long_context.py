"""Compare recompute-offload with the checkpointing of transformers at long sequences.

    python benchmarks/long_context.py                                   a Llama of width 512, 2k to 16k tokens
    python benchmarks/long_context.py --context 2048 --layers 6 --layers 24    peaks at two numbers of layers
    python benchmarks/long_context.py --context 8192 --rate 1.2x --rate 0.8x   drives with limited rates
    python benchmarks/long_context.py --device cuda --model 8b --context 32768 --json 8b.json

A step is forward and backward of one sequence of random tokens, with a loss in chunks of tokens. A *lane* is
one of the compared methods. Each lane trains in its own process, and the processes alternate step by step.

* ``checkpointing`` is the checkpointing of transformers. All ratios are to this lane.
* ``checkpointing again`` is a second run of ``checkpointing``. Its ratio is noise.
* ``checkpointing to host`` is transformers' own offloading, which needs an accelerator.
* ``host`` and ``drive`` use recompute-offload, with a store in host memory or on the drive.
* ``keep`` runs if the estimate of its peak is at most --memory.

With --rate, a second comparison limits the rate of the drive, without host memory and with host memory before
the drive. A rate of 1.2x is 1.2 times the needed rate of the lane ``drive``.

FILE of --json is written after each comparison. Comparisons whose results are in FILE are not repeated.

The column *need* has the bytes that layers save, divided by the time of the forward. The need in
parentheses is predicted from the sizes of the model and the forward time of checkpointing. *Had* is the rate
of the drive while it wrote. The expected wait is the time to write all bytes beyond the in-flight window,
minus the time in which layers compute after the first write began.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
import warnings
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
from lanes import directory_option, json_option, show, shown_race, write_json
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tba_offload as tba
from tba_lab.gpt import DTYPES
from tba_lab.race import Entrant, Spread, paired_ratio
from tba_offload.config import parse_size
from tba_offload.days import bytes_per_day
from tba_offload.device import device_of
from tba_offload.device.host_memory import keep_freed_pages
from tba_offload.device.meters import meter_of
from tba_offload.estimate import dry_model
from tba_offload.formatting import readable_size
from tba_offload.placements import Placement
from tba_offload.planner.model import Bandwidth, Plan
from tba_offload.planner.window import Window
from tba_offload.report import rok

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from around import put_around, taking_time

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor, nn

    from tba_offload.store.base import Moved

    Figures = dict[str, Any]

BASE, CONTROL = "checkpointing", "checkpointing again"
LANES = "host", "drive", "checkpointing to host", "keep"
WARM_UP = 2
"""Number of first rounds that do not count. On a CPU, only the second round measures memory."""

CHUNK = 512
"""Tokens in a chunk of the loss."""

FEW = 2
"""Number of layers in the estimate of keep's peak. An estimate of few layers is faster."""

SMALL = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 4, "vocab_size": 4096}
LARGE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "vocab_size": 128256}
MODELS: dict[str, Figures] = {"small": SMALL, "8b": LARGE | {"num_key_value_heads": 8}}
"""Sizes of Llama models. ``8b`` has the layers of Llama 3 8B."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Model and sequence length."""

    model: str
    layers: int
    context: int
    dtype: str

    def config(self) -> Any:
        import transformers

        sizes = {"num_hidden_layers": self.layers, "max_position_embeddings": self.context}
        return transformers.LlamaConfig(**MODELS[self.model], **sizes, use_cache=False)

    @property
    def saved_bytes(self) -> int:
        """Bytes of the inputs of all layers, without the tables of rotary embeddings."""
        return self.layers * MODELS[self.model]["hidden_size"] * self.context * DTYPES[self.dtype].itemsize

    def build(self, device: str) -> Any:
        """Return the model, with allocated gradients, so that gradients do not count as activations."""
        import transformers

        torch.manual_seed(1)
        torch.set_default_dtype(DTYPES[self.dtype])
        with torch.device(device):
            model = transformers.LlamaForCausalLM(self.config()).train()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return model


# Lanes


class ContextRunner:
    """Model that trains on one sequence per step.

    ``switch`` has the arguments of transformers' checkpointing; ``None`` switches checkpointing off.
    ``policy`` is the policy of tba-offload; ``None`` trains without tba-offload. ``rate`` limits the drive,
    in bytes per second and direction; ``None`` sets no limit.
    """

    def __init__(
        self, shape: Shape, device: str, *, switch: Any = None, policy: Any = None, rate: float | None = None
    ) -> None:
        warnings.simplefilter("ignore", tba.NothingSavedWarning)  # host memory saves no memory on a CPU
        keep_freed_pages()
        self._shape, self._device, self._count = shape, device_of(torch.device(device)), 0
        self._stack = contextlib.ExitStack()
        self.close = self._stack.close
        self._model = shape.build(device)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        if switch is not None:
            self._model.activation_checkpointing_enable(**switch)
        self._meter = meter_of(self._device)
        self._stack.callback(self._meter.close)
        self._session: tba.Session | None = None
        if policy is not None:
            session = tba.attach(self._model, policy, measure_memory=False)
            self._session = self._stack.enter_context(session)
            if rate is not None:
                put_around(session.store, partial(taking_time, rate), tier="drive")

    def step(self) -> Figures:
        """Run one step. Return its times, loss, transfers and waits, and its peak if measured."""
        number, self._count = self._count, self._count + 1
        session, moves = self._session, list[Any]()
        size, generator = (1, self._shape.context + 1), torch.Generator().manual_seed(number)
        tokens = torch.randint(MODELS[self._shape.model]["vocab_size"], size, generator=generator)
        tokens = tokens.to(self._device.torch_device)
        is_measured = not self._meter.samples or number == WARM_UP - 1
        if session is not None:
            session.store.watch_moves(moves.append)
        if is_measured:
            self._meter.reset()
            base = self._meter.live()
        times = [self._now()]
        with session.step(measure_memory=False) if session else contextlib.nullcontext():
            hidden = self._model.model(input_ids=tokens[:, :-1]).last_hidden_state
            times.append(self._now())
            loss = chunked_loss(self._model.lm_head, hidden, tokens[:, 1:])
            del hidden
            loss.backward()
            times.append(self._now())
        peak = self._meter.peak() - base if is_measured else None
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        if self._device.runs_behind:
            torch.cuda.empty_cache()  # the processes share the device
        began, turned, ended = times
        found = {"forward": turned - began, "seconds": ended - began, "peak": peak}
        found["loss"] = float(loss.detach())
        return found if session is None else found | transfers(session.records[-1], moves)

    def _now(self) -> float:
        if self._device.runs_behind:
            torch.accelerator.synchronize()
        return time.perf_counter()


def chunked_loss(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss, with the logits of one chunk at a time in memory."""

    def loss_of(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = head(hidden).float().flatten(0, 1)
        return functional.cross_entropy(logits, targets.flatten(), reduction="sum")

    chunks = zip(hidden.split(CHUNK, 1), targets.split(CHUNK, 1), strict=True)
    losses = [checkpoint(loss_of, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(losses).sum() / targets.numel()


def transfers(record: tba.StepRecord, moves: Sequence[Moved]) -> Figures:
    """Return the bytes that a step saved and wrote to the drive, the rate while it wrote, and the wait."""
    writes = [each for each in moves if each.writes and each.place != "host memory"]
    busy = until = 0.0
    for each in sorted(writes, key=lambda each: each.began):
        busy += max(each.ended - max(each.began, until), 0.0)
        until = max(until, each.ended)
    written = sum(each.nbytes for each in writes)
    saved = record.read_bytes + record.forwarded_bytes  # a running write of used bytes would count twice
    had = written / busy if busy else None
    return {"saved": saved, "written": written, "had": had, "wait": record.stall_seconds}


# Races


@dataclasses.dataclass
class Bench:
    """Comparisons of one model at one sequence length.

    ``forward`` is the forward time of checkpointing in the last comparison.
    """

    shape: Shape
    device: str
    place: str
    steps: int
    window: int
    forward: float = 0.0

    def race(self, lanes: Mapping[str, Figures]) -> dict[str, Figures]:
        """Compare lanes with checkpointing. Return a row of figures for each lane."""
        lanes = {BASE: {"switch": {}}, CONTROL: {"switch": {}}, **lanes}
        common = {"shape": self.shape, "device": self.device}
        entrants = {name: Entrant(ContextRunner, common | lane) for name, lane in lanes.items()}
        results = shown_race(entrants, self.steps + WARM_UP)
        rows = {name: row_of(name, self.shape, results[name], results[BASE]) for name in results}
        self.forward = statistics.mean(rows[name]["forward"] for name in (BASE, CONTROL))
        for row in rows.values():
            row["predicted_need"] = row["need"] and self.shape.saved_bytes / self.forward
        return rows

    def policy(self, **store: Any) -> Figures:
        """Return a lane with tba-offload, which takes over checkpointing and offloads inputs to a store."""
        budget = {"in_flight_bytes": self.window}
        return {"switch": {}, "policy": {"default": "offload", "budget": budget, "store": store}}

    def unheld(self, memory: int, wanted: Collection[str]) -> dict[str, Figures]:
        lanes = {"host": self.policy(kind="host")}
        lanes["drive"] = self.policy(kind="file", directories=[self.place])
        if self.device != "cpu":
            lanes["checkpointing to host"] = {"switch": {"offload": True}}
        if "keep" in wanted and self.keep_peak() <= memory:
            lanes["keep"] = {}
        return self.race({name: lane for name, lane in lanes.items() if name in wanted})

    def held(self, drive: Figures, rates: Sequence[str], capacity: int) -> dict[str, Figures]:
        """Compare drives with limited rates, without host memory and with host memory before the drive."""
        store = {"kind": "file", "directories": [self.place], "readers": 1, "writers": 1}
        first = {"order": ["host", "drive"], "host_capacity": capacity}
        lanes = {}
        for name in rates:
            rate = float(name[:-1]) * drive["need"] if name.endswith("x") else parse_size(name)
            lanes[f"drive at {name}"] = {"rate": rate} | self.policy(**store)
            lanes[f"host first at {name}"] = {"rate": rate} | self.policy(**store, **first)
        rows, rules = self.race(lanes), Window(self.window)
        first = math.ceil((rules.held_back + rules.batch) * self.shape.layers / drive["saved"])
        computes = self.forward * (1 - first / self.shape.layers)
        for name, lane in lanes.items():
            room = capacity if "order" in lane["policy"]["store"] else 0
            writes = (drive["saved"] - room - self.window) / lane["rate"]
            wait = max(writes - computes, 0.0)
            rows[name] |= {"rate": lane["rate"], "expected_wait": wait, "need": None}
        return {name: rows[name] for name in lanes}

    def keep_peak(self) -> float:
        """Return the estimated peak of ``keep`` in bytes."""
        config = dataclasses.replace(self.shape, layers=FEW).config()
        config.save_pretrained(self.place)
        drives = {"flops": 1e12, "bandwidth": Bandwidth(1e12, 1e12)}
        sizes = {"config": self.place, "dtype": self.shape.dtype, "batch": 1, "sequence": self.shape.context}
        with dry_model(**drives, **sizes) as dry:
            dry.run(Plan((Placement.OFFLOAD,) * FEW))
            keep = dry.step(Plan((Placement.KEEP,) * FEW))
        return keep.activation_peak * self.shape.layers / FEW


def row_of(name: str, shape: Shape, steps: Sequence[Figures], base: Sequence[Figures]) -> Figures:
    """Return the figures of a lane."""
    timed = steps[WARM_UP:]
    row = {"name": name, "steps": len(timed), **dataclasses.asdict(shape)}
    for key in ("seconds", "forward", "saved", "written", "had", "wait"):
        known = [step[key] for step in timed if step.get(key) is not None]
        row[key] = statistics.median(known) if known else None
    seconds = [[step["seconds"] for step in lane[WARM_UP:]] for lane in (steps, base)]
    return row | {
        "peak": max(step["peak"] or 0 for step in steps[1:]),
        "need": row["saved"] and row["saved"] / row["forward"],
        "written_per_day": row["written"] and bytes_per_day(row["written"], row["seconds"]),
        "spread": dataclasses.asdict(Spread.of(seconds[0])),
        "over": dataclasses.asdict(paired_ratio(*seconds)),
        "same_losses": [step["loss"] for step in steps] == [step["loss"] for step in base],
    }


# What pages and pictures contain


def show_rows(rows: Sequence[Figures], title: str) -> None:
    """Print the rows of one sequence length."""

    def cell(row: Figures, key: str, form: str, by: float = 1.0, beside: str = "") -> str:
        known = [f"{row[each] / by:{form}}" for each in (key, beside) if row.get(each) is not None]
        return known[0] + "".join(f" ({each})" for each in known[1:]) if row.get(key) is not None else ""

    columns = {
        "": lambda row: row["name"],
        "peak MiB": lambda row: cell(row, "peak", ".1f", 2**20),
        "step s": lambda row: cell(row, "seconds", ".3f"),
        "x checkpointing (quartiles)": lambda row: str(Spread(**row["over"])),
        "tokens/s": lambda row: f"{row['context'] / row['seconds']:.0f}",
        "need MB/s (predicted)": lambda row: cell(row, "need", ".1f", 1e6, "predicted_need"),
        "had MB/s": lambda row: cell(row, "had", ".0f", 1e6),
        "wait s (expected)": lambda row: cell(row, "wait", ".3f", 1.0, "expected_wait"),
        "TB a day": lambda row: cell(row, "written_per_day", ".2f", 1e12),
        "losses": lambda row: "same bits" if row["same_losses"] else "differ",
    }
    show(list(columns), [[text(row) for text in columns.values()] for row in rows], title)


def lines_of(rows: Sequence[Figures]) -> dict[str, list[Figures]]:
    """Return the rows of each lane, sorted by sequence length, without drives with limited rates."""
    found: dict[str, list[Figures]] = {}
    deep, mixed = (len({row[key] for row in rows}) > 1 for key in ("layers", "dtype"))
    for row in sorted(rows, key=lambda row: row["context"]):
        if row["name"] != CONTROL and "rate" not in row:
            name = row["name"] + f", {row['layers']} layers" * deep + f", {row['dtype']}" * mixed
            found.setdefault(name, []).append(row)
    return found


def show_growth(rows: Sequence[Figures], memory: int) -> None:
    """Print how peaks grow with the number of layers, and the estimated longest sequences."""
    same = itemgetter("name", "dtype", "context")
    for name, line in lines_of(rows).items():
        for row in line:
            like = [each for each in rows if same(each) == same(row)]
            least = min(like, key=lambda row: row["layers"])
            if row is not least:
                ratio = row["peak"] / least["peak"]
                click.echo(f"{name}, {row['context']} tokens: peak {ratio:.3f} x {least['layers']} layers'")
        for short, long in itertools.pairwise(line[-2:]):
            slope = (long["peak"] - short["peak"]) / (long["context"] - short["context"])
            fits = long["context"] + (memory - long["peak"]) / slope
            click.echo(f"{name}: about {fits:,.0f} tokens fit {readable_size(memory)} of activations")


def draw(rows: Sequence[Figures], prefix: str) -> None:
    """Draw tokens per second over peaks, and sequence lengths over peaks."""
    points = [
        rok.RokPoint(
            strategy=name,
            batch_size=1,
            sequence=row["context"],
            activation_peak_bytes=row["peak"],
            throughput=row["context"] / row["seconds"],
            unit="tokens/s",
            step_seconds=row["seconds"],
            lower_quartile_seconds=row["spread"]["low"],
            upper_quartile_seconds=row["spread"]["high"],
            steps=row["steps"],
            source=name,
            title=f"Llama, {row['model']}, {row['layers']} layers, {row['dtype']}",
        )
        for name, line in lines_of(rows).items()
        for row in line
    ]
    rok.draw(points, f"{prefix}-rok.svg")

    def contexts() -> Any:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(rok.WIDTH, 4.2), layout="constrained")
        axes, grouped = figure.add_subplot(), rok.lines(points)
        for name, line in grouped.items():
            colour, marker, dashes = rok.looks(grouped)[name]
            places = [(each.peak_bytes / 2**20, each.sequence) for each in line]
            axes.plot(*zip(*places, strict=True), dashes, marker=marker, color=colour, label=rok.short(name))
        rok.finish(axes, "Context (tokens)", points[0].title)
        axes.set(xlabel="Activation peak (MiB)", xlim=(0, None))
        figure.legend(loc="outside upper left", ncols=2)
        return figure

    rok.write_picture(f"{prefix}-contexts.svg", contexts)


@click.command(help=(__doc__ or "").splitlines()[0], context_settings={"show_default": True})
@click.option("--context", "contexts", type=int, multiple=True, default=(2048, 4096, 8192, 16384))
@click.option("--layers", "depths", type=int, multiple=True, default=(6,))
@click.option("--dtype", "dtypes", type=click.Choice(list(DTYPES)), multiple=True, default=("fp32",))
@click.option("--model", type=click.Choice(list(MODELS)), default="small")
@click.option("--device", default="cpu")
@click.option("--steps", type=click.IntRange(min=1), default=5, help="Number of timed steps of a lane.")
@click.option("--lane", "wanted", type=click.Choice(LANES), multiple=True, default=LANES)
@click.option("--rate", "rates", multiple=True, help="Limit of the drive: 200MB, or 1.2x the needed rate.")
@click.option("--share", default=0.5, help="Share of the bytes that fit in host memory, with --rate.")
@click.option("--window", default=3.0, help="Size of the in-flight window, in inputs of a layer.")
@click.option("--memory", default="4GiB", help="Available memory for activations.")
@click.option("--picture", help="Draw PICTURE-rok.svg and PICTURE-contexts.svg.")
@directory_option
@json_option
def main(
    *, contexts: Any, depths: Any, dtypes: Any, model: str, json_file: str | None, **options: Any
) -> None:
    """Compare all lanes at each sequence length."""
    memory, wanted = parse_size(options["memory"]), {*options["wanted"], *["drive"] * bool(options["rates"])}
    rows: list[Figures] = json.loads(Path(json_file).read_text()) if Path(json_file or "").is_file() else []
    with tempfile.TemporaryDirectory(prefix="tba-bench-", dir=options["directory"]) as place:
        for dtype, layers, context in itertools.product(dtypes, depths, contexts):
            shape = Shape(model, layers, context, dtype)
            if any(dataclasses.asdict(shape).items() <= row.items() for row in rows):
                continue  # it is in the file
            window = int(options["window"] * MODELS[model]["hidden_size"] * context * DTYPES[dtype].itemsize)
            bench = Bench(shape, options["device"], place, options["steps"], window)
            found = bench.unheld(memory, wanted)
            if options["rates"]:
                room = int(options["share"] * found["drive"]["saved"])
                found |= bench.held(found["drive"], options["rates"], room)
            title = f"{model}, {layers} layers, {dtype}, {context} tokens, window {readable_size(window)}"
            show_rows(list(found.values()), title)
            rows += found.values()
            write_json(rows, json_file)
    show_growth(rows, memory)
    if options["picture"] is not None:
        draw(rows, options["picture"])


if __name__ == "__main__":
    main()
