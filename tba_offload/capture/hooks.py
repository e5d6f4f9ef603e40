"""The saved-tensor hooks: what pack decides and what unpack gives back.

One :class:`Capture` serves a session. For each execution of an offloaded layer it pushes the hooks of a
:class:`LayerHooks`, which knows the scope. ``pack`` does one look-up and one queue operation.

``pack`` never returns the saved tensor itself: an operation that saves its own output would then keep
itself alive if backward never runs. It returns a :class:`Kept` or a :class:`Packed`.

An operation saves its inputs before its kernel runs, and a kernel may fill one of them: ``rrelu`` its noise.
So the bytes of a tensor without a graph are read only when the operation that saves it has ended. Its node is
made before it saves anything, and the next operation's after it has ended: the number that autograd gives to
the latest node tells. A tensor with a graph was filled before: results get theirs after the kernel, and
filling one again raises its version.
"""

from __future__ import annotations

import contextlib
import weakref
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.capture.identity import (
    StaticStorages,
    View,
    is_nothing,
    is_understood,
    local_of,
    restore,
    shares_version,
    version_witness,
    viewed,
)
from tba_offload.capture.registry import Entry, Registry
from tba_offload.capture.saved import Kept, Packed
from tba_offload.capture.scope import ActivationKey, Lookahead, ScopeKey
from tba_offload.capture.trace import ActivationTrace, StepTrace, Treatment
from tba_offload.device.ranges import aligned_range
from tba_offload.layers.graph import (
    check_version,
    hooks_on_top,
    keeps_graph,
    latest_node,
    pop_hooks,
    push_hooks,
    untraced,
)
from tba_offload.transfer.storage import Handle, Record, State

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator
    from types import TracebackType

    from tba_offload.capture.registry import SeenView
    from tba_offload.transfer.offloader import Offloader

    Unpack = Callable[[Any], torch.Tensor]

GATHER_BELOW = 0.75
"""Strided views that need less than this share of the bytes they span are gathered before they travel."""

DENSE_FROM = 0.9
"""A view that needs at least this share of its span is written at once, gaps and all."""


