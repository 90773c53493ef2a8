"""Containers of a real podman, network namespaces by name, and the OCI hook. The judge is a capture beyond the host."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent.datapath import syscall
from tests.netns import pcap
from tests.netns.asking import ask, connect
from tests.netns.docker_answers import RESOLV_CONF, Docker, inspected
from tests.netns.engine import Engine
from tests.netns.lab import INTERNET_UPLINK, NAME_SERVERS, Lab
from tests.netns.running import RunningAgent
from tests.netns.sending import reasons
from tests.netns.test_bug_cases_start import policy_for
from tests.netns.test_interfaces import batch

pytestmark = pytest.mark.root

POLICY = "a.test:443/tcp\n"
ALLOWED, OTHER = "198.51.100.11", "198.51.100.150"
RECORDS = {"a.test.": [f"A {ALLOWED}"], "shared.test.": [f"A {OTHER}"]}
NAME_SERVER = NAME_SERVERS[0]
NETWORK = "web"
# Of the race that a first instruction would win: many in a long run.
TRIES = int(os.environ.get("NAMEGATE_HOOK_TRIES", "3"))


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """The second client stands for a container of Docker."""
    with Lab(clients=2, records=RECORDS, ports=(443,)) as lab:
        yield lab


@pytest.fixture(scope="module")
def shared_engine(lab: Lab) -> Iterator[Engine]:
    """With a network that has podman's own resolver."""
    with Engine(lab) as engine:
        engine.podman("network", "create", NETWORK)
        engine.start_service()
        yield engine


@pytest.fixture(scope="module")
def docker(lab: Lab) -> Iterator[Docker]:
    """Its answers, as documented; it has no container."""
    with Docker(lab.directory / "docker.sock", None) as docker:
        yield docker


@pytest.fixture(scope="module")
def shared_agent(
    lab: Lab, shared_engine: Engine, docker: Docker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningAgent]:
    """It polices nothing by itself but the engine's containers that have a label, and Docker's."""
    containers = [
        {"engine": str(shared_engine.socket), "select": {"policed": "yes"}, "labels": {"by": "configuration"}},
        {"engine": str(docker.server_address), "select": {"com.docker.compose.project": "shop"}},
    ]
    directory = tmp_path_factory.mktemp("agent")
    with RunningAgent(lab, POLICY, directory, endpoints=[], containers=containers) as agent:
        yield agent


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """Without containers of the test before, and with its service, whatever became of them there."""
    yield shared_engine
    shared_engine.podman("rm", "--all", "--force", "--time", "0")
    shared_engine.start_service()


@pytest.fixture
def agent(shared_agent: RunningAgent) -> Iterator[RunningAgent]:
    """Without policies of the test before."""
    yield shared_agent
    shared_agent.apply(POLICY)


