"""A container's own root cannot get out: whatever it does inside, nothing of it is seen beyond the host but what policy allows.

The client is the container: root, with every capability, in a network namespace of its own. Its attacks are tried first without
the agent, which shows that they would get out (what nobody carries on proves nothing), then with it. The judge is a capture in front
of the internet, searched for every frame that should not be there (tests/netns/attacks.py).

OWN_ROOT_FRAMES says how many damaged frames are sent, OWN_ROOT_SEED which.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import dns.message
import dns.rrset
import pytest

from agent.datapath import syscall
from tests.bpf.lab import inside
from tests.netns.asking import ask, connect
from tests.netns.attacks import ALLOWED, OFF_LINK, PORT, Attack, Frame, Place, attacks, damaged, escaped, mark_of, marks, packet
from tests.netns.lab import HOST_UPLINK, INTERNET_UPLINK, NAME_SERVERS, Capture, Lab, fresh_address
from tests.netns.running import RunningAgent
from tests.netns.sending import Conversation, drop_counts, dropping, mac_of, reasons, seen, send_frames, send_from_internet
from tests.packets import ACK, PUSH, SYN, TCP, UDP, frame, tcp, udp

pytestmark = pytest.mark.root

FRAMES = int(os.environ.get("OWN_ROOT_FRAMES", "10000"))
SEED = int(os.environ.get("OWN_ROOT_SEED", "20"))

# Both directions are closed: a peer that may knock may be answered, which is no escape.
HEAD = "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: p}\nspec:\n  endpointSelector: {}\n"
CLOSED = HEAD + "  ingress: [{fromCIDR: [203.0.113.99/32]}]\n"
POLICY = CLOSED + "  egress: [{toFQDNs: [{matchName: a.test}], toPorts: [{ports: [{port: '443'}]}]}]\n"
STRICTER = POLICY + "  egressDeny: [{toCIDR: [198.18.0.0/15]}]\n"

# No host carries these on, policed or not: what they are after is the host's end of the link. At it every one is dropped.
LOCAL_KINDS = {"ARP", "ND", "VLAN", "type", "many"}

# The agent's default mark, that of its refusals, and every other way to set the same bits.
MARKS = (0xA00, 0xB00, 0xF00, 0xFFFFFFFF)

# Each line is what a virtual machine says of a frame, and the frame, in hexadecimal. Goes round until standard input ends, or once.
_SEND = """
import os, select, socket, sys, time
device, is_endless, pause, count = sys.argv[1], sys.argv[2] == "endless", float(sys.argv[3]), int(sys.argv[4])
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
s.setsockopt(263, 15, 1)  # SOL_PACKET, PACKET_VNET_HDR
s.bind((device, 0))
frames = [bytes.fromhex(sys.stdin.readline()) for _ in range(count)]
print("sending", flush=True)
sent = 0
while True:
    for frame in frames:
        s.send(frame)
        sent += 1
        if pause: time.sleep(pause)
    if not is_endless or select.select([sys.stdin], [], [], 0)[0]: break
print(sent, flush=True)
"""

# What root does inside: each step is commands, then a datagram with the step's mark and an opening of a connection, over IPv4 and
# IPv6, to addresses that nobody allowed and, where the step has a source of its own, to one that is. Then all is as before.
_STEPS = """
import json, os, signal, socket, subprocess, sys
steps, own, router, allowed = json.load(sys.stdin)
failed = []

def shell(commands, inside=()):
    done = subprocess.run([*inside, "sh", "-e", "-c", commands], capture_output=True, text=True)
    return done.stderr if done.returncode else ""

def probe(to, port, payload, source, mark):
    family = socket.AF_INET6 if ":" in to else socket.AF_INET
    for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
        with socket.socket(family, kind) as s:
            s.setblocking(False)
            if mark: s.setsockopt(socket.SOL_SOCKET, 36, mark.to_bytes(4, sys.byteorder))  # SO_MARK
            try:
                if source: s.bind((source, 0))
                s.connect((to, port))
                s.send(payload)
            except OSError as error:
                pass  # a connection is on its way, or refused; the capture says what left

