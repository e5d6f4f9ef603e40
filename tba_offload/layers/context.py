"""What the calling thread has set around a layer: context variables and function modes.

Backward comes to the layer outside of the block that set them, and on an accelerator in another thread.
"""

from __future__ import annotations

import contextlib
import contextvars
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_C: Any = torch._C


class Context:
    """What is set where this is made; modes of ``torch.device`` as a block are among it."""

    __slots__ = ("_modes", "_variables")

    def __init__(self) -> None:
        self._variables = contextvars.copy_context()
        self._modes = _modes()

    def run(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> object:
        """Run a function in this, on any thread; what it sets itself is gone afterwards."""
        with _within(self._modes):
            return self._variables.copy().run(function, *args, **kwargs)


def _modes() -> list[object]:
    return [_C._get_function_stack_at(place) for place in range(_C._len_torch_function_stack())]


@contextlib.contextmanager
def _within(wanted: Sequence[object]) -> Iterator[None]:
    before = _modes()
    try:
        _put(wanted)
        yield
    finally:
        _put(before)


def _put(modes: Sequence[object]) -> None:
    for _ in range(_C._len_torch_function_stack()):
        _C._pop_torch_function_stack()
    for mode in modes:
        _C._push_on_torch_function_stack(mode)
