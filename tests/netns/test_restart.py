"""The agent dies and comes back: what was open stays open, what was closed stays closed, and no packet is lost (I7)."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.netns.asking import ask, connect
from tests.netns.lab import Lab
from tests.netns.running import RunningAgent
from tests.netns.sending import Stream

pytestmark = pytest.mark.root

RECORDS = {f"n{host}.a.test.": [f"A 198.51.100.{host}", f"AAAA 2001:db8:53::{host}"] for host in range(10, 40)}
POLICY = "*.a.test:443\n198.51.100.200/32:7/udp\n!198.51.100.201/32\n"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(records=RECORDS, ports=(7, 443)) as lab:
        yield lab


@pytest.fixture
def agent(lab: Lab, tmp_path: Path) -> Iterator[RunningAgent]:
    with RunningAgent(lab, POLICY, tmp_path / "agent") as agent:
        yield agent


def learned(agent: RunningAgent) -> dict[str, Any]:
    """Each learned row's prefix and identity."""
    return {row["prefix"]: row["identity"] for row in agent.ask("ipcache") if row["scope"] == "shared"}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_what_was_learned_stays_open_across_a_restart(lab: Lab, agent: RunningAgent, how: signal.Signals) -> None:
    """While the agent is gone, and after: new connections to learned addresses pass, to others not; numbers stay."""
    for host in range(10, 20):
        assert ask(lab, f"n{host}.a.test").status == "NOERROR"
    before = learned(agent)
    assert len(before) == 10
    agent.end(how)
    assert connect(lab, "198.51.100.10") == "connected"
    assert connect(lab, "198.51.100.30") == "connection refused"
    assert ask(lab, "n30.a.test").status == "SERVFAIL"
    rows_before = agent.trace.read_text()
    agent.start()
    assert learned(agent) == before
    assert '"table": "ipcache"' not in agent.trace.read_text().removeprefix(rows_before), "a row was written again"
    assert connect(lab, "198.51.100.10") == "connected"
    assert connect(lab, "198.51.100.30") == "connection refused"
    assert ask(lab, "n30.a.test").status == "NOERROR"
    assert connect(lab, "198.51.100.30") == "connected"
    names = {row["name"] for row in agent.ask("names")}
    assert names == {f"n{host}.a.test." for host in (*range(10, 20), 30)}


def test_a_running_flow_loses_no_packet_in_five_restarts(lab: Lab, agent: RunningAgent) -> None:
    """500 datagrams a second to a learned address and to a network's, while the agent is killed and started."""
    assert ask(lab, "n12.a.test").status == "NOERROR"
    streams = [Stream(lab, "198.51.100.12", 443), Stream(lab, "198.51.100.200", 7)]
    for _ in range(5):
        agent.end(signal.SIGKILL)
        agent.start()
    counts = [stream.end() for stream in streams]
    print(f"\nsent, came back: {counts}")
    for sent, heard in counts:
        assert sent > 500
        assert heard == sent
    assert agent.status()["dropped"] == 0


def test_a_policy_changed_while_the_agent_was_gone_holds_from_the_start(lab: Lab, agent: RunningAgent) -> None:
    """n10 is taken away, n31 is new: the first is closed, running flow included, the second can be asked."""
    agent.apply("n10.a.test:443\nn11.a.test:443\n")
    for host in (10, 11):
        ask(lab, f"n{host}.a.test")
    stream = Stream(lab, "198.51.100.10", 443)
    agent.end(signal.SIGKILL)
    agent.policy_file.write_text("n11.a.test:443\nn31.a.test:443\n")
    agent.start()
    sent, heard = stream.end()
    assert 0 < heard < sent
    assert connect(lab, "198.51.100.10") == "connection refused"
    assert connect(lab, "198.51.100.11") == "connected"
    assert ask(lab, "n10.a.test").status == "NXDOMAIN"
    assert ask(lab, "n31.a.test").status == "NOERROR"
    assert connect(lab, "198.51.100.31") == "connected"
    agent.await_status(lambda status: status["rows_pending"] == 0)


def test_what_was_seen_before_a_reboot_explains_a_drop_after_it(lab: Lab, agent: RunningAgent) -> None:
    """No journal, no pins, no run directory: the name is learned anew, and until then it is known whose the address was.

    Killed then, and started like that again: what was saved is still there.
    """
    assert ask(lab, "n14.a.test").status == "NOERROR"
    agent.end(signal.SIGTERM)
    for _ in range(2):
        agent.cleanup()
        shutil.rmtree(agent.directory / "run")
        agent.start()
        assert agent.ask("names") == []
        assert connect(lab, "198.51.100.14") == "connection refused"
        assert connect(lab, "198.51.100.15") == "connection refused"
        said = {row["destination"]: (row["names"], row["why"]) for row in agent.ask("drops")}
        assert said["198.51.100.14"] == (["n14.a.test."], "expired: n14.a.test.")
        assert said["198.51.100.15"] == ([], "not resolved through the proxy")
        agent.end(signal.SIGKILL)


