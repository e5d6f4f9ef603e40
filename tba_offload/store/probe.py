"""How fast a store really is, and by that the choice between the two ways from a GPU to a drive.

A drive takes the bytes of a GPU through pinned host memory (:mod:`tba_offload.store.file`) or by GPUDirect
Storage (:mod:`tba_offload.store.gds`). Which is faster depends on the drive, the file system, the driver and
where in the machine GPU and drive sit, and no library tells it beforehand. So both are tried.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from tba_offload.config.store import StoreOptions
from tba_offload.device.ranges import ByteRange, aligned_range
from tba_offload.errors import HangingError, MissingDependencyError, StoreError
from tba_offload.store.extents import BLOCK, round_up
from tba_offload.store.file import FileStore
from tba_offload.store.gds import GdsStore, import_kvikio
from tba_offload.store.hanging import opened

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tba_offload.device import Device
    from tba_offload.store.base import ActivationStore, Extent, IoFuture
    from tba_offload.store.engine import QueuedStore

_Key = TypeVar("_Key")

EXTENT_BYTES = 16 << 20
"""Bytes of one activation of a large layer."""

EXTENTS = 2
"""Extents of a round in each direction."""

_BUSY_SECONDS = 0.1
"""Seconds of work that the device has queued when two ways are compared."""

_ROUNDS = 3
_ENOUGH_SECONDS = 1.0
TRANSFER_SECONDS = 60.0
"""Seconds that a drive is waited for while it is tried."""


class Rates(NamedTuple):
    """Bytes a second of a store.

    Attributes:
        write: To it.
        read: From it.
        both: To it and from it at once, added.
    """

    write: float
    read: float
    both: float

    @property
    def most(self) -> float:
        """The most that it moves in whatever direction."""
        return max(self)


class Probe:
    """Moves bytes of a device through a store as the offloader does, and looks at the clock.

    The random generators of PyTorch are left as they are.

    Args:
        store: The store; it is left as empty as it was.
        device: The device that the bytes lie on.
        extent_bytes: Size of an extent.
        extents: How many are moved at once in each direction.
        transfer_seconds: Seconds that a transfer may take; ``None`` for what suits every drive.
    """

    def __init__(
        self,
        store: ActivationStore,
        device: Device,
        *,
        extent_bytes: int,
        extents: int,
        transfer_seconds: float | None = None,
    ) -> None:
        self._store, self._device, self._count = store, device, extents
        self._transfer_seconds = TRANSFER_SECONDS if transfer_seconds is None else transfer_seconds
        self._source = random_bytes(extent_bytes, device)
        self._targets = [
            aligned_range(extent_bytes, self._source.address, store.alignment, device) for _ in range(extents)
        ]
        self._full: list[Extent] = []

    def write(self) -> float:
        """Write; bytes a second."""
        return self._timed(writes=True, reads=False)

    def read(self) -> float:
        """Read what was written last; bytes a second."""
        return self._timed(writes=False, reads=True)

    def both(self, busy_seconds: float = 0.0) -> float:
        """Read what was written last while as much is written; bytes a second of both together.

        Args:
            busy_seconds: For how long the device has work meanwhile.
        """
        return self._timed(writes=True, reads=True, busy_seconds=busy_seconds)

    def done(self) -> None:
        """Give the extents back."""
        while self._full:
            self._store.release(self._full.pop())

    def _timed(self, *, writes: bool, reads: bool, busy_seconds: float = 0.0) -> float:
        after = self._device.event()
        after.synchronize()
        if busy_seconds:
            self._device.occupy(busy_seconds)
        written: list[Extent] = []
        futures: list[IoFuture] = []
        began = time.perf_counter()
        try:
            for number in range(self._count):
                if writes:
                    written.append(self._store.reserve(self._source.nbytes, self._source.address))
                    futures.append(self._store.write(written[-1], self._source, after))
                if reads:
                    target = self._targets[number]
                    futures.append(self._store.read(self._full[number], target, after, padded=True))
            for future in futures:
                future.wait(self._transfer_seconds)
            seconds = time.perf_counter() - began
        except BaseException as error:
            for future in futures:
                future.cancel()
            if isinstance(error, StoreError):
                self._undo(written, futures)
            raise
        if writes:
            self.done()
            self._full = written
        return len(futures) * self._source.nbytes / seconds

    def _undo(self, written: list[Extent], futures: list[IoFuture]) -> None:
        """Give all extents back when some transfers have failed and others may still run."""
        for future in futures:
            with suppress(StoreError):
                future.wait(self._transfer_seconds)
        self._full += written
        self.done()


def random_bytes(nbytes: int, device: Device) -> ByteRange:
    """Bytes on a device that no drive can compress, of a generator of their own."""
    where = device.torch_device
    generator = torch.Generator(where).manual_seed(0)
    words = torch.randint(-(2**63), 2**63 - 1, (-(-nbytes // 8),), generator=generator, device=where)
    return ByteRange.of(words.view(torch.uint8)[:nbytes])


def measure(
    store: ActivationStore, device: Device, *, extent_bytes: int | None = None, extents: int = EXTENTS
) -> Rates:
    """Return what a store moves; the best of a few rounds.

    The first round does not count: in it the file grows, memory is pinned and drivers start.

    Args:
        store: The store; it is left as empty as it was.
        device: The device that the bytes lie on.
        extent_bytes: Size of an extent; by default :data:`EXTENT_BYTES`.
        extents: How many are moved at once in each direction.

    Raises:
        StoreError: A transfer failed, or there is no room.
        TimeoutError: A transfer hangs; the store cannot be closed then, but given up.
    """
    probe = Probe(store, device, extent_bytes=extent_bytes or EXTENT_BYTES, extents=extents)
    probe.write()
    found: list[tuple[float, float, float]] = []
    began = time.perf_counter()
    while len(found) < _ROUNDS and (not found or time.perf_counter() - began < _ENOUGH_SECONDS):
        found.append((probe.write(), probe.read(), probe.both()))
    probe.done()
    store.take_loads()
    return Rates(*map(max, zip(*found, strict=True)))


class Choice(NamedTuple):
    """Which kind of store a drive gets, and why.

    Attributes:
        kind: "gds" or "file".
        why: In words.
        rates: What each kind moved in both directions at once, bytes a second; empty if nothing was measured.
    """

    kind: str
    why: str
    rates: dict[str, float]

    def as_json(self) -> dict[str, object]:
        """Return what the run log says of it."""
        return {"why": self.why, "bytes_per_second": self.rates}


def choose(directory: str | os.PathLike[str], device: Device, options: StoreOptions | None = None) -> Choice:
    """Return the faster kind of store on a drive, by what they move in both directions at once.

    They take turns, and the best round of each counts; both are gone when this returns. The device has work
    meanwhile, as in training. Neither kind waits for it, but a driver might, for copies of its own that are
    ordered with PyTorch's default stream: that would be fast on an idle GPU, slow on a busy one, and is seen
    here. Where GPUDirect Storage cannot be had or hangs, or there is no room to try it, it is the file store.
    Several processes that start at once disturb each other's measurements.

    Args:
        directory: A directory on the drive.
        device: The device that activations lie on.
        options: Of the store that is going to be opened there.

    Raises:
        HangingError: The drive does not answer when a file is opened there.
    """
    if not device.pins_memory:
        return Choice("file", "activations lie in host memory, which drives reach directly", {})
    options = options or StoreOptions()
    if not has_room(options, EXTENTS):
        return Choice(
            "file", f"a capacity of {options.capacity} bytes has no room to measure the other way", {}
        )
    options = for_trial(options, EXTENTS)
    transfer_seconds = options.stall_seconds or TRANSFER_SECONDS
    place, hangs = os.fspath(directory), True
    try:
        import_kvikio()
        with on_trial(FileStore, place, device, options, transfer_seconds) as file:
            hangs = False
            with on_trial(GdsStore, place, device, options, transfer_seconds) as direct:
                rates = in_turn({"file": file, "gds": direct}, device, transfer_seconds)
                path = direct.description["path"]
    except MissingDependencyError as error:
        return Choice("file", f"GPUDirect Storage needs {error.package}, which is not installed", {})
    except TimeoutError:
        return Choice(
            "file",
            f"a transfer of {EXTENT_BYTES} bytes had not ended after {transfer_seconds:g} s of measuring",
            {},
        )
    except (StoreError, torch.OutOfMemoryError) as error:
        if hangs and isinstance(error, HangingError):
            raise  # it would be opened in the same way again
        return Choice("file", f"GPUDirect Storage could not be measured: {error}", {})
    moved = f"{rates['gds'] / 1e9:.2f} GB/s through cuFile ({path}), {rates['file'] / 1e9:.2f} GB/s through"
    kind = "gds" if rates["gds"] > rates["file"] else "file"
    return Choice(
        kind, f"it is the faster: {moved} pinned host memory, both directions at once, on a busy GPU", rates
    )


@contextmanager
def on_trial(
    kind: type[FileStore | GdsStore],
    place: str,
    device: Device,
    options: StoreOptions | None,
    limit: float | None,
) -> Iterator[QueuedStore]:
    """Around the trial of a store: opens it as :func:`opened` does, and closes it after whatever exception.

    One with transfers that hang is given up.
    """
    make = partial(kind, place, device=device, options=options)
    store, hangs = opened(make, place, device, limit), False
    try:
        yield store
    except TimeoutError as error:
        hangs = type(error) is TimeoutError and store.pending() > 0
        raise
    finally:
        if hangs:
            store.give_up()
        else:
            store.close()


def has_room(options: StoreOptions, extents: int) -> bool:
    """Whether the capacity has room for two stores that are tried at once.

    Args:
        options: The capacity.
        extents: How many each store writes, and reads, at once.
    """
    return options.capacity is None or options.capacity >= 2 * _room(extents)


def for_trial(options: StoreOptions, extents: int) -> StoreOptions:
    """Return the options of a store that is tried, not used.

    With room for what is moved, and little patience.

    Args:
        options: Of the store that is going to be used.
        extents: How many are moved at once in each direction.
    """
    limit = options.stall_seconds
    return replace(
        options,
        capacity=_room(extents),
        stall_seconds=TRANSFER_SECONDS if limit is None else min(limit, TRANSFER_SECONDS),
    )


def _room(extents: int) -> int:
    return 2 * extents * (round_up(EXTENT_BYTES, BLOCK) + BLOCK)  # an extent may start inside a block


def in_turn(
    stores: Mapping[_Key, ActivationStore], device: Device, transfer_seconds: float, *, extents: int = EXTENTS
) -> dict[_Key, float]:
    """Return what each of some stores moves in both directions at once, the best of a few rounds in turn.

    Args:
        stores: The stores.
        device: The device that the bytes lie on; it has work meanwhile.
        transfer_seconds: Seconds that a transfer may take.
        extents: How many are moved at once in each direction.

    Returns:
        Bytes a second.
    """
    probes = {
        key: Probe(
            store, device, extent_bytes=EXTENT_BYTES, extents=extents, transfer_seconds=transfer_seconds
        )
        for key, store in stores.items()
    }
    for key, probe in probes.items():
        stores[key].prepare(_room(extents))  # so that no round has to wait while a file grows
        probe.write()
    best = dict.fromkeys(probes, 0.0)
    began = time.perf_counter()
    for turn in range(_ROUNDS):
        if turn and time.perf_counter() - began > _ENOUGH_SECONDS:
            break
        for key, probe in probes.items():
            best[key] = max(best[key], probe.both(_BUSY_SECONDS))
    return best
