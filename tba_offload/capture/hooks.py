"""Saved-tensor hooks: ``pack`` keeps or offloads a saved tensor, ``unpack`` returns the tensor to backward.

A session has one :class:`Capture`. Each run of an offloaded layer pushes its own :class:`LayerHooks`.

``pack`` never returns the saved tensor itself. Some operations save their own output. If ``pack`` returned
this output and backward never ran, the output would never be freed.

The bytes of a saved tensor that does not require a gradient are read only after the operation that saved the
tensor has ended. Some kernels still write to a saved input, for example the noise tensor of ``rrelu``. An
operation creates its autograd node before it saves tensors, so a higher node number shows that the previous
operation has ended. A tensor that requires a gradient is complete when autograd saves the tensor.
"""

from __future__ import annotations

import weakref
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, UntypedStorage

from tba_offload import torch_private
from tba_offload.capture import views
from tba_offload.capture.schedule import PrefetchSchedule
from tba_offload.capture.trace import ActivationKey, ActivationTrace, ScopeKey, StepTrace, Treatment
from tba_offload.layers.graph import check_version

if TYPE_CHECKING:
    from collections.abc import Callable

    from tba_offload.transfer.offloader import Offloader
    from tba_offload.transfer.saved import SavedRef, SavedStorage

SPARSE = 4
"""A view that uses less than 1 / ``SPARSE`` of its storage is copied into a dense tensor."""

RELEARN_AFTER = 32
"""Number of steps between two resets of :attr:`Capture.learned`.

After a reset, the session learns again which activations another reference keeps in memory.
"""


class Kept:
    """A saved tensor that stays in memory.

    Attributes:
        tensor: The saved tensor, or a dense copy if the saved tensor is a small view of a large storage.
        probe: A tensor that shares the version counter of the saved tensor.
        version: The version of the saved tensor at ``pack``. ``unpack`` compares versions, because
            saved-tensor hooks switch off autograd's check.
        view: The original view of the saved tensor if ``tensor`` is a copy; else ``None``.
        address: The original address of the first element if ``tensor`` is a copy.
    """

    __slots__ = ("address", "probe", "tensor", "version", "view")

    def __init__(self, tensor: Tensor) -> None:
        # A leaf parameter has no graph, so holding it keeps no graph alive.
        alone = type(tensor) is torch.nn.Parameter and tensor.is_leaf
        self.tensor = self.probe = tensor if alone else tensor.detach()
        self.version = tensor._version
        self.view: views.View | None = None

    def shrink(self) -> None:
        """Replace a sparse view by a dense copy, so that the large storage of the view can be freed."""
        whole = views.local_of(self.tensor)
        self.view, self.address = views.view_of(whole), whole.data_ptr()
        self.probe, self.tensor = views.version_probe(self.tensor), views.dense_copy(whole)


class Packed:
    """A saved tensor whose bytes belong to a saved storage.

    Attributes:
        saved: The saved storage.
        view: The view of the saved tensor on its storage.
        probe: A tensor that shares the version counter of the saved tensor.
        version: The version of the saved tensor at ``pack``.
        address: The original address of the first element if the saved storage is a dense copy; else 0.
    """

    __slots__ = ("address", "probe", "saved", "version", "view")

    saved: SavedStorage
    view: views.View
    probe: Tensor
    version: int
    address: int


