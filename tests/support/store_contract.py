"""The contract of a store as tests: the test of a store subclasses :class:`StoreContract`.

It needs pytest. For assertions that show their values, a ``conftest.py`` says, before anything imports this
module::

    pytest.register_assert_rewrite("store_contract")
"""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from harness import MIB, PATIENCE, used_bytes, wait_until

from tba_offload.device import READY, ByteRange
from tba_offload.errors import ChecksumError, SessionError, StoreError, StoreFullError
from tba_offload.store import MultiStore, Transfer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tba_offload.device import Event
    from tba_offload.store import Extent, Store


class Gate:
    """An event that is reached when the test says so: it holds I/O threads where the test wants them."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.reached = threading.Semaphore(0)
        """Released each time that a thread comes to the gate."""

    def synchronize(self) -> None:
        self.reached.release()
        assert self._open.wait(PATIENCE)

    def wait(self, stream: Any = None) -> None:
        raise AssertionError("I/O threads wait for events, not streams")

    def query(self) -> bool:
        return self._open.is_set()

    def open(self) -> None:
        self._open.set()


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def at_lead(nbytes: int, lead: int, alignment: int) -> torch.Tensor:
    """Return a target whose address is ``lead`` modulo the alignment, padded, filled with 0xAA."""
    room = torch.full((nbytes + 3 * alignment,), 0xAA, dtype=torch.uint8)
    start = (lead - room.data_ptr()) % alignment + alignment
    return room[start : start + nbytes]


def write(store: MultiStore, data: torch.Tensor, after: Event | None = None, **more: Any) -> Transfer:
    transfer = Transfer(ByteRange.of(data), after or READY, **more)
    store.write([transfer])
    return transfer


def read(store: MultiStore, extent: Extent, target: torch.Tensor) -> Transfer:
    transfer = Transfer(ByteRange.of(target), READY, extent=extent)
    store.read([transfer])
    return transfer


def put(store: MultiStore, data: torch.Tensor) -> Extent:
    transfer = write(store, data)
    store.wait(transfer)
    assert transfer.extent is not None
    return transfer.extent


def get(store: MultiStore, extent: Extent) -> torch.Tensor:
    target = at_lead(extent.nbytes, extent.lead, store.alignment)
    store.wait(read(store, extent, target))
    return target


def io_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("tba-"))


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


class StoreContract:
    """Tests that a store passes; subclass it, name the class ``Test…``, and define what makes the store.

    A subclass defines :meth:`make_store` and :meth:`corrupt`. Everything else is inherited, and a test that
    is inherited is never weakened: offloading relies on each.
    """

    checks_what_it_reads = True
    """Whether the store has checksums."""

    def make_store(self, directory: Path, **options: Any) -> Store:
        """Return a new store of the kind that a subclass tests; ``capacity=`` is the only option."""
        raise NotImplementedError

    def corrupt(self, store: Store, extent: Extent) -> None:
        """Change one byte of the payload of an extent behind the store's back."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[MultiStore]:
        with MultiStore([self.make_store(tmp_path)], readers=2, writers=2) as store:
            yield store

    @pytest.mark.parametrize("nbytes", [1, 513, 4095, 4097, 100_003, 9 * MIB + 1])
    def test_bytes_come_back(self, store: MultiStore, nbytes: int) -> None:
        data = pattern(nbytes)
        extent = put(store, data)
        assert extent.nbytes == nbytes
        assert extent.offset % 4096 == extent.length % 4096 == 0
        assert extent.lead + nbytes <= extent.length
        assert torch.equal(get(store, extent), data)
        assert torch.equal(get(store, extent), data)

    @pytest.mark.parametrize("shift", [1, 64, 513])
    def test_sources_and_targets_may_be_anywhere(self, store: MultiStore, shift: int) -> None:
        data = pattern(200_000)[shift : shift + 150_001]
        extent = put(store, data)
        for at in (0, shift, shift + 1):
            target = torch.zeros(160_000, dtype=torch.uint8)[at : at + 150_001]
            store.wait(read(store, extent, target))
            assert torch.equal(target, data)

    def test_a_read_without_room_for_padding_leaves_the_neighbours_alone(self, store: MultiStore) -> None:
        extent = put(store, pattern(5001))
        room = torch.full((5001 + 2 * store.alignment,), 0xAA, dtype=torch.uint8)
        start = (extent.lead + 1 - room.data_ptr()) % store.alignment
        store.wait(read(store, extent, room[start : start + 5001]))
        assert torch.equal(room[start : start + 5001], pattern(5001))
        assert bool((room[:start] == 0xAA).all())
        assert bool((room[start + 5001 :] == 0xAA).all())

    def test_an_extent_can_be_written_again(self, store: MultiStore) -> None:
        extent = put(store, pattern(10_000))
        for seed in (1, 2):
            data = pattern(10_000, seed)
            source = at_lead(10_000, extent.lead, store.alignment).copy_(data)
            store.wait(write(store, source, extent=extent))
            assert torch.equal(get(store, extent), data)
        assert used_bytes(store) == extent.length

    def test_a_transfer_starts_after_its_event(self, store: MultiStore) -> None:
        data, gate = torch.zeros(5000, dtype=torch.uint8), Gate()
        transfer = write(store, data, gate)
        assert gate.reached.acquire(timeout=PATIENCE)
        data.fill_(7)  # what the kernel before the event would do
        gate.open()
        store.wait(transfer)
        assert transfer.extent is not None
        assert bool((get(store, transfer.extent) == 7).all())

    def test_many_at_once_with_cancels_and_releases(self, store: MultiStore) -> None:
        rng, stored = random.Random(0), list[tuple[Any, torch.Tensor]]()
        for burst in range(8):
            sizes = [rng.randrange(1, 300_000) for _ in range(10)]
            data = [pattern(nbytes + 600, 100 * burst + i)[i * 60 :] for i, nbytes in enumerate(sizes)]
            writes = [Transfer(ByteRange.of(each), READY) for each in data]
            targets = [at_lead(extent.nbytes, extent.lead, store.alignment) for extent, _ in stored[:10]]
            store.write(writes)
            reads = [
                read(store, extent, target) for (extent, _), target in zip(stored, targets, strict=False)
            ]
            for transfer in rng.sample([*writes, *reads], k=(len(writes) + len(reads)) // 3):
                store.cancel(transfer)
            for transfer, target, (_, expected) in zip(reads, targets, stored, strict=False):
                if not transfer.is_cancelled:
                    store.wait(transfer)
                    assert torch.equal(target, expected)
            for transfer, each in zip(writes, data, strict=True):
                if not transfer.is_cancelled:
                    store.wait(transfer)
                    stored.append((transfer.extent, each))
            rng.shuffle(stored)
            while len(stored) > 20:
                store.release(stored.pop()[0])
        for extent, _ in stored:
            store.release(extent)
        wait_until(lambda: used_bytes(store) == 0, "all is released")

    def test_extents_are_reused_from_step_to_step(self, store: MultiStore) -> None:
        sizes = (10_000, 300_000, 5, 64_000, 300_000)
        for _ in range(4):
            extents = [put(store, pattern(nbytes)) for nbytes in sizes]
            for extent in reversed(extents):
                get(store, extent)
                store.release(extent)
            assert used_bytes(store) == 0
            store.trim()
            end = max(extent.offset + extent.length for extent in extents)
            assert end <= sum(sizes) + 2 * 4096 * len(sizes)

    def test_capacity_is_a_limit_that_a_release_lifts(self, tmp_path: Path) -> None:
        with MultiStore([self.make_store(tmp_path, capacity=64 * 4096)]) as store:
            assert store.description["capacity"] == 64 * 4096
            first, _ = put(store, pattern(30 * 4096 - 64)), put(store, pattern(30 * 4096 - 64))
            with pytest.raises(StoreFullError, match="no room for 40960 bytes"):
                put(store, pattern(10 * 4096))
            store.release(first)
            assert torch.equal(get(store, put(store, pattern(10 * 4096))), pattern(10 * 4096))

    def test_room_before_the_last_extent_of_a_full_place_is_not_taken_from_it(self, tmp_path: Path) -> None:
        with MultiStore([self.make_store(tmp_path, capacity=8 * 4096)]) as store:
            *others, last = [put(store, pattern(1, seed)) for seed in range(8)]
            for extent in others:
                store.release(extent)
            for _ in range(4):
                store.trim()
            assert torch.equal(get(store, last), pattern(1, 7))

    def test_checksums_catch_a_changed_byte(self, tmp_path: Path) -> None:
        place = self.make_store(tmp_path)
        with MultiStore([place]) as store:
            for nbytes in (1, 5000, 300_001):
                data = pattern(nbytes)
                extent = put(store, data)
                assert torch.equal(get(store, extent), data)
                self.corrupt(place, extent)
                if self.checks_what_it_reads:
                    with pytest.raises(ChecksumError) as caught:
                        get(store, extent)
                    assert caught.value.filename == store.place(extent)
                else:
                    assert not torch.equal(get(store, extent), data)

    def test_an_event_that_fails_fails_the_transfer(self, store: MultiStore) -> None:
        class Broken(Gate):
            def synchronize(self) -> None:
                raise RuntimeError("device lost")

        transfer = write(store, pattern(5000), Broken())
        with pytest.raises(StoreError, match=r"could not write .*device lost") as caught:
            store.wait(transfer)
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert used_bytes(store) == 0
        assert store.take_outages() == []  # No drive is at fault

    def test_threads_descriptors_and_directory_are_as_before(self, tmp_path: Path) -> None:
        before = descriptors()
        for _ in range(3):
            with MultiStore([self.make_store(tmp_path)]) as store:
                get(store, put(store, pattern(100_000)))
                assert io_threads()
            store.close()
            with pytest.raises(SessionError, match="is closed"):
                put(store, pattern(1))
            assert io_threads() == []
            assert descriptors() == before
            assert list(tmp_path.iterdir()) == []

    @pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
    def test_a_forked_child_is_inert(self, tmp_path: Path) -> None:
        before = descriptors()
        with MultiStore([self.make_store(tmp_path)]) as store:
            data, gate = pattern(5000), Gate()
            extent = put(store, data)
            running = write(store, data, gate)
            child = os.fork()
            if child == 0:
                os._exit(_in_child(store, extent, before))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            gate.open()
            store.wait(running)
            assert torch.equal(get(store, extent), data)


def _in_child(store: MultiStore, extent: Extent, before: set[str]) -> int:
    """Return what must hold in a forked child; the exit status says how many uses did not raise."""
    wrong = 0
    for use in (lambda: put(store, pattern(1)), lambda: get(store, extent)):
        try:
            use()
        except SessionError as error:
            wrong += "forked" not in str(error)
        except Exception:  # noqa: BLE001 - the child must end here, whatever happens
            wrong += 1
        else:
            wrong += 1
    store.close()
    return wrong + 10 * bool(descriptors() - before)
