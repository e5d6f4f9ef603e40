"""The ring of staging slabs."""

from __future__ import annotations

import threading

import pytest
import torch
from store_contract import PATIENCE

from tba_offload.device import CpuDevice
from tba_offload.device.staging import StagingRing
from tba_offload.errors import SessionError, UnsupportedError

SLAB = 1 << 16


class CountingDevice(CpuDevice):
    """Counts allocations, and can run out of memory."""

    made = 0
    left = 100

    def host_memory(self, nbytes: int) -> torch.Tensor:
        if self.made == self.left:
            raise MemoryError("no more pages")
        self.made += 1
        return super().host_memory(nbytes)


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


def test_slabs_are_made_at_first_need_and_reused() -> None:
    device = CountingDevice()
    ring = StagingRing(SLAB, 3, 512, device)
    assert (device.made, ring.allocated_bytes) == (0, 0)
    for _ in range(5):
        with ring.borrow():
            pass
    assert (device.made, ring.allocated_bytes) == (1, SLAB)
    with ring.borrow(), ring.borrow():
        assert ring.allocated_bytes == 2 * SLAB
    ring.close()
    assert ring.allocated_bytes == 0


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


def test_a_slab_that_cannot_be_made_does_not_count() -> None:
    device = CountingDevice()
    device.left = 0
    ring = StagingRing(SLAB, 1, 512, device)
    with pytest.raises(MemoryError), ring.borrow():
        pass
    assert ring.allocated_bytes == 0
    device.left = 1
    with ring.borrow():
        assert ring.allocated_bytes == SLAB
    ring.close()


def test_memory_at_another_address_is_no_slab() -> None:
    """The drive would be blamed for it."""

    class Crooked(CpuDevice):
        def host_memory(self, nbytes: int) -> torch.Tensor:
            return super().host_memory(nbytes + 64)[64:]

    ring = StagingRing(SLAB, 1, 512, Crooked())
    for _ in range(2):
        with pytest.raises(
            UnsupportedError, match=r"host memory of cpu lies at 0x.*40, which is no multiple of 512"
        ):
            with ring.borrow():
                pass
    assert ring.allocated_bytes == 0
    ring.close()


def test_a_closed_ring_lends_nothing() -> None:
    ring = StagingRing(SLAB, 1, 512, CpuDevice())
    with ring.borrow():
        ring.close()
    ring.close()
    assert ring.allocated_bytes == 0
    with pytest.raises(SessionError, match="ring is closed"), ring.borrow():
        pass


def test_closing_wakes_who_waits() -> None:
    ring = StagingRing(SLAB, 1, 512, CpuDevice())
    started, errors = threading.Semaphore(0), []

    def borrow() -> None:
        started.release()
        try:
            with ring.borrow():
                pass
        except SessionError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=borrow) for _ in range(2)]
    with ring.borrow():
        for thread in threads:
            thread.start()
        for _ in threads:
            assert started.acquire(timeout=PATIENCE)
        ring.close()
        for thread in threads:
            thread.join(PATIENCE)
    assert errors == ["the staging ring is closed"] * 2


@pytest.mark.parametrize(
    ("slab_bytes", "count", "alignment"),
    [(0, 1, 1), (4096, 0, 1), (-4096, 1, 1), (4096, 1, 3), (5000, 1, 512), (1 << 30, 1, 1 << 29)],
)
def test_senseless_rings_are_refused(slab_bytes: int, count: int, alignment: int) -> None:
    with pytest.raises(ValueError, match=r"needs slabs|must divide"):
        StagingRing(slab_bytes, count, alignment, CpuDevice())
