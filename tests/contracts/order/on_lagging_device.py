"""What ``test_lagging_device.py`` runs in a process of its own, on the device of ``lagging.py``.

The device computes later than it is asked, gives freed memory away at once and overwrites it: what nothing
orders gives other bits. PyTorch's own dispatcher, allocator and streams are at work.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import types
import warnings
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lagging
import pytest
import store_contract
import torch
from covering import each_once, full, of_which
from harness import KIB, MIB, PLACEMENTS, config_for, quiesce
from models import assert_same_history, loss_of, make_model, make_tokens, same_bits, train
from optimizers import MAKERS, policy
from store_contract import StoreContract
from torch import Tensor, nn

import tba_offload as tba
from tba_offload.config import BudgetConfig, OffloadConfig, StoreConfig
from tba_offload.device import READY, Accelerator, ByteRange, aligned_range, device_of
from tba_offload.errors import DeviceError, TransferError, UnsupportedError
from tba_offload.megatron.training import report_loss
from tba_offload.report.log import read_run_log
from tba_offload.store.file import FileStore
from tba_offload.store.host import HostStore
from tba_offload.store.multi import MultiStore
from tba_offload.transfer import offloader as engine
from tba_offload.transfer.offloader import Offloader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from models import History

    from tba_offload.store.base import Extent, Store

LAG = torch.device(lagging.LAG, 0)
STORES = ("file", "host")
DTYPES = (torch.float32, torch.bfloat16)
LATE = ("operations", "copies")
"""What comes late: the host is far ahead of operations, or they are far ahead of copies."""
WINDOW = 256 * KIB
WIDTH, ROWS = 64, 1024
ONE = WIDTH * ROWS * 4
"""Bytes of one activation of :func:`wide_layers`."""


def place(store: str, tmp_path: Path) -> dict[str, Any]:
    return {"directory": tmp_path} if store == "file" else {}


def loss_on_lagging(model: nn.Module, number: int) -> Tensor:
    return loss_of(model, make_tokens(number).to(LAG))


def made(kind: str = "gpt", dtype: torch.dtype = torch.float32) -> nn.Module:
    return make_model(kind, layers=3, dropout=0.1, dtype=dtype).to(LAG)


def history_of(model: nn.Module, session: tba.Session | None = None) -> History:
    history = train(model, session, steps=2, micro_batches=2, loss=loss_on_lagging)
    history.random_states.append(torch.get_device_module(LAG).get_rng_state())
    return history


@cache
def plain_history(kind: str = "gpt", dtype: torch.dtype = torch.float32) -> History:
    return history_of(made(kind, dtype))


def wide_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8))).to(LAG)


def gradients_of(model: nn.Module, output: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(output.pow(2).sum(), list(model.parameters()))
    return [each.cpu() for each in found]


@pytest.fixture(autouse=True)
def the_device_works() -> Iterator[None]:
    yield
    lagging.heal()


# The same bits


@pytest.mark.parametrize("kind", of_which(("gpt", "llama", "encoder"), "gpt"))
@pytest.mark.parametrize(("placement", "store", "dtype", "late"), each_once(PLACEMENTS, STORES, DTYPES, LATE))
def test_same_bits(
    placement: str, store: str, dtype: torch.dtype, late: str, kind: str, tmp_path: Path
) -> None:
    expected, model = plain_history(kind, dtype), made(kind, dtype)
    # Of recomputed layers only the inputs travel: a window that holds one of them.
    in_flight = WINDOW // 8 if placement.startswith("recompute") else WINDOW
    config = config_for(default=placement, in_flight=in_flight, **place(store, tmp_path))
    with lagging.late(**{late: 0.0003}), tba.attach(model, config) as session:
        found = history_of(model, session)
        report = session.records
    assert_same_history(found, expected)
    moved = [record.offloaded_bytes for record in report]
    if placement == "auto":  # it may find that nothing can travel without a wait
        assert any(moved)
    else:
        assert all(moved) if placement not in {"keep", "recompute"} else not any(moved)
    assert {record.peak_source for record in report} == {"lag allocator"}


def test_the_device_finds_transfers_that_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the tests above would say little."""
    model, x = wide_layers(), torch.randn(ROWS, WIDTH).to(LAG)
    expected = gradients_of(model, model(x))
    config = config_for(in_flight=4 * ONE)
    with lagging.late(operations=0.001), tba.attach(model, config, layers=list(model)) as session:
        with monkeypatch.context() as patched, session.step():
            patched.setattr(Accelerator, "event", lambda *_: READY)
            found = gradients_of(model, model(x))
        torch.accelerator.synchronize()  # or copies would go on into memory that the session gives back
    assert not all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


