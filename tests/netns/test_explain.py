"""`explain` of a real agent over the kernel's real rows: what a person sees, and what `explain` sees that nobody told it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.core.types import IpcacheKey, Prefix, Table, Write, packed
from agent.datapath import abi, syscall
from tests.netns.asking import ask, connect
from tests.netns.lab import Lab
from tests.netns.running import RunningAgent

pytestmark = pytest.mark.root

ALLOWED, DENIED, NOBODYS = "198.51.100.7", "198.51.100.165", "198.51.100.66"
POLICY = f"!{DENIED}\na.test:443/tcp\n198.18.0.0/15:443/tcp\n"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(records={"a.test.": [f"A {ALLOWED}", f"A {DENIED}"], "b.test.": [f"A {NOBODYS}"]}, ports=(443,)) as lab:
        yield lab


@pytest.fixture(scope="module")
def agent(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    with RunningAgent(lab, POLICY, tmp_path_factory.mktemp("agent")) as agent:
        yield agent


@pytest.fixture(autouse=True)
def in_force(lab: Lab, agent: RunningAgent) -> None:
    """Each test finds the same policies, and the name asked."""
    agent.apply(POLICY)
    assert ask(lab, "a.test").status == "NOERROR"


def command(agent: RunningAgent, *arguments: str | Path, given: str = "") -> tuple[int, str]:
    """The command as a person calls it: exit code and output."""
    socket = str(agent.directory / "run" / "control.sock")
    done = subprocess.run(
        [sys.executable, "-m", "agent", "--control", socket, "explain", *map(str, arguments)],
        input=given,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


def report(agent: RunningAgent, target: str, packet: str) -> dict[str, Any]:
    """What `-o json` prints."""
    shown: dict[str, Any] = agent.ask("explain", target=target, packet=packet)
    return shown


def test_a_packet_that_passes(lab: Lab, agent: RunningAgent) -> None:
    """Who asked the name, the rows, the rule's line, the flow there is, and how to close it."""
    assert connect(lab, ALLOWED) == "connected"
    code, said = command(agent, "--endpoint", lab.client.endpoint, ALLOWED, "tcp/443")
    assert code == 0, said
    assert f"{agent.policy_file}:2" in said
    assert f"a.test. {ALLOWED} answered to {lab.client.endpoint}" in said
    shown = report(agent, ALLOWED, "tcp/443")
    assert shown["number"] == "9"
    assert shown["labels"] == ["fqdn:a.test.", "reserved:world"]
    assert [row["prefix"] for row in shown["rows"] if row["table"] == "ipcache" and row["decides"]] == [f"{ALLOWED}/32"]
    assert shown["selectors"][0]["names"] == ["a.test."]
    assert shown["flows"][0]["identity"] == shown["identity"]
    assert shown["change"]["entry"] == f"!{ALLOWED}:443/tcp"


def test_a_flow_that_a_policy_ended(lab: Lab, agent: RunningAgent) -> None:
    """It is shown as the kernel remembers it, beside the verdict of a new one."""
    assert connect(lab, ALLOWED) == "connected"
    agent.apply("nothing.test\n")
    shown = report(agent, ALLOWED, "tcp/443")
    assert not shown["allowed"]
    assert shown["flows"]
    assert not any(flow["next_passes"] for flow in shown["flows"])
    assert shown["change"]["entry"] == "a.test:443/tcp"


@pytest.mark.parametrize("form", ["entry", "policy"])
def test_the_change_put_in_force(lab: Lab, agent: RunningAgent, form: str, tmp_path: Path) -> None:
    """A denied connection passes when what `explain` says was done; either form of it."""
    assert connect(lab, NOBODYS) != "connected"
    code, said = command(agent, NOBODYS, "tcp/443")
    assert code == 1, said
    change = report(agent, NOBODYS, "tcp/443")["change"]
    if form == "entry":
        agent.apply(POLICY + change["entry"] + "\n")
    else:
        added = tmp_path / "added.yaml"
        added.write_text(change["policy"])
        agent.ask("apply", files=[str(agent.policy_file), str(added)], wait=True)
    assert connect(lab, NOBODYS) == "connected"


