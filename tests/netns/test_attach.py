"""Interfaces attached while the agent runs, by command and by lease: enforced when the answer comes, let go at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dns.message
import pytest

from agent.control import ControlError
from agent.control.client import Control
from tests.netns import pcap
from tests.netns.asking import ask, connect, exchange
from tests.netns.lab import Client, Lab
from tests.netns.leasing import Lease, LeaseProcess
from tests.netns.running import RunningAgent
from tests.netns.sending import Stream
from tests.netns.test_interfaces import batch, ci

pytestmark = pytest.mark.root

A, B, DENIED = "198.51.100.11", "198.51.100.12", "198.51.100.66"
A6 = "2001:db8:53::11"
# Everybody's: b.test's address is denied to all, and the echo server may be spoken to.
POLICY = f"a.test:443\n192.0.2.0/24:8080\n203.0.113.2/32:7/udp\n!{B}/32\n"
ROWS_MAX = 300


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    records = {"a.test.": [f"A {A}", f"AAAA {A6}"], "b.test.": [f"A {B}"], "c.test.": ["A 198.51.100.13"]}
    with Lab(3, records=records, ports=(7, 443)) as lab:
        yield lab


@pytest.fixture(scope="module")
def module_agent(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    directory = tmp_path_factory.mktemp("agent")
    limits = {"policy-rows-per-set": ROWS_MAX}
    rates = {"questions-per-second": 0}
    with RunningAgent(lab, POLICY, directory, endpoints=[], limits=limits, datapath=rates, is_talkative=False) as agent:
        yield agent


@pytest.fixture
def agent(module_agent: RunningAgent) -> Iterator[RunningAgent]:
    """Running, and with nothing attached before and after."""
    yield module_agent
    for row in module_agent.ask("endpoints"):
        with contextlib.suppress(ControlError):  # it goes by itself at this moment
            module_agent.ask("detach", interface=row["interface"])
    assert kept(module_agent) == {}


def control(agent: RunningAgent) -> Path:
    return agent.directory / "run" / "control.sock"


def kept(agent: RunningAgent) -> dict[str, str]:
    """Interface to owner, as in the file."""
    path = control(agent).with_name("attachments")
    said = json.loads(path.read_text()) if path.exists() else {"attachments": []}
    return {each["endpoint"]["interface"]: each["owner"] for each in said["attachments"]}


def attached(agent: RunningAgent) -> dict[str, int]:
    """Interface to endpoint, of those enforced."""
    return {row["interface"]: row["endpoint"] for row in agent.ask("endpoints") if row["state"] == "enforcing"}


def attach(agent: RunningAgent, client: Client, **arguments: object) -> dict[str, Any]:
    answer: dict[str, Any] = agent.ask("attach", interface=client.endpoint, addresses=list(client.addresses), **arguments)
    return answer


def lease(agent: RunningAgent, client: Client, **arguments: object) -> Lease:
    return Lease(control(agent), client.endpoint, addresses=list(client.addresses), **arguments)


def gone(agent: RunningAgent, interface: str, within_s: float = 5) -> None:
    """Wait until it is neither an endpoint nor in the file."""
    agent.await_status(lambda _: interface not in attached(agent) and interface not in kept(agent), within_s)


def programs(lab: Lab) -> set[str]:
    """Interfaces of the host with programs of ours."""
    (found,) = json.loads(lab.run(lab.host, "bpftool", "-j", "net").stdout)
    return {each["devname"] for each in found["tc"] if each["devname"] not in ("ng-gate", "ng-gate-out")}


@contextlib.contextmanager
def sending(lab: Lab, client: Client) -> Iterator[None]:
    """To what is denied, all the while: fewer than the agent reads drops a second, so that those of later are told at once."""
    stream = Stream(lab, DENIED, 7, 200, client=client)
    yield
    stream.end()


# --- by command ------------------------------------------------------------------------------------------------------------


def test_what_was_attached_is_policed_until_it_is_detached(lab: Lab, agent: RunningAgent) -> None:
    """From the answer on, over a stop and a kill of the agent, and by the next one from its first packet: of datagrams to
    what is denied, all the while, none gets out. An interface that went while there was no agent is not attached any more.
    """
    client = lab.client
    with sending(lab, client):
        with lab.capture(lab.host, lab.uplink, f"host {DENIED}", name="before") as before:
            lab.run(client.namespace, "sleep", "0.05")
        answer = attach(agent, client, labels={"app": "x"})
        with lab.capture(lab.host, lab.uplink, f"host {DENIED}", name="attached") as after:
            assert attached(agent) == {"ep1": answer["endpoint"]}
            batch(lab, lab.host, *ci(lab, "late0", 1))
            agent.ask("attach", interface="late0", addresses=["10.8.1.2"])
            for how in (signal.SIGTERM, signal.SIGKILL):
                agent.end(how)
                batch(lab, lab.host, "link del late0") if how is signal.SIGKILL else None
                agent.start()
                names = {"ep1", "late0"} if how is signal.SIGTERM else {"ep1"}
                assert attached(agent).keys() == kept(agent).keys() == names
            assert attached(agent) == {"ep1": answer["endpoint"]}
            assert ask(lab, "a.test").addresses == (A,)
            assert connect(lab, A) == "connected"
            assert ask(lab, "evil.test").status == "NXDOMAIN"
        agent.ask("detach", interface="ep1")
        assert (attached(agent), kept(agent), programs(lab)) == ({}, {}, set())
        with lab.capture(lab.host, lab.uplink, f"host {DENIED}", name="detached") as detached:
            lab.run(client.namespace, "sleep", "0.05")
    for capture, passes in ((before, True), (after, False), (detached, True)):
        assert bool(pcap.read(capture.path).packets) is passes, capture.path


def test_an_attachment_ends_with_its_interface(lab: Lab, agent: RunningAgent) -> None:
    """Made again under the same name, it is another one, of which nobody said anything; also by a lease that still lives."""
    batch(lab, lab.host, *ci(lab, "late0", 1), *ci(lab, "late1", 2))
    agent.ask("attach", interface="late0", addresses=["10.8.1.2"])
    with Lease(control(agent), "late1", addresses=["10.8.2.2"]):
        assert attached(agent).keys() == kept(agent).keys() == {"late0", "late1"}
        batch(lab, lab.host, "link del late0", "link del late1", *ci(lab, "late0", 1), *ci(lab, "late1", 2))
        attach(agent, lab.clients[2])  # what is there by now has been looked at when this is answered
        assert attached(agent).keys() == kept(agent).keys() == {"ep3"}
    batch(lab, lab.host, "link del late0", "link del late1")


def test_another_name_is_the_same_interface(lab: Lab, agent: RunningAgent) -> None:
    """It is detached by the name it has."""
    batch(lab, lab.host, *ci(lab, "late0", 1))
    answer = agent.ask("attach", interface="late0", addresses=["10.8.1.2"])
    batch(lab, lab.host, "link set late0 down", "link set late0 name late9", "link set late9 up")
    agent.await_status(lambda _: attached(agent) == {"late9": answer["endpoint"]}, within_s=5)
    agent.ask("detach", interface="late9")
    assert (attached(agent), kept(agent)) == ({}, {})
    batch(lab, lab.host, "link del late9")


# --- policies of its own -----------------------------------------------------------------------------------------------------

OTHERS = """
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: own, namespace: elsewhere}
spec:
  endpointSelector: {matchLabels: {app: nobody}}
  enableDefaultDeny: {egress: false, ingress: false}
  egress:
    - toFQDNs: [{matchName: b.test}]
      toPorts: [{ports: [{port: "443"}]}]
