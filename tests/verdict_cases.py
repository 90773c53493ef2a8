"""Stories about packets, each told to all three judges. The numbers are those of bpf/verdict.h.

tests/families goes through what these stories only touch, member by member; TABLE there is all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agent.core.types import (
    IDENTITY_WORLD,
    Direction,
    EndpointValue,
    GroupValue,
    IpcacheKey,
    Orientation,
    OwnAddressKey,
    PolicyKey,
    PolicyValue,
    Prefix,
    Table,
    Verdict,
    Write,
    packed,
)
from agent.datapath.abi import Reason
from agent.datapath.model import Origin
from tests.judges import IFINDEX, Judge, can_run, can_show
from tests.packets import (
    ACK,
    CLIENT,
    CLIENT6,
    FIN,
    GRE,
    ICMP,
    ICMPV6,
    OTHER,
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
    extended,
    fragment4,
    fragment6,
    frame,
    ip,
    neighbour,
    tcp,
    udp,
)

ENDPOINT, GROUP, SCOPE = 5, 1, 1
PEERS, MOVED = 1 << 24, (1 << 24) + 1
EGRESS, INGRESS = Direction.EGRESS, Direction.INGRESS
ALLOW, REDIRECT, DENY = Verdict.ALLOW, Verdict.REDIRECT, Verdict.DENY


def group(number: int = 1, *, egress: bool = True, ingress: bool = True, audit: bool = False) -> Write:
    return Write(Table.GROUPS, GROUP, GroupValue(number, egress, ingress, audit))


def holds(prefix: str, identity: int | None, scope: int = SCOPE) -> Write:
    return Write(Table.IPCACHE, IpcacheKey(scope, Prefix.parse(prefix)), identity)


def rule(
    verdict: Verdict | None,
    identity: int = PEERS,
    protocol: int = TCP,
    port: int = 443,
    *,
    bits: int = 16,
    direction: Direction = EGRESS,
    number: int = 1,
    cookie: int = 0,
) -> Write:
    """One policy row; without protocol, for all of them."""
    key = PolicyKey(number, identity, direction, protocol, port if protocol else 0, bits if protocol else 0)
    return Write(Table.POLICY, key, None if verdict is None else PolicyValue(verdict, cookie))


def endpoint(
    orientation: Orientation = Orientation.BEHIND, *, dhcp: bool = False, silent: bool = False, number: int = ENDPOINT
) -> Write:
    return Write(Table.ENDPOINTS, IFINDEX, EndpointValue(number, GROUP, SCOPE, orientation, dhcp, silent))


def owns(address: str, *, number: int = ENDPOINT) -> Write:
    return Write(Table.OWN_ADDRESSES, OwnAddressKey(number, packed(address)), True)


BASE = (
    endpoint(),
    group(),
    owns(CLIENT),
    owns(CLIENT6),
    holds(PEER, PEERS),
    holds(PEER6, PEERS),
)


@dataclass(frozen=True)
class Sees:
    """A packet, and what becomes of it. vlans: 1 where the card took a tag off."""

    direction: Direction
    frame: bytes
    reason: Reason
    origin: Origin = Origin.WIRE
    vlans: int = 0


@dataclass(frozen=True)
class After:
    seconds: float


@dataclass(frozen=True)
class Case:
    name: str
    promise: str
    rows: tuple[Write, ...]
    steps: tuple[Sees | After | Write, ...] = field(default=())

    @property
    def runs_in_kernel(self) -> bool:
        """A test run has no card that takes tags off."""
        seen = [step for step in self.steps if isinstance(step, Sees)]
        return all(can_run(each.frame) and can_show(each.direction, each.origin) and not each.vlans for each in seen)


def out(payload: bytes, reason: Reason, protocol: int = TCP, *, to: str = PEER) -> Sees:
    return Sees(EGRESS, frame(CLIENT6 if ":" in to else CLIENT, to, protocol, payload), reason)


def back(payload: bytes, reason: Reason, protocol: int = TCP, *, by: str = PEER) -> Sees:
    return Sees(INGRESS, frame(by, CLIENT6 if ":" in by else CLIENT, protocol, payload), reason)


def tell(judge: Judge, case: Case) -> None:
    """Puts a case to a judge; fails at the first packet that gets something else."""
    judge.apply((*BASE, *case.rows))
    for number, step in enumerate(case.steps, start=1):
        if isinstance(step, After):
            judge.advance(step.seconds)
        elif isinstance(step, Write):
            judge.apply([step])
        else:
            got = judge.judge(step.direction, step.frame, step.origin, step.vlans)
            assert got is step.reason, f"{case.name}, step {number}: {got.name} instead of {step.reason.name}"


R = Reason
_SYN, _SYN_ACK = tcp(40000, 443), tcp(443, 40000, SYN | ACK)
_DATA, _ANSWER = tcp(40000, 443, ACK), tcp(443, 40000, ACK)
_ABOUT = ip(CLIENT, PEER, TCP, _SYN[:8])

CASES = (
    Case(
        "1 no endpoint",
        "an interface without a row passes nothing",
        (Write(Table.ENDPOINTS, IFINDEX, None),),
        (out(_SYN, R.DROP_NO_ENDPOINT),),
    ),
    Case(
        "1 no group", "nor does one whose group has no row", (Write(Table.GROUPS, GROUP, None),), (out(_SYN, R.DROP_NO_GROUP),)
    ),
    Case(
        "2 unreadable",
        "what cannot be read in full is dropped, whatever the rules allow",
        (rule(ALLOW, 0, 0),),
        (
            Sees(EGRESS, frame(CLIENT, PEER, TCP, _SYN[:19]), R.DROP_MALFORMED),
            Sees(EGRESS, frame(CLIENT, PEER, UDP, b"1234567"), R.DROP_MALFORMED),
            Sees(EGRESS, ethernet(0x0800, b"\x55" + ip(CLIENT, PEER, TCP, _SYN)[1:]), R.DROP_MALFORMED),
            Sees(EGRESS, ethernet(0x0800, b"\x44" + ip(CLIENT, PEER, TCP, _SYN)[1:]), R.DROP_MALFORMED),
            Sees(EGRESS, ethernet(0x88B5, bytes(40)), R.DROP_ETHERTYPE),
            Sees(EGRESS, ethernet(0x0040, bytes(64)), R.DROP_ETHERTYPE),
            Sees(EGRESS, frame("::ffff:192.0.2.10", PEER6, TCP, _SYN), R.DROP_MALFORMED),
        ),
    ),
    Case(
        "2 extension headers",
        "eight are walked, a ninth is not; nothing behind them is nothing to judge",
        (rule(ALLOW),),
        (
            Sees(EGRESS, extended(CLIENT6, PEER6, [0, 60, 43, 60, 60, 60, 60, 60], TCP, _SYN), R.PASS_POLICY),
            Sees(EGRESS, extended(CLIENT6, PEER6, [0, 60, 43, 60, 60, 60, 60, 60], TCP, tcp(1, 444)), R.DROP_POLICY),
            Sees(EGRESS, extended(CLIENT6, PEER6, [60] * 9, TCP, tcp(2, 443)), R.DROP_EXTENSIONS),
            Sees(EGRESS, frame(CLIENT6, PEER6, 59, b""), R.DROP_EXTENSIONS),
        ),
    ),
    Case(
        "2 VLAN tags",
        "one or two are seen through, a third is not, and DNS inside is not handed over",
        (rule(ALLOW), rule(REDIRECT, 0, UDP, 53)),
        (
            Sees(EGRESS, frame(CLIENT, PEER, TCP, _SYN, 0x8100), R.PASS_POLICY),
            Sees(EGRESS, frame(CLIENT, PEER, TCP, tcp(2, 443), 0x88A8, 0x8100), R.PASS_POLICY),
            Sees(EGRESS, frame(CLIENT, PEER, TCP, tcp(3, 444), 0x88A8, 0x8100), R.DROP_POLICY),
            Sees(EGRESS, frame(CLIENT, PEER, TCP, tcp(4, 443), 0x8100, 0x8100, 0x8100), R.DROP_VLAN),
            Sees(EGRESS, frame(CLIENT, OTHER, UDP, udp(5, 53), 0x8100), R.DROP_VLAN_REDIRECT),
            Sees(EGRESS, frame(CLIENT, OTHER, UDP, udp(5, 53)), R.PASS_REDIRECT),
        ),
    ),
    Case(
        "3 ARP",
        "an endpoint may ask and answer for its own address, and probe with none",
        (),
        (
            Sees(EGRESS, arp(CLIENT, OTHER), R.PASS_NEIGHBOUR),
            Sees(EGRESS, arp("0.0.0.0", CLIENT), R.PASS_NEIGHBOUR),
            Sees(EGRESS, arp(OTHER, OTHER), R.DROP_NEIGHBOUR_CLAIM),
            Sees(INGRESS, arp(OTHER, CLIENT), R.PASS_NEIGHBOUR),
        ),
    ),
    Case(
        "3 neighbour discovery",
        "the same in IPv6; a link-local source is the endpoint's there and nowhere else; it is no router",
        (rule(ALLOW, 0, 0),),
        (
            Sees(EGRESS, neighbour(CLIENT6, "ff02::1", 135), R.PASS_NEIGHBOUR),
            Sees(EGRESS, neighbour("fe80::1", "ff02::1", 135), R.PASS_NEIGHBOUR),
            Sees(EGRESS, neighbour("::", "ff02::1", 135), R.PASS_NEIGHBOUR),
            Sees(EGRESS, neighbour("fe80::1", "ff02::16", 143, hops=1), R.PASS_NEIGHBOUR),
            Sees(EGRESS, neighbour(CLIENT6, "ff02::1", 136, CLIENT6), R.PASS_NEIGHBOUR),
            Sees(EGRESS, neighbour(CLIENT6, "ff02::1", 136, PEER6), R.DROP_NEIGHBOUR_CLAIM),
            Sees(EGRESS, neighbour(PEER6, "ff02::1", 135), R.DROP_NEIGHBOUR_CLAIM),
            Sees(EGRESS, neighbour("fe80::1", "ff02::1", 134), R.DROP_NEIGHBOUR_CLAIM),
            Sees(EGRESS, neighbour("fe80::1", "fe80::2", 137), R.DROP_NEIGHBOUR_CLAIM),
            Sees(INGRESS, neighbour("fe80::1", "ff02::1", 134), R.PASS_NEIGHBOUR),
            Sees(EGRESS, frame("fe80::1", PEER6, TCP, _SYN), R.DROP_SOURCE),
        ),
    ),
    Case(
        "3 neighbour discovery stays on the link",
        "a router would carry it anywhere, with whatever it holds: to a global address off the link it is dropped, both ways",
        (rule(ALLOW, 0, 0),),
        (
            *(
                Sees(EGRESS, neighbour(CLIENT6, PEER6, kind), R.DROP_NEIGHBOUR_CLAIM)
                for kind in (130, 131, 132, 133, 135, 136, 143)
            ),
            *(
                Sees(INGRESS, neighbour(PEER6, CLIENT6, kind, hops=64), R.DROP_NEIGHBOUR_CLAIM)
                for kind in (133, 134, 135, 136, 137)
            ),
            Sees(EGRESS, neighbour(CLIENT6, "ff0e::1", 143, hops=64), R.DROP_NEIGHBOUR_CLAIM),
            Sees(EGRESS, neighbour(CLIENT6, CLIENT6[:-1] + "f", 135), R.PASS_NEIGHBOUR),
            Sees(EGRESS, neighbour(CLIENT6, "fe80::9", 136, CLIENT6), R.PASS_NEIGHBOUR),
            Sees(INGRESS, neighbour(PEER6, CLIENT6, 135, hops=255), R.PASS_NEIGHBOUR),
        ),
    ),
    Case(
        "4 from the agent",
        "what the agent's sockets and the program itself send to the endpoint passes; the other way a mark says nothing",
        (),
        (
            Sees(INGRESS, frame(OTHER, CLIENT, UDP, udp(53, 40000)), R.PASS_AGENT, Origin.AGENT),
            Sees(INGRESS, frame(PEER, CLIENT, TCP, tcp(443, 40000, RST)), R.PASS_ANSWER, Origin.ANSWER),
            Sees(INGRESS, frame(OTHER, CLIENT, UDP, udp(53, 40000)), R.DROP_POLICY),
            Sees(EGRESS, frame(CLIENT, OTHER, UDP, udp(40000, 53)), R.DROP_POLICY, Origin.AGENT),
        ),
    ),
    Case(
        "5 source",
        "a packet with somebody else's source is dropped before any rule is asked",
        (rule(ALLOW, 0, 0),),
        (
            Sees(EGRESS, frame("192.0.2.11", PEER, TCP, _SYN), R.DROP_SOURCE),
            Sees(EGRESS, frame("2001:db8:0:a::11", PEER6, TCP, _SYN), R.DROP_SOURCE),
            Sees(EGRESS, frame("0.0.0.0", PEER, UDP, udp(68, 67)), R.DROP_SOURCE),
        ),
    ),
    Case(
        "6 fragments",
        "later fragments follow their first; one that comes before it, or is of another datagram, is dropped",
        (rule(ALLOW, PEERS, UDP, 53),),
        (
            Sees(EGRESS, fragment4(CLIENT, PEER, UDP, b"x" * 16, 3, more=False, number=9), R.DROP_FRAGMENT),
            Sees(EGRESS, fragment4(CLIENT, PEER, UDP, udp(4, 53, b"x" * 16), 0, more=True, number=9), R.PASS_POLICY),
            Sees(EGRESS, fragment4(CLIENT, PEER, UDP, b"x" * 16, 3, more=False, number=9), R.PASS_FLOW),
            Sees(EGRESS, fragment4(CLIENT, PEER, UDP, b"x" * 16, 3, more=False, number=10), R.DROP_FRAGMENT),
            Sees(EGRESS, fragment4(CLIENT, PEER, UDP, udp(4, 54, b"x" * 16), 0, more=True, number=11), R.DROP_POLICY),
            Sees(EGRESS, fragment4(CLIENT, PEER, UDP, b"x" * 16, 3, more=False, number=11), R.DROP_FRAGMENT),
            Sees(EGRESS, fragment6(CLIENT6, PEER6, UDP, udp(5, 53, b"x" * 16), 0, more=True, number=9), R.PASS_POLICY),
            Sees(EGRESS, fragment6(CLIENT6, PEER6, UDP, b"x" * 16, 3, more=False, number=9), R.PASS_FLOW),
            Sees(EGRESS, fragment6(CLIENT6, PEER6, UDP, udp(6, 53), 0, more=False, number=8), R.PASS_POLICY),
            After(61),
            Sees(EGRESS, fragment4(CLIENT, PEER, UDP, b"x" * 16, 3, more=False, number=9), R.DROP_FRAGMENT),
        ),
    ),
    Case(
        "6 fragments over flags",
        "a fragment that would rewrite the flags of a judged TCP header is dropped; so is neighbour discovery in parts",
        (rule(ALLOW),),
        (
            Sees(EGRESS, fragment4(CLIENT, PEER, TCP, _SYN + b"x" * 4, 0, more=True, number=3), R.PASS_POLICY),
            Sees(EGRESS, fragment4(CLIENT, PEER, TCP, b"x" * 16, 1, more=False, number=3), R.DROP_FRAGMENT),
            Sees(EGRESS, fragment6(CLIENT6, "ff02::1", ICMPV6, b"\x87" + bytes(23), 0, more=True, number=3), R.DROP_FRAGMENT),
        ),
    ),
    Case(
        "6 DNS in fragments",
        "a question in fragments is not handed over",
        (rule(REDIRECT, 0, UDP, 53),),
        (Sees(EGRESS, fragment4(CLIENT, PEER, UDP, udp(4, 53, b"x" * 16), 0, more=True, number=9), R.DROP_FRAGMENT),),
    ),
    Case(
        "7 replies",
        "what answers an allowed packet passes without an ingress rule; what answers another does not",
        (rule(ALLOW),),
        (
            out(_SYN, R.PASS_POLICY),
            back(_SYN_ACK, R.PASS_FLOW),
            out(_DATA, R.PASS_FLOW),
            back(tcp(443, 40001, SYN | ACK), R.DROP_POLICY),
            back(_SYN_ACK, R.DROP_POLICY, by=OTHER),
            back(_SYN_ACK, R.DROP_POLICY, by=PEER6),
        ),
    ),
    Case(
        "7 the address expires",
        "a running flow goes on, a new one does not begin",
        (rule(ALLOW),),
        (
            out(_SYN, R.PASS_POLICY),
            holds(PEER, None),
            out(_DATA, R.PASS_FLOW),
            back(_ANSWER, R.PASS_FLOW),
            out(tcp(40001, 443), R.DROP_POLICY),
        ),
    ),
    Case(
        "7a idle",
        "a flow without packets for a minute, or a connection both sides closed, is no flow",
        (rule(ALLOW, PEERS, UDP, 53), rule(ALLOW)),
        (
            out(udp(4, 53), R.PASS_POLICY, UDP),
            After(59),
            back(udp(53, 4), R.PASS_FLOW, UDP),
            After(61),
            back(udp(53, 4), R.DROP_POLICY, UDP),
            out(_SYN, R.PASS_POLICY),
            back(_SYN_ACK, R.PASS_FLOW),
            After(61),
            back(_SYN_ACK, R.DROP_POLICY),
            out(_SYN, R.PASS_POLICY),
            out(_DATA, R.PASS_FLOW),
            After(600),
            back(_ANSWER, R.PASS_FLOW),
            back(tcp(443, 40000, FIN | ACK), R.PASS_FLOW),
            After(600),
            out(tcp(40000, 443, FIN | ACK), R.PASS_FLOW),
            After(9),
            back(_ANSWER, R.PASS_FLOW),
            After(2),
            back(_ANSWER, R.DROP_POLICY),
            out(_SYN, R.PASS_POLICY),
            out(tcp(40000, 443, RST), R.PASS_FLOW),
            back(tcp(443, 40000, RST), R.PASS_FLOW),
            rule(None),
            out(_DATA, R.PASS_FLOW),
            out(_SYN, R.DROP_POLICY),
            After(11),
            back(_ANSWER, R.DROP_POLICY),
        ),
    ),
    Case(
        "7b a SYN the other way",
        "is not of the flow whose ports it has: it is judged as new, and the flow goes on",
        (rule(ALLOW), rule(ALLOW, 0, TCP, 40001, direction=INGRESS)),
        (
            out(_SYN, R.PASS_POLICY),
            out(tcp(40001, 443), R.PASS_POLICY),
            back(tcp(443, 40000), R.DROP_POLICY),
            back(tcp(443, 40001), R.PASS_POLICY),
            out(_DATA, R.PASS_FLOW),
            back(_ANSWER, R.PASS_FLOW),
        ),
    ),
    Case(
        "7c ICMP errors",
        "about a flow they pass, also from routers on the way; about none, or other messages, they need a rule",
        (rule(ALLOW), rule(ALLOW, PEERS, ICMP, 8)),
        (
            out(_SYN, R.PASS_POLICY),
            back(error(3, 4, _ABOUT), R.PASS_RELATED, ICMP),
            back(error(11, 0, _ABOUT), R.PASS_RELATED, ICMP, by=ROUTER),
            back(error(11, 0, ip(CLIENT, PEER, TCP, tcp(40001, 443)[:8])), R.DROP_UNRELATED, ICMP, by=ROUTER),
            back(error(5, 1, _ABOUT), R.DROP_POLICY, ICMP),
            back(error(3, 1, ip(CLIENT, PEER, ICMP, echo(0, 9))), R.DROP_UNRELATED, ICMP),
            out(echo(8, 9), R.PASS_POLICY, ICMP),
            back(error(11, 0, ip(CLIENT, PEER, ICMP, echo(8, 9))), R.PASS_RELATED, ICMP, by=ROUTER),
            back(error(3, 1, ip(CLIENT, PEER, ICMP, b"\x0d" + bytes(11))), R.DROP_UNRELATED, ICMP),
            out(tcp(40002, 443), R.PASS_POLICY, to=PEER6),
            back(error(2, 0, ip(CLIENT6, PEER6, TCP, tcp(40002, 443))), R.PASS_RELATED, ICMPV6, by=PEER6),
            back(error(2, 0, ip(CLIENT6, PEER6, TCP, tcp(40003, 443))), R.DROP_UNRELATED, ICMPV6, by=PEER6),
            out(error(3, 3, ip(PEER, CLIENT, TCP, _SYN_ACK[:8])), R.PASS_RELATED, ICMP),
            out(error(3, 3, ip(PEER, CLIENT, TCP, _SYN_ACK[:8]) + b"smuggled"), R.DROP_UNRELATED, ICMP, to=OTHER),
            out(error(1, 4, ip(PEER6, CLIENT6, TCP, tcp(443, 40002, SYN | ACK))), R.PASS_RELATED, ICMPV6, to=PEER6),
            out(error(1, 4, ip(PEER6, CLIENT6, TCP, tcp(443, 40002, SYN | ACK))), R.DROP_UNRELATED, ICMPV6, to="2001:db8:9::9"),
        ),
    ),
    Case(
        "7d an ended flow",
        "the peer cannot bring it back, whatever it sends and however long; the endpoint can where it is allowed again",
        (rule(ALLOW), rule(ALLOW, PEERS, UDP, 53), rule(ALLOW, PEERS, TCP, 443, number=3)),
        (
            group(ingress=False),
            out(_SYN, R.PASS_POLICY),
            out(udp(4, 53), R.PASS_POLICY, UDP),
            group(2, ingress=False),
            out(_DATA, R.DROP_POLICY),
            back(_ANSWER, R.DROP_FLOW_ENDED),
            back(tcp(443, 40000), R.DROP_FLOW_ENDED),
            back(error(3, 3, _ABOUT), R.DROP_FLOW_ENDED, ICMP),
            back(udp(53, 4), R.DROP_POLICY, UDP),
            back(udp(53, 4), R.DROP_FLOW_ENDED, UDP),
            out(udp(4, 53), R.DROP_POLICY, UDP),
            After(119),
            back(_ANSWER, R.DROP_FLOW_ENDED),
            After(119),
            back(_ANSWER, R.DROP_FLOW_ENDED),
            out(_SYN, R.DROP_POLICY),
            group(3, ingress=False),
            out(_DATA, R.DROP_FLOW_ENDED),
            out(_SYN, R.PASS_POLICY),
            back(_SYN_ACK, R.PASS_FLOW),
            After(121),
            back(udp(53, 4), R.PASS_POLICY, UDP),
        ),
    ),
    Case(
        "7d the peer's own flow",
        "one the peer had opened it may open anew, where ingress allows it",
        (rule(ALLOW, PEERS, TCP, 22, direction=INGRESS), rule(ALLOW, PEERS, TCP, 22, direction=INGRESS, number=3)),
        (
            back(tcp(5000, 22), R.PASS_POLICY),
            out(tcp(22, 5000, SYN | ACK), R.PASS_FLOW),
            group(2),
            out(tcp(22, 5000, ACK), R.DROP_POLICY),
            back(tcp(5000, 22), R.DROP_POLICY),
            group(3),
            back(tcp(5000, 22, ACK), R.DROP_FLOW_ENDED),
            back(tcp(5000, 22), R.PASS_POLICY),
            out(tcp(22, 5000, SYN | ACK), R.PASS_FLOW),
        ),
    ),
    Case(
        "8 address to identity",
        "the endpoint's scope, its closest prefix; else the static scope; else world",
        (
            rule(ALLOW, MOVED),
            rule(ALLOW, IDENTITY_WORLD, TCP, 80),
            holds("198.51.100.0/24", MOVED, scope=0),
            holds("203.0.113.0/24", MOVED, scope=2),
            holds("2001:db8:0:b::/64", MOVED, scope=0),
        ),
        (
            out(_SYN, R.DROP_POLICY),
            out(_SYN, R.PASS_POLICY, to="198.51.100.8"),
            out(_SYN, R.DROP_POLICY, to=OTHER),
            out(tcp(2, 80), R.PASS_POLICY, to=OTHER),
            out(_SYN, R.PASS_POLICY, to="2001:db8:0:b::8"),
            out(_SYN, R.DROP_POLICY, to=PEER6),
            holds(PEER6, None),
            out(_SYN, R.PASS_POLICY, to=PEER6),
        ),
    ),
    Case(
        "9 the closest row",
        "of one identity the closest block of ports decides, and a row without protocol covers all of them",
        (
            rule(ALLOW, PEERS, TCP, 8000, bits=10),
            rule(DENY, PEERS, TCP, 8005),
            rule(ALLOW, PEERS, UDP, 0, bits=0),
            rule(ALLOW, MOVED, 0),
            holds(OTHER, MOVED),
        ),
        (
            out(tcp(1, 8000), R.PASS_POLICY),
            out(tcp(1, 8063), R.PASS_POLICY),
            out(tcp(1, 8064), R.DROP_POLICY),
            out(tcp(1, 7999), R.DROP_POLICY),
            out(tcp(1, 8005), R.DROP_DENY),
            out(udp(1, 9), R.PASS_POLICY, UDP),
            out(bytes(20), R.PASS_POLICY, SCTP, to=OTHER),
            out(bytes(20), R.PASS_POLICY, GRE, to=OTHER),
            out(bytes(20), R.DROP_POLICY, GRE),
        ),
    ),
    Case(
        "9 the stronger verdict",
        "between the identity's row and anybody's, deny beats redirect beats allow, at every closeness",
        (
            rule(ALLOW, PEERS, TCP, 1),
            rule(DENY, 0, TCP, 1),
            rule(DENY, PEERS, 0),
            rule(ALLOW, 0, TCP, 443),
            rule(REDIRECT, 0, UDP, 53),
            rule(ALLOW, MOVED, 0),
            holds(OTHER, MOVED),
        ),
        (
            out(tcp(1, 1), R.DROP_DENY),
            out(tcp(1, 443), R.DROP_DENY),
            out(udp(1, 53), R.DROP_DENY, UDP),
            out(udp(1, 53), R.PASS_REDIRECT, UDP, to=OTHER),
            out(tcp(1, 443), R.PASS_POLICY, to=OTHER),
            out(tcp(1, 1), R.DROP_DENY, to=OTHER),
        ),
    ),
    Case(
        "9 default allow",
        "without default deny what no row names passes; denials and redirects hold all the same",
        (rule(DENY, PEERS, TCP, 25), rule(REDIRECT, 0, UDP, 53), rule(DENY, PEERS, TCP, 22, direction=INGRESS)),
        (
            group(egress=False, ingress=False),
            out(_SYN, R.PASS_POLICY),
            out(tcp(1, 25), R.DROP_DENY),
            out(udp(1, 53), R.PASS_REDIRECT, UDP),
            back(tcp(5000, 80), R.PASS_POLICY),
            back(tcp(5000, 22), R.DROP_DENY),
        ),
    ),
    Case(
        "9 redirect",
        "leaves no flow: the next packet is redirected as well, and an answer from the wire is none; never toward the endpoint",
        (
            rule(REDIRECT, 0, TCP, 53),
            rule(REDIRECT, 0, UDP, 53),
            rule(REDIRECT, 0, UDP, 54, direction=INGRESS),
            rule(REDIRECT, 0, SCTP, 53),
        ),
        (
            out(udp(4, 53), R.PASS_REDIRECT, UDP),
            back(udp(53, 4), R.DROP_POLICY, UDP),
            out(tcp(4, 53), R.PASS_REDIRECT),
            out(tcp(4, 53, ACK), R.PASS_REDIRECT),
            out(tcp(4, 53), R.PASS_REDIRECT, to=PEER6),
            back(udp(9, 54), R.DROP_POLICY, UDP),
            out(udp(4, 53), R.DROP_NOT_FOR_GATE, SCTP),
        ),
    ),
    Case(
        "10 who opens",
        "toward the endpoint only a SYN or a datagram; a reset opens nothing, from either side",
        (rule(ALLOW, 0, TCP, 80, direction=INGRESS), rule(ALLOW, 0, UDP, 80, direction=INGRESS), rule(ALLOW)),
        (
            back(tcp(5000, 80, ACK), R.PASS_POLICY),
            out(tcp(80, 5000, ACK), R.DROP_POLICY),
            back(tcp(5000, 80), R.PASS_POLICY),
            out(tcp(80, 5000, SYN | ACK), R.PASS_FLOW),
            back(udp(5000, 80), R.PASS_POLICY, UDP),
            out(udp(80, 5000), R.PASS_FLOW, UDP),
            out(tcp(40000, 443, RST), R.PASS_POLICY),
            back(_ANSWER, R.DROP_POLICY),
            out(_DATA, R.PASS_POLICY),
            back(_ANSWER, R.PASS_FLOW),
        ),
    ),
    Case(
        "10 ping",
        "an echo is a flow by its number, judged by its type; other messages are judged one by one",
        (rule(ALLOW, PEERS, ICMP, 8), rule(ALLOW, PEERS, ICMPV6, 128), rule(ALLOW, PEERS, ICMP, 13)),
        (
            out(echo(8, 77), R.PASS_POLICY, ICMP),
            back(echo(0, 77), R.PASS_FLOW, ICMP),
            back(echo(0, 78), R.DROP_POLICY, ICMP),
            back(echo(0, 77), R.DROP_POLICY, ICMP, by=OTHER),
            back(echo(8, 5), R.DROP_POLICY, ICMP),
            out(echo(128, 77), R.PASS_POLICY, ICMPV6, to=PEER6),
            back(echo(129, 77), R.PASS_FLOW, ICMPV6, by=PEER6),
            out(echo(13, 77), R.PASS_POLICY, ICMP),
            back(echo(14, 77), R.DROP_POLICY, ICMP),
        ),
    ),
    Case(
        "11 judged again",
        "in another set a flow goes on by the address's present identity or by the one it remembers",
        (
            rule(ALLOW),
            rule(ALLOW, PEERS, number=2),
            rule(ALLOW, MOVED, number=3),
            rule(DENY, PEERS, number=4),
            rule(ALLOW, MOVED, number=4),
        ),
        (
            out(_SYN, R.PASS_POLICY),
            holds(PEER, MOVED),
            group(2),
            back(_ANSWER, R.PASS_FLOW),
            out(_DATA, R.PASS_FLOW),
            group(3),
            out(_DATA, R.PASS_FLOW),
            holds(PEER, PEERS),
            group(4),
            out(_DATA, R.DROP_DENY),
            out(_DATA, R.DROP_DENY),
            back(_ANSWER, R.DROP_FLOW_ENDED),
        ),
    ),
    Case(
        "11 a denial of the remembered identity",
        "ends the flow although the address has another identity by now",
        (rule(ALLOW), rule(DENY, PEERS, number=2), rule(ALLOW, MOVED, number=2)),
        (out(_SYN, R.PASS_POLICY), holds(PEER, MOVED), group(2), out(_DATA, R.DROP_DENY), back(_ANSWER, R.DROP_FLOW_ENDED)),
    ),
    Case(
        "11 by its own direction",
        "a flow is judged in the direction in which it was opened, by its opener's port, whichever side speaks",
        (
            rule(ALLOW, PEERS, TCP, 22, direction=INGRESS),
            rule(ALLOW, PEERS, TCP, 22, direction=INGRESS, number=2),
            rule(ALLOW, PEERS, TCP, 5000, number=3),
        ),
        (
            back(tcp(5000, 22), R.PASS_POLICY),
            group(2),
            out(tcp(22, 5000, SYN | ACK), R.PASS_FLOW),
            group(3),
            out(tcp(22, 5000, ACK), R.DROP_POLICY),
        ),
    ),
    Case(
        "11 now redirected",
        "a flow whose port is intercepted from now on ends, and its next packet goes to the proxy",
        (rule(ALLOW, PEERS, UDP, 53), rule(REDIRECT, PEERS, UDP, 53, number=2)),
        (
            out(udp(4, 53), R.PASS_POLICY, UDP),
            group(2, ingress=False),
            out(udp(4, 53), R.PASS_REDIRECT, UDP),
            back(udp(53, 4), R.DROP_FLOW_ENDED, UDP),
            out(udp(4, 53), R.PASS_REDIRECT, UDP),
        ),
    ),
    Case(
        "11 default allow",
        "a flow no row of the new set names goes on where the direction is open, and ends where it is not",
        (rule(ALLOW),),
        (out(_SYN, R.PASS_POLICY), group(2, egress=False), out(_DATA, R.PASS_FLOW), group(3), out(_DATA, R.DROP_POLICY)),
    ),
    Case(
        "12 audit",
        "lets pass what would be dropped, with its answers; when it ends, so do they",
        (rule(ALLOW, PEERS, TCP, 80),),
        (
            group(audit=True),
            out(_SYN, R.PASS_AUDIT),
            back(_SYN_ACK, R.PASS_AUDIT),
            out(tcp(2, 80), R.PASS_POLICY),
            back(tcp(80, 2, SYN | ACK), R.PASS_FLOW),
            Sees(EGRESS, frame("192.0.2.11", PEER, TCP, _SYN), R.PASS_AUDIT),
            back(error(3, 3, _ABOUT), R.PASS_AUDIT, ICMP),
            group(2, audit=True),
            back(_ANSWER, R.PASS_AUDIT),
            back(tcp(80, 2, ACK), R.PASS_AUDIT),
            group(2),
            out(_DATA, R.DROP_POLICY),
            back(_ANSWER, R.DROP_FLOW_ENDED),
            back(tcp(80, 2, ACK), R.DROP_POLICY),
        ),
    ),
)
