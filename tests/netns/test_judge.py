"""The judge, judged: packets written by hand, no network, no root."""

from __future__ import annotations

import struct
from pathlib import Path

import dns.message
import dns.rrset
import pytest

from agent.core.types import Address, packed
from tests.netns import pcap
from tests.netns.judge import FORWARD_MS_MAX, Judgement, judge
from tests.netns.pcap import ACK, SYN, TCP, UDP, Packet, Recording

CLIENT = packed("192.0.2.6")
CLIENT6 = packed("2001:db8:1:1::2")
SERVER = packed("198.51.100.53")
A1, A2 = packed("198.18.0.1"), packed("2001:db8:99::2")
MS = 10**6


def message(name: str, kind: str, *addresses: str) -> bytes:
    query = dns.message.make_query(name, kind)
    reply = dns.message.make_response(query)
    if addresses:
        reply.answer.append(dns.rrset.from_text(name, 60, "IN", kind, *addresses))
    return reply.to_wire()


def udp_reply(at_ns: int, payload: bytes) -> Packet:
    return Packet(at_ns, SERVER, CLIENT, UDP, 53, 40000, payload=payload)


def segment(at_ns: int, sequence: int, payload: bytes = b"", flags: int = ACK) -> Packet:
    return Packet(at_ns, SERVER, CLIENT, TCP, 53, 40001, flags, sequence, payload)


def syn(at_ns: int, address: Address) -> Packet:
    return Packet(at_ns, CLIENT if len(address) == 4 else CLIENT6, address, TCP, 50000, 7, SYN, 1)


def judged(client: list[Packet], uplink: list[Packet]) -> Judgement:
    return judge(Recording(tuple(client)), Recording(tuple(uplink)))


REPLY = message("n0.test.", "A", "198.18.0.1")


def test_a_first_packet_that_comes_through_is_not_lost() -> None:
    seen = judged([udp_reply(1 * MS, REPLY), syn(2 * MS, A1)], [syn(3 * MS, A1)])
    assert seen.lost == []
    assert seen.by_address[A1].reply == seen.replies[0]
    assert (seen.replies[0].name, seen.replies[0].addresses) == ("n0.test.", (A1,))


@pytest.mark.parametrize("late_ms", [None, FORWARD_MS_MAX + 1])
def test_one_that_does_not_or_only_its_copy_does_is_lost(late_ms: int | None) -> None:
    """The client sends again after a second, and only that is seen at the uplink."""
    uplink = [] if late_ms is None else [syn((2 + late_ms) * MS, A1)]
    seen = judged([udp_reply(1 * MS, REPLY), syn(2 * MS, A1), syn(1002 * MS, A1)], uplink)
    assert [first.address for first in seen.lost] == [A1]
    assert seen.retransmitted == 1


def test_a_packet_without_a_reply_before_it_is_no_loss() -> None:
    """Whoever sends to an address nobody named has not been failed by the gate; nor has one who sent before the reply."""
    seen = judged([syn(1 * MS, A1), syn(1 * MS, A2), udp_reply(2 * MS, REPLY)], [])
    assert seen.lost == []
    assert len(seen.unresolved) == 2


def test_packets_of_other_clients_and_answers_of_servers_do_not_count() -> None:
    """The uplink carries everybody; a SYN with ACK opens nothing, whatever its port."""
    other = Packet(2 * MS, packed("192.0.2.10"), A1, TCP, 50000, 7, SYN, 1)
    answers = [Packet(2 * MS, A1, CLIENT, TCP, source, to, SYN | ACK, 1) for source, to in ((7, 50000), (50000, 7))]
    seen = judged([udp_reply(1 * MS, REPLY), syn(2 * MS, A1), *answers], [other])
    assert len(seen.lost) == 1
    assert len(seen.by_address) == 1


def test_a_packet_that_comes_out_twice_is_counted() -> None:
    seen = judged([udp_reply(1 * MS, REPLY), syn(2 * MS, A1)], [syn(2 * MS, A1), syn(3 * MS, A1)])
    assert seen.duplicated == 1


def test_a_reply_is_early_before_its_last_row_was_acknowledged() -> None:
    """One row of two is not enough; a row never acknowledged is worse; a reply without addresses needs none."""
    both = message("n0.test.", "A", "198.18.0.1", "198.18.0.9")
    seen = judged([udp_reply(5 * MS, both), udp_reply(6 * MS, message("n1.test.", "A"))], [])
    a9 = packed("198.18.0.9")
    assert seen.early({A1: 4 * MS, a9: 5 * MS}) == []
    assert seen.early({A1: 4 * MS, a9: 5 * MS + 1}) == [seen.replies[0]]
    assert seen.early({A1: 4 * MS}) == [seen.replies[0]]


