"""What a container's own root can put on its wire, as a table; and the judge of what came out beyond the host.

Every attack has a number. Its mark stands in its frames, and what it is after is an address of its own (`fresh_address` of the
number), so that a capture says which of them got out. Its kind is what stands before the colon of its name.

Rule 1: an attack is frames and nothing else; what is done with commands and sockets is in test_own_root.py.
Rule 2: checksums of IPv4 headers are right unless the attack is that they are not: a router would drop them all the same.
Rule 3: the judge looks at every frame that left the host, not for what it knows of.
"""

from __future__ import annotations

import itertools
import random
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from agent.core.types import packed
from tests.netns import pcap
from tests.netns.lab import HOST_UPLINK, INTERNET_UPLINK, NAME_SERVERS, fresh_address
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
    neighbour,
    tcp,
    udp,
)

PORT: Final = 443
ALLOWED: Final = ("198.51.100.7", "2001:db8:53::7")
VLAN: Final = 5  # of the frames of tests.packets

_HOP_BY_HOP, _ROUTING, _FRAGMENT, _ESP, _AUTHENTICATION, _NO_NEXT, _OPTIONS = 0, 43, 44, 50, 51, 59, 60
_IPIP, _IPV6, _DCCP, _UDP_LITE, _IGMP = 4, 41, 33, 136, 2
_MARK: Final = re.compile(rb"<attack (\d{4})>")
_MACS: Final = ethernet(0, b"")[:12]
_EVERYBODY: Final = b"\xff" * 6


@dataclass(frozen=True, slots=True)
class Place:
    """Who attacks: (IPv4, IPv6) of itself, its router, another endpoint; Ethernet addresses of its router and itself."""

    own: tuple[str, str]
    router: tuple[str, str]
    other: tuple[str, str]
    macs: bytes


class Frame(NamedTuple):
    """header: what a virtual machine's driver would say of it (struct virtio_net_hdr)."""

    octets: bytes
    header: bytes


@dataclass(frozen=True, slots=True)
class Attack:
    """harmless: so many of its frames may pass the host's end of the link: to what is allowed, to the proxy, of a neighbour."""

    number: int
    name: str
    frames: tuple[Frame, ...]
    harmless: int

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]


def mark_of(number: int) -> bytes:
    return b"<attack %04d>" % number


def marks(path: Path) -> set[int]:
    """The numbers of all attacks of which a frame is in this capture."""
    return {int(found) for _, octets in pcap.frames(path) for found in _MARK.findall(octets)}


# --- the table -------------------------------------------------------------------------------------------------------


def attacks(place: Place) -> list[Attack]:
    table = _Table(place)
    for version in (4, 6):
        _transports(table, version)
        _sources(table, version)
        _fragments(table, version)
        _tunnels(table, version)
        _icmp(table, version)
        _links(table, version)
        _later(table, version)
        _many(table, version)
    _ipv4_headers(table)
    _ipv6_headers(table)
    _arp(table)
    _neighbours(table)
    return table.attacks


class _Table:
    def __init__(self, place: Place) -> None:
        self.place = place
        self.attacks: list[Attack] = []

    def aim(self, version: int) -> tuple[str, bytes]:
        """What the next attack is after, and its mark."""
        return fresh_address(len(self.attacks), version), mark_of(len(self.attacks))

    def put(self, name: str, *frames: bytes, harmless: int = 0, header: bytes = bytes(10)) -> None:
        """Frames with the Ethernet addresses of tests.packets go from the attacker to its router."""
        routed = [self.place.macs + each[12:] if each[:12] == _MACS else each for each in frames]
        number = len(self.attacks)
        self.attacks.append(Attack(number, f"{name} ({number})", tuple(Frame(each, header) for each in routed), harmless))


def packet(source: str, to: str, protocol: int, payload: bytes, *vlans: int) -> bytes:
    """In Ethernet, with the checksum that a router looks at."""
    if ":" in to:
        return ethernet(0x86DD, ipv6_header(source, to, protocol, len(payload)) + payload, *vlans)
    return ethernet(0x0800, _summed(ipv4_header(source, to, protocol, len(payload))) + payload, *vlans)


def _summed(header: bytes) -> bytes:
    """The IPv4 header with its checksum (RFC 1071), options and all."""
    blank = header[:10] + bytes(2) + header[12:]
    total = sum(struct.unpack(f">{len(blank) // 2}H", blank))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return blank[:10] + struct.pack(">H", total ^ 0xFFFF) + blank[12:]


