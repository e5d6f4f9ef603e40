"""What stands in an optimizer's ``state`` for a tensor whose bytes are away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch

from tba_offload.errors import StatesAwayError

if TYPE_CHECKING:
    from collections.abc import Sequence


class AwayTensor(torch.Tensor):
    """A tensor without memory: it tells size, strides, data type and device, and every use is an error.

    So an optimizer that is asked what its states are like answers as ever, and what would compute with their
    bytes, copy or save them ends with an error that says what to do instead.

    Args:
        size: That of the state.
        stride: Likewise, elements.
        dtype: Likewise.
        device: Where the state lies while it is updated.
        name: What it is, for messages: ``exp_avg of parameter 3``.
    """

    _name: str

    @staticmethod
    def __new__(
        cls,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        name: str,
    ) -> Self:
        """Makes one."""
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(size), strides=tuple(stride), dtype=dtype, device=device
        )
        made._name = name
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch declares what is switched off by default
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        """Raises: there is nothing to compute with."""
        values = [*args, *(kwargs or {}).values()]
        flat = [each for value in values for each in (value if isinstance(value, list | tuple) else [value])]
        away = next((each for each in flat if isinstance(each, AwayTensor)), None)
        used = cls if away is None else type(away)
        raise used._error(away._name if away is not None else "a state", f"{func} was called with it")

    @staticmethod
    def _error(name: str, use: str) -> StatesAwayError:
        return StatesAwayError(
            f"the optimizer state {name} is not in memory between updates, and {use}; read states with "
            "optimizer.state_dict() or OptimizerStates.read(parameter), or close the OptimizerStates first"
        )

    def numpy(self, **_: Any) -> NoReturn:
        """Raises, as every use does."""
        raise self._error(self._name, "numpy() was called")

    def data_ptr(self) -> NoReturn:
        """Likewise."""
        raise self._error(self._name, "data_ptr() was called")

    def tolist(self) -> NoReturn:
        """Likewise."""
        raise self._error(self._name, "tolist() was called")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise self._error(self._name, "it was pickled")

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise self._error(self._name, "it was copied")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # untyped there
        return f"<{self._name}, away: {tuple(self.shape)}, {self.dtype}>"


class FreedGradient(AwayTensor):
    """A gradient that was used in backward and is freed."""

    @staticmethod
    def _error(name: str, use: str) -> StatesAwayError:
        return StatesAwayError(
            f"{name} was used for an update in backward and freed, and {use}; what needs it, as clipping "
            "does, needs states.gradients: keep"
        )
