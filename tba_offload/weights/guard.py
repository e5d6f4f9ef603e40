"""Uses of frozen weights outside of their layer, while their bytes are in the store."""

from __future__ import annotations

import functools
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from tba_offload.errors import SessionError
from tba_offload.states.away import METADATA
from tba_offload.torch_private import not_traced, references_to, tree_leaves, without_subclasses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tba_offload.weights.pieces import Part

_TENSOR: Any = torch.Tensor  # its descriptors are missing in the type stubs
_LAYOUT = {_TENSOR.stride, _TENSOR.is_contiguous, _TENSOR.storage_offset}
_TRAIN = {_TENSOR.requires_grad_, _TENSOR.requires_grad.__set__}
_ALONE = references_to(torch.empty(0))


class Guard:
    """The class of a frozen weight outside of its layer, together with the weight's own class.

    The weight stays the same object. Only its class changes, so that all functions of PyTorch come here.
    Functions that need only metadata read no bytes. All other functions get the values from the store.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function. If the function needs the bytes, bring the weights into memory for it.

        Raises:
            SessionError: The weight would be trained, copied, or converted.
            TransferError: The weight cannot be read, or its new values cannot be written.
        """
        kwargs = kwargs or {}
        if func in METADATA:
            with without_subclasses():
                args = (_weight_of(args[0]).layout_of(args[0]), *args[1:]) if func in _LAYOUT else args
                return func(*args, **kwargs)
        found = (each for each in tree_leaves((args, kwargs)) if isinstance(each, Guard))
        weights = list({id(weight): weight for weight in map(_weight_of, found)}.values())
        for weight in weights:
            weight.check(func, args, kwargs)
        if func in _TRAIN:
            return args[0]  # it needs no gradient already
        with ExitStack() as stack:
            for weight in weights:
                stack.enter_context(weight.borrowed())
            if func is _TENSOR.data_ptr:  # the memory must stay while the program uses the address
                weights[0].loans.pointed.append(args[0].detach())
            return func(*args, **kwargs)

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


def _weight_of(tensor: Any) -> FrozenWeight:
    weight: FrozenWeight = vars(tensor)["_tba_offload_weight"]
    return weight


class Loans:
    """The weights that the program uses outside of their layers.

    Attributes:
        lock: The lock of all weights.
        lent: Weights in memory, because the program or autograd still uses them.
        pointed: Aliases of weights whose address the program has.
    """

    def __init__(self, tell: Callable[[str], object]) -> None:
        self.lock = threading.RLock()
        self.lent: set[FrozenWeight] = set()
        self.pointed: list[torch.Tensor] = []
        self._tell: Callable[[str], object] | None = tell

    def reclaim(self) -> None:
        """Free the memory of weights that are not used any longer. Write changed values first."""
        with self.lock:
            for weight in list(self.lent):
                weight.reclaim()

    def tell_once(self, weight: FrozenWeight, seconds: float) -> None:
        """Report the first use outside of a layer."""
        if self._tell is not None:
            self._tell(
                f"the frozen weight {weight.name} was used outside of its layer, and read from the store in "
                f"{1000 * seconds:.1f} ms. Each such use of a frozen weight reads the weight again"
            )
            self._tell = None


