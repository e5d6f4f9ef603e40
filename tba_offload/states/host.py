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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tba_offload.errors import UnsupportedError
from tba_offload.states.away import AwayMaster
from tba_offload.states.entries import have_moved
from tba_offload.states.groups import MASTER, side_by_side
from tba_offload.states.parameters import is_dense
from tba_offload.states.twin import Twin
from tba_offload.store.host import HostStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tba_offload.device import Event
    from tba_offload.states.groups import Entry, SubGroup
    from tba_offload.states.updates import StatesRecord, Updates

    States = dict[torch.Tensor, Entry]

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
        self._entries, self._groups, self._homes = updates.entries, updates.groups, updates.homes
        self._states, self._device = self._entries.in_host_memory, self._homes.device
        self._is_on = update != "device" and self._device.runs_behind  # a CPU's memory is the host's
        if self._is_on and self._homes.store.kind != HostStore.kind:
            raise UnsupportedError(
                f"states.update: {update} needs states in host memory, and they live in a store of kind "
                f"{self._homes.store.kind}; set store.kind to host, or states.update to device"
            )
        self._rates = _Rates(is_auto=update == "auto")
        self._twin = Twin(self._optimizer, kind, _settings_for_host)
        self._computing = threading.Lock()
        self._desks = [torch.empty(0, dtype=torch.uint8) for _ in range(_THREADS)]
        self._last: tuple[Any, tuple[int, int], float] | None = None

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
            marks, sizes, host_seconds = self._last
            began, ended = self._device.seconds(marks)
            self._rates.learn(sizes, (ended - began, host_seconds))
            self._last = None
        mine = self._chosen(groups)
        rest = [group for group in groups if group not in self._states]
        on_device, on_host = (sum(group.nbytes for group in some) for some in (rest, mine))
        record.on_host, record.predicted_seconds = len(mine), self._rates.seconds(on_device, on_host)
        record.sub_groups += len(mine)
        resident = [self._resident(group) for group in mine]
        after, began = self._device.event(), self._device.mark()  # the device has made gradients and copies
        with ThreadPoolExecutor(_THREADS, "tba-update", self._device.bind_thread) as pool:
            jobs = {
                group: pool.submit(self._update, group, entries, options, after)
                for group, entries in zip(mine, resident, strict=True)
            }
            try:
                yield rest
                ended, done = self._device.mark(), [job.result() for job in jobs.values()]
            finally:
                pool.shutdown(cancel_futures=True)
                for group, job in jobs.items():
                    if not job.cancelled() and job.exception() is None:
                        self._entries.take(group, job.result().bound, job.result().left)
        if done:
            seconds = max(each.ended for each in done) - min(each.began for each in done)
            self._last = (began, ended), (on_device, on_host), seconds

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

    # ---- which sub-groups --------------------------------------------------------------------------

    def _chosen(self, groups: Sequence[SubGroup]) -> list[SubGroup]:
        """Take over the sub-groups that the processor updates now, and give up the others."""
        updated = set(groups)
        able = [group for group in self._groups.spread if group in updated and self._is_able(group)]
        able.sort(key=lambda group: group not in self._states)  # what it has stays as far as it may
        chosen = set(able[: self._rates.count([group.nbytes for group in able], len(self._states))])
        self.give_up(updated - chosen)
        for group in chosen - self._states.keys():
            self._states[group] = self._entries.bytes_of(group)[: group.nbytes].cpu()
            self._entries.slots.drop(group)
            group.home.release()
        return [group for group in groups if group in chosen]

    def _is_able(self, group: SubGroup) -> bool:
        """Whether the processor can update all parameters of a sub-group, and their states are there."""
        moving = [each for each in group.parameters if each.grad is not None]
        has_states = any(place.key != MASTER for place in group.places) and all(
            map(self._entries.shown, moving)
        )
        return has_states and all(map(_is_plain, moving))

    # ---- the way of one sub-group ------------------------------------------------------------------

    def _resident(self, group: SubGroup) -> States:
        """Return the states that do not travel, of the parameters of a sub-group that are updated."""
        moving = [each for each in group.parameters if each.grad is not None]
        return {each: self._entries.resident(group, each) for each in moving}

    def _update(self, group: SubGroup, resident: States, options: Mapping[str, Any], after: Event) -> _Done:
        """Update a sub-group: read its states, copy gradients here, update, copy parameters back, write.

        Args:
            group: The sub-group.
            resident: States that do not travel, of its parameters that have gradients.
            options: Further arguments of the optimizer's ``step``.
            after: The device has made these and the gradients when this point is reached.
        """
        desk = self._desks.pop()
        try:
            bound = group.views(self._states[group])
            after.synchronize()
            began = time.perf_counter()
            with self._device.on_side_stream():  # another one would wait for all that the device has to do
                before = {each: _on_host(entry) | bound.get(each, {}) for each, entry in resident.items()}
                models = [self._groups.model_part(group, each) for each in resident]
                likes = [*models, *(group.cut(each.grad) for each in resident)]
                starts, end = side_by_side(like.nbytes for like in likes)
                desk = self._device.host_memory(end) if end > desk.numel() else desk
                copies = [_laid(desk[start:], like) for like, start in zip(likes, starts, strict=True)]
                here, gradients = dict(zip(resident, copies, strict=False)), copies[len(models) :]
                for like, copy in zip(likes[len(models) :], gradients, strict=True):
                    copy.copy_(like, non_blocking=True)
                for parameter, like in zip(resident, models, strict=True):
                    if MASTER not in before[parameter]:
                        here[parameter].copy_(like, non_blocking=True)
            with self._computing:  # one update at a time has all cores
                left = self._run(group.number, here, gradients, before, options)
            if have_moved(bound, left):
                raise UnsupportedError(
                    f"{type(self._optimizer).__name__} makes or drops states in host memory. Load a "
                    "checkpoint, and keep states.update at device"
                )
            with self._device.on_side_stream():
                # Gradients too, where a fused kernel has divided them.
                count = len(likes) if hasattr(self._optimizer, "grad_scale") else len(models)
                for like, copy in zip(likes[:count], copies, strict=False):
                    like.copy_(copy, non_blocking=True)
                for parameter, entry in resident.items():
                    for key in entry.keys() & left[parameter].keys():
                        if isinstance(entry[key], torch.Tensor):
                            left[parameter][key] = left[parameter][key].to(entry[key].device)
        finally:
            self._desks.append(desk)
        return _Done(bound, left, began, time.perf_counter())

    def _run(
        self,
        number: int,
        here: Mapping[torch.Tensor, torch.Tensor],
        gradients: Sequence[torch.Tensor],
        before: States,
        options: Mapping[str, Any],
    ) -> States:
        """Run the optimizer's code over parameters and gradients that are here, and return their states."""
        tensors = {each: before[each].get(MASTER, copy) for each, copy in here.items()}
        entries = {
            tensor: {key: value for key, value in before[each].items() if key != MASTER}
            for each, tensor in tensors.items()
        }
        for tensor, gradient in zip(entries, gradients, strict=True):
            tensor.grad = gradient
        try:
            self._twin.run(number, entries, options)
            states = self._twin.states
            left = {each: {**states.get(tensor, entries[tensor])} for each, tensor in tensors.items()}
        finally:
            self._twin.discard()
        for each, tensor in tensors.items():
            if MASTER in before[each]:
                left[each][MASTER] = tensor
                here[each].copy_(tensor)
        return left


