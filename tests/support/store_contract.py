"""The contract of a store as tests: the test of a store subclasses :class:`StoreContract`.

It needs pytest. For assertions that show their values, a ``conftest.py`` says, before anything imports this
module::

    pytest.register_assert_rewrite("store_contract")
"""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tba_offload.device import READY, ByteRange, Device
from tba_offload.errors import ChecksumError, SessionError, StoreError, StoreFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tba_offload.store.base import ActivationStore, Extent, IoFuture

CPU = Device()
MIB = 1 << 20
PATIENCE = 120.0
"""Seconds after which a test stops waiting and fails; a busy machine may take tens of them for nothing."""
MORE_THAN_THREADS = 8
"""Transfers of one direction that no store of these tests runs all at once."""


class Gate:
    """An event that is reached when the test says so: it holds I/O threads where the test wants them."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.reached = threading.Semaphore(0)
        """Released each time that a thread comes to the gate."""

    def synchronize(self) -> None:
        """Blocks until the gate is open."""
        self.reached.release()
        assert self._open.wait(PATIENCE)

    def wait(self, stream: Any = None) -> None:
        """Not for I/O threads."""
        raise AssertionError("I/O threads wait for events, not streams")

    def query(self) -> bool:
        """Whether the gate is open."""
        return self._open.is_set()

    def open(self) -> None:
        """Lets everything pass."""
        self._open.set()


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    """``nbytes`` random bytes, the same for the same seed."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def at_lead(nbytes: int, lead: int, alignment: int) -> torch.Tensor:
    """Return a target whose address is ``lead`` modulo the alignment, padded, filled with 0xAA."""
    room = torch.full((nbytes + 3 * alignment,), 0xAA, dtype=torch.uint8)
    start = (lead - room.data_ptr()) % alignment + alignment
    return room[start : start + nbytes]


def put(store: ActivationStore, data: torch.Tensor) -> Extent:
    """Write a tensor of bytes into a new extent and wait until it is written."""
    extent = store.reserve(data.nbytes, data.data_ptr())
    store.write(extent, ByteRange.of(data), READY).wait(PATIENCE)
    return extent


def get(store: ActivationStore, extent: Extent, *, padded: bool = True) -> torch.Tensor:
    """Read an extent into new memory and wait until it is read."""
    target = at_lead(extent.nbytes, extent.lead, store.alignment)
    store.read(extent, ByteRange.of(target), READY, padded=padded).wait(PATIENCE)
    return target