class FrozenWeight:
    """A frozen weight: a parameter, and the tensors with its bytes.

    Args:
        name: Name of the weight in its model.
        parameter: The parameter.
        parts: The tensors with its bytes. For a plain parameter, this is the parameter itself.
        loans: The weights that are used outside of their layers.
    """

    def __init__(self, name: str, parameter: torch.Tensor, parts: Sequence[Part], loans: Loans) -> None:
        self.name, self.parameter, self.parts, self.loans = name, parameter, parts, loans
        self._tensors = list(
            {id(each): each for each in (parameter, *(part.tensor for part in parts))}.values()
        )
        self._kinds = list(map(type, self._tensors))
        self._readers, self._is_open = 0, False
        self._references = [_ALONE] * len(self._tensors)
        self.nbytes = sum(part.nbytes for part in parts)

    @property
    def is_back(self) -> bool:
        """Whether offloading has ended and the bytes are in memory."""
        return all(part.is_back for part in self.parts)

    def write(self) -> None:
        """Write the bytes for the first time and free their memory.

        Raises:
            TransferError: The bytes cannot be written. They stay in memory.
        """
        for tensor in self._tensors:
            vars(tensor)["_tba_offload_weight"] = self
        for part in self.parts:
            part.write()
        self._is_open = False
        self._set_classes()

    def begin_read(self) -> None:
        """Start to read the bytes, unless they are in memory or are being read."""
        for part in self.parts:
            part.begin_read()

    def read(self) -> None:
        """Bring the bytes into memory for the layer.

        Raises:
            TransferError: The bytes cannot be read.
        """
        with without_subclasses():
            for part in self.parts:
                part.read()
        self._is_open = True
        self._set_classes()

    def shut(self) -> None:
        """End the use by the layer. The bytes stay in memory.

        Raises:
            SessionError: The layer replaced the data by a tensor of another shape, data type or device.
            TransferError: The values cannot be written.
        """
        self._is_open = False
        self._set_classes()
        with without_subclasses():
            adopted = [part.adopt() for part in self.parts]
            if any(adopted):
                self.reclaim()

    def leave(self) -> None:
        """Free the memory. If the layer changed the values, write them first.

        Raises:
            SessionError: The layer replaced the data by a tensor of another shape, data type or device.
            TransferError: The values cannot be written.
        """
        self.shut()
        with without_subclasses():
            for part in self.parts:
                part.leave()

    def come_back(self) -> None:
        """Bring the bytes back at the end of offloading.

        Raises:
            TransferError: The bytes cannot be read.
        """
        with without_subclasses():
            for part in self.parts:
                part.come_back()
        self._is_open = True
        self._set_classes()
        for tensor in self._tensors:
            vars(tensor).pop("_tba_offload_weight", None)

    # ---- outside of the layer --------------------------------------------------------------------

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Return a context manager in which the weight is in memory and has its own class.

        Afterwards free the memory again, unless a result of the use still needs it.

        Raises:
            TransferError: The weight cannot be read, or its new values cannot be written.
            SessionError: The data was replaced by a tensor of another shape, data type or device.
        """
        loans = self.loans
        self._readers += 1
        try:
            with loans.lock, without_subclasses():
                loans.reclaim()
                began = time.perf_counter()
                if self not in loans.lent:
                    self._references = list(map(references_to, self._tensors))
                for part in self.parts:
                    part.lend()
                loans.tell_once(self, time.perf_counter() - began)
                self._set_classes()
            yield
        finally:
            with loans.lock, without_subclasses():
                self._readers -= 1
                self._set_classes()
                self.reclaim()

    def reclaim(self) -> None:
        """Free the memory of uses outside of the layer, unless it is still needed."""
        if self._readers:
            return
        loans = self.loans
        loans.lent.add(self)
        with without_subclasses():
            counts = zip(map(references_to, self._tensors), self._references, strict=True)
            if any(part.is_used for part in self.parts) or any(found > own for found, own in counts):
                self._references = [_ALONE] * len(self._tensors)
                for part in self.parts:
                    part.watch()
                return
            for part in self.parts:
                part.reclaim()
        loans.lent.discard(self)

    def check(self, func: Any, args: Any, kwargs: Any) -> None:
        """Check that a function can run on the weight while the weight is offloaded.

        Raises:
            SessionError: The function would train the weight, or replace its data by a tensor of another
                shape, data type or device.
        """
        if func in _TRAIN and (args[1] if len(args) > 1 else kwargs.get("requires_grad", True)):
            raise SessionError(
                f"the frozen weight {self.name} cannot be trained while its values are in the store. Close "
                "the session first, change requires_grad, and attach again"
            )
        if func == _TENSOR.data.__set__:
            for part in self.parts:
                if part.tensor is args[0]:
                    part.check(args[1])

    def layout_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the layout that a tensor has in memory."""
        return next((part.here for part in self.parts if part.tensor is tensor), tensor)

    def _set_classes(self) -> None:
        is_own = self._is_open or self._readers
        for tensor, kind in zip(self._tensors, self._kinds, strict=True):
            tensor.__class__ = kind if is_own else _guarded(kind)
