"""Finding the layers of a model, and naming them."""

from __future__ import annotations

import pytest
from harness import session_for
from models import make_model
from torch import Tensor, nn

import tba_offload as tba
from tba_offload.errors import UnsupportedError
from tba_offload.layers.checkpoint import torch_checkpoint
from tba_offload.layers.stack import (
    LayerStack,
    explicit_layers,
    find_layers,
)


class Block(nn.Module):
    """A layer: a module that is made of others."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class OtherBlock(Block):
    """Another kind of layer."""


class Parameterless(nn.Module):
    """Made of others, without anything to train."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout()


class Parts(nn.Module):
    """Modules under the names given."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class Adapted(Parts):
    """A layer with a list of adapters."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def blocks(count: int, kind: type[nn.Module] = Block, *arguments: int) -> nn.ModuleList:
    return nn.ModuleList(kind(*arguments) for _ in range(count))


def found(stack: LayerStack) -> list[tuple[int, str, int]]:
    return [(layer.id.number, layer.id.name, layer.chunk) for layer in stack.layers]


# Finding


def test_the_blocks_of_a_list_are_the_layers() -> None:
    model = Parts(embedding=nn.Embedding(4, 4), layers=blocks(3), norm=nn.LayerNorm(4))
    stack = find_layers(model)
    assert found(stack) == [(0, "layers.0", 0), (1, "layers.1", 0), (2, "layers.2", 0)]
    assert [layer.module for layer in stack.layers] == list(model.layers)
    assert {layer.id.stack for layer in stack.layers} == {None}


def test_what_is_found_recomputes_and_counts_as_plain_torch_does() -> None:
    stack = find_layers(Parts(layers=blocks(2)))
    assert stack.checkpoint is torch_checkpoint
    assert stack.micro_batch is None


@pytest.mark.parametrize("kind", ["gpt", "llama", "encoder"])
def test_layers_of_the_models_that_people_train(kind: str) -> None:
    assert found(find_layers(make_model(kind, layers=5))) == [(n, f"layers.{n}", 0) for n in range(5)]


def test_a_list_deep_inside_has_its_whole_name() -> None:
    model = Parts(module=Parts(model=Parts(decoder=Parts(layers=blocks(2)))))
    assert [layer.id.name for layer in find_layers(model).layers] == [
        "module.model.decoder.layers.0",
        "module.model.decoder.layers.1",
    ]


def test_a_sequential_counts_as_a_list() -> None:
    assert [layer.id.name for layer in find_layers(Parts(body=nn.Sequential(*blocks(2)))).layers] == [
        "body.0",
        "body.1",
    ]


def test_the_list_with_most_parameters_decides_the_kind() -> None:
    model = Parts(small=blocks(5, OtherBlock), large=blocks(2, Block, 32), more=blocks(3, OtherBlock))
    assert found(find_layers(model)) == [(0, "large.0", 0), (1, "large.1", 0)]


def test_a_hybrid_model_has_layers_of_several_classes() -> None:
    """As those of Jamba and Zamba, some of which hold a list of adapters."""
    mixed = nn.ModuleList(
        [Block(32), Adapted(own=Block(32), adapters=blocks(2)), Block(32), Adapted(own=Block(32))]
    )
    model = Parts(layers=mixed, more=blocks(2, Block, 32), others=blocks(2, OtherBlock))
    assert [layer.id.name for layer in find_layers(model).layers] == [
        *(f"layers.{number}" for number in range(4)),
        *(f"more.{number}" for number in range(2)),
    ]


def test_a_list_is_no_layer() -> None:
    """Nothing calls it; Funnel has lists of lists."""
    model = Parts(blocks=nn.ModuleList([blocks(2), blocks(1)]))
    assert [layer.id.name for layer in find_layers(model).layers] == [
        *("blocks.0.0", "blocks.0.1", "blocks.1.0"),
    ]


def test_a_list_that_is_named_as_a_layer_is_an_error() -> None:
    model = Parts(rows=nn.ModuleList(nn.ModuleList([Block()]) for _ in range(2)))
    with pytest.raises(UnsupportedError, match=r"layer 0 \(rows.0\) is a ModuleList, which is never called"):
        explicit_layers(model, list(model.rows))


