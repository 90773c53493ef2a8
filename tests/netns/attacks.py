"""What a container's own root can put on its wire, as a table; and the judge of what came out beyond the host.

Every attack has a number. Its mark stands in each of its frames, and what it is after is an address of its own (`fresh_address` of
the number), so that a capture says which of them got out. The kind is what stands before the colon of its name.

Rule 1: an attack is frames and nothing else; what is done with commands and sockets is in test_own_root.py.
Rule 2: checksums of IPv4 headers are right unless the attack is that they are not: a router would drop them all the same.
Rule 3: the judge looks at every frame that left the host, not for what it knows of.
"""

from __future__ import annotations

import itertools
import random
import re
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from agent.core.types import packed
from tests.netns import pcap
from tests.netns.lab import HOST_UPLINK, INTERNET_UPLINK, NAME_SERVERS, fresh_address
from tests.netns.sending import summed
from tests.packets import (
    ACK,
    FIN,
    GRE,
    ICMP,
    ICMPV6,
    PUSH,
    RST,
    SCTP,
    SYN,
    TCP,
    UDP,
    echo,
    error,
    ethernet,
    ipv4_header,
    ipv6_header,
    tcp,
    udp,
)

PORT: Final = 443
ALLOWED: Final = ("198.51.100.7", "2001:db8:53::7")
_HOP_BY_HOP, _ROUTING, _FRAGMENT, _ESP, _AUTHENTICATION, _NO_NEXT, _OPTIONS = 0, 43, 44, 50, 51, 59, 60
_IPIP, _IPV6, _DCCP, _UDP_LITE, _IGMP = 4, 41, 33, 136, 2
_MARK: Final = re.compile(rb"<attack (\d{4})>")
_NO_HEADER: Final = bytes(10)
_NEEDS_CHECKSUM, _GSO_TCP4, _GSO_TCP6 = 1, 1, 4  # virtio 5.1.6

Built = bytes | Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Place:
    """Who attacks, seen from its link: (IPv4, IPv6) of itself, of its router and of another client; and the MACs to that router."""

    own: tuple[str, str]
    router: tuple[str, str]
    other: tuple[str, str]
    macs: bytes


class Frame(NamedTuple):
    """header: what a virtual machine would say of it (struct virtio_net_hdr)."""

    octets: bytes
    header: bytes = _NO_HEADER


@dataclass(frozen=True, slots=True)
class Attack:
    """allowed: how many of the frames, the first ones, are to what policy allows, asked of the proxy, or harmless on the link."""

    number: int
    name: str
    frames: tuple[Frame, ...]
    allowed: int

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]


def mark(number: int) -> bytes:
    return b"<attack %04d>" % number


def marks(path: Path) -> set[int]:
    """The numbers of all attacks of which a frame is in this capture."""
    return {int(found) for octets in pcap.frames(path) for found in _MARK.findall(octets)}


# --- the table -------------------------------------------------------------------------------------------------------


def attacks(place: Place, first: int = 0) -> list[Attack]:
    table = _Table(place, first)
    for version in (4, 6):
        _transports(table, version)
        _sources(table, version)
        _fragments(table, version)
        _tunnels(table, version)
        _icmp(table, version)
        _frames(table, version)
        _checksums(table, version)
        _neighbours(table, version)
        _many(table, version)
    _ipv4_headers(table)
    _ipv6_headers(table)
    return table.attacks


class _Table:
    def __init__(self, place: Place, first: int) -> None:
        self.place = place
        self.attacks: list[Attack] = []
        self._first = first

    def add(self, name: str, version: int, build: Callable[[str, bytes], Built], *, allowed: int = 0, header: bytes = b"") -> None:
        """build: from the address the attack is after and its mark to its frames."""
        number = self._first + len(self.attacks)
        built = build(fresh_address(number, version), mark(number))
        octets = [built] if isinstance(built, bytes) else built
        frames = tuple(Frame(self._sent(each), header or _NO_HEADER) for each in octets)
        self.attacks.append(Attack(number, f"{name}, IPv{version}", frames, allowed))

    def _sent(self, frame: bytes) -> bytes:
        """From the attacker to its router, unless the frame says otherwise."""
        return self.place.macs + frame[12:] if frame[:12] == _ANY_MACS else frame


