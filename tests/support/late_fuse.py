"""A file system that takes what it has no room for, and says so when a file is closed; by FUSE, in Python.

As network file systems with a cache of their own do: a write returns before the server has the bytes.
Direct I/O is refused. It speaks the kernel's protocol itself, so that no package is needed, and lives in a
process of its own::

    with mounted(directory, room=1 << 20): ...

Bytes that have found no room are zeros afterwards.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_libc = ctypes.CDLL(None, use_errno=True)
_DETACH = 2

LOOKUP, FORGET, GETATTR, SETATTR, MKDIR, UNLINK, RMDIR = 1, 2, 3, 4, 9, 10, 11
OPEN, READ, WRITE, STATFS, RELEASE, FSYNC, FLUSH, INIT = 14, 15, 16, 17, 18, 20, 25, 26
OPENDIR, READDIR, RELEASEDIR, ACCESS, CREATE, DESTROY, BATCH_FORGET = 27, 28, 29, 34, 35, 38, 42

_HEAD = struct.Struct("=IIQQIIIHH")
_INIT = struct.Struct("=IIIIHHIIHHI7I")
_ATTRIBUTES = struct.Struct("=6Q10I")
_MOST = 1 << 20
_BIG_WRITES, _MAX_PAGES = 1 << 5, 1 << 22
_PAST_THE_CACHE = 1
"""An answer to ``open``: every read and write comes here."""


def can_mount() -> bool:
    """Whether this process may mount file systems of a process."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError:
        return False
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    capabilities = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff"))
    return bool(capabilities >> 21 & 1)  # CAP_SYS_ADMIN