def test_a_module_without_a_forward_is_no_layer() -> None:
    """Nothing calls it; the autoencoders of latent diffusion hold the parts of a stage in bare modules."""
    stages = nn.ModuleList(nn.Module() for _ in range(2))
    for stage in stages:
        stage.block = blocks(2, Block, 16)
        stage.downsample = nn.Linear(4, 4)
    assert [layer.id.name for layer in find_layers(Parts(down=stages, layers=blocks(2))).layers] == [
        *("down.0.block.0", "down.0.block.1", "down.1.block.0", "down.1.block.1"),
        *("layers.0", "layers.1"),
    ]


def test_several_lists_of_one_kind_are_numbered_through() -> None:
    model = Parts(down=Parts(layers=blocks(2)), up=Parts(layers=blocks(3, Block, 16)))
    assert found(find_layers(model)) == [
        (0, "down.layers.0", 0),
        (1, "down.layers.1", 0),
        (2, "up.layers.0", 0),
        (3, "up.layers.1", 0),
        (4, "up.layers.2", 0),
    ]


def test_an_encoder_and_a_decoder_count_each_on_its_own() -> None:
    """As the layers of Megatron's T5, so that a policy fits both."""
    model = Parts(encoder=Parts(block=blocks(2)), decoder=Parts(block=blocks(3, Block, 16)))
    assert [(layer.id.stack, layer.id.number, layer.id.depth) for layer in find_layers(model).layers] == [
        ("encoder", 0, 2),
        ("encoder", 1, 2),
        ("decoder", 0, 3),
        ("decoder", 1, 3),
        ("decoder", 2, 3),
    ]
    third = Parts(encoder=blocks(2), decoder=blocks(2), more=blocks(2))
    assert [(layer.id.stack, layer.id.number) for layer in find_layers(third).layers] == [
        (None, number) for number in range(6)
    ]


def test_lists_within_layers_are_not_layers() -> None:
    model = Parts(layers=nn.ModuleList(Adapted(heads=blocks(2), linear=nn.Linear(4, 4)) for _ in range(3)))
    assert [layer.id.name for layer in find_layers(model).layers] == ["layers.0", "layers.1", "layers.2"]


def test_chunks_of_an_interleaved_pipeline_are_numbered_through() -> None:
    chunks = [Parts(layers=blocks(2)), Parts(layers=blocks(3))]
    stack = find_layers(chunks)
    assert found(stack) == [
        (0, "layers.0", 0),
        (1, "layers.1", 0),
        (2, "layers.0", 1),
        (3, "layers.1", 1),
        (4, "layers.2", 1),
    ]
    assert [layer.module for layer in stack.layers] == [*chunks[0].layers, *chunks[1].layers]


def test_a_chunk_without_layers_has_none() -> None:
    assert found(find_layers([Parts(embedding=nn.Linear(4, 4)), Parts(layers=blocks(2))])) == [
        (0, "layers.0", 1),
        (1, "layers.1", 1),
    ]


# None found


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(4, 4),
        Parts(layers=nn.ModuleList()),
        Parts(layers=blocks(1)),
        Parts(layers=nn.ModuleList([Block(), OtherBlock()])),
        Parts(layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(4))),
        Parts(layers=blocks(2, Parameterless)),
        Parts(layers=nn.ModuleDict({"first": Block(), "second": Block()})),
    ],
    ids=["no list", "empty", "one block", "mixed", "no blocks", "no parameters", "dict"],
)
def test_a_model_without_equal_blocks_says_what_to_do(model: nn.Module) -> None:
    message = (
        rf"^found no ModuleList of equal blocks in {type(model).__name__}; "
        r"name the layers: attach\(model, config, layers=\[\.\.\.\]\)$"
    )
    with pytest.raises(UnsupportedError, match=message):
        find_layers(model)
    with pytest.raises(UnsupportedError, match=message):
        tba.attach(model, tba.OffloadConfig(store=tba.StoreConfig(kind="host")))


def test_an_encoder_of_another_class_than_its_decoder_is_found_too() -> None:
    """As in BART, Whisper and models that are put together of two."""
    for first, second in ((Block, OtherBlock), (OtherBlock, Block)):
        model = Parts(encoder=Parts(layers=blocks(2, first)), decoder=Parts(layers=blocks(3, second, 16)))
        stack = find_layers(model)
        assert [(layer.id.stack, layer.id.number) for layer in stack.layers] == [
            *(("encoder", number) for number in range(2)),
            *(("decoder", number) for number in range(3)),
        ]
        assert stack.left_out == ()


