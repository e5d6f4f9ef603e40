"""How a store is opened, and the kinds of stores that programs register."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tba_offload.config.values import BLOCK, KINDS, STALL_SECONDS
from tba_offload.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tba_offload.config import StoreConfig

_FEW_CORES = 2
_openers: dict[str, Callable[..., Any]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """How a store is opened; :func:`options_of` makes them of what the user wrote.

    Attributes:
        kind: "file" writes files; "host" keeps bytes in host memory; "gds" moves bytes between GPU and drive
            directly; "auto" is "gds" on a GPU whose machine has the nvidia-fs driver and kvikio, else
            "file"; or one that was registered.
        directories: Where to put files, one for each drive; several make a striped store.
        capacity: Bytes that extents may take in all, divided evenly among the directories; ``None`` for no
            limit but the drives' own.
        host_capacity: Bytes of host memory to use while the drives have too much to do; ``None`` for none.
        checksum: Verify every read from a drive against a checksum taken at the write. Host memory is not
            checked: there is no drive or driver that could change the bytes.
        stall_seconds: Seconds after which a drive that does not answer is an error; ``None`` for never.
        readers: Threads that read, for each directory.
        writers: Threads that write, likewise.

    Raises:
        ConfigError: There are no threads for a direction, or a capacity holds no extent.
    """

    kind: str = "auto"
    directories: tuple[str, ...] = ()
    capacity: int | None = None
    host_capacity: int | None = None
    checksum: bool = True
    stall_seconds: float | None = STALL_SECONDS
    readers: int = 2
    writers: int = 2

    def __post_init__(self) -> None:
        if self.writers < 1 or self.readers < 1:
            raise ConfigError(f"a store needs a writer and a reader, not {self.writers} and {self.readers}")
        for capacity in (self.share, self.host_capacity):
            if capacity is not None and capacity < BLOCK:
                raise ConfigError(
                    f"a capacity of {capacity} bytes holds no extent; the least is {BLOCK} bytes a drive"
                )

    @property
    def share(self) -> int | None:
        """The even share of the capacity that each drive has, bytes."""
        return None if self.capacity is None else self.capacity // max(len(self.directories), 1)

    def of_drive(self, directory: str) -> StoreOptions:
        """Return the options for one of the drives alone."""
        return replace(self, directories=(directory,), capacity=self.share, host_capacity=None)

    def of_host_memory(self, threads: int) -> StoreOptions:
        """Return the options for the host memory beside drives.

        Args:
            threads: For each direction.
        """
        return StoreOptions(
            kind="host",
            capacity=self.host_capacity,
            stall_seconds=self.stall_seconds,
            readers=threads,
            writers=threads,
        )


def threads_per_direction() -> int:
    """Return how many threads read, and how many write, on each drive.

    Two, or one on up to two cores. Beside an H200 two threads carried 52 GB/s, all that its link to host
    memory has. On two cores that also compute, a step took 1.13 times a plain one with either number.
    """
    return 1 if len(os.sched_getaffinity(0)) <= _FEW_CORES else 2


def directories_of(config: StoreConfig) -> tuple[str, ...]:
    """Return where files go: the system's directory for temporary files, if no other is named."""
    if config.directories or config.kind == "host":
        return tuple(map(str, config.directories))
    return (tempfile.gettempdir(),)


def saves_nothing(config: StoreConfig) -> str | None:
    """Return why offloading frees no memory of a model on the CPU; None if it does.

    Raises:
        StoreError: A directory does not answer.
    """
    from tba_offload.store.hanging import ask
    from tba_offload.store.run_file import lies_in_memory

    remedy = "name a directory on a drive"
    if config.kind == "host":
        return f"kind: host moves activations from host memory to host memory; {remedy}, with kind: file"
    for directory in directories_of(config):
        if ask(partial(lies_in_memory, directory), directory, config.stall_seconds):
            return f"{directory} lies in host memory; {remedy}"
    if config.host_capacity is not None:
        return "host_capacity takes host memory for what the drives have no time for; remove it"
    return None


def options_of(config: StoreConfig) -> StoreOptions:
    """Return what a store is opened with, of what the user wrote."""
    usual = threads_per_direction()
    return StoreOptions(
        kind=config.kind,
        directories=directories_of(config),
        capacity=config.capacity,
        host_capacity=config.host_capacity,
        checksum=config.checksum,
        stall_seconds=config.stall_seconds,
        readers=config.readers or usual,
        writers=config.writers or usual,
    )


def opener_of(kind: str) -> Callable[..., Any] | None:
    """Return how a kind that was registered is opened; None for those of the package."""
    return _openers.get(kind)


def register_kind(kind: str, opener: Callable[..., Any]) -> None:
    """Make a kind of store known by its name: ``store.kind`` of a policy.

    Args:
        kind: The name.
        opener: Called with a :class:`StoreOptions` and ``device=``, the
            :class:`tba_offload.device.Device` that activations lie on; returns a new
            :class:`tba_offload.store.base.ActivationStore`, which the session closes. ``host_capacity`` is
            ``None`` there: host memory is put beside what it returns.

    Raises:
        ValueError: The name is taken.
    """
    if kind in KINDS:
        raise ValueError(f"a kind of store of the name {kind!r} is known already")
    KINDS.append(kind)
    _openers[kind] = opener


def unregister_kind(kind: str) -> None:
    """Undo :func:`register_kind`; the kinds of the package stay."""
    if _openers.pop(kind, None) is not None:
        KINDS.remove(kind)
