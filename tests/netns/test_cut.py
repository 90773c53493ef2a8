"""What ends a running flow, and what does not (DECISIONS 15, 17): judged by captures on both sides of the host.

The peer is one that keeps sending, whatever happens: datagrams all the time, and segments again that nobody acknowledged.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import pytest

from agent.core.types import Address, packed
from tests.netns import pcap
from tests.netns.asking import ask, connect
from tests.netns.lab import Capture, Lab
from tests.netns.pcap import TCP, UDP, Packet
from tests.netns.running import RunningAgent

pytestmark = pytest.mark.root

PORT: Final = 9005
ADDRESSES: Final = ("198.51.100.11", "2001:db8:53::11")
NAMES: Final = {"a.test.": [f"A {ADDRESSES[0]}", f"AAAA {ADDRESSES[1]}"]}

# By the shorthand only egress is closed, and the peer may send what it likes.
ALLOWED: Final = f"a.test:{PORT}\n"
REMOVED: Final = "b.test\n"
DENIED: Final = ALLOWED + "".join(f"!{address}\n" for address in ADDRESSES)


def _both_closed(name: str) -> str:
    return f"""\
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {{name: closed}}
spec:
  endpointSelector: {{}}
  egress: [{{toFQDNs: [{{matchName: {name}}}], toPorts: [{{ports: [{{port: "{PORT}", protocol: ANY}}]}}]}}]
  ingress: [{{}}]
  enableDefaultDeny: {{egress: true, ingress: true}}
"""


# Whoever spoke to it once is told something 100 times a second from then on, by UDP and TCP.
_PEER = """
import contextlib, select, socket, sys, time
port, datagrams, senders, connections = int(sys.argv[1]), [], set(), []
for address in sys.argv[2:]:
    datagrams.append(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM))
    if ":" in address:
        datagrams[-1].setsockopt(socket.IPPROTO_IPV6, 78, 1)  # IPV6_FREEBIND: local by route only
    datagrams[-1].bind((address, port))
listener = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
print("listening", flush=True)
while True:
    for ready in select.select([*datagrams, listener, *connections], [], [], 0)[0]:
        with contextlib.suppress(OSError):
            if ready in datagrams:
                senders.add((ready, ready.recvfrom(64)[1]))
            elif ready is listener:
                connections.append(listener.accept()[0])
                connections[-1].setblocking(False)
            elif not ready.recv(4096):
                connections.remove(ready)
    for own, sender in senders:
        with contextlib.suppress(OSError):
            own.sendto(b"late", sender)
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.send(b"more")
    time.sleep(0.01)
"""

# A connection and a stream of numbered datagrams to each address, 100 a second, whatever becomes of them; says so when it
# has heard from everybody.
_TALKER = """
import contextlib, socket, sys, time
port, talking, heard, number = int(sys.argv[1]), [], set(), 0
for address in sys.argv[2:]:
    talking.append(socket.create_connection((address, port), timeout=5))
    talking.append(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM))
    talking[-1].connect((address, port))
for s in talking:
    s.setblocking(False)
is_told = False
while True:
    number += 1
    for s in talking:
        with contextlib.suppress(OSError):
            s.send(b"%08d" % number)
        with contextlib.suppress(OSError):
            if s.recv(4096):
                heard.add(s)
    if not is_told and len(heard) == len(talking):
        is_told = True
        print("heard", flush=True)
    time.sleep(0.01)
