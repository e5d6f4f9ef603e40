"""Activations that a drive does not give back, made again by repeating the forward of their layer.

Only a layer is repeated whose second run was found to give the bits of its first one, only in a process that
is alone, where no other rank would have to repeat a collective operation with it, and only while all that it
was called with is still there. What it was called with is not kept for that: its bytes are in memory or with
a record as long as backward needs them, which for the first input is nearly always until the layer is done; a
mask that is made for one forward may be gone before.

An operation may fill a tensor after it has saved it, so the forward is repeated to its end; and samples of
its output are compared with those of the first run before anything of it is used.

To be ready for it takes 0.3 % of a step on a CPU, with layers of width 512 on 512 tokens, in fp32 on AVX2:
about 0.6 ms for each run of one.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from tba_offload.layers import untraced
from tba_offload.layers.nested import TooManyError
from tba_offload.recompute.trial import Arguments, Watched, refuse_unpack

if TYPE_CHECKING:
    from torch import Tensor

    from tba_offload.recompute.observation import Observation


class Rescue(Watched):
    """One execution of a layer that can be repeated if a drive loses what it saved.

    The hold of an argument keeps no memory; an argument of which there is no such hold has ``None`` for one.

    Args:
        arguments: As of :class:`~tba_offload.recompute.trial.Watched`.
        samples_only: Compare samples of the output only: what is made has to match its checksum as well.
        options: As of :class:`~tba_offload.recompute.trial.Watched`.
    """

    def __init__(self, *arguments: Any, samples_only: bool, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._samples_only = samples_only

    def __call__(self, /, *args: Any, **kwargs: Any) -> object:
        """Run the layer as it would run without this."""
        try:
            observed = self._verifier.observe(self._mode, args, kwargs)
        except TooManyError:
            return self._forward(*args, **kwargs)
        output = self._forward(*args, **kwargs)
        found = observed.found
        if observed.change(args, kwargs) is None and found.unknown is None and found.are_static():
            self._keep(observed, output, Arguments(args, kwargs, self._hold))
        return output

    def _keep(self, observed: Observation, output: object, arguments: Arguments) -> None:
        """Keep what a second run needs, if that takes no memory."""
        if not arguments.keep_no_memory():
            return
        with contextlib.suppress(TooManyError):  # what cannot be compared cannot be used
            observed.note_output(output, samples_only=self._samples_only)
        if observed.is_compared:
            self._observed, self._arguments = observed, arguments

    def saved(self, number: int, lost: object) -> Tensor | None:
        """Return what the layer saved, made by a second run of it.

        Args:
            number: Which of the tensors that it saved, from 1.
            lost: The record of that tensor; an argument that lies in it is lost as well.

        Returns:
            The tensor; ``None`` if a second run is not possible, or gives anything else than the first.
        """
        observed, arguments = self._observed, self._arguments
        if observed is None or arguments is None or arguments.lie_in(lost):
            return None
        if not self._verifier.may_rescue(self._mode):
            return None
        try:
            given = arguments.again(self._fetch)
            return None if given is None else self._repeat(observed, number, *given)
        except Exception:  # noqa: BLE001 - arguments may be lost too, and the layer's code may fail: then
            return None  # the caller raises the error of the drive, which is what went wrong

    def _repeat(
        self, observed: Observation, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        wanted = _Wanted(number)
        with (
            self._autocast(),
            torch.enable_grad(),
            saved_tensors_hooks(wanted.pack, refuse_unpack),
            observed.found.undoing(),
        ):
            output = observed.repeat(self._forward, args, kwargs)
        return wanted.tensor if observed.is_output(output) else None


class _Wanted:
    """Keeps one of the tensors that a layer saves, and drops the others."""

    def __init__(self, number: int) -> None:
        self.tensor: Tensor | None = None
        self._number = number
        self._count = 0

    @untraced.hook
    def pack(self, tensor: Tensor) -> None:
        self._count += 1
        if self._count == self._number:
            self.tensor = tensor.detach()
