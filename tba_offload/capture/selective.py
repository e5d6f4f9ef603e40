"""The hooks of layers placed ``selective``: offloaded, but what recipes can make again does not travel.

A recipe is on trial at first: its tensor is offloaded as ever, and when backward asks for it, the recipe is
tried and its result compared with the restored bytes. From then on tensors of which a recipe of the same name
makes the same bits are neither kept nor written. One that failed is not tried again.
"""

from __future__ import annotations

import copy
import sys
import weakref
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import torch

from tba_offload.capture.hooks import Kept, LayerHooks, Packed, check_version
from tba_offload.capture.identity import View, look, shares_version, version_witness
from tba_offload.capture.recipes import Finder, norms_of, watch_norm
from tba_offload.capture.scope import ActivationKey
from tba_offload.capture.trace import Fate
from tba_offload.errors import TbaError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

    from tba_offload.capture.hooks import Capture
    from tba_offload.capture.recipes import Maker, Recipe
    from tba_offload.capture.scope import ScopeKey
    from tba_offload.capture.trace import ActivationTrace


NESTED = 2
"""Recipes that take what recipes make: at most so many, one within the other.

All that a recipe takes is in memory with what it makes. So in a chain one in three is offloaded after all.
"""


class Likeness(NamedTuple):
    """By what a recipe is recognized: activations of equal layers have one verdict, whatever their size.

    Attributes:
        name: Of the recipe.
        kind: Class of the layer.
        number: Of the activation in its scope.
        dtype: Of the saved tensor.
        training: Which modules of the layer are in training mode: a dropout that drops nothing leaves the
            same graph.
    """

    name: str
    kind: type
    number: int
    dtype: torch.dtype
    training: tuple[bool, ...]


class Rebuild:
    """One storage that backward computes anew; all saved tensors that look at it share it.

    It holds neither the storage nor those that its recipe takes, but their handles.

    Args:
        rebuilds: What the session knows of recipes.
        storage: The storage itself.
        witness: Shares the version counter of the tensors that look at it.
        recipe: How to compute it.
        trace: What is told of it.
    """

    __slots__ = (
        "__weakref__",
        "_alive",
        "_held",
        "_stream",
        "depth",
        "nbytes",
        "rebuilds",
        "recipe",
        "trace",
        "version",
        "waiting",
        "witness",
    )

    def __init__(
        self,
        rebuilds: Rebuilds,
        storage: torch.UntypedStorage,
        witness: Tensor,
        recipe: Recipe,
        trace: ActivationTrace,
    ) -> None:
        self.rebuilds = rebuilds
        self.nbytes = storage.nbytes()
        self.recipe = recipe
        self.depth = _depth(recipe)
        self.trace = trace
        self.witness = witness
        self.version = witness._version
        self.waiting: weakref.WeakSet[Rebuilt] = weakref.WeakSet()
        self._alive = weakref.ref(storage)
        self._held: torch.UntypedStorage | None = None
        self._stream = rebuilds.stream()  # on which it was computed

    def is_of(self, storage: torch.UntypedStorage, tensor: Tensor) -> bool:
        """Whether ``tensor`` looks at this very storage, and it has not changed."""
        return (
            self._alive() is storage
            and self.witness._version == self.version
            and shares_version(self.witness, tensor)
        )

    def storage(self) -> torch.UntypedStorage:
        """The storage with its bytes: the one that somebody still has, or a new one."""
        stream = self.rebuilds.stream()
        found = self._alive()
        # One that was resized to nothing is alive but empty; one of another stream may not be ready.
        if found is None or found.nbytes() < self.nbytes or stream != self._stream:
            found = self.rebuilds.compute(self.recipe)
            if found.nbytes() != self.nbytes:
                raise AssertionError(f"{self.recipe.name} made {found.nbytes()} bytes, not {self.nbytes}")
            self._alive, self._stream = weakref.ref(found), stream
        return found

    def used(self, tensor: Rebuilt, storage: torch.UntypedStorage) -> None:
        """Keeps the storage until each tensor was asked for once; from then on only others keep it."""
        if self.trace.unpacked_at is None:
            self.trace.unpacked_at = perf_counter()
        self.waiting.discard(tensor)
        self._held = storage if self.waiting else None


class Rebuilt:
    """A saved tensor whose bytes are computed anew.

    Attributes:
        rebuild: Its storage.
        view: How it looks at it.
        witness: Shares its version counter.
        version: What that counter said.
    """

    __slots__ = ("__weakref__", "rebuild", "version", "view", "witness")

    def __init__(self, rebuild: Rebuild, view: View, witness: Tensor, version: int) -> None:
        self.rebuild = rebuild
        self.view = view
        self.witness = witness
        self.version = version
        rebuild.waiting.add(self)

    def twin(self) -> Rebuilt:
        """The same for somebody else, who will ask for it on his own."""
        return Rebuilt(self.rebuild, self.view, self.witness, self.version)


