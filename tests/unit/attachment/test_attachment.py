"""What ``attach`` takes, on models of Megatron, of Hugging Face and in plain PyTorch, and what it says."""

from __future__ import annotations

import dataclasses
import traceback
import warnings
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from harness import KIB
from models import loss_of, make_model, make_tokens
from places import EXAMPLES

import tba_offload as tba
from tba_offload.config import load_config
from tba_offload.errors import ConfigError, NoEffectWarning, NothingSavedWarning
from tba_offload.store import posix

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import nn

POLICIES = EXAMPLES / "policies"
LAYERS = 4
TWO_STACKS = "encoder_decoder"
EXT4 = 0xEF53


@pytest.fixture
def on_a_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the directory for temporary files lies on."""
    monkeypatch.setattr(posix, "file_system_magic", lambda _: EXT4)


# Policies travel


@contextmanager
def plain() -> Iterator[nn.Module]:
    yield make_model(layers=LAYERS)


@contextmanager
def megatron() -> Iterator[nn.Module]:
    from megatron_models import make_megatron_model

    from tba_lab.megatron_cpu import single_process

    with single_process(seed=1):
        yield make_megatron_model("gpt", layers=LAYERS)


def hugging_face(kind: str) -> Any:
    """A context of a tiny random model."""
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "llama":
            config = transformers.LlamaConfig(
                vocab_size=128,
                hidden_size=64,
                intermediate_size=172,
                num_hidden_layers=LAYERS,
                num_attention_heads=4,
                num_key_value_heads=2,
            )
            return nullcontext(transformers.LlamaForCausalLM(config))
        if kind == "gpt2":
            config = transformers.GPT2Config(vocab_size=128, n_embd=64, n_layer=LAYERS, n_head=4)
            return nullcontext(transformers.GPT2LMHeadModel(config))
        config = transformers.T5Config(vocab_size=128, d_model=64, d_kv=16, d_ff=128, num_layers=LAYERS)
        return nullcontext(transformers.T5ForConditionalGeneration(config))


MODELS: dict[str, Any] = {
    "plain": plain,
    "megatron": megatron,
    "llama": lambda: hugging_face("llama"),
    "gpt2": lambda: hugging_face("gpt2"),
}


@pytest.mark.megatron
@pytest.mark.parametrize("kind", MODELS)
def test_the_example_policies_fit_every_model(kind: str, tmp_path: Path) -> None:
    paths = sorted(path for path in POLICIES.glob("*.yaml") if path.stem != TWO_STACKS)
    assert len(paths) == 9
    with MODELS[kind]() as model:
        for path in paths:
            config = load_config(path)
            directories = [tmp_path / path.stem / str(n) for n in range(len(config.store.directories))]
            for directory in directories:
                directory.mkdir(parents=True)
            with tba.attach(model, path, directories=directories or None, measure_memory=False) as session:
                placed = [placement.value for placement in session.plan.placements]
                described: Any = session.store.description
                used = [part["directory"] for part in described.get("stores", [described]) if directories]
            assert len(placed) == LAYERS
            expected = {rule.placement.value for rule in config.layers} | {config.default.value}
            assert set(placed) == expected
            assert used == [str(directory) for directory in directories]


def test_the_example_for_two_stacks_fits_a_t5(tmp_path: Path) -> None:
    with (
        hugging_face("t5") as model,
        tba.attach(
            model, POLICIES / f"{TWO_STACKS}.yaml", directories=tmp_path, measure_memory=False
        ) as session,
    ):
        placed = [placement.value for placement in session.plan.placements]
    assert placed == ["recompute"] * 2 + ["offload"] * 4 + ["keep"] * 2


@pytest.mark.megatron
@pytest.mark.parametrize("kind", MODELS)
def test_numbers_need_no_stack_where_there_is_one(kind: str) -> None:
    policy = {
        "default": "keep",
        "layers": [{"match": "0-1", "placement": "recompute"}, {"match": "last 1", "placement": "offload"}],
    }
    with MODELS[kind]() as model, tba.attach(model, policy, measure_memory=False) as session:
        placed = [placement.value for placement in session.plan.placements]
    assert placed == ["recompute", "recompute", "keep", "offload"]


# Directories


@pytest.mark.parametrize("kind", ["word", "path", "list"])
def test_directories_override_those_of_the_policy(kind: str, tmp_path: Path) -> None:
    drives = [tmp_path / "a", tmp_path / "b"]
    for drive in drives:
        drive.mkdir()
    given: Any = {"word": str(drives[0]), "path": drives[0], "list": drives}[kind]
    policy = {"store": {"directories": "/no/such/directory"}}
    with tba.attach(make_model(), policy, directories=given, measure_memory=False) as session:
        assert session.config.store.directories == tuple(drives if kind == "list" else drives[:1])


def test_directories_of_attach_name_variables_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    with tba.attach(make_model(), directories="$SCRATCH", measure_memory=False) as session:
        assert session.config.store.directories == (tmp_path,)
    monkeypatch.delenv("SCRATCH")
    with pytest.raises(ConfigError, match="'SCRATCH', which is not set"):
        tba.attach(make_model(), directories="$SCRATCH")


# What is wrong


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": []}, r"^layers=\[\] names no layer"),
        ({"directories": []}, r"^directories=\[\] names none"),
        ({"config": {"store": {"kind": "host"}}, "directories": "/a"}, "has no effect with kind: host"),
        ({"config": {"layers": [{"match": "9", "placement": "keep"}]}}, "'9' matches no layer"),
    ],
)
def test_what_cannot_be_right_is_an_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tba.attach(make_model(), **arguments)


def test_everything_wrong_with_a_file_is_told_at_once_and_briefly(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("default: no\nlayers:\n- {match: 9, placement: keep}\non_full: drop\n")
    with pytest.raises(ConfigError) as caught:
        tba.attach(make_model(), path)
    assert [problem.line for problem in caught.value.problems] == [1, 3, 4]
    shown = traceback.TracebackException.from_exception(caught.value)
    assert [frame.name for frame in shown.stack][1:] == ["attach"]
    printed = "".join(shown.format())
    assert "During handling" not in printed
    assert "direct cause" not in printed
    assert "pydantic" not in printed


def test_a_file_that_is_not_there_is_told_briefly(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file") as caught:
        tba.attach(make_model(), tmp_path / "none.yaml")
    assert "direct cause" not in "".join(traceback.format_exception(caught.value))


# What is legal and has no effect


def warned(config: object, **arguments: Any) -> list[warnings.WarningMessage]:
    """The warnings of attaching a model of four layers; each names the line of the caller."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tba.attach(make_model(layers=LAYERS), config, measure_memory=False, **arguments).close()  # type: ignore[arg-type]
    assert {warning.filename for warning in caught} <= {__file__}
    return caught


