"""Is the plan as good as the best of the simple ones? `auto` against policies written by hand.

    python benchmarks/planner.py                    every budget, with the drive as it is
    python benchmarks/planner.py --model mixed      another model, or layers that sleep (paced)
    python benchmarks/planner.py --rate 200MB       on a drive slowed down to 200 MB/s in each direction
    python benchmarks/planner.py --budget 0         without a budget, against keep and offload
    python benchmarks/planner.py --adapt            the drive halves its rate in the middle of a run
    python benchmarks/planner.py --scale            how long planning takes, up to 100,000 activations

For every budget (a share of keep's activation peak) auto races the policies that a user could write down:
keep the last layers and offload, or recompute, the others, as many as fit; offload or recompute all; half and
half. One process each, single steps alternating. Policies that do not fit the budget race too, and count not.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import click
import families
import torch
from around import put_around
from gpt_runner import HEAD_WIDTH, SHAPE, dtype_option, settled_dtype, shown_race
from rich.console import Console
from rich.table import Table

import tba_offload as tba
from tba_lab.demo.race import (
    MEASURE_EVERY,
    Entrant,
    measures_memory,
    prediction_error,
    ratio_of,
    timed_rounds,
)
from tba_lab.gpt import GptShape, build_gpt, gpt_loss, random_batch
from tba_lab.megatron_cpu import single_process
from tba_offload.config import parse_size
from tba_offload.config.policy import Placement, Rule
from tba_offload.device.malloc import FAST_ALLOCATOR, keep_freed_pages
from tba_offload.plan.bandwidth import Bandwidth
from tba_offload.plan.condense import count_items
from tba_offload.plan.model import Limits
from tba_offload.plan.profile import LayerKind, Saved, Slot, StepProfile, Timing
from tba_offload.plan.search import make_plan
from tba_offload.plan.what_if import composition, peak_of_keep
from tba_offload.store.file import FileStore
from tba_offload.store.open import STORES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.store.base import Extent

WARM_UP = 4
"""Steps that do not count: in the first two auto learns, in the third its plan starts."""

Figures = dict[str, Any]


class ThrottledFileStore(FileStore):
    """A file store on a drive that moves no more than so many bytes a second, in each direction."""

    bytes_per_second: float | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._turns = {"write": threading.Lock(), "read": threading.Lock()}
        put_around(self, self._taking_time)

    @contextlib.contextmanager
    def _taking_time(self, direction: str, extent: Extent) -> Any:
        with self._turns[direction]:
            began = time.perf_counter()
            yield
            if self.bytes_per_second is not None:
                left = extent.nbytes / self.bytes_per_second - (time.perf_counter() - began)
                time.sleep(max(left, 0.0))


class PlanRunner:
    """A model that trains on random tokens under a policy.

    Args:
        config: The policy as YAML.
        shape: The model.
        batch_size: Sequences in a step.
        rates: From a step on, how many bytes a second the drive moves: pairs of step and rate.
        measure: Whether memory is measured in every fourth step.
        family: One of :data:`families.FAMILIES`; by default the GPT of Megatron.
    """

    def __init__(
        self,
        *,
        config: str,
        shape: GptShape,
        batch_size: int,
        rates: Sequence[tuple[int, float | None]] = ((0, None),),
        measure: bool = True,
        family: str | None = None,
    ) -> None:
        keep_freed_pages()
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(single_process())
        self._family = family
        self._model = build_gpt(shape, seed=1) if family is None else families.build(family, shape, seed=1)
        for parameter in self._model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=3e-4, fused=True)
        self._shape, self._batch_size, self._rates, self._measure = shape, batch_size, dict(rates), measure
        self._count = 0
        with mock.patch.dict(STORES, {"file": ThrottledFileStore}):
            session = tba.attach(self._model, tba.OffloadConfig.from_yaml(config), measure_memory=False)
        self._session = self._stack.enter_context(session)

    def step(self) -> Figures:
        """One step: its time, loss, peak if it was measured, stall, plan and prediction."""
        if self._count in self._rates:
            store = self._session.store
            assert isinstance(store, ThrottledFileStore), "another class of store has no rate to set"
            store.bytes_per_second = self._rates[self._count]
        seed = self._count
        measure = self._measure and measures_memory(self._count)
        self._count += 1
        placements = self._session.plan.placements
        with self._session.step(measure_memory=measure) as step:
            loss = self._loss(seed)
            loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        record = step.record
        assert record is not None
        return {
            "loss": float(loss.detach()),
            "seconds": record.seconds,
            "stall": record.stall_seconds,
            "peak": record.activation_peak_bytes,
            "predicted_seconds": record.predicted_seconds,
            "predicted_peak": record.predicted_peak_bytes,
            "layers": composition(placements),
        }

    def _loss(self, seed: int) -> torch.Tensor:
        if self._family is not None:
            return families.loss_of(self._model, self._shape, batch_size=self._batch_size, seed=seed)
        return gpt_loss(self._model, random_batch(self._shape, batch_size=self._batch_size, seed=seed))

    def close(self) -> None:
        """End session and process group."""
        self._stack.close()


def policy(
    directory: str,
    default: Placement,
    *,
    rules: Sequence[Rule] = (),
    window: int | None = None,
    budget: int | None = None,
) -> str:
    """Return a policy as YAML."""
    return tba.OffloadConfig(
        default=default,
        layers=tuple(rules),
        budget=tba.BudgetConfig(in_flight_bytes=window, activation_bytes=budget),
        store=tba.StoreConfig(kind="file", directories=(Path(directory),)),
    ).to_yaml()


def by_hand(directory: str, layers: int, budget: int | None, peak: int, window: int) -> dict[str, str]:
    """Policies that a user could write: the last layers kept, as many as should fit."""
    if budget is None:
        return {"offload all": policy(directory, Placement.OFFLOAD, window=window)}
    one = peak / layers
    found = {}
    spared = Placement.RECOMPUTE_EXCEPT_ATTENTION
    for other in (Placement.RECOMPUTE_OFFLOAD, spared, Placement.OFFLOAD_REMAT):
        found[f"{other} all"] = policy(directory, other, window=window)
    for other in (Placement.OFFLOAD, Placement.RECOMPUTE):
        found[f"{other} all"] = policy(directory, other, window=window)
        room = budget - (window if other is Placement.OFFLOAD else one) - 0.1 * peak
        kept = min(int(room / one), layers - 1)
        if kept > 0:
            rule = Rule(f"{layers - kept}-{layers - 1}", Placement.KEEP)
            found[f"keep {kept}, {other}"] = policy(directory, other, rules=(rule,), window=window)
    for percent in (25, 50, 75):
        share = Placement(f"offload-{percent}%")
        found[f"{share} all"] = policy(directory, share, window=window)
    every_other = Rule(",".join(map(str, range(0, layers, 2))), Placement.RECOMPUTE)
    found["half recompute, half offload"] = policy(
        directory, Placement.OFFLOAD, rules=(every_other,), window=window
    )
    return found


class Bench:
    """The races of one command line."""

    def __init__(
        self,
        *,
        directory: str,
        steps: int,
        batch_size: int,
        window: str,
        shape: Figures,
        family: str | None = None,
    ) -> None:
        self.family = family
        self.directory, self.steps, self.batch_size = directory, steps, batch_size
        self.window = parse_size(window)
        self.shape = GptShape(heads=shape["hidden"] // HEAD_WIDTH, **shape)

    def race(
        self, configs: dict[str, str], rates: Sequence[tuple[int, float | None]], *, steps: int | None = None
    ) -> dict[str, list[Figures]]:
        """Races policies, name → YAML."""
        steps = steps or self.steps
        entrants = {
            name: Entrant(
                PlanRunner,
                {
                    "config": config,
                    "shape": self.shape,
                    "batch_size": self.batch_size,
                    "rates": rates,
                    "family": self.family,
                },
                FAST_ALLOCATOR,
            )
            for name, config in configs.items()
        }
        return shown_race(entrants, steps)

    def keep(self) -> str:
        """Return the policy of keep."""
        return policy(self.directory, Placement.KEEP)

    def peak_of_keep(self) -> int:
        """Return keep's activation peak, bytes."""
        steps = self.race({"keep": self.keep()}, ((0, None),), steps=MEASURE_EVERY)["keep"]
        return max(step["peak"] or 0 for step in steps)