def io_threads() -> list[str]:
    """Names of the threads of stores that run now."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("tba-"))


def descriptors() -> set[str]:
    """File descriptors of this process that are open now."""
    return {path.name for path in Path("/proc/self/fd").iterdir()}


class StoreContract:
    """Tests that a store passes; subclass it, name the class ``Test…``, and define what makes the store.

    A subclass defines :meth:`make_store`, :meth:`corrupt` and :attr:`expression`, the last with its
    :attr:`imports`. Everything else is inherited, and a test that is inherited is never weakened: the
    offloader relies on each.
    """

    expression = ""
    """Python that makes the same store in another process; ``directory`` and ``CPU`` are defined there."""

    imports = ""
    """Python that :attr:`expression` needs first, if the store is not one of the package's own.

    The other process finds the modules that the tests find: it is given their ``sys.path``.
    """

    splits_alike = True
    """Whether equal steps put the same extents into the same places."""

    checks_what_it_reads = True
    """Whether small extents lie on a drive, whose bytes are checked."""

    def make_store(self, directory: Path, **options: Any) -> ActivationStore:
        """Return a new store of the kind that a subclass tests, closed by the test."""
        raise NotImplementedError

    def corrupt(self, store: ActivationStore, extent: Extent) -> None:
        """Change one byte of the payload of an extent behind the store's back."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[ActivationStore]:
        with self.make_store(tmp_path) as store:
            yield store

    # Several at once.

    def test_several_are_reserved_written_and_come_back(self, store: ActivationStore) -> None:
        data = [pattern(nbytes, nbytes) for nbytes in (1, 4095, 4096, 70_000, 5000)]
        extents: list[Extent] = []
        while len(extents) < len(data):
            rest = [(each.nbytes, each.data_ptr()) for each in data[len(extents) :]]
            found = store.reserve_many(rest)
            assert 1 <= len(found) <= len(rest)
            extents += found
        taken = sorted((extent.drive, extent.offset, extent.offset + extent.length) for extent in extents)
        assert all(one[0] < other[0] or one[2] <= other[1] for one, other in pairwise(taken))
        ended: list[IoFuture] = []
        orders = [
            (extent, ByteRange.of(each), READY, ended.append)
            for extent, each in zip(extents, data, strict=True)
        ]
        writes = store.write_many(orders)
        for write in writes:
            write.wait(PATIENCE)
        for extent, each in zip(extents, data, strict=True):
            assert extent.nbytes == each.nbytes
            assert torch.equal(get(store, extent), each)
            store.release(extent)
        assert store.used_bytes == 0
        while len(ended) < len(writes):
            time.sleep(0.001)
        assert set(ended) == set(writes)

    # Bytes come back.

    @pytest.mark.parametrize("padded", [True, False])
    @pytest.mark.parametrize("nbytes", [1, 513, 4095, 4097, 100_003, 9 * MIB + 1])
    def test_bytes_come_back(self, store: ActivationStore, nbytes: int, padded: bool) -> None:
        data = pattern(nbytes)
        extent = put(store, data)
        assert extent.nbytes == nbytes
        assert extent.offset % 4096 == extent.length % 4096 == 0
        assert extent.lead + nbytes <= extent.length
        assert torch.equal(get(store, extent, padded=padded), data)

    @pytest.mark.parametrize("shift", [1, 64, 513])
    def test_sources_and_targets_may_lie_anywhere(self, store: ActivationStore, shift: int) -> None:
        data = pattern(200_000)[shift : shift + 150_001]
        extent = put(store, data)
        for place in (0, shift, shift + 1):
            target = torch.zeros(160_000, dtype=torch.uint8)[place : place + 150_001]
            store.read(extent, ByteRange.of(target), READY, padded=False).wait(PATIENCE)
            assert torch.equal(target, data)

    @pytest.mark.parametrize("shift", [0, 1])
    def test_an_unpadded_read_leaves_the_neighbours_alone(self, store: ActivationStore, shift: int) -> None:
        data = pattern(5001)
        extent = put(store, data)
        room = torch.full((20_000,), 0xAA, dtype=torch.uint8)
        start = (extent.lead - room.data_ptr()) % store.alignment + 4096 + shift
        store.read(extent, ByteRange.of(room[start : start + 5001]), READY, padded=False).wait(PATIENCE)
        assert torch.equal(room[start : start + 5001], data)
        assert bool((room[:start] == 0xAA).all())
        assert bool((room[start + 5001 :] == 0xAA).all())

    def test_a_padded_read_needs_room_for_the_padding(self, store: ActivationStore) -> None:
        data = pattern(5001)
        extent = put(store, data)
        tight = torch.empty(5001, dtype=torch.uint8)
        if store.alignment > 1:
            with pytest.raises(ValueError, match="no room for padding"):
                store.read(extent, ByteRange.of(tight), READY, padded=True)
        store.read(extent, ByteRange.of(tight), READY, padded=False).wait(PATIENCE)
        assert torch.equal(tight, data)

    def test_an_extent_can_be_written_and_read_again(self, store: ActivationStore) -> None:
        extent = put(store, pattern(10_000, seed=1))
        for seed in (2, 3):
            data = pattern(10_000, seed)
            store.write(extent, ByteRange.of(data), READY).wait(PATIENCE)
            assert torch.equal(get(store, extent), data)
            assert torch.equal(get(store, extent), data)

    def test_a_transfer_starts_after_its_event(self, store: ActivationStore) -> None:
        data, gate = torch.zeros(5000, dtype=torch.uint8), Gate()
        extent = store.reserve(5000, data.data_ptr())
        future = store.write(extent, ByteRange.of(data), gate)
        assert gate.reached.acquire(timeout=PATIENCE)
        data.fill_(7)  # what the kernel before the event would do
        gate.open()
        future.wait(PATIENCE)
        assert bool((get(store, extent) == 7).all())

    def test_concurrent_mixed_transfers_with_random_cancels(self, store: ActivationStore) -> None:
        rng = random.Random(0)
        stored: list[tuple[Extent, torch.Tensor]] = []
        for burst in range(12):
            writes = self._start_writes(store, rng, burst)
            reads = self._start_reads(store, rng, stored)
            futures = [write for *_, write in writes] + [read for *_, read in reads]
            for future in rng.sample(futures, k=len(futures) // 3):
                future.cancel()
            stored += self._finish_writes(store, writes)
            for data, target, read in reads:
                if not read.cancelled():
                    read.wait(PATIENCE)
                    assert torch.equal(target, data)
            rng.shuffle(stored)
            while len(stored) > 20:
                store.release(stored.pop()[0])
        assert store.pending() == store.pending_bytes() == 0

    def _start_writes(
        self, store: ActivationStore, rng: random.Random, burst: int
    ) -> list[tuple[Extent, torch.Tensor, IoFuture]]:
        started = []
        for i in range(10):
            shift = rng.randrange(600)
            data = pattern(shift + rng.randrange(1, 300_000), seed=100 * burst + i)[shift:]
            extent = store.reserve(data.nbytes, data.data_ptr())
            started.append((extent, data, store.write(extent, ByteRange.of(data), READY)))
        return started

    def _start_reads(
        self, store: ActivationStore, rng: random.Random, stored: list[tuple[Extent, torch.Tensor]]
    ) -> list[tuple[torch.Tensor, torch.Tensor, IoFuture]]:
        started = []
        for extent, data in stored[:10]:
            target = at_lead(extent.nbytes, extent.lead, store.alignment)
            started.append(
                (data, target, store.read(extent, ByteRange.of(target), READY, padded=rng.random() < 0.7))
            )
        return started

    def _finish_writes(
        self, store: ActivationStore, writes: list[tuple[Extent, torch.Tensor, IoFuture]]
    ) -> list[tuple[Extent, torch.Tensor]]:
        finished = []
        for extent, data, write in writes:
            if write.cancelled():
                store.release(extent)
            else:
                write.wait(PATIENCE)
                finished.append((extent, data))
        return finished

    # Extents are reserved, reused and given back.

    def test_extents_are_reused_within_and_across_steps(self, store: ActivationStore) -> None:
        marks = []
        # The same memory in every step: an extent is as long as the blocks that its bytes lie in.
        saved = [torch.zeros(nbytes, dtype=torch.uint8) for nbytes in (10_000, 300_000, 5, 64_000, 300_000)]
        for _ in range(5):
            extents = []
            for data in saved:
                store.release(put(store, data))
                extents.append(put(store, data))
            for extent in reversed(extents):
                get(store, extent)
                store.release(extent)
            assert store.used_bytes == 0
            marks.append(store.high_water_bytes)
        assert marks[-1] <= 4 * 800_000
        if self.splits_alike:
            assert marks[-1] == marks[1]

    def test_capacity_is_a_limit_that_a_release_lifts(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path, capacity=64 * 4096) as store:
            assert store.capacity_bytes == 64 * 4096
            assert sum(load.room or 0 for load in store.take_loads()) == 64 * 4096
            extents = [store.reserve(8 * 4096, 0) for _ in range(8)]
            with pytest.raises(StoreFullError, match="capacity"):
                store.reserve(1, 0)
            store.release(extents[3])
            assert torch.equal(get(store, put(store, pattern(3 * 4096))), pattern(3 * 4096))

    # Wrong use is an error, never a wrong byte.

    def test_released_extents_cannot_be_used(self, store: ActivationStore) -> None:
        data = pattern(5000)
        extent = put(store, data)
        store.release(extent)
        with pytest.raises(ValueError, match="not reserved"):
            store.release(extent)
        with pytest.raises(ValueError, match="not reserved"):
            store.write(extent, ByteRange.of(data), READY)
        with pytest.raises(ValueError, match="not reserved"):
            store.read(extent, ByteRange.of(torch.empty(5000, dtype=torch.uint8)), READY, padded=False)

    def test_an_extent_that_was_never_written_cannot_be_read(self, store: ActivationStore) -> None:
        extent = store.reserve(5000, 0)
        with pytest.raises(ValueError, match="never written"):
            store.read(extent, ByteRange.of(torch.empty(5000, dtype=torch.uint8)), READY, padded=False)

    def test_a_busy_extent_cannot_be_used(self, store: ActivationStore) -> None:
        data, gate = pattern(5000), Gate()
        extent = store.reserve(5000, data.data_ptr())
        future = store.write(extent, ByteRange.of(data), gate)
        with pytest.raises(ValueError, match="has not ended"):
            store.release(extent)
        with pytest.raises(ValueError, match="has not ended"):
            store.write(extent, ByteRange.of(data), READY)
        with pytest.raises(ValueError, match="being written"):
            store.read(extent, ByteRange.of(torch.empty(5000, dtype=torch.uint8)), READY, padded=False)
        gate.open()
        future.wait(PATIENCE)
        store.release(extent)

    @pytest.mark.parametrize("nbytes", [4999, 5001])
    def test_ranges_must_fit(self, store: ActivationStore, nbytes: int) -> None:
        extent = put(store, pattern(5000))
        memory = ByteRange.of(pattern(nbytes))
        with pytest.raises(ValueError, match=f"takes 5000 bytes, not {nbytes}"):
            store.write(extent, memory, READY)
        with pytest.raises(ValueError, match=f"takes 5000 bytes, not {nbytes}"):
            store.read(extent, memory, READY, padded=False)

    def test_an_event_that_fails_fails_the_transfer(self, store: ActivationStore) -> None:
        class Broken(Gate):
            def synchronize(self) -> None:
                raise RuntimeError("device lost")

        data = pattern(5000)
        extent = store.reserve(5000, data.data_ptr())
        future = store.write(extent, ByteRange.of(data), Broken())
        with pytest.raises(StoreError, match=r"could not write .*device lost") as caught:
            future.wait(PATIENCE)
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert future.done()
        assert not future.cancel()
        with pytest.raises(ValueError, match="never written"):
            store.read(extent, ByteRange.of(data), READY, padded=False)
        store.release(extent)

    def test_checksums_catch_a_changed_byte_unless_told_otherwise(self, tmp_path: Path) -> None:
        """The same where there is no drive: host memory is not checked."""
        with self.make_store(tmp_path) as store:
            for nbytes in (1, 5000, 300_001):
                data = pattern(nbytes)
                extent = put(store, data)
                assert torch.equal(get(store, extent), data)
                assert torch.equal(get(store, extent, padded=False), data)
                self.corrupt(store, extent)
                for padded in (True, False):
                    if not self.checks_what_it_reads:
                        assert not torch.equal(get(store, extent, padded=padded), data)
                        continue
                    with pytest.raises(ChecksumError) as caught:
                        get(store, extent, padded=padded)
                    assert caught.value.filename == store.place(extent)

    # Futures.

    def test_a_queued_transfer_can_be_cancelled(self, store: ActivationStore) -> None:
        gate = Gate()
        called: list[IoFuture] = []
        futures = self._gated_writes(store, gate)
        data = pattern(5000)
        extent = store.reserve(5000, data.data_ptr())
        future = store.write(extent, ByteRange.of(data), gate)
        future.add_done_callback(called.append)
        memory = weakref.ref(data.untyped_storage())
        del data
        assert memory() is not None
        assert future.cancel()
        assert memory() is None
        assert future.cancel()
        assert future.cancelled()
        assert future.done()
        assert store.pending() == len(futures)
        future.add_done_callback(called.append)
        store.release(extent)
        gate.open()
        for other in futures:
            other.wait(PATIENCE)
        with pytest.raises(StoreError, match="cancelled") as caught:
            future.wait()
        assert caught.value.errno == errno.ECANCELED
        assert called == []

    def test_a_running_transfer_cannot_be_cancelled(self, store: ActivationStore) -> None:
        gate = Gate()
        data = pattern(5000)
        future = store.write(store.reserve(5000, data.data_ptr()), ByteRange.of(data), gate)
        assert gate.reached.acquire(timeout=PATIENCE)
        assert not future.cancel()
        assert not future.cancelled()
        assert not future.done()
        gate.open()
        future.wait(PATIENCE)
        assert not future.cancel()

    def test_callbacks_run_once_on_an_io_thread(self, store: ActivationStore) -> None:
        calls: list[tuple[IoFuture, str]] = []
        gate = Gate()
        data = pattern(5000)
        future = store.write(store.reserve(5000, data.data_ptr()), ByteRange.of(data), gate)
        for _ in range(3):
            future.add_done_callback(lambda done: calls.append((done, threading.current_thread().name)))
        gate.open()
        future.wait(PATIENCE)
        _eventually(lambda: len(calls) == 3)
        assert all(done is future and name.startswith("tba-write-") for done, name in calls)
        future.add_done_callback(lambda done: calls.append((done, threading.current_thread().name)))
        assert calls[3:] == [(future, threading.current_thread().name)]

    def test_a_callback_can_free_the_memory_and_release_the_extent(self, store: ActivationStore) -> None:
        gate, alive = Gate(), []
        data = pattern(5000)
        tensor = weakref.ref(data)
        extent = store.reserve(5000, data.data_ptr())
        future = store.write(extent, ByteRange.of(data), gate)

        def finish(_: IoFuture) -> None:
            store.release(extent)
            alive.append(tensor())

        future.add_done_callback(finish)
        del data
        gate.open()
        future.wait(PATIENCE)
        _eventually(lambda: bool(alive))
        assert alive == [None]
        assert store.used_bytes == 0

    # The end.

    def test_close_is_final_and_idempotent(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path)
        data = pattern(5000)
        extent = put(store, data)
        store.close()
        store.close()
        with pytest.raises(SessionError, match="closed"):
            store.reserve(1, 0)
        with pytest.raises(SessionError, match="closed"):
            store.write(extent, ByteRange.of(data), READY)
        with pytest.raises(SessionError, match="closed"):
            store.read(extent, ByteRange.of(data), READY, padded=False)
        store.release(extent)

    def test_close_cancels_the_queue_and_waits_for_the_rest(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path)
        gate = Gate()
        futures = self._gated_writes(store, gate)
        assert gate.reached.acquire(timeout=PATIENCE)
        closing = threading.Thread(target=store.close)
        closing.start()
        _eventually(futures[-1].cancelled)
        assert closing.is_alive()
        gate.open()
        closing.join(PATIENCE)
        assert not closing.is_alive()
        assert all(future.done() for future in futures)
        assert not all(future.cancelled() for future in futures)  # one of them had begun
        assert io_threads() == []

    def test_threads_and_descriptors_are_flat(self, tmp_path: Path) -> None:
        before = descriptors()
        for _ in range(3):
            with self.make_store(tmp_path) as store:
                get(store, put(store, pattern(100_000)), padded=False)
                assert io_threads()
            assert io_threads() == []
            assert descriptors() == before

    def test_a_forgotten_store_ends_its_threads_and_says_so(self, tmp_path: Path) -> None:
        before = descriptors()
        self._use_and_forget(tmp_path)
        _eventually(lambda: io_threads() == [])
        assert descriptors() == before

    def _use_and_forget(self, directory: Path) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            put(self.make_store(directory), pattern(5000))
            _eventually(lambda: any("was not closed" in str(warning.message) for warning in caught))

    @pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
    def test_a_forked_child_is_inert(self, tmp_path: Path) -> None:
        before = descriptors()
        store = self.make_store(tmp_path)
        data, gate = pattern(5000), Gate()
        extent = put(store, data)
        running = store.write(store.reserve(5000, data.data_ptr()), ByteRange.of(data), gate)
        child = os.fork()
        if child == 0:
            os._exit(_in_child(store, extent, data, running, before))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        gate.open()
        running.wait(PATIENCE)
        assert torch.equal(get(store, extent), data)
        store.close()

    @pytest.mark.full
    def test_the_interpreter_exits_cleanly_with_io_pending(self, tmp_path: Path) -> None:
        program = f"""
            import logging, torch
            from pathlib import Path
            from tba_offload.device import ByteRange, Device, READY
            from tba_offload.store.file import FileStore
            from tba_offload.store.host import HostStore
            from tba_offload.store.striped import StripedStore
            from tba_offload.store.tiered import TieredStore
            logging.disable()
            CPU, directory = Device(), Path({str(tmp_path)!r})
            store = {self.expression}
            data = torch.ones(4 << 20, dtype=torch.uint8)
            extents = [store.reserve(data.nbytes, data.data_ptr()) for _ in range(40)]
            futures = [store.write(extent, ByteRange.of(data), READY) for extent in extents]
        """
        ended = subprocess.run(
            [sys.executable, "-c", f"{self.imports}\n{textwrap.dedent(program)}"],
            check=False,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
        assert list(tmp_path.iterdir()) == []

    def _gated_writes(self, store: ActivationStore, gate: Gate) -> list[IoFuture]:
        """More writes than threads, all held at the gate."""
        data = pattern(5000)
        extents = [store.reserve(5000, data.data_ptr()) for _ in range(MORE_THAN_THREADS)]
        return [store.write(extent, ByteRange.of(data), gate) for extent in extents]


def _in_child(
    store: ActivationStore, extent: Extent, data: torch.Tensor, running: IoFuture, before: set[str]
) -> int:
    """Return what must hold in a forked child; the exit status says how many uses did not raise."""
    uses: list[Callable[[], object]] = [
        lambda: store.reserve(1, 0),
        lambda: store.release(extent),
        lambda: store.write(extent, ByteRange.of(data), READY),
        lambda: store.read(extent, ByteRange.of(data), READY, padded=False),
        lambda: store.prepare(4096),
        lambda: running.wait(5),
    ]
    wrong = 0
    for use in uses:
        try:
            use()
        except SessionError as error:
            wrong += "forked" not in str(error)
        except Exception:  # noqa: BLE001 - the child must end here, whatever happens
            wrong += 1
        else:
            wrong += 1
    store.close()
    left = descriptors() - before  # other packages may close their own here
    return wrong + 10 * bool(left)


def _eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {PATIENCE:g} s"
        time.sleep(0.001)
