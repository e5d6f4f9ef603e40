"""A checkpoint: a layer that backward runs again instead of keeping what it saved."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class _Place(NamedTuple):
    """Stands for a tensor among the arguments of a layer."""

    number: int


_LOADED_LATE = "torch._dynamo"
"""Module that torch loads when a checkpoint is first called, if no optimizer has had it loaded: with all that
it needs some 800 modules, 70 MiB and 2 to 5 s."""


def is_loaded() -> bool:
    """Whether a checkpoint of torch would have nothing to load."""
    return _LOADED_LATE in sys.modules


def load() -> None:
    """Load what a checkpoint of torch needs, so that no step does."""
    importlib.import_module(_LOADED_LATE)


def torch_checkpoint(forward: Callable[..., Any], /, *args: object, **kwargs: object) -> object:
    """Run ``forward`` so that backward runs it again instead of keeping its activations.

    Tensors among the arguments, by position or name, alone or in tuples, are saved as an operation saves its
    inputs, so that saved-tensor hooks see them. All else stays as it is, tensors in lists or objects too, and
    those of inference mode, which cannot be saved.
    That it draws the same random numbers again is up to ``forward``: see :mod:`tba_offload.recompute.run`.
    """
    tensors: list[torch.Tensor] = []
    layout = without_tensors((args, tuple(kwargs.items())), tensors)

    def run(*inputs: torch.Tensor) -> object:
        positional, named = with_tensors(layout, inputs)
        return forward(*positional, **dict(named))

    again: Callable[..., object] = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    first = _FirstRun(run)
    output = again(first, *tensors)
    if first.error is not None:
        layout = ()  # what forward left in an argument may hold the graph, and the graph this function
    first.raise_error()
    return output


class _FirstRun:
    """Runs a function, and the first time keeps what it raises.

    With older versions of torch, 2.11 among them, a checkpoint that an exception leaves in forward takes its
    saved-tensor hooks off only when the exception is forgotten: a program that catches it would train on
    under them.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self.function = function
        self.error: BaseException | None = None
        self._is_over = False

    def __call__(self, *inputs: torch.Tensor) -> object:
        if self._is_over:
            return self.function(*inputs)
        self._is_over = True
        try:
            return self.function(*inputs)
        except BaseException as error:  # noqa: BLE001 - raised as soon as the checkpoint has ended
            self.error = error
            return None

    def raise_error(self) -> None:
        """Raise what was kept, if anything; it is kept no longer, since its frames know this object."""
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error


def without_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the same with places for its tensors that can be saved, which are appended to a list."""
    if isinstance(value, torch.Tensor) and not value.is_inference():
        tensors.append(value)
        return _Place(len(tensors) - 1)
    return tuple(without_tensors(part, tensors) for part in value) if type(value) is tuple else value


def with_tensors(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Undo :func:`without_tensors`."""
    if type(value) is _Place:
        return tensors[value.number]
    return tuple(with_tensors(part, tensors) for part in value) if type(value) is tuple else value


def is_recomputation() -> bool:
    """Whether the calling forward runs inside a backward pass.

    Holds for torch's and Megatron's checkpoints alike: what is saved then is used at once and stays.
    """
    return torch._C._current_graph_task_id() != -1
