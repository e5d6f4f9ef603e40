"""What was saved in this step, by storage: what travels, what is kept, and what was learned to be kept."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from tba_offload.capture.identity import View, shares_version
from tba_offload.transfer.storage import State

if TYPE_CHECKING:
    import torch

    from tba_offload.capture.scope import ActivationKey
    from tba_offload.capture.trace import ActivationTrace
    from tba_offload.transfer.storage import Record

RELEARN_AFTER = 32
"""Steps after which an activation that was found to be kept elsewhere is offloaded again, to see."""


class Entry(weakref.ref["torch.Tensor"]):
    """What is known of a storage, as a weak reference to the witness of what was saved of it first.

    Weak, because the witness of what waits for its batch keeps its memory: it lives as long as the graph. One
    object with the rest, because the cyclic collector looks at each.

    Attributes:
        record: Of the storage.
        trace: Of the record.
        view: How the first saved tensor looks at the storage.
        footprint: The bytes that it needs.
        version: Its version.
    """

    __slots__ = ("footprint", "record", "trace", "version", "view")

    record: Record
    trace: ActivationTrace
    view: View
    footprint: tuple[int, int, int]
    version: int


SeenView = tuple[View, tuple[int, int, int]]
"""A view and its footprint."""


class Registry:
    """The storages that the layers of one session have saved.

    An address may belong to another storage by now, so a weak reference answers each question. The hot path
    looks first whether the address is known at all.

    Attributes:
        entries: What travels, by the address of the storage object.
        kept: What stays in this step, likewise.
        views: How tensors that were saved in this step look at their storages, with footprints: equal ones
            share an object.
        learned: Of each layer: number and bytes of activations that something else keeps, so that offloading
            them frees nothing, and until which step that is believed.
    """

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.kept: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.views: dict[tuple[object, ...], SeenView] = {}
        self.learned: dict[int, dict[tuple[int, int], int]] = {}
        self._step = 0

    def begin_step(self) -> None:
        """Record that what was learned long ago is put to the test again."""
        self._step += 1
        for layer, learned in list(self.learned.items()):
            for kept in [kept for kept, until in learned.items() if until <= self._step]:
                del learned[kept]
            if not learned:
                del self.learned[layer]

    def end_step(self) -> None:
        """Forget the storages of the step; records that autograd still holds live on with their handles."""
        self.entries.clear()
        self.kept.clear()
        self.views.clear()

    def new_view(self, looks: tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]) -> SeenView:
        """Return the view of a tensor whose like was not saved before in this step."""
        view = View(*looks)
        seen = self.views[looks] = view, view.footprint()
        return seen

    def find(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> Entry | None:
        """Return the entry of a storage that was saved before, if ``tensor`` shows it is unchanged."""
        found = self.entries.get(storage._cdata)
        if found is None:
            return None
        record, witness = found.record, found()
        if (
            record.origin() is not storage
            or record.state is State.RELEASED
            or tensor._version != found.version
            # With a counter of its own a tensor may have been changed without this record's noticing.
            or witness is None
            or not shares_version(witness, tensor)
        ):
            return None
        return found

    def record_of(self, storage: torch.UntypedStorage) -> Record | None:
        """Return the record of a storage, at whatever version."""
        found = self.entries.get(storage._cdata)
        return found.record if found is not None and found.record.origin() is storage else None

    def note_kept(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage stays in this step: saved again it is kept too, and is no activation."""
        self.kept[storage._cdata] = weakref.ref(storage)

    def is_kept(self, storage: torch.UntypedStorage) -> bool:
        """Whether :meth:`note_kept` was told of this very storage."""
        kept = self.kept.get(storage._cdata)
        return kept is not None and kept() is storage

    def learn(self, key: ActivationKey, nbytes: int) -> None:
        """Something else keeps this activation's storage: keep it too from the next step on."""
        self.learned.setdefault(key.scope.layer, {})[key.number, nbytes] = self._step + RELEARN_AFTER

    def forget_learned(self, layers: set[int]) -> None:
        """Layers of these numbers are placed anew: what was kept elsewhere may not be any longer."""
        for layer in layers:
            self.learned.pop(layer, None)
