"""Updates in host memory: the processor updates some sub-groups while the device updates the others.

The states of its sub-groups do not cross the link between device and host: gradients come, and parameters go
instead. Deep Optimizer States does so (arXiv 2410.21316). The optimizer's own code updates both, by its
kernels for a CPU here, which may round differently.
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
"""While one updates, on all cores, the other copies what it has updated and what it is going to."""

_RECENT = 5
"""Updates whose median counts: single ones are as slow as whatever else runs on the host makes them."""

_WORTH_IT = 0.95
"""Of the expected time: what another split must come down to, since a sub-group that changes lanes is written
and read once more. Less would follow the noise of single updates."""


class HostLane:
    """The processor updates some sub-groups, or all, beside the device.

    The states of its sub-groups lie in memory of their own, and are updated in place.

    Args:
        updates: Those of the optimizer.
        kind: The class of the optimizer.
        update: ``device``, ``host`` or ``auto``: who updates.

    Raises:
        UnsupportedError: States live on drives, which both lanes would share.
    """

    def __init__(self, updates: Updates, kind: type[torch.optim.Optimizer], update: str) -> None:
        self._optimizer = updates.optimizer  # not the updates: a cycle
        self._entries, self._groups, self._device = updates.entries, updates.groups, updates.homes.device
        self._states = self._entries.in_host_memory
        self._is_on = update != "device" and self._device.runs_behind  # a CPU's memory is the host's
        if self._is_on and updates.homes.store.kind != "host":
            raise UnsupportedError(
                f"states.update: {update} needs states in host memory, and they live in a store of kind "
                f"{updates.homes.store.kind}; set store.kind to host, or states.update to device"
            )
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
        """Update some sub-groups while the device updates the others.

        Args:
            groups: All that are updated.
            options: Further arguments of the optimizer's ``step``.
            record: Gets what the processor does, and what the update is expected to take.

        Yields:
            Those that are left to the device.

        Raises:
            TransferError: States cannot be read or written.
        """
        if not self._is_on:
            yield groups
            return
        if self._last is not None:  # by now the device is done with that
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
        for group in mine:  # slices get copies of states, which the event comes after
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
        """Leave sub-groups to the device.

        Raises:
            TransferError: Their states cannot be written.
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
        """Take over the states of sub-groups that the processor updates now, and give up those of others."""
        updated = set(groups)
        able = [group for group in self._groups.spread if group in updated and self._is_able(group)]
        able.sort(key=lambda group: group not in self._states)  # what it has stays as far as it may
        chosen = set(able[: self._rates.count([group.nbytes for group in able], len(self._states))])
        self.give_up(updated - chosen)
        for group in chosen - self._states.keys():
            self._states[group] = self._entries.bytes_of(group)[: group.nbytes].cpu()
            self._entries.slots.drop(group)
            group.home.release()

    def _is_able(self, group: SubGroup) -> bool:
        """Whether the parameters that are updated have states, and are such as fused kernels take."""
        return all(self._entries.shown(each) and _is_plain(each, each.grad) for each in group.moving)

    # ---- the way of one sub-group ------------------------------------------------------------------

    def _update(
        self, group: SubGroup, resident: States, options: Mapping[str, Any], after: Event
    ) -> tuple[States, States]:
        """Update a sub-group: copy gradients and parameters here, update, copy parameters back.

        Args:
            group: The sub-group.
            resident: States that do not travel, of its parameters that have gradients.
            options: Further arguments of the optimizer's ``step``.
            after: The device has made these and the gradients when this point is reached.

        Returns:
            The states that travel, as the update got them, and all states that it has left.
        """
        after.synchronize()
        self._times.append(time.perf_counter())
        bound = group.views(self._states[group])
        models = {each: self._groups.model_part(group, each) for each in resident}
        copies = {each: _pinned_like(model) for each, model in models.items()}
        with self._device.on_side_stream():  # another one would wait for all that the device has to do
            states = {each: _on_host(entry) | bound.get(each, {}) for each, entry in resident.items()}
            tensors = {each: states[each].get(MASTER, copy) for each, copy in copies.items()}
            for each, tensor in tensors.items():
                gradient = group.cut(each.grad)
                tensor.grad = _pinned_like(gradient).copy_(gradient, non_blocking=True)
                if tensor is copies[each]:
                    tensor.copy_(models[each], non_blocking=True)
        with self._computing:  # one update at a time has all cores
            self._twin.run(group.number, {tensors[each]: states[each] for each in tensors}, options)
            self._twin.discard()
            for each, copy in copies.items():
                copy.copy_(tensors[each])
        if have_moved(bound, states):
            raise UnsupportedError(
                f"{type(self._optimizer).__name__} makes or drops states in host memory. Load a checkpoint, "
                "and keep states.update at device"
            )
        with self._device.on_side_stream():
            for each, tensor in tensors.items():
                models[each].copy_(copies[each], non_blocking=True)
                if hasattr(self._optimizer, "grad_scale"):  # by which a fused kernel has divided
                    group.cut(each.grad).copy_(tensor.grad, non_blocking=True)
                for key, value in resident[each].items():
                    if isinstance(value, torch.Tensor):
                        states[each][key] = value.copy_(states[each][key])
        for tensor in tensors.values():
            tensor.grad = None  # a master in host memory would keep it
        self._times.append(time.perf_counter())
        return bound, states


