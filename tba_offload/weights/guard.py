"""Uses of frozen weights outside of their layer, while their bytes are in the store."""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from collections import deque
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch

from tba_offload.errors import SessionError
from tba_offload.states.away import METADATA
from tba_offload.torch_private import (
    factories,
    is_transformed,
    not_traced,
    tree_leaves,
    tree_map,
    without_subclasses,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from torch import nn

    from tba_offload.weights.pieces import Part

_TENSOR: Any = torch.Tensor  # its descriptors are missing in the type stubs
_METADATA = METADATA - {_TENSOR.stride, _TENSOR.is_contiguous}  # the placeholder has other strides
_OF_ITSELF = {_TENSOR.data.__set__, _TENSOR.set_, _TENSOR.resize_, _TENSOR.resize_as_}
_TRAIN = {_TENSOR.requires_grad_, _TENSOR.requires_grad.__set__}
_IS_COMPATIBLE = factories._has_compatible_shallow_copy_type
_PASSES, _NEARLY_ALL = 5, 4
"""An expert that ran in 4 of the last 5 passes is read ahead. At most a fifth of these reads is wasted."""

Run: TypeAlias = "dict[FrozenWeight, set[int]]"
"""The slices of experts that a run of their layer has used."""

_NO_SLICES = ()
_PLAIN = {torch.Tensor, torch.nn.Parameter}


class Guard:
    """The class of a frozen weight outside of its layer, together with the weight's own class.

    The weight stays the same object. Only its class changes, so that all functions of PyTorch come here.
    Functions that need only metadata read no bytes. All other functions get the values from the store.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function. If the function needs the bytes, bring the weights into memory for it.

        Raises:
            SessionError: The weight would be trained or converted.
            TransferError: The weight cannot be read, or its new values cannot be written.
        """
        kwargs = kwargs or {}
        if func in _METADATA:
            with without_subclasses():
                return func(*args, **kwargs)
        found = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Guard)]
        weights = list(dict.fromkeys(map(_weight_of, found)))
        for weight in weights:
            weight.check(func, args, kwargs)
        if func in _TRAIN:
            return args[0]  # it needs no gradient already
        with ExitStack() as stack:
            views = [weight for weight in weights if stack.enter_context(weight.in_use(func, args, kwargs))]
            if func is _TENSOR.data_ptr:  # the memory must stay while the program uses the address
                weights[0].loans.pointed.append(args[0].detach())
            result = _with_aliases(func, args, kwargs, () if func in _OF_ITSELF else found)
            return views[0].guard(result) if views else result

    def _refuse(self, *_: object) -> NoReturn:
        raise SessionError(
            f"the frozen weight {_weight_of(self).name} cannot be copied or pickled while its values are in "
            "the store. Close the session first, or copy model.state_dict()"
        )

    __deepcopy__ = __copy__ = __reduce_ex__ = _refuse


not_traced(Guard.__torch_function__.__func__, nor_what_it_calls=True)  # type: ignore[attr-defined]


