"""The host itself as an endpoint: its own sockets, not what it forwards; the agent's own questions; an address that changes.

"Host" is the lab's host namespace. The uplink is the lab's; the client behind the host is no endpoint here.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.netns import pcap
from tests.netns.asking import ask, connect
from tests.netns.flooding import Flood, times_at
from tests.netns.lab import HOST_UPLINK, INTERNET_UPLINK, NAME_SERVERS, Client, Lab
from tests.netns.running import RunningAgent
from tests.netns.test_interfaces import batch

pytestmark = pytest.mark.root

ALLOWED = ("198.51.100.11", "2001:db8:53::11")
DENIED = ("198.51.100.66", "2001:db8:53::66")
# Closed in both directions: nothing may come in but what belongs to what went out.
POLICY = """
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: host}
spec:
  endpointSelector: {matchLabels: {app: host}}
  egress: [{toFQDNs: [{matchName: a.test}], toPorts: [{ports: [{port: "443", protocol: ANY}]}]}]
  ingress: [{}]
  enableDefaultDeny: {egress: true, ingress: true}
"""
ENDPOINTS = [{"interface": "up0", "labels": {"app": "host"}, "orientation": "uplink"}]


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(records={"a.test.": [f"A {ALLOWED[0]}", f"AAAA {ALLOWED[1]}"]}, ports=(443,)) as lab:
        yield lab


@pytest.fixture
def agent(lab: Lab, tmp_path: Path) -> Iterator[RunningAgent]:
    with RunningAgent(lab, POLICY, tmp_path / "agent", endpoints=ENDPOINTS) as agent:
        yield agent


def host(lab: Lab) -> Client:
    """The host as one that asks and connects."""
    return Client(lab.host, lab.uplink, lab.uplink, HOST_UPLINK, INTERNET_UPLINK)


# What each failed, and how long it took: `tcp refused 0.3` in milliseconds.
_FAIL = """
import socket, sys, time
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
for kind, word in ((socket.SOCK_STREAM, "tcp"), (socket.SOCK_DGRAM, "udp")):
    s = socket.socket(family, kind)
    s.settimeout(2)
    began = time.monotonic()
    try:
        s.connect((sys.argv[1], 443))
        s.send(b"x")
        s.recv(1)
        said = "passed"
    except OSError as error:
        said = type(error).__name__
    print(word, said, (time.monotonic() - began) * 1000)
