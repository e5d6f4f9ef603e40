"""What a recomputed layer has saved, when backward is given it."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError

from tba_offload.device.peers import has_peers
from tba_offload.errors import SavedTensorModifiedError, TbaError
from tba_offload.layers import untraced
from tba_offload.layers.graph import check_version, hooks_on_top, latest_node
from tba_offload.recompute.contents import address_of
from tba_offload.recompute.surroundings import too_late
from tba_offload.recompute.verdicts import NESTED, OTHER_NUMBERS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from contextlib import AbstractContextManager

    from tba_offload.recompute.samples import Differences, Samples


_CHANGE_IN_PLACE = "modified by an inplace operation"
"""Words of autograd's error for a saved tensor; a checkpoint saves the layer's arguments by autograd."""


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
        leave_out: Is given the places, in the order of saving, of tensors that kernels do not fill.
    """

    def __init__(
        self,
        failed: Callable[[str], TbaError],
        name: str,
        samples: Callable[[], Samples],
        leave_out: Callable[[frozenset[int]], object],
    ) -> None:
        self._failed = failed
        self._name = name
        self._make_samples = samples
        self._leave_out = leave_out
        self._count = 0  # tensors that the first run has saved
        self._samples = samples()
        self._versions: list[int] = []  # at which the latest second run has saved them, by the same number

    @contextmanager
    def in_first_run(self, restorable: Collection[int]) -> Iterator[None]:
        """Return a block for the first run of the layer.

        Args:
            restorable: Addresses of tensors that the layer may change, and finds again in the second run.
        """
        top = hooks_on_top()
        with nullcontext() if top is None else saved_tensors_hooks(*self._first(*top, restorable)):
            yield
        self._samples.end()

    def in_second_run(
        self, restorable: Collection[int], whole: Callable[[], str | None] | None
    ) -> AbstractContextManager[Callable[[], object]]:
        """Return a block for a second run of it whose tensors backward is given.

        It gives a function to be called when forward has ended, while the layer still holds what that wrote.

        Args:
            restorable: As of :meth:`in_first_run`.
            whole: Runs the layer to its end and tells what differs then from the first run, if anything;
                ``None`` if there is nothing to compare.
        """
        top = hooks_on_top()
        return nullcontext(_nothing) if top is None else self._second(*top, restorable, whole)

    def _first(
        self,
        pack: Callable[[torch.Tensor], Any],
        unpack: Callable[[Any], torch.Tensor],
        restorable: Collection[int],
    ) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
        @untraced.hook
        def number(tensor: torch.Tensor) -> tuple[int, Any]:
            self._count += 1
            if tensor.is_nested:  # of which a checkpoint would ask the shape, which not every kind has
                raise self._failed(NESTED)
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
            except RuntimeError as error:
                if not _is_change_in_place(error):
                    raise
                given = f"a tensor that {self._name} is given"
                raise SavedTensorModifiedError(too_late(given)) from error
            check_version(tensor, self._versions[number], f"{self._name}, recomputed")
            return tensor

        return number, check

    @contextmanager
    def _second(
        self,
        pack: Callable[[torch.Tensor], Any],
        unpack: Callable[[Any], torch.Tensor],
        restorable: Collection[int],
        whole: Callable[[], str | None] | None,
    ) -> Iterator[Callable[[], object]]:
        samples = self._make_samples()
        run = _SecondRun(pack, restorable, samples, self._count)
        self._versions = run.versions
        try:
            with saved_tensors_hooks(run.note, unpack):
                yield run.operation_ended
        except _Ended as end:
            ended, end.error = end.error, None  # or each would hold the other, and all callers
            end.__traceback__ = None  # it holds this frame, which from Python 3.12 on holds ``end``
        else:
            ended = run.take_end()
        try:
            samples.end()
            differences = self._samples.differences(samples)
            if differences is not None and not self._are_unfilled(differences, whole):
                raise self._failed(OTHER_NUMBERS)
            if ended is not None:
                raise ended
        finally:
            del ended  # it knows this frame, and so all callers

    def _are_unfilled(self, differences: Differences, whole: Callable[[], str | None] | None) -> bool:
        """Whether a second run differs only in memory that kernels reserve for backward and do not fill.

        Some do: the workspace of an LSTM, or the seed of an attention that drops nothing. Backward does not
        read it, and it is no part of the graph. What is put out tells whether it was that.
        """
        if not differences.may_be_unfilled or whole is None:
            return False
        # One rank alone must not repeat a collective operation, so there it cannot be told.
        if not has_peers() and whole() is not None:
            return False
        self._leave_out(differences.places)
        return True


