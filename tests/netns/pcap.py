"""Reads what tcpdump wrote: Ethernet, IPv4 and IPv6, TCP and UDP, as flat packets.

Only what a judge needs, and nothing of the code judged. What it cannot read it counts: a judge that passes over packets in
silence would call them lost.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from agent.core.types import Address

TCP = 6
UDP = 17
SYN, RST, ACK = 0x02, 0x04, 0x10

# First four bytes of a file (tcpdump writes its machine's order): fraction of a second in micro- or nanoseconds.
_FRACTION_NS = {0xA1B2C3D4: 1000, 0xA1B23C4D: 1}
_LINKTYPE_ETHERNET = 1
_IPV6_OPTIONS = (0, 43, 60)  # hop-by-hop, routing, destination: the second byte counts units of 8 bytes after the first


class Packet(NamedTuple):
    """at_ns: CLOCK_REALTIME. Ports, flags, sequence and payload are 0 and empty where the protocol has none."""

    at_ns: int
    source: Address
    destination: Address
    protocol: int
    source_port: int = 0
    destination_port: int = 0
    flags: int = 0
    sequence: int = 0
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class Recording:
    """packets: in the order of the file. other: frames that are not IP. not_understood: fragments, and packets cut short."""

    packets: tuple[Packet, ...]
    other: int = 0
    not_understood: int = 0


def read(path: Path) -> Recording:
    """Read a capture file; ValueError when it is none, or not of Ethernet."""
    packets: list[Packet] = []
    other = not_understood = 0
    for at_ns, frame in frames(path):
        ether_type = int.from_bytes(frame[12:14], "big")
        if ether_type not in (0x0800, 0x86DD):
            other += 1
            continue
        try:
            packets.append(_packet(at_ns, frame[14:], is_v6=ether_type == 0x86DD))
        except (_NotUnderstood, struct.error, IndexError):
            not_understood += 1
    return Recording(tuple(packets), other, not_understood)


class _NotUnderstood(Exception):
    pass


def frames(path: Path) -> Iterator[tuple[int, bytes]]:
    """When and what, of every frame; ValueError when this is no capture of Ethernet."""
    data = path.read_bytes()
    order = next((o for o in "<>" if len(data) >= 24 and struct.unpack_from(f"{o}I", data)[0] in _FRACTION_NS), None)
    if order is None:
        raise ValueError("not a capture file")
    magic, linktype = struct.unpack_from(f"{order}I16xI", data)
    if linktype != _LINKTYPE_ETHERNET:
        raise ValueError(f"link type {linktype} is not Ethernet")
    at = 24
    while at + 16 <= len(data):
        seconds, fraction, length = struct.unpack_from(f"{order}III", data, at)
        at += 16
        yield seconds * 10**9 + fraction * _FRACTION_NS[magic], data[at : at + length]
        at += length


def _packet(at_ns: int, packet: bytes, *, is_v6: bool) -> Packet:
    if is_v6:
        length, protocol = struct.unpack_from("!HB", packet, 4)
        source, destination, rest = packet[8:24], packet[24:40], packet[40 : 40 + length]
        while protocol in _IPV6_OPTIONS:
            protocol, rest = rest[0], rest[8 + 8 * rest[1] :]
        is_fragment = protocol == 44
    else:
        length, fragment, protocol = struct.unpack_from("!2xH2xHxB", packet)
        source, destination, rest = packet[12:16], packet[16:20], packet[(packet[0] & 15) * 4 : length]
        is_fragment = fragment & 0x3FFF != 0
    if is_fragment or len(packet) < (40 if is_v6 else 0) + length:
        raise _NotUnderstood
    if protocol == UDP:
        source_port, destination_port = struct.unpack_from("!HH", rest)
        return Packet(at_ns, source, destination, UDP, source_port, destination_port, payload=rest[8:])
    if protocol == TCP:
        source_port, destination_port, sequence, offset, flags = struct.unpack_from("!HHI4xBB", rest)
        payload = rest[(offset >> 4) * 4 :]
        return Packet(at_ns, source, destination, TCP, source_port, destination_port, flags, sequence, payload)
    return Packet(at_ns, source, destination, protocol)
