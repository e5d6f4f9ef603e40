"""Ctrl-C at chosen points of a step; run as a program, because an interrupt must not hit the test runner.

A signal is handled between two operations of the main thread: at the start of a Python function and after a
call. Those points are counted in one step, and each trial interrupts another one of them.
"""

from __future__ import annotations

import gc
import random
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from harness import KIB, PATIENCE, Drive, assert_all_given_back, session_for
from models import same_bits
from torch import Tensor, nn

import tba_offload

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from types import CodeType, FrameType

    from tba_offload.session import Session

PACKAGE = str(Path(tba_offload.__file__).parent)
WHERE = tuple(f"{PACKAGE}/{part}" for part in ("transfer/", "capture/", "recompute/", "store/", "device/"))


def _press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


class Aim:
    """Counts the points of a block at which a signal may be handled, and sends one at a chosen point.

    Args:
        at: The number of that point; ``None`` to count only.
        within: Functions of which, and of what they call, the points are; none for all.
        strike: What happens there.
        where: Folders whose code has the points.
    """

    def __init__(
        self,
        at: int | None = None,
        *,
        within: Collection[CodeType] = (),
        strike: Callable[[], object] = _press_ctrl_c,
        where: tuple[str, ...] = WHERE,
    ) -> None:
        self.at = at
        self.count = 0
        self.struck: str | None = None
        self._within = within
        self._strike = strike
        self._where = where
        self._outermost: FrameType | None = None

    def __enter__(self) -> Self:
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self._outermost = None  # it knows its callers, and what they hold

    def _look(self, frame: FrameType, event: str, _: Any) -> None:
        if self._within and not self._is_within(frame, event):
            return
        if event not in {"call", "c_return"} or not frame.f_code.co_filename.startswith(self._where):
            return
        self.count += 1
        if self.count == self.at:
            self.struck = (
                f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name} {event}"
            )
            self._strike()

    def _is_within(self, frame: FrameType, event: str) -> bool:
        if self._outermost is None and event == "call" and frame.f_code in self._within:
            self._outermost = frame
        elif event == "return" and frame is self._outermost:
            self._outermost = None
        return self._outermost is not None


class Block(nn.Module):
    """A block that saves several views of one storage."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.up(x).chunk(3, -1)
        return x + self.down(a.tanh() * b.sigmoid() * c)


def forward_backward(model: nn.Module, session: Session | None) -> list[Tensor]:
    """One step; the gradients."""
    model.zero_grad()
    x = torch.linspace(-1, 1, 64 * 32).view(64, 32)
    if session is None:
        model(x).pow(2).mean().backward()
    else:
        with session.step():
            model(x).pow(2).mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def linger() -> None:
    """Waits for an interrupt that was put off for a moment.

    In short sleeps: one that comes between the last operation of Python and the sleep does not end it.
    """
    for _ in range(int(10 * PATIENCE)):
        time.sleep(0.1)


def trial(model: nn.Module, session: Session, at: int, expected: list[Tensor]) -> str | None:
    """One interrupted step, and one that must be as if nothing had been; what was wrong."""
    arrived, aim = False, Aim(at)
    try:
        with aim:
            forward_backward(model, session)
        if aim.struck is not None:
            linger()
    except KeyboardInterrupt:
        arrived = True
    if aim.struck is None:
        return None  # this step had fewer points
    if not arrived:
        return f"{aim.struck}: the interrupt was swallowed"
    try:
        # Two, because PyTorch keeps the graph of a step that failed in a parameter's hook until the next.
        found = [forward_backward(model, session) for _ in range(2)][-1]
    except Exception as error:  # noqa: BLE001 - whatever it is, it is returned as what went wrong
        return f"{aim.struck}: the next step: {error!r}"
    if not all(same_bits(a, b) for a, b in zip(found, expected, strict=True)):
        return f"{aim.struck}: other bits"
    gc.collect()
    try:
        assert_all_given_back(session)
    except AssertionError as error:
        return f"{aim.struck}: {error}"
    window = session.offloader.window
    left = (window.in_flight, window.read_ahead, window.settled)
    if any(left):
        return f"{aim.struck}: in flight, read ahead, settled are {left}"
    return None


def main(trials: int, seed: int) -> int:
    """Prints what went wrong, a line each."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chance = random.Random(seed)
    drive = Drive()
    model = nn.Sequential(*(Block(i) for i in range(3)))
    expected = forward_backward(model, None)
    with session_for(model, layers=list(model), drive=drive, in_flight=40 * KIB) as session:
        for _ in range(3):
            forward_backward(model, session)
        with Aim() as aim:
            forward_backward(model, session)
        gc.collect()
        gc.freeze()  # or each collection would look at all of PyTorch

        def one(_: int) -> str | None:
            drive.writes.seconds = drive.reads.seconds = chance.choice([0.0, 0.0, 0.0005])
            return trial(model, session, chance.randint(1, aim.count), expected)

        return tell_of(trials, one, aim.count)


def tell_of(trials: int, one: Callable[[int], str | None], points: int) -> int:
    """Runs trials and prints what went wrong, a line each; the exit status.

    Args:
        trials: How many.
        one: Runs the trial of a number, from 0; what was wrong.
        points: How many points there are to strike at.
    """
    failures = 0
    for failure in map(one, range(trials)):
        if failure is not None:
            failures += 1
            sys.stdout.write(f"{failure}\n")
    sys.stdout.write(f"{trials} trials at {points} points, {failures} wrong\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
