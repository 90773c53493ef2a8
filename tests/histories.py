"""Random histories of packets and table changes, for comparing two judges.

The values are few on purpose: only then do packets meet flows, and flows meet changes.
"""

from __future__ import annotations

from hypothesis import strategies as st

from agent.core.types import IDENTITY_WORLD, Direction, PolicyKey, PolicyValue, Table, Verdict, Write
from agent.datapath.model import Origin
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
    tcp,
    udp,
)
from tests.verdict_cases import BASE, MOVED, PEERS, After, group, holds

Packet = tuple[Direction, bytes, Origin]
Step = Packet | After | Write

_PORTS = st.sampled_from((53, 443, 8000, 8001))
_FLAGS = st.sampled_from((SYN, SYN | ACK, ACK, FIN | ACK, RST))
_SETS = st.sampled_from((1, 2, 3))
_PEERS = st.sampled_from((PEER, OTHER, PEER6))
_DIRECTIONS = st.sampled_from(Direction)


@st.composite
def _policy(draw: st.DrawFn) -> Write:
    protocol = draw(st.sampled_from((0, TCP, TCP, UDP, UDP, ICMP, ICMPV6, SCTP)))
    port_bits = draw(st.sampled_from((0, 15, 16))) if protocol else 0
    port = draw(st.sampled_from((53, 443, 8000, 8, 128))) >> (16 - port_bits) << (16 - port_bits)
    identity = draw(st.sampled_from((0, IDENTITY_WORLD, PEERS, MOVED)))
    key = PolicyKey(draw(_SETS), identity, draw(_DIRECTIONS), protocol, port, port_bits)
    verdict = draw(st.sampled_from((*Verdict, Verdict.ALLOW, None)))
    return Write(Table.POLICY, key, None if verdict is None else PolicyValue(verdict, draw(st.integers(0, 5))))


_CHANGES = st.one_of(
    _policy(),
    st.builds(group, _SETS, egress=st.booleans(), ingress=st.booleans(), audit=st.booleans()),
    st.builds(
        holds,
        st.sampled_from((PEER, "198.51.100.0/24", OTHER, PEER6, "2001:db8::/32")),
        st.sampled_from((PEERS, MOVED, None)),
        scope=st.sampled_from((0, 1)),
    ),
    st.builds(After, st.sampled_from((1, 9, 11, 59, 61, 119, 121))),
)


@st.composite
def _transport(draw: st.DrawFn, *, is_v6: bool) -> tuple[int, bytes]:
    match draw(st.sampled_from(("tcp", "tcp", "tcp", "udp", "udp", "echo", "sctp", "gre", "other"))):
        case "tcp":
            return TCP, tcp(draw(_PORTS), draw(_PORTS), draw(_FLAGS))
        case "udp":
            return UDP, udp(draw(_PORTS), draw(_PORTS))
        case "echo":
            kind = draw(st.sampled_from((128, 129) if is_v6 else (8, 0)))
            return ICMPV6 if is_v6 else ICMP, echo(kind, draw(st.sampled_from((1, 2))))
        case "sctp":
            return SCTP, udp(draw(_PORTS), draw(_PORTS))
        case "gre":
            return GRE, bytes(12)
        case _:
            return ICMPV6 if is_v6 else ICMP, echo(draw(st.integers(0, 255)), 1, bytes(20))


@st.composite
def _frames(draw: st.DrawFn) -> tuple[Direction, bytes]:
    direction = draw(_DIRECTIONS)
    peer = draw(_PEERS)
    is_v6 = ":" in peer
    client = draw(st.sampled_from([CLIENT6 if is_v6 else CLIENT] * 9 + ["2001:db8::66" if is_v6 else "192.0.2.66"]))
    source, destination = (client, peer) if direction is Direction.EGRESS else (peer, client)
    protocol, payload = draw(_transport(is_v6=is_v6))
    match draw(st.sampled_from(("plain", "plain", "plain", "plain", "fragment", "error", "vlan", "extended", "neighbour"))):
        case "fragment":
            place, number = draw(st.sampled_from((0, 0, 1, 3))), draw(st.sampled_from((1, 2)))
            build = fragment6 if is_v6 else fragment4
            return direction, build(source, destination, protocol, payload + bytes(8), place, draw(st.booleans()), number)
        case "error":
            about = ip(destination, source, protocol, payload)
            kind = draw(st.sampled_from((1, 2, 3, 4) if is_v6 else (3, 11, 12)))
            return direction, frame(source, destination, ICMPV6 if is_v6 else ICMP, error(kind, 0, about))
        case "vlan":
            vlans = draw(st.lists(st.sampled_from((0x8100, 0x88A8)), min_size=1, max_size=3))
            return direction, frame(source, destination, protocol, payload, *vlans)
        case "extended" if is_v6:
            kinds = draw(st.lists(st.sampled_from((0, 43, 60)), min_size=1, max_size=10))
            return direction, extended(source, destination, kinds, protocol, payload)
        case "neighbour" if is_v6:
            return direction, neighbour(source, "ff02::1", draw(st.integers(130, 143)), draw(st.sampled_from((client, peer))))
        case "neighbour":
            return direction, arp(source, destination)
        case _:
            return direction, frame(source, destination, protocol, payload)


@st.composite
def _packets(draw: st.DrawFn, cut_min: int) -> Packet:
    direction, whole = draw(_frames())
    if draw(st.integers(0, 9)) == 0:  # damaged: cut, or with one octet changed
        whole = whole[: draw(st.integers(min(cut_min, len(whole)), len(whole)))]
        place = draw(st.integers(12, len(whole) - 1)) if len(whole) > 14 else 12
        whole = whole[:place] + draw(st.binary(min_size=1, max_size=1)) + whole[place + 1 :]
    origin = draw(st.sampled_from((Origin.WIRE,) * 9 + (Origin.AGENT,)))
    return direction, whole, origin


def histories(cut_min: int) -> st.SearchStrategy[tuple[list[Write], list[Step]]]:
    """Rules to begin with, then packets and changes. cut_min: no frame is cut shorter."""
    packets = _packets(cut_min)
    steps = st.lists(st.one_of(packets, packets, packets, _CHANGES), min_size=1, max_size=40)
    return st.tuples(st.lists(_policy(), max_size=12), steps)


def compare(history: tuple[list[Write], list[Step]], judges: tuple[Judge, Judge]) -> None:
    """Puts a history to both; every packet must get the same, and the flows at the end must be the same."""
    rules, steps = history
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
            assert one is other, f"step {number}: {one.name} and {other.name} for {direction.name} {whole.hex()}"
    one_flows, other_flows = (judge.flows() for judge in judges)
    assert one_flows == other_flows