"""

_LISTEN = """
import socket
server = socket.create_server(("", 8080))
print("ready", flush=True)
while True: server.accept()[0].close()
"""


def test_policies_of_its_own_are_the_only_ones(lab: Lab, agent: RunningAgent) -> None:
    """Everybody's neither widen nor narrow them, whom they select is of no account, and they close both directions: only the
    host may come in. The one beside it goes on by everybody's.
    """
    one, two, _ = lab.clients
    server = lab.start(one.namespace, "/usr/bin/python3", "-c", _LISTEN)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    host, internet = (dataclasses.replace(one, namespace=namespace) for namespace in (lab.host, lab.internet))
    attach(agent, two)
    attach(agent, one, policies=[{"name": "own.yaml", "text": OTHERS}])
    assert ask(lab, "b.test", client=one).addresses == (B,)
    assert connect(lab, B, client=one) == "connected"
    assert ask(lab, "a.test", client=two).addresses == (A,)
    assert connect(lab, A, client=two) == "connected"
    assert ask(lab, "a.test", client=one).status == "NXDOMAIN"
    assert connect(lab, A, client=one) == "connection refused"
    assert ask(lab, "b.test", client=two).status == "NXDOMAIN"

    def reached_from() -> dict[str, bool]:
        by = {"host": host, "internet": internet, "endpoint": two}
        return {who: connect(lab, one.addresses[0], 8080, client=each, within_s=0.5) == "connected" for who, each in by.items()}

    assert reached_from() == {"host": True, "internet": False, "endpoint": False}
    agent.ask("detach", interface="ep1")
    attach(agent, one, policies=[])
    assert ask(lab, "b.test", client=one).status == "NXDOMAIN"
    assert connect(lab, B, client=one) == "connection refused"
    agent.ask("detach", interface="ep1")
    attach(agent, one)
    assert ask(lab, "a.test", client=one).addresses == (A,)
    assert reached_from() == {"host": True, "internet": True, "endpoint": True}
    server.kill()


def test_a_command_changes_nothing_of_an_endpoint(lab: Lab, agent: RunningAgent) -> None:
    """What is in force stays, and the sentence says what is to be done: other labels could open it, and nobody would notice.
    The same said again is good; so is another thing after `detach`.
    """
    client = lab.client
    attach(agent, client, labels={"app": "x"})
    for said, what in (
        ({}, "labels"),
        ({"labels": {"app": "y"}}, "labels"),
        ({"labels": {"app": "x"}, "audit": True}, "audit"),
        ({"labels": {"app": "x"}, "policies": own("b.test"), "denied": "drop"}, "denied, policies"),
    ):
        with pytest.raises(ControlError) as caught:
            attach(agent, client, **said)
        assert f"ep1 is an endpoint already, with other {what}, " in caught.value.sentence
        assert "`namegate detach ep1` first" in caught.value.sentence
    (row,) = agent.ask("endpoints")
    assert (row["labels"], row["audit"]) == ({"app": "x"}, False)
    assert attach(agent, client, labels={"app": "x"})["endpoint"] == row["endpoint"]
    agent.ask("detach", interface="ep1")
    attach(agent, client, labels={"app": "y"})
    (row,) = agent.ask("endpoints")
    assert row["labels"] == {"app": "y"}


def test_nor_of_one_that_is_configured(tmp_path: Path) -> None:
    """Not under a pattern either. Where no policy closes what was attached, the answer says so."""
    document = """
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: closed}
spec:
  endpointSelector: {matchLabels: {app: x}}
  egress: [{toFQDNs: [{matchName: a.test}]}]
