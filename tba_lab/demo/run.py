"""The demo: one GPT trained three ways at once, and what each way costs in memory and time."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tba_lab.demo import drive
from tba_lab.demo.dtype import instruction_set
from tba_lab.demo.fit import ITEM_BYTES, STRATEGY_COSTS, parameters_of
from tba_lab.demo.progress import PlannedStep
from tba_lab.demo.race import (
    MEASURE_EVERY,
    Entrant,
    Watch,
    measures_memory,
    prediction_error,
    race,
    ratio_of,
    timed_rounds,
    turns,
)
from tba_lab.demo.text import write_text
from tba_lab.demo.trainer import Trainer
from tba_offload.config import (
    BudgetConfig,
    OffloadConfig,
    StatesConfig,
    StoreConfig,
    format_size,
    load_config,
)
from tba_offload.config.policy import LayerId, Placement
from tba_offload.device.malloc import FAST_ALLOCATOR
from tba_offload.errors import ConfigError
from tba_offload.plan.model import Plan
from tba_offload.report.rok import RokPoint, draw, points
from tba_offload.writing import write_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tba_lab.gpt import GptShape

CONTROL = "control"
"""Keep once more, in a process of its own: how far it is from keep is what the machine's noise can do."""

STATES = "states"
"""Offloads activations as the offload strategy does, and the optimizer's states too."""

AUTO = "auto"
"""The policy that is no file: the planner decides."""

_MOVED = ("offloaded", "read", "forwarded", "deduplicated", "kept", "given_up", "held", "fallback_kept")

WINDOW_STATES = 32 / 3
"""The window by default, in hidden states of a micro-batch, of which a layer saves some 25: as many
activations are in flight whatever their size. In whole MiB; 10 of them at width 1536, 320 tokens and bf16."""

_SUB_GROUPS = 20
"""Of the default size, at width 1536 in bf16."""

WARM_UP = 3
"""Steps that medians and peaks leave out: the first allocates, the second settles."""

_PEAK = "activation_peak_bytes"

Figures = dict[str, Any]


@dataclass(frozen=True)
class DemoSettings:
    """What the demo trains and where it writes.

    Attributes:
        shape: The model.
        batch_sizes: Sequences in a step; one race for each.
        steps: Steps of each strategy.
        output: Where the run logs, the picture and the summary go.
        directories: Where the offloaded bytes go; by default a new directory under ``output``.
        in_flight_bytes: The window of the offload strategy, at the smallest batch size; it grows with it.
            ``None`` for :data:`WINDOW_STATES`.
        policy: YAML file that replaces the policy of the offload strategy, or :data:`AUTO`.
        budget: Activation peak that ``auto`` must keep to: bytes, or as a ``float`` a share of keep's peak,
            which is measured first.
        device_budget: Likewise of weights, gradients, states and activations together; for :data:`STATES`,
            if that races.
        fewest_states: Whether as few states travel as let a step be fastest.
        threads: Compute threads of each process; ``None`` for PyTorch's own choice.
        control: Whether keep races twice, as :data:`CONTROL` too.
        states: How the optimizer's states are offloaded in :data:`STATES`; without it that does not race.
    """

    shape: GptShape
    batch_sizes: tuple[int, ...]
    steps: int
    output: Path
    directories: tuple[Path, ...] = ()
    in_flight_bytes: int | None = None
    policy: Path | None = None
    budget: int | float | None = None
    device_budget: int | float | None = None
    fewest_states: bool = False
    threads: int | None = None
    control: bool = False
    states: StatesConfig | None = None

    def __post_init__(self) -> None:
        if len({measures_memory(round_) for round_ in range(WARM_UP, self.steps)}) < 2:
            raise ConfigError(
                f"steps is {self.steps}: too few for {WARM_UP} that warm up, one that measures memory, "
                "one for time"
            )
        refuse_budgets(self.policy, self.budget, self.device_budget, fewest_states=self.fewest_states)
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ConfigError(f"batch sizes are {self.batch_sizes}, and each must be at least 1")

    @property
    def is_auto(self) -> bool:
        """Whether the planner decides."""
        return self.ours == AUTO

    @property
    def measures_keep(self) -> bool:
        """Whether keep is measured first, for a budget that is a share of what it needs."""
        return isinstance(self.budget, float) or isinstance(self.device_budget, float)

    @property
    def on_device_budget(self) -> str:
        """The strategy that keeps to :attr:`device_budget`."""
        return STATES if self.states is not None else self.ours

    @property
    def ours(self) -> str:
        """The strategy that is compared with keep and recompute."""
        return self.strategies[2]

    @property
    def strategies(self) -> tuple[str, ...]:
        """What races."""
        return strategies_of(self.policy, states=self.states is not None, control=self.control)

    @property
    def window(self) -> int:
        """Bytes in flight of the offload strategy at the smallest batch size."""
        if self.in_flight_bytes is not None:
            return self.in_flight_bytes
        tokens = min(self.batch_sizes) * self.shape.sequence
        states = tokens * self.shape.hidden * ITEM_BYTES[self.shape.dtype]
        return math.ceil(WINDOW_STATES * states / 2**20) * 2**20

    @property
    def compared(self) -> tuple[str, ...]:
        """What is in the curve: all but the control."""
        return tuple(name for name in self.strategies if name != CONTROL)

    def planned_steps(self) -> list[PlannedStep]:
        """All steps of all races in their order."""
        return [step for size in self.batch_sizes for step in self._planned_steps_of(size)]

    def _planned_steps_of(self, size: int) -> Iterator[PlannedStep]:
        if self.measures_keep:
            for number in range(MEASURE_EVERY):
                yield PlannedStep(f"keep alone, batch size {size}", float(size), opens=number == 0)
        for round_ in range(self.steps):
            for turn, name in enumerate(turns(self.strategies, round_)):
                opens = round_ == turn == 0
                yield PlannedStep(f"{name}, batch size {size}", size * STRATEGY_COSTS[name], opens=opens)


