"""What went wrong with transfers: errors that wait for the training thread, drives that were named."""

from __future__ import annotations

from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from tba_offload.errors import DeviceError, OutOfServiceError, StoreFullError, TransferError, warn
from tba_offload.transfer.watchdog import HUNG

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tba_offload.store.base import ActivationStore
    from tba_offload.transfer.storage import Record

_FULL = "free space or choose another directory under store.directories, or set on_full: keep"
_REMEDIES = {
    "write": "check the drive and the system log, choose another directory under store.directories, or set "
    "on_full: keep",
    "read": "check the drive with its own tools; training cannot go on without these bytes",
    "keep": "an earlier transfer of this activation failed; see the first error",
}

_DEVICE = (
    "no drive is at fault: an operation of the training program failed on the device, and this transfer was "
    "the first to wait for it. with CUDA_LAUNCH_BLOCKING=1 the operation itself raises the error"
)


class Failures:
    """The failures of one offloader's transfers, and what is said of them.

    Args:
        store: Whose drives fail.
        keep_when_full: Whether what cannot be written is kept in memory and counted.
        budget_bytes: What resident activations may come to, for warnings; ``None`` for no budget.

    Attributes:
        keep_when_full: As given.
        epoch: Number of the step: failures of what was written before the last one that was given up are
            not told.
    """

    def __init__(self, store: ActivationStore, *, keep_when_full: bool, budget_bytes: int | None) -> None:
        self.keep_when_full = keep_when_full
        self.epoch = 0
        self._store = store
        self._budget_bytes = budget_bytes
        self._errors: SimpleQueue[TransferError] = SimpleQueue()
        self._told: set[str] = set()

    def resolve(self, *, keep_when_full: bool) -> None:
        """Set what becomes of what cannot be written; between steps."""
        self.keep_when_full = keep_when_full

    def of_write(self, record: Record, error: BaseException, epoch: int) -> None:
        """Record that a write failed, and that is an error of the step that it began in."""
        record.failed(error)
        if epoch == self.epoch:
            self._errors.put(transfer_error("write", record, error))

    def forget(self) -> None:
        """Record that the step is given up, and its failures with it."""
        self.epoch += 1
        self._errors = SimpleQueue()

    def raise_first(self) -> None:
        """Raise the error of a transfer that failed on an I/O thread, if there is one.

        Raises:
            TransferError: Names the layer, the cause and the remedy.
        """
        if outages := self._store.take_outages():
            self._tell_outages(outages)
        if self._errors.empty():  # an exception of the queue takes longer
            return
        try:
            error = self._errors.get_nowait()
        except Empty:
            return
        raise error

    def _tell_outages(self, outages: Iterable[tuple[str, str]]) -> None:
        """Name each drive that failed, once; where the policy wants an error, that names it."""
        for place, cause in outages:
            if self.keep_when_full and place not in self._told:
                self._told.add(place)
                warn(self._describe_outage(place, cause), RuntimeWarning)

    def _describe_outage(self, place: str, cause: str) -> str:
        budget = self._budget_bytes
        beyond = "" if budget is None else f", beyond budget.activation_bytes ({budget} bytes) if it must"
        return (
            f"a drive failed and is left alone: {place}: {cause}. what was meant for it goes to other drives "
            f"or stays in memory{beyond}; it is tried again after 1 s, 2 s, 4 s and so on. check the drive "
            "and the system log, or choose another directory under store.directories; on_full: error makes "
            "this an error. the run log counts drives_out_of_service and fallback_kept_bytes"
        )


def is_full(error: BaseException | None) -> bool:
    """Whether there was no room; a drive that is out of service may have some."""
    return isinstance(error, StoreFullError) and not isinstance(error, OutOfServiceError)


def transfer_error(what: str, record: Record, cause: BaseException | None, where: str = "") -> TransferError:
    """Return the error of a transfer: names the layer, the cause and the remedy.

    Args:
        what: "write", "read" or "keep".
        record: Of what.
        cause: Why it failed.
        where: Which drive, where the cause does not tell.
    """
    remedy = _FULL if is_full(cause) else _REMEDIES[what]
    if isinstance(cause, TimeoutError):
        remedy = HUNG
    if isinstance(cause, DeviceError):
        remedy = _DEVICE
    message = f"could not {what} {record.nbytes} bytes of {record.key}{where}: {cause}; {remedy}"
    error = TransferError(message)
    error.__cause__ = cause
    return error
