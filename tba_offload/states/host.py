"""Optimizer updates of some sub-groups by the CPU, while the device updates the other sub-groups.

The states of sub-groups that the CPU updates stay in host memory, as in Deep Optimizer States (arXiv
2410.21316). Gradients and parameters are copied to the host, and updated parameters are copied back. CPU and
device both run the optimizer's own code. CPU kernels may round differently.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.errors import UnsupportedError
from tba_offload.states.away import AwayMaster
from tba_offload.states.entries import have_moved
from tba_offload.states.groups import MASTER
from tba_offload.states.parameters import is_dense
from tba_offload.states.twin import Twin

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tba_offload.device import Event
    from tba_offload.states.groups import Entry, SubGroup
    from tba_offload.states.updates import StatesRecord, Updates

    States = Mapping[torch.Tensor, Entry]

_THREADS = 2
"""Number of threads that update sub-groups on the CPU.

With two threads, copies between host and device overlap with updates.
"""

_RECENT = 5
"""Number of recent updates over which the median rate is taken.

Other load on the host may slow down a single update.
"""

_WORTH_IT = 0.95
"""Sub-groups move between device and CPU if the update then takes less than this fraction of its time.

Each move costs one more write and read, and a smaller gain may be noise.
"""


class HostUpdates:
    """Updates of some or all sub-groups on the CPU, in parallel with the device.

    Each sub-group that the CPU updates has its own host memory, in which its states are updated in place.

    Args:
        updates: The updates of the optimizer.
        kind: The class of the optimizer.
        update: The setting ``states.update``: ``'device'``, ``'host'`` or ``'auto'``.

    Raises:
        UnsupportedError: The states are on drives, not in host memory.
    """

    def __init__(self, updates: Updates, kind: type[torch.optim.Optimizer], update: str) -> None:
        self._optimizer = updates.optimizer  # a reference to `updates` would form a cycle
        self._entries, self._groups, self._device = updates.entries, updates.groups, updates.homes.device
        self._states = self._entries.in_host_memory
        self._is_on = update != "device" and self._device.runs_behind  # a CPU's states are in host memory
        if self._is_on and updates.homes.store.kind != "host":
            why = f"states.update: {update} needs store.kind 'host', not '{updates.homes.store.kind}'"
            raise UnsupportedError(f"{why}. Set store.kind to 'host', or states.update to 'device'")
        self._rates = _Rates(is_auto=update == "auto")
        self._twin = Twin(self._optimizer, kind, _settings_for_host)
        self._computing = threading.Lock()
        self._pool = ThreadPoolExecutor(_THREADS, "tba-update", self._device.bind_thread)
        self._times: list[float] = []
        self._last: tuple[list[Any], list[int], float] | None = None

    @contextmanager
    def updating(
        self, groups: Sequence[SubGroup], options: Mapping[str, Any], record: StatesRecord
    ) -> Iterator[Sequence[SubGroup]]:
        """Update some sub-groups on the CPU while the device updates the other sub-groups.

        Args:
            groups: All sub-groups to update.
            options: Further arguments of the optimizer's ``step``.
            record: The record of the update, which gets the number of sub-groups for the CPU and the
                predicted time.

        Yields:
            The sub-groups for the device.

        Raises:
            TransferError: States cannot be read or written.
        """
        if not self._is_on:
            yield groups
            return
        if self._last is not None:  # the device has already finished the last update
            marks, sizes, on_host = self._last
            began, ended = self._device.seconds(marks)
            self._rates.learn(sizes, (ended - began, on_host))
        self._choose(groups)
        mine = [group for group in groups if group in self._states]
        rest = [group for group in groups if group not in self._states]
        sizes = [sum(group.nbytes for group in some) for some in (rest, mine)]
        record.on_host, record.predicted_seconds = len(mine), self._rates.seconds(*sizes)
        record.sub_groups += len(mine)
        self._last, marks = None, [self._device.mark()]
        self._times.clear()
        jobs = {}
        for group in mine:  # the event is recorded after the copies of states for slices
            resident = {each: self._entries.resident(group, each) for each in group.moving}
            jobs[group] = self._pool.submit(self._update, group, resident, options, self._device.event())
        try:
            yield rest
            marks.append(self._device.mark())
            for job in jobs.values():
                job.result()
        finally:
            wait([job for job in jobs.values() if not job.cancel()])
            for group, job in jobs.items():
                if not job.cancelled() and job.exception() is None:
                    self._entries.take(group, *job.result())
        if mine:
            self._last = marks, sizes, max(self._times) - min(self._times)

    def give_up(self, groups: Iterable[SubGroup]) -> None:
        """Write the states of sub-groups from host memory to the store, so that the device updates them.

        Raises:
            TransferError: The states cannot be written.
        """
        for group in self._states.keys() & set(groups):
            slot = self._entries.slots.take(group)
            slot.lend()[: group.nbytes].copy_(self._states.pop(group))
            self._entries.slots.hold(group, slot)
            slot.write()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    # ---- which sub-groups --------------------------------------------------------------------------

    def _choose(self, groups: Sequence[SubGroup]) -> None:
        updated = set(groups)
        able = [group for group in self._groups.spread if group in updated and self._is_able(group)]
        # Prefer sub-groups whose states are already in host memory.
        able.sort(key=lambda group: group not in self._states)
        chosen = set(able[: self._rates.count([group.nbytes for group in able], len(self._states))])
        self.give_up(updated - chosen)
        for group in chosen - self._states.keys():
            self._states[group] = self._entries.bytes_of(group)[: group.nbytes].cpu()
            self._entries.slots.drop(group)
            group.home.release()

    def _is_able(self, group: SubGroup) -> bool:
        return all(self._entries.shown(each) and _is_plain(each, each.grad) for each in group.moving)

    # ---- one sub-group -----------------------------------------------------------------------------

    def _update(
        self, group: SubGroup, resident: States, options: Mapping[str, Any], after: Event
    ) -> tuple[States, States]:
        after.synchronize()
        self._times.append(time.perf_counter())
        bound = group.views(self._states[group])
        models = {each: self._groups.model_part(group, each) for each in resident}
        copies = {each: _pinned_like(model) for each, model in models.items()}
        with self._device.on_side_stream():  # not on a stream that waits for all queued work
            states = {each: _on_host(entry) | bound.get(each, {}) for each, entry in resident.items()}
            tensors = {each: states[each].get(MASTER, copy) for each, copy in copies.items()}
            for each, tensor in tensors.items():
                gradient = group.cut(each.grad)
                tensor.grad = _pinned_like(gradient).copy_(gradient, non_blocking=True)
                if tensor is copies[each]:
                    tensor.copy_(models[each], non_blocking=True)
        with self._computing:  # each update uses all cores, so only one update may run
            self._twin.run(group.number, {tensors[each]: states[each] for each in tensors}, options)
            self._twin.discard()
            for each, copy in copies.items():
                copy.copy_(tensors[each])
        if have_moved(bound, states):
            why = f"{type(self._optimizer).__name__} added or removed states when it ran on the CPU"
            raise UnsupportedError(f"{why}. Load a checkpoint, and set states.update to 'device'")
        with self._device.on_side_stream():
            for each, tensor in tensors.items():
                models[each].copy_(copies[each], non_blocking=True)
                if hasattr(self._optimizer, "grad_scale"):  # a fused kernel has applied grad_scale
                    group.cut(each.grad).copy_(tensor.grad, non_blocking=True)
                for key, value in resident[each].items():
                    if isinstance(value, torch.Tensor):
                        states[each][key] = value.copy_(states[each][key])
        for tensor in tensors.values():
            tensor.grad = None  # a master in host memory would keep the gradient alive
        self._times.append(time.perf_counter())
        return bound, states


# ---- the performance model -----------------------------------------------------------------------


class _Rates:
    """Performance model that splits the sub-groups between device and CPU.

    The time of an update is the larger of the device's time and the CPU's time, as in Deep Optimizer States.
    Each time is the bytes of the updated states divided by a rate. The rates are measured while device and
    CPU work at the same time and share the bandwidth of host memory. Before the first measured update, the
    CPU gets half of the sub-groups.

    Args:
        is_auto: Whether device and CPU both update sub-groups. If False, the CPU updates all sub-groups.
    """

    def __init__(self, *, is_auto: bool) -> None:
        self._is_auto = is_auto
        self._sides: tuple[deque[float], deque[float]] = (deque(maxlen=_RECENT), deque(maxlen=_RECENT))

    def count(self, sizes: Sequence[int], before: int) -> int:
        """Return the number of sub-groups for the CPU. The current number is ``before``."""
        if not self._is_auto:
            return len(sizes)
        if not all(self._sides):
            return len(sizes) // 2
        on_host = [0, *accumulate(sizes)]
        seconds = [self.seconds(on_host[-1] - nbytes, nbytes) or 0.0 for nbytes in on_host]
        best, now = min(range(len(seconds)), key=seconds.__getitem__), min(before, len(sizes))
        return best if seconds[best] < _WORTH_IT * seconds[now] else now

    def seconds(self, *nbytes: int) -> float | None:
        """Return the expected seconds of an update, from bytes on device and CPU; ``None`` if unknown."""
        busy = [(some, rates) for some, rates in zip(nbytes, self._sides, strict=True) if some]
        if not busy or not all(rates for _, rates in busy):
            return None
        return max(some * statistics.median(rates) for some, rates in busy)

    def learn(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        for nbytes, took, rates in zip(sizes, seconds, self._sides, strict=True):
            if nbytes:
                rates.append(took / nbytes)


# ------------------------------------------------------------------------------------------------


def _is_plain(parameter: torch.Tensor, gradient: torch.Tensor | None) -> bool:
    return (
        type(parameter.data) in (torch.Tensor, AwayMaster)
        and type(gradient) is torch.Tensor
        and gradient.layout == torch.strided
        and (gradient.dtype, gradient.stride()) == (parameter.dtype, parameter.stride())
        and parameter.is_floating_point()
        and is_dense(parameter)
    )


def _pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


def _settings_for_host(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of an optimizer for an update in host memory.

    If the optimizer lets PyTorch choose how to compute the update, use the fused implementation. For CPU
    tensors, PyTorch would choose a loop over the parameters, which reads and writes memory about ten times.
    """
    settings = _on_host(values)
    if settings.get("fused", False) is None and settings.get("foreach") is None:
        settings["fused"] = True
    return settings


def _on_host(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in values.items()}
