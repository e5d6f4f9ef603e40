"""What is seen of memory: what holds it at the peak of each phase, and what runs of layers leave there."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from tba_offload.config.policy import Placement
from tba_offload.plan.beside import Beside

FORWARD, LOSS, BACKWARD, EMBEDDINGS = "forward", "loss", "backward", "embeddings"
BETWEEN, UPDATE = "between", "update"
"""After a backward pass: gradients are clipped, or another pass begins; and while an optimizer works."""


class Held(NamedTuple):
    """What holds memory at one moment, in bytes.

    Attributes:
        in_flight: Packed by layers and not yet written.
        read_ahead: Read back and not yet used.
        settled: Kept by the offloader: in use by backward, or refused by a drive.
        small: Saved by layers with hooks, and kept: small, not understood, or held elsewhere.
        kept: Left in memory by layers that are placed ``keep`` or were left alone, and by plan by others.
        inputs: Left in memory by layers that are recomputed.
        outputs: Left in memory by layers whose activations travel, beside all that the offloader knows of.
        put_out: Put out by the model, now or in earlier steps, and alive still.
    """

    in_flight: int = 0
    read_ahead: int = 0
    settled: int = 0
    small: int = 0
    kept: int = 0
    inputs: int = 0
    outputs: int = 0
    put_out: int = 0

    @property
    def nbytes(self) -> int:
        """All of it."""
        return sum(self)

    @property
    def planned(self) -> int:
        """Bytes of which plans know: activations of layers."""
        return self.nbytes - self.outputs - self.put_out


class Peak(NamedTuple):
    """The fullest moment of one phase, gradients included.

    Attributes:
        nbytes: Live bytes, without those that were there before the step, gradients and states of optimizers.
        layer: Index of the layer that ran, or had run last.
        held: What held them.
        beside: Those of nothing in ``held`` that were there when the layer began.
        gradients: Bytes of gradients at the time.
        frozen: Bytes of frozen weights that were there for layers that compute.
    """

    nbytes: int
    layer: int
    held: Held
    beside: int
    gradients: int
    frozen: int

    @property
    def whole(self) -> int:
        """All bytes of the moment."""
        return self.nbytes + self.gradients + self.frozen

    def figures(self) -> dict[str, object]:
        """Return the same for a log."""
        return {**self._asdict(), "held": self.held._asdict()}


@dataclass(slots=True)
class LayerMemory:
    """What the runs of one layer did, the largest of each, in bytes.

    Attributes:
        leaves: Left in memory by a forward, what the offloader holds left out.
        forward: Most live bytes in a forward beyond those before it; what is read ahead is of others.
        backward: The same in a backward.
        beside: Most bytes in each beside what plans know of.
    """

    leaves: int = 0
    forward: int = 0
    backward: int = 0
    beside: Beside = field(default_factory=Beside)

    def left(self, nbytes: int) -> None:
        """Record that a forward has left ``nbytes`` in memory."""
        self.leaves = max(self.leaves, nbytes)

    def took(self, phase: str, nbytes: int, beside: int, whole: int) -> None:
        """At its peak a phase had ``nbytes`` more live than at its begin, and ``beside`` what plans know.

        Of that, ``whole`` would have lain beside all that the run had saved.
        """
        if phase == FORWARD:
            self.forward = max(self.forward, nbytes)
            self.beside = self.beside.at_least(Beside(forward=beside))
        elif phase == BACKWARD:
            self.backward = max(self.backward, nbytes)
            self.beside = self.beside.at_least(Beside(0, beside, whole))


_Left = dict[str, int]
"""Bytes that a run of a layer has left in memory, by holder."""


class Runs:
    """The runs of layers that wait for their backward, and what they have left in memory, by holder.

    Args:
        final: Index of the layer after which the loss comes, as far as is known: where a model has several
            stacks it need not be the last one.

    Attributes:
        left: Bytes that runs have left in memory for backward, beside what the offloader holds.
        all_left: All of them.
        beside_at_loss: Most bytes between the last layer's forward and its backward that plans do not know
            of: logits, temporaries, what the model has put out; ``None`` if that was not seen.
    """

    def __init__(self, final: int) -> None:
        self.final = final
        self._first: int | None = None
        self._latest = final
        self.left = {"kept": 0, "inputs": 0, "outputs": 0, "small": 0}
        self.all_left = 0
        self.beside_at_loss: int | None = None
        self._waiting: dict[int, list[_Left]] = defaultdict(list)
        self._leaving: _Left | None = None

    def begin(self, index: int) -> bool:
        """Return a forward begins.

        Returns whether it is of the layer whose forward was the first in the step.
        """
        self._first = index if self._first is None else self._first
        return index == self._first

    def end(self, index: int) -> bool:
        """Return a forward has ended; returns whether the loss comes next."""
        self._latest = index
        return index == self.final

    def wait(self, index: int, run: _Left) -> None:
        """Record that a run begins to wait."""
        self._waiting[index].append(run)
        self._change(run, 1)

    def reach(self, index: int) -> None:
        """Backward comes to the latest run of a layer, so that it is done with the one before."""
        self.final = self._latest
        self.let_go()
        runs = self._waiting[index]
        self._leaving = runs.pop() if runs else None

    def fit(self, most: int) -> None:
        """No more than ``most`` bytes are there: what the model's output alone had held went with that."""
        gone = self.all_left - most
        for run in (run for runs in self._waiting.values() for run in runs):
            if gone <= 0 or not (self.left["outputs"] or self.left["small"]):
                return
            for holder in ("outputs", "small"):
                fewer = min(gone, run.get(holder, 0))
                self._change({holder: fewer}, -1)
                run[holder] = run.get(holder, 0) - fewer
                gone -= fewer

    def at_loss(self, beside: int) -> None:
        """Around the loss memory held ``beside`` bytes that plans do not know of."""
        self.beside_at_loss = max(self.beside_at_loss or 0, beside)

    def let_go(self) -> None:
        """Backward is done with the run that it had come to."""
        if self._leaving is not None:
            self._change(self._leaving, -1)
            self._leaving = None

    def _change(self, run: _Left, sign: int) -> None:
        for holder, nbytes in run.items():
            self.left[holder] += sign * nbytes
            self.all_left += sign * nbytes


def holder_of(way: str) -> str:
    """Return what holds the bytes that a run of a layer leaves in memory, by how it ran."""
    placement = Placement(way)
    if placement is Placement.KEEP:
        return "kept"
    return "inputs" if placement.recomputes else "outputs"
