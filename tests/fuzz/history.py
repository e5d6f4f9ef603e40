"""What a training has computed, by its bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator


class Bits(NamedTuple):
    """A tensor that no tensor keeps."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: bytes

    def __str__(self) -> str:
        found = torch.frombuffer(bytearray(self.data), dtype=torch.uint8) if self.data else torch.tensor([])
        values = found.view(self.dtype).reshape(self.shape) if self.data else found
        return f"{tuple(self.shape)} {values.flatten()[:4].tolist()}"


@dataclass(frozen=True)
class Failure:
    """An error that ended a training."""

    where: str
    kind: type[BaseException]
    message: str
    trace: str

    def __str__(self) -> str:
        return f"{self.kind.__name__} in {self.where}: {self.message}"


class History:
    """What was noted, in order, and the first error."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, Any]] = []
        self.failed: Failure | None = None
        self.failed_closing: Failure | None = None

    def note(self, what: str, value: Any) -> None:
        self.notes.append((what, bits_of(value) if isinstance(value, Tensor) else value))

    def note_tree(self, what: str, tree: Any) -> None:
        for path, leaf in leaves(tree):
            self.note(f"{what} {path}", leaf)

    def fail(self, where: str, kind: type[BaseException], message: str, trace: str) -> None:
        failure = Failure(where, kind, message, trace)
        if self.failed is None:
            self.failed = failure
        else:
            self.failed_closing = failure

    def first_difference(self, other: History) -> str | None:
        """Where it differs from another one, as far as both go."""
        for (what, value), (other_what, other_value) in zip(self.notes, other.notes, strict=False):
            if what != other_what:
                return f"{what} in place of {other_what}"
            if value != other_value:
                return f"{what}: {value} in place of {other_value}"
        return None


def leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from ((f"{key}.{path}", leaf) for path, leaf in leaves(value))
    elif isinstance(tree, list | tuple):
        yield from leaves(dict(enumerate(tree)))
    else:
        yield "", tree


def bits_of(tensor: Tensor) -> Any:
    found = tensor.detach()
    if found.is_sparse:
        found = found.coalesce()
        return bits_of(found.indices()), bits_of(found.values())
    found = found.contiguous().reshape(-1)
    data = found.view(torch.uint8).numpy().tobytes() if found.numel() else b""
    return Bits(tensor.dtype, tuple(tensor.shape), data)
