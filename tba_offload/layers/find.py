"""Find the layers of a model: blocks that run one after the other.

:func:`find_layers` looks for them, :func:`explicit_layers` takes those that the caller names.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn

from tba_offload.config.policy import LayerId, with_depths
from tba_offload.errors import UnsupportedError

Blocks = dict[str, nn.Module]
"""The blocks of a list, by their places in it."""

State = tuple[Callable[[], Any], Callable[[Any], object]]
"""Functions that read and set state that a second run of a layer must find again."""

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


class BlockList(NamedTuple):
    """A list of blocks in a model.

    Attributes:
        name: Its name in its chunk.
        chunk: The model chunk it belongs to.
        members: The blocks, by their places in the list.
    """

    name: str
    chunk: int
    members: Blocks

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks in their order."""
        return list(self.members.values())

    @property
    def stack(self) -> str | None:
        """Whether the list belongs to an encoder or to a decoder, by its name."""
        return next((part for part in self.name.split(".") if part in _COUNTERPARTS), None)

    def __str__(self) -> str:
        kinds = " and ".join(sorted(kind.__name__ for kind in set(map(type, self.blocks))))
        return f"{self.name} ({len(self.members)} of {kinds})"


_COUNTERPARTS = {"encoder": "decoder", "decoder": "encoder"}


@dataclass(frozen=True)
class LayerStack:
    """The layers of a model and what its framework does differently.

    Attributes:
        layers: In the order of their numbers.
        micro_batch: Number of the micro-batch that a layer is about to run, where the framework tells;
            otherwise ``None`` and executions are counted.
        states: Returns state of the framework that second runs put back, as its generators are.
        left_out: Lists of other blocks that have a share of the parameters.
    """

    layers: tuple[Layer, ...]
    micro_batch: Callable[[nn.Module], int | None] | None = None
    states: Callable[[], Sequence[State]] = tuple
    left_out: tuple[BlockList, ...] = ()


def chunks_of(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return the chunks of a model: those that are given, or the model itself."""
    return list(model) if isinstance(model, Sequence) else [model]


def find_layers(model: nn.Module | Sequence[nn.Module]) -> LayerStack:
    """Find the decoder or encoder layers of a model.

    The layers are the blocks of the ``ModuleList``, ``Sequential`` or ``ModuleDict`` of numbers that holds
    the most parameters. Other lists of the same kind of block count too. Where the list holds stages, as in
    Swin and ConvNeXt, the layers are the blocks of the stages.

    The blocks of a ``ModuleList`` may be of several classes, as in hybrids of attention and Mamba. An encoder
    may have other blocks than its decoder, as in Whisper; each of the two counts its layers from 0. A list of
    one block counts if there is no longer list and the block holds most of the parameters, as in ALBERT.

    Args:
        model: A module, or the chunks of one in an interleaved pipeline.

    Raises:
        UnsupportedError: No such list; the layers have to be named.
    """
    chunks = chunks_of(model)
    if not chunks:
        raise UnsupportedError("there is no model to attach to: the list of its chunks is empty")
    for search in (_lists, _only_blocks):
        found = [
            BlockList(name or type(part).__name__, chunk, members)
            for chunk, part in enumerate(chunks)
            for name, members in search(part)
        ]
        if found:
            break
    else:
        raise UnsupportedError(
            f"found no ModuleList of equal blocks in {type(chunks[0]).__name__}; "
            "name the layers: attach(model, config, layers=[...])"
        )
    largest = max(found, key=lambda each: _parameter_count(each.blocks))
    kinds, counterpart = set(map(type, largest.blocks)), _COUNTERPARTS.get(largest.stack or "", "")
    lists = [each for each in found if each.stack == counterpart or kinds.issuperset(map(type, each.blocks))]
    are_two = {each.stack for each in lists} == _COUNTERPARTS.keys()
    numbers: dict[str | None, Iterator[int]] = defaultdict(itertools.count)
    layers = []
    for each in lists:
        stack = each.stack if are_two else None
        for place, block in each.members.items():
            layer_id = LayerId(next(numbers[stack]), f"{each.name}.{place}", stack)
            layers.append(Layer(layer_id, block, each.chunk))
    least = LEAST_LEFT_OUT * _parameter_count(layer.module for layer in layers)
    left_out = (each for each in found if each not in lists and _parameter_count(each.blocks) >= least)
    return LayerStack(_counted(layers), left_out=tuple(left_out))


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
    counted = _counted(layers)
    check_disjoint(counted)
    return LayerStack(counted)


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


def _counted(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Return each layer once, knowing how many there are. A module in several places runs several times."""
    first: dict[nn.Module, Layer] = {}
    for layer in layers:
        first.setdefault(layer.module, layer)
    own = [layer.id for layer in first.values()]
    return tuple(replace(each, id=i) for each, i in zip(first.values(), with_depths(own, own), strict=True))


# Lists of blocks


def _lists(model: nn.Module) -> Iterator[tuple[str, Blocks]]:
    """Yield name and blocks of each list; the blocks of a list of stages are those in its stages."""
    for name, blocks in _outermost(model, least=2):
        yield name, _in_stages(blocks) or blocks


def _only_blocks(model: nn.Module) -> Iterator[tuple[str, Blocks]]:
    """Yield the list of one block that holds most of the model, as ALBERT's, which is called in a loop."""
    for name, blocks in _outermost(model, least=1):
        if not isinstance(model.get_submodule(name), nn.Sequential) and _are_most(blocks.values(), [model]):
            yield name, blocks


def _outermost(model: nn.Module, *, least: int) -> Iterator[tuple[str, Blocks]]:
    """Yield name and members of the outermost lists of ``least`` blocks or more."""
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(outer) for outer in inside):
            continue
        blocks = _rows(_members(module))
        if len(blocks) >= least and _are_alike(blocks, may_differ=not isinstance(module, nn.Sequential)):
            inside.append(f"{name}." if name else "")
            yield name, blocks


