"""The class of a frozen weight while the bytes of the weight are in the store."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any, NoReturn

import torch

from tba_offload import torch_private
from tba_offload.errors import SessionError
from tba_offload.states.away import METADATA

_TENSOR: Any = torch.Tensor  # its descriptors are missing in the type stubs
_OF_ITSELF = {_TENSOR.data.__set__, _TENSOR.set_, _TENSOR.resize_, _TENSOR.resize_as_}
TRAIN = {_TENSOR.requires_grad_, _TENSOR.requires_grad.__set__}
_PLAIN = {torch.Tensor, torch.nn.Parameter}
_NO_WEIGHT = "this alias of an offloaded frozen weight has no bytes. Use weight.detach() to get an alias"


class Guard:
    """A base class of frozen weights outside of their layers. The other base is the weight's original class.

    Offloading changes the class of a weight, so that functions of PyTorch call ``__torch_function__``. The
    weight stays the same object. Functions that need only metadata read no bytes. For all other functions,
    the values are read from the store.
    """

    tba_offload_weight: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, with the weights in memory if the function needs their bytes.

        Raises:
            SessionError: The function would convert the weight.
            TransferError: The weight cannot be read, or its new values cannot be written.
        """
        if func not in METADATA:
            return _use(func, *args, **kwargs or {})
        with torch_private.without_subclasses(), torch_private.without_dispatch():
            return func(*args, **kwargs or {})

    def _refuse(self, *_: object) -> NoReturn:
        raise SessionError(
            f"the frozen weight {self.tba_offload_weight.name} cannot be copied or pickled while its values "
            "are in the store. Close the session first, or copy model.state_dict()"
        )

    __deepcopy__ = __copy__ = __reduce_ex__ = _refuse


def _use(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a function of frozen weights that needs their bytes."""
    found = [each for each in torch_private.tree_leaves((args, kwargs)) if isinstance(each, Guard)]
    if not found:
        raise SessionError(_NO_WEIGHT)
    weights = list(dict.fromkeys(each.tba_offload_weight for each in found))
    for weight in weights:
        weight.check(func, args, kwargs)
    if func in TRAIN:
        with torch_private.without_subclasses():
            return func(*args, **kwargs)
    with ExitStack() as stack:
        views = [weight for weight in weights if stack.enter_context(weight.in_use(func, args, kwargs))]
        if func is _TENSOR.data_ptr:  # the memory must stay while the program uses the address
            weights[0].loans.pointed.append(args[0].detach())
        result = _with_aliases(func, args, kwargs, [] if func in _OF_ITSELF else found)
        return views[0].guard(result) if views else result


torch_private.not_traced(Guard.__torch_function__.__func__, nor_what_it_calls=True)  # type: ignore[attr-defined]
torch_private.call_for_unreadable(_use)  # for functions that ignore classes, such as torch.tensor()


@functools.cache
def guarded(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    """Return a subclass of :class:`Guard` and ``kind``.

    The subclass has the name of ``kind``, because libraries compare the names of classes.
    """
    names: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    if kind not in _PLAIN and not hasattr(kind, "__tensor_flatten__"):
        names["to"] = _to
    metaclass: Any = type(kind)
    return metaclass(kind.__name__, (Guard, kind), names)  # type: ignore[no-any-return]


def _to(weight: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the weight itself if ``to`` would change nothing.

    The method ``to`` of bitsandbytes also moves the scales, and creates a new parameter from the bytes.

    Raises:
        SessionError: ``to`` would change the data type or the device.
    """
    like = torch.empty((), dtype=weight.dtype, device=weight.device)
    if (made := like.to(*args, **kwargs)) is not like:
        weight.tba_offload_weight.check(_TENSOR.data.__set__, (weight, made.expand(weight.shape)), {})
    return weight


def _with_aliases(func: Any, args: Any, kwargs: Any, found: list[Any]) -> Any:
    """Run a function with aliases of weights, because autograd and hooks may keep the arguments."""
    aliases = {id(each): each.detach() for each in found if type(each) in _PLAIN}
    args, kwargs = torch_private.tree_map(lambda value: aliases.get(id(value), value), (args, kwargs))
    result = func(*args, **kwargs)
    return next((each for each in found if aliases.get(id(each), aliases) is result), result)
