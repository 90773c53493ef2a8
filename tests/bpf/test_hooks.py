"""What only real packets show: tags the stack takes off, answers without a socket, large segments, an uplink that routes."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.core.events import Attach
from agent.core.types import EndpointValue, GroupValue, Orientation, OwnAddressKey, Table, Verdict, Write, packed
from agent.datapath.abi import Reason
from agent.datapath.datapath import Datapath
from tests.bpf.lab import CLIENT, CLIENT6, HOST, HOST6, inside
from tests.bpf.scene import (
    HOSTS,
    SERVER,
    SERVER6,
    Scene,
    answer_one,
    counted,
    echo,
    known_as,
    row,
    transparent_socket,
)
from tests.packets import TCP, UDP, frame, tcp, udp

pytestmark = pytest.mark.root

_CONTAINER, _CONTAINER6 = "10.98.0.2", "2001:db8:98::2"


def test_vlans_the_stack_takes_off(scene: Scene) -> None:
    """A tag in front of the hook counts like one in the frame: seen through, also with a second behind it, but not for DNS."""
    with scene.opened() as datapath:
        datapath.apply([known_as(HOST, HOSTS)])
        datapath.attach(scene.attach)
        with inside(scene.lab.client), socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as wire:
            wire.bind(("eth0", 0))
            wire.send(frame(CLIENT, HOST, TCP, tcp(1, 80), 0x8100))
            wire.send(frame(CLIENT, HOST, TCP, tcp(2, 80), 0x88A8, 0x8100))
            wire.send(frame(CLIENT, HOST, TCP, tcp(3, 80), 0x8100, 0x8100, 0x8100))
            wire.send(frame(CLIENT, SERVER, UDP, udp(4, 53), 0x8100))
            wire.send(frame(CLIENT, SERVER, UDP, udp(4, 53), 0x88A8, 0x8100))
        assert counted(datapath, Reason.PASS_POLICY) == 2
        assert counted(datapath, Reason.DROP_VLAN) == 1
        assert counted(datapath, Reason.DROP_VLAN_REDIRECT) == 2


@pytest.mark.parametrize("server", [SERVER, SERVER6])
def test_a_question_answered_by_a_cookie(scene: Scene, server: str) -> None:
    """A flooded listener answers a SYN without keeping it: the SYN-ACK has no socket, and reaches the endpoint all the same."""
    key = (2 if ":" in server else 0) | 1
    with scene.opened() as datapath, transparent_socket(key) as listener:
        Path("/proc/sys/net/ipv4/tcp_syncookies").write_text("2", encoding="ascii")  # always, as if it were flooded
        datapath.set_dns_sockets({key: listener.fileno()})
        datapath.attach(scene.attach)
        proxy = threading.Thread(target=answer_one, args=(listener, key))
        proxy.start()
        answer = scene.lab.asks(socket.SOCK_STREAM, server, 53, b"question")
        proxy.join()
        assert answer == b"from " + server.encode() + b":question"
        assert _cookies_sent() > 0


def _cookies_sent() -> int:
    names, values = (line.split() for line in Path("/proc/thread-self/net/netstat").read_text().splitlines()[:2])
    return int(values[names.index("SyncookiesSent")])


@pytest.mark.parametrize("address", [HOST, HOST6])
def test_a_running_transfer_is_reset_at_once(scene: Scene, address: str) -> None:
    """When its address is no longer allowed, segments to be cut up are refused by one reset, which the sender believes."""
    with scene.opened() as datapath, socket.create_server((address, 80), family=_family(address)) as server:
        datapath.apply([known_as(address, HOSTS)])
        datapath.attach(scene.attach)
        with inside(scene.lab.client):
            sender = socket.create_connection((address, 80), timeout=5)
        receiver, _ = server.accept()
        with sender, receiver:
            sender.sendall(bytes(64_000))
            assert receiver.recv(1)
            datapath.apply([Write(Table.GROUPS, 1, GroupValue(2, True, True, audit=False))])
            with pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):
                sender.sendall(bytes(16 << 20))
        assert counted(datapath, Reason.PASS_ANSWER) > 0


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


@contextlib.contextmanager
def a_container(scene: Scene) -> Iterator[str]:
    """Another namespace behind the lab's host, without an endpoint; what it sends over IPv4 is masqueraded."""
    name = f"ngx-{os.getpid()}"

    def run(*command: str) -> None:
        subprocess.run(command, check=True, timeout=20)

    run("ip", "netns", "add", name)
    try:
        with inside(scene.lab.host):
            run("ip", "link", "add", "inner", "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "addr", "add", "10.98.0.1/24", "dev", "inner")
            run("ip", "-6", "addr", "add", "2001:db8:98::1/64", "dev", "inner", "nodad")
            run("ip", "link", "set", "inner", "up")
            rules = "table ip lab { chain out { type nat hook postrouting priority 100; oifname ngv0 masquerade; }; }"
            run("nft", rules)
        for command in (
            "link set lo up",
            f"addr add {_CONTAINER}/24 dev eth0",
            f"-6 addr add {_CONTAINER6}/64 dev eth0 nodad",
            "link set eth0 up",
            "route add default via 10.98.0.1",
            "-6 route add default via 2001:db8:98::1",
        ):
            run("ip", "-n", name, *command.split())
        for namespace in (name, scene.lab.host):
            _wait_for_addresses(namespace)
        yield name
    finally:
        run("ip", "netns", "del", name)


def _wait_for_addresses(namespace: str) -> None:
    """A host that forwards asks for neighbours from its link-local address, once that is sure (RFC 4862 5.4)."""
    ends_at = time.monotonic() + 10
    command = ["ip", "-n", namespace, "-6", "-o", "addr", "show", "tentative"]
    while subprocess.run(command, check=True, capture_output=True, timeout=20).stdout:
        assert time.monotonic() < ends_at, f"{namespace} does not come to an address of its own"
        time.sleep(0.1)


def test_a_mark_proves_nothing(scene: Scene) -> None:
    """A packet that is carried on under the agent's mark, as somebody's firewall may set it, is judged like any other."""
    rules = "add chain ip lab in { type filter hook prerouting priority 0; iifname inner meta mark set 0xa00; }"
    with a_container(scene) as container, scene.opened() as datapath, inside(scene.lab.client), echo(CLIENT):
        assert _asks(container, CLIENT, 80) == b"A"
        with inside(scene.lab.host):
            subprocess.run(["nft", rules], check=True, timeout=20)
            datapath.attach(scene.attach)
        assert _asks(container, CLIENT, 80) != b"A"
        assert (counted(datapath, Reason.DROP_POLICY), counted(datapath, Reason.PASS_AGENT)) == (1, 0)


def test_what_an_uplink_forwards(scene: Scene) -> None:
    """With both directions closed, what others send through the host passes, masqueraded or not, and is answered.

    The host's own packets do not pass, nor what a peer sends to the host.
    """
    attach = Attach(1, scene.lab.interface, scene.lab.ifindex, Orientation.UPLINK)
    with a_container(scene) as container, inside(scene.lab.host):
        datapath = Datapath.open(scene.settings)
        try:
            datapath.apply(
                [
                    Write(Table.ENDPOINTS, attach.ifindex, EndpointValue(1, 1, 1, Orientation.UPLINK)),
                    Write(Table.GROUPS, 1, GroupValue(1, True, True, audit=False)),
                    *(Write(Table.OWN_ADDRESSES, OwnAddressKey(1, packed(own)), True) for own in (HOST, HOST6)),
                    row(0, 17, 53, Verdict.REDIRECT),
                ]
            )
            datapath.attach(attach)
            with inside(scene.lab.client), echo(CLIENT, CLIENT6):
                for address in (CLIENT, CLIENT6):
                    assert _asks(container, address, 80) == b"A"
                    assert _asks(scene.lab.host, address, 80) in {"PermissionError", "OSError"}
            assert counted(datapath, Reason.PASS_FORWARDED) >= 3  # of IPv4 the answer comes to the host: it finds its flow
            assert counted(datapath, Reason.PASS_FLOW) >= 1
            flows = [flow for flow in datapath.flows() if flow.exempt]
            assert [(flow.local, flow.remote, flow.protocol) for flow in flows] == [(packed(HOST), packed(CLIENT), 17)]
            forwarded, dropped = counted(datapath, Reason.PASS_FORWARDED), counted(datapath, Reason.DROP_POLICY)
            for address in (HOST, "10.98.0.1"):  # the host's, whatever interface it is on
                _asks(scene.lab.client, address, 80)
            assert counted(datapath, Reason.PASS_FORWARDED) == forwarded
            assert counted(datapath, Reason.DROP_POLICY) == dropped + 2
            assert _asks(container, CLIENT6, 53) != b"A"  # not to the proxy either: nobody is there, and it says so
            assert counted(datapath, Reason.PASS_REDIRECT) == counted(datapath, Reason.DROP_NO_GATE) == 0
        finally:
            datapath.close()


def _asks(namespace: str, server: str, port: int) -> bytes | str:
    with inside(namespace), socket.socket(_family(server), socket.SOCK_DGRAM) as asker:
        asker.settimeout(0.5)
        try:
            asker.connect((server, port))
            asker.send(b"a")
            return asker.recv(512)
        except OSError as problem:
            return type(problem).__name__
