"""File systems that report a lost write only when a file is flushed or closed: no byte is lost silently."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING

import late_fuse
import pytest
import torch
from harness import KIB, MIB
from models import assert_same_history, make_model, train
from store_contract import CPU, descriptors

import tba_offload as tba
from tba_offload.config import BudgetConfig, OffloadConfig, StoreConfig
from tba_offload.device import READY
from tba_offload.device.ranges import ByteRange, aligned_range
from tba_offload.errors import StoreFullError
from tba_offload.store.file import FileStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tba_offload.store.base import Extent


def put_back(store: FileStore) -> None:
    """A drive that has failed is left alone for a while, from a moment after the write has ended on."""
    while store.write_rate() is not None:
        time.sleep(0.001)
    store.resume()


on_fuse = pytest.mark.skipif(
    not late_fuse.can_mount(), reason="mounting by FUSE needs /dev/fuse and CAP_SYS_ADMIN"
)


@pytest.fixture
def late(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system with room for 1 MiB, which refuses direct I/O."""
    (tmp_path / "late").mkdir()
    with late_fuse.mounted(tmp_path / "late", MIB):
        yield tmp_path / "late"


def block(value: int, nbytes: int = 256 * KIB) -> ByteRange:
    return ByteRange.of(torch.full((nbytes,), value, dtype=torch.uint8))


def read_back(store: FileStore, extent: Extent) -> torch.Tensor:
    target = aligned_range(extent.nbytes, extent.lead, store.alignment, CPU)
    store.read(extent, target, READY, padded=True).wait(60)
    return target.tensor()


@on_fuse
@pytest.mark.parametrize("writers", [1, 3])
def test_a_write_that_was_lost_fails_though_it_returned(writers: int, late: Path) -> None:
    """Without checksums, by which reading it would tell."""
    with FileStore(str(late), device=CPU, checksum=False, writers=writers) as store:
        assert store.description["path"] == "buffered"
        assert "refuses direct I/O" in str(store.description["reason"])
        assert store.description["file_system"] == "fuse"
        assert store.description["confirms_writes"]
        kept: list[tuple[int, Extent]] = []
        for value in range(1, 13):
            source = block(value)
            extent = store.reserve(source.nbytes, source.address)
            write = store.write(extent, source, READY)
            if value <= 4:
                write.wait(60)
                kept.append((value, extent))
            else:
                with pytest.raises(StoreFullError, match=f"Errno {errno.ENOSPC}.*{late}"):
                    write.wait(60)
                put_back(store)
        for value, extent in kept:
            assert torch.equal(read_back(store, extent), block(value).tensor())


@on_fuse
@pytest.mark.parametrize("checksum", [True, False])
def test_training_keeps_what_was_lost_and_its_bits(checksum: bool, late: Path) -> None:
    config = OffloadConfig(
        budget=BudgetConfig(in_flight_bytes=MIB),
        store=StoreConfig(kind="file", directories=(late,), checksum=checksum, writers=2),
        min_tensor_bytes=KIB,
    )
    expected = train(make_model(layers=4), steps=3)
    before = descriptors()
    model = make_model(layers=4)
    with tba.attach(model, config) as session:
        with pytest.warns(UserWarning, match="the store is full: .* of activations stayed in memory"):
            found = train(model, session, steps=3)
        records = session.report()
    assert_same_history(found, expected)
    assert records[0].offloaded_bytes > 0
    assert records[0].fallback_kept_bytes > 0
    assert sum(record.reread_bytes for record in records) == 0
    assert list(late.iterdir()) == []
    assert len(descriptors()) == len(before)
