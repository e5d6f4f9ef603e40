"""The layers of Megatron models, and their recomputation bit for bit."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal
from unittest import mock

import pytest
import torch
from fused_layers import SIZE, FusedLayer
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import tba_offload as tba
from tba_lab.gpt import GptShape, build_encoder, build_gpt, gpt_loss, random_batch
from tba_lab.megatron_cpu import seed_all, single_process, training_device
from tba_offload.capture.hooks import LayerHooks
from tba_offload.config.policy import LayerId, Placement, Rule
from tba_offload.errors import RecomputationError, UnsupportedError
from tba_offload.layers.stack import Layer, LayerStack
from tba_offload.megatron.layers import (
    checkpoint_layer,
    current_microbatch,
    find_layers,
    find_stack,
    is_megatron,
    shorten,
)
from tba_offload.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from warm import Warm

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]

SHAPE = GptShape(layers=3, hidden=32, heads=4, sequence=16, vocab=64, dropout=0.1)
SHAPES = [
    dataclasses.replace(SHAPE, style=style, dtype=dtype)
    for style in ("gpt", "llama")
    for dtype in ("fp32", "bf16")
]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.style}-{shape.dtype}")


@pytest.fixture
def megatron() -> Iterator[None]:
    with single_process(seed=1):
        yield


def same_bits(first: list[Tensor], second: list[Tensor]) -> bool:
    """Equal as integers: 0.0 and -0.0 differ, and a NaN equals itself."""
    return len(first) == len(second) and all(
        a.dtype == b.dtype and torch.equal(as_integers(a), as_integers(b))
        for a, b in zip(first, second, strict=True)
    )


def as_integers(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(INTEGERS[tensor.element_size()])


def recompute(layer: nn.Module) -> list[int]:
    """Makes a layer recompute; returns a list that grows with each run of its forward."""
    forward = layer.forward
    runs: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        runs.append(len(runs))
        return forward(*args, **kwargs)

    layer.forward = lambda *args, **kwargs: checkpoint_layer(counted, *args, **kwargs)
    return runs


def train_step(model: nn.Module, loss_of: Callable[[nn.Module], Tensor], *recomputed: int) -> list[Tensor]:
    """Loss, gradients and the random state after one step, with some layers recomputed."""
    layers = find_layers(model)
    runs = [recompute(layers[number].module) for number in recomputed]
    seed_all(5)
    loss = loss_of(model)
    torch.autograd.backward(loss)
    assert [len(run) for run in runs] == [2] * len(runs)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return [loss, *gradients, *random_states()]


def random_states() -> list[Tensor]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return [torch.get_rng_state(), *get_cuda_rng_tracker().get_states().values()]


class TestRecomputeIsBitForBit:
    @every_shape
    @pytest.mark.parametrize("recomputed", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
    def test_of_any_layer(self, shape: GptShape, recomputed: tuple[int, ...]) -> None:
        batch = random_batch(shape, batch_size=2, seed=2)

        def run(*layers: int) -> list[Tensor]:
            return train_step(build_gpt(shape, seed=0), lambda model: gpt_loss(model, batch), *layers)

        assert same_bits(run(*recomputed), run())

    def test_of_an_encoder(self) -> None:
        shape = dataclasses.replace(SHAPE, dtype="fp32")
        hidden = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(0)).to(training_device())

        def run(*layers: int) -> list[Tensor]:
            inputs = hidden.clone().requires_grad_()
            results = train_step(
                build_encoder(shape, seed=0), lambda model: model(inputs, None).square().mean(), *layers
            )
            assert inputs.grad is not None
            return [*results, inputs.grad]

        assert same_bits(run(0, 1, 2), run())

    def test_of_layers_that_share_a_context(self) -> None:
        def run(*layers: int) -> list[Tensor]:
            return train_step(build_t5(), t5_loss, *layers)

        assert same_bits(run(0, 1, 2, 3), run())

    def test_which_dropout_and_the_comparison_make_hard(self) -> None:
        batch = random_batch(SHAPE, batch_size=2, seed=2)
        model = build_gpt(SHAPE, seed=0)
        seed_all(5)
        first = gpt_loss(model, batch)
        assert not same_bits([first], [gpt_loss(model, batch)])
        assert not same_bits([torch.tensor(0.0)], [torch.tensor(-0.0)])
        assert same_bits([torch.tensor(torch.nan)], [torch.tensor(torch.nan)])


class TestCheckpointLayer:
    def test_hands_over_only_the_hidden_states(self) -> None:
        """Masks and rotary tables are shared by all layers: saving them for each would only cost."""
        packed: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            packed.append(tensor.data_ptr())
            return tensor.detach()

        hidden = torch.randn(4, requires_grad=True)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            checkpoint_layer(
                lambda x, mask, table: x * mask * table, hidden, torch.ones(4), table=torch.ones(4)
            )
        assert packed == [hidden.data_ptr()]

    def test_holds_no_input_itself(self) -> None:
        """Or offloading the inputs would free nothing."""
        hidden = torch.randn(4, requires_grad=True) * 2
        gone = weakref.ref(hidden.untyped_storage())
        with saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor):
            output, _ = checkpoint_layer(
                lambda hidden_states, mask: (hidden_states.exp(), None), hidden_states=hidden, mask=None
            )
        del hidden
        assert gone() is None
        output.sum().backward()

    def test_keeps_the_structure_of_the_output(self) -> None:
        hidden = torch.randn(4, requires_grad=True)
        single = checkpoint_layer(lambda x: x * 2, hidden)
        pair = checkpoint_layer(lambda x: (x * 2, None), hidden)
        triple = checkpoint_layer(lambda x: (None, x * 2, "setting"), hidden)
        assert isinstance(single, Tensor)
        assert isinstance(pair, tuple)
        assert pair[1] is None
        assert (triple[0], triple[2]) == (None, "setting")
        (single + pair[0] + triple[1]).sum().backward()
        assert hidden.grad is not None
        assert hidden.grad.tolist() == [6.0] * 4

    def test_hands_arguments_through_as_they_are(self) -> None:
        hidden, context = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True) * 1
        frozen = torch.randn(4)
        output, same, untouched = checkpoint_layer(
            lambda hidden, context, frozen: (hidden * context, context, frozen),
            hidden,
            context=context,
            frozen=frozen,
        )
        assert same is context
        assert untouched is frozen
        assert not frozen.requires_grad
        output.sum().backward()
        assert hidden.grad is not None
        assert torch.equal(hidden.grad, context)

    def test_passes_arguments_in_their_places(self) -> None:
        a, b = torch.ones(1, requires_grad=True), torch.full((1,), 2.0, requires_grad=True)
        output = checkpoint_layer(
            lambda first, second, *, third, fourth: first - 10 * second + third * fourth,
            5.0,
            a,
            third=b,
            fourth=7.0,
        )
        assert output.item() == 5 - 10 + 14
        output.backward()
        assert a.grad is not None
        assert b.grad is not None
        assert (a.grad.item(), b.grad.item()) == (-10, 7)

    @pytest.mark.parametrize("grad_enabled", [True, False])
    def test_runs_the_layer_as_it_is_where_nothing_can_be_recomputed(self, *, grad_enabled: bool) -> None:
        hidden = torch.randn(4, requires_grad=not grad_enabled)
        weight = torch.randn(4, requires_grad=True)
        with torch.set_grad_enabled(grad_enabled):
            output = checkpoint_layer(lambda hidden: hidden * weight, hidden)
        assert output.requires_grad == grad_enabled
        if grad_enabled:
            output.sum().backward()
            assert weight.grad is not None
            assert torch.equal(weight.grad, hidden)

    def test_an_exception_of_the_layer_comes_through(self) -> None:
        def fail(hidden: Tensor) -> Tensor:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            checkpoint_layer(fail, torch.ones(1, requires_grad=True))


class TestFindLayers:
    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    def test_of_a_model(self, dtype: Literal["fp32", "bf16"]) -> None:
        """The bf16 model is wrapped; its names are those of the bare one."""
        model = build_gpt(dataclasses.replace(SHAPE, dtype=dtype), seed=0)
        found = find_layers(model)
        assert [layer.id for layer in found] == [LayerId(n, f"decoder.layers.{n}") for n in range(3)]
        assert {layer.chunk for layer in found} == {0}
        modules = dict(model.named_modules())
        prefix = "module." if dtype == "bf16" else ""
        assert [layer.module for layer in found] == [modules[f"{prefix}decoder.layers.{n}"] for n in range(3)]

    def test_of_an_encoder_block_alone(self) -> None:
        found = find_layers(build_encoder(SHAPE, seed=0))
        assert [layer.id for layer in found] == [LayerId(n, f"layers.{n}") for n in range(3)]

    def test_of_a_model_with_two_stacks(self) -> None:
        assert [layer.id for layer in find_layers(build_t5())] == [
            LayerId(0, "encoder.layers.0", "encoder"),
            LayerId(1, "encoder.layers.1", "encoder"),
            LayerId(0, "decoder.layers.0", "decoder"),
            LayerId(1, "decoder.layers.1", "decoder"),
        ]

    def test_leaves_out_a_layer_within_a_layer(self) -> None:
        model = build_gpt(dataclasses.replace(SHAPE, dtype="fp32"), seed=0)
        outer, inner, _ = (layer.module for layer in find_layers(model))
        outer.helper = inner
        assert [layer.module for layer in find_layers(outer)] == [outer]

    def test_needs_numbers(self) -> None:
        model = build_gpt(SHAPE, seed=0)
        del find_layers(model)[1].module.layer_number
        with pytest.raises(UnsupportedError, match=r"'module\.decoder\.layers\.1' .* has no layer_number"):
            find_layers(model)

    def test_finds_none_elsewhere(self) -> None:
        assert find_layers(nn.Sequential(nn.Linear(2, 2))) == []
        assert not is_megatron(nn.Sequential(nn.Linear(2, 2)))


class Mixer(nn.Module):
    """In the place of Mamba's own mixer, whose kernels need a GPU."""

    def __init__(self, config: object, *, d_model: int, **_: object) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_model)

    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        return self.gate(hidden_states).sigmoid() * hidden_states, None


