"""The layers of a model: blocks of one kind, one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from tba_offload.config.policy import LayerId, with_depths
from tba_offload.errors import UnsupportedError
from tba_offload.layers.checkpoint import torch_checkpoint
from tba_offload.layers.randomness import Generator, generators_of

Checkpoint = Callable[..., Any]
"""``checkpoint(forward, *args, **kwargs)``: runs forward now and again in backward.

Our saved-tensor hooks around it see the inputs that it saves, and nothing that forward saves.
"""


LEAST_LEFT_OUT = 0.1
"""Share of the parameters of the layers that were found, from which on other blocks are worth a word."""


@dataclass(frozen=True)
class Layer:
    """A layer that a session can place.

    Attributes:
        id: Its number and name, as rules match them.
        module: Calling it is a scope.
        chunk: The model chunk it belongs to, in an interleaved pipeline.
    """

    id: LayerId
    module: nn.Module
    chunk: int = 0


class LeftOut(NamedTuple):
    """A list of blocks that are none of the layers.

    Attributes:
        name: Where it is.
        blocks: Its blocks.
    """

    name: str
    blocks: tuple[nn.Module, ...]

    def __str__(self) -> str:
        kinds = " and ".join(sorted(kind.__name__ for kind in _kinds(self.blocks)))
        return f"{self.name} ({len(self.blocks)} of {kinds})"


@dataclass(frozen=True)
class LayerStack:
    """The layers of a model and what its framework does differently.

    Attributes:
        layers: In the order of their numbers.
        checkpoint: Recomputes one layer, with the random state of the framework.
        micro_batch: Number of the micro-batch that a layer is about to run, where the framework tells;
            otherwise ``None`` and executions are counted.
        functions: How outputs of the framework's own autograd functions are computed anew: a
            :data:`tba_offload.capture.recipes.Maker` for each.
        generators: What random numbers come from where layers compute on some devices.
        not_compared: Why a layer must not be run once more than training has it run; ``None`` if it may.
        left_out: Lists of other blocks that have a share of the parameters.
    """

    layers: tuple[Layer, ...]
    checkpoint: Checkpoint = torch_checkpoint
    micro_batch: Callable[[nn.Module], int | None] | None = None
    functions: Mapping[type, Callable[..., Any]] = field(default_factory=dict)
    generators: Callable[[Iterable[torch.device]], Sequence[Generator]] = generators_of
    not_compared: Callable[[nn.Module], str | None] = lambda _: None
    left_out: tuple[LeftOut, ...] = ()


def chunks_of(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return the chunks of a model: those that are given, or the model itself."""
    return list(model) if isinstance(model, Sequence) else [model]


def find_layers(model: nn.Module | Sequence[nn.Module]) -> LayerStack:
    """Find the decoder or encoder layers of a model.

    They are the blocks of the ``ModuleList`` (or ``Sequential``) of equal blocks that holds the most
    parameters, as in Megatron and Hugging Face models; other lists of the same kind of block count too. In
    hybrid models, of attention and Mamba say, the blocks of a ``ModuleList`` are of several classes, and
    those of an encoder may be of another class than those of its decoder, as in Whisper and BART. A
    ``ModuleDict`` whose keys are numbers, as torchtitan's models have, is such a list too. The blocks are
    numbered through, but an encoder and a decoder are stacks that each count from 0.

    Args:
        model: A module, or the chunks of one in an interleaved pipeline.

    Raises:
        UnsupportedError: No such list; the layers have to be named.
    """
    chunks = chunks_of(model)
    if not chunks:
        raise UnsupportedError("there is no model to attach to: the list of its chunks is empty")
    found = [(chunk, name, blocks) for chunk, part in enumerate(chunks) for name, blocks in _stacks(part)]
    if not found:
        raise UnsupportedError(
            f"found no ModuleList of equal blocks in {type(chunks[0]).__name__}; "
            "name the layers: attach(model, config, layers=[...])"
        )
    _, largest, most = max(found, key=lambda each: _parameter_count(each[2].values()))
    kinds, counterpart = _kinds(most.values()), _counterpart(largest)
    lists: list[tuple[int, str, dict[str, nn.Module]]] = []
    others: list[tuple[int, str, dict[str, nn.Module]]] = []
    for each in found:
        is_counterpart = counterpart is not None and _stack_of(each[1]) == counterpart
        (lists if is_counterpart or _kinds(each[2].values()) <= kinds else others).append(each)
    stacks = [_stack_of(name) for _, name, _ in lists]
    if None in stacks or len(set(stacks)) == 1:
        stacks = [None] * len(lists)
    layers: list[Layer] = []
    counts: dict[str | None, Iterator[int]] = {stack: itertools.count() for stack in stacks}
    for stack, (chunk, name, blocks) in zip(stacks, lists, strict=True):
        for key, block in blocks.items():
            layers.append(Layer(LayerId(next(counts[stack]), f"{name}.{key}", stack), block, chunk))
    least = LEAST_LEFT_OUT * _parameter_count(layer.module for layer in layers)
    left_out = (
        LeftOut(name, tuple(blocks.values()))
        for _, name, blocks in others
        if _parameter_count(blocks.values()) >= least
    )
    return LayerStack(_counted(_distinct(layers)), left_out=tuple(left_out))


