"""The same training to the last bit, whatever the placement, the store, the dtype and the schedule.

Losses, gradients of every step, the updated parameters and the state of the random number generators are
compared as integers with those of a run to which nothing is attached.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from covering import combinations, full
from models import (
    HEADS,
    HIDDEN,
    SEQUENCE,
    VOCAB,
    History,
    assert_same_history,
    make_model,
    make_tokens,
    same_bits,
    train,
)

import tba_offload as tba
from tba_lab.gpt import Batch, GptShape, build_gpt, causal_mask, gpt_loss
from tba_lab.megatron_cpu import seed_all, single_process
from tba_offload import BudgetConfig, OffloadConfig, Placement, Rule, StoreConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from _pytest.mark import ParameterSet
    from torch import Tensor, nn
    from warm import Warm

MEGATRON = "megatron-"
KINDS = ["gpt", "llama", "encoder", *(MEGATRON + kind for kind in ("gpt", "llama"))]
INPUTS = "recompute-offload"
ATTENTION = "recompute-except-attention"
LAYERS = 3
STEPS = 2
UNIFORM = ("keep", "offload", "recompute", INPUTS, ATTENTION, "offload-50%", "offload-remat", "auto")
MIXED = Placement.OFFLOAD, (Rule("0", Placement.RECOMPUTE), Rule("*layers.2", Placement.KEEP))
PLACEMENTS: dict[str, tuple[Placement, tuple[Rule, ...]]] = {
    **{name: (Placement(name), ()) for name in UNIFORM},
    "mixed": MIXED,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WINDOW = 256 * 1024
WINDOW_OF_INPUTS = 24 * 1024
"""Holds at most one input of a layer."""

STORES = ("host", "file")
DROPOUTS = (0.0, 0.1)
MICRO_BATCHES = (1, 3)


def of_kinds(*factors: Sequence[Any]) -> list[ParameterSet]:
    """Combinations of the kinds of models with other settings, as parameters of a test.

    The main lane takes those in which every two of the other settings meet, with each kind of model in turn.
    """
    settings = combinations(*factors)
    turns = range(max(len(KINDS), len(settings)))
    always = [(KINDS[turn % len(KINDS)], *settings[turn % len(settings)]) for turn in turns]
    rows = dict.fromkeys([*always, *combinations(KINDS, *factors)])
    return [pytest.param(*row, marks=marks_of(row[0], is_full=row not in always)) for row in rows]


def marks_of(kind: str, *, is_full: bool) -> list[pytest.MarkDecorator]:
    return [pytest.mark.megatron] * kind.startswith(MEGATRON) + [full] * is_full


EACH_KIND = [
    pytest.param(kind, marks=marks_of(kind, is_full=kind not in {"gpt", "megatron-llama"})) for kind in KINDS
]

# What ``single_process`` silences is silent in one phase of a test only, and a group outlives the phase.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Warning. tp_group is None:DeprecationWarning"),
    pytest.mark.usefixtures("deterministic"),
]


@pytest.fixture(scope="module", params=EACH_KIND)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kind of model; the process group of megatron-core's is set up once for all tests of a kind."""
    with single_process() if request.param.startswith(MEGATRON) else nullcontext():
        yield request.param