def build_mamba() -> nn.Module:
    """Three layers of megatron-core's MambaLayer."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")
        from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

    config: Any = find_layers(build_gpt(dataclasses.replace(SHAPE, dtype="fp32"), seed=0))[0].module.config
    parts = MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=Mixer, mamba_bda=get_bias_dropout_add)
    groups = ProcessGroupCollection()
    torch.manual_seed(0)
    model = nn.Module()
    model.decoder = nn.Module()
    model.decoder.layers = nn.ModuleList(
        MambaLayer(config, parts, layer_number=number, pg_collection=groups) for number in (1, 2, 3)
    )
    return model


class TestInputsThatTravel:
    """Layers placed recompute-offload, which Megatron's checkpoint recomputes."""

    @every_shape
    def test_hooks_see_the_hidden_states_and_nothing_else(self, shape: GptShape) -> None:
        """Not the dropout either, for which the layers switch gradients on."""
        batch = random_batch(shape, batch_size=2, seed=2)
        model = build_gpt(shape, seed=0)
        given: list[tuple[int, torch.Size]] = []
        for layer in find_layers(model):
            layer.module.register_forward_pre_hook(
                lambda _, args, kwargs: given.append(where(kwargs["hidden_states"])), with_kwargs=True
            )
        with attached(model) as (session, seen):
            for _ in range(2):
                given.clear()
                seen.clear()
                with session.step() as step:
                    torch.autograd.backward(gpt_loss(model, batch))
                assert seen == given
                assert len(seen) == 3
                assert step.record is not None
                assert step.record.recomputed_scopes == 3

    def test_other_numbers_are_noticed_in_each_step(self) -> None:
        """Megatron's checkpoint hides what a layer saves: what it puts out is compared."""
        batch = random_batch(SHAPE, batch_size=2, seed=2)
        model = build_gpt(SHAPE, seed=0)

        def step(session: tba.Session) -> None:
            with session.step():
                torch.autograd.backward(gpt_loss(model, batch))

        with attached(model) as (session, _):
            for _ in range(3):
                step(session)
            find_layers(model)[1].module.mlp.register_forward_hook(
                lambda _, __, output: (output[0] * int.from_bytes(os.urandom(4), "big"), *output[1:])
            )
            with pytest.raises(RecomputationError, match=r"layer 1 .* other numbers"):
                step(session)

    def test_inputs_are_freed(self) -> None:
        batch = random_batch(SHAPE, batch_size=2, seed=2)
        model = build_gpt(SHAPE, seed=0)
        given: list[weakref.ref[torch.UntypedStorage]] = []
        for layer in find_layers(model):
            layer.module.register_forward_pre_hook(
                lambda _, args, kwargs: given.append(weakref.ref(kwargs["hidden_states"].untyped_storage())),
                with_kwargs=True,
            )
        with attached(model) as (session, _), session.step():
            loss = gpt_loss(model, batch)
            session.offloader.quiesce()
            assert [storage() for storage in given] == [None] * 3
            torch.autograd.backward(loss)

    def test_a_context_of_all_decoder_layers_travels_once(self) -> None:
        def train(session: tba.Session | None) -> list[Tensor]:
            seed_all(3)
            with session.step() if session else contextlib.nullcontext():
                loss = t5_loss(model)
                if session:
                    session.offloader.quiesce()
                loss.backward()
            return [loss.detach(), *(parameter.grad for parameter in model.parameters())]

        model = build_t5()
        expected = train(None)
        model = build_t5()
        with attached(model) as (session, seen):
            assert same_bits(train(session), expected)
            (record,) = session.report()
        hidden = 8 * 2 * 16 * 4
        assert len(seen) == 2 + 2 * 2  # the decoder's layers are given hidden states and the context
        assert (record.offloaded_bytes, record.read_bytes) == (5 * hidden, 5 * hidden)
        assert (record.deduplicated_bytes, record.held_bytes) == (hidden, 0)


