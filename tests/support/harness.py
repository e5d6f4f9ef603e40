"""A drive that does what a test tells it to, and sessions that write to it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock

import pytest

import tba_offload as tba
from tba_offload.config import BudgetConfig, OffloadConfig, StoreConfig
from tba_offload.device import Device
from tba_offload.store.host import HostStore
from tba_offload.store.multi import MultiStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import nn

    from tba_offload.config.policy import Rule
    from tba_offload.device import ByteRange
    from tba_offload.session import Session
    from tba_offload.store.base import Extent
    from tba_offload.transfer.offloader import Offloader

Result = TypeVar("Result")

CPU = Device()
KIB = 1 << 10
MIB = 1 << 20
PLACEMENTS = tuple(map(str, tba.Placement))
"""Names of all placements, but for those that tell a share."""

COMPILER_LOOKS = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
"""For tests that compile layers which are given activations: the compiler looks for gradients of those."""

PATIENCE = 120.0
"""Seconds after which a test stops waiting and fails; a busy machine may take tens of them for nothing."""


class Direction:
    """What happens to the writes, the reads or the reservations of a drive.

    Attributes:
        started: How many have begun.
        ended: How many are over, failed or not.
        seconds: How long each takes at least.
        bytes_per_second: How fast the drive is; ``None`` for as fast as it can.
    """

    def __init__(self) -> None:
        self.started = 0
        self.ended = 0
        self.seconds = 0.0
        self.bytes_per_second: float | None = None
        self._make_error: Callable[[], BaseException] | None = None
        self._changed = threading.Condition()
        self._gate = threading.Event()
        self._gate.set()
        self._turn = threading.Lock()

    def hold(self) -> None:
        self._gate.clear()

    def release(self) -> None:
        self._gate.set()

    def fail_with(self, make_error: Callable[[], BaseException]) -> None:
        """Fails all from now on, each with an error of its own: one that is kept keeps what callers hold."""
        self._make_error = make_error

    @contextmanager
    def under_way(self, nbytes: int) -> Iterator[None]:
        with self._changed:
            self.started += 1
            self._changed.notify_all()
        try:
            assert self._gate.wait(PATIENCE)
            self._take_time(nbytes)
            if self._make_error is not None:
                raise self._make_error()
            yield
        finally:
            with self._changed:
                self.ended += 1
                self._changed.notify_all()

    def _take_time(self, nbytes: int) -> None:
        seconds = self.seconds
        if self.bytes_per_second is not None:
            seconds += nbytes / self.bytes_per_second
        if seconds:
            with self._turn:  # one drive does one thing at a time
                time.sleep(seconds)


class Drive:
    def __init__(self) -> None:
        self.reservations = Direction()
        self.writes = Direction()
        self.reads = Direction()

    def release(self) -> None:
        self.writes.release()
        self.reads.release()


class DrivenHostStore(HostStore):
    """Host memory that obeys a drive; small slabs, because tests are small.

    One thread writes and one reads, so that what is behind a held transfer is queued for certain.
    """

    def __init__(self, drive: Drive, **options: Any) -> None:
        self.drive = drive
        super().__init__(device=CPU, slab_bytes=MIB, **options)

    def grow(self, end: int) -> None:
        with self.drive.reservations.under_way(end):
            super().grow(end)

    def write(self, extent: Extent, source: ByteRange) -> None:
        with self.drive.writes.under_way(extent.nbytes):
            super().write(extent, source)

    def read(self, extent: Extent, target: ByteRange) -> None:
        with self.drive.reads.under_way(extent.nbytes):
            super().read(extent, target)


class DrivenStore(MultiStore):
    """A store that lets go on what its drive holds before it closes."""

    def __init__(self, drive: Drive, *, capacity: int | None = None) -> None:
        self.drive = drive
        super().__init__([DrivenHostStore(drive, capacity=capacity)])

    def close(self) -> None:
        self.drive.release()
        super().close()


def config_for(
    *,
    in_flight: int | None = None,
    activation: int | None = None,
    capacity: int | None = None,
    host_capacity: int | None = None,
    order: tuple[str, str] | None = None,
    directory: object = None,
    rules: tuple[Rule, ...] = (),
    **settings: Any,
) -> OffloadConfig:
    """Everything down to 1 KiB is offloaded, to memory unless a directory is given."""
    settings.setdefault("min_tensor_bytes", KIB)
    where: dict[str, Any] = (
        {"kind": "host"} if directory is None else {"kind": "file", "directories": (directory,)}
    )
    return OffloadConfig(
        layers=rules,
        budget=BudgetConfig(in_flight_bytes=in_flight or 0, activation_bytes=activation),
        store=StoreConfig(capacity=capacity, host_capacity=host_capacity, order=order, **where),
        **settings,
    )


def session_for(
    model: nn.Module | list[nn.Module],
    *,
    drive: Drive | None = None,
    store: MultiStore | None = None,
    layers: list[nn.Module] | None = None,
    measure_memory: bool = False,
    **settings: Any,
) -> Session:
    config = config_for(**settings)
    if drive is not None:
        store = DrivenStore(drive, capacity=config.store.capacity)
    if store is None:
        return tba.attach(model, config, layers=layers, measure_memory=measure_memory)
    with mock.patch("tba_offload.session.session.open_store", return_value=store):
        return tba.attach(model, config, layers=layers, measure_memory=measure_memory)


def made(path: Path) -> Path:
    path.mkdir()
    return path


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE:g} s in vain: {what}"
        time.sleep(0.001)


def in_time(work: Callable[[], Result]) -> Result:
    """Does the work in another thread, which may hang without this one; returns or raises what it does."""
    future: Future[Result] = Future()

    def do() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            future.set_exception(error)

    threading.Thread(target=do, daemon=True).start()
    return future.result(PATIENCE)


def quiesce(offloader: Offloader) -> None:
    """Wait until every write has ended, and let the offloader look at them and at dropped handles."""
    offloader.flush()
    for write in list(offloader._writes):
        assert write.wait(PATIENCE), "a write does not end"
    offloader.prefetch(())
    offloader.raise_failures()


def used_bytes(store: MultiStore) -> int:
    return sum(place.extents.used for place in store._places)


def assert_all_given_back(session: Session) -> None:
    """No graph is alive any more: no byte may be in flight and no extent taken."""
    window = session.offloader.window

    def is_idle() -> bool:
        in_time(lambda: quiesce(session.offloader))
        return window.in_flight == 0

    wait_until(is_idle, "bytes are still in flight")
    wait_until(lambda: used_bytes(session.store) == 0, f"{used_bytes(session.store)} bytes of extents")
