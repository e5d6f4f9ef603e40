"""Tensors without memory, for offloaded optimizer states, offloaded master copies and freed gradients."""

from __future__ import annotations

from typing import Any, NoReturn, Self, TypeGuard

import torch

from tba_offload.errors import StatesAwayError
from tba_offload.torch_private import factories, tree_leaves, without_subclasses

_TENSOR: Any = torch.Tensor  # its descriptors are missing in the type stubs
_KNOWN = (
    *(name for name in dir(torch.Tensor) if name.startswith("is_") and name != "is_nonzero"),
    *("shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "size", "stride", "numel", "dim"),
    *("nelement", "ndimension", "element_size", "storage_offset", "get_device", "requires_grad", "grad"),
    *("grad_fn", "retains_grad", "_version", "__len__"),
)
METADATA = {
    *(getattr(torch.Tensor, name) for name in _KNOWN),  # methods
    *(getattr(torch.Tensor, name).__get__ for name in _KNOWN),  # attributes
    *(factories.is_floating_point, factories.is_complex),
    *(_TENSOR.grad.__set__, _TENSOR.grad.__delete__),
}
"""Functions that read the metadata of a tensor, or that read and set its gradient."""

_HARMLESS = METADATA | {factories.zeros_like, factories.ones_like, factories.empty_like}
"""Functions that do not read the bytes of a tensor."""

_ALIASES = frozenset((_TENSOR.data.__get__, _TENSOR.detach))
"""Functions that return a tensor that shares the memory of their argument."""


class _Away(torch.Tensor):
    """A tensor with a size, strides, data type and device, but without bytes."""

    _allowed = _HARMLESS
    _error: str
    _tba_offload_name: str

    def refused(self, use: str) -> StatesAwayError:
        return StatesAwayError(self._error.format(name=self._tba_offload_name, use=use))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func not in cls._allowed:
            cls._refuse(func, types, args, kwargs)
        with without_subclasses():
            return func(*args, **(kwargs or {}))

    @classmethod
    def _refuse(cls, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> NoReturn:
        away = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, cls))
        raise away.refused(f"{func} was called with this tensor")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # untyped there
        return f"<{self._tba_offload_name}, offloaded: {tuple(self.shape)}, {self.dtype}>"


class AwayTensor(_Away):
    """Placeholder of an offloaded state.

    Code that reads only the metadata of states, such as the shape, works as before. A use of the bytes raises
    an error with a remedy.

    Args:
        size: Size of the state.
        stride: Strides of the state in elements.
        dtype: Data type of the state.
        device: Device of the state during an update.
        name: Name for messages, such as ``'exp_avg' of layers.0.weight``.
    """

    # Lightning's teardown calls these methods, which then return the tensor itself.
    _allowed = _HARMLESS | {_TENSOR.to, _TENSOR.cpu, _TENSOR.contiguous}
    _error = (
        "the optimizer state {name} is not in memory between updates: {use}. Read states with "
        "optimizer.state_dict() or OptimizerStates.read(parameter), or close the OptimizerStates first"
    )
    origin: tuple[torch.Tensor | None, str] = None, ""
    """The parameter of the state, and the name of the state."""

    @staticmethod
    def __new__(
        cls, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device, name: str
    ) -> Self:
        """Create a placeholder, as a wrapper subclass without storage."""
        made: Self = _TENSOR._make_wrapper_subclass(cls, size, strides=stride, dtype=dtype, device=device)
        made._tba_offload_name = name
        return made

    # Autograd and other C++ code call this method directly.
    __torch_dispatch__ = _Away._refuse  # type: ignore[assignment] # other types there

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Return no inner tensors, so that tools that call this method to count memory count no bytes."""
        return [], None


class FreedGradient(AwayTensor):
    """Placeholder of a gradient that was used for an update in backward and then freed."""

    _error = (
        "{name} was freed when backward updated the parameter: {use}. Call zero_grad() with "
        "set_to_none=True after each step. If gradient clipping, a gradient scaler or a second backward "
        "needs gradients, set states.when to 'step'"
    )


class AwayMaster(_Away):
    """Class of a master copy while its bytes are offloaded.

    The master copy stays the same object in ``optimizer.state``, in parameter groups and in the program. Only
    the class and the storage of the tensor change.
    """

    _allowed = _HARMLESS | _ALIASES
    _error = (
        "the {name} is not in memory between updates: {use}. Set states.masters to 'keep', or close the "
        "OptimizerStates first"
    )
    _tba_offload_class: type[torch.Tensor]

    @classmethod
    def begin(cls, master: torch.Tensor, name: str) -> None:
        """Free the memory of a master copy that owns its storage, and change its class to ``AwayMaster``.

        Args:
            master: The tensor.
            name: Name of the model parameter, for messages.
        """
        vars(master).update(_tba_offload_name=f"master copy of {name}", _tba_offload_class=type(master))
        storage = master.untyped_storage()
        master.__class__ = cls  # before the memory is freed
        storage.resize_(0)

    @classmethod
    def allocate(cls, master: torch.Tensor) -> None:
        """Allocate memory with undefined contents for a master copy, unless the copy already has memory."""
        with without_subclasses():
            storage = master.untyped_storage()
            if storage.nbytes() != master.nbytes:  # resizing to the same size would allocate and copy
                storage.resize_(master.nbytes)

    @classmethod
    def end(cls, master: torch.Tensor) -> None:
        """Restore the class of a master copy. If necessary, allocate memory with undefined contents."""
        cls.allocate(master)
        master.__class__ = vars(master)["_tba_offload_class"]
        del vars(master)["_tba_offload_name"], vars(master)["_tba_offload_class"]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """If the function returns an alias of a master copy, mark the alias as offloaded too."""
        made = super().__torch_function__(func, types, args, kwargs)
        if func in _ALIASES:
            vars(made).update(vars(args[0]))
            made.__class__ = cls
        return made


def stands_for(value: object, parameter: torch.Tensor, key: str) -> TypeGuard[AwayTensor]:
    """Return True if ``value`` is the placeholder of the state ``key`` of a parameter."""
    return type(value) is AwayTensor and value.origin[0] is parameter and value.origin[1] == key


def is_away(value: object) -> bool:
    """Return True for the placeholder of a state, and for an offloaded master copy."""
    return type(value) in (AwayTensor, AwayMaster)