def namegate(agent: RunningAgent, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command, in the host's namespace, asking this agent."""
    control = ("--control", agent.directory / "run" / "control.sock")
    return agent.lab.run(agent.lab.host, sys.executable, "-m", "agent", *control, *arguments, check=False)


def attach(agent: RunningAgent, engine: Engine, container: str, *options: str) -> subprocess.CompletedProcess[str]:
    return namegate(agent, "attach", "--container", container, "--engine", engine.socket, *options)


def endpoints(agent: RunningAgent) -> dict[str, dict[str, Any]]:
    """By the container that they are."""
    return {row["labels"].get("container", row["interface"]): row for row in agent.ask("endpoints")}


def await_endpoint(agent: RunningAgent, container: str, address: str) -> None:
    """Until it is enforced with this address alone."""

    def is_there(_: dict[str, Any]) -> bool:
        row = endpoints(agent).get(container)
        return row is not None and (row["state"], row["addresses"]) == ("enforcing", [address])

    agent.await_status(is_there, within_s=10)


def sent_to(lab: Lab, address: str, name: str) -> Any:
    """A capture beyond the host; a question for its Ethernet address counts as well."""
    return lab.capture(lab.internet, "eth0", f"host {address}", name=name)


def frames(path: Path) -> int:
    recording = pcap.read(path)
    return len(recording.packets) + recording.other


def allows(engine: Engine, container: str, denied: str) -> None:
    """What the policy says: a.test resolves and connects, another name is denied, another address refused."""
    script = f"nslookup -type=a a.test {NAME_SERVER}; nslookup -type=a denied.test {NAME_SERVER}; "
    script += f"nc -w 8 {ALLOWED} 443 </dev/null && echo in; nc -w 8 {denied} 443 </dev/null && echo out"
    said = engine.inside(container, "sh", "-c", script)
    assert f"Address: {ALLOWED}\n" in said, said
    assert "can't find denied.test: NXDOMAIN" in said, said
    assert "in\n" in said, said
    assert "Connection refused" in said.rpartition(denied)[2], said
    assert "out\n" not in said, said


# --- the hook --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hook(agent: RunningAgent, engine: Engine) -> Sequence[str]:
    """Installed, if it is not; gives the options that make it the container's concern."""
    if not list(engine.hooks.iterdir()):
        install(agent, engine)
    return ("--annotation", "namegate.label.app=web")


def install(agent: RunningAgent, engine: Engine, *options: str) -> None:
    done = namegate(agent, "attach", "--hook", "--hooks-dir", engine.hooks, *options)
    assert done.returncode == 0, done.stderr


def uninstall(agent: RunningAgent, engine: Engine) -> subprocess.CompletedProcess[str]:
    return namegate(agent, "detach", "--hook", "--hooks-dir", engine.hooks)


def test_a_container_is_policed_before_its_first_instruction(
    lab: Lab, agent: RunningAgent, engine: Engine, hook: Sequence[str]
) -> None:
    """In no try does a packet of its first connection get out; of a container that the hook does not concern it does."""
    denied = "198.51.100.66"
    script = f"nc -w 1 {denied} 443 </dev/null; nslookup -type=a a.test {NAME_SERVER} >/dev/null; "
    script += f"nc -w 1 {ALLOWED} 443 </dev/null && echo connected"
    command = ("--rm", "--rootfs", engine.root, "sh", "-c", script)
    with sent_to(lab, denied, "first") as uplink:
        for _ in range(TRIES):
            assert engine.podman("run", *hook, *command) == "connected"
    assert frames(uplink.path) == 0
    assert set(reasons(agent, denied)) == {("policy", "not resolved through the proxy")}
    with sent_to(lab, denied, "unconcerned") as uplink:
        engine.podman("run", *command)
    assert frames(uplink.path) > 0


def test_without_an_agent_it_does_not_start(lab: Lab, agent: RunningAgent, engine: Engine) -> None:
    """The engine shows why. What the hook does not concern starts, and what has no network; with the host's it does not."""
    absent = lab.directory / "absent.sock"
    install = (sys.executable, "-m", "agent", "--control", absent, "attach", "--hook", "--hooks-dir", engine.hooks)
    lab.run(lab.host, *install)
    concerned, command = ("--annotation", "namegate.policed=yes"), ("--rootfs", engine.root, "true")
    refused = engine.attempt("run", "--rm", *concerned, *command)
    assert refused.returncode == 126
    assert f"the container is not started: no agent is running (nobody listens at {absent})" in refused.stderr
    refused = engine.attempt("run", "--rm", "--network", "host", *concerned, *command)
    assert (refused.returncode, "host network mode" in refused.stderr) == (126, True), refused.stderr
    engine.podman("run", "--rm", *command)
    engine.podman("run", "--rm", "--network", "none", *concerned, *command)
    lab.run(lab.host, *install, "--all")
    assert engine.attempt("run", "--rm", *command).returncode == 126
    assert uninstall(agent, engine).returncode == 0
    assert list(engine.hooks.iterdir()) == []
    again = uninstall(agent, engine)
    assert (again.returncode, again.stderr.startswith("there is no hook")) == (1, True)


def test_the_hook_is_where_podman_reads(lab: Lab, engine: Engine, tmp_path: Path) -> None:
    """podman is not told where hooks are. As its package has it, and where containers.conf names other directories, the hook is
    read: without an agent nothing starts. `doctor` finds one that is not; one that was elsewhere is moved; `detach` takes it
    from where it is.
    """
    host, concerned = tmp_path / "host", ("--annotation", "namegate.policed=yes")
    agent = (sys.executable, "-m", "agent")
    install = (*agent, "attach", "--hook", "--control", lab.directory / "absent.sock")
    assert engine.run_on_host(host, *concerned) == 0
    done = engine.on_host(host, *install)
    assert "/usr/share/containers/oci/hooks.d/namegate.json, which podman reads: " in done.stdout, done.stderr
    assert (engine.run_on_host(host, *concerned), engine.run_on_host(host)) == (126, 0)
    directories = '[engine]\nhooks_dir = ["/usr/share/elsewhere", "/etc/containers/elsewhere"]\n'
    (host / "etc" / "containers.conf.d" / "hooks.conf").write_text(directories)
    assert engine.run_on_host(host, *concerned) == 0

    def doctor() -> list[tuple[str, str]]:
        rows = json.loads(engine.on_host(host, *agent, "doctor", "-o", "json").stdout)
        return [(row["state"], row["found"]) for row in rows if row["name"] == "oci hook"]

    ((state, found),) = doctor()
    assert (state, found.startswith("podman does not read /usr/share/containers/oci/hooks.d/namegate.json")) == ("bad", True)
    assert engine.on_host(host, *install).returncode == 0
    assert sorted(file.relative_to(host).as_posix() for file in host.rglob("namegate.*")) == ["etc/elsewhere/namegate.json"]
    assert doctor() == [("good", "podman reads /etc/containers/elsewhere/namegate.json")]
    assert engine.run_on_host(host, *concerned) == 126
    done = engine.on_host(host, *install, "--hooks-dir", "/etc/containers/oci/hooks.d")
    assert "warning: podman reads no hooks from /etc/containers/oci/hooks.d unless it is told to" in done.stderr
    done = engine.on_host(host, *agent, "detach", "--hook")
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2), done.stderr
    assert list(host.rglob("namegate.*")) == []
    assert engine.run_on_host(host, *concerned) == 0


