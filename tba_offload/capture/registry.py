"""What was saved in this step, by storage: what travels, what is kept, and what was learned to be kept."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from tba_offload.capture.identity import shares_version
from tba_offload.transfer.storage import State

if TYPE_CHECKING:
    import torch

    from tba_offload.capture.identity import View
    from tba_offload.capture.scope import ActivationKey
    from tba_offload.capture.trace import ActivationTrace
    from tba_offload.transfer.storage import Record

RELEARN_AFTER = 32
"""Steps after which an activation that was found to be kept elsewhere is offloaded again, to see."""

Entry = tuple["Record", "ActivationTrace", "View", tuple[int, int, int], "torch.Tensor", int]
"""A record and its trace; of what was saved first the view, the bytes that it needs, witness and version."""


class Registry:
    """The storages that the layers of one session have saved.

    An address may belong to another storage by now, so a weak reference answers each question. The hot path
    looks first whether the address is known at all.

    Attributes:
        entries: What travels, by the address of the storage object.
        kept: What stays in this step, likewise.
        learned: Layer, number and bytes of what is kept elsewhere, and the step until which that is believed.
    """

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.kept: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.learned: dict[tuple[int, int, int], int] = {}
        self._step = 0

    def begin_step(self) -> None:
        """What was learned long ago is put to the test again."""
        self._step += 1
        self.learned = {kept: until for kept, until in self.learned.items() if until > self._step}

    def end_step(self) -> None:
        """Forgets the storages of the step; records that autograd still holds live on with their handles."""
        self.entries.clear()
        self.kept.clear()

    def find(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> Entry | None:
        """The entry of a storage that was saved before, if ``tensor`` can tell that it has not changed."""
        found = self.entries.get(storage._cdata)
        if found is None:
            return None
        record, _, _, _, witness, version = found
        if (
            record.origin() is not storage
            or record.state is State.RELEASED
            or tensor._version != version
            # With a counter of its own a tensor may have been changed without this record's noticing.
            or not shares_version(witness, tensor)
        ):
            return None
        return found

    def record_of(self, storage: torch.UntypedStorage) -> Record | None:
        """The record of a storage, at whatever version."""
        found = self.entries.get(storage._cdata)
        return found[0] if found is not None and found[0].origin() is storage else None

    def note_kept(self, storage: torch.UntypedStorage) -> None:
        """A storage stays in this step: saved again it is kept too, and is no activation."""
        self.kept[storage._cdata] = weakref.ref(storage)

    def is_kept(self, storage: torch.UntypedStorage) -> bool:
        """Whether :meth:`note_kept` was told of this very storage."""
        kept = self.kept.get(storage._cdata)
        return kept is not None and kept() is storage

    def learn(self, key: ActivationKey, nbytes: int) -> None:
        """Something else keeps this activation's storage: keep it too from the next step on."""
        self.learned[key.scope.layer, key.number, nbytes] = self._step + RELEARN_AFTER

    def learned_of(self, layer: int) -> frozenset[int]:
        """Numbers of the activations of a layer that may be ones that :meth:`learn` was told of."""
        return frozenset([number for its_layer, number, _ in self.learned if its_layer == layer])

    def is_learned(self, key: ActivationKey, nbytes: int) -> bool:
        """Whether offloading this activation was found to free nothing."""
        return (key.scope.layer, key.number, nbytes) in self.learned

    def forget_learned(self, layers: set[int]) -> None:
        """Layers of these numbers are placed anew: what was kept elsewhere may not be any longer."""
        self.learned = {kept: until for kept, until in self.learned.items() if kept[0] not in layers}
