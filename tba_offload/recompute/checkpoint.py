"""Recomputation of a layer: PyTorch's checkpoint, and a check that the second run equals the first.

The layer runs in PyTorch's checkpoint, and hooks compute a digest of the tensors that the layer saves. The
state of the layer is inspected before and after its first run in each mode (:mod:`purity`). When backward
unpacks the first saved tensor, the layer runs again in hooks that compute a digest. At the end of the second
run, the digests of both runs are compared (:mod:`verify`).
"""

from __future__ import annotations

import sys
import threading
import weakref
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint

from tba_offload.device import has_peers
from tba_offload.errors import RecomputationError, TbaError, UnsupportedError, warn
from tba_offload.layers.graph import first_differentiable
from tba_offload.layers.nested import modules_in
from tba_offload.recompute.arguments import put_together, take_apart
from tba_offload.recompute.purity import SMALL, Look, Mode, in_force, put_back, state_kept, values_of
from tba_offload.recompute.verify import OTHER, SavedTensors, cannot, modified, other_numbers
from tba_offload.torch_private import hooks_on_top, untraced

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from torch import nn

    from tba_offload.layers.find import State
    from tba_offload.recompute.arguments import Arguments
    from tba_offload.recompute.verify import Verifier

_turn = threading.RLock()
"""The lock of second runs.

A second run sets the random generators of all threads, so only one thread at a time may run a layer again.
"""


class RecomputedLayer:
    """A layer whose forward can run again in backward.

    Args:
        site: The :class:`~tba_offload.capture.site.Site` of the layer. If the site has a checkpoint of a
            framework, this checkpoint runs the layer if the layer cannot be recomputed here.
        verifier: Collects the results of comparisons.
        states: Returns the states that second runs restore in addition to PyTorch's random generators.

    Attributes:
        name: Name of the layer in errors.
        is_left: Whether the layer cannot be recomputed, and was left to the checkpoint of a framework.
        modes: The :class:`Mode` of the layer, by the training flags of its modules.
        tried: Modes in which a :class:`Trial` has shown whether the layer can be recomputed.
        last_saved: Index of the last tensor that the layer saves. Most differences between two runs also
            change the last saved tensor.
    """

    def __init__(self, site: Any, verifier: Verifier, states: Callable[[], Sequence[State]]) -> None:
        self._site, self.verifier, self.states, self.is_left = site, verifier, states, False
        self.module: nn.Module = site.layer.module
        self.name = str(site.layer.id)
        self.modes: dict[tuple[bool, ...], Mode] = {}
        self.tried: set[tuple[bool, ...]] = set()
        self.last_saved = -1

    @property
    def training(self) -> tuple[bool, ...]:
        """The training flags of the layer's modules."""
        return tuple([inner.training for inner in modules_in(self.module)])

    def run(self, forward: Callable[..., Any], given: Arguments, placement: Hashable = None) -> Any:
        """Run the layer in a checkpoint.

        Raises:
            UnsupportedError: A second run would repeat a side effect, or would give other numbers.
        """
        if self._site.checkpoint is None and (reason := _why_never(self.module)) is not None:
            raise cannot(self.name, reason, UnsupportedError)
        mode = self.name, self.training, placement
        execution = _Execution(self, forward, given, self.verifier.part(mode))
        output = torch_checkpoint.checkpoint(execution, *execution.tensors, **_SETTINGS)
        if execution.errors:  # no variable for the error, because its frames refer to this frame
            if "saved tensor hooks" in str(execution.errors[0]):
                reason = f"its forward forbids saved-tensor hooks ({execution.errors[0]})"
                execution.errors[0] = cannot(self.name, reason, UnsupportedError)
            if execution.is_undone():
                return self._site.run_plainly(forward, *given)
            raise execution.errors.pop()
        return output

    def must_leave(self) -> bool:
        """Return True if the checkpoint of a framework runs the layer, because no other second run can."""
        if self._site.checkpoint is None:
            return False
        if not self.is_left and (reason := _why_never(self.module)) is not None:
            self.leave(cannot(self.name, reason, UnsupportedError))
        return self.is_left

    def leave(self, fault: BaseException) -> bool:
        """Leave the layer to the checkpoint of its framework. Return False if there is none."""
        if self._site.checkpoint is None or not isinstance(fault, UnsupportedError | RecomputationError):
            return False
        if not self.is_left:
            self.verifier.leave(type(self.module), fault)
        self.is_left = True
        return True

    @property
    def has_failed(self) -> bool:
        """Whether a trial of a layer of this class has failed."""
        return type(self.module) in self.verifier.failed

    @property
    def may_plan(self) -> bool:
        """Whether a trial of the layer has ended, and no trial of a layer of its class has failed."""
        return bool(self.tried) and not self.has_failed

    def may_try(self) -> bool:
        """Return True if the layer needs a :class:`Trial` in its present mode."""
        if self.has_failed or self.training in self.tried:
            return False
        if (reason := _why_never(self.module)) is None and has_hooks(self.module):
            reason = "the program has added hooks to its forward, and these hooks would run twice"
        if reason is not None:
            self.judge(self.training, cannot(self.name, reason, UnsupportedError))
        return reason is None

    def may_repeat(self) -> bool:
        """Return True if the planner may recompute the layer in its present mode."""
        return self.may_plan and self.training in self.tried and not has_hooks(self.module)

    def judge(self, training: tuple[bool, ...], fault: Exception | None) -> None:
        """Record the result of a trial. A fault applies to all layers of the class, and is reported once."""
        self.tried.add(training)
        if fault is None or self.has_failed:
            return
        self.verifier.failed.add(type(self.module))
        sentence = f"the planner does not recompute {self.name} and other layers of its class: {fault}"
        if OTHER in str(fault):
            warn(sentence, RuntimeWarning)  # the trial may have changed the state of the program
        else:
            self.verifier.report(sentence)


