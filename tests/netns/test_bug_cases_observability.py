"""Bug cases of theme 15 that are about telling: one decision and its reason, chatter, audit to policy, a hook that is gone,
headers that are missing.

OBSERVABILITY_LONG=1: with the times that the cases state.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Self

import pytest

from agent.control.client import Control
from tests.netns.asking import ask, connect
from tests.netns.lab import NAME_SERVERS, Lab
from tests.netns.leasing import Lease
from tests.netns.running import RunningAgent
from tests.netns.sending import dropping, send_frames
from tests.netns.test_suggest import Recording, namegate
from tests.packets import ICMPV6, UDP, frame, udp

pytestmark = pytest.mark.root

IS_LONG: Final = bool(os.environ.get("OBSERVABILITY_LONG"))
POLICY: Final = "a.test:443/tcp\n"
RECORDS: Final = {
    "a.test.": ["CNAME b.other.test."],
    "b.other.test.": ["A 198.51.100.182"],
    "n185.test.": ["A 198.51.100.185"],
}
PEERS: Final = ("203.0.113.81", "203.0.113.83", "203.0.113.85")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(clients=3, records=RECORDS, ports=(443, 8443)) as lab:
        for peer in PEERS:
            lab.run(lab.internet, "ip", "route", "add", "local", peer, "dev", "lo")
        yield lab


@pytest.fixture(scope="module")
def agent(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """The first client is enforced, the second audited, the third left to a lease. Nothing is mended while a case looks."""
    endpoints = [
        {
            "interface": client.endpoint,
            "labels": {"app": f"e{number}"},
            "addresses": list(client.addresses),
            "audit": number == 2,
        }
        for number, client in enumerate(lab.clients[:2], 1)
    ]
    directory = tmp_path_factory.mktemp("observability")
    with RunningAgent(lab, POLICY, directory, endpoints=endpoints, datapath={"verify-every": 0}) as agent:
        yield agent


class Heard:
    """Facts of these kinds, from now on."""

    def __init__(self, agent: RunningAgent, *kinds: str) -> None:
        control = Control(agent.directory / "run" / "control.sock", patience=20)
        self._feed = control.listen("facts", kinds=list(kinds))
        self.facts: list[dict[str, Any]] = []

    def until(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        deadline = time.monotonic() + 10
        while not any(map(wanted, self.facts)):
            assert time.monotonic() < deadline, self.facts
            self.facts += [line["fact"] for line in self._feed.read(1) if "fact" in line]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._feed.__exit__(None, None, None)


def command(agent: RunningAgent, *arguments: str) -> subprocess.CompletedProcess[str]:
    control = agent.directory / "run" / "control.sock"
    return agent.lab.run(agent.lab.host, sys.executable, "-m", "agent", "--control", control, *arguments, check=False)


def test_case_181_every_denial_says_why(lab: Lab, agent: RunningAgent) -> None:
    """A name that no policy allows, an allowed name at another port, an address nobody asked about: three events, each with
    its own reason, and `explain` agrees. The destination of a question is the server, its port that of DNS (19)."""
    own = lab.client.addresses[0]
    assert ask(lab, "a.test").addresses == ("198.51.100.182",)
    with Heard(agent, "question", "drop") as heard:
        assert ask(lab, "denied.test").status == "NXDOMAIN"
        for address, port in (("198.51.100.182", 22), ("203.0.113.81", 443)):
            assert connect(lab, address, port) == "connection refused"
        heard.until(lambda fact: fact.get("destination") == "203.0.113.81")
    lookup, other_port, unknown = heard.facts
    packet: dict[str, Any] = {"kind": "drop", "endpoint": 1, "protocol": "tcp", "source": own, "reason": "policy"}
    holds(
        lookup, kind="question", endpoint=1, protocol="udp", client=own, server=NAME_SERVERS[0], name="denied.test.", type="A",
        outcome="denied", verdict="denied", rule="no rule",
    )  # fmt: skip
    holds(
        other_port, **packet, destination="198.51.100.182", port=22, names=["a.test."], chains=[["a.test.", "b.other.test."]],
        why="no rule for this port: a.test.", rule="no rule",
    )  # fmt: skip
    holds(
        unknown, **packet, destination="203.0.113.81", port=443, names=[], chains=[], why="not resolved through the proxy",
        rule="no rule",
    )  # fmt: skip
    times = [datetime.fromisoformat(fact["time"]) for fact in heard.facts]
    assert times == sorted(times)
    assert all(at.tzinfo is not None for at in times)

    kept = json.loads(command(agent, "drops", "--last", "2", "-o", "json").stdout)
    assert [row["destination"] for row in kept] == ["198.51.100.182", "203.0.113.81"]
    holds(other_port, **{key: value for key, value in kept[0].items() if key != "time"})
    said = command(agent, "explain", "--drop", "2").stdout
    assert "a.test. > b.other.test." in said
    assert "no rule" in said


def holds(fact: dict[str, Any], **fields: object) -> None:
    assert {key: fact.get(key) for key in fields} == fields


# What a host says in five minutes at once: by multicast DNS it asks every five seconds, in both families.
SOLICITATION: Final = bytes.fromhex("85000000") + bytes(4)
ASKED_IN_5_MIN: Final = 60


def chatter(lab: Lab) -> list[bytes]:
    own, own6 = lab.clients[2].addresses
    asked = bytes.fromhex("000000000001000000000000") + b"\x05_http\x04_tcp\x05local\x00\x00\x0c\x00\x01"
    mdns = [
        frame(own, "224.0.0.251", UDP, udp(5353, 5353, asked)),
        frame(own6, "ff02::fb", UDP, udp(5353, 5353, asked)),
    ]
    return [frame(own, "224.0.0.252", UDP, udp(5355, 5355, asked))] * 3 + mdns * ASKED_IN_5_MIN


def test_case_183_chatter_of_the_link_is_no_denial(lab: Lab, agent: RunningAgent) -> None:
    """Of five minutes of it, the agent's own questions and one SYN that is denied, the SYN alone is in the summary of a run, in
    `drops` and among the drops of `monitor`; the chatter is counted, told apart, and dropped all the same."""
    client = lab.clients[2]
    before, kept = agent.status()["counters"].get("link chatter", 0), agent.ask("drops")
    said = chatter(lab)
    control = agent.directory / "run" / "control.sock"
    with Lease(control, client.endpoint, addresses=client.addresses) as lease, Heard(agent, "drop", "chatter") as heard:
        with dropping(agent, policy=len(said) + 1):
            send_frames(lab, [frame(client.addresses[1], "ff02::2", ICMPV6, SOLICITATION)] * 3, client)
            send_frames(lab, said, client)
            assert ask(lab, "a.test", client=client).status == "NOERROR"
            assert connect(lab, "203.0.113.83", client=client) == "connection refused"
        heard.until(lambda fact: fact.get("destination") == "203.0.113.83")
        summary = lease.end()
    (drop,) = summary["drops"]
    assert (drop["destination"], drop["port"], drop["count"]) == ("203.0.113.83", 443, 1)
    assert [row["destination"] for row in agent.ask("drops")[len(kept) :]] == ["203.0.113.83"]
    assert [fact["destination"] for fact in heard.facts if fact["kind"] == "drop"] == ["203.0.113.83"]
    told = {fact["destination"] for fact in heard.facts if fact["kind"] == "chatter"}
    assert told == {"224.0.0.251", "ff02::fb", "224.0.0.252"}
    assert agent.status()["counters"]["link chatter"] - before == len(said)


def traffic(lab: Lab, number: int) -> list[str]:
    """Of this client: a name and its address, and an address without a name."""
    client = lab.clients[number - 1]
    return [
        *ask(lab, "n185.test", client=client).addresses,
        connect(lab, "198.51.100.185", client=client),
        connect(lab, "203.0.113.85", 8443, client=client),
    ]


def test_case_185_what_was_blocked_becomes_a_line(lab: Lab, agent: RunningAgent, tmp_path: Path) -> None:
    """What the audited client did is suggested by name where it asked, by address where it did not; `check` takes that, and
    under it the enforced client may do the same and no more (23)."""
    wanted = ["198.51.100.185", "connected", "connected"]
    recording = Recording(lab, agent, tmp_path / "record")
    assert traffic(lab, 2) == wanted
    recording.await_row(kind="drop", destination="203.0.113.85", audited=True)
    recording.end()
    suggested = namegate("suggest", "-o", "list", recording.path)
    lines = {line.partition("#")[0].strip() for line in suggested.stdout.splitlines()} - {""}
    assert lines == {"n185.test:443/tcp", "203.0.113.85:8443/tcp"}
    assert "203.0.113.85/32" in namegate("suggest", "-o", "cnp", recording.path).stdout
    file = tmp_path / "suggested.txt"
    file.write_text(suggested.stdout)
    assert namegate("check", file).exit_code == 0
    assert ask(lab, "n185.test").status == "NXDOMAIN", "not before"
    try:
        agent.apply(suggested.stdout)
        with dropping(agent):
            assert traffic(lab, 1) == wanted
        with dropping(agent, policy=2):
            assert {connect(lab, "203.0.113.85"), connect(lab, "198.51.100.185", 8443)} == {"connection refused"}
    finally:
        agent.apply(POLICY)


def test_case_186_a_hook_that_is_gone_is_seen_at_each_look(lab: Lab, agent: RunningAgent) -> None:
    """`status` asks the kernel: degraded, names the interface, exit code 1, at once and later (22); good when it is back."""
    interface = lab.client.endpoint
    assert command(agent, "status").returncode == 0
    take_off(agent, interface)
    try:
        for pause_s in (0, 5 if IS_LONG else 0):
            time.sleep(pause_s)
            said = command(agent, "status", "-o", "json")
            status = json.loads(said.stdout)
            assert (said.returncode, status["state"]) == (1, "degraded")
            assert status["reasons"] == [f"{interface}: our program is not there: nothing is enforced"]
    finally:
        assert "now        as it should be" in command(agent, "verify", "--repair").stdout
    assert command(agent, "status").returncode == 0


def take_off(agent: RunningAgent, interface: str) -> None:
    """By hand, as whoever tidies up does it: by link where the kernel has links for this, else by filter."""
    (link,) = json.loads(agent.lab.run(agent.lab.host, "ip", "-j", "link", "show", "dev", interface).stdout)
    links = list((agent.pins / "links").glob(f"{link['ifindex']}-*"))
    for path in links:
        subprocess.run(["bpftool", "link", "detach", "pinned", path], check=True, capture_output=True)
    if not links:
        agent.lab.run(agent.lab.host, "tc", "qdisc", "del", "dev", interface, "clsact")


# In a mount namespace of its own, where the running kernel's headers are nowhere.
_WITHOUT_HEADERS = """
test ! -d /lib/modules || mount -t tmpfs none /lib/modules
test ! -e /sys/kernel/kheaders.tar.xz || mount -t tmpfs none /sys/kernel
unset BCC_KERNEL_SOURCE
NAMEGATE_CACHE="$1" exec "$2" -m agent agent -c "$3"
"""


def test_case_188_missing_headers_are_one_sentence(lab: Lab, tmp_path: Path) -> None:
    """It names the package; exit code 2, nothing is attached, pinned or made, no traceback (24)."""
    pins = Path("/sys/fs/bpf") / lab.internet
    unstarted = RunningAgent(
        lab, POLICY, tmp_path, endpoints=[{"interface": "eth0"}], datapath={"pin-directory": str(pins), "device": "ng188"}
    )
    there = lab.run(lab.internet, "ip", "-o", "link").stdout
    shell = ("unshare", "--mount", "sh", "-e", "-c", _WITHOUT_HEADERS, "sh")
    try:
        done = lab.run(lab.internet, *shell, tmp_path / "cache", sys.executable, unstarted.configuration, check=False)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert f"install linux-headers-{os.uname().release}" in line
        assert done.stdout == ""
        assert not pins.exists()
        assert lab.run(lab.internet, "ip", "-o", "link").stdout == there
        (hooks,) = json.loads(lab.run(lab.internet, "bpftool", "-j", "net", "show", "dev", "eth0").stdout)
        assert not any(hooks.values())
    finally:
        unstarted.cleanup()
