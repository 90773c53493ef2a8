"""From audit to a policy: what was recorded while everything passed, enforced."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from agent.cli import main
from agent.suggest.record import read_record
from tests.netns.asking import ask, connect
from tests.netns.lab import Lab
from tests.netns.running import RunningAgent

pytestmark = pytest.mark.root

RECORDS = {
    "a.test.": ["A 198.51.100.7", "AAAA 2001:db8:53::7"],
    "b.test.": ["A 198.51.100.8"],
    "alias.w.test.": ["CNAME target.w.test."],
    "target.w.test.": ["A 198.51.100.9"],
    "evil.test.": ["A 198.51.100.66"],
}


def namegate(*arguments: str | Path) -> Result:
    """What needs no agent."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


class Recording:
    def __init__(self, lab: Lab, agent: RunningAgent, path: Path) -> None:
        self.path = path
        control = agent.directory / "run" / "control.sock"
        self._process = lab.start(lab.host, sys.executable, "-m", "agent", "--control", control, "record", path)
        assert self._process.stdout is not None
        assert self._process.stdout.readline().startswith("recording into")

    def await_row(self, **fields: Any) -> None:
        """Until a row of the file has these."""
        deadline = time.monotonic() + 20
        while not any(fields.items() <= row.items() for row in read_record(self.path)):
            assert time.monotonic() < deadline, f"{fields} never came, but {self.path.read_text()[-2000:]}"
            time.sleep(0.02)

    def end(self) -> str:
        self._process.send_signal(signal.SIGINT)
        said, _ = self._process.communicate(timeout=20)
        assert self._process.returncode == 0
        return said


def used(lab: Lab) -> list[str]:
    """What the workloads do; and what came of it."""
    other = lab.clients[1]
    return [
        *(ask(lab, name).status for name in ("a.test", "b.test", "alias.w.test", "missing.test")),
        ask(lab, "a.test", "AAAA", client=other).status,
        connect(lab, "198.51.100.7"),
        connect(lab, "198.51.100.8", 80),
        connect(lab, "198.51.100.9", 7),
        connect(lab, "198.51.100.200", 80),
        connect(lab, "2001:db8:53::7", client=other),
    ]


WANTED = [*["NOERROR"] * 3, "NXDOMAIN", "NOERROR", *["connected"] * 5]


def test_what_audit_saw_is_a_policy(tmp_path: Path) -> None:
    """Under it the same traffic has no denial, another name is denied, and so is a name of one endpoint to the other. The agent
    started anew meanwhile, and the record says so.
    """
    with Lab(clients=2, records=RECORDS) as lab:
        audited = [
            {"interface": each.endpoint, "labels": {"app": f"e{number}"}, "addresses": list(each.addresses), "audit": True}
            for number, each in enumerate(lab.clients, 1)
        ]
        with RunningAgent(lab, "nothing.test\n", tmp_path, is_talkative=False, endpoints=audited) as agent:
            recording = Recording(lab, agent, tmp_path / "one.rec")
            assert connect(lab, "198.51.100.201", 80) == "connected"
            recording.await_row(destination="198.51.100.201")
            agent.end(signal.SIGTERM)
            agent.start()
            recording.await_row(kind="gap")
            assert used(lab) == WANTED
            recording.await_row(destination="2001:db8:53::7")
            assert "gaps without an agent: 1" in recording.end()

        files = {"list": tmp_path / "suggested.txt", "cnp": tmp_path / "suggested.yaml"}
        for form, file in files.items():
            suggested = namegate("suggest", "-o", form, recording.path)
            assert suggested.exit_code == 0, suggested.stderr
            file.write_text(suggested.stdout)
            checked = namegate("check", "--against", recording.path, file)
            assert checked.exit_code == 0, checked.stdout
        narrow = tmp_path / "narrow.txt"
        narrow.write_text("a.test:443\n")
        checked = namegate("check", "--against", recording.path, narrow)
        assert checked.exit_code == 1
        assert "now denied: question for b.test. of app=e1 (was 1 x audited)" in checked.stdout

        with RunningAgent(lab, files["cnp"].read_text(), tmp_path / "enforced", is_talkative=False) as agent:
            for form, file in files.items():
                agent.apply(file.read_text())
                before = agent.status()
                assert used(lab) == WANTED, form
                after = agent.status()
                assert (after["dropped"], after["denied"]) == (before["dropped"], before["denied"]), form
                assert ask(lab, "evil.test").status != "NOERROR"
                assert connect(lab, "198.51.100.66") == "connection refused"
            agent.apply(files["cnp"].read_text())
            assert ask(lab, "b.test", client=lab.clients[1]).status != "NOERROR", "each has its own"
