"""The command line: ``tba-offload COMMAND``, or ``python -m tba_offload COMMAND``.

Each command imports what it needs when it runs, so that reading a log never waits for torch. What tba-offload
raises on purpose ends as one line on stderr and exit status 1; a wrong command line has exit status 2.
"""

from __future__ import annotations

import importlib
from typing import Any

import click

from tba_offload import __version__
from tba_offload.cli.check import check
from tba_offload.cli.demo import demo
from tba_offload.cli.doctor import doctor
from tba_offload.cli.init import init
from tba_offload.cli.megatron import launch, patch
from tba_offload.cli.runs import plan, report, rok, timeline, why
from tba_offload.errors import ConfigError, TbaError
from tba_offload.formatting import quoted, visible


class _Commands(click.Group):
    """A group whose commands may raise any :class:`TbaError`."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TbaError as error:
            said = error.problems if isinstance(error, ConfigError) else (error,)
            lines = (visible(" ".join(str(each).split())) for each in said)
            raise click.ClickException("\nError: ".join(lines)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tba-offload")
@click.option(
    "--import",
    "modules",
    metavar="MODULE",
    multiple=True,
    help="Import a module first, which registers kinds of stores; may be given several times.",
)
def main(modules: tuple[str, ...]) -> None:
    """Offload activations to NVMe while a large model trains."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            message = f"{quoted(module)} cannot be imported: {error}; name its folder in PYTHONPATH"
            raise click.BadParameter(message, param_hint="'--import'") from error


for command in (init, check, rok, plan, why, timeline, report, demo, doctor, patch, launch):
    main.add_command(command)
