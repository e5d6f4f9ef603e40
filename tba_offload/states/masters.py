"""Master copies: what an optimizer updates in place of parameters in low precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tba_offload.errors import UnsupportedError
from tba_offload.states.away import AwayMaster
from tba_offload.states.pieces import parameters_of, travels

if TYPE_CHECKING:
    from collections.abc import Mapping

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

    def __init__(self, optimizer: torch.optim.Optimizer, copies: Mapping[torch.Tensor, torch.Tensor]) -> None:
        own = set(parameters_of(optimizer))
        self._copies = {master: copy for master, copy in copies.items() if master in own}
        self._copies = {each: copy for each, copy in self._copies.items() if travels(each.detach(), each)}
        self._names: dict[torch.Tensor, str] = {}
        for master, copy in self._copies.items():
            if master.shape != copy.shape or master.is_contiguous() != copy.is_contiguous():
                raise UnsupportedError(
                    f"a master of {tuple(master.shape)} does not lie in memory like its parameter of "
                    f"{tuple(copy.shape)}; set states.masters to keep"
                )

    def __contains__(self, parameter: torch.Tensor) -> bool:
        """Return True if a parameter of the optimizer is a master that travels."""
        return parameter in self._copies

    def copy_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the parameter of the model that a master is a copy of; any other parameter is itself."""
        return self._copies.get(parameter, parameter)

    def can_be_cut(self, parameter: torch.Tensor) -> bool:
        """Return True unless slices of the parameter of the model are copies, not views."""
        return parameter not in self._copies or self._copies[parameter].is_contiguous()

    def with_states(self, parameter: torch.Tensor, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return the states of a parameter, and the master where it is one, a plain tensor unless away."""
        return {**entry, MASTER: parameter.detach()} if parameter in self._copies else dict(entry)

    def tensor(self, piece: Piece, bound: torch.Tensor | None) -> torch.Tensor:
        """Return what an update gets as a piece: the bytes in a slot, if it belongs to a master."""
        if bound is None:
            return piece.tensor()
        for name, value in vars(piece.parameter).items():  # an optimizer may know a parameter by them
            setattr(bound, name, value)
        bound.grad = piece.gradient()
        return bound

    def model_part(self, piece: Piece) -> torch.Tensor:
        """Return the part of the model that an update of a piece changes."""
        return piece.own(self.copy_of(piece.parameter))

    def send_away(self, master: torch.Tensor, name: str | None = None) -> None:
        """Free the memory of a master.

        Args:
            master: The master, whose bytes lie in a slot or at home.
            name: What messages call it; as before, unless it is given.
        """
        name = self._names[master] = name or self._names[master]
        if type(master) is not AwayMaster:
            AwayMaster.begin(master, name)

    def bring_back(self, master: torch.Tensor) -> None:
        """Have a master in memory, with the bytes of :meth:`fill`, or with undefined ones."""
        if type(master) is AwayMaster:
            AwayMaster.end(master)

    def fill(self, piece: Piece, value: torch.Tensor) -> None:
        """Set the bytes of a piece of a master, which counts as away until :meth:`bring_back`."""
        if type(piece.parameter) is AwayMaster:
            AwayMaster.allocate(piece.parameter)
        with torch._C.DisableTorchFunctionSubclass():
            piece.own(piece.parameter).copy_(value)
