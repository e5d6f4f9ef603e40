"""Compare the step time of `auto` with policies written by hand.

    python benchmarks/planner.py                      every budget, on the drive without a limit
    python benchmarks/planner.py --model moe          another model
    python benchmarks/planner.py --rate 200MB         on a drive limited to 200 MB/s in each direction
    python benchmarks/planner.py --budget 0           without a budget, compared with keep and offload
    python benchmarks/planner.py --grid --json FILE   five models, four budgets, and four drives

For each ``--budget`` (percent of keep's activation peak; 0 for no budget), auto is compared with policies
that a user could write: keep as many of the last layers as fit and offload or recompute the other layers;
offload or recompute all layers; recompute one half and offload the other half. Each policy trains in its own
process, and the processes alternate step by step. Policies whose peak exceeds the budget do not count. The
ratio of ``keep again`` to keep is noise. FILE is written after each comparison. A comparison whose results
are in FILE is not repeated, so a stopped grid can be continued.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import statistics
import sys
import tempfile
from collections import Counter
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
from lanes import CONTROL, directory_option, dtype_option, json_option, shape_of, show, shown_race, write_json

import tba_offload as tba
from tba_lab.gpt import DTYPES, GptShape, random_batch
from tba_lab.race import MEASURE_EVERY, Entrant, measures_memory, paired_ratio, timed_rounds
from tba_offload.config import parse_size
from tba_offload.device.host_memory import keep_freed_pages

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from around import put_around, taking_time

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    Figures = dict[str, Any]

WARM_UP = 4
"""Number of first steps that do not count. In the first three steps, auto measures placements."""

VOCABULARY = 1024
"""Size of the vocabulary. It is small, so that memory does not peak at the logits."""

MODELS: dict[str, Figures] = {
    "gpt": {"family": "gpt2"},
    "llama": {"family": "llama"},
    "moe": {"family": "moe"},
    "wide and narrow": {"family": "mixed"},
    "long sequences": {"family": "llama", "sequence": 1024, "batch_size": 1},
}
"""For each model, its family and the sizes that differ from the command line."""

AS_IT_IS = "as it is"
RATES = (AS_IT_IS, "400MB", "200MB", "100MB")
"""Rates of the drives of ``--grid``."""

# Models


def build(family: str, shape: GptShape) -> nn.Module:
    """Return a model of a family; ``mixed`` is a Llama with a narrow MLP in every other layer."""
    torch.manual_seed(1)
    import transformers
    from transformers.models.llama.modeling_llama import LlamaMLP

    sizes = {"vocab_size": VOCABULARY, "use_cache": False, "max_position_embeddings": shape.sequence}
    sizes |= {"num_hidden_layers": shape.layers, "hidden_size": shape.hidden}
    heads = {"num_attention_heads": shape.heads, "num_key_value_heads": shape.heads}
    if family == "gpt2":
        config = transformers.GPT2Config(
            **sizes, n_head=shape.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
        )
        model: nn.Module = transformers.GPT2LMHeadModel(config)
    elif family == "moe":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 2 * shape.hidden}
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads, **experts))
    else:
        config = transformers.LlamaConfig(**sizes, **heads, intermediate_size=4 * shape.hidden)
        model = transformers.LlamaForCausalLM(config)
        if family == "mixed":
            config.intermediate_size //= 8
            for layer in model.model.layers[1::2]:
                layer.mlp = LlamaMLP(config)
    return model.train().to(DTYPES[shape.dtype])


class PlanRunner:
    """Model that trains on random tokens with a policy. ``rate`` limits the drive, in bytes per second."""

    def __init__(
        self, *, config: Figures, shape: GptShape, family: str, batch_size: int, rate: int | None
    ) -> None:
        keep_freed_pages()
        self._stack = contextlib.ExitStack()
        self._model, self._shape = build(family, shape), shape
        for parameter in self._model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=3e-4, fused=True)
        self._batch_size, self._count = batch_size, 0
        if rate is not None:
            config = config | {"store": config["store"] | {"readers": 1, "writers": 1}}
        session = tba.attach(self._model, config, measure_memory=False)
        self._session = self._stack.enter_context(session)
        if rate is not None:
            put_around(self._session.store, partial(taking_time, rate))
        self.close = self._stack.close

    def step(self) -> Figures:
        """Run one step. Return its time, loss, peak (if measured), predicted peak and plan."""
        number, self._count = self._count, self._count + 1
        tokens = random_batch(self._shape, batch_size=self._batch_size, seed=number)["tokens"]
        placements = Counter(map(str, self._session.plan.placements))
        with self._session.step(measure_memory=measures_memory(number)) as step:
            loss = self._model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        record = step.record
        return {
            "loss": float(loss.detach()),
            "seconds": record.seconds,
            "peak": record.activation_peak_bytes,
            "predicted_peak": record.predicted_peak_bytes,
            "layers": ", ".join(f"{count} {name}" for name, count in placements.items()),
        }


@dataclasses.dataclass
class Bench:
    """Comparisons of one model. ``common`` has the arguments that all lanes share."""

    place: str
    window: str
    common: Figures

    def race(
        self, configs: Mapping[str, Figures], steps: int, rate: int | None = None
    ) -> dict[str, list[Figures]]:
        """Train with each policy. ``configs`` maps names to policies."""
        lanes = {
            name: Entrant(PlanRunner, {"config": config, "rate": rate, **self.common})
            for name, config in configs.items()
        }
        return shown_race(lanes, steps)

    def peak(self) -> int:
        """Return the activation peak in bytes of a step that keeps all layers."""
        steps = self.race({"keep": self.policy("keep")}, MEASURE_EVERY)["keep"]
        return max(step["peak"] or 0 for step in steps)

    def policy(self, default: str, rules: Mapping[str, str] = {}, *, budget: int | None = None) -> Figures:
        """Return a policy. ``rules`` maps layers to placements."""
        return {
            "default": default,
            "layers": [{"match": match, "placement": name} for match, name in rules.items()],
            "budget": {"activation_bytes": budget} if budget else {"in_flight_bytes": self.window},
            "store": {"kind": "file", "directories": [self.place]},
        }

    def by_hand(self, budget: int | None, peak: int) -> dict[str, Figures]:
        """Return policies that a user could write, with as many kept layers as should fit."""
        if budget is None:
            return {"offload all": self.policy("offload")}
        layers = self.common["shape"].layers
        one, last = peak / layers, layers - 1
        found = {f"{name} all": self.policy(name) for name in ("offload", "recompute")}
        for name, needed in (("offload", parse_size(self.window)), ("recompute", one)):
            kept = min(int((budget - needed - 0.1 * peak) / one), last)
            if kept > 0:
                found[f"keep {kept}, {name}"] = self.policy(name, rules={f"{last - kept + 1}-{last}": "keep"})
        half = ",".join(map(str, range(0, layers, 2)))
        found["half recompute, half offload"] = self.policy("offload", rules={half: "recompute"})
        return found


def raced(bench: Bench, peak: int, share: int, steps: int, rate: str) -> list[Figures]:
    """Compare auto with other policies at one budget, or without one. Return one row for each policy."""
    budget, keep = peak * share // 100 if share else None, bench.policy("keep")
    auto = bench.policy("auto", budget=budget)
    configs = {"keep": keep, CONTROL: keep, "auto": auto, **bench.by_hand(budget, peak)}
    results = bench.race(configs, steps, None if rate == AS_IT_IS else parse_size(rate))
    return [judged(name, results, share, budget or peak) for name in results]


def judged(name: str, results: Mapping[str, list[Figures]], share: int, budget: int) -> Figures:
    """Return peak, time and prediction of a policy, with the ratio of auto's time to the policy's time.

    For ``keep again``, the ratio is its time divided by the time of keep.
    """
    steps, over = results[name], results["keep" if name == CONTROL else "auto"]
    one, other = (steps, over) if name == CONTROL else (over, steps)
    rounds = timed_rounds(one[WARM_UP:], other[WARM_UP:], measured=lambda step: step["peak"] is not None)
    measured = [step for step in steps[WARM_UP - 1 :] if step["peak"] is not None]
    peak = max(step["peak"] for step in measured)
    errors = [step["predicted_peak"] / step["peak"] - 1 for step in measured if step["predicted_peak"]]
    ratio = paired_ratio(*([each[lane]["seconds"] for each in rounds] for lane in range(2)))
    own = [each[0 if name == CONTROL else 1] for each in rounds]
    return {
        "share": share,
        "budget_bytes": budget,
        "name": name,
        "peak_bytes": peak,
        "fits": peak <= budget or not share,
        "steps_measured": len(measured),
        "steps_kept": sum(step["peak"] <= budget or not share for step in measured),
        "seconds_median": statistics.median(step["seconds"] for step in own),
        "auto_over_it": str(ratio),
        "auto_over_it_median": ratio.median,
        "same_losses": [step["loss"] for step in steps] == [step["loss"] for step in results["keep"]],
        "peak_error": statistics.median(errors) if errors else None,
        "layers": steps[-1]["layers"],
    }


def show_rows(rows: Sequence[Figures], title: str) -> None:
    """Print the rows of one budget."""
    heads = ("", "peak, x budget", "step s", "auto / it; keep again / keep", "losses", "layers")
    show(
        heads,
        [
            (
                row["name"],
                f"{row['peak_bytes'] / row['budget_bytes']:.3f}{'' if row['fits'] else ' (too much)'}",
                f"{row['seconds_median']:.3f}",
                row["auto_over_it"],
                "same bits" if row["same_losses"] else "differ",
                row["layers"],
            )
            for row in rows
        ],
        title,
    )


def best_by_hand(rows: Sequence[Figures]) -> Figures | None:
    """Return the row of the fastest policy that fits the budget."""
    fitting = [row for row in rows if row["fits"] and row["name"] not in {"auto", CONTROL}]
    return min(fitting, key=lambda row: row["seconds_median"], default=None)


def verdict(rows: Sequence[Figures]) -> str:
    """Return a sentence that compares auto with the best policy by hand, and its predictions with peaks."""
    auto = next(row for row in rows if row["name"] == "auto")
    said = f"auto: the budget was kept in {auto['steps_kept']} of {auto['steps_measured']} measured steps"
    if best := best_by_hand(rows):
        said += f", {best['auto_over_it']} x the time of the best ({best['name']})"
    error = auto["peak_error"]
    return said if error is None else f"{said}; predicted peak {error:+.1%}"


def all_raced(
    cells: Sequence[tuple[str, str, int]], common: Figures, json_file: str | None, **arguments: Any
) -> None:
    """Compare auto with other policies for each model, drive and budget. Print the median and the maximum."""
    steps = common.pop("steps")
    rows = json.loads(Path(json_file).read_text()) if json_file and Path(json_file).exists() else []
    known = {(row["model"], row["rate"], row["share"]) for row in rows}
    new = [cell for cell in cells if cell not in known]
    for model, its_cells in itertools.groupby(new, key=itemgetter(0)):
        shape = {**common, **MODELS[model]}
        lane = {name: shape.pop(name) for name in ("family", "batch_size")}
        bench = Bench(**arguments, common={**lane, "shape": shape_of(**shape)})
        peak = bench.peak()
        for _, rate, share in its_cells:
            found = raced(bench, peak, share, steps, rate)
            budget = f"budget {share}% of" if share else "no budget, against"
            show_rows(found, f"{model}, the drive {rate}, {budget} keep's peak")
            click.echo(verdict(found))
            rows += [{"model": model, "rate": rate, **row} for row in found]
            write_json(rows, json_file)
    summary(rows)


def summary(rows: Sequence[Figures]) -> None:
    """Print the median and the maximum of the ratios to the best policy by hand."""
    cells: dict[Any, list[Figures]] = {}
    for row in rows:
        cells.setdefault((row["model"], row["rate"], row["share"]), []).append(row)
    ratios, errors = [], []
    for found in cells.values():
        lanes = {row["name"]: row for row in found}
        if best := best_by_hand(found):
            ratios.append(best["auto_over_it_median"])
        if lanes["auto"]["peak_error"] is not None:
            errors.append(abs(lanes["auto"]["peak_error"]))
    if ratios:
        median, worst = statistics.median(ratios), max(ratios)
        click.echo(f"auto / the best by hand: median {median:.3f}, worst {worst:.3f}, of {len(ratios)} cells")
    kept, measured = (
        sum(each[key] for each in rows if each["name"] == "auto") for key in ("steps_kept", "steps_measured")
    )
    click.echo(f"budgets kept in {kept} of {measured} measured steps")
    if errors:
        click.echo(f"predicted peaks: off by {statistics.median(errors):.1%} in the median")


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--budget", "shares", type=click.IntRange(min=0), multiple=True, default=(20, 35, 50, 75))
@click.option("--grid", "is_grid", is_flag=True, help="All models and drives.")
@click.option(
    "--rate", "rates", multiple=True, default=(AS_IT_IS,), help="Limit of the drive, such as 200MB."
)
@click.option("--model", "models", type=click.Choice(list(MODELS)), multiple=True, default=("llama",))
@click.option("--layers", default=12, show_default=True)
@click.option("--hidden", default=512, show_default=True)
@click.option("--sequence", default=256, show_default=True)
@click.option("--batch-size", default=2, show_default=True)
@click.option(
    "--steps", type=click.IntRange(min=8), default=16, show_default=True, help="Steps of each policy."
)
@click.option("--window", default="10MiB", show_default=True, help="In-flight window of other policies.")
@dtype_option
@directory_option
@json_option
def main(
    *,
    models: tuple[str, ...],
    rates: tuple[str, ...],
    shares: tuple[int, ...],
    is_grid: bool,
    window: str,
    directory: str | None,
    json_file: str | None,
    **common: Any,
) -> None:
    """Compare auto with policies written by hand."""
    if is_grid:
        models, rates = tuple(MODELS), RATES
    cells = list(itertools.product(models, rates, shares))
    with tempfile.TemporaryDirectory(prefix="tba-bench-", dir=directory) as place:
        all_raced(cells, common, json_file, place=place, window=window)


if __name__ == "__main__":
    main()
