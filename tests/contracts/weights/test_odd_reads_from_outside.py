"""Uses of frozen weights outside of their layers by ways that go round Python, or keep what they read.

Each gives the right values, or an error that names the weight and the remedy.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from bases import Training, frozen_parts, layers_of, make, offloaded
from covering import of_which
from models import assert_same_tensors
from test_reads_from_outside import assert_named, everything, finish
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tba_offload.errors import SessionError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*outside of its layer"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]


def rows() -> Tensor:
    return torch.linspace(-1, 1, 2 * 64).reshape(2, 64).requires_grad_()


def gradient_of(run: Callable[[Tensor], Tensor]) -> Tensor:
    x = rows()
    run(x).pow(2).sum().backward()
    assert x.grad is not None
    return x.grad


class Product(torch.autograd.Function):
    """A product as a program writes it that has a kernel of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ ctx.saved_tensors[0].T, None


# What autograd keeps


def in_a_function(weight: Tensor, _: Training) -> Tensor:
    return gradient_of(lambda x: Product.apply(torch.tanh(Product.apply(x, weight)), weight))


def in_a_checkpoint(weight: Tensor, _: Training) -> Tensor:
    return gradient_of(
        lambda x: checkpoint(lambda x: torch.tanh(x @ weight) @ weight, x, use_reentrant=False)
    )


def in_a_reentrant_checkpoint(weight: Tensor, _: Training) -> Tensor:
    return gradient_of(lambda x: checkpoint(lambda x: torch.tanh(x @ weight) @ weight, x, use_reentrant=True))


