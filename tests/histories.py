"""Random histories of packets and table changes, for comparing two judges.

The values are few on purpose: only then do packets meet flows, and flows meet changes.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st

from agent.core.types import (
    IDENTITY_WORLD,
    Address,
    Direction,
    Orientation,
    PolicyKey,
    PolicyValue,
    Table,
    Verdict,
    Write,
    packed,
)
from agent.datapath.abi import Reason
from agent.datapath.model import Origin, _Drop, parse
from tests.judges import Judge
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
    RST,
    SCTP,
    SYN,
    TCP,
    UDP,
    arp,
    echo,
    error,
    extended,
    fragment4,
    fragment6,
    frame,
    ip,
    neighbour,
    optioned,
    routed,
    tcp,
    udp,
)
from tests.verdict_cases import BASE, ENDPOINT, MOVED, PEERS, After, endpoint, group, holds, rule

Packet = tuple[Direction, bytes, Origin]
Step = Packet | After | Write

_ODD, _ODD6 = (
    ["192.0.2.66", "0.0.0.0", "255.255.255.255", "127.0.0.1", *["10.0.0.5"] * 3],
    ["2001:db8::66", "fe80::1", "ff02::1:2", "::1", *["2001:db8:0:d::5"] * 3],
)
_LOCAL_PORTS, _REMOTE_PORTS = st.sampled_from((8000, 8000, 8001, 443)), st.sampled_from((53, 443, 443, 8000))
_FLAGS = st.sampled_from((SYN, SYN | ACK, ACK, FIN | ACK, RST))
_SETS = st.sampled_from((1, 2, 3))
_PEERS = st.sampled_from((PEER, PEER, PEER6, PEER6, OTHER))
_DIRECTIONS = st.sampled_from(Direction)


@st.composite
def _policy(draw: st.DrawFn) -> Write:
    protocol = draw(st.sampled_from((0, 0, TCP, TCP, UDP, UDP, ICMP, ICMPV6, SCTP)))
    port_bits = draw(st.sampled_from((0, 15, 16))) if protocol else 0
    port = draw(st.sampled_from((53, 443, 443, 8000, 8, 128))) >> (16 - port_bits) << (16 - port_bits)
    identity = draw(st.sampled_from((0, 0, IDENTITY_WORLD, PEERS, PEERS, MOVED)))
    key = PolicyKey(draw(_SETS), identity, draw(_DIRECTIONS), protocol, port, port_bits)
    verdict = draw(st.sampled_from((*Verdict, Verdict.ALLOW, Verdict.ALLOW, Verdict.ALLOW, None)))
    return Write(Table.POLICY, key, None if verdict is None else PolicyValue(verdict, draw(st.integers(0, 5))))


_WIDE = st.one_of(
    st.builds(rule, st.just(Verdict.ALLOW), st.just(0), st.just(0), direction=_DIRECTIONS, number=_SETS),
    st.builds(rule, st.just(Verdict.REDIRECT), st.just(0), st.sampled_from((TCP, UDP)), st.just(53), number=_SETS),
)
_CHANGES = st.one_of(
    _policy(),
    st.builds(group, _SETS, egress=st.booleans(), ingress=st.booleans(), audit=st.sampled_from((False, False, False, True))),
    st.builds(endpoint, st.sampled_from(Orientation), dhcp=st.booleans(), number=st.sampled_from((*[ENDPOINT] * 7, 6))),
    st.builds(
        holds,
        st.sampled_from((PEER, "198.51.100.0/24", OTHER, PEER6, "2001:db8::/32")),
        st.sampled_from((PEERS, MOVED, None)),
        scope=st.sampled_from((0, 1)),
    ),
    # In sum never a lifetime to the second: the kernel's clock goes on meanwhile.
    st.builds(After, st.sampled_from((1.3, 9.3, 11.3, 59.3, 61.3, 119.3, 121.3))),
)


@st.composite
def _transport(draw: st.DrawFn, *, is_v6: bool, direction: Direction) -> tuple[int, bytes]:
    source, destination = draw(_LOCAL_PORTS), draw(_REMOTE_PORTS)
    if direction is Direction.INGRESS:
        source, destination = destination, source
    match draw(st.sampled_from(("tcp", "tcp", "tcp", "udp", "udp", "dhcp", "echo", "sctp", "gre", "other"))):
        case "tcp":
            return TCP, tcp(source, destination, draw(_FLAGS))
        case "udp":
            return UDP, udp(source, destination)
        case "dhcp":
            client, server = (546, 547) if is_v6 else (68, 67)
            return UDP, udp(client, server) if draw(st.booleans()) else udp(server, client)
        case "echo":
            kind = draw(st.sampled_from((128, 129) if is_v6 else (8, 0)))
            return ICMPV6 if is_v6 else ICMP, echo(kind, draw(st.sampled_from((1, 2))))
        case "sctp":
            chunk = draw(st.sampled_from((1, 6, 14)))
            return SCTP, udp(source, destination, bytes(4) + bytes([chunk]) + bytes(3))
        case "gre":
            return GRE, bytes(12)
        case _:
            return ICMPV6 if is_v6 else ICMP, echo(draw(st.integers(0, 255)), 1, bytes(20))


@st.composite
def _frames(draw: st.DrawFn) -> tuple[Direction, bytes]:
    direction = draw(_DIRECTIONS)
    peer = draw(_PEERS)
    is_v6 = ":" in peer
    odd = _ODD6 if is_v6 else _ODD  # the last one is a container's
    client = draw(st.sampled_from([CLIENT6 if is_v6 else CLIENT] * 40 + odd))
    peer = draw(st.sampled_from([peer] * 50 + odd))
    source, destination = (client, peer) if direction is Direction.EGRESS else (peer, client)
    protocol, payload = draw(_transport(is_v6=is_v6, direction=direction))
    match draw(st.sampled_from(("plain",) * 5 + ("fragment", "error", "vlan", "extended", "neighbour"))):
        case "fragment":
            place, number = draw(st.sampled_from((0, 0, 1, 3, 4, 8_190))), draw(st.sampled_from((1, 2)))
            build = fragment6 if is_v6 else fragment4
            return direction, build(source, destination, protocol, payload + bytes(8), place, draw(st.booleans()), number)
        case "error":
            about = ip(destination, source, protocol, payload)
            kind = draw(st.sampled_from((1, 2, 3, 4) if is_v6 else (3, 11, 12)))
            return direction, frame(source, destination, ICMPV6 if is_v6 else ICMP, error(kind, 0, about))
        case "vlan":
            vlans = draw(st.lists(st.sampled_from((0x8100, 0x88A8)), min_size=1, max_size=3))
            return direction, frame(source, destination, protocol, payload, *vlans)
        case "extended" if not is_v6:
            options = draw(st.sampled_from((b"\1\1", b"\x94\4\0\0", b"\x83\3\4", b"\7\0", b"\1" * 17, b"\x44\x29")))
            return direction, optioned(source, destination, protocol, payload, options)
        case "extended" if draw(st.booleans()):
            return direction, routed(source, destination, protocol, payload, draw(st.integers(0, 4)), draw(st.integers(0, 1)))
        case "extended":
            kinds = draw(st.lists(st.sampled_from((0, 43, 44, 51, 60)), min_size=1, max_size=10))
            return direction, extended(source, destination, kinds, protocol, payload)
        case "neighbour" if is_v6:
            return direction, neighbour(source, "ff02::1", draw(st.integers(130, 143)), draw(st.sampled_from((client, peer))))
        case "neighbour":
            return direction, arp(source, destination)
        case _:
            return direction, frame(source, destination, protocol, payload)


def _is_containers(whole: bytes) -> bool:
    """Whether it is one that KernelJudge's host routes on, behind however many tags. What is link-local stays on its link."""
    ip_at = 14
    while whole[ip_at - 2 : ip_at] in {b"\x81\x00", b"\x88\xa8"}:
        ip_at += 4
    if whole[ip_at - 2 : ip_at] == b"\x08\x00":
        return whole[ip_at + 16 : ip_at + 17] == b"\x0a"
    is_there = whole[ip_at + 24 : ip_at + 32] == packed("2001:db8:0:d::")[:8]
    return whole[ip_at - 2 : ip_at] == b"\x86\xdd" and is_there and whole[ip_at + 8] != 0xFE


