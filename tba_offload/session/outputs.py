"""What layers and the model put out and something holds, as a list that a model fills, or a training loop."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch

from tba_offload.device.live_bytes import LiveBytes, plain_storage
from tba_offload.layers.graph import first_differentiable
from tba_offload.layers.nested import TooManyError, tensors_in
from tba_offload.placements import Placement
from tba_offload.transfer.storage import State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tba_offload.capture.hooks import Capture
    from tba_offload.capture.site import Site


class Returned(NamedTuple):
    """A storage that a layer has returned, or saved and the model puts out.

    Attributes:
        storage: A weak reference to it.
        nbytes: Its size.
        layer: Index of the layer; of the last one for a storage that each layer passes on.
        placement: How the layer ran.
        number: How many storages layers had returned before in the step.
        is_main: Whether it is what the next layer is given.
        is_put_out: Whether the model puts it out.
    """

    storage: weakref.ref[torch.UntypedStorage]
    nbytes: int
    layer: int
    placement: Placement
    number: int
    is_main: bool = False
    is_put_out: bool = False


class Outputs:
    """Counts what layers and the model put out, by weak references.

    Args:
        capture: Knows the storages of the model itself, which do not count, and what is offloaded.
        device: Storages elsewhere do not count.
        last: Index of the last layer.

    Attributes:
        at_begin: Bytes that the model had put out before the step began, and that were there then.
        returned: How many storages layers have returned in the step.
    """

    def __init__(self, capture: Capture, device: torch.device, last: int) -> None:
        self.at_begin = self.returned = 0
        self._capture = capture
        self._last = last
        self._live = LiveBytes(device)
        self._of_layers: dict[int, Returned] = {}  # by address, in the forward that runs
        self._ran: dict[int, tuple[int, Placement, int]] = {}  # by number of the layer
        self._unused: list[tuple[Returned, bool]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of what the model has put out that are there now."""
        return self._live.nbytes

    def begin_step(self) -> None:
        """Record that what is there now is of earlier steps."""
        self.at_begin, self.returned = self.nbytes, 0
        self._of_layers, self._unused = {}, []

    def layer_returned(self, site: Site, placement: Placement, output: object) -> None:
        """Record that a layer has returned ``output``."""
        ran = self._ran[site.layer.id.number] = site.index, placement, self.returned
        main = plain_storage(first_differentiable(output))
        for storage in self._storages(output):
            found = Returned(weakref.ref(storage), storage.nbytes(), *ran, storage is main)
            self._of_layers[storage._cdata] = found
            self.returned += 1
        if site.index == self._last:
            looks = ((each, self._look_at(each.storage())) for each in self._of_layers.values())
            self._unused = [(each, is_written) for each, (is_unused, is_written) in looks if is_unused]

    def _look_at(self, storage: torch.UntypedStorage | None) -> tuple[bool, bool]:
        """Return whether a storage is alive without the offloader's needing it, and whether it is written."""
        record = None if storage is None else self._capture.registry.record_of(storage)
        if record is None:
            return storage is not None, False
        return record.source is None and record.state is not State.WAITS, True

    def model_ended(self, output: object) -> list[Returned]:
        """Record that the model's forward has ended with ``output``.

        Returns:
            What the forward has held of its layers' outputs, and no graph.
        """
        put_out = {storage._cdata: storage for storage in self._storages(output)}
        collected = []
        for each, is_written in self._unused:
            if (alive := each.storage()) is not None:
                held_by_graph = Placement.RECOMPUTE if each.is_main else Placement.KEEP
                if alive._cdata in put_out and each.placement not in {Placement.KEEP, held_by_graph}:
                    collected.append(each._replace(is_put_out=True))
            elif each.layer < self._last - each.is_main:  # others may be gone since the last layer has ended
                collected.append(each)
                # What lives on is counted when backward finds it in memory.
                self._capture.offloader.stats.held += each.nbytes if is_written else 0
        for key, storage in put_out.items():
            self._live.add_storage(storage)
            record = self._capture.registry.record_of(storage)
            ran = None if record is None else self._ran.get(record.key.scope.layer)  # type: ignore[attr-defined]
            if record is not None and ran and key not in self._of_layers and self._look_at(storage)[0]:
                collected.append(Returned(weakref.ref(storage), record.nbytes, *ran, is_put_out=True))
        self._of_layers, self._unused = {}, []
        return collected

    def _storages(self, output: object) -> Iterator[torch.UntypedStorage]:
        try:
            tensors = (output,) if type(output) is torch.Tensor else tensors_in(output)  # mostly one: quick
            found = list(map(plain_storage, tensors))
        except TooManyError:
            return
        yield from (each for each in found if each is not None and each not in self._capture.static)
