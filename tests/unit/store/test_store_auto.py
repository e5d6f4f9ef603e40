"""Which kind of store ``kind: auto`` takes, and the measurements of ``tba-offload doctor``."""

from __future__ import annotations

import errno
import sys
from typing import TYPE_CHECKING, Any

import fake_kvikio
import pytest
import torch
from ordered_device import OrderedDevice
from store_contract import CPU, descriptors, get, pattern, put

from tba_offload.errors import ConfigError, StoreError
from tba_offload.store import bench, gds, open_store
from tba_offload.store.bench import Row, advised, measure
from tba_offload.store.file import FileStore
from tba_offload.store.gds import GdsStore
from tba_offload.store.host import HostStore

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


@pytest.fixture
def device() -> OrderedDevice:
    return OrderedDevice(seconds=0.0)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nvidia-fs driver is loaded."""
    (tmp_path / "driver").touch()
    monkeypatch.setattr(gds, "NVIDIA_FS", tmp_path / "driver")


# The choice


@pytest.mark.usefixtures("kvikio", "driver")
def test_auto_is_gds_where_the_driver_is_loaded(device: OrderedDevice, tmp_path: Path) -> None:
    before = descriptors()
    with open_store(kind="auto", directories=[tmp_path], device=device) as store:
        assert isinstance(store, GdsStore)
        assert store.description["chosen"] == {"why": "the nvidia-fs driver is loaded"}
        data = pattern(100_003)
        assert torch.equal(get(store, put(store, data)), data)
    assert descriptors() == before


@pytest.mark.usefixtures("kvikio")
def test_auto_is_file_without_the_driver(
    device: OrderedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gds, "NVIDIA_FS", tmp_path / "none")
    with open_store(kind="auto", directories=[tmp_path], device=device) as store:
        assert isinstance(store, FileStore)
        told: Any = store.description["chosen"]
    assert told["why"] == "the nvidia-fs driver of GPUDirect Storage is not loaded"


@pytest.mark.usefixtures("driver")
def test_auto_is_file_without_kvikio(
    device: OrderedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with open_store(kind="auto", directories=[tmp_path], device=device) as store:
        assert isinstance(store, FileStore)
        told: Any = store.description["chosen"]
    assert told["why"] == "GPUDirect Storage needs kvikio, which is not installed"


@pytest.mark.usefixtures("kvikio", "driver")
def test_auto_is_file_on_each_drive_whose_files_cufile_refuses(
    device: OrderedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = [tmp_path / "refused", tmp_path / "taken"]
    for directory in directories:
        directory.mkdir()
    refusals = iter([OSError(errno.EOPNOTSUPP, "not taken")])
    original = fake_kvikio.CuFile.__init__

    def refusing(file: fake_kvikio.CuFile, fd: int) -> None:
        for error in refusals:
            raise error
        original(file, fd)

    monkeypatch.setattr(fake_kvikio.CuFile, "__init__", refusing)
    before = descriptors()
    with open_store(kind="auto", directories=directories, device=device) as store:
        parts: Any = store.description["stores"]
        assert [part["kind"] for part in parts] == ["file", "gds"]
        assert "GPUDirect Storage cannot be had there: not taken" in parts[0]["chosen"]["why"]
    assert descriptors() == before


@pytest.mark.usefixtures("kvikio", "driver")
def test_on_a_cpu_nothing_is_to_choose(tmp_path: Path) -> None:
    with open_store(kind="auto", directories=[tmp_path], device=CPU) as store:
        assert isinstance(store, FileStore)
        assert "chosen" not in store.description


# Threads


@pytest.mark.parametrize(("cores", "threads"), [(2, 1), (64, 2)])
def test_threads_go_by_the_cores(
    cores: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    for given in ({}, {"writers": 3}):
        with open_store(directories=[tmp_path], device=CPU, **given) as store:
            description = store.description
        assert (description["readers"], description["writers"]) == (threads, given.get("writers", threads))


@pytest.mark.parametrize("value", [0, 257, 2.5, True, "many"])
def test_a_number_of_threads_is_a_number(value: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no number of threads; write one from 1 to 256"):
        open_store(kind="file", directories=[tmp_path], device=CPU, writers=value)


# The measurement


@pytest.mark.parametrize("kind", ["file", "host"])
def test_a_measurement_leaves_store_and_generator_as_they_were(kind: str, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    store = HostStore(device=CPU) if kind == "host" else FileStore(tmp_path, device=CPU)
    with store:
        rates = measure(store, CPU, extent_bytes=30_001, extents=3, seconds=0.01)
        assert (store.used_bytes, store.pending()) == (0, 0)
        assert [load.write.nbytes for load in store.take_loads()] == [0]
    assert min(rates) > 0
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.usefixtures("kvikio")
def test_a_measurement_that_fails_leaves_no_extent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with GdsStore(tmp_path, device=CPU) as store:
        monkeypatch.setattr(
            fake_kvikio.CuFile, "read", lambda *_: (_ for _ in ()).throw(OSError(5, "broken"))
        )
        with pytest.raises(StoreError, match="broken"):
            measure(store, CPU, extent_bytes=4096, seconds=0.0)
        assert (store.used_bytes, store.pending()) == (0, 0)


def test_bench_measures_each_size_with_each_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "BLOCKS", (4096, 3 * MIB))
    shown: list[Row] = []
    before = descriptors()
    rows = bench.bench(str(tmp_path), CPU, "file", seconds=0.0, show=shown.append)
    assert [(row.threads, row.block_bytes) for row in rows] == [
        (threads, block) for threads in bench.THREADS for block in (4096, 3 * MIB)
    ]
    assert shown == rows
    assert all(min(row.write, row.read, row.both) > 0 for row in rows)
    assert descriptors() == before
    assert list(tmp_path.iterdir()) == []


def test_advice_is_the_fewest_threads_that_are_nearly_as_fast() -> None:
    rows = [
        Row(MIB // 4, 1, write=2.0, read=1.0, both=1.0),
        Row(MIB // 2, 1, write=5.0, read=5.0, both=1.0),
        Row(4 * MIB, 1, write=9.6, read=8.0, both=1.0),
        Row(4 * MIB, 2, write=10.0, read=9.6, both=1.0),
        Row(4 * MIB, 4, write=9.0, read=10.0, both=1.0),
    ]
    assert advised(rows) == {"writers": 1, "readers": 2, "min_tensor_bytes": MIB // 2}
    slow = [Row(MIB, 1, 1.0, 1.0, 1.0), Row(64 * MIB, 1, 9.0, 9.0, 9.0)]
    assert advised(slow)["min_tensor_bytes"] == MIB
