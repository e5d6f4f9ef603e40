"""The hooks of layers placed ``offload-remat``: offloaded, but what recipes can make again does not travel.

A recipe is on trial at first: its tensor is offloaded as ever, and when backward asks for it, the recipe is
tried and its result compared with the restored bytes. From then on tensors of which a recipe of the same name
makes the same bits are neither kept nor written. One that failed is not tried again.

What a layer does may change later. So in each step one tensor whose recipe is trusted is written as well,
in turn, and the recipe is tried on it again. Of each tensor that is not written a few elements are kept, with
which the recipe's result is compared. On a device that computes asynchronously the training thread reads the
outcome when the step has ended.
"""

from __future__ import annotations

import copy
import sys
import weakref
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import torch

from tba_offload.capture.hooks import LayerHooks
from tba_offload.capture.identity import View, local_of, restore, shares_version, version_witness, viewed
from tba_offload.capture.recipes import Finder, norms_of, watch_norm
from tba_offload.capture.saved import Kept, Packed
from tba_offload.capture.trace import Treatment
from tba_offload.errors import TbaError, UnsupportedError, warn
from tba_offload.layers import settings
from tba_offload.layers.graph import check_version
from tba_offload.transfer.storage import Handle

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

    from tba_offload.capture.hooks import Capture
    from tba_offload.capture.recipes import Maker, Recipe
    from tba_offload.capture.registry import SeenView
    from tba_offload.capture.scope import ActivationKey, ScopeKey
    from tba_offload.capture.trace import ActivationTrace


NESTED = 2
"""Recipes that take what recipes make: at most so many, one within the other.

All that a recipe takes is in memory with what it makes. So in a chain one in three is offloaded after all.
"""

LEAST_TURNS = 16
"""Steps after which the same activation is tried again, at least: recipes spare 15 in 16 of their bytes."""

