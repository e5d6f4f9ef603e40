"""A frozen weight, which decides when its bytes are in memory and which functions may use the bytes."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from tba_offload.errors import SessionError
from tba_offload.torch_private import factories, is_transformed, without_subclasses
from tba_offload.weights.experts import experts_for
from tba_offload.weights.guard import TRAIN, guarded
from tba_offload.weights.pieces import Part

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from tba_offload.layers.frozen import Found
    from tba_offload.states.home import Homes

_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_PASSES, _NEARLY_ALL = 5, 4
"""An expert is read ahead if the expert ran in at least 4 of the last 5 forward passes. At most a fifth of
these reads is then useless."""

_IS_READ = "was read from the store for a use outside of its layer. Each such use reads the weight again"

Run: TypeAlias = "dict[FrozenWeight, set[int]]"
"""The weights of experts that one forward of a layer has used, with the indices of the used slices."""


class Loans:
    """The frozen weights that the program uses outside of their layers.

    Args:
        tell: Function that reports a message.

    Attributes:
        lock: The lock that guards all frozen weights of a session.
        lent: Weights that are in memory because the program or autograd may still use them.
        pointed: Tensors that keep the memory of weights whose ``data_ptr()`` the program has called.
    """

    def __init__(self, tell: Callable[[str], object]) -> None:
        self.lock, self._tell, self._told = threading.RLock(), tell, set[str]()
        self.lent, self.pointed = set[FrozenWeight](), list[torch.Tensor]()

    def tell(self, name: str, said: str) -> None:
        """Report a message about the weight ``name``, unless ``said`` was reported for another weight."""
        if said not in self._told:
            self._told.add(said)
            self._tell(f"the frozen weight {name} {said}")

    def reclaim(self) -> None:
        """Write changed values of weights that no tensor uses any more, then free the memory."""
        with self.lock, without_subclasses():
            for weight in list(self.lent):
                weight.reclaim()


class FrozenWeight:
    """A frozen weight: a parameter, and the storages with its bytes.

    Call all methods under the lock, and inside ``torch_private.without_subclasses()``.

    Args:
        found: The parameter, its tensors and its layer.
        homes: The store.
        loans: The frozen weights that the program uses outside of their layers.
        count: Function that is called with each change of the weight's memory, in bytes.

    Attributes:
        name: Name of the parameter in the model.
        layer: Index of the layer with the weight.
        parameter: The parameter.
        expert: The expert that has the weight; ``None`` if the weight belongs to no expert.
        slices: Indices of the experts in the parameter; ``range(1)`` if its slices are not experts.
        parts: The storages with the bytes of the weight.
        nbytes: Total size of the storages in bytes.
        is_open: Whether the layer is running.
        used: Indices of the slices that the current forward of the layer has used.
    """

    def __init__(self, found: Found, homes: Homes, loans: Loans, count: Callable[[int], object]) -> None:
        self.name, self.layer, self.parameter = found.name, found.layer, found.tensors[0]
        self.expert, self.slices, self.loans = found.expert, range(found.slices), loans
        self.parts = [Part(group, found, homes, count) for group in found.groups]
        self.nbytes = sum(part.nbytes for part in self.parts)
        self.used, self._views = set[int](), list[Any]()
        self.is_open, self._readers = False, 0
        self._ran: deque[bool] = deque(maxlen=_PASSES)
        self._tensors = [(tensor, type(tensor)) for tensor in found.tensors]
        # swap_tensors() would move the guard to another tensor, but refuses tensors with weak references.
        self._pins = list(map(weakref.ref, found.tensors))

    def __deepcopy__(self, _: object) -> FrozenWeight:
        return self  # in a layer, a copy of a tensor has the attributes of the tensor

    @property
    def is_back(self) -> bool:
        """Whether the weight is not offloaded, and its bytes are in memory."""
        return all(part.is_back for part in self.parts)

    def write(self) -> None:
        """Write the bytes for the first time and free their memory.

        Raises:
            TransferError: The bytes cannot be written, and stay in memory.
        """
        for tensor, _ in self._tensors:
            vars(tensor)["tba_offload_weight"] = self
        for part in self.parts:
            part.write()
        self.is_open = False
        self._set_classes()

    # ---- for the layer ---------------------------------------------------------------------------

    def begin_run(self) -> set[int]:
        """Begin a forward of the layer, and return a set to which the used slices are added later."""
        self._ran.append(bool(self.used))
        self.used = set()
        return self.used

    def begin_read(self, run: Run | None) -> None:
        """Start to read the bytes for a forward or backward of the layer, except bytes that are in memory.

        Args:
            run: The experts that the forward has used; ``None`` before a forward. Before a forward, the
                weights of an expert are read ahead only if the expert ran in most of the last forwards.
        """
        wanted: Collection[int] = self.slices
        if self.expert is not None:
            is_likely = len(self.slices) == 1 and sum(self._ran) >= _NEARLY_ALL
            wanted = range(is_likely) if run is None else run.get(self, ())
        for part in self.parts:
            part.begin_read(wanted)

    def open(self, run: Run | None) -> None:
        """Bring the bytes into memory for the layer. Before a forward, do not wait for weights of experts.

        Args:
            run: The experts that the forward has used; ``None`` before a forward.

        Raises:
            TransferError: The bytes cannot be read.
        """
        self.is_open = True
        if run is not None:
            self.used = run.get(self, set())
        if self.expert is None or self.used:
            self.read(self.slices if self.expert is None else self.used)
        self._set_classes()

    def read(self, wanted: Collection[int]) -> None:
        """Bring the slices ``wanted`` into memory.

        Raises:
            TransferError: The bytes cannot be read.
        """
        for part in self.parts:
            part.read(wanted)
        self.used.update(wanted)
        self._set_classes()

    def guard(self, view: torch.Tensor) -> torch.Tensor:
        """Change the class of a view of the parameter, so that a use of the view reads the needed experts."""
        vars(view)["tba_offload_weight"] = self
        view.__class__ = guarded(torch.Tensor)
        self._views.append(view)
        return view

    def shut(self) -> None:
        """End the forward or backward of the layer. The bytes stay in memory.

        Raises:
            TransferError: The layer has set ``parameter.data``, and the new values cannot be written.
        """
        self.is_open = False
        self._set_classes()
        while self._views:
            self._views.pop().__class__ = torch.Tensor
        for part in self.parts:
            part.adopt()
        self.reclaim()

    def leave(self) -> None:
        """Write the values if the layer changed the values, then free the memory.

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
        self.is_open, self.used = True, set(self.slices)
        self._set_classes()
        for tensor, _ in self._tensors:
            vars(tensor).pop("tba_offload_weight", None)

    # ---- outside of the layer --------------------------------------------------------------------

    @contextmanager
    def in_use(self, func: Any, args: Any, kwargs: Any) -> Iterator[bool]:
        """Return a context manager in which a function can use the bytes of the weight.

        While the layer runs, only the experts that the function needs are read. While the layer does not run,
        the whole weight is read into separate memory, and has its original class until the block ends. The
        separate memory is freed after the block, unless a result of the function still uses this memory.

        Yields:
            True if the function returns a view of a parameter with experts, and reads no bytes. The caller
            passes the view to :meth:`guard`.

        Raises:
            TransferError: The weight cannot be read, or its new values cannot be written.
        """
        loans, has_slices = self.loans, len(self.slices) > 1
        if self.is_open:
            wanted = experts_for(func, args, kwargs, self.slices) if has_slices else self.slices
            with loans.lock, without_subclasses():
                if self.expert is not None:  # else the layer has read the weight meanwhile, in another thread
                    self.read(wanted)
            with without_subclasses() if has_slices else nullcontext():
                yield not wanted
            return
        self._readers += 1
        try:
            with loans.lock, without_subclasses():
                loans.reclaim()
                for part in self.parts:
                    part.lend()
                self._set_classes()
                loans.tell(self.name, _IS_READ)
            yield False
        finally:
            with loans.lock, without_subclasses():
                self._readers -= 1
                self._set_classes()
                self.reclaim()

    def reclaim(self) -> None:
        """Free the separate memory for uses outside of the layer, unless other tensors still use this memory.

        The weight stays in memory if ``parameter.data`` was set to a tensor of another shape, data type or
        device, or if NumPy uses the memory of the layer.

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
        if said := "".join({part.stays for part in self.parts}):
            self._stay(said)
        for part in self.parts:
            part.reclaim()
        self.loans.lent.discard(self)

    def _stay(self, said: str) -> None:
        """Bring the bytes back, and keep them in memory until the session ends.

        Raises:
            TransferError: The bytes cannot be read.
        """
        self.come_back()
        self.parts, self._tensors = [], []
        self.loans.tell(self.name, f"stays in memory from now on: it {said}. Further weights are not named")

    def check(self, func: Any, args: Any, kwargs: Any) -> None:
        """Check that a function can run on the weight. If the function trains the weight, end its offloading.

        Raises:
            SessionError: The function would replace the data of the weight by a tensor of another shape, data
                type or device.
            TransferError: The weight cannot be read.
        """
        said = ""
        if func in TRAIN and (args[1] if len(args) > 1 else kwargs.get("requires_grad", True)):
            with self.loans.lock, without_subclasses():
                self.reclaim()
                self._stay("is trained")
        elif is_transformed():
            said = "cannot be used in a transform of torch.func while its values are in the store"
        elif func == _SET_DATA or func is factories._has_compatible_shallow_copy_type:  # nn.Module.to() asks
            said = "".join(part.unlike(args[1]) for part in self.parts if part.tensors[0] is args[0])
            if hasattr(args[0], "__tensor_flatten__"):
                said = "cannot be converted while its values are in the store"
        if said:
            raise SessionError(
                f"the frozen weight {self.name} {said}. Close the session first, change the model, and "
                "attach again"
            )

    def _set_classes(self) -> None:
        is_whole = (self.is_open and len(self.used) == len(self.slices)) or self._readers
        for tensor, kind in self._tensors:
            tensor.__class__ = kind if is_whole else guarded(kind)
