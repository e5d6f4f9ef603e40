"""Faults put below a real store: each does what its name says, and the product's own code runs above it."""

from __future__ import annotations

import errno
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch
from faults import KINDS, Fault, inject
from store_contract import CPU, PATIENCE, READY, at_lead, get, pattern, put

from tba_offload.device import ByteRange
from tba_offload.errors import ConfigError, ShortTransferError, StoreError, StoreFullError
from tba_offload.store import open_store, posix
from tba_offload.store.file import FileStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tba_offload.store.base import Extent

NBYTES = 100_003


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with FileStore(tmp_path, device=CPU, writers=1, readers=1, checksum=False) as store:
        yield store


def changed_bits(data: torch.Tensor, other: torch.Tensor) -> int:
    return sum(int(byte).bit_count() for byte in (data ^ other).tolist())


# The text form.


@pytest.mark.parametrize(
    "text",
    [
        *(
            f"{kind}-{verb}"
            for kind, verbs in KINDS.items()
            for verb in verbs
            if (kind, verb) != ("fail", "grow")
        ),
        "fail-write:after=2,errno=EROFS",
        "fail-write:bytes=64MiB,errno=ENOSPC",
        "fail-grow:bytes=1GiB,errno=ENOSPC",
        "delay-read:seconds=0.5",
        "hang-write:after=5,drive=1",
        "flip-read:chance=0.25,times=2,seed=3",
        "fail-read:time=1.5",
    ],
)
def test_a_fault_is_read_as_it_is_written(text: str) -> None:
    assert str(Fault.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("burn-write", "'burn-write' is not one of fail-write, fail-read, fail-grow, short-write"),
        ("lost-read", "'lost-read' is not one of"),
        ("flip", "'flip' is not one of"),
        ("", "'' is not one of"),
        ("flip-read:", "'' is not one of n, after, bytes, time"),
        ("flip-read:m=3", "'m' is not one of n, after"),
        ("flip-read:n=0", "n must be a number from 1, not '0'"),
        ("flip-read:n", "n must be a number from 1, not ''"),
        ("flip-read:after=-1", "after must be a number, not '-1'"),
        ("fail-write:errno=EWHAT", "errno must be the name of an error such as EIO, not 'EWHAT'"),
        ("fail-write:errno=errorcode", "errno must be the name"),
        ("fail-write:bytes=64", "bytes must be a size such as 64MiB, not '64'"),
        ("flip-read:chance=1.5", "chance must be a share from 0 to 1"),
        ("hang-read:time=soon", "time must be seconds, not 'soon'"),
        ("hang-read:time=nan", "time must be seconds, not 'nan'"),
    ],
)
def test_what_is_no_fault_is_refused_with_what_is_legal(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Fault.parse(text)
    assert message in str(caught.value)
    assert repr(text) in str(caught.value)


# What each does.


@pytest.mark.parametrize("name", ["EIO", "EROFS", "ENODEV", "EAGAIN", "ENOMEM"])
def test_a_call_fails_with_the_given_number(store: FileStore, name: str) -> None:
    extent = put(store, pattern(NBYTES))
    with inject(f"fail-write:errno={name}", f"fail-read:errno={name}"):
        for use in (lambda: put(store, pattern(NBYTES)), lambda: get(store, extent)):
            with pytest.raises(StoreError) as caught:
                use()
            assert caught.value.errno == getattr(errno, name)
            assert caught.value.filename == store.directory
    assert torch.equal(get(store, extent), pattern(NBYTES))


def test_a_drive_is_full_after_so_many_bytes(store: FileStore) -> None:
    with inject("fail-write:errno=ENOSPC,bytes=256KiB") as faults:
        put(store, pattern(NBYTES))
        put(store, pattern(NBYTES))
        with pytest.raises(StoreFullError):
            put(store, pattern(NBYTES))
        store.resume()
        put(store, pattern(5000))
    assert [strike.nbytes > 5000 for strike in faults.fired] == [True]


def test_a_file_cannot_grow(store: FileStore) -> None:
    with inject("fail-grow"), pytest.raises(StoreFullError, match="cannot grow"):
        store.prepare(1 << 30)
    assert torch.equal(get(store, put(store, pattern(NBYTES))), pattern(NBYTES))


def test_a_short_transfer_is_continued_and_one_of_nothing_is_an_error(store: FileStore) -> None:
    with inject("short-write:n=1", "short-read:n=1") as faults:
        assert torch.equal(get(store, put(store, pattern(NBYTES))), pattern(NBYTES))
    assert len(faults.fired) == 2
    with inject("nothing-write"), pytest.raises(ShortTransferError, match="stopped after 0"):
        put(store, pattern(NBYTES))
    store.resume()
    extent = put(store, pattern(NBYTES))
    with inject("nothing-read"), pytest.raises(ShortTransferError, match="stopped after 0"):
        get(store, extent)


@pytest.mark.parametrize("nbytes", [16_384, NBYTES])
@pytest.mark.parametrize("spec", ["flip-write", "flip-read"])
def test_one_bit_is_flipped(store: FileStore, spec: str, nbytes: int) -> None:
    for seed in range(4):
        source = pattern(nbytes)
        with inject(f"{spec}:seed={seed}") as faults:
            read = get(store, put(store, source))
        assert changed_bits(read, pattern(nbytes)) == 1
        assert torch.equal(source, pattern(nbytes))  # the drive lies; memory is as it was
        assert len(faults.fired) == 1


@pytest.mark.parametrize("spec", ["zeros-write", "zeros-read"])
def test_zeros_come_instead_of_data(store: FileStore, spec: str) -> None:
    with inject(spec):
        assert not get(store, put(store, pattern(NBYTES))).any()


def test_a_lost_write_leaves_what_was_there(store: FileStore) -> None:
    source = at_lead(65_536, 0, store.alignment)
    extent = put(store, source)
    with inject("lost-write"):
        store.write(extent, ByteRange.of(source.clone().fill_(1)), READY).wait(PATIENCE)
    assert torch.equal(get(store, extent), source)


def test_a_delay_takes_its_time(store: FileStore) -> None:
    began = time.monotonic()
    with inject("delay-write:seconds=0.2"):
        put(store, pattern(NBYTES))
    assert time.monotonic() - began >= 0.2


@pytest.mark.parametrize("verb", ["write", "read"])
def test_a_drive_hangs_until_it_is_released(store: FileStore, verb: str) -> None:
    data = pattern(NBYTES)
    extent = put(store, data)
    target = torch.empty_like(data)
    with inject(f"hang-{verb}") as faults:
        if verb == "write":
            future = store.write(extent, ByteRange.of(data), READY)
        else:
            future = store.read(extent, ByteRange.of(target), READY, padded=False)
        with pytest.raises(TimeoutError):
            future.wait(0.1)
        faults.release()
        future.wait(PATIENCE)
        put(store, data)
    assert torch.equal(get(store, extent), data)


# When and where they strike.


def struck(store: FileStore, spec: str, writes: int = 8) -> list[int]:
    """Numbers of the writes of 100,003 bytes that were struck, from 1."""
    found = []
    with inject(spec) as faults:
        for number in range(1, writes + 1):
            before = len(faults.fired)
            extent = put(store, pattern(NBYTES))
            found += [number] * (len(faults.fired) - before)
            store.release(extent)
    return found


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ("n=3", [3]),
        ("after=5", [6, 7, 8]),
        ("after=2,times=2", [3, 4]),
        ("bytes=256KiB", [3, 4, 5, 6, 7, 8]),
        ("chance=0", []),
        ("chance=1,times=1", [1]),
        ("time=1000", []),
        ("drive=0,n=1", [1]),
        ("drive=1", []),
    ],
)
def test_conditions_say_which_calls_are_struck(
    store: FileStore, conditions: str, expected: list[int]
) -> None:
    assert struck(store, f"flip-write:{conditions}") == expected


