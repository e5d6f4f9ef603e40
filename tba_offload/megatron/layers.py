"""Functions that find the layers of a Megatron model, and the states that recomputation restores."""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.nn import ModuleList

from tba_offload.config.policy import LayerId, with_depths
from tba_offload.errors import UnsupportedError
from tba_offload.layers.find import Layer, LayerStack, State, Switch, chunks_of, value_of_switch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from torch import Tensor, nn


_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module"})


def is_megatron(model: nn.Module | Sequence[nn.Module]) -> bool:
    """Return True if a model, or a list of model chunks, contains a transformer layer of megatron-core.

    The function does not import megatron-core. If the program has not imported megatron-core, the result is
    False.
    """
    layer_types = _layer_types()
    return any(isinstance(module, layer_types) for chunk in chunks_of(model) for module in chunk.modules())


def find_stack(
    model: nn.Module | Sequence[nn.Module], gather: Callable[[list[LayerId]], Sequence[LayerId]] | None = None
) -> LayerStack:
    """Return the layers of a Megatron model, with functions that read micro-batch numbers and random states.

    Layer numbers start from 0 and continue over all pipeline stages and model chunks. Layer names are the
    module names without wrappers such as ``Float16Module``, with the global layer number
    (``decoder.layers.7``). A layer id includes the stack (``encoder``) only if several stacks use the same
    numbers. A layer inside another layer is part of the outer layer and is not listed.

    Layers are sorted by chunk, and within a chunk by the order in which the modules were registered. For a
    model of another framework, the result has no layers.

    Args:
        model: The model, or the list of model chunks on this rank, with or without wrappers.
        gather: Function that takes the layer ids of this rank and returns the layer ids of all ranks. By
            default, only the layers of this rank are known.

    Raises:
        UnsupportedError: A layer of the model has no ``layer_number``.
    """
    layer_types = _layer_types()
    found = [
        Layer(_identify(name, module), module, index)
        for index, chunk in enumerate(chunks_of(model))
        for name, module in _outermost(chunk, layer_types)
    ]
    own = [layer.id for layer in found]
    ids = shorten(own, gather(own) if gather is not None else own)
    layers = tuple(replace(layer, id=short) for layer, short in zip(found, ids, strict=True))
    modules = [module for chunk in chunks_of(model) for module in chunk.modules()]
    lists = [each for each in modules if isinstance(getattr(each, "layers", None), ModuleList)]
    own_layers = {layer.module for layer in layers}
    blocks = [each for each in lists if hasattr(getattr(each, "config", 0), "fp8")]
    switches = partial(_switches, {block: own_layers & set(block.modules()) for block in blocks})
    checkpointed = [each.id for each in layers if any(each.module in on.layers for on in switches())]
    elsewhere = frozenset(() if gather is None else gather(checkpointed)) - set(checkpointed)
    return LayerStack(layers, current_microbatch, _states, switches, elsewhere)


def _switches(blocks: Mapping[Any, AbstractSet[nn.Module]]) -> Iterator[Switch]:
    """Yield a switch for each Megatron configuration that recomputes whole layers.

    Megatron itself recomputes layers that use FP8 or FP4, and layers whose saved inputs it distributes over
    ranks. The function yields no switch for the configurations of these layers.

    Args:
        blocks: For each block of layers, the attached layers in the block. The caller finds these layers only
            once, because a walk through all modules takes time.
    """
    name = "recompute_granularity"
    for config in {id(block.config): block.config for block in blocks}.values():
        is_left = config.distribute_saved_activations or config.fp8 or getattr(config, "fp4", None)
        if value_of_switch(config, name) != "full" or is_left:
            continue
        own = [block for block in blocks if block.config is config]
        is_by_block, count = config.recompute_method == "block", config.recompute_num_layers
        kept = {layer for block in own for layer in block.layers[count:] if is_by_block}
        yield Switch(name, config, name, {each for one in own for each in blocks[one]} - kept, _checkpoint)


def _checkpoint(run: Callable[..., object], *args: object) -> object:
    """Run a layer with Megatron's activation recomputation."""
    from megatron.core import tensor_parallel

    return tensor_parallel.checkpoint(run, False, *args)  # noqa: FBT003 - positional in Megatron


