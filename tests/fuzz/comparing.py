"""A program plain and with offloading: the same bits, the same errors, and nothing left."""

from __future__ import annotations

import gc
import tempfile
import threading
import time
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from operator import gt
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import tba_offload as tba

from .looping import Training

if TYPE_CHECKING:
    from .choices import Program
    from .looping import History

REFUSALS = (
    tba.ConfigError,
    tba.UnsupportedError,
    tba.RecomputationError,
    tba.SessionError,
    tba.StatesAwayError,
)
"""Errors by which the package says that it does not go together with a program."""

OWN = {
    *("FrozenWeights", "Kept", "LayerHooks", "OptimizerStates", "Packed", "SavedStorage", "Session"),
    *("Slot", "Step"),
}
"""Classes of which nothing is left when a session is closed and its model is gone."""

PATIENCE = 30.0
"""Seconds for threads to end."""


@dataclass(frozen=True)
class Verdict:
    """What became of a program; ``unsteady`` is one whose plain training differs from itself."""

    kind: str
    text: str = ""

    @property
    def is_fault(self) -> bool:
        return self.kind in {"differs", "error", "other error", "left"}

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.text else self.kind


def judge(program: Program) -> Verdict:
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as name:
        warnings.simplefilter("ignore")
        expected, plain_left = trained(program, None)
        before = own_objects()
        directory = Path(name)
        for drive in ("a", "b"):
            (directory / drive).mkdir()
        descriptors = open_files()
        found, left = trained(program, directory)
        verdict = compared(found, expected)
        if verdict.kind == "differs" and trained(program, None)[0].first_difference(expected) is not None:
            return Verdict("unsteady", verdict.text)
        if verdict.is_fault:
            return verdict
        remains = left_over(directory)
        remains += [f"{count} {name}" for name, count in (own_objects() - before).items()]
        if open_files() > descriptors:
            remains.append(f"{open_files() - descriptors} descriptors")
        if any(map(gt, left, plain_left)):  # once more: what is made once in a process is not left each time
            left, plain_left = trained(program, directory)[1], trained(program, None)[1]
        if any(map(gt, left, plain_left)):
            remains.append(f"(count, bytes) of storages: {left} in place of {plain_left}")
        return Verdict("left", ", ".join(remains)) if remains else verdict


def trained(program: Program, directory: Path | None) -> tuple[History, tuple[int, int]]:
    fail_once()
    count, nbytes = alive()
    training = Training(program, directory)
    history = training.run()
    del training
    fail_once()
    count_after, nbytes_after = alive()
    return history, (count_after - count, nbytes_after - nbytes)


def fail_once() -> None:
    """Lets a small backward pass fail. PyTorch keeps the graph of a failed pass until another pass fails."""
    changed = torch.ones(1, requires_grad=True).exp()
    result = changed.exp()
    with torch.no_grad():
        result.zero_()
    with suppress(RuntimeError):
        result.backward()
    gc.collect()  # what that graph held is found by the next collection only


def compared(found: History, expected: History) -> Verdict:
    if difference := found.first_difference(expected):
        return Verdict("differs", difference)
    error, plain = found.failed, expected.failed
    if found.failed_closing is not None:
        return Verdict("error", f"{found.failed_closing} after {error}\n{found.failed_closing.trace}")
    if error is not None and plain is None:
        return Verdict("refused" if issubclass(error.kind, REFUSALS) else "error", f"{error}\n{error.trace}")
    if error is None and plain is not None:
        return Verdict("other error", f"none in place of {plain}")
    if error is None or plain is None:
        return Verdict("same")
    if error.where == plain.where and (
        issubclass(error.kind, plain.kind) or issubclass(error.kind, REFUSALS)
    ):
        return Verdict("same error", str(plain))
    return Verdict("other error", f"{error} in place of {plain}\n{error.trace}")


def alive() -> tuple[int, int]:
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.layout == torch.strided:
            try:
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            except (RuntimeError, NotImplementedError):
                continue
    return len(storages), sum(storages.values())


def own_objects() -> Counter[str]:
    gc.collect()
    kinds = (type(thing) for thing in gc.get_objects())
    ours = (kind for kind in kinds if str(kind.__module__).startswith("tba_offload."))
    return Counter(kind.__name__ for kind in ours if kind.__name__ in OWN)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def left_over(directory: Path) -> list[str]:
    deadline = time.monotonic() + PATIENCE
    while True:
        threads = [each.name for each in threading.enumerate() if each.name.startswith("tba-")]
        if not threads or time.monotonic() > deadline:
            break
        time.sleep(0.005)
    files = (path for path in directory.rglob("*") if path.name not in {"a", "b"})
    return threads + [path.name for path in files if path.suffix != ".jsonl"]
