"""Interfaces that come late, go, come back, and change their names: what matches is policed, in every moment but the first."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.netns.asking import ask, connect
from tests.netns.flooding import Flood, times_at
from tests.netns.lab import Lab
from tests.netns.running import RunningAgent

pytestmark = pytest.mark.root

POLICY = "a.test:443/tcp\n"
DENIED = "198.51.100.99"
PATTERN = [{"interface": "ci-*", "labels": {"app": "ci"}}]


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


def batch(lab: Lab, namespace: str, *lines: str) -> None:
    """Commands of ip(8), one right after the other."""
    path = lab.directory / "batch"
    path.write_text("\n".join(lines) + "\n")
    lab.run(namespace, "ip", "-batch", path)


def ci(lab: Lab, name: str, number: int, *options: str) -> list[str]:
    """Commands that make a veth; its other side is `pNUMBER`, in the client's namespace. The host has 10.8.NUMBER.1."""
    return [
        f"link add name {name} {' '.join(options)} type veth peer name p{number} netns {lab.client.namespace}",
        f"addr add 10.8.{number}.1/24 dev {name}",
        f"link set {name} up",
    ]


def use(lab: Lab, number: int) -> None:
    """The other side of such a veth: packets bound to it go through the host."""
    lines = [f"addr add 10.8.{number}.2/24 dev p{number}", f"link set p{number} up"]
    batch(lab, lab.client.namespace, *lines, f"route add default via 10.8.{number}.1 dev p{number} metric {number}")


def states(agent: RunningAgent) -> dict[str, str]:
    return {row["interface"]: row["state"] for row in agent.ask("endpoints")}


def names(agent: RunningAgent) -> dict[int, str]:
    return {row["endpoint"]: row["interface"] for row in agent.ask("endpoints")}


def await_states(agent: RunningAgent, wanted: dict[str, str], within_s: float = 5) -> None:
    agent.await_status(lambda _: states(agent) == wanted, within_s)


def told_at(agent: RunningAgent, sentence: str) -> float | None:
    """When the log first said it; seconds of time.time()."""
    found = re.search(rf"^(\S+ \S+),(\d+) .*{re.escape(sentence)}$", agent.log.read_text(), re.MULTILINE)
    return dt.datetime.fromisoformat(f"{found[1]}.{found[2]}").timestamp() if found else None


# --- by name ---------------------------------------------------------------------------------------------------------------


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
        assert connect(lab, DENIED) == "connection refused"
        assert ask(lab, "evil.test").status == "NXDOMAIN"
        assert ask(lab, "a.test").status == "NOERROR"
        assert connect(lab, "198.51.100.11") == "connected"


def detach(agent: RunningAgent, interface: str) -> str:
    command = [sys.executable, "-m", "agent", "detach", interface, "-c", str(agent.configuration)]
    return agent.lab.run(agent.lab.host, *command, check=False).stdout


def test_an_interface_is_let_go_by_command(lab: Lab, tmp_path: Path) -> None:
    """With the agent running, which says so and goes on, and with it stopped; each time the next start enforces it again."""
    with RunningAgent(lab, POLICY, tmp_path / "agent") as agent:
        assert connect(lab, DENIED) == "connection refused"
        assert detach(agent, "ep1") == "ep1 is no longer policed\n"
        assert connect(lab, DENIED) == "connected"
        status = agent.status()
        said = "ep1 is not enforced: it was detached by command, until the agent starts again"
        assert (status["state"], status["reasons"]) == ("degraded", [said])
        assert detach(agent, "ep1") == ""
        for _ in range(2):
            agent.end(signal.SIGTERM)
            agent.start()
            assert connect(lab, DENIED) == "connection refused"
        agent.end(signal.SIGTERM)
        assert connect(lab, DENIED) == "connection refused"
        assert detach(agent, "ep1") == "ep1 is no longer policed\n"
        assert connect(lab, DENIED) == "connected"
        assert detach(agent, "ep1") == ""


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


# --- by pattern ------------------------------------------------------------------------------------------------------------


def test_what_matches_is_policed_as_soon_as_it_is_made(lab: Lab, tmp_path: Path) -> None:
    """Within a second, and in 50 ms when the agent is idle: no datagram of an eager sender gets out after that (case 15)."""
    delays = []
    with RunningAgent(lab, POLICY, tmp_path / "agent", endpoints=PATTERN) as agent:
        for number in range(1, 11):
            with lab.capture(lab.host, lab.uplink, f"host {DENIED}", name=f"new-{number}") as uplink:
                with Flood(lab, lab.client.namespace, DENIED, f"p{number}") as sender:
                    made_at = dt.datetime.now().astimezone().timestamp()
                    batch(lab, lab.host, *ci(lab, f"ci-{number}", number))
                    use(lab, number)
                    sender.await_first()
                    await_states(agent, {f"ci-{number}": "enforcing"})
                enforced_at = told_at(agent, f"ci-{number} is enforced")
                assert enforced_at is not None
            assert [at for at in times_at(uplink.path, DENIED) if at > enforced_at + 0.001] == []
            delays.append(enforced_at - made_at)
            batch(lab, lab.host, f"link del ci-{number}")
            await_states(agent, {})
            if number >= 3 and min(delays) < 0.05:
                break
    assert max(delays) < 1, delays
    assert min(delays) < 0.05, delays


