"""Drives with host memory beside them."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from harness import KIB, MIB, Drive, DrivenFileStore, assert_all_given_back, config_for, in_time, made
from models import assert_same_history, make_model, train
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
from tba_offload.errors import ConfigError, StoreFullError, TransferError
from tba_offload.report.log import read_run_log
from tba_offload.store import open_store
from tba_offload.store.file import FileStore
from tba_offload.store.host import HostStore
from tba_offload.store.striped import StripedStore
from tba_offload.store.tiered import TieredStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import nn

    from tba_offload.session import Session
    from tba_offload.store.base import ActivationStore, Extent

HOST = 1
"""The ``drive`` of extents in host memory, where there is one drive."""

ALWAYS = -1
"""Bytes to spill at, so that host memory comes first until it is full."""


class TestTieredStore(StoreContract):
    """A drive that has little to do, so that it gets everything."""

    expression = "TieredStore(FileStore(directory, device=CPU), HostStore(1 << 20, device=CPU, drive=1))"

    def make_store(self, directory: Path, *, capacity: int | None = None, **options: Any) -> ActivationStore:
        share = None if capacity is None else capacity // 2
        host = HostStore(share or MIB, device=CPU, drive=HOST, slab_bytes=1 << 16, **options)
        return TieredStore(FileStore(directory, device=CPU, capacity=share, **options), host)

    def corrupt(self, store: ActivationStore, extent: Extent) -> None:
        assert isinstance(store, TieredStore)
        assert isinstance(store.drives, FileStore)
        data = pattern(extent.nbytes)
        data[-1] ^= 1
        home = store.host if extent.drive == HOST else store.drives
        digest = home._leases.of(extent).digest
        store.write(extent, ByteRange.of(data), READY).wait(PATIENCE)
        home._leases.of(extent).digest = digest


# Where extents go


@pytest.fixture
def drive() -> Drive:
    return Drive()


def no_space() -> StoreFullError:
    return StoreFullError(errno.ENOSPC, "no space on the drive")


def tiered(
    drive: Drive, directory: Path, *, host: int = MIB, spill_bytes: int, capacity: int | None = None
) -> TieredStore:
    file = DrivenFileStore(drive, directory, device=CPU, writers=1, readers=1, capacity=capacity)
    return TieredStore(file, HostStore(host, device=CPU, drive=HOST), spill_bytes=spill_bytes)


# What is told of it


# How it is opened


@pytest.mark.parametrize("count", [1, 2])
def test_open_store_puts_host_memory_beside_drives(count: int, tmp_path: Path) -> None:
    paths = [made(tmp_path / str(number)) for number in range(count)]
    with open_store(directories=paths, capacity=8 * MIB, host_capacity=MIB, device=CPU) as store:
        assert isinstance(store, TieredStore)
        assert isinstance(store.drives, StripedStore if count > 1 else FileStore)
        assert (store.drives.capacity_bytes, store.host.capacity_bytes) == (8 * MIB, MIB)
        assert store.host.drive_index == count
        store.spill_bytes = ALWAYS
        assert torch.equal(get(store, put(store, pattern(100_000))), pattern(100_000))
        assert store.host.used_bytes > 0
        with pytest.raises(StoreFullError, match=r"raise store\.capacity .* raise store\.host_capacity "):
            store.reserve(9 * MIB, 0)


def test_host_memory_has_none_beside_it() -> None:
    with pytest.raises(ConfigError, match="host_capacity: has no effect with kind: host"):
        open_store(kind="host", host_capacity=MIB, device=CPU)


def test_open_store_leaves_nothing_open_when_there_is_no_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object, **__: object) -> None:
        raise StoreFullError(errno.ENOMEM, "no pages to pin")

    monkeypatch.setattr("tba_offload.store.host.HostBackend", none)
    before = descriptors()
    with pytest.raises(StoreFullError, match="no pages to pin"):
        open_store(directories=[tmp_path], host_capacity=MIB, device=CPU)
    assert descriptors() == before
    assert io_threads() == []


# Training


@contextmanager
def attached(
    model: nn.Module, drive: Drive, directory: Path, *, host: int = 8 * MIB, **settings: Any
) -> Iterator[tuple[Session, TieredStore]]:
    store = tiered(drive, directory, host=host, spill_bytes=0)
    config = config_for(directory=directory, host_capacity=host, **settings)
    with (
        mock.patch("tba_offload.session.session.open_store", return_value=store),
        tba.attach(model, config, measure_memory=False) as session,
    ):
        yield session, store


def test_training_goes_on_while_the_drive_stands_still(drive: Drive, tmp_path: Path) -> None:
    """Half the window lies in front of the drive, the rest goes to host memory; nobody waits for ever."""
    expected = train(make_model(dropout=0.1), steps=3, micro_batches=2)
    model, went = make_model(dropout=0.1), []

    def before(step: int) -> None:
        if step == 0:
            drive.writes.hold()
        if step == 1:
            went.append((store.drives.high_water_bytes, store.host.high_water_bytes))
            drive.release()

    with attached(model, drive, tmp_path, in_flight=400 * KIB) as (session, store):
        assert store.spill_bytes == 200 * KIB
        found = in_time(lambda: train(model, session, steps=3, micro_batches=2, before_step=before))
        report = session.report()
        assert_all_given_back(session)
        assert store.host.used_bytes == 0
        assert store.host.host_bytes <= 8 * MIB
    assert_same_history(found, expected)
    (drives, host), first = went[0], report[0]
    assert drives > 200 * KIB
    assert host > 400 * KIB
    assert first.in_flight_peak_bytes <= 400 * KIB
    assert first.offloaded_bytes >= host  # the drive wrote nothing before the second step
    assert first.fallback_kept_bytes == 0


@pytest.mark.parametrize("in_flight", [None, 400 * KIB])
def test_a_full_drive_is_no_reason_to_keep_anything(
    in_flight: int | None, drive: Drive, tmp_path: Path
) -> None:
    expected = train(make_model(), steps=3)
    model = make_model()

    def before(step: int) -> None:
        if step == 1:
            drive.reservations.fail_with(no_space)

    with attached(model, drive, tmp_path, in_flight=in_flight, on_full="error") as (session, store):
        found = train(model, session, steps=3, before_step=before)
        assert_all_given_back(session)
        assert store.host.high_water_bytes > 0
    assert_same_history(found, expected)


def test_two_full_tiers_are_a_full_store(drive: Drive, tmp_path: Path) -> None:
    expected = train(make_model(), steps=2)
    drive.reservations.fail_with(no_space)
    model = make_model()
    with attached(model, drive, tmp_path, host=64 * KIB, on_full="keep") as (session, store):
        with pytest.warns(UserWarning, match="the store is full"):
            found = train(model, session, steps=2)
        assert all(record.fallback_kept_bytes > 0 for record in session.report())
        assert 0 < store.host.host_bytes <= 64 * KIB
        assert_all_given_back(session)
    assert_same_history(found, expected)
    model = make_model()
    with (
        attached(model, drive, tmp_path, host=64 * KIB, on_full="error") as (session, _),
        pytest.raises(TransferError, match=r"no space on the drive.*store's capacity of 65536"),
    ):
        train(model, session, steps=1)


def test_a_session_opens_both_tiers_and_logs_them(tmp_path: Path) -> None:
    expected = train(make_model(), steps=2)
    model, log = make_model(), tmp_path / "run.jsonl"
    config = config_for(directory=tmp_path, host_capacity=MIB, in_flight=MIB, capacity=32 * MIB)
    with tba.attach(model, config, run_log=log, measure_memory=False) as session:
        found = train(model, session, steps=2)
        assert isinstance(session.store, TieredStore)
    assert_same_history(found, expected)
    told = read_run_log(log).header.store
    assert (told["kind"], told["spill_bytes"], told["capacity"]) == ("tiered", MIB // 2, 33 * MIB)
    assert told["drives"]["directory"] == str(tmp_path)  # type: ignore[index]
    assert (told["host"]["path"], told["host"]["capacity"]) == ("memory", MIB)  # type: ignore[index]
