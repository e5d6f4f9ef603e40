"""The transformer layers of a Megatron model: which there are, and how one of them is recomputed."""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from tba_offload.capture.hooks import set_aside
from tba_offload.config.policy import LayerId, with_depths
from tba_offload.errors import UnsupportedError
from tba_offload.layers.randomness import Generator, generators_of
from tba_offload.layers.stack import Layer, LayerStack, chunks_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    _Arguments = dict[int | str, Any]  # by position or name

Output = TypeVar("Output")

_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module"})


def is_megatron(model: nn.Module | Sequence[nn.Module]) -> bool:
    """Whether a model, or a list of model chunks, holds a transformer layer of megatron-core.

    megatron-core is not imported for the answer: where it was not imported, nothing is Megatron's.
    """
    layer_types = _layer_types()
    return any(isinstance(module, layer_types) for chunk in chunks_of(model) for module in chunk.modules())


def find_stack(
    model: nn.Module | Sequence[nn.Module], gather: Callable[[list[LayerId]], Sequence[LayerId]] | None = None
) -> LayerStack:
    """Get the layers of a Megatron model, with Megatron's checkpoint and the micro-batches of its schedules.

    Args:
        model: The model or the list of its chunks on this rank, wrapped or not.
        gather: Tells the layers of all ranks from those of this one; by default there are no others.

    Raises:
        UnsupportedError: A layer does not know its number.
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
    return LayerStack(
        layers,
        checkpoint=checkpoint_layer,
        micro_batch=current_microbatch,
        generators=_generators_of,
        not_compared=_logs_losses,
    )


def _logs_losses(layer: nn.Module) -> str | None:
    """Why layers with experts are not run only to be compared: their routers add up losses for the log."""
    router = getattr(sys.modules.get("megatron.core.transformer.moe.router"), "Router", None)
    if router is None or not any(isinstance(module, router) for module in layer.modules()):
        return None
    return "its router adds to the losses that are logged each time it runs"


def _generators_of(devices: Iterable[torch.device]) -> Sequence[Generator]:
    """PyTorch's generators, and those of Megatron's random number regions."""
    from megatron.core import tensor_parallel

    tracker = tensor_parallel.get_cuda_rng_tracker()
    # It goes on in the very dict that it is given.
    return *generators_of(devices), Generator(
        tracker.get_states, lambda states: tracker.set_states(dict(states))
    )


def find_layers(model: nn.Module | Sequence[nn.Module]) -> list[Layer]:
    """Find the transformer and Mamba layers of a model, as this rank holds it.

    Numbers count from 0 over all pipeline stages and model chunks. Names are those of the bare model
    (``decoder.layers.7``), without wrappers such as ``Float16Module`` and with the global number in
    place of the local one. The stack (``encoder``) is named only where numbers alone are ambiguous.
    A layer within a layer is part of the outer one.

    Args:
        model: The model or the list of its chunks on this rank, wrapped or not.

    Returns:
        The layers in the order of the chunks, and within a chunk in the order in which they were
        registered; empty where the model is not Megatron's.

    Raises:
        UnsupportedError: A layer does not know its number.
    """
    return list(find_stack(model).layers)


def shorten(layers: Sequence[LayerId], everywhere: Sequence[LayerId]) -> list[LayerId]:
    """Leave out the names of stacks where numbers say enough, and count their layers.

    Multi-token prediction counts on where the decoder ends; the stacks of T5 both count from 0.

    Args:
        layers: Layers with their stacks.
        everywhere: Those of all ranks: no stage of a pipeline may see both stacks.
    """
    stacks: dict[int, set[str | None]] = defaultdict(set)
    for layer in everywhere:
        stacks[layer.number].add(layer.stack)
    if any(len(names) > 1 for names in stacks.values()):
        return with_depths(layers, everywhere)
    return with_depths(*([replace(layer, stack=None) for layer in each] for each in (layers, everywhere)))


def current_microbatch(layer: nn.Module) -> int | None:
    """Return the micro-batch that Megatron's schedule runs the layer on, from 0; None outside of a schedule.

    A schedule sets it before each forward and leaves it standing afterwards: it means something during
    a layer's first forward only, and never in backward.
    """
    number: int | None = getattr(layer, "current_microbatch", None)
    return number


def checkpoint_layer(forward: Callable[..., Output], /, *args: Any, **kwargs: Any) -> Output:
    """Run a layer and keep only its inputs: backward runs it a second time, with the same numbers.

    This is ``tensor_parallel.checkpoint``, which repeats the random numbers of Megatron's random number
    regions too; in FP8 and FP4 it is that of Transformer Engine, which also repeats the scaling factors.
    What requires a gradient (the hidden states, the context of a cross attention) is handed to it and is
    seen by saved-tensor hooks; everything else (masks, rotary tables, settings) is closed over, as it is
    shared between layers and frees nothing.

    Without gradients it just runs the layer. An input without a gradient, as frozen embeddings give, gets one
    that is not read: Megatron's checkpoint would otherwise not be part of the graph.

    Args:
        forward: The layer's own forward.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        What ``forward`` returns: a tensor or a tuple of tensors and other things.
    """
    given: _Arguments = dict(enumerate(args)) | kwargs
    tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
    inputs = {key: tensor for key, tensor in tensors.items() if tensor.requires_grad}
    if not inputs and _trains(forward):
        hidden_states = next((each for each in tensors.items() if each[1].is_floating_point()), None)
        if hidden_states is not None:
            inputs = {hidden_states[0]: hidden_states[1].detach().requires_grad_()}
    if not inputs or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # The closure must not hold the inputs, or offloading them could free nothing.
    closed_over = {key: value for key, value in given.items() if key not in inputs}
    output: Output = _checkpoint(forward, inputs, closed_over)
    return output


def _checkpoint(forward: Callable[..., Any], inputs: _Arguments, closed_over: _Arguments) -> Any:
    """Pass through the checkpoint only what the layer makes, and put its output together again.

    An argument that the layer hands through (the context of a decoder) stays the same tensor in the
    same graph: its gradients are summed in the order in which they would be without recomputation.
    """
    names = tuple(inputs)
    layout: list[tuple[str, Any]] = []
    is_tuple = True

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        nonlocal is_tuple
        given = closed_over | dict(zip(names, tensors, strict=True))
        positions = sorted(key for key in given if isinstance(key, int))
        keywords = {key: value for key, value in given.items() if isinstance(key, str)}
        # The layers of Megatron switch gradients on for a part of a forward that runs without: what is
        # saved there is dropped at once, and hooks shall see the inputs only.
        with set_aside():
            returned = forward(*(given[position] for position in positions), **keywords)
        is_tuple = isinstance(returned, tuple)
        values = returned if is_tuple else (returned,)
        layout[:] = [_origin(value, given) for value in values]
        return tuple(value for value, (how, _) in zip(values, layout, strict=True) if how == "made")

    made = iter(_checkpoint_of(forward)(run, *inputs.values()))
    parts: dict[str, Callable[[Any], Any]] = {
        "made": lambda _: next(made),
        "given": (closed_over | inputs).__getitem__,
        "other": lambda value: value,
    }
    output = tuple(parts[how](what) for how, what in layout)
    return output if is_tuple else output[0]


def _origin(value: Any, given: _Arguments) -> tuple[str, Any]:
    """Return where a part of a layer's output comes from: made, a given argument, or no tensor."""
    if not isinstance(value, Tensor):
        return "other", value
    return next((("given", key) for key, argument in given.items() if argument is value), ("made", None))


