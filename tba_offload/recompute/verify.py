"""Comparison of the two runs of a layer: everything they save for backward, byte for byte by digests.

Hooks stand inside those of the checkpoint. They see each tensor that the layer saves, in both runs. Of the
first run one digest of 64 bits is held. When the second run has ended, and before backward gets any tensor of
it, the digests are compared on the device. The outcome is one flag a run, read before the optimizer's step.

Every byte is read in the first three steps of a layer in each mode and placement, afterwards an eighth of
each tensor, another one in each step: see :meth:`Verifier.part`.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Hashable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import CheckpointError, _StopRecomputationError

from tba_offload.errors import RecomputationError, SavedTensorModifiedError, TbaError, warn
from tba_offload.layers.graph import latest_node, untraced
from tba_offload.recompute import digest

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

_WHOLE_STEPS = 3
"""Steps of a layer in one mode in which every byte is compared."""

turn = threading.RLock()
"""Held by the thread that runs a layer a second time: generators are set for that, for all threads."""


_OTHER = "its second run gave other numbers"
_hooks_on_top: Any = torch._C._autograd._top_saved_tensors_default_hooks

Static = Mapping[int, tuple[str, weakref.ref[torch.UntypedStorage]]]
"""Names of storages that are compared by version: by address, which says nothing once they are freed."""


def cannot(layer: str, cause: str, kind: type[TbaError] = RecomputationError) -> TbaError:
    """Return the error of a layer that cannot be recomputed."""
    return kind(f"{layer} cannot be recomputed: {cause}. Place it keep or offload.")


def other_numbers(layer: str) -> TbaError:
    """Return the error of a layer whose second run gave other numbers."""
    return cannot(
        layer,
        f"{_OTHER} than the first, because it depends on something that changed in between (a counter, a "
        "global, a generator of its own; with states.when: backward the weight of a later layer, which needs "
        "states.when: step). Do not use the gradients of this step; with states.when: backward the layers "
        "after this one are updated already, so load a checkpoint",
    )


def modified(what: str) -> SavedTensorModifiedError:
    """Return the error of a tensor that was changed before backward had used it."""
    return SavedTensorModifiedError(
        f"{what} was changed in place after forward and before backward had used it. Change a copy instead, "
        "or place the layer keep or offload."
    )


class Verifier:
    """Outcomes of the comparisons of one session, and which layers ``auto`` may recompute.

    A comparison is computed on the device. Its outcome is read before the next step of any optimizer, and at
    once on a CPU, where nothing has to be waited for.

    Args:
        kinds: The classes of the layers by their names, in order.
        report: Takes a sentence about layers that ``auto`` leaves alone.

    Attributes:
        faults: What is wrong with second runs of a layer, by its name and its mode; ``None`` if nothing is.
    """

    def __init__(
        self, kinds: Mapping[str, type] | None = None, report: Callable[[str], object] = warn
    ) -> None:
        self.faults: dict[tuple[str, tuple[bool, ...]], str | None] = {}
        self._kinds, self._report = dict(kinds or {}), report
        self._failed: set[type | None] = set()
        self._reported: set[type | None] = set()
        self._open: deque[tuple[str, torch.Tensor]] = deque()
        self._step, self._compared = 0, dict[Hashable, tuple[int, int]]()
        own = weakref.ref(self)  # the hook is global, and must not keep a session alive

        def check(*_: object) -> None:
            verifier = own()
            if verifier is not None:
                verifier.check()

        self._handle = register_optimizer_step_pre_hook(check)
        weakref.finalize(self, self._handle.remove)

    def add(self, name: str, differs: torch.Tensor) -> None:
        """Note an outcome.

        Args:
            name: What errors call what was computed again.
            differs: A boolean of one element: whether the second run gave other bytes.

        Raises:
            RecomputationError: It did, as is known at once on a CPU.
        """
        self._open.append((name, differs))
        if differs.device.type == "cpu":
            self.check()

    def part(self, mode: Hashable) -> int | None:
        """Return which part of each tensor both runs of a layer read; ``None`` means every byte.

        Every byte is read until three steps were compared. Then the eight parts take turns, so that eight
        steps of the layer read every byte.

        Args:
            mode: The layer, and all that may have its kernels compute otherwise.
        """
        step, count = self._compared.get(mode, (-1, 0))
        before = count - (step == self._step)  # micro-batches of a step read the same part
        return None if before < _WHOLE_STEPS else before % digest.PARTS

    def compared(self, mode: Hashable) -> None:
        """Note that both runs of a layer were compared in this step."""
        step, count = self._compared.get(mode, (-1, 0))
        if step != self._step:
            self._compared[mode] = self._step, count + 1

    def end_step(self) -> None:
        """Check all outcomes of a step, which ends.

        Raises:
            RecomputationError: A second run gave other numbers than the first.
        """
        self.check()
        self._step += 1

    def check(self) -> None:
        """Check all outcomes since the last time; waits for the device if there are some.

        Raises:
            RecomputationError: A second run gave other numbers than the first.
        """
        found = [self._open.popleft() for _ in range(len(self._open))]
        wrong = list(dict.fromkeys(name for name, differs in found if differs.item()))
        for name in wrong:
            self.withdraw(name)
        if wrong:
            raise other_numbers(", ".join(wrong))

    def judge(self, name: str, training: tuple[bool, ...], fault: Exception | None) -> None:
        """Note what a trial of a layer has found; one fault is enough, and is reported once for a class."""
        kind = self._kinds.get(name)
        if fault is None:
            self.faults.setdefault((name, training), None)
            return
        self.faults[name, training] = str(fault)
        if kind not in self._reported:
            self._reported.add(kind)
            sentence = f"{name}, and layers like it, are not recomputed by the planner: "
            if _OTHER in str(fault):
                warn(
                    f"{sentence}{_OTHER} than the first. If its forward keeps state of its own (a counter, a "
                    "global), that has moved on once more than in plain training. Place it keep or offload, "
                    "and it runs once.",
                    RuntimeWarning,
                )
            else:
                self._report(f"{sentence}{fault}")

    def withdraw(self, name: str) -> None:
        """Have ``auto`` recompute no layer of this class from now on: a second run of one has failed."""
        self._failed.add(self._kinds.get(name))

    def may_repeat(self, name: str, training: tuple[bool, ...]) -> bool:
        """Return True if a trial of the layer in this mode found nothing, and none of its class failed."""
        return self.faults.get((name, training), "") is None and self._kinds.get(name) not in self._failed

    def may_plan(self, index: int) -> bool:
        """Return True if trials of a layer in all modes that it ran in found nothing."""
        name = list(self._kinds)[index]
        modes = [training for layer, training in self.faults if layer == name]
        return bool(modes) and all(self.may_repeat(name, training) for training in modes)

    def close(self) -> None:
        """Take the hook off."""
        self._handle.remove()


class _Run:
    """The saved tensors of one run.

    A kernel may fill a tensor after it was saved (the noise of ``rrelu``, statistics of attention). Only
    tensors without a graph can be such. They are read when the next operation saves something.

    Args:
        static: Names of storages that are compared by version.
        part: Which part of each tensor is read, or all of it.

    Attributes:
        forms: Of each tensor: what must be equal in both runs beside digests; the last is the version of a
            parameter.
        numbers: The digests by device, when the run has ended.
        fills_last: Whether the last operation may fill a tensor after it has saved it.
    """

    def __init__(self, static: Static, part: int | None) -> None:
        self.forms: list[tuple[Any, ...]] = []
        self.numbers: dict[torch.device, torch.Tensor] = {}
        self.fills_last = False
        self._static, self._part = static, part
        self._waiting: list[torch.Tensor] = []
        self._seen: dict[object, weakref.ref[Any]] = {}
        self._node = -1

    def add(self, tensor: torch.Tensor) -> None:
        """Note a saved tensor.

        Raises:
            TypeError: The bytes of this kind of tensor cannot be read.
        """
        if latest_node() != self._node:
            self._read_waiting()
            self._node, self.fills_last = latest_node(), False
        parts = list(digest.plain_parts(tensor))
        names = [self._name_of(part.untyped_storage()) for part in parts]
        is_static = bool(parts) and None not in names
        form = (type(tensor), tensor.dtype, tensor.shape, names)
        self.forms.append((*form, tensor._version if is_static else None))
        if tensor.requires_grad and not is_static:
            for part in parts:
                self._read(part)
        elif not is_static:
            self.fills_last = True
            if not _may_be_unfilled(tensor):
                self._waiting += parts

    def _name_of(self, storage: torch.UntypedStorage) -> str | None:
        name, known = self._static.get(storage._cdata, (None, None))
        return name if known is not None and known() is storage else None

    def _read(self, tensor: torch.Tensor, *, is_repeated: bool = False) -> None:
        """Read a tensor; once, unless ``is_repeated``, if operations save it often."""
        storage = tensor.untyped_storage()
        place = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        key = (storage._cdata, tensor._version, *place)
        known = None if is_repeated else self._seen.get(key)
        if known is None or known() is None:
            if not is_repeated:
                self._seen[key] = weakref.ref(storage)
            sums, before = digest.fold(tensor, self._part), self.numbers.get(tensor.device)
            self.numbers[tensor.device] = sums if before is None else digest.chain(before, sums)

    def _read_waiting(self) -> None:
        for tensor in self._waiting:
            self._read(tensor, is_repeated=True)
        self._waiting.clear()

    def end(self) -> None:
        """Compute the digests when the run has ended."""
        self._read_waiting()
        self.numbers = {device: digest.mix(sums) for device, sums in self.numbers.items()}
        self._seen = {}


class _Ended(BaseException):
    """Carries the end of a second run past the layer's own code, which may catch all exceptions."""


