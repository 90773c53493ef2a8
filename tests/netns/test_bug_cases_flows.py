"""Bug cases of running flows: what ends one, what does not, and what never was one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.netns.asking import ask, connect
from tests.netns.lab import Lab
from tests.netns.running import RunningAgent
from tests.netns.sending import (
    Conversation,
    counts,
    dropping,
    reasons,
    rows,
    seen,
    send_frames,
    send_from_internet,
)
from tests.packets import ACK, PUSH, RST, SYN, TCP, frame, tcp

pytestmark = pytest.mark.root

PEERS = ("203.0.113.5", "203.0.113.58")
RECORDS = {f"n{case}.test.": [f"A 198.51.100.{case}"] for case in (155, 156, 158, 162)}
HEAD = "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: p}\nspec:\n  endpointSelector: {}\n"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(records=RECORDS, ports=(443,)) as lab:
        for peer in PEERS:
            lab.run(lab.internet, "ip", "route", "add", "local", peer, "dev", "lo")
        yield lab


def flows_with(agent: RunningAgent, table: str, address: str) -> int:
    """Rows of `flows` or `ended` with this peer; addresses are v4-mapped."""
    mapped = bytes(10) + b"\xff\xff" + bytes(map(int, address.split(".")))
    return sum(key[20:36] == mapped for key, _ in rows(agent, table))


@pytest.mark.parametrize("first", ["client", "peer"])
def test_case_155_a_permission_that_is_taken_away_ends_the_flow(lab: Lab, tmp_path: Path, first: str) -> None:
    """At the next packet, whoever sends it; the peer does not bring the flow back, and another name's goes on (15, 17)."""
    kept = "n156.test:443/tcp\n"
    with RunningAgent(lab, f"n155.test:443/tcp\n{kept}", tmp_path / "agent") as agent:
        for name in ("n155.test", "n156.test"):
            assert ask(lab, name).status == "NOERROR"
        with Conversation(lab, "198.51.100.155") as talk, Conversation(lab, "198.51.100.156") as other:
            late = frame("198.51.100.155", lab.client.addresses[0], TCP, tcp(443, talk.port, ACK | PUSH, b"late"))
            assert (talk.say(), other.say()) == ("echoed", "echoed")
            agent.apply(kept)
            near = lab.capture(lab.client.namespace, lab.client.device, "host 198.51.100.155", name=f"155-{first}-near")
            far = lab.capture(lab.host, lab.uplink, "host 198.51.100.155", name=f"155-{first}-far")
            with near, far:
                if first == "peer":
                    with dropping(agent, policy=1):
                        send_from_internet(lab, [late])
                    assert flows_with(agent, "ended", "198.51.100.155") == 1
                with dropping(agent, policy=1):
                    assert talk.say() == "connection reset by peer"
                assert flows_with(agent, "ended", "198.51.100.155") == 1
                with dropping(agent, flow_ended=2):
                    send_from_internet(lab, [late, late])
                segment = frame(lab.client.addresses[0], "198.51.100.155", TCP, tcp(talk.port, 443, ACK, b"more"))
                with dropping(agent, policy=1):
                    send_frames(lab, [segment])
                assert connect(lab, "198.51.100.155") == "connection refused"
                assert other.say() == "echoed"
            assert seen(far, source=lab.client.addresses[0]) == []
            assert {packet.flags & RST for packet in seen(near, source="198.51.100.155")} == {RST}
        assert set(reasons(agent, "198.51.100.155")) == {("policy", "no rule for this name: n155.test.")}


