"""The same training to the last bit, whatever the placement, the store, the dtype and the schedule.

Losses, gradients of every step and the updated parameters are compared as integers with those of a run to
which nothing is attached.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest
import torch
from models import History, assert_same_history, make_model, train

import tba_offload as tba
from tba_offload import BudgetConfig, OffloadConfig, Placement, Rule, StoreConfig

if TYPE_CHECKING:
    from pathlib import Path

KINDS = ["gpt", "llama", "encoder"]
PLACEMENTS: dict[str, tuple[Placement, tuple[Rule, ...]]] = {
    "keep": (Placement.KEEP, ()),
    "offload": (Placement.OFFLOAD, ()),
    "recompute": (Placement.RECOMPUTE, ()),
    "auto": (Placement.AUTO, ()),
    "mixed": (
        Placement.OFFLOAD,
        (Rule("0", Placement.RECOMPUTE), Rule("layers.3", Placement.KEEP)),
    ),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(autouse=True)
def deterministic() -> object:
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


@functools.cache
def plain(kind: str, dtype: str, dropout: float, micro_batches: int) -> History:
    model = make_model(kind, dtype=DTYPES[dtype], dropout=dropout)
    return train(model, micro_batches=micro_batches)


def config_for(placement: str, store: str, directory: Path) -> OffloadConfig:
    """Everything but the smallest tensors travels, through a window that holds a fraction of a layer."""
    default, rules = PLACEMENTS[placement]
    return OffloadConfig(
        default=default,
        layers=rules,
        budget=BudgetConfig(in_flight_bytes=256 * 1024),
        store=StoreConfig(kind=store, directories=(directory,) if store == "file" else ()),
        min_tensor_bytes=1024,
    )


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("store", ["host", "file"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_same_bits(
    kind: str, placement: str, store: str, dtype: str, dropout: float, micro_batches: int, tmp_path: Path
) -> None:
    model = make_model(kind, dtype=DTYPES[dtype], dropout=dropout)
    with tba.attach(model, config_for(placement, store, tmp_path), measure_memory=False) as session:
        found = train(model, session, micro_batches=micro_batches)
        report = session.report()
    assert_same_history(found, plain(kind, dtype, dropout, micro_batches))
    moved = sum(record.offloaded_bytes for record in report)
    assert (moved > 0) == (placement in {"offload", "auto", "mixed"})
    recomputed = {record.recomputed_scopes for record in report}
    assert recomputed == {{"recompute": 4, "mixed": 1}.get(placement, 0) * micro_batches}


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_really_go_out_and_come_back(kind: str, tmp_path: Path) -> None:
    model = make_model(kind)
    with tba.attach(model, config_for("offload", "file", tmp_path), measure_memory=False) as session:
        train(model, session, steps=2)
        record = session.report()[-1]
    # With a window of a fraction of a layer, all but the last activations have left memory.
    assert record.read_bytes > 0.8 * record.offloaded_bytes
    assert record.in_flight_peak_bytes <= 1.5 * 256 * 1024


def test_placements_change_between_steps(tmp_path: Path) -> None:
    model = make_model("gpt", dropout=0.1)
    with tba.attach(model, config_for("offload", "file", tmp_path), measure_memory=False) as session:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        found = History()
        torch.manual_seed(7)
        for step, placement in enumerate(["offload", "recompute", "mixed"]):
            session.apply(config_for(placement, "file", tmp_path))
            one_step(model, session, optimizer, found, step)
        found.parameters = [parameter.detach().clone() for parameter in model.parameters()]
        recomputed = [record.recomputed_scopes for record in session.report()]
    assert_same_history(found, plain("gpt", "fp32", 0.1, 1))
    assert recomputed == [0, 4, 1]


def one_step(
    model: torch.nn.Module,
    session: tba.Session,
    optimizer: torch.optim.Optimizer,
    history: History,
    step: int,
) -> None:
    from models import loss_of, make_tokens

    with session.step():
        loss = loss_of(model, make_tokens(100 * step))
        loss.backward()
    history.losses.append(loss.detach())
    history.gradients += [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
