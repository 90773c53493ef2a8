"""`explain` beside the program in the kernel: random policies, random packets, and the same verdict by the same rule.

EXPLAINED_PACKETS=10000 makes a long run of it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from agent.core.engine import SOURCES
from agent.core.events import EndpointAdded, HostAddresses, PoliciesChanged, SourceReported, Tick
from agent.core.rules import Policy
from agent.core.types import Direction, Write, packed
from agent.datapath.abi import Reason
from agent.datapath.events import EventRing
from agent.why.asked import Asked
from agent.why.explain import at_once
from agent.why.packet import packet_row, rule_text
from agent.why.rows import Grounds, local_of
from agent.why.supposed import Situation, suppose
from tests.judges import IFINDEX, KernelJudge
from tests.packets import CLIENT, CLIENT6
from tests.property.test_policy_oracle import ADDRESSES, BORDERS, HOST, NAMES, POLICIES, PROTOCOLS
from tests.sim.world import World

pytestmark = pytest.mark.root

PACKETS: Final = int(os.environ.get("EXPLAINED_PACKETS", "400"))
_OF_ONE: Final = 24  # below the burst of questions that a test's program has


@pytest.fixture(scope="module")
def loaded() -> Iterator[KernelJudge]:
    judge = KernelJudge()
    yield judge
    judge.close()


@pytest.fixture
def kernel(loaded: KernelJudge) -> KernelJudge:
    loaded.reset()
    return loaded


def forget_flows(kernel: KernelJudge) -> None:
    for name in ("flows", "ended"):
        rows = kernel.tables._rows_by_map[name]
        for key, _ in list(rows.dump(rows.value.size)):
            rows.delete(key)


PACKET: Final = st.builds(
    Asked,
    st.sampled_from(Direction),
    st.sampled_from([packed(address) for address in ADDRESSES]),
    st.sampled_from((*PROTOCOLS, *PROTOCOLS, 47)),
    st.sampled_from((*BORDERS, 53, 53, 53, 53, 53, 80, 443)),
)


def fitting(asked: Asked) -> Asked:
    """ICMP of the address's family, with a type that a rule decides over; without ports no port."""
    if asked.protocol == 1:
        kind = (8, 0, 13)[asked.port % 3] if len(asked.remote) == 4 else (128, 129)[asked.port % 2]
        return Asked(asked.direction, asked.remote, 1 if len(asked.remote) == 4 else 58, kind)
    return asked if asked.protocol != 47 else Asked(asked.direction, asked.remote, 47, 0)


@pytest.mark.timeout(120 + PACKETS // 20)
def test_the_kernels_verdict(kernel: KernelJudge) -> None:
    """Its reason, its identity and its rule, read from its own rows by its own look-ups; and as if, without any kernel."""
    counted: Counter[Reason] = Counter()
    ring = EventRing(kernel.loaded.fds_by_map["events"])

    @settings(
        max_examples=-(-PACKETS // _OF_ONE),
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(
        st.lists(POLICIES, min_size=1, max_size=3),
        st.sets(st.tuples(st.sampled_from(NAMES), st.sampled_from(ADDRESSES)), max_size=4),
        st.booleans(),
        st.lists(PACKET.map(fitting), min_size=_OF_ONE, max_size=_OF_ONE),
    )
    def one(policies: list[Policy], learned: set[tuple[str, str]], audit: bool, packets: list[Asked]) -> None:
        kernel.reset()
        world = World()
        own = (packed(CLIENT), packed(CLIENT6))
        added = EndpointAdded(1, "lo", IFINDEX, {"app": "e1"}, own, audit=audit and len(policies) > 2)
        other = EndpointAdded(2, "veth2", 102, {"app": "e2"}, (packed("192.0.2.12"),))
        for known in (HostAddresses(frozenset({packed(HOST)})), added, other, PoliciesChanged(tuple(policies), "start")):
            world.handle(known)
        for source in sorted(SOURCES):
            world.handle(SourceReported(source))
        world.advance(0.0)
        scope = world.engine.groups.endpoints[1].scope
        for name, address in sorted(learned):
            world.engine.names.learn(name, [(packed(address), 60)], scope, world.now)
        world.handle(Tick())
        world.advance(0.0)
        kernel.apply([Write(table, key, value) for table, rows in world.kernel.rows.items() for key, value in rows.items()])
        situation = Situation(
            world.settings,
            added,
            (other,),
            world.host,
            tuple(policy for policy in policies if policy.selects(added.labels)),
            frozenset(world.engine.dns_cache.lifetimes),
            world.now,
        )
        for asked in packets:
            forget_flows(kernel)
            seen = kernel.judge(asked.direction, asked.frame(local_of(added, asked)))
            shown = packet_row(Grounds(world.engine, kernel.tables), added, asked, world.now)
            assert shown["audited"] is (seen is Reason.PASS_AUDIT)
            (event,) = ring.read() if seen.is_drop or shown["audited"] else (None,)
            said = event.reason if event is not None else seen
            assert shown["reason"] == said.text, f"{asked}: the kernel says {said.text}"
            cookie = event.cookie if event is not None else next((flow.cookie for flow in kernel.tables.flows()), None)
            if cookie is not None:
                assert shown["rule"] in (None, rule_text(world.engine, cookie)), f"{asked}: the kernel names rule {cookie}"
            if event is not None:
                assert shown["identity"] == event.identity
            supposed = at_once(suppose(replace(situation, about=asked)))
            as_if = packet_row(supposed, added, asked, world.now)
            assert [as_if[key] for key in ("reason", "rule", "labels")] == [shown[key] for key in ("reason", "rule", "labels")]
            counted[said] += 1

    try:
        one()
    finally:
        ring.close()
    print(f"{counted.total()} packets: {', '.join(f'{r.text} {n}' for r, n in counted.most_common())}")
    assert counted.total() >= PACKETS
    for reason in (Reason.PASS_POLICY, Reason.PASS_REDIRECT, Reason.DROP_POLICY, Reason.DROP_DENY):
        assert counted[reason] * 100 >= counted.total(), f"hardly any packet is {reason.text}"
