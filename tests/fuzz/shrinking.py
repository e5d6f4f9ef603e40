"""Takes features from a program that fails, one at a time, while it goes on to fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .choices import simpler

if TYPE_CHECKING:
    from collections.abc import Callable

    from .choices import Program


def shrunk(
    program: Program, fails: Callable[[Program], bool], *, tell: Callable[[Program], object] = id
) -> Program:
    """The program from which nothing more can be taken.

    Args:
        program: One that fails.
        fails: Whether a program still does.
        tell: Is called with each simpler one that does.
    """
    while True:
        smaller = next(filter(fails, simpler(program)), None)
        if smaller is None:
            return program
        program = smaller
        tell(program)
