"""Containers of a real podman, network namespaces by name, and the OCI hook. The judge is a capture beyond the host."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.datapath import syscall
from tests.netns import pcap
from tests.netns.asking import ask, connect
from tests.netns.engine import Engine
from tests.netns.lab import HOST_UPLINK, NAME_SERVERS, Lab
from tests.netns.running import RunningAgent
from tests.netns.sending import reasons
from tests.netns.test_bug_cases_start import policy_for

pytestmark = pytest.mark.root

POLICY = "a.test:443/tcp\n"
ALLOWED, OTHER, DENIED = "198.51.100.11", "198.51.100.12", "203.0.113.45"
POLICED = ("--annotation", "namegate.label.app=web")
NAME_SERVER = NAME_SERVERS[0]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(records={"a.test.": [f"A {ALLOWED}"], "b.test.": [f"A {OTHER}"]}, ports=(443,)) as lab:
        yield lab


@pytest.fixture(scope="module")
def the_engine(lab: Lab) -> Iterator[Engine]:
    with Engine(lab) as engine:
        yield engine


@pytest.fixture
def engine(the_engine: Engine) -> Iterator[Engine]:
    """Without containers of the test before."""
    yield the_engine
    the_engine.podman("rm", "--all", "--force", "--time", "0")


def running(
    lab: Lab, directory: Path, policy: str = POLICY, *, wait_for: str = "enforcing", **sections: Mapping[str, Any]
) -> RunningAgent:
    """An agent that polices nothing by itself."""
    return RunningAgent(lab, policy, directory / "agent", wait_for=wait_for, endpoints=[], **sections)


def namegate(agent: RunningAgent, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command, in the host's namespace, asking this agent."""
    control = ("--control", agent.directory / "run" / "control.sock")
    return agent.lab.run(agent.lab.host, sys.executable, "-m", "agent", *control, *arguments, check=False)


def hook(agent: RunningAgent, engine: Engine, *options: str) -> None:
    done = namegate(agent, "attach", "--hook", "--hooks-dir", engine.hooks, *options)
    assert done.returncode == 0, done.stderr


def interface_of(agent: RunningAgent, **labels: str) -> str:
    """The policed one that has these labels."""
    (found,) = (row["interface"] for row in agent.ask("endpoints") if labels.items() <= dict(row["labels"]).items())
    return str(found)


# --- the hook --------------------------------------------------------------------------------------------------------------

# The first thing this container does is to connect where it may not; what it may comes after.
_FIRST = f"nc -w 1 {DENIED} 443 </dev/null; nslookup -type=a a.test {NAME_SERVER} >/dev/null; nc -w 1 {ALLOWED} 443 </dev/null && echo in"


def test_a_container_is_policed_before_its_first_instruction(lab: Lab, engine: Engine, tmp_path: Path) -> None:
    """In no try does a packet of its first connection get out; of one that the hook does not concern it does."""
    with running(lab, tmp_path) as agent:
        hook(agent, engine)
        command = ("run", "--rm", "--rootfs", engine.root, "sh", "-c", _FIRST)
        with lab.capture(lab.host, lab.uplink, f"dst {DENIED}", name="hook-denied") as uplink:
            for _ in range(5):
                assert engine.podman("run", *POLICED, *command[1:]) == "in"
        assert pcap.read(uplink.path).packets == ()
        assert {reason for reason, _ in reasons(agent, DENIED)} == {"policy"}
        with lab.capture(lab.host, lab.uplink, f"dst {DENIED}", name="hook-unconcerned") as uplink:
            engine.podman(*command)
        assert pcap.read(uplink.path).packets != ()
        namegate(agent, "detach", "--hook", "--hooks-dir", engine.hooks)


def test_without_an_agent_it_does_not_start(lab: Lab, engine: Engine, tmp_path: Path) -> None:
    """The engine shows why; a container that the hook does not concern starts, and so does one without any network."""
    with running(lab, tmp_path) as agent:
        hook(agent, engine)
        in_host = engine.attempt("run", "--rm", *POLICED, "--network", "host", "--rootfs", engine.root, "true")
    assert (in_host.returncode, "host network mode" in in_host.stderr) == (126, True), in_host.stderr
    refused = engine.attempt("run", "--rm", *POLICED, "--rootfs", engine.root, "true")
    assert (refused.returncode, "the container is not started: no agent is running" in refused.stderr) == (126, True)
    engine.podman("run", "--rm", "--rootfs", engine.root, "true")
    engine.podman("run", "--rm", *POLICED, "--network", "none", "--rootfs", engine.root, "true")
    gone = namegate(agent, "detach", "--hook", "--hooks-dir", engine.hooks)
    assert (gone.returncode, list(engine.hooks.iterdir())) == (0, [])
    again = namegate(agent, "detach", "--hook", "--hooks-dir", engine.hooks)
    assert (again.returncode, again.stderr.startswith("there is no hook")) == (1, True)


# --- namespaces --------------------------------------------------------------------------------------------------------------


def test_a_namespace_by_its_name(lab: Lab, tmp_path: Path) -> None:
    """Its veth and addresses are found; both families are policed when the command ends, and free when it is detached."""
    with running(lab, tmp_path) as agent:
        assert connect(lab, DENIED.replace(".45", ".2")) == "connected"
        attached = namegate(agent, "attach", "--netns", lab.client.namespace, "--label", "app=blue")
        assert (attached.returncode, attached.stdout) == (0, "ep1 is policed\n"), attached.stderr
        (row,) = agent.ask("endpoints")
        assert (set(row["addresses"]), dict(row["labels"])) == (set(lab.client.addresses), {"app": "blue"})
        assert connect(lab, "203.0.113.2").endswith("refused")
        assert ask(lab, "a.test").addresses == (ALLOWED,)
        assert connect(lab, ALLOWED) == "connected"
        assert namegate(agent, "detach", "--netns", lab.client.namespace).stdout == "ep1 is no longer policed\n"
        assert connect(lab, "203.0.113.2") == "connected"


def test_what_leads_nowhere_here_is_refused(lab: Lab, tmp_path: Path) -> None:
    """The host's own namespace, one whose veths end elsewhere, a macvlan, one that is not there: a sentence each, exit 1."""
    bare = f"{lab.host.removesuffix('host')}bare"
    lab.run(lab.host, "ip", "netns", "add", bare)
    try:
        with running(lab, tmp_path) as agent:

            def refused(namespace: str) -> str:
                done = namegate(agent, "attach", "--netns", namespace)
                assert (done.returncode, done.stdout) == (1, "")
                return done.stderr

            assert "no interface but lo" in refused(bare)
            assert "host network mode" in refused(lab.host)
            assert "there is no network namespace absent" in refused("absent")
            lab.run(lab.internet, "ip", "link", "add", "far", "type", "veth", "peer", "name", "near", "netns", bare)
            assert "in a third network namespace" in refused(bare)
            lab.run(lab.internet, "ip", "link", "del", "far")
            lab.run(lab.host, "ip", "link", "add", "link", lab.uplink, "name", "mac0", "netns", bare, "type", "macvlan")
            assert "its mac0 (macvlan) sends through its parent" in refused(bare)
            assert agent.ask("endpoints") == []
    finally:
        lab.run(lab.host, "ip", "netns", "del", bare)
