"""The lab judges itself before it judges the agent: without one, nothing is lost; what is made to be lost is seen."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.core.types import packed
from tests.netns import pcap
from tests.netns.judge import Judgement, judge
from tests.netns.lab import NAME_SERVERS, Lab, LabError, built, fresh_address

pytestmark = pytest.mark.root

NAMES = 60


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(clients=2, fresh=1000, records={"www.example.test.": ["A 198.51.100.80", "5 IN AAAA 2001:db8:53::80"]}) as lab:
        yield lab


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def run_clients(lab: Lab, tmp_path: Path, *arguments: str, client: int = 0) -> tuple[dict[str, int], Judgement]:
    """What the client says happened, and what the captures of both sides say."""
    asker = lab.clients[client]
    near = lab.capture(asker.namespace, asker.device, "udp or tcp", name=f"{tmp_path.name}-near")
    far = lab.capture(lab.host, lab.uplink, "udp or tcp", name=f"{tmp_path.name}-far")
    with near, far:
        said = json.loads(lab.run(asker.namespace, built("first_packet.c"), *arguments).stdout)
    assert (near.lost, far.lost) == (0, 0)
    return said["summary"], judge(pcap.read(near.path), pcap.read(far.path))


@pytest.mark.parametrize("server", NAME_SERVERS)
@pytest.mark.parametrize("send", ["udp", "tcp"])
@pytest.mark.parametrize("dns", ["udp", "tcp"])
def test_nothing_is_lost_where_nobody_stands_in_the_way(lab: Lab, tmp_path: Path, dns: str, send: str, server: str) -> None:
    """Every name is answered, every first packet forwarded, and client and captures agree."""
    said, seen = run_clients(lab, tmp_path, "--server", server, "--dns", dns, "--send", send, "--count", str(NAMES), "--spin")
    assert said["first-try"] == NAMES
    assert seen.summary() == {
        "replies": NAMES,
        "replies_with_addresses": NAMES,
        "first_packets": NAMES,
        "lost": 0,
        "unresolved": 0,
        "retransmitted": 0,
        "duplicated": 0,
        "not_understood": 0,
    }
    first = seen.by_address[packed(fresh_address(1, 6))]
    assert first.reply is not None
    assert first.forwarded_at_ns is not None
    assert (first.reply.name, first.reply.is_tcp) == ("n1.test.", dns == "tcp")
    assert first.reply.at_ns < first.sent_at_ns < first.forwarded_at_ns


@pytest.fixture
def host_rules(lab: Lab) -> Iterator[list[str]]:
    """Lines for nft in the host's namespace, in a chain that forwarded packets pass; gone afterwards."""
    lines: list[str] = []
    yield lines
    lab.run(lab.host, "nft", "delete table inet obstacle", check=False)


def obstruct(lab: Lab, *rules: str) -> None:
    lines = ["table inet obstacle {", "set seen { type ipv4_addr; flags dynamic; }"]
    lines += ["chain forward { type filter hook forward priority 0;", *rules, "}", "}"]
    lab.run(lab.host, "nft", "\n".join(lines))


@pytest.mark.parametrize("send", ["udp", "tcp"])
@pytest.mark.usefixtures("host_rules")
def test_what_the_host_drops_is_seen_as_lost(lab: Lab, tmp_path: Path, send: str) -> None:
    """Names 0 to 9 are in the way of a drop rule, for A and for AAAA."""
    last = (fresh_address(9), fresh_address(9, 6))
    obstruct(
        lab,
        f"ip daddr {fresh_address(0)}-{last[0]} drop",
        f"ip6 daddr {fresh_address(0, 6)}-{last[1]} drop",
    )
    said, seen = run_clients(lab, tmp_path, "--server", NAME_SERVERS[0], "--send", send, "--count", str(NAMES))
    assert (said["lost"], said["first-try"]) == (10, NAMES - 10)
    wanted = {packed(fresh_address(i, 6 if i % 2 else 4)) for i in range(10)}
    assert {first.address for first in seen.lost} == wanted


@pytest.mark.usefixtures("host_rules")
def test_a_connection_that_needs_a_second_syn_counts_as_lost(lab: Lab, tmp_path: Path) -> None:
    """The first SYN to each address is dropped, the copy a second later passes: late to the client, lost to the judge."""
    obstruct(lab, "tcp dport 7 ip daddr != @seen add @seen { ip daddr } drop")
    arguments = ("--server", NAME_SERVERS[0], "--types", "a", "--first", "100", "--count", "5", "--settle-ms", "1600")
    said, seen = run_clients(lab, tmp_path, *arguments)
    assert said["late"] == 5
    assert (len(seen.lost), seen.retransmitted) == (5, 5)
    assert all(first.forwarded_at_ns is not None for first in seen.lost)


