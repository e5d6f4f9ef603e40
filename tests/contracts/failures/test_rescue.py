"""What a drive does not give back is made again by the layer that saved it, or the step fails by name."""

from __future__ import annotations

import errno
import logging
import warnings
import weakref
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from covering import each_once
from faults import inject
from harness import KIB, Drive, assert_all_given_back, config_for, session_for
from models import History, all_written, assert_same_history, make_model, numbered_loss, same_bits, train
from torch import Tensor, nn

from tba_offload.config.policy import Placement
from tba_offload.errors import StoreError, TransferError
from tba_offload.session import Session, World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tba_offload.report.log import StepRecord

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


def test_layers_that_auto_has_tried_are_repeated(undisturbed: dict[str, History]) -> None:
    model, drive = make_model(layers=2, dropout=0.2), Drive()

    def fail_one(step: int) -> None:
        if step == 1:
            drive.reads.fail(gone(), at=drive.reads.started + 4)

    auto = {"default": Placement.AUTO, "on_slow": "wait", "activation": 400 * KIB, "in_flight": 64 * KIB}
    with told() as sentences, session_for(model, drive=drive, **auto) as session:
        history = train(model, session, steps=STEPS, before_step=fail_one)
        assert_all_given_back(session)
        records = session.report()
    assert_same_history(history, undisturbed["dropout"])
    assert records[1].rescued_bytes > 0
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


class Fickle(nn.Module):
    """Goes by state that is nowhere in a layer."""

    def forward(self, x: Tensor) -> Tensor:
        if STATE.fails:
            raise ValueError("not again")
        return x * STATE.factor


def make_fickle() -> nn.Module:
    model = make_model(layers=2)
    model.layers[1].dropout = Fickle()
    return model


def test_a_layer_that_was_never_tried_is_not_repeated() -> None:
    check_named_failure(make_model(layers=2), trusted=False)


def test_inputs_that_are_lost_as_well_end_the_step_by_the_name_of_what_was_lost_first() -> None:
    message = check_named_failure(
        make_model(layers=2, dropout=0.2), losing=lambda drive: drive.reads.fail_with(gone)
    )
    assert "activation 0 " not in message  # which is the input


@pytest.mark.parametrize(("name", "value"), [("factor", 2.0), ("fails", True)])
def test_a_layer_that_runs_otherwise_by_now_is_not_used(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_fickle()
    with monkeypatch.context() as changed:
        message = check_named_failure(
            model, between=lambda: changed.setattr(STATE, name, value), afterwards=changed.undo
        )
    assert "not again" not in message


class Saving(torch.autograd.Function):
    """Saves something that its output does not show."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x * STATE.factor)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        return gradients[0] * saved


class Hiding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Saving.apply(x)  # type: ignore[no-untyped-call]


def test_what_is_made_again_must_match_the_checksum_of_what_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever read fails: the gradients are right, or the step ends by name."""
    model = make_model(layers=2)
    model.layers[1].dropout = Hiding()
    expected = gradients_of_a_step(model, None)
    raised = 0
    for number in range(1, 9):
        with (
            monkeypatch.context() as changed,
            session_for(model, default=Placement.RECOMPUTE, directory=tmp_path, in_flight=WINDOW) as session,
        ):
            gradients_of_a_step(model, session)
            place_offload(session, directory=tmp_path, in_flight=WINDOW)
            try:
                with inject(f"fail-read:n={number},errno=ENODEV"), session.step():
                    torch.manual_seed(3)
                    loss = numbered_loss(model, 0)
                    session.offloader.quiesce()
                    changed.setattr(STATE, "factor", 2.0)
                    loss.backward()
            except TransferError:
                raised += 1
            else:
                found = [parameter.grad for parameter in model.parameters()]
                assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))  # type: ignore[arg-type]
            model.zero_grad()
    assert 0 < raised < 8


def test_a_layer_whose_mode_has_changed_is_repeated_in_the_one_that_it_had() -> None:
    model = make_model(layers=2, dropout=0.2)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_named_failure(model, between=lambda: model.eval())


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_a_process_that_is_alone_repeats_a_layer(ranks: int) -> None:
    with (
        mock.patch("torch.distributed.is_initialized", return_value=True),
        mock.patch("torch.distributed.get_world_size", return_value=ranks),
    ):
        if ranks > 1:
            check_named_failure(make_model(layers=2))
            return
        with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
            check_named_failure(make_model(layers=2))


# What layers do


