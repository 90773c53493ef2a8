"""Interfaces that come late, go, and come back under the same name: another interface each time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.netns.asking import ask, connect
from tests.netns.lab import Lab
from tests.netns.running import RunningAgent

pytestmark = pytest.mark.root

POLICY = "a.test:443/tcp\n"


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(records={"a.test.": ["A 198.51.100.11"]}, ports=(443,)) as lab:
        yield lab


def remove(lab: Lab) -> None:
    lab.run(lab.host, "ip", "link", "del", lab.client.endpoint)


def make(lab: Lab) -> None:
    """The client's link as the lab makes it, for IPv4."""
    client = lab.client
    for command in (
        f"ip link add {client.endpoint} type veth peer name {client.device} netns {client.namespace}",
        f"ip addr add {client.gateways[0]}/30 dev {client.endpoint}",
        f"ip link set {client.endpoint} up",
    ):
        lab.run(lab.host, *command.split())
    for command in (
        f"ip addr add {client.addresses[0]}/30 dev {client.device}",
        f"ip link set {client.device} up",
        f"ip route replace default via {client.gateways[0]}",
    ):
        lab.run(client.namespace, *command.split())


def test_an_interface_that_is_made_anew_is_enforced_again(lab: Lab, tmp_path: Path) -> None:
    """While it is gone status says so; when it is back nothing it had is left, and everything is judged."""
    with RunningAgent(lab, POLICY, tmp_path / "agent") as agent:
        assert ask(lab, "a.test").status == "NOERROR"
        assert connect(lab, "198.51.100.11") == "connected"
        (before,) = agent.ask("endpoints")
        remove(lab)
        status = agent.await_status(lambda status: status["state"] == "degraded", within_s=5)
        assert status["reasons"] == ["there is no interface ep1 in this network namespace (`ip link` shows them)"]
        make(lab)
        agent.await_status(lambda status: status["state"] == "enforcing", within_s=5)
        (after,) = agent.ask("endpoints")
        assert (after["interface"], after["endpoint"] > before["endpoint"]) == ("ep1", True)
        assert connect(lab, "198.51.100.99") == "connection refused"
        assert ask(lab, "evil.test").status == "NXDOMAIN"
        assert ask(lab, "a.test").status == "NOERROR"
        assert connect(lab, "198.51.100.11") == "connected"


def test_an_interface_that_comes_after_the_start_is_enforced_within_a_second(lab: Lab, tmp_path: Path) -> None:
    """The agent starts without it and says so; it is enforced soon after it is made."""
    remove(lab)
    with RunningAgent(lab, POLICY, tmp_path / "agent", wait_for="degraded") as agent:
        assert agent.status()["reasons"] == ["there is no interface ep1 in this network namespace (`ip link` shows them)"]
        make(lab)
        agent.await_status(lambda status: status["state"] == "enforcing", within_s=1)
        assert connect(lab, "198.51.100.11") == "connection refused"
        assert ask(lab, "a.test").status == "NOERROR"
        assert connect(lab, "198.51.100.11") == "connected"


def test_an_address_the_host_gets_later_is_the_hosts(lab: Lab, tmp_path: Path) -> None:
    """What names say of it is taken out from then on."""
    with RunningAgent(lab, POLICY, tmp_path / "agent") as agent:
        assert ask(lab, "a.test").addresses == ("198.51.100.11",)
        lab.run(lab.host, "ip", "addr", "add", "198.51.100.11/32", "dev", "lo")
        prefixes = {"198.51.100.11/32"}
        agent.await_status(lambda _: prefixes <= {row["prefix"] for row in agent.ask("ipcache") if row["scope"] == "static"}, 5)
        answer = ask(lab, "a.test")
        assert (answer.status, answer.addresses) == ("NOERROR", ())