class _Done(NamedTuple):
    """An update of the processor: states as it got them and left them, and when, by ``perf_counter``."""

    bound: Mapping[torch.Tensor, Mapping[str, torch.Tensor]]
    left: States
    began: float
    ended: float


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


def _is_plain(parameter: torch.Tensor) -> bool:
    """Whether a parameter and its gradient are plain tensors of real numbers, which fused kernels need."""
    kind, gradient = type(parameter.data), parameter.grad
    return (
        (kind is AwayMaster or (kind is torch.Tensor and is_dense(parameter)))
        and parameter.is_floating_point()
        and type(gradient) is torch.Tensor
        and gradient.layout == torch.strided
    )


def _laid(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the first bytes of memory as a tensor like another one, but dense; it is not filled."""
    stride = like.stride() if is_dense(like) else torch.empty(like.shape, device="meta").stride()
    return memory[: like.nbytes].view(like.dtype).as_strided(like.size(), stride)


def _settings_for_host(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of an optimizer for an update in host memory.

    Where the optimizer leaves the implementation to PyTorch, the fused one is taken if there is one: the loop
    that PyTorch chooses for tensors of a CPU goes through memory some ten times.
    """
    settings = _on_host(values)
    if "fused" in settings and settings["fused"] is None and settings.get("foreach") is None:
        settings["fused"] = True
    return settings


def _on_host(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same, with tensors of a device copied to host memory; also those in tuples, as betas are."""

    def moved(value: Any) -> Any:
        if type(value) is tuple:
            return tuple(map(moved, value))
        is_data = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
        return value.to("cpu") if is_data else value

    return {name: moved(value) for name, value in values.items()}
