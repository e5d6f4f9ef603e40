"""Profiles of training steps that need not be run: a transformer layer from its shape, a stage from layers.

What a layer saves is the accounting of Korthikanti et al. 2022 (34 s b h bytes in 16 bit with dropout, less
what tensor parallelism divides), one entry for each saved tensor, with flash attention: no matrix of scores.
Times are floating-point operations over a rate. Everything else (norms, activation functions, communication)
counts as if it took none.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tba_offload.config.policy import Placement
from tba_offload.plan.profile import LayerKind, Saved, Slot, StepProfile, Timing
from tba_offload.plan.what_if import one_f_one_b

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Operation:
    """A part of a layer.

    Attributes:
        flops: Floating-point operations of its forward, for one token.
        saves: Bytes of each tensor that it saves for backward, for one token.
    """

    flops: float
    saves: tuple[float, ...] = ()


@dataclass(frozen=True)
class LayerShape:
    """One kind of layer.

    Attributes:
        blocks: Its attention blocks and its MLP, each a list of operations in their order.
        input_bytes: Bytes of its input, for one token.
    """

    blocks: tuple[tuple[Operation, ...], ...]
    input_bytes: float

    @property
    def flops(self) -> float:
        """Floating-point operations of one forward, for one token."""
        return sum(operation.flops for operation in itertools.chain(*self.blocks))

    @property
    def saved_bytes(self) -> float:
        """Bytes that one forward saves, for one token."""
        return sum(sum(operation.saves) for operation in itertools.chain(*self.blocks))

    def kind(self, tokens: int, scale: float = 1.0) -> LayerKind:
        """Get the layer for so many tokens, its activations so many times as large as the accounting says."""
        passed, saved = 0.0, []
        for operation in itertools.chain(*self.blocks):
            begins, passed = passed, passed + operation.flops / self.flops
            saved += [
                Saved(int(nbytes * tokens * scale), begins, max(1.0 - passed, 0.0))
                for nbytes in operation.saves
            ]
        return LayerKind(tuple(saved), small_bytes=0, input_bytes=int(self.input_bytes * tokens * scale))

    @property
    def scopes(self) -> tuple[int, ...]:
        """For each block, how many tensors have been saved when it ends."""
        counts = [sum(len(operation.saves) for operation in block) for block in self.blocks]
        return tuple(itertools.accumulate(counts))

    def timing(self, tokens: int, rate: float) -> Timing:
        """Seconds for so many tokens; backward is twice forward."""
        forward = self.flops * tokens / rate
        return Timing(forward, 2 * forward)


def llama_layer(
    *, hidden: int, ffn: int, heads: int, kv_heads: int, sequence: int, bytes_each: int
) -> LayerShape:
    """RMSNorm, grouped-query attention, SwiGLU, no dropout, as eager PyTorch saves it.

    A norm saves its input and what it has normalized; keys and values are repeated for all heads before
    attention.
    """
    h = hidden * bytes_each
    f = ffn * bytes_each
    kv = hidden * kv_heads // heads
    attention = (
        Operation(0, (h, h)),  # norm
        Operation(2 * hidden * (hidden + 2 * kv), (h,)),
        Operation(2 * sequence * hidden, (h, h, h, h)),  # causal: half of the scores; q, k, v, result
        Operation(2 * hidden * hidden),
    )
    mlp = (
        Operation(0, (h, h)),
        Operation(4 * hidden * ffn, (h,)),
        Operation(0, (f, f, f)),  # gate, its SiLU, up
        Operation(2 * hidden * ffn, (f,)),
    )
    return LayerShape((attention, mlp), input_bytes=h)


def megatron_layer(*, hidden: int, sequence: int, tensor_parallel: int, cross: bool = False) -> LayerShape:
    """Return a layer of Megatron's GPT, BERT or T5 in 16 bit with dropout, on one of its ranks.

    Without sequence parallelism, norms, inputs of linear layers and dropout masks are on every rank.

    Args:
        hidden: The width.
        sequence: Tokens of a sequence.
        tensor_parallel: Ranks that share a layer.
        cross: Whether it attends to an encoder's output too, as decoder layers of T5 do.
    """
    h, part, t = hidden * 2.0, hidden * 2.0 / tensor_parallel, tensor_parallel

    def attention(projections: int) -> tuple[Operation, ...]:
        return (
            Operation(0, (h,)),  # norm
            Operation(2 * projections * hidden * hidden / t, (h,)),
            Operation(4 * sequence * hidden / t, (part, part, part, part)),
            Operation(2 * hidden * hidden / t),
            Operation(0, (h / 2,)),  # dropout mask
        )

    mlp = (
        Operation(0, (h,)),
        Operation(8 * hidden * hidden / t, (h,)),
        Operation(0, (4 * part,)),  # GELU
        Operation(8 * hidden * hidden / t, (4 * part,)),
        Operation(0, (h / 2,)),
    )
    blocks = (attention(3), attention(3), mlp) if cross else (attention(3), mlp)
    return LayerShape(blocks, input_bytes=h)


def stage(
    shapes: Sequence[LayerShape],
    *,
    tokens: int,
    rate: float,
    micro_batches: int = 1,
    ahead: int = 1,
    turn_seconds: float = 0.0,
    last_wait: float = 0.0,
    rest_bytes: int = 0,
    scale: float = 1.0,
) -> StepProfile:
    """Return the step of a stage.

    Args:
        shapes: Its layers.
        tokens: Tokens of a micro-batch.
        rate: Floating-point operations a second.
        micro_batches: How many there are.
        ahead: Forwards before the first backward, as 1F1B has them.
        turn_seconds: Other compute, or waiting for other stages, before the first backward.
        last_wait: Waiting for other stages before the last backward.
        rest_bytes: Bytes that are there beside activations of layers.
        scale: So many times as large as the accounting says are activations.
    """
    distinct = list(dict.fromkeys(shapes))
    slots: list[Slot] = []
    blocks = one_f_one_b(micro_batches, ahead)
    first = next(number for number, block in enumerate(blocks) if block.backward)
    for number, block in enumerate(blocks):
        order = range(len(shapes) - 1, -1, -1) if block.backward else range(len(shapes))
        gap = turn_seconds if number == first else last_wait if number == len(blocks) - 1 else 0.0
        slots += [
            Slot(layer, block.micro_batch, block.backward, 0.0 if place else gap)
            for place, layer in enumerate(order)
        ]
    return StepProfile(
        kinds=tuple(shape.kind(tokens, scale) for shape in distinct),
        layers=tuple(distinct.index(shape) for shape in shapes),
        timings=tuple({Placement.KEEP: shape.timing(tokens, rate)} for shape in distinct),
        slots=tuple(slots),
        rest_bytes=rest_bytes,
    )
