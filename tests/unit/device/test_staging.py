"""The ring of staging slabs."""

from __future__ import annotations

import threading

import pytest
import torch
from store_contract import PATIENCE

from tba_offload.device import CpuDevice
from tba_offload.device.staging import StagingRing
from tba_offload.errors import SessionError

SLAB = 1 << 16


@pytest.mark.parametrize("alignment", [1, 512, 4096])
def test_slabs_are_aligned_and_writable(alignment: int) -> None:
    ring = StagingRing(SLAB, 2, alignment, CpuDevice())
    with ring.borrow() as first, ring.borrow() as second:
        for slab in (first, second):
            assert slab.data_ptr() % alignment == 0
            assert (slab.dtype, slab.shape) == (torch.uint8, (SLAB,))
        first.fill_(1)
        second.fill_(2)
        assert bool((first == 1).all())
    ring.close()


def test_borrowers_wait_for_a_free_slab() -> None:
    ring = StagingRing(SLAB, 1, 512, CpuDevice())
    got = threading.Event()

    def borrow() -> None:
        with ring.borrow():
            got.set()

    with ring.borrow():
        thread = threading.Thread(target=borrow)
        thread.start()
        assert not got.wait(0.05)
    assert got.wait(PATIENCE)
    thread.join()
    ring.close()


def test_many_borrowers_never_share_a_slab() -> None:
    ring = StagingRing(4096, 2, 512, CpuDevice())
    wrong: list[int] = []

    def work(value: int) -> None:
        for _ in range(200):
            with ring.borrow() as slab:
                slab.fill_(value)
                if not bool((slab == value).all()):
                    wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert ring.allocated_bytes <= 2 * 4096
    ring.close()


def test_a_slab_comes_back_after_an_error() -> None:
    ring = StagingRing(SLAB, 1, 512, CpuDevice())
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), ring.borrow():
            raise ZeroDivisionError
    ring.close()


def test_a_closed_ring_lends_nothing() -> None:
    ring = StagingRing(SLAB, 1, 512, CpuDevice())
    with ring.borrow():
        ring.close()
    ring.close()
    assert ring.allocated_bytes == 0
    with pytest.raises(SessionError, match="ring is closed"), ring.borrow():
        pass