class OnTrial:
    """A saved tensor that travels, and a recipe that may spare it the way next time.

    Attributes:
        packed: The tensor as it was packed.
        view: How it looks at its storage.
        nbytes: Size of that storage.
        recipe: What is tried, once.
        depth: How many recipes it takes to make it again, one within the other.
        likeness: For what the verdict holds.
    """

    __slots__ = ("depth", "likeness", "nbytes", "packed", "recipe", "view")

    def __init__(self, packed: Packed, recipe: Recipe | None, depth: int, likeness: Likeness) -> None:
        self.packed = packed
        self.view = packed.view
        self.nbytes = packed.handle.record.nbytes
        self.recipe = recipe
        self.depth = depth
        self.likeness = likeness


class Rebuilds:
    """What a session knows of recipes.

    Args:
        capture: Gives back what was saved.
        functions: Recipes for the outputs of custom functions, by the class of the function.
    """

    def __init__(self, capture: Capture, functions: Mapping[type, Maker]) -> None:
        self.capture = capture
        self.functions = functions
        self._verdicts: dict[Likeness, bool] = {}
        self._rebuilds: weakref.WeakValueDictionary[int, Rebuild] = weakref.WeakValueDictionary()
        self._norms: weakref.WeakKeyDictionary[nn.Module, tuple[nn.Module, ...]] = weakref.WeakKeyDictionary()

    def norms_of(self, layer: nn.Module) -> tuple[nn.Module, ...]:
        """The norms within a layer."""
        if layer not in self._norms:
            self._norms[layer] = norms_of(layer)
        return self._norms[layer]

    def find(self, storage: torch.UntypedStorage, tensor: Tensor) -> Rebuild | None:
        """The rebuild of a storage that was saved before."""
        found = self._rebuilds.get(storage._cdata)
        return found if found is not None and found.is_of(storage, tensor) else None

    def add(self, tensor: Tensor, recipe: Recipe, key: ActivationKey) -> Rebuild:
        """A new one, found again by its storage."""
        storage = tensor.untyped_storage()
        trace = self.capture.trace
        trace.rebuilt_bytes += storage.nbytes()
        activation = trace.saved(key, storage.nbytes(), Fate.REBUILT)
        rebuild = Rebuild(self, storage, version_witness(tensor), recipe, activation)
        self._rebuilds[storage._cdata] = rebuild
        return rebuild

    def verdict(self, likeness: Likeness) -> bool | None:
        """Whether a recipe makes the same bits; ``None`` if that was not tried yet."""
        return self._verdicts.get(likeness)

    def unpack(self, packed: Kept | Packed | Rebuilt | OnTrial) -> Tensor:
        """As :meth:`Capture.unpack`, which it does the rest of.

        Raises:
            SavedTensorModifiedError: The tensor, or one that it is computed from, was changed in place.
            TransferError: Bytes could not be written or read.
        """
        if isinstance(packed, Rebuilt):
            rebuild = packed.rebuild
            check_version(packed.witness, packed.version, rebuild.trace.key)
            storage = rebuild.storage()
            rebuild.used(packed, storage)
            return look(storage, packed.view)
        if isinstance(packed, OnTrial):
            tensor = self.capture.unpack(packed.packed)
            self._try(packed, tensor)
            return tensor
        return self.capture.unpack(packed)

    def compute(self, recipe: Recipe) -> torch.UntypedStorage:
        """What a recipe makes."""
        return recipe.compute(self.unpack, self.capture.device).untyped_storage()

    def stream(self) -> object:
        """The stream of the device, on which the calling thread computes."""
        return self.capture.offloader.device.stream()

    def _try(self, trial: OnTrial, tensor: Tensor) -> None:
        """Compares what a recipe makes with the tensor that it is for."""
        recipe, trial.recipe = trial.recipe, None
        likeness = trial.likeness
        if recipe is None or self._verdicts.get(likeness) is False:
            return
        try:
            made = self.compute(recipe)
        except TbaError:
            raise
        except RuntimeError:  # the operations refuse what they were given, or there is no memory for a trial
            is_same = False
        else:
            is_same = made.nbytes() == trial.nbytes and _same_bits(look(made, trial.view), tensor)
        self._verdicts[likeness] = is_same
        if is_same:
            trial.packed.trace.fate = Fate.REBUILT


