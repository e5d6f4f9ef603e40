"""Wrong uses of the package: each is answered by what is wrong, where, and what to do about it."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from harness import KIB
from later import Later
from models import loss_of, make_model, make_tokens
from torch import nn

import tba_offload as tba

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from models import Model

transformers_callback = Later("tba_offload.integrations.transformers")

LAYERS = 3
OFFLOAD = {"default": "offload", "min_tensor_bytes": KIB, "store": {"kind": "host"}}


def policy(**settings: Any) -> dict[str, Any]:
    return OFFLOAD | settings


def budget(**limits: Any) -> dict[str, Any]:
    return policy(budget=limits)


def rules(*matches: object) -> dict[str, Any]:
    return policy(layers=[{"match": match, "placement": "keep"} for match in matches])


@pytest.fixture
def model() -> Model:
    return make_model(layers=LAYERS)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "policy.yaml").write_text("default: keep\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# What attach is given

WORDS = "fit, keep, offload, recompute, .*, offload-N%"

POLICIES: dict[str, tuple[Any, str]] = {
    "a misspelt word": (
        "offlaod",
        rf"policy 'offlaod' is neither .* Did you mean 'offload'\? Known words: {WORDS}",
    ),
    "a misspelt file": ("polcy.yaml", r"'polcy\.yaml' is neither .* Did you mean 'policy\.yaml'\?"),
    "a file that is not there": (
        "none.yml",
        r"'none\.yml' is neither .* YAML files in the directory: policy\.yaml\.",
    ),
    "a number": (
        3,
        "the policy 3 has the wrong type. Pass a word such as 'fit', the path of a YAML file, a dict, or",
    ),
    "a misspelt key": ({"defautl": "keep"}, r"defautl: unknown key; did you mean 'default'\?"),
    "a misspelt placement": ({"default": "recompte"}, "default: must be .*; did you mean 'recompute'"),
    "a share of all": ({"default": "offload-100%"}, "default: must be .*; N is a whole number from 1 to 99"),
    "fit in a policy": ({"default": "fit"}, "default: must be .*, not 'fit'; in a policy file, write 'auto'"),
    "YAML without a unit": (
        "store: {}\nbudget: {device_bytes: 12}",
        r"line 2: budget\.device_.* no unit; write",
    ),
    "a negative size": (
        budget(in_flight_bytes="-1GiB"),
        "budget.in_flight_bytes: '-1GiB' is not a size; write",
    ),
    "a slice for a range": (
        rules("0:3"),
        r"layers\[0\]\.match: malformed match '0:3': write '0-3' for a range",
    ),
    "a range backwards": (rules("3-1"), r"layers\[0\]\.match: malformed match '3-1': .* write '1-3'"),
    "a layer too many": (rules("9"), r"the rule '9' matches no layer; the layers are 0-2 \(layers\.0"),
    "a rule without effect": (rules("0-2", "1"), "the rule '1' has no effect, because .* '0-2'. Move this"),
    "an unknown store": (
        policy(store={"kind": "nvme"}),
        "store.kind: must be 'auto', 'gds', 'file' or 'host'",
    ),
    "states without a device": (policy(states={"default": "auto"}), "states: .* needs budget.device_bytes"),
    "a setting of another": (
        policy(states={"micro_batches": 2}),
        "states.micro_batches: has no effect .* Remove",
    ),
}


@pytest.mark.parametrize(("given", "answer"), POLICIES.values(), ids=POLICIES)
def test_wrong_policies(given: Any, answer: str, model: Model) -> None:
    with pytest.raises(tba.ConfigError, match=f"(?s){answer}"):
        tba.attach(model, given)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 4)
        for name in ("lower", "upper"):
            setattr(self, name, nn.Sequential(nn.Linear(4, 4), nn.GELU()))


ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no layers": ({"layers": []}, tba.ConfigError, r"layers=\[\] contains no layer\. Pass a list of layers"),
    "no layers to be found": (
        {"model": Odd()},
        tba.UnsupportedError,
        r"found no ModuleList of equal blocks in Odd; pass the layers: .*\[model\.lower, model\.upper\]\)",
    ),
    "no directories": ({"directories": []}, tba.ConfigError, r"directories=\[\] has no path\. Name a path"),
    "a missing directory": (
        {"directories": "/no/such"},
        tba.StoreError,
        "'no' does not exist; mount the drive, or create the directory: mkdir -p /no/such",
    ),
    "a variable that is not set": (
        {"directories": "$TBA_NOT_SET/tba"},
        tba.ConfigError,
        "'TBA_NOT_SET', which is empty or not set. Set the variable, or write the path",
    ),
    "step 0": ({"trace_steps": [0]}, tba.ConfigError, r"trace_steps has 0\. Pass step numbers of 1 or more"),
    "a sink that is a path": (
        {"on_step": "s.csv"},
        tba.ConfigError,
        r"on_step is 's\.csv'\. Pass a function",
    ),
    "no tokens": (
        {"tokens": 0},
        tba.ConfigError,
        r"tokens is 0\. Pass a number per micro-batch, or",
    ),
    "a log in no directory": (
        {"run_log": "no/run.jsonl"},
        tba.RunLogError,
        "no/run.jsonl: the run log cannot be opened: the directory does not exist: mkdir -p .*/no",
    ),
}


@pytest.mark.parametrize(("given", "kind", "answer"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_wrong_arguments(given: dict[str, Any], kind: type[Exception], answer: str, model: Model) -> None:
    config = {} if "directories" in given else {"config": OFFLOAD}
    with pytest.raises(kind, match=answer):
        tba.attach(**{"model": model} | config | given)


def test_a_callback_with_an_unknown_argument() -> None:
    with pytest.raises(
        TypeError, match=r"OffloadCallback has no argument 'layer'\. The arguments of attach.*, layers, "
    ):
        transformers_callback.OffloadCallback("fit", layer=[])


def test_attaching_twice(model: Model) -> None:
    with (
        tba.attach(model, OFFLOAD),
        pytest.raises(
            tba.SessionError,
            match=r"layer 0 \(layers.0\) is already attached to a session. Close that session",
        ),
    ):
        tba.attach(model, OFFLOAD)


def test_one_run_log_for_two_sessions_keeps_both(model: Model, here: Path) -> None:
    with (
        tba.attach(model, OFFLOAD, run_log="run.jsonl"),
        tba.attach(make_model(), OFFLOAD, run_log="run.jsonl"),
    ):
        assert sorted(each.name for each in here.glob("*.jsonl")) == ["run.2.jsonl", "run.jsonl"]


# A session


def nested(session: tba.Session) -> None:
    with session.step(), session.step():
        pass


def closed(session: tba.Session) -> None:
    with session.step():
        session.close()


def used_late(session: tba.Session) -> None:
    session.close()
    with session.step():
        pass


def untraced(session: tba.Session) -> None:
    with session.step() as step:
        pass
    assert step.timeline


SESSIONS: dict[str, tuple[Callable[[tba.Session], object], str]] = {
    "a step in a step": (nested, "another step of this session is still open. End that step"),
    "closed in a step": (closed, "cannot be closed while a step is open. End the step first"),
    "used after it was closed": (used_late, r"this session is closed. Call attach\(\) again"),
    "a timeline of a plain step": (
        untraced,
        r"this step recorded no timeline. Call session\.step\(trace=True",
    ),
    "why before any step": (lambda session: session.why(), "no step"),
}


@pytest.mark.parametrize(("use", "answer"), SESSIONS.values(), ids=SESSIONS)
def test_wrong_uses_of_a_session(use: Callable[[tba.Session], object], answer: str, model: Model) -> None:
    with tba.attach(model, OFFLOAD) as session, pytest.raises(tba.TbaError, match=answer):
        use(session)


# A loop


def told(model: nn.Module, config: Any, loop: Callable[[], object], **arguments: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", tba.NoEffectWarning)
        warnings.simplefilter("ignore", tba.errors.NothingSavedWarning)
        with tba.attach(model, config, **arguments), contextlib.suppress(RuntimeError):
            for _ in range(3):
                loop()
            return [str(each.message) for each in caught]
    return [str(each.message) for each in caught]


def test_a_model_whose_parameters_are_all_frozen(model: Model) -> None:
    model.requires_grad_(requires_grad=False)
    (said,) = told(model, OFFLOAD, lambda: loss_of(model, make_tokens(0)).backward())
    assert said.startswith("the model runs with gradients enabled, but none of its parameters requires")
    assert "Set requires_grad=True" in said


def test_layers_that_are_all_frozen(model: Model) -> None:
    model.layers.requires_grad_(requires_grad=False)
    model.embedding.requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        loss_of(model, make_tokens(0)).backward()
        optimizer.step()
        optimizer.zero_grad()

    (said,) = told(model, OFFLOAD, loop)
    assert "no backward pass reached an attached layer (frozen, " in said
    assert "attach the layers that train: attach(model, config, layers=[...])" in said


@pytest.mark.parametrize("clears", [True, False])
def test_a_loop_that_never_steps(model: Model, *, clears: bool) -> None:
    """If gradients add up, it is known only at the end that no update was to come."""

    def loop() -> None:
        loss_of(model, make_tokens(0)).backward()
        if clears:
            model.zero_grad()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", tba.NoEffectWarning)
        with tba.attach(model, OFFLOAD) as session:
            for _ in range(4 if clears else 3):
                loop()
            assert len(session.records) == (4 if clears else 0)
            assert [each for each in caught if each.category is tba.NoEffectWarning] == [] or clears
    (said,) = [str(each.message) for each in caught if each.category is tba.NoEffectWarning]
    assert "no optimizer updated the model's parameters. Call optimizer.step()" in said


def test_an_optimizer_of_another_model(model: Model) -> None:
    """Its step changes nothing of this model, and ``zero_grad`` clears nothing."""
    stale = torch.optim.AdamW(make_model(layers=LAYERS, seed=2).parameters())

    def loop() -> None:
        loss_of(model, make_tokens(0)).backward()
        stale.step()
        stale.zero_grad()

    (said,) = told(model, OFFLOAD, loop)
    assert said.startswith("optimizer.step() was called 3 times, but the optimizer AdamW updates none of the")
    assert "Create the optimizer from the parameters of this model" in said


def test_an_optimizer_of_another_model_whose_states_are_to_be_offloaded(model: Model) -> None:
    stale = torch.optim.AdamW(make_model(seed=2).parameters())
    (said,) = told(model, policy(states={}), lambda: None, optimizer=stale)
    assert "no parameter of this AdamW belongs to the model" in said
    assert "pass the optimizer that updates the model" in said.lower()


def test_states_without_an_optimizer(model: Model) -> None:
    (said,) = told(model, policy(states={}), lambda: None)
    assert said == "the key 'states' has no effect without an optimizer in attach(). Pass optimizer=optimizer"
