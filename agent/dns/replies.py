"""How UDP replies leave: from the address and port that were asked, whoever owns them.

Rule 1: no address and no port of this host is ever occupied for it. The datagram, UDP header included, goes out through a
transparent raw socket, which can name any source.

Why not sockets bound to what was asked: a server of this host that does not share its port (nsd sets no SO_REUSEADDR) makes our
bind fail, and its own bind fails while ours is kept; if it listens on all addresses, also when ours has a foreign one.
And a socket that is only bound takes the questions of a resolver on the same address (seen with dnsmasq and unbound).

The price: the UDP checksum is ours to write, and the kernel offers a raw socket every datagram the host receives. Ours is bound
to an address that no packet has, so the offer ends at a comparison.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from struct import Struct
from typing import Final

from agent.core.types import PROTOCOL_UDP
from agent.dns.batches import BATCH, DATAGRAM_OCTETS_MAX, HEADER, HEADER_OCTETS, Memory, send
from agent.dns.ledger import Noted

# From <linux/in.h>, <linux/in6.h> and <asm-generic/socket.h>; Python 3.11 does not name them.
IP_PKTINFO: Final = 8
IP_TRANSPARENT: Final = 19
IPV6_TRANSPARENT: Final = 75
SO_SNDBUFFORCE: Final = 32

# The dummy address of RFC 7600 and one of the discard-only prefix of RFC 6666.
NOBODY: Final = {socket.AF_INET: "192.0.0.8", socket.AF_INET6: "100::1"}

# One socket serves everybody: room for some hundred large replies that a slow device has not taken yet.
SEND_BUFFER_OCTETS: Final = 4 << 20

_UDP_HEADER: Final = Struct("!4H")  # source port, destination port, length, checksum (RFC 768)
_UDP_CHECKSUM_AT: Final = 6
# The pseudo header it is summed with: addresses, protocol, length; and two octets of nothing more, for it is 12 long.
_SUMMED_V4: Final = Struct("!4s4s2x2H4H")

# What the kernel is told of one datagram: an iovec, whom to send it to, and from where, as a control message with struct
# in_pktinfo or in6_pktinfo. Of the address the port means nothing: it stands in the UDP header.
_TOLD_V4: Final = Struct("=QQH2x4s8x16s4x4s8x")
_TOLD_V6: Final = Struct("=QQH2x4x16s4s4x16s16s4x4x")
_TOLD_OCTETS: Final = 96
_AF_INET: Final = int(socket.AF_INET)
_AF_INET6: Final = int(socket.AF_INET6)
_CONTROL: Final = Struct("=Qii")  # of a struct cmsghdr: its octets, its level, its type
_CONTROL_V4: Final = _CONTROL.pack(socket.CMSG_LEN(12), socket.IPPROTO_IP, IP_PKTINFO)
_CONTROL_V6: Final = _CONTROL.pack(socket.CMSG_LEN(20), socket.IPPROTO_IPV6, socket.IPV6_PKTINFO)
_SENDER_AT: Final = 16


class ReplySockets:
    """Senders of replies, one for IPv4 and one for IPv6.

    mark: SO_MARK on what is sent, 0 for none. OSError without CAP_NET_RAW and CAP_NET_ADMIN.
    """

    def __init__(self, mark: int) -> None:
        self._v4 = _raw(socket.AF_INET, mark)
        try:
            self._v6 = _raw(socket.AF_INET6, mark)
        except OSError:
            self._v4.close()
            raise
        self._told = Memory(BATCH * _TOLD_OCTETS)
        self._datagrams = Memory(BATCH * DATAGRAM_OCTETS_MAX)
        self._headers_v4 = self._headers(sender_octets=16, control_at=32, control_octets=socket.CMSG_SPACE(12))
        self._headers_v6 = self._headers(sender_octets=28, control_at=48, control_octets=socket.CMSG_SPACE(20))

    def _headers(self, *, sender_octets: int, control_at: int, control_octets: int) -> Memory:
        headers = Memory(BATCH * HEADER_OCTETS)
        for place in range(BATCH):
            told = self._told.address + place * _TOLD_OCTETS
            HEADER.pack_into(
                headers.octets,
                place * HEADER_OCTETS,
                *(told + _SENDER_AT, sender_octets, told, 1, told + control_at, control_octets, 0, 0),
            )
        return headers

    def send(self, replies: Sequence[tuple[Noted, bytes]]) -> int:
        """Let answers go to who asked, from where was asked; gives back how many the kernel would not send, or nobody could."""
        of_v4: list[tuple[Noted, bytes]] = []
        of_v6: list[tuple[Noted, bytes]] = []
        for reply in replies:
            noted, message = reply
            if len(message) <= DATAGRAM_OCTETS_MAX - _UDP_HEADER.size:
                (of_v4 if len(noted.server) == 4 else of_v6).append(reply)
        unsent = len(replies) - len(of_v4) - len(of_v6)
        for start in range(0, len(of_v4), BATCH):
            unsent += len(self._send_v4(of_v4[start : start + BATCH]))
        for start in range(0, len(of_v6), BATCH):
            unsent += len(self._send_v6(of_v6[start : start + BATCH]))
        return unsent

    def _send_v4(self, batch: list[tuple[Noted, bytes]]) -> list[tuple[int, int]]:
        told, datagrams, start = self._told.octets, self._datagrams.octets, self._datagrams.address
        at = told_at = 0
        for noted, message in batch:
            octets = _UDP_HEADER.size + len(message)
            summed = noted.server, noted.client, PROTOCOL_UDP, octets, noted.port, noted.client_port, octets, 0
            checksum = checksum_of(_SUMMED_V4.pack(*summed) + message)
            end = at + octets
            datagrams[at:end] = _UDP_HEADER.pack(noted.port, noted.client_port, octets, checksum) + message
            _TOLD_V4.pack_into(
                told,
                told_at,
                *(start + at, octets, _AF_INET, noted.client, _CONTROL_V4, noted.server),
            )
            at, told_at = end, told_at + _TOLD_OCTETS
        return send(self._v4.fileno(), self._headers_v4.address, len(batch))

    def _send_v6(self, batch: list[tuple[Noted, bytes]]) -> list[tuple[int, int]]:
        told, datagrams, start = self._told.octets, self._datagrams.octets, self._datagrams.address
        at = told_at = 0
        for noted, message in batch:
            octets = _UDP_HEADER.size + len(message)
            end = at + octets
            # Here the kernel writes the checksum (RFC 3542 3.1).
            datagrams[at:end] = _UDP_HEADER.pack(noted.port, noted.client_port, octets, 0) + message
            _TOLD_V6.pack_into(
                told,
                told_at,
                *(start + at, octets, _AF_INET6, noted.client, noted.scope, _CONTROL_V6, noted.server),
            )
            at, told_at = end, told_at + _TOLD_OCTETS
        return send(self._v6.fileno(), self._headers_v6.address, len(batch))

    def close(self) -> None:
        self._v4.close()
        self._v6.close()
        for memory in (self._told, self._datagrams, self._headers_v4, self._headers_v6):
            memory.close()


def transparent(family: socket.AddressFamily, kind: socket.SocketKind, mark: int, protocol: int = 0) -> socket.socket:
    """A socket that may name any address as its own and be handed packets for any; OSError without CAP_NET_ADMIN."""
    opened = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, protocol)
    try:
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, IPV6_TRANSPARENT, 1)
        else:
            opened.setsockopt(socket.IPPROTO_IP, IP_TRANSPARENT, 1)
        if mark:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
    except OSError:
        opened.close()
        raise
    return opened


def _raw(family: socket.AddressFamily, mark: int) -> socket.socket:
    opened = transparent(family, socket.SOCK_RAW, mark, socket.IPPROTO_UDP)
    try:
        opened.bind((NOBODY[family], 0))
        opened.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, SEND_BUFFER_OCTETS)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_CHECKSUM, _UDP_CHECKSUM_AT)
    except OSError:
        opened.close()
        raise
    return opened


def checksum_of(octets: bytes) -> int:
    """The Internet checksum (RFC 1071) as UDP writes it: never 0, which would say that there is none.

    The ones' complement sum of 16-bit words is the whole number modulo 65,535.
    """
    return -int.from_bytes(octets + bytes(len(octets) % 2), "big") % 0xFFFF or 0xFFFF
