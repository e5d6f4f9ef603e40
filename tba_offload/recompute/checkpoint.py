"""Recomputation of a layer: PyTorch's checkpoint, with what verifies that the second run is the first.

In order: the layer is looked at, runs under the checkpoint and under hooks that compute a digest of each
tensor that it saves, and is looked at again (:mod:`purity`, once in each mode). When backward asks for the
first of its saved tensors, the layer runs again under such hooks, and digests are compared (:mod:`verify`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Hashable, Iterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointError, _StopRecomputationError, checkpoint

from tba_offload.device.peers import has_peers
from tba_offload.errors import TbaError, UnsupportedError
from tba_offload.layers.graph import first_differentiable
from tba_offload.layers.nested import modules_in
from tba_offload.recompute.arguments import put_together, take_apart
from tba_offload.recompute.purity import SMALL, Look, Mode, attributes_kept, buffers_at, in_force
from tba_offload.recompute.verify import SavedTwice, cannot, other_numbers, turn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from tba_offload.layers.find import State
    from tba_offload.recompute.verify import Verifier

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments by position and by name."""


class RecomputedLayer:
    """A layer whose forward can run again in backward.

    Args:
        module: The layer.
        name: What errors call it.
        verifier: Takes the outcomes of comparisons.
        states: Returns the state that second runs put back, beside PyTorch's generators.

    Attributes:
        modes: What is known of the layer, by which of its modules train.
    """

    def __init__(
        self, module: nn.Module, name: str, verifier: Verifier, states: Callable[[], Sequence[State]] = tuple
    ) -> None:
        self.module, self.name, self.verifier, self.states = module, name, verifier, states
        self.modes: dict[tuple[bool, ...], Mode] = {}

    @property
    def training(self) -> tuple[bool, ...]:
        """Which modules of the layer train."""
        return tuple([inner.training for inner in modules_in(self.module)])

    def run(self, forward: Callable[..., Any], given: Arguments, placement: Hashable = None) -> Any:
        """Run the layer in a checkpoint.

        Raises:
            UnsupportedError: A second run would change something again, or give other numbers.
        """
        if (reason := _why_never(self.module)) is not None:
            raise cannot(self.name, reason, UnsupportedError)
        verifier, mode = self.verifier, (self.name, self.training, placement)

        def outcome(differs: torch.Tensor) -> None:
            verifier.compared(mode)
            verifier.add(self.name, differs)

        execution = _Execution(self, forward, given, verifier.part(mode), outcome)
        output = checkpoint(execution, *execution.tensors, use_reentrant=False)
        execution.raise_error()
        return output

    def may_try(self) -> bool:
        """Return True if a :class:`Trial` of the layer tells something that is not known yet."""
        training, reason = self.training, _why_never(self.module)
        if (self.name, training) in self.verifier.faults:
            return False
        if reason is None and has_hooks(self.module):
            reason = "a program has hooked into its forward, and its hooks would run twice"
        held = (value for inner in modules_in(self.module) for value in vars(inner).values())
        if reason is None and any(isinstance(value, Iterator) for value in held):
            reason = "it holds an iterator, which a second run would move on"
        if reason is not None:
            self.verifier.judge(self.name, training, cannot(self.name, reason, UnsupportedError))
        return reason is None


