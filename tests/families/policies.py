"""8, 9 and 12. What the rows say, the limit on questions, and the audit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

from agent.core.types import Verdict, Write
from agent.datapath.abi import Reason
from tests.families.vocabulary import (
    ANOTHER,
    DATAGRAM,
    OPENING,
    R,
    sent_frame,
)
from tests.judges import QUESTION_BURST
from tests.packets import (
    ACK,
    CLIENT,
    CLIENT6,
    FIN,
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
    error,
    ethernet,
    fragment4,
    frame,
    ip,
    optioned,
    tcp,
    udp,
)
from tests.verdict_cases import (
    ALLOW,
    DENY,
    EGRESS,
    INGRESS,
    PEERS,
    REDIRECT,
    After,
    Case,
    Sees,
    back,
    endpoint,
    group,
    out,
    owns,
    rule,
)


def _icmp_types() -> Iterator[Case]:
    for number, protocol, is_v6 in [(t, ICMP, False) for t in (0, 4, 5, 8, 9, 10, 13, 14, 15, 17, 18, 30, 42, 253)] + [
        (t, ICMPV6, True) for t in (100, 127, 128, 129, 138, 139, 140, 141, 144, 148, 151, 160, 200)
    ]:
        message = bytes([number]) + bytes(19)
        is_echo = number in ({128, 129} if is_v6 else {0, 8})
        again = R.PASS_FLOW if is_echo else R.PASS_POLICY
        yield Case(
            f"9 {'ICMPv6' if is_v6 else 'ICMP'} type {number}",
            "is judged by its type, in its direction; only an echo leaves a flow",
            (rule(ALLOW, PEERS, protocol, number),),
            (
                out(message, R.PASS_POLICY, protocol, to=PEER6 if is_v6 else PEER),
                out(message, again, protocol, to=PEER6 if is_v6 else PEER),
                back(message, R.PASS_FLOW if is_echo else R.DROP_POLICY, protocol, by=PEER6 if is_v6 else PEER),
                out(message, R.DROP_POLICY, protocol, to=OTHER6 if is_v6 else OTHER),
                rule(DENY, PEERS, protocol, number, number=2),
                group(2),
                out(message, R.DROP_DENY, protocol, to=PEER6 if is_v6 else PEER),
            ),
        )


def _protocols() -> Iterator[Case]:
    for what, number, is_v6 in (
        ("IGMP", 2, False),
        ("IPv4 in IPv4", 4, False),
        ("IPv6 in IPv4", 41, False),
        ("GRE", 47, False),
        ("ESP", 50, False),
        ("AH in IPv4", 51, False),
        ("OSPF", 89, False),
        ("VRRP", 112, False),
        ("L2TP", 115, False),
        ("UDP-Lite", 136, False),
        ("an experiment", 253, False),
        ("GRE in IPv6", 47, True),
        ("ESP in IPv6", 50, True),
        ("IPv4 in IPv6", 4, True),
        ("OSPF in IPv6", 89, True),
    ):
        peer = PEER6 if is_v6 else PEER
        payload = OPENING  # what looks like ports is none
        yield Case(
            f"9 protocol {what}",
            "has no ports, whatever it holds: a rule for ports says nothing of it, a rule for the network does",
            (rule(ALLOW), rule(ALLOW, PEERS, UDP, 0, bits=0)),
            (
                out(payload, R.DROP_POLICY, number, to=peer),
                rule(ALLOW, PEERS, 0),
                out(payload, R.PASS_POLICY, number, to=peer),
                back(payload, R.PASS_FLOW, number, by=peer),
                rule(None, PEERS, 0),
                rule(ALLOW, PEERS, number, 0, bits=0, number=2),
                group(2),
                out(payload, R.PASS_FLOW, number, to=peer),
            ),
        )


def _strengths() -> Iterator[Case]:
    verdicts: tuple[Verdict | None, ...] = (None, ALLOW, REDIRECT, DENY)
    egress = {None: R.DROP_POLICY, ALLOW: R.PASS_POLICY, REDIRECT: R.PASS_REDIRECT, DENY: R.DROP_DENY}
    ingress = {**egress, REDIRECT: R.DROP_POLICY}
    for own, anybodys in itertools.product(verdicts, verdicts):
        strongest = max(own, anybodys, key=lambda verdict: verdict or 0)
        words = [verdict.name.lower() if verdict else "nothing" for verdict in (own, anybodys)]
        yield Case(
            f"9 {words[0]} of the identity, {words[1]} of anybody",
            "the stronger holds, in each direction and at every closeness; toward the endpoint nothing is redirected",
            (
                rule(own),
                rule(anybodys, 0),
                rule(own, PEERS, TCP, 0, bits=0, direction=INGRESS),
                rule(anybodys, 0, TCP, 22, direction=INGRESS),
            ),
            (out(OPENING, egress[strongest]), back(tcp(5, 22), ingress[strongest])),
        )


def _blocks() -> Iterator[Case]:
    for bits in range(17):
        first = 0x5A5A >> (16 - bits) << (16 - bits)
        last = first + (1 << (16 - bits)) - 1
        steps = [out(udp(1, port), R.PASS_POLICY, UDP) for port in {first, last}]
        steps += [out(udp(2, port), R.DROP_POLICY, UDP) for port in (first - 1, last + 1) if 0 <= port <= 0xFFFF]
        yield Case(
            f"9 a block of {1 << (16 - bits)} ports",
            "covers its first and its last port, and not those beside it",
            (rule(ALLOW, PEERS, UDP, first, bits=bits),),
            tuple(steps),
        )


def _questions() -> Iterator[Case]:
    rows = (rule(REDIRECT, 0, UDP, 53), rule(REDIRECT, 0, TCP, 53))
    ask, connect = out(udp(4, 53), R.PASS_REDIRECT, UDP), out(tcp(4, 53), R.PASS_REDIRECT)
    too_many, no_connect = out(udp(4, 53), R.DROP_QUESTION_LIMIT, UDP), out(tcp(4, 53), R.DROP_QUESTION_LIMIT)
    members: tuple[tuple[str, str, tuple[Sees | After | Write, ...]], ...] = (
        ("a burst", "passes to the last question, and no further", (ask,) * QUESTION_BURST + (too_many, too_many)),
        (
            "over time",
            "one more each second, and after a pause a burst again, not two",
            (
                *(ask,) * QUESTION_BURST,
                *(too_many, After(1), ask, too_many, After(3), ask, ask, ask, too_many, After(10_000)),
                *(ask,) * QUESTION_BURST,
                too_many,
            ),
        ),
        ("both transports", "have one limit", (ask, connect) * (QUESTION_BURST // 2) + (too_many, no_connect)),
        (
            "an open connection",
            "is counted once, when it begins",
            (connect,) * QUESTION_BURST
            + (out(tcp(4, 53, ACK), R.PASS_REDIRECT), out(tcp(4, 53, FIN | ACK), R.PASS_REDIRECT), no_connect),
        ),
        (
            "what is no question",
            "does not count: another port, a denied server, a fragment",
            (ask,) * (QUESTION_BURST - 1)
            + (
                rule(DENY, PEERS, UDP, 54),
                out(udp(4, 54), R.DROP_DENY, UDP),
                Sees(EGRESS, fragment4(CLIENT, PEER, UDP, udp(4, 53, bytes(8)), 0, more=True, number=1), R.DROP_FRAGMENT),
                Sees(EGRESS, frame(CLIENT, PEER, UDP, udp(4, 53), 0x8100), R.DROP_VLAN_REDIRECT),
                ask,
                too_many,
            ),
        ),
        (
            "another endpoint",
            "has a limit of its own",
            (ask,) * QUESTION_BURST
            + (too_many, owns(CLIENT, number=ANOTHER), endpoint(number=ANOTHER), ask, endpoint(), too_many),
        ),
        (
            "audit",
            "lets pass what is over the limit",
            (ask,) * QUESTION_BURST + (group(audit=True), out(udp(4, 53), R.PASS_AUDIT, UDP)),
        ),
        (
            "a flow of before",
            "that is redirected from now on counts as well",
            (
                *(ask,) * QUESTION_BURST,
                rule(ALLOW, 0, UDP, 53, number=2),
                rule(REDIRECT, 0, UDP, 53, number=3),
                group(2),
                out(udp(4, 53), R.PASS_POLICY, UDP),
                group(3),
                too_many,
            ),
        ),
    )
    for what, promise, steps in members:
        yield Case(f"9a {what}", promise, rows, steps)


def _audit() -> Iterator[Case]:
    for reason, whole in (
        (R.DROP_SOURCE, frame("192.0.2.11", PEER, UDP, DATAGRAM)),
        (R.DROP_NEIGHBOUR_CLAIM, arp(OTHER, OTHER)),
        (R.DROP_ETHERTYPE, ethernet(0x88CC, bytes(46))),
        (R.DROP_VLAN, frame(CLIENT, PEER, UDP, DATAGRAM, 0x8100, 0x8100, 0x8100)),
        (R.DROP_VLAN_REDIRECT, frame(CLIENT, OTHER, UDP, udp(4, 53), 0x8100)),
        (R.DROP_MALFORMED, sent_frame(DATAGRAM[:7], UDP)),
        (R.DROP_EXTENSIONS, frame(CLIENT6, PEER6, 59, b"")),
        (R.DROP_FRAGMENT, fragment4(CLIENT, PEER, UDP, bytes(8), 3, more=False, number=1)),
        (R.DROP_POLICY, sent_frame(DATAGRAM, UDP)),
        (R.DROP_DENY, sent_frame(tcp(1, 25), TCP)),
        (R.DROP_UNRELATED, sent_frame(error(3, 3, ip(PEER, CLIENT, UDP, DATAGRAM)), ICMP)),
        (R.DROP_NOT_FOR_GATE, frame(CLIENT, OTHER, SCTP, udp(4, 53))),
        (R.DROP_SOURCE_ROUTE, optioned(CLIENT, PEER, UDP, DATAGRAM, b"\x83\x07\x04" + bytes(4))),
        (R.DROP_MARTIAN, frame(CLIENT, "127.0.0.1", UDP, DATAGRAM)),
    ):
        yield Case(
            f"12 {reason.text}",
            "is dropped for this reason, under audit passes, and after it is dropped again",
            (rule(DENY, 0, TCP, 25), rule(REDIRECT, 0, UDP, 53), rule(REDIRECT, 0, SCTP, 53)),
            (
                Sees(EGRESS, whole, reason),
                group(audit=True),
                Sees(EGRESS, whole, R.PASS_AUDIT),
                group(2),
                *_after_audit(whole, reason),
            ),
        )


def _after_audit(whole: bytes, reason: Reason) -> tuple[Write | Sees, ...]:
    """In another set: its rows are written again, so that a denial is one there too."""
    rows = (rule(DENY, 0, TCP, 25, number=2), rule(REDIRECT, 0, UDP, 53, number=2), rule(REDIRECT, 0, SCTP, 53, number=2))
    return (*rows, Sees(EGRESS, whole, reason))


FAMILY: Final = (*_icmp_types(), *_protocols(), *_strengths(), *_blocks(), *_questions(), *_audit())
