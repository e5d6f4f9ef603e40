"""How a store grows: on a thread of its own, for a file system may hang, and within the limit of waits."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from tba_offload.errors import HangingError, StoreError, StoreFullError, is_of_drive, warn
from tba_offload.store.base import WARN_AFTER, IoFuture
from tba_offload.store.transfers import store_error

if TYPE_CHECKING:
    from tba_offload.store.backend import Backend
    from tba_offload.store.condition import Condition
    from tba_offload.store.lanes import Lanes
    from tba_offload.store.leases import Leases
    from tba_offload.store.life import Life


class _Growth(IoFuture):
    """The job of making room."""

    __slots__ = ("_backend", "_size")

    def __init__(self, backend: Backend, size: int) -> None:
        super().__init__()
        self._backend = backend
        self._size = size

    def run(self) -> tuple[()]:
        """Make room; on the thread that has claimed the job."""
        error: BaseException | None = None
        try:
            self._backend.device.bind_thread()
            self._backend.grow(self._size)
        except BaseException as failure:  # noqa: BLE001 - every failure reaches the thread that waits
            error = store_error(failure.with_traceback(None), "grow")
        self.finish(error)
        return ()


class Growing:
    """Of one store.

    Args:
        backend: What grows.
        lanes: The store's threads, and the limit of waits.
        condition: Of the drive.
        leases: Their lock guards whether the store is open.
        life: Whether it is.
    """

    def __init__(
        self, backend: Backend, lanes: Lanes, condition: Condition, leases: Leases, life: Life
    ) -> None:
        self._backend = backend
        self._lanes = lanes
        self._condition = condition
        self._leases = leases
        self._life = life

    def to(self, size: int) -> None:
        """Make room for ``size`` bytes; no lock is held meanwhile.

        Raises:
            StoreFullError: There is none, or there was none a moment ago.
            OutOfServiceError: The drive failed.
            TimeoutError: The drive hangs.
        """
        growth, refusal = _Growth(self._backend, size), self._condition.refusal
        with self._leases.lock:
            self._life.check_open()
            refusal.check(size)
            self._lanes.put_growth(growth)
        try:
            self._await(growth, size)
        except StoreFullError as error:
            refusal.note(size, error)
            raise
        except StoreError as error:
            if not is_of_drive(error):
                raise
            self._condition.fail(error)
            raise self._condition.out_of_service() from error
        except TimeoutError:
            cause = f"the file cannot grow within {self._lanes.limit:g} s"
            self._condition.fail(HangingError(errno.ETIMEDOUT, cause, self._backend.name))
            raise
        refusal.service.succeeded()

    def _await(self, growth: _Growth, size: int) -> None:
        """Wait for room for ``size`` bytes; a wait that gets long is named in a warning.

        Raises:
            StoreError: The file cannot grow.
            TimeoutError: The drive hangs.
        """
        limit = self._lanes.limit
        if limit is None:
            growth.wait()
            return
        name = self._backend.name
        text = "nothing has moved for {:g} s: the file in {} does not grow to {} bytes"
        try:
            growth.wait(limit * WARN_AFTER)
        except TimeoutError:
            warn(text.format(limit * WARN_AFTER, name, size), RuntimeWarning)
            try:
                growth.wait(limit * (1 - WARN_AFTER))
            except TimeoutError:
                raise TimeoutError(text.format(limit, name, size)) from None
