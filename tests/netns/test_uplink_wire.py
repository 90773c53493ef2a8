"""What else there is on an uplink's wire: macvlan children with namespaces of their own, the switch, those for whom the host
answers, a second uplink.

"Host" is the lab's host namespace, and the policy that of test_uplink.py: closed both ways but for a.test.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.netns import pcap
from tests.netns.asking import ask, connect
from tests.netns.lab import HOST_UPLINK, INTERNET_UPLINK, NAME_SERVERS, Capture, Client, Lab
from tests.netns.running import RunningAgent
from tests.netns.sending import Conversation, drop_counts, seen
from tests.netns.test_interfaces import batch
from tests.netns.test_uplink import ALLOWED, DENIED, ENDPOINTS, POLICY, host
from tests.packets import arp

pytestmark = pytest.mark.root

MARK = 0xA00
SECOND = ("10.77.0.1", "2001:db8:3::1")
BEYOND_SECOND = ("10.77.0.2", "2001:db8:3::2")


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(records={"a.test.": [f"A {ALLOWED[0]}", f"AAAA {ALLOWED[1]}"]}, ports=(443,)) as lab:
        yield lab


def agent_of(lab: Lab, directory: Path, **sections: object) -> RunningAgent:
    marked = {"mark": MARK, "mark-mask": 0xF00}
    return RunningAgent(lab, POLICY, directory / "agent", endpoints=ENDPOINTS, datapath=marked, **sections)  # type: ignore[arg-type]


def mac(lab: Lab, namespace: str, device: str) -> str:
    (link,) = json.loads(lab.run(namespace, "ip", "-j", "link", "show", "dev", device).stdout)
    return str(link["address"])


# --- a child of the uplink -------------------------------------------------------------------------------------------


@pytest.fixture
def child(lab: Lab) -> Iterator[Client]:
    """A macvlan device on the uplink, in a namespace of its own. The neighbours are told to it and it to them, for a policed
    uplink lets out no question of it for one."""
    namespace = lab.host.replace("-host", "-child")
    lab.run(lab.host, "ip", "netns", "add", namespace)
    try:
        lab.settle(namespace, {"ipv6/conf/all/accept_dad": 0, "ipv6/conf/default/accept_dad": 0})
        batch(lab, lab.host, f"link add eth0 link {lab.uplink} netns {namespace} type macvlan mode bridge")
        addresses, router = ("203.0.113.9", "2001:db8:2::9"), mac(lab, lab.internet, "eth0")
        batch(
            lab,
            namespace,
            "link set lo up",
            *(f"addr add {address}/{length} dev eth0" for address, length in zip(addresses, (24, 64), strict=True)),
            "link set eth0 up",
            *(f"neigh replace {address} lladdr {router} dev eth0" for address in INTERNET_UPLINK),
            *(f"route add default via {address}" for address in INTERNET_UPLINK),
        )
        own = mac(lab, namespace, "eth0")
        batch(lab, lab.internet, *(f"neigh replace {address} lladdr {own} dev eth0" for address in addresses))
        yield Client(namespace, "eth0", lab.uplink, addresses, INTERNET_UPLINK)
    finally:
        lab.run(lab.host, "ip", "netns", "del", namespace)


# Datagrams and connections under a mark, from these sources to port 443 of these addresses; a line for each that was answered.
_MARKED = """
import contextlib, select, socket, sys
mark, sources, addresses = int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3].split(",")
sent = {}
for source in sources:
    for address in addresses:
        if (":" in source) != (":" in address): continue
        for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
            s = socket.socket(socket.AF_INET6 if ":" in source else socket.AF_INET, kind)
            s.setblocking(False)
            s.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
            s.setsockopt(*((socket.IPPROTO_IPV6, 75, 1) if ":" in source else (socket.IPPROTO_IP, 19, 1)))  # TRANSPARENT
            s.bind((source, 0))
            with contextlib.suppress(BlockingIOError): s.connect((address, 443))
            if kind is socket.SOCK_DGRAM: s.send(b"x")
            sent[s] = kind
waiting = select.poll()
for s, kind in sent.items(): waiting.register(s, select.POLLIN if kind is socket.SOCK_DGRAM else select.POLLOUT)
by_number = {s.fileno(): s for s in sent}
while by_number and (ready := waiting.poll(400)):
    for number, _ in ready:
        waiting.unregister(number)
        s = by_number.pop(number)
        if not s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR): print(*s.getsockname()[:1], sent[s].name)
