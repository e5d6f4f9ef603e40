"""``tba-offload demo``: compare keep, recompute and offload on a small Megatron GPT and real text."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
from rich.console import Console

import tba_offload as tba
from tba_lab.gpt import DTYPES, Batch, GptShape, batch_of, build_gpt, choose_dtype, gpt_loss, model_flops
from tba_lab.megatron_cpu import require_core, single_process, training_device
from tba_lab.race import MEASURE_EVERY, Entrant, Spread, measures_memory, paired_ratio, race, timed_rounds
from tba_offload.config import format_size, load_config, parse_size
from tba_offload.device.host_memory import keep_freed_pages
from tba_offload.device.meters import available_bytes
from tba_offload.errors import ConfigError, TbaError, UnsupportedError
from tba_offload.formatting import readable_size
from tba_offload.report.log import counted_steps, read_run_log
from tba_offload.report.rok import draw, points, require_matplotlib
from tba_offload.report.text import Table, show

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tba_lab.race import Say

PRESETS: dict[str, dict[str, Any]] = {
    "gpu": {"layers": 12, "hidden": 2048, "sequence": 1024, "steps": 20, "batch_sizes": (2, 3)},
    "bf16": {"layers": 8, "hidden": 512, "sequence": 128, "steps": 8, "batch_sizes": (24, 48)},
    "fp32": {"layers": 8, "hidden": 384, "sequence": 128, "steps": 8, "batch_sizes": (12, 24)},
}
"""Default settings for a GPU, and for a CPU with each dtype."""

WITH_STATES: dict[str, Any] = {"layers": 4, "batch_sizes": (16,)}
"""Default settings with offloaded optimizer states. Each step reads and writes all states, so
the batch must be large."""

STATES = {
    "offload": tba.StatesConfig(),
    "auto": tba.StatesConfig(default="auto"),
    "backward": tba.StatesConfig(when="backward"),
}
_WHOLE = {"cpu": "resident", "cuda": "device"}  # the peak that includes all memory, by type of device
WINDOW = 32 / 3
"""Default in-flight window, as a multiple of the hidden state. A layer saves about 25 hidden states."""

SEED = 1234


@dataclass(frozen=True, kw_only=True)
class Job:
    """Settings of a demo. A budget is a number of bytes, or a ``float``: a fraction of the peak of keep."""

    shape: GptShape
    sizes: tuple[int, ...]
    steps: int
    output: Path
    directories: tuple[Path, ...] = ()
    window: int | None = None
    policy: Path | None = None
    budget: float | None = None
    device_budget: float | None = None
    states: tba.StatesConfig | None = None
    control: bool = False

    @property
    def strategies(self) -> tuple[str, ...]:
        """Names of the compared strategies. ``control`` is a second run of keep."""
        ours = "auto" if self.policy == Path("auto") else "offload"
        return ("keep", "recompute", ours, *["states"] * bool(self.states), *["control"] * self.control)

    @property
    def budgeted(self) -> str:
        """Name of the strategy that has the budgets."""
        return self.strategies[3 if self.states else 2]

    def config(self, strategy: str, size: int, scratch: Path, limits: Mapping[str, int]) -> tba.OffloadConfig:
        """Return the policy of a strategy at a batch size. ``scratch`` is the default store directory."""
        item, states = DTYPES[self.shape.dtype].itemsize, None
        if strategy == "states" and self.states is not None:
            nbytes = 2 * item * self.shape.layers * self.shape.layer_parameters // 20  # for 20 sub-groups
            states = dataclasses.replace(self.states, sub_group_bytes=min(max(nbytes, 2**18), 64 << 20))
        if strategy in {"offload", "states"} and self.policy not in {None, Path("auto")}:
            config = load_config(str(self.policy))
            if config.store.kind != "host":
                places = self.directories or config.store.directories or (scratch,)
                store = dataclasses.replace(config.store, directories=tuple(places))
                config = dataclasses.replace(config, store=store)
            return dataclasses.replace(config, states=states)
        default = {"states": self.strategies[2], "control": "keep"}.get(strategy, strategy)
        hidden_state = min(self.sizes) * self.shape.sequence * self.shape.hidden * item
        window = self.window or math.ceil(WINDOW * hidden_state / 2**20) * 2**20
        budget: dict[str, Any] = {"in_flight_bytes": window * size // min(self.sizes)}
        return tba.OffloadConfig(
            default=tba.Placement(default),
            budget=tba.BudgetConfig(**(dict(limits) if limits and strategy == self.budgeted else budget)),
            store=tba.StoreConfig(kind="file", directories=self.directories or (scratch,)),
            states=states,
        )

    def __str__(self) -> str:
        shape, sizes = self.shape, " and ".join(map(str, self.sizes))
        model = f"{shape.layers} layers, hidden {shape.hidden}, sequence {shape.sequence}, {shape.dtype}"
        return f"GPT, {model}, batch {sizes}: {self.steps} steps of {', '.join(self.strategies)}"


def run_on_console(*, as_json: bool, time_limit: float, **options: Any) -> None:
    """Run the demo with the options of the command line, and print the comparison."""
    say: Say = (lambda _: None) if as_json else Console(stderr=True, highlight=False, soft_wrap=True).print
    require_core("the demo")
    require_matplotlib()
    job = job_of(say, options)
    say(str(job))
    summary = run_demo(job, say, time_limit=60 * time_limit)
    if as_json:
        click.echo(json.dumps(summary, indent=2))
    else:
        show(*comparison(summary, job))
        click.echo("\n".join(["", *_bars(summary, job), "", *_next_steps(job.output)]))
    if not (summary["identical_losses"] and summary["identical_parameters"]):
        raise TbaError("the strategies computed different results, which is a bug. Please report this")


def job_of(say: Say, options: dict[str, Any]) -> Job:
    """Return the settings of the demo. Settings without an option come from the preset of this machine."""
    policy, states, window = options["policy"], options.pop("states"), options.pop("window")
    budgets = {name: options.pop(name) for name in ("budget", "device_budget")}
    if any(budgets.values()) and policy != Path("auto"):
        raise ConfigError("a budget needs --policy auto, because a policy file has its own budget")
    if states == "auto" and budgets["device_budget"] is None:
        raise ConfigError("--states auto needs --device-budget")
    if window is not None and policy is not None:
        raise ConfigError("--window has no effect with --policy. Set budget.in_flight_bytes in the policy")
    if policy not in {None, Path("auto")}:
        load_config(str(policy))  # an error of the file comes before all work
    device = training_device()
    dtype, why = choose_dtype(options.pop("dtype"), device)
    say(why)
    chosen = dict(PRESETS["gpu" if device.type == "cuda" else dtype])
    if states != "keep":
        chosen |= WITH_STATES | {"hidden": max(chosen["hidden"], 1152)}
    chosen |= {name: value for name, value in options.items() if value not in (None, ())}
    model: dict[str, Any] = {name: chosen.pop(name) for name in ("layers", "hidden", "sequence")}
    heads = next(count for count in range(12, 0, -1) if model["hidden"] % count == 0)
    limits: dict[str, Any] = {name: text and _budget(text) for name, text in budgets.items()}
    job = Job(
        shape=GptShape(**model, heads=heads, dtype=dtype),
        sizes=tuple(sorted(set(chosen.pop("batch_sizes")))),
        window=None if window is None else parse_size(window),
        states=STATES.get(states),
        **limits,
        **chosen,
    )
    _refuse_what_does_not_fit(job, available_bytes(device))
    return job


def _budget(text: str) -> float:
    if not text.endswith("%"):
        return parse_size(text)
    with contextlib.suppress(ValueError):
        if 0 < (share := float(text[:-1]) / 100) < math.inf:
            return share
    raise ConfigError(f"not a budget: {text!r}. Pass a size such as 64MiB, or a percentage of keep's peak")


def _refuse_what_does_not_fit(job: Job, available: int) -> None:
    """Raise an error if the training processes need more memory than is available."""
    shape, item = job.shape, DTYPES[job.shape.dtype].itemsize
    scores = shape.heads * shape.sequence * (8 + 3 * item)  # attention saves two in fp32 around the softmax
    activations = max(job.sizes) * shape.sequence * (20 * item * shape.hidden + scores)
    base = (500 << 20) + 4 * shape.layers * item * shape.layer_parameters  # weights, gradients, two moments
    needed = len(job.strategies) * base + 2 * shape.layers * activations  # all of keep, parts of the others
    if needed > available:
        raise ConfigError(
            f"{job}: needs about {readable_size(needed)}, but only {readable_size(available)} are free. Pass "
            "a smaller --hidden, --layers, --sequence or --batch-size"
        )


def run_demo(job: Job, say: Say, *, time_limit: float = math.inf) -> dict[str, Any]:
    """Train all strategies, write run logs, pictures and ``summary.json``, and return the summary."""
    if old := sorted(job.output.glob("*.jsonl")):
        raise ConfigError(
            f"{job.output}: the directory has run logs of another run ({old[0].name}). Pass a new directory"
        )
    job.output.mkdir(parents=True, exist_ok=True)
    keys = [(size, name) for size in job.sizes for name in job.strategies]
    logs = {(size, name): job.output / f"{name}-b{size}.jsonl" for size, name in keys}
    ends, limits, deadline = {}, {}, time.monotonic() + time_limit
    try:
        with tempfile.TemporaryDirectory(prefix="tba-demo-", dir=job.output) as scratch:
            for size in job.sizes:
                limits[size] = _limits(job, size, Path(scratch), say)
                entrants = {
                    name: _entrant(job, name, size, Path(scratch), limits[size], logs[size, name])
                    for name in job.strategies
                }
                ahead = sum(each for each in job.sizes if each > size) / size
                left = deadline - time.monotonic()
                for name, steps in race(entrants, job.steps, say=say, time_limit=left, ahead=ahead).items():
                    ends[size, name] = steps[-1]["parameters"]
    except BaseException:
        for log in logs.values():  # an incomplete comparison would block the next run in this directory
            log.unlink(missing_ok=True)
        raise
    summary = summarize(job, logs, limits)
    summary["identical_parameters"] = all(ends[key] == ends[key[0], "keep"] for key in ends)
    compared = [log for (_, name), log in logs.items() if name != "control"]
    drawn = points(compared, memory="device" if job.states else "activations")
    for name in ("rok.svg", "rok.png"):
        draw(drawn, job.output / name)
    (job.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def _limits(job: Job, size: int, scratch: Path, say: Say) -> dict[str, int]:
    """Return the budgets in bytes. If a budget is a fraction of keep's peak, first measure this peak."""
    given = {"activation_bytes": job.budget, "device_bytes": job.device_budget}
    peaks: dict[str, int] = {}
    if any(isinstance(value, float) for value in given.values()):
        log = scratch / "keep.jsonl"
        race({"keep alone": _entrant(job, "keep", size, scratch, {}, log)}, MEASURE_EVERY, say=say)
        (point,) = points([log], memory="device")
        peaks = {"activation_bytes": point.activation_peak_bytes or 0, "device_bytes": point.peak_bytes}
        log.unlink()
    return {
        name: int(value * peaks[name]) if isinstance(value, float) else value
        for name, value in given.items()
        if value is not None
    }