def test_what_cannot_be_attached_is_shown_and_tried_again(lab: Lab, tmp_path: Path) -> None:
    """`status` exits 1 and names the interface as unprotected until the reason is gone."""
    with RunningAgent(lab, POLICY, tmp_path / "agent", endpoints=PATTERN) as agent:
        obstacle = agent.pins / "links" / "4242-ingress"
        obstacle.mkdir(parents=True)
        batch(lab, lab.host, *ci(lab, "ci-1", 1, "index", "4242"))
        agent.await_status(lambda status: "ci-1 is unprotected: cannot " in str(status["reasons"]), within_s=5)
        control = ("--control", str(agent.directory / "run" / "control.sock"))
        shown = subprocess.run([sys.executable, "-m", "agent", *control, "status"], capture_output=True, text=True, check=False)
        assert (shown.returncode, "ci-1 is unprotected" in shown.stdout) == (1, True)
        obstacle.rmdir()
        await_states(agent, {"ci-1": "enforcing"}, within_s=15)
        assert "unprotected" not in str(agent.status()["reasons"])
        assert agent.log.read_text().count("ci-1 is NOT enforced") == 1


def test_all_of_it_in_one_second(lab: Lab, tmp_path: Path) -> None:
    """Made, deleted, renamed away and to a match, made anew with another and with the same index: what is left is policed."""
    with RunningAgent(lab, POLICY, tmp_path / "agent", endpoints=PATTERN) as agent:
        lines = [line for number in range(1, 7) for line in ci(lab, f"ci-{number}", number)]
        batch(lab, lab.host, *lines, *ci(lab, "ci-7", 7, "index", "777"), *ci(lab, "other", 8))
        await_states(agent, dict.fromkeys([f"ci-{number}" for number in range(1, 8)], "enforcing"))
        lines = ["link del ci-1", "link del ci-2", *ci(lab, "ci-2", 2), "link del ci-7", *ci(lab, "ci-7", 7, "index", "777")]
        for old, new in (("ci-3", "away"), ("ci-4", "ci-x"), ("other", "ci-y"), ("ci-5", "z"), ("ci-6", "ci-5"), ("z", "ci-6")):
            lines += [f"link set {old} down", f"link set {old} name {new}", f"link set {new} up"]
        batch(lab, lab.host, *lines)
        wanted = ("ci-2", "ci-5", "ci-6", "ci-7", "ci-x", "ci-y")
        await_states(agent, dict.fromkeys(wanted, "enforcing"), within_s=2)
        pins = {int(pin.name.partition("-")[0]) for pin in (agent.pins / "links").iterdir()}
        links = {link["ifname"]: link["ifindex"] for link in json.loads(lab.run(lab.host, "ip", "-j", "link").stdout)}
        assert pins == {links[name] for name in (*wanted, "ng-gate")}
        assert "ci-3 is no endpoint any more: detached" in agent.log.read_text()


def test_what_is_renamed_and_still_matches_is_policed_all_the_time(lab: Lab, tmp_path: Path) -> None:
    """Also when two change names with each other, and labels with the names: no datagram gets out."""
    endpoints = [{"interface": f"ci-{word}*", "labels": {"app": word}} for word in ("a", "b")]
    batch(lab, lab.host, *ci(lab, "ci-a", 1), *ci(lab, "ci-b", 2))
    for number in (1, 2):
        use(lab, number)
    with RunningAgent(lab, POLICY, tmp_path / "agent", endpoints=endpoints, wait_for="degraded") as agent:
        before = names(agent)
        with contextlib.ExitStack() as stack:
            uplink = stack.enter_context(lab.capture(lab.host, lab.uplink, f"host {DENIED}", name="renamed"))
            for number in (1, 2):
                stack.enter_context(Flood(lab, lab.client.namespace, DENIED, f"p{number}")).await_first()
            for old, new in (("ci-a", "ci-a2"), ("ci-b", "ci-a"), ("ci-a2", "ci-b")):
                batch(lab, lab.host, f"link set {old} name {new}")
            after = {number: {"ci-a": "ci-b", "ci-b": "ci-a"}[name] for number, name in before.items()}
            agent.await_status(lambda _: names(agent) == after, within_s=5)
            assert states(agent) == {"ci-a": "enforcing", "ci-b": "enforcing"}
        assert times_at(uplink.path, DENIED) == []
        assert "detached" not in agent.log.read_text()
