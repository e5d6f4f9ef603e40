"""One test or more for each pitfall that has bitten a project of this kind, by the number it has in the list.

All of them train small modules and compare gradients and inputs' gradients bit for bit with a run to which
nothing is attached, unless they say otherwise.
"""

from __future__ import annotations

import copy
import gc
import random
import threading
import warnings
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from blocks import (
    INNER,
    LENGTH,
    ONE,
    ROWS,
    SCHEDULES,
    WIDTH,
    Block,
    Mix,
    Net,
    Work,
    assert_same,
    assert_transparent,
    attached,
    backward_twice,
    double_backward,
    forward_backward,
    gradients,
    make_input,
    plain,
    run,
    schedule,
)
from covering import in_turn
from harness import KIB, PATIENCE, Drive, assert_all_given_back, quiesce, wait_until
from models import same_bits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tba_offload.errors import SavedTensorModifiedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tba_offload.report.log import StepRecord

SMALL = ROWS * LENGTH * WIDTH * 4
"""Bytes of the input of a block."""


def moved(record: StepRecord) -> int:
    """Bytes of activations that were written, or came back before that."""
    return record.offloaded_bytes + record.forwarded_bytes - record.held_bytes


# 1. Unpack while the write is in flight


def test_01_backward_while_all_writes_are_held() -> None:
    drive = Drive()
    drive.writes.hold()
    with attached(drive=drive) as (net, session):
        assert_same(run(net, forward_backward, session, 2), plain(steps=2))
        drive.release()
        assert_all_given_back(session)
        assert all(record.read_bytes == 0 < record.forwarded_bytes for record in session.records)


def test_01_backward_while_some_writes_have_ended_and_one_is_running() -> None:
    drive = Drive()

    def work(net: Net, number: int) -> list[Tensor]:
        x = make_input(number)
        x1 = net.layers[0](x)
        net.settle()
        drive.writes.hold()
        net.layers[2](net.layers[1](x1)).pow(2).mean().backward()
        drive.writes.release()
        return [x.grad]  # type: ignore[list-item]

    records = assert_transparent(work, drive=drive, settled=False)
    assert all(record.read_bytes and record.forwarded_bytes for record in records)


# 2. Memory freed or reused before its write completes


def test_02_memory_is_not_reused_before_its_write_has_ended() -> None:
    drive = Drive()

    def work(net: Net, number: int) -> list[Tensor]:
        x = make_input(number)
        drive.writes.hold()
        loss = net(x).pow(2).mean()
        junk = [torch.full((ROWS, LENGTH, INNER), float("nan")) for _ in range(12)]
        drive.writes.release()
        net.settle()
        junk += [torch.full((ROWS, LENGTH, INNER), float("nan")) for _ in range(12)]
        loss.backward()
        return [x.grad]  # type: ignore[list-item]

    records = assert_transparent(work, drive=drive, settled=False)
    assert all(record.read_bytes > 3 * ONE for record in records)


# 4. Views


def strided_then_all(h: Tensor) -> Tensor:
    return h[..., ::2].pow(2).repeat_interleave(2, -1) + h.pow(2)


def all_then_strided(h: Tensor) -> Tensor:
    return h.pow(2) + h[..., ::2].pow(2).repeat_interleave(2, -1)


def transposed(h: Tensor) -> Tensor:
    t = h.flatten(0, 1).t()
    return (t * t.roll(1, 0)).t().view_as(h)


def overlapping(h: Tensor) -> Tensor:
    return F.pad(h.unfold(-1, 3, 1).pow(2).sum(-1), (2, 0))


def gaps_and_overlaps(h: Tensor) -> Tensor:
    return h * h.as_strided((8, 300, 3), (2000, 1, 1), 5).pow(2).mean()


def interleaved_heads(h: Tensor) -> Tensor:
    parts = h.view(ROWS, -1, 8, 32).split(8, -1)
    return torch.cat([part.pow(2) for part in parts], -1).view_as(h)


VIEWS: dict[str, Mix] = {
    "chunk": lambda h: torch.cat([h.chunk(2, -1)[0] * h.chunk(2, -1)[1]] * 2, -1),
    "interleaved heads": interleaved_heads,
    "transposed": transposed,
    "expanded": lambda h: h * h[:, :1].expand_as(h),
    "one in four": lambda h: h + h[..., ::4].pow(2).repeat_interleave(4, -1),
    "offset": lambda h: F.pad(h[:, 3:] * h[:, 3:], (0, 0, 3, 0)),
    "overlapping": overlapping,
    "gaps and overlaps": gaps_and_overlaps,
    "diagonal": lambda h: h * h.diagonal(dim1=1, dim2=2).pow(2).sum(),
    "few of many": lambda h: h + h[:, :1, :8].pow(2).sum(),
    "other dtype": lambda h: h * h.detach().view(torch.int32).bitwise_and(1).float(),
    "strided, then all": strided_then_all,
    "all, then strided": all_then_strided,
}


