"""Tensors without memory: an optimizer's state, a master copy or a gradient whose bytes are away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeGuard

import torch
from torch.utils._pytree import tree_leaves

from tba_offload.errors import StatesAwayError

if TYPE_CHECKING:
    from collections.abc import Sequence

_FACTS = (
    *("grad", "grad_fn", "requires_grad", "is_leaf", "shape", "dtype", "device", "layout", "ndim", "nbytes"),
    *("itemsize", "is_cuda", "is_cpu", "is_xpu", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized"),
    *("is_mkldnn", "is_nested", "_version", "retains_grad"),
)
_QUESTIONS = (
    *("size", "stride", "numel", "nelement", "dim", "ndimension", "element_size", "storage_offset"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_conj", "is_neg", "is_inference", "get_device"),
)
_TENSOR: Any = torch.Tensor  # attributes of which are descriptors, as the types do not know
_FACTORIES: Any = torch._C._VariableFunctions  # not torch itself, whose names a program may have replaced
_HARMLESS = frozenset(
    (
        *(getattr(torch.Tensor, name).__get__ for name in _FACTS),
        *(getattr(torch.Tensor, name) for name in _QUESTIONS),
        *(_FACTORIES.zeros_like, _FACTORIES.ones_like, _FACTORIES.empty_like),
        *(_FACTORIES.is_floating_point, _FACTORIES.is_complex),
        *(_TENSOR.grad.__set__, _TENSOR.grad.__delete__),
    )
)
"""Functions that ask a tensor for what it knows without memory, or for its gradient, and give it one."""

_ALIASES = frozenset((_TENSOR.data.__get__, _TENSOR.detach))
"""Functions that give another tensor of the same memory."""

_CONVERSIONS = frozenset((_TENSOR.to, _TENSOR.cpu, _TENSOR.contiguous))
"""Functions that give the tensor itself where there is nothing to convert, as Lightning's teardown asks."""


def _first(kind: type[torch.Tensor], *arguments: Any) -> Any:
    """Return the first argument of a class, also one in a list."""
    return next(each for each in tree_leaves(arguments) if isinstance(each, kind))


class AwayTensor(torch.Tensor):
    """A state without memory: size, strides, data type and device are known, and every use is an error.

    An optimizer that is asked what its states are like answers as ever. What would compute with their bytes,
    copy or save them, raises an error that says what to do instead.

    Args:
        size: That of the state.
        stride: Likewise, elements.
        dtype: Likewise.
        device: Where the state lies while it is updated.
        name: What it is, for messages: ``'exp_avg' of layers.0.weight``.
    """

    _name: str
    origin: tuple[torch.Tensor | None, str] = None, ""
    """The parameter whose state it is, and the name of the state."""

    @staticmethod
    def __new__(
        cls, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device, name: str
    ) -> Self:
        """Make one."""
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(size), strides=tuple(stride), dtype=dtype, device=device
        )
        made._name = name
        return made

    def refused(self, use: str) -> StatesAwayError:
        """Return the error of a use of it.

        Args:
            use: What was done.
        """
        return StatesAwayError(
            f"the optimizer state {self._name} is not in memory between updates, and {use}; read states with "
            "optimizer.state_dict() or OptimizerStates.read(parameter), or close the OptimizerStates first"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Answer what needs no bytes, and raise for everything else."""
        if func in _HARMLESS or func in _CONVERSIONS:  # one that converts is dispatched, and raises there
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch declares what is switched off by default
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        """Raise: there is nothing to compute with. Autograd and other code in C++ come here at once."""
        raise _first(AwayTensor, args, kwargs).refused(f"{func} was called with it")

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Return what it is made of: nothing, so that what counts memory by this protocol finds none."""
        return [], None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # untyped there
        return f"<{self._name}, away: {tuple(self.shape)}, {self.dtype}>"


class FreedGradient(AwayTensor):
    """A gradient that was used in backward and is freed."""

    @classmethod
    def like(cls, gradient: torch.Tensor, name: str) -> Self:
        """Return what stands for a gradient.

        Args:
            gradient: The gradient, dense or sparse.
            name: What messages call it.
        """
        dense = gradient if gradient.layout == torch.strided else torch.empty(gradient.shape, device="meta")
        return cls(gradient.shape, dense.stride(), gradient.dtype, gradient.device, name)

    def refused(self, use: str) -> StatesAwayError:
        """Return the error of a use of it."""
        return StatesAwayError(
            f"{self._name} is freed, since backward has updated the parameter with it, and {use}. Call "
            "zero_grad() after each step; where clipping, a gradient scaler or another pass needs gradients, "
            "set states.when to step"
        )


class AwayMaster(torch.Tensor):
    """The class of a master copy whose bytes are away.

    It is the same object as in memory: a key of ``optimizer.state``, a member of parameter groups, and what
    gradients are assigned to. It has no bytes, tells size, data type and device, and takes a gradient; every
    other use is an error.
    """

    _tba_offload_name: str
    _tba_offload_class: type[torch.Tensor]

    @classmethod
    def begin(cls, master: torch.Tensor, name: str) -> None:
        """Take the bytes of a tensor, which owns its memory, away.

        Args:
            master: The tensor.
            name: What it is, for messages.
        """
        vars(master).update(_tba_offload_name=name, _tba_offload_class=type(master))
        storage = master.untyped_storage()
        master.__class__ = cls  # before its memory goes
        storage.resize_(0)

    @classmethod
    def allocate(cls, master: torch.Tensor) -> None:
        """Give it memory, whose contents are undefined, unless it has some again."""
        nbytes = master.nbytes
        with torch._C.DisableTorchFunctionSubclass():
            storage = master.untyped_storage()
            if storage.nbytes() != nbytes:  # else it would be allocated anew, and copied
                storage.resize_(nbytes)

    @classmethod
    def end(cls, master: torch.Tensor) -> None:
        """Give it its class again, and memory, unless it has some."""
        cls.allocate(master)
        master.__class__ = vars(master)["_tba_offload_class"]
        del vars(master)["_tba_offload_name"], vars(master)["_tba_offload_class"]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Answer what needs no bytes, and raise for everything else."""
        if func in _HARMLESS or func in _ALIASES:
            with torch._C.DisableTorchFunctionSubclass():
                made = func(*args, **(kwargs or {}))
                if func in _ALIASES:
                    vars(made).update(_tba_offload_name=args[0]._tba_offload_name)
                    made.__class__ = cls
            return made
        raise StatesAwayError(
            f"the master of {_first(cls, args, kwargs)._tba_offload_name} is not in memory between updates, "
            f"and {func} was called with it; set states.masters to keep, or close the OptimizerStates first"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # untyped there
        return f"<master of {self._tba_offload_name}, away: {tuple(self.shape)}, {self.dtype}>"


def stands_for(value: object, parameter: torch.Tensor, key: str) -> TypeGuard[AwayTensor]:
    """Return True if a value is what stands for a state of a parameter."""
    return type(value) is AwayTensor and value.origin[0] is parameter and value.origin[1] == key


def is_away(value: object) -> bool:
    """Return True for a state or a master copy whose bytes are away."""
    return type(value) in (AwayTensor, AwayMaster)
