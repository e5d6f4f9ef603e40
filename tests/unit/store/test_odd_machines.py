"""Stores on machines that stop their processes, allow few threads, or know files by their names only."""

from __future__ import annotations

import errno
import os
import stat
import threading
from typing import TYPE_CHECKING

import pytest
from store_contract import CPU

from tba_offload.errors import StoreError
from tba_offload.store import posix
from tba_offload.store.file import FileStore
from tba_offload.store.hanging import ask

if TYPE_CHECKING:
    from pathlib import Path

    from warm import Warm

STOPPED = """
import contextlib, os, subprocess, sys, time

import torch

from tba_offload.store.options import StoreOptions
from tba_offload.device import ByteRange, CpuDevice, READY
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
    stop = f"sleep 0.3; kill -STOP {os.getpid()}; sleep 4; kill -CONT {os.getpid()}"
    stopping = subprocess.Popen(["sh", "-c", stop])
    if what == "ask":
        ask(lambda: work(1.0), place, 2.5)
    else:
        store.write(store.reserve(source.nbytes, source.address), source, after=READY).wait(2.5)
stopping.wait()
print("ended")
"""


@pytest.mark.parametrize("what", ["wait", "ask"])
def test_a_drive_is_not_to_blame_for_time_in_which_the_process_was_stopped(
    what: str, tmp_path: Path, python_with_torch: Warm
) -> None:
    done = python_with_torch.run("-c", STOPPED, what, str(tmp_path))
    assert (done.stdout, done.stderr) == ("ended\n", "")


def test_a_process_that_may_have_no_threads_says_so_and_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, left, before = threading.Thread.start, iter([True]), set(threading.enumerate())

    def start_one(thread: threading.Thread) -> None:
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(StoreError, match="no more threads can be started; raise `ulimit -u`") as error:
        FileStore(tmp_path, device=CPU, writers=1, readers=1)
    assert error.value.errno == errno.EAGAIN
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert set(threading.enumerate()) <= before
    assert not list(tmp_path.iterdir())
    with pytest.raises(StoreError, match="no more threads can be started"):
        ask(lambda: None, "somewhere", 1.0)


def test_a_store_works_where_the_system_tells_of_files_by_their_names_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on mergerfs; and blocks cannot be reserved, as in some containers."""
    real, fuse = os.fstatvfs, 0x65735546

    def of_names_only(fd: int) -> os.statvfs_result:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(fd)

    def magic(fd: int) -> int:
        return 0 if stat.S_ISREG(os.fstat(fd).st_mode) else fuse

    def refuse(*_: int) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fstatvfs", of_names_only)
    monkeypatch.setattr(posix, "file_system_magic", magic)
    monkeypatch.setattr(posix, "fallocate", refuse)
    with FileStore(tmp_path, device=CPU) as store:
        assert (store.description["file_system"], store.description["confirms_writes"]) == ("fuse", True)
        store.prepare(1 << 20)
