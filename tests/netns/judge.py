"""Judges the gate by two captures: one on the client's own interface, one where the host's packets leave for the internet.

The client's side says when a reply was on the wire and when the first packet to its address was sent; the uplink's side says
whether that packet, and not a later copy of it, came through. Nothing here asks the agent.

A *first packet* is the first TCP SYN or UDP datagram to an address, at the ports the test uses. It is *lost* when the uplink
does not show it within FORWARD_MS_MAX: what the client's kernel sends again after a second is another packet.

Functions here are pure; messages are read by dnspython, the judge of the agent's own walker as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import dns.exception
import dns.message
import dns.rdatatype

from agent.core.types import Address, packed
from tests.netns.pcap import ACK, SYN, TCP, UDP, Packet, Recording

# Forwarding takes microseconds, on a busy machine some milliseconds; a SYN is sent again after 1,000.
FORWARD_MS_MAX = 100

PORT_DNS = 53
_STREAM_BYTES_MAX = 2 + 65535


@dataclass(frozen=True, slots=True)
class Reply:
    """A DNS reply on the client's wire. at_ns: when its last byte was there."""

    at_ns: int
    name: str
    rcode: int
    addresses: tuple[Address, ...]
    is_tcp: bool


@dataclass(slots=True)
class FirstPacket:
    """What was seen of one address.

    sent_at_ns, forwarded_at_ns: the first packet at the client and at the uplink. sent, forwarded: packets counted on both
    sides, copies included. reply: the earliest one that held the address.
    """

    address: Address
    sent_at_ns: int
    sent: int = 1
    forwarded_at_ns: int | None = None
    forwarded: int = 0
    reply: Reply | None = None

    @property
    def is_lost(self) -> bool:
        return self.forwarded_at_ns is None or self.forwarded_at_ns - self.sent_at_ns > FORWARD_MS_MAX * 10**6

    @property
    def was_resolved(self) -> bool:
        """Had a reply with this address reached the client before it sent?"""
        return self.reply is not None and self.reply.at_ns <= self.sent_at_ns


@dataclass(frozen=True, slots=True)
class Judgement:
    """replies: in order of time. by_address: one for each address that was sent to.

    not_understood: packets and messages that could not be read, which may be replies or first packets we do not know of.
    """

    replies: tuple[Reply, ...]
    by_address: Mapping[Address, FirstPacket]
    not_understood: int

    @property
    def lost(self) -> list[FirstPacket]:
        """Lost although a reply had named the address."""
        return [first for first in self.by_address.values() if first.was_resolved and first.is_lost]

    @property
    def unresolved(self) -> list[FirstPacket]:
        """Sent to an address that no reply had named."""
        return [first for first in self.by_address.values() if not first.was_resolved]

    @property
    def retransmitted(self) -> int:
        """Packets the client sent after a first one: SYNs again, further datagrams."""
        return sum(first.sent - 1 for first in self.by_address.values())

    @property
    def duplicated(self) -> int:
        """Packets that came out more often than they went in."""
        return sum(max(0, first.forwarded - first.sent) for first in self.by_address.values())

    def early(self, acknowledged_at_ns: Mapping[Address, int]) -> list[Reply]:
        """Replies that were on the wire before the last row they need was acknowledged, or whose rows never were.

        acknowledged_at_ns: for each address, when the kernel had said yes to the last of its rows; same clock as the captures.
        """
        return [
            reply
            for reply in self.replies
            if any(acknowledged_at_ns.get(address, reply.at_ns + 1) > reply.at_ns for address in reply.addresses)
        ]

    def summary(self) -> dict[str, int]:
        return {
            "replies": len(self.replies),
            "replies_with_addresses": sum(bool(reply.addresses) for reply in self.replies),
            "first_packets": len(self.by_address),
            "lost": len(self.lost),
            "unresolved": len(self.unresolved),
            "retransmitted": self.retransmitted,
            "duplicated": self.duplicated,
            "not_understood": self.not_understood,
        }


def judge(client: Recording, uplink: Recording, ports: Collection[int] = (7,)) -> Judgement:
    """Judge one client's capture against the uplink's, which may hold other clients' packets too."""
    streams = _Streams()
    replies: list[Reply] = []
    by_address: dict[Address, FirstPacket] = {}
    sources: set[Address] = set()
    not_understood = client.not_understood + uplink.not_understood
    for packet in client.packets:
        if packet.source_port == PORT_DNS:
            for message in streams.messages(packet):
                reply = _reply(packet, message)
                if reply is None:
                    not_understood += 1
                else:
                    replies.append(reply)
        elif _opens(packet, ports):
            sources.add(packet.source)
            first = by_address.get(packet.destination)
            if first is None:
                by_address[packet.destination] = FirstPacket(packet.destination, packet.at_ns)
            else:
                first.sent += 1
    for packet in uplink.packets:
        if packet.source in sources and _opens(packet, ports) and (first := by_address.get(packet.destination)) is not None:
            first.forwarded += 1
            if first.forwarded_at_ns is None:
                first.forwarded_at_ns = packet.at_ns
    for reply in replies:
        for address in reply.addresses:
            if (first := by_address.get(address)) is not None and first.reply is None:
                first.reply = reply
    return Judgement(tuple(replies), by_address, not_understood + streams.not_understood)


def _opens(packet: Packet, ports: Collection[int]) -> bool:
    if packet.destination_port not in ports:
        return False
    return packet.protocol == UDP or (packet.protocol == TCP and packet.flags & (SYN | ACK) == SYN)


def _reply(packet: Packet, message: bytes) -> Reply | None:
    try:
        parsed = dns.message.from_wire(message)
    except (dns.exception.DNSException, ValueError):
        return None
    name = parsed.question[0].name.to_text().lower() if parsed.question else ""
    addresses = tuple(
        packed(record.address)
        for records in parsed.answer
        if records.rdtype in (dns.rdatatype.A, dns.rdatatype.AAAA)
        for record in records
    )
    return Reply(packet.at_ns, name, int(parsed.rcode()), addresses, packet.protocol == TCP)


@dataclass(slots=True)
class _Stream:
    next_sequence: int
    pending: bytes = b""


@dataclass(slots=True)
class _Streams:
    """Puts the messages of DNS over TCP together (RFC 1035, 4.2.2: two bytes of length before each).

    Segments in order and retransmitted ones are understood. After a gap (the capture lost a segment, or they changed places)
    the rest of that connection is not, and each of its segments is counted.
    """

    by_flow: dict[tuple[Address, Address, int], _Stream] = field(default_factory=dict)
    not_understood: int = 0

    def messages(self, packet: Packet) -> Iterable[bytes]:
        if packet.protocol == UDP:
            return [packet.payload]
        if packet.protocol != TCP:
            return []
        flow = (packet.source, packet.destination, packet.destination_port)
        if packet.flags & SYN:
            self.by_flow[flow] = _Stream((packet.sequence + 1) % 2**32)
            return []
        if not packet.payload:
            return []
        stream = self.by_flow.get(flow)
        behind = 0 if stream is None else (stream.next_sequence - packet.sequence) % 2**32
        if stream is None or _STREAM_BYTES_MAX < behind < 2**32:
            self.not_understood += 1
            return []
        fresh = packet.payload[behind:]
        stream.next_sequence = (stream.next_sequence + len(fresh)) % 2**32
        stream.pending += fresh
        found: list[bytes] = []
        while len(stream.pending) >= 2 and len(stream.pending) >= (end := 2 + int.from_bytes(stream.pending[:2], "big")):
            found.append(stream.pending[2:end])
            stream.pending = stream.pending[end:]
        return found
