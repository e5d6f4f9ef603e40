"""``attach``: find the layers of a model and open a session for them."""

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
from tba_offload.report.log import describe_step
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

    Layers are found in Megatron models and in models that hold equal blocks in a ``ModuleList``, a
    ``Sequential`` or a ``ModuleDict`` of numbers, also within stages, as Swin's. For others name them.

    Args:
        model: The model, wrapped or not, or the list of its chunks in an interleaved pipeline.
        config: An :class:`OffloadConfig`, a dict with the keys of a YAML policy, or the path of one; by
            default everything is offloaded.
        layers: The layers, if they cannot be found or others are wanted.
        directories: Where offloaded bytes go, instead of where the policy says: one path, or one for each
            drive.
        optimizer: The optimizer, or several, whose states are offloaded too, see
            :func:`tba_offload.offload_optimizer`; by default none is.
        tokens: Tokens of one micro-batch, or a function that tells them from the arguments of the model's
            forward; by default the elements of ``input_ids``, or else of the first tensor of whole numbers
            that the model is given by position.
        run_log: Path of the run log to write. Where there is one of an earlier run, this one writes
            ``run.2.jsonl`` for ``run.jsonl``; each process of :mod:`torch.distributed` writes its own, as
            ``run.rank0.jsonl``.
        strategy: Label of the run in ROK plots; by default the placement that all layers share, or ``mixed``,
            and whether states and weights are offloaded, as in ``offload + states``.
        model_info: What the run log says about the model beside the name of its class and how many parameters
            it has: sizes, batch size, another name.
        measure_memory: Whether to measure the activation peak of steps that do not say so themselves. On CUDA
            that is free; on a CPU a thread samples, which takes part of a core.
        status: Whether each step is told in a line. New plans of ``auto`` always are: by the logger
            ``tba_offload.session``, on stderr unless the program has set logging up.
        on_step: A function, or several, to be called with the :class:`StepRecord` of each step when all of it
            is known: on a CPU at the step's end, on an accelerator mostly within the next step. Those of
            :mod:`tba_offload.sinks` write to TensorBoard or W&B. An exception of one ends the training.
        trace_steps: Numbers of the steps, from 1, that are recorded over time as ``session.step(trace=True)``
            records one, also where they open by themselves.

    Returns:
        The session. Close it, or use it as a context manager.

    Raises:
        ConfigError: The policy is wrong, or takes no effect on this model; says every problem there is.
        UnsupportedError: No layers were found, or the model cannot be offloaded.
        StoreError: The store cannot be opened.

    Warns:
        NoEffectWarning: A setting does not do what it seems to.
    """
    chunks = chunks_of(model)
    stack = _find(chunks) if layers is None else _named(chunks, layers)
    if stack.left_out:
        tell(f"{', '.join(map(str, stack.left_out))}: {_LEFT_OUT}")
    ids = [layer.id for layer in stack.layers]
    chosen = with_directories(read_config(config, layers=ids), directories)
    warn_of_doubts(chosen, ids, on_cpu=device_of_model(chunks).torch_device.type == "cpu")
    optimizers = _listed(optimizer)
    if chosen.states is not None and not optimizers:
        message = "states: is about the states of optimizers, and attach() was given no optimizer"
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
        on_step=_functions(on_step) + ((_tell,) if status else ()),
        trace_steps=_numbers(trace_steps),
    )


_LEFT_OUT = (
    "these blocks are none of the layers that were found, so what they save stays in memory, and frozen "
    "weights of theirs too; name all that are to be placed: attach(model, config, layers=[...])"
)


def _find(chunks: list[nn.Module]) -> LayerStack:
    """Ask the frameworks that are loaded, then look for blocks."""
    if any(name.partition(".")[0] == "megatron" for name in sys.modules):
        from tba_offload.megatron.layers import find_stack, is_megatron

        if is_megatron(chunks):
            return find_stack(chunks)
    return find_layers(chunks)


def _named(chunks: list[nn.Module], layers: Sequence[nn.Module]) -> LayerStack:
    if not layers:
        raise ConfigError("layers=[] names no layer; name some, or leave layers out to have them found")
    return explicit_layers(chunks, layers)


def _about(chunks: Sequence[nn.Module]) -> dict[str, object]:
    """Return what tells runs of one model from those of another."""
    parameters = {parameter for chunk in chunks for parameter in chunk.parameters()}  # a shared one once
    names = dict.fromkeys(type(_unwrapped(chunk)).__name__ for chunk in chunks)
    known = (parameter.numel() for parameter in parameters if not is_lazy(parameter))
    return {"name": ", ".join(names), "parameters": sum(known)}


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model in wrappers with nothing else in them, as DistributedDataParallel."""
    while [name for name, _ in model.named_children()] in (["module"], ["_orig_mod"]):
        (model,) = model.children()
    return model


def _listed(given: Any) -> tuple[Any, ...]:
    """Return the objects that are given, of which a single one may stand alone."""
    if given is None:
        return ()
    return tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)


def _functions(on_step: OnStep | Sequence[OnStep] | None) -> tuple[OnStep, ...]:
    found = (on_step,) if callable(on_step) else _listed(on_step)
    for each in found:
        if not callable(each):
            raise ConfigError(f"on_step is {quoted(each)}: give a function of a step's record, or a sink")
    return found


def _tell(record: StepRecord) -> None:
    tell(describe_step(record))


def _numbers(trace_steps: Iterable[int]) -> frozenset[int]:
    found = _listed(trace_steps)
    for each in found:
        if not isinstance(each, int) or each < 1:
            raise ConfigError(f"trace_steps has {quoted(each)}: give numbers of steps, from 1")
    return frozenset(found)