"""
    endpoints = [{"interface": "ep[1]", "labels": {"app": "x"}}]
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab(2, records={"b.test.": [f"A {B}"]}))
        batch(lab, lab.host, *(f"route add {each.addresses[0]}/32 dev {each.endpoint}" for each in lab.clients))
        agent = stack.enter_context(RunningAgent(lab, document, tmp_path, endpoints=endpoints, is_talkative=False))
        with pytest.raises(ControlError, match="ep1 is an endpoint already, with other labels"):
            agent.ask("attach", interface="ep1", labels={"app": "y"})
        assert ask(lab, "b.test").status == "NXDOMAIN"
        assert agent.ask("attach", interface="ep1", labels={"app": "x"})["open"] == []
        assert attach(agent, lab.clients[1], labels={"app": "y"})["open"] == ["ep2"]


# --- leases ------------------------------------------------------------------------------------------------------------------


def test_a_lease_tells_what_was_denied_and_ends_with_a_summary(lab: Lab, agent: RunningAgent) -> None:
    """Questions and packets while it lives, each once; all of them, counted, as the last line."""
    with lease(agent, lab.client, labels={"run": "1"}, policies=[{"name": "--allow", "text": "a.test:443/tcp"}]) as held:
        assert (attached(agent), kept(agent)) == ({"ep1": held.endpoint}, {"ep1": "lease"})
        for _ in range(2):
            assert ask(lab, "a.test").addresses == (A,)
            assert ask(lab, "evil.test").status == "NXDOMAIN"
        fact = held.fact()
        assert (fact["kind"], fact["name"], fact["verdict"], fact["allow"]) == ("question", "evil.test.", "denied", "evil.test")
        assert connect(lab, DENIED) == "connection refused"
        fact = held.fact()
        assert (fact["kind"], fact["destination"], fact["port"]) == ("drop", DENIED, 443)
        assert connect(lab, A) == "connected"
        summary = held.end()
    assert [(each["name"], each["verdict"], each["count"]) for each in summary["names"]] == [
        ("a.test.", "allowed", 2),
        ("evil.test.", "denied", 2),
    ]
    assert [(each["destination"], each["names"]) for each in summary["drops"]] == [(DENIED, [])]
    assert summary["allow"] == ["evil.test", f"{DENIED}:443/tcp"]
    gone(agent, "ep1")


@pytest.mark.parametrize("how", ["close", "kill", "ask and shut down"])
def test_a_lease_ends_with_its_owner(lab: Lab, agent: RunningAgent, tmp_path: Path, how: str) -> None:
    """However that ends; also when it did not wait for the answer."""
    if how == "kill":
        with LeaseProcess(control(agent), tmp_path / "heard", "ep1") as held:
            assert attached(agent).keys() == {"ep1"}
            held.kill()
    else:
        held_here = lease(agent, lab.client)
        if how == "close":
            held_here.close()
        else:
            held_here.end()
            held_here.close()
    gone(agent, "ep1")
    assert programs(lab) == set()


def test_who_stands_still_holds_his_lease_and_loses_lines(lab: Lab, agent: RunningAgent, tmp_path: Path) -> None:
    """A stopped process with thousands of facts due: the agent has no more of them than its bound, and tells how many went."""
    with LeaseProcess(control(agent), tmp_path / "heard", "ep1", addresses=list(lab.client.addresses), policies=[]) as held:
        held.send_signal(signal.SIGSTOP)
        resident = agent.resident_octets()
        rounds = [[dns.message.make_query(f"n{i}-{j}.test.", "A", id=j).to_wire() for j in range(50)] for i in range(100)]
        assert len(exchange(lab, *rounds, within_s=20)) == 5_000
        assert agent.resident_octets() - resident < 16 << 20
        assert attached(agent).keys() == {"ep1"}
        held.send_signal(signal.SIGCONT)
        held.await_line(lambda line: '"lost"' in line)
        ask(lab, "one-more.test")
        held.await_line(lambda line: "one-more.test." in line)


def test_leases_are_kept_over_the_agents_death(lab: Lab, agent: RunningAgent) -> None:
    """All are policed while it is gone and after: said again with the same arguments, a lease keeps its number and what was
    learned; its end does not end those of others, who have five seconds.
    """
    one, two, three = lab.clients
    own = [{"name": "--allow", "text": "a.test:443/tcp"}]
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(lease(agent, each, policies=own)) for each in (one, two, three)]
        numbers = attached(agent)
        assert ask(lab, "a.test").addresses == (A,)
        names = agent.ask("names")
        for each in (one, two):
            stack.enter_context(sending(lab, each))
        with lab.capture(lab.host, lab.uplink, f"host {DENIED}", name="leased") as uplink:
            agent.end(signal.SIGKILL)
            for lost in held:
                lost.await_loss()
            assert connect(lab, A, client=one) == "connected"
            agent.start()
            started = time.monotonic()
            assert attached(agent) == numbers
            again = stack.enter_context(lease(agent, one, policies=own))
            assert again.endpoint == numbers["ep1"]
            assert {row["name"] for row in agent.ask("names")} == {row["name"] for row in names} >= {"a.test."}
            assert connect(lab, A, client=one) == "connected"
            with lease(agent, three, policies=own) as short:
                short.end()
            gone(agent, "ep3")
            assert attached(agent).keys() == kept(agent).keys() == {"ep1", "ep2"}
            for refused in ({"policies": [{"name": "x", "text": "a b"}]}, {"denied": "maybe"}):
                with pytest.raises(ControlError):
                    lease(agent, two, **refused)
            assert attached(agent).keys() == {"ep1", "ep2"}
        assert pcap.read(uplink.path).packets == ()
        gone(agent, "ep2", within_s=8)
        assert time.monotonic() - started < 6.5
        assert attached(agent) == {"ep1": numbers["ep1"]}


def test_an_end_does_not_disturb_who_is_about_to_begin(lab: Lab, agent: RunningAgent) -> None:
    """One lease ends while another one waits for its rows."""
    first = lease(agent, lab.clients[0])
    agent.inject(delay=0.3)
    begun: list[Lease] = []
    beginning = threading.Thread(target=lambda: begun.append(lease(agent, lab.clients[1])))
    beginning.start()
    agent.await_status(lambda _: "ep2" in kept(agent), within_s=5)
    first.close()
    beginning.join(timeout=20)
    agent.inject()
    gone(agent, "ep1")
    assert attached(agent) == {"ep2": begun[0].endpoint}
    begun[0].close()
    gone(agent, "ep2")


def test_leases_that_come_and_go_at_the_same_time(lab: Lab, agent: RunningAgent) -> None:
    """Interfaces are made, leased and removed by five at a time: each lease is answered as if it were alone."""
    failed: list[object] = []

    def come_and_go(number: int) -> None:
        name, peer = f"many{number}", f"p{number}"
        for _ in range(3):
            try:
                lab.run(lab.host, *f"ip link add {name} type veth peer name {peer} netns {lab.client.namespace}".split())
                with Lease(control(agent), name, addresses=[f"10.8.{number}.2"], policies=[], forwarding=True) as held:
                    held.end()
            except Exception as error:  # noqa: BLE001 - told by the test
                failed.append(error)
            finally:
                lab.run(lab.host, "ip", "link", "del", name)

    workers = [threading.Thread(target=come_and_go, args=(number,)) for number in range(10, 15)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert failed == []
    assert agent.status()["state"] == "enforcing"
    agent.await_status(lambda _: kept(agent) == {}, within_s=5)


# --- refused -----------------------------------------------------------------------------------------------------------------

BIG = "\n".join(f"n{number}.test:443/tcp" for number in range(ROWS_MAX + 1))


def own(text: str) -> list[dict[str, str]]:
    return [{"name": "--allow", "text": text}]


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"interface": "nope"}, "there is no interface nope"),
    ({"interface": "ep*"}, "a pattern stands in the configuration"),
    ({"interface": "ng-gate"}, "the agent's own device"),
    ({"interface": "lo"}, "`lo` is no endpoint"),
    ({"interface": "up0"}, "a default route leaves by it"),
    ({"interface": "up0", "lease": True}, "a default route leaves by it"),
    ({"interface": "tun0"}, "carries no Ethernet frames"),
    ({"interface": "tun0", "lease": True, "forwarding": True}, "carries no Ethernet frames"),
    ({"interface": "\U0001f600"}, "there is no interface"),
    ({"interface": "\ud83d"}, "a character in it that no text has"),
    ({"interface": 7}, "interface: "),
    ({}, "`interface` is missing"),
    ({"interface": "ep1", "policies": own("a b")}, "--allow:1: 'a b' has white space in it"),
    ({"interface": "ep1", "policies": own("")}, "there is no policy in the file"),
    ({"interface": "ep1", "policies": own("\ud800")}, "this is no UTF-8 text"),
    ({"interface": "ep1", "policies": "a.test"}, "`policies` is a list"),
    ({"interface": "ep1", "policies": own(BIG)}, f"one set holds {ROWS_MAX}"),
    ({"interface": "ep1", "policies": own(BIG), "lease": True, "forwarding": True}, f"one set holds {ROWS_MAX}"),
    ({"interface": "ep1", "labels": {"a b": "c"}}, "is no label"),
    ({"interface": "ep1", "labels": {"a": "\ud800"}}, "a character in it that no text has"),
    ({"interface": "ep1", "addresses": ["192.0.2.300"]}, "addresses"),
    ({"interface": "ep1", "learn": "never"}, "learn: "),
    ({"interface": "ep1", "forwarding": True}, "`forwarding` lasts as long as a `lease`"),
]


def test_what_is_refused_leaves_nothing(lab: Lab, agent: RunningAgent) -> None:
    """A sentence, and the endpoints, the file, the programs, the kernel's settings and the traffic of others are as before; so
    is an interface that was attached already.
    """
    lab.run(lab.host, "ip", "tuntap", "add", "tun0", "mode", "tun")
    two, three = lab.clients[1:]
    attach(agent, two)
    attach(agent, three, policies=own("c.test"))
    path = control(agent).with_name("attachments")

    def everything() -> tuple[object, ...]:
        switches = lab.run(lab.host, "sh", "-c", "cd /proc/sys/net; cat ipv4/conf/*/forwarding ipv6/conf/*/force_forwarding")
        return attached(agent), path.read_bytes(), programs(lab), switches.stdout

    before = everything()
    stream = Stream(lab, "203.0.113.2", 7, client=two)
    for arguments, sentence in REFUSED:
        with pytest.raises(ControlError) as caught:
            agent.ask("attach", **arguments)
        assert sentence in caught.value.sentence, arguments
    for said in ({"policies": own("a b")}, {"policies": own(BIG), "lease": True}, {"denied": "maybe"}):
        with pytest.raises(ControlError):
            attach(agent, three, **said)
    sent, heard = stream.end()
    assert (sent, heard) == (heard, heard)
    assert everything() == before
    assert ask(lab, "c.test", client=three).status == "NOERROR"
    assert ask(lab, "a.test", client=three).status == "NXDOMAIN"
    assert agent.status()["state"] == "enforcing"
    lab.run(lab.host, "ip", "link", "del", "tun0")


def test_attached_while_the_agent_starts(lab: Lab, agent: RunningAgent) -> None:
    """The answer comes when it is enforced, and not before."""
    agent.end(signal.SIGTERM)
    agent.begin()
    deadline = time.monotonic() + 30
    while True:
        assert time.monotonic() < deadline
        with contextlib.suppress(ControlError):
            answer = Control(control(agent), patience=30).ask("attach", interface="ep1", addresses=list(lab.client.addresses))
            break
    assert isinstance(answer, dict)
    assert attached(agent) == {"ep1": answer["endpoint"]}
    assert connect(lab, DENIED) == "connection refused"


def test_a_file_that_cannot_be_read_refuses_the_start(lab: Lab, agent: RunningAgent) -> None:
    """In one sentence; what it said is policed all the while, and again when it is back."""
    attach(agent, lab.client)
    agent.end(signal.SIGTERM)
    path = control(agent).with_name("attachments")
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    with pytest.raises(Exception, match=r"namegate: .*attachments, which says what was attached, cannot be read"):
        agent.start()
    agent.end(signal.SIGTERM)
    assert connect(lab, DENIED) == "connection refused"
    path.write_bytes(content)
    agent.start()
    assert attached(agent).keys() == {"ep1"}


# --- forwarding ------------------------------------------------------------------------------------------------------------


class Switches:
    """Those of a host that forwards nothing."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._closed = self.now()

    def now(self) -> dict[str, str]:
        paths = [f"ipv4/conf/{name}/forwarding" for name in ("all", "ep1", "up0", "idle0")]
        paths += [f"ipv6/conf/{name}/force_forwarding" for name in ("ep1", "up0", "idle0")]
        script = " ".join(f"/proc/sys/net/{path}" for path in paths)
        values = self._lab.run(self._lab.host, "sh", "-c", f"cat {script} 2>/dev/null").stdout.split()
        return dict(zip(paths, values, strict=False))

    def changed(self) -> set[str]:
        return {path for path, value in self.now().items() if value != self._closed[path]}


