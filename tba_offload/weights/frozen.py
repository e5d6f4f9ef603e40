"""Frozen weights on drives, as of the model that LoRA trains on top of: the layer that computes has them.

The weights of a layer are read before its forward, and again before its backward; meanwhile those of the
layer that comes next are read. They are written once, when they are taken over.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from tba_offload.config import ConfigLike, OffloadConfig, Paths, read_config, with_directories
from tba_offload.device.streams import device_of
from tba_offload.errors import SessionError, TransferError
from tba_offload.layers import untraced
from tba_offload.layers.nested import TooManyError, tensors_in
from tba_offload.layers.stack import explicit_layers, find_layers
from tba_offload.states.home import Home, Homes
from tba_offload.store import open_store
from tba_offload.weights.piece import Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from torch.utils.hooks import RemovableHandle

    from tba_offload.store.base import ActivationStore

_current_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward pass of the calling thread, -1 outside of one."""


def offload_frozen(
    model: nn.Module | Sequence[nn.Module],
    config: ConfigLike = None,
    *,
    layers: Sequence[nn.Module] | None = None,
    directories: Paths | None = None,
) -> FrozenWeights:
    """Keeps the frozen weights of a model's layers in a store, but for those of the layer that computes.

    Weights count as frozen that need no gradient now. Only ``torch.nn.Parameter`` itself travels, of at least
    ``min_tensor_bytes``, whose memory no other layer and nothing outside the layers uses. Read from outside
    of its layer such a weight is NaN; ``state_dict()`` has the values, in host memory.

    Args:
        model: The model, or its chunks.
        config: As for :func:`tba_offload.attach`; its ``store``, ``on_full`` and ``min_tensor_bytes`` count.
        layers: The layers, if they cannot be found or others are wanted.
        directories: Where the bytes go, instead of where the policy says: one path, or one for each drive.

    Returns:
        The weights. Close them, or use them as a context manager: they come back into memory then.

    Raises:
        ConfigError: The configuration is wrong, or no layers were found.
        StoreError: The store cannot be opened.
        TransferError: A weight cannot be written, and the policy says that this is an error.
    """
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    stack = find_layers(chunks) if layers is None else explicit_layers(chunks, layers)
    chosen = with_directories(read_config(config), directories)
    return FrozenWeights(chunks, [layer.module for layer in stack.layers], chosen)