class Capture:
    """The saved tensors of one session.

    Args:
        offloader: Writes activations to the store, and reads activations back.
        min_tensor_bytes: Smallest number of bytes of a storage that is offloaded.

    Attributes:
        static: The storages of the model's parameters, gradients and buffers.
        schedule: The prefetch schedule.
        trace: The trace of the current step.
        budget_bytes: Maximum bytes of activations in memory for layers placed ``auto``; ``None`` for no
            limit.
        slow_kept_bytes: Bytes kept in this step because the drive was too slow.
        learned: For each layer, the activations that are not offloaded, because another reference keeps them
            in memory or recomputed layers share them. Each entry has the index and the size of an activation.
    """

    def __init__(self, offloader: Offloader, *, min_tensor_bytes: int) -> None:
        self.offloader, self.device = offloader, offloader.device.torch_device
        # At least 1, so that a tensor without elements stays in memory.
        self.min_tensor_bytes = max(min_tensor_bytes, 1)
        self.budget_bytes: int | None = None
        self.static = views.StaticStorages()
        self.schedule, self.trace = PrefetchSchedule(offloader), StepTrace()
        self.slow_kept_bytes = self._largest = self._step = 0
        self.look_at_memory: Callable[[], object] | None = None
        # A key is the address of a storage object. For a dense copy the key also has the view. An address may
        # be reused, so each value has a weak reference to its storage.
        self.saved: dict[object, SavedRef] = {}
        self.kept: dict[int, weakref.ref[UntypedStorage]] = {}
        self.learned: dict[int, set[tuple[int, int]]] = {}

    # ---- pack: the rest is in LayerHooks ---------------------------------------------------------

    def find(
        self, storage: UntypedStorage, tensor: Tensor, view: views.View | None = None
    ) -> SavedStorage | None:
        """Return the saved storage with the bytes of ``tensor``; ``None`` if the bytes are not saved."""
        address = storage._cdata
        ref = self.saved.get(address if view is None else (address, view))
        saved = ref() if ref is not None else None
        if saved is None or saved.source() is not storage or tensor._version != saved.version:
            return None
        # Two tensors on one storage may have separate version counters. A write to one tensor does not change
        # the version of the other.
        return saved if torch_private.shares_version(saved.probe, tensor) else None

    def is_kept(self, storage: UntypedStorage) -> bool:
        """Return True if :meth:`note_kept` was called for this storage in this step."""
        kept = self.kept.get(storage._cdata)
        return kept is not None and kept() is storage

    def learn(self, trace: ActivationTrace) -> None:
        """Keep an activation in memory in later steps."""
        self.learned.setdefault(trace.key.scope.layer, set()).add((trace.key.number, trace.nbytes))

    def note_kept(self, storage: UntypedStorage) -> None:
        """Keep a storage in memory until the end of this step, even if autograd saves it again."""
        self.kept[storage._cdata] = weakref.ref(storage)

    def keeps_when_slow(self, nbytes: int) -> bool:
        """Return True if an activation of this size may stay in memory because the drive is too slow."""
        window = self.offloader.window
        if not window.is_crowded(window.in_flight, nbytes):
            return False
        # Backward needs room for two more activations: one in use, and one not released yet.
        self._largest = max(self._largest, nbytes)
        resident = window.in_flight + self.trace.kept_bytes + nbytes + 2 * self._largest
        return self.budget_bytes is None or resident <= self.budget_bytes

    # ---- unpack ----------------------------------------------------------------------------------

    def unpack(self, packed: Kept | Packed) -> Tensor:
        """Return the saved tensor, with its original bytes and view.

        Raises:
            SavedTensorModifiedError: The tensor was changed in place after it was saved.
            SessionError: The step that saved the tensor was discarded.
            TransferError: The bytes could not be written or read.
        """
        if isinstance(packed, Kept):
            if packed.probe._version != packed.version:
                check_version(packed.probe, packed.version, "a kept activation")
            if packed.view is None:
                return packed.tensor
            return self._spread_out(packed.tensor.untyped_storage(), packed)
        saved = packed.saved
        if self.look_at_memory is not None:
            self.look_at_memory()
        if packed.probe._version != packed.version:
            check_version(packed.probe, packed.version, saved.key)
        storage, start = self.offloader.fetch(saved)
        # Rebuild the tensor before I/O threads wake up, because these calls release the GIL.
        if not packed.address:
            tensor = views.restore(storage, packed.view, packed.probe, start)
        else:
            tensor = self._spread_out(storage, packed, start)
        trace: ActivationTrace = saved.trace
        if trace.unpacked_at is None:
            trace.unpacked_at = perf_counter()
            if saved.was_held:  # another reference keeps the bytes in memory
                self.learn(trace)
            self.schedule.used(trace.key)
        return tensor

    def _spread_out(self, dense: UntypedStorage, packed: Any, start: int = 0) -> Tensor:
        room = views.spread_out(dense, start, packed.view, packed.address, self.offloader.device)
        return views.restore(room.storage, (*packed.view[:3], 0), packed.probe, room.start)

    def protect(self, storage: UntypedStorage) -> None:
        """Release a storage before its owner resizes the storage. See :meth:`Offloader.release_memory`."""
        ref = self.saved.get(storage._cdata)
        saved = ref() if ref is not None else None
        if saved is not None and saved.source() is storage:
            self.offloader.release_memory(saved, storage)

    # ---- steps -----------------------------------------------------------------------------------

    def begin_step(self, *, look_at_memory: Callable[[], object] | None = None) -> None:
        """Start a new trace. Every :data:`RELEARN_AFTER` steps, clear :attr:`learned`.

        Args:
            look_at_memory: Function that samples memory when a storage is saved and when backward uses a
                saved tensor. ``None`` if the memory meter takes no samples.
        """
        self._step += 1
        if self._step % RELEARN_AFTER == 0:
            self.learned.clear()
        self.look_at_memory = look_at_memory
        self.trace, self.slow_kept_bytes = StepTrace(), 0
        self.schedule.begin_step()

    def end_step(self, *, failed: bool, is_broken: bool) -> None:
        """Forget which storages were saved or kept in this step.

        Unless ``is_broken`` is True, a saved storage stays valid until autograd releases the storage.

        Args:
            failed: Whether the step failed. A failed step does not change the prefetch order.
            is_broken: Whether the offloader discards the step.
        """
        self.saved.clear()
        self.kept.clear()
        if failed:
            top = torch_private.hooks_on_top()
            # After an interrupt, layers may not have popped their hooks.
            while top is not None and getattr(getattr(top[0], "__self__", None), "capture", None) is self:
                torch_private.pop_hooks()
                top = torch_private.hooks_on_top()
            self.schedule.abandon_step()
        if is_broken:
            self.offloader.abandon()
        else:
            self.offloader.end_step()

    def forget_learned(self, layers: set[int]) -> None:
        """Clear :attr:`learned` for layers whose placement changes."""
        for layer in layers:
            self.learned.pop(layer, None)


