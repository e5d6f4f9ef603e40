"""Comparison of the two runs of a recomputed layer by digests of the tensors that the layer saves.

Hooks inside the hooks of the checkpoint see each tensor that the layer saves, in both runs. Only a 64-bit
digest of the first run is kept. At the end of the second run, the digests are compared on the device.
Backward gets the tensors of the second run only after this comparison. The result of the comparison is one
flag, which is read before the optimizer's step.

In the first three steps of a layer in each mode and placement, every saved tensor is read. Later steps read
the last tensor and one eighth of the other tensors: see :meth:`Verifier.part`.
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
"""Number of steps at the start of each mode in which every saved tensor is read."""

_PARTS = 8
"""Number of parts of the saved tensors. After :data:`_WHOLE_STEPS` steps, each step reads one part."""

OTHER = "its second run gave other numbers than the first"

Static = Mapping[int, tuple[str, weakref.ref[torch.UntypedStorage]]]
"""Storages that are compared by version: a map from their addresses to the names of the tensors and weak
references to the storages."""


def cannot(layer: str, cause: str, kind: type[TbaError] = RecomputationError) -> TbaError:
    """Return the error of a layer that cannot be recomputed."""
    return kind(f"{layer} cannot be recomputed: {cause}. Set its placement to 'keep' or 'offload'.")


def other_numbers(layer: str) -> TbaError:
    """Return the error of a layer whose second run gave other numbers."""
    return cannot(
        layer,
        f"{OTHER}. The layer depends on state that changed between the two runs, such as a counter, a global "
        "variable or a random generator of its own. Do not use the gradients of this step. With states.when "
        "'backward', later layers are already updated: load a checkpoint. If the layer uses the weight of a "
        "later layer, set states.when to 'step'",
    )


def modified(what: str) -> SavedTensorModifiedError:
    """Return the error of a tensor that was changed before backward had used it."""
    return SavedTensorModifiedError(
        f"{what} was changed in place after forward and before backward had used it. Change a copy instead"
    )


class Verifier:
    """The results of the comparisons of one session.

    A comparison is computed on the device. The result of a comparison is read before the next step of any
    optimizer, or at once on a CPU.

    Args:
        report: Called with a message about layers that ``auto`` does not recompute.

    Attributes:
        failed: Classes of layers that ``auto`` does not recompute, because a trial has failed.
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
        """Report why a layer of this class is left to its framework's checkpointing, once for each class."""
        if kind not in self._left:
            self._left.add(kind)
            cause = str(fault).partition(". ")[0]  # without the remedy
            self.report(f"{cause}. The framework's own checkpointing recomputes layers of this class instead")

    def add(self, name: str, differs: torch.Tensor, leave: Callable[[TbaError], bool] | None = None) -> None:
        """Add the result of a comparison.

        Args:
            name: Name of the layer or tensor in errors.
            differs: A boolean tensor of one element: whether the second run gave other bytes.
            leave: Takes the error. Returns True if it is not raised.

        Raises:
            RecomputationError: The second run gave other bytes, and the device is a CPU.
        """
        self._open.append((name, differs, leave))
        if differs.device.type == "cpu":
            self.check()

    def part(self, mode: Hashable) -> int | None:
        """Return the index of the part (one eighth) of a layer's tensors to read; ``None`` for all tensors.

        The first three steps of a mode read all tensors. Each later step reads one of eight parts, so that
        eight steps of the layer read every byte. All micro-batches of a step read the same part.

        Args:
            mode: The layer, and all settings that may change its choice of kernels.
        """
        last, count = self._steps.get(mode, (-1, -1))
        if last != self._step:
            count += 1
            self._steps[mode] = self._step, count
        return None if count < _WHOLE_STEPS else count % _PARTS

    def end_step(self) -> None:
        """Check all results at the end of a step.

        Raises:
            RecomputationError: A second run gave other numbers than the first.
        """
        self.check()
        self._step += 1

    def check(self) -> None:
        """Check all new results. If there are new results, wait for the device.

        Raises:
            RecomputationError: A second run gave other numbers than the first.
        """
        found = [self._open.popleft() for _ in range(len(self._open))]
        wrong = {name: leave for name, differs, leave in found if differs.item()}
        if raised := [name for name, leave in wrong.items() if not (leave and leave(other_numbers(name)))]:
            raise other_numbers(", ".join(raised))


class SavedTensors:
    """The tensors that one run of a layer saves for backward.

    A saved tensor is held until the next tensor is saved.

    A kernel may write to a tensor without a graph after it was saved, such as the noise of ``rrelu`` or the
    statistics of attention. Tensors without a graph are therefore read when the next operation saves a
    tensor.

    Args:
        layer: The name of the layer.
        static: Storages that are compared by version: parameters and large buffers.
        part: Index of the part (one eighth) of the tensors that is read; ``None`` for all tensors.
        always: Index of one more tensor that is always read.

    Attributes:
        forms: For each tensor, the properties that must be equal in both runs. The last property of a
            parameter or a large buffer is its version.
        numbers: The digest for each device, after the end of the run.
        last: Index of the last tensor that depends on the layer's computation.
        fills_last: Whether the last operation may still write to a tensor that it has saved.
    """

    def __init__(self, layer: str, static: Static, part: int | None, always: int) -> None:
        self.forms: list[tuple[Any, ...]] = []
        self.numbers: dict[torch.device, torch.Tensor] = {}
        self.last, self.fills_last = -1, False
        self._layer, self._static, self._part, self._always = layer, static, part, always
        self._waiting: list[torch.Tensor] = []
        self._node = -1

    def add(self, tensor: torch.Tensor) -> int:
        """Record a saved tensor; return its index.

        Raises:
            UnsupportedError: The bytes of this kind of tensor cannot be compared.
        """
        if latest_node() != self._node:
            self._read(self._waiting)
            self._waiting, self._node, self.fills_last = [], latest_node(), False
        try:
            parts = list(digest.plain_parts(tensor))
            names = [self._name_of(part.untyped_storage()) for part in parts]
        except (TypeError, NotImplementedError) as error:  # wrappers of transforms raise the second error
            reason = f"it saves {error}, whose bytes cannot be compared"
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
    """Return True for a tensor without a graph whose memory a kernel allocates but may leave unfilled.

    Examples are workspaces of recurrent networks, and random seeds of attention without dropout. A difference
    between the runs is still found, because the outputs of the kernels are compared too.
    """
    is_workspace = tensor.dtype is torch.uint8 and tensor.dim() == 1
    return is_workspace or (tensor.numel() <= 2 and tensor.dtype in {torch.int64, torch.uint64})