def saved_on_the_host(weight: Tensor, _: Training) -> Tensor:
    def run(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return torch.tanh(x @ weight) @ weight

    return gradient_of(run)


def by_saved_tensor_hooks(weight: Tensor, _: Training) -> Tensor:
    def run(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.numpy(), torch.from_numpy):
            return torch.tanh(x @ weight) @ weight

    return gradient_of(run)


def behind_a_step(weight: Tensor, training: Training) -> Tensor:
    """The graph is older than a step, in which the layer runs."""

    def run(x: Tensor) -> Tensor:
        y = torch.tanh(x @ weight) @ weight
        training.step(11)
        return y

    return gradient_of(run)


def of_gradients(weight: Tensor, _: Training) -> Tensor:
    def run(x: Tensor) -> Tensor:
        y = torch.tanh(x @ weight).pow(3).sum()
        return torch.autograd.grad(y, x, create_graph=True)[0]

    return gradient_of(run)


# What does not ask the class of a tensor, and is given another tensor on the same memory


def by_a_constructor(weight: Tensor, _: Training) -> list[Tensor]:
    return [torch.tensor(weight.detach()), torch.as_tensor(weight) + 0, torch.asarray(weight).clone()]


def by_the_constructor(weight: Tensor, _: Training) -> Tensor:
    return torch.Tensor(weight.detach()).clone()


def as_a_parameter(weight: Tensor, _: Training) -> Tensor:
    return nn.Parameter(weight.detach(), requires_grad=False).detach().clone()


def by_dlpack(weight: Tensor, _: Training) -> list[Tensor]:
    second = torch.utils.dlpack.to_dlpack(weight.detach())
    return [torch.from_dlpack(weight).clone(), torch.from_dlpack(second).clone()]


def by_script(weight: Tensor, _: Training) -> Tensor:
    return torch.jit.trace(lambda x: x.pow(2).sum(), torch.ones(64, 64))(weight.detach())


def compiled(weight: Tensor, _: Training) -> Tensor:
    run = torch.compile(lambda x: x.pow(2).sum(), backend="eager")
    return run(weight.detach())


def by_vmap(weight: Tensor, _: Training) -> Tensor:
    return torch.func.vmap(lambda row: row.sum())(weight.detach())


def by_grad(weight: Tensor, _: Training) -> Tensor:
    return torch.func.grad(lambda x: (x @ weight).pow(2).sum())(rows().detach())


def by_jvp(weight: Tensor, _: Training) -> Tensor:
    return torch.func.jvp(lambda x: (x * x).sum(), (weight,), (torch.ones_like(weight),))[1]


def by_an_operator(weight: Tensor, _: Training) -> Tensor:
    return torch.ops.aten.sum.default(weight)


def by_its_storage(weight: Tensor, _: Training) -> list[Tensor]:
    found = torch.empty(0).set_(weight.untyped_storage(), 0, weight.shape, (64, 1)).clone()
    return [found, torch.frombuffer(bytearray(bytes(weight.untyped_storage())), dtype=torch.float32)]


def by_its_address(weight: Tensor, _: Training) -> Tensor:
    import ctypes

    return torch.tensor((ctypes.c_float * weight.numel()).from_address(weight.data_ptr()))


# What writes


def by_an_array(weight: Tensor, _: Training) -> None:
    array = weight.detach().numpy()
    array *= 1.25


def by_out(weight: Tensor, _: Training) -> None:
    with torch.no_grad():
        torch.mul(weight, 1.25, out=weight)


def by_a_vector(weight: Tensor, _: Training) -> None:
    nn.utils.vector_to_parameters(torch.linspace(-1, 1, weight.numel()), [weight])


def by_load(weight: Tensor, training: Training) -> None:
    name = next(name for name, each in training.model.named_parameters() if each is weight)
    training.model.load_state_dict({name: torch.full((64, 64), 0.125)}, strict=False)


def by_assignment(weight: Tensor, training: Training) -> None:
    name = next(name for name, each in training.model.named_parameters() if each is weight)
    training.model.load_state_dict({name: torch.full((64, 64), 0.125)}, strict=False, assign=True)


def by_another_parameter(weight: Tensor, training: Training) -> None:
    base = layers_of(training.model)[1].self_attn.q_proj.base_layer
    base.weight = nn.Parameter(torch.full((64, 64), 0.125), requires_grad=False)


def within_a_hook(weight: Tensor, training: Training) -> None:
    """While its own layer computes."""

    def change(*_: object) -> None:
        with torch.no_grad():
            weight.mul_(1.25)

    handle = layers_of(training.model)[1].register_forward_hook(change)
    with torch.no_grad():
        training.evaluate()
    handle.remove()


USES: tuple[Callable[[Tensor, Training], Any], ...] = (
    *(
        in_a_function,
        in_a_checkpoint,
        in_a_reentrant_checkpoint,
        saved_on_the_host,
        by_saved_tensor_hooks,
    ),
    *(
        behind_a_step,
        of_gradients,
        by_a_constructor,
        by_the_constructor,
        as_a_parameter,
    ),
    *(
        by_dlpack,
        by_script,
        compiled,
        by_vmap,
        by_grad,
    ),
    *(
        by_jvp,
        by_an_operator,
        by_its_storage,
        by_its_address,
        by_an_array,
    ),
    *(
        by_out,
        by_a_vector,
        by_load,
        by_assignment,
        by_another_parameter,
    ),
    *(within_a_hook,),
)


@pytest.mark.filterwarnings("ignore:.*backward hook:UserWarning")
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_a_use_has_the_right_values_or_is_refused_by_name(
    use: Callable[[Tensor, Training], Any], tmp_path: Path
) -> None:
    found = Training(make("Llama"))
    error: Exception | None = None
    with offloaded(found.model, tmp_path) as session:
        found.step(0)
        try:
            note(use, found)
        except SessionError as raised:
            error = raised.with_traceback(None)
        finish(found)
        gc.collect()
        assert session.weights is not None
        assert session.weights.resident_bytes == 0
    plain = Training(make("Llama"))
    plain.step(0)
    if error is None:
        note(use, plain)
    else:
        assert_named(error)
    finish(plain)
    assert_same_tensors(everything(found), everything(plain))


def note(use: Callable[[Tensor, Training], Any], training: Training) -> None:
    found = use(layers_of(training.model)[1].self_attn.q_proj.base_layer.weight, training)
    tensors = [found] if isinstance(found, Tensor) else found or []
    training.seen += [each.detach().clone() for each in tensors]


@pytest.mark.parametrize("base", of_which(["fp32", "nf4", "torchao int8"], "fp32", "nf4"))
def test_aliases_outlive_the_session(base: str, tmp_path: Path) -> None:
    """What is written through them after the session is written to the weights."""
    results = []
    for directory in (None, tmp_path):
        training = Training(make("Llama", base))
        training.step(0)
        if directory is None:
            aliases = [part.detach() for _, part in frozen_parts(training.model)]
        else:
            with offloaded(training.model, directory):
                training.step(0)
                aliases = [part.detach() for _, part in frozen_parts(training.model)]
        results.append([alias.clone() for alias in aliases])
        for alias in aliases:
            alias.view(-1)[0] = 1
        results[-1] += [part for _, part in frozen_parts(training.model)]
    assert_same_tensors(results[1], results[0])
