"""Kinds of endpoints, and the addresses they may send from: the same policy by veth, tap, bridge and bridge port."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.netns import pcap
from tests.netns.asking import ask, connect
from tests.netns.lab import HOST_UPLINK, NAME_SERVERS, NETNS_DIRECTORY, Lab
from tests.netns.running import RunningAgent
from tests.netns.test_interfaces import batch, states

pytestmark = pytest.mark.root

POLICY = "a.test:443/tcp\n"
ALLOWED = ("198.51.100.11", "2001:db8:53::11")
DENIED = ("198.51.100.66", "2001:db8:53::66")


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(records={"a.test.": [f"A {ALLOWED[0]}", f"AAAA {ALLOWED[1]}"]}, ports=(443,)) as lab:
        yield lab


# --- kinds -----------------------------------------------------------------------------------------------------------------

# A virtual machine as the host sees it: whoever holds the tap's descriptor. Its frames are those of a second tap, in the
# client's namespace, so that a whole network stack is behind it.
_MACHINE = """
import ctypes, fcntl, os, select, struct, sys

def tap(namespace, name):
    with open(namespace) as target:
        if ctypes.CDLL(None, use_errno=True).setns(target.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")
    fd = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(fd, 0x400454CA, struct.pack("16sH22x", name.encode(), 0x1002))  # TUNSETIFF: IFF_TAP | IFF_NO_PI
    return fd

ends = [tap(sys.argv[1], sys.argv[2]), tap(sys.argv[3], sys.argv[4])]
print("ready", flush=True)
while True:
    for fd in select.select(ends, [], [], 60)[0]:
        try:
            os.write(ends[1 - ends.index(fd)], os.read(fd, 65536))
        except OSError:
            pass
"""


def gateway(lab: Lab, device: str) -> list[str]:
    v4, v6 = lab.client.gateways
    return [f"addr add {v4}/30 dev {device}", f"addr add {v6}/64 dev {device}", f"link set {device} up"]


def connect_client(lab: Lab, device: str) -> None:
    """The client's addresses and routes, on this device."""
    (v4, v6), (via4, via6) = lab.client.addresses, lab.client.gateways
    lines = [f"addr add {v4}/30 dev {device}", f"addr add {v6}/64 dev {device}", f"link set {device} up"]
    batch(lab, lab.client.namespace, *lines, f"route add default via {via4}", f"route add default via {via6}")


def be_known(lab: Lab) -> None:
    """The client says something by each family, as one that was there before the agent: the host knows its neighbour then."""
    deadline = time.monotonic() + 10
    for address in ALLOWED:
        while connect(lab, address) != "connected":
            assert time.monotonic() < deadline, f"{address} cannot be reached"


def wire(lab: Lab, kind: str) -> str:
    """Put the client behind such an interface instead of the lab's veth; gives back its name."""
    if kind == "veth":
        return lab.client.endpoint
    batch(lab, lab.host, f"link del {lab.client.endpoint}")
    if kind == "tap":
        ends = (NETNS_DIRECTORY / lab.host, "tap0", NETNS_DIRECTORY / lab.client.namespace, "guest0")
        machine = lab.start(lab.host, sys.executable, "-c", _MACHINE, *ends)
        assert machine.stdout is not None
        assert machine.stdout.readline() == "ready\n"
        batch(lab, lab.host, *gateway(lab, "tap0"))
        connect_client(lab, "guest0")
        return "tap0"
    port = ["link add port1 type veth peer name eth0 netns " + lab.client.namespace, "link set port1 up master br0"]
    batch(lab, lab.host, "link add br0 type bridge", *port, *gateway(lab, "br0"))
    if kind.endswith("with nf"):
        lab.settle(lab.host, {"bridge/bridge-nf-call-iptables": 1, "bridge/bridge-nf-call-ip6tables": 1})
    connect_client(lab, "eth0")
    return "br0" if kind == "bridge" else "port1"


@pytest.mark.parametrize("kind", ["veth", "tap", "bridge", "bridge port", "bridge port with nf"])
def test_the_same_policy_on_every_kind(lab: Lab, tmp_path: Path, kind: str) -> None:
    """Both families: a name opens its address for the first packet, nothing else gets out and is refused at once."""
    if kind.endswith("with nf") and not Path("/proc/sys/net/bridge").is_dir():
        pytest.skip("the kernel has no br_netfilter")
    endpoint: dict[str, Any] = {"interface": wire(lab, kind), "labels": {"app": "e1"}}
    if kind.startswith("bridge port"):
        endpoint["addresses"] = list(lab.client.addresses)
    be_known(lab)
    with RunningAgent(lab, POLICY, tmp_path / "agent", endpoints=[endpoint]) as agent:
        with lab.capture(lab.host, lab.uplink, f"host {DENIED[0]} or host {DENIED[1]}", name="denied") as uplink:
            for family, (name_server, kind_of_record) in enumerate(zip(NAME_SERVERS, ("A", "AAAA"), strict=True)):
                for address in (ALLOWED[family], DENIED[family]):
                    began = time.monotonic()
                    assert connect(lab, address).endswith("refused"), address
                    assert time.monotonic() - began < 0.5  # of which an interpreter's start is the most
                for transport in ("+notcp", "+tcp"):
                    answer = ask(lab, "a.test", kind_of_record, transport, server=name_server)
                    assert (answer.status, answer.addresses) == ("NOERROR", (ALLOWED[family],))
                    assert ask(lab, "evil.test", kind_of_record, transport, server=name_server).status == "NXDOMAIN"
                assert connect(lab, ALLOWED[family]) == "connected"
                assert connect(lab, DENIED[family]).endswith("refused")
        assert pcap.read(uplink.path).packets == ()
        assert agent.status()["state"] == "enforcing", agent.status()


# --- own addresses ---------------------------------------------------------------------------------------------------------


def own_addresses(agent: RunningAgent) -> set[str]:
    """What the endpoints may send from."""
    return {address for row in agent.ask("endpoints") for address in row["addresses"]}


def test_an_address_of_the_interfaces_own_network_is_known_when_it_is_used(lab: Lab, tmp_path: Path) -> None:
    """Nothing was configured and nothing said before: the first claim makes it known, the next passes."""
    lab.run(lab.host, "ip", "neigh", "flush", "dev", "ep1")
    lab.run(lab.client.namespace, "ip", "neigh", "flush", "dev", "eth0")
    endpoints = [{"interface": "ep1", "labels": {"app": "e1"}}]
    with RunningAgent(lab, POLICY, tmp_path / "agent", endpoints=endpoints, wait_for="degraded") as agent:
        assert "ep1 has no address yet, so everything it sends is dropped" in agent.status()["reasons"][0]
        assert ask(lab, "a.test", "A", "+tries=3", "+time=2").addresses == (ALLOWED[0],)
        assert connect(lab, ALLOWED[0]) == "connected"
        assert ask(lab, "a.test", "AAAA", "+tries=3", "+time=2", server=NAME_SERVERS[1]).addresses == (ALLOWED[1],)
        assert connect(lab, ALLOWED[1]) == "connected"
        agent.await_status(lambda status: status["state"] == "enforcing", within_s=5)
        assert own_addresses(agent) == set(lab.client.addresses)


_SEND_FROM = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind((sys.argv[1], 0))
for _ in range(3): s.sendto(b"x", (sys.argv[2], 443))
"""


def test_another_address_than_its_own_never_is(lab: Lab, tmp_path: Path) -> None:
    """Outside the interface's network, or the host's own: dropped however often it is tried, and not learned."""
    be_known(lab)
    endpoints = [{"interface": "ep1", "labels": {"app": "e1"}}]
    stolen = ("192.0.2.77", HOST_UPLINK[0], lab.client.gateways[0])
    with RunningAgent(lab, "198.51.100.11:443\n", tmp_path / "agent", endpoints=endpoints) as agent:
        with lab.capture(lab.host, lab.uplink, "udp", name="stolen") as uplink:
            for address in stolen:
                batch(lab, lab.client.namespace, f"addr add {address}/32 dev lo")
                lab.run(lab.client.namespace, sys.executable, "-c", _SEND_FROM, address, ALLOWED[0])
            agent.await_status(lambda _: [row["source"] for row in agent.ask("drops")].count(stolen[-1]) >= 3, within_s=5)
        assert pcap.read(uplink.path).packets == ()
        assert {(row["source"], row["reason"]) for row in agent.ask("drops")} == {(address, "source") for address in stolen}
        assert own_addresses(agent) == set(lab.client.addresses)


def test_what_was_used_before_the_start_is_known_at_the_start(lab: Lab, tmp_path: Path) -> None:
    """By the host's neighbour table: a workload that is running already loses no packet to learning."""
    be_known(lab)
    endpoints = [{"interface": "ep[0-9]", "labels": {"app": "e1"}}]
    with RunningAgent(lab, POLICY, tmp_path / "agent", endpoints=endpoints) as agent:
        assert own_addresses(agent) == set(lab.client.addresses)
        assert states(agent) == {"ep1": "enforcing"}
        assert ask(lab, "a.test").addresses == (ALLOWED[0],)
        assert connect(lab, ALLOWED[0]) == "connected"


def test_a_route_to_one_address_is_an_address(lab: Lab, tmp_path: Path) -> None:
    """It may come later; it goes with the route, and the endpoint stays what it is."""
    lab.run(lab.host, "ip", "addr", "flush", "dev", "ep1")
    endpoints = [{"interface": "ep1", "labels": {"app": "e1"}}]
    with RunningAgent(lab, POLICY, tmp_path / "agent", endpoints=endpoints, wait_for="degraded") as agent:
        (before,) = agent.ask("endpoints")
        for address in lab.client.addresses:
            lab.run(lab.host, "ip", "route", "add", address, "dev", "ep1")
        agent.await_status(lambda status: status["state"] == "enforcing", within_s=2)
        assert own_addresses(agent) == set(lab.client.addresses)
        lab.run(lab.host, "ip", "route", "del", lab.client.addresses[1], "dev", "ep1")
        agent.await_status(lambda _: own_addresses(agent) == {lab.client.addresses[0]}, within_s=2)
        assert [row["endpoint"] for row in agent.ask("endpoints")] == [before["endpoint"]]


# --- DHCP and silence ------------------------------------------------------------------------------------------------------

_DISCOVER = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
s.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, sys.argv[1].encode())
s.bind(("", 68))
s.sendto(b"\\1\\1\\6", ("255.255.255.255", 67))
"""
_SERVER = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
s.bind(("", 67))
print("ready", flush=True)
print(s.recvfrom(100)[1][0], flush=True)
"""