class Elsewhere(nn.Module):
    """Layers that compute on a stream of their own, ordered as a careful program orders them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)
        )
        self.streams = [torch.accelerator.current_stream(), torch.Stream(LAG)]

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            here, stream = torch.accelerator.current_stream(), self.streams[number % 2]
            stream.wait_stream(here)
            with stream:
                x.record_stream(stream)
                x = layer(x)
            here.wait_stream(stream)
            x.record_stream(here)
        return x


class Apart(nn.Module):
    """Two layers that compute at the same time, each on a stream of its own; the first one is slow."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU()) for _ in range(2))
        self.streams = [torch.Stream(LAG), torch.Stream(LAG)]

    def forward(self, x: Tensor) -> Tensor:
        here, outputs = torch.accelerator.current_stream(), []
        for layer, stream in zip(self.layers, self.streams, strict=True):
            stream.wait_stream(here)
            with stream:
                x.record_stream(stream)
                if not outputs:
                    lagging.sleep(0.02)
                outputs.append(layer(x))
        for output, stream in zip(outputs, self.streams, strict=True):
            here.wait_stream(stream)
            output.record_stream(here)
        return torch.cat(outputs, -1)


@pytest.mark.parametrize("made", [Elsewhere, Apart])
@pytest.mark.parametrize("store", STORES)
def test_same_bits_on_streams_of_the_users(store: str, made: type[nn.Module], tmp_path: Path) -> None:
    """A write waits for the stream that made its bytes, whichever is current when it is queued."""
    torch.manual_seed(0)
    model, x = made().to(LAG), torch.randn(64, 64).to(LAG)

    def gradients() -> list[Tensor]:
        found = torch.autograd.grad(model(x).pow(2).sum(), list(model.parameters()))
        return [each.cpu() for each in found]

    expected = gradients()
    layers: Any = model.layers
    config = config_for(in_flight=WINDOW, **place(store, tmp_path))
    with lagging.late(operations=0.0003), tba.attach(model, config, layers=list(layers)) as session:
        for _ in range(3):
            with session.step():
                found = gradients()
            assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def test_a_read_comes_after_the_last_work_with_the_memory_that_it_fills(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An allocator gives memory in the order of its stream: work of another thread may still be to come."""
    device = device_of(LAG)
    expected = torch.arange(MIB // 4, device=LAG)
    with MultiStore([HostStore(device=device, capacity=4 * MIB)]) as store:
        offloader = Offloader(store, device)
        saved = offloader.save(expected.clone().untyped_storage(), "layer 0")
        quiesce(offloader)

        def just_freed(*settings: Any) -> ByteRange:
            room = aligned_range(*settings)
            lagging.sleep(0.05)
            room.tensor().fill_(7)
            return room

        monkeypatch.setattr(engine, "aligned_range", just_freed)
        storage, start = offloader.fetch(saved)
        found = ByteRange(storage, start, expected.nbytes).tensor().cpu()
        assert same_bits(found, ByteRange.of(expected).tensor().cpu())


@pytest.mark.parametrize("placement", of_which(["offload", "recompute-offload"], "offload"))
def test_same_bits_of_activations_that_lie_on_several_drives(placement: str, tmp_path: Path) -> None:
    drives = tuple(tmp_path / name for name in "abc")
    for drive in drives:
        drive.mkdir()
    expected, model = plain_history(), made()
    config = OffloadConfig(
        default=placement,
        min_tensor_bytes=KIB,
        budget=BudgetConfig(in_flight_bytes=WINDOW // 8),
        store=StoreConfig(kind="file", directories=drives),
    )
    seen: set[str] = set()
    with lagging.late(copies=0.0003), tba.attach(model, config) as session:
        session.store.watch_moves(lambda move: seen.add(move.place))
        found = history_of(model, session)
    assert_same_history(found, expected)
    assert seen == set(map(str, drives))


# Optimizer states


@pytest.mark.parametrize(
    ("name", "store", "late", "when"),
    each_once(("adam", "adamw-foreach"), STORES, LATE, ("step", "backward")),
)
def test_states_give_the_bits_of_the_optimizer(
    name: str, when: str, store: str, late: str, tmp_path: Path
) -> None:
    def trained(*, offloads: bool) -> list[Tensor]:
        model = made()
        optimizer = MAKERS[name](model.parameters())
        directories = [str(tmp_path)] if store == "file" else []
        chosen = policy(tmp_path, store={"kind": store, "directories": directories})
        chosen["states"]["when"] = when
        states = tba.offload_optimizer(optimizer, chosen, model=model) if offloads else None
        torch.manual_seed(7)
        for number in range(3):
            loss_on_lagging(model, number).backward()
            optimizer.step()
            optimizer.zero_grad()
        if states is not None:
            last = states.records[-1]
            assert last.read_bytes > 0 < last.written_bytes
            assert last.in_backward == (last.sub_groups if when == "backward" else 0)
            states.close()
        entries = optimizer.state_dict()["state"].values()
        moments = [entry[key] for entry in entries for key in ("exp_avg", "exp_avg_sq")]
        return [each.detach().cpu() for each in (*model.parameters(), *moments)]

    expected = trained(offloads=False)
    with lagging.late(**{late: 0.0003}):
        found = trained(offloads=True)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("store", STORES)
def test_states_are_read_while_the_device_has_other_work(store: str, tmp_path: Path) -> None:
    """The host is far ahead of it in backward: a slot that is free already is not waited for."""
    model = made()
    optimizer = MAKERS["adam"](model.parameters())
    chosen = policy(tmp_path, store={"kind": store, "directories": [str(tmp_path)] * (store == "file")})
    chosen["states"]["when"] = "backward"
    early: list[bool] = []
    with tba.offload_optimizer(optimizer, chosen, model=model) as states:
        for number in range(3):
            loss = loss_on_lagging(model, number)
            torch.accelerator.synchronize()
            lagging.sleep(1.0 if number == 2 else 0.0)
            then = device_of(LAG).event()
            if number == 2:
                states.watch_moves(lambda move, then=then: early.append(move.writes or then.query()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        states.watch_moves(None)
    assert not all(early)


# Memory


@pytest.mark.parametrize("store", STORES)
def test_the_allocators_peak_keeps_the_promise(store: str, tmp_path: Path) -> None:
    """Peak ≤ what keep needs for two layers + ceiling, however many layers there are."""
    width, rows = 64, 1024
    ceiling = 4 * rows * width * 4

    def peak(layers: int, placement: str) -> int:
        torch.manual_seed(0)
        block = (nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        model = nn.Sequential(*(nn.Sequential(*block) for _ in range(layers))).to(LAG)
        config = config_for(default=placement, in_flight=ceiling, **place(store, tmp_path))
        x = torch.randn(rows, width).to(LAG)
        with tba.attach(model, config, layers=list(model)) as session:
            for _ in range(3):
                with session.step() as step:
                    model(x).pow(2).sum().backward()
        assert step.record is not None
        assert step.record.activation_peak_bytes is not None
        return step.record.activation_peak_bytes

    with lagging.late(copies=0.001):
        many = peak(12, "offload")
        assert many <= peak(2, "keep") + ceiling
        assert many <= 0.5 * peak(12, "keep")


def test_reading_ahead_takes_no_memory_that_is_not_there() -> None:
    model, x = wide_layers(), torch.randn(ROWS, WIDTH).to(LAG)
    expected = gradients_of(model, model(x))
    with tba.attach(model, config_for(in_flight=None), layers=list(model)) as session:
        with session.step() as step:
            output = model(x)
            quiesce(session.offloader)
            torch.accelerator.empty_cache()
            with lagging.memory_of(torch.accelerator.memory_allocated() + 8 * ONE):
                found = gradients_of(model, output)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
    assert step.record is not None
    assert 0 < step.record.given_up_bytes < step.record.read_bytes == 15 * ONE


# Copies


@pytest.mark.parametrize("store", [*STORES, "tiered"])
def test_no_slab_is_pinned_inside_a_step(store: str, tmp_path: Path) -> None:
    """Host memory that has a limit is pinned when the store opens; without one it grows as it is needed."""
    model = made()
    where = {"directory": tmp_path} if store != "host" else {"capacity": 64 * MIB}
    if store == "tiered":
        where["host_capacity"] = 4 * MIB
    with tba.attach(model, config_for(in_flight=WINDOW, **where)) as session:
        before = lagging.count("pinned_bytes")
        history_of(model, session)
        assert lagging.count("pinned_bytes") <= before  # tests before this one may have left some


@pytest.mark.parametrize("store", [*STORES, "tiered"])
def test_where_nothing_may_be_pinned_pageable_memory_serves(store: str, tmp_path: Path) -> None:
    expected, model = plain_history(), made()
    where = {"directory": tmp_path} if store != "host" else {"capacity": 64 * MIB}
    if store == "tiered":
        where["host_capacity"] = 4 * MIB
    before = lagging.count("pinned_bytes")
    with lagging.locked_memory_of(0):
        with pytest.warns(RuntimeWarning, match="cannot be pinned"):
            session = tba.attach(model, config_for(in_flight=WINDOW, **where), run_log=tmp_path / "run.jsonl")
        with session:  # a second warning would be an error
            assert_same_history(history_of(model, session), expected)
            record, description = session.records[-1], session.store.description
            train(model, session, steps=2, loss=loss_on_lagging)
    assert lagging.count("pinned_bytes") == before
    assert record.offloaded_bytes > 0 < record.read_bytes
    assert ("pageable memory" in str(description)) is (store != "file")
    events: Any = read_run_log(tmp_path / "run.jsonl").others
    (rates,) = [event["drive"] for event in events if event["event"] == "plan"]
    assert not (rates["host"] if store == "tiered" else rates)["is_assumed"]  # this memory has its own rates


# What has ended, or has failed


def most_pinned(directory: Path, store: str) -> int:
    """Bytes that were pinned at the end of a run, whose session is gone when this returns."""
    model = made()
    with tba.attach(model, config_for(in_flight=WINDOW, **place(store, directory))) as session:
        history_of(model, session)
        most = lagging.count("pinned_bytes")
    del session
    gc.collect()
    return most


@pytest.mark.parametrize("store", STORES)
def test_pinned_memory_is_given_back_and_no_thread_spins(store: str, tmp_path: Path) -> None:
    """To PyTorch, which pins for such a device; the next run takes it."""
    spinning, most = lagging.Event.spinning, most_pinned(tmp_path, store)
    assert lagging.count("pinned_bytes") == most_pinned(tmp_path, store) == most > 0
    assert lagging.Event.spinning == spinning


@pytest.mark.parametrize("kind", STORES)
def test_a_forked_child_that_collects_a_store_leaves_the_device_alone(kind: str, tmp_path: Path) -> None:
    device = device_of(LAG)
    made = FileStore(tmp_path, device=device) if kind == "file" else HostStore(device=device)
    store = MultiStore([made])
    extent = store_contract.put(store, torch.zeros(5000, dtype=torch.uint8))
    store.release(extent)
    child = os.fork()
    if child == 0:
        code = 99
        try:
            signal.alarm(30)
            warnings.simplefilter("ignore")
            store = made = None  # type: ignore[assignment]
            gc.collect()
            code = lagging.count("calls_in_child")
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    store.close()


@pytest.mark.parametrize("store", STORES)
def test_an_operation_that_fails_is_not_taken_for_a_drive_that_failed(store: str, tmp_path: Path) -> None:
    model = made()
    with tba.attach(model, config_for(in_flight=WINDOW, **place(store, tmp_path))) as session:
        with pytest.raises(TransferError, match="No drive is at fault") as caught, session.step():
            loss = loss_on_lagging(model, 0)
            lagging.fail()
            loss_on_lagging(model, 1)
            quiesce(session.offloader)
            loss.backward()
        assert isinstance(caught.value.__cause__, DeviceError)
        assert session.store.take_outages() == []
        assert all(load.in_service for load in session.store.take_loads())
        del loss, caught
        lagging.heal()


@pytest.mark.parametrize("placement", ["keep", "offload", "recompute"])
def test_a_graph_that_is_captured_is_noticed(placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    with tba.attach(model, config_for(default=placement)) as session:
        monkeypatch.setattr(torch.get_device_module(LAG), "is_capturing", True)
        noticed = pytest.raises(UnsupportedError, match="while a CUDA graph is captured")
        with nullcontext() if placement == "keep" else noticed, session.step():
            loss_on_lagging(model, 0).backward()


class Capturing(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.layer, self.where = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))), where

    def forward(self, x: Tensor) -> Tensor:
        module = torch.get_device_module(LAG)
        module.is_capturing = self.where == "forward"
        y = self.layer(x)
        module.is_capturing = False
        if self.where == "backward":
            y.register_hook(lambda gradient: setattr(module, "is_capturing", True))
        return y


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_graph_that_is_captured_inside_a_layer_is_noticed(where: str) -> None:
    layer, x = Capturing(where).to(LAG), torch.randn(ROWS, WIDTH).to(LAG)
    module = torch.get_device_module(LAG)
    with tba.attach(layer, config_for(in_flight=4 * ONE), layers=[layer]) as session:
        try:
            with (
                pytest.raises(UnsupportedError, match="Capture graphs only outside attached layers"),
                session.step(),
            ):
                y = layer(x)
                quiesce(session.offloader)
                y.sum().backward()
        finally:
            module.is_capturing = False


class Replaying(nn.Module):
    """A layer that is compiled to CUDA graphs: each call runs another node of Inductor's tree of them."""

    def __init__(self, manager: types.SimpleNamespace) -> None:
        super().__init__()
        self.layer, self.manager = nn.Linear(WIDTH, WIDTH), manager

    def forward(self, x: Tensor) -> Tensor:
        self.manager.current_node = object()
        return self.layer(x)


@pytest.mark.parametrize("placement", ["keep", "offload", "recompute"])
def test_a_layer_that_is_compiled_to_graphs_is_noticed(
    placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs as a graph beside attached layers is nothing to them."""
    manager = types.SimpleNamespace(current_node=None)
    trees = types.SimpleNamespace(get_manager=lambda index, create_if_none_exists: manager)
    plain, graphed = nn.Linear(WIDTH, WIDTH), Replaying(manager)
    x = torch.randn(ROWS, WIDTH).to(LAG)
    model = nn.Sequential(graphed, plain).to(LAG)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    with tba.attach(model, config_for(default=placement), layers=[plain]) as session, session.step():
        model(x).sum().backward()
    with tba.attach(model, config_for(default=placement), layers=[graphed]) as session:
        noticed = pytest.raises(UnsupportedError, match=r"runs as CUDA graphs.* mode='default'")
        with nullcontext() if placement == "keep" else noticed, session.step():
            model(x).sum().backward()


# Figures


FAR_BEHIND = 0.5
"""Seconds by which the device ends a step later than the host."""


def late_loss(step: tba.Step, loss: Tensor, way: str) -> None:
    """Gives a step its loss, by the end of which the host is done long before the device."""
    lagging.sleep(FAR_BEHIND)
    if way == "Megatron's":  # sums, with the numbers of tokens in them
        reported = torch.stack([loss.detach() * 8, torch.full_like(loss, 8)])
        report_loss(step, [{"lm loss": reported}, {"lm loss": (reported[0], reported[1])}])
    else:
        step.loss = loss.detach()


@pytest.mark.parametrize("way", ["a tensor", "Megatron's"])
def test_nothing_waits_for_the_loss_of_a_step(way: str) -> None:
    model, losses = made(), []
    with tba.attach(model, config_for(default="keep")) as session:
        for number in range(3):
            before = lagging.count("host_waits")
            with session.step() as step:
                loss = loss_on_lagging(model, number)
                loss.backward()
                late_loss(step, loss, way)
            assert step.record is not None
            assert (step.record.loss, session.records[-1].loss) == (None, None)
            assert lagging.count("host_waits") == before
            losses.append(loss.item())
            assert [record.loss for record in session.records] == losses


@pytest.mark.parametrize("way", ["a tensor", "Megatron's"])
def test_the_run_log_has_the_loss_and_the_time_of_the_device(way: str, tmp_path: Path) -> None:
    """Also of a last step that ends when the host has long closed the session."""
    model, losses, log = made(), [], tmp_path / "run.jsonl"
    with tba.attach(model, config_for(default="keep"), run_log=log) as session:
        for number in range(3):
            with session.step() as step:
                loss = loss_on_lagging(model, number)
                loss.backward()
                late_loss(step, loss, way)
            losses.append(loss.detach())
    steps = read_run_log(log).steps
    assert [step.step for step in steps] == [1, 2, 3]
    assert [step.loss for step in steps] == [loss.item() for loss in losses]
    assert all(step.seconds > FAR_BEHIND for step in steps)
    assert session.records == list(steps)


# The contract of stores, for bytes that go through slabs


class Given:
    def synchronize(self) -> None:
        torch.accelerator.synchronize()

    def wait(self, stream: Any = None) -> None:
        raise AssertionError("I/O threads wait for events, not streams")

    def query(self) -> bool:
        return False


class OnLagging(StoreContract):
    @pytest.fixture(autouse=True)
    def bytes_lie_on_the_device(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        on_host = store_contract.pattern

        def pattern(nbytes: int, seed: int = 0) -> Tensor:
            with torch.device("cpu"):
                return on_host(nbytes, seed).to(LAG)

        monkeypatch.setattr(store_contract, "pattern", pattern)

        class Gate(store_contract.Gate):
            """Where it opens, what the device was given before is done too."""

            def synchronize(self) -> None:
                super().synchronize()
                torch.accelerator.synchronize()

        monkeypatch.setattr(store_contract, "READY", Given())
        monkeypatch.setattr(store_contract, "Gate", Gate)
        with torch.device(LAG), lagging.late(copies=0.0001):
            yield


class TestFileStoreOnLagging(OnLagging):
    def make_store(self, directory: Path, **options: Any) -> Store:
        return FileStore(directory, device=device_of(LAG), **options)

    def corrupt(self, store: Store, extent: Extent) -> None:
        assert isinstance(store, FileStore)
        file, place = Path(f"/proc/self/fd/{store.fd}"), extent.offset + extent.lead
        with file.open("r+b", buffering=0) as opened:  # not by its own, which wants whole blocks
            changed = bytes([os.pread(opened.fileno(), 1, place)[0] ^ 1])
            os.pwrite(opened.fileno(), changed, place)
            os.fsync(opened.fileno())


@full
class TestHostStoreOnLagging(OnLagging):
    checks_what_it_reads = False

    def make_store(self, directory: Path, **options: Any) -> Store:
        return HostStore(device=device_of(LAG), slab_bytes=MIB, **options)

    def corrupt(self, store: Store, extent: Extent) -> None:
        bit = torch.zeros(extent.nbytes, dtype=torch.uint8)
        store.read(extent, ByteRange.of(bit))
        store.write(extent, ByteRange.of(bit ^ 1))