def test_why_a_container_does_not_start_is_in_a_log(agent: RunningAgent, engine: Engine, hook: Sequence[str]) -> None:
    """Some runtimes show only that a hook failed: the agent's log says it, or the system's where there is no agent."""
    refused = engine.attempt("run", "--rm", "--network", "host", *hook, "--rootfs", engine.root, "true")
    assert refused.returncode == 126
    (said,) = re.findall(r"container (\w{64}) is not started: (.*)", agent.log.read_text())
    assert "host network mode" in said[1]
    heard = """
import io, socket
from agent import oci_hook
log = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
log.bind("/dev/log")
log.settimeout(5)
oci_hook.main(['{"control": "/nowhere"}'], io.StringIO('{"id": "c1", "pid": "x"}'))
print(log.recv(4096).decode())
"""
    private = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev && exec "$@"', "sh")
    done = agent.lab.run(agent.lab.host, *private, sys.executable, "-c", heard)
    assert "container c1 is not started: the hook was called in a way it does not know" in done.stdout


def test_the_engine_adds_labels_to_what_the_hook_attached(agent: RunningAgent, engine: Engine, hook: Sequence[str]) -> None:
    """Those of the hook hold: an image has labels, too. Detached by its name it is free, and `status` says so."""
    engine.run("hooked", *hook, "--label", "policed=yes", "--label", "app=admin")
    wanted = {"app": "web", "by": "configuration", "container": "hooked", "policed": "yes"}
    agent.await_status(lambda _: [row["labels"] for row in agent.ask("endpoints")] == [wanted], within_s=10)
    (row,) = agent.ask("endpoints")
    assert row["state"] == "enforcing"
    assert namegate(agent, "detach", "--container", "hooked").returncode == 0
    assert agent.ask("endpoints") == []
    said = "container hooked is not policed: it was detached by command, until the agent starts again"
    agent.await_status(lambda status: status["reasons"] == [said], within_s=5)


# --- an engine's containers --------------------------------------------------------------------------------------------------


def test_a_container_by_its_name(agent: RunningAgent, engine: Engine) -> None:
    """Attached while it runs; made anew under the same name it is attached anew, until it is detached."""
    denied = "198.51.100.67"
    engine.run("web", "--label", "app=web", "--label", "note=of no syntax")
    attached = attach(agent, engine, "web", "--label", "by=command")
    assert (attached.returncode, attached.stdout) == (0, "veth0 is policed\n"), attached.stderr
    row = endpoints(agent)["web"]
    assert row["labels"] == {"app": "web", "by": "command", "container": "web"}
    assert row["addresses"] == [engine.address("web")]
    allows(engine, "web", denied)
    engine.podman("rm", "--force", "--time", "0", "web")
    engine.run("web")
    await_endpoint(agent, "web", engine.address("web"))
    assert endpoints(agent)["web"]["endpoint"] != row["endpoint"]
    allows(engine, "web", denied)
    released = namegate(agent, "detach", "--container", "web")
    assert (released.returncode, endpoints(agent)) == (0, {}), released.stderr
    assert engine.connect("web", denied) == "connected"
    assert namegate(agent, "detach", "--container", "web").returncode == 1


