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

import errno
import socket
from struct import Struct
from typing import Any

from agent.core.types import Address

# From <linux/in.h>, <linux/in6.h> and <asm-generic/socket.h>; Python 3.11 does not name them.
IP_PKTINFO = 8
IP_TRANSPARENT = 19
IPV6_TRANSPARENT = 75
SO_SNDBUFFORCE = 32

# The dummy address of RFC 7600 and one of the discard-only prefix of RFC 6666.
NOBODY = {socket.AF_INET: "192.0.0.8", socket.AF_INET6: "100::1"}

# One socket serves everybody: room for some hundred large replies that a slow device has not taken yet.
SEND_BUFFER_OCTETS = 4 << 20

DATAGRAM_OCTETS_MAX = 65535

_UDP_HEADER = Struct("!4H")  # source port, destination port, length, checksum (RFC 768)
_UDP_CHECKSUM_AT = 6
_PSEUDO_HEADER = Struct("!4s4sxBH")
_IN_PKTINFO = Struct("=i4s4x")  # any interface, the source address
_IN6_PKTINFO = Struct("=16si")


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

    def send(self, server: Address, port: int, client: Any, message: bytes) -> None:
        """From (server, port) to the socket address `client`; OSError if the kernel will not."""
        octets = _UDP_HEADER.size + len(message)
        if octets > DATAGRAM_OCTETS_MAX:
            raise OSError(errno.EMSGSIZE, "a datagram cannot be so long")
        if len(server) == 4:
            header = _UDP_HEADER.pack(port, client[1], octets, 0)
            pseudo = _PSEUDO_HEADER.pack(server, socket.inet_aton(client[0]), socket.IPPROTO_UDP, octets)
            header = header[:_UDP_CHECKSUM_AT] + checksum_of(pseudo + header + message).to_bytes(2, "big")
            source = (socket.IPPROTO_IP, IP_PKTINFO, _IN_PKTINFO.pack(0, server))
            self._v4.sendmsg((header, message), (source,), 0, (client[0], 0))
        else:
            header = _UDP_HEADER.pack(port, client[1], octets, 0)  # here the kernel writes the checksum (RFC 3542 3.1)
            source = (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, _IN6_PKTINFO.pack(server, 0))
            self._v6.sendmsg((header, message), (source,), 0, (client[0], 0, 0, client[3]))

    def close(self) -> None:
        self._v4.close()
        self._v6.close()


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
