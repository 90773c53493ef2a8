"""What the program tells of packets: each that it dropped, and on request each that opens a flow. Read from a ring we share.

The ring is two mappings of one map: a page with our position, which we write; the kernel's position and the data, mapped twice
in a row so that no record is ever cut by the end. A record is eight bytes of header and the event; the kernel sets the length
last. See Documentation/bpf/ringbuf.rst. The map's file descriptor can be polled; reading makes it silent until the next event.
"""

from __future__ import annotations

import mmap
import struct
from typing import Final, NamedTuple

from agent.core.types import Address, Direction
from agent.datapath import abi, syscall
from agent.datapath.abi import Reason
from agent.datapath.errors import refused

_PAGE: Final = mmap.PAGESIZE
_BUSY: Final = 1 << 31
_DISCARDED: Final = 1 << 30
_HEADER: Final = 8
_POSITION: Final = struct.Struct("=Q")
_NS: Final = 1_000_000_000


class PacketEvent(NamedTuple):
    """A packet that was dropped, or under audit would have been; or one that was judged and allowed (PASS_POLICY).

    at: seconds of CLOCK_BOOTTIME. endpoint: None where the interface has no row. identity: of the remote, 0 where it was not
    looked up; cookie: of the rule that decided, 0 for none. An ICMP message has its type in policy_port.
    """

    at: float
    reason: Reason
    audited: bool
    endpoint: int | None
    ifindex: int
    direction: Direction
    identity: int
    cookie: int
    protocol: int
    source: Address
    destination: Address
    source_port: int
    destination_port: int
    policy_port: int
    length: int


class EventRing:
    """Reader of the ring `events`. fd stays the caller's."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._size = syscall.map_info(fd).max_entries
        try:
            self._ours = mmap.mmap(fd, _PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            self._kernels = mmap.mmap(fd, _PAGE + 2 * self._size, mmap.MAP_SHARED, mmap.PROT_READ, offset=_PAGE)
        except OSError as problem:
            raise refused("map the ring of events", problem) from None

    def close(self) -> None:
        self._ours.close()
        self._kernels.close()

    def read(self, limit: int = 1_024) -> list[PacketEvent]:
        """Up to `limit` events, oldest first."""
        found: list[PacketEvent] = []
        (position,) = _POSITION.unpack_from(self._ours, 0)
        while len(found) < limit:
            (written,) = _POSITION.unpack_from(self._kernels, 0)
            if position >= written:
                break
            start = _PAGE + position % self._size
            (length,) = struct.unpack_from("=I", self._kernels, start)
            if length & _BUSY:
                break  # another processor is still writing it
            size = length & ~_DISCARDED
            if not length & _DISCARDED and size == abi.EVENT.size:
                found.append(_event(self._kernels, start + _HEADER))
            position += -(-(size + _HEADER) // 8) * 8
            _POSITION.pack_into(self._ours, 0, position)
        return found


def _event(memory: mmap.mmap, offset: int) -> PacketEvent:
    (
        at,
        endpoint,
        ifindex,
        identity,
        cookie,
        length,
        policy_port,
        reason,
        audited,
        source,
        destination,
        source_port,
        destination_port,
        protocol,
        direction,
        _,
    ) = abi.EVENT.unpack_from(memory, offset)
    return PacketEvent(
        at / _NS,
        Reason(reason),
        bool(audited),
        None if endpoint == abi.ENDPOINT_NONE else endpoint,
        ifindex,
        Direction(direction),
        identity,
        cookie,
        protocol,
        abi.unmapped(source),
        abi.unmapped(destination),
        int.from_bytes(source_port, "big"),
        int.from_bytes(destination_port, "big"),
        int.from_bytes(policy_port, "big"),
        length,
    )
