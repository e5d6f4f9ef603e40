"""Checkpoints that are saved by a forked process while training goes on."""

from __future__ import annotations

import functools
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest
import torch

import tba_offload as tba
from tba_lab.gpt import GptShape, build_gpt, gpt_loss, random_batch
from tba_lab.megatron_cpu import seed_all, single_process

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")]

SHAPE = GptShape(layers=3, hidden=32, heads=4, sequence=16, vocab=64, dropout=0.1)


def save(path: Path, state: dict[str, Tensor]) -> None:
    """In the forked process; it takes longer than a step."""
    time.sleep(0.3)
    torch.save(state, path)


def train(saved: Path, config: tba.OffloadConfig | None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and parameters after three steps, and what ``--async-save`` saved after the first."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest, TemporalAsyncCaller

    with single_process(seed=1):
        model = build_gpt(SHAPE, seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seed_all(3)
        losses, writer = [], TemporalAsyncCaller()
        with tba.attach(model, config) if config else nullcontext() as session:
            for number in range(3):
                with session.step() if session else nullcontext():
                    loss = gpt_loss(model, random_batch(SHAPE, batch_size=2, seed=number))
                    loss.backward()
                losses.append(loss.detach())
                optimizer.step()
                optimizer.zero_grad()
                if number == 0:
                    state = {name: each.detach().clone() for name, each in model.named_parameters()}
                    writer.schedule_async_call(AsyncRequest(functools.partial(save, saved, state), (), []))
            assert writer.is_current_async_call_done(blocking=True)
            if session:
                assert all(record.offloaded_bytes and record.read_bytes for record in session.report())
        return [*losses, *(each.detach().clone() for each in model.parameters())], torch.load(saved)


def test_training_and_the_checkpoint_are_those_of_the_plain_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)  # megatron-core waits for the GPU first
    plain, plain_saved = train(tmp_path / "plain.pt", None)
    drive = tmp_path / "drive"
    drive.mkdir()
    config = tba.OffloadConfig(
        budget=tba.BudgetConfig(in_flight_bytes=32 << 10),
        store=tba.StoreConfig(kind="file", directories=(str(drive),)),
        min_tensor_bytes=1 << 10,
    )
    found, saved = train(tmp_path / "found.pt", config)
    assert all(map(torch.equal, found, plain))
    assert saved.keys() == plain_saved.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in plain_saved.items())
    assert not torch.equal(next(iter(saved.values())), found[3])  # training went on meanwhile
    assert list(drive.iterdir()) == []
