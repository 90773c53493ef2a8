"""7, 10 and 11. What a packet belongs to, how long, and what a new policy makes of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

from agent.core.types import Verdict, Write
from tests.families.vocabulary import (
    DATAGRAM,
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
    PEER,
    PEER6,
    PUSH,
    ROUTER,
    RST,
    SCTP,
    SYN,
    TCP,
    UDP,
    echo,
    error,
    extended,
    fragment4,
    fragment6,
    frame,
    ip,
    tcp,
    udp,
)
from tests.verdict_cases import (
    ALLOW,
    DENY,
    INGRESS,
    MOVED,
    PEERS,
    REDIRECT,
    After,
    Case,
    Sees,
    back,
    group,
    holds,
    out,
    rule,
)


def _ages() -> Iterator[Case]:
    open_out = (rule(ALLOW), rule(ALLOW, PEERS, UDP, 443), rule(ALLOW, PEERS, SCTP, 443), rule(ALLOW, PEERS, 0))
    init, abort, complete = (udp(4, 443) + bytes([kind]) + bytes(3) for kind in (1, 6, 14))
    init, abort, complete = (patched(each, 12, bytes([kind])) for each, kind in ((init, 1), (abort, 6), (complete, 14)))
    peers_abort, reply = patched(udp(443, 4), 12, b"\6"), udp(443, 4)
    fin, peers_fin = tcp(40000, 443, FIN | ACK), tcp(443, 40000, FIN | ACK)
    reset, peers_reset = tcp(40000, 443, RST), tcp(443, 40000, RST | ACK)
    for what, promise, steps in (
        ("TCP, opening", "a minute", (out(OPENING, R.PASS_POLICY), After(61), back(OPENED, R.DROP_POLICY))),
        (
            "TCP, opened",
            "hours",
            (
                out(OPENING, R.PASS_POLICY),
                back(OPENED, R.PASS_FLOW),
                out(SENT, R.PASS_FLOW),
                After(3_600),
                back(RECEIVED, R.PASS_FLOW),
            ),
        ),
        (
            "TCP, closed by one side",
            "is open: the other may have much to say",
            (
                out(OPENING, R.PASS_POLICY),
                out(fin, R.PASS_FLOW),
                After(3_600),
                back(RECEIVED, R.PASS_FLOW),
                out(SENT, R.PASS_FLOW),
            ),
        ),
        (
            "TCP, closed by both sides",
            "ten seconds for the last acknowledgement, however much still comes",
            (
                out(OPENING, R.PASS_POLICY),
                out(fin, R.PASS_FLOW),
                back(peers_fin, R.PASS_FLOW),
                After(6),
                out(SENT, R.PASS_FLOW),
                After(6),
                back(RECEIVED, R.DROP_POLICY),
            ),
        ),
        (
            "TCP, reset by the peer",
            "closes that side: a reset that nobody believed must not cut a connection",
            (out(OPENING, R.PASS_POLICY), back(peers_reset, R.PASS_FLOW), After(3_600), back(RECEIVED, R.PASS_FLOW)),
        ),
        (
            "TCP, reset by both sides",
            "ten seconds",
            (
                out(OPENING, R.PASS_POLICY),
                back(peers_reset, R.PASS_FLOW),
                out(reset, R.PASS_FLOW),
                After(11),
                back(RECEIVED, R.DROP_POLICY),
            ),
        ),
        (
            "TCP, opened anew with the same ports",
            "a SYN after both sides closed begins another connection, which is judged",
            (
                out(OPENING, R.PASS_POLICY),
                out(fin, R.PASS_FLOW),
                back(peers_fin, R.PASS_FLOW),
                out(OPENING, R.PASS_POLICY),
                After(30),
                back(OPENED, R.PASS_FLOW),
            ),
        ),
        (
            "TCP, opened anew while it is in use",
            "is another connection; a SYN that only comes twice, before there was an answer, is not",
            (
                out(OPENING, R.PASS_POLICY),
                back(OPENED, R.PASS_FLOW),
                out(OPENING, R.PASS_FLOW),
                out(SENT, R.PASS_FLOW),
                holds(PEER, None),
                out(OPENING, R.DROP_POLICY),
                out(SENT, R.PASS_FLOW),
                back(RECEIVED, R.PASS_FLOW),
                holds(PEER, PEERS),
                out(OPENING, R.PASS_POLICY),
                back(RECEIVED, R.PASS_FLOW),
            ),
        ),
        ("UDP", "a minute", (out(DATAGRAM, R.PASS_POLICY, UDP), After(61), back(reply, R.DROP_POLICY, UDP))),
        (
            "UDP, kept up by the peer",
            "a minute after the last packet of either side",
            (
                out(DATAGRAM, R.PASS_POLICY, UDP),
                After(50),
                back(reply, R.PASS_FLOW, UDP),
                After(50),
                back(reply, R.PASS_FLOW, UDP),
            ),
        ),
        ("an echo", "a minute", (out(echo(8, 1), R.PASS_POLICY, ICMP), After(61), back(echo(0, 1), R.DROP_POLICY, ICMP))),
        ("another protocol", "a minute", (out(bytes(8), R.PASS_POLICY, GRE), After(61), back(bytes(8), R.DROP_POLICY, GRE))),
        ("SCTP, opening", "a minute", (out(init, R.PASS_POLICY, SCTP), After(61), back(reply, R.DROP_POLICY, SCTP))),
        (
            "SCTP, opened",
            "hours, once both sides have spoken",
            (out(init, R.PASS_POLICY, SCTP), back(reply, R.PASS_FLOW, SCTP), After(3_600), back(reply, R.PASS_FLOW, SCTP)),
        ),
        (
            "SCTP, aborted",
            "is over at once for both sides",
            (out(init, R.PASS_POLICY, SCTP), back(peers_abort, R.PASS_FLOW, SCTP), back(reply, R.DROP_POLICY, SCTP)),
        ),
        (
            "SCTP, shut down",
            "is over with the last of its three messages",
            (
                out(init, R.PASS_POLICY, SCTP),
                back(reply, R.PASS_FLOW, SCTP),
                out(complete, R.PASS_FLOW, SCTP),
                back(reply, R.DROP_POLICY, SCTP),
                out(abort, R.PASS_POLICY, SCTP),
            ),
        ),
        (
            "ended",
            "two minutes without a packet, and the peer's count",
            (
                group(ingress=False),
                out(DATAGRAM, R.PASS_POLICY, UDP),
                group(2, ingress=False),
                out(DATAGRAM, R.DROP_POLICY, UDP),
                After(110),
                back(reply, R.DROP_FLOW_ENDED, UDP),
                After(110),
                back(reply, R.DROP_FLOW_ENDED, UDP),
                After(121),
                back(reply, R.PASS_POLICY, UDP),
            ),
        ),
    ):
        yield Case(f"7a {what}", f"{what}: {promise}", open_out, steps)


def _tcp_flags() -> Iterator[Case]:
    rows = (rule(ALLOW), rule(ALLOW, 0, TCP, 22, direction=INGRESS))
    for what, flags, opens_out, opens_in in (
        ("SYN", SYN, True, True),
        ("SYN with congestion flags", SYN | 0xC0, True, True),
        ("SYN with data pushed", SYN | PUSH, True, True),
        ("SYN-ACK", SYN | ACK, True, False),
        ("ACK", ACK, True, False),
        ("FIN", FIN | ACK, True, False),
        ("SYN and FIN", SYN | FIN, True, False),
        ("no flag", 0, True, False),
        ("every flag", 0xFF, False, False),
        ("reset", RST, False, False),
        ("reset and ACK", RST | ACK, False, False),
        ("SYN and reset", SYN | RST, False, False),
    ):
        yield Case(
            f"10 TCP: {what}",
            "may pass where a rule allows it; a flow is opened by what is no reset, toward the endpoint only by a SYN",
            rows,
            (
                out(tcp(40000, 443, flags), R.PASS_POLICY),
                back(RECEIVED, R.PASS_FLOW if opens_out else R.DROP_POLICY),
                back(tcp(5000, 22, flags), R.PASS_POLICY),
                out(tcp(22, 5000, ACK), R.PASS_FLOW if opens_in else R.DROP_POLICY),
            ),
        )


def _cut_by_length(whole: bytes) -> bytes:
    """A packet whose own length leaves out its last 20 octets, which are padding then."""
    at = 16 if whole[12:14] == b"\x08\x00" else 18
    return whole[:at] + (int.from_bytes(whole[at : at + 2], "big") - 20).to_bytes(2, "big") + whole[at + 2 :]


def _icmp_errors() -> Iterator[Case]:
    for is_v6 in (False, True):
        client, peer, protocol = (CLIENT6, PEER6, ICMPV6) if is_v6 else (CLIENT, PEER, ICMP)
        router = "2001:db8:0:e::1" if is_v6 else ROUTER
        ping, pong = (128, 129) if is_v6 else (8, 0)
        for what, inner, sent, other in (
            ("TCP", TCP, OPENING, tcp(40001, 443)),
            ("UDP", UDP, DATAGRAM, udp(5, 443)),
            ("SCTP", SCTP, udp(4, 443), udp(5, 443)),
            ("an echo", protocol, echo(ping, 3), echo(ping, 4)),
            ("GRE", GRE, bytes(8), None),
        ):
            rows = (rule(ALLOW, PEERS, 0),)
            kind = 1 if is_v6 else 3
            steps: list[Sees | Write] = [
                back(error(kind, 0, ip(client, peer, inner, sent)), R.DROP_UNRELATED, protocol, by=router),
                out(sent, R.PASS_POLICY, inner, to=peer),
                back(error(kind, 0, ip(client, peer, inner, sent)), R.PASS_RELATED, protocol, by=peer),
                back(error(kind, 0, ip(client, peer, inner, sent[:8])), R.PASS_RELATED, protocol, by=router),
                back(error(kind, 0, ip(client, router, inner, sent)), R.DROP_UNRELATED, protocol, by=router),
                back(error(kind, 0, ip(peer, client, inner, sent)), R.DROP_UNRELATED, protocol, by=peer),
            ]
            if other is not None:
                steps.append(back(error(kind, 0, ip(client, peer, inner, other)), R.DROP_UNRELATED, protocol, by=router))
                steps.append(back(error(kind, 0, ip(client, peer, inner, sent[:3])), R.DROP_MALFORMED, protocol, by=router))
            steps += [group(2), back(error(kind, 0, ip(client, peer, inner, sent)), R.DROP_POLICY, protocol, by=router)]
            yield Case(
                f"7c {'v6' if is_v6 else 'v4'}: an error about {what}",
                "passes while what it is about is a flow, from whoever met the packet; it ends with it",
                rows,
                tuple(steps),
            )
        for kind, code, what in (
            ((1, 0, "unreachable"), (2, 0, "too big"), (3, 0, "time exceeded"), (4, 1, "bad parameter"))
            if is_v6
            else ((3, 4, "needs fragments"), (11, 0, "time exceeded"), (12, 0, "bad parameter"))
        ):
            yield Case(
                f"7c {'v6' if is_v6 else 'v4'}: {what}",
                "comes back about what was sent, and goes out about what was received",
                (rule(ALLOW),),
                (
                    out(OPENING, R.PASS_POLICY, to=peer),
                    back(error(kind, code, ip(client, peer, TCP, OPENING)), R.PASS_RELATED, protocol, by=router),
                    out(error(kind, code, ip(peer, client, TCP, OPENED)), R.PASS_RELATED, protocol, to=peer),
                    out(error(kind, code, ip(peer, client, TCP, OPENED)), R.DROP_UNRELATED, protocol, to=router),
                ),
            )
        whole = error(1 if is_v6 else 3, 0, ip(client, peer, TCP, OPENING))
        yield Case(
            f"7c {'v6' if is_v6 else 'v4'}: an error without what it is about",
            "is about nothing",
            (rule(ALLOW),),
            (
                out(OPENING, R.PASS_POLICY, to=peer),
                back(whole[:8], R.DROP_MALFORMED, protocol, by=peer),
                Sees(INGRESS, _cut_by_length(frame(peer, client, protocol, whole)), R.DROP_MALFORMED),
                back(whole[: 8 + 19], R.DROP_MALFORMED, protocol, by=peer),
                back(patched(whole, 8, b"\x55"), R.DROP_MALFORMED, protocol, by=peer),
            ),
        )
        yield Case(
            f"7c {'v6' if is_v6 else 'v4'}: an error about an error",
            "is about no flow (RFC 1122 3.2.2)",
            (rule(ALLOW), rule(ALLOW, PEERS, protocol, pong)),
            (
                out(OPENING, R.PASS_POLICY, to=peer),
                back(error(1 if is_v6 else 3, 0, ip(client, peer, protocol, whole)), R.DROP_UNRELATED, protocol, by=peer),
            ),
        )
    later = fragment4(CLIENT, PEER, TCP, bytes(16), 3, more=False, number=1)[14:]
    later6 = fragment6(CLIENT6, PEER6, TCP, bytes(16), 3, more=False, number=1)[14:]
    behind = extended(CLIENT6, PEER6, [0, 60], TCP, OPENING)[14:]
    yield Case(
        "7c an error about a later fragment",
        "does not say of which flow it was",
        (rule(ALLOW),),
        (
            out(OPENING, R.PASS_POLICY),
            out(OPENING, R.PASS_POLICY, to=PEER6),
            back(error(3, 4, later), R.DROP_UNRELATED, ICMP),
            back(error(2, 0, later6), R.DROP_UNRELATED, ICMPV6, by=PEER6),
        ),
    )
    yield Case(
        "7c an error about a packet with extension headers",
        "finds its ports behind them, as the packet did",
        (rule(ALLOW),),
        (out(OPENING, R.PASS_POLICY, to=PEER6), back(error(2, 0, behind), R.PASS_RELATED, ICMPV6, by=PEER6)),
    )


def _again() -> Iterator[Case]:
    verdicts: tuple[Verdict | None, ...] = (None, ALLOW, REDIRECT, DENY)
    becomes = {None: R.DROP_POLICY, ALLOW: R.PASS_FLOW, REDIRECT: R.PASS_REDIRECT, DENY: R.DROP_DENY}
    for present, remembered in itertools.product(verdicts, verdicts):
        strongest = max(present, remembered, key=lambda verdict: verdict or 0)
        words = [verdict.name.lower() if verdict else "nothing" for verdict in (present, remembered)]
        later = R.PASS_FLOW if strongest is ALLOW else R.DROP_FLOW_ENDED
        yield Case(
            f"11 {words[0]} of the present identity, {words[1]} of the remembered",
            "the stronger of the two decides what becomes of the flow; the peer hears of it",
            (rule(ALLOW), rule(present, MOVED, number=2), rule(remembered, PEERS, number=2)),
            (out(OPENING, R.PASS_POLICY), holds(PEER, MOVED), group(2), out(SENT, becomes[strongest]), back(RECEIVED, later)),
        )


FAMILY: Final = (*_ages(), *_tcp_flags(), *_icmp_errors(), *_again())