def sweep(bench: Bench, shares: Sequence[int], rate: float | None) -> list[Figures]:
    """Races auto at every budget, or without one; one row for each policy."""
    peak, rows = bench.peak_of_keep(), []
    for share in shares:
        budget = peak * share // 100 if share else None
        configs = {
            "keep": bench.keep(),
            "auto": policy(bench.directory, Placement.AUTO, budget=budget),
            **by_hand(bench.directory, bench.shape.layers, budget, peak, bench.window),
        }
        results = bench.race(configs, ((0, rate),))
        rows += judge(results, share, peak if budget is None else budget)
        Console(width=130).print(table(rows[-len(configs) :], share, rate))
        click.echo(verdict(rows[-len(configs) :]))
    return rows


def judge(results: dict[str, list[Figures]], share: int, budget: int) -> list[Figures]:
    """Peak, time and prediction of each policy, against auto; without a budget keep's peak stands for it."""
    rows = []
    for name, steps in results.items():
        rounds = timed_rounds(results["auto"], steps, warm_up=WARM_UP, peak="peak")
        measured = [step for step in steps[WARM_UP - 1 :] if step["peak"] is not None]
        peak = max(step["peak"] for step in measured)
        rows.append(
            {
                "share": share,
                "budget_bytes": budget,
                "name": name,
                "peak_bytes": peak,
                "fits": peak <= budget or not share,
                "seconds_median": statistics.median(step["seconds"] for _, step in rounds),
                "auto_over_it": ratio_of(rounds, "seconds"),
                "stall_median": statistics.median(step["stall"] for step in steps[WARM_UP:]),
                "same_losses": [s["loss"] for s in steps] == [s["loss"] for s in results["keep"]],
                "predicted_peak_error": prediction_error(measured, "predicted_peak", "peak"),
                "predicted_seconds_error": prediction_error(
                    [step for _, step in rounds], "predicted_seconds", "seconds"
                ),
                "layers": steps[-1]["layers"],
            }
        )
    return rows


