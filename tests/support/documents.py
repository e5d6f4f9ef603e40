"""What stands in Markdown: blocks of code, and commands in them and in running text."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from places import ROOT

from tba_offload import cli

if TYPE_CHECKING:
    from collections.abc import Iterator

HOME = "https://github.com/tba-offload/tba-offload"
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def code_blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def running_text(text: str) -> str:
    """What stands outside of fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def commands_in(text: str) -> Iterator[list[str]]:
    """Words after ``tba-offload``, in running text and in blocks of bash."""
    quoted = re.findall(r"`(tba-offload [^`]+)`", running_text(text))
    typed = [line.strip() for block in code_blocks(text, "bash") for line in block.splitlines()]
    for command in (*quoted, *(line for line in typed if line.startswith("tba-offload "))):
        yield shlex.split(command, comments=True)[1:]


def known_options(command: str) -> set[str]:
    """The options of a command of ours."""
    parameters = cli.main.commands[command].params
    return {"-h", "--help", *(name for one in parameters for name in (*one.opts, *one.secondary_opts))}
