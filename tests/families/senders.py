"""3 to 5. Who sent it, to whom, and what passes because of that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from agent.core.types import IDENTITY_HOST, Orientation
from agent.datapath.abi import Reason
from agent.datapath.model import Origin
from tests.families.vocabulary import (
    ANOTHER,
    DATAGRAM,
    EVERYTHING,
    OPENED,
    OPENING,
    RECEIVED,
    SENT,
    R,
    patched,
)
from tests.packets import (
    ACK,
    CLIENT,
    CLIENT6,
    FIN,
    GRE,
    ICMP,
    ICMPV6,
    OTHER,
    OTHER6,
    PEER,
    PEER6,
    ROUTER,
    RST,
    SCTP,
    SYN,
    TCP,
    UDP,
    arp,
    echo,
    error,
    ethernet,
    fragment4,
    frame,
    ip,
    ipv6_header,
    neighbour,
    tcp,
    udp,
)
from tests.verdict_cases import (
    ALLOW,
    DENY,
    EGRESS,
    INGRESS,
    MOVED,
    PEERS,
    REDIRECT,
    After,
    Case,
    Sees,
    back,
    endpoint,
    group,
    holds,
    out,
    owns,
    rule,
)


def _neighbours() -> Iterator[Case]:
    own = arp(CLIENT, OTHER)
    for what, whole, reason in (
        ("a question", own, R.PASS_NEIGHBOUR),
        ("an answer", patched(own, 20, b"\0\2"), R.PASS_NEIGHBOUR),
        ("an announcement", arp(CLIENT, CLIENT), R.PASS_NEIGHBOUR),
        ("a probe", arp("0.0.0.0", OTHER), R.PASS_NEIGHBOUR),
        ("another's answer", patched(arp(PEER, OTHER), 20, b"\0\2"), R.DROP_NEIGHBOUR_CLAIM),
        ("for other hardware", patched(own, 14, b"\0\6"), R.DROP_MALFORMED),
        ("for another protocol", patched(own, 16, b"\x86\xdd"), R.DROP_MALFORMED),
        ("with long hardware addresses", patched(own, 18, b"\x08"), R.DROP_MALFORMED),
        ("with long addresses", patched(own, 19, b"\x10"), R.DROP_MALFORMED),
        ("cut", own[:41], R.DROP_MALFORMED),
    ):
        yield Case(f"3 ARP: {what}", what, (), (Sees(EGRESS, whole, reason),))
    for what, kind, target in (
        ("listener query", 130, "::"),
        ("listener report", 131, "::"),
        ("listener done", 132, "::"),
        ("router solicitation", 133, "::"),
        ("neighbour solicitation", 135, OTHER6),
        ("neighbour advertisement", 136, CLIENT6),
        ("listener report, version 2", 143, "::"),
    ):
        yield Case(
            f"3 {what}",
            "from its own address, a link-local one, or none; not from another's. What comes toward it from its link passes",
            (),
            (
                Sees(EGRESS, neighbour(CLIENT6, "ff02::2", kind, target), R.PASS_NEIGHBOUR),
                Sees(EGRESS, neighbour("fe80::1", "ff02::2", kind, target), R.PASS_NEIGHBOUR),
                Sees(EGRESS, neighbour("::", "ff02::2", kind, target), R.PASS_NEIGHBOUR),
                Sees(EGRESS, neighbour(OTHER6, "ff02::2", kind, target), R.DROP_NEIGHBOUR_CLAIM),
                Sees(INGRESS, neighbour("fe80::2", "ff02::1", kind, target), R.PASS_NEIGHBOUR),
            ),
        )
    for what, kind in (("router advertisement", 134), ("redirect", 137)):
        yield Case(
            f"3 {what}",
            "is a router's: the endpoint may not, a router on the link may",
            EVERYTHING,
            (
                Sees(EGRESS, neighbour("fe80::1", "ff02::1", kind), R.DROP_NEIGHBOUR_CLAIM),
                Sees(INGRESS, neighbour("fe80::2", "ff02::1", kind), R.PASS_NEIGHBOUR),
                Sees(INGRESS, neighbour("fe80::2", "fe80::1", kind), R.PASS_NEIGHBOUR),
            ),
        )
    neighbour6, elsewhere6 = "2001:db8:0:a::11", "2001:db8:0:a::d05"  # in one /64; routing leads to the second by another link
    for what, kind, target in (("a solicitation", 135, "::"), ("an advertisement", 136, CLIENT6), ("a report", 131, "::")):
        yield Case(
            f"3 {what} to a neighbour's own address",
            "passes where that is on its link; a host that routes a part of a /64 to another link would carry it on",
            EVERYTHING,
            (
                Sees(EGRESS, neighbour(CLIENT6, neighbour6, kind, target), R.PASS_NEIGHBOUR),
                Sees(EGRESS, neighbour(CLIENT6, elsewhere6, kind, target), R.DROP_NEIGHBOUR_CLAIM, Origin.FORWARDED),
                endpoint(Orientation.UPLINK),
                Sees(EGRESS, neighbour(CLIENT6, elsewhere6, kind, target), R.PASS_NEIGHBOUR, Origin.FORWARDED),
            ),
        )
    report = b"\x8f" + bytes(7)
    alert = b"\x3a\x00\x05\x02\x00\x00\x01\x00"
    listening = ethernet(0x86DD, ipv6_header("fe80::1", "ff02::16", 0, len(alert + report), 1) + alert + report)
    yield Case(
        "3 a listener report with a router alert",
        "stands behind a hop-by-hop header, as RFC 3810 wants it",
        (),
        (Sees(EGRESS, listening, R.PASS_NEIGHBOUR),),
    )
    uplink, routed, routed6 = endpoint(Orientation.UPLINK), "10.0.0.5", "2001:db8:0:d::5"
    forwarded = Origin.FORWARDED  # said of the address that is answered for: this host routes it on
    for what, whole, reason, is_routed in (
        ("ARP, for an address that is routed on", arp(routed, OTHER), R.PASS_NEIGHBOUR, True),
        ("ARP, for one on the same link", arp(OTHER, OTHER), R.DROP_NEIGHBOUR_CLAIM, False),
        ("an advertisement by the host", neighbour(CLIENT6, "fe80::9", 136, routed6), R.PASS_NEIGHBOUR, True),
        ("an advertisement by its link-local address", neighbour("fe80::1", "fe80::9", 136, routed6), R.PASS_NEIGHBOUR, True),
        ("an advertisement in its name", neighbour(routed6, "fe80::9", 136, routed6), R.PASS_NEIGHBOUR, True),
        ("an advertisement to all", neighbour("fe80::1", "ff02::1", 136, routed6), R.PASS_NEIGHBOUR, True),
        ("an advertisement by somebody else", neighbour(OTHER6, "fe80::9", 136, routed6), R.DROP_NEIGHBOUR_CLAIM, True),
        ("an advertisement of one on the same link", neighbour(CLIENT6, "fe80::9", 136, OTHER6), R.DROP_NEIGHBOUR_CLAIM, False),
        ("an advertisement of none", neighbour(routed6, "fe80::9", 136, "::"), R.DROP_NEIGHBOUR_CLAIM, True),
        ("an advertisement off the link", neighbour(CLIENT6, PEER6, 136, routed6), R.DROP_NEIGHBOUR_CLAIM, True),
        ("a question", neighbour(routed6, "ff02::1", 135, OTHER6), R.DROP_NEIGHBOUR_CLAIM, True),
        ("a router's part", neighbour(routed6, "ff02::1", 134, "::"), R.DROP_NEIGHBOUR_CLAIM, True),
    ):
        yield Case(
            f"3c proxy: {what}",
            "an uplink may answer for what the host routes on by another interface; a workload may for nobody",
            (),
            (
                Sees(EGRESS, whole, R.DROP_NEIGHBOUR_CLAIM, forwarded),
                uplink,
                Sees(EGRESS, whole, reason, forwarded if is_routed else Origin.WIRE),
            ),
        )
    yield Case(
        "3 an advertisement cut before its target",
        "names nobody",
        (),
        (Sees(EGRESS, frame(CLIENT6, "ff02::1", ICMPV6, b"\x88" + bytes(15)), R.DROP_MALFORMED),),
    )


def _dhcp() -> Iterator[Case]:
    many, servers, local, server = "255.255.255.255", "ff02::1:2", "fe80::1", "fe80::2"
    ask, answer, ask6, answer6 = udp(68, 67), udp(67, 68), udp(546, 547), udp(547, 546)
    for what, direction, whole, with_dhcp, without in (
        ("a question without an address", EGRESS, frame("0.0.0.0", many, UDP, ask), R.PASS_DHCP, R.DROP_SOURCE),
        ("a question from its own address", EGRESS, frame(CLIENT, many, UDP, ask), R.PASS_DHCP, R.DROP_POLICY),
        ("a question to one server", EGRESS, frame(CLIENT, PEER, UDP, ask), R.DROP_POLICY, R.DROP_POLICY),
        ("a question without an address to one server", EGRESS, frame("0.0.0.0", PEER, UDP, ask), R.DROP_SOURCE, R.DROP_SOURCE),
        ("from another's address", EGRESS, frame(OTHER, many, UDP, ask), R.DROP_SOURCE, R.DROP_SOURCE),
        ("from another port", EGRESS, frame("0.0.0.0", many, UDP, udp(69, 67)), R.DROP_SOURCE, R.DROP_SOURCE),
        ("to another port", EGRESS, frame(CLIENT, many, UDP, udp(68, 69)), R.DROP_POLICY, R.DROP_POLICY),
        ("as a server", EGRESS, frame(CLIENT, many, UDP, answer), R.DROP_POLICY, R.DROP_POLICY),
        ("over TCP", EGRESS, frame(CLIENT, PEER, TCP, tcp(68, 67)), R.DROP_POLICY, R.DROP_POLICY),
        ("in fragments", EGRESS, fragment4(CLIENT, many, UDP, ask, 0, more=True, number=3), R.DROP_POLICY, R.DROP_POLICY),
        ("an answer to everybody", INGRESS, frame(PEER, many, UDP, answer), R.PASS_DHCP, R.DROP_POLICY),
        ("an answer to the address it is to have", INGRESS, frame(PEER, "192.0.2.99", UDP, answer), R.PASS_DHCP, R.DROP_POLICY),
        ("an answer from another port", INGRESS, frame(PEER, CLIENT, UDP, udp(68, 68)), R.DROP_POLICY, R.DROP_POLICY),
        ("another's question", INGRESS, frame("0.0.0.0", many, UDP, ask), R.DROP_MARTIAN, R.DROP_MARTIAN),
        ("v6: a question to all servers", EGRESS, frame(local, servers, UDP, ask6), R.PASS_DHCP, R.DROP_SOURCE),
        ("v6: a question to a server on the link", EGRESS, frame(local, server, UDP, ask6), R.PASS_DHCP, R.DROP_SOURCE),
        ("v6: to a server elsewhere", EGRESS, frame(CLIENT6, PEER6, UDP, ask6), R.DROP_POLICY, R.DROP_POLICY),
        ("v6: from no address", EGRESS, frame("::", servers, UDP, ask6), R.DROP_SOURCE, R.DROP_SOURCE),
        ("v6: to all nodes", EGRESS, frame(local, "ff02::1", UDP, ask6), R.DROP_SOURCE, R.DROP_SOURCE),
        ("v6: as a server", EGRESS, frame(local, server, UDP, answer6), R.DROP_SOURCE, R.DROP_SOURCE),
        ("v6: an answer on the link", INGRESS, frame(server, local, UDP, answer6), R.PASS_DHCP, R.DROP_POLICY),
        ("v6: an answer from elsewhere", INGRESS, frame(PEER6, CLIENT6, UDP, answer6), R.DROP_POLICY, R.DROP_POLICY),
        ("v6: an answer from another port", INGRESS, frame(server, local, UDP, udp(546, 546)), R.DROP_POLICY, R.DROP_POLICY),
    ):
        yield Case(
            f"3a DHCP: {what}",
            "what is DHCP passes where it may, and an uplink may always; elsewhere it is a packet like any other",
            (),
            (
                Sees(direction, whole, without),
                endpoint(dhcp=True),
                Sees(direction, whole, with_dhcp),
                endpoint(Orientation.UPLINK),
                Sees(direction, whole, with_dhcp),
            ),
        )
    yield Case(
        "3a DHCP: leaves no flow",
        "neither a question nor an answer opens the way for anything else",
        (endpoint(dhcp=True), rule(DENY, 0, UDP, 67), rule(DENY, 0, UDP, 68, direction=INGRESS)),
        (
            Sees(EGRESS, frame(CLIENT, many, UDP, ask), R.PASS_DHCP),
            Sees(INGRESS, frame(PEER, CLIENT, UDP, answer), R.PASS_DHCP),
            Sees(EGRESS, frame(CLIENT, PEER, UDP, ask), R.DROP_DENY),
        ),
    )


def _origins() -> Iterator[Case]:
    uplink = endpoint(Orientation.UPLINK)
    agent, forwarded, marked, refusal = Origin.AGENT, Origin.FORWARDED, Origin.MARKED, Origin.ANSWER
    container, elsewhere, elsewhere6 = "10.0.0.5", "10.0.0.6", "2001:db8:0:d::6"
    ask, reply = udp(40000, 53), udp(53, 40000)

    def sent(payload: bytes, reason: Reason, origin: Origin = Origin.WIRE, protocol: int = UDP, to: str = OTHER) -> Sees:
        return Sees(EGRESS, frame(CLIENT6 if ":" in to else CLIENT, to, protocol, payload), reason, origin)

    def got(payload: bytes, reason: Reason, origin: Origin = Origin.WIRE, protocol: int = UDP, by: str = OTHER) -> Sees:
        return Sees(INGRESS, frame(by, CLIENT6 if ":" in by else CLIENT, protocol, payload), reason, origin)

    for what, flags, reason in (
        ("SYN-ACK", SYN | ACK, R.PASS_AGENT),
        ("SYN-ACK with congestion marks", SYN | ACK | 0x40, R.PASS_AGENT),
        ("SYN", SYN, R.DROP_POLICY),
        ("ACK", ACK, R.DROP_POLICY),
        ("reset", RST | ACK, R.DROP_POLICY),
    ):
        yield Case(
            f"4 without a socket: {what}",
            "of what this host makes under the agent's mark without a socket, a SYN cookie's answer passes and opens nothing",
            (),
            (
                Sees(INGRESS, frame(OTHER, CLIENT, TCP, tcp(53, 40000, flags)), reason, marked),
                Sees(EGRESS, frame(CLIENT, OTHER, TCP, tcp(40000, 53, ACK)), R.DROP_POLICY),
            ),
        )
    for what, to, by in (("an answer", CLIENT, "192.0.2.11"), ("v6: an answer", CLIENT6, "2001:db8:0:a::11")):
        yield Case(
            f"4 of the agent: {what}",
            "passes to who asked; what a bridge brings to somebody else is not his to hear, but where everybody's is",
            (),
            (
                Sees(INGRESS, frame(OTHER6 if ":" in to else OTHER, to, UDP, reply), R.PASS_AGENT, agent),
                Sees(INGRESS, frame(OTHER6 if ":" in to else OTHER, by, UDP, reply), R.DROP_POLICY, agent),
                group(ingress=False),
                Sees(INGRESS, frame(OTHER6 if ":" in to else OTHER, by, UDP, reply), R.PASS_POLICY, agent),
            ),
        )
    yield Case(
        "4 without a socket: a datagram",
        "is not believed",
        (),
        (Sees(INGRESS, frame(OTHER, CLIENT, UDP, reply), R.DROP_POLICY, marked),),
    )
    yield Case(
        "4a behind an interface nothing is believed",
        "of what a workload sends, neither a mark nor where it came in by says who it is",
        (),
        (sent(ask, R.DROP_POLICY, agent), sent(ask, R.DROP_POLICY, marked), sent(ask, R.DROP_POLICY, forwarded)),
    )
    for what, protocol, question, to in (
        ("a datagram", UDP, ask, OTHER),
        ("a datagram in IPv6", UDP, ask, OTHER6),
        ("a connection", TCP, OPENING, OTHER),
        ("a connection in IPv6", TCP, OPENING, OTHER6),
        ("a packet of none", TCP, SENT, OTHER),
        ("an echo", ICMP, echo(8, 9), OTHER),
        ("GRE", GRE, bytes(8), OTHER),
    ):
        yield Case(
            f"4a the mark alone: {what}",
            "a mark without a socket of this host is anybody's: the packet is judged as if it had none, its source too",
            (uplink,),
            (
                sent(question, R.DROP_POLICY, marked, protocol, to),
                Sees(
                    EGRESS, frame("2001:db8::66" if ":" in to else "192.0.2.66", to, protocol, question), R.DROP_SOURCE, marked
                ),
                rule(DENY, 0, 0),
                sent(question, R.DROP_DENY, marked, protocol, to),
                rule(ALLOW, 0, 0),
                sent(question, R.PASS_POLICY, marked, protocol, to),
            ),
        )
    yield Case(
        "4a the mark alone asks",
        "it is redirected like any socket of the host",
        (uplink, rule(REDIRECT, 0, UDP, 53)),
        (sent(ask, R.PASS_REDIRECT, marked),),
    )
    for what, protocol, question, answer, to in (
        ("over UDP", UDP, ask, reply, OTHER),
        ("over UDP in IPv6", UDP, ask, reply, OTHER6),
        ("over TCP", TCP, tcp(40000, 53), tcp(53, 40000, SYN | ACK), OTHER),
        ("over TCP in IPv6", TCP, tcp(40000, 53), tcp(53, 40000, SYN | ACK), OTHER6),
    ):
        yield Case(
            f"4a the agent asks {what}",
            "an uplink lets the agent's questions out, not to the proxy, and their replies in, whatever the policy becomes",
            (uplink, rule(REDIRECT, 0, protocol, 53)),
            (
                got(answer, R.DROP_POLICY, protocol=protocol, by=to),
                sent(question, R.PASS_AGENT, agent, protocol, to),
                got(answer, R.PASS_FLOW, protocol=protocol, by=to),
                group(2),
                got(answer, R.PASS_FLOW, protocol=protocol, by=to),
                group(3, audit=True),
                group(4),
                got(answer, R.PASS_FLOW, protocol=protocol, by=to),
            ),
        )
    yield Case(
        "7e another's socket is not the agent",
        "what a socket of the host sends is no packet of the agent's flow: it is redirected, and leaves that flow alone",
        (uplink, rule(REDIRECT, 0, UDP, 53)),
        (sent(ask, R.PASS_AGENT, agent), sent(ask, R.PASS_REDIRECT), got(reply, R.PASS_FLOW)),
    )
    yield Case(
        "7e another's socket that is allowed",
        "takes the ports over: from then on the flow is judged",
        (uplink, rule(ALLOW, 2, UDP, 53)),
        (
            sent(ask, R.PASS_AGENT, agent),
            sent(ask, R.PASS_POLICY),
            got(reply, R.PASS_FLOW),
            group(2),
            got(reply, R.DROP_POLICY),
            got(reply, R.DROP_FLOW_ENDED),
            sent(ask, R.PASS_AGENT, agent),
            got(reply, R.PASS_FLOW),
        ),
    )
    yield Case(
        "4a idle",
        "the agent's flow ends like any other",
        (uplink,),
        (sent(ask, R.PASS_AGENT, agent), After(61), got(reply, R.DROP_POLICY)),
    )
    yield Case(
        "4a the agent's reset",
        "passes and opens nothing",
        (uplink,),
        (sent(tcp(40000, 53, RST), R.PASS_AGENT, agent, TCP), got(tcp(53, 40000, ACK), R.DROP_POLICY, protocol=TCP)),
    )
    yield Case(
        "7b against the agent's flow",
        "a peer's SYN from the resolver's port is no reply",
        (uplink,),
        (
            sent(tcp(40000, 53), R.PASS_AGENT, agent, TCP),
            got(tcp(53, 40000), R.DROP_POLICY, protocol=TCP),
            got(tcp(53, 40000, SYN | ACK), R.PASS_FLOW, protocol=TCP),
        ),
    )
    yield Case(
        "7c an error about the agent's question",
        "comes back to it, from routers on the way too",
        (uplink,),
        (
            sent(ask, R.PASS_AGENT, agent),
            got(error(3, 3, ip(CLIENT, OTHER, UDP, ask)), R.PASS_RELATED, protocol=ICMP),
            group(2),
            got(error(11, 0, ip(CLIENT, OTHER, UDP, ask)), R.PASS_RELATED, protocol=ICMP, by=ROUTER),
            got(error(3, 3, ip(CLIENT, OTHER, UDP, udp(40001, 53))), R.DROP_UNRELATED, protocol=ICMP),
        ),
    )
    for what, here, there in (("IPv4", container, OTHER), ("IPv6", elsewhere6, OTHER6)):
        yield Case(
            f"4a forwarded, {what}",
            "what the host only carries passes an uplink both ways, DNS too, and leaves no flow there",
            (uplink, rule(DENY, 0, 0), rule(DENY, 0, 0, direction=INGRESS)),
            (
                Sees(EGRESS, frame(here, there, UDP, ask), R.PASS_FORWARDED, forwarded),
                Sees(EGRESS, frame(here, there, TCP, OPENING), R.PASS_FORWARDED, forwarded),
                Sees(EGRESS, frame(here, there, GRE, bytes(8)), R.PASS_FORWARDED, forwarded),
                Sees(INGRESS, frame(there, here, UDP, reply), R.PASS_FORWARDED, forwarded),
                Sees(INGRESS, frame(there, here, TCP, OPENING), R.PASS_FORWARDED, forwarded),
            ),
        )
    yield Case(
        "4a not made by a socket of the host",
        "the same packets from the host itself have a source that is not its own",
        (uplink, *EVERYTHING),
        (Sees(EGRESS, frame(container, OTHER, UDP, ask), R.DROP_SOURCE),),
    )
    for what, protocol, question, answer in (
        ("TCP", TCP, OPENING, OPENED),
        ("UDP", UDP, udp(40000, 443), udp(443, 40000)),
        ("an echo", ICMP, echo(8, 9), echo(0, 9)),
        ("SCTP", SCTP, udp(40000, 443), udp(443, 40000)),
        ("GRE", GRE, bytes(8), bytes(8)),
    ):
        yield Case(
            f"4a masqueraded {what}",
            "what leaves under the host's address comes back to it: replies pass, nothing else; a new policy changes nothing",
            (uplink, rule(DENY, 0, 0), rule(DENY, 0, 0, direction=INGRESS)),
            (
                got(answer, R.DROP_DENY, protocol=protocol, by=PEER),
                sent(question, R.PASS_FORWARDED, forwarded, protocol, PEER),
                got(answer, R.PASS_FLOW, protocol=protocol, by=PEER),
                group(2),
                got(answer, R.PASS_FLOW, protocol=protocol, by=PEER),
                got(answer, R.DROP_POLICY, protocol=protocol, by=OTHER),
            ),
        )
    yield Case(
        "7e the host behind a masqueraded flow",
        "its own sockets gain nothing by it: the same tuple is judged",
        (uplink,),
        (
            sent(OPENING, R.PASS_FORWARDED, forwarded, TCP, PEER),
            sent(SENT, R.DROP_POLICY, protocol=TCP, to=PEER),
            sent(OPENING, R.DROP_POLICY, protocol=TCP, to=PEER),
            got(RECEIVED, R.PASS_FLOW, protocol=TCP, by=PEER),
        ),
    )
    for what, flags, reason in (
        ("an acknowledgement", ACK, R.PASS_FLOW),
        ("an end", FIN | ACK, R.PASS_FLOW),
        ("a reset", RST, R.PASS_FLOW),
        ("a SYN-ACK", SYN | ACK, R.PASS_FLOW),
        ("an opening", SYN, R.DROP_POLICY),
    ):
        yield Case(
            f"7e the end of the agent's connection: {what}",
            "the kernel ends it under the agent's mark when the socket is gone; without mark, or of none, it is judged",
            (uplink,),
            (
                sent(tcp(40000, 443, flags), R.DROP_POLICY, marked, TCP, PEER),
                sent(OPENING, R.PASS_FORWARDED, forwarded, TCP, PEER),
                sent(tcp(40000, 443, flags), R.DROP_POLICY, protocol=TCP, to=PEER),
                sent(tcp(40000, 443, flags), reason, marked, TCP, PEER),
                sent(tcp(40001, 443, flags), R.DROP_POLICY, marked, TCP, PEER),
                got(RECEIVED, R.PASS_FLOW, protocol=TCP, by=PEER),
            ),
        )
    yield Case(
        "7e a datagram under the agent's mark",
        "is the end of nothing",
        (uplink,),
        (sent(ask, R.PASS_FORWARDED, forwarded), sent(ask, R.DROP_POLICY, marked), got(reply, R.PASS_FLOW)),
    )
    yield Case(
        "4a masqueraded fragments",
        "of what is forwarded no fragment is missed; those of the reply follow their first",
        (uplink,),
        (
            Sees(EGRESS, fragment4(CLIENT, PEER, UDP, bytes(16), 3, more=False, number=9), R.PASS_FORWARDED, forwarded),
            Sees(
                EGRESS,
                fragment4(CLIENT, PEER, UDP, udp(4, 443, bytes(16)), 0, more=True, number=9),
                R.PASS_FORWARDED,
                forwarded,
            ),
            Sees(INGRESS, fragment4(PEER, CLIENT, UDP, udp(443, 4, bytes(16)), 0, more=True, number=5), R.PASS_FLOW),
            Sees(INGRESS, fragment4(PEER, CLIENT, UDP, bytes(16), 3, more=False, number=5), R.PASS_FLOW),
            Sees(INGRESS, fragment4(PEER, CLIENT, UDP, bytes(16), 3, more=False, number=6), R.DROP_FRAGMENT),
        ),
    )
    yield Case(
        "4b toward the host",
        "its own address, and what routing does not lead on, are the host's, and judged",
        (uplink, rule(ALLOW, PEERS, TCP, 22, direction=INGRESS)),
        (
            got(tcp(5, 22), R.PASS_POLICY, protocol=TCP, by=PEER),
            got(tcp(5, 23), R.DROP_POLICY, protocol=TCP, by=PEER),
            Sees(INGRESS, frame(PEER, "192.0.2.255", UDP, udp(1, 9)), R.DROP_POLICY),
            Sees(INGRESS, frame(PEER, "192.0.2.250", UDP, udp(1, 9)), R.DROP_POLICY),
        ),
    )
    yield Case(
        "4b to many",
        "multicast and broadcast are the host's, whatever else they are",
        (uplink,),
        (
            Sees(INGRESS, frame(PEER, "255.255.255.255", UDP, udp(1, 9)), R.DROP_POLICY, forwarded),
            Sees(INGRESS, frame(PEER, "224.0.0.251", UDP, udp(5353, 5353)), R.DROP_POLICY, forwarded),
            Sees(INGRESS, frame(PEER6, "ff02::fb", UDP, udp(5353, 5353)), R.DROP_POLICY, forwarded),
            rule(ALLOW, PEERS, UDP, 5353, direction=INGRESS),
            Sees(INGRESS, frame(PEER, "224.0.0.251", UDP, udp(5353, 5353)), R.PASS_POLICY),
        ),
    )
    yield Case(
        "4b behind an interface",
        "there is nothing a veth's workload could route on for us: all of it is judged",
        (),
        (Sees(INGRESS, frame(PEER, elsewhere, UDP, udp(1, 9)), R.DROP_POLICY, forwarded),),
    )
    about = ip(PEER, elsewhere, TCP, OPENED)
    yield Case(
        "4c the host as a router",
        "its errors about what it forwards pass, and go to the sender of it; about what was for the host they need a flow",
        (uplink,),
        (
            sent(error(3, 4, about), R.PASS_FORWARDED, protocol=ICMP, to=PEER),
            sent(error(3, 4, about), R.DROP_UNRELATED, protocol=ICMP, to=OTHER),
            sent(error(3, 3, ip(PEER, CLIENT, UDP, udp(1, 9))), R.DROP_UNRELATED, protocol=ICMP, to=PEER),
            sent(error(2, 0, ip(PEER6, elsewhere6, TCP, OPENED)), R.PASS_FORWARDED, protocol=ICMPV6, to=PEER6),
            sent(error(3, 4, ip(PEER, "224.0.0.1", UDP, DATAGRAM)), R.DROP_UNRELATED, protocol=ICMP, to=PEER),
            endpoint(),
            sent(error(3, 4, about), R.DROP_UNRELATED, protocol=ICMP, to=PEER),
        ),
    )
    yield Case(
        "4 a refusal on an uplink",
        "comes in where the answer would; without our mark it is one from the wire",
        (uplink,),
        (
            got(tcp(443, 40000, RST | ACK), R.PASS_ANSWER, refusal, TCP, PEER),
            got(error(3, 13, ip(CLIENT, PEER, UDP, udp(1, 9))), R.PASS_ANSWER, refusal, ICMP, PEER),
            got(tcp(443, 40000, RST | ACK), R.DROP_POLICY, protocol=TCP, by=PEER),
        ),
    )
    yield Case(
        "5 the host's own packets",
        "of an uplink are judged like anybody's, its own address and all",
        (uplink, rule(ALLOW), rule(REDIRECT, 0, UDP, 53)),
        (
            sent(OPENING, R.PASS_POLICY, protocol=TCP, to=PEER),
            got(OPENED, R.PASS_FLOW, protocol=TCP, by=PEER),
            sent(ask, R.PASS_REDIRECT),
            sent(OPENING, R.DROP_POLICY, protocol=TCP),
            group(2),
            sent(SENT, R.DROP_POLICY, protocol=TCP, to=PEER),
        ),
    )


def _addresses() -> Iterator[Case]:
    for what, source in (
        ("loopback", "127.0.0.1"),
        ("another of loopback", "127.8.9.10"),
        ("none", "0.0.0.0"),
        ("multicast", "224.0.0.1"),
        ("everybody", "255.255.255.255"),
        ("loopback in IPv6", "::1"),
        ("none in IPv6", "::"),
        ("multicast in IPv6", "ff0e::1"),
    ):
        to = CLIENT6 if ":" in source else CLIENT
        yield Case(
            f"5 from {what}",
            "nobody on a wire has this address, whatever is allowed; the endpoint has it neither",
            EVERYTHING,
            (
                Sees(INGRESS, frame(source, to, UDP, DATAGRAM), R.DROP_MARTIAN),
                Sees(EGRESS, frame(source, PEER6 if ":" in source else PEER, UDP, DATAGRAM), R.DROP_SOURCE),
            ),
        )
    for what, destination in (
        ("loopback", "127.0.0.1"),
        ("none", "0.0.0.0"),
        ("loopback in IPv6", "::1"),
        ("none in IPv6", "::"),
    ):
        yield Case(
            f"5 to {what}",
            "a router that took it for its own would hand it to services that believe they are alone",
            EVERYTHING,
            (out(DATAGRAM, R.DROP_MARTIAN, UDP, to=destination), out(tcp(1, 53), R.DROP_MARTIAN, to=destination)),
        )
    yield Case(
        "5 own, and of no wire",
        "a row for such an address does not make it one",
        (*EVERYTHING, owns("127.0.0.1")),
        (Sees(EGRESS, frame("127.0.0.1", PEER, UDP, DATAGRAM), R.DROP_MARTIAN),),
    )
    yield Case(
        "5 neighbours in numbers",
        "what stands beside the addresses of no wire is an address like any other",
        EVERYTHING,
        tuple(
            back(DATAGRAM, R.PASS_POLICY, UDP, by=source)
            for source in ("126.255.255.255", "128.0.0.1", "223.255.255.255", "240.0.0.1", "0.0.0.1", "::2", "fec0::1")
        ),
    )
    yield Case(
        "5 to many",
        "is judged by whom it goes to, and comes back from nobody",
        (rule(ALLOW, MOVED, UDP, 5353), holds("224.0.0.0/4", MOVED), holds("ff00::/8", MOVED)),
        (
            out(udp(5353, 5353), R.PASS_POLICY, UDP, to="224.0.0.251"),
            out(udp(5353, 5353), R.PASS_POLICY, UDP, to="ff02::fb"),
            out(udp(5353, 5354), R.DROP_POLICY, UDP, to="224.0.0.251"),
            out(udp(5353, 5353), R.DROP_POLICY, UDP, to="255.255.255.255"),
        ),
    )
    yield Case(
        "5 to the host itself",
        "is a packet like any other, judged by the host's identity",
        (holds("192.0.2.1", IDENTITY_HOST, scope=0), rule(ALLOW, IDENTITY_HOST, TCP, 22)),
        (
            out(tcp(1, 22), R.PASS_POLICY, to="192.0.2.1"),
            back(tcp(22, 1, SYN | ACK), R.PASS_FLOW, by="192.0.2.1"),
            out(tcp(1, 23), R.DROP_POLICY, to="192.0.2.1"),
            out(echo(8, 1), R.DROP_POLICY, ICMP, to="192.0.2.1"),
        ),
    )
    yield Case(
        "5 an address of another endpoint",
        "is own to the one it is a row of, and to no other",
        (*EVERYTHING, owns("192.0.2.11", number=ANOTHER)),
        (
            Sees(EGRESS, frame("192.0.2.11", PEER, UDP, DATAGRAM), R.DROP_SOURCE),
            endpoint(number=ANOTHER),
            Sees(EGRESS, frame("192.0.2.11", PEER, UDP, DATAGRAM), R.PASS_POLICY),
        ),
    )


FAMILY: Final = (*_neighbours(), *_dhcp(), *_origins(), *_addresses())
