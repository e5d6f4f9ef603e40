"""Stores on machines that stop their processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from warm import Warm

STOPPED = """
import contextlib, os, subprocess, sys, time

import torch

from tba_offload.device import ByteRange, CpuDevice, READY
from tba_offload.store.file import FileStore
from around import put_around

place = sys.argv[1]

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
    store.write(store.reserve(source.nbytes, source.address), source, after=READY).wait(2.5)
stopping.wait()
print("ended")
"""


def test_a_drive_is_not_to_blame_for_time_in_which_the_process_was_stopped(
    tmp_path: Path, python_with_torch: Warm
) -> None:
    done = python_with_torch.run("-c", STOPPED, str(tmp_path))
    assert (done.stdout, done.stderr) == ("ended\n", "")
