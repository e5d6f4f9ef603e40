"""Faults put below a real store: each does what its name says, or the tests with faults would say little."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch
from faults import inject
from store_contract import CPU, PATIENCE, READY, get, pattern, put

from tba_offload.device import ByteRange
from tba_offload.errors import ShortTransferError, StoreFullError
from tba_offload.store.file import FileStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NBYTES = 100_003


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with FileStore(tmp_path, device=CPU, writers=1, readers=1, checksum=False) as store:
        yield store


@pytest.mark.parametrize("fault", ["flip-write:n=1", "flip-read:n=1", "zeros-write", "zeros-read"])
def test_bytes_are_changed(store: FileStore, fault: str) -> None:
    data = pattern(NBYTES)
    with inject(fault) as faults:
        found = get(store, put(store, data))
    bits = sum(int(byte).bit_count() for byte in (data ^ found).tolist())
    assert bits == 1 if fault.startswith("flip") else not found.any()
    assert len(faults.fired) == 1
    assert torch.equal(get(store, put(store, data)), data)


def test_a_lost_write_leaves_what_was_there(store: FileStore) -> None:
    extent = put(store, pattern(NBYTES))
    with inject("lost-write"):
        store.write(extent, ByteRange.of(pattern(NBYTES, seed=1)), READY).wait(PATIENCE)
    assert torch.equal(get(store, extent), pattern(NBYTES))


@pytest.mark.parametrize(
    ("conditions", "struck"),
    [("n=3", {3}), ("after=3", {4, 5, 6}), ("after=1,times=2", {2, 3}), ("bytes=300KiB", {4, 5, 6})],
)
def test_conditions_say_which_calls_are_struck(store: FileStore, conditions: str, struck: set[int]) -> None:
    data = pattern(NBYTES)
    with inject(f"flip-write:{conditions}"):
        found = {number: get(store, put(store, data)) for number in range(1, 7)}
    assert {number for number, each in found.items() if not torch.equal(each, data)} == struck


def test_transfers_are_cut_short_and_files_do_not_grow(store: FileStore) -> None:
    with inject("short-write", "short-read") as faults:
        assert torch.equal(get(store, put(store, pattern(NBYTES))), pattern(NBYTES))
    assert len(faults.fired) > 2
    with inject("nothing-write"), pytest.raises(ShortTransferError, match="stopped after 0"):
        put(store, pattern(NBYTES))
    with inject("fail-grow:errno=ENOSPC"), pytest.raises(StoreFullError):
        store.prepare(1 << 40)


def test_a_drive_hangs_until_it_is_released(store: FileStore) -> None:
    ended = threading.Event()
    with inject("hang-write") as faults:
        thread = threading.Thread(target=lambda: (put(store, pattern(NBYTES)), ended.set()))
        thread.start()
        while not faults.fired:
            time.sleep(0.001)
        assert not ended.wait(0.05)
        faults.release()
        thread.join(PATIENCE)
    assert ended.is_set()
