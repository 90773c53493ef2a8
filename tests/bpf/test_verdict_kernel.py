"""The verdict in the kernel, by BPF_PROG_TEST_RUN: the cases, and random histories beside the model."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

from agent.core.types import Direction, Orientation, Write, packed, text_of
from agent.datapath import abi
from agent.datapath.abi import Reason
from agent.datapath.events import EventRing
from agent.datapath.model import Origin
from tests.cases import datapath
from tests.cases.runner import Fields, Outcome
from tests.families import TABLE
from tests.histories import Step, compare, histories
from tests.judges import MARK_AGENT, MARK_ANSWER, KernelJudge, ModelJudge
from tests.packets import CLIENT, CLIENT6, ICMPV6, PEER, PEER6, TCP, UDP, echo, frame, tcp, udp
from tests.verdict_cases import ALLOW, BASE, DENY, ENDPOINT, PEERS, REDIRECT, Case, endpoint, group, rule, tell

pytestmark = pytest.mark.root

# A test run refuses an IP frame without a whole IP header; the native build takes those.
_RUN_MIN = 54


@pytest.fixture(scope="module")
def loaded() -> Iterator[KernelJudge]:
    judge = KernelJudge()
    yield judge
    judge.close()


@pytest.fixture
def kernel(loaded: KernelJudge) -> KernelJudge:
    loaded.reset()
    return loaded


@pytest.mark.parametrize("case", [case for case in TABLE if case.runs_in_kernel], ids=lambda case: case.name)
def test_case(kernel: KernelJudge, case: Case) -> None:
    """Each case's promise holds for the loaded program."""
    tell(kernel, case)


@pytest.mark.parametrize("case", datapath.cases_with_packets(), ids=lambda case: case["id"])
def test_peer_case(kernel: KernelJudge, case: Fields) -> None:
    """What a peer's tests assert holds here too, or stands on a decision."""
    verdict = datapath.verdict_by(kernel, case)
    assert verdict.outcome is not Outcome.FAILED, verdict.why


@pytest.mark.parametrize(("address", "peer"), [(CLIENT, PEER), (CLIENT6, PEER6)])
def test_beside_its_own_address(kernel: KernelJudge, address: str, peer: str) -> None:
    """An address one octet away from an uplink's own is neither its own nor, unless a route says so, anyone's behind it."""
    own, counted = packed(address), Counter[Reason]()
    rows = [*BASE, endpoint(Orientation.UPLINK), rule(ALLOW, 0, 0, direction=Direction.INGRESS)]
    for place in range(len(own)):
        beside = own[:place] + bytes([own[place] ^ 0x54]) + own[place + 1 :]
        packet = Direction.INGRESS, frame(peer, text_of(beside), TCP, tcp(443, 8000)), Origin.WIRE
        kernel.reset()
        counted.update(compare((rows, [packet]), (ModelJudge(), kernel)))
    assert Reason.PASS_FORWARDED not in counted, counted


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(history=histories(_RUN_MIN))
def test_same_as_model(loaded: KernelJudge, history: tuple[list[Write], list[Step]]) -> None:
    """Whatever happens in whatever order, the program and the model say the same and remember the same flows."""
    loaded.reset()
    compare(history, (ModelJudge(), loaded))


@pytest.mark.parametrize("mark", [MARK_AGENT, MARK_ANSWER])
def test_a_mark_of_ours_does_not_go_on(kernel: KernelJudge, mark: int) -> None:
    """What an endpoint behind this host sends goes on without it, whatever becomes of it; an uplink's keeps it."""
    kernel.apply([*BASE, rule(ALLOW, PEERS, UDP, 443), rule(REDIRECT, PEERS, UDP, 53)])

    def mark_after(port: int) -> int:
        run = kernel.run("from_endpoint", frame(CLIENT, PEER, UDP, udp(40000, port)), mark | 0xF0F0)
        return int.from_bytes(run.context[8:12], sys.byteorder)

    assert [mark_after(port) for port in (443, 443, 53)] == [0xF0F0] * 3
    assert mark_after(444) == 0xF0F0
    kernel.apply([group(audit=True)])
    assert mark_after(444) == 0xF0F0
    kernel.apply([endpoint(Orientation.UPLINK)])
    assert mark_after(443) == mark | 0xF0F0