def test_messages_over_tcp_are_put_together() -> None:
    """Two messages in three segments, one of them sent twice; each is timed by the segment that completed it."""
    second = message("n1.test.", "AAAA", "2001:db8:99::2")
    stream = b"".join(struct.pack("!H", len(m)) + m for m in (REPLY, second))
    start, cut = 2**32 - 5, len(REPLY) + 10
    segments = [segment(1, start - 1, flags=SYN | ACK), segment(2, start, stream[:1])]
    segments += [segment(3, (start + 1) % 2**32, stream[1:cut]), segment(4, (start + 1) % 2**32, stream[1:cut])]
    segments += [segment(5, (start + cut) % 2**32, stream[cut:])]
    seen = judged(segments, [])
    assert [(reply.at_ns, reply.name, reply.addresses, reply.is_tcp) for reply in seen.replies] == [
        (3, "n0.test.", (A1,), True),
        (5, "n1.test.", (A2,), True),
    ]
    assert seen.not_understood == 0


def test_what_is_not_understood_is_counted() -> None:
    """A gap in a stream, a stream without its beginning, a message that is none."""
    stream = struct.pack("!H", len(REPLY)) + REPLY
    gap = [segment(1, 99, flags=SYN | ACK), segment(2, 100, stream[:10]), segment(3, 120, stream[20:])]
    assert judged(gap, []).not_understood == 1
    assert judged([segment(3, 120, stream)], []).not_understood == 1
    seen = judged([udp_reply(1, REPLY[:20])], [])
    assert (seen.not_understood, seen.replies) == (1, ())


def frame(ether_type: int, packet: bytes) -> bytes:
    return bytes(12) + struct.pack("!H", ether_type) + packet


def capture_file(path: Path, *frames: bytes, order: str = "<", magic: int = 0xA1B23C4D, linktype: int = 1) -> Path:
    data = struct.pack(f"{order}IHHiIII", magic, 2, 4, 0, 0, 512, linktype)
    data += b"".join(struct.pack(f"{order}IIII", 1, 2, len(f), len(f)) + f for f in frames)
    path.write_bytes(data)
    return path


def ipv4(protocol: int, rest: bytes, fragment: int = 0) -> bytes:
    return struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(rest), 0, fragment, 64, protocol, 0, CLIENT, A1) + rest


@pytest.mark.parametrize(("order", "magic", "at_ns"), [("<", 0xA1B23C4D, 10**9 + 2), (">", 0xA1B2C3D4, 10**9 + 2000)])
def test_files_of_both_byte_orders_and_precisions_are_read(tmp_path: Path, order: str, magic: int, at_ns: int) -> None:
    datagram = frame(0x0800, ipv4(UDP, struct.pack("!HHHH", 5, 7, 12, 0) + b"data"))
    read = pcap.read(capture_file(tmp_path / "f", datagram, order=order, magic=magic))
    assert read == Recording((Packet(at_ns, CLIENT, A1, UDP, 5, 7, payload=b"data"),))


def test_ethernet_padding_and_ipv6_options_are_seen_through(tmp_path: Path) -> None:
    """A short frame is filled up to 60 bytes; a hop-by-hop header stands before TCP."""
    header = struct.pack("!HHIIBBHHH", 5, 7, 1, 0, 5 << 4, SYN, 0, 0, 0)
    padded = frame(0x0800, ipv4(TCP, header)) + bytes(6)
    options = bytes([TCP, 0, 1, 4, 0, 0, 0, 0])
    v6 = struct.pack("!IHBB16s16s", 6 << 28, len(options + header), 0, 64, CLIENT6, A2) + options + header
    read = pcap.read(capture_file(tmp_path / "f", padded, frame(0x86DD, v6)))
    assert [(p.source, p.destination_port, p.flags, p.payload) for p in read.packets] == [
        (CLIENT, 7, SYN, b""),
        (CLIENT6, 7, SYN, b""),
    ]


def test_arp_fragments_and_short_packets_are_told_apart(tmp_path: Path) -> None:
    datagram = struct.pack("!HHHH", 5, 7, 12, 0) + b"data"
    frames = [frame(0x0806, bytes(28)), frame(0x0800, ipv4(UDP, datagram, 0x2000)), frame(0x0800, ipv4(UDP, datagram)[:24])]
    read = pcap.read(capture_file(tmp_path / "f", *frames))
    assert read == Recording((), other=1, not_understood=2)


@pytest.mark.parametrize("linktype", [0, 113])
def test_what_is_no_capture_of_ethernet_is_refused(tmp_path: Path, linktype: int) -> None:
    with pytest.raises(ValueError, match="not Ethernet"):
        pcap.read(capture_file(tmp_path / "f", linktype=linktype))
    (tmp_path / "g").write_bytes(b"text")
    with pytest.raises(ValueError, match="not a capture file"):
        pcap.read(tmp_path / "g")