def table(rows: Sequence[Figures], share: int, rate: float | None) -> Table:
    """Return the rows of one budget."""
    drive = "the drive as it is" if rate is None else f"{rate / 1e6:.0f} MB/s"
    budget = f"budget {share}% of keep's peak" if share else "no budget"
    made = Table(title=f"{budget}, {drive}")
    for head in (
        "",
        "peak, x budget" if share else "peak, x keep's",
        "step s",
        "stall s",
        "auto / it (quartiles)",
        "losses",
        "layers",
    ):
        made.add_column(head, justify="left" if head in {"", "layers"} else "right")
    for row in rows:
        made.add_row(
            row["name"],
            f"{row['peak_bytes'] / row['budget_bytes']:.3f}{'' if row['fits'] else ' (too much)'}",
            f"{row['seconds_median']:.3f}",
            f"{row['stall_median']:.3f}",
            str(row["auto_over_it"]),
            "same bits" if row["same_losses"] else "differ",
            row["layers"],
        )
    return made


def verdict(rows: Sequence[Figures]) -> str:
    """Auto against the best of the others, and its predictions."""
    auto = next(row for row in rows if row["name"] == "auto")
    others = [row for row in rows if row["fits"] and row["name"] != "auto"]
    limit = "budget" if auto["share"] else "keep's"
    said = f"auto: peak {auto['peak_bytes'] / auto['budget_bytes']:.3f} x {limit}"
    if others:
        best = min(others, key=lambda row: row["seconds_median"])
        said += f", {best['auto_over_it']} x the time of the best ({best['name']})"
    if auto["predicted_seconds_error"] is not None:
        said += (
            f"; predicted peak {auto['predicted_peak_error']:+.1%}, "
            f"step {auto['predicted_seconds_error']:+.1%}"
        )
    return said


def adapt(bench: Bench, rate: float) -> list[Figures]:
    """Return the drive halves its rate in the middle: how many steps until compute waits no more?"""
    half = bench.steps // 2
    configs = {"auto": policy(bench.directory, Placement.AUTO, window=bench.window)}
    steps = bench.race(configs, ((0, rate), (half, rate / 2)))["auto"]
    made = Table(title=f"{rate / 1e6:.0f} MB/s, from step {half} on {rate / 2e6:.0f} MB/s")
    for head in ("step", "seconds", "stall, % of step", "layers"):
        made.add_column(head, justify="right" if head != "layers" else "left")
    for number, step in enumerate(steps):
        made.add_row(
            str(number), f"{step['seconds']:.3f}", f"{step['stall'] / step['seconds']:.1%}", step["layers"]
        )
    Console(width=110).print(made)
    return [{"step": number, **step} for number, step in enumerate(steps)]


SCALES = (1_000, 3_000, 10_000, 30_000, 100_000)
"""Activations that are planned for."""

