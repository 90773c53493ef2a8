"""`monitor` and `top` before a person's eyes, before Hubble's tools, and stopped.

MONITOR_FLOOD_S is how long the flood lasts at least.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from agent.datapath.abi import SETTING_TELL_OPENED
from tests.netns.asking import ask, connect
from tests.netns.lab import NAME_SERVERS, Lab, built
from tests.netns.running import RunningAgent
from tests.netns.sending import rows
from tests.netns.watching import Terminal, look

pytestmark = pytest.mark.root

FLOOD_S: Final = float(os.environ.get("MONITOR_FLOOD_S", "0.5"))
DENIED_FLOWS: Final = 100_000
PER_SECOND: Final = 5_000
POLICY: Final = "a.test:443/tcp\n"
RECORDS: Final = {"a.test.": ["A 198.51.100.7"], "b.test.": ["A 198.51.100.8"]}


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    with (
        Lab(clients=2, records=RECORDS) as lab,
        RunningAgent(lab, POLICY, tmp_path_factory.mktemp("agent"), is_talkative=False) as running,
    ):
        yield running


def command(agent: RunningAgent, *arguments: str) -> list[str | Path]:
    return [sys.executable, "-m", "agent", "--control", agent.directory / "run" / "control.sock", *arguments]


@contextmanager
def flooded(lab: Lab) -> Iterator[None]:
    """Questions that are denied, of another endpoint than the first."""
    questions = (built("questions.c"), "udp", NAME_SERVERS[0], "53", str(PER_SECOND), "below.test")
    flood = lab.start(lab.clients[1].namespace, *questions)
    try:
        yield
    finally:
        flood.kill()
        flood.wait(timeout=10)


class Written:
    """`monitor` that writes into a file; has listened before anything happens."""

    def __init__(self, agent: RunningAgent, path: Path, *options: str) -> None:
        self.path = path
        self._lab = agent.lab
        with path.open("w") as file, path.with_suffix(".err").open("w") as errors:
            arguments = command(agent, "monitor", *options)
            self.process = agent.lab.start(agent.lab.host, *arguments, stdout=file, stderr=errors)
        self._await_first()

    def _await_first(self) -> None:
        """Something is told again and again until it is heard."""
        deadline = time.monotonic() + 30
        while not self.path.stat().st_size:
            assert time.monotonic() < deadline, self.path.with_suffix(".err").read_text()
            ask(self._lab, "first.test", client=self._lab.clients[1])

    def rows(self) -> list[dict[str, Any]]:
        """Whole lines, as JSON."""
        text = self.path.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def end(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=20)


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (200, 50)], ids=["80x24", "200x50"])
def test_a_person_can_read_it(agent: RunningAgent, columns: int, lines: int) -> None:
    """At one event a second and at 5,000: whole lines, the newest there, and how much is not shown. Keys work meanwhile."""
    lab = agent.lab
    with ExitStack() as stack:
        top = stack.enter_context(Terminal(lab, command(agent, "top"), columns, lines))
        monitor = stack.enter_context(Terminal(lab, command(agent, "monitor"), columns, lines))
        both = (top, monitor)
        top.see_text("INTERFACE")

        def are_heard() -> bool:
            ask(lab, "first.test", client=lab.clients[1])
            return all("first.test" in "".join(each.display) for each in both)

        look(both, are_heard)
        ask(lab, "a.test")
        assert connect(lab, "198.51.100.7") == "connected"
        assert connect(lab, "198.51.100.8") == "connection refused"
        look(both, lambda: all("198.51.100.8:443" in "".join(each.display) for each in both))
        quiet = [line for line in monitor.display if " ep1 " in line]
        assert [line.split()[2:5] for line in quiet] == [
            ["allowed", "A", "a.test"],
            ["allowed", "tcp", "a.test:443"],
            ["denied", "tcp", "198.51.100.8:443"],
        ]
        assert b"\x1b[31mdenied" in monitor.heard, "coloured in a terminal"
        assert any(line.startswith("a.test") and line.endswith("198.51.100.7") for line in top.display)

        with flooded(lab):
            until = time.monotonic() + FLOOD_S
            look(both, lambda: time.monotonic() > until and "more are not shown" in "".join(monitor.display), FLOOD_S + 10)
            top.type("e")
            look(both, lambda: any("ep1, latest first" in line for line in top.display))
            look(both, lambda: [line.split(".")[0] for line in top.display if ".test " in line] == ["a"])
        assert all(len(line) <= columns for each in both for line in each.display)
        top.type("q")
        monitor.type("\x03")
        assert (top.end(), monitor.end()) == (0, 130)


def test_a_reader_that_stands_still_loses_lines_and_nothing_else(agent: RunningAgent, tmp_path: Path) -> None:
    """Each of so many denied flows is denied and is told or counted as lost; later packets of the same flows are told again.

    The reader is a job that somebody has stopped with Ctrl-Z.
    """
    lab = agent.lab
    monitor = Written(agent, tmp_path / "facts.jsonl", "--kind", "drop", "--kind", "question", "-o", "json")
    before = agent.status()["dropped"]
    monitor.process.send_signal(signal.SIGSTOP)
    flood = (built("flood.c"), "198.18.0.1", "9")
    lab.run(lab.client.namespace, *flood, str(DENIED_FLOWS), str(DENIED_FLOWS), timeout_s=120)
    assert agent.status()["dropped"] - before == DENIED_FLOWS
    answer = ask(lab, "a.test")
    assert (answer.addresses, connect(lab, "198.51.100.7")) == (("198.51.100.7",), "connected")
    assert connect(lab, "198.51.100.8") != "connected"  # a flood's packets are not all answered
    monitor.process.send_signal(signal.SIGCONT)

    def seen() -> tuple[int, int]:
        rows = monitor.rows()
        told = sum(row["kind"] == "drop" and row["port"] == 9 for row in rows)
        return told, sum(row["count"] for row in rows if row["kind"] == "lost")

    deadline = time.monotonic() + 60
    while sum(seen()) < DENIED_FLOWS and time.monotonic() < deadline:
        ask(lab, "b.test")  # what was lost is told before what comes next
    told, lost = seen()
    assert lost > 0
    assert told + lost >= DENIED_FLOWS
    lab.run(lab.client.namespace, *flood, "50", "50")
    while seen()[0] < told + 50 and time.monotonic() < deadline:
        ask(lab, "b.test")
    again = [row["destination"] for row in monitor.rows() if row["kind"] == "drop"][-50:]
    assert len(set(again)) == 50
    assert monitor.end() == 130


def test_hubbles_tools_make_a_policy_of_it(agent: RunningAgent, tmp_path: Path) -> None:
    """hubble-audit2policy reads what `-o hubble` wrote, and `check` accepts what it makes."""
    monitor = Written(agent, tmp_path / "flows.jsonl", "-o", "hubble")
    ask(agent.lab, "a.test")
    assert connect(agent.lab, "198.51.100.7") == "connected"
    deadline = time.monotonic() + 20
    while not any(row.get("flow", {}).get("event_type") == {"type": 5} for row in monitor.rows()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert monitor.end() == 130
    made = tmp_path / "made.yaml"
    tool = Path(sys.executable).with_name("hubble-audit2policy")
    arguments: list[str | Path] = [
        tool,
        monitor.path,
        "--no-enrich",
        "--single-file",
        made,
        "--verdict",
        "FORWARDED",
        "--verdict",
        "REDIRECTED",
    ]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    checked = subprocess.run(
        [sys.executable, "-m", "agent", "check", made], capture_output=True, text=True, timeout=60, check=False
    )
    assert checked.returncode == 0, checked.stdout + made.read_text()
    assert "port: '443'" in made.read_text()


def test_what_nobody_wants_to_hear_is_not_told(agent: RunningAgent, tmp_path: Path) -> None:
    """The kernel tells of allowed flows while somebody listens to them, and no longer: also when the listener was killed."""

    def tells(wanted: bool) -> bool:
        deadline = time.monotonic() + 10
        while (found := bool(_settings(agent)[SETTING_TELL_OPENED])) != wanted and time.monotonic() < deadline:
            time.sleep(0.01)
        return found

    assert not tells(wanted=False)
    denials = Written(agent, tmp_path / "denials.jsonl", "--verdict", "denied", "-o", "json")
    assert not _settings(agent)[SETTING_TELL_OPENED]
    everything = Written(agent, tmp_path / "everything.jsonl", "-o", "json")
    assert tells(wanted=True)
    everything.process.kill()
    assert not tells(wanted=False)
    assert denials.end() == 130


def _settings(agent: RunningAgent) -> dict[int, int]:
    return {
        int.from_bytes(key, sys.byteorder): int.from_bytes(value[0], sys.byteorder) for key, value in rows(agent, "settings")
    }
