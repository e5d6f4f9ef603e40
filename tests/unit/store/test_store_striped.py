"""The store over several drives."""

from __future__ import annotations

import errno
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from harness import KIB, Drive, DrivenHostStore, assert_all_given_back, config_for, wait_until
from models import loss_of, make_model, make_tokens, same_bits
from store_contract import (
    CPU,
    PATIENCE,
    READY,
    StoreContract,
    descriptors,
    get,
    io_threads,
    pattern,
    put,
)

import tba_offload as tba
from tba_offload.device import ByteRange
from tba_offload.errors import ChecksumError, ConfigError, StoreError, StoreFullError, TransferError
from tba_offload.store import open_store
from tba_offload.store.file import FileStore
from tba_offload.store.host import HostStore
from tba_offload.store.service import Service
from tba_offload.store.striped import StripedStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tba_offload.store.base import ActivationStore, Extent


@dataclass
class Trained:
    """What came of some steps, by their numbers."""

    records: list[Any] = field(default_factory=list)
    gradients: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)


def grad_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad.clone()


def assert_same_gradients(some: Trained, others: Trained) -> None:
    """The steps that both have made, bit for bit."""
    for number in some.gradients.keys() & others.gradients.keys():
        pairs = zip(some.gradients[number], others.gradients[number], strict=True)
        assert all(same_bits(a, b) for a, b in pairs)


class TestStripedStore(StoreContract):
    """A drive with files and one in memory, so that alignments and leads differ."""

    splits_alike = False  # it follows the rates as they are measured

    expression = "StripedStore([FileStore(directory, device=CPU), HostStore(device=CPU, drive=1)])"

    def make_store(self, directory: Path, *, capacity: int | None = None, **options: Any) -> ActivationStore:
        share = None if capacity is None else capacity // 2
        file = FileStore(directory, device=CPU, capacity=share, **options)
        return StripedStore([file, HostStore(share, device=CPU, drive=1, slab_bytes=1 << 16, **options)])

    def corrupt(self, store: ActivationStore, extent: Extent) -> None:
        assert isinstance(store, StripedStore)
        file, host = store.stores
        assert isinstance(file, FileStore)
        assert isinstance(host, HostStore)
        data = pattern(extent.nbytes)
        data[-1] ^= 1
        drive = store.stores[extent.drive]
        digest = drive._leases.of(extent).digest  # type: ignore[attr-defined]
        store.write(extent, ByteRange.of(data), READY).wait(PATIENCE)
        drive._leases.of(extent).digest = digest  # type: ignore[attr-defined]

    def test_checksums_catch_a_changed_byte_unless_told_otherwise(self, tmp_path: Path) -> None:
        """Drives are checked, the memory among them is not."""
        with self.make_store(tmp_path) as store:
            for seed in range(4):
                data = pattern(5000, seed)
                extent = put(store, data)
                self.corrupt(store, extent)
                if extent.drive:
                    assert not torch.equal(get(store, extent), data)
                    continue
                with pytest.raises(ChecksumError, match="instead of"):
                    get(store, extent)


def hosts(count: int, **options: Any) -> StripedStore:
    return StripedStore([HostStore(device=CPU, drive=drive, **options) for drive in range(count)])


# Drives of different speed


