"""Bug cases of packets that are not plain TCP or UDP: fragments, ICMP on the way, other protocols, senders of raw frames."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.netns.asking import ask, connect
from tests.netns.lab import Capture, Lab
from tests.netns.running import RunningAgent
from tests.netns.sending import dropping, reasons, seen, send_frames
from tests.packets import GRE, TCP, UDP, fragment4, fragment6, frame, tcp, udp

pytestmark = pytest.mark.root

PEERS = ("203.0.113.12", "203.0.113.14", "203.0.113.18")
PREFIX = "2001:db8:114::/64"
FAR = ("198.51.100.115", "2001:db8::115")
RECORDS = {f"n{case}.test.": [f"A 198.51.100.{case}"] for case in (112, 118, 119)} | {
    "n115.test.": [f"A {FAR[0]}", f"AAAA {FAR[1]}"]
}
HEAD = "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: p}\nspec:\n  endpointSelector: {}\n"

# One datagram of so many octets; what comes back: `echoed`, `silence`, or the error.
_DATAGRAM = """
import socket, sys
address, port, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
s = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
s.connect((address, port))
s.settimeout(1)
datagram = bytes(range(250)) * (size // 250)
try:
    s.send(datagram)
    print("echoed" if s.recv(65536) == datagram else "another datagram")
except TimeoutError:
    print("silence")
except OSError as error:
    print(error.strerror.lower())
"""

# A server that says how many octets it was sent; and a client that sends so many and prints that.
_SINK = """
import socket, sys, threading

def serve(s):
    while True:
        connection, _ = s.accept()
        with connection:
            octets = 0
            while more := connection.recv(65536):
                octets += len(more)
            connection.sendall(str(octets).encode())

servers = [socket.create_server(("", 443)), socket.create_server(("::", 443), family=socket.AF_INET6)]
threads = [threading.Thread(target=serve, args=(s,)) for s in servers]
for thread in threads: thread.start()
print("ready", flush=True)
"""
_TRANSFER = """
import socket, sys
with socket.create_connection((sys.argv[1], 443), timeout=10) as s:
    s.sendall(bytes(int(sys.argv[2])))
    s.shutdown(socket.SHUT_WR)
    print(s.recv(64).decode())
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(records=RECORDS, ports=(443, 9000, 9001)) as lab:
        for peer in PEERS:
            lab.run(lab.internet, "ip", "route", "add", "local", peer, "dev", "lo")
        lab.run(lab.internet, "ip", "-6", "route", "add", "local", PREFIX, "dev", "lo")
        yield lab


@pytest.fixture(scope="module")
def agent(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """For the cases that are about no start: each puts its own policy in force."""
    with RunningAgent(lab, "nothing.test\n", tmp_path_factory.mktemp("agent")) as agent:
        yield agent


def datagram(lab: Lab, address: str, port: int, octets: int = 250) -> str:
    return lab.run(lab.client.namespace, sys.executable, "-c", _DATAGRAM, address, str(port), str(octets)).stdout.strip()


def captured(lab: Lab, name: str, expression: str) -> tuple[Capture, Capture]:
    """One capture at the client and one in front of the internet."""
    near = lab.capture(lab.client.namespace, lab.client.device, expression, name=f"{name}-near")
    return near, lab.capture(lab.host, lab.uplink, expression, name=f"{name}-far")


def test_case_112_no_port_is_read_from_the_payload_of_a_later_fragment(lab: Lab, agent: RunningAgent) -> None:
    """Without its first one a fragment is dropped in silence, whatever its octets say; the datagram itself passes (18, 19)."""
    own, allowed, unknown = lab.client.addresses[0], "198.51.100.112", "203.0.113.12"
    agent.apply("n112.test:443/udp\n")
    assert ask(lab, "n112.test").status == "NOERROR"
    near, far = captured(lab, "112", f"host {allowed} or host {unknown}")
    with near, far:
        with dropping(agent, fragment=2):
            ports = udp(443, 443)
            send_frames(lab, [fragment4(own, peer, UDP, ports, 185, False, 112) for peer in (allowed, unknown)])
        assert datagram(lab, allowed, 443) == "echoed"
    assert [packet.destination_port for packet in seen(far, source=own)] == [443]
    assert far.taken == 2, "the datagram and its echo"
    assert near.taken == 4, "the fragments were answered"


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("ports", ["every", "9000"])
def test_case_114_later_fragments_follow_the_first(lab: Lab, agent: RunningAgent, version: int, ports: str) -> None:
    """A datagram of 4,000 octets passes or is dropped whole; what comes ahead of its first is dropped and counted (18)."""
    own, peer = lab.client.addresses[version == 6], "203.0.113.14" if version == 4 else "2001:db8:114::14"
    policy = f"203.0.113.0/24\n{PREFIX}\n"
    if ports == "9000":
        rule = "toPorts: [{ports: [{port: '9000', protocol: UDP}]}]"
        policy = f"{HEAD}  egress: [{{toCIDR: [203.0.113.0/24, '{PREFIX}'], {rule}}}]\n"
    agent.apply(policy)
    # The first one shows the path whole; three fragments each.
    with dropping(agent):
        assert datagram(lab, peer, 9000, 4000) == "echoed"
    near, far = captured(lab, f"114-{version}-{ports}", f"src {own} and dst {peer}")
    with near, far:
        if ports == "every":
            with dropping(agent):
                assert datagram(lab, peer, 9001, 4000) == "echoed"
        else:
            with dropping(agent, policy=1, fragment=2):
                assert datagram(lab, peer, 9001, 4000) == "silence"
    assert (near.taken, far.taken) == (3, 3 if ports == "every" else 0)
    fragment = fragment4 if version == 4 else fragment6
    pieces = [udp(4114, 9000, bytes(2000))[place : place + 1000] for place in (0, 1000, 2000)]
    number = 114 + (ports == "9000")  # a datagram's number is remembered for a minute
    made = [fragment(own, peer, UDP, piece, place * 125, place < 2, number) for place, piece in enumerate(pieces)]
    near, far = captured(lab, f"114-{version}-{ports}-ahead", f"src {own} and dst {peer}")
    with near, far, dropping(agent, fragment=2):
        send_frames(lab, [made[1], made[2], made[0]])
    assert (near.taken, far.taken) == (3, 1)
    with dropping(agent):
        send_frames(lab, made[1:])


def test_case_115_a_router_on_the_way_can_say_that_a_packet_is_too_big(lab: Lab, agent: RunningAgent) -> None:
    """1 MB to a server behind a hop with an MTU of 1280, over IPv4 and IPv6: the messages of that hop reach the client (16)."""
    octets = 1_000_000
    beyond = f"{lab.host.removesuffix('host')}beyond"
    lab.run(lab.host, "ip", "netns", "add", beyond)
    try:
        lab.settle(beyond, {"ipv6/conf/all/accept_dad": 0, "ipv6/conf/default/accept_dad": 0})
        lab.settle(lab.internet, {"ipv4/ip_forward": 1, "ipv6/conf/all/forwarding": 1})
        for line in (
            f"link add hop0 mtu 1280 type veth peer name eth0 mtu 1500 netns {beyond}",
            "addr add 10.9.115.1/30 dev hop0",
            "addr add 2001:db8:9::1/64 dev hop0",
            "link set hop0 up",
            f"route add {FAR[0]}/32 via 10.9.115.2 table local",  # where the range is, of which it is one address
            f"-6 route add {FAR[1]}/128 via 2001:db8:9::2",
        ):
            lab.run(lab.internet, "ip", *line.split())
        for line in (
            "link set lo up",
            f"addr add {FAR[0]}/32 dev lo",
            f"addr add {FAR[1]}/128 dev lo",
            "addr add 10.9.115.2/30 dev eth0",
            "addr add 2001:db8:9::2/64 dev eth0",
            "link set eth0 up",
            "route add default via 10.9.115.1",
            "-6 route add default via 2001:db8:9::1",
        ):
            lab.run(beyond, "ip", *line.split())
        server = lab.start(beyond, sys.executable, "-c", _SINK)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        agent.apply("n115.test:443/tcp\n")
        too_big = (
            "icmp[icmptype] == 3 and icmp[icmpcode] == 4 and src 203.0.113.2",
            "icmp6 and ip6[40] == 2 and src 2001:db8:2::2",
        )
        near4, near6 = (
            lab.capture(lab.client.namespace, lab.client.device, expression, name=f"115-{place}")
            for place, expression in enumerate(too_big)
        )
        with near4, near6, dropping(agent):
            for kind, address in zip(("A", "AAAA"), FAR, strict=True):
                assert ask(lab, "n115.test", kind).addresses == (address,)
                done = lab.run(lab.client.namespace, sys.executable, "-c", _TRANSFER, address, str(octets))
                assert done.stdout == f"{octets}\n"
        assert min(near4.taken, near6.taken) > 0, "the hop never said so"
        with dropping(agent, policy=1):
            assert connect(lab, "203.0.113.18") == "connection refused"
    finally:
        lab.run(lab.host, "ip", "netns", "del", beyond, check=False)


@pytest.mark.parametrize("entry", ["n118.test:443/tcp", "n118.test"])
def test_case_118_other_protocols_need_a_rule_for_the_address(lab: Lab, agent: RunningAgent, entry: str) -> None:
    """GRE passes where the name is allowed for every protocol; a sender of raw frames has no more rights than others (18)."""
    own, peer, unknown = lab.client.addresses[0], "198.51.100.118", "203.0.113.18"
    gre = [frame(own, peer, GRE, bytes(8))]
    agent.apply(f"{entry}\n")
    assert ask(lab, "n118.test").status == "NOERROR"
    near, far = captured(lab, f"118-{entry.count(':')}", f"src {own} and (dst {peer} or dst {unknown})")
    with near, far:
        if entry == "n118.test":
            with dropping(agent):
                send_frames(lab, gre)
        else:
            with dropping(agent, policy=1):
                send_frames(lab, gre)
        with dropping(agent, policy=3):
            raw = [(GRE, bytes(8)), (TCP, tcp(4118, 443)), (UDP, udp(4118, 443))]
            send_frames(lab, [frame(own, unknown, protocol, payload) for protocol, payload in raw])
        assert connect(lab, peer) == "connected"
    assert [packet.protocol for packet in seen(far)[:2]] == ([GRE, TCP] if entry == "n118.test" else [TCP, TCP])
    assert seen(far, destination=unknown) == []
    assert len(seen(near, destination=unknown)) == 3


def test_case_119_udp_has_to_be_allowed_by_a_rule_of_its_own(lab: Lab, agent: RunningAgent) -> None:
    """To the port that TCP may use UDP is refused by ICMP "administratively prohibited", until a rule allows it (19)."""
    agent.apply("n119.test:443/tcp\n")
    assert ask(lab, "n119.test").status == "NOERROR"
    prohibited = "icmp[icmptype] == 3 and icmp[icmpcode] == 13"
    near = lab.capture(lab.client.namespace, lab.client.device, prohibited, name="119-near")
    with near, dropping(agent, policy=1):
        assert datagram(lab, "198.51.100.119", 443) == "no route to host"  # what Linux makes of it
    assert len(seen(near)) == 1
    assert reasons(agent, "198.51.100.119") == [("policy", "no rule for this port: n119.test.")]
    assert connect(lab, "198.51.100.119") == "connected"
    agent.apply("n119.test:443/tcp\nn119.test:443/udp\n")
    assert datagram(lab, "198.51.100.119", 443) == "echoed"
