"""The exceptions that tba-offload raises, and how it warns.

::

    TbaError
    ├── ConfigError (ValueError)              a policy file or an argument is wrong
    ├── UnsupportedError (RuntimeError)       a model or a setting that cannot be offloaded, and why
    ├── MissingDependencyError (ImportError)  an optional package is needed; says what to install
    ├── SavedTensorModifiedError (RuntimeError)  a saved tensor was changed in place before backward
    ├── RecomputationError (RuntimeError)     a recomputed layer gave other numbers than before
    ├── TransferError (RuntimeError)          offloading of one activation failed; names layer and remedy
    ├── StatesAwayError (RuntimeError)        an optimizer state was used that is not in memory
    ├── SessionError (RuntimeError)           the session was used out of order, closed, or after a fork
    ├── PatchError (RuntimeError)             a Megatron-LM checkout cannot be patched, and why
    ├── RunLogError (ValueError)              a run log cannot be read
    └── StoreError (OSError)                  the store could not move bytes
        ├── StoreFullError                    no room: capacity reached or drive full
        │   └── OutOfServiceError             a drive that failed takes nothing for a while
        ├── HangingError                      a drive does not answer
        ├── ShortTransferError                fewer bytes moved than asked for
        ├── ChecksumError                     bytes read differ from the bytes written
        └── DeviceError                       the device of the bytes failed, not the drive

    NoEffectWarning (UserWarning)             a legal setting that does not do what it seems to
    └── NothingSavedWarning                   offloading frees little memory or none, as it is set up

Every message says what happened, where, and what to do about it.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class TbaError(Exception):
    """Base of everything that tba-offload raises on purpose."""


class ConfigError(TbaError, ValueError):
    """A policy file, a size or an argument is not what it must be.

    Args:
        message: What is wrong, and the legal values.
        file: The file it stands in, if it came from one.
        line: The line in that file, from 1.
    """

    def __init__(self, message: str, *, file: str | None = None, line: int | None = None) -> None:
        self.file = file
        self.line = line
        self._joined: tuple[ConfigError, ...] = ()
        where = file or ""
        if line is not None:
            where += f":{line}" if where else f"line {line}"
        super().__init__(f"{where}: {message}" if where else message)

    @classmethod
    def joined(cls, problems: Sequence[ConfigError]) -> ConfigError:
        """One error for several problems, by line; file and line are those of the first."""
        first, *others = sorted(problems, key=lambda problem: problem.line or 0)
        if not others:
            return first
        error = cls("\n".join(map(str, (first, *others))))
        error.file, error.line, error._joined = first.file, first.line, (first, *others)
        return error

    @property
    def problems(self) -> tuple[ConfigError, ...]:
        """The problems that this error says, each as an error of its own."""
        return self._joined or (self,)


class NoEffectWarning(UserWarning):
    """A setting is legal but has no effect, or not the effect that it seems to have."""


class NothingSavedWarning(NoEffectWarning):
    """Offloading frees little memory or none: a CPU's goes to host memory, or the window holds most of it."""


class UnsupportedError(TbaError, RuntimeError):
    """The model, or a setting of it, cannot be combined with offloading."""


class MissingDependencyError(TbaError, ImportError):
    """An optional package is needed for what was asked.

    Args:
        package: The package that is missing.
        purpose: What needs it.
        extra: The extra of tba-offload that installs it, if there is one.
    """

    def __init__(self, package: str, purpose: str, *, extra: str | None = None) -> None:
        self.package = package
        remedy = f"pip install 'tba-offload[{extra}]'" if extra else f"pip install {package}"
        super().__init__(f"{purpose} needs {package}, which is not installed; {remedy}")


class SavedTensorModifiedError(TbaError, RuntimeError):
    """A tensor that autograd saved was changed in place before its backward used it."""


class RecomputationError(TbaError, RuntimeError):
    """A layer that backward computed anew did not give the numbers of its forward."""


class TransferError(TbaError, RuntimeError):
    """The transfer of one activation failed; the cause is the store's own error."""


class SessionError(TbaError, RuntimeError):
    """A session was used out of order, after it was closed, or in a forked child."""


class StatesAwayError(TbaError, RuntimeError):
    """An optimizer state was used between updates, when its bytes are in a store."""


class PatchError(TbaError, RuntimeError):
    """A Megatron-LM checkout is unknown, has changes of its own, or does not fit its patch."""


class RunLogError(TbaError, ValueError):
    """A run log cannot be read, or is not one."""


class StoreError(TbaError, OSError):
    """A store could not open, write or read; carries the errno where there is one."""


class StoreFullError(StoreError):
    """The store has no room: its capacity is reached or the drive is full."""


class OutOfServiceError(StoreFullError):
    """The drive failed and is left alone; it takes nothing until it is tried again."""


class HangingError(StoreError):
    """A drive has not answered within ``store.stall_seconds``, and may still do what it was told to.

    Its errno is ``ETIMEDOUT``, which also a drive that does answer may give: that one is not hanging.
    """


class ShortTransferError(StoreError):
    """Fewer bytes were moved than asked for."""


class ChecksumError(StoreError):
    """The bytes that were read are not the bytes that were written."""


class DeviceError(StoreError):
    """The device that the bytes lie on failed, by what the training program had given it to do."""


def is_of_drive(error: BaseException | None) -> bool:
    """Whether a failed transfer is the drive's fault, as the operating system or a checksum says.

    A fault of the program, such as an error of the device that the bytes lie on, is not.
    """
    if not isinstance(error, StoreError):
        return False
    return error.errno is not None or isinstance(error.__cause__, OSError)


_PASSED_OVER = frozenset({"tba_offload", "torch", "contextlib"})


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn of something, and name the nearest line outside of this package and torch.

    Args:
        message: What happened, where, and what to do about it.
        category: The class of the warning.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] in _PASSED_OVER:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