class Capture:
    """What the layers of one session save, step by step.

    Args:
        offloader: Moves the bytes.
        min_tensor_bytes: Tensors that need fewer bytes stay in memory.
        budget_bytes: The budget of resident activations that layers placed ``auto`` keep to.
    """

    def __init__(
        self, offloader: Offloader, *, min_tensor_bytes: int, budget_bytes: int | None = None
    ) -> None:
        self.offloader = offloader
        self.min_tensor_bytes = min_tensor_bytes
        self.budget_bytes = budget_bytes
        self.device = offloader.device.torch_device
        self.static = StaticStorages()
        self.lookahead = Lookahead(offloader.ahead)
        self.trace = StepTrace()
        self.slow_kept_bytes = 0
        self.look_at_memory: Callable[[], object] | None = None
        self.registry = Registry()
        self._largest = 0

    def configure(self, *, min_tensor_bytes: int) -> None:
        """Set how small a tensor may be to travel; between steps."""
        self.min_tensor_bytes = min_tensor_bytes

    def begin_step(self, *, look_at_memory: Callable[[], object] | None = None) -> None:
        """Start a new trace; what was learned long ago is put to the test again.

        Args:
            look_at_memory: Called with each tensor, where a meter sees only what it looks at.
        """
        self.registry.begin_step()
        self.look_at_memory = look_at_memory
        self.trace = StepTrace()
        self.slow_kept_bytes = 0
        self.lookahead.begin_step()

    def end_step(self, *, failed: bool) -> None:
        """Forget the records of the step; those that autograd still holds live on with their handles."""
        self.registry.end_step()
        if failed:
            self._pop_left_hooks()
        self.offloader.drain()
        if failed:
            self.lookahead.abandon_step()
            self.offloader.abandon()
        else:
            self.offloader.ahead.give_up()

    def _pop_left_hooks(self) -> None:
        """Record that an interrupt may have struck just before a layer popped its hooks."""
        while (top := hooks_on_top()) is not None:
            layer_hooks = getattr(top[0], "__self__", None)
            if not isinstance(layer_hooks, LayerHooks) or layer_hooks.capture is not self:
                return
            pop_hooks()

    # ---- records ---------------------------------------------------------------------------------

    def add(
        self,
        record: Record,
        storage: torch.UntypedStorage,
        witness: torch.Tensor,
        view: View,
        footprint: tuple[int, int, int],
    ) -> ActivationTrace:
        """Register a new record by its storage, so that other threads find it and it is read ahead."""
        trace = ActivationTrace(record.key, record.nbytes, Treatment.OFFLOADED, perf_counter())  # type: ignore[arg-type]
        self.trace.activations.append(trace)
        entry = Entry(witness)
        entry.record, entry.trace, entry.view, entry.footprint = record, trace, view, footprint
        entry.version = witness._version
        self.registry.entries[storage._cdata] = entry
        self.lookahead.saved(record)
        return trace

    def protect(self, storage: torch.UntypedStorage) -> None:
        """Record that the owner of ``storage`` is about to resize it: see :meth:`Offloader.protect`."""
        record = self.registry.record_of(storage)
        if record is not None:
            self.offloader.writer.join(record)
            self.offloader.protect(storage, record)

    # ---- what to keep ----------------------------------------------------------------------------

    def keeps_when_slow(self, nbytes: int) -> bool:
        """Whether an activation may be kept because the drive does not follow."""
        if not self.offloader.ledger.crowded(nbytes):
            return False
        # In backward one activation is in use beside those, and another is not yet given back.
        self._largest = max(self._largest, nbytes)
        resident = self.offloader.in_flight + self.trace.kept_bytes + nbytes + 2 * self._largest
        return self.budget_bytes is None or resident <= self.budget_bytes

    # ---- unpack ----------------------------------------------------------------------------------

    def unpack(self, packed: Kept | Packed) -> torch.Tensor:
        """Return the saved tensor: same bytes, same view.

        Raises:
            SavedTensorModifiedError: It was changed in place since it was saved.
            TransferError: Its bytes could not be written or read.
        """
        if isinstance(packed, Kept):
            if packed.witness._version != packed.version:
                check_version(packed.witness, packed.version, "a kept activation")
            if packed.spread is None:
                return packed.tensor
            return self._spread(packed.tensor, packed.spread, packed)
        handle, trace = packed.handle, packed.trace
        record = handle.record
        if self.look_at_memory is not None:
            self.look_at_memory()
        if packed.witness._version != packed.version:
            check_version(packed.witness, packed.version, record.key)
        if handle.tensor is not None and (recalled := self._recall(handle, trace)) is not None:
            return recalled
        is_first = not handle.drop.read
        storage, shift = self.offloader.reader.fetch(handle)
        # Before the I/O threads are woken: these calls let go of the GIL, and they would take it.
        if packed.spread is None:
            tensor = restore(storage, packed.view, packed.witness, shift)
        else:
            tensor = self._spread(viewed(storage, packed.view, shift), packed.spread, packed)
        if is_first and trace.unpacked_at is None:
            trace.unpacked_at = perf_counter()
            self.lookahead.used(record.key)  # type: ignore[arg-type]
        if is_first and record.held:
            self.registry.learn(trace.key, trace.nbytes)
        return tensor

    def _recall(self, handle: Handle, trace: ActivationTrace) -> torch.Tensor | None:
        """Return the saved tensor itself while it waits for its batch.

        None if the offloader has its bytes.
        """
        if keeps_graph():
            self.offloader.writer.join(handle.record)  # it may be asked for again much later
        tensor = self.offloader.reader.recall(handle)
        if tensor is not None and trace.unpacked_at is None:
            trace.unpacked_at = perf_counter()
            self.lookahead.used(handle.record.key)  # type: ignore[arg-type]
        return tensor

    def _spread(self, gathered: torch.Tensor, view: View, packed: Kept | Packed) -> torch.Tensor:
        """Put gathered elements back where their view had them; what lies between them is undefined."""
        lo, hi, _ = view.footprint()
        room = aligned_range(hi - lo, packed.address, 1, self.offloader.device)
        moved = view.moved(room.start - lo)
        viewed(room.storage, moved.distinct()).copy_(gathered)
        return restore(room.storage, moved, packed.witness)