def config(device):
    lines = [f"ip link set {device} up", f"ip addr replace {own[0]}/30 dev {device}", f"ip addr replace {own[1]}/64 dev {device} nodad"]
    return "; ".join(lines + [f"ip route replace default via {router[0]}", f"ip -6 route replace default via {router[1]}"])

if len(sys.argv) > 1:  # in a namespace of its own: the first step alone
    steps = [steps[int(sys.argv[1])]]
for number, step in enumerate(steps):
    if "nested" in step and len(sys.argv) == 1:
        nested = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo there; exec sleep 60"], stdout=subprocess.PIPE)
        nested.stdout.readline()
        there = ["nsenter", f"--net=/proc/{nested.pid}/ns/net"]
        problem = shell(f"ip link set eth0 netns {nested.pid}") or shell(config("eth0"), there)
        script = [sys.executable, "-c", open("/proc/self/cmdline").read().split("\\0")[2], str(number)]
        done = subprocess.run([*there, *script], input=json.dumps([steps, own, router, allowed]), text=True, capture_output=True)
        problem = problem or done.stderr or shell(f"ip link set eth0 netns {os.getpid()}", there)
        nested.kill()
        nested.wait()
    else:
        problem = shell(step["commands"].replace("CONFIG", config("eth0")))
        for version, to in zip((4, 6), step["to"]):
            source = step.get("source", {}).get(str(version))
            for mark in step.get("marks", [0]):
                probe(to, 443, step["mark"].encode(), source, mark)
                if source: probe(allowed[version == 6], 443, step["mark"].encode(), source, mark)
    if len(sys.argv) == 1:
        problem = problem or shell(step.get("undo", "")) or shell(config("eth0"))
    if problem: failed.append([step["name"], problem])
print(json.dumps(failed))
"""


@dataclass(frozen=True)
class Stage:
    lab: Lab
    place: Place
    uplink: bytes
    table: list[Attack]

    def escaped(self, capture: Capture) -> list[str]:
        return escaped(capture.path, self.uplink, [client.addresses for client in self.lab.clients])


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    records = {"a.test.": [f"A {ALLOWED[0]}", f"AAAA {ALLOWED[1]}"]}
    with Lab(2, records=records, ports=(PORT,)) as lab:
        # A device that writes no checksums has the kernel write them, as most network cards do by themselves.
        lab.run(lab.host, "ethtool", "-K", lab.uplink, "tx", "off")
        lab.run(lab.host, "ip", "-6", "route", "add", f"{OFF_LINK}/128", "via", INTERNET_UPLINK[1])
        lab.settle(lab.host, {f"ipv4/conf/{name}/accept_source_route": 1 for name in ("all", lab.client.endpoint)})
        macs = mac_of(lab, lab.host, lab.client.endpoint) + mac_of(lab, lab.client.namespace, lab.client.device)
        place = Place(lab.client.addresses, lab.client.gateways, lab.clients[1].addresses, macs)
        yield Stage(lab, place, mac_of(lab, lab.host, lab.uplink), attacks(place))


# --- sending and capturing -------------------------------------------------------------------------------------------


class Sending:
    """Frames on their way from a device of the client: once round, or until `end`."""

    def __init__(self, lab: Lab, frames: Sequence[Frame], *, device: str = "eth0", pause_s: float = 0, is_endless: bool = False) -> None:
        arguments = (device, "endless" if is_endless else "once", str(pause_s), str(len(frames)))
        self._process = lab.start(lab.client.namespace, sys.executable, "-c", _SEND, *arguments, stdin=subprocess.PIPE)
        assert self._process.stdin is not None
        self._process.stdin.write("".join(f"{(frame.header + frame.octets).hex()}\n" for frame in frames))
        self._process.stdin.flush()

    def end(self) -> int:
        """How many were sent."""
        said, _ = self._process.communicate("", timeout=120)
        assert self._process.returncode == 0, said
        return int(said.split()[-1])


@dataclass(frozen=True)
class Captures:
    """near: at the host's end of the client's link, where whatever left the client comes in. other: at the other client's."""

    near: Capture
    other: Capture
    far: Capture