def _echo(version: int, mark: bytes, kind: int | None = None) -> tuple[int, bytes]:
    if version == 4:
        return ICMP, echo(8 if kind is None else kind, 7, mark)
    return ICMPV6, echo(128 if kind is None else kind, 7, mark)


def _transports(table: _Table, version: int) -> None:
    """To addresses and ports that nobody allowed, by every transport."""
    is_v6 = version == 6
    own, allowed = table.place.own[is_v6], ALLOWED[is_v6]
    for what, flags in (
        ("opening", SYN),
        ("opening and ending", SYN | FIN),
        ("answering nobody", SYN | ACK),
        ("in the middle", ACK | PUSH),
        ("reset", RST),
        ("no flags", 0),
        ("all flags", 0xFF),
    ):
        to, mark = table.aim(version)
        table.put(f"TCP: {what}", packet(own, to, TCP, tcp(4000, PORT, flags, mark)))
    for port in (0, 7, 123, 853, 4789, 5353, PORT, 51820):
        to, mark = table.aim(version)
        table.put(f"UDP: port {port}", packet(own, to, UDP, udp(4000, port, mark)))
    for protocol, payload in ((TCP, tcp(4000, 53, SYN)), (UDP, udp(4000, 53, b"\0\1\1\0\0\1\0\0\0\0\0\0"))):
        to, mark = table.aim(version)
        table.put("DNS: another server", packet(own, to, protocol, payload + mark), harmless=1)
    for protocol, payload in ((TCP, tcp(4000, 853)), (UDP, udp(4000, 853))):
        to, mark = table.aim(version)
        table.put("DNS: over TLS or QUIC", packet(own, to, protocol, payload + mark))
    others = {_DCCP: tcp(4000, PORT), _UDP_LITE: udp(4000, PORT), _IGMP: b"\x16" + bytes(7), _ESP: bytes(16), 89: bytes(24)}
    for protocol, payload in {
        **others,
        253: b"",
        255: b"",
        SCTP: udp(4000, 36412, bytes(4) + b"\1\0\0\x14" + bytes(16)),
    }.items():
        for is_to_allowed in (False, True):
            to, mark = table.aim(version)
            table.put(f"protocol: {protocol}", packet(own, allowed if is_to_allowed else to, protocol, payload + mark))
    for port in (22, 53443, 444, 442, 853):
        for protocol in (TCP, UDP):
            _, mark = table.aim(version)
            payload = tcp(4000, port, SYN, mark) if protocol == TCP else udp(4000, port, mark)
            table.put(f"port: {port} of an allowed address", packet(own, allowed, protocol, payload))
    for what, inner in (
        ("another endpoint", table.place.other),
        ("the router", table.place.router),
        ("the uplink", HOST_UPLINK),
    ):
        for protocol, payload in ((TCP, tcp(4000, PORT)), (UDP, udp(4000, PORT)), (UDP, udp(53, 33333)), _echo(version, b"")):
            _, mark = table.aim(version)
            table.put(f"inside: {what}", packet(own, inner[is_v6], protocol, payload + mark))


def _sources(table: _Table, version: int) -> None:
    """In another's name, to where the attacker itself might; also as if it were the upstream, toward whoever asked that."""
    is_v6 = version == 6
    others = {
        "its router": table.place.router[is_v6],
        "the uplink": HOST_UPLINK[is_v6],
        "the next router": INTERNET_UPLINK[is_v6],
        "another endpoint": table.place.other[is_v6],
        "a stranger": fresh_address(5_000, version),
        "nobody": "::" if is_v6 else "0.0.0.0",
        "loopback": "::1" if is_v6 else "127.0.0.1",
        "many": "ff02::1" if is_v6 else "224.0.0.1",
        "everybody": "::ffff:192.0.2.6" if is_v6 else "255.255.255.255",
    }
    if is_v6:
        others["the link"] = "fe80::1"
    for what, source in others.items():
        _, mark = table.aim(version)
        table.put(f"source: {what}", packet(source, ALLOWED[is_v6], UDP, udp(4000, PORT, mark)))
    for to in (HOST_UPLINK[is_v6], table.place.own[is_v6], table.place.other[is_v6]):
        _, mark = table.aim(version)
        table.put(
            "source: the upstream", packet(NAME_SERVERS[is_v6], to, UDP, udp(53, 40_000, b"\0\1\x81\x80" + bytes(8) + mark))
        )


