"""The exceptions and warnings of tba-offload.

::

    TbaError
    ├── ConfigError (ValueError)              a policy file or an argument is invalid
    ├── UnsupportedError (RuntimeError)       a model or a setting cannot be combined with offloading
    ├── MissingDependencyError (ImportError)  an optional package is not installed
    ├── SavedTensorModifiedError (RuntimeError)  a saved tensor was changed in place before backward
    ├── RecomputationError (RuntimeError)     a recomputed layer gave other numbers than its forward
    ├── TransferError (RuntimeError)          the transfer of one activation failed
    ├── StatesAwayError (RuntimeError)        an optimizer state was used while its bytes were in a store
    ├── SessionError (RuntimeError)           a session was used in a wrong order, closed, or after a fork
    ├── PatchError (RuntimeError)             a Megatron-LM checkout cannot be patched
    ├── RunLogError (ValueError)              a run log cannot be read
    └── StoreError (OSError)                  a store could not move bytes
        ├── StoreFullError                    no room: the capacity is reached, or the drive is full
        │   └── OutOfServiceError             a drive failed, so writes to the drive are paused
        ├── HangingError                      a drive does not answer
        ├── ShortTransferError                fewer bytes moved than requested
        ├── ChecksumError                     the bytes read differ from the bytes written
        └── DeviceError                       the accelerator failed, not the drive

    NoEffectWarning (UserWarning)             a valid setting has no effect, or an unexpected effect
    └── NothingSavedWarning                   offloading frees little or no memory

Each error message names the failed operation, the cause and the remedy.
"""

from __future__ import annotations

import logging
import sys
import warnings
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager


class TbaError(Exception):
    """Base class of all errors that tba-offload raises on purpose."""


class ConfigError(TbaError, ValueError):
    """A policy file, a size or an argument is invalid.

    Args:
        message: The problem, and the valid values.
        file: Path of the file with the problem, if the problem is in a file.
        line: Line of the problem in the file, from 1.
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
        """Return one error for several problems, with the problems sorted by line.

        The error has the attributes ``file`` and ``line`` of the first problem.
        """
        first, *others = sorted(problems, key=lambda problem: problem.line or 0)
        if not others:
            return first
        error = cls("\n".join(map(str, (first, *others))))
        error.file, error.line, error._joined = first.file, first.line, (first, *others)
        return error

    @property
    def problems(self) -> tuple[ConfigError, ...]:
        """The problems in this error, each as a separate error."""
        return self._joined or (self,)


class NoEffectWarning(UserWarning):
    """A setting is valid but has no effect, or a different effect than expected."""


class NothingSavedWarning(NoEffectWarning):
    """Offloading frees little memory: the store is host memory, or the in-flight window holds most bytes."""


class UnsupportedError(TbaError, RuntimeError):
    """The model or a setting of the model cannot be combined with offloading."""


class MissingDependencyError(TbaError, ImportError):
    """A feature needs an optional package that is not installed.

    Args:
        package: The missing package.
        purpose: The feature that needs the package.
        extra: The extra of tba-offload that installs the package.
    """

    def __init__(self, package: str, purpose: str, *, extra: str) -> None:
        remedy = f"pip install 'tba-offload[{extra}]'"
        super().__init__(f"{purpose} needs {package}, which is not installed; {remedy}")


@contextmanager
def required(package: str, purpose: str, *, extra: str) -> Iterator[None]:
    """Raise :class:`MissingDependencyError` if an import in the ``with`` block does not find the package."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise MissingDependencyError(package, purpose, extra=extra) from error


class SavedTensorModifiedError(TbaError, RuntimeError):
    """A tensor that autograd saved was changed in place before backward used the tensor."""


class RecomputationError(TbaError, RuntimeError):
    """The recomputation of a layer in backward gave other results than the layer's first forward."""


class TransferError(TbaError, RuntimeError):
    """The transfer of one activation failed. The ``__cause__`` of the exception is the error of the store."""


class SessionError(TbaError, RuntimeError):
    """A session was used in a wrong order, after its close, or in a forked child process."""


class StatesAwayError(TbaError, RuntimeError):
    """The program used an optimizer state while the bytes of the state were in the store."""


class PatchError(TbaError, RuntimeError):
    """A Megatron-LM checkout cannot be patched: its release has no patch, or its files were modified."""


class RunLogError(TbaError, ValueError):
    """A run log cannot be read, or the file is not a run log."""


class StoreError(TbaError, OSError):
    """A store failed to open, write or read. The attribute ``errno`` is the system's error number, if any."""


class StoreFullError(StoreError):
    """The store has no room: its capacity is reached, or the drive is full."""


class OutOfServiceError(StoreFullError):
    """A drive failed. The store writes to other drives, and tries the failed drive again later."""


class HangingError(StoreError):
    """A drive has not answered within ``store.stall_seconds``, and may still execute its requests.

    The attribute ``errno`` of this error is ``ETIMEDOUT``. A plain :class:`StoreError` with ``ETIMEDOUT``
    means that the drive answered and reported a timeout.
    """


class ShortTransferError(StoreError):
    """A transfer moved fewer bytes than requested."""


class ChecksumError(StoreError):
    """The bytes that were read differ from the bytes that were written."""


class DeviceError(StoreError):
    """An earlier operation of the training program failed on the accelerator. No drive failed."""


def is_of_drive(error: BaseException | None) -> bool:
    """Return True if an error is a failure of a drive, reported by the system or by a checksum."""
    if not isinstance(error, StoreError):
        return False
    return error.errno is not None or isinstance(error.__cause__, OSError)


_PASSED_OVER = frozenset({"tba_offload", "torch", "contextlib"})


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points to the nearest caller outside of tba-offload and PyTorch.

    Args:
        message: The text of the warning.
        category: The warning class.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] in _PASSED_OVER:
        frame, level = frame.f_back, level + 1
    with without_bars():
        warnings.warn(message, category, stacklevel=level)


def log_warning(name: str, message: str, *figures: object) -> None:
    """Log a warning to the logger of a module, while the progress bars of tqdm are hidden.

    Args:
        name: The name of the module.
        message: The message, with ``%`` placeholders.
        figures: Values for the placeholders in the message.
    """
    with without_bars():
        logging.getLogger(name).warning(message, *figures, stacklevel=2)


def without_bars() -> AbstractContextManager[object]:
    """Return a context manager that hides the open progress bars of tqdm."""
    tqdm: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    return tqdm.external_write_mode(sys.stderr) if getattr(tqdm, "_instances", None) else nullcontext()
