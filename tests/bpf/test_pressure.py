"""Tables that are far too small for what happens: what is forgotten opens nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from agent.datapath.abi import FlowState, Reason
from tests.judges import SMALL_TABLES, KernelJudge
from tests.packets import ACK, CLIENT, OTHER, PEER, SYN, TCP, UDP, fragment4, frame, tcp, udp
from tests.verdict_cases import ALLOW, BASE, EGRESS, INGRESS, PEERS, group, holds, rule

pytestmark = pytest.mark.root

_FLOWS: Final = 256
_FLOOD: Final = 4_000
R = Reason


@pytest.fixture(scope="module")
def loaded() -> Iterator[KernelJudge]:
    judge = KernelJudge({**SMALL_TABLES, "FLOWS_MAX": _FLOWS, "ENDED_MAX": 128, "FRAGMENTS_MAX": 64})
    yield judge
    judge.close()


@pytest.fixture
def kernel(loaded: KernelJudge) -> KernelJudge:
    loaded.reset()
    loaded.apply(BASE)
    return loaded


def flood(kernel: KernelJudge, *, inward: bool = False) -> None:
    """So many flows from as many ports; of two datagrams each, for those of one only push out each other."""
    program = "to_endpoint" if inward else "from_endpoint"
    for port in range(_FLOOD):
        packet = udp(10_000 + port, 443)
        whole = frame(PEER, CLIENT, UDP, packet) if inward else frame(CLIENT, PEER, UDP, packet)
        assert kernel.run(program, whole, repeat=2, came_in_by=1 if inward else 0).action == -1
    kernel._forget_counts()
    assert len(list(kernel.tables._rows("flows"))) <= _FLOWS


def test_an_ended_flow_stays_ended(kernel: KernelJudge) -> None:
    """Ingress is open and the peer opens thousands of flows: the ended one is pushed out of the flows, and is ended still."""
    kernel.apply([rule(ALLOW, PEERS, UDP, 443), group(ingress=False)])
    question, answer = frame(CLIENT, PEER, UDP, udp(4, 443)), frame(PEER, CLIENT, UDP, udp(443, 4))
    assert kernel.judge(EGRESS, question) is R.PASS_POLICY
    kernel.apply([group(2, ingress=False)])
    assert kernel.judge(EGRESS, question) is R.DROP_POLICY
    kernel.advance(110)
    assert kernel.judge(INGRESS, answer) is R.DROP_FLOW_ENDED
    flood(kernel, inward=True)
    assert not [flow for flow in kernel.flows() if flow[3] == 4], "the flood was too small to push it out"
    assert [(flow.local_port, flow.state) for flow in kernel.tables.flows() if flow.local_port == 4] == [(4, FlowState.ENDED)]
    kernel.advance(110)
    assert kernel.judge(INGRESS, answer) is R.DROP_FLOW_ENDED
    assert kernel.judge(EGRESS, question) is R.DROP_POLICY
    kernel.advance(119)
    assert kernel.judge(INGRESS, answer) is R.DROP_FLOW_ENDED


def test_opened_again_it_is_ended_no_more(kernel: KernelJudge) -> None:
    """The endpoint's own SYN begins a new flow where policy allows it again, and its old end does not come back."""
    kernel.apply([rule(ALLOW), rule(ALLOW, number=3), rule(ALLOW, PEERS, UDP, 443, number=3)])
    opening, data, answer = (
        frame(CLIENT, PEER, TCP, tcp(40000, 443)),
        frame(CLIENT, PEER, TCP, tcp(40000, 443, ACK)),
        frame(PEER, CLIENT, TCP, tcp(443, 40000, SYN | ACK)),
    )
    assert kernel.judge(EGRESS, opening) is R.PASS_POLICY
    kernel.apply([group(2)])
    assert kernel.judge(EGRESS, data) is R.DROP_POLICY
    kernel.apply([group(3)])
    assert kernel.judge(INGRESS, answer) is R.DROP_FLOW_ENDED
    assert kernel.judge(EGRESS, opening) is R.PASS_POLICY
    assert kernel.judge(INGRESS, answer) is R.PASS_FLOW
    flood(kernel)
    assert kernel.judge(EGRESS, data) is R.PASS_POLICY


def test_what_is_pushed_out_is_judged_anew(kernel: KernelJudge) -> None:
    """Whatever the flood does, nothing denied gets in or out: a forgotten flow is a new one, by the rows of now."""
    kernel.apply([rule(ALLOW, PEERS, UDP, 443), rule(ALLOW), holds(OTHER, PEERS)])
    opening = frame(CLIENT, OTHER, TCP, tcp(40000, 443))
    answer = frame(OTHER, CLIENT, TCP, tcp(443, 40000, SYN | ACK))
    assert kernel.judge(EGRESS, opening) is R.PASS_POLICY
    assert kernel.judge(INGRESS, answer) is R.PASS_FLOW
    kernel.apply([holds(OTHER, None)])
    assert kernel.judge(INGRESS, answer) is R.PASS_FLOW, "the end of a lifetime does not cut"
    flood(kernel)
    assert kernel.judge(INGRESS, answer) is R.DROP_POLICY
    assert kernel.judge(EGRESS, frame(CLIENT, OTHER, TCP, tcp(40000, 443, ACK))) is R.DROP_POLICY
    for port in range(50):
        assert kernel.judge(INGRESS, frame(PEER, CLIENT, UDP, udp(443, 40_000 + port))) is R.DROP_POLICY


def test_a_flow_in_use_outlives_a_flood(kernel: KernelJudge) -> None:
    """One that is used again and again between new ones is not the one that goes."""
    kernel.apply([rule(ALLOW, PEERS, UDP, 443), rule(ALLOW)])
    assert kernel.judge(EGRESS, frame(CLIENT, PEER, TCP, tcp(40000, 443))) is R.PASS_POLICY
    answer = frame(PEER, CLIENT, TCP, tcp(443, 40000, ACK))
    for port in range(2_000):
        assert kernel.run("from_endpoint", frame(CLIENT, PEER, UDP, udp(10_000 + port, 443)), came_in_by=0).action == -1
        assert kernel.run("to_endpoint", answer).action == -1


def test_a_forgotten_first_fragment(kernel: KernelJudge) -> None:
    """Fragments whose first was pushed out are dropped, not guessed."""
    kernel.apply([rule(ALLOW, PEERS, UDP, 443)])
    first = [fragment4(CLIENT, PEER, UDP, udp(4, 443, bytes(16)), 0, more=True, number=each) for each in range(1, 600)]
    assert kernel.judge(EGRESS, first[0]) is R.PASS_POLICY
    for whole in first[1:]:
        assert kernel.judge(EGRESS, whole) is R.PASS_FLOW
    assert kernel.judge(EGRESS, fragment4(CLIENT, PEER, UDP, bytes(8), 3, more=False, number=1)) is R.DROP_FRAGMENT