@contextlib.contextmanager
def capturing(lab: Lab, name: str) -> Iterator[Captures]:
    with contextlib.ExitStack() as stack:
        places = ((lab.host, lab.client.endpoint), (lab.clients[1].namespace, "eth0"), (lab.internet, "eth0"))
        yield Captures(*(stack.enter_context(lab.capture(*place, name=f"{name}-{number}")) for number, place in enumerate(places)))


def neighbours(lab: Lab) -> set[str]:
    """Whom the host takes for somebody on the client's link."""
    found = json.loads(lab.run(lab.host, "ip", "-j", "neigh", "show", "dev", lab.client.endpoint).stdout)
    return {row["dst"] for row in found if not row["dst"].startswith("fe80:")}


def frames_of(table: Sequence[Attack]) -> list[Frame]:
    return [frame for attack in table for frame in attack.frames]


# --- what root does with commands and sockets ------------------------------------------------------------------------


def steps_of(lab: Lab) -> list[dict[str, object]]:
    other, router = lab.clients[1], lab.client.gateways
    flush = "ip rule flush; ip rule add from all lookup main; ip -6 rule flush; ip -6 rule add from all lookup main"
    marking = "nft add table inet t; nft add chain inet t o '{ type route hook output priority 0; }'; nft add rule inet t o meta mark set 0xa00"
    nat = "nft add table ip n; nft add chain ip n p '{ type nat hook postrouting priority 100; }'; nft add rule ip n p snat to "
    bare = "ip link set eth0 down; ip link set eth0 address 02:00:00:00:00:%s; CONFIG"
    stacked = "ip addr flush dev eth0; ip link set {0} up; ip addr add {1}/30 dev {0}; ip addr add {2}/64 dev {0} nodad; " + (
        f"ip route replace default via {router[0]} dev {{0}}; ip -6 route replace default via {router[1]} dev {{0}}"
    )
    over = [stacked.format(device, *lab.client.addresses) for device in ("mv0", "br0")]
    vxlan = "ip link add vx0 type vxlan id 1 remote {0} dstport {1} local {2}; ip link set vx0 up; ip addr add 10.9.9.1/24 dev vx0; "
    vxlan += "ip neigh add 10.9.9.2 lladdr 02:00:00:00:00:09 dev vx0; ip route add 198.18.0.0/15 via 10.9.9.2 dev vx0"
    made: list[tuple[str, str, str, dict[str, object]]] = [
        ("rules flushed", f"nft flush ruleset; {flush}", "", {}),
        ("packets marked by its own rules", marking, "nft flush ruleset", {}),
        ("sockets marked", "true", "", {"marks": MARKS}),
        ("another's address by its own rules", nat + other.addresses[0], "nft flush ruleset", {}),
        ("other queues", "tc qdisc replace dev eth0 root pfifo limit 9; tc qdisc add dev eth0 clsact", "tc qdisc del dev eth0 clsact", {}),
        ("no queue", "tc qdisc replace dev eth0 root noqueue", "", {}),
        ("another MAC", bare % "99", "", {}),
        ("another name", "ip link set eth0 down; ip link set eth0 name wan0; ip link set wan0 up; ip link set wan0 down; ip link set wan0 name eth0; CONFIG", "", {}),
        ("larger packets", "ip link set eth0 mtu 9000 txqueuelen 10 promisc on", "ip link set eth0 mtu 1500 promisc off", {}),
        ("smaller packets", "ip link set eth0 mtu 1280", "ip link set eth0 mtu 1500", {}),
        ("a new start of the link", "ip link set eth0 down; CONFIG", "", {}),
        ("a macvlan on it", f"ip link add link eth0 name mv0 type macvlan mode bridge; {over[0]}", "ip link del mv0", {}),
        ("a bridge over it", f"ip link add br0 type bridge; ip link set eth0 master br0; {over[1]}", "ip link del br0", {}),
        ("a tunnel to a stranger", vxlan.format(fresh_address(4_000), 4789, lab.client.addresses[0]), "ip link del vx0", {}),
        ("a tunnel to an allowed address", vxlan.format(ALLOWED[0], 4789, lab.client.addresses[0]), "ip link del vx0", {}),
        ("in a namespace of its own", "", "", {"nested": True}),
        ("nothing", "true", "", {}),
    ]
    for what, pair in (
        ("its router", lab.client.gateways),
        ("another endpoint", other.addresses),
        ("the uplink", HOST_UPLINK),
        ("the upstream", NAME_SERVERS),
        ("the next router", INTERNET_UPLINK),
        ("a stranger", (fresh_address(5_000), fresh_address(5_000, 6))),
        ("its own link", ("192.0.2.7", "2001:db8:1:1::7")),
    ):
        adding = f"ip addr add {pair[0]}/32 dev eth0; ip addr add {pair[1]}/128 dev eth0 nodad"
        taking = f"ip addr del {pair[0]}/32 dev eth0; ip addr del {pair[1]}/128 dev eth0"
        made.append((f"the address of {what}", adding, taking, {"source": {4: pair[0], 6: pair[1]}}))
    return [
        {
            "name": name,
            "commands": commands,
            "undo": undo,
            "mark": mark_of(1_000 + number).decode(),
            "to": [fresh_address(1_000 + number), fresh_address(1_000 + number, 6)],
            **more,
        }
        for number, (name, commands, undo, more) in enumerate(made)
    ]


