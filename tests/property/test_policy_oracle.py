"""The policy compiler against an oracle that knows only the rules.

The whole way is judged: rules, compiled blocks, rows, ipcache rows, and the datapath's two look-ups by longest match.
RULE_SETS=10000 makes a long run of it (scripts/sim --rule-sets 10000).
"""

from __future__ import annotations

import ipaddress
import itertools
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.events import EndpointAdded, HostAddresses, PoliciesChanged, Tick
from agent.core.policy import Block, port_blocks, resolve
from agent.core.rules import Cidr, Endpoints, Entity, Fqdn, LabelSelector, Origin, Peer, Policy, Ports, Rule
from agent.core.types import (
    PROTOCOL_ICMP,
    PROTOCOL_SCTP,
    PROTOCOL_TCP,
    PROTOCOL_UDP,
    Direction,
    PolicyValue,
    Prefix,
    Verdict,
    packed,
)
from tests.property.naive import Situation, Workload
from tests.sim.world import World, subject

RULE_SETS = int(os.environ.get("RULE_SETS", "0"))
PROTOCOLS = (PROTOCOL_TCP, PROTOCOL_UDP, PROTOCOL_SCTP, PROTOCOL_ICMP)
ENDPOINTS = {1: "192.0.2.11", 2: "192.0.2.12"}
HOST = "192.0.2.1"
ADDRESSES = ("10.0.1.1", "10.0.1.2", "10.0.2.1", "198.51.100.7", "2001:db8::7", *ENDPOINTS.values(), HOST)
NAMES = ("a.example.", "b.example.", "x.a.example.")
BORDERS = (0, 1, 52, 53, 54, 79, 80, 81, 443, 1023, 1024, 32_767, 32_768, 65_534, 65_535)


@st.composite
def prefixes(draw: st.DrawFn) -> Prefix:
    address = packed(draw(st.sampled_from(ADDRESSES)))
    bits = 8 * len(address)
    return Prefix.masked(
        address, draw(st.sampled_from((0, 8, 16, 22, 23, 24, 31, 32, 64, 127, 128)).filter(lambda n: n <= bits))
    )


@st.composite
def cidrs(draw: st.DrawFn) -> Cidr:
    """A network, and holes in it that may themselves be nested."""
    whole = draw(prefixes())
    holes = draw(st.lists(prefixes(), max_size=2))
    return Cidr(whole, tuple(hole for hole in holes if whole.contains(hole)))


PEERS: st.SearchStrategy[Peer] = st.one_of(
    cidrs(),
    st.sampled_from(("a.example.", "*.example.", "**.example.", "*")).map(Fqdn),
    st.sampled_from(Entity),
    st.sampled_from((Endpoints(LabelSelector()), Endpoints(subject("e2")))),
)


@st.composite
def ports(draw: st.DrawFn) -> Ports:
    protocol = draw(st.sampled_from(PROTOCOLS))
    if protocol == PROTOCOL_ICMP:
        kind = draw(st.sampled_from((0, 3, 8)))
        return Ports(protocol, kind, kind)
    first, last = sorted((draw(st.sampled_from(BORDERS)), draw(st.sampled_from(BORDERS))))
    return Ports(protocol, first, last)


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    direction = draw(st.sampled_from((Direction.EGRESS, Direction.EGRESS, Direction.INGRESS)))
    deny = draw(st.integers(0, 2)) == 2
    peers = draw(st.one_of(st.none(), st.lists(PEERS, min_size=1, max_size=3, unique=True)))
    if peers is not None and (deny or direction is Direction.INGRESS):
        peers = [peer for peer in peers if not isinstance(peer, Fqdn)]
    spoken = draw(st.one_of(st.none(), st.lists(ports(), min_size=1, max_size=3)))
    names = None
    if direction is Direction.EGRESS and not deny and spoken and draw(st.integers(0, 3)) == 3:
        names = ("a.example.",)
    return Rule(
        direction,
        None if peers is None else tuple(peers),
        None if spoken is None else tuple(spoken),
        deny,
        names,
        Origin("p", draw(st.integers(1, 9))),
    )


POLICIES = st.builds(
    Policy,
    st.just("p"),
    st.sampled_from((None, "e1")).map(subject),
    st.lists(rules(), min_size=1, max_size=4).map(tuple),
    default_deny_egress=st.booleans(),
    default_deny_ingress=st.booleans(),
    except_names=st.sampled_from(((), (), ("b.example.",))),
)


