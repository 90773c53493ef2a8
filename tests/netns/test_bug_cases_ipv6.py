"""Bug cases of IPv6: policed like IPv4, there or not; and DHCP, whose client has no address to show."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from tests.netns.asking import ask, connect
from tests.netns.lab import NAME_SERVERS, Lab
from tests.netns.running import RunningAgent
from tests.netns.sending import counts, dropping, reasons, seen, send_frames, send_from, summed
from tests.packets import UDP, frame, udp

pytestmark = pytest.mark.root

LITERAL = "2001:db8:ffff::1"
PREFIXES = ("2001:db8::/64", "2001:db8:ffff::/64")
RECORDS = {
    "n98.test.": ["A 198.51.100.98", "AAAA 2001:db8::98"],
    "n100.test.": ["A 198.51.100.10", "AAAA 2001:db8::100"],
    "n101.test.": ["A 198.51.100.101", "AAAA 2001:db8::101"],
    "only4.test.": ["A 198.51.100.102"],
}

# An echo request; and one datagram that waits for what comes back: `echoed`, or the error.
_PROBES = """
import socket, sys
s = socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6)
s.sendto(b"\\x80\\0\\0\\0\\0\\7\\0\\1probe", (sys.argv[1], 0))
s = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
s.connect((sys.argv[1], 443))
s.settimeout(1)
try:
    s.send(b"probe")
    print("echoed" if s.recv(64) == b"probe" else "another datagram")
except OSError as error:
    print(error.strerror.lower() if error.strerror else "timed out")
"""

# Connects by name as programs do, by getaddrinfo: AAAA before A. Prints the addresses connected to, and the longest time.
_BY_NAME = """
import collections, json, socket, sys, time
peers, longest = collections.Counter(), 0.0
for number in range(int(sys.argv[1])):
    begun = time.monotonic()
    with socket.create_connection((sys.argv[2 + number % 2], 443), timeout=5) as s:
        peers[s.getpeername()[0]] += 1
    longest = max(longest, time.monotonic() - begun)
print(json.dumps([peers, longest]))
"""

_LITERAL = """
import socket, sys, time
s = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
s.settimeout(2)
begun = time.monotonic()
try:
    s.connect((sys.argv[1], 443))
    print("connected", time.monotonic() - begun)
except OSError as error:
    print(type(error).__name__, time.monotonic() - begun)
"""

# A machine behind a tap: once told, it sends the frames it is given.
_TAP = """
import fcntl, os, struct, sys
tap = os.open("/dev/net/tun", os.O_RDWR)
fcntl.ioctl(tap, 0x400454CA, struct.pack("16sH22x", sys.argv[1].encode(), 0x1002))  # TUNSETIFF, IFF_TAP | IFF_NO_PI
print("there", flush=True)
for line in sys.stdin:
    os.write(tap, bytes.fromhex(line))
"""

# A DHCP server's ear on one interface: a line for each datagram.
_DHCP = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, sys.argv[1].encode())
s.bind(("", 67))
s.settimeout(float(sys.argv[2]))
print("listening", flush=True)
try:
    print(s.recvfrom(512)[1][0], flush=True)
except TimeoutError:
    print("silence", flush=True)
"""


def routed(lab: Lab) -> Lab:
    for prefix in PREFIXES:
        lab.run(lab.internet, "ip", "-6", "route", "add", "local", prefix, "dev", "lo")
    return lab


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(records=RECORDS, ports=(443,)) as lab:
        yield routed(lab)


def test_case_098_ipv6_is_policed_as_well(lab: Lab, tmp_path: Path) -> None:
    """TCP, UDP and an echo request to an IPv6 address that nobody looked up are dropped; a looked-up one passes."""
    with RunningAgent(lab, "n98.test:443/tcp\n", tmp_path / "agent") as agent:
        with lab.capture(lab.host, lab.uplink, f"host {LITERAL}", name="98-far") as far:
            with dropping(agent, policy=3):
                assert connect(lab, LITERAL) == "connection refused"
                said = lab.run(lab.client.namespace, sys.executable, "-c", _PROBES, LITERAL).stdout
                assert said == "permission denied\n"  # what Linux makes of "administratively prohibited"
            with dropping(agent, policy=1):
                assert connect(lab, "2001:db8::98") == "connection refused"
            assert ask(lab, "n98.test", "AAAA").addresses == ("2001:db8::98",)
            assert connect(lab, "2001:db8::98") == "connected"
        assert seen(far) == []
        protocols = [row["protocol"] for row in agent.ask("drops") if row["destination"] == LITERAL]
        assert protocols == ["tcp", "icmpv6", "udp"]
        assert set(reasons(agent, LITERAL)) == {("policy", "not resolved through the proxy")}


