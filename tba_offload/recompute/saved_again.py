"""What a recomputed layer has saved, when backward is given it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError

from tba_offload.errors import RecomputationError
from tba_offload.layers.graph import check_version, hooks_on_top

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch


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