@pytest.mark.timeout(0 if RULE_SETS else 120)
@settings(max_examples=RULE_SETS or 60)
@given(
    st.lists(POLICIES, min_size=1, max_size=3),
    st.sets(st.tuples(st.sampled_from(NAMES), st.sampled_from(ADDRESSES)), max_size=4),
    st.data(),
)
def test_every_packet_gets_the_verdict_of_its_rules(
    policies: list[Policy], learned: set[tuple[str, str]], data: st.DataObject
) -> None:
    """No denial is hidden by a longer match, no redirect by an allow, nothing is opened that no rule opens."""
    world = World()
    world.handle(HostAddresses(frozenset({packed(HOST)})))
    world.start(*policies, endpoints=ENDPOINTS)
    endpoints = {
        number: Workload(number, (("app", f"e{number}"),), (packed(address),)) for number, address in ENDPOINTS.items()
    }
    pairs = set()
    for name, text in learned:
        for scope in {endpoint.scope for endpoint in world.engine.groups.endpoints.values()}:
            world.engine.names.learn(name, [(packed(text), 60)], scope, world.now)
            pairs.add((scope, name, packed(text)))
    world.handle(Tick())
    situation = Situation(tuple(policies), tuple(endpoints.values()), frozenset(pairs), frozenset({packed(HOST)}))
    spoken = {p for policy in policies for rule in policy.rules for p in rule.ports or ()}
    borders = {port for p in spoken for port in (p.first - 1, p.first, p.last, p.last + 1) if 0 <= port <= 65_535} | {0, 53}
    for port in sorted(data.draw(st.sets(st.sampled_from(sorted(borders)), min_size=1, max_size=6), label="ports")):
        for number, endpoint in endpoints.items():
            for address in map(packed, ADDRESSES):
                for protocol in (*PROTOCOLS, 47):
                    for direction in Direction:
                        seen = world.kernel.verdict_for(100 + number, address, protocol, port, direction)
                        meant = situation.verdict(endpoint, address, protocol, port, direction)
                        where = f"endpoint {number} {direction.name} {ipaddress.ip_address(address)} {protocol}/{port}"
                        assert seen == meant, f"{where}: the rows say {seen!r}, the rules {meant!r}"


BLOCKS = st.builds(
    lambda protocol, port, bits: Block(Direction.EGRESS, protocol, port >> (16 - bits) << (16 - bits), bits if protocol else 0),
    st.sampled_from((PROTOCOL_TCP, PROTOCOL_UDP)),
    st.sampled_from(BORDERS),
    st.sampled_from((0, 1, 6, 10, 15, 16)),
) | st.just(Block(Direction.EGRESS, 0, 0, 0))


@given(st.lists(st.tuples(BLOCKS, st.builds(PolicyValue, st.sampled_from(Verdict), st.integers(1, 5))), max_size=8))
def test_the_longest_match_carries_the_strongest_verdict(values: list[tuple[Block, PolicyValue]]) -> None:
    """Of all blocks that hold the packet, whatever their sizes and their order; and the rule named has this verdict."""
    rows = resolve(values)
    assert rows == resolve(reversed(values)), "the order in which rules stand does not matter"
    for protocol in (PROTOCOL_TCP, PROTOCOL_UDP, PROTOCOL_SCTP):
        for port in BORDERS:
            holding = [value for block, value in values if holds(block, protocol, port)]
            matching = [block for block in rows if holds(block, protocol, port)]
            assert bool(holding) == bool(matching)
            if matching:
                longest = max(matching, key=lambda block: (block.protocol != 0, block.port_bits))
                assert rows[longest].verdict == max(value.verdict for value in holding)
                assert rows[longest] in holding


def holds(block: Block, protocol: int, port: int) -> bool:
    return block.protocol in (0, protocol) and port >> (16 - block.port_bits) == block.port >> (16 - block.port_bits)


@given(st.integers(0, 65_535), st.integers(0, 65_535))
def test_a_range_is_the_fewest_aligned_blocks(one: int, other: int) -> None:
    """They cover it exactly, do not overlap, and no two neighbours could be one."""
    first, last = sorted((one, other))
    blocks = list(port_blocks(first, last))
    at = first
    for port, bits in blocks:
        assert port == at
        assert port % (1 << (16 - bits)) == 0
        at = port + (1 << (16 - bits))
    assert at == last + 1
    for (port, bits), (_, next_bits) in itertools.pairwise(blocks):
        assert bits != next_bits or port % (1 << (17 - bits)), "these two are one block"


def test_the_host_and_endpoints_are_not_the_world() -> None:
    """An entity selects by what the address is, whatever was learned for it."""
    world = World()
    world.handle(HostAddresses(frozenset({packed(HOST)})))
    rule = Rule(Direction.EGRESS, (Entity.WORLD,), None)
    world.start(Policy("p", LabelSelector(), (rule,), True, False), endpoints=ENDPOINTS)
    assert world.passes("198.51.100.7")
    assert not world.passes(HOST)
    assert not world.passes(ENDPOINTS[2])
    world.handle(HostAddresses(frozenset()))
    assert world.passes(HOST)
    world.handle(EndpointAdded(3, "veth3", 103, {}, (packed("198.51.100.7"),)))
    assert not world.passes("198.51.100.7")
    world.handle(PoliciesChanged((), None))
    assert world.passes("198.51.100.7")