"""


def marked(lab: Lab, child: Client, sources: tuple[str, ...]) -> list[str]:
    arguments = (str(MARK), ",".join(sources), ",".join(DENIED))
    return lab.run(child.namespace, sys.executable, "-c", _MARKED, *arguments).stdout.splitlines()


def test_a_child_of_the_uplink_is_not_the_agent_by_its_mark(lab: Lab, child: Client, tmp_path: Path) -> None:
    """Root in a container on a macvlan may mark its packets like the agent's: they have a socket, but none of this host."""
    assert len(marked(lab, child, child.addresses)) == 4, "the child reaches nobody, so nothing is shown"
    denied = f"host {DENIED[0]} or host {DENIED[1]}"
    with agent_of(lab, tmp_path) as agent, lab.capture(lab.internet, "eth0", denied, name="marked") as wire:
        assert marked(lab, child, (*child.addresses, *HOST_UPLINK)) == []
        assert drop_counts(agent)["source"] >= 4  # from its own addresses
        assert drop_counts(agent)["policy"] >= 4  # from the host's
        assert ask(lab, "a.test", client=host(lab)).addresses == (ALLOWED[0],)
    assert pcap.read(wire.path).packets == ()


_ASK_AS = """
import socket, sys
source, port, server, mark = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
s.setsockopt(socket.IPPROTO_IP, 19, 1)  # TRANSPARENT
s.bind((source, port))
s.connect((server, 53))
s.send(bytes.fromhex("000001000001000000000000") + b"\\4evil\\4test\\0\\0\\1\\0\\1")
"""


def test_a_child_cannot_speak_for_a_socket_of_the_agent(lab: Lab, child: Client, tmp_path: Path) -> None:
    """Not even with the addresses and ports of one that is open: it is the very socket that counts."""
    with agent_of(lab, tmp_path), lab.capture(lab.internet, "eth0", "udp dst port 53", name="asked") as wire:
        assert ask(lab, "a.test", client=host(lab)).addresses == (ALLOWED[0],)
        opened = lab.run(lab.host, "ss", "-Hun", "dst", f"{NAME_SERVERS[0]}:53").stdout
        ports = re.findall(rf"{re.escape(HOST_UPLINK[0])}:(\d+)", opened)
        assert ports, "no socket of the agent's is open"
        for port in ports:
            lab.run(child.namespace, sys.executable, "-c", _ASK_AS, HOST_UPLINK[0], port, NAME_SERVERS[0], str(MARK))
        assert ask(lab, "a.test", "AAAA", client=host(lab)).addresses == (ALLOWED[1],)
    asked = [packet.payload for packet in pcap.read(wire.path).packets]
    assert asked
    assert not any(b"\4evil" in question for question in asked)


# --- the switch ------------------------------------------------------------------------------------------------------

# Says what it hears of one EtherType, as a supplicant does, until it has heard `last`.
_HEAR = """
import socket, sys
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(int(sys.argv[2], 16)))
s.bind((sys.argv[1], int(sys.argv[2], 16)))
s.settimeout(10)
print("ready", flush=True)
heard = []
while not heard or heard[-1] != "last":
    heard.append(s.recv(200)[14:].split(b"\\0")[0].decode())
print(*heard)
"""
_SEND = """
import contextlib, socket, sys
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
s.bind((sys.argv[1], 0))
for frame in sys.argv[2:]:
    with contextlib.suppress(OSError): s.send(bytes.fromhex(frame))
"""


def test_the_switch_hears_the_host_and_the_host_the_switch(lab: Lab, tmp_path: Path) -> None:
    """EAPOL and LLDP, or a port that wants the host to prove itself again would close. What everybody would get stays here."""
    ends = (lab.host, "up0"), (lab.internet, "eth0")
    with agent_of(lab, tmp_path):
        for ethertype, nearest in (("888e", "0180c2000003"), ("88cc", "0180c200000e")):
            for (here, device), (there, far) in (ends, ends[::-1]):
                ear = lab.start(there, sys.executable, "-c", _HEAR, far, ethertype)
                assert ear.stdout is not None
                assert ear.stdout.readline() == "ready\n"
                texts = (("ffffffffffff", b"everybody"), (nearest, b"nearest"), (nearest, b"last"))
                frames = (bytes.fromhex(to + "020000000001" + ethertype) + text.ljust(46, b"\0") for to, text in texts)
                lab.run(here, sys.executable, "-c", _SEND, device, *(frame.hex() for frame in frames))
                assert ear.stdout.readline() == "nearest last\n"


# --- those for whom the host answers ---------------------------------------------------------------------------------


