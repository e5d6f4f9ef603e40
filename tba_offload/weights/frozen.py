"""Frozen weights on drives, as of the model that LoRA trains on top of: the layer that computes has them.

The weights of a layer are read before its forward, and again before its backward; meanwhile those of the
layer that comes next are read. They are written once, when they are taken over.
"""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from tba_offload.config import ConfigLike, OffloadConfig, Paths, read_config, with_directories
from tba_offload.device.streams import device_of_model
from tba_offload.errors import SessionError, TransferError
from tba_offload.layers import untraced
from tba_offload.layers.nested import TooManyError, tensors_in
from tba_offload.layers.stack import explicit_layers, find_layers
from tba_offload.placements import Staying
from tba_offload.states.home import Home, Homes
from tba_offload.store import open_store
from tba_offload.store.base import close_after
from tba_offload.weights.choice import name_on_other_devices, name_others, own_storages
from tba_offload.weights.in_use import InUse
from tba_offload.weights.piece import Piece
from tba_offload.weights.traffic import WeightsTraffic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from torch.utils.hooks import RemovableHandle

    from tba_offload.store.base import ActivationStore

logger = logging.getLogger(__name__)

_current_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward pass of the calling thread, -1 outside of one."""


def offload_frozen(
    model: nn.Module | Sequence[nn.Module],
    config: ConfigLike = None,
    *,
    layers: Sequence[nn.Module] | None = None,
    directories: Paths | None = None,
) -> FrozenWeights:
    """Keep the frozen weights of a model's layers in a store, but for those of the layer that computes.

    Weights count as frozen that need no gradient now. Only ``torch.nn.Parameter`` itself travels, of at least
    ``min_tensor_bytes``, whose memory no other layer and nothing outside the layers uses. Read from outside
    of its layer such a weight is NaN; ``state_dict()`` has the values, in host memory.

    Args:
        model: The model, or its chunks.
        config: As for :func:`tba_offload.attach`; its ``store``, ``on_full`` and ``min_tensor_bytes`` count,
            and the share if its ``weights`` name one.
        layers: The layers, if they cannot be found or others are wanted.
        directories: Where the bytes go, instead of where the policy says: one path, or one for each drive.

    Returns:
        The weights. Close them, or use them as a context manager: they come back into memory then.

    Raises:
        ConfigError: The configuration is wrong, or no layers were found.
        StoreError: The store cannot be opened.
        TransferError: A weight cannot be written, and the policy says that this is an error.
        UnsupportedError: No weight can travel, and those of the layers are of classes that cannot.
    """
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    stack = find_layers(chunks) if layers is None else explicit_layers(chunks, layers)
    chosen = with_directories(read_config(config), directories)
    return FrozenWeights(chunks, [layer.module for layer in stack.layers], chosen, tell=logger.warning)


class FrozenWeights:
    """The frozen weights of some layers.

    Args:
        chunks: The model or its chunks.
        layers: In the order in which they run.
        config: Its store, ``on_full``, ``min_tensor_bytes`` and the share of its ``weights`` count.
        count: Told by how many bytes memory of the device grows, or shrinks.
        tell: Called with a line where weights stay in memory.
        traffic: Takes note of what they move; by default nothing does.

    Attributes:
        nbytes: Bytes of all that travel.
        resident_bytes: Those that are in memory now.
        peak_bytes: The most that were since they were taken over, or since this was set to 0.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        layers: Sequence[nn.Module],
        config: OffloadConfig,
        *,
        count: Callable[[int], object] = lambda _: None,
        tell: Callable[[str], object] = lambda _: None,
        traffic: WeightsTraffic | None = None,
    ) -> None:
        self.nbytes = self.resident_bytes = self.peak_bytes = 0
        self._told = count
        self._layers = layers
        self._lock = threading.RLock()
        self._in_use = InUse()
        self._in_memory: set[int] = set()
        self._handles: list[RemovableHandle] = []
        device = device_of_model(chunks)
        self._store: ActivationStore = open_store(config.store.options(), device=device)
        homes = Homes(
            self._store,
            device,
            stall_limit=config.store.stall_seconds,
            keep_when_full=False,
            tell=tell,
            padded=False,
        )
        self._pieces: list[list[Piece]] = [[] for _ in layers]
        self._traffic = traffic or WeightsTraffic()
        try:
            self._take_over(chunks, config, homes, tell)
            self._traffic.begin(homes)
            for number, layer in enumerate(layers):
                if self._pieces[number]:
                    self._handles += self._watch(layer, number)
                    self._handles += self._watch_owners(layer, number)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Brings all weights back into memory and closes the store. May be called twice.

        Raises:
            TransferError: Some cannot be read. The others are back, and the next call tries again.
            SessionError: Something was computed with one that was away.
        """
        with self._lock, ExitStack() as at_last:
            while self._handles:
                self._handles.pop().remove()
            at_last.callback(self._close_store)
            for pieces in self._pieces:
                for piece in [*pieces]:
                    at_last.callback(self._come_back, pieces, piece)

    def _come_back(self, pieces: list[Piece], piece: Piece) -> None:
        spoilt = piece.come_back()
        pieces.remove(piece)
        if spoilt:
            raise SessionError(
                f"something was computed with the frozen weight {spoilt} while its values were in the store; "
                "it has its values again. close the frozen weights first, and compute afterwards"
            )

    def _close_store(self) -> None:
        if not any(self._pieces):
            self._traffic.end()
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        close_after(error, self.close)

    # ---- taking over -----------------------------------------------------------------------------

    def _take_over(
        self, chunks: Sequence[nn.Module], config: OffloadConfig, homes: Homes, tell: Callable[[str], object]
    ) -> None:
        percent = config.frozen_percent or 100
        share = Staying(percent)
        could_travel = False
        device = homes.device.torch_device
        for number, parameters in own_storages(chunks, self._layers, config.min_tensor_bytes, device):
            could_travel = True
            if share.stays(parameters[0][1].untyped_storage().nbytes()):
                continue
            piece = Piece(parameters, Home(homes, parameters[0][0], "frozen weights"), self._grow)
            self._pieces[number].append(piece)  # first: an interrupt must not lose what was sent
            try:
                piece.send()
            except TransferError as error:
                self._pieces[number].remove(piece)
                if config.on_full != "keep":
                    raise
                tell(f"frozen weights stay in memory from here on, since they cannot be written: {error}")
                return
            self.nbytes += piece.nbytes
        lie_elsewhere = name_on_other_devices(self._layers, config.min_tensor_bytes, device, tell)
        name_others(self._layers, config.min_tensor_bytes, travels=could_travel, tell=tell)
        if not (could_travel or lie_elsewhere):
            tell(
                "no frozen weight travels: no weight of the layers is frozen, of min_tensor_bytes or more, "
                "and in memory that nothing else uses. those that are frozen after this stay in memory"
            )
        elif could_travel and not self.nbytes:
            tell(
                f"no frozen weight travels: {percent} % of the bytes are less than half of one; "
                "raise weights.frozen"
            )

    def _watch(self, layer: nn.Module, number: int) -> Iterator[RemovableHandle]:
        yield layer.register_forward_pre_hook(_Before(self, number), prepend=True)
        yield layer.register_forward_hook(_After(self, number), always_call=True)

    def _watch_owners(self, layer: nn.Module, number: int) -> Iterator[RemovableHandle]:
        """Watches modules that have weights: they are saved, or come back to, without their layer too."""
        pieces = {id(parameter): piece for piece in self._pieces[number] for parameter in piece.parameters}
        for owner in layer.modules():
            own = [p for p in owner.parameters(recurse=False) if id(p) in pieces]
            if not own:
                continue
            found = list(dict.fromkeys(pieces[id(parameter)] for parameter in own))
            if owner is not layer:
                yield owner.register_forward_pre_hook(_Part(self, number), prepend=True)
            yield owner.register_forward_hook(_Output(self, number))
            yield owner.register_state_dict_post_hook(_Saved(self, number, found))  # type: ignore[no-untyped-call]
            yield owner.register_load_state_dict_pre_hook(_Load(self, number, found))  # type: ignore[no-untyped-call]
            yield owner.register_load_state_dict_post_hook(_Loaded(self, number, found))  # type: ignore[no-untyped-call]

    def _grow(self, nbytes: int) -> None:
        self.resident_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)
        self._told(nbytes)

    # ---- while the model runs --------------------------------------------------------------------

    def begins(self, number: int, *, is_part: bool = False) -> None:
        """Record that the forward of a layer begins.

        For the first time, or once more because backward has come to it.

        Args:
            number: The layer.
            is_part: It is that of a module in it, whose layer may not run at all, as in ``layer.step()``.

        Raises:
            TransferError: Its weights cannot be read.
            SessionError: One was changed while it was away, or a transform of ``torch.func`` runs the layer.
        """
        with self._lock:
            if is_part and number in self._in_use:
                return
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise SessionError(
                "transforms of torch.func cannot run layers whose frozen weights are in the store; "
                "close them first"
            )
        if _is_made_again():
            self.returned(number)
            return
        with self._lock:
            if not is_part:
                self._in_use.begin(number)
            self._bring(number, then=_next(number, self._pieces))

    def _bring(self, number: int, *, then: int) -> None:
        """Has the weights of a layer here, while those of another are on their way."""
        near = {number, then}
        # Of these others some were read in vain, as of a layer that was left out.
        for other in self._in_memory - near:
            self._send_away(other)
        self._in_memory |= near
        for each in (number, *near - {number}):
            for piece in self._pieces[each]:
                piece.begin()
        with self._traffic.waiting():
            for piece in self._pieces[number]:
                piece.arrive()
        for piece in self._pieces[number]:
            piece.use()

    def ran(self, number: int, output: object) -> None:
        """Record that the forward of a layer has ended."""
        returns = self.note_return(number, output)
        with self._lock:
            if not self._in_use.end(number):  # it was made again for its backward, which is to come
                return
            # The last layer is the first that backward comes back to.
            if not (returns and number == _next(number, self._pieces)):
                self._send_away(number)

    def note_return(self, number: int, output: object) -> bool:
        """Has backward tell when it comes back to a layer; whether it may.

        Raises:
            SessionError: The output cannot be looked through.
        """
        if not torch.is_grad_enabled():
            return False
        try:
            found = [tensor for tensor in tensors_in(output) if tensor.requires_grad and tensor.grad_fn]
        except TooManyError:
            raise SessionError(
                "the output of a layer with frozen weights holds too much to be looked through"
            ) from None
        for tensor in found:
            tensor.register_hook(_Returned(self, number))  # type: ignore[no-untyped-call]
        return bool(found)

    def returned(self, number: int) -> None:
        """Backward has come back to a layer.

        Raises:
            TransferError: Its weights cannot be read.
            SessionError: One was changed while it was away.
        """
        this = _current_pass()
        with self._lock:
            before = self._in_use.reach(this, number)
            if before is None:
                engine: Any = torch.autograd.Variable._execution_engine
                ended = partial(self._pass_ended, this)
                engine.queue_callback(ended)
                self._in_use.follow(this, number, ended)
                del ended  # or the traceback of an error below would keep the pass alive
            elif before != number:
                self._send_away(before)
            self._bring(number, then=_next(number, self._pieces, by=-1))

    def _pass_ended(self, this: int) -> None:
        with self._lock:
            self._in_use.leave(this)
            for number in [*self._in_memory]:
                self._send_away(number)

    def _send_away(self, number: int) -> None:
        """Frees the memory of a layer's weights, unless it computes."""
        if number not in self._in_use:
            with self._traffic.waiting():  # for reads in vain
                for piece in self._pieces[number]:
                    piece.leave()
            self._in_memory.discard(number)

    # ---- checkpoints -----------------------------------------------------------------------------

    def copies(self, pieces: Sequence[Piece]) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Weights, each with its values in new host memory.

        Raises:
            TransferError: They cannot be read.
        """
        with self._lock:
            return [each for piece in pieces for each in piece.copies()]

    def load(self, number: int, pieces: Sequence[Piece]) -> None:
        """Other values are about to be loaded into some weights of a layer.

        Raises:
            TransferError: They cannot be read.
            SessionError: One was changed while it was away.
        """
        with self._lock:
            self._in_memory.add(number)
            for piece in pieces:
                piece.arrive()

    def loaded(self, number: int) -> None:
        """They were."""
        with self._lock:
            self._send_away(number)


def _next(number: int, pieces: Sequence[Sequence[Piece]], *, by: int = 1) -> int:
    """Return the next layer of which a weight travels, after another one; that one itself if there is none.

    Args:
        number: The other one.
        pieces: Of each layer.
        by: 1 as forward goes, -1 as backward does.
    """
    others = range(number + by, len(pieces) if by > 0 else -1, by)
    return next((other for other in others if pieces[other]), number)


def _is_made_again() -> bool:
    """Whether a forward is one that backward asks for; without gradients it is an evaluation in a hook."""
    return _current_pass() != -1 and torch.is_grad_enabled()


class _Hook:
    """What a module is given: copies of the model must not take the weights of this one for theirs."""

    def __init__(self, weights: FrozenWeights, number: int) -> None:
        self._weights = weights
        self._number = number

    def __deepcopy__(self, memo: object) -> _Hook:
        raise SessionError("a model whose frozen weights are in the store cannot be copied; close them first")

    def __reduce__(self) -> tuple[object, ...]:
        raise SessionError(
            "a model whose frozen weights are in the store cannot be pickled; close them first"
        )


class _Before(_Hook):
    @untraced.hook
    def __call__(self, *_: object) -> None:
        self._weights.begins(self._number)


class _After(_Hook):
    @untraced.hook
    def __call__(self, _layer: nn.Module, _arguments: object, output: object) -> None:
        self._weights.ran(self._number, output)


class _Part(_Hook):
    def __call__(self, *_: object) -> None:
        if not torch.compiler.is_compiling():  # what is compiled runs within its layer
            self._weights.begins(self._number, is_part=True)


class _Output(_Hook):
    def __call__(self, _module: nn.Module, _arguments: object, output: object) -> None:
        if not torch.compiler.is_compiling():  # what is compiled comes back as one
            self._weights.note_return(self._number, output)


class _Returned(_Hook):
    def __call__(self, _gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise SessionError(
                "gradients of gradients (create_graph=True) would read frozen weights that are in the store; "
                "close them first"
            )
        self._weights.returned(self._number)


class _OwnersHook(_Hook):
    """What a module is given that has some pieces of a layer."""

    def __init__(self, weights: FrozenWeights, number: int, pieces: Sequence[Piece]) -> None:
        super().__init__(weights, number)
        self._own = pieces


class _Saved(_OwnersHook):
    def __call__(self, owner: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
        values = {id(parameter): copy for parameter, copy in self._weights.copies(self._own)}
        for name, parameter in owner.named_parameters(recurse=False):
            # load_state_dict(assign=True) has perhaps put another parameter in its place.
            if f"{prefix}{name}" in state and id(parameter) in values:
                state[f"{prefix}{name}"] = values[id(parameter)]


class _Load(_OwnersHook):
    def __call__(self, *_: object) -> None:
        self._weights.load(self._number, self._own)


class _Loaded(_OwnersHook):
    def __call__(self, *_: object) -> None:
        self._weights.loaded(self._number)
