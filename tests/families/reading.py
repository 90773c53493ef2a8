"""2. A frame is read, or is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from agent.core.types import Orientation
from tests.families.vocabulary import (
    DATAGRAM,
    EVERYTHING,
    OPENED,
    OPENING,
    R,
    patched,
    sent_frame,
    short,
)
from tests.packets import (
    ACK,
    CLIENT,
    CLIENT6,
    GRE,
    ICMP,
    ICMPV6,
    OTHER,
    OTHER6,
    PEER,
    PEER6,
    SCTP,
    TCP,
    UDP,
    arp,
    echo,
    ethernet,
    extended,
    frame,
    ipv4_header,
    ipv6_header,
    optioned,
    routed,
    tcp,
    udp,
)
from tests.verdict_cases import (
    ALLOW,
    EGRESS,
    INGRESS,
    PEERS,
    REDIRECT,
    After,
    Case,
    Sees,
    endpoint,
    rule,
)


def _lengths() -> Iterator[Case]:
    v4, v6 = sent_frame(DATAGRAM, UDP), sent_frame(DATAGRAM, UDP, is_v6=True)
    large = ethernet(0x0800, ipv4_header(CLIENT, PEER, TCP, -20) + tcp(40000, 443, ACK, bytes(66_000)))
    large6 = ethernet(0x86DD, ipv6_header(CLIENT6, PEER6, TCP, 0) + tcp(40000, 443, ACK, bytes(66_000)))
    for what, whole, reason in (
        ("IPv4: a header longer than the packet", patched(v4, 14, b"\x4f"), R.DROP_MALFORMED),
        ("IPv4: a header that ends in the transport's", patched(v4, 14, b"\x46"), R.DROP_MALFORMED),
        ("IPv4: shorter than its header", patched(v4, 16, short(19)), R.DROP_MALFORMED),
        ("IPv4: no length", patched(v4, 16, short(0)), R.DROP_MALFORMED),
        ("IPv4: longer than the frame", patched(v4, 16, short(len(v4) - 14 + 1)), R.DROP_MALFORMED),
        ("IPv4: padding behind the packet", v4 + bytes(20), R.PASS_POLICY),
        ("IPv4: ports only in the padding", patched(v4, 16, short(20)), R.DROP_MALFORMED),
        ("IPv4: a port only in the padding", patched(v4, 16, short(22)), R.DROP_MALFORMED),
        ("IPv4: cut in the addresses", v4[:30], R.DROP_MALFORMED),
        ("IPv4: nothing behind the ethertype", v4[:14], R.DROP_MALFORMED),
        ("IPv6: version 4", patched(v6, 14, b"\x40"), R.DROP_MALFORMED),
        ("IPv6: longer than the frame", patched(v6, 18, short(len(v6) - 54 + 1)), R.DROP_MALFORMED),
        ("IPv6: no length", patched(v6, 18, short(0)), R.DROP_MALFORMED),
        ("IPv6: padding behind the packet", v6 + bytes(20), R.PASS_POLICY),
        ("IPv6: a port only in the padding", patched(v6, 18, short(2)), R.DROP_MALFORMED),
        ("IPv6: cut in the addresses", v6[:50], R.DROP_MALFORMED),
        ("IPv6: from a v4-mapped address", frame("::ffff:192.0.2.10", PEER6, UDP, DATAGRAM), R.DROP_MALFORMED),
        ("IPv6: to a v4-mapped address", frame(CLIENT6, "::ffff:198.51.100.7", UDP, DATAGRAM), R.DROP_MALFORMED),
        ("UDP: 7 octets", sent_frame(DATAGRAM[:7], UDP), R.DROP_MALFORMED),
        ("UDP: a length below its header's", sent_frame(patched(DATAGRAM, 4, short(7)), UDP), R.DROP_MALFORMED),
        ("UDP: no length, which only a jumbogram has", sent_frame(patched(DATAGRAM, 4, short(0)), UDP), R.DROP_MALFORMED),
        ("UDP: a length beyond the packet", sent_frame(patched(DATAGRAM, 4, short(len(DATAGRAM) + 1)), UDP), R.DROP_MALFORMED),
        ("UDP: a length below the packet's", sent_frame(patched(DATAGRAM, 4, short(8)), UDP), R.PASS_POLICY),
        ("UDP: an empty datagram", sent_frame(udp(4, 443, b""), UDP), R.PASS_POLICY),
        ("TCP: 19 octets", sent_frame(OPENING[:19], TCP), R.DROP_MALFORMED),
        ("TCP: a header of 16 octets", sent_frame(patched(OPENING, 12, b"\x40"), TCP), R.DROP_MALFORMED),
        ("TCP: a header beyond the packet", sent_frame(patched(OPENING, 12, b"\x60"), TCP), R.DROP_MALFORMED),
        ("TCP: a header with all its options", sent_frame(patched(OPENING, 12, b"\xf0") + bytes(40), TCP), R.PASS_POLICY),
        ("SCTP: 11 octets", sent_frame(bytes(11), SCTP), R.DROP_MALFORMED),
        ("SCTP: a header without a chunk", sent_frame(bytes(12), SCTP), R.PASS_POLICY),
        ("ICMP: 7 octets", sent_frame(b"\x08" + bytes(6), ICMP), R.DROP_MALFORMED),
        ("ICMP: 8 octets", sent_frame(b"\x08" + bytes(7), ICMP), R.PASS_POLICY),
        ("ICMP: a header that ends in the padding", patched(sent_frame(echo(8, 1), ICMP), 16, short(24)), R.DROP_MALFORMED),
        ("SCTP: a header that ends in the padding", patched(sent_frame(bytes(12), SCTP), 16, short(28)), R.DROP_MALFORMED),
        ("ICMPv6: 7 octets", sent_frame(b"\x80" + bytes(6), ICMPV6, is_v6=True), R.DROP_MALFORMED),
        ("ICMPv6 in IPv4 is a protocol like any other", sent_frame(b"", ICMPV6), R.PASS_POLICY),
        ("ICMP in IPv6 is a protocol like any other", sent_frame(b"", ICMP, is_v6=True), R.PASS_POLICY),
        ("another protocol without a payload", sent_frame(b"", GRE), R.PASS_POLICY),
    ):
        yield Case(
            f"2 {what}", what, EVERYTHING, (Sees(EGRESS, whole, reason), After(61), Sees(INGRESS, _turned(whole), reason))
        )
    yield Case(
        "2 too long for its field",
        "what a card is to cut up may be longer than the field can say; it says 0 then",
        (rule(ALLOW), rule(ALLOW, direction=INGRESS)),
        (Sees(EGRESS, large, R.PASS_POLICY), Sees(EGRESS, large6, R.PASS_POLICY)),
    )


def _turned(whole: bytes) -> bytes:
    """The same packet the other way: only the addresses change places, if they are there."""
    at, size = (26, 4) if whole[12:14] == b"\x08\x00" else (22, 16)
    source, destination = whole[at : at + size], whole[at + size : at + 2 * size]
    return whole[:at] + destination + source + whole[at + 2 * size :] if len(destination) == size else whole


def _ethertypes() -> Iterator[Case]:
    for what, number in (
        ("a length, as of 802.3 frames (spanning tree)", 38),
        ("RARP", 0x8035),
        ("MPLS", 0x8847),
        ("PPPoE", 0x8864),
        ("LACP", 0x8809),
        ("MACsec", 0x88E5),
        ("CDP, and another protocol of one vendor", 0x2000),
    ):
        whole, across = ethernet(number, bytes(46)), ethernet(number, bytes(46), to=bytes.fromhex("0180c200000e"))
        refused = tuple(Sees(direction, each, R.DROP_ETHERTYPE) for direction in (EGRESS, INGRESS) for each in (whole, across))
        yield Case(
            f"2 ethertype {what}",
            "what is neither ARP nor IP has no rule that could allow it, nor is an uplink an exception",
            EVERYTHING,
            (*refused, endpoint(Orientation.UPLINK), *refused),
        )


def _options() -> Iterator[Case]:
    route = b"\x03\x04" + bytes(8)
    for what, options, reason in (
        ("an end of the list", b"\0", R.PASS_POLICY),
        ("nothing, four times", b"\1\1\1\1", R.PASS_POLICY),
        ("record route", b"\x07\x07\x04" + bytes(4), R.PASS_POLICY),
        ("timestamp", b"\x44\x08\x05\x00" + bytes(4), R.PASS_POLICY),
        ("router alert", b"\x94\x04\0\0", R.PASS_POLICY),
        ("security", b"\x82\x0b" + bytes(9), R.PASS_POLICY),
        ("as many as there is room for", b"\x94\x04\0\0" * 10, R.PASS_POLICY),
        ("loose source route", b"\x83\x0b" + route[1:], R.DROP_SOURCE_ROUTE),
        ("strict source route", b"\x89\x0b" + route[1:], R.DROP_SOURCE_ROUTE),
        ("source route behind nothing", b"\1\1\x83\x07\x04" + bytes(4), R.DROP_SOURCE_ROUTE),
        ("source route behind another", b"\x94\x04\0\0\x89\x07\x04" + bytes(4), R.DROP_SOURCE_ROUTE),
        ("source route behind the end of the list", b"\0\x83\x07\x04" + bytes(4), R.PASS_POLICY),
        ("a length of 0", b"\x94\0\0\0", R.DROP_MALFORMED),
        ("a length of 1", b"\x94\1\0\0", R.DROP_MALFORMED),
        ("a length beyond the header", b"\x94\x05\0\0", R.DROP_MALFORMED),
        ("a kind without a length at the end", b"\1\1\1\x94", R.DROP_MALFORMED),
        ("nothing, over and over", b"\1" * 40, R.DROP_EXTENSIONS),
    ):
        yield Case(
            f"2 IPv4 option: {what}",
            "options that say nothing of the way are seen through: the ports behind them are judged",
            (rule(ALLOW), rule(ALLOW, direction=INGRESS)),
            (
                Sees(EGRESS, optioned(CLIENT, PEER, TCP, OPENING, options), reason),
                Sees(
                    EGRESS,
                    optioned(CLIENT, PEER, TCP, tcp(1, 444), options),
                    R.DROP_POLICY if reason is R.PASS_POLICY else reason,
                ),
                Sees(INGRESS, optioned(PEER, CLIENT, TCP, tcp(5, 443), options), reason),
            ),
        )


def _extension_headers() -> Iterator[Case]:
    rows = (rule(ALLOW), rule(ALLOW, direction=INGRESS))

    def sent(kinds: list[int], payload: bytes = OPENING, protocol: int = TCP) -> bytes:
        return extended(CLIENT6, PEER6, kinds, protocol, payload)

    for count in range(9):
        yield Case(
            f"2 {count} extension headers",
            "up to eight are walked to the ports behind them",
            rows,
            (
                Sees(EGRESS, sent([60] * count), R.PASS_POLICY),
                Sees(EGRESS, sent([60] * count, tcp(1, 444)), R.DROP_POLICY),
                Sees(INGRESS, extended(PEER6, CLIENT6, [60] * count, TCP, tcp(5, 443)), R.PASS_POLICY),
            ),
        )
    for what, whole, reason in (
        ("nine", sent([60] * 9), R.DROP_EXTENSIONS),
        ("hop by hop", sent([0]), R.PASS_POLICY),
        ("authentication, which counts its length in fours", sent([51]), R.PASS_POLICY),
        ("an atomic fragment", sent([44]), R.PASS_POLICY),
        ("destination options behind an atomic fragment", sent([44, 60]), R.PASS_POLICY),
        ("every kind, in the order of RFC 8200", sent([0, 60, 43, 44, 51, 60]), R.PASS_POLICY),
        ("one of 24 octets", frame(CLIENT6, PEER6, 60, b"\x06\x02" + bytes(22) + OPENING), R.PASS_POLICY),
        ("one longer than the packet", frame(CLIENT6, PEER6, 60, b"\x06\xff" + bytes(6) + OPENING), R.DROP_MALFORMED),
        (
            "one longer than the packet, before another protocol",
            frame(CLIENT6, PEER6, 60, b"\x2f\x09" + bytes(6)),
            R.DROP_MALFORMED,
        ),
        ("one that is cut", frame(CLIENT6, PEER6, 60, b"\x06\0\0\0"), R.DROP_MALFORMED),
        ("one that ends in the padding", patched(sent([60]), 18, short(4)), R.DROP_MALFORMED),
        ("two fragment headers", sent([44, 44]), R.DROP_MALFORMED),
        ("no next header", sent([], b"", 59), R.DROP_EXTENSIONS),
        ("no next header behind another", sent([60], b"", 59), R.DROP_EXTENSIONS),
        ("nothing behind it", sent([60], b""), R.DROP_MALFORMED),
    ):
        yield Case(f"2 extension headers: {what}", what, rows, (Sees(EGRESS, whole, reason),))
    for kind in (0, 2, 3, 4):
        yield Case(
            f"2 routing header of type {kind}",
            "with segments left it is a source route (RFC 5095), from either side; with none it has been gone",
            rows,
            (
                Sees(EGRESS, routed(CLIENT6, PEER6, TCP, OPENING, kind, 1), R.DROP_SOURCE_ROUTE),
                Sees(EGRESS, routed(CLIENT6, PEER6, TCP, OPENING, kind, 255), R.DROP_SOURCE_ROUTE),
                Sees(INGRESS, routed(PEER6, CLIENT6, TCP, tcp(5, 443), kind, 1), R.DROP_SOURCE_ROUTE),
                Sees(EGRESS, routed(CLIENT6, PEER6, TCP, OPENING, kind, 0), R.PASS_POLICY),
            ),
        )
    for what, number in (("mobility", 135), ("host identity", 139), ("shim6", 140), ("encapsulated", 50)):
        yield Case(
            f"2 {what} header",
            "is not looked behind: it is a protocol without ports, whatever it holds",
            rows,
            (
                Sees(EGRESS, sent([], OPENING, number), R.DROP_POLICY),
                rule(ALLOW, PEERS, 0),
                Sees(EGRESS, sent([], OPENING, number), R.PASS_POLICY),
            ),
        )


def _vlans() -> Iterator[Case]:
    rows = (rule(ALLOW), rule(REDIRECT, 0, UDP, 53), rule(REDIRECT, 0, TCP, 53))
    for what, vlans in (
        ("one tag", (0x8100,)),
        ("one service tag", (0x88A8,)),
        ("two tags", (0x8100, 0x8100)),
        ("a tag in a service tag", (0x88A8, 0x8100)),
    ):
        yield Case(
            f"2 VLAN: {what}",
            "is seen through in both families; a question inside is denied over UDP and TCP",
            rows,
            (
                Sees(EGRESS, frame(CLIENT, PEER, TCP, OPENING, *vlans), R.PASS_POLICY),
                Sees(INGRESS, frame(PEER, CLIENT, TCP, OPENED, *vlans), R.PASS_FLOW),
                Sees(EGRESS, frame(CLIENT, PEER, TCP, tcp(1, 444), *vlans), R.DROP_POLICY),
                Sees(EGRESS, frame(CLIENT6, PEER6, TCP, OPENING, *vlans), R.PASS_POLICY),
                Sees(EGRESS, frame(CLIENT, PEER, UDP, udp(4, 53), *vlans), R.DROP_VLAN_REDIRECT),
                Sees(EGRESS, frame(CLIENT6, OTHER6, TCP, tcp(4, 53), *vlans), R.DROP_VLAN_REDIRECT),
                Sees(EGRESS, frame("192.0.2.11", PEER, TCP, OPENING, *vlans), R.DROP_SOURCE),
            ),
        )
    priority = patched(frame(CLIENT, OTHER, UDP, udp(4, 53), 0x8100), 14, b"\xe0\0")
    yield Case(
        "2 VLAN: a priority tag",
        "a tag of no VLAN is one all the same: the stack would take the question for an untagged one",
        rows,
        (
            Sees(EGRESS, priority, R.DROP_VLAN_REDIRECT),
            Sees(EGRESS, patched(frame(CLIENT, PEER, TCP, OPENING, 0x8100), 14, b"\xe0\0"), R.PASS_POLICY),
        ),
    )
    yield Case(
        "2 VLAN: a tag the card took off",
        "counts with those in the frame",
        rows,
        (
            Sees(EGRESS, frame(CLIENT, PEER, TCP, OPENING), R.PASS_POLICY, vlans=1),
            Sees(EGRESS, frame(CLIENT, PEER, TCP, tcp(2, 443), 0x8100), R.PASS_POLICY, vlans=1),
            Sees(EGRESS, frame(CLIENT, PEER, TCP, tcp(3, 443), 0x8100, 0x8100), R.DROP_VLAN, vlans=1),
            Sees(EGRESS, frame(CLIENT, OTHER, UDP, udp(4, 53)), R.DROP_VLAN_REDIRECT, vlans=1),
        ),
    )
    yield Case(
        "2 VLAN: three tags",
        "are not looked behind, whatever is allowed, in either direction",
        EVERYTHING,
        (
            Sees(EGRESS, frame(CLIENT, PEER, TCP, OPENING, 0x88A8, 0x8100, 0x8100), R.DROP_VLAN),
            Sees(INGRESS, frame(PEER, CLIENT, TCP, OPENING, 0x88A8, 0x8100, 0x8100), R.DROP_VLAN),
        ),
    )
    yield Case(
        "2 VLAN: cut in the tag",
        "there is nothing to judge",
        EVERYTHING,
        (Sees(EGRESS, frame(CLIENT, PEER, TCP, OPENING, 0x8100)[:17], R.DROP_MALFORMED),),
    )
    yield Case(
        "2 VLAN: ARP in a tag",
        "has the same rules as without",
        (),
        (
            Sees(EGRESS, arp(CLIENT, OTHER)[:12] + b"\x81\0\0\5" + arp(CLIENT, OTHER)[12:], R.PASS_NEIGHBOUR),
            Sees(EGRESS, arp(OTHER, CLIENT)[:12] + b"\x81\0\0\5" + arp(OTHER, CLIENT)[12:], R.DROP_NEIGHBOUR_CLAIM),
        ),
    )


def _links() -> Iterator[Case]:
    for what, number, to, reason in (
        ("EAPOL to the switch", 0x888E, "0180c2000003", R.PASS_NEIGHBOUR),
        ("EAPOL to an access point", 0x888E, "020000000001", R.PASS_NEIGHBOUR),
        ("EAPOL to everybody", 0x888E, "ffffffffffff", R.DROP_ETHERTYPE),
        ("EAPOL to a group that bridges forward", 0x888E, "0180c2000010", R.DROP_ETHERTYPE),
        ("EAPOL to another vendor's group", 0x888E, "01000ccccccc", R.DROP_ETHERTYPE),
        ("LLDP to the nearest bridge", 0x88CC, "0180c200000e", R.PASS_NEIGHBOUR),
        ("LLDP past a relay", 0x88CC, "0180c2000003", R.PASS_NEIGHBOUR),
        ("LLDP to the customer's bridge", 0x88CC, "0180c2000000", R.PASS_NEIGHBOUR),
        ("LLDP to one station", 0x88CC, "020000000001", R.DROP_ETHERTYPE),
        ("LLDP to everybody", 0x88CC, "ffffffffffff", R.DROP_ETHERTYPE),
    ):
        whole = ethernet(number, bytes(46), to=bytes.fromhex(to))
        tagged = ethernet(number, bytes(46), 0x8100, to=bytes.fromhex(to))
        yield Case(
            f"3b {what}",
            "keeps an uplink's link, both ways, if it cannot get behind the other end of it; no workload has a link to keep",
            (),
            (
                Sees(EGRESS, whole, R.DROP_ETHERTYPE),
                Sees(INGRESS, whole, R.DROP_ETHERTYPE),
                endpoint(Orientation.UPLINK),
                Sees(EGRESS, whole, reason),
                Sees(INGRESS, whole, reason),
                Sees(EGRESS, tagged, R.DROP_ETHERTYPE),
                Sees(EGRESS, whole, R.DROP_ETHERTYPE, vlans=1),
            ),
        )


FAMILY: Final = (*_lengths(), *_ethertypes(), *_links(), *_options(), *_extension_headers(), *_vlans())