def test_lifetimes_go_on_while_the_agent_is_gone(lab: Lab, tmp_path: Path) -> None:
    """What ended meanwhile is closed right after the start."""
    dns = {"ttl-floor": "2s", "ttl-cap": "2s", "keep-while-flow-seen": "1s"}
    with RunningAgent(lab, POLICY, tmp_path / "agent", dns=dns) as agent:
        assert ask(lab, "n13.a.test").status == "NOERROR"
        agent.end(signal.SIGKILL)
        # The kernel knows no lifetimes: the address stays open until somebody looks.
        assert connect(lab, "198.51.100.13") == "connected"
        agent.start()
        agent.await_status(lambda status: status["names"] == 0, within_s=10)
        assert connect(lab, "198.51.100.13") == "connection refused"


def test_without_a_journal_everything_is_learned_anew(lab: Lab, agent: RunningAgent) -> None:
    """Rows that nobody can explain are not taken over; the next question opens the address again."""
    assert ask(lab, "n14.a.test").status == "NOERROR"
    agent.end(signal.SIGKILL)
    (agent.directory / "run" / "journal").unlink()
    agent.start()
    assert agent.ask("names") == []
    assert connect(lab, "198.51.100.14") == "connection refused"
    assert ask(lab, "n14.a.test").status == "NOERROR"
    assert connect(lab, "198.51.100.14") == "connected"


def test_a_foreign_journal_is_refused_and_left_alone(lab: Lab, agent: RunningAgent) -> None:
    """The agent does not start, says so in one sentence, and the kernel goes on enforcing."""
    assert ask(lab, "n15.a.test").status == "NOERROR"
    agent.end(signal.SIGKILL)
    journal = agent.directory / "run" / "journal"
    kept = journal.read_text()
    journal.write_text("somebody's notes\n")
    done = lab.run(lab.host, sys.executable, "-m", "agent", "agent", "-c", agent.configuration, check=False)
    assert done.returncode == 2
    assert done.stderr == f"namegate: {journal} is not a journal of namegate: move it away\n"
    assert journal.read_text() == "somebody's notes\n"
    assert connect(lab, "198.51.100.15") == "connected"
    journal.write_text(kept)
    agent.start()
    assert [row["name"] for row in agent.ask("names")] == ["n15.a.test."]


def test_a_second_agent_is_refused_and_the_first_one_goes_on(lab: Lab, agent: RunningAgent, tmp_path: Path) -> None:
    """With its socket, with its pins, with its device: one sentence each, and nothing of the first one is touched."""
    assert ask(lab, "n16.a.test").status == "NOERROR"
    first = agent.configuration.read_text()
    socket, pins = str(agent.directory / "run" / "control.sock"), str(agent.pins)
    other = (str(tmp_path / "other" / "control.sock"), f"{pins}-other")
    for text, wanted in (
        (first, "an agent is already running"),
        (first.replace(socket, other[0]), "another agent enforces by the pins in"),
        (first.replace(socket, other[0]).replace(pins, other[1]), "ng-gate is in use by another agent"),
    ):
        configuration = tmp_path / "second.yaml"
        configuration.write_text(text)
        # One that is not refused would run for ever.
        command = ("timeout", "15", sys.executable, "-m", "agent", "agent", "-c", configuration)
        done = lab.run(lab.host, *command, check=False)
        assert (done.returncode, wanted in done.stderr) == (2, True), done.stderr
        assert "Traceback" not in done.stderr
    assert agent.status()["state"] == "enforcing"
    assert connect(lab, "198.51.100.16") == "connected"
    assert connect(lab, "198.51.100.30") == "connection refused"
    assert ask(lab, "n17.a.test").status == "NOERROR"
    assert not Path(other[1]).exists()


def test_killed_at_random_moments_under_load(lab: Lab, agent: RunningAgent) -> None:
    """Ten times, while names are asked: what a client was given connects, then and after the next start."""
    chance = random.Random(7)
    for _ in range(10):
        given: list[str] = []
        asking = [
            lab.start(lab.client.namespace, "dig", "@198.51.100.53", f"n{host}.a.test", "+tries=1", "+time=1", "+short")
            for host in range(10, 40)
        ]
        kill_after = chance.randrange(len(asking))
        for number, question in enumerate(asking):
            if number == kill_after:
                agent.end(signal.SIGKILL)
            said, _ = question.communicate(timeout=10)
            given += re.findall(r"^198\.51\.100\.\d+$", said, re.MULTILINE)
        for address in given[:3] + given[-3:]:
            assert connect(lab, address) == "connected"
        agent.start()
        for address in given[:3] + given[-3:]:
            assert connect(lab, address) == "connected"
    state = json.dumps(agent.status())
    assert agent.status()["state"] == "enforcing", state