class SelectiveHooks(LayerHooks):
    """The hooks of one scope of a layer that is placed ``selective``.

    Args:
        rebuilds: What the session knows of recipes.
        layer: The layer.
        key: The scope.
        when_slow: Whether activations may be kept when the ceiling of bytes in flight is reached.
        kept: Numbers of the activations that the plan keeps in memory.
        part: Number of the one that it keeps a part of, and how many bytes that is.
    """

    __slots__ = ("_layer", "_rebuilds", "_training", "_watched")

    def __init__(
        self,
        rebuilds: Rebuilds,
        layer: nn.Module,
        key: ScopeKey,
        *,
        when_slow: bool,
        kept: frozenset[int] = frozenset(),
        part: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(rebuilds.capture, key, when_slow=when_slow, kept=kept, part=part)
        self._rebuilds = rebuilds
        self._layer = layer
        self._training: tuple[bool, ...] | None = None
        self._watched: list[RemovableHandle] = []

    def __enter__(self) -> None:
        super().__enter__()
        try:
            for norm in self._rebuilds.norms_of(self._layer):
                self._watched.append(watch_norm(norm))
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            super().__exit__(kind, error, traceback)
        finally:
            for handle in self._watched:
                handle.remove()

    def _unpacker(self) -> Callable[..., Tensor]:
        return self._rebuilds.unpack

    def _pack_new(  # type: ignore[override]
        self, tensor: Tensor, storage: torch.UntypedStorage, view: View
    ) -> Kept | Packed | Rebuilt | OnTrial:
        """As for offloaded layers, if there is no recipe."""
        found = self._rebuilds.find(storage, tensor)
        if found is not None:
            self.capture.trace.deduplicated_bytes += view.footprint().distinct
            return _rebuilt(found, tensor, view)
        recipe = self._recipe_of(tensor, storage, view)
        if recipe is None:
            return super()._pack_new(tensor, storage, view)
        if self._training is None:
            self._training = tuple(module.training for module in self._layer.modules())
        likeness = Likeness(recipe.name, type(self._layer), self._count, tensor.dtype, self._training)
        verdict = self._rebuilds.verdict(likeness)
        if verdict:
            return _rebuilt(self._rebuilds.add(tensor, recipe, self._next_key()), tensor, view)
        packed = super()._pack_new(tensor, storage, view)
        if verdict is None and isinstance(packed, Packed):
            return OnTrial(packed, recipe, _depth(recipe), likeness)
        return packed

    def _recipe_of(self, tensor: Tensor, storage: torch.UntypedStorage, view: View) -> Recipe | None:
        """A recipe for a tensor that does not stay in memory anyway."""
        capture, key = self.capture, ActivationKey(self._key, self._count)
        is_small = view.footprint().distinct < capture.min_tensor_bytes
        if is_small or key.number in self._kept or capture.is_learned(key, storage.nbytes()):
            return None
        # Made anew each time, because it refers back to this object.
        recipe = Finder(self._share, self._rebuilds.functions).recipe_of(tensor)
        return recipe if recipe is not None and _depth(recipe) <= NESTED else None

    def _share(self, packed: object) -> Kept | Packed | Rebuilt | OnTrial | None:
        """A hold of its own on what was saved, so that its use by a recipe is not taken for the only one."""
        if isinstance(packed, OnTrial):
            own = self._share(packed.packed)
            return OnTrial(own, None, packed.depth, packed.likeness) if isinstance(own, Packed) else None
        if isinstance(packed, Kept):
            return packed
        if isinstance(packed, torch.nn.Parameter):
            return Kept(packed)
        if isinstance(packed, Rebuilt):
            return packed.twin()
        if isinstance(packed, Packed) and self.capture.offloader.owns(packed.handle):
            return self._share_record(packed)
        return None

    def _share_record(self, packed: Packed) -> Packed:
        handle = packed.handle
        twin = copy.copy(packed)
        twin.handle = self.capture.offloader.handle(handle.record, handle.lo, handle.hi)
        if handle.record in self._deferred and handle.record.span_over(handle.lo, handle.hi) is None:
            self._deferred[handle.record].append(weakref.ref(twin))
        return twin


def _depth(recipe: Recipe) -> int:
    """How many recipes lie one within the other, if those of what it takes count."""
    return 1 + max((_depth_of(source) for source in recipe.leaves()), default=0)


def _depth_of(source: object) -> int:
    if isinstance(source, Rebuilt):
        return source.rebuild.depth
    return source.depth if isinstance(source, OnTrial) else 0


def _rebuilt(rebuild: Rebuild, tensor: Tensor, view: View) -> Rebuilt:
    return Rebuilt(rebuild, view, version_witness(tensor), tensor._version)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit: -0 is not +0, and a NaN equals itself."""
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)))