def _nothing() -> None:
    pass


def _is_change_in_place(error: RuntimeError) -> bool:
    return not isinstance(error, TbaError) and _CHANGE_IN_PLACE in str(error)


class _SecondRun:
    """What a second run has saved so far.

    A checkpoint ends a second run with the last tensor that is saved. Its operation may fill that tensor, or
    another one that it saves, only afterwards, as ``rrelu`` does with its noise. Tensors with a graph were
    filled before, and so were parameters; where the last operation saves any other, the run goes on to the
    end of the layer. What is left of that saves nothing, so it is little.

    Args:
        pack: Of the checkpoint.
        restorable: Addresses of tensors that the layer finds again, and that get their values back after the
            run.
        samples: Takes samples of what is saved.
        count: Tensors that the first run has saved.

    Attributes:
        versions: At which each tensor was saved.
    """

    __slots__ = ("_copies", "_count", "_end", "_node", "_pack", "_restorable", "_samples", "versions")

    def __init__(
        self,
        pack: Callable[[torch.Tensor], Any],
        restorable: Collection[int],
        samples: Samples,
        count: int,
    ) -> None:
        self.versions: list[int] = []
        self._end: Exception | None = None  # by which the checkpoint ends the run
        self._pack = pack
        self._restorable = restorable
        self._samples = samples
        self._count = count
        self._copies: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._node = -1  # number of the latest operation that has saved what it may fill afterwards

    @untraced.hook
    def note(self, tensor: torch.Tensor) -> object:
        """Have the checkpoint save a tensor.

        Raises:
            _Ended: The checkpoint ends the run here.
        """
        if self._copies and latest_node() != self._node:
            self.operation_ended()
        if self._end is not None:
            return tensor.detach()
        if may_fill := not tensor.requires_grad and _may_be_filled(tensor):
            self._node = latest_node()
        if self._restorable and address_of(tensor) in self._restorable:
            copy = tensor.detach().clone()  # which has the values of this run for longer than it lasts
            if may_fill:
                self._copies.append((copy, tensor, tensor._version))
            tensor = copy
            self._samples.leave_out()
        else:
            self._samples.add(tensor)
        self.versions.append(tensor._version)
        try:
            return self._pack(tensor)
        except Exception as error:  # noqa: BLE001 - raised when the layer's code is left
            if len(self.versions) < self._count or latest_node() != self._node:
                raise _Ended(error) from None
            self._end = error.with_traceback(None)  # which has all callers, and what they hold
            return tensor.detach()

    def operation_ended(self) -> None:
        """Give copies the values that their operation has filled in, which no version tells of."""
        copies, self._copies = self._copies, []
        for copy, tensor, version in copies:
            if tensor._version == version:
                copy.data.copy_(tensor)

    def take_end(self) -> Exception | None:
        """Return the error by which the checkpoint ends a run that went on to the end of the layer, once."""
        end, self._end = self._end, None
        return end


def _may_be_filled(tensor: torch.Tensor) -> bool:
    """Whether the operation that saves a tensor without a graph may fill it after that: not a parameter."""
    whole = tensor if tensor._base is None else tensor._base
    return not isinstance(whole, torch.nn.Parameter)


class _Ended(BaseException):
    """Takes what a checkpoint raises past the layer's own code, which may catch all exceptions."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error: Exception | None = error


def _without_tip(error: CheckpointError) -> str:
    """Return what a checkpoint says, without its tips of how to debug it."""
    said = str(error).partition("\nTip:")[0].removeprefix("torch.utils.checkpoint:")
    return f"backward cannot be given what its forward saved ({' '.join(said.split())})"
