"""Ctrl-C at chosen points of a step or an update: a program, as an interrupt must not hit the test runner.

A signal is handled between two operations of the main thread: at the start of a Python function and after a
call. Those points are counted in one step, and each trial interrupts another one of them.
"""

from __future__ import annotations

import gc
import random
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from unittest import mock

import torch
from harness import KIB, PATIENCE, Drive, assert_all_given_back, session_for, used_bytes
from models import same_bits
from optimizers import Training, pair, policy, train
from torch import Tensor, nn

import tba_offload as tba
from tba_offload.states import optimizer
from tba_offload.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from tba_offload.session import Session
    from tba_offload.store.multi import MultiStore

PACKAGE = str(Path(tba.__file__).parent)
WHERE = tuple(f"{PACKAGE}/{part}" for part in ("transfer/", "capture/", "recompute/", "store/", "device/"))
OF_STATES = tuple(f"{PACKAGE}/{part}" for part in ("states/", "store/", "device/"))


class Aim:
    """Counts the points of a block where a signal may be handled, and sends one at a chosen point."""

    def __init__(self, at: int | None = None, *, where: tuple[str, ...] = WHERE) -> None:
        self.at = at
        self.count = 0
        self.struck: str | None = None
        self._where = where

    def __enter__(self) -> Self:
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in {"call", "c_return"} or not frame.f_code.co_filename.startswith(self._where):
            return
        self.count += 1
        if self.count == self.at:
            self.struck = (
                f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name} {event}"
            )
            signal.raise_signal(signal.SIGINT)


class Block(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.up(x).chunk(3, -1)
        return x + self.down(a.tanh() * b.sigmoid() * c)


def forward_backward(model: nn.Module, session: Session | None) -> list[Tensor]:
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


def steps(trials: int, chance: random.Random) -> bool:
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

        def one() -> str | None:
            drive.writes.seconds = drive.reads.seconds = chance.choice([0.0, 0.0, 0.0005])
            return trial(model, session, chance.randint(1, aim.count), expected)

        return is_wrong(trials, one, aim.count)


# ---- updates whose states are away ---------------------------------------------------------------


def trial_of_update(place: Path, at: int) -> tuple[str | None, int]:
    """Two updates, one that is interrupted, and two more; what was wrong, and how many points there were."""
    found, expected = pair("adamw")
    aim, stores = Aim(at, where=OF_STATES), []

    def opened(*arguments: Any, **settings: Any) -> MultiStore:
        stores.append(open_store(*arguments, **settings))
        return stores[-1]

    with mock.patch.object(optimizer, "open_store", opened):
        states = tba.offload_optimizer(found.optimizer, policy(place), model=found.model)
    with states:
        train(found, expected, 0, 1)
        try:
            wrong = interrupted_update(found, expected, aim, stores[0])
        except Exception as error:  # noqa: BLE001 - whatever it is, it is returned as what went wrong
            wrong = repr(error)
    return None if wrong is None else f"{aim.struck}: {wrong}", aim.count


def interrupted_update(found: Training, expected: Training, aim: Aim, store: MultiStore) -> str | None:
    used = used_bytes(store)
    before = values(expected)
    expected.step(2)
    after = values(expected)
    try:
        with aim:
            found.step(2)
        if aim.struck is not None:
            linger()
            return "the interrupt was swallowed"
    except KeyboardInterrupt:
        pass
    for name, value in values(found).items():
        # Adam changes a parameter, and its other moment, by several operations.
        if name.startswith("exp_avg of") and not is_of_either(value, before[name], after[name]):
            return f"{name} is neither that of before nor that of after"
    for seed in (3, 4):
        found.step(seed)
    left = used_bytes(store)
    return None if left == used else f"{left} bytes of the store are in use, not {used}"


def values(training: Training) -> dict[str, Tensor]:
    found = {name: parameter.detach().clone() for name, parameter in training.model.named_parameters()}
    for number, state in training.optimizer.state_dict()["state"].items():
        found.update({f"{key} of parameter {number}": value.clone() for key, value in state.items()})
    return found


def is_of_either(found: Tensor, before: Tensor, after: Tensor) -> bool:
    """Whether each element is that of before or that of after: a large tensor is updated in slices."""
    bits, old, new = (each.view(torch.int32) for each in (found, before, after))
    return bool(((bits == old) | (bits == new)).all())


def updates(trials: int, chance: random.Random) -> bool:
    with tempfile.TemporaryDirectory() as place:
        _, points = trial_of_update(Path(place), sys.maxsize)
        return is_wrong(trials, lambda: trial_of_update(Path(place), chance.randint(1, points))[0], points)


def is_wrong(trials: int, one: Callable[[], str | None], points: int) -> bool:
    failures = [failure for _ in range(trials) if (failure := one()) is not None]
    sys.stdout.writelines(f"{failure}\n" for failure in failures)
    sys.stdout.write(f"{trials} trials at {points} points, {len(failures)} wrong\n")
    return bool(failures)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    kind = {"steps": steps, "updates": updates}[sys.argv[1]]
    sys.exit(kind(int(sys.argv[2]), random.Random(0)))
