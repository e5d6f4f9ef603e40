"""Tensors without memory: an optimizer's state, a master copy or a gradient whose bytes are away."""

from __future__ import annotations

from typing import Any, NoReturn, Self, TypeGuard

import torch

from tba_offload.errors import StatesAwayError
from tba_offload.torch_private import factories, tree_leaves, without_subclasses

_TENSOR: Any = torch.Tensor  # attributes of which are descriptors, as the types do not know
_KNOWN = (
    *(name for name in dir(torch.Tensor) if name.startswith("is_")),
    *("shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "size", "stride", "numel", "dim"),
    *("nelement", "ndimension", "element_size", "storage_offset", "get_device", "requires_grad", "grad"),
    *("grad_fn", "retains_grad", "_version"),
)
_HARMLESS = {
    *(getattr(torch.Tensor, name) for name in _KNOWN),  # methods
    *(getattr(torch.Tensor, name).__get__ for name in _KNOWN),  # attributes
    *(factories.is_floating_point, factories.is_complex),
    *(factories.zeros_like, factories.ones_like, factories.empty_like),
    *(_TENSOR.grad.__set__, _TENSOR.grad.__delete__),
}
"""Functions that ask a tensor for what it knows without memory, or for its gradient, and give it one."""

_ALIASES = frozenset((_TENSOR.data.__get__, _TENSOR.detach))
"""Functions that give another tensor of the same memory."""


class _Away(torch.Tensor):
    """A tensor without bytes: size, strides, data type and device are known, and every other use is an error.

    Classes of it say which functions may be called with it, and the error of others.
    """

    _allowed = _HARMLESS
    _error: str
    _tba_offload_name: str

    def refused(self, use: str) -> StatesAwayError:
        """Return the error of a use of the bytes.

        Args:
            use: The clause that says what was done with them.
        """
        return StatesAwayError(self._error.format(name=self._tba_offload_name, use=use))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Answer what needs no bytes, and raise for everything else."""
        if func not in cls._allowed:
            cls._refuse(func, types, args, kwargs)
        with without_subclasses():
            return func(*args, **(kwargs or {}))

    @classmethod
    def _refuse(cls, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> NoReturn:
        away = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, cls))
        raise away.refused(f"{func} was called with it")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # untyped there
        return f"<{self._tba_offload_name}, away: {tuple(self.shape)}, {self.dtype}>"


class AwayTensor(_Away):
    """A state without memory.

    An optimizer that is asked what its states are like answers as ever. What would compute with their bytes,
    copy or save them, raises an error that says what to do instead.

    Args:
        size: That of the state.
        stride: Likewise, elements.
        dtype: Likewise.
        device: Where the state lies while it is updated.
        name: For messages: ``'exp_avg' of layers.0.weight``.
    """

    # As Lightning's teardown asks: they give the tensor itself, or are dispatched, and raise there.
    _allowed = _HARMLESS | {_TENSOR.to, _TENSOR.cpu, _TENSOR.contiguous}
    _error = (
        "the optimizer state {name} is not in memory between updates, and {use}; read states with "
        "optimizer.state_dict() or OptimizerStates.read(parameter), or close the OptimizerStates first"
    )
    origin: tuple[torch.Tensor | None, str] = None, ""
    """The parameter whose state it is, and the name of the state."""

    @staticmethod
    def __new__(
        cls, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device, name: str
    ) -> Self:
        """Make one."""
        made: Self = _TENSOR._make_wrapper_subclass(cls, size, strides=stride, dtype=dtype, device=device)
        made._tba_offload_name = name
        return made

    # Autograd and other code in C++ come here at once.
    __torch_dispatch__ = _Away._refuse  # type: ignore[assignment] # other types there

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Return no parts, so that what counts memory by this protocol finds none."""
        return [], None


class FreedGradient(AwayTensor):
    """A gradient that was used in backward and is freed."""

    _error = (
        "{name} is freed, since backward has updated the parameter with it, and {use}. Call zero_grad() "
        "with set_to_none=True after each step; where clipping, a gradient scaler or another pass needs "
        "gradients, set states.when to step"
    )


class AwayMaster(_Away):
    """The class of a master copy whose bytes are away.

    It is the same object as in memory: a key of ``optimizer.state``, a member of parameter groups, and what
    gradients are assigned to.
    """

    _allowed = _HARMLESS | _ALIASES
    _error = (
        "the {name} is not in memory between updates, and {use}; set states.masters to keep, or close the "
        "OptimizerStates first"
    )
    _tba_offload_class: type[torch.Tensor]

    @classmethod
    def begin(cls, master: torch.Tensor, name: str) -> None:
        """Take the bytes of a tensor, which owns its memory, away.

        Args:
            master: The tensor.
            name: The parameter that it is a master of, for messages.
        """
        vars(master).update(_tba_offload_name=f"master of {name}", _tba_offload_class=type(master))
        storage = master.untyped_storage()
        master.__class__ = cls  # before its memory goes
        storage.resize_(0)

    @classmethod
    def allocate(cls, master: torch.Tensor) -> None:
        """Give it memory, whose contents are undefined, unless it has some again."""
        with without_subclasses():
            storage = master.untyped_storage()
            if storage.nbytes() != master.nbytes:  # else it would be allocated anew, and copied
                storage.resize_(master.nbytes)

    @classmethod
    def end(cls, master: torch.Tensor) -> None:
        """Give it its class again, and memory, unless it has some."""
        cls.allocate(master)
        master.__class__ = vars(master)["_tba_offload_class"]
        del vars(master)["_tba_offload_name"], vars(master)["_tba_offload_class"]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Answer what needs no bytes, and raise for everything else."""
        made = super().__torch_function__(func, types, args, kwargs)
        if func in _ALIASES:
            vars(made).update(vars(args[0]))
            made.__class__ = cls
        return made


def stands_for(value: object, parameter: torch.Tensor, key: str) -> TypeGuard[AwayTensor]:
    """Return True if a value is what stands for a state of a parameter."""
    return type(value) is AwayTensor and value.origin[0] is parameter and value.origin[1] == key


def is_away(value: object) -> bool:
    """Return True for a state or a master copy whose bytes are away."""
    return type(value) in (AwayTensor, AwayMaster)
