"""Training on an NVIDIA GPU: the same bits, nothing that races, and a peak that the allocator confirms."""

from __future__ import annotations

import textwrap
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from children import run_python
from fake_kvikio import HAS_KVIKIO
from harness import COMPILER_LOOKS
from models import (
    HIDDEN,
    SEQUENCE,
    GptBlock,
    assert_same_history,
    assert_same_tensors,
    loss_of,
    make_model,
    make_tokens,
    train,
)
from torch import Tensor, nn

import tba_offload as tba
from tba_offload import BudgetConfig, OffloadConfig, Placement, Rule, StoreConfig

if TYPE_CHECKING:
    from models import History

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

STORES = [
    "host",
    "file",
    pytest.param("gds", marks=pytest.mark.skipif(not HAS_KVIKIO, reason="kvikio is not installed")),
]
PLACEMENTS: dict[str, tuple[Placement, tuple[Rule, ...]]] = {
    **{str(placement): (placement, ()) for placement in Placement},
    "mixed": (Placement.OFFLOAD, (Rule("0", Placement.RECOMPUTE), Rule("2", Placement.KEEP))),
}
HERE = Path(__file__).parent
WINDOW = 256 * 1024
LONG_SLEEP = 20_000_000
"""Clock cycles for which a kernel keeps the device busy: about 10 ms, in which the host gets far ahead."""