SAMPLED = 64
"""Elements of an activation that are compared each time that it is made again.

It takes 0.1 ms of a CPU with cold caches: 0.4 % of a step whose activations have 2.7 MiB.
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


class Comparison(NamedTuple):
    """What a recipe made, compared with what was saved.

    Attributes:
        differs: Whether they differ; a tensor on the device if the device computes asynchronously.
        key: The activation.
        likeness: That of the recipe.
        is_written: Whether backward was given what was saved, which travelled; else what the recipe made.
    """

    differs: bool | Tensor
    key: ActivationKey
    likeness: Likeness
    is_written: bool


class Rebuild:
    """One storage that backward computes anew; all saved tensors that look at it share it.

    It holds neither the storage nor those that its recipe takes, but their handles.

    Args:
        rebuilds: What the session knows of recipes.
        storage: The storage itself.
        witness: Shares the version counter of the tensors that look at it.
        recipe: How to compute it.
        likeness: What says that the recipe makes the same.
        trace: What is told of it.
    """

    __slots__ = (
        "__weakref__",
        "_alive",
        "_held",
        "_sample",
        "_settings",
        "_stream",
        "depth",
        "likeness",
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
        likeness: Likeness,
        trace: ActivationTrace,
    ) -> None:
        self.rebuilds = rebuilds
        self.nbytes = storage.nbytes()
        self.recipe = recipe
        self.likeness = likeness
        self.depth = _depth(recipe)
        self.trace = trace
        self.witness = witness
        self.version = witness._version
        self.waiting: weakref.WeakSet[Rebuilt] = weakref.WeakSet()
        self._alive = weakref.ref(storage)
        self._held: torch.UntypedStorage | None = None
        self._stream = rebuilds.stream()  # on which it was computed
        self._sample = _sample(storage, likeness.dtype).clone()
        self._settings = settings.current()

    def is_of(self, storage: torch.UntypedStorage, tensor: Tensor) -> bool:
        """Whether ``tensor`` looks at this very storage, and it has not changed."""
        return (
            self._alive() is storage
            and self.witness._version == self.version
            and shares_version(self.witness, tensor)
        )

    def storage(self) -> torch.UntypedStorage:
        """Return the storage with its bytes: the one that is still in use, or a new one."""
        stream = self.rebuilds.stream()
        found = self._alive()
        # One that was resized to nothing is alive but empty; one of another stream may not be ready.
        if found is None or found.nbytes() < self.nbytes or stream != self._stream:
            with settings.in_force(self._settings):
                found = self.rebuilds.compute(self.recipe)
            if found.nbytes() != self.nbytes:
                raise AssertionError(f"{self.recipe.name} made {found.nbytes()} bytes, not {self.nbytes}")
            made = _sample(found, self.likeness.dtype)
            self.rebuilds.compare(made, self._sample, self.trace.key, self.likeness, is_written=False)
            self._alive, self._stream = weakref.ref(found), stream
        return found

    def used(self, tensor: Rebuilt, storage: torch.UntypedStorage) -> None:
        """Keep the storage until each tensor was asked for once; from then on only others keep it."""
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
        """Return the same for another user, which asks for it by itself."""
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
        self._trusted = 0  # activations of this step that need not travel
        self._turn = 0  # number among them of the one that does
        self._open: list[Comparison] = []  # of which the device has not told the outcome

    def begin_step(self) -> None:
        """Another activation travels in this step to be compared again."""
        self._turn = (self._turn or max(self._trusted, LEAST_TURNS)) - 1
        self._trusted = 0

    def end_step(self, *, failed: bool) -> None:
        """Look at the comparisons of the step that the device has made meanwhile.

        Raises:
            UnsupportedError: A recipe did not make what was saved, and backward has used it.
        """
        comparisons, self._open = self._open, []
        if comparisons and not failed:
            outcomes = torch.stack([torch.as_tensor(found.differs) for found in comparisons]).tolist()
            for found, differs in zip(comparisons, outcomes, strict=True):
                if differs:
                    self._withdraw(found)

    def has_turn(self) -> bool:
        """Whether the next activation that need not travel does, to be compared again."""
        self._trusted += 1
        return self._trusted == self._turn + 1

    def norms_of(self, layer: nn.Module) -> tuple[nn.Module, ...]:
        """Return the norms within a layer."""
        if layer not in self._norms:
            self._norms[layer] = norms_of(layer)
        return self._norms[layer]

    def find(self, storage: torch.UntypedStorage, tensor: Tensor) -> Rebuild | None:
        """Return the rebuild of a storage that was saved before."""
        found = self._rebuilds.get(storage._cdata)
        return found if found is not None and found.is_of(storage, tensor) else None

    def add(self, tensor: Tensor, recipe: Recipe, likeness: Likeness, key: ActivationKey) -> Rebuild:
        """Return a new one, found again by its storage."""
        storage = tensor.untyped_storage()
        trace = self.capture.trace
        trace.rebuilt_bytes += storage.nbytes()
        activation = trace.saved(key, storage.nbytes(), Treatment.REBUILT)
        rebuild = Rebuild(self, storage, version_witness(tensor), recipe, likeness, activation)
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
            return restore(storage, packed.view, packed.witness)
        if isinstance(packed, OnTrial):
            tensor = self.capture.unpack(packed.packed)
            self._try(packed, tensor)
            return tensor
        return self.capture.unpack(packed)

    def compute(self, recipe: Recipe) -> torch.UntypedStorage:
        """Return what a recipe makes."""
        return recipe.compute(self.unpack, self.capture.device).untyped_storage()

    def stream(self) -> object:
        """Return the stream of the device, on which the calling thread computes."""
        return self.capture.offloader.device.stream()

    def compare(
        self, made: Tensor, saved: Tensor, key: ActivationKey, likeness: Likeness, *, is_written: bool
    ) -> None:
        """Compare bits that a trusted recipe made with those that were saved, or have the device do it.

        Raises:
            UnsupportedError: They differ, and what was saved was not written.
        """
        if self.capture.offloader.device.runs_behind:
            self._open.append(Comparison((made != saved).any(), key, likeness, is_written))
        elif not torch.equal(made, saved):
            self._withdraw(Comparison(True, key, likeness, is_written))  # noqa: FBT003

    def _withdraw(self, found: Comparison) -> None:
        """Record that a recipe that was trusted made something else than was saved.

        It is not used any more.
        """
        self._verdicts[found.likeness] = False
        message = (
            f"what the recipe {found.likeness.name} makes is no longer what {found.key} saved: the layer has "
            "changed, or changes tensors where autograd does not see it (.data, a kernel of its own). "
        )
        if not found.is_written:
            raise UnsupportedError(
                f"{message}its gradients of this step are wrong: do not use them. such activations are "
                "written from the next step on; place the layer offload instead of offload-remat"
            )
        warn(
            f"{message}the bytes that were written are used, and such activations are written from now on; "
            "place the layer offload instead of offload-remat"
        )

    def _try(self, trial: OnTrial, tensor: Tensor) -> None:
        """Compare what a recipe makes with the tensor that it is for."""
        recipe, trial.recipe = trial.recipe, None
        likeness, trace = trial.likeness, trial.packed.trace
        verdict = self._verdicts.get(likeness)
        if recipe is None or verdict is False:
            return
        made = self._make(recipe, trial)
        if verdict is None:
            self._verdicts[likeness] = made is not None and torch.equal(made, _bits(tensor))
        elif made is None:
            self._withdraw(Comparison(True, trace.key, likeness, is_written=True))  # noqa: FBT003
        else:
            self.compare(made, _bits(tensor), trace.key, likeness, is_written=True)
        if self._verdicts[likeness]:
            trace.treatment = Treatment.REBUILT

    def _make(self, recipe: Recipe, trial: OnTrial) -> Tensor | None:
        """Return the bits of what a recipe makes for a trial; None if it is refused, or of another size."""
        try:
            made = self.compute(recipe)
        except TbaError:
            raise
        except RuntimeError:  # the operations refuse what they were given, or there is no memory for a trial
            return None
        return _bits(viewed(made, trial.view)) if made.nbytes() == trial.nbytes else None


class RematerializingHooks(LayerHooks):
    """The hooks of one scope of a layer that is placed ``offload-remat``.

    Args:
        rebuilds: What the session knows of recipes.
        layer: The layer.
        key: The scope.
        when_slow: Whether activations may be kept when the window is full.
    """

    __slots__ = ("_layer", "_rebuilds", "_training", "_watched")

    def __init__(
        self,
        rebuilds: Rebuilds,
        layer: nn.Module,
        key: ScopeKey,
        *,
        when_slow: bool,
    ) -> None:
        super().__init__(rebuilds.capture, key, when_slow=when_slow)
        self._unpack = rebuilds.unpack
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

    def _pack_new(  # type: ignore[override]
        self, tensor: Tensor, storage: torch.UntypedStorage, seen: SeenView
    ) -> Kept | Packed | Rebuilt | OnTrial:
        """As for offloaded layers, if there is no recipe."""
        view, footprint = seen
        found = self._rebuilds.find(storage, tensor)
        if found is not None:
            self.capture.trace.deduplicated_bytes += footprint[2]
            return _rebuilt(found, tensor, view)
        recipe = self._recipe_of(tensor, storage, view)
        if recipe is None:
            return super()._pack_new(tensor, storage, seen)
        if self._training is None:
            self._training = tuple(module.training for module in self._layer.modules())
        likeness = Likeness(recipe.name, type(self._layer), self._count, tensor.dtype, self._training)
        verdict = self._rebuilds.verdict(likeness)
        if verdict and not self._rebuilds.has_turn():
            return _rebuilt(self._rebuilds.add(tensor, recipe, likeness, self._next_key()), tensor, view)
        packed = super()._pack_new(tensor, storage, seen)
        if verdict is not False and isinstance(packed, Packed):
            return OnTrial(packed, recipe, _depth(recipe), likeness)
        return packed

    def _recipe_of(self, tensor: Tensor, storage: torch.UntypedStorage, view: View) -> Recipe | None:
        """Return a recipe for a tensor that does not stay in memory anyway."""
        is_small, number = view.footprint()[2] < self.capture.min_tensor_bytes, self._count
        if local_of(tensor) is not tensor:
            return None  # recipes run operations on what is of this rank
        if is_small or (number, storage.nbytes()) in self._learned:
            return None
        # Made anew each time, because it refers back to this object.
        recipe = Finder(self._share, self._rebuilds.functions).recipe_of(tensor)
        return recipe if recipe is not None and _depth(recipe) <= NESTED else None

    def _share(self, packed: object) -> Kept | Packed | Rebuilt | OnTrial | None:
        """Return a hold of its own on what was saved: its use by a recipe is not the only one."""
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
        self.capture.offloader.writer.join(handle.record)
        twin = copy.copy(packed)
        twin.handle = Handle(handle.record, handle.lo, handle.hi, self.capture.offloader.drops)
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


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sample(storage: torch.UntypedStorage, dtype: torch.dtype) -> Tensor:
    """Return a few elements of a storage that such ones fill, as integers."""
    itemsize = min(dtype.itemsize, 8)
    count = storage.nbytes() // itemsize
    step = count // SAMPLED | 1  # odd, so that they are not all of one column
    return viewed(storage, View(_INTEGERS[itemsize], ((count - 1) // step + 1,), (step,), 0))


def _bits(tensor: Tensor) -> Tensor:
    """Integers that are equal if the bits are: -0 is not +0, and a NaN equals itself."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return flat if flat.numel() % 8 or flat.data_ptr() % 8 else flat.view(torch.int64)