def _checkpoint_of(forward: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
    """Return the checkpoint that Megatron itself would use for the layer: it depends on the precision."""
    from megatron.core import parallel_state, tensor_parallel

    distribute_inputs = False  # over the tensor-parallel group: another way to save their memory
    config = getattr(getattr(forward, "__self__", None), "config", None)
    if not (getattr(config, "fp8", None) or getattr(config, "fp4", None)):
        return lambda run, *inputs: tensor_parallel.checkpoint(run, distribute_inputs, *inputs)
    from megatron.core.extensions.transformer_engine import te_checkpoint

    tracker, group = tensor_parallel.get_cuda_rng_tracker, parallel_state.get_tensor_model_parallel_group()
    return lambda run, *inputs: te_checkpoint(run, distribute_inputs, tracker, group, *inputs)


def _trains(forward: Callable[..., Any]) -> bool:
    """Whether the layer has a parameter that is trained, as far as its forward tells."""
    layer = getattr(forward, "__self__", None)
    return not isinstance(layer, nn.Module) or any(p.requires_grad for p in layer.parameters())


_LAYER_TYPES = {
    "megatron.core.transformer.transformer_layer": "BaseTransformerLayer",
    "megatron.core.ssm.mamba_layer": "MambaLayer",
}


def _layer_types() -> tuple[type[nn.Module], ...]:
    """Return the base classes of megatron-core's layers, those that are in use at all."""
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
    """Return the layer's global number and name; its stack is what stands before ``.layers``."""
    number = getattr(layer, "layer_number", None)
    if not isinstance(number, int):
        raise UnsupportedError(
            f"the layer {name!r} ({type(layer).__name__}) has no layer_number, so that no policy can "
            "name it; Megatron's layers get one from the block that builds them"
        )
    parts = list(itertools.dropwhile(_WRAPPERS.__contains__, name.split(".")))  # names of the bare model
    if parts[-1].isdigit():
        parts[-1] = str(number - 1)
    stack, within_a_stack, _ = ".".join(parts).partition(".layers.")
    return LayerId(number - 1, ".".join(parts), stack if within_a_stack else None)
