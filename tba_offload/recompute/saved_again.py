"""What a recomputed layer has saved, when backward is given it."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError

from tba_offload.layers.graph import check_version, hooks_on_top
from tba_offload.recompute.contents import address_of
from tba_offload.recompute.verdicts import OTHER_NUMBERS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from contextlib import AbstractContextManager

    import torch

    from tba_offload.errors import TbaError
    from tba_offload.recompute.samples import Differences, Samples


class SavedAgain:
    """What backward is given of a recomputed layer: tensors that the layer's second run has saved.

    A checkpoint gives them out as they are, and hooks switch off autograd's own check for changes in place.
    So the second run notes the version of each, and what backward is given is compared with that. Samples of
    each are compared with those of the first run. The hooks of the checkpoint do the rest; there are none
    where a checkpoint leaves saving to autograd.

    Args:
        failed: Makes the error for what is wrong with recomputing the layer.
        name: The layer as messages call it.
        samples: Makes what takes samples of one of the runs.
        are_unfilled: Tells of differences whether they are only where kernels fill no memory.
    """

    def __init__(
        self,
        failed: Callable[[str], TbaError],
        name: str,
        samples: Callable[[], Samples],
        are_unfilled: Callable[[Differences], bool],
    ) -> None:
        self._failed = failed
        self._name = name
        self._make_samples = samples
        self._are_unfilled = are_unfilled
        self._count = 0  # tensors that the first run has saved
        self._samples = samples()
        self._versions: list[int] = []  # at which the latest second run has saved them, by the same number

    @contextmanager
    def in_first_run(self, restorable: Collection[int]) -> Iterator[None]:
        """A block for the first run of the layer.

        Args:
            restorable: Addresses of tensors that the layer may change, and finds again in the second run.
        """
        top = hooks_on_top()
        with nullcontext() if top is None else saved_tensors_hooks(*self._first(*top, restorable)):
            yield
        self._samples.end()

    def in_second_run(self, restorable: Collection[int]) -> AbstractContextManager[object]:
        """A block for a second run of it whose tensors backward is given.

        Args:
            restorable: As of :meth:`in_first_run`.
        """
        top = hooks_on_top()
        return nullcontext() if top is None else self._second(*top, restorable)

    def _first(
        self,
        pack: Callable[[torch.Tensor], Any],
        unpack: Callable[[Any], torch.Tensor],
        restorable: Collection[int],
    ) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
        def number(tensor: torch.Tensor) -> tuple[int, Any]:
            self._count += 1
            if restorable and address_of(tensor) in restorable:
                self._samples.leave_out()
            else:
                self._samples.add(tensor)
            return self._count - 1, pack(tensor)

        def check(numbered: tuple[int, Any]) -> torch.Tensor:
            number, packed = numbered
            try:
                tensor = unpack(packed)
            except CheckpointError as error:
                raise self._failed(_without_tip(error)) from error
            check_version(tensor, self._versions[number], f"{self._name}, recomputed")
            return tensor

        return number, check

    @contextmanager
    def _second(
        self,
        pack: Callable[[torch.Tensor], Any],
        unpack: Callable[[Any], torch.Tensor],
        restorable: Collection[int],
    ) -> Iterator[None]:
        self._versions = versions = []
        samples = self._make_samples()

        def note(tensor: torch.Tensor) -> object:
            if restorable and address_of(tensor) in restorable:
                tensor = tensor.detach().clone()  # which has the values of this run for longer than it lasts
                samples.leave_out()
            else:
                samples.add(tensor)
            versions.append(tensor._version)
            if len(versions) == self._count:
                samples.end()  # the checkpoint ends the run here
            try:
                return pack(tensor)
            except Exception as error:  # noqa: BLE001 - raised when the layer's code is left
                raise _Ended(error) from None

        ended: Exception | None = None
        try:
            with saved_tensors_hooks(note, unpack):
                yield
        except _Ended as end:
            ended, end.error = end.error, None  # or each would hold the other, and all callers
        try:
            samples.end()
            differences = self._samples.differences(samples)
            if differences is not None and not self._are_unfilled(differences):
                raise self._failed(OTHER_NUMBERS)
            if ended is not None:
                raise ended
        finally:
            del ended  # it knows this frame, and so all callers


class _Ended(BaseException):
    """Takes what a checkpoint raises past the layer's own code, which may catch all exceptions."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error: Exception | None = error


def _without_tip(error: CheckpointError) -> str:
    """What a checkpoint says, without its tips of how to debug it."""
    said = str(error).partition("\nTip:")[0].removeprefix("torch.utils.checkpoint:")
    return f"backward cannot be given what its forward saved ({' '.join(said.split())})"
