"""What a ``plan`` event of a run log must look like before anything is computed from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import BaseModel, Field, model_validator

from tba_offload.report.damage import Bytes, Flag, Seconds, Word, checked

if TYPE_CHECKING:
    from collections.abc import Mapping

_Share = Annotated[float, Field(strict=True, ge=0, le=1e3, allow_inf_nan=False)]
_Rate = Annotated[float, Field(strict=True, ge=1, le=1e18, allow_inf_nan=False)]
_Number = Annotated[int, Field(strict=True, ge=0, lt=2**20)]
_Saved = (
    tuple[Bytes, _Share, _Share]
    | tuple[Bytes, _Share, _Share, Flag | None]
    | tuple[Bytes, _Share, _Share, Flag | None, _Share | None]
)
# The last word is the old one of the one before it.
_Measured = Literal[
    "keep",
    "offload",
    "recompute",
    "recompute-offload",
    "recompute-except-attention",
    "offload-remat",
    "selective",
]


class _Kind(BaseModel):
    activations: Annotated[list[_Saved], Field(max_length=10_000)]
    small_bytes: Bytes
    input_bytes: Bytes
    at_once: Bytes | None = None
    attention_bytes: Bytes | None = None
    beside: dict[_Measured, tuple[Bytes, Bytes] | tuple[Bytes, Bytes, Bytes]] = {}


class _Profile(BaseModel):
    kinds: list[_Kind]
    layers: Annotated[list[_Number], Field(min_length=1, max_length=10_000)]
    timings: list[Annotated[dict[_Measured, tuple[Seconds, Seconds]], Field(min_length=1)]]
    slots: Annotated[
        list[tuple[_Number, _Number, Flag, Seconds] | tuple[_Number, _Number, Flag, Seconds, _Number]],
        Field(min_length=1, max_length=1_000_000),
    ]
    gradients: Annotated[list[Bytes], Field(max_length=1_000_000)] = []
    tail: Seconds
    loss_bytes: Bytes = 0
    rest_bytes: Bytes

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if len(self.timings) != len(self.kinds) or max(self.layers) >= len(self.kinds):
            raise ValueError("kinds, their timings and layers do not fit together")
        if self.gradients and len(self.gradients) != len(self.slots):
            raise ValueError("there are not as many numbers of gradients as slots")
        running: set[tuple[int, int]] = set()
        for place, (layer, micro_batch, backward, _, *held) in enumerate(self.slots):
            if held and not (backward and place < held[0] <= len(self.slots)):
                raise ValueError("what a slot holds is gone before the slot, or after the step")
            if layer >= len(self.layers) or backward > ((layer, micro_batch) in running):
                raise ValueError("a slot is of no layer, or its backward comes before its forward")
            running.add((layer, micro_batch))
        return self


class _Tier(BaseModel):
    write: _Rate
    read: _Rate


class _Host(_Tier):
    capacity: Bytes


class _Drive(_Tier):
    latency: Seconds = 0.0
    host: _Host | None = None
    capacity: Bytes | None = None


class _Limits(BaseModel):
    window: Bytes | None


class _Writes(BaseModel):
    bytes_per_day: Annotated[float, Field(strict=True, ge=0, le=1e21, allow_inf_nan=False)]
    allowed: Annotated[int, Field(strict=True, ge=0, le=2**60)]
    bounds: Flag


class _Spread(BaseModel):
    bytes_per_second: _Rate | None
    spread: Annotated[float, Field(strict=True, ge=0, le=1e18)] | None


class _Rates(BaseModel):
    tier: Word
    write: _Spread
    read: _Spread


class _Plan(BaseModel):
    names: list[Word]
    profile: _Profile
    drive: _Drive
    limits: _Limits
    rates: list[_Rates] = []
    writes: _Writes | None = None

    @model_validator(mode="after")
    def _names_every_layer(self) -> Self:
        if len(self.names) != len(self.profile.layers):
            raise ValueError("there are not as many names as layers")
        return self


def checked_plan(event: Mapping[str, object]) -> None:
    """Check what is needed to plan anew.

    Raises:
        RunLogError: A part is missing, of another type or beyond all bounds; says which.
    """
    checked(_Plan, event)
