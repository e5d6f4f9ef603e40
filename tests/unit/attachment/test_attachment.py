"""What ``attach`` takes, what it says, and what copies and files of an attached model hold."""

from __future__ import annotations

import copy
import io
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from harness import made, session_for
from later import Later
from models import Model, loss_of, make_model, make_tokens, one_step, same_bits

import tba_offload as tba
from tba_offload.errors import NothingSavedWarning

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

transformers = Later("transformers")

LAYERS = 4


@pytest.fixture
def model() -> Model:
    return make_model(layers=3)


# Policies


def placed(model: nn.Module, policy: object, **arguments: Any) -> list[str]:
    with tba.attach(model, policy, measure_memory=False, **arguments) as session:  # type: ignore[arg-type]
        return [placement.value for placement in session.plan.placements]


WORDS = {
    None: "auto",
    "fit": "auto",
    **{word: word for word in ("auto", "keep", "offload", "offload-50%", "recompute", "offload-remat")},
    "default: keep\nbudget: {in_flight_bytes: 1MiB}": "keep",
}


@pytest.mark.parametrize("word", WORDS)
def test_one_word_or_a_text_is_a_policy(word: str | None, tmp_path: Path) -> None:
    assert placed(make_model(layers=2), word, directories=tmp_path) == [WORDS[word]] * 2


@pytest.mark.parametrize("kind", ["word", "path", "list", "variable"])
def test_directories_override_those_of_the_policy(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drives = [made(tmp_path / "a"), made(tmp_path / "b")]
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    given: Any = {"word": str(drives[0]), "path": drives[0], "list": drives, "variable": "$SCRATCH/a"}[kind]
    policy = {"store": {"directories": "/no/such/directory"}}
    with tba.attach(make_model(), policy, directories=given, measure_memory=False) as session:
        assert session.config.store.directories == tuple(drives if kind == "list" else drives[:1])


# What is legal and has no effect


def warned(config: object, **arguments: Any) -> list[warnings.WarningMessage]:
    """The warnings of attaching a model of four layers; each names the line of the caller."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        placed(make_model(layers=LAYERS), config, **arguments)
    assert {warning.filename for warning in caught} <= {__file__}
    return caught


def test_host_memory_saves_nothing_of_a_model_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    host, shm = "keeps activations in host memory", "/dev/shm is in host memory"
    arguments: tuple[tuple[object, dict[str, str], str], ...] = (
        ({"store": {"kind": "host"}}, {}, f"kind: host {host}"),
        ({}, {"directories": "/dev/shm"}, f"{shm}; choose a directory on a drive"),
    )
    for config, given, message in arguments:
        (warning,) = warned(config, **given)
        assert warning.category is NothingSavedWarning
        assert message in str(warning.message)
    monkeypatch.setattr("tempfile.tempdir", "/dev/shm")  # the default
    assert shm in str(warned(None)[0].message)


def test_the_warning_may_be_an_error_which_leaves_nothing_attached() -> None:
    model = make_model()
    with warnings.catch_warnings(), pytest.raises(NothingSavedWarning):
        warnings.simplefilter("error")
        tba.attach(model, {"store": {"kind": "host"}})
    with session_for(model) as session:
        one_step(session, model)


# Copies and files


def saved(model: nn.Module) -> bytes:
    torch.save(model, file := io.BytesIO())
    return file.getvalue()


def test_a_file_of_an_attached_model_needs_no_session_and_not_this_package(model: Model) -> None:
    bare = saved(model)
    with session_for(model) as session:
        one_step(session, model)
        file = saved(model)
        twin = torch.load(io.BytesIO(file), weights_only=False)
        with torch.no_grad():
            assert same_bits(loss_of(twin, make_tokens(0)), loss_of(model, make_tokens(0)))
        loss_of(twin, make_tokens(0)).backward()
        names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(file))
        assert not [name for name in names if name.startswith("tba_offload")]
    assert saved(model) == bare


def test_a_copy_of_an_attached_model_is_a_model_of_its_own(model: Model) -> None:
    """As for moving averages of the weights: the copy must compute with its own parameters."""
    with session_for(model) as session:
        one_step(session, model)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in twin.layers.parameters():
                parameter.mul_(0.5)
        reference = make_model(layers=3)
        reference.load_state_dict(twin.state_dict())
        with torch.no_grad():
            assert same_bits(loss_of(twin, make_tokens(0)), loss_of(reference, make_tokens(0)))
        loss_of(twin, make_tokens(0)).backward()  # no warning: no session is attached to it
        one_step(session, model)
    loss_of(twin, make_tokens(0)).backward()
