"""Commands of the program ``tba-offload``, in this process."""

from __future__ import annotations

from click.testing import CliRunner, Result

from tba_offload import cli


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, list(map(str, arguments)))
