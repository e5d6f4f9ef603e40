"""Comparison of the two runs of a recomputed layer, by digests of the tensors that the layer saves.

Saved-tensor hooks see each tensor that the layer saves. Only a 64-bit digest of the first run is kept. At the
end of the second run, the two digests are compared on the device. The result is one flag, which is read
before the optimizer's step.

In the first three steps of a layer, and after a change of the placement or of the training flags, every saved
tensor is compared. Later steps compare the last tensor and one eighth of the other tensors. See
:meth:`Verifier.part`.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tba_offload.errors import RecomputationError, SavedTensorModifiedError, TbaError, UnsupportedError, warn
from tba_offload.recompute import digest
from tba_offload.torch_private import latest_node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_WHOLE_STEPS = 3
"""Number of first steps in which every saved tensor of a layer is compared, for each combination of training
flags and placement."""

_PARTS = 8
"""Number of later steps in which every saved tensor is compared once."""

OTHER = "the layer's second run gave other numbers than the first run"

Static = Mapping[int, tuple[str, weakref.ref[torch.UntypedStorage]]]
"""Storages whose versions are compared instead of their bytes. The address of each storage maps to the name
of the tensor and to a weak reference to the storage."""


def cannot(layer: str, cause: str, kind: type[TbaError] = RecomputationError) -> TbaError:
    """Return the error for a layer that cannot be recomputed.

    Args:
        layer: The name of the layer.
        cause: The reason, as a clause.
        kind: The class of the error.
    """
    return kind(f"{layer} cannot be recomputed: {cause}. Set the layer's placement to 'keep' or 'offload'.")


def other_numbers(layer: str) -> TbaError:
    """Return the error for a layer whose second run gave other numbers than the first."""
    return cannot(
        layer,
        f"{OTHER}. The layer uses state that changed between the two runs, such as a counter, a global "
        "variable or the layer's own random generator. Do not use the gradients of this step. With "
        "states.when 'backward', the optimizer has already updated later layers: load a checkpoint. If the "
        "layer uses the weight of a later layer, set states.when to 'step'",
    )


def modified(what: str) -> SavedTensorModifiedError:
    """Return the error for a tensor that was changed in place before backward used the tensor."""
    return SavedTensorModifiedError(
        f"{what} was changed in place before backward used the tensor. Change a copy instead"
    )


class Verifier:
    """The results of all comparisons in one session.

    On an accelerator, the result of a comparison is read before the next step of an optimizer. On a CPU, the
    result is read immediately.

    Args:
        report: Function that is called with a message if a class of layers cannot be recomputed.

    Attributes:
        failed: Classes of layers that ``auto`` does not recompute, because a test recomputation of one layer
            has failed.
        close: Function that removes the hook on optimizers.
    """

    def __init__(self, report: Callable[[str], object] = warn) -> None:
        self.report, self.failed, self._left = report, set[type](), set[type]()
        self._open: deque[tuple[str, torch.Tensor, Callable[[TbaError], bool] | None]] = deque()
        self._step, self._steps = 0, dict[Hashable, tuple[int, int]]()
        own = weakref.ref(self)  # the hook is global, and must not keep a session alive

        def check(*_: object) -> None:
            if (verifier := own()) is not None:
                verifier.check()

        self.close = weakref.finalize(self, register_optimizer_step_pre_hook(check).remove)

    def leave(self, kind: type, fault: TbaError) -> None:
        """Report why the framework recomputes layers of a class. Each class is reported once.

        Args:
            kind: The class of the layer.
            fault: The error that shows why tba-offload cannot recompute the layer.
        """
        if kind not in self._left:
            self._left.add(kind)
            cause = str(fault).partition(". ")[0]  # without the remedy
            self.report(f"{cause}. The framework's own checkpointing recomputes layers of this class instead")

    def add(self, name: str, differs: torch.Tensor, leave: Callable[[TbaError], bool] | None = None) -> None:
        """Add the result of a comparison.

        Args:
            name: Name of the layer or tensor in errors.
            differs: A boolean tensor with one element. True means that the two runs gave different bytes.
            leave: Function that takes the error, and returns True to suppress the error.

        Raises:
            RecomputationError: The two runs gave different bytes on a CPU. On an accelerator, :meth:`check`
                raises the error later.
        """
        self._open.append((name, differs, leave))
        if differs.device.type == "cpu":
            self.check()

    def part(self, mode: Hashable) -> int | None:
        """Return which eighth of a layer's saved tensors this step compares, from 0 to 7; ``None`` for all.

        All micro-batches of a step compare the same eighth.

        Args:
            mode: The layer, the training flags of its modules, and its placement.
        """
        last, count = self._steps.get(mode, (-1, -1))
        if last != self._step:
            count += 1
            self._steps[mode] = self._step, count
        return None if count < _WHOLE_STEPS else count % _PARTS

    def end_step(self) -> None:
        """Check the results of all comparisons, and end the step.

        Raises:
            RecomputationError: A second run gave other numbers than the first.
        """
        self.check()
        self._step += 1

    def check(self) -> None:
        """Wait for the results of all comparisons, and check the results.

        Raises:
            RecomputationError: A second run gave other numbers than the first.
        """
        found = [self._open.popleft() for _ in range(len(self._open))]
        wrong = {name: leave for name, differs, leave in found if differs.item()}
        if raised := [name for name, leave in wrong.items() if not (leave and leave(other_numbers(name)))]:
            raise other_numbers(", ".join(raised))


class SavedTensors:
    """The tensors that one run of a layer saves for backward.

    A kernel may still write to a saved tensor that does not require a gradient, such as the noise of
    ``rrelu``. This class reads the tensor later, when the next operation saves a tensor.

    Args:
        layer: The name of the layer.
        static: Storages of parameters and large buffers, whose versions are compared instead of their bytes.
        part: Which eighth of the tensors is compared, from 0 to 7; ``None`` for all tensors.
        always: Index of a tensor that is always compared.

    Attributes:
        forms: For each tensor, the properties that must be equal in both runs: class, dtype, shape, names of
            the storages in ``static``, and version. The version is ``None`` for a tensor outside ``static``.
        numbers: The digest of the tensors on each device. During the run, ``numbers`` has intermediate sums.
        last: Index of the last tensor that requires a gradient.
        fills_last: Whether the last operation may still write to a tensor that the operation has saved.
    """

    def __init__(self, layer: str, static: Static, part: int | None, always: int) -> None:
        self.forms: list[tuple[Any, ...]] = []
        self.numbers: dict[torch.device, torch.Tensor] = {}
        self.last, self.fills_last = -1, False
        self._layer, self._static, self._part, self._always = layer, static, part, always
        self._waiting: list[torch.Tensor] = []
        self._node = -1

    def add(self, tensor: torch.Tensor) -> int:
        """Record a saved tensor, and return its index.

        Raises:
            UnsupportedError: The bytes of this class of tensors cannot be compared.
        """
        if latest_node() != self._node:
            self._read(self._waiting)
            self._waiting, self._node, self.fills_last = [], latest_node(), False
        try:
            parts = list(digest.plain_parts(tensor))
            names = [self._name_of(part.untyped_storage()) for part in parts]
        except (TypeError, NotImplementedError) as error:  # wrappers of transforms raise the second error
            reason = f"the layer saves {error}, whose bytes cannot be compared"
            raise cannot(self._layer, reason, UnsupportedError) from error
        place, is_static = len(self.forms), bool(parts) and None not in names
        version = tensor._version if is_static else None
        self.forms.append((type(tensor), tensor.dtype, tensor.shape, names, version))
        if is_static:
            return place
        is_read = self._part in (None, place % _PARTS) or place == self._always
        if tensor.requires_grad:
            self.last = place
            self._read(parts if is_read else ())
        else:
            self.fills_last = True
            self._waiting += parts if is_read and not _may_be_unfilled(tensor) else ()
        return place

    def _name_of(self, storage: torch.UntypedStorage) -> str | None:
        name, known = self._static.get(storage._cdata, (None, None))
        return name if known is not None and known() is storage else None

    def _read(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            sums, before = digest.fold(tensor), self.numbers.get(tensor.device)
            self.numbers[tensor.device] = sums if before is None else digest.chain(before, sums)

    def end(self) -> None:
        """Compute the digests at the end of the run."""
        self._read(self._waiting)
        self._waiting = []
        self.numbers = {device: digest.mix(sums) for device, sums in self.numbers.items()}


def _may_be_unfilled(tensor: torch.Tensor) -> bool:
    """Return True for a tensor that a kernel allocates but may not fill, so that its bytes may be random.

    Examples are workspaces of recurrent networks, and random seeds of attention without dropout. The
    comparison still covers the outputs of the kernels.
    """
    is_workspace = tensor.dtype is torch.uint8 and tensor.dim() == 1
    return is_workspace or (tensor.numel() <= 2 and tensor.dtype in {torch.int64, torch.uint64})
