"""The command line: one file for a group of commands."""

from __future__ import annotations

from tba_offload.cli.commands import main

__all__ = ["main"]