def _members(module: nn.Module) -> Blocks:
    """Return what a list of modules holds, by its places; nothing of any other module."""
    if isinstance(module, nn.ModuleDict):
        return dict(module.items()) if all(key.isdecimal() for key in module) else {}
    if isinstance(module, nn.ModuleList | nn.Sequential):
        return {str(place): member for place, member in enumerate(module)}
    return {}


def _rows(members: Blocks) -> Blocks:
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


def _in_stages(stages: Blocks) -> Blocks:
    """Return the blocks in the stages of a model, as Swin's; nothing if these modules are layers.

    Stages hold most of their parameters in lists of blocks. They differ in width or depth, or are lists of
    equal blocks themselves, as OLMo's block groups. Layers may hold lists too, but are equal. Experts are no
    layers: only some of them run. What a stage holds beside its lists, as the downsampling, is a layer too.
    """
    found: Blocks = {}
    listed: list[nn.Module] = []
    longest = 0
    for place, stage in stages.items():
        lists = dict(_outermost(stage, least=1))
        if not lists or any("expert" in name for name in lists):
            return {}
        longest = max(longest, *map(len, lists.values()))
        for top, part in (("", stage), *stage.named_children()):
            inner = {name: each for name, each in lists.items() if name.partition(".")[0] == top}
            for name, members in inner.items():
                listed += members.values()
                found |= {".".join(filter(None, (place, name, key))): each for key, each in members.items()}
            if not inner and top and "" not in lists and _is_block(part):
                found[f"{place}.{top}"] = part
    if longest == 1 or not _are_most(listed, stages.values()):
        return {}
    shapes = {tuple(parameter.shape for parameter in stage.parameters()) for stage in stages.values()}
    names = {tuple(name for name, _ in block.named_parameters()) for block in found.values()}
    are_groups = all(map(_members, stages.values())) and len(names) == 1
    return found if are_groups or len(shapes) > 1 else {}


def _are_alike(blocks: Blocks, *, may_differ: bool) -> bool:
    """Whether blocks can be layers: those of one class, or of several of which one comes twice."""
    firsts = {type(block): block for block in reversed(blocks.values())}
    if not all(map(_is_block, firsts.values())):
        return False
    if len(firsts) == 1:
        return True
    # The stages of a U-Net differ in class; what they hold is found as lists of its own.
    held = (
        each
        for block in blocks.values()
        for _, inner in _outermost(block, least=2)
        for each in inner.values()
    )
    return may_differ and len(firsts) < len(blocks) and not _are_most(held, blocks.values())


def _is_block(module: nn.Module) -> bool:
    """Whether a module is composed of others, with parameters, and is called.

    Lists of modules never are, nor are bare ``nn.Module`` objects that hold the parts of a stage together, as
    the autoencoders of latent diffusion have them: they have no forward of their own.
    """
    has_parts = next(module.children(), None) is not None and next(module.parameters(), None) is not None
    return has_parts and _is_called(module)


def _is_called(module: nn.Module) -> bool:
    """Whether a module has a forward of its own."""
    forward = getattr(module, "forward", None)  # TorchScript may leave it out
    return forward is not None and getattr(forward, "__func__", None) is not nn.Module.forward


def _parameter_count(blocks: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for block in blocks for parameter in block.parameters())


def _are_most(some: Iterable[nn.Module], modules: Iterable[nn.Module]) -> bool:
    """Whether some parts of modules hold more than half of the parameters."""
    return 2 * _parameter_count(some) > _parameter_count(modules)
