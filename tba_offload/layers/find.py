"""Find the layers of a model: blocks that run one after the other.

:func:`find_layers` searches for these blocks. :func:`explicit_layers` takes the modules that the caller
passes.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn

from tba_offload.config.policy import LayerId, with_depths
from tba_offload.errors import UnsupportedError

Blocks = dict[str, nn.Module]
"""The blocks of a list, by position."""

State = tuple[Callable[[], Any], Callable[[Any], object]]
"""A function that reads a state, and a function that sets it. Second runs of a layer restore this state."""


class Switch(NamedTuple):
    """An attribute that makes a framework checkpoint layers.

    Attributes:
        name: Name of the switch in messages.
        owner: The object with the attribute.
        attribute: Name of the attribute.
        layers: The modules that the framework checkpoints.
        checkpoint: Runs a function with its arguments in the framework's checkpoint.
    """

    name: str
    owner: Any
    attribute: str
    layers: AbstractSet[nn.Module]
    checkpoint: Callable[..., Any]


class SetAside:
    """The value of a switch that a session has set aside. As a checkpoint function, it only calls the layer.

    Attributes:
        value: The value of the program.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the layer."""
        return function(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return copy.copy, (self.value,)  # copies of the model have the switch of the program


def value_of_switch(owner: object, attribute: str) -> Any:
    """Return the program's value of a switch, also while it is set aside; ``None`` if there is none."""
    value = getattr(owner, attribute, None)
    return value.value if type(value) is SetAside else value


LEAST_LEFT_OUT = 0.1
"""Other lists of blocks are reported if they have at least this share of the parameters of the layers."""


@dataclass(frozen=True)
class Layer:
    """A layer that a session can place.

    Attributes:
        id: The number and name of the layer, which rules of a policy match.
        module: The module. Each call of the module is a scope.
        chunk: Index of the model chunk with the layer, in an interleaved pipeline.
    """

    id: LayerId
    module: nn.Module
    chunk: int = 0


class BlockList(NamedTuple):
    """A list of blocks in a model.

    Attributes:
        name: Module name of the list within its chunk.
        chunk: Index of the model chunk with the list.
        members: The blocks, by position in the list.
    """

    name: str
    chunk: int
    members: Blocks

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks, in order."""
        return list(self.members.values())

    @property
    def stack(self) -> str | None:
        """``encoder`` or ``decoder`` if a part of the list's name is this word; else ``None``."""
        return next((part for part in self.name.split(".") if part in _COUNTERPARTS), None)

    def __str__(self) -> str:
        kinds = " and ".join(sorted(kind.__name__ for kind in set(map(type, self.blocks))))
        return f"{self.name} ({len(self.members)} of {kinds})"


_COUNTERPARTS = {"encoder": "decoder", "decoder": "encoder"}


@dataclass(frozen=True)
class LayerStack:
    """The layers of a model, with functions of the framework that built the model.

    Attributes:
        layers: The layers, in the order of their numbers.
        micro_batch: Function that returns the framework's number of the micro-batch that a layer is about to
            run; ``None`` to count the runs of each layer instead.
        states: Function that returns states of the framework that second runs restore, such as its random
            generators.
        switches: Function that returns the framework's switches that are on and checkpoint layers.
        checkpointed: Layers on other ranks that the framework checkpoints.
        left_out: Other lists of blocks with a considerable share of the parameters.
    """

    layers: tuple[Layer, ...]
    micro_batch: Callable[[nn.Module], int | None] | None = None
    states: Callable[[], Sequence[State]] = tuple
    switches: Callable[[], Iterable[Switch]] = tuple
    checkpointed: AbstractSet[LayerId] = frozenset()
    left_out: tuple[BlockList, ...] = ()