"""


@pytest.mark.parametrize("family", [0, 1], ids=["v4", "v6"])
def test_a_name_opens_its_address_to_the_host_and_nothing_else(lab: Lab, agent: RunningAgent, family: int) -> None:
    """Whoever it asks; what is denied fails within 50 ms, TCP and UDP, and no packet of it leaves."""
    with lab.capture(lab.internet, "eth0", f"host {DENIED[family]}", name="denied") as wire:
        shown = lab.run(lab.host, sys.executable, "-c", _FAIL, DENIED[family]).stdout.split()
        assert (shown[0], shown[3]) == ("tcp", "udp")
        assert shown[1] == "ConnectionRefusedError"
        assert shown[4] in {"ConnectionRefusedError", "PermissionError", "OSError"}
        assert max(float(shown[2]), float(shown[5])) < 50, shown
        assert connect(lab, ALLOWED[family], client=host(lab)).endswith("refused")
        for server in (*NAME_SERVERS, "198.51.100.200"):
            for transport in ("+notcp", "+tcp"):
                answer = ask(lab, "a.test", ("A", "AAAA")[family], transport, client=host(lab), server=server)
                assert (answer.status, answer.addresses, answer.server) == ("NOERROR", (ALLOWED[family],), server)
                assert ask(lab, "evil.test", "A", transport, client=host(lab), server=server).status == "NXDOMAIN"
                assert connect(lab, ALLOWED[family], client=host(lab)) == "connected"
    assert pcap.read(wire.path).packets == ()
    assert agent.status()["state"] == "enforcing", agent.status()


def test_the_host_may_send_from_each_of_its_addresses(lab: Lab, agent: RunningAgent) -> None:
    """Also from those of its other interfaces; what is learned is open to them all."""
    for family, address in enumerate(lab.client.gateways):
        answer = ask(lab, "a.test", ("A", "AAAA")[family], "-b", address, client=host(lab), server=NAME_SERVERS[family])
        assert (answer.status, answer.addresses) == ("NOERROR", (ALLOWED[family],))
        assert connect(lab, ALLOWED[family], client=host(lab)) == "connected"
    assert [row for row in agent.ask("drops") if row["reason"] == "source"] == []


def test_one_question_goes_upstream_for_one_that_is_asked(lab: Lab, agent: RunningAgent) -> None:
    """The agent's own is not intercepted, or it would ask itself; the host's own never gets out as it was (case 135)."""
    with lab.capture(lab.internet, "eth0", "dst port 53", name="upstream") as wire:
        for _ in range(3):
            assert ask(lab, "a.test", client=host(lab), server="198.51.100.200").status == "NOERROR"
        assert ask(lab, "evil.test", client=host(lab)).status == "NXDOMAIN"
    questions = pcap.read(wire.path).packets
    assert {packet.destination for packet in questions} == {socket.inet_aton(NAME_SERVERS[0])}
    assert len([packet for packet in questions if b"\x01a\x04test" in packet.payload]) == 3
    assert len(questions) == 3
    assert agent.status()["counters"]["questions"] == 4


def connections(lab: Lab, namespace: str, port: str) -> str:
    """Those of port 53, and whose they are; `port`: on which side."""
    return lab.run(namespace, "ss", "-Htanp", "state", "connected", port, "=", ":53").stdout


def await_connections(lab: Lab, namespace: str, port: str, wanted: Callable[[str], bool]) -> None:
    deadline = time.monotonic() + 3
    while not wanted(found := connections(lab, namespace, port)):
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


@pytest.mark.parametrize("family", [0, 1], ids=["v4", "v6"])
def test_the_agents_connections_begin_and_end(lab: Lab, tmp_path: Path, family: int) -> None:
    """It asks over UDP and over TCP, and a connection's end reaches a server that is slow to end it: when it does, the agent's
    socket is gone, the kernel has the last word, and without it the server would wait for minutes."""
    upstreams = {"upstreams": [NAME_SERVERS[family]]}
    with RunningAgent(lab, POLICY, tmp_path / "agent", endpoints=ENDPOINTS, dns=upstreams) as agent:
        for transport in ("+notcp", "+tcp"):
            answer = ask(lab, "a.test", ("A", "AAAA")[family], transport, client=host(lab), server=NAME_SERVERS[family])
            assert (answer.status, answer.addresses) == ("NOERROR", (ALLOWED[family],))
        server = {int(pid) for pid in re.findall(r"pid=(\d+)", connections(lab, lab.internet, "sport"))}
        assert server
        for pid in server:
            os.kill(pid, signal.SIGSTOP)
        try:
            agent.end(signal.SIGTERM)
            await_connections(lab, lab.host, "dport", lambda found: "FIN-WAIT-2" in found)
        finally:
            for pid in server:
                os.kill(pid, signal.SIGCONT)
        await_connections(lab, lab.internet, "sport", lambda found: not found)


def test_what_the_host_forwards_passes_and_its_answers_come_back(lab: Lab, agent: RunningAgent) -> None:
    """The client behind the host is policed nowhere here: it reaches what the host may not, although nothing may come in."""
    for family in (0, 1):
        assert connect(lab, DENIED[family]) == "connected"
        assert connect(lab, DENIED[family], client=host(lab)).endswith("refused")
    assert ask(lab, "a.test").status == "NOERROR"
    assert agent.status()["counters"].get("questions", 0) == 0


def test_nothing_comes_in_to_the_host_by_any_of_its_addresses(lab: Lab, agent: RunningAgent) -> None:
    """The host answers for every address it has, whatever interface that is on; so the uplink judges them all."""
    listener = """
import socket, threading
for family in (socket.AF_INET, socket.AF_INET6):
    s = socket.create_server(("::" if family == socket.AF_INET6 else "", 443), family=family)
    threading.Thread(target=lambda s=s: [s.accept() for _ in range(99)], daemon=True).start()