"""


class Flow(NamedTuple):
    protocol: int
    peer: Address
    client_port: int


class Talk:
    """The client and the peer in full swing, each flow of them in two captures. A context manager; judge after its end."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._own = {packed(address) for address in lab.client.addresses}
        self._captures: tuple[Capture, ...] = ()

    def __enter__(self) -> Self:
        lab, what = self._lab, f"port {PORT}"
        self._captures = (
            lab.capture(lab.client.namespace, lab.client.device, what, name="cut-near"),
            lab.capture(lab.host, lab.uplink, what, name="cut-far"),
        )
        self._peer = lab.start(lab.internet, sys.executable, "-c", _PEER, str(PORT), *ADDRESSES)
        assert self._peer.stdout is not None
        assert self._peer.stdout.readline() == "listening\n"
        self._talker = lab.start(lab.client.namespace, sys.executable, "-c", _TALKER, str(PORT), *ADDRESSES)
        assert self._talker.stdout is not None
        assert self._talker.stdout.readline() == "heard\n"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for process in (self._talker, self._peer):
            process.kill()
            process.wait(timeout=10)
        for capture in self._captures:
            capture.stop()

    def near(self) -> dict[Flow, list[Packet]]:
        """What the client sent."""
        return self._flows(self._captures[0], is_of_client=True)

    def far(self) -> dict[Flow, list[Packet]]:
        """What of it got out."""
        return self._flows(self._captures[1], is_of_client=True)

    def of_peer(self) -> dict[Flow, list[Packet]]:
        return self._flows(self._captures[1], is_of_client=False)

    def await_packets(self, flows: Callable[[], dict[Flow, list[Packet]]], count: int, within_s: float = 10) -> None:
        """Until each of the four flows has so many more packets than now."""
        since, deadline = time.time_ns(), time.monotonic() + within_s
        while True:
            counts = [sum(packet.at_ns > since for packet in packets) for packets in flows().values()]
            if len(counts) == 4 and min(counts) >= count:
                return
            assert time.monotonic() < deadline, counts
            time.sleep(0.1)

    def _flows(self, capture: Capture, *, is_of_client: bool) -> dict[Flow, list[Packet]]:
        flows: dict[Flow, list[Packet]] = defaultdict(list)
        for packet in pcap.read(capture.path).packets:
            if packet.protocol in (TCP, UDP) and (packet.source in self._own) == is_of_client:
                peer, port = (
                    (packet.destination, packet.source_port) if is_of_client else (packet.source, packet.destination_port)
                )
                flows[Flow(packet.protocol, peer, port)].append(packet)
        return flows


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(records=NAMES, ports=(443,)) as lab:
        yield lab


def _contents(packets: list[Packet]) -> list[tuple[int, int, bytes]]:
    return [(packet.flags, packet.sequence, packet.payload) for packet in packets]


@pytest.mark.parametrize(
    ("before", "after"),
    [(ALLOWED, REMOVED), (ALLOWED, DENIED), (_both_closed("a.test"), _both_closed("b.test"))],
    ids=["removed", "denied", "ingress-closed"],
)
def test_a_permission_that_goes_cuts_within_one_packet(lab: Lab, tmp_path: Path, before: str, after: str) -> None:
    """Of each flow, TCP and UDP, a first part gets out, and after that nothing, however long the peer goes on."""
    with RunningAgent(lab, before, tmp_path / "agent") as agent:
        assert {ask(lab, "a.test", kind).status for kind in ("A", "AAAA")} == {"NOERROR"}
        with Talk(lab) as talk:
            talk.await_packets(talk.far, 10)
            agent.apply(after)
            applied_at = time.time_ns()
            talk.await_packets(talk.of_peer, 2)
        near, far = talk.near(), talk.far()
    assert len(near) == 4
    assert near.keys() == far.keys()
    for flow, sent in near.items():
        out = far[flow]
        assert 10 < len(out) < len(sent), flow
        assert _contents(out) == _contents(sent[: len(out)]), flow
        assert out[-1].at_ns < applied_at, flow


def test_the_end_of_a_lifetime_cuts_nothing(lab: Lab, tmp_path: Path) -> None:
    """The name is forgotten and its address closed to new flows; of the running ones every packet gets out, also when they are
    judged again, for another reason, by the identity that the address had."""
    dns = {"ttl-floor": "1s", "ttl-cap": "1s", "keep-while-flow-seen": "1s", "keep-past-lifetime": "1s"}
    with RunningAgent(lab, ALLOWED, tmp_path / "agent", dns=dns) as agent:
        assert {ask(lab, "a.test", kind).status for kind in ("A", "AAAA")} == {"NOERROR"}
        with Talk(lab) as talk:
            agent.await_status(lambda status: status["names"] == 0, within_s=10)
            agent.apply(ALLOWED + "b.test\n")
            assert {connect(lab, address, PORT) for address in ADDRESSES} == {"connection refused"}
            talk.await_packets(talk.far, 50)
        near, far = talk.near(), talk.far()
    talked = {flow: sent for flow, sent in near.items() if flow in far}
    assert len(talked) == 4
    for flow, sent in talked.items():
        assert _contents(far[flow]) == _contents(sent), flow
