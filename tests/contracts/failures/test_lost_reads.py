"""A step whose bytes a drive does not give back fails by name, and the next one is right."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest
import torch
from harness import KIB, Drive, assert_all_given_back, config_for, session_for
from models import make_model, numbered_loss, same_bits

from tba_offload.errors import StoreError, TransferError
from tba_offload.placements import Placement

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tba_offload.session import Session

WINDOW = 16 * KIB


def gradients_of_a_step(model: nn.Module, session: Session) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    with session.step():
        loss = numbered_loss(model, 0)
        session.offloader.quiesce()  # all is written before backward reads it
        loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:a drive failed:RuntimeWarning")
@pytest.mark.parametrize("first", [Placement.OFFLOAD, Placement.RECOMPUTE])
def test_a_step_whose_bytes_are_lost_fails_by_name_and_the_next_one_is_right(first: Placement) -> None:
    model, drive = make_model(layers=2), Drive()
    with session_for(model, drive=drive, default=first, in_flight=WINDOW) as session:
        expected = gradients_of_a_step(model, session)
        session.apply(config_for(default=Placement.OFFLOAD, in_flight=WINDOW))
        drive.reads.fail_with(lambda: StoreError(errno.ENODEV, "the drive is gone"))
        with pytest.raises(TransferError) as caught:
            gradients_of_a_step(model, session)
        message = str(caught.value)
        del caught
        drive.reads.recover()
        found = gradients_of_a_step(model, session)
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
        assert_all_given_back(session)
    assert "could not read" in message
    assert "layer 1 (layers.1), micro-batch 0, activation" in message
    assert "the drive is gone" in message