def _states() -> Sequence[State]:
    """Return the states that recomputation restores: random generators, and logged losses of MoE routers."""
    from megatron.core import tensor_parallel

    tracker = tensor_parallel.get_cuda_rng_tracker()
    # The tracker continues to use the dict that it gets, so pass a copy.
    generators = (tracker.get_states, lambda found: tracker.set_states(dict(found)))
    return generators, (lambda: {name: each.clone() for name, each in _logged().items()}, _put_logged)


def _logged() -> dict[str, Tensor]:
    newer = sys.modules.get("megatron.core.transformer.moe.moe_logging")
    if newer is not None:
        return {name: each.values for name, each in newer.get_moe_metrics_tracker().metrics.items()}
    older = sys.modules.get("megatron.core.transformer.moe.moe_utils")
    entries = {} if older is None else older.get_moe_layer_wise_logging_tracker()
    return {name: each["values"] for name, each in entries.items()}


def _put_logged(values: Mapping[str, Tensor]) -> None:
    for name, summed in _logged().items():
        summed.copy_(values[name]) if name in values else summed.zero_()


def shorten(layers: Sequence[LayerId], everywhere: Sequence[LayerId]) -> list[LayerId]:
    """Add the number of layers to each id, and remove the stack from the ids if layer numbers are unique.

    For example, the layers of multi-token prediction continue the numbers of the decoder, so layer numbers
    are unique. In T5, the numbers of both stacks start from 0, so the layer ids keep their stacks.

    Args:
        layers: Layer ids of this rank, with stacks.
        everywhere: Layer ids of all ranks. A single pipeline stage may have layers of only one stack.
    """
    stacks: dict[int, set[str | None]] = defaultdict(set)
    for layer in everywhere:
        stacks[layer.number].add(layer.stack)
    if any(len(names) > 1 for names in stacks.values()):
        return with_depths(layers, everywhere)
    return with_depths(*([replace(layer, stack=None) for layer in each] for each in (layers, everywhere)))


def current_microbatch(layer: nn.Module) -> int | None:
    """Return the micro-batch number that Megatron's schedule has set, from 0; None outside of a schedule.

    A schedule sets the number before each forward and never resets the number. The number is therefore valid
    during the first run of a layer, but not when backward recomputes the layer.
    """
    number: int | None = getattr(layer, "current_microbatch", None)
    return number


_LAYER_TYPES = {
    "megatron.core.transformer.transformer_layer": "BaseTransformerLayer",
    "megatron.core.ssm.mamba_layer": "MambaLayer",
}


def _layer_types() -> tuple[type[nn.Module], ...]:
    """Return the base classes of megatron-core's layers that the program has imported."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in _LAYER_TYPES.items())
    return tuple(layer_type for layer_type in found if layer_type is not None)


def _outermost(chunk: nn.Module, layer_types: tuple[type[nn.Module], ...]) -> Iterator[tuple[str, nn.Module]]:
    outer = None
    for name, module in chunk.named_modules():
        inside = outer is not None and name.startswith(outer)
        if not inside and isinstance(module, layer_types):
            outer = f"{name}." if name else ""
            yield name, module


def _identify(name: str, layer: nn.Module) -> LayerId:
    """Return a layer's id: the global layer number, the module name, and the stack.

    The stack is the part of the module name before ``.layers``.
    """
    number = getattr(layer, "layer_number", None)
    if not isinstance(number, int):
        raise UnsupportedError(
            f"the layer {name!r} ({type(layer).__name__}) has no layer_number, so no policy can name "
            "this layer. Build the layer in a TransformerBlock, which sets layer_number"
        )
    parts = list(itertools.dropwhile(_WRAPPERS.__contains__, name.split(".")))  # names without wrappers
    if parts[-1].isdigit():
        parts[-1] = str(number - 1)
    stack, within_a_stack, _ = ".".join(parts).partition(".layers.")
    return LayerId(number - 1, ".".join(parts), stack if within_a_stack else None)