@pytest.mark.usefixtures("host_rules")
def test_a_refusal_and_a_missing_reply_are_told_apart(lab: Lab, tmp_path: Path) -> None:
    """A reset is a refusal; a name server that does not answer is counted, and nothing is sent."""
    obstruct(lab, "tcp dport 7 reject with tcp reset")
    said, seen = run_clients(lab, tmp_path, "--server", NAME_SERVERS[1], "--first", "200", "--count", "4")
    assert said["refused"] == 4
    assert len(seen.lost) == 4
    arguments = ("--server", "198.51.100.99", "--count", "2", "--timeout-ms", "50")
    said, seen = run_clients(lab, tmp_path, *arguments)
    assert said["unanswered"] == 2
    assert seen.summary()["first_packets"] == 0


def test_a_name_without_address_is_answered_and_nothing_is_sent(lab: Lab, tmp_path: Path) -> None:
    """n1000 does not exist: an NXDOMAIN for each, no first packet."""
    said, seen = run_clients(lab, tmp_path, "--server", NAME_SERVERS[0], "--first", "1000", "--count", "3")
    assert said["no-address"] == 3
    assert [reply.rcode for reply in seen.replies] == [3, 3, 3]
    assert not seen.by_address


def test_every_client_reaches_every_server_range(lab: Lab) -> None:
    """Records are served as given; any invented address answers, in both versions."""
    echo = "import socket, sys; s = socket.create_connection((sys.argv[1], 80), 5); s.sendall(b'x'); assert s.recv(1) == b'x'"
    for client in lab.clients:
        shown = lab.run(client.namespace, "dig", f"@{NAME_SERVERS[1]}", "www.example.test", "AAAA", "+noall", "+answer").stdout
        assert shown.split() == ["www.example.test.", "5", "IN", "AAAA", "2001:db8:53::80"]
        for address in ("198.51.100.80", "198.19.255.254", "2001:db8:53::80", "2001:db8:99:ffff::1"):
            lab.run(client.namespace, sys.executable, "-c", echo, address)


def test_a_capture_is_complete_when_it_is_stopped(lab: Lab) -> None:
    """tcpdump sleeps through a burst and has all of it still to read when it is told to stop: every packet is in the file."""
    burst = (
        "import socket, sys\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "for i in range(5000): s.sendto(i.to_bytes(4, 'big'), (sys.argv[1], 9))"
    )
    with lab.capture(lab.client.namespace, lab.client.device, "udp dst port 9", name="burst") as capture:
        capture._tcpdump.send_signal(signal.SIGSTOP)
        lab.run(lab.client.namespace, sys.executable, "-c", burst, fresh_address(0))
        capture._tcpdump.send_signal(signal.SIGCONT)
    assert (capture.taken, capture.lost) == (5000, 0)
    assert len(pcap.read(capture.path).packets) == capture.taken


def test_nothing_is_left_after_a_failure() -> None:
    """The body raises: namespaces, processes and files are gone all the same."""
    lab = Lab()
    running: list[int] = []

    def fail_inside() -> None:
        with lab:
            assert lab.host in namespaces()
            # A daemon leaves the group of the process that the lab knows.
            lab.run(lab.internet, "sh", "-c", "setsid --fork sleep 300 >/dev/null 2>&1")
            pids = lab.run(lab.host, "ip", "netns", "pids", lab.internet).stdout.split()
            running.extend(os.pidfd_open(int(pid)) for pid in pids)
            raise ValueError("the body")

    with pytest.raises(ValueError, match="the body"):
        fail_inside()
    ended, _, _ = select.select(running, [], [], 0)
    for handle in running:
        os.close(handle)
    assert len(running) >= 3
    assert ended == running
    assert lab.host.removesuffix("host") not in namespaces()
    assert not lab.directory.exists()


def test_a_lab_that_cannot_be_built_leaves_nothing() -> None:
    """A zone that nsd refuses: LabError that says so, and nothing stays."""
    lab = Lab(records={"bad.example.": ["A not-an-address"]})
    with pytest.raises(LabError, match=r"nsd-checkzone(?s:.*)not-an-address"), lab:
        pass
    assert lab.host not in namespaces()
    assert not lab.directory.exists()


def test_leftovers_of_a_killed_run_are_removed() -> None:
    """A process makes a lab and is killed; the next lab takes its namespaces away."""
    program = (
        "import os, signal\nfrom tests.netns.lab import Lab\n"
        "with Lab() as lab:\n    print(lab.host, lab.directory, flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    host, directory = killed.stdout.split()
    assert host in namespaces()
    with Lab():
        assert host not in namespaces()
        assert not Path(directory).exists()