@pytest.mark.usefixtures("on_a_drive")
@pytest.mark.parametrize("placement", ["keep", "recompute"])
def test_a_budget_that_no_layer_keeps_to(placement: str) -> None:
    (warning,) = warned({"default": placement, "budget": {"activation_bytes": "2GiB"}})
    assert warning.category is NoEffectWarning
    assert str(warning.message).startswith("budget.activation_bytes: has no effect: no layer is auto")
    (warning,) = warned({"default": placement, "budget": {"device_bytes": "2TiB"}})
    assert str(warning.message).startswith("budget.device_bytes: has no effect: no layer is auto")


@pytest.mark.usefixtures("on_a_drive")
@pytest.mark.parametrize(
    "placement", ["offload", "offload-remat", "recompute-offload", "recompute-except-attention"]
)
def test_a_budget_above_the_limit_of_bytes_in_flight(placement: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(f"default: {placement}\nbudget:\n  activation_bytes: 2GiB\n")
    (warning,) = warned(path)
    assert f"{path}:3: budget.activation_bytes: has no effect" in str(warning.message)


@pytest.mark.usefixtures("on_a_drive")
@pytest.mark.parametrize(
    "settings",
    [
        {"budget": {"activation_bytes": "2MiB"}},
        {"budget": {"device_bytes": "2TiB"}},
        {"budget": {"activation_bytes": "2GiB", "in_flight_bytes": 0}},
        {"budget": {"activation_bytes": "2GiB"}, "on_slow": "keep"},
        {"budget": {"activation_bytes": "2GiB"}, "default": "auto"},
        {"budget": {"activation_bytes": "2GiB"}, "layers": [{"match": "last 1", "placement": "auto"}]},
        {"default": "keep"},
        {},
    ],
)
def test_what_takes_effect_is_not_warned_of(settings: dict[str, object]) -> None:
    assert warned(settings) == []


@pytest.mark.usefixtures("on_a_drive")
@pytest.mark.parametrize("update", ["host", "host-25%", "auto"])
def test_where_states_are_updated_is_of_no_matter_on_a_cpu(update: str) -> None:
    model = make_model(layers=LAYERS)
    optimizer = torch.optim.Adam(model.parameters())
    policy = {"states": {"update": update}}
    with pytest.warns(NoEffectWarning, match="states.update: has no effect: the model is on the CPU"):
        tba.attach(model, policy, optimizer=optimizer, measure_memory=False).close()


@pytest.mark.parametrize("steps", [[0], ["a"], 0, [2, -1]])
def test_steps_to_trace_are_numbers_from_1(steps: Any) -> None:
    with pytest.raises(ConfigError, match=r"trace_steps has .*: give numbers of steps, from 1"):
        tba.attach(make_model(), trace_steps=steps)


@pytest.mark.usefixtures("on_a_drive")
def test_a_rule_for_layers_that_are_not_there() -> None:
    (warning,) = warned({"layers": [{"match": "2-30", "placement": "keep"}]})
    assert warning.category is NoEffectWarning
    assert "the rule '2-30' names layers that there are not; the layers are 0-3" in str(warning.message)


def test_host_memory_saves_nothing_of_a_model_on_the_cpu(tmp_path: Path) -> None:
    (warning,) = warned({"store": {"kind": "host"}})
    assert warning.category is NothingSavedWarning
    assert "kind: host moves activations from host memory to host memory" in str(warning.message)
    (warning,) = warned({}, directories="/dev/shm")
    assert warning.category is NothingSavedWarning
    assert "/dev/shm lies in host memory; name a directory on a drive" in str(warning.message)


def test_the_default_directory_may_lie_in_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/dev/shm")
    (warning,) = warned(None)
    assert "/dev/shm lies in host memory" in str(warning.message)


@pytest.mark.usefixtures("on_a_drive")
def test_host_memory_beside_drives_saves_nothing_either() -> None:
    (warning,) = warned({"store": {"host_capacity": "1MiB"}})
    assert "host_capacity takes host memory" in str(warning.message)


def test_the_warning_may_be_an_error_which_leaves_nothing_attached() -> None:
    model = make_model()
    with warnings.catch_warnings(), pytest.raises(NothingSavedWarning):
        warnings.simplefilter("error")
        tba.attach(model, {"store": {"kind": "host"}})
    policy = {"store": {"kind": "host"}, "min_tensor_bytes": KIB}
    with tba.attach(model, policy, measure_memory=False) as session:
        with session.step() as step:
            loss_of(model, make_tokens(1)).backward()
        assert step.record is not None
        assert step.record.offloaded_bytes + step.record.forwarded_bytes > 0


def test_a_model_on_another_device_is_not_warned_of() -> None:
    from tba_offload.session.notices import warn_of_doubts

    config = dataclasses.replace(load_config(POLICIES / "host_memory.yaml"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_doubts(config, [layer.id for layer in _layers()], on_cpu=False)


def _layers() -> Any:
    from tba_offload.layers.find import find_layers

    with torch.device("meta"):
        return find_layers(make_model(layers=LAYERS)).layers
