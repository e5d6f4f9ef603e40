"""Which way bytes take from a GPU to a drive: the faster one, by a measurement."""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import fake_kvikio
import pytest
import torch
from ordered_device import OrderedDevice
from store_contract import CPU, descriptors, get, pattern, put

import tba_offload as tba
from tba_offload import StoreConfig
from tba_offload.config.store import StoreOptions
from tba_offload.errors import StoreError
from tba_offload.report.log import read_run_log
from tba_offload.store import gds, open_store, posix
from tba_offload.store import probe as choice
from tba_offload.store.file import FileBackend, FileStore
from tba_offload.store.gds import GdsBackend, GdsStore
from tba_offload.store.host import HostBackend, HostStore
from tba_offload.store.probe import EXTENTS, Probe, choose, measure
from tba_offload.store.process import open_stores

if TYPE_CHECKING:
    from pathlib import Path

    from tba_offload.store.engine import QueuedStore

KIB = 1024
SLOW = 1.0
"""Seconds that a transfer of the slower way takes, by the clock that is measured with."""


class Clock:
    """Runs on only where a transfer is slow, so that nothing depends on the machine."""

    def __init__(self) -> None:
        self.late = 0.0
        self.read = 0

    def perf_counter(self) -> float:
        self.read += 1
        return self.late + 1e-6 * self.read


@pytest.fixture
def device() -> OrderedDevice:
    return OrderedDevice(seconds=0.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(choice, "time", clock)
    monkeypatch.setattr(choice, "EXTENT_BYTES", 64 * KIB + 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})  # too few to try more threads
    return clock


BACKENDS: dict[type[QueuedStore], type] = {
    FileStore: FileBackend,
    GdsStore: GdsBackend,
    HostStore: HostBackend,
}