def test_containers_by_their_labels_through_all_that_happens_to_them(agent: RunningAgent, engine: Engine) -> None:
    """Stopped and started, its network made anew with and without an event, the engine's service restarted meanwhile."""
    denied = "198.51.100.68"
    engine.run("job", "--label", "policed=yes", network=NETWORK)
    engine.run("other", network=NETWORK)
    await_endpoint(agent, "job", engine.address("job"))
    assert endpoints(agent).keys() == {"job"}
    assert endpoints(agent)["job"]["labels"] == {"by": "configuration", "container": "job", "policed": "yes"}
    allows(engine, "job", denied)
    for change in (
        ("network", "reload", "job"),
        ("network", "disconnect", NETWORK, "job"),
        ("network", "connect", NETWORK, "job"),
        ("restart", "--time", "0", "job"),
    ):
        before = {row["endpoint"] for row in endpoints(agent).values()}
        engine.podman(*change)
        if "disconnect" in change:
            agent.await_status(lambda _: endpoints(agent) == {}, within_s=10)
            continue
        agent.await_status(lambda _: not before & {row["endpoint"] for row in endpoints(agent).values()}, within_s=10)  # noqa: B023
        await_endpoint(agent, "job", engine.address("job"))
        allows(engine, "job", denied)
    engine.stop_service()
    agent.await_status(lambda status: status["state"] == "degraded", within_s=10)
    assert any("cannot be asked" in reason for reason in agent.status()["reasons"])
    allows(engine, "job", denied)
    engine.run("late", "--label", "policed=yes", network=NETWORK)
    engine.start_service()
    await_endpoint(agent, "late", engine.address("late"))
    assert endpoints(agent).keys() == {"job", "late"}
    agent.await_status(lambda status: status["state"] == "enforcing", within_s=5)
    engine.podman("rm", "--all", "--force", "--time", "0")
    agent.await_status(lambda _: endpoints(agent) == {}, within_s=10)


def test_an_agent_that_starts_anew_polices_what_it_did(lab: Lab, agent: RunningAgent, engine: Engine) -> None:
    """What was attached by command as well, and while the engine cannot be asked; not what was detached meanwhile."""
    denied = "198.51.100.69"
    engine.run("web")
    engine.run("job", "--label", "policed=yes")
    assert attach(agent, engine, "web").returncode == 0
    await_endpoint(agent, "job", engine.address("job"))
    assert namegate(agent, "attach", "--netns", lab.client.namespace).returncode == 0
    engine.stop_service()
    agent.end(signal.SIGTERM)
    let_go = namegate(agent, "detach", "--netns", lab.client.namespace, "-c", agent.configuration)
    assert (let_go.returncode, let_go.stdout) == (0, "ep1 is no longer policed\n"), let_go.stderr
    agent.begin()
    # Degraded, for it cannot ask the engine; until it has tried, questions are held or answered by the holder.
    agent.await_status(lambda status: status["state"] == "degraded" and endpoints(agent).keys() == {"web", "job"}, within_s=20)
    for container in ("web", "job"):
        allows(engine, container, denied)
    engine.start_service()
    agent.await_status(lambda status: status["state"] == "enforcing", within_s=15)
    engine.podman("rm", "--force", "--time", "0", "web")
    engine.run("web")
    await_endpoint(agent, "web", engine.address("web"))
    assert namegate(agent, "detach", "--container", "web").returncode == 0


