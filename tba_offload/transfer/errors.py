"""Errors and warnings of failed transfers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tba_offload.errors import (
    DeviceError,
    HangingError,
    OutOfServiceError,
    SessionError,
    StoreFullError,
    TransferError,
)

if TYPE_CHECKING:
    from collections.abc import Hashable

_REMEDIES = {
    "write": "check the drive and the system log, choose another directory under store.directories, or set "
    "on_full: keep",
    "read": "training cannot continue without these bytes. Check the drive with the tools of its vendor",
    "keep": "change a copy instead, or set the placement of the layer to 'keep'",
}
_BY_CAUSE = {
    OutOfServiceError: _REMEDIES["write"],
    StoreFullError: "free space or choose another directory under store.directories, or set on_full: keep",
    DeviceError: "no drive is at fault: an operation of the training program failed on the device, and this "
    "transfer was the first to wait for it. With CUDA_LAUNCH_BLOCKING=1 the operation raises the error",
}


def is_full(error: BaseException | None) -> bool:
    """Return True if the store is full. A drive that is out of service does not count as full."""
    return isinstance(error, StoreFullError) and not isinstance(error, OutOfServiceError)


def transfer_error(
    verb: str, key: Hashable, nbytes: int, cause: BaseException | str, where: str = ""
) -> TransferError:
    """Return the error of a failed transfer. Its text has the layer, the cause and the remedy.

    Args:
        verb: "write", "read" or "keep".
        key: Name of the activation.
        nbytes: Size of the activation.
        cause: Why the transfer failed.
        where: The place, if the cause does not name it.
    """
    remedy = next((text for kind, text in _BY_CAUSE.items() if isinstance(cause, kind)), _REMEDIES[verb])
    ending = "" if isinstance(cause, HangingError) else f"; {remedy}"  # that error has its own remedy
    error = TransferError(f"could not {verb} {nbytes} bytes of {key}{where}: {cause}{ending}")
    error.__cause__ = cause if isinstance(cause, BaseException) else None
    return error


def unusable(key: Hashable, *, is_inert: bool) -> SessionError:
    """Return the error of a graph whose saved bytes no longer exist.

    Args:
        key: Name of the activation.
        is_inert: Whether this is a forked child.
    """
    why = "belongs to a step that failed or was interrupted, and its bytes were discarded. Run the forward "
    why += "of this graph again"
    if is_inert:
        why = "was saved before this process was forked. Only the parent can run backward through that "
        why += "graph, not a forked child"
    return SessionError(f"{key} {why}")


def outage(place: str, cause: str) -> str:
    """Return the warning about a drive that failed.

    Args:
        place: Name of the drive.
        cause: Why it failed.
    """
    return (
        f"a drive failed and is left alone: {place}: {cause}. Its writes go to other drives, or stay in "
        "memory, even beyond budget.activation_bytes. After a pause the drive is tried again. Check the "
        "drive, or choose another directory. With on_full: error this warning is an error"
    )