_ANY_MACS: Final = ethernet(0, b"")[:12]


def _packet(source: str, to: str, protocol: int, payload: bytes, *vlans: int) -> bytes:
    if ":" in to:
        return ethernet(0x86DD, ipv6_header(source, to, protocol, len(payload)) + payload, *vlans)
    return ethernet(0x0800, summed(ipv4_header(source, to, protocol, len(payload))) + payload, *vlans)


def _datagram(mark: bytes, port: int = PORT) -> bytes:
    return udp(4000, port, mark)


def _transports(table: _Table, version: int) -> None:
    own, allowed = table.place.own[version == 6], ALLOWED[version == 6]
    other, router, uplink = table.place.other[version == 6], table.place.router[version == 6], HOST_UPLINK[version == 6]
    for what, flags in (
        ("opening", SYN),
        ("opening and ending", SYN | FIN),
        ("answering nobody", SYN | ACK),
        ("in the middle", ACK | PUSH),
        ("reset", RST),
        ("no flags", 0),
        ("all flags", 0xFF),
    ):
        table.add(f"TCP: {what}", version, lambda to, m, f=flags: _packet(own, to, TCP, tcp(4000, PORT, f, m)))  # type: ignore[misc]
    for port in (7, 53, 123, 853, 4789, 5353, PORT, 51820, 0):
        is_asked = port == 53
        table.add(f"UDP: to port {port}", version, lambda to, m, p=port: _packet(own, to, UDP, _datagram(m, p)), allowed=is_asked)  # type: ignore[misc]
    for what, protocol, payload in (
        ("SCTP", SCTP, udp(4000, PORT, bytes(4) + b"\1\0\0\x14" + bytes(16))),
        ("DCCP", _DCCP, tcp(4000, PORT)),
        ("UDP-Lite", _UDP_LITE, udp(4000, PORT)),
        ("IGMP", _IGMP, b"\x16\0\0\0" + bytes(4)),
        ("OSPF", 89, bytes(24)),
        ("ESP", _ESP, bytes(16)),
        ("experiment", 253, bytes(8)),
        ("raw", 255, bytes(8)),
    ):
        table.add(
            f"protocol: {what}", version, lambda to, m, n=protocol, data=payload: _packet(own, to, n, data + m)  # type: ignore[misc]
        )
        if protocol != SCTP:
            table.add(
                f"protocol: {what} to an allowed address",
                version,
                lambda _, m, n=protocol, data=payload: _packet(own, allowed, n, data + m),  # type: ignore[misc]
            )
    for port in (22, 80, 853, 444):
        table.add(f"port: TCP {port} of an allowed address", version, lambda _, m, p=port: _packet(own, allowed, TCP, tcp(4000, p, SYN, m)))  # type: ignore[misc]
        table.add(f"port: UDP {port} of an allowed address", version, lambda _, m, p=port: _packet(own, allowed, UDP, _datagram(m, p)))  # type: ignore[misc]
    for what, to in (("another endpoint", other), ("its router", router), ("the host's uplink", uplink)):
        table.add(f"inside: TCP to {what}", version, lambda _, m, a=to: _packet(own, a, TCP, tcp(4000, PORT, SYN, m)))  # type: ignore[misc]
        table.add(f"inside: UDP to {what}", version, lambda _, m, a=to: _packet(own, a, UDP, _datagram(m)))  # type: ignore[misc]
        table.add(f"inside: echo to {what}", version, lambda _, m, a=to: _packet(own, a, *_echo(version, m)))  # type: ignore[misc]


def _echo(version: int, m: bytes, kind: int | None = None) -> tuple[int, bytes]:
    if version == 4:
        return ICMP, echo(8 if kind is None else kind, 7, m)
    return ICMPV6, echo(128 if kind is None else kind, 7, m)