def test_what_cannot_be_policed_is_said(agent: RunningAgent, engine: Engine) -> None:
    """No network and the host's; a container that does not run is taken, one that is not there is not."""
    engine.run("none", network="none")
    engine.run("host", network="host")
    for container, sentence in (
        ("none", "container none has no network: nothing gets out"),
        ("host", "container host is not policed: it is in the host's own network namespace"),
        ("absent", f"{engine.socket} has no container absent"),
    ):
        refused = attach(agent, engine, container)
        assert (refused.returncode, refused.stderr.startswith(sentence)) == (1, True), refused.stderr
    assert agent.status()["state"] == "enforcing"
    engine.run("labelled", "--label", "policed=yes", network="host")
    agent.await_status(lambda status: status["state"] == "degraded", within_s=10)
    assert any(reason.startswith("container labelled is not policed") for reason in agent.status()["reasons"])
    engine.podman("rm", "--force", "--time", "0", "labelled")
    agent.await_status(lambda status: status["state"] == "enforcing", within_s=10)
    engine.podman("create", "--name", "later", "--pidfile", engine.pid_file("later"), "--rootfs", engine.root, "sleep", "300")
    taken = attach(agent, engine, "later")
    assert (taken.returncode, taken.stdout, "does not run" in taken.stderr) == (0, "", True)
    engine.podman("start", "later")
    await_endpoint(agent, "later", engine.address("later"))
    assert namegate(agent, "detach", "--container", "later").returncode == 0


def test_a_container_is_not_attached_as_something_else(agent: RunningAgent, engine: Engine) -> None:
    """Not in passing: what is in force stays until it is detached, by the container's name or its interface's."""
    engine.run("web")
    for value, code in (("a", 0), ("b", 1), ("a", 0)):
        done = attach(agent, engine, "web", "--label", f"by={value}")
        assert (done.returncode, "is an endpoint already, with other labels" in done.stderr) == (code, code == 1), done.stderr
        assert endpoints(agent)["web"]["labels"]["by"] == "a"
    assert namegate(agent, "detach", endpoints(agent)["web"]["interface"]).returncode == 0
    done = attach(agent, engine, "web", "--label", "by=b")
    assert (done.returncode, "policed" in done.stdout) == (0, True), done.stderr
    row = endpoints(agent)["web"]
    assert (row["labels"]["by"], row["state"]) == ("b", "enforcing")
    engine.podman("stop", "--time", "0", "web")
    refused = attach(agent, engine, "web", "--label", "by=c")
    assert (refused.returncode, "`namegate detach --container web` first" in refused.stderr) == (1, True), refused.stderr
    assert namegate(agent, "detach", "--container", "web").returncode == 0
    assert attach(agent, engine, "web", "--label", "by=c").returncode == 0
    assert namegate(agent, "detach", "--container", "web").returncode == 0


def test_who_can_make_himself_a_way_out_is_named(agent: RunningAgent, engine: Engine, hook: Sequence[str]) -> None:
    """CAP_NET_ADMIN without a user namespace: the commands warn, the hook has it logged, `status` lists it and is not degraded.
    With one, or without the capability, nobody warns."""
    said = "its root has CAP_NET_ADMIN and no user namespace of its own"
    logged = len(agent.log.read_text())
    engine.run("plain", *hook)
    engine.run("admin", *hook, "--cap-add", "NET_ADMIN")
    engine.run("mapped", *hook, "--cap-add", "NET_ADMIN", "--uidmap", "0:100000:65536", "--gidmap", "0:100000:65536")
    (row,) = (row for row in agent.ask("endpoints") if row["addresses"] == [engine.address("admin")])
    assert re.findall(rf"(\S+): {said}", agent.log.read_text()[logged:]) == [row["interface"]]
    for container in ("plain", "admin", "mapped"):
        warnings = agent.ask("attach", container=container, engine=str(engine.socket))["warnings"]
        assert [warning.startswith(f"container {container}: {said}") for warning in warnings] == [True] * (container == "admin")
    engine.run("mighty", "--privileged", "--label", "policed=yes")
    await_endpoint(agent, "mighty", engine.address("mighty"))
    status = agent.status()
    assert status["state"] == "enforcing"
    assert [warning.partition(":")[0] for warning in status["warnings"]] == ["container admin", "container mighty"]
    refused = namegate(agent, "attach", "--pid", engine.pid("admin"))
    assert (refused.returncode, "is an endpoint already, with other labels" in refused.stderr) == (1, True), refused.stderr
    in_force = [f"--label={key}={value}" for key, value in endpoints(agent)["admin"]["labels"].items()]
    attached = namegate(agent, "attach", "--pid", engine.pid("admin"), *in_force)
    assert (attached.returncode, attached.stderr.startswith(f"warning: {said}")) == (0, True), attached.stderr
    for container in ("plain", "admin", "mapped"):
        agent.ask("detach", container=container)


