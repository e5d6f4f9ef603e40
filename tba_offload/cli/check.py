"""``tba-offload check``: judges a policy by a number of layers, without a model and without torch."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import click

from tba_offload.cli.shared import JSON
from tba_offload.errors import ConfigError
from tba_offload.formatting import quoted, visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tba_offload.config import OffloadConfig
    from tba_offload.config.policy import LayerId, Policy

_LAYERS = re.compile(r"(?:(?P<stack>[^:\s]+):)?(?P<count>[1-9][0-9]{0,5})")


class _Group(NamedTuple):
    """Layers that follow each other and are placed alike for the same reason."""

    layers: str
    placement: str
    why: str


def _stacks(
    _context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[tuple[str | None, int], ...]:
    """``24``, or for a model with several stacks ``encoder:12`` and ``decoder:12``."""
    found = [_LAYERS.fullmatch(value) for value in values]
    for value, match in zip(values, found, strict=True):
        if match is None:
            raise click.BadParameter(f"{quoted(value)} is no number of layers; write 24, or encoder:12")
    stacks = tuple((match["stack"], int(match["count"])) for match in found if match is not None)
    names = [stack for stack, _ in stacks]
    if len(set(names)) < len(names) or (len(names) > 1 and None in names):
        raise click.BadParameter("of several stacks each needs a name of its own, such as encoder:12")
    return stacks


@click.command()
@click.argument("policy", metavar="POLICY.yaml", type=click.Path(path_type=Path))
@click.option(
    "--layers",
    "stacks",
    metavar="N|STACK:N",
    multiple=True,
    required=True,
    callback=_stacks,
    help="How many layers the model has; of several stacks each: --layers encoder:12 --layers decoder:12.",
)
@JSON
def check(policy: Path, stacks: tuple[tuple[str | None, int], ...], *, as_json: bool) -> None:
    """Say what a policy does with a model of N layers, or everything that is wrong with it.

    Prints the placement of each layer and the rule that gives it, and what becomes of optimizer states and
    frozen weights. Rules that match modules by name cannot be
    judged without the model; they are named, and left out. Exit status 1 if anything is wrong.
    """
    from tba_offload.config import load_config

    layers = _layers_of(stacks)
    try:
        config = load_config(policy, layers=layers)
    except ConfigError as error:
        _refuse(error, as_json=as_json)
    _show(config, layers, config.doubts(layers), as_json=as_json)


def _layers_of(stacks: Sequence[tuple[str | None, int]]) -> list[LayerId]:
    """Layers without names, and without the name of the stack where there is only one."""
    from tba_offload.config.policy import LayerId, with_depths

    layers = [
        LayerId(number, "", stack if len(stacks) > 1 else None)
        for stack, count in stacks
        for number in range(count)
    ]
    return with_depths(layers, layers)


def _refuse(error: ConfigError, *, as_json: bool) -> NoReturn:
    """Says every problem, one a line, and ends the program.

    Raises:
        click.exceptions.Exit: With status 1.
    """
    if as_json:
        found = [{"line": problem.line, "message": str(problem)} for problem in error.problems]
        click.echo(json.dumps({"problems": found}, indent=2))
    else:
        for problem in error.problems:
            click.echo(f"Error: {visible(str(problem))}", err=True)
    raise click.exceptions.Exit(1)


def _show(config: OffloadConfig, layers: Sequence[LayerId], doubts: Sequence[str], *, as_json: bool) -> None:
    policy = config.policy
    groups, unjudged = list(_groups(policy, layers)), [str(rule) for rule in policy.unjudged(layers)]
    states, weights = config.states, config.weights
    beside = {
        "states": None if states is None else f"{states.default}, updated in {states.when}",
        "weights": None if weights is None else f"{weights.frozen}, if frozen",
    }
    if as_json:
        document = {
            "layers": [group._asdict() for group in groups],
            **beside,
            "not_judged": unjudged,
            "warnings": list(doubts),
            "problems": [],
        }
        click.echo(json.dumps(document, indent=2))
        return
    widths = [max(map(len, column)) for column in zip(*groups, strict=True)]
    for layers_word, placement, why in groups:
        click.echo(f"{layers_word:<{widths[0]}}  {placement:<{widths[1]}}  {visible(why)}")
    for what, placed in beside.items():
        if placed is not None:
            click.echo(f"{what}: {placed}")
    for rule in unjudged:
        click.echo(f"not judged, because only the model has names: the rule {visible(rule)}")
    for doubt in doubts:
        click.echo(f"Warning: {visible(doubt)}", err=True)


def _groups(policy: Policy, layers: Sequence[LayerId]) -> Iterator[_Group]:
    """Neighbours of one stack that are placed alike by the same rule."""

    def reason(layer: LayerId) -> tuple[str | None, str, str]:
        placement, why = policy.explain(layer)
        return layer.stack, placement.value, why

    for (_, placement, why), found in itertools.groupby(layers, reason):
        first, *others = found
        yield _Group(first.numbers(1 + len(others)), placement, why)