class LayerHooks:
    """The hooks of one scope; a context manager around the layer's forward.

    Args:
        capture: What the session captures.
        key: The scope.
        when_slow: Whether activations may be kept when the window is full.
    """

    __slots__ = (
        "_count",
        "_deferred",
        "_filling",
        "_key",
        "_learned",
        "_node",
        "_small",
        "_unpack",
        "_when_slow",
        "capture",
    )

    def __init__(
        self,
        capture: Capture,
        key: ScopeKey,
        *,
        when_slow: bool,
    ) -> None:
        self.capture = capture
        self._key = key
        self._when_slow = when_slow
        self._learned: Container[tuple[int, int]] = capture.registry.learned.get(key.layer, ())
        # What gives back what is packed here: it must not know this object, which is of one scope only.
        self._unpack: Unpack = capture.unpack
        self._count = 0
        self._deferred: dict[Record, list[weakref.ref[Packed]]] = {}
        self._filling: dict[Record, None] = {}  # deferred until the operation that saves them has ended
        self._small: list[tuple[Kept, View]] = []  # small views, copied then
        self._node = 0  # number of the latest node when they were saved

    def watch_for_second_use(self, tell: Callable[[], object]) -> None:
        """Have a function told when backward asks for a saved tensor twice, which checkpoints give once."""
        unpack, asked = self._unpack, set[tuple[int, int]]()

        def watched(packed: Any) -> torch.Tensor:
            question = torch._C._current_graph_task_id(), id(packed)
            if question in asked and question[0] != -1:
                tell()
            asked.add(question)
            return unpack(packed)

        self._unpack = watched

    def __enter__(self) -> None:
        self.capture.offloader.failures.raise_first()
        push_hooks(self.pack, self._unpack)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pop_hooks()
        if kind is not None and not issubclass(kind, Exception):
            self.capture.offloader.repair()
        # What was put off has to be settled in any case: nothing else would free its memory.
        if self._filling or self._small:
            self._operation_ended()
        for record, views in self._deferred.items():
            self._decide(record, views)
        self.capture.offloader.writer.end_scope(at_once=self._when_slow)

    # ---- pack ------------------------------------------------------------------------------------

    @untraced
    def pack(self, tensor: torch.Tensor) -> Kept | Packed:
        """Decide what becomes of a saved tensor and queue its write."""
        capture = self.capture
        if (self._filling or self._small) and latest_node() != self._node:
            self._operation_ended()
        if type(tensor) is torch.nn.Parameter or torch._C._current_graph_task_id() != -1:
            return Kept(tensor)
        local = tensor if type(tensor) is torch.Tensor else local_of(tensor)
        if type(local) is not torch.Tensor and not is_understood(local, capture.device):
            return self._keep_odd(tensor)
        try:
            storage = local.untyped_storage()
        except RuntimeError:  # sparse tensors and functorch's wrappers have none
            return self._keep_odd(tensor)
        registry, address, base = capture.registry, storage._cdata, tensor._base
        # What looks like a detour spares a call: most addresses are not known, most bases no parameters.
        if address in capture.static.addresses and storage in capture.static:
            return Kept(tensor)
        if base is not None and base.is_leaf and isinstance(base, torch.nn.Parameter):
            # A view of weights that were gathered for this scope, as FSDP does it: never an activation.
            registry.note_kept(storage)
            return Kept(tensor)
        nbytes = storage.nbytes()
        if nbytes < capture.min_tensor_bytes:
            capture.trace.kept_bytes += nbytes
            return Kept(tensor)
        # No earlier: it takes as long as all that comes before.
        if not is_understood(local, capture.device):
            return self._keep_odd(tensor)
        found = registry.entries.get(address)
        if found is not None and (record := found.record).origin() is storage:
            # As Registry.find has it, but for a call.
            witness = found()
            is_same = record.state is not State.RELEASED and tensor._version == found.version
            if is_same and witness is not None and shares_version(witness, tensor):
                return self._pack_more(tensor, local, storage, found, witness)
        if address in registry.kept and registry.is_kept(storage):
            return Kept(tensor)
        looks = local.dtype, local.shape, local.stride(), local.storage_offset()
        seen = registry.views.get(looks) or registry.new_view(looks)  # type: ignore[arg-type]
        return self._pack_new(tensor, storage, seen)

    def _pack_new(self, tensor: torch.Tensor, storage: torch.UntypedStorage, seen: SeenView) -> Kept | Packed:
        """Return a storage that was not saved before in this step, or has changed since."""
        capture = self.capture
        view, footprint = seen
        lo, hi, distinct = footprint
        if distinct < capture.min_tensor_bytes:
            return self._keep_small(tensor, view, distinct)
        key, nbytes = ActivationKey(self._key, self._count), storage.nbytes()
        self._count += 1
        if (key.number, nbytes) in self._learned:
            return self._keep(tensor, storage, key, Treatment.LEARNED_KEEP)
        if self._when_slow and capture.keeps_when_slow(nbytes):
            capture.slow_kept_bytes += nbytes
            return self._keep(tensor, storage, key, Treatment.SLOW_KEEP)
        if capture.look_at_memory is not None:
            capture.look_at_memory()
        offloader = capture.offloader
        window = offloader.ledger.window.nbytes
        if window is not None and offloader.ledger.in_flight + nbytes > window:
            offloader.writer.admit(nbytes)
        is_filled = tensor.requires_grad
        if (
            is_filled
            and not self._when_slow
            and type(tensor) is torch.Tensor
            and distinct >= DENSE_FROM * (hi - lo)
        ):
            witness, record = tensor.detach(), Record(storage, key)
            stream = offloader.device.stream()
            # Before another thread may find the record: its first handle has to be the one that waits.
            handle = Handle(record, lo, hi, offloader.drops, tensor=witness, stream=stream)
            trace = capture.add(record, storage, witness, view, footprint)
            packed = Packed(tensor, view, handle, witness, trace)
            offloader.writer.collect(record)
            return packed
        witness, record = version_witness(tensor), Record(storage, key)
        trace = capture.add(record, storage, witness, view, footprint)
        handle = Handle(record, lo, hi, offloader.drops)
        packed = Packed(tensor, view, handle, witness, trace)
        self._queue(packed, record, storage, footprint, is_filled=is_filled)
        return packed

    def _pack_more(
        self,
        tensor: torch.Tensor,
        local: torch.Tensor,
        storage: torch.UntypedStorage,
        found: Entry,
        witness: torch.Tensor,
    ) -> Kept | Packed:
        """Another view of a storage that has a record: only what it lacks is written."""
        record, trace, view, footprint = found.record, found.trace, found.view, found.footprint
        if record.state is State.WAITS:
            self.capture.offloader.writer.join(record)
        is_same = view == (local.dtype, local.shape, local.stride(), local.storage_offset())
        if not is_same:
            view = View.of(local)
            footprint = view.footprint()
        lo, hi, distinct = footprint
        if type(tensor) is not torch.Tensor or witness.dtype is not tensor.dtype:  # else it serves both
            witness = version_witness(tensor)
        handle = Handle(record, lo, hi, self.capture.offloader.drops)
        if record.state is State.RELEASED:  # by another thread, until this handle was counted
            return self._pack_new(tensor, storage, (view, footprint))
        packed = Packed(tensor, view, handle, witness, trace)
        for span in record.spans:
            if span.lo <= lo and hi <= span.hi:
                self.capture.trace.deduplicated_bytes += distinct
                return packed
        self._queue(packed, record, storage, footprint, is_filled=tensor.requires_grad)
        return packed

    def _queue(
        self,
        packed: Packed,
        record: Record,
        storage: torch.UntypedStorage,
        footprint: tuple[int, int, int],
        *,
        is_filled: bool,
    ) -> None:
        """Queue the write of the bytes that a view needs, now or once they are known to be there."""
        lo, hi, distinct = footprint
        if distinct < DENSE_FROM * (hi - lo):
            self._defer(packed, record, storage)
            self._filling.pop(record, None)
        elif not is_filled:
            self._defer_to_next_operation(packed, record, storage)
        else:
            # A drive must not be taken for slow, and its bytes kept, that was never given them.
            self.capture.offloader.writer.save(record, storage, lo, hi, at_once=self._when_slow)

    def _next_key(self) -> ActivationKey:
        key = ActivationKey(self._key, self._count)
        self._count += 1
        return key

    def _keep(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, key: ActivationKey, treatment: Treatment
    ) -> Kept:
        trace, nbytes = self.capture.trace, storage.nbytes()
        trace.kept_bytes += nbytes
        trace.activations.append(ActivationTrace(key, nbytes, treatment, perf_counter()))
        self.capture.registry.note_kept(storage)
        return Kept(tensor)

    def _keep_odd(self, tensor: torch.Tensor) -> Kept:
        """Keep what is not understood; a parameter of such a kind is no activation."""
        if is_nothing(tensor):
            return self._keep_small(tensor, View.of(tensor), 0)  # or it would keep what it is a view of
        if not (tensor.is_leaf and tensor.requires_grad):
            self.capture.trace.kept_bytes += tensor.numel() * tensor.itemsize
        return Kept(tensor)

    def _keep_small(self, tensor: torch.Tensor, view: View, distinct: int) -> Kept:
        """Keep what a small view needs of its large storage, or all of the storage would stay."""
        self.capture.trace.kept_bytes += distinct
        kept = Kept(tensor)
        if tensor.requires_grad:
            kept.shrink(view)
        else:
            self._node = latest_node()
            self._small.append((kept, view))
        return kept

    # ---- what the operation may still fill -------------------------------------------------------

    def _defer_to_next_operation(self, packed: Packed, record: Record, storage: torch.UntypedStorage) -> None:
        """Put a view without gaps off until the operation that saves it has ended."""
        waits_for_scope = record in self._deferred and record not in self._filling
        self._defer(packed, record, storage)
        if not waits_for_scope:
            self._node = latest_node()
            self._filling[record] = None

    def _operation_ended(self) -> None:
        """Record that what was saved before can be read: writes it, and copies small views."""
        filling, self._filling = self._filling, {}
        small, self._small = self._small, []
        for kept, view in small:
            kept.shrink(view)
        for record in filling:
            self._decide(record, self._deferred.pop(record))

    # ---- strided views ---------------------------------------------------------------------------

    def _defer(self, packed: Packed, record: Record, storage: torch.UntypedStorage) -> None:
        """Put a view with gaps off to the end of the scope: others may need what lies in the gaps."""
        if record not in self._deferred:
            self._deferred[record] = []
            self.capture.offloader.writer.defer(record, storage)
        self._deferred[record].append(weakref.ref(packed))

    def _decide(self, record: Record, references: list[weakref.ref[Packed]]) -> None:
        """Write the span of the views that were put off, or gathers them if they need little of it."""
        offloader = self.capture.offloader
        alive = [
            packed
            for reference in references
            if (packed := reference()) is not None
            and record.span_over(packed.handle.lo, packed.handle.hi) is None
        ]
        storage = record.source
        if alive and storage is not None and record.state in {State.TRAVELS, State.UNDECIDED}:
            lo, hi = min(packed.handle.lo for packed in alive), max(packed.handle.hi for packed in alive)
            needed = sum(view.footprint()[2] for view in {packed.view for packed in alive})
            if needed < GATHER_BELOW * (hi - lo):
                self._gather(alive, storage)
            else:
                offloader.writer.save(record, storage, lo, hi, at_once=self._when_slow)
        offloader.writer.decide(record)

    def _gather(self, views: list[Packed], storage: torch.UntypedStorage) -> None:
        """Give each view a dense storage of its own; the large one is then free to go."""
        dense: dict[View, tuple[Record, View]] = {}
        for packed in views:
            if packed.view not in dense:
                dense[packed.view] = self._offload_dense(packed, storage)
            record, view = dense[packed.view]
            packed.spread, packed.view = packed.view, view
            lo, hi, _ = view.footprint()
            packed.handle = Handle(record, lo, hi, self.capture.offloader.drops)

    def _offload_dense(self, packed: Packed, storage: torch.UntypedStorage) -> tuple[Record, View]:
        """Copy the elements of a view together and queues the write of the copy."""
        capture = self.capture
        tensor = viewed(storage, packed.view.distinct()).contiguous()
        copy, view = tensor.untyped_storage(), View.of(tensor)
        capture.offloader.writer.admit(copy.nbytes())
        footprint = view.footprint()
        witness, record = version_witness(tensor), Record(copy, self._next_key())
        packed.trace = capture.add(record, copy, witness, view, footprint)
        lo, hi, _ = footprint
        capture.offloader.writer.save(record, copy, lo, hi, at_once=self._when_slow)
        return record, view