SCHEDULES = {
    "1F1B, 4 ahead": lambda items: (50, items // 1000, 4),
    "all forwards first": lambda items: (50, items // 1000, items),
    "one micro-batch": lambda items: (items // 20, 1, 1),
}
"""Layers, micro-batches and forwards ahead for so many activations, 20 a layer."""


def synthetic_profile(layers: int, micro_batches: int, ahead: int) -> StepProfile:
    """Get a step of equal layers of 20 activations of 1 MiB, saved and used in reverse at even distances."""
    saved = tuple(Saved(2**20, (number + 0.5) / 20, 1 - (number + 0.5) / 20) for number in range(20))
    ahead = min(ahead, micro_batches)
    passes = [(number, False) for number in range(ahead)]  # 1F1B: forwards ahead, then one of each in turn
    for number in range(micro_batches):
        passes += [(number, True)] + [(ahead + number, False)] * (ahead + number < micro_batches)
    slots = tuple(
        Slot(layer, micro_batch, backward, 0.0)
        for micro_batch, backward in passes
        for layer in (range(layers - 1, -1, -1) if backward else range(layers))
    )
    kind, timing = LayerKind(saved, 0, 2**20), {Placement.KEEP: Timing(0.01, 0.02)}
    return StepProfile((kind,), (0,) * layers, (timing,), slots)


def scale() -> list[Figures]:
    """Plans larger and larger steps, at half the drive that they need and a third of the memory."""
    bandwidth = Bandwidth(0.5 * 20 * 2**20 / 0.01, 0.5 * 20 * 2**20 / 0.01)
    made = Table(title="seconds to plan; median of 5")
    for head in ("activations", *SCHEDULES):
        made.add_column(head, justify="right")
    rows: list[Figures] = []
    for items in SCALES:
        cells = []
        for name, shape in SCHEDULES.items():
            profile = synthetic_profile(*shape(items))
            limits = Limits(peak_of_keep(profile, bandwidth) // 3, 256 * 2**20)
            times = [_seconds_to_plan(profile, bandwidth, limits) for _ in range(5)]
            rows.append(
                {"schedule": name, "activations": count_items(profile), "seconds": statistics.median(times)}
            )
            cells.append(f"{statistics.median(times):.3f} ({min(times):.3f} to {max(times):.3f})")
        made.add_row(f"{items}", *cells)
    Console(width=110).print(made)
    for name in SCHEDULES:
        own = [row for row in rows if row["schedule"] == name]
        click.echo(f"{name}: {_growth(own):.2f} x as fast as n log n grows, from the smallest to the largest")
    return rows


def _seconds_to_plan(profile: StepProfile, bandwidth: Bandwidth, limits: Limits) -> float:
    began = time.perf_counter()
    make_plan(profile, bandwidth, limits, policy=(Placement.AUTO,) * len(profile.layers))
    return time.perf_counter() - began


def _growth(rows: Sequence[Figures]) -> float:
    """How many times as fast the time grows as n log n does; 1 or less is wanted."""
    first, last = rows[0], rows[-1]
    expected = math.prod(f(last["activations"]) / f(first["activations"]) for f in (float, math.log))
    return float(last["seconds"] / first["seconds"] / expected)


@click.command()
@click.option(
    "--budget",
    "shares",
    type=click.IntRange(min=0),
    multiple=True,
    default=(20, 35, 50, 75),
    show_default=True,
    help="Percent of keep's peak; 0 for no budget.",
)
@click.option("--rate", default=None, help="Slow the drive down to this much a second, such as 200MB.")
@click.option(
    "--adapt", "adapts", is_flag=True, help="Halve the rate in the middle; --rate is 800MB by default."
)
@click.option("--scale", "scales", is_flag=True, help="Time the planner alone, on steps of growing size.")
@click.option("--model", "family", type=click.Choice([*families.FAMILIES]), help="Instead of Megatron's GPT.")
@click.option("--layers", default=12, show_default=True)
@click.option("--hidden", default=512, show_default=True)
@click.option("--sequence", default=256, show_default=True)
@click.option("--batch-size", default=2, show_default=True)
@click.option("--steps", type=click.IntRange(min=8), default=16, show_default=True, help="Steps of each.")
@click.option("--window", default="10MiB", show_default=True, help="Bytes in flight of the others.")
@dtype_option
@click.option("--directory", default=None, help="Where files go.  [default: a temporary directory]")
@click.option("--json", "json_file", default=None, help="Also write the figures to this file.")
def main(
    *,
    shares: tuple[int, ...],
    rate: str | None,
    adapts: bool,
    scales: bool,
    directory: str | None,
    json_file: str | None,
    steps: int,
    batch_size: int,
    window: str,
    dtype: str,
    family: str | None,
    **shape: int,
) -> None:
    """Race auto against policies written by hand."""
    if scales:
        write(scale(), json_file)
        return
    model = SHAPE | shape | {"dtype": settled_dtype(dtype)}
    with contextlib.ExitStack() as stack:
        place = directory or stack.enter_context(tempfile.TemporaryDirectory(prefix="tba-bench-"))
        bench = Bench(
            directory=place, steps=steps, batch_size=batch_size, window=window, shape=model, family=family
        )
        if adapts:
            rows = adapt(bench, parse_size(rate or "800MB"))
        else:
            rows = sweep(bench, shares, None if rate is None else parse_size(rate))
    write(rows, json_file)


def write(rows: list[Figures], json_file: str | None) -> None:
    """Write the figures if asked."""
    if json_file is not None:
        Path(json_file).write_text(json.dumps(rows, indent=2, default=vars) + "\n")


if __name__ == "__main__":
    main()
