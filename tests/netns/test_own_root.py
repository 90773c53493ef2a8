"""A container's own root cannot get out: whatever it does inside, nothing of it is seen beyond the host but what policy allows.

The client is the container: root, with every capability, in a network namespace of its own. Its attacks are tried first without
the agent, which shows that they would get out (what nobody carries on proves nothing), then with it. The judge is a capture in
front of the internet, searched for every frame that should not be there (tests/netns/attacks.py).

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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count, islice
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

RECORDS = {"a.test.": [f"A {ALLOWED[0]}", f"AAAA {ALLOWED[1]}"]}

# Both directions are closed: a peer that may knock may be answered, which is no escape.
HEAD = "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: p}\nspec:\n  endpointSelector: {}\n"
CLOSED = HEAD + "  ingress: [{fromCIDR: [203.0.113.99/32]}]\n"
POLICY = CLOSED + "  egress: [{toFQDNs: [{matchName: a.test}], toPorts: [{ports: [{port: '443'}]}]}]\n"
STRICTER = POLICY + "  egressDeny: [{toCIDR: [198.18.0.0/15]}]\n"

# No host carries these on, policed or not: what they are after is the host's end of the link. At it every one is dropped.
LOCAL_KINDS = {"ARP", "ND", "VLAN", "type", "many"}

# Beside the client's; of IPv6 on its own link.
SECOND = ("192.0.2.201", "2001:db8:1:1::7")

# The agent's default mark, that of its refusals, and every other way to set the same bits.
MARKS = (0xA00, 0xB00, 0xF00, 0xFFFFFFFF)

# Each line is what a virtual machine says of a frame, and the frame. They are sent once, or round and round until input ends.
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

# What root does inside: each step is commands, then a datagram with the step's mark and the opening of a connection, over IPv4
# and IPv6, to addresses that nobody allowed and, where the step has a source of its own, to one that is. Then all is as before.
_STEPS = """
import json, os, socket, subprocess, sys
script, steps, own, router, allowed, is_nested = json.load(sys.stdin)
failed = []

def shell(commands, inside=()):
    done = subprocess.run([*inside, "sh", "-e", "-c", commands], capture_output=True, text=True)
    return done.stderr if done.returncode else ""

def probe(to, payload, source, mark):
    family = socket.AF_INET6 if ":" in to else socket.AF_INET
    for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
        with socket.socket(family, kind) as s:
            s.setblocking(False)
            if mark: s.setsockopt(socket.SOL_SOCKET, 36, mark.to_bytes(4, sys.byteorder))  # SO_MARK
            try:
                if source: s.bind((source, 0))
                s.connect((to, 443))
                s.send(payload)
            except OSError:
                pass  # a connection is on its way, or refused; the capture says what left

def config(device):
    lines = f"ip link set {device} up; ip addr replace {own[0]}/30 dev {device}; ip addr replace {own[1]}/64 dev {device} nodad"
    return f"{lines}; ip route replace default via {router[0]}; ip -6 route replace default via {router[1]}"

for step in steps:
    if step["is_nested"] and not is_nested:
        nested = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo there; exec sleep 60"], stdout=subprocess.PIPE)
        nested.stdout.readline()
        there = ["nsenter", f"--net=/proc/{nested.pid}/ns/net"]
        problem = shell(f"ip link set eth0 netns {nested.pid}") or shell(config("eth0"), there)
        given = json.dumps([script, [step], own, router, allowed, True])
        done = subprocess.run([*there, sys.executable, "-c", script], input=given, text=True, capture_output=True)
        problem = problem or done.stderr or shell(f"ip link set eth0 netns {os.getpid()}", there)
        nested.kill()
        nested.wait()
    else:
        problem = shell(step["commands"].replace("CONFIG", config("eth0")))
        for to, source, permitted in zip(step["to"], step["source"], allowed):
            for mark in step["marks"]:
                probe(to, step["mark"].encode(), source, mark)
                if source: probe(permitted, step["mark"].encode(), source, mark)
    if not is_nested:
        problem = problem or shell(step["undo"]) or shell(config("eth0"))
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
    with Lab(2, records=RECORDS, ports=(PORT,)) as lab:
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

    def __init__(
        self, lab: Lab, frames: Sequence[Frame], *, device: str = "eth0", pause_s: float = 0, is_endless: bool = False
    ) -> None:
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
        yield Captures(
            *(stack.enter_context(lab.capture(*place, name=f"{name}-{number}")) for number, place in enumerate(places))
        )


