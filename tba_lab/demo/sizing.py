"""Measures what :mod:`tba_lab.demo.fit` needs: a step of a narrow layer, then of wider ones; room."""

from __future__ import annotations

import dataclasses
import shutil
import time
from typing import TYPE_CHECKING, Any

import torch

from tba_lab.demo.fit import MEMORY_SHARE, Fit, Limits, Probe, Wish, check_room, fit
from tba_lab.demo.race import Entrant, Watch, race
from tba_lab.gpt import GptShape, build_gpt, gpt_loss, model_flops, random_batch
from tba_lab.megatron_cpu import single_process, training_device
from tba_offload.device.available import available_bytes
from tba_offload.device.malloc import FAST_ALLOCATOR, keep_freed_pages
from tba_offload.device.streams import device_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

WIDTH_SECONDS = 3.0
"""Seconds for the steps of one width; a width of which one step is expected to take longer is left out."""

_STEPS = 4
"""Steps of each width at most. The first allocates; of the others the fastest counts, since whatever else the
machine does makes steps longer and never shorter."""


def fitted(
    wish: Wish,
    directories: Sequence[Path],
    *,
    seconds: float,
    threads: int | None,
    watch: Watch,
) -> Fit:
    """Return the largest job that fits this machine.

    Args:
        wish: What the user gave.
        directories: Where offloaded bytes go; they need not exist yet.
        seconds: What all steps together may take.
        threads: Compute threads of each process; ``None`` for PyTorch's own choice.
        watch: Told how far it is.

    Raises:
        ConfigError: The wish makes no model.
        DoesNotFitError: It cannot fit.
    """
    probes = [] if wish.is_complete else _probe(wish, threads, watch)
    memory, disk = available_bytes(training_device()), min(map(free_disk_bytes, directories))
    limits = Limits(seconds, int(MEMORY_SHARE * memory), int(MEMORY_SHARE * disk))
    found = fit(wish.jobs(), limits, probes)
    check_room(found.job, Limits(seconds, memory, disk))
    return found


def free_disk_bytes(directory: Path) -> int:
    """Room on the drive of a directory, or of the one that it is going to be made in."""
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free


def _probe(wish: Wish, threads: int | None, watch: Watch) -> list[Probe]:
    """In a process of its own, in the allocator setting of the training."""
    arguments = {"shapes": wish.probe_shapes(), "batch_size": min(wish.batch_sizes), "threads": threads}
    watch.phase("measuring steps of small models, to fit the job to this machine")
    (found,) = race({"sizing": Entrant(Sizing, arguments, FAST_ALLOCATOR)}, 1, watch=watch)["sizing"]
    return [Probe(**probe) for probe in found["probes"]]


class Sizing:
    """Times steps of models of growing width.

    Args:
        shapes: The models.
        batch_size: Sequences in a step.
        threads: Compute threads; ``None`` for PyTorch's own choice.
    """

    def __init__(self, *, shapes: Sequence[GptShape], batch_size: int, threads: int | None) -> None:
        keep_freed_pages()
        if threads is not None:
            torch.set_num_threads(threads)
        self._shapes, self._batch_size = shapes, batch_size

    def step(self) -> dict[str, Any]:
        """Return the figures of one :class:`Probe` for each width, until one would take too long."""
        probes: list[Probe] = []
        for shape in self._shapes:
            flops = model_flops(shape, self._batch_size)
            if probes and probes[-1].seconds * flops / probes[-1].flops > WIDTH_SECONDS:
                break
            probes.append(time_steps(shape, self._batch_size))
        return {"probes": [dataclasses.asdict(probe) for probe in probes]}

    def close(self) -> None:
        """Nothing is open."""


def time_steps(shape: GptShape, batch_size: int) -> Probe:
    """Return the fastest of a few steps on random tokens."""
    with single_process():
        model = build_gpt(shape, seed=1)
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        times: list[tuple[float, float]] = []
        while len(times) < _STEPS and (not times or sum(map(sum, times)) < WIDTH_SECONDS):
            times.append(_time_step(model, optimizer, random_batch(shape, batch_size=batch_size, seed=1)))
    seconds, optimizer_seconds = map(min, zip(*times, strict=True))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Probe(shape.hidden, model_flops(shape, batch_size), seconds, parameters, optimizer_seconds)


def _time_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> tuple[float, float]:
    """Seconds of forward and backward, and of the update."""
    device = device_of(training_device())
    began = time.perf_counter()
    gpt_loss(model, batch).backward()  # type: ignore[no-untyped-call]
    device.event().synchronize()
    middle = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    device.event().synchronize()
    return middle - began, time.perf_counter() - middle