def test_chance_is_drawn_by_the_seed(store: FileStore) -> None:
    draws = [struck(store, f"flip-write:chance=0.5,seed={seed}", 24) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert 0 < len(draws[0]) < 24


def test_one_drive_of_several(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    with open_store(directories=directories, device=CPU, checksum=False) as store:
        with inject("flip-write:drive=1") as faults:
            extents = [put(store, pattern(NBYTES)) for _ in range(6)]
        read = [changed_bits(get(store, extent), pattern(NBYTES)) for extent in extents]
    assert {extent.drive for extent in extents} == {0, 1}
    assert read == [extent.drive for extent in extents]
    assert {(strike.drive, strike.directory) for strike in faults.fired} == {(1, str(directories[1]))}


def test_the_first_fault_that_is_due_strikes_alone(store: FileStore) -> None:
    with inject("fail-write:n=2,errno=EIO", "flip-write") as faults:
        put(store, pattern(NBYTES))
        with pytest.raises(StoreError):
            put(store, pattern(NBYTES))
    assert [strike.fault.kind for strike in faults.fired] == ["flip", "fail"]
    assert faults.counts() == {"fail-write:n=2": 1, "flip-write": 1}


def test_nothing_stays(store: FileStore) -> None:
    calls = posix.pwrite, posix.pread, posix.fallocate
    threads = threading.active_count()
    with inject("hang-write"):
        assert posix.pwrite is not calls[0]
        with pytest.raises(RuntimeError, match="injected already"):
            inject("flip-read").start()
        future = store.write(store.reserve(NBYTES, 0), ByteRange.of(pattern(NBYTES)), READY)
    future.wait(PATIENCE)
    assert (posix.pwrite, posix.pread, posix.fallocate) == calls
    assert threading.active_count() == threads


def test_each_use_begins_anew(store: FileStore) -> None:
    faults = inject("fail-write:n=2", "hang-read:n=1")
    seen = []
    for _ in range(2):
        with faults:
            extent = put(store, pattern(NBYTES))
            reading = store.read(extent, ByteRange.of(pattern(NBYTES)), READY, padded=False)
            with pytest.raises(TimeoutError):
                reading.wait(0.1)
            with pytest.raises(StoreError):
                put(store, pattern(NBYTES))
        reading.wait(PATIENCE)
        store.resume()
        seen.append(faults.fired)
        assert faults.counts() == {"fail-write:n=2": 1, "hang-read:n=1": 1}
    assert [[strike.fault.kind for strike in fired] for fired in seen] == [["hang", "fail"]] * 2


def test_faults_that_are_gone_take_no_others_away(store: FileStore) -> None:
    gone = inject("flip-write")
    with gone:
        pass
    with inject("fail-write"):
        gone.stop()
        with pytest.raises(StoreError):
            put(store, pattern(NBYTES))


# Calls that join several extents.

SIZES = (5000, 40_000, 100, 12_345)


def put_together(store: FileStore) -> tuple[list[Extent], list[torch.Tensor]]:
    """Neighbours that are queued together."""
    data = [at_lead(nbytes, 64 * n, store.alignment).copy_(pattern(nbytes)) for n, nbytes in enumerate(SIZES)]
    extents = store.reserve_many([(each.nbytes, each.data_ptr()) for each in data])
    pairs = zip(extents, data, strict=True)
    writes = store.write_many([(extent, ByteRange.of(each), READY, None) for extent, each in pairs])
    for write in writes:
        write.wait(PATIENCE)
    return extents, data


def get_together(store: FileStore, extents: list[Extent]) -> list[torch.Tensor]:
    rooms = [at_lead(extent.nbytes, extent.lead, store.alignment).zero_() for extent in extents]
    reads = store.read_many(
        [(extent, ByteRange.of(room), READY) for extent, room in zip(extents, rooms, strict=True)],
        padded=True,
    )
    for read in reads:
        read.wait(PATIENCE)
    return rooms


@pytest.fixture
def grown(store: FileStore) -> FileStore:
    store.prepare(1 << 20)
    return store


@pytest.mark.parametrize("spec", ["flip-write:n=1", "flip-read:n=1"])
def test_one_bit_of_a_joined_call_is_flipped_where_data_lies(grown: FileStore, spec: str) -> None:
    for seed in range(4):
        with inject(f"{spec},seed={seed}") as faults:
            extents, data = put_together(grown)
            changed = [*map(changed_bits, get_together(grown, extents), data)]
        assert changed == [0, 1, 0, 0]
        assert [strike.extents for strike in faults.fired] == [len(SIZES)]


@pytest.mark.parametrize("spec", ["zeros-write:n=1", "zeros-read:n=1", "lost-write:n=1"])
def test_a_joined_call_moves_no_data(grown: FileStore, spec: str) -> None:
    with inject(spec) as faults:
        extents, _ = put_together(grown)
        assert not any(read.any() for read in get_together(grown, extents))
    assert [strike.extents for strike in faults.fired] == [len(SIZES)]


@pytest.mark.parametrize("verb", ["write", "read"])
@pytest.mark.parametrize("kind", ["fail", "short", "nothing", "delay", "hang"])
def test_a_joined_call_that_does_not_go_through_is_followed_by_one_for_each(
    grown: FileStore, kind: str, verb: str
) -> None:
    with inject(f"{kind}-{verb}:n=1") as faults:
        faults.release()  # what hangs goes on at once
        extents, data = put_together(grown)
        assert all(map(torch.equal, get_together(grown, extents), data))
    assert [strike.extents for strike in faults.fired] == [len(SIZES)]


def test_each_extent_that_follows_a_joined_call_is_struck_too(grown: FileStore) -> None:
    with inject("fail-write") as faults, pytest.raises(StoreError):
        put_together(grown)
    assert [strike.extents for strike in faults.fired] == [len(SIZES), 1]  # then the drive is left alone