def test_docker_by_its_documented_answers(lab: Lab, agent: RunningAgent, docker: Docker, tmp_path: Path) -> None:
    """Policed from its start to its end, with the addresses it was given; that its resolver asks past the veth is said."""
    resolv_conf = tmp_path / "resolv.conf"
    resolv_conf.write_text(RESOLV_CONF)
    client = lab.clients[1]
    v4, v6 = client.addresses
    told = (f"/run/netns/{client.namespace}", v4, v6, str(resolv_conf))
    docker.happen("start", inspected(*told))
    agent.await_status(lambda _: endpoints(agent).get("shop-web-1", {}).get("state") == "enforcing", within_s=10)
    row = endpoints(agent)["shop-web-1"]
    assert (row["interface"], set(row["addresses"])) == ("ep2", {v4, v6})
    assert row["labels"] == {
        "com.docker.compose.project": "shop",
        "com.docker.compose.service": "web",
        "container": "shop-web-1",
    }
    (reason,) = (reason for reason in agent.status()["reasons"] if reason.startswith("container shop-web-1"))
    assert "asks 127.0.0.53 from the host" in reason
    assert "daemon.json" in reason
    assert connect(lab, "198.51.100.70", client=client).endswith("refused")
    assert reasons(agent, "198.51.100.70") == [("policy", "not resolved through the proxy")]
    docker.happen("die", inspected(*told, is_running=False))
    agent.await_status(lambda status: endpoints(agent) == {} and status["state"] == "enforcing", within_s=10)


# --- namespaces --------------------------------------------------------------------------------------------------------------


def test_a_namespace_by_its_name(lab: Lab, agent: RunningAgent) -> None:
    """Its veth and addresses are found; it is policed when the command ends, and free when it is detached."""
    assert connect(lab, INTERNET_UPLINK[0]) == "connected"
    attached = namegate(agent, "attach", "--netns", lab.client.namespace, "--label", "app=blue")
    assert (attached.returncode, attached.stdout) == (0, "ep1 is policed\n"), attached.stderr
    (row,) = agent.ask("endpoints")
    assert (set(row["addresses"]), row["labels"]) == (set(lab.client.addresses), {"app": "blue"})
    for address in INTERNET_UPLINK:
        assert connect(lab, address).endswith("refused")
    assert ask(lab, "a.test").addresses == (ALLOWED,)
    assert connect(lab, ALLOWED) == "connected"
    assert namegate(agent, "detach", "--netns", lab.client.namespace).stdout == "ep1 is no longer policed\n"
    assert connect(lab, INTERNET_UPLINK[0]) == "connected"


def test_what_leads_nowhere_here_is_refused(lab: Lab, agent: RunningAgent) -> None:
    """The host's own namespace, one whose veths end elsewhere, a macvlan, one that is not there: a sentence each, exit 1."""
    bare = f"{lab.host.removesuffix('host')}bare"
    lab.run(lab.host, "ip", "netns", "add", bare)

    def refusal(namespace: str) -> str:
        done = namegate(agent, "attach", "--netns", namespace)
        assert (done.returncode, done.stdout) == (1, "")
        return done.stderr

    try:
        assert "no interface but lo" in refusal(bare)
        assert "host network mode" in refusal(lab.host)
        assert "there is no network namespace absent" in refusal("absent")
        lab.run(lab.internet, "ip", "link", "add", "far", "type", "veth", "peer", "name", "near", "netns", bare)
        assert "in a third network namespace" in refusal(bare)
        lab.run(lab.internet, "ip", "link", "del", "far")
        lab.run(lab.host, "ip", "link", "add", "link", lab.uplink, "name", "mac0", "netns", bare, "type", "macvlan")
        assert "its mac0 (macvlan) sends through its parent" in refusal(bare)
        assert agent.ask("endpoints") == []
    finally:
        lab.run(lab.host, "ip", "netns", "del", bare)


# --- bug cases, theme 12 -----------------------------------------------------------------------------------------------------