def do_inside(lab: Lab, steps: list[dict[str, object]]) -> None:
    given = json.dumps([steps, lab.client.addresses, lab.client.gateways, ALLOWED])
    doing = lab.start(lab.client.namespace, sys.executable, "-c", _STEPS, stdin=subprocess.PIPE)
    said, _ = doing.communicate(given, timeout=60)
    assert json.loads(said) == []


# --- without the agent, then with it ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def agent(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """After everything has got out without it."""
    lab = stage.lab
    with capturing(lab, "without") as captures:
        Sending(lab, frames_of(stage.table)).end()
        claimed = neighbours(lab)
        do_inside(lab, steps_of(lab))
    arrived = marks(captures.far.path) | marks(captures.other.path)
    by_number = {attack.number: attack.kind for attack in stage.table}
    assert {by_number[number] for number in arrived if number < 1_000} == set(by_number.values()) - LOCAL_KINDS
    assert claimed > set(lab.client.addresses), "nobody believed a claim"
    # Without a router's leave: the addresses of the host itself, and a broadcast.
    kept_back = {step["name"] for step in steps_of(lab) if step["mark"] not in {mark_of(n).decode() for n in arrived}}
    assert kept_back == {"?"}
    assert stage.escaped(captures.far) != []
    lab.run(lab.host, "ip", "neigh", "flush", "dev", lab.client.endpoint)
    with RunningAgent(lab, POLICY, tmp_path_factory.mktemp("agent"), is_talkative=False) as agent:
        allow(lab)
        yield agent


def allow(lab: Lab) -> None:
    """Somebody looked the allowed name up."""
    assert (ask(lab, "a.test").addresses, ask(lab, "a.test", "AAAA").addresses) == ((ALLOWED[0],), (ALLOWED[1],))


def test_y(stage: Stage, agent: RunningAgent) -> None:
    pass