class _Execution:
    """The first run of a layer, and its second runs in backward. An execution holds no saved tensor.

    Args:
        layer: The layer.
        forward: Runs the layer.
        given: The layer's arguments.
        part: Index of the part (one eighth) of the saved tensors that is compared; ``None`` for all tensors.

    Attributes:
        training: The training flags of the layer's modules.
        tensors: The tensors among the arguments.
        errors: The error of the first run, if it failed.
    """

    def __init__(
        self, layer: RecomputedLayer, forward: Callable[..., Any], given: Arguments, part: int | None = None
    ) -> None:
        self._layer, self._forward, self.training = layer, forward, layer.training
        # Kept only until the first run, because the arguments hold the graph of all operations before the
        # layer.
        self._given, self.tensors = [given], list[torch.Tensor]()
        self.errors: list[BaseException] = []
        self._look, known = None, layer.modes.get(self.training)
        if known is None:
            self._look = Look(layer.module, given, layer.states())
            known = Mode(self._look.states, ())
        self._found = values_of(known.states)
        self._buffers = {name: layer.module.get_buffer(name).clone() for name in known.buffers}
        self._layout: Any = take_apart(given, self.tensors)
        self._generators = torch.get_rng_state(), *torch_checkpoint.get_device_states(*self.tensors)
        self._new_run = partial(SavedTensors, layer.name, _static(layer.module), part, layer.last_saved)
        self._first, self._has_ended, self._versions = self._new_run(), False, list[int]()
        self._is_left, self._is_early = False, part is None

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Run the layer.

        The first run gets the program's own arguments, and later runs get the saved arguments.
        """
        hooks: Any = hooks_on_top()
        pack, unpack = hooks
        if not self._given:
            return self._again(inputs, pack, unpack)
        (args, kwargs), self.tensors, first = self._given.pop(), [], self._first

        @untraced
        def number(tensor: torch.Tensor) -> tuple[int, Any]:
            return first.add(tensor), pack(tensor)

        def check(numbered: tuple[int, Any]) -> torch.Tensor:
            return self._checked(numbered[0], partial(unpack, numbered[1]))

        try:
            with saved_tensors_hooks(number, check):
                output = self._forward(*args, **kwargs)
            self._end_first_run()
        except BaseException as error:  # noqa: BLE001 - PyTorch 2.10's checkpoint would leave its hooks on
            self._is_left = self._has_ended and self._layer.leave(error)
            if self._is_left:  # its state has changed already, so the second run is that of any checkpoint
                return output
            self.errors.append(error)
            self._look = self._layout = None  # arguments may hold the graph and so this object
            return None
        return output

    def is_undone(self) -> bool:
        """Return True if the framework's checkpoint can run the layer, after a first run that has failed."""
        if not self._layer.leave(self.errors[0]):
            return False
        torch.set_rng_state(self._generators[0])
        torch_checkpoint.set_device_states(*self._generators[1:])
        for (_, put), value in self._found.items():
            put(value)
        return True

    def _end_first_run(self) -> None:
        """Compute the digests of the first run. In a new mode, also record side effects of the first run."""
        layer, look, self._look = self._layer, self._look, None
        self._first.end()
        self._has_ended, layer.last_saved = True, self._first.last
        if look is not None:
            known = layer.modes[self.training] = look.learn(layer.name, self._found)
            self._buffers = {name: look.buffers[name] for name in known.buffers}

    def _checked(self, place: int, unpack: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a saved tensor from the second run. The first call starts the second run."""
        name = self._layer.name
        try:
            with _turn:
                tensor = unpack()
        except torch_checkpoint.CheckpointError as error:
            cause = str(error).partition("\nTip:")[0].removeprefix("torch.utils.checkpoint: ")
            raise cannot(name, " ".join(cause.split())) from error
        except RuntimeError as error:
            if type(error) is RuntimeError and "modified by an inplace operation" in str(error):
                raise modified(f"an argument of {name}") from error
            raise
        if not self._is_left and tensor._version != self._versions[place]:
            raise modified(f"a tensor saved by {name}")
        return tensor

    def _again(self, inputs: Sequence[torch.Tensor], pack: Any, unpack: Any) -> Any:
        """Run the layer again in the checkpoint's hooks, and compare the tensors that the layer saves."""
        layer = self._layer
        args, kwargs = put_together(self._layout, inputs)
        if self._is_left:
            with in_force(self._found):
                return self._forward(*args, **kwargs)
        try:
            with in_force(self._found), state_kept(layer.name, layer.module):
                put_back(layer.module, self._buffers)
                for inner, training in zip(modules_in(layer.module), self.training, strict=False):
                    inner.training = training  # a program may call eval() between forward and backward
                self._compare_run(partial(self._forward, *args, **kwargs), pack, unpack)
        except TbaError as fault:
            if not (self._is_early and layer.leave(fault)):
                raise
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            cause = f"its second run fails ({type(error).__name__}: {error})"
            raise cannot(layer.name, cause) from error

    def _compare_run(self, forward: Callable[[], object], pack: Any, unpack: Any) -> None:
        """Run the layer inside hooks, and compare the tensors that the layer saves.

        At the last saved tensor, the checkpoint ends the run by an exception. If the kernel may still write
        to that tensor, the run continues to the end of forward.
        """
        second, versions, is_complete = self._new_run(), list[int](), False
        self._versions, first, has_ended = versions, self._first, self._has_ended

        @untraced
        def again(tensor: torch.Tensor) -> object:
            nonlocal is_complete
            second.add(tensor)
            versions.append(tensor._version)
            if not is_complete:
                try:
                    return pack(tensor)
                except torch_checkpoint._StopRecomputationError:
                    if not (has_ended and first.fills_last):
                        raise _Ended from None
                    is_complete = True
            return tensor.detach()

        with suppress(_Ended), saved_tensors_hooks(again, unpack):
            forward()
        if has_ended:  # else forward runs a backward pass within the first run
            self._compare(second)

    def _compare(self, second: SavedTensors) -> None:
        first, name = self._first, self._layer.name
        second.end()
        for one, other in zip(first.forms, second.forms, strict=False):
            if one != other and one[:-1] == other[:-1]:
                raise modified(f"{one[-2][0]} of {name}")
        if first.forms != second.forms or first.numbers.keys() != second.numbers.keys():
            raise other_numbers(name)
        for device, number in first.numbers.items():
            self._note(number != second.numbers[device])

    def _note(self, differs: torch.Tensor) -> None:
        self._layer.verifier.add(self._layer.name, differs, self._layer.leave if self._is_early else None)


class _Ended(BaseException):
    """The exception that ends a second run.

    The class is a ``BaseException``, because a layer may catch every ``Exception``.
    """


def _hold_nothing(_: object) -> None:
    """Drop a saved tensor. A trial uses this function as ``pack`` and ``unpack``.

    A trial fails for a layer that computes gradients in its forward.
    """


class Trial(_Execution):
    """A test of whether a layer can be recomputed: a second run of a layer that is not recomputed.

    The second run takes place when backward reaches the layer, like a recomputation. The results of a trial's
    second run are dropped. A checkpoint around a single number restores the random generators and the
    autocast state of forward.
    """

    def __init__(self, layer: RecomputedLayer, forward: Callable[..., Any], given: Arguments) -> None:
        super().__init__(layer, forward, given)
        self._is_early = False  # its faults are judged, see below
        # This call saves the arguments through the hooks around the layer. The layer's first run comes next.
        self._number: Any = torch_checkpoint.checkpoint(self, *self.tensors, use_reentrant=False)

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Do nothing in the first call of the checkpoint. Run the layer in the second call."""
        if self._given:
            self._given, self.tensors = [], []
        else:
            self._again(inputs, _hold_nothing, _hold_nothing)
        return torch.zeros((), requires_grad=True).exp()

    def see(self, tensor: torch.Tensor) -> None:
        """Record a tensor that the first run saves."""
        with self._judged():
            self._first.add(tensor)

    def first_run_ended(self, output: Any) -> None:
        """Compare the two runs when backward reaches ``output``, which the first run returned."""
        layer, training = self._layer, self.training
        number, self._number = self._number, None  # the graph of the output refers to this object
        with self._judged():
            self._end_first_run()

        def compare(_: object) -> None:
            if not layer.has_failed and training not in layer.tried:
                with self._judged(), _turn:
                    _ = number.grad_fn._saved_result  # unpacking makes the checkpoint run again
                    layer.judge(training, None)

        tensor = first_differentiable(output)
        if tensor is not None and tensor.grad_fn is not None:
            # This hook runs after the tensor's own hooks, which may gather sharded parameters.
            tensor.grad_fn.register_prehook(compare)

    @contextmanager
    def _judged(self) -> Iterator[None]:
        """Record any error, including errors of the layer's own code.

        After an error in its trial, the planner does not recompute the layer.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) and has_peers():
                raise  # other ranks would wait for this rank in the layer's collective operations
            self._layer.judge(self.training, error)

    def _note(self, differs: torch.Tensor) -> None:
        if differs.item():
            cause = (
                f"{OTHER}. If its forward changes a counter or a global variable, this second run has "
                "changed the variable once more than training without offloading does"
            )
            raise cannot(self._layer.name, cause)


