"""The command line: ``tba-offload COMMAND``, or ``python -m tba_offload COMMAND``.

Each command imports the modules that it needs when it runs. A command that reads a run log therefore does not
import torch. If a command raises a :class:`TbaError`, the program prints the error on stderr and exits with
status 1. If options are wrong, the program exits with status 2.
"""

from __future__ import annotations

from typing import Any

import click

from tba_offload import __version__
from tba_offload.cli.check import check
from tba_offload.cli.demo import demo
from tba_offload.cli.doctor import doctor
from tba_offload.cli.estimate import estimate
from tba_offload.cli.init import init
from tba_offload.cli.megatron import launch, patch
from tba_offload.cli.runs import plan, report, rok, timeline, why
from tba_offload.errors import ConfigError, TbaError
from tba_offload.formatting import visible

_COMPLETION = (
    'Tab completion in bash: eval "$(_TBA_OFFLOAD_COMPLETE=bash_source tba-offload)". For zsh and '
    "fish, replace bash_source by zsh_source or fish_source."
)


class _Commands(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TbaError as error:
            said = error.problems if isinstance(error, ConfigError) else (error,)
            lines = (visible(" ".join(str(each).split())) for each in said)
            raise click.ClickException("\nError: ".join(lines)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]}, epilog=_COMPLETION)
@click.version_option(__version__, prog_name="tba-offload")
def main() -> None:
    """Offload activations to NVMe drives while a large model trains."""


for command in (init, estimate, check, rok, plan, why, timeline, report, demo, doctor, patch, launch):
    main.add_command(command)
