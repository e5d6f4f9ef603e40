"""``tba-offload schema``: the JSON Schema of policies."""

from __future__ import annotations

import json

import click


@click.command()
def schema() -> None:
    """Print the JSON Schema of policies, for editors.

    Placements and kinds of stores that --import registers are in it. One for the package's own is in the
    documentation, where the first line of a policy may name it:
    "# yaml-language-server: $schema=ADDRESS".
    """
    from tba_offload.config.schema import policy_schema

    click.echo(json.dumps(policy_schema(), indent=2))
