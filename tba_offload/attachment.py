"""``attach``: finds the layers of a model and opens a session for them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tba_offload.capture.layers import LayerStack, explicit_layers, find_layers
from tba_offload.session import ConfigLike, Session, read_config

if TYPE_CHECKING:
    import os

    from torch import nn

    from tba_offload.boundaries import Tokens


def attach(
    model: nn.Module | Sequence[nn.Module],
    config: ConfigLike = None,
    *,
    layers: Sequence[nn.Module] | None = None,
    tokens: Tokens | None = None,
    run_log: str | os.PathLike[str] | None = None,
    strategy: str | None = None,
    model_info: Mapping[str, object] | None = None,
    measure_memory: bool = True,
) -> Session:
    """Attaches offloading to a model.

    The layers are found in Megatron models and in models with a ``ModuleList`` of equal blocks, as those
    of Hugging Face; for others name them.

    Args:
        model: The model, wrapped or not, or the list of its chunks in an interleaved pipeline.
        config: An :class:`OffloadConfig` or the path of a YAML policy; by default everything is offloaded.
        layers: The layers, if they cannot be found or others are wanted.
        tokens: Tokens of one micro-batch, or a function that tells them from the arguments of the model's
            forward; by default the elements of ``input_ids``, where the model is given any.
        run_log: Path of the run log to write.
        strategy: Label of the run in ROK plots.
        model_info: What the run log says about the model: name, sizes, batch size.
        measure_memory: Whether to measure the activation peak of steps that do not say so themselves. On CUDA
            that is free; on a CPU a thread samples, which takes part of a core.

    Returns:
        The session. Close it, or use it as a context manager.

    Raises:
        ConfigError: The policy is wrong.
        UnsupportedError: No layers were found, or the model cannot be offloaded.
        StoreError: The store cannot be opened.
    """
    chunks = list(model) if isinstance(model, Sequence) else [model]
    stack = explicit_layers(chunks, layers) if layers is not None else _find(chunks)
    return Session(
        stack,
        chunks,
        read_config(config),
        run_log=run_log,
        strategy=strategy,
        model_info=model_info,
        measure_memory=measure_memory,
        tokens=tokens,
    )


def _find(chunks: list[nn.Module]) -> LayerStack:
    """Asks the frameworks that are loaded, then looks for equal blocks."""
    if any(name.partition(".")[0] == "megatron" for name in sys.modules):
        from tba_offload.megatron.layers import find_stack, is_megatron

        if is_megatron(chunks):
            return find_stack(chunks)
    return find_layers(chunks)