class FrozenWeights:
    """The frozen weights of some layers.

    Args:
        chunks: The model or its chunks.
        layers: In the order in which they run.
        config: Its store, ``on_full`` and ``min_tensor_bytes`` count.
        count: Told by how many bytes memory of the device grows, or shrinks.
        tell: Called with a line where weights stay in memory.

    Attributes:
        nbytes: Bytes of all that travel.
        resident_bytes: Those that are in memory now.
        peak_bytes: The most that have been since the last :meth:`take_over`.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        layers: Sequence[nn.Module],
        config: OffloadConfig,
        *,
        count: Callable[[int], object] = lambda _: None,
        tell: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.nbytes = self.resident_bytes = self.peak_bytes = 0
        self._told = count
        self._layers = layers
        self._lock = threading.RLock()
        self._at: dict[int, tuple[int, int]] = {}  # of a thread: its backward pass, and the layer it is at
        self._handles: list[RemovableHandle] = []
        device = next((p.device for chunk in chunks for p in chunk.parameters()), torch.device("cpu"))
        self._store: ActivationStore = open_store(config.store.options(), device=device_of(device))
        homes = Homes(
            self._store,
            device_of(device),
            stall_limit=config.store.stall_seconds,
            keep_when_full=False,
            tell=tell,
            padded=False,
        )
        self._pieces: list[list[Piece]] = [[] for _ in layers]
        try:
            self._take_over(chunks, config, homes, tell)
            for number, layer in enumerate(layers):
                if self._pieces[number]:
                    self._handles += self._watch(layer, number)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Brings all weights back into memory and closes the store. May be called twice.

        Raises:
            TransferError: Some cannot be read.
        """
        with self._lock:
            while self._handles:
                self._handles.pop().remove()
            for pieces in self._pieces:
                for piece in pieces:
                    piece.come_back()
                pieces.clear()
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- taking over -----------------------------------------------------------------------------

    def _take_over(
        self, chunks: Sequence[nn.Module], config: OffloadConfig, homes: Homes, tell: Callable[[str], object]
    ) -> None:
        for number, parameters in _own_storages(chunks, self._layers, config.min_tensor_bytes):
            piece = Piece(parameters, Home(homes, parameters[0][0], "frozen weights"), self._grow)
            try:
                piece.send()
            except TransferError as error:
                if config.on_full != "keep":
                    raise
                tell(f"frozen weights stay in memory from here on, since they cannot be written: {error}")
                return
            self._pieces[number].append(piece)
            self.nbytes += piece.nbytes

    def _watch(self, layer: nn.Module, number: int) -> Iterator[RemovableHandle]:
        yield layer.register_forward_pre_hook(_Before(self, number), prepend=True)
        yield layer.register_forward_hook(_After(self, number), always_call=True)
        yield layer.register_state_dict_post_hook(_Saved(self, number))  # type: ignore[no-untyped-call]
        yield layer.register_load_state_dict_pre_hook(_Before(self, number))  # type: ignore[no-untyped-call]
        yield layer.register_load_state_dict_post_hook(_Loaded(self, number))  # type: ignore[no-untyped-call]

    def _grow(self, nbytes: int) -> None:
        self.resident_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)
        self._told(nbytes)

    # ---- while the model runs --------------------------------------------------------------------

    def begins(self, number: int) -> None:
        """The forward of a layer begins: for the first time, or once more because backward has come to it.

        Raises:
            TransferError: Its weights cannot be read.
            SessionError: One was changed while it was away.
        """
        if _current_pass() != -1:
            self.returned(number)
            return
        with self._lock:
            self._bring(number, then=number + 1)

    def _bring(self, number: int, *, then: int) -> None:
        """Has the weights of a layer here, while those of another are on their way."""
        for piece in self._pieces[number]:
            piece.begin()
        if 0 <= then < len(self._pieces):
            for piece in self._pieces[then]:
                piece.begin()
        for piece in self._pieces[number]:
            piece.arrive()

    def ran(self, number: int, output: object) -> None:
        """The forward of a layer has ended."""
        if _current_pass() != -1:  # it was made again for its backward, which is to come
            return
        returns = torch.is_grad_enabled() and self._note_return(number, output)
        with self._lock:
            # The last layer is the first that backward comes back to.
            if not (returns and number == len(self._pieces) - 1):
                self._send_away(number)

    def _note_return(self, number: int, output: object) -> bool:
        """Has backward tell when it comes back to a layer; whether it may."""
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
        thread, this = threading.get_ident(), _current_pass()
        with self._lock:
            earlier, before = self._at.get(thread, (-1, -1))
            self._at[thread] = this, number
            if earlier != this:  # it begins, and the one before ended, perhaps by an error, or waits for it
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(partial(self._pass_ended, thread))
            elif before != number:
                self._send_away(before)
            self._bring(number, then=number - 1)

    def _pass_ended(self, thread: int) -> None:
        with self._lock:
            _, last = self._at.pop(thread, (-1, -1))
            for number in {last, len(self._pieces) - 1} - {-1}:
                self._send_away(number)

    def _send_away(self, number: int) -> None:
        """Frees the memory of a layer's weights, unless a backward pass is at that layer."""
        if number not in (at for _, at in self._at.values()):
            for piece in self._pieces[number]:
                piece.leave()

    # ---- checkpoints -----------------------------------------------------------------------------

    def copies(self, number: int) -> dict[str, torch.Tensor]:
        """The weights of a layer in new host memory, by their names in the layer.

        Raises:
            TransferError: They cannot be read.
        """
        with self._lock:
            return {name: copy for piece in self._pieces[number] for name, copy in piece.copies().items()}

    def loaded(self, number: int) -> None:
        """Other values were loaded into the weights of a layer."""
        with self._lock:
            self._send_away(number)


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


class _Returned(_Hook):
    def __call__(self, _gradient: torch.Tensor) -> None:
        self._weights.returned(self._number)


class _Saved(_Hook):
    def __call__(self, _layer: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
        for name, copy in self._weights.copies(self._number).items():
            if f"{prefix}{name}" in state:
                state[f"{prefix}{name}"] = copy


class _Loaded(_Hook):
    def __call__(self, *_: object) -> None:
        self._weights.loaded(self._number)


def _own_storages(
    chunks: Sequence[nn.Module], layers: Sequence[nn.Module], at_least: int
) -> Iterator[tuple[int, list[tuple[str, nn.Parameter]]]]:
    """Storages of frozen weights that belong to one layer alone: its number, and what looks at them."""
    owner = {module: number for number, layer in enumerate(layers) for module in layer.modules()}
    users: defaultdict[int, list[tuple[int | None, str, torch.Tensor]]] = defaultdict(list)
    names = [{id(each): name for name, each in layer.named_parameters()} for layer in layers]
    for chunk in chunks:
        for module in chunk.modules():
            number = owner.get(module)
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if type(tensor) is nn.Parameter or type(tensor) is torch.Tensor:
                    name = "" if number is None else names[number].get(id(tensor), "")
                    users[tensor.untyped_storage()._cdata].append((number, name, tensor))
    for found in users.values():
        numbers = {number for number, _, _ in found}
        (number, _, first), *_ = found
        if len(numbers) > 1 or number is None or first.untyped_storage().nbytes() < at_least:
            continue
        parameters = {name: tensor for _, name, tensor in found if name}
        if len(parameters) == len(found) and all(map(_travels, parameters.values())):
            yield number, list(parameters.items())  # type: ignore[arg-type]


def _travels(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is nn.Parameter
        and tensor.is_leaf
        and not tensor.requires_grad
        and tensor.layout is torch.strided
        and not tensor.is_complex()
        and tensor.numel() > 0
    )
