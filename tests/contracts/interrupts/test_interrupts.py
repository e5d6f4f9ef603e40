"""Ctrl-C: it arrives, wherever it strikes, and leaves nothing behind."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest
from covering import EVERYTHING
from harness import PATIENCE, session_for
from places import SUPPORT, TESTS
from torch import nn

from tba_offload import interrupts
from tba_offload.errors import SessionError

if TYPE_CHECKING:
    from warm import Warm


class Owner:
    """Stands for a step."""


OWNER = Owner()


def test_an_interrupt_anywhere_in_a_step_arrives_and_leaves_nothing(python_with_torch: Warm) -> None:
    """After each interrupted step the next one gives the same bits, and all books are at zero."""
    assert_all_arrive(python_with_torch, "interrupts.py", 200 if EVERYTHING else 50)


def test_an_interrupt_anywhere_in_an_update_arrives_and_loses_no_state(python_with_torch: Warm) -> None:
    """Each state is that of before or of after, and training goes on."""
    assert_all_arrive(python_with_torch, "state_interrupts.py", 200 if EVERYTHING else 20)


def assert_all_arrive(python: Warm, program: str, trials: int) -> None:
    done = python.run(str(SUPPORT / program), str(trials), "0", timeout=250)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.startswith(f"{trials} trials at ")


@pytest.fixture(autouse=True)
def python_handles_interrupts() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells have it for jobs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_shield_leaves_a_handler_of_the_program_alone() -> None:
    def mine(*_: object) -> None:
        pass

    signal.signal(signal.SIGINT, mine)
    try:
        assert not interrupts.put_up(OWNER)
        interrupts.take_down(OWNER)
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_up() -> bool:
    return signal.getsignal(signal.SIGINT) is not signal.default_int_handler


def test_the_shield_stays_until_the_last_owner_takes_it_down() -> None:
    other, lost = Owner(), Owner()
    assert all(map(interrupts.put_up, (OWNER, OWNER, other, lost)))
    interrupts.take_down(OWNER)
    assert is_up()
    interrupts.take_down(other)
    assert is_up()
    del lost
    interrupts.take_down(other)
    assert not is_up()


def test_the_end_of_one_step_leaves_the_shield_to_the_other() -> None:
    models = [nn.Sequential(nn.Linear(4, 4)) for _ in range(2)]
    with (
        session_for(models[0], layers=list(models[0])) as one,
        session_for(models[1], layers=list(models[1])) as two,
    ):
        with one.step():
            with two.step():
                pass
            assert is_up()
            with pytest.raises(SessionError, match="another step of this session"), one.step():
                pass
            assert is_up()
        assert not is_up()


def test_outside_of_the_books_an_interrupt_is_raised_at_once() -> None:
    assert interrupts.put_up(OWNER)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        interrupts.take_down(OWNER)


@interrupts.waits
def wait() -> None:
    signal.raise_signal(signal.SIGINT)


def hang(seconds: float) -> bool:
    """Stands for a function of the books that does not come back."""
    signal.raise_signal(signal.SIGINT)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return True


def test_a_wait_is_ended_at_once_and_what_hangs_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_LEDGERS", (str(TESTS),))
    assert interrupts.put_up(OWNER)
    try:
        with pytest.raises(KeyboardInterrupt):
            wait()
        with pytest.raises(KeyboardInterrupt):
            hang(200.0)
    finally:
        interrupts.take_down(OWNER)


def end_a_step() -> None:
    """Stands for the end of a step, into which an interrupt falls."""
    signal.raise_signal(signal.SIGINT)
    interrupts.take_down(OWNER)


def change_books() -> bool:
    """Stands for a change of the books that an interrupt must not cut short."""
    signal.raise_signal(signal.SIGINT)
    return True


def test_an_interrupt_at_the_end_of_a_step_takes_nothing_from_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interrupts, "_LEDGERS", (str(TESTS),))
    monkeypatch.setattr(interrupts, "AT_MOST", 0.1)
    assert interrupts.put_up(OWNER)
    with pytest.raises(KeyboardInterrupt):
        end_a_step()
        time.sleep(PATIENCE)
    time.sleep(2 * interrupts.AT_MOST)
    assert interrupts.put_up(OWNER)
    changed = False
    try:
        with pytest.raises(KeyboardInterrupt):
            changed = change_books()
            wait_for_interrupt()
    finally:
        interrupts.take_down(OWNER)
    assert changed


@interrupts.waits
def wait_for_interrupt() -> None:
    time.sleep(PATIENCE)