def _entrant(job: Job, name: str, size: int, scratch: Path, limits: Mapping[str, int], log: Path) -> Entrant:
    config = job.config(name, size, scratch, limits).to_yaml()
    return Entrant(Trainer, {"job": job, "config": config, "strategy": name, "size": size, "log": log})


class Trainer:
    """Model, optimizer, data and session of one strategy, in its own process."""

    def __init__(self, *, job: Job, config: str, strategy: str, size: int, log: Path) -> None:
        keep_freed_pages()
        logging.getLogger("tba_offload").addHandler(logging.NullHandler())  # the table says more
        self._job, self._size, self._done, self._text = job, size, 0, read_text()
        stack = contextlib.ExitStack()
        stack.enter_context(single_process(seed=SEED))
        self._model = build_gpt(job.shape, seed=SEED)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=3e-4, fused=True)
        policy = tba.OffloadConfig.from_yaml(config)
        self._session = stack.enter_context(
            tba.attach(
                self._model,
                policy,
                optimizer=None if policy.states is None else self._optimizer,
                run_log=log,
                strategy=strategy,
                model_info=dataclasses.asdict(job.shape) | {"name": "megatron-core GPT", "batch_size": size},
            )
        )
        self.close = stack.close

    def step(self) -> dict[str, str]:
        """Train one step. Return the loss of a step, and after the last step a digest of all parameters."""
        job, is_measured = self._job, measures_memory(self._done)
        batch = text_batch(self._text, job.shape, self._size, self._done)
        with self._session.step(
            tokens=self._size * job.shape.sequence,
            model_flops=model_flops(job.shape, self._size),
            measure_memory=is_measured,
            trace=is_measured,
        ) as step:
            loss = gpt_loss(self._model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            step.loss = float(loss.detach())
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=bool(job.states))  # Megatron keeps its gradient buffers
        self._done += 1
        digest = hashlib.sha256()
        for parameter in self._model.parameters() if self._done == job.steps else ():
            digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return {"parameters": digest.hexdigest()}


