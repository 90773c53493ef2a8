"""Netlink dumps (rtnetlink(7)), read as they come: a message's fixed part, then its attributes.

Not through pyroute2, which is right where something is changed once: it needs 0.7 s to list the 250 veths of 250 endpoints, and
holds Python's lock all the while, so that DNS would wait. This takes a twentieth of that.

The sequence number is not compared: the socket is new, so everything on it answers the one request.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

GET_LINK: Final = 18
GET_ADDRESS: Final = 22
GET_ROUTE: Final = 26
GET_NEIGHBOUR: Final = 30

# struct ifinfomsg, ifaddrmsg, rtmsg, ndmsg of <linux/rtnetlink.h>, and what of their fields is given back.
_FIXED: Final = {
    GET_LINK: struct.Struct("=BxHiII"),  # family, type, index, flags, change
    GET_ADDRESS: struct.Struct("=BBBBI"),  # family, prefix length, flags, scope, index
    GET_ROUTE: struct.Struct("=8BI"),  # family, destination length, source length, tos, table, protocol, scope, type, flags
    GET_NEIGHBOUR: struct.Struct("=B3xiHBB"),  # family, index, state, flags, type
}
HEADER: Final = struct.Struct("=IHHII")  # length, type, flags, sequence number, port
_ATTRIBUTE: Final = struct.Struct("=HH")  # length, type

_REQUEST_DUMP: Final = 0x301
_DUMP_INTERRUPTED: Final = 0x10
_TYPE_MASK: Final = 0x3FFF  # without "nested" and "network byte order"
_ERROR: Final = 2
_DONE: Final = 3
_EXTENSIONS: Final = 29  # IFLA_EXT_MASK
_SKIP_STATISTICS: Final = 8
_BUFFER_BYTES: Final = 1 << 17
_PATIENCE_S: Final = 5.0
_TRIES_MAX: Final = 8


class Message(NamedTuple):
    """fixed: the numbers of the message's own struct; attributes: type to value, of equal types the last."""

    fixed: tuple[int, ...]
    attributes: dict[int, bytes]


def dump(what: int, family: int = socket.AF_UNSPEC) -> list[Message]:
    """Everything of one kind in the network namespace of the caller; raises OSError.

    What changed while it was listed is listed again: half of the old and half of the new would be a network that never was.
    """
    for _ in range(_TRIES_MAX):
        found = _dump_once(what, family)
        if found is not None:
            return found
    raise OSError(errno.EINTR, "the network changes faster than it can be listed")


def _dump_once(what: int, family: int) -> list[Message] | None:
    fixed = _FIXED[what]
    body = bytearray(fixed.size)
    body[0] = family
    if what == GET_LINK:
        body += _ATTRIBUTE.pack(8, _EXTENSIONS) + struct.pack("=I", _SKIP_STATISTICS)
    found: list[Message] = []
    is_whole = True
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as netlink:
        netlink.settimeout(_PATIENCE_S)
        netlink.send(HEADER.pack(HEADER.size + len(body), what, _REQUEST_DUMP, 1, 0) + body)
        while True:
            for kind, flags, payload in messages(netlink.recv(_BUFFER_BYTES)):
                is_whole = is_whole and not flags & _DUMP_INTERRUPTED
                if kind == _DONE:
                    return found if is_whole else None
                if kind == _ERROR:
                    number = -int(struct.unpack_from("=i", payload)[0])
                    raise OSError(number, os.strerror(number))
                found.append(Message(fixed.unpack_from(payload), attributes(payload, fixed.size)))


def messages(octets: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Type, flags and payload of each message of a datagram."""
    at = 0
    while at + HEADER.size <= len(octets):
        length, kind, flags, _, _ = HEADER.unpack_from(octets, at)
        if length < HEADER.size:
            return
        yield kind, flags, octets[at + HEADER.size : at + length]
        at += (length + 3) & ~3


def attributes(octets: bytes, at: int = 0) -> dict[int, bytes]:
    """Attributes from this place on; a nested one is again such a row of them."""
    found: dict[int, bytes] = {}
    while at + 4 <= len(octets):
        length, kind = _ATTRIBUTE.unpack_from(octets, at)
        if length < 4:
            break
        found[kind & _TYPE_MASK] = octets[at + 4 : at + length]
        at += (length + 3) & ~3
    return found