def _fragments(table: _Table, version: int) -> None:
    """Parts that only together say where they go, or say two things."""
    is_v6 = version == 6
    own, allowed = table.place.own[is_v6], ALLOWED[is_v6]

    def part(to: str, protocol: int, payload: bytes, place: int, *, more: bool, source: str = own) -> bytes:
        number = 7_000 + len(table.attacks)
        if is_v6:
            header = struct.pack(">BBHI", protocol, 0, place << 3 | more, number)
            return packet(source, to, _FRAGMENT, header + payload)
        return ethernet(0x0800, _summed(ipv4_header(source, to, protocol, len(payload), place | more << 13, number)) + payload)

    for what, protocol, first in (("UDP", UDP, udp(4000, PORT)), ("TCP", TCP, tcp(4000, PORT))):
        to, mark = table.aim(version)
        padded = first + bytes(-len(first) % 8)
        first_part, later = part(to, protocol, padded, 0, more=True), part(to, protocol, mark, len(padded) // 8, more=False)
        table.put(f"fragments: {what}", first_part, later)
        to, mark = table.aim(version)
        table.put(f"fragments: {what}, the later one first", part(to, protocol, mark, 1, more=False), first_part)
        to, mark = table.aim(version)
        table.put(
            f"fragments: {what}, a tiny first one",
            part(to, protocol, first[:8], 0, more=True),
            part(to, protocol, mark, 1, more=False),
        )
        _, mark = table.aim(version)
        table.put(f"fragments: {what} to an allowed address, alone", part(allowed, protocol, mark, 9, more=False))
    whole = udp(4000, PORT, bytes(16))
    to, mark = table.aim(version)
    table.put(
        "fragments: another end after an allowed first one",
        part(allowed, UDP, whole, 0, more=True),
        part(to, UDP, mark, 3, more=False),
        harmless=1,
    )
    _, mark = table.aim(version)
    table.put(
        "fragments: another protocol after an allowed first one",
        part(allowed, UDP, whole, 0, more=True),
        part(allowed, GRE, mark, 3, more=False),
        harmless=1,
    )
    _, mark = table.aim(version)
    table.put(
        "fragments: over the ports of an allowed first one",
        part(allowed, UDP, whole, 0, more=True),
        part(allowed, UDP, bytes(8) + mark, 1, more=False),
        part(allowed, UDP, udp(4000, 22, bytes(16) + mark), 0, more=True),
        harmless=1,
    )
    _, mark = table.aim(version)
    other = table.place.other[is_v6]
    table.put(
        "fragments: in another's name after an allowed first one",
        part(allowed, UDP, whole, 0, more=True),
        part(allowed, UDP, mark, 3, more=False, source=other),
        harmless=1,
    )
    to, mark = table.aim(version)
    table.put("fragments: of one", part(to, UDP, udp(4000, PORT, mark), 0, more=False))
    to, mark = table.aim(version)
    table.put("fragments: beyond the end", part(to, UDP, bytes(16) + mark, 8_189, more=False))


def _tunnels(table: _Table, version: int) -> None:
    """A packet in a packet, to a stranger and to an address that is allowed one port."""
    own, allowed = table.place.own[version == 6], ALLOWED[version == 6]
    for inner_version in (4, 6):
        for is_to_allowed in (False, True):
            inner_own = table.place.own[inner_version == 6]
            kind = b"\x08\x00" if inner_version == 4 else b"\x86\xdd"
            for name, protocol, head in (
                ("IP", _IPIP if inner_version == 4 else _IPV6, b""),
                ("GRE", GRE, bytes(2) + kind),
                ("GRE with a key", GRE, b"\x20\0" + kind + bytes(4)),
                ("AH", _AUTHENTICATION, bytes([_IPIP if inner_version == 4 else _IPV6, 4]) + bytes(22)),
                ("VXLAN", UDP, udp(4000, 4789, b"\x08\0\0\0" + bytes(4))),
                ("GENEVE", UDP, udp(4000, 6081, bytes(2) + b"\x65\x58" + bytes(4))),
                ("WireGuard", UDP, udp(4000, 51820, b"\4\0\0\0" + bytes(12))),
            ):
                to, mark = table.aim(version)
                inner = packet(inner_own, fresh_address(6_000, inner_version), UDP, udp(4000, PORT, mark))
                body = head + (inner if protocol == UDP else inner[14:])
                if protocol == UDP:
                    body = body[:4] + struct.pack(">H", len(body)) + body[6:]
                table.put(
                    f"tunnel: IPv{inner_version} in {name}", packet(own, allowed if is_to_allowed else to, protocol, body)
                )


def _icmp(table: _Table, version: int) -> None:
    """What ICMP can carry: echoes, errors about flows of others or of nobody, redirects, and types without a use."""
    is_v6 = version == 6
    own, allowed = table.place.own[is_v6], ALLOWED[is_v6]
    protocol = ICMPV6 if is_v6 else ICMP
    for kind in (128, 129, 139, 140, 127, 200, 255) if is_v6 else (8, 0, 13, 14, 15, 17, 30, 255):
        for is_to_allowed in (False, True):
            to, mark = table.aim(version)
            table.put(f"ICMP: type {kind}", packet(own, allowed if is_to_allowed else to, *_echo(version, mark, kind)))
    for kind in (1, 2, 3, 4) if is_v6 else (3, 11, 12, 5, 4):
        for about_source, about_to in ((allowed, own), (None, own), (own, allowed)):
            to, mark = table.aim(version)
            about = packet(about_source or to, about_to, UDP, udp(PORT, 39_999, mark))[14:]
            table.put(f"ICMP: error {kind}", packet(own, to, protocol, error(kind, 0, about)))
        _, mark = table.aim(version)
        about = packet(allowed, own, UDP, udp(PORT, 39_999, mark))[14:]
        table.put(f"ICMP: error {kind} about no flow", packet(own, allowed, protocol, error(kind, 0, about)))


def _links(table: _Table, version: int) -> None:
    """Other ways to be Ethernet: addresses, VLANs, length fields, foreign types."""
    own = table.place.own[version == 6]
    ethertype = b"\x86\xdd" if version == 6 else b"\x08\x00"
    router, attacker = table.place.macs[:6], table.place.macs[6:]
    stranger = b"\x02\0\0\0\0\x99"
    for what, macs in (
        ("from a stranger", router + stranger),
        ("from its router", router + router),
        ("from many", router + b"\x01\0\x5e\0\0\1"),
        ("from nobody", router + bytes(6)),
        ("to everybody", _EVERYBODY + attacker),
        ("to itself", attacker + attacker),
        ("to a bridge", b"\x01\x80\xc2\0\0\0" + attacker),
    ):
        to, mark = table.aim(version)
        table.put(f"address: {what}", macs + packet(own, to, UDP, udp(4000, PORT, mark))[12:])
    for vlans in ((0x8100,), (0x88A8,), (0x8100, 0x8100), (0x88A8, 0x8100), (0x8100, 0x8100, 0x8100)):
        for port in (PORT, 53):
            to, mark = table.aim(version)
            table.put(f"VLAN: {len(vlans)} deep", packet(own, to, UDP, udp(4000, port, mark), *vlans))
    size = len(packet(own, own, UDP, udp(4000, PORT, mark_of(0)))) - 14
    for name, head in (
        ("length field", struct.pack(">H", size)),
        ("LLC", struct.pack(">H", size + 3) + b"\x06\x06\x03"),
        ("SNAP", struct.pack(">H", size + 8) + b"\xaa\xaa\x03\0\0\0" + ethertype),
        ("MPLS", b"\x88\x47\0\x01\x01\x40"),
        ("PPPoE", b"\x88\x64\x11\0\0\1" + struct.pack(">H", size + 2) + (b"\0\x57" if version == 6 else b"\0\x21")),
        ("LLDP", b"\x88\xcc"),
        ("EAPOL", b"\x88\x8e"),
        ("MACsec", b"\x88\xe5\x20\0\0\0\0\1"),
        ("RARP", b"\x80\x35"),
        ("loopback", b"\x90\0"),
        ("experiment", b"\x88\xb5"),
        ("TRILL", b"\x22\xf3"),
        ("another version", b"\x08\x00" if version == 6 else b"\x86\xdd"),
        ("nothing known", b"\x12\x34"),
    ):
        to, mark = table.aim(version)
        whole = packet(own, to, UDP, udp(4000, PORT, mark))[14:]
        table.put(f"type: {name}", _MACS + head + whole)


def _later(table: _Table, version: int) -> None:
    """What the sender leaves to the last device on the way: to write a checksum, over what was judged; and to cut it up."""
    is_v6 = version == 6
    own, allowed = table.place.own[is_v6], ALLOWED[is_v6]
    ip_size = 40 if is_v6 else 20
    transport = 14 + ip_size

    def written(place: int, start: int = 20) -> bytes:
        return struct.pack("<BBHHHH", 1, 0, 0, 0, start, place - start)

    for what, place in (
        ("port", transport + 2),
        ("last octets of the address", transport - 2),
        ("first", transport - ip_size + 24),
    ):
        for protocol in (UDP, TCP):
            _, mark = table.aim(version)
            payload = udp(4000, PORT, mark) if protocol == UDP else tcp(4000, PORT, SYN, mark)
            frame = packet(own, allowed, protocol, payload)
            table.put(f"checksum: over the {what}", frame, header=written(place))
    if is_v6:
        _, mark = table.aim(version)
        advertisement = neighbour(own, "fe80::1", 136, own)
        body = advertisement[54:] + mark
        frame = ethernet(0x86DD, ipv6_header(own, "fe80::1", ICMPV6, len(body), 255) + body)
        table.put("checksum: over a neighbour's address", frame, header=written(transport - 16))
    for protocol in (UDP, TCP):
        to, mark = table.aim(version)
        payload = udp(4000, PORT, mark * 80) if protocol == UDP else tcp(4000, PORT, ACK, mark * 80)
        end = 6 if protocol == UDP else 16
        kind = 5 if protocol == UDP else 4 if is_v6 else 1
        size = transport + (8 if protocol == UDP else 20)
        header = struct.pack("<BBHHHH", 1, kind, size, 400, transport, end)
        table.put("segments: of one packet", packet(own, to, protocol, payload), header=header)


def _many(table: _Table, version: int) -> None:
    """To everybody on the link, by what finds servers there, and what pretends to be one."""
    is_v6 = version == 6
    own = table.place.own[is_v6]
    groups = (
        ("ff02::fb", "ff02::1:3", "ff05::c", "ff0e::101")
        if is_v6
        else ("224.0.0.251", "224.0.0.252", "239.255.255.250", "255.255.255.255", "192.0.2.7")
    )
    for group, port in itertools.product(groups, (5353, 1900, 53)):
        _, mark = table.aim(version)
        table.put(f"many: {group}", packet(own, group, UDP, udp(4000, port, mark)), harmless=port == 53)
    if is_v6:
        for source, ports in (("fe80::1", (546, 547)), ("fe80::1", (547, 546)), (own, (547, 546))):
            _, mark = table.aim(version)
            table.put("many: DHCP", packet(source, "ff02::1:2", UDP, udp(*ports, mark)))
        return
    for source, ports in (("0.0.0.0", (68, 67)), (own, (68, 67)), (own, (67, 68)), (table.place.router[0], (67, 68))):
        _, mark = table.aim(version)
        table.put("many: DHCP", packet(source, "255.255.255.255", UDP, udp(*ports, bytes(240) + mark)))


def _ipv4_headers(table: _Table) -> None:
    own, allowed = table.place.own[0], ALLOWED[0]

    def made(to: str, mark: bytes, options: bytes = b"", changed: Mapping[str, int] = {}) -> bytes:
        """changed: `length`, `flags`, `hops`, `first` (version and header length), `sum`; over the right ones."""
        options += bytes(-len(options) % 4)
        payload = udp(4000, PORT, mark)
        header = bytearray(ipv4_header(own, to, UDP, len(options) + len(payload)) + options)
        header[0] = changed.get("first", 0x45 + len(options) // 4)
        header[2:4] = struct.pack(">H", changed.get("length", len(header) + len(payload)))
        header[6:8] = struct.pack(">H", changed.get("flags", 0))
        header[8] = changed.get("hops", 64)
        summed = bytearray(_summed(bytes(header)))
        if "sum" in changed:
            summed[10:12] = struct.pack(">H", changed["sum"])
        return ethernet(0x0800, bytes(summed) + payload)

    via = packed(table.aim(4)[0])
    for name, options in (
        ("nothing", b"\1\1\1\1"),
        ("record route", b"\x07\x0b\x04" + bytes(8)),
        ("timestamps", b"\x44\x0c\x05\x00" + bytes(8)),
        ("router alert", b"\x94\x04\0\0"),
        ("security", b"\x82\x0b" + bytes(9)),
        ("unknown", b"\x1e\x06" + bytes(4)),
        ("forty times nothing", b"\1" * 40),
        ("an option that ends too late", b"\x1e\x28\0\0"),
        ("an option without end", b"\x1e\x00\0\0"),
        ("hidden behind the end", b"\0\x83\x07\x04" + via),
    ):
        to, mark = table.aim(4)
        table.put(f"options: {name}", made(to, mark, options))
    for name, option in (("loose", b"\x83"), ("strict", b"\x89")):
        for to in (allowed, table.place.router[0]):
            target, mark = table.aim(4)
            table.put(f"source route: {name}", made(to, mark, option + b"\x07\x04" + packed(target)))
            target, mark = table.aim(4)
            table.put(
                f"source route: {name}, behind others",
                made(to, mark, b"\1\1\1" + option + b"\x0b\x04" + packed(target) + packed(to)),
            )
    for name, changed in (
        ("reserved flag", {"flags": 0x8000}),
        ("must not be cut", {"flags": 0x4000}),
        ("no hop left", {"hops": 0}),
        ("one hop left", {"hops": 1}),
        ("wrong sum", {"sum": 0x1234}),
        ("no length", {"length": 0}),
        ("too short", {"length": 19}),
        ("too long", {"length": 1_400}),
        ("short of its ports", {"length": 22}),
        ("header of four words", {"first": 0x44}),
        ("header longer than the packet", {"first": 0x4F}),
        ("version 5", {"first": 0x55}),
        ("version 6", {"first": 0x65}),
    ):
        to, mark = table.aim(4)
        table.put(f"broken: {name}", made(to, mark, changed=changed))
    for size in (1, 7, 19):
        to, mark = table.aim(4)
        table.put("broken: cut", made(to, mark)[: 14 + size] + mark)


def _ipv6_headers(table: _Table) -> None:
    own, allowed = table.place.own[1], ALLOWED[1]

    def chained(
        to: str, kinds: Sequence[int], mark: bytes, *, routing: bytes = bytes(6), protocol: int = UDP, last: bytes = b""
    ) -> bytes:
        body = last or udp(4000, PORT, mark)
        following = [*kinds[1:], protocol]
        headers = b""
        for kind, after in zip(kinds, following, strict=True):
            if kind == _ROUTING:
                headers += bytes([after, (len(routing) + 2) // 8 - 1]) + routing
            else:
                headers += bytes([after, 0]) + (b"\1\4\0\0\0\0" if kind in (_HOP_BY_HOP, _OPTIONS) else bytes(6))
        return packet(own, to, kinds[0] if kinds else protocol, headers + body)

    kinds = (_HOP_BY_HOP, _OPTIONS, _ROUTING, _FRAGMENT, _AUTHENTICATION)
    for length in (1, 2, 3):
        for order in itertools.permutations(kinds, length):
            to, mark = table.aim(6)
            table.put("extensions: in any order", chained(to, order, mark))
    for count in (8, 9, 20):
        to, mark = table.aim(6)
        table.put("extensions: many", chained(to, [_OPTIONS] * count, mark))
    for what, protocol in (
        ("nothing", _NO_NEXT),
        ("ESP", _ESP),
        ("the unknown", 253),
        ("mobility", 135),
        ("HIP", 139),
        ("shim6", 140),
    ):
        for is_to_allowed in (False, True):
            to, mark = table.aim(6)
            frame = chained(allowed if is_to_allowed else to, [_OPTIONS], mark, protocol=protocol)
            table.put(f"extensions: {what} behind them", frame)
    for kind in (0, 1, 2, 3, 4, 5, 255):
        for to in (allowed, table.place.router[1]):
            target, mark = table.aim(6)
            route = bytes([kind, 1]) + bytes(4) + packed(target)
            table.put("source route: IPv6", chained(to, [_ROUTING], mark, routing=route))
            target, mark = table.aim(6)
            table.put("source route: IPv6, behind others", chained(to, [_HOP_BY_HOP, _OPTIONS, _ROUTING], mark, routing=route))
    fragment = struct.pack(">BBHI", _OPTIONS, 0, 1, 77)
    to, mark = table.aim(6)
    hidden = packet(own, to, _FRAGMENT, fragment + bytes([UDP, 0, 1, 4, 0, 0, 0, 0]) + udp(4000, PORT, mark))
    table.put("extensions: behind a first fragment's header", hidden)
    _, mark = table.aim(6)
    hidden = packet(own, allowed, _FRAGMENT, fragment + bytes([UDP, 0, 1, 4, 0, 0, 0, 0]) + udp(4000, PORT, mark))
    table.put("extensions: behind a first fragment's header, to an allowed address", hidden)
    for name, option in (
        ("jumbo", b"\xc2\x04\0\1\0\0"),
        ("home address", b"\xc9\x10" + packed(own)),
        ("router alert", b"\5\2\0\0\1\0"),
    ):
        to, mark = table.aim(6)
        padded = option + bytes(-(len(option) + 2) % 8)
        kind = _OPTIONS if name == "home address" else _HOP_BY_HOP
        body = bytes([UDP, (len(padded) + 2) // 8 - 1]) + padded + udp(4000, PORT, mark)
        table.put(f"extensions: {name}", packet(own, to, kind, body))
    for name, length in (("no length", 0), ("too short", 3), ("too long", 900)):
        to, mark = table.aim(6)
        frame = packet(own, to, UDP, udp(4000, PORT, mark))
        table.put(f"broken: {name}", frame[:18] + struct.pack(">H", length) + frame[20:])
    for hops in (0, 1):
        to, mark = table.aim(6)
        frame = packet(own, to, UDP, udp(4000, PORT, mark))
        table.put("broken: hops", frame[:21] + bytes([hops]) + frame[22:])


def _arp(table: _Table) -> None:
    """Claims of addresses; what is padded behind them goes no further than the link."""
    place = table.place
    own, router, attacker = packed(place.own[0]), packed(place.router[0]), place.macs[6:]

    def claim(operation: int, sender: bytes, target: bytes, mark: bytes, mac: bytes = attacker) -> bytes:
        body = b"\0\1\x08\0\6\4" + struct.pack(">H", operation) + mac + sender + bytes(6) + target
        return _EVERYBODY + attacker + b"\x08\x06" + body + mark

    for what, address in (
        ("its router", router),
        ("another endpoint", packed(place.other[0])),
        ("the uplink", packed(HOST_UPLINK[0])),
        ("the upstream", packed(NAME_SERVERS[0])),
        ("the next router", packed(INTERNET_UPLINK[0])),
        ("a stranger", packed(fresh_address(5_000))),
    ):
        for operation, target in ((1, router), (2, router), (1, address), (2, address)):
            _, mark = table.aim(4)
            table.put(f"ARP: {what}", claim(operation, address, target, mark))
    _, mark = table.aim(4)
    table.put("ARP: its own", claim(1, own, router, mark), harmless=1)


def _neighbours(table: _Table) -> None:
    """The same by neighbour discovery; and the part of a router."""
    place = table.place
    own, router, attacker = place.own[1], place.router[1], place.macs[6:]

    def sent(source: str, to: str, kind: int, flags: int, target: str, mark: bytes) -> bytes:
        body = struct.pack(">BBHI", kind, 0, 0, flags) + packed(target) + bytes([1 if kind == 135 else 2, 1]) + attacker + mark
        return ethernet(0x86DD, ipv6_header(source, to, ICMPV6, len(body), 255) + body)

    override = 0xA0000000  # from a router, override
    for what, address in (
        ("its router", router),
        ("another endpoint", place.other[1]),
        ("the uplink", HOST_UPLINK[1]),
        ("the upstream", NAME_SERVERS[1]),
        ("a stranger", fresh_address(5_000, 6)),
    ):
        for source, to in ((address, "ff02::1"), (own, "ff02::1"), (own, router)):
            _, mark = table.aim(6)
            table.put(f"ND: {what}", sent(source, to, 136, override, address, mark))
        _, mark = table.aim(6)
        table.put(f"ND: {what} asks", sent(address, router, 135, 0, router, mark))
    for source, to in (("fe80::1", "ff02::1"), (own, "ff02::1"), ("fe80::1", router)):
        _, mark = table.aim(6)
        prefix = b"\3\4\x40\xc0\0\0\x0e\x10\0\0\x0e\x10" + bytes(4) + packed("2001:db8:bad::")
        body = b"\x86\0\0\0\x40\0\x07\x08" + bytes(8) + prefix + mark
        table.put("ND: advertises a router", ethernet(0x86DD, ipv6_header(source, to, ICMPV6, len(body), 255) + body))
        _, mark = table.aim(6)
        body = b"\x89\0\0\0" + bytes(4) + packed(own) + packed(ALLOWED[1]) + mark
        table.put("ND: redirects", ethernet(0x86DD, ipv6_header(source, to, ICMPV6, len(body), 255) + body))
    for kind in (130, 131, 132, 133, 135, 136, 143):
        for to in (fresh_address(len(table.attacks), 6), OFF_LINK, "ff05::2", "ff0e::101"):
            _, mark = table.aim(6)
            frame = sent(own, to, kind, 0, own, mark)
            table.put("neighbour: off the link", frame)


OFF_LINK: Final = "2001:db8:1:1::99"
"""In the network of the first client, and beyond the host: a test that uses it makes the route."""


# --- the judge -------------------------------------------------------------------------------------------------------


def escaped(path: Path, uplink: bytes, owners: Sequence[tuple[str, str]]) -> list[str]:
    """Every frame in a capture in front of the host that came from the uplink (its MAC) and should not have: from none of its
    owners' addresses to what they may reach, nor the host's own questions and neighbour discovery. As hexadecimal octets."""
    found = []
    for _, octets in pcap.frames(path):
        if octets[6:12] == uplink and not _may_leave(octets, owners):
            found.append(octets.hex())
    return found


def _may_leave(octets: bytes, owners: Sequence[tuple[str, str]]) -> bool:
    ethertype, body = octets[12:14], octets[14:]
    if ethertype == b"\x08\x06":
        return not _MARK.search(octets)
    if ethertype not in (b"\x08\x00", b"\x86\xdd"):
        return False
    is_v6 = ethertype == b"\x86\xdd"
    source, to = (body[8:24], body[24:40]) if is_v6 else (body[12:16], body[16:20])
    if source == packed(HOST_UPLINK[is_v6]) or source[:2] == b"\xfe\x80":
        return not _MARK.search(octets) and (to == packed(NAME_SERVERS[is_v6]) or _is_of_the_link(body, to, is_v6=is_v6))
    if to != packed(ALLOWED[is_v6]) or source not in {packed(owner[is_v6]) for owner in owners}:
        return False
    return _is_to_allowed_port(body, is_v6=is_v6)


def _is_of_the_link(body: bytes, to: bytes, *, is_v6: bool) -> bool:
    """Neighbour discovery of the host itself, and what it says of its groups."""
    if not is_v6:
        return False
    return to[:2] == b"\xff\x02" or to == packed(INTERNET_UPLINK[1]) or to[:2] == b"\xfe\x80"


def _is_to_allowed_port(body: bytes, *, is_v6: bool) -> bool:
    """Read as the receiver would read it. A later fragment is nothing without its first."""
    if is_v6:
        protocol, at = body[6], 40
        while protocol in (_HOP_BY_HOP, _ROUTING, _OPTIONS, _AUTHENTICATION, _FRAGMENT):
            if protocol == _ROUTING and body[at + 3]:
                return False
            if protocol == _FRAGMENT and int.from_bytes(body[at + 2 : at + 4], "big") >> 3:
                return True
            size = (
                8
                if protocol == _FRAGMENT
                else (body[at + 1] + 2) * 4
                if protocol == _AUTHENTICATION
                else (body[at + 1] + 1) * 8
            )
            protocol, at = body[at], at + size
    else:
        protocol, at = body[9], (body[0] & 15) * 4
        if int.from_bytes(body[6:8], "big") & 0x1FFF:
            return True
    if protocol == (ICMPV6 if is_v6 else ICMP):
        return _is_about_allowed_port(body[at:], is_v6=is_v6)
    return protocol in (TCP, UDP, SCTP) and int.from_bytes(body[at + 2 : at + 4], "big") == PORT


def _is_about_allowed_port(message: bytes, *, is_v6: bool) -> bool:
    """An error about what the allowed peer had sent."""
    about = message[8:]
    ports_at = 40 if is_v6 else (about[0] & 15) * 4 if about else 0
    source = about[8:24] if is_v6 else about[12:16]
    is_error = message[0] in ((1, 2, 3, 4) if is_v6 else (3, 11, 12))
    return is_error and source == packed(ALLOWED[is_v6]) and int.from_bytes(about[ports_at : ports_at + 2], "big") == PORT


# --- at random -------------------------------------------------------------------------------------------------------


def damaged(place: Place, seed: int) -> Iterator[Frame]:
    """Without end: frames near those of the table and near what is allowed, a few octets changed, moved, lost or put in."""
    chance = random.Random(seed)
    table = [frame for attack in attacks(place) for frame in attack.frames if not any(frame.header)]
    honest = [
        Frame(place.macs + packet(place.own[v], ALLOWED[v], *rest)[12:], bytes(10))
        for v in (0, 1)
        for rest in (
            (UDP, udp(4000, PORT)),
            (TCP, tcp(4000, PORT)),
            (TCP, tcp(4000, PORT, ACK)),
            (SCTP, udp(4000, PORT, bytes(24))),
        )
    ]
    while True:
        octets = bytearray(chance.choice(table if chance.random() < 0.6 else honest).octets)
        for _ in range(chance.choice((1, 1, 2, 4))):
            place_in = chance.randrange(12, len(octets))
            match chance.randrange(6):
                case 0 | 1:
                    octets[place_in] = chance.randrange(256)
                case 2:
                    octets[place_in] ^= 1 << chance.randrange(8)
                case 3:
                    del octets[max(place_in, 14) :]
                case 4:
                    octets[place_in:place_in] = chance.randbytes(chance.choice((1, 2, 4, 8)))
                case _:
                    other = chance.choice(table).octets
                    octets[place_in:] = other[chance.randrange(12, len(other)) :]
            if len(octets) < 15:
                octets += bytes(15 - len(octets))
        if octets[12:14] == b"\x08\x00" and len(octets) >= 34 and chance.random() < 0.8:
            size = 14 + max(20, (octets[14] & 15) * 4)
            octets[14:size] = _summed(
                bytes(octets[14:size]) if len(octets[14:size]) % 2 == 0 else bytes(octets[14:size]) + b"\0"
            )
        yield Frame(bytes(octets[:1_514]), bytes(10))