def read_text(limit: int = 4 << 20) -> torch.Tensor:
    """Return the source files of Python's standard library as tokens, one for each byte, separated by NUL."""
    library = Path(sysconfig.get_path("stdlib"))
    text = b"\0".join(path.read_bytes() for path in sorted(library.glob("*.py")))[:limit]
    if not text:
        raise UnsupportedError(f"no text to train on: {library} has no source files of the standard library")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def text_batch(text: torch.Tensor, shape: GptShape, size: int, number: int) -> Batch:
    """Return passages of the text as the micro-batch of a step. Equal step numbers give equal passages."""
    generator = torch.Generator().manual_seed(SEED + number)
    starts = torch.randint(0, len(text) - shape.sequence, (size, 1), generator=generator)
    return batch_of(text[starts + torch.arange(shape.sequence + 1)].long())


def summarize(
    job: Job, logs: Mapping[tuple[int, str], Path], limits: Mapping[int, Mapping[str, int]]
) -> dict[str, Any]:
    """Return the figures of all run logs. Time ratios are medians and quartiles over rounds."""
    found = {key: points([path], memory="device")[0] for key, path in logs.items()}
    steps = {key: counted_steps(read_run_log(path)) for key, path in logs.items()}
    figures: dict[str, dict[str, Any]] = {str(size): {} for size in job.sizes}
    ratios: dict[str, dict[str, Any]] = {str(size): {} for size in job.sizes}
    for (size, name), point in found.items():
        counted = steps[size, name]
        figures[str(size)][name] = {
            "activation_peak_bytes": point.activation_peak_bytes,
            "device_peak_bytes": point.peak_bytes,
            "resident_peak_bytes": max(step.resident_peak_bytes or 0 for step in counted),
            "step_seconds_median": point.step_seconds,
            "tokens_per_second": (counted[-1].tokens or 0) / point.step_seconds,
            "offloaded_bytes": statistics.median(step.offloaded_bytes for step in counted),
            "read_bytes": statistics.median(step.read_bytes for step in counted),
            "stall_seconds_median": statistics.median(step.stall_seconds or 0.0 for step in counted),
            "losses": [step.loss for step in read_run_log(logs[size, name]).steps],
        }
        for other in ("keep", "recompute"):
            base, both = found[size, other], (counted, steps[size, other])
            rounds = timed_rounds(*both, measured=lambda step: step.peak_source is not None)
            times = ([pair[place].seconds_with_update for pair in rounds] for place in range(2))
            ratios[str(size)][f"{name}_over_{other}"] = {
                "activation_peak": (point.activation_peak_bytes or 0) / (base.activation_peak_bytes or 1),
                "device_peak": point.peak_bytes / base.peak_bytes,
                "time": dataclasses.asdict(paired_ratio(*times)),
            }
    return {
        "trained": dataclasses.asdict(job.shape) | {"steps": job.steps},
        "batch_sizes": figures,
        "ratios": ratios,
        "budgets": {str(size): dict(each) for size, each in limits.items()},
        "identical_losses": all(
            each["losses"] == group["keep"]["losses"] for group in figures.values() for each in group.values()
        ),
    }