class _Execution:
    """One execution of a layer: its first run, and those that repeat it.

    Args:
        layer: The layer.
        forward: Runs it.
        given: Its arguments.
        part: Which part of the saved tensors is compared; ``None`` is all of them.
        outcome: Takes a boolean of one element: whether the runs differ.
    """

    def __init__(
        self,
        layer: RecomputedLayer,
        forward: Callable[..., Any],
        given: Arguments,
        part: int | None,
        outcome: Callable[[torch.Tensor], object],
    ) -> None:
        self._layer, self._forward, self.training = layer, forward, layer.training
        # Until the first run: they hold the graph before the layer.
        self.given, self.tensors = [given], list[torch.Tensor]()
        self._error: BaseException | None = None
        self._look, mode = None, layer.modes.get(self.training)
        if mode is None:
            arguments = {**{str(place): value for place, value in enumerate(given[0])}, **given[1]}
            self._look = Look(layer.module, arguments, layer.states())
            mode = Mode(self._look.states, ())
        self._mode = mode
        self._found = {read: read() for read, _ in self._mode.states}
        self._buffers = {name: layer.module.get_buffer(name).clone() for name in self._mode.buffers}
        self._layout: Any = take_apart(given, self.tensors)
        self.saved = SavedTwice(layer.name, _static(layer.module), part, outcome)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Run the layer: the first time on the program's own arguments, then to repeat that."""
        if not self.given:
            return self.again(inputs)
        (args, kwargs), self.tensors = self.given.pop(), []
        try:
            with self.saved.first_run():
                output = self._forward(*args, **kwargs)
            self.learn()
        except BaseException as error:  # noqa: BLE001 - checkpoints of PyTorch 2.10 would keep their hooks on
            self._error = error
            self._look = self._layout = None  # arguments may hold the graph, whose checkpoint holds this
            return None
        return output

    def raise_error(self) -> None:
        """Raise the error of the first run, if there was one.

        Raises:
            UnsupportedError: A function of the layer forbids hooks.
        """
        error, self._error = self._error, None
        try:
            if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error):
                reason = f"it forbids saved-tensor hooks ({error})"
                raise cannot(self._layer.name, reason, UnsupportedError) from error
            if error is not None:
                raise error
        finally:
            del error  # its frames know this one

    def learn(self) -> None:
        """Note what the first run has changed, if that is not known yet.

        Raises:
            UnsupportedError: A second run would change it again.
        """
        look, self._look = self._look, None
        if look is not None:
            self._mode = self._layer.modes[self.training] = look.learn(self._layer.name, self._found)
            self._buffers = {name: look.buffers[name] for name in self._mode.buffers}

    def again(self, inputs: Sequence[torch.Tensor], *, drops: bool = False) -> None:
        """Run the layer a second time and compare what it saves; ``drops``: hold nothing of that.

        Raises:
            RecomputationError: The second run differs, or fails.
        """
        layer = self._layer
        args, kwargs = put_together(self._layout, inputs)
        try:
            with (
                in_force(self._mode.states, self._found),
                buffers_at(layer.module, self._buffers) as replaced,
                attributes_kept(layer.name, layer.module, replaced),
            ):
                for inner, training in zip(modules_in(layer.module), self.training, strict=False):
                    inner.training = training  # a program may evaluate between forward and backward
                self.saved.run_again(lambda: self._forward(*args, **kwargs), replaced, drops=drops)
        except _StopRecomputationError:
            raise
        except Exception as error:
            if not drops:
                layer.verifier.withdraw(layer.name)
            if isinstance(error, TbaError | torch.OutOfMemoryError | CheckpointError):
                raise
            cause = f"its second run fails ({type(error).__name__}: {error})"
            raise cannot(layer.name, cause) from error