@pytest.mark.parametrize(("views", "kind"), in_turn(list(VIEWS), ["host", "file"]))
def test_04_views_of_one_buffer(views: str, kind: str, tmp_path: Any) -> None:
    directory = tmp_path if kind == "file" else None
    records = assert_transparent(
        block=lambda: Block(VIEWS[views]), directory=directory, min_tensor_bytes=256, in_flight=2 * ONE
    )
    assert all(record.read_bytes > 0 for record in records)


def test_04_parts_that_count_their_changes_apart() -> None:
    """A GRU saves one of its gates, and then changes others in the same storage, with ``unsafe_chunk``."""

    def mix(h: Tensor) -> Tensor:
        first, second = (h * 1).unsafe_chunk(2, dim=-1)
        first.sigmoid_()
        for _ in range(50):
            second.mul_(0.99)
        return torch.cat([first, second], dim=-1)

    records = assert_transparent(block=lambda: Block(mix))
    assert all(each.offloaded_bytes + each.forwarded_bytes < 3 * 2 * ONE for each in records)


# 5. Every kind of tensor


class Marked(Tensor):
    """A subclass."""


class Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, carried: Tensor, look: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(carried)
        # With hooks of whatever kind autograd gives back a parameter as a tensor.
        ctx.kind = Tensor if isinstance(carried, nn.Parameter) else type(carried)
        ctx.look, ctx.layout = look, carried.layout
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (carried,) = ctx.saved_tensors
        assert isinstance(carried, ctx.kind)
        assert carried.layout == ctx.layout
        return grad * ctx.look(carried).double().mean().to(grad.dtype), None, None


def quietly(make: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def made(h: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make(h)

    return made


def unaligned(h: Tensor) -> Tensor:
    buffer = bytearray(b"\0") + bytearray(h.numpy().tobytes())
    return torch.frombuffer(buffer, dtype=torch.float32, offset=1)


def same(carried: Tensor) -> Tensor:
    return carried


def dense(carried: Tensor) -> Tensor:
    return carried.to_dense()


def nothing(carried: Tensor) -> Tensor:
    return torch.ones(carried.shape)


def emptied(h: Tensor) -> Tensor:
    tensor = h * 2
    tensor.untyped_storage().resize_(0)
    return tensor


KINDS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "float64": (lambda h: h.double() * 3, same),
    "float16": (lambda h: h.half() * 3, same),
    "bfloat16": (lambda h: h.bfloat16() * 3, same),
    "float8": (lambda h: h.to(torch.float8_e5m2), lambda carried: carried.float()),
    "int64": (lambda h: h.argsort(-1), same),
    "uint8": (lambda h: (h > 0).to(torch.uint8), same),
    "bool": (lambda h: h > 0, same),
    "complex": (lambda h: torch.complex(h, h + 1), torch.abs),
    "resolved conjugate": (lambda h: torch.complex(h, h + 1).conj().resolve_conj(), torch.imag),
    "numpy": (lambda h: torch.from_numpy(h.numpy().copy()), same),
    "shared": (lambda h: h.clone().share_memory_(), same),
}  # fmt: skip
LEFT_ALONE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "lazy conjugate": (lambda h: torch.complex(h, h + 1).conj(), torch.imag),
    "lazy negative": (lambda h: torch.complex(h, h + 1).conj().imag, same),
    "scalar": (lambda h: h.mean(), same),
    "no elements": (lambda h: h[:, :0], lambda carried: torch.tensor(carried.numel() + 1.0)),
    "parameter": (lambda h: nn.Parameter(h * 2), same),
    "another device": (lambda h: h.to("meta"), nothing),
    "emptied": (emptied, nothing),
    "nested": (lambda h: torch.nested.as_nested_tensor([h[0], h[1, :3]], layout=torch.jagged), Tensor.values),
    "sparse": (lambda h: h[0].relu().to_sparse(), dense),
    "compressed sparse": (quietly(lambda h: h[0].relu().to_sparse_csr()), dense),
    "quantized": (quietly(lambda h: torch.quantize_per_tensor(h, 0.1, 0, torch.qint8)), torch.dequantize),
    "oneDNN": (lambda h: h.to_mkldnn(), dense),
    "subclass": (lambda h: (h * 2).as_subclass(Marked), lambda carried: carried.as_subclass(Tensor)),
    "implicit zeros": (lambda h: torch._efficientzerotensor((5000,)), lambda carried: carried + 1),
    "unaligned": (unaligned, same),
}  # fmt: skip


