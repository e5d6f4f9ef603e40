"""Our plan against plain TBA and plain TERAIO, on the simulator, with the figures of their testbeds.

    python benchmarks/teraio.py                      both checks, both models, a sweep of the bandwidth
    python benchmarks/teraio.py --all                every batch size and sequence length of TERAIO's figure
    python benchmarks/teraio.py --json FILE

First the rivals (teraio_rivals.py) meet the results that their authors published; then TBA's cut, TERAIO's
greedy and the planner of this package plan the same step, with the same memory and the same drive, and the
simulator plays what they have planned. The figure is the share of the ideal: the step time with unlimited
memory over the step time of the plan. TERAIO also plans when transfers start, which the simulator decides for
itself; where its books close it promises 100 %, so that is said beside what the simulator makes of its plan.

Where the inputs come from. Marks in this file: [published] stands in one of the two papers, or where the
comment says; [derived] follows from published figures, the comment says how; [assumed] is ours. TBA is arXiv
2408.10013 (SSDTrain), TERAIO arXiv 2506.06472 (NeurIPS 2025). Heights of bars in figures could not be had,
only what the text says of them, so there are no published step times: times are operations over an assumed
rate. Only the ratio of compute to bandwidth counts, so the sweep shows what another rate would do: on a GPU
twice as fast, 16 GB/s are what 8 GB/s are here.

What is compared: activations only, since the simulator knows nothing else. TERAIO moves weights, gradients
and optimizer states too, and this package moves none of them. So there are two kinds of rows: with all of
them on the GPU, and with the optimizer states away for all three planners, their bytes taken from the drive,
which stands in for what TERAIO does with them. What is not compared: Llama3-70B, whose weights, gradients and
optimizer states alone are six times a GPU's memory, and host memory as a second tier; TERAIO's average of
80.7 % has both in it. Of the two stages of the pipeline the first is simulated, which holds twice as many
activations as the second.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table
from teraio_rivals import (
    Played,
    everything_kept,
    fit_tba,
    one_layer_each,
    play_tba,
    play_teraio,
    scopes_of,
)
from transformer_profile import LayerShape, llama_layer, megatron_layer, stage

from tba_offload.config import parse_size
from tba_offload.config.policy import Placement
from tba_offload.plan.bandwidth import Bandwidth
from tba_offload.plan.model import Limits
from tba_offload.plan.search import make_plan
from tba_offload.plan.tuning import TUNING
from tba_offload.what_if import composition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.plan.profile import StepProfile

Figures = dict[str, Any]

GB = 10**9

# ---- TERAIO's testbed ------------------------------------------------------------------------------

H100_MEMORY = 94 * GB
"""[published] Table 2: H100 NVL, 94 GB each; two of them."""

MEMORY_OF_M = 80 * 2**30
"""[derived] What 100 % is in the figures M of Figure 7. A stage keeps its output for every micro-batch:
65,536 tokens more of 4096 x 4 bytes are 1.0 GiB, and M grows by 1.25 %; with Llama3-70B by as much."""

SSD_RATE = 16.0 * GB
"""[published] Section 4.1: about 16 GB/s for each GPU, of 4 Samsung 990 PRO (26 GB/s). [assumed] In each
direction."""

SWEEP = (8, 16, 24, 32, 48)
"""[published] GB/s; from the range of Figure 3 (4 to 64)."""

H100_RATE = 42e12
"""Floating-point operations a second. [published] Full precision (Section 4.1). [assumed] The rate: 60 to 67
TFLOP/s of FP32 are named for the card, and a good two thirds of that are usual."""

PIPELINE_STAGES = 2
"""[published] Section 2: 2-stage 1F1B over two GPUs."""

STATIC_BYTES = 16
"""[derived] Of a parameter in full precision: weight, gradient, and two states of Adam."""

OPTIMIZER_BYTES = 8
"""[derived] What of it are optimizer states."""


@dataclass(frozen=True)
class Setting:
    """A batch of Figure 7.

    Attributes:
        batch: Sequences.
        sequence: Tokens of each.
        memory: M: the peak of one GPU, in percent, [published].
    """

    batch: int
    sequence: int
    memory: float

    @property
    def tokens(self) -> int:
        """Of the whole batch."""
        return self.batch * self.sequence


@dataclass(frozen=True)
class Model:
    """A model that TERAIO was measured with.

    Attributes:
        name: Its name.
        shape: Width, width of the MLP, heads, heads of keys and values: [published], in its configuration.
        layers: Their number, [published] likewise.
        vocabulary: Its size, [published] likewise.
        micro_batch_tokens: [derived] The power of two with which the accounting comes closest to M.
        settings: The batches of Figure 7; the first stands for the model.
        ssd_share: [published] What Section 4.2 says of TERAIO-SSD, in percent; ``None`` if in words only.
        ssd_words: What it says.
    """

    name: str
    shape: dict[str, int]
    layers: int
    vocabulary: int
    micro_batch_tokens: int
    settings: tuple[Setting, ...]
    ssd_share: float | None
    ssd_words: str

    def layer(self, sequence: int) -> LayerShape:
        """One of its layers, in full precision [published]."""
        return llama_layer(**self.shape, sequence=sequence, bytes_each=4)

    @property
    def stage_layers(self) -> int:
        """Layers of a stage."""
        return self.layers // PIPELINE_STAGES

    @property
    def stage_parameters(self) -> int:
        """Parameters of the first stage: the embedding and half of the layers."""
        hidden, ffn = self.shape["hidden"], self.shape["ffn"]
        kv = hidden * self.shape["kv_heads"] // self.shape["heads"]
        layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * ffn
        return self.vocabulary * hidden + self.stage_layers * layer

    @property
    def static_bytes(self) -> int:
        """Weights, gradients and optimizer states of the first stage."""
        return STATIC_BYTES * self.stage_parameters

    def outputs(self, setting: Setting) -> int:
        """Bytes of the outputs of the stage, kept for all micro-batches."""
        return setting.tokens * self.shape["hidden"] * 4

    def accounted(self, setting: Setting) -> float:
        """Return the peak of the first stage by the accounting alone, in percent of what M refers to."""
        saved = self.layer(setting.sequence).saved_bytes * self.stage_layers
        activations = PIPELINE_STAGES * self.micro_batch_tokens * saved
        return 100 * (self.static_bytes + self.outputs(setting) + activations) / MEMORY_OF_M

    def scale(self, setting: Setting) -> float:
        """By which factor activations differ from the accounting if the peak is to be the published one."""
        rest = self.static_bytes + self.outputs(setting)
        accounted = self.accounted(setting) / 100 * MEMORY_OF_M - rest
        return (setting.memory / 100 * MEMORY_OF_M - rest) / accounted

    def profile(self, setting: Setting) -> StepProfile:
        """Return the step of the first stage; it waits for the second as 1F1B does."""
        layer = self.layer(setting.sequence)
        timing = layer.timing(self.micro_batch_tokens, H100_RATE)
        return stage(
            [layer] * self.stage_layers,
            tokens=self.micro_batch_tokens,
            rate=H100_RATE,
            micro_batches=setting.tokens // self.micro_batch_tokens,
            ahead=PIPELINE_STAGES,
            turn_seconds=timing.backward * self.stage_layers,
            last_wait=timing.forward * self.stage_layers,
            scale=self.scale(setting),
        )


LLAMA_8B = Model(
    "Llama3-8B",
    {"hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8},
    layers=32,
    vocabulary=128256,
    micro_batch_tokens=8192,
    settings=(
        Setting(64, 2048, 188.81),
        Setting(32, 2048, 187.56),
        Setting(128, 2048, 191.32),
        Setting(64, 1024, 187.56),
        Setting(64, 4096, 191.32),
    ),
    ssd_share=None,
    ssd_words="near ideal",
)
GRANITE_8B = Model(
    "Granite-code-base-8B",
    {"hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8},
    layers=36,
    vocabulary=49152,
    micro_batch_tokens=16384,
    settings=(
        Setting(64, 4096, 381.84),
        Setting(32, 4096, 379.34),
        Setting(128, 4096, 386.84),
        Setting(64, 2048, 379.34),
        Setting(64, 8192, 386.85),
    ),
    # "Similar performance to the ZeRO series", of which ZeRO-Offload has 65.5 % of the ideal.
    ssd_share=65.5,
    ssd_words="like ZeRO-Offload: 65.5 %",
)
LLAMA_70B = Model(
    "Llama3-70B",
    {"hidden": 8192, "ffn": 28672, "heads": 64, "kv_heads": 8},
    layers=80,
    vocabulary=128256,
    micro_batch_tokens=4096,
    settings=(Setting(16, 2048, 940.85),),
    ssd_share=None,
    ssd_words="not said",
)
"""For the check of the accounting only."""

MODELS = (LLAMA_8B, GRANITE_8B)

# ---- TBA's testbed ---------------------------------------------------------------------------------

A100_RATE = 0.75 * 312e12 * 765 / 1410
"""[published] FP16, clock locked at the base frequency (Section IV-A): 765 MHz (the authors' scripts).
[assumed] 312 TFLOP/s at 1410 MHz, and 75 % of what is left of it."""

OPTANE = Bandwidth(write=4 * 6.2 * GB, read=25.0 * GB)
"""[published] 4 P5800X in RAID0 for the GPU that was measured (Section IV-A). [assumed] 6.2 GB/s of writes
and 7.2 GB/s of reads each, and no more than 25 GB/s of PCIe 4.0 x16."""

TBA_SHAPES = ((8192, 4), (12288, 3), (16384, 2))
"""[published] Width and layers (Section IV-B)."""

TBA_VOCABULARIES = {"BERT": 30522, "T5": 32128, "GPT": 50257}
"""[assumed] Those of the models' own papers."""

TBA_SEQUENCE, TBA_PARALLEL = 1024, 2
"""[published] Section IV-A: tokens of a sequence, ranks of tensor parallelism."""

TBA_BATCH = 8
"""[assumed] The default of the authors' script; what was measured could not be had. Bytes and times both grow
with it, so the shares do not depend on it."""

TBA_REDUCTION = (28.0, 40.0)
"""[published] Section IV-B: percent by which the activation peak falls, over nine cases. The abstract: 47."""


def tba_profile(model: str, hidden: int, layers: int) -> tuple[StepProfile, list[tuple[int, ...]]]:
    """Return a step on TBA's testbed, and where its scopes end.

    Beside activations of layers memory holds logits (16 bit, and 32 bit for the loss) and, in backward, the
    gradients of one layer's MLP: two of the widest tensor and one of its input.
    """
    shape = {"hidden": hidden, "sequence": TBA_SEQUENCE, "tensor_parallel": TBA_PARALLEL}
    decoders = layers // 2 if model == "T5" else 0  # [published] Section IV-A
    shapes = [megatron_layer(**shape)] * (layers - decoders)
    shapes += [megatron_layer(**shape, cross=True)] * decoders
    tokens = TBA_BATCH * TBA_SEQUENCE
    words = TBA_VOCABULARIES[model] // TBA_PARALLEL
    gradients = 2 * hidden * (2 * 4 // TBA_PARALLEL + 1)
    profile = stage(
        shapes,
        tokens=tokens,
        rate=A100_RATE,
        turn_seconds=6 * hidden * words * tokens / A100_RATE,
        rest_bytes=tokens * (6 * words + gradients),
    )
    return profile, [each.scopes for each in dict.fromkeys(shapes)]


# ---- what was published, again ---------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """One figure, as it was published and as it comes out here."""

    what: str
    published: str
    here: str
    difference: str = ""


def check_tba() -> list[Check]:
    """TBA's cut on its testbed, over the nine cases."""
    falls, slower = [], []
    for model in TBA_VOCABULARIES:
        for hidden, layers in TBA_SHAPES:
            profile, ends = tba_profile(model, hidden, layers)
            ideal = everything_kept(profile, OPTANE)
            outcome = play_tba(profile, scopes_of(profile, ends), OPTANE).outcome
            falls.append(100 * (1 - outcome.peak_bytes / ideal.peak_bytes))
            slower.append(100 * (outcome.seconds / ideal.seconds - 1))
    low, high = TBA_REDUCTION
    return [
        Check(
            "TBA: the activation peak falls by, over 9 cases",
            f"{low:.0f} to {high:.0f} %",
            f"{min(falls):.0f} to {max(falls):.0f} %",
            f"{min(falls) - low:+.0f}, {max(falls) - high:+.0f} points",
        ),
        Check("TBA: and the step becomes slower by", "almost none", f"{max(slower) + 0:.1f} % at most"),
    ]


def check_memory() -> list[Check]:
    """Return the accounting against the published peaks without offloading."""
    found = []
    for model in (*MODELS, LLAMA_70B):
        setting = model.settings[0]
        accounted = model.accounted(setting)
        found.append(
            Check(
                f"{model.name}: peak M of one GPU, batch {setting.batch} x {setting.sequence}",
                f"{setting.memory:.1f} %",
                f"{accounted:.1f} %",
                f"{100 * (accounted / setting.memory - 1):+.1f} %",
            )
        )
    return found


def check_teraio(rows: Sequence[Figures]) -> list[Check]:
    """TERAIO's greedy on its testbed, with the optimizer states away; and how much bandwidth is enough."""
    found = []
    for model in MODELS:
        (row,) = (
            row
            for row in rows
            if row["model"] == model.name and row["optimizer_away"] and row["setting"] == 0
        )
        share = 100 * row["teraio_best"]
        away = "" if model.ssd_share is None else f"{share - model.ssd_share:+.1f} points"
        found.append(
            Check(f"TERAIO-SSD, {model.name}: share of the ideal", model.ssd_words, f"{share:.1f} %", away)
        )
    for model in MODELS:
        enough = [
            row["ssd_rate"] / GB
            for row in rows
            if row["model"] == model.name and row["setting"] == 0 and row["teraio_books_close"]
        ]
        found.append(
            Check(
                f"TERAIO, {model.name}: near the ideal with, GB/s",
                "32 to 48",
                f"{min(enough):.0f}" if enough else "more than was tried",
            )
        )
    return found


# ---- side by side ----------------------------------------------------------------------------------


def compare(model: Model, number: int, rate: float, memory: float, *, optimizer_away: bool) -> Figures:
    """All three planners on one step.

    Args:
        model: The model.
        number: Which of its settings.
        rate: Bytes a second of the drive, in each direction.
        memory: Bytes of the GPU.
        optimizer_away: Whether the optimizer states are on the drive, for all three.
    """
    setting = model.settings[number]
    profile = model.profile(setting)
    budget = memory - model.static_bytes - model.outputs(setting)
    bandwidth = Bandwidth(rate, rate)
    ideal = everything_kept(profile, bandwidth)
    if optimizer_away:
        states = OPTIMIZER_BYTES * model.stage_parameters
        budget += states
        bandwidth = Bandwidth(*(2 * [rate - states / ideal.seconds]))
    scopes = scopes_of(profile, [model.layer(setting.sequence).scopes])
    cut = play_tba(profile, scopes, bandwidth)
    teraio, closed = play_teraio(one_layer_each(profile), bandwidth, budget)
    # The planner's margin is for predictions that do not come true. Here they do, and the rivals have none.
    limits = Limits(int(budget / (1 - TUNING.margin)))
    plan = make_plan(profile, bandwidth, limits, policy=[Placement.AUTO] * len(profile.layers))
    assert plan.prediction is not None

    def share(played: Played | None) -> float | None:
        return None if played is None else ideal.seconds / played.outcome.seconds

    row = {
        "model": model.name,
        "setting": number,
        "batch": setting.batch,
        "sequence": setting.sequence,
        "ssd_rate": rate,
        "optimizer_away": optimizer_away,
        "needed_bytes": ideal.peak_bytes,
        "budget_bytes": int(budget),
        "ideal_seconds": ideal.seconds,
        "tba": share(cut),
        "tba_peak_bytes": cut.outcome.peak_bytes,
        "tba_fitting": share(fit_tba(profile, scopes, bandwidth, budget)),
        "teraio": share(teraio),
        "teraio_books_close": closed,
        "ours": ideal.seconds / plan.prediction.seconds if plan.prediction.peak_bytes <= budget else None,
        "ours_stall_seconds": plan.prediction.stall_seconds,
        "ours_layers": composition(plan.placements),
        "ours_plan": plan.as_json(),
    }
    row["teraio_best"] = 1.0 if closed else row["teraio"] or 0.0
    fits = [row["tba"]] if cut.outcome.peak_bytes <= budget else []
    rivals = [each or 0.0 for each in (*fits, row["tba_fitting"], row["teraio"])]
    row["ahead"] = (row["ours"] or 0.0) - max(rivals)
    return row


def table(rows: Sequence[Figures], title: str) -> Table:
    """Rows side by side."""
    made = Table(title=title)
    heads = (
        "GB/s",
        "has, needs GB",
        "TBA's cut (its peak)",
        "TBA that fits",
        "TERAIO",
        "books",
        "ours",
        "ahead",
    )
    for head in ("", *heads, "our layers"):
        made.add_column(head, justify="left" if head in {"", "our layers"} else "right")
    for row in rows:
        where = "" if row["setting"] == 0 else f" {row['batch']}x{row['sequence']}"
        made.add_row(
            row["model"] + where,
            f"{row['ssd_rate'] / GB:.0f}",
            f"{row['budget_bytes'] / GB:.0f}, {row['needed_bytes'] / GB:.0f}",
            f"{percent(row['tba'])} ({row['tba_peak_bytes'] / row['budget_bytes']:.1f} x)",
            percent(row["tba_fitting"]),
            percent(row["teraio"]),
            "close" if row["teraio_books_close"] else "do not",
            percent(row["ours"]),
            f"{100 * row['ahead']:+.1f}",
            row["ours_layers"],
        )
    return made


def percent(share: float | None) -> str:
    """Return a share, or that there is no plan."""
    return "does not fit" if share is None else f"{100 * share:.1f} %"


def checks_table(checks: Sequence[Check]) -> Table:
    """Return what was published beside what comes out."""
    made = Table(title="the rivals and the accounting, against what was published")
    for head in ("", "published", "here", "difference"):
        made.add_column(head, justify="left" if not head else "right")
    for check in checks:
        made.add_row(check.what, check.published, check.here, check.difference)
    return made


LEVEL = 0.002
"""Shares of the ideal that differ by less are level, as those of two plans that wait for next to nothing."""


def verdict(rows: Sequence[Figures]) -> list[str]:
    """Return what the rows say, with what speaks against us."""
    ahead = [row for row in rows if row["ahead"] > LEVEL]
    level = [row for row in rows if abs(row["ahead"]) <= LEVEL]
    behind = [row for row in rows if row["ahead"] < -LEVEL]
    counts = f"{len(ahead)} of {len(rows)} rows, within {100 * LEVEL:.1f} points in {len(level)}"
    said = [f"on the same simulator our plan is ahead of both in {counts}"]
    said += [
        f"  behind: {row['model']} at {row['ssd_rate'] / GB:.0f} GB/s"
        f"{', optimizer states away' if row['optimizer_away'] else ''}: {100 * row['ahead']:+.1f} points"
        for row in behind
    ]
    better = [row for row in rows if row["teraio_books_close"] and (row["ours"] or 0.0) < 1.0]
    for model in MODELS:
        ours = [
            f"{percent(row['ours'])}{' (optimizer states away)' if row['optimizer_away'] else ''}"
            for row in rows
            if row["model"] == model.name and row["ssd_rate"] == SSD_RATE and row["setting"] == 0
        ]
        said.append(f"{model.name}: published of TERAIO-SSD: {model.ssd_words}; our plan: {', '.join(ours)}")
    said.append(
        f"in {len(better)} rows TERAIO's books close: by its own account, which starts every transfer at the"
        " moment that was planned, it reaches 100 %, which our plan does not"
    )
    return said


@click.command()
@click.option("--all", "everything", is_flag=True, help="Every batch size and sequence length.")
@click.option("--memory", default=f"{H100_MEMORY // GB}GB", show_default=True, help="Of the GPU.")
@click.option("--rate", "rates", type=float, multiple=True, help="GB/s of the sweep.  [default: 8 to 48]")
@click.option("--json", "json_file", default=None, help="Also write the figures to this file.")
def main(*, everything: bool, memory: str, rates: tuple[float, ...], json_file: str | None) -> None:
    """Simulate our plan, TBA's cut and TERAIO's greedy on TERAIO's testbed."""
    size = parse_size(memory)
    console = Console(width=150)
    rows: list[Figures] = []
    for away in (False, True):
        rows += [
            compare(model, number, SSD_RATE, size, optimizer_away=away)
            for model in MODELS
            for number in range(len(model.settings) if everything else 1)
        ]
    sweep = [
        compare(model, 0, rate * GB, size, optimizer_away=False)
        for model in MODELS
        for rate in rates or SWEEP
        if rate * GB != SSD_RATE
    ]
    checks = [*check_memory(), *check_tba(), *check_teraio([*rows, *sweep])]
    console.print(checks_table(checks))
    resident = [row for row in rows if not row["optimizer_away"]]
    console.print(table(resident, "share of the ideal; weights, gradients and optimizer states on the GPU"))
    console.print(table([row for row in rows if row["optimizer_away"]], "the same, optimizer states away"))
    if sweep:
        console.print(table(sweep, "share of the ideal at other bandwidths, all static tensors on the GPU"))
    for line in verdict([*rows, *sweep]):
        console.print(line)
    if json_file is not None:
        document = {"checks": [dataclasses.asdict(check) for check in checks], "rows": [*rows, *sweep]}
        Path(json_file).write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
