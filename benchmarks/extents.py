"""Whole activations on one drive each, or cut over all of them: what a step takes that waits for its drives.

    python benchmarks/extents.py

No measurement but a simulation of events: drives of one rate, which the I/O threads of a direction share, a
window of bytes in flight, and layers of 1.07 GB in eight tensors of up to 256 MiB, as a GPT of hidden size
8192 saves them at sequence 4096 in bf16. An extent goes to the drive that would have written it first; a
tensor is free, or there, when its last extent is. Forward takes 12 ms a layer, backward twice that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
TENSORS = tuple(size * MIB for size in (64, 192, 64, 64, 64, 64, 256, 256))
FORWARD, BACKWARD = 0.012, 0.024
CUTS = (None, 64 * MIB, 32 * MIB, 16 * MIB)


@dataclass
class Transfer:
    """One extent that is under way."""

    left: float
    ended: Callable[[], None]


@dataclass
class Drive:
    """A queue, and what its threads move at once."""

    queue: list[Transfer] = field(default_factory=list)
    running: list[Transfer] = field(default_factory=list)

    def pending(self) -> float:
        """Bytes that are to be moved."""
        return sum(transfer.left for transfer in (*self.running, *self.queue))


class Drives:
    """Drives of one rate, and the time.

    Args:
        count: How many.
        rate: Bytes a second of each.
        threads: I/O threads of each.
    """

    def __init__(self, count: int, rate: float, threads: int) -> None:
        self.drives = [Drive() for _ in range(count)]
        self.now = 0.0
        self._rate, self._threads = rate, threads

    def put(self, drive: Drive, nbytes: int, ended: Callable[[], None]) -> None:
        """Queues a transfer."""
        drive.queue.append(Transfer(nbytes, ended))
        self._start(drive)

    def _start(self, drive: Drive) -> None:
        while drive.queue and len(drive.running) < self._threads:
            drive.running.append(drive.queue.pop(0))

    def go_on(self, until: float | None = None) -> None:
        """Goes on to the next end of a transfer, but not beyond a time."""
        ends = [
            min(transfer.left for transfer in drive.running) * len(drive.running) / self._rate
            for drive in self.drives
            if drive.running
        ]
        seconds = min([*ends, *([] if until is None else [until - self.now])])
        self.now += seconds
        over: list[Transfer] = []
        for drive in self.drives:
            for transfer in drive.running:
                transfer.left -= seconds * self._rate / len(drive.running)
            over += [transfer for transfer in drive.running if transfer.left < 1]
            drive.running = [transfer for transfer in drive.running if transfer.left >= 1]
            self._start(drive)
        for transfer in over:
            transfer.ended()

    def wait(self, seconds: float) -> None:
        """Lets time pass."""
        until = self.now + seconds
        while self.now < until - 1e-12:
            self.go_on(until)


def parts_of(nbytes: int, cut: int | None) -> list[int]:
    """Return the extents of a tensor."""
    return [nbytes] if cut is None else [min(cut, nbytes - at) for at in range(0, nbytes, cut)]


def seconds_of(drives: Drives, layers: int, window: float, cut: int | None) -> float:
    """How long forward and backward take."""
    tensors = [(number, nbytes) for number, nbytes in enumerate(TENSORS * layers)]
    places: list[list[tuple[Drive, int]]] = []
    missing = [len(parts_of(nbytes, cut)) for _, nbytes in tensors]
    in_flight = 0

    def freed(number: int) -> None:
        nonlocal in_flight
        missing[number] -= 1
        in_flight -= 0 if missing[number] else tensors[number][1]

    for number, nbytes in tensors:
        drives.wait(FORWARD / len(TENSORS))
        while in_flight and in_flight + nbytes > window:
            drives.go_on()
        in_flight += nbytes
        places.append([])
        for part in parts_of(nbytes, cut):
            drive = min(drives.drives, key=Drive.pending)
            places[-1].append((drive, part))
            drives.put(drive, part, lambda number=number: freed(number))  # type: ignore[misc]
    while in_flight:
        drives.go_on()
    return _backward(drives, tensors[::-1], places, window)


def _backward(
    drives: Drives, tensors: list[tuple[int, int]], places: list[list[tuple[Drive, int]]], window: float
) -> float:
    missing = [len(parts) for parts in places]
    ahead, taken = 0, 0

    def came(number: int) -> None:
        missing[number] -= 1

    for number, nbytes in tensors:
        while taken < len(tensors) and (not ahead or ahead + tensors[taken][1] <= window):
            wanted, size = tensors[taken]
            ahead, taken = ahead + size, taken + 1
            for drive, part in places[wanted]:
                drives.put(drive, part, lambda wanted=wanted: came(wanted))  # type: ignore[misc]
        while missing[number]:
            drives.go_on()
        ahead -= nbytes
        drives.wait(BACKWARD / len(TENSORS))
    return drives.now


@click.command()
@click.option("--layers", default=24, show_default=True)
@click.option("--rate", default=6.0, show_default=True, help="GB/s of a drive in a direction.")
@click.option("--threads", default=2, show_default=True, help="I/O threads of a drive in a direction.")
def main(*, layers: int, rate: float, threads: int) -> None:
    """Simulate steps that wait for their drives."""
    table = Table(title=f"{layers} layers, {rate:g} GB/s a drive; seconds, and by those of whole extents")
    for name in ("drives", "window", *("whole" if cut is None else f"{cut // MIB} MiB" for cut in CUTS)):
        table.add_column(name, justify="right")
    for count in (1, 2, 4, 8):
        for held in (0.5, 1, 2, 3):
            found = [
                seconds_of(Drives(count, 1e9 * rate, threads), layers, held * sum(TENSORS), cut)
                for cut in CUTS
            ]
            table.add_row(
                str(count),
                f"{held:g} layers",
                f"{found[0]:.2f}",
                *(f"{each:.2f} ({each / found[0]:.2f})" for each in found[1:]),
            )
    Console().print(table)


if __name__ == "__main__":
    main()