# ---- the performance model -----------------------------------------------------------------------


class _Rates:
    """What the lanes take for each byte of states, and how many sub-groups the processor gets.

    An update takes ``max(bytes on the device / its rate, bytes on the host / its rate)``, as Deep Optimizer
    States has it, with rates that hold what host memory and link allow when both work. So each sub-group goes
    to the lane that ends it first. Updates are split in halves until one was timed.

    Args:
        is_auto: Whether both lanes work; else the processor updates all.
    """

    def __init__(self, *, is_auto: bool) -> None:
        self._is_auto = is_auto
        self._lanes: tuple[deque[float], deque[float]] = (deque(maxlen=_RECENT), deque(maxlen=_RECENT))

    def count(self, sizes: Sequence[int], before: int) -> int:
        """Return how many sub-groups the processor updates, the first ones of these.

        Args:
            sizes: Bytes of the states of each.
            before: How many of them it has.
        """
        if not self._is_auto:
            return len(sizes)
        if not all(self._lanes):
            return len(sizes) // 2
        on_host = [0, *accumulate(sizes)]
        seconds = [self.seconds(on_host[-1] - nbytes, nbytes) or 0.0 for nbytes in on_host]
        best, now = min(range(len(seconds)), key=seconds.__getitem__), min(before, len(sizes))
        return best if seconds[best] < _WORTH_IT * seconds[now] else now

    def seconds(self, *nbytes: int) -> float | None:
        """Return the seconds of an update; ``None`` as long as the rate of a lane that works is not known.

        Args:
            nbytes: Bytes of states that the device updates, and that the processor does.
        """
        busy = [(some, rates) for some, rates in zip(nbytes, self._lanes, strict=True) if some]
        if not busy or not all(rates for _, rates in busy):
            return None
        return max(some * statistics.median(rates) for some, rates in busy)

    def learn(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """Note the bytes and the seconds of the lanes of an update."""
        for nbytes, took, rates in zip(sizes, seconds, self._lanes, strict=True):
            if nbytes:
                rates.append(took / nbytes)


# ------------------------------------------------------------------------------------------------


def _is_plain(parameter: torch.Tensor, gradient: torch.Tensor | None) -> bool:
    """Whether a parameter and its gradient are plain tensors of real numbers that lie in memory alike."""
    return (
        type(parameter.data) in (torch.Tensor, AwayMaster)
        and type(gradient) is torch.Tensor
        and gradient.layout == torch.strided
        and (gradient.dtype, gradient.stride()) == (parameter.dtype, parameter.stride())
        and parameter.is_floating_point()
        and is_dense(parameter)
    )


def _pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return pinned memory that is laid out like a tensor; PyTorch keeps it for the next one of its size."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


def _settings_for_host(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of an optimizer for an update in host memory.

    Where the optimizer leaves the implementation to PyTorch, the fused one is taken if there is one: the loop
    that PyTorch chooses for tensors of a CPU goes through memory some ten times.
    """
    settings = _on_host(values)
    if settings.get("fused", False) is None and settings.get("foreach") is None:
        settings["fused"] = True
    return settings


def _on_host(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same, with tensors of a device copied to host memory."""
    return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in values.items()}