def slow_down(kind: type[QueuedStore], clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = BACKENDS[kind]
    for name in ("move_out", "move_in"):
        original = getattr(backend, name)

        def moving(self: Any, *arguments: Any, original: Any = original, **options: Any) -> Any:
            clock.late += SLOW
            return original(self, *arguments, **options)

        monkeypatch.setattr(backend, name, moving)


# The choice


@pytest.mark.usefixtures("kvikio")
@pytest.mark.parametrize(("slow", "chosen"), [(GdsStore, FileStore), (FileStore, GdsStore)])
def test_auto_takes_the_faster_way_and_says_why(
    slow: type[QueuedStore],
    chosen: type[QueuedStore],
    clock: Clock,
    device: OrderedDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    slow_down(slow, clock, monkeypatch)
    monkeypatch.setattr(gds, "NVIDIA_FS", tmp_path)
    before = descriptors()
    with (
        caplog.at_level(logging.INFO, logger="tba_offload"),
        open_store(kind="auto", directories=[tmp_path], device=device, capacity=1 << 20) as store,
    ):
        assert type(store) is chosen
        description = store.description
        data = pattern(100_003)
        assert torch.equal(get(store, put(store, data)), data)
    assert descriptors() == before
    told: Any = description["chosen"]
    rates = told["bytes_per_second"]
    assert max(rates, key=rates.get) == chosen.kind == description["kind"]
    assert min(rates.values()) <= 4 * (64 * KIB + 1) / SLOW < max(rates.values())
    assert "GB/s through cuFile (GDS)" in told["why"]
    assert [record.getMessage() for record in caplog.records if "it is the faster" in record.getMessage()]


@pytest.mark.usefixtures("kvikio")
def test_a_way_that_waits_for_the_device_is_not_taken(
    clock: Clock, device: OrderedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one would that waits for the default stream, which in training always has work."""
    slow_down(FileStore, clock, monkeypatch)
    monkeypatch.setattr(choice, "_BUSY_SECONDS", 0.0)
    assert choose(tmp_path, device).kind == "gds"
    queued: list[float] = []
    monkeypatch.setattr(choice, "_BUSY_SECONDS", 9 * SLOW)
    monkeypatch.setattr(device, "occupy", queued.append)
    original = GdsBackend.move_out

    def waiting(self: Any, *arguments: Any) -> Any:
        while queued:
            clock.late += queued.pop()
        return original(self, *arguments)

    monkeypatch.setattr(GdsBackend, "move_out", waiting)
    found = choose(tmp_path, device)
    assert found.kind == "file"
    assert found.why.endswith("pinned host memory, both directions at once, on a busy GPU")


@pytest.mark.usefixtures("kvikio")
def test_every_drive_has_its_own_choice(
    clock: Clock, device: OrderedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = iter(["gds", "file"])
    monkeypatch.setattr(
        "tba_offload.store.open.choose", lambda *_, **__: choice.Choice(next(kinds), "it is", {})
    )
    directories = [tmp_path / "one", tmp_path / "two"]
    for directory in directories:
        directory.mkdir()
    with open_store(kind="auto", directories=directories, device=device) as store:
        parts: Any = store.description["stores"]
        assert [part["kind"] for part in parts] == ["gds", "file"]
        for _ in range(4):
            data = pattern(50_000)
            assert torch.equal(get(store, put(store, data)), data)


def test_without_kvikio_it_is_the_file_store(
    clock: Clock, device: OrderedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with open_store(kind="auto", directories=[tmp_path], device=device) as store:
        assert isinstance(store, FileStore)
        told: Any = store.description["chosen"]
    assert told == {
        "why": "GPUDirect Storage needs kvikio, which is not installed",
        "bytes_per_second": {},
        "readers": 1,
        "writers": 1,
        "bytes_per_second_by_threads": {},
    }
    assert clock.read == 0


@pytest.fixture
def failing_reads(kvikio: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fake_kvikio.CuFile, "read", failing)


@pytest.mark.usefixtures("failing_reads")
def test_a_way_that_fails_is_not_taken(clock: Clock, device: OrderedDevice, tmp_path: Path) -> None:
    before = descriptors()
    found = choose(tmp_path, device)
    assert (found.kind, found.rates) == ("file", {})
    assert found.why.startswith("GPUDirect Storage could not be measured: ")
    assert "Operation not supported" in found.why
    assert descriptors() == before
    assert list(tmp_path.iterdir()) == []


def test_a_way_that_hangs_is_not_taken(
    clock: Clock, device: OrderedDevice, tmp_path: Path, kvikio: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does anybody wait for it, not even the end of the process."""
    goes_on = threading.Event()
    reads = fake_kvikio.CuFile.read

    def hanging(file: fake_kvikio.CuFile, address: int, nbytes: int, offset: int) -> int:
        if nbytes > 4096:  # what is tried when the store is opened is a block
            goes_on.wait()
        return reads(file, address, nbytes, offset)

    monkeypatch.setattr(fake_kvikio.CuFile, "read", hanging)
    monkeypatch.setattr(choice, "TRANSFER_SECONDS", 0.05)
    found = choose(tmp_path, device)
    assert (found.kind, found.rates) == ("file", {})
    assert "had not ended after" in found.why
    assert not open_stores()
    goes_on.set()


def test_without_memory_for_a_measurement_it_is_the_file_store(
    clock: Clock, device: OrderedDevice, tmp_path: Path, kvikio: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "randint", full)
    found = choose(tmp_path, device)
    assert found.kind == "file"
    assert found.why == "GPUDirect Storage could not be measured: CUDA out of memory"


@pytest.mark.usefixtures("kvikio")
def test_a_measurement_that_fails_leaves_no_extent_taken(
    clock: Clock, device: OrderedDevice, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with GdsStore(tmp_path, device=device) as store:
        request.getfixturevalue("failing_reads")
        with pytest.raises(StoreError, match="Operation not supported"):
            choice.measure(store, device)
        assert (store.used_bytes, store.pending()) == (0, 0)


@pytest.mark.usefixtures("kvikio")
def test_a_capacity_without_room_is_not_exceeded_for_a_measurement(
    clock: Clock, device: OrderedDevice, tmp_path: Path
) -> None:
    room = 2 * 2 * EXTENTS * (68 + 4) * KIB
    assert choose(tmp_path, device, StoreOptions(capacity=room - 1)).why.endswith(
        "has no room to measure the other way"
    )
    assert clock.read == 0
    choose(tmp_path, device, StoreOptions(capacity=room))
    assert clock.read > 0


@pytest.mark.usefixtures("kvikio")
def test_where_bytes_lie_on_the_host_nothing_is_measured(clock: Clock, tmp_path: Path) -> None:
    with open_store(kind="auto", directories=[tmp_path], device=CPU) as store:
        assert isinstance(store, FileStore)
        assert "chosen" not in store.description
    assert choose(tmp_path, CPU).why == "activations lie in host memory, which drives reach directly"
    assert clock.read == 0


@pytest.mark.usefixtures("kvikio")
def test_a_measurement_draws_no_random_numbers(clock: Clock, device: OrderedDevice, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    choose(tmp_path, device)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.usefixtures("kvikio")
def test_the_run_log_says_which_and_why(
    clock: Clock, device: OrderedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(FileStore, clock, monkeypatch)
    monkeypatch.setattr("tba_offload.session.parts.device_of_model", lambda _: device)
    config = tba.OffloadConfig(store=StoreConfig(directories=(tmp_path,)))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    log = tmp_path / "run.jsonl"
    with tba.attach(model, config, layers=list(model), run_log=log, measure_memory=False):
        pass
    store: Any = read_run_log(log).header.store
    assert store["kind"] == "gds"
    assert store["chosen"]["why"].startswith("it is the faster: ")


# The measurement


@pytest.mark.parametrize("kind", [FileStore, HostStore])
def test_rates_are_bytes_by_the_clock(
    kind: type[QueuedStore], clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(kind, clock, monkeypatch)
    with kind(*([tmp_path] if kind is FileStore else []), device=CPU, writers=1, readers=1) as store:  # type: ignore[arg-type, misc]
        rates = measure(store, CPU, extent_bytes=40_000, extents=3)
        assert store.used_bytes == 0
        assert [load.write.nbytes for load in store.take_loads()] == [0]
    assert rates == pytest.approx((40_000, 40_000, 40_000), rel=0.01)
    assert rates.most == max(rates)


def test_what_is_read_is_what_was_written(tmp_path: Path, device: OrderedDevice) -> None:
    with FileStore(tmp_path, device=device) as store:
        probe = Probe(store, device, extent_bytes=30_001, extents=2)
        probe.write()
        probe.both()
        probe.read()
        assert all(torch.equal(each.tensor(), probe._source.tensor()) for each in probe._targets)
        probe.done()
        assert store.used_bytes == 0


# The path of a directory


@pytest.mark.parametrize(
    ("magic", "alignment", "reason"),
    [
        (0x01021994, 512, "tmpfs lies in memory and has no direct I/O, which cuFile needs"),
        (0xEF53, 0, "the file system does not offer direct I/O, which cuFile needs"),
    ],
)
@pytest.mark.usefixtures("kvikio")
def test_a_directory_without_direct_io_gets_no_gds(
    magic: int, alignment: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posix, "file_system_magic", lambda _: magic)
    monkeypatch.setattr(posix, "direct_alignment", lambda _: alignment)
    before = descriptors()
    with pytest.raises(StoreError, match=f"cannot be had there: {reason}; use store.kind: file, or auto"):
        GdsStore(tmp_path, device=CPU)
    assert descriptors() == before
    assert list(tmp_path.iterdir()) == []