def test_case_156_the_end_of_a_lifetime_cuts_no_running_flow(lab: Lab, tmp_path: Path) -> None:
    """A flow outlives four lifetimes of its address, and new ones beside it pass; once it is gone the address closes (15)."""
    dns = {"ttl-floor": "2s", "ttl-cap": "2s", "keep-while-flow-seen": "2s"}
    with RunningAgent(lab, "n156.test:443/tcp\n", tmp_path / "agent", dns=dns) as agent:
        assert ask(lab, "n156.test").status == "NOERROR"
        begun = time.monotonic()
        with Conversation(lab, "198.51.100.156", patience_s=0.3) as talk:
            while (elapsed := time.monotonic() - begun) < 8:
                assert talk.say() == "echoed", f"after {elapsed:.1f} s"
                assert talk.listen() == "silence"
                if elapsed > 4:
                    assert connect(lab, "198.51.100.156") == "connected"
        assert counts(agent)["policy"] == 0
        agent.await_status(lambda status: status["names"] == 0, within_s=10)
        with dropping(agent, policy=1):
            assert connect(lab, "198.51.100.156") == "connection refused"
        assert reasons(agent, "198.51.100.156") == [("policy", "expired: n156.test.")]
        assert ask(lab, "n156.test").status == "NOERROR"
        assert connect(lab, "198.51.100.156") == "connected"


def test_case_158_a_denied_syn_leaves_no_state(lab: Lab, tmp_path: Path) -> None:
    """What the peer sends on the same ports, and the client's answer to that, are no flow; the SYN gets our reset (17, 19)."""
    policy = HEAD + "  ingress: [{}]\n  egress:\n  - toFQDNs: [{matchName: n158.test}]\n"
    policy += "    toPorts: [{ports: [{port: '443', protocol: TCP}]}]\n"
    client, peer = lab.client.addresses[0], "203.0.113.58"
    with RunningAgent(lab, policy, tmp_path / "agent") as agent:
        near = lab.capture(lab.client.namespace, lab.client.device, f"host {peer}", name="158-near")
        far = lab.capture(lab.host, lab.uplink, f"host {peer}", name="158-far")
        with near, far:
            with dropping(agent, policy=1):
                send_frames(lab, [frame(client, peer, TCP, tcp(4158, 443))])
            with dropping(agent, policy=2):
                answers = [tcp(443, 4158, SYN | ACK), tcp(443, 4158, ACK | PUSH, b"data")]
                send_from_internet(lab, [frame(peer, client, TCP, answer) for answer in answers])
            with dropping(agent, policy=1):
                send_frames(lab, [frame(client, peer, TCP, tcp(4158, 443, ACK))])
        assert flows_with(agent, "flows", peer) + flows_with(agent, "ended", peer) == 0
        assert seen(far, source=client) == []
        assert [packet.flags & RST for packet in seen(near, source=peer)] == [RST, RST]
        assert ask(lab, "n158.test").status == "NOERROR"
        with Conversation(lab, "198.51.100.158") as talk:
            assert talk.say() == "echoed"
        assert flows_with(agent, "flows", "198.51.100.158") == 1


@pytest.mark.parametrize("denied", ["answer", "drop"])
def test_case_160_flows_from_before_the_attachment_are_judged_as_new_ones(lab: Lab, tmp_path: Path, denied: str) -> None:
    """What the policy allows loses nothing; what needs a lookup is reset, or, where denials are silent, goes on after one."""
    client = lab.client
    endpoint = {"interface": client.endpoint, "addresses": list(client.addresses), "denied": denied}
    policy = "n162.test:443/tcp\n203.0.113.0/28\n"
    with Conversation(lab, "203.0.113.5") as allowed, Conversation(lab, "198.51.100.162", patience_s=5) as unknown:
        assert (allowed.say(), unknown.say()) == ("echoed", "echoed")
        allowed.begin(300)
        with RunningAgent(lab, policy, tmp_path / "agent", endpoints=[endpoint]) as agent:
            assert allowed.echoed() == (300, 0)
            unknown.begin(1)
            agent.await_status(lambda status: status["dropped"] > 0, within_s=5)
            assert reasons(agent, "198.51.100.162")[0] == ("policy", "not resolved through the proxy")
            if denied == "answer":
                assert unknown.echoed() == (0, 0)
                assert unknown.say() == "broken pipe"
            assert ask(lab, "n162.test").status == "NOERROR"
            if denied == "drop":
                echoed, again = unknown.echoed()
                assert (echoed, again > 0) == (1, True)
                assert unknown.say() == "echoed"
            assert connect(lab, "198.51.100.162") == "connected"
            assert allowed.say() == "echoed"
            assert reasons(agent, "203.0.113.5") == []