def config_for(placement: str, store: str, directory: Path) -> OffloadConfig:
    default, rules = PLACEMENTS[placement]
    return OffloadConfig(
        default=default,
        layers=rules,
        # Of recomputed layers only the inputs travel: a window that holds one of them.
        budget=BudgetConfig(in_flight_bytes=WINDOW // 8 if default.recomputes else WINDOW),
        store=StoreConfig(kind=store, directories=() if store == "host" else (directory,)),
        min_tensor_bytes=1024,
    )


def loss_on_gpu(model: nn.Module, number: int) -> Tensor:
    return loss_of(model, make_tokens(number).cuda())


def history_of(model: nn.Module, session: tba.Session | None, **how: Any) -> History:
    history = train(model, session, steps=2, micro_batches=2, loss=loss_on_gpu, **how)
    history.random_states.append(torch.cuda.get_rng_state())
    return history


def make(kind: str = "gpt", *, dropout: float = 0.1, dtype: torch.dtype = torch.float32) -> nn.Module:
    return make_model(kind, layers=3, dropout=dropout, dtype=dtype).cuda()


# The same bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", ["gpt", "llama", "encoder"])
def test_same_bits(kind: str, placement: str, store: str, dtype: torch.dtype, tmp_path: Path) -> None:
    expected = history_of(make(kind, dtype=dtype), None)
    model = make(kind, dtype=dtype)
    with tba.attach(model, config_for(placement, store, tmp_path)) as session:
        found = history_of(model, session)
        report = session.records
    assert_same_history(found, expected)
    moved = [record.offloaded_bytes for record in report]
    assert all(moved) if placement not in {"keep", "recompute"} else not any(moved)
    assert {record.peak_source for record in report} == {"cuda allocator"}


@pytest.mark.parametrize("store", STORES)
def test_same_bits_on_a_stream_of_the_users(store: str, tmp_path: Path) -> None:
    expected = history_of(make(), None)
    model = make()
    torch.cuda.synchronize()
    with (
        tba.attach(model, config_for("offload", store, tmp_path)) as session,
        torch.cuda.stream(torch.cuda.Stream()),
    ):
        found = history_of(model, session)
        torch.cuda.synchronize()
    assert_same_history(found, expected)


@COMPILER_LOOKS
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # the compiler's advice to be less precise
@pytest.mark.parametrize("store", STORES)
def test_same_bits_with_compiled_layers(store: str, tmp_path: Path) -> None:
    def compiled() -> nn.Module:
        model = make(dropout=0.0)
        for layer in model.layers:
            layer.compile()
        return model

    expected = history_of(compiled(), None)
    model = compiled()
    with tba.attach(model, config_for("offload", store, tmp_path)) as session:
        found = history_of(model, session)
        assert all(record.offloaded_bytes for record in session.records)
    assert_same_history(found, expected)


# Races, made likely: the host is far ahead of the device, or the device of the host


class Sleepy(nn.Module):
    """Layers between which the device sleeps, so that nothing is ready when the host asks."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GptBlock(0.0) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            torch.cuda._sleep(LONG_SLEEP)
            x = layer(x)
        return x


@pytest.mark.parametrize("sleeps_in_backward", [False, True])
@pytest.mark.parametrize("store", STORES)
def test_a_device_that_lags_behind_gets_the_same_bits(
    store: str, sleeps_in_backward: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Sleepy().cuda()
    x = torch.randn(8, SEQUENCE, HIDDEN, device="cuda")

    def gradients(session: tba.Session | None) -> list[Tensor]:
        with session.step() if session is not None else nullcontext():
            y = model(x)
            if sleeps_in_backward:
                y.register_hook(lambda _: torch.cuda._sleep(LONG_SLEEP))
            return list(torch.autograd.grad(y.float().pow(2).sum(), list(model.parameters())))

    expected = gradients(None)
    with tba.attach(model, config_for("offload", store, tmp_path), layers=list(model.layers)) as session:
        for _ in range(3):
            found = gradients(session)
            assert_same_tensors(found, expected)


# Times


class Dozing(nn.Module):
    """A layer in which the device sleeps: for some time in forward, twice as long in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        torch.cuda._sleep(LONG_SLEEP)
        inner = self.into(x)
        inner.register_hook(lambda _: torch.cuda._sleep(2 * LONG_SLEEP))
        return self.out(nn.functional.gelu(inner))


def length_of_sleep() -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(5):  # while the clocks of the device rise
        began.record()
        torch.cuda._sleep(LONG_SLEEP)
        ended.record()
        ended.synchronize()
    return began.elapsed_time(ended) / 1000


@pytest.mark.parametrize("store", STORES)
def test_a_step_takes_the_time_of_the_device(store: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(Dozing() for _ in range(4))).cuda()
    x = torch.randn(8, SEQUENCE, HIDDEN, device="cuda", requires_grad=True)
    config = config_for("offload", store, tmp_path)
    with tba.attach(layers, config, layers=list(layers), run_log=tmp_path / "run.jsonl") as session:
        for _ in range(4):
            torch.cuda._sleep(10 * LONG_SLEEP)  # the device is far behind when the step begins
            with session.step():
                layers(x).pow(2).sum().backward()
    sleeps = len(layers) * (1 + 2) * length_of_sleep()
    assert 0.7 * sleeps < session.records[-1].seconds < 1.5 * sleeps


# Memory


@pytest.mark.parametrize("store", STORES)
def test_the_allocators_peak_keeps_the_promise(store: str, tmp_path: Path) -> None:
    """Peak ≤ what keep needs for two layers + ceiling, however many layers there are."""
    width, rows = 1024, 8192
    one = rows * width * 4
    ceiling = 4 * one

    def peak(layers: int, placement: Placement) -> int:
        block = [nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU()]
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(*block) for _ in range(layers))).cuda()
        config = OffloadConfig(
            default=placement,
            budget=BudgetConfig(in_flight_bytes=ceiling),
            store=StoreConfig(kind=store, directories=() if store == "host" else (tmp_path,)),
        )
        x = torch.randn(rows, width, device="cuda")
        with tba.attach(model, config, layers=list(model)) as session:
            for _ in range(3):
                with session.step() as step:
                    model(x).pow(2).sum().backward()
            assert step.record is not None
            assert step.record.activation_peak_bytes is not None
            return step.record.activation_peak_bytes

    few, many = (peak(layers, Placement.OFFLOAD) for layers in (4, 16))
    # One activation more or less, as transfers end; 32 layers had the peak of 4, 10.25 activations.
    assert many <= few + one
    assert many <= peak(2, Placement.KEEP) + ceiling
    assert many <= 0.5 * peak(16, Placement.KEEP)


@pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync"])
@pytest.mark.parametrize("store", STORES)
def test_same_bits_with_another_allocator(setting: str, store: str, tmp_path: Path) -> None:
    program = f"""
        from pathlib import Path
        from test_gpu import *
        torch.use_deterministic_algorithms(mode=True)
        expected = history_of(make(), None)
        model = make()
        with tba.attach(model, config_for("offload", {store!r}, Path({str(tmp_path)!r}))) as session:
            found = history_of(model, session)
        assert_same_history(found, expected)
    """
    variables = {"PYTORCH_CUDA_ALLOC_CONF": setting, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    ended = run_python("-c", textwrap.dedent(program), cwd=HERE, **variables)  # where test_gpu is found
    assert ended.returncode == 0, ended.stderr
