"""Offloading of frozen weights, such as the weights of a LoRA base model, until their layer computes.

The weights of a layer are read before its forward, and again before its backward. While one layer computes,
the weights of the next layer are read. The weights are written once, when offloading starts.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from contextlib import ExitStack
from functools import partial
from itertools import chain, takewhile
from operator import methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from tba_offload.device import device_of_model
from tba_offload.errors import SessionError, UnsupportedError
from tba_offload.layers.nested import TooManyError, tensors_in
from tba_offload.placements import Staying, spread
from tba_offload.states.home import Home, Homes
from tba_offload.store.open import open_store
from tba_offload.torch_private import (
    call_after_backward,
    current_backward,
    is_recomputation,
    is_transformed,
    untraced,
    without_subclasses,
)
from tba_offload.weights.guard import FrozenWeight, Loans, Run, numbers_in
from tba_offload.weights.pieces import Part, experts_in, left_out, own_weights, parts_of, slices_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.utils.hooks import RemovableHandle

    from tba_offload.config import OffloadConfig
    from tba_offload.store.base import Moved

    Modules = Sequence[nn.Module]
    Tell = Callable[[str], object]

_ONLY = (
    "Offloading supports torch.nn.Parameter, the parameter classes of bitsandbytes, and tensor classes with "
    "__tensor_flatten__. Each weight must be on the device of the model's first parameter"
)
_NONE = (
    "no frozen weight is offloaded. A weight must be frozen before attach(), have at least min_tensor_bytes, "
    "and be used by only one layer. A small percentage in weights.frozen may select no weight"
)
_WITH = "with frozen weights in the store. Close the session first"
_MOST_WAITS = 20_000
"""Largest number of recorded waits. A timeline has the same limit."""


class FrozenWeights:
    """The frozen weights of some layers.

    Args:
        chunks: The model or its chunks.
        layers: The layers in the order in which they run.
        config: The configuration. Only ``store``, ``min_tensor_bytes`` and the percentage in ``weights`` are
            used.
        count: Called with each change of the device memory, in bytes.
        tell: Called with a message if weights stay in memory.

    Attributes:
        nbytes: Bytes of all weights in the store.
        resident_bytes: Bytes of the weights that are in memory now.
        peak_bytes: Largest ``resident_bytes`` since the start, or since ``peak_bytes`` was set to 0.
    """

    def __init__(
        self,
        chunks: Modules,
        layers: Modules,
        config: OffloadConfig,
        *,
        count: Callable[[int], object],
        tell: Tell,
    ) -> None:
        self.nbytes = self.resident_bytes = self.peak_bytes = 0
        self._count = count
        self._loans = Loans(tell)
        self._lock = self._loans.lock
        self._in_forward: dict[tuple[int, int], nn.Module] = {}  # by thread and layer: the module that runs
        self._passes: weakref.WeakValueDictionary[int, _Pass] = weakref.WeakValueDictionary()
        self._in_memory: set[int] = set()
        self._runs: dict[int, Run] = {}  # the latest of each layer
        self._handles: list[RemovableHandle] = []
        self._pieces: list[list[FrozenWeight]] = [[] for _ in layers]  # the offloaded weights of each layer
        self._all: list[tuple[int, FrozenWeight]] = []
        self._before = 0, 0.0
        device = device_of_model(chunks)
        self._homes = Homes(open_store(config.store.drives, device=device), device)
        try:
            self._take_over(chunks, layers, config, tell)
            for number, layer in enumerate(layers):
                if self._pieces[number]:
                    self._handles += self._watch(layer, number)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Bring all weights back into memory and close the store. May be called twice.

        Raises:
            TransferError: Some weights cannot be read. The other weights are in memory again. The next call
                tries again.
        """
        with self._lock, without_subclasses(), ExitStack() as at_last:
            while self._handles:
                self._handles.pop().remove()
            at_last.callback(self._close_store)
            for _, piece in self._all:
                at_last.callback(piece.come_back)

    def _close_store(self) -> None:
        if all(piece.is_back for _, piece in self._all):
            self.resident_bytes = 0  # none of them is offloaded now
            self._homes.store.close()
            # In a cycle, the model would stay alive. Graphs that outlive this object still ask for layers.
            self._all, self._pieces = [], [[] for _ in self._pieces]

    # ---- counts ----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin the count of a step. Weights that are already in memory count as read in this step."""
        with self._lock, without_subclasses():
            self._loans.reclaim()
        self.take()
        read, waited = self._before
        self._before = read - self.resident_bytes, waited

    def take(self) -> WeightsMoved:
        """Return the reads since the last call or the start of the step."""
        homes, (read, waited) = self._homes, self._before
        self._before = homes.read_bytes, homes.waited
        waits, homes.waits = homes.waits, deque(maxlen=_MOST_WAITS)
        return WeightsMoved(homes.read_bytes - read, homes.waited - waited, tuple(waits))

    def watch_moves(self, seen: Callable[[Moved], object] | None) -> None:
        """Call a function after each call that moves bytes. See :meth:`MultiStore.watch_moves`."""
        self._homes.store.watch_moves(seen)

    # ---- how many weights stay in memory ---------------------------------------------------------

    what, slots = "frozen weights", 0  # offloaded weights in memory count as gradients

    @property
    def sizes(self) -> list[int]:
        """Bytes of each weight, in the order in which :meth:`arrange` offloads the weights."""
        return [piece.nbytes for _, piece in self._spread]

    @property
    def device_bytes(self) -> int:
        """Bytes of the weights that stay in memory."""
        return sum(piece.nbytes for _, piece in self._spread if piece.is_back)

    def arrange(self, offloaded: int) -> None:
        """Offload the first ``offloaded`` weights from now on, and keep the other weights in memory.

        Raises:
            TransferError: A weight cannot be read or written. The remaining weights stay as they were.
        """
        with self._lock, without_subclasses():
            self._loans.reclaim()
            for number, (layer, piece) in enumerate(self._spread):
                if number >= offloaded and not piece.is_back and piece not in self._loans.lent:
                    piece.come_back()
                    self._pieces[layer].remove(piece)
                    self._grow(-piece.nbytes)
                elif number < offloaded and piece.is_back:
                    self._pieces[layer].append(piece)
                    piece.write()

    @property
    def _spread(self) -> list[tuple[int, FrozenWeight]]:
        return [self._all[number] for number in spread(len(self._all))]

    # ---- taking over -----------------------------------------------------------------------------

    def _take_over(self, chunks: Modules, layers: Modules, config: OffloadConfig, tell: Tell) -> None:
        at_least, device = config.min_tensor_bytes, self._homes.device.torch_device
        found = list(own_weights(chunks, layers, at_least, device))
        others = left_out(layers, at_least, device)
        share, experts = Staying(config.frozen_percent), list(map(experts_in, layers))
        named = chain.from_iterable(chunk.named_parameters() for chunk in chunks)
        names = {id(parameter): name for name, parameter in named}
        for number, module, weight, groups in found:
            if share.stays(sum(group[0].untyped_storage().nbytes() for group in groups)):
                continue
            name, slices = names.get(id(weight), ""), slices_of(weight, module)
            parts = []
            for group in groups:
                homes = [Home(self._homes, name, "frozen weights") for _ in range(slices)]
                parts.append(Part(group, homes, self._grow))
            expert = experts[number].get(module) if slices == 1 else module
            piece = FrozenWeight(name, parts_of(weight, module), parts, self._loans, expert)
            # Record the weight before the write, so that an interrupt does not lose the bytes.
            self._pieces[number].append(piece)
            self._all.append((number, piece))
            with without_subclasses():
                piece.write()
            self.nbytes += piece.nbytes
        if others:
            if not found:
                raise UnsupportedError(f"no frozen weight can be offloaded: {others}. {_ONLY}")
            tell(f"some frozen weights stay in memory: {others}. {_ONLY}")
        elif not self.nbytes:
            tell(_NONE)

    def _watch(self, layer: nn.Module, number: int) -> Iterator[RemovableHandle]:
        """Add hooks to a layer.

        Also add hooks to modules in it that have weights, because they can run, save and load alone.
        """
        before, after = _LayerHook(partial(self._begin, number)), _LayerHook(partial(self._end, number))
        yield layer.register_forward_pre_hook(before, prepend=True)
        yield layer.register_forward_hook(after, always_call=True)
        pieces = {id(piece.parameter): piece for piece in self._pieces[number]}
        for owner in layer.modules():
            if not any(id(parameter) in pieces for parameter in owner.parameters(recurse=False)):
                continue
            if owner is not layer:
                begin, end = (_Hook(partial(call, number, is_part=True)) for call in (self._begin, self._end))
                yield owner.register_forward_pre_hook(begin, prepend=True)
                yield owner.register_forward_hook(end, always_call=True)
            save = _Hook(partial(self._save, pieces))
            yield owner.register_state_dict_post_hook(save)  # type: ignore[no-untyped-call]
        for expert in {piece.expert: None for piece in pieces.values() if piece.expert is not None}:
            ask = _Hook(
                partial(self._ask, number, [each for each in pieces.values() if each.expert is expert])
            )
            yield expert.register_forward_pre_hook(ask, prepend=True, with_kwargs=True)

    def _grow(self, nbytes: int) -> None:
        self.resident_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)
        self._count(nbytes)

    # ---- while the model runs --------------------------------------------------------------------

    def _begin(self, number: int, module: nn.Module, *_: object, is_part: bool = False) -> None:
        """Bring the weights of a layer into memory before its forward, or before its recomputation.

        Args:
            number: The layer.
            module: The layer, or a module inside it.
            is_part: Whether this is the forward of a module inside the layer. In this case the layer itself
                may not run, for example if the program calls ``layer.step()``.

        Raises:
            TransferError: The weights cannot be read.
            SessionError: A transform of ``torch.func`` runs the layer, or the program replaced a weight by a
                tensor of another shape, data type or device.
        """
        with self._lock:
            if is_part and self._is_in_use(number):
                return
            if is_transformed():
                raise SessionError(f"transforms of torch.func cannot run layers {_WITH}")
            # Without gradients, this is an evaluation inside a backward hook, not a recomputation.
            run = {piece: piece.begin_run() for piece in self._pieces[number] if piece.expert is not None}
            self._runs[number] = run
            if is_recomputation() and torch.is_grad_enabled():
                self._backward_came(number, run)
                return
            self._in_forward[threading.get_ident(), number] = module
            self._bring(number, self._next(number))

    def _ask(self, number: int, pieces: list[FrozenWeight], _: object, args: Any, kwargs: Any) -> None:
        """Start to read the weights of an expert that is called, or of the experts in an argument."""
        with self._lock, without_subclasses():
            for piece in pieces if self._is_in_use(number) else ():
                found = (numbers_in(each, piece.slices) for each in (*args, *kwargs.values()))
                piece.begin_read({piece: {0} if piece.slices == 1 else next(filter(None, found), set())})

    def _end(
        self, number: int, module: nn.Module, _: object, output: object, *, is_part: bool = False
    ) -> None:
        """Free the weights of a layer after its forward."""
        returns = self._watch_output(number, output)
        run = threading.get_ident(), number
        with self._lock:
            # A recomputed layer is not found here. Its backward comes next.
            if self._in_forward.get(run) is not module:
                return
            del self._in_forward[run]
            # Keep the weights of the last layer, because backward starts there.
            if not (is_part or (returns and number == self._next(number))):
                self.keep_only(self._in_memory - {number})
            elif not self._is_in_use(number):
                with without_subclasses():
                    for piece in self._pieces[number]:
                        piece.shut()

    def _watch_output(self, number: int, output: object) -> bool:
        """Add hooks to outputs that need gradients; return True if there are any.

        The hooks read the weights when backward reaches such an output.

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
        with self._lock:
            this = current_backward()
            found = self._passes.get(this)
            if found is None:
                self._passes[this] = found = _Pass(self)
                call_after_backward(found)
            found.layer = number
            del found  # otherwise the traceback of an error would keep the pass alive
            self._bring(number, self._next(number, by=-1), run)

    def _bring(self, number: int, then: int, run: Run | None = None) -> None:
        """Read the weights of a layer, and start to read the weights of the next layer.

        Args:
            number: The layer.
            then: The next layer.
            run: Before a backward, what the run of the layer has used.
        """
        with self._lock, without_subclasses():
            self._loans.pointed.clear()
            self._loans.reclaim()
            near = {number, then}
            self.keep_only(near)  # weights of a skipped layer may have been read ahead
            self._in_memory |= near
            for piece in self._pieces[number]:
                piece.begin_read(run)
            if then != number:
                for piece in self._pieces[then]:
                    piece.begin_read(None if run is None else self._runs.get(then))
            for piece in self._pieces[number]:
                piece.open(run)

    def keep_only(self, near: set[int]) -> None:
        """Free the weights of all layers except the layers in ``near`` and layers that compute now."""
        with self._lock, without_subclasses():
            for number in self._in_memory - near:
                if not self._is_in_use(number):
                    for piece in self._pieces[number]:
                        piece.leave()
                    self._in_memory.discard(number)

    def _is_in_use(self, number: int) -> bool:
        in_backward = (each.layer for each in self._passes.values())
        return number in in_backward or any(number == layer for _, layer in self._in_forward)

    def _next(self, number: int, *, by: int = 1) -> int:
        """Return the next layer with offloaded weights in this direction; ``number`` if there is none."""
        others = range(number + by, len(self._pieces) if by > 0 else -1, by)
        return next((other for other in others if self._pieces[other]), number)

    def _save(self, pieces: dict[int, Any], owner: nn.Module, state: Any, prefix: str, _: Any) -> None:
        """Replace weights in a state dict by copies in host memory, so that their memory can be freed."""
        # load_state_dict(assign=True) may have replaced a parameter. bitsandbytes saves several tensors.
        own = owner.named_parameters(recurse=False)
        names = [f"{prefix}{name}" for name, parameter in own if id(parameter) in pieces]
        for key in takewhile(methodcaller("startswith", prefix), list(reversed(state))):
            if key.startswith((*names, f"{prefix}SCB")):
                state[key] = state[key].detach().clone().cpu()
        with self._lock, without_subclasses():
            self._loans.reclaim()


class _Pass:
    """A backward pass. Autograd holds this object until the pass ends or fails, and calls it at the end."""

    def __init__(self, weights: FrozenWeights) -> None:
        self.layer = -1
        self._weights = weights

    def __call__(self) -> None:
        self.layer = -1
        self._weights.keep_only(set())


class _Hook:
    """A module hook that cannot be copied. A copy of the model must not use these weights."""

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call

    def __call__(self, *given: object) -> None:
        if not torch.compiler.is_compiling():  # compiled code runs within the hooks of its layer
            self._call(*given)

    def __reduce_ex__(self, _: object) -> Any:
        raise SessionError(f"a model cannot be copied or pickled {_WITH}")


class _LayerHook(_Hook):
    @untraced
    def __call__(self, *given: object) -> None:
        self._call(*given)


class WeightsMoved(NamedTuple):
    """Bytes read in an interval.

    Attributes:
        read_bytes: Bytes that were read.
        waited_seconds: Seconds in which layers waited for reads.
        waits: Start and end of the latest 20,000 waits, by :func:`time.perf_counter`.
    """

    read_bytes: int
    waited_seconds: float
    waits: tuple[tuple[float, float], ...]