def test_case_145_the_engines_own_chains_are_of_no_account(
    lab: Lab, agent: RunningAgent, engine: Engine, hook: Sequence[str]
) -> None:
    """Dropped and counted at the veth before and after the engine made its chains anew; without our program: degraded."""
    denied = "203.0.113.45"
    engine.run("web", *hook)
    with sent_to(lab, denied, "145") as uplink:
        assert "refused" in engine.connect("web", denied)
        lab.run(lab.host, "iptables", "-t", "filter", "-F", "NETAVARK_FORWARD")
        engine.run("sibling")  # podman makes its chains anew
        assert "NETAVARK_FORWARD" in lab.run(lab.host, "iptables", "-S").stdout
        assert "refused" in engine.connect("web", denied)
    assert frames(uplink.path) == 0
    assert len(reasons(agent, denied)) == 2
    assert namegate(agent, "status").returncode == 0
    (row,) = agent.ask("endpoints")
    (link,) = json.loads(lab.run(lab.host, "ip", "-j", "link", "show", "dev", row["interface"]).stdout)
    syscall.link_detach(syscall.get_pinned(str(agent.pins / "links" / f"{link['ifindex']}-ingress")))
    status = namegate(agent, "status")
    assert (status.returncode, "degraded" in status.stdout) == (1, True), status.stdout


def test_case_146_containers_resolve(agent: RunningAgent, engine: Engine, hook: Sequence[str]) -> None:
    """On the default network and on one with podman's own resolver, at the address that the container's resolv.conf has."""
    denied = "198.51.100.146"
    for network in ("podman", NETWORK):
        container = f"on-{network}"
        engine.run(container, *hook, network=network)
        servers = [
            line.split()[1] for line in engine.inside(container, "cat", "/etc/resolv.conf").splitlines() if "nameserver" in line
        ]
        assert ALLOWED in engine.lookup(container, "a.test", servers[0])
        assert "NXDOMAIN" in engine.lookup(container, "denied.test", servers[0])
        allows(engine, container, denied)
    assert set(reasons(agent, denied)) == {("policy", "not resolved through the proxy")}


# A question that nobody answers, for its own address, from another's Ethernet address: a bridge believes who had it last.
_STEAL = """
import socket, sys
mac, own = bytes.fromhex(sys.argv[1].replace(":", "")), socket.inet_aton(sys.argv[2])
with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as s:
    s.bind(("eth0", 0))
    s.send(b"\\xff" * 6 + mac + bytes.fromhex("080600010800060400010200000000aa") + own + bytes(6) + own)
"""
_SAY = "import socket, sys; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'for b', (sys.argv[1], 9))"


def test_a_neighbour_on_a_bridge_hears_what_it_may_be_sent(
    lab: Lab, agent: RunningAgent, engine: Engine, hook: Sequence[str]
) -> None:
    """The limit of a bridge: under another's Ethernet address (CAP_NET_RAW) one has its frames brought to oneself. Who is
    closed in ingress gets none of them."""
    for container in ("a", "b"):
        engine.run(container, *hook)
    a, b = engine.address("a"), engine.address("b")
    namespace = Path(engine.shown("a")["NetworkSettings"]["SandboxKey"]).name
    lab.run(lab.host, sys.executable, "-c", _SAY, b)  # the host knows its Ethernet address from now on
    taken = engine.inside("b", "cat", "/sys/class/net/eth0/address").strip()
    closed = policy_for("web", "{matchName: a.test}") + "  ingress: [{fromCIDR: [203.0.113.99/32]}]\n"
    for policy, is_heard in ((POLICY, True), (closed, False)):
        agent.apply(policy)
        with lab.capture(namespace, "eth0", f"udp and dst host {b}", name=f"heard-{is_heard}") as at_a:
            for _ in range(4):  # whatever b sends takes its address back
                lab.run(lab.host, "nsenter", "--target", engine.pid("a"), "--net", sys.executable, "-c", _STEAL, taken, a)
                lab.run(lab.host, sys.executable, "-c", _SAY, b)
        assert (frames(at_a.path) > 0) is is_heard
    (row,) = (row for row in agent.ask("endpoints") if row["addresses"] == [a])
    drops = [each for each in agent.ask("drops") if each["destination"] == b and each["endpoint"] == row["endpoint"]]
    assert {each["reason"] for each in drops} == {"policy"}


_LISTEN = ("sh", "-c", "while true; do nc -l -p 5432 </dev/null; done")