def neighbours(lab: Lab) -> set[str]:
    """Whom the host takes for somebody on the client's link."""
    found = json.loads(lab.run(lab.host, "ip", "-j", "neigh", "show", "dev", lab.client.endpoint).stdout)
    return {row["dst"] for row in found if "lladdr" in row and not row["dst"].startswith("fe80:")}


def frames_of(table: Sequence[Attack]) -> list[Frame]:
    return [frame for attack in table for frame in attack.frames]


# --- what root does with commands and sockets ------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """commands, then probes: to addresses that belong to its number, from `source` where it has one, under each of `marks`."""

    number: int
    name: str
    commands: str
    undo: str = ""
    marks: tuple[int, ...] = (0,)
    source: tuple[str, str] = ("", "")
    is_nested: bool = False

    def as_json(self) -> dict[str, object]:
        to = [fresh_address(self.number), fresh_address(self.number, 6)]
        return {**asdict(self), "mark": mark_of(self.number).decode(), "to": to}


def steps_of(lab: Lab) -> list[Step]:
    other, router = lab.clients[1], lab.client.gateways
    flush = (
        "ip rule flush; ip -6 rule flush; ip rule add from all lookup main || true; ip -6 rule add from all lookup main || true"
    )
    marking = "nft add table inet t; nft add chain inet t o '{ type route hook output priority 0; }'; "
    marking += "nft add rule inet t o meta mark set 0xa00"
    nat = "nft add table ip n; nft add chain ip n p '{ type nat hook postrouting priority 100; }'; nft add rule ip n p snat to "
    own_mac, addressed = (
        mac_of(lab, lab.client.namespace, lab.client.device).hex(":"),
        "ip link set eth0 down; ip link set eth0 address",
    )
    queue, link = "tc qdisc replace dev eth0 root", "ip link set eth0"

    def renamed(before: str, after: str) -> str:
        return f"ip link set {before} down; ip link set {before} name {after}"

    def on(device: str) -> str:
        own = lab.client.addresses
        moved = f"ip addr flush dev eth0; ip link set {device} up; ip addr add {own[0]}/30 dev {device}; "
        moved += f"ip addr add {own[1]}/64 dev {device} nodad; ip route replace default via {router[0]} dev {device}; "
        return f"{moved} ip -6 route replace default via {router[1]} dev {device}"

    def tunnel(remote: str) -> str:
        made = (
            f"ip link add vx0 type vxlan id 1 remote {remote} dstport 4789; ip addr add 10.9.9.1/24 dev vx0; ip link set vx0 up"
        )
        return (
            f"{made}; ip neigh add 10.9.9.2 lladdr 02:00:00:00:00:09 dev vx0; ip route add 198.18.0.0/15 via 10.9.9.2 dev vx0"
        )

    numbers = count(1_000)
    steps = [
        Step(next(numbers), "rules flushed", f"nft flush ruleset; {flush}"),
        Step(next(numbers), "packets marked by its own rules", marking, "nft flush ruleset"),
        Step(next(numbers), "sockets marked", "true", marks=MARKS),
        Step(next(numbers), "another's address by its own rules", nat + other.addresses[0], "nft flush ruleset"),
        Step(
            next(numbers),
            "other queues",
            f"{queue} pfifo limit 9; tc qdisc add dev eth0 clsact",
            "tc qdisc del dev eth0 clsact",
        ),
        Step(next(numbers), "no queue", f"{queue} noqueue"),
        Step(next(numbers), "another MAC", f"{addressed} 02:00:00:00:00:99; CONFIG", f"{addressed} {own_mac}"),
        Step(
            next(numbers), "another name", f"{renamed('eth0', 'wan0')}; ip link set wan0 up; {renamed('wan0', 'eth0')}; CONFIG"
        ),
        Step(next(numbers), "larger packets", f"{link} mtu 9000 txqueuelen 10 promisc on", f"{link} mtu 1500 promisc off"),
        Step(next(numbers), "smaller packets", f"{link} mtu 1280", f"{link} mtu 1500"),
        Step(next(numbers), "a new start of the link", "ip link set eth0 down; CONFIG"),
        Step(next(numbers), "a macvlan on it", f"ip link add link eth0 name mv0 type macvlan; {on('mv0')}", "ip link del mv0"),
        Step(
            next(numbers), "a bridge over it", f"ip link add br0 type bridge; {link} master br0; {on('br0')}", "ip link del br0"
        ),
        Step(next(numbers), "a tunnel to a stranger", tunnel("198.51.100.99"), "ip link del vx0"),
        Step(next(numbers), "a tunnel to an allowed address", tunnel(ALLOWED[0]), "ip link del vx0"),
        Step(next(numbers), "in a namespace of its own", "true", is_nested=True),
        Step(next(numbers), "nothing", "true"),
    ]
    for what, source in (
        ("its router", lab.client.gateways),
        ("another endpoint", other.addresses),
        ("the uplink", HOST_UPLINK),
        ("the upstream", NAME_SERVERS),
        ("the next router", INTERNET_UPLINK),
        ("a stranger", (fresh_address(5_000), fresh_address(5_000, 6))),
        ("somebody beside it", SECOND),
    ):
        adding = f"ip addr add {source[0]}/32 dev eth0; ip addr add {source[1]}/128 dev eth0 nodad"
        steps.append(Step(next(numbers), f"the address of {what}", adding, adding.replace("add ", "del "), source=source))
    return steps


