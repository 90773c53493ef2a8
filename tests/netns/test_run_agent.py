"""The agent that only serves runs: it comes when it is needed, takes over from one that died, and leaves nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.control import ControlError
from agent.control.client import Control
from agent.control.runs import runs_socket
from tests.netns import pcap
from tests.netns.asking import ask, connect
from tests.netns.lab import NETNS_DIRECTORY, Lab
from tests.netns.leasing import Lease
from tests.netns.runs import Host
from tests.netns.sending import Stream

pytestmark = pytest.mark.root

A, DENIED = "198.51.100.11", "198.51.100.66"
READY_S_MAX = 60.0
OWN = [{"name": "--allow", "text": "a.test:443/tcp"}]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(2, records={"a.test.": [f"A {A}"]}, ports=(7, 443)) as lab:
        yield lab


class RunAgents:
    """Agents for runs of the lab's host."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.namespace = (NETNS_DIRECTORY / lab.host).stat().st_ino
        self.control = runs_socket(self.namespace)
        self.pins = Path(f"/sys/fs/bpf/namegate-runs-{self.namespace}")
        self._host = Host(lab)
        self._started: list[subprocess.Popen[str]] = []

    def start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self._host.inside(sys.executable, "-m", "agent", "agent", "--for-runs"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=self._host.environment,
        )
        self._started.append(process)
        return process

    def end(self, how: signal.Signals) -> None:
        """The last one."""
        self._started[-1].send_signal(how)
        self._started[-1].wait(timeout=20)

    def first_to_end(self, processes: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
        deadline = time.monotonic() + 20
        while not (ended := [process for process in processes if process.poll() is not None]):
            assert time.monotonic() < deadline, "all of them go on"
            time.sleep(0.01)
        return ended[0]

    def lease(self, number: int) -> Lease:
        """Of this client, as soon as there is an agent."""
        client = self.lab.clients[number]
        deadline = time.monotonic() + READY_S_MAX
        while True:
            try:
                Control(self.control).ask("hello")
            except ControlError:
                assert time.monotonic() < deadline, "there is no agent"
                time.sleep(0.01)
            else:
                return Lease(self.control, client.endpoint, addresses=list(client.addresses), policies=OWN)

    def left(self) -> list[str]:
        """What is in the kernel and in the file system of an agent."""
        paths = [str(path) for path in (self.control.parent, self.pins) if path.exists()]
        look = "ip -o link show type veth; ip rule show; ip -6 rule show; ip route show table 2005 2>/dev/null; bpftool net"
        lines = self.lab.run(self.lab.host, "sh", "-c", look).stdout.splitlines()
        return paths + [line for line in lines if "ng-runs" in line or "2005" in line or "namegate" in line or "ng_" in line]

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.terminate()
            process.communicate(timeout=20)


@pytest.fixture
def agents(lab: Lab) -> Iterator[RunAgents]:
    agents = RunAgents(lab)
    before = agents.left()
    yield agents
    if agents.left() != before:  # a test has failed: what is left goes by the agent's own end
        agents.start().wait(timeout=READY_S_MAX)
    agents.close()
    assert agents.left() == before == []


def test_it_ends_by_itself_and_leaves_nothing(lab: Lab, agents: RunAgents) -> None:
    """Of two that start at once one serves and the other says so and ends; the one that serves ends after its last lease."""
    both = [agents.start(), agents.start()]
    with agents.lease(0) as first:
        assert first.answer["interface"] == "ep1"
        assert len(agents.left()) > 5
        with agents.lease(1) as second:
            assert ask(lab, "a.test", client=lab.clients[1]).addresses == (A,)
            second.end()
        assert connect(lab, DENIED) == "connection refused"
        assert ask(lab, "a.test").addresses == (A,)
        assert connect(lab, A) == "connected"
        assert agents.first_to_end(both).returncode == 2
        first.end()
    assert [process.wait(timeout=20) for process in both].count(0) == 1


def test_what_it_enforced_goes_on_without_it(lab: Lab, agents: RunAgents) -> None:
    """Stopped with a lease it leaves everything as it is; the next one takes that over, and knows who comes again. Of what is
    denied not a packet gets out.
    """
    agents.start()
    with agents.lease(0) as held, lab.capture(lab.host, lab.uplink, f"host {DENIED}") as uplink:
        stream = Stream(lab, DENIED, 7, 200)
        assert ask(lab, "a.test").addresses == (A,)
        agents.end(signal.SIGTERM)
        held.await_loss()
        assert connect(lab, A) == "connected"
        assert connect(lab, DENIED) == "connection refused"
        next_one = agents.start()
        with agents.lease(0) as again:
            assert again.endpoint == held.endpoint
            assert connect(lab, A) == "connected"
            sent, heard = stream.end()
            assert (sent > 100, heard) == (True, 0)
            again.end()
    assert next_one.wait(timeout=20) == 0
    assert pcap.read(uplink.path).packets == ()