def test_a_drop(lab: Lab, agent: RunningAgent) -> None:
    """The last one, by number and as a line on standard input: the denial and its line, and the allow that loses."""
    assert connect(lab, DENIED) != "connected"
    code, said = command(agent, "--drop", "1")
    assert code == 1, said
    assert f"rule: {agent.policy_file}:1" in said
    drop = agent.ask("drops")[-1]
    for given in (json.dumps(drop), json.dumps([drop], indent=2), json.dumps({"fact": {"kind": "drop", **drop}})):
        code, again = command(agent, "--drop", "-", given=given)
        assert (code, again.splitlines()[:4]) == (1, said.splitlines()[:4])
    _, said = command(agent, "--drop", "1", "-o", "json")
    rules = [(rule["verdict"], rule["decides"]) for rule in json.loads(said)["now"]["rules"]]
    assert rules == [("deny", True), ("allow", False)]


def test_other_policies(lab: Lab, agent: RunningAgent, tmp_path: Path) -> None:
    """As if in force: by the agent with what it knows of names, and without one for what needs no name."""
    other = tmp_path / "other.list"
    other.write_text("a.test:80/tcp\n203.0.113.0/24:443/tcp\n")
    assert command(agent, "--policy", other, ALLOWED, "tcp/80")[0] == 0
    code, said = command(agent, "--policy", other, ALLOWED, "tcp/443")
    assert code == 1, said
    assert report(agent, ALLOWED, "tcp/443")["allowed"], "nothing was put in force"
    for target, expected in (("203.0.113.9", 0), ("198.51.100.9", 1)):
        done = subprocess.run(
            [sys.executable, "-m", "agent", "--control", tmp_path / "none", "explain", "--policy", other, target, "tcp/443"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == expected, done.stdout + done.stderr
        assert "no agent was asked" in done.stdout


def test_names_and_addresses(lab: Lab, agent: RunningAgent) -> None:
    """A name: may it be asked, who did, and are its addresses open. An address: what it is to whom."""
    assert command(agent, "a.test")[0] == 0
    code, said = command(agent, "a.test", "tcp/443")
    assert code == 1, said
    assert f"{DENIED}: denied (deny, 9)" in said
    code, said = command(agent, "b.test")
    assert code == 1, said
    assert "add to a list: b.test" in said
    code, said = command(agent, ALLOWED)
    assert code == 0, said
    assert "tcp 443: allow" in said
    assert command(agent, NOBODYS)[0] == 1


def test_a_row_that_somebody_changed(lab: Lab, agent: RunningAgent) -> None:
    """The kernel's rows judge: what is not as the agent wants it is shown, and the exit code is 1, though the packet passes."""
    (path,) = agent.pins.glob("maps/*/ipcache4")
    fd = syscall.get_pinned(str(path))
    key = IpcacheKey(1, Prefix.of(packed(NOBODYS)))
    there = next(row for row in report(agent, ALLOWED, "tcp/443")["rows"] if row["table"] == "ipcache")
    try:
        syscall.map_update(fd, abi.pack_ipcache_key(key), abi.pack_value(Write(Table.IPCACHE, key, there["identity"])))
        code, said = command(agent, NOBODYS, "tcp/443")
        assert code == 1
        assert "allowed" in said
        assert "the agent wants no row, the kernel has" in said
    finally:
        syscall.map_delete(fd, abi.pack_ipcache_key(key))
    assert report(agent, NOBODYS, "tcp/443")["differences"] == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("198.51.100.7", "tcp"), "has no port"),
        (("198.51.100.7", "nonsense/4"), "is no protocol"),
        (("198.51.100.7", "icmp/3"), "judged by the flow it is about"),
        (("--endpoint", "veth-none", "198.51.100.7", "tcp/443"), "no endpoint is 'veth-none'"),
        (("--drop", "100000"), "drops are kept"),
        (("--drop", "x"), "is no number"),
        ((), "Say an address or a name"),
    ],
)
def test_used_wrongly(lab: Lab, agent: RunningAgent, arguments: tuple[str, ...], sentence: str) -> None:
    """A sentence, and exit code 2."""
    code, said = command(agent, *arguments)
    assert code == 2
    assert sentence in said