class Trial:
    """A second run of a layer that is not recomputed, to see whether it could be.

    It takes place where a recomputation would: when backward comes to the layer. Nothing is held of it. A
    checkpoint around a single number has it run with the generators and autocast of forward.

    Args:
        layer: The layer.
        forward: Runs it.
        given: Its arguments.
    """

    def __init__(self, layer: RecomputedLayer, forward: Callable[..., Any], given: Arguments) -> None:
        def outcome(differs: torch.Tensor) -> None:
            if differs.item():
                raise other_numbers(layer.name)

        self._layer = layer
        self._execution = _Execution(layer, forward, given, None, outcome)
        self._execution.given.clear()
        self._fault: TbaError | None = None

    def begin(self) -> None:
        """Save the arguments, through the hooks around the layer; its first run comes next."""
        execution, number, runs = self._execution, torch.zeros((), requires_grad=True), list[int]()

        def run(*inputs: torch.Tensor) -> torch.Tensor:
            if runs:
                execution.again(inputs, drops=True)
            runs.append(1)
            return number.exp()

        self._number = checkpoint(run, *execution.tensors, use_reentrant=False)
        execution.tensors = []

    def see(self, tensor: torch.Tensor) -> None:
        """Note a tensor that the first run saves."""
        try:
            self._execution.saved.see(tensor)
        except TbaError as error:
            self._fault = error

    def first_run_ended(self, output: Any) -> None:
        """Compare the layer's first run, which has put out ``output``, when backward comes to it."""
        layer, training, number = self._layer, self._execution.training, self._number
        try:
            self._execution.saved.end_first_run()
            self._execution.learn()
        except TbaError as error:
            self._fault = error
        if self._fault is not None:
            layer.verifier.judge(layer.name, training, self._fault)
            return

        def compare(_: object) -> None:
            if (layer.name, training) in layer.verifier.faults:
                return
            fault: Exception | None = None
            try:
                with turn:
                    _ = number.grad_fn._saved_result  # asks the checkpoint for what it has to run again
            except Exception as error:  # the layer's own: the planner does without it
                if isinstance(error, torch.OutOfMemoryError) and has_peers():
                    raise  # others go on in the layer's collective operations, and must not do so alone
                fault = error
            layer.verifier.judge(layer.name, training, fault)

        tensor = first_differentiable(output)
        if tensor is not None and tensor.grad_fn is not None:
            # After the hooks of the tensor, by which sharded parameters are gathered.
            tensor.grad_fn.register_prehook(compare)

    def noticing(self, unpack: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
        """Return ``unpack`` that notices what backward asks for twice: checkpoints give each tensor once."""
        layer, training, asked = self._layer, self._execution.training, set[tuple[int, int]]()

        def unpack_noticed(packed: Any) -> torch.Tensor:
            key = torch._C._current_graph_task_id(), id(packed)
            if key in asked and key[0] != -1:
                reason = "its backward asks for a saved tensor twice, and a checkpoint gives each once"
                layer.verifier.judge(layer.name, training, cannot(layer.name, reason, UnsupportedError))
            asked.add(key)
            return unpack(packed)

        return unpack_noticed


def _why_never(module: nn.Module) -> str | None:
    """Return why a layer cannot be recomputed, whatever it does."""
    if any(issubclass(type(inner), torch.jit.ScriptModule) for inner in module.modules()):
        return "it holds TorchScript, whose first runs are not compiled as later ones are"
    for name in ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8"):  # newer, older
        if name in sys.modules and sys.modules[name].FP8GlobalStateManager.is_fp8_enabled():
            return "each of its runs changes the scaling factors of FP8"
    return None


def has_hooks(layer: nn.Module) -> bool:
    """Return True if a program has hooked into the forward of the layer or a part of it.

    Hooks of frameworks that shard or offload models, and the library's own, are part of the layer.
    """
    return any(
        _package_of(hook) not in _FRAMEWORKS
        for module in layer.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )


_FRAMEWORKS = frozenset({"torch", "megatron", "transformer_engine", "tba_offload", "tba_lab"})
"""Packages whose hooks may run twice."""


def _package_of(hook: object) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", None) or type(hook).__module__).partition(".")[0]


def _static(module: nn.Module) -> dict[int, tuple[str, weakref.ref[torch.UntypedStorage]]]:
    """Names of the storages that are compared by version, not read: parameters and large buffers.

    By address, and beside the storage: sharding frees some, and others get their addresses.
    """
    large = ((name, buffer) for name, buffer in module.named_buffers() if buffer.nbytes > SMALL)
    named = chain(module.named_parameters(), large)
    local = ((name, getattr(tensor, "_local_tensor", tensor)) for name, tensor in named)
    stored = ((name, each.untyped_storage()) for name, each in local if each.layout is torch.strided)
    return {storage._cdata: (name, weakref.ref(storage)) for name, storage in stored}
