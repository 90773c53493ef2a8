"""6. Parts of a datagram."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from agent.core.types import Direction, Write
from agent.datapath.abi import Reason
from tests.families.vocabulary import DATAGRAM, EVERYTHING, OPENING, R, patched, sent_frame
from tests.packets import (
    CLIENT,
    CLIENT6,
    GRE,
    ICMP,
    ICMPV6,
    OTHER,
    OTHER6,
    PEER,
    PEER6,
    TCP,
    UDP,
    echo,
    error,
    extended,
    fragment4,
    fragment6,
    frame,
    ip,
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
    group,
    rule,
)


def _fragments() -> Iterator[Case]:
    for is_v6 in (False, True):
        client, peer, other = (CLIENT6, PEER6, OTHER6) if is_v6 else (CLIENT, PEER, OTHER)
        build = fragment6 if is_v6 else fragment4
        family, error_protocol, ping = ("v6", ICMPV6, 128) if is_v6 else ("v4", ICMP, 8)
        whole = udp(4, 443, bytes(16))  # 24 octets: the next one begins at 3
        rows = (rule(ALLOW, PEERS, UDP, 443), rule(ALLOW), rule(ALLOW, PEERS, UDP, 443, direction=INGRESS))

        def part(
            payload: bytes,
            place: int,
            reason: Reason,
            protocol: int = UDP,
            number: int = 9,
            *,
            more: bool = False,
            source: str = client,
            destination: str = peer,
            direction: Direction = EGRESS,
            build: type(fragment4) = build,  # type: ignore[valid-type]
        ) -> Sees:
            return Sees(direction, build(source, destination, protocol, payload, place, more, number), reason)

        first = part(whole, 0, R.PASS_POLICY, more=True)

        def member(what: str, *steps: Sees | After | Write, rows: tuple[Write, ...] = rows, family: str = family) -> Case:
            return Case(f"6 {family}: {what}", what, rows, steps)

        yield member("a later one follows its first", first, part(bytes(8), 3, R.PASS_FLOW))
        yield member("so does one in between", first, part(bytes(8), 3, R.PASS_FLOW, more=True), part(bytes(8), 4, R.PASS_FLOW))
        yield member(
            "in any order behind the first", first, part(bytes(8), 9, R.PASS_FLOW), part(bytes(48), 3, R.PASS_FLOW, more=True)
        )
        yield member("not before it", part(bytes(8), 3, R.DROP_FRAGMENT), first, part(bytes(8), 3, R.PASS_FLOW))
        yield member("of another datagram", first, part(bytes(8), 3, R.DROP_FRAGMENT, number=10))
        yield member("to another address", first, part(bytes(8), 3, R.DROP_FRAGMENT, destination=other))
        yield member("of another protocol", first, part(bytes(8), 3, R.DROP_FRAGMENT, TCP))
        yield member(
            "the other way",
            first,
            part(bytes(8), 3, R.DROP_FRAGMENT, source=peer, destination=client, direction=INGRESS),
        )
        yield member("from another's address", first, part(bytes(8), 3, R.DROP_SOURCE, source=other))
        yield member("over its first", first, part(bytes(8), 2, R.DROP_FRAGMENT), part(bytes(8), 1, R.DROP_FRAGMENT))
        yield member(
            "over the end of its first, which is no multiple of eight",
            part(udp(4, 443, bytes(13)), 0, R.PASS_POLICY, more=True),
            part(bytes(8), 2, R.DROP_FRAGMENT),
            part(bytes(8), 3, R.PASS_FLOW),
        )
        yield member(
            "of a denied first",
            part(udp(4, 444, bytes(16)), 0, R.DROP_POLICY, more=True),
            part(bytes(8), 3, R.DROP_FRAGMENT),
        )
        yield member(
            "with a second first that is denied",
            first,
            part(udp(4, 444, bytes(16)), 0, R.DROP_POLICY, more=True),
            part(bytes(8), 3, R.PASS_FLOW),
        )
        yield member("after a minute", first, After(61), part(bytes(8), 3, R.DROP_FRAGMENT))
        yield member("within a minute", first, After(59), part(bytes(8), 3, R.PASS_FLOW))
        yield member("beyond what a packet can be", first, part(bytes(16), 8_191, R.DROP_MALFORMED))
        yield member("a first without the whole UDP header", part(whole[:7], 0, R.DROP_MALFORMED, more=True))
        yield member("a first without the whole TCP header", part(OPENING[:16], 0, R.DROP_MALFORMED, TCP, more=True))
        yield member(
            "a first without TCP's options",
            part(patched(OPENING, 12, b"\x80") + bytes(4), 0, R.DROP_MALFORMED, TCP, more=True),
        )
        yield member(
            "over the flags of a SYN",
            part(OPENING + bytes(4), 0, R.PASS_POLICY, TCP, more=True),
            part(bytes(8), 1, R.DROP_FRAGMENT, TCP),
            part(bytes(8), 2, R.DROP_FRAGMENT, TCP),
            part(bytes(8), 3, R.PASS_FLOW, TCP),
        )
        yield member(
            "of what is redirected",
            part(udp(4, 53, bytes(16)), 0, R.DROP_FRAGMENT, more=True),
            part(bytes(8), 3, R.DROP_FRAGMENT),
            rows=(rule(REDIRECT, 0, UDP, 53),),
        )
        yield member(
            "of an echo",
            part(echo(ping, 7, bytes(16)), 0, R.PASS_POLICY, error_protocol, more=True),
            part(bytes(8), 3, R.PASS_FLOW, error_protocol),
            rows=(rule(ALLOW, PEERS, error_protocol, ping),),
        )
        yield member(
            "of an ICMP error",
            part(DATAGRAM, 0, R.PASS_POLICY, more=False) if not is_v6 else first,
            part(
                error(1 if is_v6 else 3, 0, ip(client, peer, UDP, whole)),
                0,
                R.DROP_FRAGMENT,
                error_protocol,
                more=True,
                source=peer,
                destination=client,
                direction=INGRESS,
            ),
        )
        yield member(
            "of a protocol without ports",
            part(bytes(8), 1, R.DROP_FRAGMENT, GRE),
            part(bytes(8), 0, R.PASS_POLICY, GRE, more=True),
            part(bytes(8), 1, R.PASS_FLOW, GRE),
            rows=(rule(ALLOW, PEERS, 0),),
        )
        yield member(
            "of a reply",
            first,
            part(udp(443, 4, bytes(16)), 0, R.PASS_FLOW, more=True, source=peer, destination=client, direction=INGRESS),
            part(bytes(8), 3, R.PASS_FLOW, source=peer, destination=client, direction=INGRESS),
        )
        yield member(
            "toward the endpoint",
            part(udp(5, 443, bytes(16)), 0, R.PASS_POLICY, more=True, source=peer, destination=client, direction=INGRESS),
            part(bytes(8), 3, R.PASS_FLOW, source=peer, destination=client, direction=INGRESS),
            part(bytes(8), 3, R.DROP_FRAGMENT, number=1, source=peer, destination=client, direction=INGRESS),
        )
        yield member(
            "of a flow that is ended",
            first,
            group(2),
            part(bytes(8), 3, R.DROP_POLICY),
            Sees(INGRESS, frame(peer, client, UDP, udp(443, 4)), R.DROP_FLOW_ENDED),
            rule(ALLOW, PEERS, UDP, 443, number=3),
            group(3),
            part(bytes(8), 3, R.DROP_FLOW_ENDED),
        )
    yield Case(
        "6 v6: with an extension header behind the fragment's",
        "its ports would be looked for where the end will not find them (RFC 7112)",
        EVERYTHING,
        (
            Sees(EGRESS, fragment6(CLIENT6, PEER6, 60, b"\x11" + bytes(7) + DATAGRAM, 0, True, 3), R.DROP_FRAGMENT),
            Sees(EGRESS, fragment6(CLIENT6, PEER6, 60, bytes(8), 3, False, 3), R.DROP_FRAGMENT),
            Sees(INGRESS, fragment6(PEER6, CLIENT6, 51, b"\x11" + bytes(7) + DATAGRAM, 0, True, 3), R.DROP_FRAGMENT),
        ),
    )
    header = struct.pack(">BBHI", UDP, 0, 1, 3)
    yield Case(
        "6 v6: extension headers before the fragment's",
        "are in every fragment, and seen through",
        (rule(ALLOW, PEERS, UDP, 443),),
        (Sees(EGRESS, extended(CLIENT6, PEER6, [0, 60], 44, header + udp(4, 443, bytes(8))), R.PASS_POLICY),),
    )
    yield Case(
        "6 v4: may not be fragmented",
        "the flag that forbids fragments makes none",
        (rule(ALLOW, PEERS, UDP, 443),),
        (Sees(EGRESS, patched(sent_frame(DATAGRAM, UDP), 20, b"\x40\0"), R.PASS_POLICY),),
    )


FAMILY: Final = tuple(_fragments())