class SavedTwice:
    """The saved tensors of both runs of one execution of a layer. Holds no tensor of theirs.

    Args:
        layer: The name of the layer.
        static: Names of storages that are compared by version: parameters and large buffers.
        part: Which part of each tensor both runs read; ``None`` is all of it.
        outcome: Takes a boolean of one element: whether the runs differ.

    Attributes:
        ended: Whether the first run has ended.
    """

    def __init__(
        self, layer: str, static: Static, part: int | None, outcome: Callable[[torch.Tensor], object]
    ) -> None:
        self._layer, self._outcome = layer, outcome
        self._first, self._new_run = _Run(static, part), partial(_Run, static, part)
        self._versions: list[int] = []
        self.ended = False

    def see(self, tensor: torch.Tensor) -> int:
        """Note a tensor that the first run saves; return its number.

        Raises:
            RecomputationError: The bytes of this kind of tensor cannot be compared.
        """
        self._add(self._first, tensor)
        return len(self._first.forms) - 1

    def end_first_run(self) -> None:
        """Compute the digests of the first run, which has ended."""
        self._first.end()
        self.ended = True

    @contextlib.contextmanager
    def first_run(self) -> Iterator[None]:
        """Return a block around the first run, inside the hooks of the checkpoint."""
        pack, unpack = _hooks_on_top(True)  # noqa: FBT003 - positional in C++

        @untraced
        def number(tensor: torch.Tensor) -> tuple[int, Any]:
            return self.see(tensor), pack(tensor)

        def check(numbered: tuple[int, Any]) -> torch.Tensor:
            number, packed = numbered
            try:
                with turn:
                    tensor: torch.Tensor = unpack(packed)  # the first call runs the layer a second time
            except CheckpointError as error:
                cause = str(error).partition("\nTip:")[0].removeprefix("torch.utils.checkpoint: ")
                raise cannot(self._layer, " ".join(cause.split())) from error
            except RuntimeError as error:
                if type(error) is RuntimeError and "modified by an inplace operation" in str(error):
                    raise modified(f"a tensor that {self._layer} is given") from error
                raise
            if tensor._version != self._versions[number]:
                raise modified(f"a tensor that {self._layer} saves")
            return tensor

        with saved_tensors_hooks(number, check):
            yield
        self.end_first_run()

    def run_again(
        self, forward: Callable[[], object], replaced: Container[int | None], *, drops: bool = False
    ) -> None:
        """Run the layer a second time, inside the hooks of the checkpoint, and compare what it saves.

        The checkpoint ends the run with the last tensor that is saved, by an error of its own. Where the
        kernel may fill that tensor only afterwards, the run goes on to the end of forward.

        Args:
            forward: Runs the layer.
            replaced: Addresses of the storages that buffers have during the run only.
            drops: Whether nothing is held of what the run saves.

        Raises:
            RecomputationError: The runs differ, or that cannot be seen.
            SavedTensorModifiedError: A parameter was changed in place.
        """
        pack, unpack = (_drop, _refuse) if drops else _hooks_on_top(True)  # noqa: FBT003
        second, versions, is_complete = self._new_run(), list[int](), False
        self._versions = versions

        @untraced
        def again(tensor: torch.Tensor) -> object:
            nonlocal is_complete
            self._add(second, tensor)
            if replaced and address_of(tensor) in replaced:
                tensor = tensor.detach()  # the buffer itself gets its own storage back
            versions.append(tensor._version)
            if not is_complete:
                try:
                    return pack(tensor)
                except _StopRecomputationError:
                    if not (self.ended and self._first.fills_last):
                        raise _Ended from None
                    is_complete = True
            return tensor.detach()

        try:
            with saved_tensors_hooks(again, unpack):
                forward()
        except _Ended:
            self._compare(second)
            raise _StopRecomputationError from None
        self._compare(second)

    def _add(self, run: _Run, tensor: torch.Tensor) -> None:
        try:
            run.add(tensor)
        except (TypeError, NotImplementedError) as error:  # the latter of wrappers of transforms
            raise cannot(self._layer, f"it saves {error}, whose bytes cannot be compared") from error

    def _compare(self, second: _Run) -> None:
        if not self.ended:
            return  # a run within the first one, whose forward goes backward
        first = self._first
        second.end()
        for one, other in zip(first.forms, second.forms, strict=False):
            if one != other and one[:-1] == other[:-1]:
                raise modified(f"{one[-2][0]} of {self._layer}")
        if first.forms != second.forms or first.numbers.keys() != second.numbers.keys():
            raise other_numbers(self._layer)
        for device, number in first.numbers.items():
            self._outcome(number != second.numbers[device])


def _may_be_unfilled(tensor: torch.Tensor) -> bool:
    """Return True for memory without a graph that kernels reserve and need not fill.

    Workspaces of recurrent networks, and seeds of attention that drops nothing: what such kernels put out,
    which they save too, tells of a difference.
    """
    is_workspace = tensor.dtype is torch.uint8 and tensor.dim() == 1
    return is_workspace or (tensor.numel() <= 2 and tensor.dtype in {torch.int64, torch.uint64})


def _drop(_: torch.Tensor) -> None:
    """Hold nothing of a saved tensor."""


def _refuse(_: None) -> torch.Tensor:
    raise RuntimeError("the layer asks for gradients in its forward")


def address_of(tensor: torch.Tensor) -> int | None:
    """Return the address of the storage of a tensor; ``None`` if its kind has none."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
