"""Ctrl-C: it arrives, wherever it strikes, and leaves nothing behind."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
from covering import EVERYTHING
from places import SUPPORT

if TYPE_CHECKING:
    from warm import Warm


def test_an_interrupt_anywhere_in_a_step_arrives_and_leaves_nothing(python_with_torch: Warm) -> None:
    """After each interrupted step the next one gives the same bits, and all books are at zero."""
    assert_all_arrive(python_with_torch, "steps", 200 if EVERYTHING else 50)


def test_an_interrupt_anywhere_in_an_update_arrives_and_loses_no_state(python_with_torch: Warm) -> None:
    """Each state is that of before or of after, and training goes on."""
    assert_all_arrive(python_with_torch, "updates", 200 if EVERYTHING else 20)


def assert_all_arrive(python: Warm, what: str, trials: int) -> None:
    done = python.run(str(SUPPORT / "interrupts.py"), what, str(trials), timeout=250)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.startswith(f"{trials} trials at ")


@pytest.fixture(autouse=True)
def python_handles_interrupts() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells have it for jobs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
