"""Recomputation of a layer by ``torch.utils.checkpoint``, and a check that the second run equals the first.

Saved-tensor hooks compute a digest of the tensors that the layer saves in its first run. When backward needs
the first saved tensor, the layer runs a second time, and the hooks compute a second digest. At the end of the
second run, the two digests are compared (:mod:`verify`).

In the first run with each combination of training flags, the state of the layer is compared before and after
the run (:mod:`purity`).
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
"""Lock that a thread holds while it recomputes a layer, because a recomputation sets random generators that
all threads share."""


class RecomputedLayer:
    """A layer whose forward can run again in backward.

    Args:
        site: The :class:`~tba_offload.capture.site.Site` of the layer. If this class cannot recompute the
            layer, the framework's checkpoint function, if any, runs the layer.
        verifier: Collector of the results of comparisons.
        states: Function that returns states that a recomputation restores in addition to PyTorch's random
            generators.

    Attributes:
        name: Name of the layer in errors.
        is_left: Whether the framework's checkpoint function runs the layer, because this class cannot
            recompute the layer.
        modes: The :class:`Mode` for each combination of training flags of the layer's modules.
        tried: The combinations of training flags for which a :class:`Trial` has ended.
        last_saved: Index of the last saved tensor that requires a gradient. The last tensor is always
            compared, because most differences between two runs also change this tensor.
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
        """Run the layer inside ``torch.utils.checkpoint``, which recomputes the layer in backward.

        Args:
            forward: Function that runs the layer.
            given: The layer's arguments.
            placement: The layer's placement. After a change of the placement, all saved tensors are compared
                again.

        Raises:
            UnsupportedError: The layer cannot be recomputed.
        """
        if (reason := _why_never(self.module)) is not None:
            fault = cannot(self.name, reason, UnsupportedError)
            if self.leave(fault):
                return self._site.run_plainly(forward, *given)
            raise fault
        mode = self.name, self.training, placement
        execution = _Execution(self, forward, given, self.verifier.part(mode))
        output = torch_checkpoint.checkpoint(execution, *execution.tensors, **_SETTINGS)
        if execution.errors:  # no variable for the error, because its frames refer to this frame
            if "saved tensor hooks" in str(execution.errors[0]):
                reason = f"the layer's forward forbids saved-tensor hooks ({execution.errors[0]})"
                execution.errors[0] = cannot(self.name, reason, UnsupportedError)
            if self.leave(execution.errors[0]):
                execution.undo()
                return self._site.run_plainly(forward, *given)
            raise execution.errors.pop()
        return output

    def leave(self, fault: BaseException) -> bool:
        """Leave the layer to the framework's checkpoint function, and return True.

        Return False if the framework has no checkpoint function, or if ``fault`` is neither an
        ``UnsupportedError`` nor a ``RecomputationError``.

        Args:
            fault: The error that shows why the layer cannot be recomputed.
        """
        if self._site.checkpoint is None or not isinstance(fault, UnsupportedError | RecomputationError):
            return False
        if not self.is_left:
            self.verifier.leave(type(self.module), fault)
        self.is_left = True
        return True

    @property
    def has_failed(self) -> bool:
        """Whether the trial of any layer of this layer's class has failed."""
        return type(self.module) in self.verifier.failed

    @property
    def may_plan(self) -> bool:
        """Whether a trial of this layer has ended, and all trials of layers of its class succeeded so far."""
        return bool(self.tried) and not self.has_failed

    def may_try(self) -> bool:
        """Return True if a :class:`Trial` is needed for the present training flags of the layer's modules."""
        if self.has_failed or self.training in self.tried:
            return False
        if (reason := _why_never(self.module)) is None and has_hooks(self.module):
            reason = "the program has added hooks to the layer's forward, and these hooks would run twice"
        if reason is not None:
            self.judge(self.training, cannot(self.name, reason, UnsupportedError))
        return reason is None

    def may_repeat(self) -> bool:
        """Return True if the planner may recompute the layer with its present training flags."""
        return self.may_plan and self.training in self.tried and not has_hooks(self.module)

    def judge(self, training: tuple[bool, ...], fault: Exception | None) -> None:
        """Record the result of a trial.

        Args:
            training: The training flags of the layer's modules during the trial.
            fault: The error of the trial; ``None`` if the trial succeeded. After an error, the planner
                recomputes no layer of the same class.
        """
        self.tried.add(training)
        if fault is None or self.has_failed:
            return
        self.verifier.failed.add(type(self.module))
        sentence = f"the planner does not recompute {self.name} and other layers of the same class: {fault}"
        if OTHER in str(fault):
            warn(sentence, RuntimeWarning)  # the trial may have changed the state of the program
        else:
            self.verifier.report(sentence)


