"""The command line of benchmarks that tell what one mechanism costs a training step of the demo's GPT.

Three lanes train the same model step by step in turn, each in a process of its own: with the mechanism, with
it once more (how far the two are apart is what the machine's noise can do to any ratio) and without it. A
mechanism may have a fourth, in which its work is done many times over.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import click
import torch

import tba_offload as tba
from tba_lab.demo.race import Entrant, Spread, paired_ratio, race
from tba_lab.demo.text import write_text
from tba_lab.demo.trainer import Trainer
from tba_lab.gpt import GptShape
from tba_offload.device.malloc import FAST_ALLOCATOR

if TYPE_CHECKING:
    from collections.abc import Callable

    Steps = list[dict[str, Any]]
    Lanes = dict[str, Steps]

ON, AGAIN, OFF, MANY = "on", "on again", "off", "many times"


def metered(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Get the same function, which adds its processor seconds to a list, on whatever thread it is called."""

    def noted(*arguments: Any, **options: Any) -> Any:
        began = time.thread_time()
        try:
            return function(*arguments, **options)
        finally:
            seconds.append(time.thread_time() - began)

    return noted


class MeteredTrainer(Trainer):
    """A strategy of the demo that also says how much processor time a step took."""

    settings: ClassVar[dict[str, Any]] = {}
    """What the session is told of each step, in place of what the demo says."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        step = self.session.step
        self.session.step = lambda **demos: step(**demos | self.settings)  # type: ignore[method-assign]

    def step(self) -> dict[str, Any]:
        """One training step; its figures and the processor seconds of all threads of the process."""
        began = time.process_time()
        figures = super().step()
        return {**figures, "cpu_seconds": time.process_time() - began}


class Lane(NamedTuple):
    """A process that trains: its strategy's class and, from a scratch directory, its configuration."""

    trainer: type[MeteredTrainer]
    config: Callable[[Path], tba.OffloadConfig]


class Mechanism(NamedTuple):
    """What is switched on and off.

    Attributes:
        strategy: The demo's name of what is done with activations.
        on: The lane that has the mechanism; it runs twice.
        off: The lane that does not have it.
        summarize: The mechanism's own figures, from the steps of all lanes.
        told: Sentences about these figures.
        many: The lane that has its work many times over.
    """

    strategy: str
    on: Lane
    off: Lane
    summarize: Callable[[Lanes], dict[str, Any]]
    told: Callable[[dict[str, Any]], str]
    many: Lane | None = None


def all_offloaded(scratch: Path, *, checksum: bool = True) -> tba.OffloadConfig:
    """Return a lane's configuration in which everything travels, with checksums or without."""
    return tba.OffloadConfig(
        budget=tba.BudgetConfig(in_flight_bytes=10 << 20),
        store=tba.StoreConfig(kind="file", directories=(scratch,), checksum=checksum),
    )


def cost_command(doc: str, mechanism: Mechanism, *, steps: int, warm_up: int) -> click.Command:
    """Return the command that races the lanes and prints what the mechanism costs.

    Args:
        doc: The benchmark's docstring; the first line is the help text.
        mechanism: What is switched on and off.
        steps: How many steps each lane makes unless ``--steps`` says otherwise.
        warm_up: How many of these are left out of the ratios.
    """

    @click.command(help=doc.splitlines()[0])
    @click.option("--layers", default=12, show_default=True)
    @click.option("--hidden", default=768, show_default=True)
    @click.option("--sequence", default=160, show_default=True)
    @click.option("--batch-size", default=2, show_default=True)
    @click.option("--steps", default=steps, show_default=True)
    @click.option("--dtype", type=click.Choice(["bf16", "fp32"]), default="fp32", show_default=True)
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
    def main(*, batch_size: int, steps: int, as_json: bool, **model: Any) -> None:
        """Measures and prints."""
        shape = GptShape(heads=12, **model)
        with tempfile.TemporaryDirectory() as scratch:
            lanes = race(_entrants(mechanism, shape, batch_size, steps, Path(scratch)), steps)
        figures = {
            "dtype": shape.dtype,
            "instruction_set": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            **mechanism.summarize(lanes),
            **_ratios(lanes, warm_up),
        }
        click.echo(json.dumps(figures, indent=2) if as_json else "\n".join(_lines(figures, mechanism)))

    return main


def _entrants(
    mechanism: Mechanism, shape: GptShape, batch_size: int, steps: int, scratch: Path
) -> dict[str, Entrant]:
    text = write_text(scratch / "text")
    made = {}
    for name, lane in {
        ON: mechanism.on,
        AGAIN: mechanism.on,
        OFF: mechanism.off,
        MANY: mechanism.many,
    }.items():
        if lane is None:
            continue
        arguments = {
            "shape": shape,
            "text": text,
            "config": lane.config(scratch).to_yaml(),
            "strategy": mechanism.strategy,
            "batch_size": batch_size,
            "steps": steps,
            "run_log": None,
        }
        made[name] = Entrant(lane.trainer, arguments, FAST_ALLOCATOR)
    return made


def _ratios(lanes: Lanes, warm_up: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for label, measured in (("cpu", "cpu_seconds"), ("time", "whole_step_seconds")):
        seconds = {name: [step[measured] for step in steps[warm_up:]] for name, steps in lanes.items()}
        figures[f"{label}_on_over_off"] = vars(paired_ratio(seconds[ON], seconds[OFF]))
        figures[f"{label}_on_over_on"] = vars(paired_ratio(seconds[ON], seconds[AGAIN]))
    losses = {tuple(step["loss"] for step in steps) for steps in lanes.values()}
    return {**figures, "losses_identical": len(losses) == 1}


def _lines(figures: dict[str, Any], mechanism: Mechanism) -> list[str]:
    shown = {key: Spread(**value) for key, value in figures.items() if "_on_over_" in key}
    return [
        f"{figures['dtype']} on {figures['instruction_set']}, {figures['threads']} threads",
        mechanism.told(figures),
        f"processor time, on over off: {shown['cpu_on_over_off']}; on over on: {shown['cpu_on_over_on']}",
        f"step time, on over off: {shown['time_on_over_off']}; on over on: {shown['time_on_over_on']}",
        f"losses identical: {figures['losses_identical']}",
    ]