@pytest.mark.parametrize("kind", [*KINDS, *LEFT_ALONE])
def test_05_every_kind_of_tensor_is_offloaded_or_left_alone(kind: str) -> None:
    make, look = (KINDS | LEFT_ALONE)[kind]

    def mix(h: Tensor) -> Tensor:
        with torch.no_grad():
            carried = make(h)
        return Carry.apply(h, carried, look)  # type: ignore[no-any-return,no-untyped-call]

    for record in assert_transparent(block=lambda: Block(mix), steps=2):
        of_blocks = 3 * (SMALL + ONE)  # what their two products save
        assert (moved(record) > of_blocks) is (kind in KINDS)


# 6. The same storage again


class Twice(nn.Module):
    """Saves one storage twice, and hands it to the next layer, which saves it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.exp(self.linear(x) * 0.1)
        return y * y.pow(2)


def test_06_one_storage_saved_twice_and_by_two_layers() -> None:
    records = assert_transparent(block=Twice)
    assert all(record.deduplicated_bytes > 0 for record in records)


def test_06_an_address_that_is_reused_is_another_activation() -> None:
    """Each round frees a stored activation, so that the next one gets its address."""

    def work(net: Net, number: int) -> list[Tensor]:
        seen: list[Tensor] = []
        for again in range(20):
            x = make_input(100 * number + again)
            loss = net.layers[0](x).pow(2).mean()
            if again % 3:
                loss.backward()
                seen.append(x.grad)  # type: ignore[arg-type]
        return seen

    assert_transparent(work)


# 7. What lives as long as the model


class Lasting(nn.Module):
    """Saves a tensor that is no activation; its weight is a view of a flat buffer, as in Megatron."""

    def __init__(self, find: Callable[[Lasting], Tensor]) -> None:
        super().__init__()
        self.find = find
        self.flat, self.flat_grad = torch.randn(2 * WIDTH * WIDTH), torch.zeros(2 * WIDTH * WIDTH)
        self.weight = nn.Parameter(self.flat[WIDTH * WIDTH :].view(WIDTH, WIDTH))
        self.weight.main_grad = self.flat_grad[WIDTH * WIDTH :].view(WIDTH, WIDTH)  # type: ignore[attr-defined]
        self.other = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.other.grad = torch.randn(WIDTH, WIDTH)
        self.more = nn.ParameterList(torch.ones(8) for _ in range(100))
        for each in self.more:
            each.grad = torch.ones(8)
        self.register_buffer("table", torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + Carry.apply(F.linear(x, self.weight), self.find(self), same)  # type: ignore[no-any-return,no-untyped-call]


def at_the_address_of_a_gradient(layer: Lasting) -> Tensor:
    addresses = {each.grad.untyped_storage()._cdata for each in layer.more if each.grad is not None}
    layer.more.zero_grad()
    found = [torch.ones(WIDTH, WIDTH)]
    while found[-1].untyped_storage()._cdata not in addresses:
        found.append(torch.ones(WIDTH, WIDTH))
        assert len(found) < 10_000, "no address was used again"
    return found[-1]


LASTING: dict[str, Callable[[Lasting], Any]] = {
    "parameter": lambda layer: layer.weight,
    "transpose": lambda layer: layer.other.t(),
    "rows": lambda layer: layer.other[2:].detach(),
    "data": lambda layer: layer.other.data,
    "flat parameters": lambda layer: layer.flat,
    "flat gradients": lambda layer: layer.flat_grad[10:],
    "gradient": lambda layer: layer.other.grad,
    "buffer": lambda layer: layer.table,
    "copy": lambda layer: layer.other.clone().detach(),
    "address of a gradient": at_the_address_of_a_gradient,
}


@pytest.mark.parametrize("which", LASTING)
def test_07_what_lives_as_long_as_the_model_is_no_activation(which: str) -> None:
    """Nor is it by its address, which may belong to an activation later."""
    (record,) = assert_transparent(block=lambda: Lasting(LASTING[which]), steps=1)
    carried = WIDTH * WIDTH * 4 if which in {"copy", "address of a gradient"} else 0
    assert moved(record) == 3 * (SMALL + carried)


def test_07_weights_that_are_replaced_between_steps() -> None:
    def work(net: Net, number: int) -> list[Tensor]:
        found = forward_backward(net, number)
        for layer in net.layers:
            layer.weight = nn.Parameter(layer.weight.detach().clone())  # type: ignore[arg-type,operator]
        return found

    records = assert_transparent(work, block=lambda: Lasting(LASTING["parameter"]))
    assert all(moved(record) <= 3 * SMALL for record in records)


# 8. Unpack twice, out of order, from another thread, after an exception, or never


def parts_of_a_graph(net: Net, number: int) -> list[Tensor]:
    x = make_input(number)
    y1 = net.layers[0](x)
    y2 = net.layers[1](y1)
    first = torch.autograd.grad(y2.sum(), y1, retain_graph=True)
    second = torch.autograd.grad(y1.pow(2).sum(), x, retain_graph=True)
    net.layers[2](y2).pow(2).mean().backward()
    return [*first, *second, x.grad]  # type: ignore[list-item]


def branches_in_reverse(net: Net, number: int) -> list[Tensor]:
    x = make_input(number)
    outputs = [layer(x) for layer in net.layers]
    for output in outputs:  # first in, first out
        output.pow(2).mean().backward()
    return [x.grad]  # type: ignore[list-item]


def in_another_thread(net: Net, number: int) -> list[Tensor]:
    x = make_input(number)
    loss = net(x).pow(2).mean()
    thread = threading.Thread(target=loss.backward, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return [x.grad]  # type: ignore[list-item]


def never(net: Net, number: int) -> list[Tensor]:
    net(make_input(number + 50))
    lost = net(make_input(number + 60))
    kept = forward_backward(net, number)
    del lost
    return kept


UNPACKS: dict[str, Work] = {
    "twice": backward_twice,
    "double backward": double_backward,
    "parts of a graph": parts_of_a_graph,
    "in reverse": branches_in_reverse,
    "in another thread": in_another_thread,
    "never": never,
}


@pytest.mark.parametrize("held", [False, True], ids=["stored", "writing"])
@pytest.mark.parametrize("how", UNPACKS)
def test_08_unpack(how: str, held: bool) -> None:
    drive = Drive()
    if held:
        drive.writes.seconds = 0.003
    assert_transparent(UNPACKS[how], drive=drive, in_flight=6 * ONE, settled=not held)


def test_08_after_an_exception_in_backward() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ZeroDivisionError

    def work(net: Net, number: int) -> list[Tensor]:
        x = make_input(number)
        y = net.layers[0](x)
        z = net.layers[1](Fails.apply(y))  # type: ignore[no-untyped-call]
        with pytest.raises(ZeroDivisionError):
            net.layers[2](z).sum().backward(retain_graph=True)
        net.zero_grad()
        y.pow(2).mean().backward()
        return [x.grad]  # type: ignore[list-item]

    assert_transparent(work)


def test_08_backward_in_one_thread_while_another_runs_forward() -> None:
    def work(net: Net, number: int) -> list[Tensor]:
        inputs = [make_input(10 * number + index) for index in range(6)]
        losses = [net(inputs[0]).pow(2).mean()]
        for x in inputs[1:]:
            thread = threading.Thread(target=torch.autograd.grad, args=(losses[-1], list(net.parameters())))
            thread.start()
            losses.append(net(x).pow(2).mean())
            thread.join(PATIENCE)
        losses[-1].backward()
        return [loss.detach() for loss in losses]

    drive = Drive()
    drive.writes.seconds = drive.reads.seconds = 0.0005
    assert_transparent(work, drive=drive, in_flight=3 * ONE, settled=False)


# 9. Changed in place


class Exposed(nn.Module):
    saved: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.saved = torch.exp(self.linear(x) * 0.1)
        return self.saved * 2


@pytest.mark.parametrize("when", ["before the write", "after the write", "kept"])
def test_09_changed_in_place_before_backward(when: str) -> None:
    drive = Drive()
    threshold = 1 << 30 if when == "kept" else KIB

    def work(net: Net) -> None:
        loss = net(make_input()).sum()
        if when == "after the write":
            wait_until(lambda: drive.writes.started == drive.writes.ended, "writes")
        with torch.no_grad():
            net.layers[1].saved[0].add_(1)  # type: ignore[union-attr]
        try:
            loss.backward()
        finally:
            drive.release()  # a step that fails waits for the writes that run

    with attached(Exposed, drive=drive, min_tensor_bytes=threshold) as (net, session):
        if when == "before the write":
            drive.writes.hold()
        with pytest.raises(SavedTensorModifiedError, match="in place") as caught, session.step():
            work(net)
        assert when == "kept" or "layer 1 (layers.1), micro-batch 0" in str(caught.value)
        net.zero_grad()
        assert_same(run(net, forward_backward, session, 1), plain(block=Exposed))


def test_09_a_change_that_nobody_asks_for_is_no_error() -> None:
    def work(net: Net, number: int) -> list[Tensor]:
        lost = net(make_input(number)).sum()
        with torch.no_grad():
            net.layers[1].saved.add_(1)  # type: ignore[union-attr]
        del lost
        return forward_backward(net, number)

    assert_transparent(work, block=Exposed)


# 10. Something else keeps the storage alive


class Holding(Block):
    """Keeps what it saves, as layers in FP8 keep a copy of their weight from micro-batch to micro-batch."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(self.up(x))
        self.held = y.detach()
        return x + self.down(y)


