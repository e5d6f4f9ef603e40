"""How large the runs of layers are: those that a plan was made for, and those of the step that runs.

What a layer saves grows with the shapes that it is given, and not in proportion to their bytes alone:
attention scores grow with the square of the length. So a run is within another one only if none of its
dimensions is larger, nor the number of runs of the layer that wait for their backward. Nor may there be more
gradients where they leave less to activations, or gradients of more parameters: a plan counts on those that
come later to be not there yet.
"""

from __future__ import annotations

from collections import defaultdict
from operator import le
from typing import TYPE_CHECKING, NamedTuple

from tba_offload.plan.tuning import TUNING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tba_offload.plan.tuning import Tuning

RunSize = tuple[int, ...]
"""Runs of a layer that wait for their backward, this one included; where gradients take room from what it
saves, their bytes, see :func:`rough_bytes`, and how many parameters get some; all dimensions of tensors."""


class StepSize(NamedTuple):
    """How large a step was, beside what the plan in force was made for.

    Attributes:
        has_grown: A run was larger.
        is_largest: Of all that plans must hold for, nothing is missing in this step.
        is_full: The layers that ran were given as much as that; others may have been skipped.
        is_large: Its layers were given nearly as many bytes.
        is_mixed: It has grown after layers had run as planned for less.
        is_new: What was planned for was forgotten, or there was nothing yet.
    """

    has_grown: bool = False
    is_largest: bool = True
    is_full: bool = True
    is_large: bool = True
    is_mixed: bool = False
    is_new: bool = False


class Sizes:
    """The sizes of a session's steps; plans must hold for the largest of them.

    Args:
        tuning: Says what is large, and when it is forgotten.
    """

    def __init__(self, tuning: Tuning = TUNING) -> None:
        self._tuning = tuning
        self._planned: dict[int, list[RunSize]] = {}
        self._planned_bytes = 0
        self._seen: defaultdict[int, set[RunSize]] = defaultdict(set)
        self._has_grown = False
        self._is_mixed = False
        self._small_steps = 0
        self._missed: dict[int, int] = {}  # steps since as many runs of a layer waited as were planned for

    def begin_step(self) -> None:
        """Forget the runs of the last step, which may have failed."""
        self._seen.clear()
        self._has_grown = self._is_mixed = False

    def note(self, layer: int, size: RunSize) -> bool:
        """Note that a layer is going to run; tell whether all of this step is as was planned for so far."""
        seen = self._seen[layer]
        if size not in seen:
            if not self._has_grown and not _is_within(size, self._planned.get(layer, ())):
                self._has_grown = True
                self._is_mixed = any(self._seen.values())
            seen.add(size)
        return not self._has_grown

    def end_step(self, nbytes: int) -> StepSize:
        """Tell how large a step was, and count with it.

        Args:
            nbytes: Most bytes that its layers were given.
        """
        is_largest = _all_within(self._planned, self._seen)
        found = StepSize(
            self._has_grown,
            is_largest,
            is_full=is_largest or self._is_full(),
            is_large=nbytes >= self._tuning.large * self._planned_bytes,
            is_mixed=self._is_mixed,
            is_new=not self._planned,
        )
        if self._has_grown:
            for layer, seen in self._seen.items():
                self._planned[layer] = _largest([*self._planned.get(layer, ()), *seen])
        self._planned_bytes = nbytes if is_largest else max(nbytes, self._planned_bytes)
        self._small_steps = 0 if found.is_large else self._small_steps + 1
        self._missed = {
            layer: self._missed.get(layer, 0) + 1
            for layer, sizes in self._planned.items()
            if _most_waiting(self._seen.get(layer, ())) < _most_waiting(sizes)
        }
        if max(self._small_steps, *self._missed.values(), 0) >= self._tuning.forgotten_after:
            self._planned.clear()
            self._missed.clear()
            self._small_steps = self._planned_bytes = 0
        return found

    def _is_full(self) -> bool:
        """Whether nothing but layers is missing: of those that ran, some was given each of their sizes."""
        seen = set().union(*self._seen.values())
        planned = (size for layer in self._seen for size in self._planned.get(layer, ()))
        return all(_is_within(size, seen) for size in planned)


def rough_bytes(nbytes: int) -> int:
    """Bytes rounded up to five binary digits: what differs less from one step to the next is the same."""
    coarse = max(nbytes.bit_length() - 5, 0)
    return -(-nbytes >> coarse) << coarse


def _all_within(some: Mapping[int, Iterable[RunSize]], others: Mapping[int, Iterable[RunSize]]) -> bool:
    return all(_is_within(size, others.get(layer, ())) for layer, sizes in some.items() for size in sizes)


def _most_waiting(sizes: Iterable[RunSize]) -> int:
    return max((size[0] for size in sizes), default=0)


def _is_within(size: RunSize, others: Iterable[RunSize]) -> bool:
    return any(len(size) == len(other) and all(map(le, size, other)) for other in others)


def _largest(sizes: Iterable[RunSize]) -> list[RunSize]:
    """Those that are within no other one."""
    kept: list[RunSize] = []
    for size in sorted(set(sizes), reverse=True):  # what a size is within comes before it
        if not _is_within(size, kept):
            kept.append(size)
    return kept
