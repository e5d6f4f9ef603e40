"""The function ``attach``, which finds the layers of a model and opens a session."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch.nn.parameter import is_lazy

from tba_offload.config import ConfigLike, Paths, read_config, with_directories
from tba_offload.device import device_of_model
from tba_offload.errors import ConfigError, NoEffectWarning, warn
from tba_offload.formatting import quoted
from tba_offload.layers.find import LayerStack, chunks_of, explicit_layers, find_layers
from tba_offload.session import Session
from tba_offload.session.notices import tell, warn_of_doubts
from tba_offload.session.record import run_log_path

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from torch import nn
    from torch.optim import Optimizer

    from tba_offload.report.log import StepRecord
    from tba_offload.session.loop import Tokens

    OnStep = Callable[[StepRecord], object]


def attach(
    model: nn.Module | Sequence[nn.Module],
    config: ConfigLike = None,
    *,
    layers: Sequence[nn.Module] | None = None,
    directories: Paths | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    tokens: Tokens | None = None,
    run_log: str | os.PathLike[str] | None = None,
    strategy: str | None = None,
    model_info: Mapping[str, object] | None = None,
    measure_memory: bool = True,
    status: bool = False,
    on_step: OnStep | Sequence[OnStep] | None = None,
    trace_steps: Iterable[int] = (),
) -> Session:
    """Attach offloading to a model.

    ``attach`` finds the layers of Megatron models, and of models with a list of equal blocks. The list is a
    ``ModuleList``, a ``Sequential``, or a ``ModuleDict`` whose keys are numbers. The equal blocks may be
    divided into stages, as in Swin. For models of another structure, pass ``layers``.

    Args:
        model: The model, with or without a wrapper such as DistributedDataParallel. For an interleaved
            pipeline, the list of model chunks.
        config: The policy. With ``"fit"``, the planner chooses the fastest placements that fit into nine
            tenths of the device memory. The name of a placement, such as ``"offload"`` or ``"recompute"``,
            is the placement of all layers. A policy can also be the path of a YAML file, YAML text, a dict
            with the keys of a YAML policy, or an :class:`OffloadConfig`.
        layers: The layers to attach. By default, ``attach`` finds the layers of the model.
        directories: Directories of the store: one path, or one path per drive. ``directories`` replaces the
            directories in the policy.
        optimizer: One or several optimizers whose states are offloaded in addition to activations. See
            :func:`tba_offload.offload_optimizer`.
        tokens: Number of tokens in one micro-batch, or a function that takes the arguments of the model's
            forward and returns this number. The default is the number of elements of ``input_ids``, or of the
            first positional argument that is a tensor of integers.
        run_log: Path of the run log. If ``run.jsonl`` exists from an earlier run, the new run writes
            ``run.2.jsonl``. Each process of :mod:`torch.distributed` writes its own log, such as
            ``run.rank0.jsonl``.
        strategy: Label of the run in ROK plots. By default, the label is the placement of the layers, or
            ``mixed`` if the layers have several placements. The default label also names offloaded states and
            offloaded weights, for example ``offload + states``.
        model_info: Facts about the model that the run log records, such as layer sizes, the batch size or a
            name.
        measure_memory: Whether to measure the activation peak. On CUDA, the measurement takes no time. On a
            CPU, a thread takes samples of the process memory, and uses part of one core.
        status: Whether to log a line for each step. Plans of ``auto`` and the summary of the run are always
            logged. The logger is ``tba_offload.session``. If the program configures no logging handler, the
            lines go to stderr.
        on_step: One or several functions that are called with the complete :class:`StepRecord` of each step.
            On a CPU, the functions are called at the end of the step. On an accelerator, the functions are
            usually called during the next step. The classes in :mod:`tba_offload.sinks` write to TensorBoard
            or W&B. An exception in an ``on_step`` function ends training.
        trace_steps: Numbers of the steps whose timelines are recorded, as with ``session.step(trace=True)``.
            The first step has number 1.

    Returns:
        The open session. Close the session at the end of training, or use the session as a context manager.

    Raises:
        ConfigError: The policy is invalid, or does not match the model. The error lists all problems.
        UnsupportedError: No layers were found, or the model cannot be offloaded.
        StoreError: The store for offloaded bytes cannot be opened.

    Warns:
        NoEffectWarning: A setting of the policy has no effect, or less effect than expected.
    """
    chunks = chunks_of(model)
    if layers is not None and not layers:
        raise ConfigError("layers=[] contains no layer. Pass a list of layers, or omit layers")
    stack = _find(chunks) if layers is None else explicit_layers(chunks, layers)
    if stack.left_out:
        tell(f"{', '.join(map(str, stack.left_out))}: {_LEFT_OUT}")
    ids = [layer.id for layer in stack.layers]
    chosen = with_directories(read_config(config, layers=ids), directories)
    warn_of_doubts(chosen, ids, on_cpu=device_of_model(chunks).torch_device.type == "cpu")
    optimizers = _listed(optimizer)
    if chosen.states is not None and not optimizers:
        message = "the key 'states' has no effect without an optimizer in attach(). Pass optimizer=optimizer"
        warn(message, NoEffectWarning)
    return Session(
        stack,
        chunks,
        chosen,
        run_log=run_log and run_log_path(run_log),
        strategy=strategy,
        model_info={**_about(chunks), **(model_info or {})},
        measure_memory=measure_memory,
        tokens=tokens,
        optimizers=optimizers,
        on_step=_functions(on_step) + ((lambda record: tell(str(record)),) if status else ()),
        trace_steps=_numbers(trace_steps),
    )


_LEFT_OUT = (
    "attach() did not recognize these blocks as layers, so their activations and frozen weights stay in "
    "memory. To attach these blocks too, pass all layers: attach(model, config, layers=[...])"
)


def _find(chunks: list[nn.Module]) -> LayerStack:
    if any(name.partition(".")[0] == "megatron" for name in sys.modules):
        from tba_offload.megatron.layers import find_stack, is_megatron

        if is_megatron(chunks):
            return find_stack(chunks)
    return find_layers(chunks)


def _about(chunks: Sequence[nn.Module]) -> dict[str, object]:
    parameters = {parameter for chunk in chunks for parameter in chunk.parameters()}  # each counts once
    names = dict.fromkeys(type(_unwrapped(chunk)).__name__ for chunk in chunks)
    known = (parameter.numel() for parameter in parameters if not is_lazy(parameter))
    return {"name": ", ".join(names), "parameters": sum(known)}


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers, such as DistributedDataParallel. A wrapper has one child module."""
    while [name for name, _ in model.named_children()] in (["module"], ["_orig_mod"]):
        (model,) = model.children()
    return model


def _listed(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)


def _functions(on_step: OnStep | Sequence[OnStep] | None) -> tuple[OnStep, ...]:
    found = (on_step,) if callable(on_step) else _listed(on_step)
    for each in found:
        if not callable(each):
            raise ConfigError(f"on_step is {quoted(each)}. Pass a function that takes a step's record")
    return found


def _numbers(trace_steps: Iterable[int]) -> frozenset[int]:
    found = _listed(trace_steps)
    for each in found:
        if not isinstance(each, int) or each < 1:
            raise ConfigError(f"trace_steps has {quoted(each)}. Pass step numbers of 1 or more")
    return frozenset(found)