class Clock:
    """Time as the test has it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_full_drive_is_passed_over() -> None:
    small, large = HostStore(8 * 4096, device=CPU), HostStore(64 * 4096, device=CPU, drive=1)
    with StripedStore([small, large]) as store:
        drives = [store.reserve(8 * 4096, 0).drive for _ in range(9)]
        assert Counter(drives) == {0: 1, 1: 8}
        with pytest.raises(
            StoreFullError, match=r"none of 2 drives has room for 1 bytes: .*capacity.*; .*capacity"
        ):
            store.reserve(1, 0)


def test_one_drive_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    class Stuck(HostStore):
        def close(self) -> None:
            super().close()
            raise StoreError("stuck")

    store = StripedStore([Stuck(device=CPU), FileStore(tmp_path, device=CPU, drive=1)])
    with pytest.raises(StoreError, match="stuck"):
        store.close()
    assert io_threads() == []


# A drive that dies


def on_clock(store: StripedStore) -> Clock:
    """The drives rest by this clock."""
    clock = Clock()
    for drive in store.stores:
        assert isinstance(drive, HostStore)
        drive._condition.service = Service(clock)
    return clock


def dead() -> StoreError:
    return StoreError(errno.ENODEV, "No such device", "/mnt/b")


def two_drives(drive: Drive) -> StripedStore:
    """The first one does what it is told."""
    driven = DrivenHostStore(drive, device=CPU, slab_bytes=1 << 20)
    return StripedStore([driven, HostStore(device=CPU, drive=1, slab_bytes=1 << 20)])


def test_the_share_of_a_drive_that_dies_goes_to_the_others_at_once() -> None:
    drive = Drive()
    with two_drives(drive) as store:
        clock = on_clock(store)
        drive.writes.fail_with(dead)
        extents = [store.reserve(5000, 0) for _ in range(2)]
        for extent in extents:
            future = store.write(extent, ByteRange.of(pattern(5000)), READY)
            wait_until(future.done, "a write")
        assert [store.reserve(5000, 0).drive for _ in range(20)] == [1] * 20
        assert [load.in_service for load in store.take_loads()] == [False, True]
        clock.now = 1.0
        drives = [store.reserve(5000, 0).drive for _ in range(20)]
        assert sorted(drives) == [0] + [1] * 19  # one write is let through to try it
        drive.writes.recover()
        trial = store.reserve(5000, 0)
        clock.now = 3.0
        while trial.drive == 1:
            trial = store.reserve(5000, 0)
        store.write(trial, ByteRange.of(pattern(5000)), READY).wait(PATIENCE)
        assert {store.reserve(5000, 0).drive for _ in range(40)} == {0, 1}
        assert [load.in_service for load in store.take_loads()] == [True, True]


def train_on(store: StripedStore, steps: int, before: Callable[[int], None], **settings: Any) -> Trained:
    """Trains over a store; which steps failed, with what, and the gradients and records of the others."""
    model, trained = make_model(layers=4), Trained()
    config = config_for(in_flight=16 * KIB, **settings)
    with (
        mock.patch("tba_offload.session.session.open_store", return_value=store),
        tba.attach(model, config, measure_memory=False) as session,
    ):
        for number in range(steps):
            before(number)
            try:
                with session.step() as step:
                    loss = loss_of(model, make_tokens(number))
                    session.offloader.quiesce()
                    before(-number - 1)
                    loss.backward()
                trained.records.append(step.record)
                trained.gradients[number] = [grad_of(parameter) for parameter in model.parameters()]
            except TransferError as error:
                trained.failures[number] = str(error)
            del loss
            model.zero_grad()
        assert_all_given_back(session)
    return trained


def test_training_goes_on_with_the_other_drive_when_one_refuses_writes() -> None:
    drive = Drive()

    def before(number: int) -> None:
        if number == 2:
            drive.writes.fail_with(dead)

    whole = train_on(hosts(2, slab_bytes=1 << 20), 5, lambda _: None)
    store = two_drives(drive)
    on_clock(store)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trained = train_on(store, 5, before)
    (warning,) = [each for each in told if issubclass(each.category, RuntimeWarning)]
    assert "/mnt/b" in str(warning.message)
    assert trained.failures == {}
    assert_same_gradients(trained, whole)
    assert [record.drives_out_of_service for record in trained.records] == [0, 0, 1, 1, 1]
    kept = [record.fallback_kept_bytes for record in trained.records]
    assert kept[2] > 0
    assert kept[3:] == [0, 0]
    assert all(record.offloaded_bytes > 0 for record in trained.records)


def test_open_store_makes_one_file_a_directory(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    with open_store(directories=paths, capacity=8 << 20, device=CPU) as store:
        assert isinstance(store, StripedStore)
        assert [drive.description["directory"] for drive in store.stores] == [str(path) for path in paths]
        assert [drive.capacity_bytes for drive in store.stores] == [4 << 20, 4 << 20]
        extents = [put(store, pattern(100_000, seed)) for seed in range(4)]
        assert {extent.drive for extent in extents} == {0, 1}
        for seed, extent in enumerate(extents):
            assert torch.equal(get(store, extent), pattern(100_000, seed))


def test_open_store_refuses_one_place_twice(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    for other in (tmp_path / "a", tmp_path / "link", tmp_path / "a" / ".." / "a"):
        with pytest.raises(ConfigError, match=r"are the same place|is given twice"):
            open_store(directories=[tmp_path / "a", other], device=CPU)


def test_open_store_leaves_nothing_open_when_a_directory_fails(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "file").touch()
    before = descriptors()
    with pytest.raises(StoreError, match="not a directory"):
        open_store(directories=[tmp_path / "a", tmp_path / "file"], device=CPU)
    assert descriptors() == before
    assert io_threads() == []
