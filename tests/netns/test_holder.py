"""The agent is gone, and questions are asked: who answers them, with what, and how soon (DECISIONS 20)."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.netns.asking import ask, connect, finish, start_asking
from tests.netns.lab import NAME_SERVERS, Lab, fresh_address, fresh_name
from tests.netns.lookups import Lookups
from tests.netns.running import RunningAgent

pytestmark = pytest.mark.root

POLICY = "*.test:443\n"
NAMES = 200
# UDP and TCP, IPv4 and IPv6.
WAYS = [(server, options) for server in NAME_SERVERS for options in ((), ("+tcp",))]

# Asks over one connection twice a second until it is closed.
PERSISTENT = """
import socket, sys, time
question = bytes.fromhex("000101000001000000000000") + b"\\x02n0\\x04test\\x00\\x00\\x01\\x00\\x01"
s = socket.create_connection((sys.argv[1], 53), timeout=20)
is_first = True
try:
    while True:
        s.sendall(len(question).to_bytes(2, "big") + question)
        reply = s.recv(4096)
        if not reply:
            break
        if is_first:
            print("answered", reply[5] & 15, flush=True)
        is_first = False
        time.sleep(0.5)
except ConnectionError:
    pass
print("closed", flush=True)
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(fresh=NAMES, ports=(443,)) as lab:
        yield lab


@pytest.fixture
def agent(lab: Lab, tmp_path: Path) -> Iterator[RunningAgent]:
    with RunningAgent(lab, POLICY, tmp_path / "agent") as agent:
        yield agent


class Ending:
    """A process that is watched to its end, by a handle that no other process can inherit its number from."""

    def __init__(self, pid: int) -> None:
        self._handle = os.pidfd_open(pid)

    def kill(self) -> None:
        signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        self.wait()

    def wait(self) -> None:
        assert select.select([self._handle], [], [], 5)[0], "the process is still there"
        os.close(self._handle)


def questions_queued(lab: Lab) -> int:
    """How many of the four listeners have something in their queues."""
    lines = lab.run(lab.host, "ss", "-H", "-lntu", "src", "127.0.0.1", "or", "src", "[::1]").stdout.splitlines()
    assert len(lines) == 4, lines
    return sum(int(line.split()[2]) > 0 for line in lines)


def test_a_new_agent_answers_what_was_asked_meanwhile(lab: Lab, tmp_path: Path) -> None:
    """Datagrams and connections that came while there was no agent get data; names learned before keep their identities."""
    with RunningAgent(lab, POLICY, tmp_path / "agent", dns={"holder-patience": "60s"}) as agent:
        assert ask(lab, fresh_name(0)).addresses == (fresh_address(0),)
        before = {row["prefix"]: row["identity"] for row in agent.ask("ipcache")}
        agent.end(signal.SIGKILL)
        asking = [
            start_asking(lab, fresh_name(number), "A", "+time=20", *options, server=server)
            for number, (server, options) in enumerate(WAYS, 1)
        ]
        deadline = time.monotonic() + 10
        while questions_queued(lab) < 4:
            assert time.monotonic() < deadline, lab.run(lab.host, "ss", "-H", "-lntu").stdout
        agent.start()
        for number, question in enumerate(asking, 1):
            assert finish(question).addresses == (fresh_address(number),)
        assert before.items() <= {row["prefix"]: row["identity"] for row in agent.ask("ipcache")}.items()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_without_an_agent_the_holder_answers(lab: Lab, agent: RunningAgent, how: signal.Signals) -> None:
    """SERVFAIL with extended error 14 within a second of asking, over every way; then a new agent takes over."""
    agent.end(how)
    for server, options in WAYS:
        answer = ask(lab, fresh_name(0), "A", *options, server=server)
        assert (answer.status, answer.error[:2], answer.addresses) == ("SERVFAIL", "14", ()), (server, options)
        assert answer.took_ms < 1000
    agent.start()
    for server, options in WAYS:
        assert ask(lab, fresh_name(1), "A", *options, server=server).addresses == (fresh_address(1),)


def test_a_connection_of_the_holder_ends_after_the_takeover(lab: Lab, agent: RunningAgent) -> None:
    """A client that stays connected is not answered SERVFAIL for ever: it has to connect anew, and then gets data."""
    agent.end(signal.SIGKILL)
    ask(lab, fresh_name(0))  # from here on the holder answers
    held = lab.start(lab.client.namespace, sys.executable, "-c", PERSISTENT, NAME_SERVERS[0])
    assert held.stdout is not None
    assert held.stdout.readline() == "answered 2\n"
    agent.start()
    said, _ = held.communicate(timeout=20)
    assert said == "closed\n"
    assert ask(lab, fresh_name(0), "A", "+tcp").status == "NOERROR"