def test_case_100_a_host_without_ipv6_is_no_reason_not_to_start(tmp_path: Path) -> None:
    """IPv4 is enforced and opened; an AAAA answer is given or empty; the agent does not complain over and over."""
    with Lab(records=RECORDS, ports=(443,)) as lab:
        lab.settle(lab.host, {"ipv6/conf/all/disable_ipv6": 1, "ipv6/conf/default/disable_ipv6": 1})
        with RunningAgent(lab, "n100.test:443/tcp\n", tmp_path / "agent") as agent:
            with dropping(agent, policy=1):
                assert connect(lab, "198.51.100.10") == "connection refused"
            assert ask(lab, "n100.test").addresses == ("198.51.100.10",)
            answer = ask(lab, "n100.test", "AAAA")
            assert answer.status == "NOERROR"
            assert answer.addresses in {(), ("2001:db8::100",)}
            assert connect(lab, "198.51.100.10") == "connected"
            status = agent.status()
            assert (status["state"], status["reasons"], status["rows_pending"]) == ("enforcing", [], 0)
            complaints = [line for line in agent.log.read_text().splitlines() if " ERROR " in line or " WARNING " in line]
            assert len(complaints) <= 2, complaints


def test_case_101_a_client_that_tries_ipv6_first_never_waits(lab: Lab, tmp_path: Path) -> None:
    """100 connects by name meet no drop; one to a literal address fails by a reset at once (8, 19)."""
    resolver = tmp_path / "resolv.conf"
    resolver.write_text(f"nameserver {NAME_SERVERS[0]}\n")
    own_file = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'  # seen by this one process: unshare(1)
    with RunningAgent(lab, "n101.test:443/tcp\nonly4.test:443/tcp\n", tmp_path / "agent") as agent:
        with dropping(agent):
            client = ("unshare", "--mount", "sh", "-c", own_file, resolver, sys.executable, "-c", _BY_NAME)
            said = lab.run(lab.client.namespace, *client, "100", "n101.test", "only4.test", timeout_s=120).stdout
        peers, longest_s = json.loads(said)
        assert peers == {"2001:db8::101": 50, "198.51.100.102": 50}
        assert longest_s < 1
        with dropping(agent, policy=1):
            how, took = lab.run(lab.client.namespace, sys.executable, "-c", _LITERAL, LITERAL).stdout.split()
        assert (how, float(took) < 0.05) == ("ConnectionRefusedError", True), took


DISCOVER = frame("0.0.0.0", "255.255.255.255", UDP, udp(68, 67, bytes(240)))


def dhcp_server(lab: Lab, interface: str, patience_s: float) -> subprocess.Popen[str]:
    server = lab.start(lab.host, sys.executable, "-c", _DHCP, interface, str(patience_s))
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    return server


def make_tap(lab: Lab) -> IO[str]:
    """A tap with an address on the host's side; frames that the machine behind it sends are written to what this gives."""
    machine = lab.start(lab.host, sys.executable, "-c", _TAP, "tap103", stdin=subprocess.PIPE)
    assert machine.stdin is not None
    assert machine.stdout is not None
    assert machine.stdout.readline() == "there\n"
    lab.run(lab.host, "ip", "link", "set", "tap103", "up")
    lab.run(lab.host, "ip", "addr", "add", "10.9.103.1/30", "dev", "tap103")
    return machine.stdin


@pytest.mark.parametrize("kind", ["uplink", "tap", "veth", "veth-that-may"])
def test_case_103_a_client_without_an_address_asks_for_one(lab: Lab, tmp_path: Path, kind: str) -> None:
    """A discovery passes on an uplink, on a tap, and on a veth with `dhcp: true`; elsewhere its source is not known (7, 16)."""
    client = lab.client
    entry: dict[str, Any] = {"interface": client.endpoint, "addresses": list(client.addresses)}
    tap = make_tap(lab) if kind == "tap" else None
    if kind == "uplink":
        entry = {"interface": lab.uplink, "orientation": "uplink"}
    elif kind == "tap":
        entry = {"interface": "tap103", "addresses": ["10.9.103.2"]}
    elif kind == "veth-that-may":
        entry["dhcp"] = True
    is_dropped = kind == "veth"
    with RunningAgent(lab, "n98.test:443/tcp\n", tmp_path / "agent", endpoints=[entry]) as agent:
        if kind == "uplink":
            with lab.capture(lab.internet, "eth0", "udp port 67", name="103-far") as far, dropping(agent):
                send_from(lab, lab.host, lab.uplink, lab.internet, "eth0", [DISCOVER])
            assert len(seen(far, source="0.0.0.0", destination="255.255.255.255")) == 1
        else:
            server = dhcp_server(lab, entry["interface"], 1 if is_dropped else 5)
            with dropping(agent, **({"source": 1} if is_dropped else {})):
                if tap is not None:
                    tap.write((b"\xff" * 6 + summed(DISCOVER)[6:]).hex() + "\n")
                    tap.flush()
                else:
                    send_frames(lab, [DISCOVER])
                heard, _ = server.communicate(timeout=10)
            assert heard == ("silence\n" if is_dropped else "0.0.0.0\n")
        assert counts(agent)["pass-dhcp"] == (0 if is_dropped else 1)