@pytest.mark.parametrize(
    ("kind", "settings", "passes"), [("veth", {}, False), ("veth", {"dhcp": True}, True), ("tap", {}, True)]
)
def test_a_tap_may_ask_for_an_address(lab: Lab, tmp_path: Path, kind: str, settings: dict[str, bool], passes: bool) -> None:
    """And a veth where it is said; else it is dropped, as its source is not the endpoint's (case 103)."""
    endpoint = {"interface": wire(lab, kind), "addresses": list(lab.client.addresses), **settings}
    device = "guest0" if kind == "tap" else lab.client.device
    be_known(lab)
    lab.run(lab.client.namespace, "ip", "-4", "addr", "flush", "dev", device)
    with RunningAgent(lab, POLICY, tmp_path / "agent", endpoints=[endpoint]) as agent:
        server = lab.start(lab.host, sys.executable, "-c", _SERVER)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        lab.run(lab.client.namespace, sys.executable, "-c", _DISCOVER, device)
        if passes:
            assert server.stdout.readline() == "0.0.0.0\n"
        else:
            agent.await_status(lambda _: any(row["port"] == 67 for row in agent.ask("drops")), within_s=5)
            assert {(row["source"], row["reason"]) for row in agent.ask("drops") if row["port"] == 67} == {
                ("0.0.0.0", "source")
            }


def test_denied_drop_is_silent(lab: Lab, tmp_path: Path) -> None:
    """The client hears nothing, and has to wait for its own patience."""
    endpoint = {"interface": "ep1", "addresses": list(lab.client.addresses), "denied": "drop"}
    with RunningAgent(lab, POLICY, tmp_path / "agent", endpoints=[endpoint]) as agent:
        assert connect(lab, DENIED[0], within_s=0.3) == "timed out"
        assert [row["reason"] for row in agent.ask("drops") if row["destination"] == DENIED[0]] == ["policy"]
        assert ask(lab, "a.test").status == "NOERROR"
        assert connect(lab, ALLOWED[0]) == "connected"
