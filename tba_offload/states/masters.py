"""Master copies: what an optimizer updates in place of parameters in low precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tba_offload.errors import UnsupportedError
from tba_offload.states.away import AwayMaster
from tba_offload.states.layout import travels
from tba_offload.states.pieces import parameters_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tba_offload.states.own_step import Entry
    from tba_offload.states.pieces import Piece

MASTER = "tba_offload.master"
"""Name of a master copy among the states of its own: no optimizer has one of that name."""


class Masters:
    """The master copies that one optimizer updates, and what gets their values after each update.

    Between updates a master has no bytes, and is the same object. An update gets a tensor over the bytes in a
    slot in its place.

    Args:
        optimizer: The optimizer.
        copies: Masters, and the parameters of the model, or parts of them, that are set to their values.

    Raises:
        UnsupportedError: A parameter has another shape than its master, or one of them is not contiguous.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        copies: Mapping[torch.Tensor, torch.Tensor],
    ) -> None:
        self._names: dict[torch.Tensor, str] = {}
        own = set(parameters_of(optimizer))
        self._copies = {
            master: copy for master, copy in copies.items() if master in own and travels_as(master)
        }
        for master, copy in self._copies.items():
            if master.shape != copy.shape or master.is_contiguous() != copy.is_contiguous():
                raise UnsupportedError(
                    f"a master of {tuple(master.shape)} does not lie in memory like its parameter of "
                    f"{tuple(copy.shape)}; set states.masters to keep"
                )

    def __contains__(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter of the optimizer is a master that travels."""
        return parameter in self._copies

    def can_be_cut(self, parameter: torch.Tensor) -> bool:
        """Whether slices of what a parameter is copied to, if it is a master, are views of that."""
        return parameter not in self._copies or self._copies[parameter].is_contiguous()

    def with_states(self, parameter: torch.Tensor, entry: Entry) -> Entry:
        """States of a parameter, and the master where it is one, as a plain tensor unless it is away."""
        return {**entry, MASTER: parameter.detach()} if parameter in self._copies else dict(entry)

    def tensor(self, piece: Piece, bound: torch.Tensor | None) -> torch.Tensor:
        """Return what an update gets as a piece: the bytes in a slot, if it belongs to a master."""
        if bound is None:
            return piece.tensor()
        for name, value in vars(piece.parameter).items():  # an optimizer may know a parameter by them
            setattr(bound, name, value)
        bound.grad = piece.gradient()
        return bound

    def copy(self, piece: Piece, value: torch.Tensor) -> None:
        """Set the parameter of the model to its master, which was updated."""
        self.model_part(piece).copy_(value)

    def model_part(self, piece: Piece) -> torch.Tensor:
        """Return what an update of a piece changes of the model.

        What a master is a copy of, else the piece.
        """
        return piece.own(self._copies.get(piece.parameter, piece.parameter))

    def send_away(self, master: torch.Tensor, name: str | None = None) -> None:
        """Free the memory of a master.

        Args:
            master: The master, whose bytes lie in a slot or at home.
            name: What messages call it; as before, unless it is given.
        """
        if name is not None:
            self._names[master] = name
        if type(master) is not AwayMaster:
            AwayMaster.begin(master, self._names[master])

    def bring_back(self, master: torch.Tensor) -> None:
        """Record that it is in memory, with the bytes of :meth:`fill`, or with undefined ones."""
        if type(master) is AwayMaster:
            AwayMaster.end(master)

    def fill(self, piece: Piece, value: torch.Tensor) -> None:
        """Set the bytes of a piece of a master, which counts as away until :meth:`bring_back`."""
        if type(piece.parameter) is AwayMaster:
            AwayMaster.allocate(piece.parameter)
        with torch._C.DisableTorchFunctionSubclass():
            piece.own(piece.parameter).copy_(value)


def travels_as(master: torch.Tensor) -> bool:
    """Whether a tensor that is in memory can be away as a master."""
    return travels(master.detach(), master)
