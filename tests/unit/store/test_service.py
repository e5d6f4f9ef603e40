"""When a drive that failed is tried again."""

from __future__ import annotations

import errno

from tba_offload.errors import OutOfServiceError
from tba_offload.store.service import FIRST_REST, PROVEN, Service


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def rest_of(service: Service, clock: Clock) -> float:
    """How long the service rests now, in half seconds; it is back afterwards."""
    began = clock.now
    while not service.admits():
        clock.now += FIRST_REST / 2
    service.succeeded()
    assert service.cause is None
    return clock.now - began


def test_a_drive_that_fails_again_and_again_rests_for_twice_as_long() -> None:
    clock = Clock()
    service, rests = Service(clock), []
    for _ in range(4):
        service.failed(OSError("no"))
        rests.append(rest_of(service, clock))
        clock.now += FIRST_REST
    assert rests == [FIRST_REST, 2 * FIRST_REST, 4 * FIRST_REST, 8 * FIRST_REST]


def test_a_transfer_that_was_refused_is_no_trial() -> None:
    """Queued before the failure, it comes to the drive's thread while another one is let through."""
    clock = Clock()
    service = Service(clock)
    service.failed(OSError("no"))
    clock.now += FIRST_REST
    assert service.admits()
    service.failed(OutOfServiceError(errno.EIO, "left alone"))
    assert service.cause == "no"
    service.succeeded()
    assert service.cause is None
    service.failed(OSError("again"))
    assert rest_of(service, clock) == 2 * FIRST_REST


def test_a_drive_that_has_proved_itself_rests_as_it_did_first() -> None:
    clock = Clock()
    service, rests = Service(clock), []
    for _ in range(4):
        service.failed(OSError("no"))
        rests.append(rest_of(service, clock))
        clock.now += 2 * PROVEN * rests[-1] + FIRST_REST
    assert rests == [FIRST_REST] * 4


def test_a_trial_that_fails_is_no_time_in_service() -> None:
    clock = Clock()
    service = Service(clock)
    for expected in (FIRST_REST, 2 * FIRST_REST, 4 * FIRST_REST):
        service.failed(OSError("no"))
        began = clock.now
        while not service.admits():
            clock.now += FIRST_REST / 2
        assert clock.now - began == expected
