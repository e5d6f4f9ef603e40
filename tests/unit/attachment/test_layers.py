"""Which layers of a model ``attach`` takes, how they are numbered, and what may be named instead."""

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
from torch import Tensor, nn

import tba_offload as tba
from tba_offload.errors import NothingSavedWarning, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

transformers = Later("transformers")


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x))


class OtherBlock(Block):
    """Another kind of layer."""


class Parts(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class Adapted(Parts):
    """A layer that holds lists: of adapters, heads or experts."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def blocks(count: int, kind: type[nn.Module] = Block, *arguments: int) -> nn.ModuleList:
    return nn.ModuleList(kind(*arguments) for _ in range(count))


def taken(
    model: nn.Module | list[nn.Module], layers: Sequence[nn.Module] | None = None
) -> tuple[list[str], list[nn.Module]]:
    """Number, name and chunk (but of the first one) of each layer that is taken, and its module."""
    with session_for(model, layers=None if layers is None else list(layers)) as session:
        found = [
            f"{each.id.numbers(1)} {each.id.name}{f' of chunk {each.chunk}' if each.chunk else ''}"
            for each in session.layers
        ]
        return found, [each.module for each in session.layers]


def numbered(*names: str) -> list[str]:
    return [f"{number} {name}" for number, name in enumerate(names)]


# Found


@pytest.mark.parametrize("kind", ["gpt", "llama", "encoder"])
def test_the_blocks_of_a_list_are_the_layers(kind: str) -> None:
    model = make_model(kind, layers=3)
    assert taken(model) == (numbered("layers.0", "layers.1", "layers.2"), list(model.layers))


LISTS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "deep inside": (
        lambda: Parts(module=Parts(model=Parts(trunk=Parts(layers=blocks(2))))),
        ["module.model.trunk.layers.0", "module.model.trunk.layers.1"],
    ),
    "a Sequential": (lambda: Parts(body=nn.Sequential(*blocks(2))), ["body.0", "body.1"]),
    "a dict of numbers": (
        lambda: Parts(layers=nn.ModuleDict({"4": Block(), "5": Block()})),
        ["layers.4", "layers.5"],
    ),
    "the one with most parameters decides the kind": (
        lambda: Parts(small=blocks(5, OtherBlock), large=blocks(2, Block, 32), more=blocks(3, OtherBlock)),
        ["large.0", "large.1"],
    ),
    "several of one kind": (
        lambda: Parts(down=Parts(layers=blocks(2)), up=Parts(layers=blocks(2, Block, 16))),
        ["down.layers.0", "down.layers.1", "up.layers.0", "up.layers.1"],
    ),
    "lists within equal layers are no stages": (
        lambda: Parts(layers=nn.ModuleList(Adapted(heads=blocks(4), own=Block()) for _ in range(2))),
        ["layers.0", "layers.1"],
    ),
    "experts are no layers, even where layers have different numbers of them": (
        lambda: Parts(layers=nn.ModuleList(Adapted(experts=blocks(count), own=Block()) for count in (2, 4))),
        ["layers.0", "layers.1"],
    ),
    "a block that runs several times": (
        lambda: Parts(layers=nn.ModuleList([(block := Block()), Block(), block])),
        ["layers.0", "layers.1"],
    ),
    "one that holds most of the model, however often it runs": (
        lambda: Parts(embedding=nn.Embedding(4, 4), groups=blocks(1)),
        ["groups.0"],
    ),
    "blocks in stages without a forward, as in the autoencoders of latent diffusion": (
        lambda: Parts(down=nn.ModuleList(Parts(block=blocks(2), wider=nn.Linear(4, 4)) for _ in range(2))),
        ["down.0.block.0", "down.0.block.1", "down.1.block.0", "down.1.block.1"],
    ),
}


@pytest.mark.parametrize("kind", LISTS)
def test_lists_of_blocks(kind: str) -> None:
    make, names = LISTS[kind]
    assert taken(make())[0] == numbered(*names)


def test_an_encoder_and_a_decoder_count_each_on_its_own() -> None:
    """As in Megatron's T5, so that a policy fits both. The layers of BART and Whisper differ in class."""
    for first, second in ((Block, Block), (Block, OtherBlock), (OtherBlock, Block)):
        model = Parts(encoder=Parts(layers=blocks(2, first)), decoder=Parts(layers=blocks(3, second, 16)))
        assert taken(model)[0] == [
            *(f"encoder:{number} encoder.layers.{number}" for number in range(2)),
            *(f"decoder:{number} decoder.layers.{number}" for number in range(3)),
        ]
    third = Parts(encoder=blocks(2), decoder=blocks(2), more=blocks(2))
    assert [name.partition(" ")[0] for name in taken(third)[0]] == ["0", "1", "2", "3", "4", "5"]


def test_chunks_of_an_interleaved_pipeline_are_numbered_through() -> None:
    chunks = [Parts(layers=blocks(2)), Parts(embedding=nn.Linear(4, 4)), Parts(layers=blocks(2))]
    names, modules = taken(list(chunks))
    assert names == ["0 layers.0", "1 layers.1", "2 layers.0 of chunk 2", "3 layers.1 of chunk 2"]
    assert modules == [*chunks[0].layers, *chunks[2].layers]
    named = [chunks[2].layers[0], chunks[0].layers[1]]
    assert taken(list(chunks), named)[0] == ["0 layers.0 of chunk 2", "1 layers.1"]


SMALL = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96, "intermediate_size": 128}
DEPTH = {"num_hidden_layers": 4}
TWO_STACKS = {"hidden_size": 48, "pad_token_id": 0, "encoder_layers": 2, "decoder_layers": 4}
MOE = {"num_key_value_heads": 2, "num_local_experts": 2, "num_experts": 2}
SWIN = {"embed_dim": 12, "depths": [2, 4], "num_attention_heads": [2, 4], "image_size": 32, "window_size": 4}
RESNET = {"hidden_sizes": [16, 32], "depths": [2, 3], "embedding_size": 8}
CONVNEXT = {"hidden_sizes": [8, 16, 24], "depths": [1, 3, 1], "num_stages": 3}


