"""What megatron-core's fused activation functions put out is rebuilt in layers placed ``offload-remat``."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from models import same_bits
from torch import Tensor, nn

import tba_offload as tba
from tba_lab import gpt
from tba_lab.gpt import GptShape, build_gpt, gpt_loss, random_batch
from tba_lab.megatron_cpu import seed_all, single_process
from tba_offload.config.policy import LayerId
from tba_offload.layers.stack import Layer, LayerStack
from tba_offload.megatron.layers import find_stack, fused_functions
from tba_offload.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]

LAYERS, ROWS, WIDTH, INNER = 2, 64, 16, 64
STEPS = 3
SHAPE = GptShape(layers=LAYERS, hidden=32, heads=4, sequence=16, vocab=64, dropout=0.1)
BATCH = 2


@pytest.fixture
def megatron() -> Iterator[None]:
    """The fused functions as they are written: to compile them here would take minutes."""
    stance = torch.compiler.set_stance("force_eager")
    with single_process(seed=1), stance:
        yield


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


# Models


def build_fused(shape: GptShape) -> nn.Module:
    """The model with the fusions that are off otherwise."""
    original = gpt._config

    def config(shape: GptShape) -> Any:
        found = original(shape)
        found.bias_activation_fusion = True
        return found

    with mock.patch.object(gpt, "_config", config):
        return build_gpt(shape, seed=0)


def train(model: nn.Module, shape: GptShape, session: Session | None) -> list[Tensor]:
    """Losses and gradients of some steps."""
    found: list[Tensor] = []
    for number in range(STEPS):
        seed_all(number)
        with session.step() if session is not None else nullcontext():
            loss = gpt_loss(model, random_batch(shape, batch_size=BATCH, seed=number))
            if session is not None:
                session.offloader.quiesce()
            torch.autograd.backward(loss)
        found += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("style", ["gpt", "llama"])
@pytest.mark.parametrize(
    "build", [lambda shape: build_gpt(shape, seed=0), build_fused], ids=["plain", "fused"]
)
def test_models(build: Callable[[GptShape], nn.Module], style: Any, dtype: Any) -> None:
    shape = dataclasses.replace(SHAPE, style=style, dtype=dtype)
    expected = train(build(shape), shape, None)
    moved = {}
    for default in ("offload", "offload-remat"):
        model = build(shape)
        config = tba.OffloadConfig(default=default, store=tba.StoreConfig(kind="host"), min_tensor_bytes=256)
        with Session(find_stack(model), [model], config, measure_memory=False) as session:
            assert_same(train(model, shape, session), expected)
            record = session.report()[-1]
            moved[default] = record.offloaded_bytes
    assert moved["offload"] - moved["offload-remat"] == record.rebuilt_bytes
    itemsize = 4 if dtype == "fp32" else 2
    tokens = BATCH * shape.sequence
    # Two norms, the function and the weights of attention; llama's norms and gates are of several parts.
    least = tokens * (2 * shape.hidden + shape.ffn_width + shape.heads * shape.sequence) * itemsize
    if style == "gpt":
        assert record.rebuilt_bytes == LAYERS * least
    else:
        assert record.rebuilt_bytes > LAYERS * least


# Functions


def fused(module: str, name: str) -> Any:
    return getattr(pytest.importorskip(f"megatron.core.fusions.{module}"), name)


class Fused(nn.Module):
    """A layer that calls one of the functions."""

    def __init__(self, call: Callable[[Tensor, Tensor, Tensor], Tensor], takes: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, takes, bias=False), nn.Linear(INNER, WIDTH)
        self.bias = nn.Parameter(torch.randn(takes))
        self.scale = nn.Linear(WIDTH, 1)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.call(self.up(x), self.bias, self.scale(x)))


GELU, GEGLU, SWIGLU = "fused_bias_gelu", "fused_bias_geglu", "fused_bias_swiglu"
RELU = "fused_weighted_squared_relu"
FUNCTIONS: dict[str, tuple[int, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "gelu": (1, lambda h, b, _: fused(GELU, "GeLUFunction").apply(h, b)),
    "geglu": (2, lambda h, *_: fused(GEGLU, "GeGLUFunction").apply(h)),
    "geglu and bias": (2, lambda h, b, _: fused(GEGLU, "BiasGeGLUFunction").apply(h, b)),
    "quick geglu": (
        2,
        lambda h, _, s: fused(GEGLU, "WeightedQuickGeGLUFunction").apply(h, s, False, torch.tensor(0.5)),
    ),
    "quick geglu and bias": (
        2,
        lambda h, b, s: fused(GEGLU, "WeightedBiasQuickGeGLUFunction").apply(
            h, b, s, False, torch.tensor(0.5)
        ),
    ),
    "swiglu": (2, lambda h, *_: fused(SWIGLU, "SwiGLUFunction").apply(h, False, False)),
    "swiglu and bias": (2, lambda h, b, _: fused(SWIGLU, "BiasSwiGLUFunction").apply(h, b, False, False)),
    "weighted swiglu": (2, lambda h, _, s: fused(SWIGLU, "WeightedSwiGLUFunction").apply(h, s, False)),
    "squared relu": (1, lambda h, _, s: fused(RELU, "WeightedSquaredReLUFunction").apply(h, s)),
}


def run(
    takes: int, call: Callable[[Tensor, Tensor, Tensor], Tensor], session: bool
) -> tuple[list[Tensor], int]:
    """Gradients of some steps, and the bytes that were made again in the last of them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Fused(call, takes * INNER) for _ in range(LAYERS)))
    layers = tuple(Layer(LayerId(number, str(number)), layer) for number, layer in enumerate(model))
    config = tba.OffloadConfig(
        default=tba.Placement.OFFLOAD_REMAT, store=tba.StoreConfig(kind="host"), min_tensor_bytes=1024
    )
    found: list[Tensor] = []
    stack = LayerStack(layers, functions=fused_functions())
    with Session(stack, [model], config, measure_memory=False) as attached:
        for number in range(STEPS):
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number), requires_grad=True)
            with attached.step() if session else nullcontext():
                model.train(session)  # a layer that trains outside of a step is warned of
                loss = model(x).pow(2).mean()
                attached.offloader.quiesce()
                loss.backward()
            found += [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]  # type: ignore[list-item]
            model.zero_grad(set_to_none=True)
        return found, attached.report()[-1].rebuilt_bytes if session else 0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    expected, _ = run(*FUNCTIONS[name], session=False)
    found, nbytes = run(*FUNCTIONS[name], session=True)
    assert_same(found, expected)
    assert nbytes == LAYERS * ROWS * INNER * 4


