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


def _stack(text: str) -> tuple[str | None, int]:
    """Return ``("encoder", 12)`` for the option value ``encoder:12``, and ``(None, 24)`` for ``24``."""
    found = re.fullmatch(r"(?:([^:\s]+):)?([1-9][0-9]{0,5})", text)
    if found is None:
        why = f"{quoted(text)} must be a number of layers, such as 24, or a stack and its number of layers"
        raise click.BadParameter(f"{why}, such as encoder:12")
    return found[1], int(found[2])


@click.command()
@click.argument("policy", metavar="POLICY.yaml", type=click.Path(path_type=Path))
@click.option(
    "--layers",
    "stacks",
    metavar="N|STACK:N",
    type=_stack,
    multiple=True,
    required=True,
    help="Number of layers of the model. For several stacks: --layers encoder:12 --layers decoder:12.",
)
@JSON
def check(policy: Path, stacks: Sequence[tuple[str | None, int]], *, as_json: bool) -> None:
    """Print the placement of each layer under a policy, or all errors in the policy.

    The output also names the rule that sets each placement, and the settings for optimizer states and frozen
    weights. Rules that match module names are listed but not applied, because the command does not load the
    model. The exit status is 1 if the policy has an error.

    If the model has several stacks of layers, such as an encoder and a decoder, pass --layers for each stack.
    """
    from tba_offload.config import load_config
    from tba_offload.config.policy import LayerId, with_depths

    names = {stack for stack, _ in stacks}
    if len(names) < len(stacks) or (len(stacks) > 1 and None in names):
        raise click.UsageError("name each stack of layers: --layers encoder:12 --layers decoder:12")
    stacks = stacks if len(stacks) > 1 else [(None, stacks[0][1])]
    layers = [LayerId(number, "", stack) for stack, count in stacks for number in range(count)]
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
        "states": states and f"{states.default} (optimizer updates run in {_UPDATES[states.when]})",
        "weights": weights and f"{weights.frozen} (frozen weights)",
        "not_judged": [str(rule) for rule in config.policy.unjudged(layers)],
        "warnings": config.doubts(layers),
        "problems": [],
    }
    click.echo(json.dumps(found, indent=2) if as_json else "\n".join(_lines(found)))
    for doubt in [] if as_json else found["warnings"]:
        click.echo(f"Warning: {visible(doubt)}", err=True)


def _groups(policy: Policy, layers: Sequence[LayerId]) -> Iterator[dict[str, str]]:
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
        yield f"not checked: the rule {visible(rule)} selects by module name, but no model is loaded"