def _claimed(whole: bytes) -> Address | None:
    """The address for which an ARP packet or an advertisement speaks."""
    try:
        packet = parse(whole)
    except _Drop:
        return None
    return packet.claims[-1] if packet.is_answer else None


@st.composite
def _packets(draw: st.DrawFn, cut_min: int) -> Packet:
    direction, whole = draw(_frames())
    if draw(st.integers(0, 19)) == 7:  # damaged: cut, or with one octet changed
        whole = whole[: draw(st.integers(min(cut_min, len(whole)), len(whole)))]
        place = draw(st.integers(12, len(whole) - 1)) if len(whole) > 14 else 12
        whole = whole[:place] + draw(st.binary(min_size=1, max_size=1)) + whole[place + 1 :]
    marked = Origin.MARKED if direction is Direction.EGRESS else Origin.AGENT  # what a test run can show: see can_show()
    origin = draw(st.sampled_from((Origin.WIRE,) * 18 + (marked,)))
    if (claimed := _claimed(whole)) is not None:
        is_routed_on = claimed[:1] == b"\x0a" if len(claimed) == 4 else claimed[:8] == packed("2001:db8:0:d::")[:8]
        origin = Origin.FORWARDED if is_routed_on else origin
    elif direction is Direction.EGRESS:
        origin = draw(st.sampled_from((origin,) * 6 + (Origin.FORWARDED,)))
    elif origin is Origin.WIRE and _is_containers(whole):
        origin = Origin.FORWARDED
    return direction, whole, origin


def histories(cut_min: int, packets: int | None = None) -> st.SearchStrategy[tuple[list[Write], list[Step]]]:
    """Rules to begin with, then packets and changes. cut_min: no frame is cut shorter. packets: so many, and little else."""
    packet = _packets(cut_min)
    if packets is None:
        steps = st.lists(st.one_of(packet, packet, packet, _CHANGES), min_size=1, max_size=40)
    else:
        steps = st.tuples(*[packet] * packets, *[_CHANGES] * (packets // 8)).flatmap(st.permutations)
    return st.tuples(st.lists(st.one_of(_policy(), _policy(), _WIDE), min_size=4, max_size=12), steps)


def compare(history: tuple[list[Write], list[Step]], judges: tuple[Judge, Judge]) -> Counter[Reason]:
    """Puts a history to both: every packet must get the same, and the flows at the end be the same. Gives what they got."""
    rules, steps = history
    counted: Counter[Reason] = Counter()
    for judge in judges:
        judge.apply([*BASE, *rules])
    for number, step in enumerate(steps, start=1):
        if isinstance(step, After):
            for judge in judges:
                judge.advance(step.seconds)
        elif isinstance(step, Write):
            for judge in judges:
                judge.apply([step])
        else:
            direction, whole, origin = step
            one, other = (judge.judge(direction, whole, origin) for judge in judges)
            assert one is other, f"step {number}: {one.name} and {other.name} for {direction.name} {origin.name} {whole.hex()}"
            counted[one] += 1
    one_flows, other_flows = (judge.flows() for judge in judges)
    assert one_flows == other_flows
    return counted