def connects(engine: Engine, container: str, sibling: str) -> None:
    """Within a second: the sibling's shell needs a moment to listen again after each connection."""
    deadline = time.monotonic() + 1
    while (became := engine.connect(container, sibling, 5432)) != "connected":
        assert time.monotonic() < deadline, became
        time.sleep(0.05)


def test_case_148_traffic_to_a_sibling(agent: RunningAgent, engine: Engine, hook: Sequence[str]) -> None:
    """Enforced it is dropped, with its address in the policy it passes, in audit mode it passes and is reported."""
    engine.run("database", command=_LISTEN)
    sibling = engine.address("database")
    engine.run("web", *hook)
    assert "refused" in engine.connect("web", sibling, 5432)
    agent.apply(f"{POLICY}{sibling}/32\n")
    connects(engine, "web", sibling)
    agent.apply(POLICY)
    engine.podman("rm", "--force", "--time", "0", "web")
    install(agent, engine, "--audit")
    engine.run("web", *hook)
    connects(engine, "web", sibling)
    assert [row["audited"] for row in agent.ask("drops") if row["destination"] == sibling][-1] is True
    uninstall(agent, engine)


def test_case_150_who_sent_it_is_known_behind_one_bridge(agent: RunningAgent, engine: Engine) -> None:
    """What A learned is not B's; it is when B's policy selects the name; with `learn: per-endpoint` when B has asked."""
    a, b = policy_for("a", "{matchName: shared.test}"), policy_for("b", "{matchName: b.test}")
    both = f"{a}---\n{policy_for('b', '{matchName: shared.test}')}"
    agent.apply(f"{a}---\n{b}")
    for learn in ("shared", "per-endpoint"):
        install(agent, engine, "--learn", learn)
        for name in ("a", "b"):
            engine.run(name, "--annotation", f"namegate.label.app={name}")
        assert OTHER in engine.lookup("a", "shared.test", NAME_SERVER)
        assert engine.connect("a", OTHER) == "connected"
        assert "refused" in engine.connect("b", OTHER)
        agent.apply(both)
        if learn == "per-endpoint":
            assert "refused" in engine.connect("b", OTHER)
            assert OTHER in engine.lookup("b", "shared.test", NAME_SERVER)
        assert engine.connect("b", OTHER) == "connected"
        agent.apply(f"{a}---\n{b}")
        engine.podman("rm", "--all", "--force", "--time", "0")
    uninstall(agent, engine)


def test_case_152_guests_behind_a_second_nat(lab: Lab, agent: RunningAgent) -> None:
    """Replies reach the guest that asked, from the address that was asked; before and after a restart of the agent."""
    router = lab.client
    guests = [dataclasses.replace(router, namespace=f"{lab.host.removesuffix('host')}guest{number}") for number in (1, 2)]
    rules = "table ip guests { chain out { type nat hook postrouting priority 100; oifname eth0 masquerade; }; }"
    lab.settle(router.namespace, {"ipv4/ip_forward": 1})
    lab.run(router.namespace, "nft", rules)
    try:
        for number, guest in enumerate(guests, 1):
            lab.run(lab.host, "ip", "netns", "add", guest.namespace)
            batch(
                lab,
                router.namespace,
                f"link add guest{number} type veth peer name eth0 netns {guest.namespace}",
                f"addr add 10.152.{number}.1/24 dev guest{number}",
                f"link set guest{number} up",
            )
            via = f"route add default via 10.152.{number}.1"
            batch(lab, guest.namespace, f"addr add 10.152.{number}.2/24 dev eth0", "link set eth0 up", via)
        assert namegate(agent, "attach", "--netns", router.namespace).returncode == 0
        for moment in ("before", "after"):
            if moment == "after":
                agent.end(signal.SIGTERM)
                agent.start()
            for guest in guests:
                answer = ask(lab, "a.test", client=guest)
                assert (answer.addresses, answer.server) == ((ALLOWED,), NAME_SERVER)
                assert connect(lab, ALLOWED, client=guest) == "connected"
                assert connect(lab, "198.51.100.152", client=guest).endswith("refused")
        assert namegate(agent, "detach", "--netns", router.namespace).returncode == 0
    finally:
        for guest in guests:
            lab.run(lab.host, "ip", "netns", "del", guest.namespace, check=False)
        lab.run(router.namespace, "nft", "delete", "table", "ip", "guests", check=False)
