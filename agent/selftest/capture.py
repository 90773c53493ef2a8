"""A capture: every packet the client sent, as it went by an interface."""

from __future__ import annotations

import socket
import struct
from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

from agent.core.types import PORT_DNS, PROTOCOL_TCP, PROTOCOL_UDP, Address, packed
from agent.selftest.network import CLIENT, Network

_EVERY_PROTOCOL: Final = 3  # ETH_P_ALL
_OCTETS: Final = 32 << 20  # a few thousand packets between two reads
_SO_RCVBUFFORCE: Final = 33
_SOL_PACKET, _PACKET_STATISTICS = 263, 6
_ETHERNET: Final = 14
_SYN, _ACK = 0x02, 0x10
_CLIENT: Final = frozenset(map(packed, CLIENT))


class Packet(NamedTuple):
    """One of the client's. what: by which it is told from every other: a sequence number and flags, or the payload."""

    remote: Address
    protocol: int
    ports: bytes
    what: bytes
    is_first: bool  # of a connection: SYN, without ACK


class Capture:
    """Of one interface, from its making on. What comes waits in the kernel until it is read."""

    def __init__(self, network: Network, place: str, device: str) -> None:
        with network.inside(place):
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _OCTETS)
            self._socket.bind((device, _EVERY_PROTOCOL))
        self._socket.setblocking(False)
        self.lost = 0

    def close(self) -> None:
        self._socket.close()

    def read(self) -> list[Packet]:
        """TCP and UDP from the client since the last time, its questions left out."""
        packets = []
        while True:
            try:
                packet = _packet(self._socket.recv(2048))
            except BlockingIOError:
                break
            if packet is not None:
                packets.append(packet)
        _, lost = struct.unpack("=II", self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8))
        self.lost += lost
        return packets


def missing(near: Iterable[Packet], far: Iterable[Packet]) -> list[Packet]:
    """What left the client and did not arrive, each as often as it was lost."""
    return list((Counter(near) - Counter(far)).elements())


def _packet(frame: bytes) -> Packet | None:
    kind, head = frame[12:14], frame[_ETHERNET:]
    if kind == b"\x08\x00" and len(head) >= 20:
        source, remote, protocol, inner = head[12:16], head[16:20], head[9], head[4 * (head[0] & 15) :]
    elif kind == b"\x86\xdd" and len(head) >= 40:
        source, remote, protocol, inner = head[8:24], head[24:40], head[6], head[40:]
    else:
        return None
    if source not in _CLIENT or protocol not in (PROTOCOL_TCP, PROTOCOL_UDP) or len(inner) < 8:
        return None
    if int.from_bytes(inner[2:4], "big") == PORT_DNS:
        return None
    is_tcp = protocol == PROTOCOL_TCP
    what = inner[4:8] + inner[13:14] if is_tcp else inner[8:]
    return Packet(remote, protocol, inner[:4], what, is_tcp and inner[13] & (_SYN | _ACK) == _SYN)