class SharingHooks(LayerHooks):
    """The hooks of one scope of a layer of whose bytes a share travels.

    Args:
        capture: What the session saves.
        key: The scope.
        stays: Says of each activation, by its bytes, whether it stays: in the order of saving, of each once.
        when_slow: Whether activations may be kept when the window is full.
    """

    __slots__ = ("_stays",)

    def __init__(
        self,
        capture: Capture,
        key: ScopeKey,
        stays: Callable[[int], bool],
        *,
        when_slow: bool,
    ) -> None:
        super().__init__(capture, key, when_slow=when_slow)
        self._stays = stays

    def _pack_new(self, tensor: torch.Tensor, storage: torch.UntypedStorage, seen: SeenView) -> Kept | Packed:
        """As for offloaded layers, unless its turn is to stay."""
        is_small, nbytes = seen[1][2] < self.capture.min_tensor_bytes, storage.nbytes()
        # What is kept elsewhere costs nothing to keep: it takes no turn.
        if is_small or (self._count, nbytes) in self._learned or not self._stays(nbytes):
            return super()._pack_new(tensor, storage, seen)
        return self._keep(tensor, storage, self._next_key(), Treatment.PLANNED_KEEP)


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """Take the hooks of a scope off the stack for as long as the block lasts, if they are on top of it."""
    top = hooks_on_top()
    if top is None or not isinstance(getattr(top[0], "__self__", None), LayerHooks):
        yield
        return
    is_aside = False
    try:
        pop_hooks()
        is_aside = True
        yield
    finally:
        if is_aside:
            push_hooks(*top)
