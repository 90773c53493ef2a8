"""Frames for tests, as bytes. Checksums are left zero where nobody looks at them.

The client is 192.0.2.10 and 2001:db8:0:a::10; the peer 198.51.100.7 and 2001:db8:0:b::7.
"""

from __future__ import annotations

import socket
import struct

from agent.core.types import packed

CLIENT, PEER, OTHER, ROUTER = "192.0.2.10", "198.51.100.7", "203.0.113.1", "203.0.113.254"
CLIENT6, PEER6, OTHER6 = "2001:db8:0:a::10", "2001:db8:0:b::7", "2001:db8:0:c::1"

TCP, UDP, SCTP, ICMP, ICMPV6, GRE = 6, 17, 132, 1, 58, 47
FIN, SYN, RST, PUSH, ACK = 1, 2, 4, 8, 16

_MACS = bytes.fromhex("0200000000fe0200000000a1")


def ethernet(ethertype: int, payload: bytes, *vlans: int, to: bytes = _MACS[:6]) -> bytes:
    """vlans: ethertypes of VLAN tags in front of the payload."""
    header = b"".join(struct.pack(">HH", ethertype_before, 5) for ethertype_before in vlans)
    return to + _MACS[6:] + header + struct.pack(">H", ethertype) + payload


def ipv4_header(source: str, destination: str, protocol: int, length: int, flags: int = 0, number: int = 7) -> bytes:
    fields = (0x45, 0, 20 + length, number, flags, 64, protocol, 0, packed(source), packed(destination))
    return struct.pack(">BBHHHBBH4s4s", *fields)


def ipv6_header(source: str, destination: str, following: int, length: int, hops: int = 64) -> bytes:
    addresses = socket.inet_pton(socket.AF_INET6, source), socket.inet_pton(socket.AF_INET6, destination)
    return struct.pack(">IHBB16s16s", 6 << 28, length, following, hops, *addresses)


def ip(source: str, destination: str, protocol: int, payload: bytes) -> bytes:
    """An IP packet of the addresses' family."""
    if ":" in source:
        return ipv6_header(source, destination, protocol, len(payload)) + payload
    return ipv4_header(source, destination, protocol, len(payload)) + payload


def frame(source: str, destination: str, protocol: int, payload: bytes, *vlans: int) -> bytes:
    return ethernet(0x86DD if ":" in source else 0x0800, ip(source, destination, protocol, payload), *vlans)


def udp(source_port: int, destination_port: int, data: bytes = b"datagram") -> bytes:
    return struct.pack(">HHHH", source_port, destination_port, 8 + len(data), 0) + data


def tcp(source_port: int, destination_port: int, flags: int = SYN, data: bytes = b"") -> bytes:
    return struct.pack(">HHIIBBHHH", source_port, destination_port, 1, 1, 0x50, flags, 1000, 0, 0) + data


def echo(kind: int, number: int, data: bytes = b"echo") -> bytes:
    return struct.pack(">BBHHH", kind, 0, 0, number, 1) + data


def error(kind: int, code: int, about: bytes) -> bytes:
    """An ICMP error about an IP packet."""
    return struct.pack(">BBHI", kind, code, 0, 0) + about


def fragment4(source: str, destination: str, protocol: int, payload: bytes, place: int, more: bool, number: int) -> bytes:
    """place: in units of 8 bytes."""
    flags = place | (0x2000 if more else 0)
    return ethernet(0x0800, ipv4_header(source, destination, protocol, len(payload), flags, number) + payload)


def fragment6(source: str, destination: str, protocol: int, payload: bytes, place: int, more: bool, number: int) -> bytes:
    header = struct.pack(">BBHI", protocol, 0, place << 3 | more, number)
    return frame(source, destination, 44, header + payload)


def optioned(source: str, destination: str, protocol: int, payload: bytes, options: bytes) -> bytes:
    """An IPv4 packet with these options, filled up with ends of the list."""
    options += bytes(-len(options) % 4)
    header = ipv4_header(source, destination, protocol, len(options) + len(payload))
    return ethernet(0x0800, bytes([0x45 + len(options) // 4]) + header[1:] + options + payload)


def routed(source: str, destination: str, protocol: int, payload: bytes, kind: int, left: int) -> bytes:
    """An IPv6 packet with a routing header of this type and so many segments left."""
    header = struct.pack(">BBBB4x16s", protocol, 2, kind, left, socket.inet_pton(socket.AF_INET6, OTHER6))
    return frame(source, destination, 43, header + payload)


def extended(source: str, destination: str, kinds: list[int], protocol: int, payload: bytes) -> bytes:
    """An IPv6 packet with these extension headers, eight bytes each."""
    following = [*kinds[1:], protocol] if kinds else []
    headers = b"".join(struct.pack(">BB6x", after, 0) for after in following)
    return frame(source, destination, kinds[0] if kinds else protocol, headers + payload)


def arp(sender: str, target: str) -> bytes:
    mac = _MACS[6:]
    return ethernet(0x0806, b"\0\1\x08\0\6\4\0\1" + mac + packed(sender) + bytes(6) + packed(target))


def neighbour(source: str, destination: str, kind: int, target: str = "::", hops: int = 255) -> bytes:
    message = struct.pack(">BBHI16s", kind, 0, 0, 0, socket.inet_pton(socket.AF_INET6, target))
    return ethernet(0x86DD, ipv6_header(source, destination, ICMPV6, len(message), hops) + message)