def make(kind: str, dtype: str, dropout: float) -> nn.Module:
    if kind.startswith(MEGATRON):
        style = kind.removeprefix(MEGATRON)
        sizes = {"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "sequence": SEQUENCE, "vocab": VOCAB}
        return build_gpt(GptShape(**sizes, dtype=dtype, dropout=dropout, style=style), seed=1)
    return make_model(kind, layers=LAYERS, dtype=DTYPES[dtype], dropout=dropout)


def history_of(kind: str, model: nn.Module, session: tba.Session | None, **how: Any) -> History:
    if not kind.startswith(MEGATRON):
        return train(model, session, **how)
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    history = train(model, session, loss=causal_loss, seed=seed_all, **how)
    history.random_states += [state.clone() for state in get_cuda_rng_tracker().get_states().values()]
    return history


def causal_loss(model: nn.Module, number: int) -> Tensor:
    tokens = make_tokens(number)
    batch = Batch(
        tokens=tokens[:, :-1],
        labels=tokens[:, 1:],
        position_ids=torch.arange(SEQUENCE).expand(len(tokens), -1),
        attention_mask=causal_mask(SEQUENCE),
        loss_mask=torch.ones(len(tokens), SEQUENCE),
    )
    return gpt_loss(model, batch)


@functools.cache
def plain(
    kind: str, dtype: str, dropout: float, *, micro_batches: int = 1, steps: int = STEPS, threads: int = 1
) -> History:
    """The run without a session; the number of threads may decide the order of a sum, so it counts."""
    assert torch.get_num_threads() == threads
    return history_of(kind, make(kind, dtype, dropout), None, steps=steps, micro_batches=micro_batches)


def config_for(placement: str, store: str, directory: Path) -> OffloadConfig:
    """Everything but the smallest tensors travels, through a window that holds a fraction of a layer."""
    default, rules = PLACEMENTS[placement]
    window = WINDOW_OF_INPUTS if placement in {INPUTS, ATTENTION} else WINDOW
    # Without a budget the second plan depends on how high the first step was seen to peak.
    most = 2**30 if placement == "auto" else None
    return OffloadConfig(
        default=default,
        layers=rules,
        budget=BudgetConfig(in_flight_bytes=window, activation_bytes=most),
        store=StoreConfig(kind=store, directories=(directory,) if store == "file" else ()),
        min_tensor_bytes=1024,
    )


@pytest.mark.parametrize(
    ("kind", "placement", "store", "dtype", "dropout", "micro_batches"),
    of_kinds([*PLACEMENTS], STORES, [*DTYPES], DROPOUTS, MICRO_BATCHES),
    indirect=["kind"],
)
def test_same_bits(
    kind: str, placement: str, store: str, dtype: str, dropout: float, micro_batches: int, tmp_path: Path
) -> None:
    expected = plain(kind, dtype, dropout, micro_batches=micro_batches)
    model = make(kind, dtype, dropout)
    with tba.attach(model, config_for(placement, store, tmp_path), measure_memory=False) as session:
        found = history_of(kind, model, session, steps=STEPS, micro_batches=micro_batches)
        report = session.records
    assert_same_history(found, expected)
    assert {record.scopes for record in report} == {LAYERS * micro_batches}
    moved = [record.offloaded_bytes for record in report]
    if placement in {"keep", "recompute"}:
        assert not any(moved)
    elif placement == "auto":  # which may keep everything, in the end, if the drive is slow
        assert moved[0] or report[0].fallback_kept_bytes
    else:
        assert all(moved)
    rebuilt = [record.rebuilt_bytes for record in report]
    if placement == "offload-remat":
        assert rebuilt[-1] > 0.2 * moved[-1]
    elif placement != "auto":  # which tries it
        assert not any(rebuilt)
    recomputed = {"recompute": LAYERS, INPUTS: LAYERS, ATTENTION: LAYERS, "mixed": 1}.get(placement, 0)
    again = [record.recomputed_scopes / micro_batches for record in report]
    if placement == "auto":  # offloads all layers in the first step, and tries one of each kind in the second
        assert again[0] == 0
        assert again[1] in range(1, LAYERS)
    else:
        assert again == [recomputed] * STEPS


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_runs_compared_differ_in_dropout(kind: str, dtype: str) -> None:
    """Dropout that does nothing, or draws nothing, would be reproduced by everybody."""
    without, dropping = (plain(kind, dtype, dropout) for dropout in DROPOUTS)
    assert not any(same_bits(a, b) for a, b in zip(without.losses, dropping.losses, strict=True))
    assert not same_bits(without.random_states[0], dropping.random_states[0])


@pytest.mark.usefixtures("two_threads")
def test_bytes_really_go_out_and_come_back(kind: str, tmp_path: Path) -> None:
    """Of all but the last activations, as the window holds a fraction of a layer; with two threads."""
    expected = plain(kind, "fp32", 0.1, threads=2)
    model = make(kind, "fp32", 0.1)
    with tba.attach(model, config_for("offload", "file", tmp_path), measure_memory=False) as session:
        found = history_of(kind, model, session, steps=STEPS)
        record = session.records[-1]
    assert_same_history(found, expected)
    assert record.read_bytes > 0.8 * record.offloaded_bytes
    assert record.in_flight_peak_bytes <= 1.5 * WINDOW


FIRST = """
import random, torch
random.seed(1)
state = random.getstate()
import tba_offload as tba
layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
with tba.attach(layers, {"default": "offload", "store": {"kind": "host"}}, layers=list(layers)) as session:
    with session.step():
        layers(torch.ones(2, 4)).sum().backward()
    print(session.why())
assert random.getstate() == state
"""


def test_the_first_session_of_a_process_leaves_numbers_of_python_alone(python_with_torch: Warm) -> None:
    """Though packages that it imports draw some."""
    done = python_with_torch.run("-c", FIRST)
    assert done.returncode == 0, done.stderr