class _Execution:
    """The first run of a layer, and its recomputation in backward.

    Args:
        layer: The layer.
        forward: Function that runs the layer.
        given: The layer's arguments.
        part: Which eighth of the saved tensors is compared, from 0 to 7; ``None`` for all tensors.

    Attributes:
        errors: A list with the error of the first run; empty if the first run did not fail.
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
        """Run the layer. The first call uses the program's own arguments instead of ``inputs``."""
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
            if self._is_left:  # forward has ended, so backward runs the layer again without a comparison
                return output
            self.errors.append(error)
            self._look = self._layout = None  # arguments may hold the graph and so this object
            return None
        return output

    def undo(self) -> None:
        torch.set_rng_state(self._generators[0])
        torch_checkpoint.set_device_states(*self._generators[1:])
        for (_, put), value in self._found.items():
            put(value)

    def _end_first_run(self) -> None:
        layer, look, self._look = self._layer, self._look, None
        self._first.end()
        self._has_ended, layer.last_saved = True, self._first.last
        if look is not None:
            known = layer.modes[self.training] = look.learn(layer.name, self._found)
            self._buffers = {name: look.buffers[name] for name in known.buffers}

    def _checked(self, place: int, unpack: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a tensor that the second run saved. The first call of this method starts the second run."""
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
            cause = f"the layer's second run fails ({type(error).__name__}: {error})"
            raise cannot(layer.name, cause) from error

    def _compare_run(self, forward: Callable[[], object], pack: Any, unpack: Any) -> None:
        """Run the layer inside saved-tensor hooks, and compare its saved tensors with the first run's.

        When the layer has saved its last tensor, the checkpoint raises an exception that ends the run. If a
        kernel may still write to the last tensor, the exception is caught and forward runs to its end.
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
        if has_ended:  # otherwise forward runs a backward pass within the first run
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
    """The exception that ends a second run before the end of forward.

    The class is a ``BaseException``, because a layer may catch every ``Exception``.
    """


def _hold_nothing(_: object) -> None:
    """Drop a saved tensor. If a layer needs the tensor for gradients in its forward, the trial fails."""


class Trial(_Execution):
    """A test of whether a layer can be recomputed, in a step in which the layer is not recomputed.

    When backward reaches the layer, the trial runs the layer a second time and compares the two runs.
    Backward does not use the tensors of the second run. ``torch.utils.checkpoint`` restores the random
    generators and the autocast state of forward for the trial.
    """

    def __init__(self, layer: RecomputedLayer, forward: Callable[..., Any], given: Arguments) -> None:
        super().__init__(layer, forward, given)
        self._is_early = False  # `_judged` records the errors of a trial
        # This call saves the arguments through the hooks around the layer. The layer's first run comes next.
        self._number: Any = torch_checkpoint.checkpoint(self, *self.tensors, use_reentrant=False)

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Do nothing in the first call. Run the layer in the second call, which the checkpoint makes."""
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
        """Start the second run when backward reaches ``output``, the output of the first run."""
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
        try:
            yield
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) and has_peers():
                raise  # other ranks would wait for this rank in the layer's collective operations
            self._layer.judge(self.training, error)

    def _note(self, differs: torch.Tensor) -> None:
        if differs.item():
            cause = (
                f"{OTHER}. If the layer's forward changes a counter or a global variable, the second run "
                "has changed the variable again"
            )
            raise cannot(self._layer.name, cause)


_SETTINGS: Any = {"use_reentrant": False, "determinism_check": "none"}
"""Options for ``torch.utils.checkpoint``. PyTorch's check is off, because the verifier compares both runs."""


def _why_never(module: nn.Module) -> str | None:
    for inner in module.modules():
        if issubclass(type(inner), torch.jit.ScriptModule):
            return "the layer contains TorchScript, which compiles a first run differently from later runs"
        for parameter in inner._parameters.values():
            if hasattr(parameter, "ds_tensor"):
                return "DeepSpeed ZeRO-3 frees the layer's weights after each run"
    for name in ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8"):  # newer, older
        if name in sys.modules and sys.modules[name].FP8GlobalStateManager.is_fp8_enabled():
            return "each run of the layer changes the scaling factors of FP8"
    return None


def has_hooks(layer: nn.Module) -> bool:
    """Return True if the program has added forward hooks to the layer or to one of its submodules.

    Hooks of the packages in :data:`_FRAMEWORKS` are not counted.
    """
    return any(
        str(getattr(getattr(hook, "func", hook), "__module__", "")).partition(".")[0] not in _FRAMEWORKS
        for module in layer.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )


_FRAMEWORKS = frozenset({"torch", "megatron", "transformer_engine", "tba_offload", "tba_lab"})
"""Packages whose forward hooks may run twice."""


def _static(module: nn.Module) -> dict[int, tuple[str, weakref.ref[torch.UntypedStorage]]]:
    """Return the storages of parameters and large buffers, which are compared by version.

    The address of each storage maps to the name of the tensor and to a weak reference. The weak reference
    shows whether the address still belongs to this storage, because sharding frees storages.
    """
    large = ((name, buffer) for name, buffer in module.named_buffers() if buffer.nbytes > SMALL)
    named = (*module.named_parameters(), *large)
    local = ((name, getattr(tensor, "_local_tensor", tensor)) for name, tensor in named)
    stored = ((name, each.untyped_storage()) for name, each in local if each.layout is torch.strided)
    return {storage._cdata: (name, weakref.ref(storage)) for name, storage in stored}