def do_inside(lab: Lab, steps: Sequence[Step]) -> None:
    given = json.dumps([_STEPS, [step.as_json() for step in steps], lab.client.addresses, lab.client.gateways, ALLOWED, False])
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
    kinds = {attack.number: attack.kind for attack in stage.table}
    assert {kinds[number] for number in arrived if number in kinds} == set(kinds.values()) - LOCAL_KINDS
    assert claimed > set(lab.client.addresses), "nobody believed a claim"
    kept_back = {step.name for step in steps_of(lab) if step.number not in arrived}
    assert kept_back <= {"the address of its router", "the address of the uplink"}, "the host takes nothing as from itself"
    assert stage.escaped(captures.far) != []
    lab.run(lab.host, "ip", "neigh", "flush", "dev", lab.client.endpoint)
    for address in SECOND:  # or servers would send to it for minutes, and the host would say to them that it is gone
        lab.run(lab.internet, "ip", "route", "add", "blackhole", address)
    with RunningAgent(lab, POLICY, tmp_path_factory.mktemp("agent"), is_talkative=False) as agent:
        yield agent


def allow(lab: Lab) -> None:
    """Somebody looks the allowed name up."""
    assert (ask(lab, "a.test").addresses, ask(lab, "a.test", "AAAA").addresses) == ((ALLOWED[0],), (ALLOWED[1],))


def assert_nothing_got_out(stage: Stage, captures: Captures) -> None:
    assert stage.escaped(captures.far) == []
    assert marks(captures.far.path) | marks(captures.other.path) == set()
    assert captures.far.lost == captures.near.lost == 0


def test_no_frame_gets_out(stage: Stage, agent: RunningAgent) -> None:
    """Every attack reaches the host's end of the link and ends there, also what only that end could have believed."""
    allow(stage.lab)
    local = [attack for attack in stage.table if attack.kind in LOCAL_KINDS]
    other = [attack for attack in stage.table if attack.kind not in LOCAL_KINDS]
    with capturing(stage.lab, "with") as captures:
        before = drop_counts(agent)
        sent = Sending(stage.lab, frames_of(local)).end()
        assert (drop_counts(agent) - before).total() == sent - sum(attack.harmless for attack in local)
        before = drop_counts(agent)
        sent = Sending(stage.lab, frames_of(other)).end()
        # The client's own kernel may add a word to what it is answered.
        assert (drop_counts(agent) - before).total() >= sent - sum(attack.harmless for attack in other)
    assert marks(captures.near.path) == {attack.number for attack in stage.table}
    assert_nothing_got_out(stage, captures)
    assert (
        seen(captures.other, source=stage.lab.client.addresses[0])
        == seen(captures.other, source=stage.lab.client.addresses[1])
        == []
    )
    assert neighbours(stage.lab) <= set(stage.lab.client.addresses)
    assert connect(stage.lab, ALLOWED[0]) == connect(stage.lab, ALLOWED[1]) == "connected"