@pytest.mark.parametrize(
    ("family", "settings", "first", "last", "count"),
    [
        ("albert", DEPTH | {"embedding_size": 16}, "encoder.albert_layer_groups.0", None, 1),
        ("bart", TWO_STACKS, "encoder.layers.0", "decoder.layers.3", 6),
        ("bert", DEPTH, "encoder.layer.0", None, 4),
        ("convnext", CONVNEXT, "encoder.stages.0.layers.0", "encoder.stages.2.layers.0", 5),
        ("gemma3_text", DEPTH | {"num_key_value_heads": 2, "head_dim": 16}, "layers.0", None, 4),
        ("gpt2", {"n_embd": 64, "n_layer": 4}, "h.0", None, 4),
        ("jamba", DEPTH | MOE | {"attn_layer_period": 2, "attn_layer_offset": 1}, "layers.0", None, 4),
        ("llama", DEPTH, "layers.0", None, 4),
        ("mixtral", DEPTH | MOE, "layers.0", None, 4),
        ("resnet", RESNET, "encoder.stages.0.layers.0", "encoder.stages.1.layers.2", 5),
        ("swin", SWIN, "encoder.layers.0.blocks.0", "encoder.layers.1.blocks.3", 7),
        ("t5", {"d_model": 64, "d_kv": 16, "num_layers": 4}, "encoder.block.0", "decoder.block.3", 8),
        ("vit", DEPTH, "layers.0", None, 4),
        ("whisper", TWO_STACKS, "encoder.layers.0", "decoder.layers.3", 6),
    ],
)
def test_the_layers_of_each_family_are_found(
    family: str, settings: dict[str, Any], first: str, last: str | None, count: int
) -> None:
    config = transformers.AutoConfig.for_model(family, **{**SMALL, **settings})
    names = [name.partition(" ")[2] for name in taken(transformers.AutoModel.from_config(config))[0]]
    assert (names[0], len(names)) == (first, count)
    assert last is None or names[-1] == last