def refuse_budgets(
    policy: Path | None,
    budget: float | None,
    device_budget: float | None,
    *,
    fewest_states: bool,
) -> None:
    """Refuses budgets that nothing would keep to.

    Args:
        policy: As in :class:`DemoSettings`, and so the others.
        budget: Of activations.
        device_budget: Of everything.
        fewest_states: Whether states keep to that.

    Raises:
        ConfigError: There is one that nothing keeps to, or none where one is needed.
    """
    if (budget, device_budget) != (None, None) and policy != Path(AUTO):
        raise ConfigError("a budget is for --policy auto; a policy file has its own")
    if fewest_states and device_budget is None:
        raise ConfigError("--states auto needs --device-budget")


def strategies_of(policy: Path | None, *, states: bool, control: bool) -> tuple[str, ...]:
    """Return what races under a policy file, :data:`AUTO` or none."""
    ours = AUTO if policy == Path(AUTO) else "offload"
    return "keep", "recompute", ours, *([STATES] * states), *([CONTROL] * control)


def run_demo(settings: DemoSettings, *, watch: Watch | None = None) -> Figures:
    """Trains, writes run logs, ``rok.svg``, ``rok.png`` and ``summary.json``, and returns the summary.

    Args:
        settings: What to do.
        watch: Told of every single step and of what goes on between them.

    Raises:
        ConfigError: The output directory holds run logs already, or the policy file is wrong.
        RaceError: A strategy failed.
    """
    watch = watch or Watch()
    policy = read_policy(settings.policy, settings.shape.layers)
    logs = _claim_output(settings)
    try:
        races, rates, budgets = _race_all(settings, policy, logs, watch)
    except BaseException:
        for log in logs.values():  # half of a comparison is none, and would be in the way of the next
            log.unlink(missing_ok=True)
        raise
    watch.phase("drawing the curve")
    summary = {"trained": _trained(settings), **summarize(races, settings.ours)}
    if rates:
        summary["drive"] = {str(size): _drive_of(lanes, rates[size]) for size, lanes in races.items()}
    if settings.device_budget is not None:
        summary["device_budget"] = {
            str(size): _on_device(lanes[settings.on_device_budget], settings, budgets[size].device or 0)
            for size, lanes in races.items()
        }
    offloads_states = STATES in settings.strategies
    drawn = _points_of(logs, summary["batch_sizes"], on_device=offloads_states)
    for name in ("rok.svg", "rok.png"):
        draw(drawn, settings.output / name, title=_title(settings))
    write_regular(settings.output / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
    return summary


def _title(settings: DemoSettings) -> str:
    shape = settings.shape
    return (
        f"{shape.layers} layers of width {shape.hidden}, sequence {shape.sequence}; "
        f"{shape.dtype} on {instruction_set()}"
    )


def _trained(settings: DemoSettings) -> Figures:
    """Return the job, for the summary."""
    return {
        **dataclasses.asdict(settings.shape),
        "steps": settings.steps,
        "in_flight_bytes": settings.window,
        "instruction_set": instruction_set(),
    }


def _race_all(
    settings: DemoSettings,
    policy: OffloadConfig | None,
    logs: Mapping[tuple[int, str], Path],
    watch: Watch,
) -> tuple[dict[int, dict[str, list[Figures]]], dict[int, float], dict[int, _Budgets]]:
    """All races; what the drive moved around those in which states travel, in bytes a second; the budgets."""
    races: dict[int, dict[str, list[Figures]]] = {}
    budgets: dict[int, _Budgets] = {}
    rates: dict[int, float] = {}
    with tempfile.TemporaryDirectory(prefix="tba-demo-", dir=settings.output) as scratch:
        watch.phase("writing the text that is trained on")
        text = write_text(Path(scratch) / "text")
        for size in settings.batch_sizes:
            keep = _config(settings, policy, "keep", size, Path(scratch))
            budgets[size] = limits = _budgets_of(settings, keep, size, text, watch)
            configs = {
                name: _within(_config(settings, policy, name, size, Path(scratch)), settings, name, limits)
                for name in settings.strategies
            }
            watch.phase(f"starting {len(configs)} processes at batch size {size}: {', '.join(configs)}")
            if STATES in configs:
                rates[size] = drive.mixed_rate(configs[STATES])
            entrants = _entrants(settings, configs, size, text, logs)
            races[size] = race(entrants, settings.steps, watch=watch)
            if STATES in configs:  # a drive varies: the better of its rates makes the stricter bound
                rates[size] = max(rates[size], drive.mixed_rate(configs[STATES]))
    return races, rates, budgets


class _Budgets(NamedTuple):
    """Budgets of one race in bytes: of activations, and of all on the device."""

    activations: int | None
    device: int | None


def _drive_of(lanes: Mapping[str, Sequence[Figures]], rate: float) -> Figures:
    """Return what the drive needs for the bytes of a step, and how the step compares with that.

    Returns:
        ``both_bytes_per_second``, what it read and wrote at once; ``travelled_bytes``, the median of a step
        of the lane that offloads states; ``time_states_over_bound``, its time over the larger of keep's and
        of the drive's for those bytes.
    """
    rounds = _timed(lanes[STATES], lanes["keep"])
    return {
        "both_bytes_per_second": rate,
        "travelled_bytes": int(statistics.median(drive.travelled(step) for step, _ in rounds)),
        "time_states_over_bound": dataclasses.asdict(drive.over_bound(rounds, rate)),
    }


def _budgets_of(settings: DemoSettings, keep: OffloadConfig, size: int, text: Path, watch: Watch) -> _Budgets:
    """Return the budgets; what shares are shares of is measured in a few steps of keep alone."""
    steps: Sequence[Figures] = ()
    if settings.measures_keep:
        watch.phase(f"starting keep alone, to measure its peak at batch size {size}")
        steps = race(_entrants(settings, {"keep": keep}, size, text, {}), MEASURE_EVERY, watch=watch)["keep"]

    def resolved(budget: float | None, peak: str) -> int | None:
        if not isinstance(budget, float):
            return budget
        return int(budget * max(step[peak] or 0 for step in steps))

    return _Budgets(resolved(settings.budget, _PEAK), resolved(settings.device_budget, "device_peak_bytes"))


def _within(config: OffloadConfig, settings: DemoSettings, name: str, limits: _Budgets) -> OffloadConfig:
    """Return the policy of a lane with the budgets that are for it."""
    device = limits.device if name == settings.on_device_budget else None
    activations = limits.activations if name in {AUTO, STATES} else None
    states = config.states
    if name == STATES and states is not None and settings.fewest_states:
        states = dataclasses.replace(states, default="auto")
    if (activations, device) == (None, None):
        return config
    budget = BudgetConfig(activation_bytes=activations, device_bytes=device, in_flight_bytes=None)
    return dataclasses.replace(config, budget=budget, states=states)


def _on_device(steps: Sequence[Figures], settings: DemoSettings, nbytes: int) -> Figures:
    """How the lane that has a budget of all on the device kept to it.

    Returns:
        ``lane``, its name; ``bytes``, the budget; ``peak_bytes``, the most that was measured after the
        warm-up; ``kept``, whether that is less; ``predicted_peak_bytes`` and ``predicted_seconds`` of the
        last step of which that was predicted, of all of it, and the median errors of both; how many of
        ``sub_groups`` of states were ``travelling`` at last.
    """
    counted, last = steps[WARM_UP:], steps[-1]
    # Of a step that tries something else nothing is predicted.
    foretold = [step for step in counted if step["predicted_device_peak_bytes"] is not None]
    said = foretold[-1] if foretold else last
    peak = max(step["device_peak_bytes"] or 0 for step in counted)
    states = last["states"][-1] if last["states"] else None
    return {
        "lane": settings.on_device_budget,
        "bytes": nbytes,
        "peak_bytes": peak,
        "kept": peak <= nbytes,
        "predicted_peak_bytes": said["predicted_device_peak_bytes"],
        "peak_error": prediction_error(counted, "predicted_device_peak_bytes", "device_peak_bytes"),
        "predicted_seconds": said["predicted_whole_seconds"],
        "seconds_error": prediction_error(counted, "predicted_whole_seconds", "whole_step_seconds"),
        "travelling": None if states is None else states["sub_groups"] - states["staying"],
        "sub_groups": None if states is None else states["sub_groups"],
    }


def read_policy(policy: Path | None, layers: int) -> OffloadConfig | None:
    """Return the policy file, held against the layers that the model is going to have.

    Raises:
        ConfigError: It is wrong.
    """
    if policy in {None, Path(AUTO)}:
        return None
    config = load_config(policy)
    ids = [LayerId(number, f"decoder.layers.{number}", "decoder") for number in range(layers)]
    Plan.from_policy(config.policy, ids)
    return config


def summarize(races: Mapping[int, Mapping[str, Sequence[Figures]]], ours: str = "offload") -> Figures:
    """Return the figures of all races, batch size by batch size.

    Args:
        races: Batch size → strategy → the figures of its steps.
        ours: The strategy that the ratios are of.

    Ratios of times are medians of the ratios of single rounds; ``spread`` gives their quartiles.

    Returns:
        ``batch_sizes``, ``ratios``, ``spread``, ``identical_losses`` and ``measured``.
    """
    return {
        "batch_sizes": {
            str(size): {name: _strategy(steps) for name, steps in lanes.items()}
            for size, lanes in races.items()
        },
        "ratios": {str(size): _ratios(lanes, ours) for size, lanes in races.items()},
        "spread": {str(size): _spreads(lanes, ours) for size, lanes in races.items()},
        "identical_losses": all(
            [step["loss"] for step in lanes[name]] == [step["loss"] for step in lanes["keep"]]
            for lanes in races.values()
            for name in lanes
        ),
        "identical_parameters": all(
            lanes[name][-1]["parameters"] == lanes["keep"][-1]["parameters"]
            for lanes in races.values()
            for name in lanes
        ),
        "measured": {
            "activation_peak_bytes": _measured(next(iter(races.values()))["keep"])[0]["peak_source"],
            "activation_peak_steps": f"every {MEASURE_EVERY}th, whose time does not count",
            "step_seconds_median": "forward, backward and optimizer, wall clock, median after the warm-up",
            "warm_up_steps": WARM_UP,
        },
    }


def _strategy(steps: Sequence[Figures]) -> Figures:
    counted, timed = steps[WARM_UP:], [step for (step,) in _timed(steps)]
    peaks = [step[_PEAK] for step in _measured(steps)]
    figures: Figures = {
        "activation_peak_bytes": max(peaks),
        "device_peak_bytes": max(step["device_peak_bytes"] or 0 for step in counted),
        "activation_peak_bytes_median": int(statistics.median(peaks)),
        "resident_peak_bytes": max(step["resident_peak_bytes"] or 0 for step in counted),
        "step_seconds_median": _median(timed, "whole_step_seconds"),
        "forward_backward_seconds_median": _median(timed, "seconds"),
        "tokens_per_second": timed[0]["tokens"] / _median(timed, "whole_step_seconds"),
        "stall_seconds_median": _median(timed, "stall_seconds"),
        "losses": [step["loss"] for step in steps],
    }
    for name in ("predicted_peak_bytes", "predicted_seconds"):
        known = [step[name] for step in steps if step[name] is not None]
        figures[name] = known[-1] if known else None  # as where nothing was captured
    figures["predicted_peak_error"] = prediction_error(counted, "predicted_peak_bytes", _PEAK)
    figures["predicted_seconds_error"] = prediction_error(timed, "predicted_seconds", "seconds")
    for name in ("read_bytes", "written_bytes"):
        moved = [sum(states[name] for states in step["states"]) for step in counted]
        figures[f"states_{name}"] = int(statistics.median(moved))
    for name in _MOVED:
        figures[f"{name}_bytes"] = int(_median(counted, f"{name}_bytes"))
    return figures


def _measured(steps: Sequence[Figures]) -> list[Figures]:
    """Return the counted steps in which memory was measured."""
    return [step for step in steps[WARM_UP:] if step[_PEAK] is not None]


def _timed(*lanes: Sequence[Figures]) -> list[tuple[Mapping[str, Any], ...]]:
    """Return the rounds in which nothing was sampled, so that their time is that of the training."""
    return timed_rounds(*lanes, warm_up=WARM_UP, peak=_PEAK)


def _median(steps: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(statistics.median(step[name] for step in steps))


def _ratios(lanes: Mapping[str, Sequence[Figures]], ours: str) -> dict[str, float]:
    figures = {name: _strategy(steps) for name, steps in lanes.items()}
    peaks = {name: each["activation_peak_bytes"] for name, each in figures.items()}
    device = {name: each["device_peak_bytes"] for name, each in figures.items()}
    return {
        f"peak_{ours}_over_keep": peaks[ours] / peaks["keep"],
        f"peak_{ours}_over_recompute": peaks[ours] / peaks["recompute"],
        **{
            f"device_peak_{name}_over_keep": device[name] / device["keep"]
            for name in (ours, STATES)
            if name in lanes
        },
        **{name: spread["median"] for name, spread in _spreads(lanes, ours).items()},
    }


def _spreads(lanes: Mapping[str, Sequence[Figures]], ours: str) -> dict[str, dict[str, float]]:
    def spread(one: str, other: str) -> dict[str, float]:
        return dataclasses.asdict(ratio_of(_timed(lanes[one], lanes[other]), "whole_step_seconds"))

    others = [(name, "keep") for name in (STATES, CONTROL) if name in lanes]
    pairs = [(ours, "keep"), (ours, "recompute"), *others]
    return {f"time_{one}_over_{other}": spread(one, other) for one, other in pairs}


def _points_of(logs: dict[tuple[int, str], Path], lanes: Figures, *, on_device: bool) -> list[RokPoint]:
    """Return the points of the curve.

    Those of all that is on the device are less what a process has for Python.
    """
    peaks = {str(path): lanes[str(size)][name]["device_peak_bytes"] for (size, name), path in logs.items()}
    found = points(sorted(logs.values()), memory="device" if on_device else "activations")
    return [dataclasses.replace(each, device_peak_bytes=peaks[each.source]) for each in found]


def _claim_output(settings: DemoSettings) -> dict[tuple[int, str], Path]:
    """Return the run logs to write; none may exist, or figures of two runs would be mixed."""
    try:
        settings.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the output directory {settings.output}: {error.strerror}") from error
    refuse_run_logs(settings.output)
    return {
        (size, name): settings.output / f"{name}-b{size}.jsonl"
        for size in settings.batch_sizes
        for name in settings.compared
    }


def refuse_run_logs(output: Path) -> None:
    """Record that an output directory with run logs is not to be written to.

    Raises:
        ConfigError: It has some.
    """
    old = sorted(output.glob("*.jsonl"))
    if old:
        raise ConfigError(f"{output} holds run logs of another run ({old[0].name}); choose a new directory")


def _entrants(
    settings: DemoSettings,
    configs: Mapping[str, OffloadConfig],
    size: int,
    text: Path,
    logs: Mapping[tuple[int, str], Path],
) -> dict[str, Entrant]:
    return {
        name: Entrant(
            Trainer,
            {
                "shape": settings.shape,
                "text": text,
                "config": config.to_yaml(),
                "strategy": name,
                "batch_size": size,
                "steps": settings.steps,
                "run_log": logs.get((size, name)),
                "threads": settings.threads,
                "device_bytes": config.budget.device_bytes if settings.is_auto else None,
            },
            FAST_ALLOCATOR,
        )
        for name, config in configs.items()
    }


def _config(
    settings: DemoSettings, policy: OffloadConfig | None, name: str, size: int, scratch: Path
) -> OffloadConfig:
    if name == STATES:
        like = _config(settings, policy, settings.ours, size, scratch)
        return dataclasses.replace(like, states=_in_proportion(settings))
    if name == "offload" and policy is not None:
        directories = settings.directories or policy.store.directories
        if not directories and policy.store.kind != "host":
            directories = (scratch,)
        return dataclasses.replace(policy, store=dataclasses.replace(policy.store, directories=directories))
    window = settings.window * size // min(settings.batch_sizes)
    return OffloadConfig(
        default=Placement.KEEP if name == CONTROL else Placement(name),
        budget=BudgetConfig(in_flight_bytes=window),
        store=StoreConfig(kind="file", directories=settings.directories or (scratch,)),
    )


def _in_proportion(settings: DemoSettings) -> StatesConfig:
    """Optimizer states in sub-groups of a twentieth of them: a small model stands for a large one."""
    shape, states = settings.shape, settings.states or StatesConfig()
    nbytes = 2 * ITEM_BYTES[shape.dtype] * parameters_of(shape) // _SUB_GROUPS
    most = states.sub_group_on("cpu")  # also on a GPU, since a demo has few of them
    return dataclasses.replace(states, sub_group_bytes=min(max(nbytes, 2**18), most))


def describe(settings: DemoSettings) -> str:
    """One line that says what is going to be trained."""
    shape = settings.shape
    batches = ", ".join(str(size) for size in settings.batch_sizes)
    return (
        f"{shape.style} with {shape.layers} layers of width {shape.hidden}, sequence {shape.sequence}, "
        f"{shape.dtype}, dropout {shape.dropout}; batch sizes {batches}; {settings.steps} steps of "
        f"{', '.join(settings.strategies)} in turn; {_limit(settings)}"
    )


def _limit(settings: DemoSettings) -> str:
    told = [
        f"budget {budget:.0%} of keep's {what}"
        if isinstance(budget, float)
        else f"budget {format_size(budget)}"
        for budget, what in ((settings.budget, "activation peak"), (settings.device_budget, "device bytes"))
        if budget is not None
    ]
    if told:
        return ", ".join(told)
    return f"window {format_size(settings.window)}"