@pytest.mark.parametrize("mark", [0xA00, 0xB00])
def test_not_by_a_program_that_hands_packets_over_with_a_mark(stage: Stage, agent: RunningAgent, mark: int) -> None:
    """bpf_redirect_peer() puts a packet into the host's end of the link and leaves its mark: the agent's, or of a refusal."""
    lab = stage.lab
    allow(lab)
    lab.run(lab.client.namespace, "ip", "link", "add", "own0", "type", "veth", "peer", "name", "own1")
    try:
        for device in ("own0", "own1"):
            lab.run(lab.client.namespace, "ip", "link", "set", device, "up")
        with inside(lab.client.namespace):
            link = socket.if_nametoindex(lab.client.device)
        # The mark is written into the packet; then it goes to the other end of the link.
        program = (
            struct.pack("<BBhi", 0x62, 1, 8, mark)
            + struct.pack("<BBhi", 0xB7, 1, 0, link)
            + struct.pack("<BBhi", 0xB7, 2, 0, 0)
        )
        loaded = syscall.program_load(
            program + struct.pack("<BBhi", 0x85, 0, 0, 155) + struct.pack("<BBhi", 0x95, 0, 0, 0), "push"
        )
        pin = Path(f"/sys/fs/bpf/{lab.client.namespace}-push")
        try:
            syscall.pin(loaded, str(pin))
            lab.run(lab.client.namespace, "tc", "qdisc", "add", "dev", "own1", "clsact")
            lab.run(lab.client.namespace, *f"tc filter add dev own1 ingress bpf da object-pinned {pin}".split())
        finally:
            pin.unlink(missing_ok=True)
            os.close(loaded)
        with capturing(lab, f"pushed-{mark:x}") as captures:
            Sending(lab, frames_of(stage.table), device="own0").end()
        assert marks(captures.near.path) == {attack.number for attack in stage.table}
        assert_nothing_got_out(stage, captures)
    finally:
        lab.run(lab.client.namespace, "ip", "link", "del", "own0")


def test_nothing_done_inside_gets_out(stage: Stage, agent: RunningAgent) -> None:
    """Rules, queues, addresses, names, devices, namespaces and tunnels of its own; afterwards the link is as good as before."""
    steps = steps_of(stage.lab)
    allow(stage.lab)
    with capturing(stage.lab, "inside") as captures:
        do_inside(stage.lab, steps)
    assert marks(captures.near.path) == {step.number for step in steps}
    assert_nothing_got_out(stage, captures)
    assert connect(stage.lab, ALLOWED[0]) == connect(stage.lab, ALLOWED[1]) == "connected"
    assert agent.status()["state"] == "enforcing"


@pytest.mark.timeout(60 + FRAMES // 500)
def test_no_damaged_frame_gets_out(stage: Stage, agent: RunningAgent) -> None:
    """Frames near the attacks, and near what is allowed, with a few octets wrong: whatever comes out goes where it may."""
    allow(stage.lab)
    before = drop_counts(agent)
    for round_ in range(0, FRAMES, 20_000):
        frames = list(islice(damaged(stage.place, SEED + round_), min(20_000, FRAMES - round_)))
        with capturing(stage.lab, f"damaged-{round_}") as captures:
            Sending(stage.lab, frames).end()
        assert stage.escaped(captures.far) == [], f"seed {SEED + round_}"
        assert captures.far.taken > len(frames) // 50, "hardly anything passes: nothing was near what is allowed"
        assert seen(captures.other, source=stage.lab.client.addresses[0]) == []
        assert captures.far.lost == 0
    assert (drop_counts(agent) - before).total() > FRAMES // 2


def test_no_moment_of_a_restart_or_a_policy_change_lets_one_out(stage: Stage, agent: RunningAgent) -> None:
    """All attacks, again and again, while policies are replaced and the agent is killed and starts again."""
    allow(stage.lab)
    with capturing(stage.lab, "moments") as captures:
        sending = Sending(stage.lab, frames_of(stage.table), pause_s=0.0002, is_endless=True)
        for policy in (STRICTER, POLICY):
            agent.apply(policy)
        agent.end(signal.SIGKILL)
        agent.start()
        agent.apply(STRICTER)
        agent.apply(POLICY)
        agent.end(signal.SIGTERM)
        agent.start()
        assert sending.end() > 3 * len(stage.table)
    assert_nothing_got_out(stage, captures)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lab, RunningAgent]]:
    """Where nothing else is on its way, so that every packet can be counted."""
    with Lab(records=RECORDS, ports=(PORT,)) as lab, RunningAgent(lab, POLICY, tmp_path_factory.mktemp("quiet")) as agent:
        yield lab, agent


def test_no_answer_but_the_upstreams_teaches(quiet: tuple[Lab, RunningAgent]) -> None:
    """Not what a server at an allowed address says, from any port, to any port; not what is sent as if it were the upstream."""
    lab, agent = quiet
    own, taught = lab.client.addresses[0], "198.18.40.1"
    allow(lab)
    names = agent.status()["names"]
    reply = dns.message.make_response(dns.message.make_query("a.test.", "A"))
    reply.answer.append(dns.rrset.from_text("a.test.", 60, "IN", "A", taught))
    wire = reply.to_wire()
    with lab.capture(lab.internet, "eth0", f"udp and host {own}", name="answers") as far:
        send_frames(lab, [packet(own, ALLOWED[0], UDP, udp(53, PORT, wire))])  # the echo server there sends it back
        with dropping(agent, policy=2):
            send_from_internet(lab, [frame(source, own, UDP, udp(53, 4100, wire)) for source in (ALLOWED[0], NAME_SERVERS[0])])
        with dropping(agent, source=2):
            send_frames(lab, [packet(NAME_SERVERS[0], to, UDP, udp(53, 40_000, wire)) for to in (HOST_UPLINK[0], own)])
        assert ask(lab, "a.test", server=ALLOWED[0]).addresses == (ALLOWED[0],), "the upstream's answer, whoever is asked"
        with dropping(agent, policy=1):
            assert connect(lab, taught) == "connection refused"
    assert [(each.source_port, each.destination_port) for each in seen(far, source=own)] == [(53, PORT)]
    assert [each.payload for each in seen(far, source=ALLOWED[0])] == [wire, wire], "the echo, and the frame of ours"
    assert agent.status()["names"] == names
    assert reasons(agent, taught) == [("policy", "not resolved through the proxy")]


