"""Many datagrams in one system call: recvmmsg(2) and sendmmsg(2), which Python's socket module does not have.

At full load a question costs four socket calls, two in and two out. One by one they are most of what a proxy does; 64 at a time
the calls themselves hardly count any more, and neither does the wake-up (measured: 36,000 questions a second and core without,
50,000 with).

Rule 1: what the kernel is told to read from or write to is memory of ours that stays where it is; addresses are taken once.
Rule 2: what is received is copied out before the next call; so one `Receiver` serves all sockets of a thread.
Rule 3: an error is about one datagram: the others go.

Sizes and places are those of <bits/socket.h> on 64-bit Linux:

    struct mmsghdr    name | its octets | iovecs | how many | control | its octets | flags | octets of the datagram
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import socket
from collections.abc import Sequence
from struct import Struct
from typing import Final

BATCH: Final = 64
DATAGRAM_OCTETS_MAX: Final = 65535

HEADER: Final = Struct("=QI4xQQQQi4xI4x")
HEADER_OCTETS: Final = HEADER.size
LENGTH_AT: Final = 56  # in a header: the octets of the datagram
IOVEC: Final = Struct("=QQ")
IOVEC_OCTETS: Final = IOVEC.size

# A reply that is longer than a packet on Ethernet is rare: its tail goes to memory that is not even there until it is used.
_HEAD_OCTETS: Final = 1536

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_RECVMMSG: Final = _LIBC.recvmmsg
_RECVMMSG.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_void_p]
_SENDMMSG: Final = _LIBC.sendmmsg
_SENDMMSG.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int]


class Memory:
    """Octets the kernel reads and writes; of nobody else, or of a file that others have mapped too."""

    def __init__(self, octets: int, descriptor: int = -1) -> None:
        self.octets = mmap.mmap(descriptor, octets)
        self._held: ctypes.c_char | None = ctypes.c_char.from_buffer(self.octets)
        self.address = ctypes.addressof(self._held)

    def close(self) -> None:
        self._held = None  # or the mapping could not be closed
        self.octets.close()


def receive(descriptor: int, headers: int, count: int) -> int:
    """Datagrams that are there, into so many headers at this address; 0 for none. OSError for one the kernel kept for us."""
    received: int = _RECVMMSG(descriptor, headers, count, socket.MSG_DONTWAIT, None)
    if received >= 0:
        return received
    code = ctypes.get_errno()
    if code in (errno.EAGAIN, errno.EINTR):
        return 0
    raise OSError(code, os.strerror(code))


def send(descriptor: int, headers: int, count: int) -> list[tuple[int, int]]:
    """So many datagrams from the headers at this address; gives back (place, errno) of each that could not be sent."""
    failed: list[tuple[int, int]] = []
    at = 0
    while at < count:
        sent = _SENDMMSG(descriptor, headers + at * HEADER_OCTETS, count - at, socket.MSG_DONTWAIT)
        if sent < 0:
            code = ctypes.get_errno()
            if code == errno.EINTR:
                continue
            failed.append((at, code))
            sent = 1
        at += sent
    return failed


class Receiver:
    """Datagrams from connected sockets: who sent them is known."""

    def __init__(self) -> None:
        self._headers = Memory(BATCH * (HEADER_OCTETS + 2 * IOVEC_OCTETS))
        self._heads = Memory(BATCH * _HEAD_OCTETS)
        self._tails = Memory(BATCH * DATAGRAM_OCTETS_MAX)
        self._lengths = memoryview(self._headers.octets).cast("I")[
            LENGTH_AT // 4 : BATCH * HEADER_OCTETS // 4 : HEADER_OCTETS // 4
        ]
        iovecs_at = BATCH * HEADER_OCTETS
        for place in range(BATCH):
            at = iovecs_at + place * 2 * IOVEC_OCTETS
            IOVEC.pack_into(self._headers.octets, at, self._heads.address + place * _HEAD_OCTETS, _HEAD_OCTETS)
            tail = self._tails.address + place * DATAGRAM_OCTETS_MAX
            IOVEC.pack_into(self._headers.octets, at + IOVEC_OCTETS, tail, DATAGRAM_OCTETS_MAX)
            HEADER.pack_into(self._headers.octets, place * HEADER_OCTETS, 0, 0, self._headers.address + at, 2, 0, 0, 0, 0)

    def receive(self, descriptor: int) -> list[bytes]:
        """What is there, up to a batch; OSError for an error the kernel kept for us."""
        count = receive(descriptor, self._headers.address, BATCH)
        heads, at = self._heads.octets, 0
        messages: list[bytes] = []
        for length in self._lengths[:count].tolist():
            message = heads[at : at + length] if length <= _HEAD_OCTETS else self._whole(at, length)
            messages.append(message)
            at += _HEAD_OCTETS
        return messages

    def _whole(self, at: int, length: int) -> bytes:
        tail = at // _HEAD_OCTETS * DATAGRAM_OCTETS_MAX
        return self._heads.octets[at : at + _HEAD_OCTETS] + self._tails.octets[tail : tail + length - _HEAD_OCTETS]

    def close(self) -> None:
        self._lengths.release()
        for memory in (self._headers, self._heads, self._tails):
            memory.close()


class Sender:
    """Datagrams to wherever their socket is connected."""

    def __init__(self) -> None:
        self._headers = Memory(BATCH * (HEADER_OCTETS + IOVEC_OCTETS))
        self._messages = Memory(BATCH * DATAGRAM_OCTETS_MAX)
        self._iovecs_at = BATCH * HEADER_OCTETS
        for place in range(BATCH):
            iovec = self._headers.address + self._iovecs_at + place * IOVEC_OCTETS
            HEADER.pack_into(self._headers.octets, place * HEADER_OCTETS, 0, 0, iovec, 1, 0, 0, 0, 0)

    def send(self, descriptor: int, messages: Sequence[bytes]) -> list[tuple[int, int]]:
        """At most a batch; gives back (place, errno) of each that could not be sent."""
        joined = b"".join(messages)
        self._messages.octets[: len(joined)] = joined
        headers, start, at = self._headers.octets, self._messages.address, self._iovecs_at
        for message in messages:
            IOVEC.pack_into(headers, at, start, len(message))
            start += len(message)
            at += IOVEC_OCTETS
        return send(descriptor, self._headers.address, len(messages))

    def close(self) -> None:
        self._headers.close()
        self._messages.close()
