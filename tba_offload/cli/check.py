"""``tba-offload check``: print the placements of a policy without a model and without torch."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tba_offload.cli.shared import JSON
from tba_offload.errors import ConfigError
from tba_offload.formatting import quoted, visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tba_offload.config.policy import LayerId, Policy

_UPDATES = {"step": "optimizer.step()", "backward": "backward()"}
_LAYERS = re.compile(r"(?:(?P<stack>[^:\s]+):)?(?P<count>[1-9][0-9]{0,5})")


def _stacks(
    _context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str | None, int]:
    """Return the number of layers of each stack. A model with one stack has the key ``None``.

    Examples of option values are ``24`` for one stack, and ``encoder:12`` for the stack ``encoder``.
    """
    stacks: dict[str | None, int] = {}
    for value in values:
        match = _LAYERS.fullmatch(value)
        if match is None:
            raise click.BadParameter(
                f"{quoted(value)} must be a number of layers, such as 24, or a stack and its number of "
                "layers, such as encoder:12"
            )
        stacks[match["stack"]] = int(match["count"])
    if len(stacks) < len(values) or (len(values) > 1 and None in stacks):
        raise click.BadParameter(
            "several stacks need different names. An example: --layers encoder:12 --layers decoder:12"
        )
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
    help="Number of layers of the model. For several stacks, repeat the option: --layers encoder:12 "
    "--layers decoder:12.",
)
@JSON
def check(policy: Path, stacks: dict[str | None, int], *, as_json: bool) -> None:
    """Print the placement of each layer under a policy, or all errors in the policy.

    For each layer, the output has the placement and the rule that sets the placement. If the policy offloads
    optimizer states or frozen weights, the output also lists their placements. A rule that matches module
    names needs the model, so this rule is listed but not applied. The exit status is 1 if the policy has an
    error.
    """
    from tba_offload.config import load_config
    from tba_offload.config.policy import LayerId, with_depths

    layers = [
        LayerId(number, "", stack if len(stacks) > 1 else None)
        for stack, count in stacks.items()
        for number in range(count)
    ]
    layers = with_depths(layers, layers)
    try:
        config = load_config(policy, layers=layers)
    except ConfigError as error:
        if not as_json:
            raise
        problems = [{"line": problem.line, "message": str(problem)} for problem in error.problems]
        click.echo(json.dumps({"problems": problems}, indent=2))
        raise click.exceptions.Exit(1) from error
    states, weights = config.states, config.weights
    found: dict[str, Any] = {
        "layers": list(_groups(config.policy, layers)),
        "states": None
        if states is None
        else f"{states.default} (optimizer states, updated in {_UPDATES[states.when]})",
        "weights": None if weights is None else f"{weights.frozen} (frozen weights)",
        "not_judged": [str(rule) for rule in config.policy.unjudged(layers)],
        "warnings": config.doubts(layers),
        "problems": [],
    }
    click.echo(json.dumps(found, indent=2) if as_json else "\n".join(_lines(found)))
    for doubt in [] if as_json else found["warnings"]:
        click.echo(f"Warning: {visible(doubt)}", err=True)


def _groups(policy: Policy, layers: Sequence[LayerId]) -> Iterator[dict[str, str]]:
    """Yield groups of adjacent layers with the same stack, placement and rule."""

    def reason(layer: LayerId) -> tuple[str | None, str, str]:
        placement, why = policy.explain(layer)
        return layer.stack, placement.value, why

    for (_, placement, why), (first, *others) in itertools.groupby(layers, reason):
        yield {"layers": first.numbers(1 + len(others)), "placement": placement, "why": why}


def _lines(found: dict[str, Any]) -> Iterator[str]:
    widths = [max(len(group[name]) for group in found["layers"]) for name in ("layers", "placement")]
    for group in found["layers"]:
        yield f"{group['layers']:<{widths[0]}}  {group['placement']:<{widths[1]}}  {visible(group['why'])}"
    yield from (f"{name}: {found[name]}" for name in ("states", "weights") if found[name] is not None)
    for rule in found["not_judged"]:
        yield f"not checked: the rule {visible(rule)} matches module names, and the command has no model"
