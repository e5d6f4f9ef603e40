"""Ways of keeping activations on a GPU: what each costs in time, and where its bandwidth ends.

    python benchmarks/gpu.py                                  all sizes; half an hour
    python benchmarks/gpu.py --quick                          one size, within four minutes on an H100
    python benchmarks/gpu.py --size 8192x4x4096x1             hidden x layers x sequence x batch
    python benchmarks/gpu.py --device cpu --size 128x4x64x2   the same on a CPU, to see that it works

A GPT with ``scaled_dot_product_attention``: megatron-core's where that is installed, else one in
plain PyTorch that saves the same bytes. Several models of such a width do not fit one GPU, so here, unlike
in the other benchmarks, all ways share one model in one process. Single steps alternate. In a round all
ways have the same weights and the same batch, and all begin with gradients of zero; the weights change
between the rounds. A step is forward and backward, timed by events of the device; ratios are medians over
the rounds of the ratio to keep within a round, with quartiles. The peak is that of the device's allocator
in the step less what was live before.

The last rounds run with deterministic kernels and compare the loss and all gradients, bit for bit.

Beside the time of each way stands its bound: its forward takes as long as keep's, or as its tier, whose
bandwidth is measured first, takes to write its bytes, and its backward likewise to read them. What the step
needs is its bytes by the time of keep's forward and of its backward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import statistics
import sys
import time
import traceback
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
from gpt_runner import dtype_option
from gpu_ways import OURS, WAYS, Figures, Places, Size, Subject, Way, deterministic, directory_in, make_way
from rich.console import Console
from rich.table import Table

from tba_lab.demo.dtype import choose_dtype, instruction_set
from tba_lab.demo.race import Spread, measures_memory, paired_ratio, turns
from tba_lab.megatron_cpu import single_process
from tba_offload.config import parse_size
from tba_offload.device.malloc import keep_freed_pages
from tba_offload.errors import RunLogError, StoreError, UnsupportedError
from tba_offload.report import rok
from tba_offload.report.log import RunHeader, RunLogWriter, StepRecord
from tba_offload.store import open_store
from tba_offload.store.bench import Rates, measure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

WARM_UP = 4
"""Rounds that do not count: memory is allocated and pinned, and auto learns and changes to its plan."""

LEAST_ROUNDS = WARM_UP + 3
PROOF_ROUNDS = 2
WINDOW_LAYERS = 2
"""The window of ours holds what so many layers save."""

HARMLESS = (
    "ImportError",
    "ModuleNotFoundError",
    "MissingDependencyError",
    "UnsupportedError",
    "TooSlowError",
)
"""Why a way may be left out."""

ACTIVATIONS = 16
"""A layer's smaller activations are this part of what it saves."""

SIZES = ("4096x8x4096x2", "6144x6x4096x2", "8192x4x8192x1", "8192x4x1024x4", "8192x4x1024x8")
QUICK = ("8192x4x4096x1",)
QUICK_MINUTES = 3.0
GB, GIB = 1e9, 2**30


@dataclasses.dataclass(frozen=True)
class Settings:
    """The command line."""

    device: torch.device
    sizes: tuple[Size, ...]
    model: str
    ways: tuple[str, ...]
    rounds: int
    minutes: float | None
    budget: float
    window: int | None
    drive: Path
    tmpfs: Path
    output: Path


class TooSlowError(Exception):
    """There is no time for a way."""


