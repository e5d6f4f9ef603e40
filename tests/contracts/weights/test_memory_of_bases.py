"""Frozen bases of all kinds take the memory of two layers, as malloc counts."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest
from bases import (
    BASES,
    FAMILIES,
    LAYERS,
    WIDE,
    Observer,
    Training,
    frozen_parts,
    live_bytes,
    make,
    nbytes_of,
    offloaded,
)
from covering import of_which
from harness import KIB
from models import assert_same_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

MEASURED = [
    *[("Llama", base) for base in BASES],
    *[(family, "nf4, double") for family in FAMILIES if family != "Llama"],
    ("Mixtral", "bf16"),
]
ALWAYS = (("Llama", "bf16"), ("Llama", "nf4, double"), ("Llama", "int8"), ("Llama", "torchao int4"))


@pytest.mark.parametrize("kind", of_which(MEASURED, *ALWAYS), ids=", ".join)
def test_frozen_bytes_in_memory_are_those_of_two_layers_as_malloc_counts(
    kind: tuple[str, str], tmp_path: Path
) -> None:
    """The live bytes at each module of a step, beside those of the same step that keeps its weights."""
    family, base = kind
    (plain, kept_at_start, kept), _ = measured(family, base, None)
    (found, at_start, seen), stay = measured(family, base, tmp_path)
    assert_same_tensors(found, plain)
    total = nbytes_of(frozen_parts(make(family, base, **WIDE)))
    slack = total / LAYERS / 10 + 32 * KIB  # of the session, and of tables of quantized weights
    assert abs(stay) <= slack
    resident = [now - then for now, then in zip(seen, kept, strict=True)]
    resident = [each - (at_start - kept_at_start) + stay for each in resident]
    assert total / LAYERS / 4 <= max(resident) <= 2 * total / LAYERS + slack


def measured(
    family: str, base: str, directory: Path | None
) -> tuple[tuple[list[Tensor], int, list[int]], float]:
    """Live bytes before and in the third step; and the frozen bytes that attaching has left in memory."""
    with offloaded(make("Llama"), directory) if directory else nullcontext():
        pass  # what the first session of a process loads does not count
    model = make(family, base, **WIDE)
    total = nbytes_of(frozen_parts(model))
    observer, training = Observer(model), Training(model)

    def steps() -> tuple[list[Tensor], int, list[int]]:
        for number in range(3):
            at_start = live_bytes()
            observer.seen = []
            training.step(number, rows=1, length=4)
        return training.results(), at_start, observer.seen

    if directory is None:
        return steps(), total
    gc.collect()
    before = live_bytes()
    with offloaded(model, directory):
        gc.collect()
        stay = total - (before - live_bytes())
        return steps(), stay