def test_what_is_saved_in_another_precision_is_no_source() -> None:
    def call(h: Tensor, *_: Tensor) -> Tensor:
        return fused(SWIGLU, "SwiGLUFunction").apply(h, True, False)  # type: ignore[no-any-return]

    expected, _ = run(2, call, session=False)
    found, nbytes = run(2, call, session=True)
    assert_same(found, expected)
    assert nbytes == 0


def test_a_function_is_given_what_looks_the_same() -> None:
    """A compiled one may choose its code by that."""
    seen: list[tuple[object, ...]] = []
    original = fused(GELU, "bias_gelu")

    def bias_gelu(*tensors: Tensor) -> Tensor:
        seen.append(tuple((type(tensor), tensor.requires_grad, tensor.stride()) for tensor in tensors))
        assert not torch.is_grad_enabled()
        return original(*tensors)  # type: ignore[no-any-return]

    with mock.patch("megatron.core.fusions.fused_bias_gelu.bias_gelu", bias_gelu):
        run(*FUNCTIONS["gelu"], session=True)
    assert len(seen) == 2 * LAYERS * STEPS
    assert len(set(seen)) == 1


def test_every_function_that_there_is_has_a_recipe() -> None:
    """Those of the installed version, so that a new one is not forgotten."""
    import megatron.core.fusions as package

    for module in (GELU, GEGLU, SWIGLU, RELU):
        fused(module, "torch")
    known = {function.__name__ for function in fused_functions()}
    written = {
        name
        for module in (GELU, GEGLU, SWIGLU, RELU)
        for name, found in vars(getattr(package, module)).items()
        if isinstance(found, type) and issubclass(found, torch.autograd.Function)
    }
    assert known == written
