"""Recomputation of one layer."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError, checkpoint

from tba_offload.capture.hooks import check_version, hooks_on_top
from tba_offload.errors import RecomputationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager


class _Place(NamedTuple):
    """Stands for a tensor among the arguments of a layer."""

    number: int


def torch_checkpoint(forward: Callable[..., Any], /, *args: object, **kwargs: object) -> object:
    """Runs ``forward`` so that backward runs it again instead of keeping its activations.

    Tensors among the arguments, by position or name, alone or in tuples, are saved as an operation saves its
    inputs, so that saved-tensor hooks see them. All else stays as it is, tensors in lists or objects too.
    That it draws the same random numbers again is up to ``forward``: see :mod:`tba_offload.recompute.verify`.
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
    saved-tensor hooks off only when the exception is forgotten: whoever catches it would train on under them.
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
        """Raises what was kept, if anything; it is kept no longer, since its frames know this object."""
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error


class SavedAgain:
    """What backward is given of a recomputed layer: tensors that the layer's second run has saved.

    A checkpoint gives them out as they are, and hooks switch off autograd's own check for changes in place.
    So the second run notes the version of each, and what backward is given is compared with that. The hooks
    of the checkpoint do the rest; there are none where a checkpoint leaves saving to autograd.

    Args:
        sentence: Makes a message of what is wrong with recomputing the layer.
        name: The layer as messages call it.
    """

    def __init__(self, sentence: Callable[[str], str], name: str) -> None:
        self._sentence = sentence
        self._name = name
        self._count = 0  # tensors that the first run has saved
        self._versions: list[int] = []  # at which the latest second run has saved them, by the same number

    def in_first_run(self) -> AbstractContextManager[object]:
        """A block for the first run of the layer."""
        top = hooks_on_top()
        return nullcontext() if top is None else saved_tensors_hooks(*self._first(*top))

    def in_second_run(self) -> AbstractContextManager[object]:
        """A block for a second run of it whose tensors backward is given."""
        self._versions = versions = []
        top = hooks_on_top()
        if top is None:
            return nullcontext()
        pack, unpack = top

        def note(tensor: torch.Tensor) -> object:
            versions.append(tensor._version)
            return pack(tensor)

        return saved_tensors_hooks(note, unpack)

    def _first(
        self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
    ) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
        def number(tensor: torch.Tensor) -> tuple[int, Any]:
            self._count += 1
            return self._count - 1, pack(tensor)

        def check(numbered: tuple[int, Any]) -> torch.Tensor:
            number, packed = numbered
            try:
                tensor = unpack(packed)
            except CheckpointError as error:
                raise RecomputationError(self._sentence(_without_tip(error))) from error
            # A lower version is that of a buffer that was put back after the second run.
            if tensor._version > self._versions[number]:
                check_version(tensor, self._versions[number], f"{self._name}, recomputed")
            return tensor

        return number, check


def _without_tip(error: CheckpointError) -> str:
    """What a checkpoint says, without its tips of how to debug it."""
    said = str(error).partition("\nTip:")[0].removeprefix("torch.utils.checkpoint:")
    return f"backward cannot be given what its forward saved ({' '.join(said.split())})"


def without_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The same with places for its tensors, which are appended to a list."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1)
    return tuple(without_tensors(part, tensors) for part in value) if type(value) is tuple else value


def with_tensors(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Undoes :func:`without_tensors`."""
    if type(value) is _Place:
        return tensors[value.number]
    return tuple(with_tensors(part, tensors) for part in value) if type(value) is tuple else value


def is_recomputation() -> bool:
    """Whether the calling forward runs inside a backward pass.

    Holds for torch's and Megatron's checkpoints alike: what is saved then is used at once and stays.
    """
    return torch._C._current_graph_task_id() != -1
