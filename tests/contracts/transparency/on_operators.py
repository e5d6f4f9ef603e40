"""What ``test_operators.py`` runs in a process of its own: PyTorch's operators, on PyTorch's own samples.

``op_db`` is the table by which PyTorch tests its gradients. An operator is a layer here, once for each of its
samples: views, broadcasts, empty tensors, lists, indices, random numbers; also in place where there is such a
variant. All that is saved travels, and is away before backward asks for it.
"""

from __future__ import annotations

import itertools
import sys
import types
import unittest
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import harness
import pytest
import torch
from covering import EVERYTHING, of_which
from harness import KIB, quiesce, session_for
from models import same_bits
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from tba_offload import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tba_offload.session import Session

# PyTorch's own tests need this package, its table of operators only the name of a class of it.
sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]

from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402 - after the line above

PLACEMENTS = tuple(name for name in harness.PLACEMENTS if name != "keep")
DTYPES = (torch.float32, torch.bfloat16, torch.complex64)
STEPS = 3 if EVERYTHING else 2
SAMPLES = 6 if EVERYTHING else 2
"""Most samples of an operator in one data type."""

ALWAYS = (
    *("__getitem__", "addmm", "as_strided", "cat", "cumprod", "einsum", "expand", "expand_as", "gather"),
    *(
        "index_put",
        "mul",
        "nn.functional.batch_norm",
        "nn.functional.conv2d",
        "nn.functional.dropout",
        "softmax",
    ),
    *("nn.functional.instance_norm", "nn.functional.layer_norm", "nn.functional.rrelu", "sort", "split"),
    *("nn.functional.scaled_dot_product_attention", "nn.functional.gelu", "svd", "tanh", "unfold", "where"),
)
"""Operators of all kinds of saving."""

TABLE = {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db if op.supports_autograd}
REFUSED = ("the layer's forward changes its argument", "whose bytes cannot be compared")
"""Messages of layers that cannot be recomputed."""


class Operator(nn.Module):
    """A layer that is one operator, with the arguments of one sample that are no tensors."""

    def __init__(self, function: Callable[..., Any], sample: Any, *, in_place: bool) -> None:
        super().__init__()
        found, self.layout = tree_flatten((sample.input, sample.args, sample.kwargs))
        self.function, self.ending, self.in_place = function, sample.output_process_fn_grad, in_place
        self.others = {place: value for place, value in enumerate(found) if not isinstance(value, Tensor)}
        self.inputs = [value for value in found if isinstance(value, Tensor)]

    def forward(self, *tensors: Tensor) -> Any:
        rest = iter(tensors)
        count = len(tensors) + len(self.others)
        found = [self.others[place] if place in self.others else next(rest) for place in range(count)]
        first, args, kwargs = tree_unflatten(found, self.layout)
        return self.ending(self.function(first.clone() if self.in_place else first, *args, **kwargs))


def layers_of(name: str, dtype: torch.dtype) -> list[Operator]:
    """Those of an operator's samples that plain training can differentiate, and the same twice."""
    op = TABLE[name]
    if dtype not in op.supported_backward_dtypes("cpu"):
        return []
    samples = itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=True), SAMPLES)
    return [layer for sample in samples for layer in variants(op, sample) if is_repeatable(layer)]


def variants(op: Any, sample: Any) -> Iterator[Operator]:
    yield Operator(op.get_op(), sample, in_place=False)
    if op.get_inplace() is not None and isinstance(sample.input, Tensor) and not sample.broadcasts_input:
        yield Operator(op.get_inplace(), sample, in_place=True)


def is_repeatable(layer: Operator) -> bool:
    if not all(tensor.layout is torch.strided for tensor in layer.inputs):
        return False
    try:
        once, again = (train([layer], None, 0) for _ in range(2))
    except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError):
        return False  # plain training has the error too
    has_outputs = len(once) > 2 * len(layer.inputs) + 1
    return has_outputs and same(once, again)


def train(layers: list[Operator], session: Session | None, step: int) -> list[Tensor | None]:
    torch.manual_seed(step)
    found: list[Tensor | None] = []
    given, outputs = [], []
    with session.step() if session is not None else nullcontext():
        for layer in layers:
            leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in layer.inputs]
            given += leaves
            outputs += differentiable(layer(*[x.clone() if x.requires_grad else x for x in leaves]))
        found += [output.detach().clone() for output in outputs]
        if session is not None:
            quiesce(session.offloader)
        torch.autograd.backward(
            outputs, [torch.randn_like(output) for output in outputs]
        ) if outputs else None
        outputs.clear()
    return [*found, *(x.grad for x in given), *(x.detach() for x in given), torch.get_rng_state()]


def differentiable(output: object) -> list[Tensor]:
    """Tensors that depend on what a layer put out, and do not hold it: that would be found in memory."""
    found = [each for each in tree_flatten(output)[0] if isinstance(each, Tensor) and each.requires_grad]
    return [each * 1 for each in found if each.layout is torch.strided]


def same(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    return len(found) == len(expected) and all(map(same_or_none, found, expected))


def same_or_none(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None or found.layout is not torch.strided:
        return (found is None) == (expected is None)
    return same_bits(plain(found), plain(expected))


def plain(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def placements_of(name: str, dtype: torch.dtype) -> tuple[str, ...]:
    """Offload, and others in turn: they differ by operator and data type."""
    if EVERYTHING:
        return PLACEMENTS
    turn = list(TABLE).index(name) + DTYPES.index(dtype)
    others = [PLACEMENTS[1 + (turn + more) % (len(PLACEMENTS) - 1)] for more in (0, 2)]
    return ("offload", *others) if dtype is DTYPES[0] else (others[0],)


@pytest.fixture(autouse=True)
def repeatable() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", of_which(TABLE, *ALWAYS))
def test_an_operator_has_the_bits_of_plain_training(name: str) -> None:
    wrong, compared = [], 0
    for dtype in DTYPES:
        layers = layers_of(name, dtype)
        compared += len(layers)
        expected = [train(layers, None, step) for step in range(STEPS)]
        for placement in placements_of(name, dtype) if layers else ():
            try:
                found = offloaded(layers, placement)
            except UnsupportedError as error:
                if placement.startswith("recompute") and any(why in str(error) for why in REFUSED):
                    continue  # as it should be
                raise
            if not all(map(same, found, expected)):
                wrong.append((dtype, placement))
    assert wrong == []
    assert compared or name not in ALWAYS  # of others plain training may not be able to repeat any


def offloaded(layers: list[Operator], placement: str) -> list[list[Tensor | None]]:
    budget = {"activation": KIB} if placement == "auto" else {"in_flight": 64}
    settings: dict[str, Any] = {"default": placement, "min_tensor_bytes": 1, **budget}
    model = nn.ModuleList(layers)
    with session_for(model, layers=list(layers), **settings) as session:
        return [train(layers, session, step) for step in range(STEPS)]