_SETTINGS: Any = {"use_reentrant": False, "determinism_check": "none"}
"""Settings of PyTorch's checkpoint. The verifier compares the tensors of both runs instead."""


def _why_never(module: nn.Module) -> str | None:
    """Return why a layer can never be recomputed; ``None`` if there is no reason."""
    for inner in module.modules():
        if issubclass(type(inner), torch.jit.ScriptModule):
            return "it contains TorchScript, which compiles a first run differently from later runs"
        for parameter in inner._parameters.values():
            if hasattr(parameter, "ds_tensor"):
                return "DeepSpeed ZeRO-3 gathers its weights only while each run uses them"
    for name in ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8"):  # newer, older
        if name in sys.modules and sys.modules[name].FP8GlobalStateManager.is_fp8_enabled():
            return "each of its runs changes the scaling factors of FP8"
    return None


def has_hooks(layer: nn.Module) -> bool:
    """Return True if a program has added hooks to the forward of the layer or of a part of it.

    Hooks of this package, and of frameworks that shard or offload models, are not counted.
    """
    return any(
        str(getattr(getattr(hook, "func", hook), "__module__", "")).partition(".")[0] not in _FRAMEWORKS
        for module in layer.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )


_FRAMEWORKS = frozenset({"torch", "megatron", "transformer_engine", "tba_offload", "tba_lab"})
"""Packages whose hooks on forward may run twice."""


def _static(module: nn.Module) -> dict[int, tuple[str, weakref.ref[torch.UntypedStorage]]]:
    """Return the storages that are compared by version and not read: parameters and large buffers.

    The returned dict maps the address of each storage to the name of the tensor and a weak reference to the
    storage. The weak reference is needed because sharding frees storages, so an address may be reused.
    """
    large = ((name, buffer) for name, buffer in module.named_buffers() if buffer.nbytes > SMALL)
    named = (*module.named_parameters(), *large)
    local = ((name, getattr(tensor, "_local_tensor", tensor)) for name, tensor in named)
    stored = ((name, each.untyped_storage()) for name, each in local if each.layout is torch.strided)
    return {storage._cdata: (name, weakref.ref(storage)) for name, storage in stored}
