"""Stores on machines that stop their processes, allow few threads, or know files by their names only."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tba_offload.device import CpuDevice
from tba_offload.errors import StoreError
from tba_offload.store import posix
from tba_offload.store.base import IoFuture, acquired
from tba_offload.store.file import FileStore
from tba_offload.store.hanging import ask
from tba_offload.store.late import LateErrors
from tba_offload.store.run_file import RunFile

if TYPE_CHECKING:
    from collections.abc import Callable

    from warm import Warm

CPU = CpuDevice()

STOPPED = """
import contextlib, os, subprocess, sys, time

import torch

from tba_offload.config.store import StoreOptions
from tba_offload.device import ByteRange, CpuDevice, READY
from tba_offload.store.base import take_back
from tba_offload.store.file import FileStore
from tba_offload.store.hanging import ask
from around import put_around

what, place = sys.argv[1:]

def work(seconds):  # takes so long of the time in which this process runs
    while seconds > 0:
        began = time.monotonic()
        time.sleep(0.01)
        seconds -= min(time.monotonic() - began, 0.05)

@contextlib.contextmanager
def slowly(direction, extent):
    work(1.1)
    yield

options = StoreOptions(readers=1, writers=2, stall_seconds=2.5)
with FileStore(place, device=CpuDevice(), options=options) as store:
    put_around(store, slowly)
    source = ByteRange.of(torch.ones(1 << 20, dtype=torch.uint8))
    writes = []
    for _ in range(2 * (what != "ask")):
        writes.append(store.write(store.reserve(source.nbytes, source.address), source, after=READY))
        time.sleep(0.1)
    stop = f"sleep 0.3; kill -STOP {os.getpid()}; sleep 4; kill -CONT {os.getpid()}"
    stopping = subprocess.Popen(["sh", "-c", stop])
    if what == "wait":
        writes[0].wait(2.5)
    elif what == "take back":
        take_back(writes, 2.5)
        assert all(write.done() for write in writes)
    elif what == "ask":
        ask(lambda: work(1.0), place, 2.5)
stopping.wait()
print("ended")
"""


@pytest.mark.parametrize("what", ["wait", "take back", "ask", "close"])
def test_a_drive_is_not_to_blame_for_time_in_which_the_process_was_stopped(
    what: str, tmp_path: Path, python_with_torch: Warm
) -> None:
    done = python_with_torch.run("-c", STOPPED, what, str(tmp_path))
    assert (done.stdout, done.stderr) == ("ended\n", "")


@pytest.mark.parametrize("limit", [0.0, 0.01, 1.02])
def test_a_wait_ends_with_its_limit(limit: float) -> None:
    with pytest.raises(TimeoutError):
        IoFuture().wait(limit)


def test_a_lock_that_is_free_is_acquired_at_once() -> None:
    lock = threading.Lock()
    assert acquired(lock, 0.0)
    assert not acquired(lock, 0.0)
    lock.release()
    assert acquired(lock, None)


@pytest.fixture
def few_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many threads the process may start."""
    start = threading.Thread.start

    def allow(count: int) -> None:
        left = iter(range(count))

        def start_if_allowed(thread: threading.Thread) -> None:
            if next(left, None) is None:
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_if_allowed)

    return allow


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_store_that_may_have_no_threads_says_so_and_leaves_none(
    count: int, tmp_path: Path, few_threads: Callable[[int], None]
) -> None:
    before = set(threading.enumerate())
    few_threads(count)
    with pytest.raises(StoreError, match="no more threads can be started; raise `ulimit -u`") as error:
        FileStore(tmp_path, device=CPU, writers=1, readers=1)
    assert error.value.errno == errno.EAGAIN
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert set(threading.enumerate()) <= before
    assert not list(tmp_path.iterdir())


def test_a_question_that_may_have_no_thread_says_so(few_threads: Callable[[int], None]) -> None:
    few_threads(0)
    with pytest.raises(StoreError, match="no more threads can be started"):
        ask(lambda: None, "somewhere", 1.0)


def test_the_room_for_a_file_without_a_name_is_told_by_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As mergerfs has it, whose ``statfs`` goes by names."""
    real = os.fstatvfs

    def of_names_only(fd: int) -> os.statvfs_result:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(fd)

    fuse = 0x65735546
    monkeypatch.setattr(os, "fstatvfs", of_names_only)
    monkeypatch.setattr(
        posix, "file_system_magic", lambda fd: 0 if stat.S_ISREG(os.fstat(fd).st_mode) else fuse
    )
    file = RunFile(str(tmp_path), None)
    try:
        assert file.free_bytes() > 0
        assert LateErrors(file, is_direct=True).wanted
    finally:
        file.close()


@pytest.mark.parametrize("refusal", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_grows_where_blocks_cannot_be_reserved(
    refusal: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(posix, "fallocate", refuse)
    file = RunFile(str(tmp_path), None)
    try:
        file.grow(1 << 20)
        assert file.size == os.fstat(file.fd).st_size >= 1 << 20
    finally:
        file.close()


def test_a_store_that_cannot_begin_closes_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("tba_offload.store.engine.Leases", fail)
    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(MemoryError):
        FileStore(tmp_path, device=CPU)
    assert set(Path("/proc/self/fd").iterdir()) <= before