TURNED = {f"ipv4/conf/{name}/forwarding" for name in ("ep1", "up0")}
TURNED6 = {f"ipv6/conf/{name}/force_forwarding" for name in ("ep1", "up0")}


@pytest.fixture
def switches(lab: Lab) -> Iterator[Switches]:
    lab.settle(lab.host, {"ipv4/conf/all/forwarding": 0, "ipv6/conf/all/forwarding": 0})
    lab.run(lab.host, "ip", "link", "add", "idle0", "type", "veth", "peer", "name", "idle1")  # no route leaves by it
    try:
        yield Switches(lab)
    finally:
        lab.run(lab.host, "ip", "link", "del", "idle0")
        lab.settle(lab.host, {"ipv4/conf/all/forwarding": 1, "ipv6/conf/all/forwarding": 1})


def expect(condition: Callable[[], bool], within_s: float = 5) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_forwarding_lasts_as_long_as_the_last_lease(lab: Lab, agent: RunningAgent, switches: Switches) -> None:
    """Of the run's own interface and those that routes leave by, also where the agent was another one in between. IPv6 too,
    where the kernel can do it for single interfaces.
    """
    turned = {*TURNED, *TURNED6} & switches.now().keys()
    assert connect(lab, A, within_s=0.3) == "timed out"
    first = lease(agent, lab.client, forwarding=True)
    assert first.answer["ipv6"] is (turned > TURNED)
    assert switches.changed() == turned
    assert ask(lab, "a.test").addresses == (A,)
    assert connect(lab, A) == "connected"
    if first.answer["ipv6"]:
        assert ask(lab, "a.test", "AAAA").addresses == (A6,)
        assert connect(lab, A6) == "connected"
    agent.end(signal.SIGKILL)
    first.await_loss()
    first.close()
    agent.start()
    with lease(agent, lab.client, forwarding=True) as again, lease(agent, lab.clients[1], forwarding=True) as second:
        again.end()
        gone(agent, "ep1")
        assert switches.changed() == turned
        second.end()
    expect(lambda: switches.changed() == set())