def test_the_holder_outlives_what_the_agent_dies_of(lab: Lab, agent: RunningAgent) -> None:
    """The kill of its whole process group; and it has no terminal that could hang up, nor anything of the agent's open."""
    holder = agent.holder()
    agent.end(signal.SIGKILL, is_group=True)
    assert agent.holder() == holder
    assert os.getsid(holder) != os.getsid(0)
    assert Path(f"/proc/{holder}/stat").read_text().rpartition(")")[2].split()[4] == "0"  # tty_nr of proc(5)
    opened = set()
    for path in Path(f"/proc/{holder}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the connection we asked by is being closed
            opened.add(str(path.readlink()))
    files = {name for name in opened if not name.startswith(("socket:", "anon_inode:[eventpoll]", "/dev/null", "/memfd:"))}
    assert files == {f"{agent.directory}/run/holder.sock.lock"}
    memory = Path(f"/proc/{holder}/status").read_text().partition("VmRSS:")[2].split()[0]
    print(f"\nresident: {memory} KiB")
    assert int(memory) < 40_000
    assert ask(lab, fresh_name(0)).status == "SERVFAIL"


def test_the_holder_is_killed_alone(lab: Lab, agent: RunningAgent) -> None:
    """DNS goes on, and another holder has the sockets soon."""
    first = agent.holder()
    Ending(first).kill()
    assert ask(lab, fresh_name(0)).status == "NOERROR"
    agent.await_status(lambda status: status["state"] == "enforcing" and agent.holder() != first, within_s=10)
    agent.end(signal.SIGKILL)
    assert ask(lab, fresh_name(0)).status == "SERVFAIL"


def test_a_holder_that_hangs_holds_nobody_up(lab: Lab, agent: RunningAgent) -> None:
    """DNS goes on while it is tried again and again, status says what is lacking, and it is of use again when it wakes up."""
    holder = agent.holder()
    agent.end(signal.SIGTERM)
    os.kill(holder, signal.SIGSTOP)
    try:
        agent.begin()
        status = agent.await_status(lambda status: status["state"] == "degraded")
        assert status["reasons"] == ["nobody keeps the DNS sockets for the next agent: timed out"]
        begun = time.monotonic()
        while time.monotonic() < begun + 4:  # longer than one try and the pause before the next
            answer = ask(lab, fresh_name(0))
            assert (answer.status, answer.took_ms < 500) == ("NOERROR", True)
    finally:
        os.kill(holder, signal.SIGCONT)
    agent.await_status(lambda status: status["state"] == "enforcing", within_s=10)
    assert agent.holder() == holder


def test_status_says_that_there_can_be_no_holder(lab: Lab, tmp_path: Path) -> None:
    """Degraded, with the reason, while DNS works all the same; and not any more as soon as there can be one."""
    (tmp_path / "agent" / "run").mkdir(parents=True)
    in_the_way = tmp_path / "agent" / "run" / "holder.sock"
    in_the_way.write_text("somebody's notes\n")
    with RunningAgent(lab, POLICY, tmp_path / "agent", wait_for="degraded") as agent:
        (reason,) = agent.status()["reasons"]
        assert reason.startswith("nobody keeps the DNS sockets for the next agent: ")
        assert f"{in_the_way} is there and is not a socket" in reason
        assert ask(lab, fresh_name(0)).status == "NOERROR"
        in_the_way.unlink()
        agent.await_status(lambda status: status["state"] == "enforcing", within_s=10)
        assert agent.holder()


def test_both_are_killed(lab: Lab, agent: RunningAgent) -> None:
    """Questions are refused at once, as any denied packet is; what was learned stays open; a start answers again."""
    assert ask(lab, fresh_name(0)).status == "NOERROR"
    holder = Ending(agent.holder())
    agent.end(signal.SIGKILL)
    holder.kill()
    for server, options in WAYS:
        begun = time.monotonic()
        assert ask(lab, fresh_name(0), "A", *options, server=server).status == "no answer"
        assert time.monotonic() - begun < 1
    assert connect(lab, fresh_address(0)) == "connected"
    assert connect(lab, fresh_address(1)) == "connection refused"
    agent.start()
    for server, options in WAYS:
        assert ask(lab, fresh_name(0), "A", *options, server=server).status == "NOERROR"
    assert agent.holder()


def test_cleanup_ends_the_holder(agent: RunningAgent) -> None:
    """No process, no socket, no lock, no pin."""
    holder = Ending(agent.holder())
    agent.end(signal.SIGTERM)
    agent.cleanup()
    holder.wait()
    assert [path.name for path in (agent.directory / "run").iterdir()] == ["journal"]
    assert not agent.pins.exists()


def test_a_configuration_without_a_holder(lab: Lab, agent: RunningAgent) -> None:
    """The one of before is ended; without an agent questions are refused at once."""
    holder = Ending(agent.holder())
    agent.end(signal.SIGTERM)
    agent.configuration.write_text(agent.configuration.read_text().replace("dns:\n", "dns:\n  holder: false\n"))
    agent.start()
    holder.wait()
    with pytest.raises(FileNotFoundError):
        agent.holder()
    assert ask(lab, fresh_name(0)).status == "NOERROR"
    agent.end(signal.SIGKILL)
    begun = time.monotonic()
    assert ask(lab, fresh_name(0)).status == "no answer"
    assert time.monotonic() - begun < 1


def test_a_holder_of_another_release_is_replaced(lab: Lab, agent: RunningAgent) -> None:
    """Its sockets may have other options: the agent makes its own, and a holder of its own release keeps them."""
    holder = Ending(agent.holder())
    agent.end(signal.SIGKILL)
    holder.kill()
    older = "import sys, pathlib, agent.holder; agent.holder.VERSION = 0\n"
    older += "from agent.holder.process import run; run(pathlib.Path(sys.argv[1]), is_detached=True)"
    lab.run(lab.host, sys.executable, "-c", older, agent.directory / "run" / "control.sock")
    found = agent.holder()
    agent.start()
    assert agent.holder() != found
    assert ask(lab, fresh_name(0)).status == "NOERROR"
    agent.end(signal.SIGKILL)
    assert ask(lab, fresh_name(0)).status == "SERVFAIL"


def test_sockets_with_another_mark_are_not_taken(lab: Lab, agent: RunningAgent) -> None:
    """The program would take their answers for somebody else's: new ones are made, and the same holder keeps those."""
    holder = agent.holder()
    agent.end(signal.SIGTERM)
    text = agent.configuration.read_text()
    agent.configuration.write_text(text.replace("datapath:\n", "datapath:\n  mark: 0xc00\n"))
    agent.start()
    assert agent.holder() == holder
    for server, options in WAYS:
        assert ask(lab, fresh_name(0), "A", *options, server=server).status == "NOERROR"
    agent.end(signal.SIGKILL)
    for server, options in WAYS:
        assert ask(lab, fresh_name(0), "A", *options, server=server).status == "SERVFAIL"


def test_nonsense_does_not_move_the_holder(lab: Lab, agent: RunningAgent) -> None:
    """Who talks nonsense is hung up on; the agent it serves with is not affected."""
    holder = agent.holder()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for message in (b"\0", b"[]", b'{"command": "dance"}', b'{"command": "serve", "patience": 1.0}'):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.settimeout(5)
                connection.connect(str(agent.directory / "run" / "holder.sock"))
                socket.send_fds(connection, [message], [stranger.fileno()])
                assert connection.recv(100) == b""
    assert agent.holder() == holder
    agent.end(signal.SIGKILL)
    assert ask(lab, fresh_name(0)).status == "SERVFAIL"


def test_lookups_while_the_agent_is_killed_and_started(lab: Lab, agent: RunningAgent) -> None:
    """200 lookups a second, 20 kills at random moments, starts at once or a while later: each is answered within a second."""
    chance = random.Random(20)
    with Lookups(lab, NAMES) as lookups:
        for _ in range(20):
            agent.end(signal.SIGKILL)
            # How long there is no agent, and how long there is one: faults, which wait for nothing.
            time.sleep(chance.choice((0, chance.uniform(0, 1.5))))
            agent.start()
            time.sleep(chance.choice((0, chance.uniform(0, 1))))
    looked = lookups.looked
    print(f"\n{looked}")
    assert set(looked.codes) == {"0", "2"}
    assert len(looked.took) == looked.sent > 20 * 100
    assert looked.took[-1] < 1
    assert min(looked.codes.values()) > 100, "either nobody was killed, or nobody came back"