class Net(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Leaking(nn.Module):
    """Saves its noise before it is filled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.rrelu(self.first(x), training=True))


INPUT = 4
"""Number of the read of the second layer's input, after what it computed."""


class Doubling(Leaking):
    """Nothing in it saves its input."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.sin(self.first(x * 2)))


@pytest.mark.parametrize("read", range(1, 8))
def test_noise_that_is_filled_after_it_was_saved_is_made_again(read: int) -> None:
    torch.manual_seed(1)
    net, drive = Net(Leaking), Drive()
    x = torch.randn(32, 64)

    def gradients(session: Session | None) -> list[Tensor]:
        net.zero_grad()
        torch.manual_seed(3)
        with session.step() if session is not None else nullcontext():
            loss = net(x).pow(2).sum()
            if session is not None:
                session.offloader.quiesce()
            loss.backward()
        return [parameter.grad.clone() for parameter in net.parameters()]  # type: ignore[union-attr]

    expected = gradients(None)
    with session_for(net, drive=drive, default=Placement.RECOMPUTE, in_flight=WINDOW) as session:
        gradients(session)
        place_offload(session, in_flight=WINDOW)
        drive.reads.fail(gone(), at=drive.reads.started + read)
        try:
            found = gradients(session)
        except TransferError as error:
            lost = str(error)
        else:
            lost = None
            assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
            assert session.report()[-1].rescued_bytes > 0
        # Last of all a layer's input is read; that of the first layer is still in memory.
        assert (lost is not None) is (read == INPUT)
        assert lost is None or "activation 0 " in lost
        drive.reads.recover()
        assert_all_given_back(session)


def test_arguments_are_not_kept_for_a_second_run() -> None:
    torch.manual_seed(1)
    net, drive = Net(Doubling), Drive()
    memory: list[weakref.ref[torch.UntypedStorage]] = []

    def remember(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        memory.append(weakref.ref(args[0].untyped_storage()))

    def step(session: Session) -> None:
        with session.step():
            loss = net(torch.randn(32, 64)).pow(2).sum()
            session.offloader.quiesce()
            assert memory[-1]() is None
            loss.backward()

    with session_for(net, drive=drive, default=Placement.RECOMPUTE, in_flight=WINDOW) as session:
        with session.step():
            net(torch.randn(32, 64)).pow(2).sum().backward()
        place_offload(session, in_flight=WINDOW)
        net.layers[1].register_forward_pre_hook(remember)
        step(session)
        drive.reads.fail(gone(), at=drive.reads.started + 1)
        with pytest.raises(TransferError, match="the drive is gone"):
            step(session)
        assert_all_given_back(session)


def test_parameters_that_are_computed_are_not_kept_for_a_second_run() -> None:
    torch.manual_seed(1)
    net, drive = Net(Leaking), Drive()
    with session_for(net, drive=drive, default=Placement.RECOMPUTE, in_flight=WINDOW) as session:
        with session.step():
            net(torch.randn(32, 64)).pow(2).sum().backward()
        place_offload(session, in_flight=WINDOW)
        with session.step():
            given = {name: parameter * 0.9 for name, parameter in net.named_parameters()}
            memory = weakref.ref(given["layers.1.second.weight"].untyped_storage())
            loss = torch.func.functional_call(net, given, (torch.randn(32, 64),)).pow(2).sum()
            del given
            session.offloader.quiesce()
            assert memory() is None
            loss.backward()
        del loss
        assert_all_given_back(session)


def test_a_graph_that_is_used_twice_is_rescued_twice() -> None:
    model, drive = make_model(layers=2, dropout=0.2), Drive()
    torch.manual_seed(3)
    loss = numbered_loss(model, 0)
    loss.backward(retain_graph=True)
    loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with session_for(model, drive=drive, default=Placement.RECOMPUTE, in_flight=WINDOW) as session:
        gradients_of_a_step(model, session)
        place_offload(session, in_flight=WINDOW)
        torch.manual_seed(3)
        with session.step() as step:
            loss = numbered_loss(model, 0)
            drive.reads.fail(gone(), at=drive.reads.started + 3)
            loss.backward(retain_graph=True)
            drive.reads.fail(gone(), at=drive.reads.started + 3)
            loss.backward()
        del loss
        assert step.record is not None
        assert step.record.rescued_bytes > 0
        found = [parameter.grad for parameter in model.parameters()]
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))  # type: ignore[arg-type]
        drive.reads.recover()
        assert_all_given_back(session)


# What it costs


def figures(*, armed: bool, written: bool) -> list[tuple[int, ...]]:
    """What moved in steps whose writes all end between forward and backward, or never begin."""
    model, drive = make_model(layers=3, dropout=0.2), Drive()
    alone = mock.patch.object(World, "is_alone", armed)
    with alone, session_for(model, drive=drive, default=Placement.RECOMPUTE) as session:

        def place(step: int) -> None:
            if step == 1:
                place_offload(session)
            drive.writes.hold()

        def loss(model: nn.Module, number: int) -> Tensor:
            found = numbered_loss(model, number)
            if written:
                drive.release()
                session.offloader.quiesce()
            return found

        train(model, session, steps=STEPS, before_step=place, loss=loss)
        drive.release()
        assert_all_given_back(session)
        return [
            (
                record.offloaded_bytes,
                record.read_bytes,
                record.forwarded_bytes,
                record.held_bytes,
                record.kept_bytes,
                record.in_flight_peak_bytes,
            )
            for record in session.report()
        ]


@pytest.mark.parametrize("written", [True, False])
def test_lifetimes_are_those_without_it(*, written: bool) -> None:
    armed = figures(armed=True, written=written)
    assert armed == figures(armed=False, written=written)
    moved = [step[1] if written else step[2] for step in armed[1:]]
    assert min(moved) > 0