def test_the_host_answers_for_whom_it_routes_to(lab: Lab, tmp_path: Path) -> None:
    """Proxy ARP and proxy neighbour discovery on a policed uplink: the client behind the host looks as if it were there."""
    lab.settle(lab.host, {"ipv4/conf/up0/proxy_arp": 1, "ipv6/conf/up0/proxy_ndp": 1})
    batch(lab, lab.host, f"neigh add proxy {lab.client.addresses[1]} dev up0")
    for address, length in zip(lab.client.addresses, (32, 128), strict=True):
        batch(lab, lab.internet, f"route add {address}/{length} dev eth0")
    with agent_of(lab, tmp_path) as agent:
        for address in DENIED:
            assert connect(lab, address) == "connected"
        assert drop_counts(agent)["neighbour-claim"] == 0
        lab.run(lab.host, sys.executable, "-c", _SEND, "up0", arp("203.0.113.77", INTERNET_UPLINK[0]).hex())
        assert drop_counts(agent)["neighbour-claim"] == 1  # for one who is on the link itself


# --- a second uplink -------------------------------------------------------------------------------------------------


@pytest.fixture
def two(lab: Lab) -> Lab:
    """The host has another way to the same internet: up1, whose other side is eth1."""
    batch(
        lab,
        lab.host,
        f"link add up1 type veth peer name eth1 netns {lab.internet}",
        f"addr add {SECOND[0]}/24 dev up1",
        f"addr add {SECOND[1]}/64 dev up1",
        "link set up1 up",
    )
    batch(
        lab,
        lab.internet,
        f"addr add {BEYOND_SECOND[0]}/24 dev eth1",
        f"addr add {BEYOND_SECOND[1]}/64 dev eth1",
        "link set eth1 up",
    )
    return lab


def lead_by(lab: Lab, way: tuple[str, str]) -> None:
    batch(lab, lab.host, *(f"route replace default via {router}" for router in way))


UPLINKS = [*ENDPOINTS, {**ENDPOINTS[0], "interface": "up1"}]


def both(lab: Lab) -> tuple[Capture, Capture]:
    return lab.capture(lab.internet, "eth0", "tcp or udp"), lab.capture(lab.internet, "eth1", "tcp or udp")


@pytest.mark.parametrize("family", [0, 1], ids=["v4", "v6"])
def test_each_of_two_uplinks_is_the_host(two: Lab, tmp_path: Path, family: int) -> None:
    """Whichever way routing leads, back and forth: the agent asks on it, what it learns is open on it, the rest on neither; a
    connection lives on through the change."""
    lab = two
    captures = both(lab)
    with RunningAgent(lab, POLICY, tmp_path / "agent", endpoints=UPLINKS, dns={"upstreams": [NAME_SERVERS[family]]}) as agent:
        for transport, router in (("+notcp", INTERNET_UPLINK), ("+tcp", BEYOND_SECOND), ("+notcp", INTERNET_UPLINK)):
            lead_by(lab, router)
            answer = ask(lab, "a.test", ("A", "AAAA")[family], transport, client=host(lab), server=NAME_SERVERS[family])
            assert (answer.status, answer.addresses) == ("NOERROR", (ALLOWED[family],)), router
            assert connect(lab, ALLOWED[family], client=host(lab)) == "connected"
            assert connect(lab, DENIED[family], client=host(lab)).endswith("refused")
        with Conversation(lab, ALLOWED[family], client=host(lab)) as running:
            assert running.say() == "echoed"
            lead_by(lab, BEYOND_SECOND)
            assert running.say() == "echoed"
        for capture, own in zip(captures, (HOST_UPLINK, SECOND), strict=True):
            capture.stop()
            assert {packet.destination_port for packet in seen(capture, source=own[family])} == {53, 443}
            assert seen(capture, destination=DENIED[family]) == []
        assert drop_counts(agent).keys() <= {"policy"}


def test_a_reply_by_the_other_uplink(two: Lab, tmp_path: Path) -> None:
    """Each uplink is an endpoint of its own and knows its own flows: a reply that comes by the other one is judged there as
    whatever else comes in, and needs a rule."""
    lab = two
    lab.settle(lab.host, {"ipv4/conf/all/rp_filter": 0, "ipv4/conf/up0/rp_filter": 0, "ipv4/conf/up1/rp_filter": 0})
    batch(lab, lab.internet, f"route replace {SECOND[0]}/32 via {HOST_UPLINK[0]}")
    with RunningAgent(lab, POLICY, tmp_path / "agent", endpoints=UPLINKS) as agent:
        assert ask(lab, "a.test", client=host(lab)).addresses == (ALLOWED[0],)
        lead_by(lab, BEYOND_SECOND)
        assert connect(lab, ALLOWED[0], client=host(lab), within_s=0.5) == "timed out"
        agent.apply(POLICY.replace("ingress: [{}]", "ingress: [{fromCIDR: [198.51.100.0/24]}]"))
        assert connect(lab, ALLOWED[0], client=host(lab)) == "connected"
