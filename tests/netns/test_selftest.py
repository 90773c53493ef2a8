"""The selftest sees what it is there for, and leaves nothing behind, whatever ends it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from agent.selftest import checks as checks_module
from agent.selftest.capture import Packet, missing
from agent.selftest.checks import run, what_is_missing
from agent.selftest.network import Network

root = pytest.mark.root
COMMAND = (sys.executable, "-m", "agent", "selftest")
CHECKS = 6


def left_of(pid: int) -> list[Path]:
    """Namespaces, pins and files of a selftest."""
    places = Path("/run/netns"), Path("/sys/fs/bpf"), Path(tempfile.gettempdir())
    return [path for place in places for path in place.glob("ngself*") if re.match(rf"ngself{pid}(-|$)", path.name)]


def end_when_it_checks(how: signal.Signals) -> tuple[int, int]:
    """A selftest that is ended while the agent enforces; its process id and exit code."""
    command = (*COMMAND, "--names", "100000")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"good")
        assert left_of(process.pid)
        process.send_signal(how)
        return process.pid, process.wait(timeout=20)


@root
def test_it_proves_the_gate_and_goes_as_it_came() -> None:
    """Every check is good, in less than half a minute where the machine has time; the table has a line for each."""
    with subprocess.Popen((*COMMAND, "--names", "200", "-o", "json"), stdout=subprocess.PIPE, text=True) as process:
        said = json.loads(process.communicate(timeout=120)[0])
    print(f"\n{said}")
    assert process.returncode == 0
    assert said["good"]
    assert len(said["checks"]) == CHECKS
    assert not left_of(process.pid)


@root
@pytest.mark.parametrize("known_bad", ["release-first", "nothing-changed-no-wait", "wait-per-batch"])
def test_it_sees_a_gate_that_is_broken(known_bad: str) -> None:
    """A reply that leaves before its row is in the kernel: first packets are lost, and the captures show it."""
    checks = run(100, [known_bad])
    try:
        next(checks)
        fresh = next(checks)
    finally:
        checks.close()
    print(f"\n{known_bad}: {fresh.said}")
    assert not fresh.is_good
    assert fresh.bad is not None
    assert fresh.bad.startswith("a name was answered before its address was open")
    found = re.search(r"(\d+) first packets, (\d+) lost", fresh.said)
    assert found is not None
    assert int(found[1]) == 100
    assert int(found[2]) > 5
    assert not left_of(os.getpid())


@root
def test_names_that_are_not_answered_are_no_lost_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one endpoint may ask but little, most names bring nothing: the line says so, and that the gate lost nothing."""
    monkeypatch.setattr(checks_module, "NO_LIMIT", {"questions-per-second": 20, "question-burst": 10})
    checks = run(40)
    try:
        next(checks)
        fresh = next(checks)
    finally:
        checks.close()
    print(f"\n{fresh}")
    assert not fresh.is_good
    assert " 0 lost" in fresh.said
    assert "names brought no address" in fresh.said
    assert fresh.bad is not None
    assert fresh.bad.startswith("questions were refused")


@root
def test_an_interrupted_one_removes_what_it_made() -> None:
    """As by Ctrl-C in the midst of a check."""
    pid, code = end_when_it_checks(signal.SIGINT)
    assert code == 128 + signal.SIGINT
    assert not left_of(pid)


@root
def test_what_a_killed_one_left_goes_with_the_next() -> None:
    """Its agent and holder too: nobody is in its namespaces any more."""
    pid, _ = end_when_it_checks(signal.SIGKILL)
    assert left_of(pid)
    with Network():
        assert not left_of(pid)
    running = list(Path("/proc").glob("[0-9]*/cmdline"))
    assert not [path for path in running if path.exists() and f"ngself{pid}-".encode() in path.read_bytes()]
    assert not left_of(os.getpid())


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is touched."""
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "setpriv" else tool)
    sentence = what_is_missing()
    assert sentence is not None
    assert sentence.startswith("the command `setpriv` is missing")


def test_a_packet_that_was_sent_twice_has_to_arrive_twice() -> None:
    """A lost first packet does not look found because a later one came through."""
    first = Packet(b"\xc6\x12\0\1", 6, b"\0\1\0\7", b"sequence", is_first=True)
    other = first._replace(what=b"another")
    assert missing([first, first, other], [first, other]) == [first]
    assert Counter(missing([first, other], [])) == Counter([first, other])
    assert missing([first], [other, first]) == []
