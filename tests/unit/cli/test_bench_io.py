"""``tba-offload bench-io``: each size by each number of threads, settings that are a policy, nothing left."""

from __future__ import annotations

import errno
import json
from threading import Timer
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result
from faults import inject
from store_contract import CPU, descriptors

from tba_offload import cli
from tba_offload.config import OffloadConfig
from tba_offload.device import streams
from tba_offload.store import bench, posix
from tba_offload.store.bench import DIRECTIONS, MIXED, READ, WRITE, Cell, advised
from tba_offload.store.file import FileStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tba_offload.store.base import IoFuture

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "default_device", lambda: CPU)


def call(*arguments: str) -> Result:
    small = ["--block", "64KiB", "--block", "256KiB", "--threads", "1", "--threads", "3", "--seconds", "0"]
    return CliRunner().invoke(cli.main, ["bench-io", *small, *arguments])


def test_every_size_is_measured_and_nothing_stays(tmp_path: Path) -> None:
    before = descriptors()
    result = call("--json", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert descriptors() == before
    assert list(tmp_path.iterdir()) == []
    found: dict[str, Any] = json.loads(result.stdout)
    (each,) = found["directories"]
    cells = [Cell(**cell) for cell in each["cells"]]
    assert [(cell.threads, cell.block_bytes, cell.direction) for cell in cells] == [
        (threads, block, direction)
        for threads in (1, 3)
        for block in (64 * KIB, 256 * KIB)
        for direction in DIRECTIONS
    ]
    for cell in cells:
        assert cell.in_flight == 2 * cell.threads
        assert cell.transfers >= 2 * cell.in_flight
        assert cell.bytes_per_second > 0
        assert 0 < cell.p50_seconds <= cell.p99_seconds
    store = found["policy"]["store"]
    assert store["writers"] in {1, 3}
    assert store["readers"] in {1, 3}


def test_what_it_prints_last_is_a_policy(tmp_path: Path) -> None:
    directories = [tmp_path / "one", tmp_path / "other"]
    for directory in directories:
        directory.mkdir()
    said = call("--no-checksum", *map(str, directories)).stdout
    config = OffloadConfig.from_yaml(said[said.index("# ") :])
    assert [str(each) for each in config.store.directories] == list(map(str, directories))
    assert not config.store.checksum
    assert config.min_tensor_bytes in {64 * KIB, 256 * KIB}
    assert said.count("  mixed  ") == 8


class NotesLate(FileStore):
    """A store whose I/O threads call back some time after a transfer counts as done."""

    def write(self, *arguments: Any, done: Callable[[IoFuture], object] | None = None) -> IoFuture:
        def late(future: IoFuture) -> None:
            assert done is not None
            Timer(0.05, done, (future,)).start()

        return super().write(*arguments, done=late)


def test_the_latency_of_each_transfer_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.STORES, "file", NotesLate)
    result = call("--json", str(tmp_path))
    assert result.exit_code == 0, result.output
    (each,) = json.loads(result.stdout)["directories"]
    assert all(cell["p50_seconds"] >= 0.05 for cell in each["cells"] if cell["direction"] == WRITE)


@pytest.mark.parametrize("fault", ["fail-write:after=9", "fail-read:n=2", "flip-read:n=3"])
def test_a_drive_that_fails_ends_it_and_nothing_stays(fault: str, tmp_path: Path) -> None:
    before = descriptors()
    with inject(fault):
        result = call(str(tmp_path))
    assert result.exit_code == 1
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert str(tmp_path) in result.stderr
    assert descriptors() == before
    assert list(tmp_path.iterdir()) == []


def test_what_has_no_room_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fallocate(_fd: int, offset: int, nbytes: int) -> None:
        if offset + nbytes > MOST:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(posix, "fallocate", fallocate)
    result = CliRunner().invoke(cli.main, ["bench-io", "--seconds", "0", "--threads", "1", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "blocks of 16.0 MiB and more are not measured at 1 thread in each direction" in result.stderr
    assert "4.00 MiB" in result.stdout
    assert "16.0 MiB" not in result.stdout
    assert "store:" in result.stdout
    monkeypatch.setattr(posix, "fallocate", lambda *_: fallocate(0, 0, MOST + 1))
    assert call(str(tmp_path)).exit_code == 1


def test_a_drive_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "TRANSFER_SECONDS", 0.2)
    with inject("hang-write:after=9"):
        result = call(str(tmp_path))
    assert result.exit_code == 1
    assert "a transfer hangs; check the drive" in result.stderr


def test_a_directory_that_is_missing_is_named(tmp_path: Path) -> None:
    result = call(str(tmp_path / "not" / "there"))
    assert result.exit_code == 1
    assert "'not' does not exist; mount its drive" in result.stderr
    assert CliRunner().invoke(cli.main, ["bench-io"]).exit_code == 2


MOST = 20 << 20
"""Bytes that a small drive holds."""


def cells_of(rates: dict[tuple[str, int, int], float]) -> list[Cell]:
    return [
        Cell(direction, block, threads, 2 * threads, 100, rate, 0.1, 0.2)
        for (direction, block, threads), rate in rates.items()
    ]


def test_the_fewest_threads_that_are_nearly_as_fast_are_advised() -> None:
    """And the smallest blocks that reach half of the best rate."""
    rates = {
        **{(WRITE, 256 * KIB, threads): 40.0 for threads in (1, 2, 4)},
        **{(READ, 256 * KIB, threads): 90.0 for threads in (1, 2, 4)},
        **{(MIXED, 256 * KIB, threads): 999.0 for threads in (1, 2, 4)},
        (WRITE, MIB, 1): 60.0,
        (WRITE, MIB, 2): 96.0,
        (WRITE, MIB, 4): 100.0,
        (READ, MIB, 1): 97.0,
        (READ, MIB, 2): 80.0,
        (READ, MIB, 4): 100.0,
    }
    found = advised(cells_of(rates))
    assert found == (2, 1, MIB, 100.0, 100.0)


def test_no_more_than_a_mebibyte_is_left_in_memory_for_a_slow_drive() -> None:
    rates = {(WRITE, 256 * KIB, 1): 1.0, (READ, 256 * KIB, 1): 1.0}
    rates |= {(WRITE, 64 * MIB, 1): 100.0, (READ, 64 * MIB, 1): 100.0}
    assert advised(cells_of(rates)).least_bytes == MIB
