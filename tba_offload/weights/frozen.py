"""Offloading of frozen weights, such as the weights of a base model below LoRA adapters.

The weights of a layer are read before its forward, and again before its backward. While one layer computes,
the weights of the next layer are read. The weights are written once, when offloading starts.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from contextlib import ExitStack
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tba_offload import torch_private
from tba_offload.device import device_of_model
from tba_offload.errors import SessionError, UnsupportedError
from tba_offload.layers.frozen import select
from tba_offload.layers.nested import TooManyError, tensors_in
from tba_offload.placements import Staying, spread
from tba_offload.states.home import Homes, Reads
from tba_offload.store.open import open_store
from tba_offload.weights.experts import numbers_in
from tba_offload.weights.weight import FrozenWeight, Loans, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.utils.hooks import RemovableHandle

    from tba_offload.config import OffloadConfig
    from tba_offload.store.base import Moved

    Count = Callable[[int], object]
    Modules = Sequence[nn.Module]
    Tell = Callable[[str], object]

_ONLY = (
    "Offloading supports torch.nn.Parameter, the parameter classes of bitsandbytes, and tensor classes with "
    "__tensor_flatten__. Each weight must be on the device of the model's first parameter"
)
_FSDP2 = ". To offload frozen weights with FSDP2, pass them to fully_shard as ignored_params"
_NONE = (
    "no frozen weight is offloaded. A weight must be frozen before attach(), have at least min_tensor_bytes, "
    "and be used by only one layer. A small percentage in weights.frozen may select no weight"
)
_WITH = "with frozen weights in the store. Close the session first"


class FrozenWeights:
    """The frozen weights of a model's layers.

    Args:
        chunks: The model or its chunks.
        layers: The layers in the order in which they run.
        config: The configuration. Only ``store``, ``min_tensor_bytes`` and the percentage in ``weights`` are
            used.
        count: Function that is called with each change of the device memory, in bytes.
        tell: Function that reports a message if weights stay in memory.

    Attributes:
        nbytes: Bytes of all weights in the store.
        resident_bytes: Bytes of the weights that are in memory now.
        peak_bytes: Largest ``resident_bytes`` since the start, or since ``peak_bytes`` was set to 0.
    """

    def __init__(
        self, chunks: Modules, layers: Modules, config: OffloadConfig, *, count: Count, tell: Tell
    ) -> None:
        self.nbytes = self.resident_bytes = self.peak_bytes = 0
        self._count = count
        self._loans = Loans(tell)
        self._in_forward: dict[tuple[int, int], nn.Module] = {}  # by thread and layer: the module that runs
        self._passes: weakref.WeakValueDictionary[int, _Pass] = weakref.WeakValueDictionary()
        self._in_memory: set[int] = set()
        self._runs: dict[int, Run] = {}  # the latest of each layer
        self._handles: list[RemovableHandle] = []
        self._weights: list[list[FrozenWeight]] = [[] for _ in layers]  # the offloaded weights of each layer
        self._all: list[FrozenWeight] = []
        device = device_of_model(chunks)
        self._homes = Homes(open_store(config.store.drives, device=device), device)
        self._homes.waits = deque(maxlen=20_000)  # a timeline has the same limit
        try:
            self._take_over(chunks, layers, config, tell)
            for number, layer in enumerate(layers):
                if self._weights[number]:
                    self._handles += self._watch(layer, number)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Bring all weights back into memory and close the store. May be called twice.

        Raises:
            TransferError: Some weights cannot be read. The next call of ``close`` reads these weights again.
        """
        with self._loans.lock, torch_private.without_subclasses(), ExitStack() as at_last:
            while self._handles:
                self._handles.pop().remove()
            at_last.callback(self._close_store)
            for weight in self._all:
                at_last.callback(weight.come_back)

    def _close_store(self) -> None:
        if all(weight.is_back for weight in self._all):
            self._homes.store.close()
            # In a cycle, the model would stay alive. Graphs that outlive this object still ask for layers.
            self._all, self._weights = [], [[] for _ in self._weights]

    # ---- counts ----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin to count the reads of a step, including weights that are already in memory."""
        self._loans.reclaim()
        self._homes.take()
        self._homes.read_bytes = self.resident_bytes

    def take(self) -> Reads:
        """Return the reads since the last call or the start of the step."""
        return self._homes.take()

    def watch_moves(self, seen: Callable[[Moved], object] | None) -> None:
        """Call a function after each transfer. See :meth:`MultiStore.watch_moves`."""
        self._homes.store.watch_moves(seen)

    # ---- how many weights stay in memory ---------------------------------------------------------

    what, slots = "frozen weights", 0  # offloaded weights in memory count as gradients

    @property
    def sizes(self) -> list[int]:
        """Bytes of each weight, in the order in which :meth:`arrange` offloads the weights."""
        return [weight.nbytes for weight in self._spread]

    @property
    def device_bytes(self) -> int:
        """Bytes of the weights that stay in memory."""
        return sum(weight.nbytes for weight in self._spread if weight.is_back)

    def arrange(self, offloaded: int) -> None:
        """Offload the first ``offloaded`` weights from now on, and keep the other weights in memory.

        Raises:
            TransferError: A weight cannot be read or written. All later weights are unchanged.
        """
        with self._loans.lock, torch_private.without_subclasses():
            self._loans.reclaim()
            for number, weight in enumerate(self._spread):
                if number >= offloaded and not weight.is_back and weight not in self._loans.lent:
                    weight.come_back()
                    self._weights[weight.layer].remove(weight)
                elif number < offloaded and weight.is_back and weight.parts:
                    weight.write()
                    self._weights[weight.layer].append(weight)

    @property
    def _spread(self) -> list[FrozenWeight]:
        return [self._all[number] for number in spread(len(self._all))]

    # ---- taking over -----------------------------------------------------------------------------

    def _take_over(self, chunks: Modules, layers: Modules, config: OffloadConfig, tell: Tell) -> None:
        device, share = self._homes.device.torch_device, Staying(config.frozen_percent)
        selected, others = select(chunks, layers, config.min_tensor_bytes, device)
        for found in selected:
            if share.stays(sum(group[0].untyped_storage().nbytes() for group in found.groups)):
                continue
            weight = FrozenWeight(found, self._homes, self._loans, self._grow)
            # Record the weight before the write, so that an interrupt does not lose the bytes.
            self._weights[weight.layer].append(weight)
            self._all.append(weight)
            with torch_private.without_subclasses():
                weight.write()
            self.nbytes += weight.nbytes
        others += f". {_ONLY}{_FSDP2 if 'DTensor' in others else ''}" if others else ""
        if others and not selected:
            raise UnsupportedError(f"no frozen weight can be offloaded: {others}")
        if others or not self.nbytes:
            tell(f"some frozen weights stay in memory: {others}" if others else _NONE)

    def _watch(self, layer: nn.Module, number: int) -> Iterator[RemovableHandle]:
        """Add hooks to a layer, and to modules inside the layer.

        A program can run or save a module inside a layer without running the layer.
        """
        weights = self._weights[number]
        own = {id(weight.parameter) for weight in weights}
        for module in layer.modules():
            hook, is_part = _LayerHook if module is layer else _Hook, module is not layer
            has_weights = any(id(parameter) in own for parameter in module.parameters(recurse=False))
            if has_weights or not is_part:
                begin, end = (hook(call, number, is_part) for call in (self._begin, self._end))
                yield module.register_forward_pre_hook(begin, prepend=True)
                yield module.register_forward_hook(end, always_call=True)
            if has_weights:
                yield module.register_state_dict_post_hook(_Hook(self._save, own))  # type: ignore[no-untyped-call]
            if asked := [weight for weight in weights if weight.expert is module]:
                ask = _Hook(self._ask, number, asked)
                yield module.register_forward_pre_hook(ask, prepend=True, with_kwargs=True)

    def _grow(self, nbytes: int) -> None:
        self.resident_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)
        self._count(nbytes)

    # ---- while the model runs --------------------------------------------------------------------

    def _begin(self, number: int, is_part: bool, module: nn.Module, *_: object) -> None:  # noqa: FBT001
        """Bring the weights of a layer into memory before its forward, or before its recomputation.

        Args:
            number: The layer.
            is_part: True for the forward of a module inside the layer. A method such as ``layer.step()`` can
                call this module without the forward of the layer.
            module: The layer, or the module inside the layer.

        Raises:
            TransferError: The weights cannot be read.
            SessionError: A transform of ``torch.func`` runs the layer.
        """
        with self._loans.lock:
            if is_part and self._is_in_use(number):
                return
            if torch_private.is_transformed():
                raise SessionError(f"transforms of torch.func cannot run layers {_WITH}")
            # Without gradients, this is an evaluation inside a backward hook, not a recomputation.
            run = {each: each.begin_run() for each in self._weights[number] if each.expert is not None}
            self._runs[number] = run
            if torch_private.is_recomputation() and torch.is_grad_enabled():
                self._backward_came(number, run)
            else:
                self._in_forward[threading.get_ident(), number] = module
                self._bring(number)

    def _ask(self, number: int, weights: list[FrozenWeight], _: object, args: Any, kwargs: Any) -> None:
        """Start to read the weights of the called expert, or of the experts that a router has selected."""
        with self._loans.lock, torch_private.without_subclasses():
            for weight in weights if self._is_in_use(number) else ():
                found = (numbers_in(each, len(weight.slices)) for each in (*args, *kwargs.values()))
                wanted = next(filter(None, found), set()) if len(weight.slices) > 1 else {0}
                weight.begin_read({weight: wanted})

    def _end(self, number: int, is_part: bool, module: nn.Module, _: object, output: object) -> None:  # noqa: FBT001
        """Free the weights of a layer after its forward."""
        returns, run = self._watch_output(number, output), (threading.get_ident(), number)
        with self._loans.lock:
            # A recomputed layer is not found here. Its backward comes next.
            if self._in_forward.get(run) is not module:
                return
            del self._in_forward[run]
            # Keep the weights of the last layer, because backward starts there.
            if not (is_part or (returns and number == self._next(number))):
                self.keep_only(self._in_memory - {number})
            elif not self._is_in_use(number):
                with torch_private.without_subclasses():
                    for weight in self._weights[number]:
                        weight.shut()

    def _watch_output(self, number: int, output: object) -> bool:
        """Add hooks to the outputs of a layer that require gradients. Return True if any output has a hook.

        The hooks read the weights of the layer when backward reaches an output.

        Raises:
            SessionError: The output has too many nested objects to search.
        """
        if not torch.is_grad_enabled():
            return False
        try:
            found = [tensor for tensor in tensors_in(output) if tensor.requires_grad and tensor.grad_fn]
        except TooManyError:
            raise SessionError(f"the output has too many nested objects for a layer {_WITH}") from None
        for tensor in found:
            came = partial(self._gradient_came, number, self._runs.get(number, {}))
            tensor.register_hook(came)  # type: ignore[no-untyped-call]
        return bool(found)

    def _gradient_came(self, number: int, run: Run, _: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise SessionError(f"gradients of gradients (create_graph=True) do not work for layers {_WITH}")
        self._backward_came(number, run)

    def _backward_came(self, number: int, run: Run) -> None:
        with self._loans.lock:
            found = self._passes.get(this := torch_private.current_backward())
            if found is None:
                self._passes[this] = found = _Pass(self)
                torch_private.call_after_backward(found)
            found.layer = number
            del found  # otherwise the traceback of an error would keep the pass alive
            self._bring(number, run)

    def _bring(self, number: int, run: Run | None = None) -> None:
        """Read the weights of a layer, and start to read the weights of the next layer.

        Args:
            number: The layer.
            run: The experts that the layer's forward has used; ``None`` before a forward.
        """
        with self._loans.lock, torch_private.without_subclasses():
            self._loans.pointed.clear()
            then = self._next(number, by=1 if run is None else -1)
            self.keep_only({number, then})  # weights of a skipped layer may have been read ahead
            self._in_memory |= {number, then}
            for weight in self._weights[number]:
                weight.begin_read(run)
            for weight in self._weights[then] if then != number else ():
                weight.begin_read(None if run is None else self._runs.get(then))
            for weight in self._weights[number]:
                weight.open(run)

    def keep_only(self, near: set[int]) -> None:
        """Free the weights of all layers, except the layers in ``near`` and the layers that are running."""
        with self._loans.lock, torch_private.without_subclasses():
            for number in self._in_memory - near:
                if not self._is_in_use(number):
                    for weight in self._weights[number]:
                        weight.leave()
                    self._in_memory.discard(number)
            self._loans.reclaim()

    def _is_in_use(self, number: int) -> bool:
        return number in {each.layer for each in self._passes.values()} | {key[1] for key in self._in_forward}

    def _next(self, number: int, *, by: int = 1) -> int:
        """Return the index of the next layer with offloaded weights; ``number`` if there is no such layer."""
        others = range(number + by, len(self._weights) if by > 0 else -1, by)
        return next((other for other in others if self._weights[other]), number)

    def _save(self, weights: set[int], owner: nn.Module, state: Any, prefix: str, _: Any) -> None:
        """Replace frozen weights in a state dict by copies in host memory. Free the memory of the weights."""
        # load_state_dict(assign=True) may have replaced a parameter. bitsandbytes saves several tensors.
        own = owner.named_parameters(recurse=False)
        names = [f"{prefix}{name}" for name, parameter in own if id(parameter) in weights]
        for key in takewhile(lambda key: key.startswith(prefix), list(reversed(state))):
            if key.startswith((*names, f"{prefix}SCB")):
                state[key] = state[key].detach().clone().cpu()
        self._loans.reclaim()


class _Pass:
    """A backward pass. Autograd holds this object until the pass ends or fails, and calls it at the end."""

    def __init__(self, weights: FrozenWeights) -> None:
        self.layer, self._weights = -1, weights

    def __call__(self) -> None:
        self.layer = -1
        self._weights.keep_only(set())


class _Hook:
    """A module hook that cannot be copied, because a copy of the model must not use the same weights."""

    def __init__(self, call: Callable[..., object], *given: object) -> None:
        # The compiler does not run ``__call__`` of a subclass of partial, so the partial is an attribute.
        self.call = partial(call, *given)

    def __call__(self, *given: Any) -> Any:
        if not torch.compiler.is_compiling():  # compiled code runs within the hooks of its layer
            self.call(*given)

    def __reduce_ex__(self, _: object) -> Any:
        raise SessionError(f"a model cannot be copied or pickled {_WITH}")


class _LayerHook(_Hook):
    @torch_private.untraced
    def __call__(self, *given: Any) -> Any:
        self.call(*given)
