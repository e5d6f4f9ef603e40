"""What a drive does not give back is made again by the layer that saved it, or the step fails by name."""

from __future__ import annotations

import errno
import logging
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from covering import each_once
from faults import inject
from harness import KIB, Drive, assert_all_given_back, config_for, session_for
from models import History, all_written, assert_same_history, make_model, numbered_loss, same_bits, train
from torch import Tensor, nn

from tba_offload.config.policy import Placement
from tba_offload.errors import StoreError, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tba_offload.report.log import StepRecord
    from tba_offload.session import Session

pytestmark = [
    pytest.mark.filterwarnings("ignore:a drive failed:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:an activation was lost:RuntimeWarning"),
]

STEPS = 3
WINDOW = 16 * KIB


def gone() -> StoreError:
    """An error that another attempt to read would not help against."""
    return StoreError(errno.ENODEV, "the drive is gone")


def place_offload(session: Session, **settings: Any) -> None:
    session.apply(config_for(default=Placement.OFFLOAD, **settings))


def train_trusted(
    model: nn.Module, session: Session, settings: dict[str, Any], **options: Any
) -> tuple[History, list[StepRecord]]:
    """Trains; the first step recomputes the layers, which is verified, the others offload them.

    All is written before backward begins, so that the reads come in the same order each time.
    """
    options["loss"] = all_written(session, options.get("loss", numbered_loss))

    def place(step: int) -> None:
        if step == 1:
            place_offload(session, **settings)

    history = train(model, session, steps=STEPS, before_step=place, **options)
    assert_all_given_back(session)
    return history, session.report()


@contextmanager
def told() -> Iterator[list[str]]:
    """What is told of activations that were made again."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [text for warning in caught if "made again" in (text := str(warning.message))]


def autocast_loss(model: nn.Module, number: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return numbered_loss(model, number)


JOBS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "dropout": ({"dropout": 0.2}, {}),
    "llama": ({"kind": "llama", "dropout": 0.2}, {}),
    "autocast": ({"dropout": 0.2}, {"loss": autocast_loss}),
    "accumulation": ({"dropout": 0.2}, {"micro_batches": 2}),
}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, History]:
    return {
        job: train(make_model(layers=2, **model), None, steps=STEPS, **options)
        for job, (model, options) in JOBS.items()
    }


@pytest.mark.parametrize(("job", "read"), each_once(list(JOBS), [1, 4, 6, 9, 11, 22]))
def test_what_a_drive_loses_is_made_again_to_the_same_bits(
    tmp_path: Path, undisturbed: dict[str, History], job: str, read: int
) -> None:
    sizes, options = JOBS[job]
    model, settings = make_model(layers=2, **sizes), {"directory": tmp_path, "in_flight": WINDOW}
    with (
        told() as sentences,
        session_for(model, default=Placement.RECOMPUTE, **settings) as session,
        inject(f"fail-read:n={read},errno=ENODEV"),
    ):
        history, records = train_trusted(model, session, settings, **options)
    assert_same_history(history, undisturbed[job])
    assert [record.rescued_bytes > 0 for record in records].count(True) == 1
    (sentence,) = sentences
    assert str(tmp_path) in sentence
    assert "(layers." in sentence


def test_bytes_that_were_changed_in_the_drive_are_made_again(
    tmp_path: Path, undisturbed: dict[str, History]
) -> None:
    model, settings = make_model(layers=2, dropout=0.2), {"directory": tmp_path, "in_flight": WINDOW}
    with (
        told() as sentences,
        session_for(model, default=Placement.RECOMPUTE, **settings) as session,
        inject("flip-write:n=6"),
    ):
        history, records = train_trusted(model, session, settings)
    assert_same_history(history, undisturbed["dropout"])
    assert records[1].rescued_bytes > 0
    assert records[1].reread_bytes > 0  # only after another attempt
    assert len(sentences) == 1


# What is not made again


def failing_step(
    model: nn.Module, session: Session, disturb: Callable[[], object], between: Callable[[], object]
) -> str:
    """The error of a step whose reads fail; the next one works."""
    with pytest.raises(TransferError) as caught, session.step():
        torch.manual_seed(3)
        loss = numbered_loss(model, 0)
        session.offloader.quiesce()
        disturb()
        between()
        loss.backward()
    message = str(caught.value)
    del caught, loss
    return message


def gradients_of_a_step(model: nn.Module, session: Session | None) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    if session is None:
        numbered_loss(model, 0).backward()
    else:
        with session.step():
            numbered_loss(model, 0).backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    return found


def check_named_failure(
    model: nn.Module,
    *,
    trusted: bool = True,
    losing: Callable[[Drive], object] | None = None,
    between: Callable[[], object] = lambda: None,
    afterwards: Callable[[], object] = lambda: None,
) -> str:
    """A step fails by the name of what was lost first, and the next one is as if it had not been."""
    expected, drive = gradients_of_a_step(model, None), Drive()
    first = Placement.RECOMPUTE if trusted else Placement.OFFLOAD
    with session_for(model, drive=drive, default=first, in_flight=WINDOW) as session:
        gradients_of_a_step(model, session)
        place_offload(session, in_flight=WINDOW)

        def disturb() -> None:
            if losing is not None:
                losing(drive)
            else:
                drive.reads.fail(gone(), at=drive.reads.started + 1)

        with told() as sentences:
            message = failing_step(model, session, disturb, between)
        assert sentences == []
        drive.reads.recover()
        afterwards()
        found = gradients_of_a_step(model, session)
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
        assert_all_given_back(session)
    assert "could not read" in message
    assert "layer 1 (layers.1), micro-batch 0, activation" in message
    assert "the drive is gone" in message
    return message


STATE: Any = logging.getLogger("state of layers")
"""What nothing turns back for a second run."""
STATE.factor, STATE.fails = 1.0, False


def test_a_layer_that_was_never_tried_is_not_repeated() -> None:
    check_named_failure(make_model(layers=2), trusted=False)