class Contest:
    """All ways of one size."""

    def __init__(self, settings: Settings, subject: Subject) -> None:
        self.settings, self.subject = settings, subject
        self.ways: dict[str, Way] = {}
        self.steps: dict[str, list[Figures]] = {}
        self.proofs: dict[str, list[str]] = {}
        self.left_out: dict[str, str] = {}
        self.interrupted = False
        self._rounds = 0

    def enter(self, tiers: Mapping[str, Figures] | None = None) -> None:
        """Make the ways, keep first: a budget is a share of its peak.

        Args:
            tiers: What is known of the tiers; ways to one with an ``error`` are left out.
        """
        window = self.settings.window or WINDOW_LAYERS * self.subject.size.layer_bytes
        places = Places(self.settings.drive, self.settings.tmpfs, window)
        for name in self.settings.ways:
            with self._failures_of(name):
                self.ways[name] = make_way(name, self.subject, places)
                self.steps[name] = []
                trouble = (tiers or {}).get(self.ways[name].tier or "", {}).get("error")
                if trouble is not None:
                    raise UnsupportedError(f"its tier cannot be used: {trouble}")
                if name == "keep":
                    peaks = [self._step("keep", 0, measure_memory=True)["peak"] for _ in range(2)]
                    places = dataclasses.replace(places, budget=int(self.settings.budget * peaks[-1]) or None)

    def run(self) -> None:
        """Races until the rounds, or the minutes, are over; then compares bits.

        Who interrupts it gets what is known by then: the machine may be borrowed, and its time over.
        """
        try:
            self._race()
            with deterministic():
                for number in range(self._rounds, self._rounds + PROOF_ROUNDS):
                    self._proof(number)
        except KeyboardInterrupt:
            self.interrupted = True
            shortest = min(map(len, self.steps.values()), default=0)
            self.steps = {name: steps[:shortest] for name, steps in self.steps.items()}

    def _race(self) -> None:
        began = time.perf_counter()
        for number in range(self.settings.rounds):
            self._round(number)
            if self.settings.minutes is None:
                continue
            left = 60 * self.settings.minutes - (time.perf_counter() - began)
            if number == 1:  # nothing is allocated any more, so this is what steps take
                self._drop_the_slow(left / (LEAST_ROUNDS - 2 + PROOF_ROUNDS))
            if left < 0 and number + 1 >= LEAST_ROUNDS:
                break

    def close(self) -> None:
        """End all sessions."""
        for way in self.ways.values():
            way.close()
        self.ways.clear()

    def _round(self, number: int) -> None:
        is_cpu = self.subject.device.torch_device.type == "cpu"
        for name in turns(list(self.ways), number):
            with self._failures_of(name):
                measure_memory = not is_cpu or measures_memory(number)
                self.steps[name].append(self._step(name, number, measure_memory=measure_memory))
        self.subject.learn()
        self._rounds = number + 1
        told = (f"{name} {self.steps[name][-1]['seconds']:.3f}" for name in self.ways)
        click.echo(f"  round {number}: {', '.join(told)}", err=True)

    def _drop_the_slow(self, seconds: float) -> None:
        """Leaves out the slowest ways until a round can be done within so many seconds."""
        taken = {name: steps[-1]["host_seconds"] for name, steps in self.steps.items() if name != "keep"}
        while taken and sum(taken.values()) > seconds:
            slowest = max(taken, key=lambda name: taken[name])
            with self._failures_of(slowest):
                raise TooSlowError(f"a step takes {taken[slowest]:.1f} s, and the minutes are few")
            del taken[slowest]

    def _proof(self, number: int) -> None:
        for name in turns(list(self.ways), number):
            self.subject.clear_gradients()
            try:
                _, loss = self.ways[name].step(self.subject.batch_of(number), measure=False)
                proof = self.subject.fingerprint(loss)
            except Exception as error:  # noqa: BLE001 - told as its proof, which then equals no other
                proof = f"{name}: {type(error).__name__}: {error}"
                click.echo(f"  no proof of {proof}", err=True)
            self.proofs.setdefault(name, []).append(proof)
        self.subject.learn()

    def _step(self, name: str, number: int, *, measure_memory: bool) -> Figures:
        self.subject.clear_gradients()
        figures, _ = self.ways[name].step(self.subject.batch_of(number), measure=measure_memory)
        return figures

    @contextlib.contextmanager
    def _failures_of(self, name: str) -> Iterator[None]:
        """Return a way that fails is left out, and said so; the others go on: the machine may be borrowed."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the others can do without
            self.left_out[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
            click.echo(f"  {name} is left out: {self.left_out[name]}", err=True)
            if not self.left_out[name].startswith(HARMLESS):
                traceback.print_exc(limit=-3)
            way = self.ways.pop(name, None)
            self.steps.pop(name, None)
            if way is not None:
                with contextlib.suppress(Exception):  # it is left out already, and says why
                    way.close()
            self.subject.give_up_memory()


# Tiers


def tiers_of(settings: Settings, size: Size, subject: Subject) -> dict[str, dict[str, Any]]:
    """Return what the places that bytes go to really move, by extents as large as the activations."""
    extent = max(min(size.layer_bytes // ACTIVATIONS, 64 << 20), 4096)
    found = {}
    for name, kind, directories in (
        ("host", "host", ()),
        ("drive", "auto", (settings.drive,)),
        ("tmpfs", "file", (settings.tmpfs,)),
    ):
        try:
            with open_store(kind=kind, directories=directories, device=subject.device) as store:
                rates = measure(store, subject.device, extent_bytes=extent, extents=4)
                found[name] = {**rates._asdict(), "extent_bytes": extent, "store": store.description}
        except StoreError as error:
            found[name] = {"error": str(error)}
    return found


def bound(forward: float, backward: float, written: float, read: float, tier: Rates) -> float:
    """Return the least time of a step that moves these bytes, in seconds.

    Forward lasts until what is written has left, since the window holds the rest until backward uses it, and
    backward until what is read has come.

    Args:
        forward: Of the step if nothing moves.
        backward: Likewise.
        written: Bytes to the tier.
        read: Bytes from it.
        tier: What it moves.
    """
    return max(forward, written / tier.write) + max(backward, read / tier.read)


# Figures


def rows_of(contest: Contest, tiers: dict[str, dict[str, Any]]) -> list[Figures]:
    """One row for each way."""
    keep = timed(contest.steps["keep"]) if contest.steps.get("keep") else None
    rows = []
    for name, steps in contest.steps.items():
        counted = timed(steps)
        if not counted:  # interrupted before it began
            continue
        row: Figures = {
            "name": name,
            "tier": contest.ways[name].tier,
            "seconds": dataclasses.asdict(Spread.of([step["seconds"] for step in counted])),
            "host_seconds": statistics.median(step["host_seconds"] for step in counted),
            "peak_bytes": max(
                (step["peak"] for step in steps[WARM_UP - 1 :] if "peak" in step), default=None
            ),
            "reserved_bytes": max(
                (step["reserved"] for step in steps[WARM_UP - 1 :] if step.get("reserved")), default=None
            ),
            "same_bits": None if contest.interrupted else contest.proofs[name] == contest.proofs.get("keep"),
            **{key: median(counted, key) for key in MEDIANS},
        }
        if keep is not None:
            row |= against_keep(counted, keep, row, tiers)
        rows.append(row)
    base = next((row["peak_bytes"] for row in rows if row["name"] == "keep"), None)
    for row in rows:
        row["peak_over_keep"] = row["peak_bytes"] / base if base and row["peak_bytes"] else None
    return rows


MEDIANS = (
    *("forward", "backward", "stall", "written", "read", "forwarded", "kept", "recomputed"),
    *("predicted_seconds", "predicted_peak"),
)


def against_keep(
    counted: Sequence[Figures], keep: Sequence[Figures], row: Figures, tiers: dict[str, dict[str, Any]]
) -> Figures:
    """Return the ratio to keep, the bandwidth that the step needs, and the bound of its tier."""
    ratio = paired_ratio([step["seconds"] for step in counted], [step["seconds"] for step in keep])
    found: Figures = {"over_keep": dataclasses.asdict(ratio)}
    if row["tier"] is None or row["written"] is None:
        return found
    tier = tiers[row["tier"]]
    rates = Rates(tier["write"], tier["read"], tier["both"])
    times = median(keep, "forward"), median(keep, "backward")
    least = bound(*times, row["written"], row["read"], rates)
    return found | {
        "needs_write": row["written"] / median(keep, "forward"),
        "needs_read": row["read"] / median(keep, "backward"),
        "bound_seconds": least,
        "over_bound": row["seconds"]["median"] / least,
    }


def timed(steps: Sequence[Figures]) -> list[Figures]:
    """Return the steps whose time counts: on a CPU not those in which memory was sampled."""
    counted = steps[WARM_UP:] or steps
    return [step for step in counted if "peak" not in step] or list(counted)


def median(steps: Sequence[Figures], name: str) -> Any:
    """Return the median of a figure; ``None`` where it is not known."""
    known = [step[name] for step in steps if step.get(name) is not None]
    return statistics.median(known) if known else None


# Reports


def table_of(document: dict[str, Any]) -> Table:
    """Return the rows of one size."""
    made = Table(
        title=f"{document['model']} {document['size']}, {document['dtype']}; {document['rounds']} rounds",
        box=None,
    )
    heads = (
        "way",
        "step s",
        "x keep (quartiles)",
        "peak GiB",
        "x keep",
        "reserved GiB",
        "written / read GiB",
        "stall s",
    )
    for head in (*heads, "needs GB/s", "tier GB/s: write, read, both", "bound s", "x bound", "bits"):
        made.add_column(head, justify="left" if head == "way" else "right")
    for row in document["rows"]:
        tier = document["tiers"].get(row["tier"] or "")
        over = row.get("over_keep")
        made.add_row(
            row["name"],
            f"{row['seconds']['median']:.4f}",
            str(Spread(**over)) if over else "",
            number_or_blank(row["peak_bytes"] and row["peak_bytes"] / GIB),
            number_or_blank(row["peak_over_keep"]),
            number_or_blank(row["reserved_bytes"] and row["reserved_bytes"] / GIB),
            pair(row["written"], row["read"], GIB),
            number_or_blank(row["stall"], 4),
            pair(row.get("needs_write"), row.get("needs_read"), GB),
            ", ".join(f"{tier[name] / GB:.1f}" for name in Rates._fields) if tier else "",
            number_or_blank(row.get("bound_seconds"), 4),
            number_or_blank(row.get("over_bound")),
            {True: "same", False: "differ", None: ""}[row["same_bits"]],
        )
    return made


def number_or_blank(value: float | None, digits: int = 3) -> str:
    """Return a number, if there is one."""
    return "" if value is None else f"{value:.{digits}f}"


def pair(one: float | None, other: float | None, unit: float) -> str:
    """Two numbers, if there are any."""
    return "" if one is None or other is None else f"{one / unit:.2f} / {other / unit:.2f}"


def write_logs(contest: Contest, folder: Path, machine: Figures) -> None:
    """Write a run log for each way, for the ROK report."""
    subject, size = contest.subject, contest.subject.size
    model = {
        "name": subject.kind,
        "hidden": size.hidden,
        "layers": size.layers,
        "sequence": size.sequence,
        "dtype": size.dtype,
        "batch_size": size.batch,
    }
    for name, steps in contest.steps.items():
        header = RunHeader(strategy=name, model=model, hardware=machine)
        with RunLogWriter(folder / f"{size}-{slug(name)}.jsonl", header) as log:
            for number, step in enumerate(steps, 1):
                log.write(
                    StepRecord(
                        step=number,
                        seconds=step["seconds"],
                        stall_seconds=step.get("stall"),
                        tokens=subject.tokens,
                        model_flops=subject.flops,
                        activation_peak_bytes=step.get("peak"),
                        peak_source=subject.meter.source,
                        reserved_peak_bytes=step.get("reserved"),
                        gradients_allocated=True,
                        offloaded_bytes=step.get("written", 0),
                        read_bytes=step.get("read", 0),
                    )
                )


def draw_rok(settings: Settings, folder: Path, logs: Path) -> dict[str, list[str]]:
    """Return a curve for each model, through its batch sizes; what the report says of it."""
    said = {}
    for name in dict.fromkeys(str(size).rpartition("x")[0] for size in settings.sizes):
        paths = sorted(logs.glob(f"{name}x*.jsonl"))
        if not paths:
            continue
        try:
            points = rok.points(paths, warmup=WARM_UP)
        except RunLogError as error:  # interrupted before there was enough
            said[name] = [str(error)]
            continue
        said[name] = rok.advice(points)
        with contextlib.suppress(ImportError):
            for suffix in ("svg", "png"):
                rok.draw(points, folder / f"rok-{name}.{suffix}")
    return said


def slug(name: str) -> str:
    """Return a name as part of a file's name."""
    return name.replace(", ", "-").replace(" ", "-")


