"""Ctrl-C at chosen points of an update whose states are away; run as a program, as ``interrupts.py``."""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from interrupts import PACKAGE, Aim, linger, tell_of
from optimizers import Training, pair, policy

import tba_offload as tba
from tba_offload.states import optimizer
from tba_offload.store import open_store

if TYPE_CHECKING:
    from torch import Tensor

    from tba_offload.store.base import ActivationStore

WHERE = tuple(f"{PACKAGE}/{part}" for part in ("states/", "store/", "device/"))


class Trial:
    """Two updates, one that is interrupted, and two more.

    Args:
        place: Where the states go.
        at: The point of the interrupt.
    """

    def __init__(self, place: Path, at: int) -> None:
        self._found, self._expected = pair("adamw")
        self._policy = policy(place)
        self._aim = Aim(at, where=WHERE)
        self._stores: list[ActivationStore] = []

    @property
    def points(self) -> int:
        """How many points there were before the interrupt."""
        return self._aim.count

    def run(self) -> str | None:
        """What was wrong."""
        with mock.patch.object(optimizer, "open_store", self._open):
            states = tba.offload_optimizer(self._found.optimizer, self._policy, model=self._found.model)
        with states:
            for seed in range(2):
                self._found.step(seed)
                self._expected.step(seed)
            try:
                wrong = self._interrupted()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is returned as what went wrong
                wrong = repr(error)
        return None if wrong is None else f"{self._aim.struck}: {wrong}"

    def _interrupted(self) -> str | None:
        used = self._stores[0].used_bytes
        before = values(self._expected)
        self._expected.step(2)
        after = values(self._expected)
        try:
            with self._aim:
                self._found.step(2)
            if self._aim.struck is not None:
                linger()
                return "the interrupt was swallowed"
        except KeyboardInterrupt:
            pass
        for name, found in values(self._found).items():
            # Adam changes a parameter, and its other moment, by several operations.
            if name.startswith("exp_avg of") and not is_of_either(found, before[name], after[name]):
                return f"{name} is neither that of before nor that of after"
        for seed in (3, 4):
            self._found.step(seed)
        left = self._stores[0].used_bytes
        return None if left == used else f"{left} bytes of the store are in use, not {used}"

    def _open(self, *arguments: Any, **settings: Any) -> ActivationStore:
        store = open_store(*arguments, **settings)
        self._stores.append(store)
        return store


def values(training: Training) -> dict[str, Tensor]:
    """Copies of all parameters and states, by names."""
    found = {name: parameter.detach().clone() for name, parameter in training.model.named_parameters()}
    for number, state in training.optimizer.state_dict()["state"].items():
        found.update({f"{key} of parameter {number}": value.clone() for key, value in state.items()})
    return found


def is_of_either(found: Tensor, before: Tensor, after: Tensor) -> bool:
    """Whether each element is that of before or that of after: a large tensor is updated in slices."""
    bits, old, new = (each.view(torch.int32) for each in (found, before, after))
    return bool(((bits == old) | (bits == new)).all())


def main(trials: int, seed: int) -> int:
    """Prints what went wrong, a line each."""
    torch.set_num_threads(1)
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        whole = Trial(Path(place), sys.maxsize)
        whole.run()
        return tell_of(
            trials, lambda _: Trial(Path(place), chance.randint(1, whole.points)).run(), whole.points
        )


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
