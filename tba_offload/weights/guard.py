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
from tba_offload.torch_private import factories, not_traced, references_to, tree_leaves, without_subclasses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tba_offload.weights.pieces import Part

_TENSOR: Any = torch.Tensor  # its descriptors are missing in the type stubs
_LAYOUT = {_TENSOR.stride, _TENSOR.is_contiguous, _TENSOR.storage_offset}
_TRAIN = {_TENSOR.requires_grad_, _TENSOR.requires_grad.__set__}
_IS_COMPATIBLE = factories._has_compatible_shallow_copy_type
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
                f"the frozen weight {weight.name} was used outside of its layer, and read from the store in "
                f"{1000 * seconds:.1f} ms. Each such use of a frozen weight reads the weight again"
            )


class FrozenWeight:
    """A frozen weight: a parameter, and the tensors with its bytes.

    Call all methods under the lock, and without torch functions of subclasses.

    Args:
        name: Name of the weight in its model.
        tensors: The parameter, and all other tensors that it consists of.
        parts: The storages with its bytes.
        loans: The weights that are used outside of their layers.
    """

    def __init__(
        self, name: str, tensors: Sequence[torch.Tensor], parts: Sequence[Part], loans: Loans
    ) -> None:
        self.name, self.parameter, self.parts, self.loans = name, tensors[0], parts, loans
        self._tensors = [(tensor, type(tensor)) for tensor in tensors]
        self._readers, self._is_open = 0, False
        self._references: list[int] = []
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
        for part in self.parts:
            part.read()
        self._set_classes(is_open=True)

    def shut(self) -> None:
        """End the use by the layer. The bytes stay in memory.

        Raises:
            TransferError: The values cannot be written.
        """
        self._set_classes(is_open=False)
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

    def come_back(self) -> None:
        """Bring the bytes back at the end of offloading. May be called twice.

        Raises:
            TransferError: The bytes cannot be read.
        """
        for part in self.parts:
            part.come_back()
        self._set_classes(is_open=True)
        for tensor, _ in self._tensors:
            vars(tensor).pop("_tba_offload_weight", None)

    # ---- outside of the layer --------------------------------------------------------------------

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Return a context manager in which the weight is in memory and has its own class.

        Afterwards free the memory again, unless a result of the use still needs it.

        Raises:
            TransferError: The weight cannot be read, or its new values cannot be written.
        """
        loans = self.loans
        self._readers += 1
        try:
            with loans.lock, without_subclasses():
                loans.reclaim()
                began = time.perf_counter()
                if self not in loans.lent:
                    self._references = [references_to(tensor) for tensor, _ in self._tensors]
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
        """Free the memory of uses outside of the layer, unless it is still needed.

        If its data has another shape, data type or device now, the weight stays in memory.

        Raises:
            TransferError: The new values cannot be written.
        """
        if self._readers:
            return
        self.loans.lent.add(self)
        found = [references_to(tensor) for tensor, _ in self._tensors]
        own, self._references = self._references, []  # autograd may free what it held before this use
        if any(part.is_used for part in self.parts) or found != (own or [_ALONE] * len(found)):
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

    def layout_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the layout that a tensor has in memory."""
        pairs = (pair for part in self.parts for pair in zip(part.tensors, part.here, strict=True))
        return next((here for own, here in pairs if own is tensor), tensor)

    def _set_classes(self, *, is_open: bool | None = None) -> None:
        self._is_open = self._is_open if is_open is None else is_open
        for tensor, kind in self._tensors:
            tensor.__class__ = kind if self._is_open or self._readers else _guarded(kind)
