"""Function ``attach``, which finds the layers of a model and opens a session for them."""

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

    Layers are found in Megatron models, and in models with a list of equal blocks: a ``ModuleList``, a
    ``Sequential`` or a ``ModuleDict`` of numbers. The list may consist of stages, as in Swin. For other
    models pass ``layers``.

    Args:
        model: The model, wrapped or not, or the list of its chunks in an interleaved pipeline.
        config: ``"fit"``: the planner places each layer so that training fits nine tenths of this device and
            is as fast as possible. Or a placement for all layers, such as ``"offload"`` or ``"recompute"``.
            Or the path of a YAML policy, its text, a dict with its keys, or an :class:`OffloadConfig`.
        layers: The layers to attach. By default they are found.
        directories: Directories of the store, instead of those of the policy: one path, or one per drive.
        optimizer: An optimizer, or several, whose states are offloaded too, see
            :func:`tba_offload.offload_optimizer`.
        tokens: Tokens of one micro-batch, or a function of the arguments of the model's forward that returns
            them. By default the number of elements of ``input_ids``, or else of the first positional tensor
            of integers.
        run_log: Path of the run log. If ``run.jsonl`` is the log of an earlier run, this run writes
            ``run.2.jsonl``. Each process of :mod:`torch.distributed` writes its own log, such as
            ``run.rank0.jsonl``.
        strategy: Label of the run in ROK plots. By default the placement that all layers share, or ``mixed``,
            and what else is offloaded, such as ``offload + states``.
        model_info: Facts about the model for the run log, such as sizes, batch size or another name.
        measure_memory: Whether to measure the activation peak. This is free on CUDA. On a CPU a thread
            samples memory, which takes part of a core.
        status: Whether to log a line for each step. Plans of ``auto`` and the summary at the end are always
            logged: by the logger ``tba_offload.session``, or on stderr without a logging handler.
        on_step: A function, or several, to call with the complete :class:`StepRecord` of each step: at the
            end of the step on a CPU, mostly during the next step on an accelerator. The classes in
            :mod:`tba_offload.sinks` write to TensorBoard or W&B. An exception in a function ends training.
        trace_steps: Numbers of the steps, from 1, to record over time, as with ``session.step(trace=True)``.

    Returns:
        The session. Close it, or use it as a context manager.

    Raises:
        ConfigError: All problems of the policy, alone and with this model.
        UnsupportedError: No layers were found, or the model cannot be offloaded.
        StoreError: The store cannot be opened.

    Warns:
        NoEffectWarning: A setting has no effect, or less effect than expected.
    """
    chunks = chunks_of(model)
    if layers is not None and not layers:
        raise ConfigError("layers=[] names no layer. Name some, or leave layers out to have them found")
    stack = _find(chunks) if layers is None else explicit_layers(chunks, layers)
    if stack.left_out:
        tell(f"{', '.join(map(str, stack.left_out))}: {_LEFT_OUT}")
    ids = [layer.id for layer in stack.layers]
    chosen = with_directories(read_config(config, layers=ids), directories)
    warn_of_doubts(chosen, ids, on_cpu=device_of_model(chunks).torch_device.type == "cpu")
    optimizers = _listed(optimizer)
    if chosen.states is not None and not optimizers:
        message = "states: has no effect, because attach() was given no optimizer. Pass optimizer=optimizer"
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
    "these blocks are not among the layers that were found, so their activations and frozen weights stay in "
    "memory. To attach them too, name all layers: attach(model, config, layers=[...])"
)


def _find(chunks: list[nn.Module]) -> LayerStack:
    """Return the layers as Megatron defines them, or else the layers that are found by their structure."""
    if any(name.partition(".")[0] == "megatron" for name in sys.modules):
        from tba_offload.megatron.layers import find_stack, is_megatron

        if is_megatron(chunks):
            return find_stack(chunks)
    return find_layers(chunks)


def _about(chunks: Sequence[nn.Module]) -> dict[str, object]:
    """Return name and number of parameters of a model."""
    parameters = {parameter for chunk in chunks for parameter in chunk.parameters()}  # shared ones count once
    names = dict.fromkeys(type(_unwrapped(chunk)).__name__ for chunk in chunks)
    known = (parameter.numel() for parameter in parameters if not is_lazy(parameter))
    return {"name": ", ".join(names), "parameters": sum(known)}


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers without other children, such as DistributedDataParallel."""
    while [name for name, _ in model.named_children()] in (["module"], ["_orig_mod"]):
        (model,) = model.children()
    return model


def _listed(given: Any) -> tuple[Any, ...]:
    """Return one object, or several, as a tuple."""
    if given is None:
        return ()
    return tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)


def _functions(on_step: OnStep | Sequence[OnStep] | None) -> tuple[OnStep, ...]:
    found = (on_step,) if callable(on_step) else _listed(on_step)
    for each in found:
        if not callable(each):
            raise ConfigError(f"on_step is {quoted(each)}. Give a function of a step's record, or a sink")
    return found


def _numbers(trace_steps: Iterable[int]) -> frozenset[int]:
    found = _listed(trace_steps)
    for each in found:
        if not isinstance(each, int) or each < 1:
            raise ConfigError(f"trace_steps has {quoted(each)}. Give numbers of steps, from 1")
    return frozenset(found)