@functools.cache
def _guarded(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    """Return the guarded class of a class. It has the same name, because libraries compare names."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    metaclass: Any = type(kind)
    return metaclass(kind.__name__, (Guard, kind), names)  # type: ignore[no-any-return]


def _with_aliases(func: Any, args: Any, kwargs: Any, found: Iterable[Any]) -> Any:
    """Run a function with aliases of weights, because autograd and its hooks keep what a function reads."""
    aliases = {id(each): each.detach() for each in found if type(each) in _PLAIN}
    args, kwargs = tree_map(lambda value: aliases.get(id(value), value), (args, kwargs))
    result = func(*args, **kwargs)
    return next((each for each in found if aliases.get(id(each), aliases) is result), result)


def _weight_of(tensor: Any) -> FrozenWeight:
    weight: FrozenWeight = vars(tensor)["_tba_offload_weight"]
    return weight


class Loans:
    """The weights that the program uses outside of their layers.

    Attributes:
        lock: The lock of all weights.
        lent: Weights in memory, because the program or autograd still uses them.
        pointed: Aliases of weights whose address the program has.
        tell: Called with a message.
    """

    def __init__(self, tell: Callable[[str], object]) -> None:
        self.lock, self.tell, self._has_told = threading.RLock(), tell, False
        self.lent: set[FrozenWeight] = set()
        self.pointed: list[torch.Tensor] = []

    def reclaim(self) -> None:
        """Free the memory of weights that are not used any longer. Write changed values first."""
        for weight in list(self.lent):
            weight.reclaim()

    def tell_once(self, weight: FrozenWeight, seconds: float) -> None:
        """Report the first use outside of a layer."""
        if not self._has_told:
            self._has_told = True
            self.tell(
                f"the frozen weight {weight.name} was used outside of its layer, so it was read from the "
                f"store ({1000 * seconds:.1f} ms). Each use outside of the layer reads the weight again"
            )


class FrozenWeight:
    """A frozen weight: a parameter, and the tensors with its bytes.

    Call all methods under the lock, and without torch functions of subclasses.

    Args:
        name: Name of the weight in its model.
        tensors: The parameter, and all other tensors that it consists of.
        parts: The storages with its bytes.
        loans: The weights that are used outside of their layers.
        expert: The expert with the weight, or the module that has all experts in one parameter; ``None`` if
            each run of the layer needs the whole weight.

    Attributes:
        slices: Number of experts in the parameter; otherwise 1.
        is_open: Whether the layer computes with the weight now.
        used: Slices that the current run of the layer has used.
    """

    def __init__(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        parts: Sequence[Part],
        loans: Loans,
        expert: nn.Module | None,
    ) -> None:
        self.name, self.parameter, self.parts, self.loans = name, tensors[0], parts, loans
        self.expert, self.slices = expert, parts[0].slices
        self.used: set[int] = set()
        self._ran: deque[bool] = deque(maxlen=_PASSES)
        self._tensors = [(tensor, type(tensor)) for tensor in tensors]
        self._pins = list(map(weakref.ref, tensors))  # swap_tensors() would move the guard to another tensor
        self._readers, self.is_open = 0, False
        self._views: list[Any] = []
        self.nbytes = sum(part.nbytes for part in parts)

    def __deepcopy__(self, _: object) -> FrozenWeight:
        return self  # in a layer, a copy of a tensor has the attributes of the tensor

    @property
    def is_back(self) -> bool:
        """Whether the weight is not offloaded, and its bytes are in memory."""
        return all(part.is_back for part in self.parts)

    def write(self) -> None:
        """Write the bytes for the first time and free their memory.

        Raises:
            TransferError: The bytes cannot be written. They stay in memory.
        """
        for tensor, _ in self._tensors:
            vars(tensor)["_tba_offload_weight"] = self
        for part in self.parts:
            part.write()
        self.is_open = False
        self._set_classes()

    # ---- for the layer ---------------------------------------------------------------------------

    def begin_run(self) -> set[int]:
        """Return a new set, to which slices are added when a run of the layer uses them."""
        self._ran.append(bool(self.used))
        self.used = set()
        return self.used

    def begin_read(self, run: Run | None) -> Iterable[int] | None:
        """Start to read bytes, unless they are in memory or are being read.

        Args:
            run: What a run of the layer has used, if its backward comes. Before a forward, an expert is read
                if it ran in nearly all recent passes.

        Returns:
            The slices; ``None`` for all.
        """
        wanted: Iterable[int] | None = None
        if self.expert is not None:
            is_likely = self.slices == 1 and sum(self._ran) >= _NEARLY_ALL
            wanted = range(is_likely) if run is None else run.get(self, ())
        for part in self.parts:
            part.begin_read(wanted)
        return wanted

    def open(self, run: Run | None) -> None:
        """Bring the bytes into memory for the layer. Experts are read when they run.

        Args:
            run: What a run of the layer has used, if its backward comes.

        Raises:
            TransferError: The bytes cannot be read.
        """
        self.is_open = True
        if self.expert is None:
            self.read()
        elif run is None:
            self._set_classes()
        else:
            self.used = run.get(self, set())
            self.read(self.used)

    def read(self, wanted: Iterable[int] | None = None) -> None:
        """Bring slices into memory; by default, all.

        Raises:
            TransferError: The bytes cannot be read.
        """
        for part in self.parts:
            part.read(wanted)
        self.used |= set(range(self.slices) if wanted is None else wanted)
        self._set_classes()

    def guard(self, view: torch.Tensor) -> torch.Tensor:
        """Return a view of all experts. Its uses read only the experts that they need, too."""
        vars(view)["_tba_offload_weight"] = self
        view.__class__ = _guarded(torch.Tensor)
        self._views.append(view)
        return view

    def shut(self) -> None:
        """End the use by the layer. The bytes stay in memory.

        Raises:
            TransferError: The values cannot be written.
        """
        self.is_open = False
        self._set_classes()
        while self._views:
            self._views.pop().__class__ = torch.Tensor
        if any([part.adopt() for part in self.parts]):  # noqa: C419 - of all parts
            self.reclaim()

    def leave(self) -> None:
        """Free the memory. If the layer changed the values, write them first.

        Raises:
            TransferError: The values cannot be written.
        """
        self.shut()
        for part in self.parts:
            part.leave()
        if self in self.loans.lent:
            self.reclaim()

    def come_back(self) -> None:
        """Bring the bytes back at the end of offloading. May be called twice.

        Raises:
            TransferError: The bytes cannot be read.
        """
        for part in self.parts:
            part.come_back()
        self.is_open, self.used = True, set(range(self.slices))
        self._set_classes()
        for tensor, _ in self._tensors:
            vars(tensor).pop("_tba_offload_weight", None)

    # ---- outside of the layer --------------------------------------------------------------------

    @contextmanager
    def in_use(self, func: Any, args: Any, kwargs: Any) -> Iterator[bool]:
        """Return a context manager for a function of a weight whose class is the guard.

        In their layer, the experts that the function needs are read. Outside of the layer, the whole weight
        is read into separate memory, and has its original class until the block ends. The separate memory is
        freed after the block, unless a result of the function still uses it.

        Yields:
            Whether the result is a view of all experts, which :meth:`guard` makes read them later.

        Raises:
            TransferError: The weight cannot be read, or its new values cannot be written.
        """
        loans = self.loans
        if self.is_open:
            wanted = None if self.slices == 1 else _slices_in(func, args, kwargs, self.slices)
            with loans.lock, without_subclasses():
                if self.expert is not None:  # else the layer has read the weight meanwhile, in another thread
                    self.read(wanted)
            with without_subclasses() if self.slices > 1 else nullcontext():
                yield wanted == _NO_SLICES
            return
        self._readers += 1
        try:
            with loans.lock, without_subclasses():
                loans.reclaim()
                began = time.perf_counter()
                for part in self.parts:
                    part.lend()
                loans.tell_once(self, time.perf_counter() - began)
                self._set_classes()
            yield False
        finally:
            with loans.lock, without_subclasses():
                self._readers -= 1
                self._set_classes()
                self.reclaim()

    def reclaim(self) -> None:
        """Free the memory of uses outside of the layer, unless it is still needed.

        If its data has another shape, data type or device now, the weight stays in memory.

        Raises:
            TransferError: The new values cannot be written.
        """
        if self._readers:
            return
        self.loans.lent.add(self)
        if self.is_open or any(part.is_used for part in self.parts):
            for part in self.parts:
                part.watch()
            return
        if said := "".join(part.unlike(part.tensors[0]) for part in self.parts if part.lent):
            self.come_back()
            self.parts, self._tensors = (), []
            self.loans.tell(f"the frozen weight {self.name} stays in memory from now on: it {said}")
        for part in self.parts:
            part.reclaim()
        self.loans.lent.discard(self)

    def check(self, func: Any, args: Any, kwargs: Any) -> None:
        """Check that a function can run on the weight while the weight is offloaded.

        Raises:
            SessionError: The function would train the weight, or replace its data by a tensor of another
                shape, data type or device.
        """
        said = ""
        if func in _TRAIN and (args[1] if len(args) > 1 else kwargs.get("requires_grad", True)):
            said = "cannot be trained while its values are in the store"
        elif is_transformed():
            said = "cannot be used in a transform of torch.func while its values are in the store"
        elif func == _TENSOR.data.__set__ or func is _IS_COMPATIBLE:  # nn.Module.to() asks this first
            parts = [part for part in self.parts if part.tensors[0] is args[0]]
            said = "".join(part.unlike(args[1]) for part in parts)
            if hasattr(args[0], "__tensor_flatten__"):
                said = "cannot be converted while its values are in the store"
        if said:
            raise SessionError(
                f"the frozen weight {self.name} {said}. Close the session first, change the model, and "
                "attach again"
            )

    def _set_classes(self) -> None:
        has_all = self.expert is None or len(self.used) == self.slices
        for tensor, kind in self._tensors:
            tensor.__class__ = kind if (self.is_open and has_all) or self._readers else _guarded(kind)


def numbers_in(value: Any, count: int) -> set[int] | None:
    """Return the numbers in a tensor of integers below ``count``; ``None`` if the value is something else."""
    if not isinstance(value, torch.Tensor) or value.dtype not in {torch.int32, torch.int64}:
        return None
    return {number for number in set(value.flatten().tolist()) if -count <= number < count}


def _slices_in(func: Any, args: Any, kwargs: Any, count: int) -> Collection[int] | None:
    """Return the experts that a function uses; ``None`` for all, and ``_NO_SLICES`` if it makes a view."""
    if func is _TENSOR.transpose and {dim % 3 for dim in args[1:]} == {1, 2}:
        return _NO_SLICES
    if func is _TENSOR.__getitem__:
        index = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
        found = {index} if type(index) is int else numbers_in(index, count)
        return None if found is None else {number % count for number in found}
    if "grouped_mm" in str(func) and numbers_in(ends := kwargs.get("offs"), sys.maxsize) is not None:
        rows = pairwise([0, *ends.tolist()])
        return [number for number, (start, end) in enumerate(rows) if start < end]
    return None
