"""The ``memory`` event of a run log: where in a step memory was at its peak, and what held it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import BaseModel, Field, model_validator

from tba_offload.report.damage import Bytes, Number, Word, checked

if TYPE_CHECKING:
    from collections.abc import Mapping


class HeldBytes(BaseModel):
    """Bytes by what held them at one moment; see :class:`tba_offload.session.memory_seen.Held`."""

    in_flight: Bytes
    read_ahead: Bytes
    settled: Bytes
    small: Bytes
    kept: Bytes
    inputs: Bytes
    outputs: Bytes
    put_out: Bytes = 0  # earlier logs do not tell


class PhasePeak(BaseModel):
    """The peak of one phase; see :class:`tba_offload.session.memory_seen.Peak`."""

    nbytes: Bytes
    layer: Number
    held: HeldBytes
    beside: Bytes
    gradients: Bytes
    frozen: Bytes = 0  # earlier logs do not tell

    @property
    def whole(self) -> int:
        """All bytes of the moment."""
        return self.nbytes + self.gradients + self.frozen


class StaticBytes(BaseModel):
    """Bytes that last from step to step."""

    parameters: Bytes
    gradients: Bytes
    buffers: Bytes
    optimizer_states: Bytes
    masters: Bytes = 0  # earlier logs do not tell


class MemoryEvent(BaseModel):
    """What a step that was looked at has shown.

    Attributes:
        step: Its number.
        source: How live bytes were measured.
        names: Module names of the layers.
        placements: Their placements.
        window: Most bytes in flight; ``None`` for no limit.
        static: What lasts from step to step.
        held: What layers have saved and an attribute of a module holds: its name, its bytes, and whether it
            was there before the step.
        caches: What else attributes of modules hold from step to step, beside parameters, buffers and
            gradients: its name and its bytes.
        phases: The peak of each phase.
        layers: Of each layer, in bytes: what a forward leaves in memory, and the most that a forward and a
            backward take beyond what was there before.
        checkpointed: How many of the layers their own framework has run again in backward.
        not_attached: How many modules of the same classes are not among the layers.
        left_out: Lists of trained blocks of other classes that are not either, in words, with their numbers.
        head: Bytes of the largest trained parameter beside the layers, which a loss may need a gradient of.
        frozen_weights: Bytes of frozen weights of layers that could be offloaded and are in memory.
        frozen_at_once: Those of them that would be in memory at a time: of the two largest layers.
    """

    step: Number
    source: Word
    names: Annotated[list[Word], Field(max_length=10_000)]
    placements: Annotated[list[Word], Field(max_length=10_000)]
    window: Bytes | None
    static: StaticBytes
    held: Annotated[list[tuple[Word, Bytes, bool]], Field(max_length=10_000)]
    caches: Annotated[list[tuple[Word, Bytes]], Field(max_length=10_000)] = []  # earlier logs do not tell
    phases: dict[Literal["forward", "loss", "backward", "embeddings", "between", "update"], PhasePeak]
    layers: Annotated[list[tuple[Bytes, Bytes, Bytes]], Field(max_length=10_000)]
    checkpointed: Bytes = 0  # earlier logs tell neither
    not_attached: Bytes = 0
    left_out: Annotated[list[tuple[Word, Number]], Field(max_length=1000)] = []
    head: Bytes = 0
    frozen_weights: Bytes = 0
    frozen_at_once: Bytes = 0

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not len(self.names) == len(self.placements) == len(self.layers):
            raise ValueError("there are not as many names as layers")
        if any(peak.layer >= max(len(self.names), 1) for peak in self.phases.values()):
            raise ValueError("a peak is in no layer")
        return self


def checked_memory(event: Mapping[str, object]) -> MemoryEvent:
    """Return the event with its types.

    Raises:
        RunLogError: A part is missing, of another type or beyond all bounds; says which.
    """
    return checked(MemoryEvent, event)