def test_10_what_stays_alive_anyway_is_found_and_kept_from_then_on() -> None:
    first, *_, last = assert_transparent(block=Holding)
    assert first.held_bytes >= 3 * ONE  # and the input, which the test holds
    assert last.held_bytes == 0
    assert last.kept_bytes - first.kept_bytes == first.held_bytes


# 11. What hooks do not see


@pytest.mark.parametrize("threshold", [KIB, 1 << 30], ids=["offloaded", "kept"])
def test_11a_what_saves_its_own_output_does_not_leak(threshold: int) -> None:
    """Without a backward pass, and without the cyclic collector."""
    outputs: list[weakref.ref[torch.UntypedStorage]] = []

    def mix(h: Tensor) -> Tensor:
        h = h.tanh()
        outputs.append(weakref.ref(h.untyped_storage()))
        return h

    with attached(lambda: Block(mix), min_tensor_bytes=threshold) as (net, session):
        gc.disable()
        try:
            with session.step():
                net(make_input())
            assert_all_given_back(session)
            assert [output() is None for output in outputs] == [True] * 3
        finally:
            gc.enable()


def empty_and_refill(net: Net, number: int) -> list[Tensor]:
    """What Megatron's ``CheckpointWithoutOutput`` does: frees an output that was saved, computes it again."""
    x = make_input(number)
    loss = net(x).pow(2).mean()
    contents = []
    for layer in net.layers:
        contents.append(layer.saved.detach().clone())
        layer.saved.untyped_storage().resize_(0)  # type: ignore[union-attr,operator]
    junk = [torch.full_like(content, float("nan")) for content in contents]
    for layer, content in zip(net.layers, contents, strict=True):
        layer.saved.untyped_storage().resize_(content.nbytes)  # type: ignore[union-attr,operator]
        layer.saved.data.copy_(content)  # type: ignore[union-attr]
    loss.backward()
    del junk
    return [x.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("writes", ["held", "slow", "ended"])
def test_11b_a_storage_that_is_emptied_after_pack_and_filled_again(writes: str) -> None:
    drive = Drive()
    drive.writes.seconds = 0.003 if writes == "slow" else 0.0

    def work(net: Net, number: int) -> list[Tensor]:
        if writes == "held":
            drive.writes.hold()
            threading.Timer(0.05, drive.writes.release).start()
        return empty_and_refill(net, number)

    assert_transparent(work, block=Exposed, drive=drive, settled=writes == "ended")


class Narrow(nn.Module):
    """Saves a view of a large storage, of which it needs a share only; shows the large one."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.step = step
        self.large: weakref.ref[torch.UntypedStorage] | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        self.large = weakref.ref(h.untyped_storage())
        some = h[..., : WIDTH * self.step : self.step]
        return x + some.sin()


class Routed(nn.Module):
    """Has an expert for some rows of one large tensor, and one that is given none; shows the large one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.expert = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.large: weakref.ref[torch.UntypedStorage] | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        self.large = weakref.ref(h.untyped_storage())
        return (
            x + torch.cat([self.expert(rows) for rows in h.split([0, ROWS])]) + h.detach()[:, :0].cos().sum()
        )


@pytest.mark.parametrize("threshold", [KIB, 64 * KIB])
@pytest.mark.parametrize(
    "block", [partial(Narrow, 1), partial(Narrow, 16), Routed], ids=["dense", "gaps", "nothing"]
)
def test_11c_a_small_view_does_not_keep_a_large_storage(
    block: Callable[[], nn.Module], threshold: int
) -> None:
    """Dense, with gaps or empty, offloaded or, below the threshold, kept: the large storage goes."""
    needed = ROWS * LENGTH * WIDTH * 4
    with attached(block, min_tensor_bytes=threshold) as (net, session):
        for number, expected in enumerate(plain(block=block, steps=2)):
            with session.step():
                x = make_input(number)
                torch.manual_seed(number)
                loss = net(x).pow(2).mean()
                quiesce(session.offloader)
                assert [layer.large() for layer in net.layers] == [None] * 3  # type: ignore[union-attr,operator]
                loss.backward()
            assert_same([[loss.detach(), x.grad, *gradients(net)]], [expected])  # type: ignore[list-item]
            record = session.records[-1]
            assert record.offloaded_bytes <= 3 * 3 * needed or block is Routed
        del loss
        assert_all_given_back(session)


@pytest.mark.filterwarnings("ignore:layer . .* runs inside saved-tensor hooks:UserWarning")
@pytest.mark.parametrize("default", ["offload", "recompute"])
@pytest.mark.parametrize("transform", ["grad", "vjp", "vmap", "jvp", "jacrev", "functional_call"])
def test_11d_a_transform_of_attached_layers_passes_through(transform: str, default: str) -> None:
    def work(net: Net, number: int) -> list[Tensor]:
        x = make_input(number).detach()

        def loss_of(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(net, parameters, (x,)).pow(2).mean()

        parameters = {name: value.detach() for name, value in net.named_parameters()}
        if transform == "grad":
            found = list(torch.func.grad(loss_of)(parameters, x).values())
        elif transform == "vjp":
            _, back = torch.func.vjp(lambda x: loss_of(parameters, x), x)
            found = list(back(torch.tensor(1.0)))
        elif transform == "jvp":
            found = list(torch.func.jvp(lambda x: loss_of(parameters, x), (x,), (x,)))
        elif transform == "vmap":
            found = [torch.func.vmap(torch.func.grad(loss_of), (None, 0))(parameters, x)["layers.1.up.bias"]]
        elif transform == "jacrev":
            found = [torch.func.jacrev(lambda x: loss_of(parameters, x))(x)]
        else:
            found = [loss_of(dict(net.named_parameters()), x)]
            found[0].backward()
        return [*(tensor.detach() for tensor in found), *forward_backward(net, number)]

    assert_transparent(work, default=default, measure_memory=transform in {"grad", "vmap", "jvp"})


def test_11e_the_collector_may_run_finalizers_anywhere() -> None:
    """Graphs in reference cycles die whenever the collector starts, also while a lock is held."""

    def work(net: Net, number: int) -> list[Tensor]:
        for again in range(4):
            cycle: list[object] = [net(make_input(again))]
            cycle.append(cycle)
            del cycle
        return forward_backward(net, number)

    thresholds = gc.get_threshold()
    gc.set_threshold(3, 2, 2)
    drive = Drive()
    drive.writes.seconds = drive.reads.seconds = 0.0002
    try:
        assert_transparent(work, drive=drive, in_flight=3 * ONE, settled=False)
    finally:
        gc.set_threshold(*thresholds)


# 6, 9, 11 and 12. Layers that are odd in what they save


def alias_with_a_version_of_its_own(h: Tensor) -> Tensor:
    """``.data`` shares the storage but not the version: what it changes is new content all the same."""
    w = (h.detach() * 0.5).clone()
    first = h * w
    alias = w.data
    alias.add_(1)
    second = h * alias
    return first.detach() + second  # only the second needs its saved tensor


def changed_by_what_saves_it(h: Tensor) -> Tensor:
    h = torch.sigmoid_(torch.relu_(h.clone()) * 2)
    return F.dropout(h * 1.5, 0.3, inplace=True).tanh_()


def changed_through_a_view(h: Tensor) -> Tensor:
    h = h.clone()
    h[:, ::2].exp_()
    return h.unsqueeze(0).squeeze(0)


def keyword_and_closure_of_a_checkpoint(h: Tensor) -> Tensor:
    twice, inner = h * 2, partial(torch.addcmul, value=0.5)
    return checkpoint(  # type: ignore[no-any-return]
        lambda x, *, scale: inner(x, scale, twice).tanh(), h, scale=h.sigmoid(), use_reentrant=False
    )


def checkpoint_inside(h: Tensor, *, use_reentrant: bool) -> Tensor:
    def inner(h: Tensor) -> Tensor:
        return F.dropout(h.tanh().sin(), 0.2).exp()

    return checkpoint(inner, h, use_reentrant=use_reentrant) * h  # type: ignore[no-any-return]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x.detach()
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.x


def cubed(x: Tensor) -> Tensor:
    return x.pow(3).sum()


def hooks_disabled_inside(h: Tensor) -> Tensor:
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        h = h.tanh()
    return h.sin()


ODD: dict[str, Mix] = {
    "alias": alias_with_a_version_of_its_own,
    "changed by what saves it": changed_by_what_saves_it,
    "changed through a view": changed_through_a_view,
    "keyword and closure": keyword_and_closure_of_a_checkpoint,
    "context": Square.apply,
    "reentrant checkpoint": partial(checkpoint_inside, use_reentrant=True),
    "checkpoint": partial(checkpoint_inside, use_reentrant=False),
    "grad": lambda h: h + torch.func.grad(cubed)(h),
    "grad of a detached tensor": lambda h: h * torch.func.grad(cubed)(h.detach()),
    "vmap": lambda h: torch.func.vmap(lambda x: x.tanh() * x)(h),
    "vmap of grad": lambda h: torch.func.vmap(torch.func.grad(cubed))(h).tanh(),
    "hooks disabled": hooks_disabled_inside,
}


@pytest.mark.parametrize("held", [False, True], ids=["stored", "writing"])
@pytest.mark.parametrize("name", ODD)
def test_layers_that_are_odd_in_what_they_save(name: str, held: bool) -> None:
    drive = Drive()
    drive.writes.seconds = 0.001 if held else 0.0
    records = assert_transparent(block=lambda: Block(ODD[name]), drive=drive, settled=not held, steps=2)
    assert all(moved(record) > 0 for record in records)


# 12. Hooks in hooks


@pytest.mark.filterwarnings("ignore:layer . .* runs inside saved-tensor hooks:UserWarning")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_12_a_checkpoint_around_layers(reentrant: bool, dropout: float) -> None:
    def work(net: Net, number: int) -> list[Tensor]:
        x = make_input(number)
        y = checkpoint(lambda x: net.layers[1](net.layers[0](x).sin()), x, use_reentrant=reentrant)
        net.layers[2](y).pow(2).mean().backward()
        return [x.grad]  # type: ignore[list-item]

    records = assert_transparent(work, block=lambda: Block(partial(F.dropout, p=dropout)))
    assert all(record.offloaded_bytes > 0 for record in records)


@pytest.mark.filterwarnings("ignore:layer . .* runs inside saved-tensor hooks:UserWarning")
def test_12_save_on_cpu_around_layers_and_inside() -> None:
    def mix(h: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            h = h.tanh().sin()
        return h.exp()

    def work(net: Net, number: int) -> list[Tensor]:
        x = make_input(number)
        with torch.autograd.graph.save_on_cpu():
            y = net.layers[1](net.layers[0](x))
        net.layers[2](y).pow(2).mean().backward()
        return [x.grad]  # type: ignore[list-item]

    records = assert_transparent(work, block=lambda: Block(mix))
    assert all(record.offloaded_bytes > 0 for record in records)


# 13. Schedules


@pytest.mark.parametrize("speed", ["fast", "slow"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_13_schedules(name: str, speed: str) -> None:
    drive = Drive()
    if speed == "slow":
        drive.writes.seconds = drive.reads.seconds = 0.001
    records = assert_transparent(schedule(SCHEDULES[name]), drive=drive, in_flight=3 * ONE, settled=False)
    assert all(record.in_flight_peak_bytes <= 4 * ONE for record in records)


def test_13_the_number_of_micro_batches_changes() -> None:
    orders = ["F0 B0", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 F1 B0 B1", "F0 F1 F2 B0 B1 B2", "F0 B0"]

    def work(net: Net, number: int) -> list[Tensor]:
        return schedule(orders[number])(net, number)  # type: ignore[return-value]

    assert_transparent(work, steps=len(orders), in_flight=3 * ONE, settled=False)


# 14. Between steps, and steps that end early


def test_14_evaluation_inside_and_between_steps() -> None:
    def work(net: Net, number: int) -> list[Tensor]:
        seen = [net(make_input(99)).detach()]
        with torch.no_grad():
            seen.append(net(make_input(98)))
        with torch.inference_mode():
            seen.append(net(make_input(97).detach()).clone())
        return [*(tensor.detach() for tensor in seen), *forward_backward(net, number)]

    expected = plain(work, steps=2)
    with attached() as (net, session):
        found = run(net, work, session, 1)
        net.eval()
        with torch.no_grad():
            evaluated = net(make_input(98))
        assert same_bits(evaluated, expected[0][1])
        net.train()
        found += run(net, lambda net, _: work(net, 1), session, 1)
        assert_all_given_back(session)
    assert_same(found[1:], [expected[1]])


@pytest.mark.parametrize("where", ["forward", "between", "backward"])
@pytest.mark.parametrize("keeps_graph", [False, True])
def test_14_after_a_step_that_raises_half_way_the_next_one_works(where: str, keeps_graph: bool) -> None:
    expected = plain(steps=3)
    kept: list[Tensor] = []

    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    def fail_half_way(net: Net) -> None:
        y = net.layers[1](net.layers[0](make_input(5)))
        if keeps_graph:
            kept.append(y)
        if where == "forward":
            raise ZeroDivisionError
        loss = net.layers[2](y).pow(2).mean()
        if where == "backward":
            y.register_hook(fail)
            loss.backward()
        raise ZeroDivisionError

    with attached(in_flight=3 * ONE) as (net, session):
        found = run(net, forward_backward, session, 1)
        with pytest.raises(ZeroDivisionError), session.step():
            fail_half_way(net)
        net.zero_grad()
        found += run(net, lambda net, _: forward_backward(net, 1), session, 1)
        found += run(net, lambda net, _: forward_backward(net, 2), session, 1)
        assert_same(found, expected)
        assert [record.step for record in session.records] == [1, 2, 3]
        kept.clear()
        gc.collect()
        assert_all_given_back(session)


@pytest.mark.filterwarnings("ignore:layer 2 .* runs inside saved-tensor hooks:UserWarning")
def test_14a_nothing_in_backward_waits_for_bytes_that_only_backward_can_release() -> None:
    """At the ceiling, with a drive that does not move, backward runs a checkpoint and packs again."""

    def work(net: Net, number: int) -> list[Tensor]:
        x = make_input(number)
        drive.writes.hold()
        y = net.layers[1](net.layers[0](x))
        checkpoint(net.layers[2], y, use_reentrant=True).pow(2).mean().backward()
        return [x.grad]  # type: ignore[list-item]

    drive = Drive()
    expected = plain(work)
    with attached(drive=drive) as (net, session):
        assert_same(run(net, work, session, 1), expected)
        drive.release()
        at_most = session.records[0].in_flight_peak_bytes
    drive = Drive()
    with attached(drive=drive, in_flight=at_most) as (net, session):
        assert_same(run(net, work, session, 1), expected)
        drive.release()
        assert_all_given_back(session)


def test_14a_forward_after_backward_at_the_ceiling_goes_on() -> None:
    drive = Drive()
    drive.writes.seconds = 0.0005
    order = "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5"
    assert_transparent(schedule(order), drive=drive, in_flight=4 * KIB, settled=False)


# 15. Shapes that change


def test_15_shapes_that_change_from_step_to_step() -> None:
    chance = random.Random(0)
    lengths = [chance.randint(1, 40) for _ in range(12)]

    def work(net: Net, number: int) -> list[Tensor]:
        x = make_input(number, lengths[number])
        net(x).pow(2).mean().backward()
        return [x.grad]  # type: ignore[list-item]

    assert_transparent(work, steps=len(lengths), in_flight=2 * ONE)


# Copies of layers


def sharing_attributes(layer: nn.Module) -> nn.Module:
    """As ``nn.DataParallel`` and meta-learning copy a layer."""
    twin = layer.__new__(type(layer))
    twin.__dict__ = layer.__dict__.copy()
    return twin


@pytest.mark.parametrize("way", [sharing_attributes, copy.copy])
def test_a_copy_of_a_layer_runs_with_its_own_weights(way: Callable[[nn.Module], nn.Module]) -> None:
    with attached() as (net, session):
        layer, x = net.layers[0], make_input()
        twin = way(layer)
        twin._modules = {name: copy.deepcopy(each) for name, each in layer.named_children()}  # type: ignore[assignment]
        with torch.no_grad():
            twin.up.weight.mul_(2)  # type: ignore[union-attr,operator]
        told = pytest.warns(UserWarning, match="copies of layers")
        with session.step(), told:
            assert same_bits(twin(x), x + twin.down(torch.tanh(twin.up(x))))  # type: ignore[operator]
            assert not same_bits(twin(x), layer(x))
            assert same_bits(layer(x), Block.forward(layer, x))  # type: ignore[arg-type]