def test_maps_are_known(loaded: KernelJudge) -> None:
    """Every map of the program has its layout in abi.py; only the ring and the program's own scratch have none."""
    assert set(loaded.loaded.fds_by_map) == {*abi.MAPS, "events", "scratch"}


@pytest.fixture
def ring(kernel: KernelJudge) -> Iterator[EventRing]:
    made = EventRing(kernel.loaded.fds_by_map["events"])
    while made.read():
        pass
    yield made
    made.close()


def test_event(kernel: KernelJudge, ring: EventRing) -> None:
    """An event says who wanted what, and why not; under audit, that it passed."""
    kernel.apply([*BASE, rule(DENY, cookie=12), group(audit=True)])
    kernel.judge(Direction.EGRESS, frame(CLIENT, PEER, TCP, tcp(40000, 443)))
    kernel.apply([group(2)])
    kernel.judge(Direction.INGRESS, frame(PEER6, CLIENT6, ICMPV6, echo(128, 7)))
    denied, dropped = ring.read()
    assert (denied.reason, denied.audited, denied.cookie, denied.identity) == (Reason.DROP_DENY, True, 12, PEERS)
    assert (denied.endpoint, denied.direction, denied.protocol) == (ENDPOINT, Direction.EGRESS, TCP)
    assert (denied.source, denied.source_port) == (packed(CLIENT), 40000)
    assert (denied.destination, denied.destination_port, denied.length) == (packed(PEER), 443, 54)
    assert (dropped.reason, dropped.audited, dropped.policy_port) == (Reason.DROP_POLICY, False, 128)
    assert (dropped.source, dropped.destination) == (packed(PEER6), packed(CLIENT6))
    assert 0 <= time.clock_gettime(time.CLOCK_BOOTTIME) - dropped.at < 60


def test_events_around_the_end(kernel: KernelJudge, ring: EventRing) -> None:
    """Reading goes on past the end of the ring; what does not fit while nobody reads is counted as lost."""
    kernel.apply(BASE)
    denied = frame(CLIENT, PEER, TCP, tcp(40000, 443))
    lost = kernel.tables.losses()[abi.Loss.EVENT]
    for _ in range(10):
        kernel.run("from_endpoint", denied, repeat=300)
        assert len(ring.read()) == 300
    assert kernel.tables.losses()[abi.Loss.EVENT] == lost
    kernel.run("from_endpoint", denied, repeat=3_000)
    assert len(ring.read(10_000)) + kernel.tables.losses()[abi.Loss.EVENT] - lost == 3_000


def test_flow_identities(kernel: KernelJudge) -> None:
    """An identity is remembered by a flow while the flow is one, and not by its row when it is over or ended."""
    kernel.apply([*BASE, rule(ALLOW, PEERS, UDP, 443), rule(ALLOW, PEERS, UDP, 443, number=3)])
    question = frame(CLIENT, PEER, UDP, udp(40000, 443))
    assert kernel.judge(Direction.EGRESS, question) is Reason.PASS_POLICY
    assert kernel.tables.flow_identities() == {PEERS}
    kernel.advance(62)
    assert kernel.flows()
    assert not kernel.tables.flow_identities()
    assert kernel.judge(Direction.EGRESS, question) is Reason.PASS_POLICY
    kernel.apply([group(2)])
    assert kernel.judge(Direction.EGRESS, question) is Reason.DROP_POLICY
    assert not kernel.tables.flow_identities()
    assert [flow.state for flow in kernel.tables.flows()] == [abi.FlowState.ENDED]