def test_no_peer_can_open_the_way_out(quiet: tuple[Lab, RunningAgent]) -> None:
    """A denied peer and the client open one connection at once, both with raw sockets: neither hears of the other."""
    lab, agent = quiet
    own, peer = lab.client.addresses[0], "198.18.40.2"
    with lab.capture(lab.internet, "eth0", f"src {own}", name="peer") as far, dropping(agent, policy=5):
        send_frames(lab, [packet(own, peer, TCP, tcp(4200, PORT, SYN))])
        send_from_internet(lab, [frame(peer, own, TCP, tcp(PORT, 4200, flags)) for flags in (SYN, SYN | ACK)])
        answers = [tcp(4200, PORT, SYN | ACK), tcp(4200, PORT, ACK | PUSH, b"out")]
        send_frames(lab, [packet(own, peer, TCP, answer) for answer in answers])
    assert far.taken == 0


def test_a_connection_is_no_way_back_to_an_address_whose_lifetime_is_over(tmp_path: Path) -> None:
    """The running one goes on; on its ports no other one is opened."""
    dns_settings = {"ttl-floor": "1s", "ttl-cap": "1s", "keep-while-flow-seen": "1s"}
    with Lab(records=RECORDS, ports=(PORT,)) as lab:
        own = lab.client.addresses[0]
        with RunningAgent(lab, "a.test:443/tcp\n", tmp_path / "agent", dns=dns_settings) as agent:
            assert ask(lab, "a.test").status == "NOERROR"
            with Conversation(lab, ALLOWED[0]) as talk:
                assert talk.say() == "echoed"
                opening = packet(own, ALLOWED[0], TCP, tcp(talk.port, PORT, SYN))
                agent.await_status(lambda status: status["names"] == 0, within_s=10)
                with lab.capture(lab.host, lab.uplink, f"src {own}", name="again") as far, dropping(agent, policy=1):
                    send_frames(lab, [opening])
                assert seen(far) == []
                assert talk.say() == "echoed"


def test_a_user_namespace_keeps_root_from_the_hosts_own_links(stage: Stage) -> None:
    """The limit of all this. A link tells the number of the namespace at its other end, and who has CAP_NET_ADMIN over that, as
    root of a container without a user namespace may, makes himself a device on the host's uplink. With one he is refused."""
    lab = stage.lab
    (uplink,) = json.loads(lab.run(lab.host, "ip", "-j", "link", "show", lab.uplink).stdout)
    making = f"ip link add own0 link if{uplink['ifindex']} link-netnsid 0 type macvlan mode bridge".split()
    contained = lab.start(lab.host, "unshare", "--user", "--map-root-user", "--net", "sh", "-c", "echo there; exec sleep 60")
    assert contained.stdout is not None
    assert contained.stdout.readline() == "there\n"
    entering = ("nsenter", f"--user=/proc/{contained.pid}/ns/user", f"--net=/proc/{contained.pid}/ns/net")
    lab.run(lab.host, *f"ip link add own-user type veth peer name eth0 netns {contained.pid}".split())
    try:
        lab.run(lab.host, *entering, "ip", "link", "set", "eth0", "up")
        for namespace, inside_it in ((lab.host, entering), (lab.client.namespace, ())):
            lab.run(namespace, *inside_it, "ip", "link", "show")  # the kernel gives the number to who asks for it
        refused = lab.run(lab.host, *entering, *making, check=False)
        assert (refused.returncode, refused.stderr) == (2, "RTNETLINK answers: Operation not permitted\n")
        assert lab.run(lab.client.namespace, *making, check=False).returncode == 0
    finally:
        lab.run(lab.client.namespace, "ip", "link", "del", "own0", check=False)
        lab.run(lab.host, "ip", "link", "del", "own-user")
