"""What lies in memory beside what layers have saved: temporaries, gradients of activations, logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.plan.model import Plan
    from tba_offload.plan.profile import LayerKind


class Beside(NamedTuple):
    """Most bytes in memory while a layer runs, beside all that layers have saved.

    They are temporaries, gradients of activations, and what lies there anyway. What a run of the layer itself
    saves, or makes again, is none of them.

    Attributes:
        forward: From the begin of its forward to that of the next layer's.
        backward: The same of its backward.
        whole: The same of its backward, if all that it has saved were there when that begins: what is used by
            then makes room.
    """

    forward: int = 0
    backward: int = 0
    whole: int = 0

    def at_least(self, other: Beside) -> Beside:
        """Return the most of two, each way."""
        return Beside(*map(max, self, other))

    def if_whole(self, *, again: int | None = None) -> Beside:
        """Return what there is if all that the layer has saved is there when its backward begins.

        Args:
            again: If a second forward makes it, with temporaries as the first one has: bytes of the gradient
                of its output, which is there by then.
        """
        backward = self.whole if again is None else max(self.whole, self.forward + again)
        return Beside(self.forward, backward, backward)

    @classmethod
    def from_json(cls, values: Sequence[int]) -> Beside:
        """Return the one that was put into a run log as a list; some have two figures alone."""
        forward, backward, *whole = map(int, values)
        return cls(forward, backward, *(whole or [backward]))


def own_bytes(kind: LayerKind, plan: Plan, layer: int) -> Beside:
    """Bytes of a layer's own run that no books have while it runs, and the simulator counts as the layer's.

    In a forward that is what it leaves in memory, which is known when it ends, in a backward what it makes
    again.

    Args:
        kind: Of the layer.
        plan: The plan that was in force.
        layer: Index of the layer.
    """
    way = plan.placements[layer]
    if way.recomputes:
        spared = kind.attention_bytes or 0 if way.spares_attention else 0
        again = max(kind.recomputed_bytes - spared, 0)
        return Beside(0 if way.offloads else kind.input_bytes, again, again)
    if not way.offloads:
        return Beside(kind.nbytes + kind.small_bytes)
    again = 0
    if way.rebuilds:
        again = max((saved.nbytes for saved in kind.activations if saved.rebuilt), default=0)
    return Beside(plan.kept_bytes(layer, kind) + kind.small_bytes, again, again)
