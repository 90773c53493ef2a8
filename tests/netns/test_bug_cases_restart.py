"""Bug cases of reload, restart and crash: nothing opens in between, nothing that is open closes."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.netns import pcap
from tests.netns.asking import ask, connect
from tests.netns.lab import NAME_SERVERS, Client, Lab
from tests.netns.running import RunningAgent
from tests.netns.sending import Conversation, Stream, drop_counts, dropping, reasons, seen

pytestmark = pytest.mark.root

PEERS = ("203.0.113.26", "203.0.113.27", "203.0.113.31", "203.0.113.32")
RECORDS = {f"n{case}.test.": [f"A 198.51.100.{case}"] for case in (129, 131, 132, 134)}
RELOADS, RELOAD_PAUSE_S = 100, 0.015


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(records=RECORDS, ports=(443, 9000)) as lab:
        for peer in PEERS:
            lab.run(lab.internet, "ip", "route", "add", "local", peer, "dev", "lo")
        yield lab


def reload(agent: RunningAgent, policy: str) -> None:
    """With one more entry and without it in turn, so that each is a change; spread over what a stream sends meanwhile."""
    for number in range(RELOADS):
        time.sleep(RELOAD_PAUSE_S)
        agent.apply(policy + ("another.test:443/tcp\n" if number % 2 else ""))


def test_case_126_no_reload_opens_a_window(lab: Lab, tmp_path: Path) -> None:
    """2,000 datagrams a second to an address that no policy allows, during 100 reloads: none gets through."""
    policy = "n129.test:443/tcp\n198.51.100.0/25\n"
    with RunningAgent(lab, policy, tmp_path / "agent") as agent:
        with lab.capture(lab.host, lab.uplink, "dst 203.0.113.26", name="126-far") as far:
            stream = Stream(lab, "203.0.113.26", 9000, 2000)
            reload(agent, policy)
            sent, heard = stream.end()
        assert (sent > 1000, heard) == (True, 0)
        assert far.taken == 0
        assert set(drop_counts(agent)) == {"policy"}
        assert ask(lab, "n129.test").status == "NOERROR"
        assert connect(lab, "198.51.100.129") == "connected"


def test_case_127_no_reload_loses_a_packet(lab: Lab, tmp_path: Path) -> None:
    """Beside them 2,000 a second to an allowed network: not one is lost, and of the others none gets through."""
    policy = "198.51.100.0/25\n"
    with RunningAgent(lab, policy, tmp_path / "agent") as agent:
        with lab.capture(lab.host, lab.uplink, "udp port 9000 and dst 203.0.113.27", name="127-far") as far:
            streams = [Stream(lab, peer, 9000, 2000) for peer in ("203.0.113.27", "198.51.100.27")]
            reload(agent, policy)
            denied, allowed = [stream.end() for stream in streams]
        assert (denied[0] > 1000, denied[1]) == (True, 0)
        assert (allowed[0] > 1000, allowed[1]) == (True, allowed[0])
        assert far.taken == 0
        assert set(drop_counts(agent)) == {"policy"}
        assert {row["destination"] for row in agent.ask("drops")} == {"203.0.113.27"}


def test_case_129_a_reload_keeps_what_was_learned(lab: Lab, tmp_path: Path) -> None:
    """With a further name nothing changes for the first; without the first its flow and its address are closed (15, 17)."""
    policy = "n129.test:443/tcp\n"
    with RunningAgent(lab, policy, tmp_path / "agent") as agent:
        assert ask(lab, "n129.test").status == "NOERROR"
        with Conversation(lab, "198.51.100.129") as talk:
            assert talk.say() == "echoed"
            with dropping(agent):
                agent.apply(f"{policy}n132.test:443/tcp\n")
                assert talk.say() == "echoed"
                assert connect(lab, "198.51.100.129") == "connected"
            with dropping(agent, policy=2):
                agent.apply("n132.test:443/tcp\n")
                assert talk.say() == "connection reset by peer"
                assert connect(lab, "198.51.100.129") == "connection refused"
        assert set(reasons(agent, "198.51.100.129")) == {("policy", "no rule for this name: n129.test.")}


@pytest.mark.parametrize("is_held", [True, False], ids=["holder-lives", "holder-killed"])
def test_case_131_the_agents_death_neither_opens_nor_closes(lab: Lab, tmp_path: Path, is_held: bool) -> None:
    """Past the TTL of what was learned too; questions are answered SERVFAIL by the holder, or like a denied packet (20)."""
    dns = {"ttl-floor": "2s", "ttl-cap": "2s", "keep-while-flow-seen": "1s"}
    with RunningAgent(lab, "n131.test:443/tcp\n", tmp_path / "agent", dns=dns) as agent:
        assert ask(lab, "n131.test").status == "NOERROR"
        learned_at = time.monotonic()
        assert connect(lab, "198.51.100.131") == "connected"
        holder = agent.holder()
        agent.end(signal.SIGKILL)
        if not is_held:
            kill(holder)
        with lab.capture(lab.host, lab.uplink, "dst 203.0.113.31 or port 53", name=f"131-{is_held}-far") as far:
            before = drop_counts(agent)
            rounds = 0
            while time.monotonic() - learned_at < 5:
                rounds += 1
                answer = ask(lab, "n131.test", "A", "+time=2")
                if is_held:
                    assert (answer.status, answer.addresses, answer.error[:2]) == ("SERVFAIL", (), "14")
                    assert answer.took_ms < 1000
                else:
                    assert (answer.status, connect(lab, NAME_SERVERS[0], 53)) == ("no answer", "connection refused")
                assert connect(lab, "203.0.113.31") == "connection refused"
                assert connect(lab, "198.51.100.131") == "connected"
            dropped = drop_counts(agent) - before
        assert rounds >= 3
        assert pcap.read(far.path).packets == ()
        assert dropped == ({"policy": rounds} if is_held else {"policy": rounds, "no-socket": 2 * rounds})
        agent.start()
        assert ask(lab, "n131.test").addresses == ("198.51.100.131",)
        assert connect(lab, "198.51.100.131") == "connected"
        assert connect(lab, "203.0.113.31") == "connection refused"


def kill(process: int) -> None:
    handle = os.pidfd_open(process)
    signal.pidfd_send_signal(handle, signal.SIGKILL)
    assert select.select([handle], [], [], 5)[0], "the holder is still there"
    os.close(handle)


def test_case_132_only_cleanup_opens(lab: Lab, tmp_path: Path) -> None:
    """Neither a kill nor an orderly stop does (decision 20)."""
    with RunningAgent(lab, "n132.test:443/tcp\n", tmp_path / "agent") as agent:
        agent.end(signal.SIGKILL)
        with dropping(agent, policy=1):
            assert connect(lab, "203.0.113.32") == "connection refused"
        agent.start()
        assert agent.end(signal.SIGTERM) == 0
        with dropping(agent, policy=1):
            assert connect(lab, "203.0.113.32") == "connection refused"
        agent.cleanup()
        assert connect(lab, "203.0.113.32") == "connected"
        assert not agent.pins.exists()


def test_case_134_the_agents_own_questions_are_not_intercepted(lab: Lab, tmp_path: Path) -> None:
    """On an uplink: one packet upstream for each question. A start that could not tell them apart is refused (7, 24)."""
    host = Client(lab.host, lab.uplink, lab.uplink, ("203.0.113.1", "2001:db8:2::1"), ("203.0.113.2", "2001:db8:2::2"))
    uplink = {"interface": lab.uplink, "orientation": "uplink"}
    agent = RunningAgent(lab, "n134.test:443/tcp\n", tmp_path / "agent", endpoints=[uplink])
    with agent:
        with lab.capture(lab.internet, "eth0", "udp dst port 53", name="134-far") as far:
            for _ in range(3):
                assert ask(lab, "n134.test", client=host).addresses == ("198.51.100.134",)
        assert len(seen(far)) == 3
        assert connect(lab, "198.51.100.134", client=host) == "connected"
        with dropping(agent, policy=1):
            assert connect(lab, "203.0.113.31", client=host) == "connection refused"
    # The exemption: no bit of the mark is free.
    lab.run(lab.host, "ip", "rule", "add", "pref", "32000", "fwmark", "0x10/0xfffffffe", "lookup", "main")
    try:
        refused_at_start(agent, "mark")
    finally:
        lab.run(lab.host, "ip", "rule", "del", "pref", "32000")
    assert connect(lab, "203.0.113.31", client=host) == "connected"
    configuration = yaml.safe_load(agent.configuration.read_text())
    configuration["dns"]["upstreams"] = ["127.0.0.1"]
    agent.configuration.write_text(yaml.safe_dump(configuration))
    refused_at_start(agent, "upstream 127.0.0.1")
    assert connect(lab, "203.0.113.31", client=host) == "connected"


def refused_at_start(agent: RunningAgent, word: str) -> None:
    """In one sentence with this word, and nothing is attached."""
    line = ("timeout", "30", sys.executable, "-m", "agent", "agent", "-c", agent.configuration)
    done = agent.lab.run(agent.lab.host, *line, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert not (agent.pins / "links").exists()
