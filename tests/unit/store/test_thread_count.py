"""How many threads a drive gets where they move the bytes of a device: twice as many as long as that pays."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from ordered_device import OrderedDevice
from store_contract import CPU, descriptors, get, pattern, put

from tba_offload.config.store import StoreOptions
from tba_offload.errors import ConfigError, HangingError, StoreError
from tba_offload.store import doctor, open_store, probe
from tba_offload.store.file import FileBackend, FileStore
from tba_offload.store.process import open_stores
from tba_offload.store.thread_count import threads_that_pay

if TYPE_CHECKING:
    from pathlib import Path

KIB = 1024
ENOUGH = 4
"""Threads of each direction that move all that the drive below can."""


class Drive:
    """A drive that is faster the more threads there are, up to :data:`ENOUGH`, and the clock that says so."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.tried: list[int] = []
        self._lock = threading.Lock()

    def perf_counter(self) -> float:
        return self.seconds

    def move(self, threads: int) -> None:
        with self._lock:
            self.seconds += 1 / min(threads, ENOUGH)
            if threads not in self.tried:
                self.tried.append(threads)


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Drive:
    drive = Drive()
    monkeypatch.setattr(probe, "time", drive)
    monkeypatch.setattr(probe, "EXTENT_BYTES", 64 * KIB)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setitem(sys.modules, "kvikio", None)
    for name in ("move_out", "move_in"):
        original = getattr(FileBackend, name)

        def moving(self: Any, *arguments: Any, original: Any = original, **options: Any) -> Any:
            drive.move(self.ring.count // 2)
            return original(self, *arguments, **options)

        monkeypatch.setattr(FileBackend, name, moving)
    return drive


@pytest.fixture
def device() -> OrderedDevice:
    return OrderedDevice(seconds=0.0)


def found(path: Path, device: OrderedDevice, **options: Any) -> tuple[int, set[int]]:
    """The threads that are taken, and what was tried."""
    threads = threads_that_pay("file", str(path), device, StoreOptions(may_add_threads=True, **options))
    assert threads.readers == threads.writers
    return threads.writers, set(threads.rates)


def test_auto_takes_as_many_threads_as_pay(
    drive: Drive, device: OrderedDevice, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = descriptors()
    with (
        caplog.at_level(logging.INFO, logger="tba_offload"),
        open_store(kind="auto", directories=[tmp_path], device=device) as store,
    ):
        description: Any = store.description
        assert (description["readers"], description["writers"]) == (ENOUGH, ENOUGH)
        data = pattern(100_003)
        assert torch.equal(get(store, put(store, data)), data)
    assert descriptors() == before
    rates = description["chosen"]["bytes_per_second_by_threads"]
    assert {count: rate / (64 * KIB) for count, rate in rates.items()} == pytest.approx(
        {"2": 2.0, "4": 4.0, "8": 4.0}
    )
    assert any("4 threads that read, 4 that write" in record.getMessage() for record in caplog.records)


def test_where_more_do_not_pay_it_stays(drive: Drive, device: OrderedDevice, tmp_path: Path) -> None:
    assert found(tmp_path, device, readers=ENOUGH, writers=ENOUGH) == (ENOUGH, {ENOUGH, 2 * ENOUGH})


@pytest.mark.parametrize("given", [{"writers": 1}, {"readers": 3}, {"readers": 3, "writers": 1}])
def test_what_the_user_names_is_what_there_is(
    given: dict[str, int], drive: Drive, device: OrderedDevice, tmp_path: Path
) -> None:
    with open_store(kind="auto", directories=[tmp_path], device=device, **given) as store:
        description = store.description
        assert description["writers"] == given.get("writers", 2)
        assert description["readers"] == given.get("readers", 2)
    assert drive.tried == []


@pytest.mark.parametrize(("kind", "cores"), [("file", 64), ("auto", 2)])
def test_a_kind_that_is_named_and_few_cores_are_left_alone(
    kind: str,
    cores: int,
    drive: Drive,
    device: OrderedDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    with open_store(kind=kind, directories=[tmp_path], device=device) as store:
        assert store.description["writers"] == (1 if cores == 2 else 2)
    assert drive.tried == []


def test_on_a_cpu_threads_take_time_from_compute_so_none_is_tried(drive: Drive, tmp_path: Path) -> None:
    with open_store(kind="auto", directories=[tmp_path], device=CPU) as store:
        assert store.description["writers"] == 2
    assert drive.tried == []


def test_without_room_for_more_what_was_found_is_taken(
    drive: Drive, device: OrderedDevice, tmp_path: Path
) -> None:
    room = 2 * 2 * ENOUGH * (64 + 4) * KIB  # of two stores, for what is there and what is written
    assert found(tmp_path, device, capacity=room - 1) == (2, set())
    assert drive.tried == []
    assert found(tmp_path, device, capacity=room) == (ENOUGH, {2, ENOUGH})


@pytest.mark.parametrize(
    "error",
    [
        StoreError("the drive is gone"),
        TimeoutError("hangs"),
        torch.OutOfMemoryError("out of memory"),
        RuntimeError("CUDA cannot pin 8388608 bytes of host memory"),
        RuntimeError("can't start new thread"),
    ],
)
def test_after_an_error_what_was_found_is_taken(
    error: Exception, drive: Drive, device: OrderedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = FileStore.__init__

    def failing(self: Any, *arguments: Any, options: StoreOptions, **others: Any) -> None:
        if options.writers > ENOUGH:
            raise error
        original(self, *arguments, options=options, **others)

    monkeypatch.setattr(FileStore, "__init__", failing)
    before, stores = descriptors(), len(list(open_stores()))
    assert found(tmp_path, device) == (ENOUGH, {2, ENOUGH})
    assert (descriptors(), len(list(open_stores()))) == (before, stores)


def test_a_drive_that_does_not_answer_is_not_waited_for_twice(
    drive: Drive, device: OrderedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: object, **__: object) -> None:
        raise HangingError(errno.ETIMEDOUT, "no answer for 60 s")

    monkeypatch.setattr(FileStore, "__init__", silent)
    with pytest.raises(HangingError, match="no answer"):
        found(tmp_path, device)


def test_numbers_that_differ_stay_where_nothing_is_tried(
    drive: Drive, device: OrderedDevice, tmp_path: Path
) -> None:
    options = StoreOptions(readers=3, writers=1, may_add_threads=True, capacity=64 * KIB)
    assert threads_that_pay("file", str(tmp_path), device, options)[:2] == (3, 1)
    assert drive.tried == []


def test_doctor_says_how_many_threads_auto_takes(
    drive: Drive, device: OrderedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a directory whose name would be a variable in a policy."""
    place = tmp_path / "a$b"
    place.mkdir()
    findings = json.loads(json.dumps(doctor.examine([place], device)))
    (each,) = findings["directories"]
    assert (each["auto"]["readers"], each["auto"]["writers"]) == (ENOUGH, ENOUGH)
    assert set(each["auto"]["bytes_per_second_by_threads"]) == {"2", "4", "8"}
    assert "  auto  takes file (readers: 4, writers: 4), because" in "\n".join(doctor.lines(findings))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    (each,) = doctor.examine([place], CPU)["directories"]
    assert (each["auto"]["readers"], each["auto"]["bytes_per_second_by_threads"]) == (1, {})


@pytest.mark.parametrize("value", [0, -1, 257, 2.5, True, "many", "0", "²"])
def test_a_number_of_threads_is_a_number(value: object, tmp_path: Path) -> None:
    opening = partial(open_store, kind="file", directories=[tmp_path], device=CPU)
    with pytest.raises(
        ConfigError, match="is no number of threads; write one from 1 to 256, or remove the line"
    ):
        opening(writers=value)
