"""A container's own root cannot get out: whatever it does inside, nothing of it is seen beyond the host but what policy allows.

The client is the container: root, with every capability, in a network namespace of its own. Each attack is tried twice. Without the
agent it shows that it would get out, or at least reach the host: an attack that nobody carries on proves nothing. Then with it: a capture in
front of the internet is searched for every frame that should not be there (tests/netns/attacks.py).

OWN_ROOT_FRAMES says how many damaged frames are sent, OWN_ROOT_SEED which.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest

from tests.netns.asking import ask, connect
from tests.netns.attacks import ALLOWED, OFF_LINK, PORT, Attack, Frame, Place, attacks, damaged, escaped, mark_of, marks
from tests.netns.lab import HOST_UPLINK, INTERNET_UPLINK, NAME_SERVERS, Capture, Client, Lab, fresh_address
from tests.netns.running import RunningAgent
from tests.netns.sending import counts, drop_counts, mac_of

pytestmark = pytest.mark.root

FRAMES = int(os.environ.get("OWN_ROOT_FRAMES", "10000"))
SEED = int(os.environ.get("OWN_ROOT_SEED", "20"))

# Both directions are closed: a peer that may knock may be answered, which is no escape.
POLICY = """
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: p}
spec:
  endpointSelector: {}
  ingress: [{fromCIDR: [203.0.113.99/32]}]
  egress: [{toFQDNs: [{matchName: a.test}], toPorts: [{ports: [{port: '443'}]}]}]
"""

# Kinds that no host carries on, policed or not; they are to be dropped at the link all the same.
LOCAL_KINDS = {"inside", "source route", "many", "type", "VLAN", "broken", "ARP", "ND", "DNS", "address"}

# Each line is what a virtual machine says of a frame, and the frame. Prints how many were sent.
_SEND = """
import socket, sys, time
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
s.setsockopt(socket.SOL_PACKET if hasattr(socket, "SOL_PACKET") else 263, 15, 1)  # PACKET_VNET_HDR
s.bind(("eth0", 0))
frames = [bytes.fromhex(line) for line in sys.stdin]
rounds, pause = int(sys.argv[1]), float(sys.argv[2])
print("sending", flush=True)
for _ in range(rounds):
    for frame in frames:
        s.send(frame)
        if pause: time.sleep(pause)
print(len(frames) * rounds, flush=True)
"""


@dataclass
class Stage:
    """The lab before and after the agent: what is captured each time."""

    lab: Lab
    place: Place
    uplink: bytes


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    records = {"a.test.": [f"A {ALLOWED[0]}", f"AAAA {ALLOWED[1]}"]}
    with Lab(2, records=records, ports=(PORT,)) as lab:
        # A device that writes no checksums has the kernel write them: as most network cards do by themselves.
        lab.run(lab.host, "ethtool", "-K", lab.uplink, "tx", "off")
        lab.run(lab.host, "ip", "-6", "route", "add", f"{OFF_LINK}/128", "via", INTERNET_UPLINK[1])
        yield Stage(lab, place_of(lab, lab.client), mac_of(lab, lab.host, lab.uplink))


def place_of(lab: Lab, client: Client) -> Place:
    macs = mac_of(lab, lab.host, client.endpoint) + mac_of(lab, client.namespace, client.device)
    return Place(client.addresses, client.gateways, lab.clients[1].addresses, macs)


def send(lab: Lab, frames: Sequence[Frame], *, rounds: int = 1, pause_s: float = 0) -> subprocess.Popen[str]:
    sender = lab.start(
        lab.client.namespace, sys.executable, "-c", _SEND, str(rounds), str(pause_s), stdin=subprocess.PIPE, stderr=None
    )
    assert sender.stdin is not None
    assert sender.stdout is not None
    sender.stdin.write("\n".join((frame.header + frame.octets).hex() for frame in frames))
    sender.stdin.close()
    assert sender.stdout.readline() == "sending\n"
    return sender


def sent(sender: subprocess.Popen[str]) -> int:
    assert sender.stdout is not None
    said = sender.stdout.read()
    assert sender.wait(timeout=60) == 0
    return int(said)


@dataclass
class Captures:
    near: Capture
    other: Capture
    far: Capture


@contextlib.contextmanager
def capturing(lab: Lab, name: str) -> Iterator[Captures]:
    """What reached the host from the client, what reached the other client, and what went beyond the host."""
    with contextlib.ExitStack() as stack:
        places = ((lab.host, lab.client.endpoint), (lab.clients[1].namespace, "eth0"), (lab.internet, "eth0"))
        yield Captures(*(stack.enter_context(lab.capture(*place, name=f"{name}-{number}")) for number, place in enumerate(places)))


def neighbours(lab: Lab) -> set[str]:
    """Whom the host takes for a neighbour on the client's link."""
    found = json.loads(lab.run(lab.host, "ip", "-j", "neigh", "show", "dev", lab.client.endpoint).stdout)
    return {row["dst"] for row in found if "FAILED" not in row["state"]}


@pytest.fixture(scope="module")
def table(stage: Stage) -> list[Attack]:
    return attacks(stage.place)


@pytest.fixture(scope="module")
def without_agent(stage: Stage, table: list[Attack]) -> set[int]:
    with capturing(stage.lab, "without") as captures:
        sent(send(stage.lab, [frame for attack in table for frame in attack.frames]))
    kinds = {attack.kind for attack in table}
    out = marks(captures.far.path)
    by_kind = Counter(attack.kind for attack in table if attack.number in out)
    print(by_kind, neighbours(stage.lab))
    return out


def test_x(stage: Stage, table, without_agent, tmp_path):
    for attack in table:
        print("OUT" if attack.number in without_agent else "---", attack.name, file=sys.stderr)
    with RunningAgent(stage.lab, POLICY, tmp_path/"agent") as agent:
        assert ask(stage.lab, "a.test").status == "NOERROR"
        assert ask(stage.lab, "a.test", "AAAA").status == "NOERROR"
        for attack in table:
            pass
        before = drop_counts(agent), counts(agent)
        with capturing(stage.lab, "with") as captures:
            n = sent(send(stage.lab, [frame for attack in table for frame in attack.frames]))
        after = drop_counts(agent), counts(agent)
        print("SENT", n, sum((after[0]-before[0]).values()), after[1]-before[1], file=sys.stderr)
        print("NEAR missing", [a.name for a in table if a.number not in marks(captures.near.path)], file=sys.stderr)
        print("FAR", [a.name for a in table if a.number in marks(captures.far.path)], file=sys.stderr)
        print("OTHER", [a.name for a in table if a.number in marks(captures.other.path)], file=sys.stderr)
        print("ESC", escaped(captures.far.path, stage.uplink, [stage.lab.client.addresses]), file=sys.stderr)
        print(neighbours(stage.lab), file=sys.stderr)
