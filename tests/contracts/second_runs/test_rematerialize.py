"""Layers placed ``offload-remat``: what is made again and not written, its lifetime, and what is refused."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from blocks import (
    INNER,
    LENGTH,
    ONE,
    ROWS,
    Block,
    assert_same,
    assert_transparent,
    attached,
    forward_backward,
    make_input,
    plain,
    run,
)
from harness import assert_all_given_back, quiesce
from later import Later
from torch import Tensor, nn

from tba_offload.errors import RecomputationError, SavedTensorModifiedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tba_offload.report.log import StepRecord

transformers = Later("transformers")

LAYERS = 3
REMAT = {"default": "offload-remat"}


class Normed(Block):
    """A block with a module that has parameters where others have a function."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.mix = make()  # type: ignore[assignment]


def normed(make: Callable[..., nn.Module], *arguments: Any, **settings: Any) -> Callable[[], nn.Module]:
    return partial(Normed, partial(make, *arguments, **settings))


def mixing(mix: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return partial(Block, mix)


def made_again(records: list[StepRecord]) -> list[int]:
    return [record.rebuilt_bytes for record in records]


def gated(h: Tensor) -> Tensor:
    return F.silu(h) * h


class WrittenNorm(nn.Module):
    """As the models of transformers write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(INNER))

    def forward(self, h: Tensor) -> Tensor:
        wide = h.to(torch.float64)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(h.dtype)


MADE_AGAIN: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "gelu": (mixing(partial(F.gelu, approximate="tanh")), ONE),
    "leaky relu": (mixing(partial(F.leaky_relu, negative_slope=0.2)), ONE),
    "gate": (mixing(gated), 2 * ONE),
    "glu": (mixing(lambda h: F.glu(torch.cat((h, h), -1))), ONE),
    "a product with a number": (mixing(lambda h: 0.5 * F.gelu(h)), ONE),
    "layer norm": (normed(nn.LayerNorm, INNER, eps=1e-3), ONE),
    "layer norm over two dimensions": (normed(nn.LayerNorm, (LENGTH, INNER), bias=False), ONE),
    "a norm that is written out": (normed(WrittenNorm), 4 * ONE),
    "norm of a function": (mixing(lambda h: F.layer_norm(F.gelu(h), (INNER,))), 2 * ONE),
    "by names": (mixing(lambda h: F.layer_norm(h, normalized_shape=(INNER,), eps=1e-4)), ONE),
    "a view": (mixing(lambda h: F.gelu(h).view(ROWS * LENGTH, INNER).view(ROWS, LENGTH, INNER)), ONE),
    "rms norm": (normed(nn.RMSNorm, INNER), ONE),
}
"""Bytes of each layer that are made again."""

ARGUMENTS = {"a norm that is written out": ONE}
"""Bytes of each layer that are written only because others are made from them."""


@pytest.mark.parametrize("name", MADE_AGAIN)
def test_what_is_made_again_is_not_written(name: str) -> None:
    """From the first step on."""
    block, nbytes = MADE_AGAIN[name]
    unsettled = assert_transparent(block=block, settled=False, **REMAT)
    written = assert_transparent(block=block, **REMAT)
    assert made_again(unsettled) == made_again(written) == [LAYERS * nbytes] * 3
    offloaded = assert_transparent(block=block, default="offload")
    spared = LAYERS * (nbytes - ARGUMENTS.get(name, 0))
    assert [each.offloaded_bytes - spared for each in offloaded] == [each.offloaded_bytes for each in written]


@torch.no_grad()
def doubled(y: Tensor) -> Tensor:
    return y.mul_(2)


WRITTEN: dict[str, Callable[[], nn.Module]] = {
    "tanh": mixing(torch.tanh),
    "relu": mixing(F.relu),
    "sum": mixing(lambda h: h + 1),
    "dropout": mixing(partial(F.dropout, p=0.2)),
    "changed in place": mixing(lambda h: F.gelu(h).add_(1)),
    "changed without a graph": mixing(lambda h: doubled(F.gelu(h))),
    "in place": mixing(lambda h: F.silu(h, inplace=True)),
    "columns first": mixing(lambda h: F.gelu(h.transpose(1, 2)).transpose(1, 2)),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_offloaded_plainly(name: str) -> None:
    records = assert_transparent(block=WRITTEN[name], **REMAT)
    offloaded = assert_transparent(block=WRITTEN[name], default="offload")
    assert made_again(records) == [0] * 3
    assert [record.offloaded_bytes for record in records] == [r.offloaded_bytes for r in offloaded]


# Lifetimes


class Watched(Block):
    seen: ClassVar[list[weakref.ref[torch.UntypedStorage]]] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        y = self.mix(h)
        Watched.seen += [weakref.ref(tensor.untyped_storage()) for tensor in (h, y)]
        return x + self.down(y)


def alive() -> int:
    return sum(storage() is not None for storage in Watched.seen)


def test_neither_arguments_nor_outputs_stay_between_forward_and_backward() -> None:
    Watched.seen.clear()
    with attached(partial(Watched, gated), in_flight=4 * ONE, **REMAT) as (net, session):
        with session.step() as step:
            loss = net(make_input()).sum()
            quiesce(session.offloader)
            assert (len(Watched.seen), alive()) == (2 * LAYERS, 0)
            loss.backward()
        assert step.record is not None
        assert 0 < step.record.read_bytes <= step.record.offloaded_bytes  # once, though both ask for it
        with session.step():
            net(make_input()).sum()  # and no backward
            quiesce(session.offloader)  # threads that write hold what they write
        gc.collect()
        assert alive() == 0
        assert_all_given_back(session)


# What is refused


class Unsteady(Block):
    """Its function's output is changed where neither autograd nor its version tells, in one row."""

    is_changing = False

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(x))
        if self.is_changing:
            y.data[1, 3] *= 2
        return x + self.down(y)


def test_other_bytes_are_an_error_before_the_update() -> None:
    """By the layer's name."""
    with attached(Unsteady, **REMAT) as (net, session):
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        run(net, forward_backward, session, 1)
        net.layers[1].is_changing = True  # type: ignore[assignment]
        before = [parameter.detach().clone() for parameter in net.parameters()]
        with pytest.raises(RecomputationError, match=r"gelu in layer 1 \(layers.1\)"), session.step():
            forward_backward(net, 1)
            optimizer.step()
        net.layers[1].is_changing = False  # type: ignore[assignment]
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before, strict=True))
        net.zero_grad()
        assert_same(run(net, forward_backward, session, 2), plain(block=mixing(F.gelu), steps=2))
        assert_all_given_back(session)


class Taking(Normed):
    taken: ClassVar[dict[str, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        y = self.mix(h)
        Taking.taken.update(argument=h, output=y, weight=self.mix.weight)  # type: ignore[attr-defined]
        return x + self.down(y)


@pytest.mark.parametrize("what", ["output", "argument", "weight"])
def test_what_is_changed_in_place_is_noticed(what: str) -> None:
    with attached(partial(Taking, partial(nn.LayerNorm, INNER)), **REMAT) as (net, session), session.step():
        loss = net(make_input()).sum()
        with torch.no_grad():
            Taking.taken[what].add_(1)
        Taking.taken.clear()
        quiesce(session.offloader)
        with pytest.raises(SavedTensorModifiedError, match="changed in place"):
            loss.backward()