def comparison(summary: Mapping[str, Any], job: Job) -> list[Table | str]:
    """Return a table of all strategies, and sentences that compare the strategies."""
    whole = _WHOLE[training_device().type]
    peaks = ["activation", *["device"] * (bool(job.states) and whole != "device"), whole]
    figures = ("written MiB", "step s", "stall s", "tokens/s", "last loss")
    heads = ("batch", "strategy", *(f"{what} peak MiB" for what in peaks), *figures)
    sizes = [*(f"{what}_peak_bytes" for what in peaks), "offloaded_bytes"]
    rows, lines = [], []
    for size, group in summary["batch_sizes"].items():
        for name, each in group.items():
            row = [f"{each[nbytes] / 2**20:.0f}" for nbytes in sizes]
            row += [f"{each[f'{what}_seconds_median']:.3f}" for what in ("step", "stall")]
            rows.append((size, name, *row, f"{each['tokens_per_second']:.0f}", f"{each['losses'][-1]:.6f}"))
        for name in job.strategies[2:]:
            for other in ("keep", "recompute"):
                ratio = summary["ratios"][size][f"{name}_over_{other}"]
                lines.append(
                    f"batch size {size}: {name} has {ratio['activation_peak']:.2f} x the activation peak of "
                    f"{other} and {Spread(**ratio['time'])} x the step time"
                )
        for what, nbytes in summary["budgets"][size].items():
            peak = group[job.budgeted][what.replace("bytes", "peak_bytes")]
            result = f"{'within' if peak <= nbytes else 'OVER'} {what} {format_size(nbytes)}"
            lines.append(f"batch size {size}: {job.budgeted} is {result}, at {readable_size(peak)}")
    for what in ("losses", "parameters"):
        same = "identical to the last bit" if summary[f"identical_{what}"] else "DIFFERENT"
        lines.append(f"{what} of the {len(job.strategies)} strategies over {job.steps} steps: {same}")
    return [Table(heads, rows, right=heads[:1] + heads[2:]), *lines]


def _bars(summary: Mapping[str, Any], job: Job) -> Iterator[str]:
    what, size = _WHOLE[training_device().type], str(job.sizes[-1])
    found = {name: each[f"{what}_peak_bytes"] for name, each in summary["batch_sizes"][size].items()}
    yield f"Memory of the whole {'process' if what == 'resident' else what} at batch size {size}:"
    for name, nbytes in found.items():
        yield f"  {name:10}{'=' * round(50 * nbytes / max(found.values()))} {readable_size(nbytes)}"


def _next_steps(output: Path) -> Iterator[str]:
    yield f"Picture: {output / 'rok.png'}. Figures: {output / 'summary.json'}."
    beside = os.path.relpath(Path(sys.executable).with_name("tba-offload"))
    program = "tba-offload" if shutil.which("tba-offload") else beside
    yield "Next: write a report page about these runs, and measure your drive:"
    yield f"  {program} report {output}/*.jsonl -o {output}/report.html"
    yield f"  {program} doctor {output}"