def machine_of(device: torch.device) -> Figures:
    """Where it ran."""
    found: Figures = {
        "device": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "instruction_set": instruction_set(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"device": properties.name, "device_bytes": properties.total_memory}
        driver = Path("/proc/driver/nvidia/version")
        if driver.exists():
            found["driver"] = driver.read_text().splitlines()[0]
    return found


def versions() -> dict[str, str]:
    """Of everything that had a part in it."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    packages = ("tba-offload", "megatron-core", "kvikio-cu13", "kvikio-cu12", "torchtune", "trl", "deepspeed")
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


# The command


def run_size(settings: Settings, size: Size, folder: Path, machine: Figures) -> dict[str, Any]:
    """Everything about one size, as JSON."""
    kind = "megatron" if settings.model == "megatron" else "torch"
    with single_process() if kind == "megatron" else contextlib.nullcontext():
        subject = Subject(kind, size, settings.device)
        click.echo(f"{kind} {size}: measuring where bytes go", err=True)
        tiers = tiers_of(settings, size, subject)
        contest = Contest(settings, subject)
        try:
            contest.enter(tiers)
            contest.run()
            write_logs(contest, folder / "runs", machine)
            return {
                "size": str(size),
                "model": kind,
                "dtype": size.dtype,
                "tokens": subject.tokens,
                "model_flops": subject.flops,
                "rounds": max(map(len, contest.steps.values()), default=0),
                "warm_up_rounds": WARM_UP,
                "tiers": tiers,
                "rows": rows_of(contest, tiers),
                "left_out": contest.left_out,
                "interrupted": contest.interrupted,
                "steps": contest.steps,
            }
        finally:
            contest.close()
            subject.close()


def run(settings: Settings) -> dict[str, Any]:
    """Everything; writes it to the output folder, and returns it."""
    started = datetime.now(UTC)
    machine = machine_of(settings.device)
    folder = settings.output / f"gpu-{started:%Y%m%d-%H%M%S}"
    (folder / "runs").mkdir(parents=True)
    document: dict[str, Any] = {
        "started": started.isoformat(timespec="seconds"),
        "machine": machine,
        "versions": versions(),
        "command": sys.argv[1:],
        "sizes": [],
    }
    console = Console(width=210)
    for size in settings.sizes:
        document["sizes"].append(run_size(settings, size, folder, machine))
        # After every size: what is known is not lost if the next one breaks off.
        (folder / "results.json").write_text(json.dumps(document, indent=1) + "\n")
        console.print(table_of(document["sizes"][-1]))
        for name, why in document["sizes"][-1]["left_out"].items():
            console.print(f"left out: {name}, because {why}", markup=False)
        if document["sizes"][-1]["interrupted"]:
            break
    document["rok"] = draw_rok(settings, folder, folder / "runs")
    (folder / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    click.echo(f"written to {folder}")
    return document


def megatron_is_there() -> bool:
    """Whether its version can be told."""
    try:
        version("megatron-core")
    except PackageNotFoundError:
        return False
    return True


@click.command()
@click.option("--device", default="cuda", show_default=True)
@click.option(
    "--size", "sizes", multiple=True, help=f"Hidden x layers x sequence x batch.  [default: {SIZES}]"
)
@click.option("--model", type=click.Choice(["auto", "torch", "megatron"]), default="auto", show_default=True)
@dtype_option
@click.option("--way", "ways", type=click.Choice(tuple(WAYS)), multiple=True, help="Which.  [default: all]")
@click.option(
    "--rounds", type=click.IntRange(min=LEAST_ROUNDS), default=16, show_default=True, help="Steps of each."
)
@click.option("--minutes", type=float, help="After so many a size is given no further round.")
@click.option(
    "--budget", default=0.5, show_default=True, help="Peak of auto, by keep's; 0: the least without waiting."
)
@click.option("--window", help="Bytes in flight of ours.  [default: what two layers save]")
@click.option("--drive", default=".", show_default=True, help="A directory on the drive.")
@click.option("--tmpfs", default="/dev/shm", show_default=True, help="A directory in memory.")  # noqa: S108
@click.option("--output", default="benchmarks/results", show_default=True, help="Where results go.")
@click.option(
    "--quick", is_flag=True, help=f"{QUICK[0]}, and no further round after {QUICK_MINUTES:g} minutes."
)
def main(
    *,
    device: str,
    sizes: tuple[str, ...],
    model: str,
    dtype: str,
    ways: tuple[str, ...],
    rounds: int,
    minutes: float | None,
    budget: float,
    window: str | None,
    drive: str,
    tmpfs: str,
    output: str,
    quick: bool,
) -> None:
    """Race the ways of keeping activations on a GPU."""
    where = torch.device(device)
    if where.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for the rounds that compare bits
    else:
        keep_freed_pages()
    if model == "auto":
        model = "megatron" if megatron_is_there() else "torch"
    chosen = choose_dtype(dtype, device=where)
    click.echo(str(chosen), err=True)
    with directory_in(drive) as on_drive, directory_in(tmpfs) as in_memory:
        settings = Settings(
            device=where,
            sizes=tuple(Size.parse(size, chosen.dtype) for size in sizes or (QUICK if quick else SIZES)),
            model=model,
            ways=("keep", *(way for way in ways or WAYS if way != "keep")),
            rounds=rounds,
            minutes=minutes or (QUICK_MINUTES if quick else None),
            budget=budget,
            window=None if window is None else parse_size(window),
            drive=on_drive,
            tmpfs=in_memory,
            output=Path(output),
        )
        document = run(settings)
    broken = [
        f"{size['size']}: {name}"
        for size in document["sizes"]
        for name in OURS
        if failed(size, name) or not bits_of(size, name)
    ]
    if broken:
        raise click.ClickException(f"failed, or gave other bits: {'; '.join(broken)}")


def failed(size: dict[str, Any], name: str) -> bool:
    """Whether a way that was there broke."""
    return not size["left_out"].get(name, "ImportError").startswith(HARMLESS)


def bits_of(size: dict[str, Any], name: str) -> bool:
    """Whether a way that took part gave keep's bits."""
    return all(row["same_bits"] is not False for row in size["rows"] if row["name"] == name)


if __name__ == "__main__":
    main()
