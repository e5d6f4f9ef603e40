"""Functions that find the layers of a model, which are blocks that run one after the other."""

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
"""The blocks of a list, by their position in the list."""

State = tuple[Callable[[], Any], Callable[[Any], object]]
"""Two functions, which read and set a state. The state is restored before the second run of a recomputed
layer."""


class Switch(NamedTuple):
    """An attribute that switches on a framework's own recomputation of layers.

    Attributes:
        name: Name of the switch in messages.
        owner: The object with the attribute.
        attribute: Name of the attribute.
        layers: The modules that the framework recomputes.
        checkpoint: The framework's checkpoint function. The function takes a forward and its arguments.
    """

    name: str
    owner: Any
    attribute: str
    layers: AbstractSet[nn.Module]
    checkpoint: Callable[..., Any]

    def set_aside(self) -> None:
        """Replace the value of the switch by a :class:`SetAside`, also if the program has set it again."""
        value = getattr(self.owner, self.attribute, None)
        if value is not None and type(value) is not SetAside:
            setattr(self.owner, self.attribute, SetAside(value))


class SetAside:
    """Placeholder for the value of a :class:`Switch`, while a session recomputes layers itself.

    If the framework calls the placeholder as its checkpoint function, the placeholder calls the layer.

    Attributes:
        value: The value that the program has set.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the layer without recomputation."""
        return function(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return copy.copy, (self.value,)  # copies of the model have the switch of the program


def value_of_switch(owner: object, attribute: str) -> Any:
    """Return the value that the program has set for a switch; ``None`` without the attribute."""
    value = getattr(owner, attribute, None)
    return value.value if type(value) is SetAside else value


LEAST_LEFT_OUT = 0.1
"""A list of blocks that is not attached is reported if its number of parameters, as a fraction of the layers'
parameters, is at least this number."""


@dataclass(frozen=True)
class Layer:
    """A layer that has a placement.

    Attributes:
        id: The number and name of the layer, which rules of a policy match.
        module: The module.
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
        """The blocks, in the order of the list."""
        return list(self.members.values())

    @property
    def stack(self) -> str | None:
        """``encoder`` or ``decoder``, if the list's name contains this word; else ``None``."""
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
        micro_batch: Function that takes a layer before its forward, and returns the number of the
            micro-batch. With ``None``, the runs of each layer are counted instead.
        states: Function that returns the framework's states that are restored before a layer is recomputed,
            such as random generators.
        switches: Function that returns all :class:`Switch` objects whose layers the framework recomputes.
        checkpointed: Layers on other ranks that the framework recomputes.
        left_out: Lists of blocks that are not attached although they have many parameters. See
            :data:`LEAST_LEFT_OUT`.
    """

    layers: tuple[Layer, ...]
    micro_batch: Callable[[nn.Module], int | None] | None = None
    states: Callable[[], Sequence[State]] = tuple
    switches: Callable[[], Iterable[Switch]] = tuple
    checkpointed: AbstractSet[LayerId] = frozenset()
    left_out: tuple[BlockList, ...] = ()


def chunks_of(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return the chunks of an interleaved pipeline. For any other model, the model is the only chunk."""
    return list(model) if isinstance(model, Sequence) else [model]


def find_layers(model: nn.Module | Sequence[nn.Module]) -> LayerStack:
    """Find the decoder or encoder layers of a model.

    The layers are the blocks of the list with the most parameters. A list is a ``ModuleList``, a
    ``Sequential``, or a ``ModuleDict`` whose keys are numbers. Other lists with blocks of the same classes
    are added. If the list contains stages, as in Swin and ConvNeXt, the layers are the blocks of the stages.

    The blocks of a ``ModuleList`` may be of several classes, as in models that mix attention and Mamba. The
    blocks of an encoder may differ from the blocks of its decoder, as in Whisper. The layers of an encoder
    and of its decoder are numbered separately from 0. If all lists have only one block, a block with most of
    the model's parameters is the only layer, as in ALBERT.

    Args:
        model: A module, or the chunks of an interleaved pipeline.

    Raises:
        UnsupportedError: The model has no list of blocks, so the caller has to pass the layers.
    """
    chunks = chunks_of(model)
    if not chunks:
        raise UnsupportedError("the list of model chunks is empty. Pass at least one model chunk")
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
    """Return the given modules as layers, numbered in the given order.

    A module that is listed several times is one layer that runs several times.

    Args:
        model: The model, or the chunks of an interleaved pipeline.
        modules: The modules to attach.

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
                    f"{layer.id} and {owner[part].id} are the same or nested modules. Pass one of the two"
                )
            owner[part] = layer


def _counted(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    first: dict[nn.Module, Layer] = {}
    for layer in layers:
        first.setdefault(layer.module, layer)
    own = [layer.id for layer in first.values()]
    return tuple(replace(each, id=i) for each, i in zip(first.values(), with_depths(own, own), strict=True))


def _candidates(model: nn.Module) -> str:
    kinds: defaultdict[type, dict[str, nn.Module]] = defaultdict(dict)
    for name, module in model.named_modules():
        if any(module.children()) and name and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            kinds[type(module)][re.sub(r"\.(\d+)", r"[\1]", f"model.{name}")] = module
    largest = max(kinds.values(), key=lambda k: (len(k) > 1, _parameter_count(k.values())), default={})
    return ", ".join([*largest][:4]) or "..."


# Lists of blocks


def _lists(model: nn.Module) -> Iterator[tuple[str, Blocks]]:
    for name, blocks in _outermost(model, least=2):
        yield name, _in_stages(blocks) or blocks


def _only_blocks(model: nn.Module) -> Iterator[tuple[str, Blocks]]:
    """Yield lists with one block that has most of the parameters. ALBERT calls its only block in a loop."""
    for name, blocks in _outermost(model, least=1):
        if not isinstance(model.get_submodule(name), nn.Sequential) and _are_most(blocks.values(), [model]):
            yield name, blocks


def _outermost(model: nn.Module, *, least: int) -> Iterator[tuple[str, Blocks]]:
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(outer) for outer in inside):
            continue
        blocks = _rows(_members(module))
        if len(blocks) >= least and _are_alike(blocks, may_differ=not isinstance(module, nn.Sequential)):
            inside.append(f"{name}." if name else "")
            yield name, blocks


def _members(module: nn.Module) -> Blocks:
    if isinstance(module, nn.ModuleDict):
        return dict(module.items()) if all(key.isdecimal() for key in module) else {}
    if isinstance(module, nn.ModuleList | nn.Sequential):
        return {str(place): member for place, member in enumerate(module)}
    return {}


def _rows(members: Blocks) -> Blocks:
    """Return the blocks in a ``ModuleList`` of ``ModuleList``; return other members unchanged.

    In models of lucidrains, each inner ``ModuleList`` has an attention block and a feed-forward block. No
    module of these models is a whole layer.
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

    A stage has most of its parameters in lists of blocks, as in Swin. Stages differ from each other in width
    or depth, but the parameters of all layers have the same shapes. Stages may also be lists of equal blocks,
    such as the block groups of OLMo. Experts are not layers, because not all experts run. If a stage has a
    block outside its lists, such as downsampling, the block is also a layer.
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
    """Return True if blocks can be layers.

    By default, all blocks must have the same class. With ``may_differ``, two blocks of one class are enough.
    """
    firsts = {type(block): block for block in reversed(blocks.values())}
    if not all(map(_is_block, firsts.values())):
        return False
    if len(firsts) == 1:
        return True
    # The stages of a U-Net have different classes. The lists of blocks in them are found separately.
    held = (b for block in blocks.values() for _, inner in _outermost(block, least=2) for b in inner.values())
    return may_differ and len(firsts) < len(blocks) and not _are_most(held, blocks.values())


def _is_block(module: nn.Module) -> bool:
    """Return True if a module has a forward, submodules and parameters.

    A ``ModuleList`` has no forward. In some models, such as the autoencoders of latent diffusion, a stage is
    a plain ``nn.Module`` without a forward.
    """
    has_parts = next(module.children(), None) is not None and next(module.parameters(), None) is not None
    return has_parts and _is_called(module)


def _is_called(module: nn.Module) -> bool:
    forward = getattr(module, "forward", None)  # absent from some TorchScript modules
    return forward is not None and getattr(forward, "__func__", None) is not nn.Module.forward


def _parameter_count(blocks: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for block in blocks for parameter in block.parameters())


def _are_most(some: Iterable[nn.Module], modules: Iterable[nn.Module]) -> bool:
    return 2 * _parameter_count(some) > _parameter_count(modules)