@contextmanager
def mounted(directory: Path, room: int) -> Iterator[None]:
    """Mounts it for a while.

    Args:
        directory: Where.
        room: Bytes that it really has.
    """
    command = [sys.executable, __file__, str(directory), str(room)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"mounted\n"
        try:
            yield
        finally:
            _libc.umount2(os.fsencode(directory), _DETACH)
            server.kill()


@dataclass
class Node:
    """A file or a directory."""

    mode: int
    names: dict[bytes, int] = field(default_factory=dict)
    data: bytearray = field(default_factory=bytearray)


_NOTHING_TO_DO = {READDIR, RELEASE, RELEASEDIR, FSYNC, ACCESS}


class RefusedError(Exception):
    """An answer that is an error."""


class Server:
    """Answers the kernel, one request after another."""

    def __init__(self, device: int, room: int) -> None:
        self._device = device
        self._room = room
        self._held: set[tuple[int, int]] = set()
        self._has_lost = False
        self._nodes = {1: Node(stat.S_IFDIR | 0o777)}

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, _MOST + 8192)
            except OSError as error:
                if error.errno in {errno.EINTR, errno.ENOENT}:
                    continue
                return  # it is unmounted
            _, opcode, unique, number, *_ = _HEAD.unpack_from(request)
            if opcode in {FORGET, BATCH_FORGET, DESTROY}:
                continue
            try:
                answer, code = self._answer(opcode, number, request[_HEAD.size :]), 0
            except RefusedError as refusal:
                answer, code = b"", -refusal.args[0]
            os.write(self._device, struct.pack("=IiQ", 16 + len(answer), code, unique) + answer)

    def _answer(self, opcode: int, number: int, body: bytes) -> bytes:
        if opcode == INIT:
            flags = _BIG_WRITES | _MAX_PAGES
            return _INIT.pack(7, 31, _MOST, flags, 12, 9, _MOST, 1, 256, 0, 0, *(0,) * 7)
        if opcode in _NOTHING_TO_DO:
            return b""
        ways = {
            LOOKUP: self._look_up,
            GETATTR: self._attributes_of,
            SETATTR: self._resize,
            MKDIR: self._make_directory,
            UNLINK: self._remove,
            RMDIR: self._remove,
            OPEN: self._open,
            OPENDIR: self._open,
            CREATE: self._create,
            READ: self._read,
            WRITE: self._write,
            FLUSH: self._flush,
            STATFS: self._room_of,
        }
        if opcode not in ways:
            raise RefusedError(errno.ENOSYS)
        return ways[opcode](number, body)

    def _look_up(self, number: int, body: bytes) -> bytes:
        found = self._nodes[number].names.get(body.rstrip(b"\0"))
        if found is None:
            raise RefusedError(errno.ENOENT)
        return self._entry(found)

    def _attributes_of(self, number: int, _: bytes) -> bytes:
        return struct.pack("=QII", 0, 0, 0) + self._attributes(number)

    def _resize(self, number: int, body: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("=IIQQ", body)
        if valid & 8:
            data = self._nodes[number].data
            del data[size:]
            data.extend(bytes(size - len(data)))
        return self._attributes_of(number, body)

    def _make_directory(self, number: int, body: bytes) -> bytes:
        return self._made(self._nodes[number], body[8:].rstrip(b"\0"), stat.S_IFDIR | 0o700)

    def _create(self, number: int, body: bytes) -> bytes:
        mode = stat.S_IFREG | struct.unpack_from("=II", body)[1] & 0o777
        made = self._made(self._nodes[number], body[16:].rstrip(b"\0"), mode)
        return made + self._open(number, body)

    def _open(self, _: int, __: bytes) -> bytes:
        return struct.pack("=QII", 0, _PAST_THE_CACHE, 0)

    def _remove(self, number: int, body: bytes) -> bytes:
        names, name = self._nodes[number].names, body.rstrip(b"\0")
        if name not in names:
            raise RefusedError(errno.ENOENT)
        if self._nodes[names[name]].names:
            raise RefusedError(errno.ENOTEMPTY)
        del names[name]
        return b""

    def _read(self, number: int, body: bytes) -> bytes:
        _, offset, size, _, _, flags = struct.unpack_from("=QQIIQI", body)
        self._refuse_direct(flags)
        return bytes(self._nodes[number].data[offset : offset + size])

    def _write(self, number: int, body: bytes) -> bytes:
        _, offset, size, _, _, flags = struct.unpack_from("=QQIIQI", body)
        self._refuse_direct(flags)
        self._take(number, offset, body[40 : 40 + size])
        return struct.pack("=II", size, 0)

    def _flush(self, _: int, __: bytes) -> bytes:
        """A descriptor is closed."""
        lost, self._has_lost = self._has_lost, False
        if lost:
            raise RefusedError(errno.ENOSPC)
        return b""

    def _room_of(self, _: int, __: bytes) -> bytes:
        return struct.pack("=5Q4I6I", 1 << 30, 1 << 30, 1 << 30, 1, 1, 4096, 255, 4096, 0, *(0,) * 6)

    def _refuse_direct(self, flags: int) -> None:
        if flags & os.O_DIRECT:
            raise RefusedError(errno.EINVAL)

    def _take(self, number: int, offset: int, data: bytes) -> None:
        """Takes blocks as long as there is room; the others are lost."""
        held = self._nodes[number].data
        held.extend(bytes(max(offset + len(data) - len(held), 0)))
        for start in range(0, len(data), 4096):
            block, piece = (number, (offset + start) // 4096), data[start : start + 4096]
            if block not in self._held and 4096 * len(self._held) >= self._room:
                self._has_lost = True
                piece = bytes(len(piece))
            else:
                self._held.add(block)
            held[offset + start : offset + start + len(piece)] = piece

    def _made(self, above: Node, name: bytes, mode: int) -> bytes:
        if name in above.names:
            raise RefusedError(errno.EEXIST)
        number = 1 + max(self._nodes)
        self._nodes[number] = Node(mode)
        above.names[name] = number
        return self._entry(number)

    def _entry(self, number: int) -> bytes:
        return struct.pack("=4Q2I", number, 0, 0, 0, 0, 0) + self._attributes(number)

    def _attributes(self, number: int) -> bytes:
        node = self._nodes[number]
        size = len(node.data)
        owner = os.geteuid(), os.getegid()
        return _ATTRIBUTES.pack(number, size, size // 512, *(0,) * 6, node.mode, 1, *owner, 0, 4096, 0)


def main(directory: str, room: int) -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()},allow_other"
    if _libc.mount(b"late", os.fsencode(directory), b"fuse.late", 0, options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.write(1, b"mounted\n")
    Server(device, room).serve()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