def chunks_of(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return the chunks of a model. A model without chunks is one chunk."""
    return list(model) if isinstance(model, Sequence) else [model]


def find_layers(model: nn.Module | Sequence[nn.Module]) -> LayerStack:
    """Find the decoder or encoder layers of a model.

    The layers are the blocks of one list: the ``ModuleList``, ``Sequential``, or ``ModuleDict`` with numbers
    as keys, that has the most parameters. Other lists with blocks of the same classes are added. If the list
    contains stages, as in Swin and ConvNeXt, the layers are the blocks of the stages.

    The blocks of a ``ModuleList`` may be of several classes, as in hybrids of attention and Mamba. An encoder
    may have other blocks than its decoder, as in Whisper. The layers of an encoder and of its decoder are
    numbered separately from 0. A list of one block is used only if no list is longer and if the block has
    most of the parameters, as in ALBERT.

    Args:
        model: A module, or the chunks of an interleaved pipeline.

    Raises:
        UnsupportedError: The model has no list of blocks, so the caller has to pass the layers.
    """
    chunks = chunks_of(model)
    if not chunks:
        raise UnsupportedError("there is no model to attach to: the list of model chunks is empty")
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
            f"pass the layers: attach(model, config, layers=[{_candidates(chunks[0])}])"
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
    """Return the layers that the caller passes, numbered in the given order.

    A module that is listed several times, because its weights are shared, is one layer that runs several
    times.

    Raises:
        UnsupportedError: A module is not part of the model, is never called, or is inside another listed
            module.
    """
    chunks = chunks_of(model)
    names = {each: (chunk, name) for chunk, part in enumerate(chunks) for name, each in part.named_modules()}
    layers: list[Layer] = []
    for number, module in enumerate(modules):
        if module not in names:
            raise UnsupportedError(f"layers[{number}] ({type(module).__name__}) is not a module of the model")
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and not _is_called(module):
            raise UnsupportedError(
                f"layers[{number}] ({names[module][1]}) is a {type(module).__name__}, which is never called. "
                "Pass the modules inside this list"
            )
        chunk, name = names[module]
        layers.append(Layer(LayerId(number, name or type(module).__name__), module, chunk))
    counted = _counted(layers)
    check_disjoint(counted)
    return LayerStack(counted)


def check_disjoint(layers: Sequence[Layer]) -> None:
    """Check that no layer is listed twice, and that no layer is inside another layer.

    Raises:
        UnsupportedError: Two layers overlap.
    """
    owner: dict[nn.Module, Layer] = {}
    for layer in layers:
        for part in layer.module.modules():
            if part in owner and part in {layer.module, owner[part].module}:
                raise UnsupportedError(
                    f"{layer.id} and {owner[part].id} are the same or nested modules. Pass only one of them"
                )
            owner[part] = layer


def _counted(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Return each layer once, with the number of layers in its ``id``. A shared module is one layer."""
    first: dict[nn.Module, Layer] = {}
    for layer in layers:
        first.setdefault(layer.module, layer)
    own = [layer.id for layer in first.values()]
    return tuple(replace(each, id=i) for each, i in zip(first.values(), with_depths(own, own), strict=True))


def _candidates(model: nn.Module) -> str:
    """Return the names of modules that may be layers: modules of the class with the most parameters."""
    kinds: defaultdict[type, dict[str, nn.Module]] = defaultdict(dict)
    for name, module in model.named_modules():
        if any(module.children()) and name and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            kinds[type(module)][re.sub(r"\.(\d+)", r"[\1]", f"model.{name}")] = module
    largest = max(kinds.values(), key=lambda k: (len(k) > 1, _parameter_count(k.values())), default={})
    return ", ".join([*largest][:4]) or "..."


# Lists of blocks


def _lists(model: nn.Module) -> Iterator[tuple[str, Blocks]]:
    """Yield the name and blocks of each list. If a list contains stages, yield the blocks in the stages."""
    for name, blocks in _outermost(model, least=2):
        yield name, _in_stages(blocks) or blocks


def _only_blocks(model: nn.Module) -> Iterator[tuple[str, Blocks]]:
    """Yield each list of one block that has most of the parameters. ALBERT calls its only block in a loop."""
    for name, blocks in _outermost(model, least=1):
        if not isinstance(model.get_submodule(name), nn.Sequential) and _are_most(blocks.values(), [model]):
            yield name, blocks


def _outermost(model: nn.Module, *, least: int) -> Iterator[tuple[str, Blocks]]:
    """Yield the name and blocks of each outermost list with at least ``least`` blocks."""
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(outer) for outer in inside):
            continue
        blocks = _rows(_members(module))
        if len(blocks) >= least and _are_alike(blocks, may_differ=not isinstance(module, nn.Sequential)):
            inside.append(f"{name}." if name else "")
            yield name, blocks


def _members(module: nn.Module) -> Blocks:
    """Return the members of a list of modules by position; an empty dict for any other module."""
    if isinstance(module, nn.ModuleDict):
        return dict(module.items()) if all(key.isdecimal() for key in module) else {}
    if isinstance(module, nn.ModuleList | nn.Sequential):
        return {str(place): member for place, member in enumerate(module)}
    return {}


def _rows(members: Blocks) -> Blocks:
    """Return the blocks inside a list of rows; return other members unchanged.

    The model calls the blocks of a row one after the other.

    For example, the rows in models of lucidrains have an attention block and a feed-forward block. No module
    of these models is a whole layer.
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
    """Return the blocks inside the stages of a model; an empty dict if the modules are layers.

    Stages, as in Swin, have most of their parameters in lists of blocks. Stages differ in width or depth, or
    are lists of equal blocks, such as the block groups of OLMo. Layers may contain lists of blocks too, but
    the parameters of all layers have the same shapes. Experts are not layers, because only some experts run.
    A block of a stage that is outside its lists, such as downsampling, is also a layer.
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
    """Return True if blocks can be layers: all blocks, or at least two of them, have the same class."""
    firsts = {type(block): block for block in reversed(blocks.values())}
    if not all(map(_is_block, firsts.values())):
        return False
    if len(firsts) == 1:
        return True
    # The stages of a U-Net have different classes. The lists of blocks in them are found separately.
    held = (b for block in blocks.values() for _, inner in _outermost(block, least=2) for b in inner.values())
    return may_differ and len(firsts) < len(blocks) and not _are_most(held, blocks.values())


def _is_block(module: nn.Module) -> bool:
    """Return True if a module is called, and has submodules and parameters.

    Lists of modules are never called. Some models, such as the autoencoders of latent diffusion, group the
    parts of a stage in a bare ``nn.Module``, which has no forward.
    """
    has_parts = next(module.children(), None) is not None and next(module.parameters(), None) is not None
    return has_parts and _is_called(module)


def _is_called(module: nn.Module) -> bool:
    """Return True if a module has its own forward."""
    forward = getattr(module, "forward", None)  # absent from some TorchScript modules
    return forward is not None and getattr(forward, "__func__", None) is not nn.Module.forward


def _parameter_count(blocks: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for block in blocks for parameter in block.parameters())


def _are_most(some: Iterable[nn.Module], modules: Iterable[nn.Module]) -> bool:
    """Return True if the modules in ``some`` have more than half of the parameters of ``modules``."""
    return 2 * _parameter_count(some) > _parameter_count(modules)