def test_other_blocks_that_hold_much_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """As the tower for images of a model that is told of them in words."""
    model = Parts(
        vision=Parts(layers=blocks(4, OtherBlock, 8)),
        text=blocks(3, Block, 16),
        small=blocks(2, OtherBlock, 2),
    )
    assert [str(each) for each in find_layers(model).left_out] == ["vision.layers (4 of OtherBlock)"]
    with caplog.at_level("INFO", logger="tba_offload.session"), session_for(model):
        pass
    assert (
        "vision.layers (4 of OtherBlock): these blocks are none of the layers that were found" in caplog.text
    )
    every = [*model.vision.layers, *model.text, *model.small]
    caplog.clear()
    with caplog.at_level("INFO", logger="tba_offload.session"), session_for(model, layers=every):
        pass
    assert "none of the layers" not in caplog.text


def test_what_the_message_says_works() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    with pytest.raises(UnsupportedError, match="name the layers"):
        session_for(model)
    with session_for(model, layers=[model[0], model[2]]) as session:
        assert [layer.id.name for layer in session.layers] == ["0", "2"]


# Naming


def test_named_layers_are_numbered_in_the_order_given() -> None:
    model = Parts(first=Block(), second=nn.Linear(4, 4), third=Parts(deep=OtherBlock()))
    stack = explicit_layers(model, [model.third.deep, model.first])
    assert found(stack) == [(0, "third.deep", 0), (1, "first", 0)]
    assert [layer.module for layer in stack.layers] == [model.third.deep, model.first]


def test_the_whole_model_can_be_one_layer() -> None:
    model = Block()
    assert found(explicit_layers(model, [model])) == [(0, "Block", 0)]


def test_no_layers_can_be_named() -> None:
    assert explicit_layers(Block(), []).layers == ()


def test_named_layers_know_their_chunk() -> None:
    chunks = [Parts(layers=blocks(2)), Parts(layers=blocks(2))]
    assert found(explicit_layers(chunks, [chunks[1].layers[0], chunks[0].layers[1]])) == [
        (0, "layers.0", 1),
        (1, "layers.1", 0),
    ]


def test_a_layer_of_another_model_is_refused() -> None:
    model = Parts(layers=blocks(2))
    with pytest.raises(UnsupportedError, match=r"^layer 1 \(Linear\) is not a module of the model$"):
        explicit_layers(model, [model.layers[0], nn.Linear(4, 4)])


# Disjoint


def refusal(first: int, first_name: str, second: int, second_name: str) -> str:
    return (
        rf"^layer {first} \({first_name}\) and layer {second} \({second_name}\) "
        "are the same module or lie in each other$"
    )


def test_a_layer_listed_twice_is_one_layer() -> None:
    model = Parts(a=Block(), b=Block())
    layers = explicit_layers(model, [model.a, model.b, model.a]).layers
    assert [(layer.id.number, layer.module) for layer in layers] == [(0, model.a), (1, model.b)]


def test_layers_in_each_other_are_refused_in_either_order() -> None:
    model = Parts(a=Parts(inner=Parts(block=Block())), b=Block())
    with pytest.raises(UnsupportedError, match=refusal(2, "a.inner.block", 0, "a")):
        explicit_layers(model, [model.a, model.b, model.a.inner.block])
    with pytest.raises(UnsupportedError, match=refusal(1, "a", 0, "a.inner.block")):
        explicit_layers(model, [model.a.inner.block, model.a])


def test_layers_may_share_a_module() -> None:
    shared = nn.LayerNorm(4)
    model = Parts(a=Parts(block=Block(), norm=shared), b=Parts(block=Block(), norm=shared))
    assert len(explicit_layers(model, [model.a, model.b]).layers) == 2


def test_a_block_that_is_used_several_times_is_one_layer() -> None:
    block, other = Block(), Block()
    layers = find_layers(Parts(layers=nn.ModuleList([block, other, block]))).layers
    assert [(layer.id.number, layer.module) for layer in layers] == [(0, block), (1, other)]
