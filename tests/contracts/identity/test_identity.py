"""Storages, views of them, and what counts as an activation at all."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import same_bits
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tba_offload.capture.views import StaticStorages, is_understood, view_of, viewed

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = torch.device("cpu")
ELEMENTS = 96
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int16,
    torch.complex64,
    torch.bool,
)


def filled(dtype: torch.dtype, elements: int = ELEMENTS) -> Tensor:
    """Elements with all bits at random, NaNs and denormals among them."""
    generator = torch.Generator().manual_seed(elements)
    if dtype is torch.bool:
        return torch.randint(0, 2, (elements,), generator=generator).bool()
    nbytes = elements * dtype.itemsize
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype)


@st.composite
def strided_views(draw: st.DrawFn) -> Tensor:
    """Any view of up to three dimensions: transposed, expanded, with gaps, with overlaps, with an offset."""
    shape = draw(st.lists(st.integers(1, 4), max_size=3))
    stride = draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    reach = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    offset = draw(st.integers(0, ELEMENTS - 1 - reach))
    return filled(draw(st.sampled_from(DTYPES))).as_strided(shape, stride, offset)


def same_elements(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit, whatever the strides of the two are."""
    return same_bits(*(tensor.clone(memory_format=torch.contiguous_format) for tensor in (a, b)))


# Views


@given(strided_views())
def test_a_view_is_rebuilt_from_its_storage(tensor: Tensor) -> None:
    rebuilt = viewed(tensor.untyped_storage(), view_of(tensor))
    assert rebuilt.untyped_storage() is tensor.untyped_storage()
    assert (rebuilt.stride(), rebuilt.storage_offset()) == (tensor.stride(), tensor.storage_offset())
    assert same_elements(rebuilt, tensor)


# What is understood


class Marked(Tensor):
    """A subclass, as quantization and distribution libraries make them."""


def sparse() -> Tensor:
    return torch.eye(4).to_sparse()


def compressed() -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
        return torch.eye(4).to_sparse_csr()


def quantized() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


def nested() -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(4)


def emptied() -> Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def unaligned() -> Tensor:
    """Floats that do not start at a multiple of four bytes, as in files with a header."""
    return torch.frombuffer(bytearray(33), dtype=torch.float32, offset=1, count=8)


ODD: dict[str, Callable[[], Tensor]] = {
    "sparse": sparse,
    "compressed sparse": compressed,
    "oneDNN": lambda: torch.ones(4).to_mkldnn(),
    "quantized": quantized,
    "nested": nested,
    "subclass": lambda: torch.ones(4).as_subclass(Marked),
    "fake": fake,
    "lazy conjugate": lambda: torch.ones(4, dtype=torch.complex64).conj(),
    "lazy negative": lambda: torch.ones(4, dtype=torch.complex64).conj().imag,
    "no elements": lambda: torch.empty(3, 0),
    "other device": lambda: torch.empty(4, device="meta"),
    "implicit zeros": lambda: torch._efficientzerotensor((4,)),
    "emptied storage": emptied,
    "unaligned": unaligned,
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_not_a_plain_strided_tensor_is_left_alone(kind: str) -> None:
    understood = is_understood(ODD[kind](), CPU)  # not in the assertion, which would print emptied memory
    assert not understood


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_what_a_functorch_transform_wraps_is_left_alone(transform: str) -> None:
    verdicts: list[bool] = []

    def note(x: Tensor) -> Tensor:
        verdicts.append(is_understood(x, CPU))
        return (x * x).sum()

    x = torch.ones(3, 4)
    if transform == "vmap":
        torch.func.vmap(note)(x)
    elif transform == "grad":
        torch.func.grad(note)(x)
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated")
            torch.func.jvp(note, (x,), (x,))
    assert verdicts == [False]


@pytest.mark.parametrize(
    "tensor",
    [
        *(pytest.param(filled(dtype), id=str(dtype)) for dtype in DTYPES),
        pytest.param(nn.Parameter(torch.ones(4)), id="parameter"),
        pytest.param(torch.tensor(1.0), id="scalar"),
        pytest.param(torch.ones(4).expand(3, 4), id="expanded"),
        pytest.param(torch.ones(4, 5).t()[1:], id="transposed, with an offset"),
        pytest.param(torch.ones(4, dtype=torch.complex64).conj().resolve_conj(), id="resolved conjugate"),
    ],
)
def test_plain_strided_tensors_are_understood(tensor: Tensor) -> None:
    assert is_understood(tensor, CPU)


# Versions


# Storages that live as long as the model


class Flat(nn.Module):
    """Parameters and their ``main_grad`` lie in flat buffers, as in Megatron."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.flat_grad = torch.randn(30), torch.zeros(30)
        self.first = nn.Parameter(self.flat[:10].view(2, 5))
        self.second = nn.Parameter(self.flat[10:].view(4, 5))
        for parameter, grad in ((self.first, self.flat_grad[:10]), (self.second, self.flat_grad[10:])):
            parameter.main_grad = grad.view_as(parameter)  # type: ignore[attr-defined]


def static_of(*modules: nn.Module) -> StaticStorages:
    static = StaticStorages()
    static.refresh(modules)
    return static


def test_parameters_their_views_and_transposes_are_static() -> None:
    layer = nn.Linear(4, 6)
    static = static_of(layer)
    for tensor in (layer.weight, layer.weight.t(), layer.weight[2:4].detach(), layer.weight.data, layer.bias):
        assert tensor.untyped_storage() in static
    assert layer.weight.clone().untyped_storage() not in static


def test_gradients_and_buffers_are_static() -> None:
    norm = nn.BatchNorm1d(4)
    norm(torch.randn(3, 4)).sum().backward()
    static = static_of(norm)
    for tensor in (norm.weight.grad, norm.running_mean, norm.num_batches_tracked):
        assert tensor is not None
        assert tensor.untyped_storage() in static


def test_flat_buffers_are_static_through_what_lies_in_them() -> None:
    module = Flat()
    static = static_of(module)
    assert module.flat.untyped_storage() in static
    assert module.flat_grad.untyped_storage() in static
    assert len(static) == 2


def test_static_storages_of_all_chunks_count_and_are_read_anew() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    static = static_of(first, second)
    before = first.weight.untyped_storage()
    assert before in static
    assert second.weight.untyped_storage() in static
    first.weight = nn.Parameter(torch.zeros(2, 2))
    static.refresh([first])
    assert before not in static
    assert first.weight.untyped_storage() in static
    assert second.weight.untyped_storage() not in static


def test_a_storage_at_the_address_of_a_freed_gradient_is_not_static() -> None:
    linear = torch.nn.Linear(8, 8)
    linear.weight.grad = torch.zeros(8, 8)
    static = StaticStorages()
    static.refresh([linear])
    address = linear.weight.grad.untyped_storage()._cdata
    assert linear.weight.grad.untyped_storage() in static
    linear.weight.grad = None
    others = []
    while not others or others[-1]._cdata != address:
        others.append(torch.zeros(8, 8).untyped_storage())
        assert len(others) < 10_000, "the address was not used again"
    assert others[-1] not in static