def test_forwarding_follows_the_routes(lab: Lab, agent: RunningAgent, switches: Switches) -> None:
    """A host that changes its uplink forwards for a run by the new one; all is put back in the end."""
    turned = {*TURNED, *TURNED6} & switches.now().keys()
    with lease(agent, lab.client, forwarding=True) as held:
        lab.settle(lab.host, {"ipv4/conf/up0/forwarding": 0})
        for line in ("link set idle0 up", "link set idle1 up", "addr add 192.0.2.201/30 dev idle0"):
            lab.run(lab.host, "ip", *line.split())
        lab.run(lab.host, "ip", "route", "add", "203.0.113.128/25", "via", "192.0.2.202", "dev", "idle0")
        expect(lambda: switches.changed() == {*turned, "ipv4/conf/idle0/forwarding"} - {"ipv4/conf/up0/forwarding"})
        held.end()
    expect(lambda: switches.changed() == set())


@pytest.mark.parametrize(
    ("by_somebody", "left"),
    [
        ({"ipv4/conf/up0/forwarding": 0}, set()),
        ({"ipv4/conf/all/forwarding": 1}, {*TURNED, "ipv4/conf/all/forwarding", "ipv4/conf/idle0/forwarding"}),
    ],
)
def test_who_turned_a_switch_meanwhile_has_the_last_word(
    lab: Lab, agent: RunningAgent, switches: Switches, by_somebody: dict[str, int], left: set[str]
) -> None:
    """One that was turned off is not turned again, and a host that forwards now goes on."""
    with lease(agent, lab.client, forwarding=True) as held:
        lab.settle(lab.host, by_somebody)
        held.end()
    gone(agent, "ep1")
    expect(lambda: switches.changed() == left)
