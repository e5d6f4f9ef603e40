"""What autograd holds in place of a saved tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tba_offload.capture.identity import View, local_of, version_witness, viewed

if TYPE_CHECKING:
    from tba_offload.capture.trace import ActivationTrace
    from tba_offload.transfer.storage import Handle


class Kept:
    """A saved tensor that stays in memory.

    Attributes:
        tensor: The tensor, or a copy of the few elements that it needs of a large storage.
        witness: Shares the version counter of the saved tensor.
        version: What that counter said, for the check that hooks switch off in autograd.
        spread: If it is a copy: how the saved tensor looked at its storage.
        address: Where its first element lay.
    """

    __slots__ = ("address", "spread", "tensor", "version", "witness")

    def __init__(self, tensor: torch.Tensor) -> None:
        # A parameter has no graph that it could keep alive.
        alone = type(tensor) is torch.nn.Parameter and tensor.is_leaf
        self.tensor = self.witness = tensor if alone else tensor.detach()
        self.version = tensor._version
        self.spread: View | None = None
        self.address = 0

    def shrink(self, view: View) -> None:
        """Keep the elements of a small view without keeping the large storage that it looks at."""
        whole = local_of(self.tensor)
        few = viewed(whole.untyped_storage(), view.distinct())
        self.witness = version_witness(self.tensor)
        self.tensor = few.clone(memory_format=torch.contiguous_format)
        self.spread = view
        self.address = whole.data_ptr()


class Packed:
    """A saved tensor whose bytes are with a record.

    Attributes:
        handle: Its share of the record; replaced if the view is gathered at the end of its scope.
        view: What to rebuild from the record's bytes.
        spread: If the bytes were gathered: the view of the original storage to spread them into again.
        address: Where the first element lay.
    """

    __slots__ = (
        "__weakref__",
        "address",
        "handle",
        "spread",
        "trace",
        "version",
        "view",
        "witness",
    )

    def __init__(
        self,
        tensor: torch.Tensor,
        view: View,
        handle: Handle,
        witness: torch.Tensor,
        trace: ActivationTrace,
    ) -> None:
        self.handle = handle
        self.view = view
        self.witness = witness
        self.version = tensor._version
        self.trace = trace
        self.spread: View | None = None
        local = tensor if type(tensor) is torch.Tensor else local_of(tensor)
        self.address = local.data_ptr()