def test_other_blocks_that_hold_much_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """As the tower for images of a model that is told of them in words."""
    model = Parts(
        vision=Parts(layers=blocks(4, OtherBlock, 8)),
        text=blocks(3, Block, 16),
        small=blocks(2, OtherBlock, 2),
    )
    with caplog.at_level("INFO", logger="tba_offload.session"):
        taken(model)
        (said,) = [each for each in caplog.messages if "did not recognize" in each]
        assert said.startswith("vision.layers (4 of OtherBlock): attach() did not recognize these")
        caplog.clear()
        taken(model, [*model.vision.layers, *model.text, *model.small])
    assert "not among the layers" not in caplog.text


# None found


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(4, 4),
        Parts(layers=nn.ModuleList()),
        Parts(embedding=nn.Embedding(64, 4), layers=blocks(1)),
        Parts(first=nn.Linear(4, 4), last=nn.Sequential(Block())),
        Parts(layers=nn.ModuleList([Block(), OtherBlock()])),
        Parts(layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(4))),
        Parts(layers=nn.ModuleList(Adapted(dropout=nn.Dropout()) for _ in range(2))),
        Parts(layers=nn.ModuleDict({"first": Block(), "second": Block()})),
    ],
    ids=["no list", "empty", "one small block", "no loop", "mixed", "no blocks", "no parameters", "dict"],
)
def test_a_model_without_equal_blocks_says_what_to_do(model: nn.Module) -> None:
    message = (
        rf"^found no ModuleList of equal blocks in {type(model).__name__}; "
        r"pass the layers: attach\(model, config, layers=\[.*\]\)$"
    )
    with pytest.raises(UnsupportedError, match=message):
        taken(model)


# Named


def test_named_layers_are_numbered_in_the_order_given() -> None:
    model = Parts(first=Block(), second=nn.Linear(4, 4), third=Parts(deep=OtherBlock()))
    given = [model.third.deep, model.second, model.first]
    assert taken(model, given) == (numbered("third.deep", "second", "first"), given)
    assert taken(model, [model.first, model.second, model.first])[0] == numbered("first", "second")
    assert taken(model.first, [model.first])[0] == numbered("Block")
    shared = nn.LayerNorm(4)
    sharing = Parts(a=Parts(block=Block(), norm=shared), b=Parts(block=Block(), norm=shared))
    assert taken(sharing, list(sharing.children()))[0] == numbered("a", "b")


NESTED = r"are the same or nested modules. Pass one of the two$"
REFUSED: dict[str, tuple[Callable[[Any], list[nn.Module]], str]] = {
    "of another model": (
        lambda model: [model.a, nn.Linear(4, 4)],
        r"^layers\[1\] \(Linear\) is not a module of the model$",
    ),
    "inside": (lambda model: [model.a, model.a.inner], rf"^layer 1 \(a.inner\) and layer 0 \(a\) {NESTED}"),
    "around": (lambda model: [model.a.inner, model.a], rf"^layer 1 \(a\) and layer 0 \(a.inner\) {NESTED}"),
    "a list": (
        lambda model: list(model.rows),
        r"^layers\[0\] \(rows.0\) is a ModuleList, which is never called. Pass the modules inside this list$",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_a_layer_is_refused(kind: str) -> None:
    model = Parts(a=Parts(inner=Block()), b=Block(), rows=nn.ModuleList([blocks(1), blocks(1)]))
    choose, message = REFUSED[kind]
    with pytest.raises(UnsupportedError, match=message):
        taken(model, choose(model))


# What attach takes, what it says, and what copies and files of an attached model hold


DEPTH_OF_FOUR = 4


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


# Arguments that are allowed and have no effect


def warned(config: object, **arguments: Any) -> list[warnings.WarningMessage]:
    """The warnings of attaching a model of four layers; each names the line of the caller."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        placed(make_model(layers=DEPTH_OF_FOUR), config, **arguments)
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