@contextlib.contextmanager
def attached(
    model: nn.Module, stack: LayerStack | None = None
) -> Iterator[tuple[tba.Session, list[tuple[int, torch.Size]]]]:
    """A session that recomputes all layers and offloads their inputs, and the tensors its hooks see."""
    seen: list[tuple[int, torch.Size]] = []
    original = LayerHooks.pack

    def pack(hooks: LayerHooks, tensor: Tensor) -> object:
        seen.append(where(tensor))
        return original(hooks, tensor)

    config = tba.OffloadConfig(
        default=Placement.RECOMPUTE_OFFLOAD, store=tba.StoreConfig(kind="host"), min_tensor_bytes=64
    )
    with (
        mock.patch.object(LayerHooks, "pack", pack),
        Session(stack or find_stack(model), [model], config) as session,
    ):
        yield session, seen


def where(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


class TestMamba:
    def test_its_layers_are_found(self) -> None:
        model = build_mamba()
        assert is_megatron(model)
        assert [layer.id for layer in find_layers(model)] == [
            LayerId(number, f"decoder.layers.{number}") for number in range(3)
        ]

    def test_every_placement_gives_the_same_bits(self) -> None:
        def train(config: tba.OffloadConfig | None) -> list[Tensor]:
            model: Any = build_mamba()
            with tba.attach(model, config) if config else contextlib.nullcontext() as session:
                seed_all(3)
                with session.step() if session else contextlib.nullcontext():
                    hidden = torch.randn(8, 2, 32, requires_grad=True)
                    output = hidden
                    for layer in model.decoder.layers:
                        output = layer(output, None)
                    output.square().sum().backward()
                if session:
                    record = session.report()[-1]
                    assert (record.scopes, record.recomputed_scopes) == (3, 1)
                    assert record.offloaded_bytes + record.forwarded_bytes > 0
            return [output, hidden.grad, *(parameter.grad for parameter in model.parameters())]

        expected = train(None)
        for recomputed in (Placement.RECOMPUTE, Placement.RECOMPUTE_OFFLOAD):
            rules = (Rule("0", recomputed), Rule("1", Placement.KEEP))
            config = tba.OffloadConfig(layers=rules, store=tba.StoreConfig(kind="host"), min_tensor_bytes=64)
            assert same_bits(train(config), expected)


def build_mtp() -> nn.Module:
    """A GPT with two layers that predict further tokens."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec

        plain = find_layers(build_gpt(dataclasses.replace(SHAPE, dtype="fp32"), seed=0))[0].module
        config: Any = dataclasses.replace(plain.config, mtp_num_layers=2)  # type: ignore[type-var]
        spec = get_gpt_layer_local_spec()
        further = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
        torch.manual_seed(0)
        return GPTModel(config, spec, vocab_size=64, max_sequence_length=16, mtp_block_spec=further)


class TestMultiTokenPrediction:
    def test_its_layers_are_found(self) -> None:
        """Releases number them differently: on from the decoder's, or from 0 in a stack of their own."""
        ids = [layer.id for layer in find_layers(build_mtp())]
        assert [id_.name for id_ in ids[:3]] == [f"decoder.layers.{number}" for number in range(3)]
        assert [id_.name.rpartition(".")[0] for id_ in ids[3:]] == ["mtp.layers.0", "mtp.layers.1"]
        assert len({(id_.stack, id_.number) for id_ in ids}) == 5

    def test_every_placement_gives_the_same_bits(self) -> None:
        def train(config: tba.OffloadConfig | None) -> list[Tensor]:
            model: Any = build_mtp()
            tokens = torch.arange(32).view(2, 16)
            positions = torch.arange(16).expand(2, -1)
            mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
            with tba.attach(model, config) if config else contextlib.nullcontext() as session:
                seed_all(3)
                with session.step() if session else contextlib.nullcontext():
                    losses = model(tokens, positions, mask, labels=tokens, loss_mask=torch.ones(2, 16))
                    losses.mean().backward()
                if session:
                    record = session.report()[-1]
                    assert (record.scopes, record.recomputed_scopes) == (5, 1)
            return [losses, *(parameter.grad for parameter in model.parameters())]

        rules = (Rule("mtp.layers.0.*", Placement.RECOMPUTE), Rule("*.layers.1", Placement.KEEP))
        config = tba.OffloadConfig(layers=rules, store=tba.StoreConfig(kind="host"), min_tensor_bytes=64)
        assert same_bits(train(config), train(None))


class TestReducedPrecision:
    @pytest.mark.parametrize("precision", ["fp8", "fp4"])
    def test_its_layers_are_recomputed_by_transformer_engine(
        self, precision: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Megatron's own checkpoint would let the second forward move the scaling factors once more."""
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.extensions import transformer_engine

        calls: list[tuple[object, ...]] = []

        def te_checkpoint(run: Any, *settings: Any) -> Any:
            *settings, hidden = settings
            calls.append(tuple(settings))
            return tensor_parallel.checkpoint(run, False, hidden)

        monkeypatch.setattr(transformer_engine, "te_checkpoint", te_checkpoint)
        layer = find_layers(build_gpt(dataclasses.replace(SHAPE, dtype="fp32"), seed=0))[0].module
        monkeypatch.setattr(layer.config, precision, "hybrid")
        hidden = torch.randn(16, 2, 32, requires_grad=True)
        forward = nn.Linear(32, 32)
        forward.config = layer.config
        output = checkpoint_layer(forward.forward, hidden)
        output.sum().backward()
        group = parallel_state.get_tensor_model_parallel_group()
        assert calls == [(False, tensor_parallel.get_cuda_rng_tracker, group)]

    def test_hooks_see_what_its_checkpoint_saves_and_nothing_else(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It saves the tensors that it is given, once the layer has run, and holds nothing else."""
        from megatron.core.extensions import transformer_engine

        monkeypatch.setattr(
            transformer_engine,
            "te_checkpoint",
            lambda run, distribute, tracker, group, *inputs: TeCheckpoint.apply(run, *inputs),
        )

        def train(session: tba.Session | None) -> list[Tensor]:
            torch.manual_seed(3)
            with session.step() if session else contextlib.nullcontext():
                x = torch.randn(32, 2, SIZE, requires_grad=True)
                hidden = x * 1
                for layer in model:
                    given.append((where(hidden), weakref.ref(hidden.untyped_storage())))
                    hidden = layer(hidden)
                if session:
                    session.offloader.quiesce()
                    assert [storage() for _, storage in given] == [None] * 3
                hidden.square().mean().backward()
            return [x.grad, *(parameter.grad for parameter in model.parameters())]  # type: ignore[list-item]

        given: list[tuple[tuple[int, torch.Size], weakref.ref[torch.UntypedStorage]]] = []
        model = quantized_layers()
        expected = train(None)
        given.clear()
        model = quantized_layers()
        stack = LayerStack(
            tuple(Layer(LayerId(n, f"layers.{n}"), layer) for n, layer in enumerate(model)),
            checkpoint=checkpoint_layer,
        )
        with attached(model, stack) as (session, seen):
            assert same_bits(train(session), expected)
            (record,) = session.report()
        assert seen == [where for where, _ in given]
        one = 32 * 2 * SIZE * 4
        assert (record.recomputed_scopes, record.offloaded_bytes, record.read_bytes) == (3, 3 * one, 3 * one)


class TeCheckpoint(torch.autograd.Function):
    """In the place of Transformer Engine's own, as it is documented: reentrant, with the random state."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], *inputs: Tensor) -> Any:
        ctx.run, ctx.random_state = run, torch.get_rng_state()
        with torch.no_grad():
            outputs = run(*inputs)
        ctx.save_for_backward(*inputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inputs = [saved.detach().requires_grad_(saved.requires_grad) for saved in ctx.saved_tensors]
        with torch.random.fork_rng(), torch.enable_grad():
            torch.set_rng_state(ctx.random_state)
            outputs = ctx.run(*inputs)
        torch.autograd.backward(outputs, gradients)
        return None, *(each.grad for each in inputs)


class QuantizedLayer(FusedLayer):
    """With dropout, for which it switches gradients on, as Megatron's layers do."""

    config = SimpleNamespace(fp8="hybrid", fp4=None)

    def forward(self, hidden: Tensor) -> Tensor:
        made = super().forward(hidden)
        with torch.enable_grad():
            return hidden + nn.functional.dropout(made, 0.1)


def quantized_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(QuantizedLayer() for _ in range(3)))


class TestShorten:
    def test_stacks_are_named_where_numbers_of_any_rank_are_ambiguous(self) -> None:
        """One pipeline stage has the encoder only, another the decoder only."""
        encoder = [LayerId(number, f"encoder.layers.{number}", "encoder") for number in range(2)]
        decoder = [LayerId(number, f"decoder.layers.{number}", "decoder") for number in range(2)]
        assert shorten(encoder, encoder + decoder) == encoder
        assert shorten(decoder[:1], decoder) == [LayerId(0, "decoder.layers.0")]

    def test_the_stack_of_a_stage_asks_all_ranks(self) -> None:
        model = build_gpt(SHAPE, seed=0)
        elsewhere = LayerId(1, "encoder.layers.1", "encoder")
        asked: list[list[LayerId]] = []

        def gather(own: list[LayerId]) -> list[LayerId]:
            asked.append(own)
            return [*own, elsewhere]

        stack = find_stack(model, gather)
        own = [LayerId(number, f"decoder.layers.{number}", "decoder") for number in range(3)]
        assert [layer.id for layer in stack.layers] == own
        assert asked == [own]


class TestFindStack:
    def test_brings_megatrons_own_checkpoint_and_micro_batches(self) -> None:
        model = build_gpt(SHAPE, seed=0)
        stack = find_stack([model])
        assert [layer.id.number for layer in stack.layers] == [0, 1, 2]
        assert stack.checkpoint is checkpoint_layer
        assert stack.micro_batch is current_microbatch

    def test_the_schedule_says_which_micro_batch_runs(self) -> None:
        from megatron.core.pipeline_parallel.schedules import set_current_microbatch

        model = build_gpt(SHAPE, seed=0)
        layers = [layer.module for layer in find_layers(model)]
        assert [current_microbatch(layer) for layer in layers] == [None] * 3
        set_current_microbatch(model, 4)
        assert [current_microbatch(layer) for layer in layers] == [4] * 3


class TestIsMegatron:
    def test_knows_a_model_and_a_list_of_chunks(self) -> None:
        model = build_gpt(SHAPE, seed=0)
        assert is_megatron(model)
        assert is_megatron([nn.Linear(2, 2), model])
        assert not is_megatron([])

    def test_does_not_import_megatron(self, python_with_torch: Warm) -> None:
        code = (
            "import sys\n"
            "from torch import nn\n"
            "from tba_offload.megatron.layers import find_layers, is_megatron\n"
            "assert not is_megatron(nn.Linear(2, 2)) and find_layers(nn.Linear(2, 2)) == []\n"
            "assert not any(name.partition('.')[0] == 'megatron' for name in sys.modules)"
        )
        done = python_with_torch.run("-c", code, is_strict=True)
        assert done.returncode == 0, done.stderr


def build_t5() -> nn.Module:
    """A T5 of megatron-core with two layers in each stack; it warns of absent extras."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")
        from megatron.core.models.T5 import t5_spec
        from megatron.core.models.T5.t5_model import T5Model
        from megatron.core.transformer import TransformerConfig

        torch.manual_seed(0)
        config = TransformerConfig(
            num_layers=2, hidden_size=16, num_attention_heads=2, use_cpu_initialization=True
        )
        model: nn.Module = T5Model(
            config=config,
            encoder_config=config,
            transformer_encoder_layer_spec=t5_spec.get_t5_encoder_with_local_block_spec(2),
            transformer_decoder_layer_spec=t5_spec.get_t5_decoder_with_local_block_spec(2),
            vocab_size=32,
            max_sequence_length=8,
            pre_process=True,
            post_process=True,
        )
    return model.to(training_device())


def t5_loss(model: nn.Module) -> Tensor:
    tokens = torch.arange(16, device=training_device()).view(2, 8)
    mask = torch.zeros(2, 1, 8, 8, dtype=torch.bool, device=training_device())
    losses: Tensor = model(tokens, tokens, mask, mask, mask, lm_labels=tokens)
    return losses.mean()