class LayerHooks:
    """The saved-tensor hooks of one run of a layer. The layer's forward runs inside this context manager.

    Args:
        capture: The session's capture.
        key: The run of the layer.
        when_slow: Whether activations may stay in memory when the in-flight window is full.
        stays: Function that takes the bytes of an activation and returns True if the activation stays in
            memory. ``stays`` is called once for each activation, in the order of saving. If ``stays`` is
            ``None``, all activations are offloaded.
        saves_inputs: Whether the hooks see only the inputs of a layer that is recomputed. Inputs without a
            gradient that several layers share, such as masks, stay in memory from the second step on.
    """

    is_of_tba_offload = True  # torch.func transforms start with these hooks removed
    understands = staticmethod(views.is_understood)

    def __init__(
        self,
        capture: Capture,
        key: ScopeKey,
        *,
        when_slow: bool,
        stays: Callable[[int], bool] | None = None,
        saves_inputs: bool = False,
    ) -> None:
        self.capture, self._key, self._when_slow, self._stays = capture, key, when_slow, stays
        self._saves_inputs = saves_inputs
        self._learned = capture.learned.get(key.layer, ())
        self._may_keep = bool(self._learned) or when_slow or stays is not None
        # Autograd holds this function, so the function must not refer to this object.
        self._unpack: Callable[[Any], Tensor] = capture.unpack
        self._numbers = count()  # number of activations in this scope
        self._filling: list[Kept | SavedStorage] = []  # tensors to which an operation may still write
        self._node = 0  # autograd's latest node number at the last save

    def __enter__(self) -> None:
        self.capture.offloader.raise_failures()
        torch_private.push_hooks(self.pack, self._unpack)

    def __exit__(self, *error: object) -> None:
        torch_private.pop_hooks()
        if self._filling:
            self._operation_ended()
        offloader = self.capture.offloader
        if self._when_slow or not offloader.window.held_back:
            offloader.flush()

    @torch_private.untraced
    def pack(self, tensor: Tensor) -> Kept | Packed:
        """Keep a saved tensor, or queue its write to the store."""
        capture = self.capture
        if self._filling and torch_private.latest_node() != self._node:
            self._operation_ended()
        if type(tensor) is torch.nn.Parameter or torch_private.current_backward() != -1:
            return Kept(tensor)
        local = tensor if type(tensor) is Tensor else views.local_of(tensor)
        if type(local) is not Tensor and not self.understands(local, capture.device):
            return self._keep_odd(tensor)
        try:
            storage = local.untyped_storage()
        except RuntimeError:  # sparse tensors and wrappers of functorch have no storage
            return self._keep_odd(tensor)
        # Cheap checks come first. For most tensors these checks find nothing.
        address, base = storage._cdata, tensor._base
        if address in capture.static.addresses and storage in capture.static:
            return Kept(tensor)
        if base is not None and base.is_leaf and isinstance(base, torch.nn.Parameter):
            # FSDP gathers weights for this scope. Autograd saves views of these weights, but they are not
            # activations.
            capture.note_kept(storage)
            return Kept(tensor)
        nbytes = storage.nbytes()
        if nbytes < capture.min_tensor_bytes:
            capture.trace.kept_bytes += nbytes
            return Kept(tensor)
        # This check is last, because it takes as much time as all checks before it.
        if not self.understands(local, capture.device):
            return self._keep_odd(tensor)
        if address in capture.saved and (saved := capture.find(storage, tensor)) is not None:
            return self._packed(tensor, local, saved)
        if address in capture.kept and capture.is_kept(storage):
            return Kept(tensor)
        return self._pack_new(tensor, local, storage)

    def _pack_new(self, tensor: Tensor, local: Tensor, storage: UntypedStorage) -> Kept | Packed:
        nbytes = storage.nbytes()
        # unsafe_chunk(), which a GRU uses, gives each chunk its own version counter. Other chunks may change
        # during the write.
        is_apart = local.nbytes < nbytes and tensor._base is None and tensor.requires_grad and local is tensor
        if is_apart or local.nbytes * SPARSE < nbytes:
            return self._pack_sparse(tensor, local, storage)
        key = ActivationKey(self._key, next(self._numbers))
        if self._may_keep and (kept := self._keep(tensor, key, nbytes)) is not None:
            self.capture.note_kept(storage)
            return kept
        if self.capture.look_at_memory is not None:
            self.capture.look_at_memory()
        is_filling = not tensor.requires_grad
        saved = self.capture.offloader.save(storage, key, at_once=self._when_slow, is_filling=is_filling)
        if is_filling:
            self._filling.append(saved)
            self._node = torch_private.latest_node()
        return self._packed(tensor, local, saved, storage._cdata)

    def _packed(self, tensor: Tensor, local: Tensor, saved: SavedStorage, place: object = None) -> Packed:
        """Return a :class:`Packed`. A new saved storage gets the key ``place`` in :attr:`Capture.saved`."""
        capture, packed = self.capture, Packed()
        packed.saved = saved
        saved.tensors += 1
        packed.view = local.dtype, local.shape, local.stride(), local.storage_offset()  # type: ignore[assignment]
        if place is None:
            capture.trace.deduplicated_bytes += local.nbytes
            first: ActivationKey = saved.trace.key
            # Such as a mask or a rotary table. The first of the layers in backward would wait for a read.
            if self._saves_inputs and first.scope.layer != self._key.layer and not tensor.requires_grad:
                capture.learn(saved.trace)
            is_like = type(tensor) is Tensor and saved.probe.dtype is tensor.dtype
            packed.probe = saved.probe if is_like else views.version_probe(tensor)
        else:
            key: Any = saved.key
            packed.probe = saved.probe = views.version_probe(tensor)
            saved.version = tensor._version
            saved.trace = ActivationTrace(key, saved.nbytes, Treatment.OFFLOADED)
            capture.trace.activations.append(saved.trace)
            capture.saved[place] = saved.ref
            capture.schedule.saved(saved.ref)
        packed.version, packed.address = saved.version, 0
        return packed

    def _pack_sparse(self, tensor: Tensor, local: Tensor, storage: UntypedStorage) -> Kept | Packed:
        """Save a dense copy of a view that uses little of its storage, or that has its own version counter.

        The copy is offloaded only if the view requires a gradient. A view without a gradient may belong to
        the user's data set, or a running kernel may still write to the view.
        """
        capture, view, nbytes = self.capture, views.view_of(local), local.nbytes
        if nbytes < capture.min_tensor_bytes or not tensor.requires_grad:
            return self._keep_few(tensor, nbytes)
        saved, address = capture.find(storage, tensor, view), local.data_ptr()
        if saved is not None:
            packed = self._packed(tensor, local, saved)
        else:
            key = ActivationKey(self._key, next(self._numbers))
            if (kept := self._keep(tensor, key, nbytes)) is not None:
                kept.shrink()
                return kept
            capture.offloader.make_room(nbytes)
            copy = views.dense_copy(local).untyped_storage()
            saved = capture.offloader.save(copy, key, at_once=self._when_slow)
            saved.source = weakref.ref(storage)
            packed = self._packed(tensor, local, saved, (storage._cdata, view))
        packed.address = address
        return packed

    # ---- tensors that stay in memory -------------------------------------------------------------

    def _keep(self, tensor: Tensor, key: ActivationKey, nbytes: int) -> Kept | None:
        capture, trace = self.capture, self.capture.trace
        if (key.number, nbytes) in self._learned:  # costs no memory, so ``stays`` does not count it
            treatment = Treatment.LEARNED_KEEP
        elif self._stays is not None and self._stays(nbytes):
            treatment = Treatment.PLANNED_KEEP
        elif self._when_slow and capture.keeps_when_slow(nbytes):
            treatment = Treatment.SLOW_KEEP
            capture.slow_kept_bytes += nbytes
        else:
            return None
        trace.kept_bytes += nbytes
        trace.activations.append(ActivationTrace(key, nbytes, treatment))
        return Kept(tensor)

    def _keep_odd(self, tensor: Tensor) -> Kept:
        """Keep a tensor that cannot be rebuilt from its bytes. The bytes of parameters are not counted."""
        if not (tensor.is_leaf and tensor.requires_grad):
            self.capture.trace.kept_bytes += tensor.numel() * tensor.itemsize
        return Kept(tensor)

    def _keep_few(self, tensor: Tensor, nbytes: int) -> Kept:
        """Keep a dense copy of a sparse view, so that the large storage of the view can be freed."""
        self.capture.trace.kept_bytes += nbytes
        kept = Kept(tensor)
        if tensor.requires_grad:
            kept.shrink()
        else:
            self._filling.append(kept)
            self._node = torch_private.latest_node()
        return kept

    def _operation_ended(self) -> None:
        filled, self._filling = self._filling, []
        for each in filled:
            if isinstance(each, Kept):
                each.shrink()
            else:
                each.is_filling = False