print("ready", flush=True)
threading.Event().wait()
"""
    server = lab.start(lab.host, sys.executable, "-c", listener)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    internet = Client(lab.internet, "eth0", "eth0", INTERNET_UPLINK, HOST_UPLINK)
    for address in (*HOST_UPLINK, *lab.client.gateways):
        assert connect(lab, address, client=internet, within_s=0.3) == "timed out", address
    for address in lab.client.gateways:
        assert connect(lab, address) == "connected"
    assert {row["reason"] for row in agent.ask("drops")} == {"policy"}


def await_address(agent: RunningAgent, address: str) -> None:
    agent.await_status(lambda _: address in agent.ask("endpoints")[0]["addresses"], within_s=2)


def test_an_address_that_changes_changes_nothing_else(lab: Lab, agent: RunningAgent) -> None:
    """The host gets another address, as from DHCP: the same endpoint, judged in every moment, and what it learned stays."""
    (before,) = agent.ask("endpoints")
    assert ask(lab, "a.test", client=host(lab)).addresses == (ALLOWED[0],)
    assert connect(lab, ALLOWED[0], client=host(lab)) == "connected"
    lab.settle(lab.host, {"ipv4/conf/up0/promote_secondaries": 1})
    with (
        lab.capture(lab.internet, "eth0", f"host {DENIED[0]}", name="changing") as wire,
        Flood(lab, lab.host, DENIED[0]) as sender,
    ):
        sender.await_first()
        for new, old in (("203.0.113.7", "203.0.113.1"), ("203.0.113.8", "203.0.113.7")):
            batch(lab, lab.host, f"addr add {new}/24 dev up0", f"addr del {old}/24 dev up0")
            batch(lab, lab.host, f"route replace default via {INTERNET_UPLINK[0]}")
            await_address(agent, new)
            assert connect(lab, ALLOWED[0], client=host(lab)) == "connected"
    assert times_at(wire.path, DENIED[0]) == []
    (after,) = agent.ask("endpoints")
    assert (after["endpoint"], "203.0.113.8" in after["addresses"]) == (before["endpoint"], True)
    assert ask(lab, "a.test", client=host(lab)).addresses == (ALLOWED[0],)
    assert "detached" not in agent.log.read_text()


def test_dhcp_passes_on_an_uplink(lab: Lab, agent: RunningAgent) -> None:
    """Or the host would lose its address with the next lease (case 103)."""
    discover = (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.setsockopt(1, socket.SO_BROADCAST, 1); "
        "s.setsockopt(1, socket.SO_BINDTODEVICE, b'up0'); s.bind(('', 68)); s.sendto(b'x', ('255.255.255.255', 67))"
    )
    with lab.capture(lab.internet, "eth0", "udp port 67", name="dhcp") as wire:
        for device in ("up0", "ep1"):
            lab.run(lab.host, "ip", "-4", "addr", "flush", "dev", device)
        lab.run(lab.host, sys.executable, "-c", discover)
    assert [(packet.source, packet.destination_port) for packet in pcap.read(wire.path).packets] == [(bytes(4), 67)]
    assert [row for row in agent.ask("drops") if row["port"] == 67] == []


@pytest.mark.parametrize(
    ("dns", "sentence"),
    [
        ({"upstreams": ["127.0.0.1"]}, "upstream 127.0.0.1 is on this host, and `up0` is an uplink"),
        ({"upstreams": ["192.0.2.5"]}, "upstream 192.0.2.5 is on this host, and `up0` is an uplink"),
    ],
)
def test_a_start_that_would_ask_itself_is_refused(lab: Lab, tmp_path: Path, dns: dict[str, Any], sentence: str) -> None:
    """One sentence with the remedy, exit code 2, nothing attached (case 135)."""
    policy, configuration = tmp_path / "policy.yaml", tmp_path / "namegate.yaml"
    policy.write_text(POLICY)
    config = {"endpoints": ENDPOINTS, "policies": [str(policy)], "dns": dns, "control": {"socket": str(tmp_path / "control")}}
    configuration.write_text(yaml.safe_dump(config))
    done = lab.run(lab.host, sys.executable, "-m", "agent", "agent", "-c", configuration, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert lab.run(lab.host, "ip", "-o", "link").stdout.count("ng-gate") == 0
    assert connect(lab, DENIED[0], client=host(lab)) == "connected"