def _distinct(layers: Sequence[Layer]) -> list[Layer]:
    """Return the same without the later places of a module that stands in several: it runs several times."""
    first: dict[nn.Module, Layer] = {}
    for layer in layers:
        first.setdefault(layer.module, layer)
    return list(first.values())


def _stack_of(name: str) -> str | None:
    """Whether a list of blocks belongs to an encoder or to a decoder, by its name."""
    return next((part for part in name.split(".") if part in {"encoder", "decoder"}), None)


def _counterpart(name: str) -> str | None:
    """Return what belongs to an encoder, or to a decoder: its blocks may be of another class."""
    return {"encoder": "decoder", "decoder": "encoder"}.get(_stack_of(name) or "")


def explicit_layers(model: nn.Module | Sequence[nn.Module], modules: Sequence[nn.Module]) -> LayerStack:
    """Return the layers that the caller names, numbered in the order given.

    One that is listed several times, because its weights are shared, is one layer that runs several times.

    Raises:
        UnsupportedError: One of them is not part of the model, or lies in another one.
    """
    chunks = chunks_of(model)
    names = {
        module: (chunk, name) for chunk, part in enumerate(chunks) for name, module in part.named_modules()
    }
    layers: list[Layer] = []
    for number, module in enumerate(modules):
        if module not in names:
            raise UnsupportedError(f"layer {number} ({type(module).__name__}) is not a module of the model")
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and not _is_called(module):
            raise UnsupportedError(
                f"layer {number} ({names[module][1]}) is a {type(module).__name__}, which is never called; "
                "name the modules in it that are"
            )
        chunk, name = names[module]
        layers.append(Layer(LayerId(number, name or type(module).__name__), module, chunk))
    layers = _distinct(layers)
    check_disjoint(layers)
    return LayerStack(_counted(layers))


def _counted(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """All layers of a model, each knowing how many there are."""
    own = [layer.id for layer in layers]
    return tuple(replace(layer, id=known) for layer, known in zip(layers, with_depths(own, own), strict=True))


def check_disjoint(layers: Sequence[Layer]) -> None:
    """Check that no layer is listed twice or lies inside another.

    Raises:
        UnsupportedError: Names the two layers.
    """
    owner: dict[nn.Module, Layer] = {}
    for layer in layers:
        for part in layer.module.modules():
            if part in owner and part in {layer.module, owner[part].module}:
                raise UnsupportedError(
                    f"{layer.id} and {owner[part].id} are the same module or lie in each other"
                )
            owner[part] = layer


def _stacks(model: nn.Module) -> Iterator[tuple[str, dict[str, nn.Module]]]:
    """Yield the outermost lists of blocks."""
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(outer) for outer in inside):
            continue
        blocks = _rows(_members(module))
        if _is_stack(list(blocks.values()), may_differ=not isinstance(module, nn.Sequential)):
            inside.append(f"{name}." if name else "")
            yield name or type(module).__name__, blocks


def _members(module: nn.Module) -> dict[str, nn.Module]:
    """Return what a list of modules holds, by its places; nothing of any other module."""
    if isinstance(module, nn.ModuleDict):
        return dict(module.items()) if all(key.isdecimal() for key in module) else {}
    if isinstance(module, nn.ModuleList | nn.Sequential):
        return {str(place): member for place, member in enumerate(module)}
    return {}


def _rows(members: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the blocks in the lists of a list, which the model calls one by one; other members as they are.

    lucidrains' models have a list of rows, each of attention and feed-forward, and no module that is a layer.
    """
    if len(members) < 2 or not all(type(row) is nn.ModuleList for row in members.values()):
        return members
    return {
        f"{place}.{within}": block
        for place, row in members.items()
        for within, block in row._modules.items()
        if block is not None and _is_block(block)
    }


def _is_stack(blocks: list[nn.Module], *, may_differ: bool) -> bool:
    """Whether these are layers: at least two blocks of one class, or of some more if they may differ."""
    firsts = {type(block): block for block in reversed(blocks)}
    if len(firsts) == len(blocks) or not all(map(_is_block, firsts.values())):
        return False
    return len(firsts) == 1 or (may_differ and not _consist_of_stacks(blocks))


def _is_block(module: nn.Module) -> bool:
    """Whether a module is composed of others, with parameters, and is called.

    Lists of modules never are, nor are bare ``nn.Module`` objects that hold the parts of a stage together, as
    the autoencoders of latent diffusion have them: they have no forward of their own.
    """
    return (
        _is_called(module) and any(True for _ in module.children()) and any(True for _ in module.parameters())
    )


def _is_called(module: nn.Module) -> bool:
    """Whether a module has a forward of its own."""
    forward = getattr(module, "forward", None)  # TorchScript may leave it out
    return forward is not None and getattr(forward, "__func__", None) is not nn.Module.forward


def _consist_of_stacks(blocks: list[nn.Module]) -> bool:
    """Whether most of the parameters are those of layers within the blocks, as in the stages of a U-Net."""
    inner = sum(_parameter_count(layers.values()) for block in blocks for _, layers in _stacks(block))
    return 2 * inner > _parameter_count(blocks)


def _kinds(blocks: Iterable[nn.Module]) -> set[type]:
    return {type(block) for block in blocks}


def _parameter_count(blocks: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for block in blocks for parameter in block.parameters())
