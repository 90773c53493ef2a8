"""Stories of one agent on a real kernel: names, failures, policies, resolvers. Clients are dig and plain sockets."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.control import ControlError
from tests.netns import pcap
from tests.netns.asking import ask, connect, finish, start_asking
from tests.netns.lab import NAME_SERVERS, Lab
from tests.netns.running import RunningAgent

pytestmark = pytest.mark.root

RECORDS = {
    "a.test.": ["A 198.51.100.11", "AAAA 2001:db8:53::11"],
    "b.test.": ["A 198.51.100.12"],
    "c.test.": ["A 198.51.100.13"],
    "many.test.": [f"A 198.51.100.{host}" for host in range(21, 29)],
    "evil.test.": ["A 198.51.100.66"],
    "rebound.test.": ["A 198.51.100.15", "A 169.254.169.254", "A 10.1.2.3", "A 127.0.0.1"],
    "host.test.": ["A 192.0.2.5"],
    "alias.test.": ["CNAME a.elsewhere.test."],
    "a.elsewhere.test.": ["A 198.51.100.14"],
}
HEAD = "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: p}\n"
POLICY = "a.test:443/tcp\nb.test:443/tcp\nmany.test:443/tcp\nalias.test:443/tcp\nhost.test:443/tcp\nrebound.test:443/tcp\n"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(clients=2, records=RECORDS, ports=(80, 443)) as lab:
        yield lab


@pytest.fixture
def agent(lab: Lab, tmp_path: Path) -> Iterator[RunningAgent]:
    with RunningAgent(lab, POLICY, tmp_path / "agent") as agent:
        yield agent


def drops(agent: RunningAgent, destination: str) -> list[str]:
    """Reasons of the drops toward this address."""
    return [row["reason"] for row in agent.ask("drops") if row["destination"] == destination]


def why(agent: RunningAgent, destination: str) -> str:
    """What the last packet to this address lacked."""
    return str([row["why"] for row in agent.ask("drops") if row["destination"] == destination][-1])


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "address"), [("A", "198.51.100.11"), ("AAAA", "2001:db8:53::11")])
@pytest.mark.parametrize("transport", ["+notcp", "+tcp"])
@pytest.mark.parametrize("server", NAME_SERVERS)
def test_a_name_opens_its_address_and_no_other(
    lab: Lab, agent: RunningAgent, server: str, transport: str, kind: str, address: str
) -> None:
    """Refused before, connected after; another port and an address nobody asked for stay closed."""
    assert connect(lab, address) == "connection refused"
    assert why(agent, address) == "not resolved through the proxy"
    answer = ask(lab, "a.test", kind, transport, server=server)
    assert (answer.status, answer.addresses) == ("NOERROR", (address,))
    assert connect(lab, address) == "connected"
    assert connect(lab, address, 80) == "connection refused"
    assert why(agent, address) == "no rule for this port: a.test."
    assert connect(lab, "198.51.100.12") == "connection refused"
    assert set(drops(agent, address)) == {"policy"}


def test_a_denied_name_is_answered_at_once_and_never_forwarded(lab: Lab, agent: RunningAgent) -> None:
    """NXDOMAIN with Blocked, by either transport and to any server; nothing about it leaves the host."""
    with lab.capture(lab.host, lab.uplink, "port 53", name="denied") as uplink:
        for server in (*NAME_SERVERS, "198.51.100.99"):
            for transport in ("+notcp", "+tcp"):
                answer = ask(lab, "evil.test", "A", transport, server=server)
                assert (answer.status, answer.addresses) == ("NXDOMAIN", ())
                assert answer.error.startswith("15 (Blocked)")
                assert answer.server == server
        assert ask(lab, "a.test").status == "NOERROR"
    questions = [packet.payload for packet in pcap.read(uplink.path).packets]
    assert any(b"\x01a\x04test" in question for question in questions)
    assert not any(b"\x04evil" in question for question in questions)
    assert connect(lab, "198.51.100.66") == "connection refused"
    assert agent.status()["denied"] == 6
    assert agent.status()["counters"]["questions denied"] == 6


def test_an_alias_opens_the_address_for_the_name_that_was_asked(lab: Lab, agent: RunningAgent) -> None:
    """alias.test is a.elsewhere.test: the address is alias.test's; the target asked directly is judged on its own."""
    assert ask(lab, "alias.test").addresses == ("198.51.100.14",)
    assert connect(lab, "198.51.100.14") == "connected"
    assert ask(lab, "a.elsewhere.test").status == "NXDOMAIN"
    assert [row["name"] for row in agent.ask("names") if row["address"] == "198.51.100.14"] == ["alias.test."]


def test_a_server_of_the_clients_own_sees_no_packet(lab: Lab, agent: RunningAgent) -> None:
    """Whatever server is asked, the agent's upstream answers, from the address that was asked."""
    own = "198.51.100.200"
    with lab.capture(lab.host, lab.uplink, f"host {own}", name="own-server") as uplink:
        for transport in ("+notcp", "+tcp"):
            answer = ask(lab, "b.test", "A", transport, server=own)
            assert (answer.status, answer.addresses, answer.server) == ("NOERROR", ("198.51.100.12",), own)
    assert pcap.read(uplink.path).packets == ()
    assert agent.status()["state"] == "enforcing"


def test_what_is_learned_is_forgotten_when_its_lifetime_ends(lab: Lab, tmp_path: Path) -> None:
    """The address closes for new connections, and opens again when the name is asked again."""
    dns = {"ttl-floor": "1s", "ttl-cap": "1s", "keep-while-flow-seen": "1s"}
    with RunningAgent(lab, POLICY, tmp_path / "agent", dns=dns) as agent:
        assert ask(lab, "a.test").status == "NOERROR"
        assert connect(lab, "198.51.100.11") == "connected"
        agent.await_status(lambda status: status["names"] == 0, within_s=10)
        assert connect(lab, "198.51.100.11") == "connection refused"
        assert why(agent, "198.51.100.11") == "expired: a.test."
        assert ask(lab, "a.test").status == "NOERROR"
        assert connect(lab, "198.51.100.11") == "connected"


def test_a_name_cannot_open_the_host_or_the_metadata_service(lab: Lab, agent: RunningAgent) -> None:
    """The records are taken out before the client sees them; what is left of the answer is good (cases 161 to 163)."""
    answer = ask(lab, "rebound.test")
    assert (answer.status, answer.addresses) == ("NOERROR", ("198.51.100.15",))
    assert answer.error.startswith("15 (Blocked)")
    assert connect(lab, "198.51.100.15") == "connected"
    assert connect(lab, lab.client.gateways[0]) == "connection refused"
    assert set(drops(agent, lab.client.gateways[0])) == {"policy"}
    answer = ask(lab, "host.test")
    assert (answer.status, answer.addresses) == ("NOERROR", ())
    assert [row["address"] for row in agent.ask("names")] == ["198.51.100.15"]
    allowed = f"{HEAD.replace('{name: p}', '{name: p, annotations: {namegate/allow-addresses: 10.0.0.0/8}}')}spec:\n"
    agent.apply(
        allowed + "  endpointSelector: {}\n  egress:\n  - toFQDNs: [{matchName: host.test}, {matchName: rebound.test}]\n"
    )
    assert set(ask(lab, "rebound.test").addresses) == {"10.1.2.3", "198.51.100.15"}
    assert ask(lab, "host.test").addresses == ()


# --- writes that fail or are slow ------------------------------------------------------------------------------------------


def test_a_reply_whose_row_cannot_be_written_is_servfail(lab: Lab, agent: RunningAgent) -> None:
    """An injected errno: no address reaches the client, status names row and reason, and once it is gone all is well."""
    agent.inject(fail={"table": "ipcache", "times": 1000, "errno": "EAGAIN"})
    with lab.capture(lab.client.namespace, lab.client.device, "port 53", name="failed-write") as wire:
        answer = ask(lab, "b.test")
        status = agent.status()
    assert (answer.status, answer.addresses) == ("SERVFAIL", ())
    assert answer.error.startswith("14 (Not Ready)")
    assert 900 <= answer.took_ms <= 2500
    assert not any(bytes((198, 51, 100, 12)) in packet.payload for packet in pcap.read(wire.path).packets)
    assert status["state"] == "degraded"
    (failed,) = status["rows_failed"]
    assert (failed["table"], failed["row"], failed["error"]) == (
        "ipcache",
        "1 198.51.100.12/32",
        "Resource temporarily unavailable",
    )
    assert connect(lab, "198.51.100.12") == "connection refused"
    agent.inject(clear=True)
    agent.await_status(lambda now: now["state"] == "enforcing", within_s=5)
    assert ask(lab, "b.test").addresses == ("198.51.100.12",)
    assert connect(lab, "198.51.100.12") == "connected"


def test_one_row_of_eight_that_cannot_be_written_holds_all_eight(lab: Lab, agent: RunningAgent) -> None:
    """All or nothing; another name is not held up."""
    agent.inject(fail={"table": "ipcache", "times": 1000, "errno": "ENOMEM", "key": "198.51.100.25/32"})
    asking = start_asking(lab, "many.test")
    assert ask(lab, "a.test", client=lab.clients[1]).took_ms < 500
    assert finish(asking).status == "SERVFAIL"
    agent.inject(clear=True)
    agent.await_status(lambda now: now["state"] == "enforcing", within_s=5)
    answer = ask(lab, "many.test")
    assert len(answer.addresses) == 8
    assert {connect(lab, address) for address in answer.addresses} == {"connected"}


def test_a_full_map_is_servfail_until_there_is_room(lab: Lab, tmp_path: Path) -> None:
    """A real full map (ENOSPC): the reply fails at once and leaves nothing behind; when a row has gone the next one fits."""
    dns = {"ttl-floor": "2s", "ttl-cap": "2s", "keep-while-flow-seen": "1s"}
    # Both tries have as many rows; the one for IPv4 is to be full after one learned address, so its static rows are made up to
    # those of IPv6 by networks that the policy names.
    static = {version: len(_addresses(lab, version)) + len(lab.clients) for version in (4, 6)}
    static[4] += 1  # the interception device's
    networks = "".join(f"203.0.113.{host}/32:9/udp\n" for host in range(100, 100 + static[6] - static[4]))
    rows = {"ipcache-rows": max(static.values()) + 1}
    with RunningAgent(lab, POLICY + networks, tmp_path / "agent", dns=dns, datapath=rows) as agent:
        assert ask(lab, "a.test").status == "NOERROR"
        answer = ask(lab, "b.test")
        assert (answer.status, answer.addresses) == ("SERVFAIL", ())
        assert "No space left on device" in answer.error
        assert answer.took_ms < 500
        assert connect(lab, "198.51.100.12") == "connection refused"
        assert [row["name"] for row in agent.ask("names")] == ["a.test."]
        agent.await_status(lambda status: status["names"] == 0, within_s=10)
        assert ask(lab, "b.test").addresses == ("198.51.100.12",)
        assert connect(lab, "198.51.100.12") == "connected"


def _addresses(lab: Lab, version: int) -> set[str]:
    """The host's addresses."""
    lines = lab.run(lab.host, "ip", f"-{version}", "-o", "addr").stdout.splitlines()
    return {line.split()[3].partition("/")[0] for line in lines}


def test_two_clients_that_ask_at_the_same_time_both_wait(lab: Lab, agent: RunningAgent) -> None:
    """The write is delayed by 400 ms: neither reply leaves before it, although the second one changes nothing."""
    agent.inject(delay=0.4)
    begun = time.time_ns()
    asking = [start_asking(lab, "b.test", client=client) for client in lab.clients]
    answers = [finish(one) for one in asking]
    agent.inject(delay=0)
    assert [answer.addresses for answer in answers] == [("198.51.100.12",)] * 2
    assert min(answer.took_ms for answer in answers) >= 250
    acknowledged = agent.acknowledged_at_ns()[bytes((198, 51, 100, 12))]
    assert acknowledged - begun >= 400_000_000
    assert {connect(lab, "198.51.100.12", client=client) for client in lab.clients} == {"connected"}


# --- policies ------------------------------------------------------------------------------------------------------------


def test_a_selector_that_comes_later_finds_the_name_and_takes_it_away_when_it_goes(lab: Lab, agent: RunningAgent) -> None:
    """c.test may be asked, but no selector wants it; a policy that selects it opens it with no new question, and closes it."""
    asked_only = f"""\
{HEAD}spec:
  endpointSelector: {{}}
  egress:
    - toEntities: [world]
      toPorts: [{{ports: [{{port: "53", protocol: ANY}}], rules: {{dns: [{{matchPattern: "*"}}]}}}}]
"""
    selected = (
        asked_only
        + """\
    - toFQDNs: [{matchName: c.test}]
      toPorts: [{ports: [{port: "443", protocol: TCP}]}]
"""
    )
    agent.apply(asked_only)
    assert ask(lab, "c.test").addresses == ("198.51.100.13",)
    assert connect(lab, "198.51.100.13") == "connection refused"
    agent.apply(selected)
    assert connect(lab, "198.51.100.13") == "connected"
    agent.apply(asked_only)
    assert connect(lab, "198.51.100.13") == "connection refused"


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ("spec: {endpointSelectr: {}}\n", "endpointSelectr"),
        ("spec: {endpointSelector: {}, egress: 7}\n", "egress"),
        ("spec: {endpointSelector: {}, egress: [{toServices: [{k8sService: {serviceName: x}}]}]}\n", "toServices"),
    ],
)
def test_a_bad_policy_is_refused_with_its_place_and_the_one_in_force_stays(
    lab: Lab, agent: RunningAgent, spec: str, wanted: str
) -> None:
    """File, line, field; a.test goes on as before."""
    assert ask(lab, "a.test").status == "NOERROR"
    with pytest.raises(ControlError) as refused:
        agent.apply(HEAD + spec)
    assert refused.value.exit_code == 1
    sentence = next(line for line in refused.value.sentence.splitlines() if wanted in line)
    place, line = sentence.split(":")[:2]
    assert (place, int(line) > 0) == (str(agent.policy_file), True)
    assert connect(lab, "198.51.100.11") == "connected"
    assert agent.status()["state"] == "enforcing"


def test_a_policy_that_does_not_fit_changes_nothing(lab: Lab, tmp_path: Path) -> None:
    """More rows than one set may have: refused before anything is touched."""
    with RunningAgent(lab, POLICY, tmp_path / "agent", limits={"policy-rows-per-set": 64}) as agent:
        assert ask(lab, "a.test").status == "NOERROR"
        before = agent.ask("policy-map")
        with pytest.raises(ControlError, match="rows"):
            agent.apply("".join(f"n{number}.test:443/tcp\n" for number in range(100)))
        assert agent.ask("policy-map") == before
        assert connect(lab, "198.51.100.11") == "connected"


# --- the host's own resolver ---------------------------------------------------------------------------------------------


@pytest.fixture
def host_resolver(lab: Lab, tmp_path: Path) -> Iterator[str]:
    """dnsmasq on the host's side of the client's veth, forwarding to the lab's name server; gives its address."""
    address = lab.client.gateways[0]
    command = ("dnsmasq", "-k", "-p", "53", "--no-resolv", "--no-hosts", "-C", "/dev/null", "--user=root", "--pid-file=")
    with (tmp_path / "dnsmasq.log").open("w") as log:
        process = lab.start(lab.host, *command, f"--server={NAME_SERVERS[0]}", stdout=log)
    deadline = time.monotonic() + 10
    while lab.run(lab.host, "dig", f"@{address}", "a.test", "+tries=1", "+time=1", "+short", check=False).stdout == "":
        assert process.poll() is None, (tmp_path / "dnsmasq.log").read_text()
        assert time.monotonic() < deadline
    yield address
    process.terminate()
    process.wait(timeout=10)


def test_a_resolver_on_the_host_goes_on_answering(lab: Lab, tmp_path: Path, host_resolver: str) -> None:
    """Asked by the client through the gate, which asks it as its upstream, and by the host beside it, before and after."""

    def asked_by_the_host() -> list[str]:
        said = [
            lab.run(lab.host, "dig", f"@{host_resolver}", "b.test", "+tries=1", "+time=2", "+short", transport).stdout.split()
            for transport in ("+notcp", "+tcp")
        ]
        return [address for addresses in said for address in addresses]

    assert asked_by_the_host() == ["198.51.100.12"] * 2
    with RunningAgent(lab, POLICY, tmp_path / "agent", dns={"upstreams": [host_resolver]}) as agent:
        for transport in ("+notcp", "+tcp"):
            answer = ask(lab, "b.test", "A", transport, server=host_resolver)
            assert (answer.addresses, answer.server) == (("198.51.100.12",), host_resolver)
            assert ask(lab, "evil.test", "A", transport, server=host_resolver).status == "NXDOMAIN"
            assert asked_by_the_host() == ["198.51.100.12"] * 2
        assert connect(lab, "198.51.100.12") == "connected"
        assert agent.status()["state"] == "enforcing"
    assert asked_by_the_host() == ["198.51.100.12"] * 2


# --- status is read from the kernel ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("ip link set ng-gate down", "the device ng-gate is down"),
        ("ip rule del iif ng-gate", "the IPv4 rule `iif ng-gate lookup 2004` is gone"),
        ("ip -6 rule del iif ng-gate", "the IPv6 rule `iif ng-gate lookup 2004` is gone"),
        ("ip route flush table 2004", "the IPv4 route in table 2004 is gone"),
        ("sysctl -qw net.ipv4.conf.ng-gate.rp_filter=1", "rp_filter of ng-gate is not 2"),
        ("ip link del ng-gate", "the device ng-gate is gone"),
        (
            "bpftool map delete pinned PINS/groups key hex 01 00 00 00",
            "groups row 1 in the kernel is not as the agent wrote it",
        ),
        ("bpftool map update pinned PINS/groups key hex 01 0 0 0 value hex 1 0 0 0 0 0 0 0", "groups row 1 in the kernel"),
    ],
)
def test_what_somebody_did_to_the_host_shows_in_status(lab: Lab, agent: RunningAgent, command: str, wanted: str) -> None:
    """Degraded, with the thing that is wrong; before, it was enforcing."""
    assert agent.status()["state"] == "enforcing"
    (tables,) = (agent.pins / "maps").iterdir()
    lab.run(lab.host, *command.replace("PINS", str(tables)).split())
    status = agent.status()
    assert status["state"] == "degraded"
    assert any(reason.startswith(wanted) for reason in status["reasons"]), status["reasons"]


# A client that connected to a resolver before anything was policed, and goes on asking when a file appears.
OLD_CONNECTION = """
import pathlib, socket, struct, sys, time
s = socket.create_connection((sys.argv[1], 53), 5)
print("connected", flush=True)
until = time.monotonic() + 60
while not pathlib.Path(sys.argv[2]).exists() and time.monotonic() < until: time.sleep(0.02)
question = struct.pack(">6H", 7, 0x100, 1, 0, 0, 0) + b"\\4evil\\4test\\0" + struct.pack(">2H", 1, 1)
try:
    s.sendall(struct.pack(">H", len(question)) + question)
    print("answered" if s.recv(2) else "closed")
except OSError as error:
    print(error.strerror or "timed out")
"""


@pytest.mark.usefixtures("host_resolver")
def test_a_connection_to_a_resolver_from_before_the_attachment_asks_nothing_more(lab: Lab, tmp_path: Path) -> None:
    """It is not one of the agent's: the next question on it is answered by a reset."""
    go = tmp_path / "go"
    asking = lab.start(lab.client.namespace, sys.executable, "-c", OLD_CONNECTION, lab.client.gateways[0], go)
    assert asking.stdout is not None
    assert asking.stdout.readline() == "connected\n"
    with RunningAgent(lab, POLICY, tmp_path / "agent", dns={"upstreams": [lab.client.gateways[0]]}):
        go.touch()
        said, _ = asking.communicate(timeout=20)
    assert said == "Connection reset by peer\n"


# --- the command -----------------------------------------------------------------------------------------------------------


def test_every_noun_has_the_same_data_in_each_form(lab: Lab, agent: RunningAgent) -> None:
    """status and every noun as table, json and yaml, by the real command."""
    ask(lab, "a.test")
    connect(lab, "198.51.100.66")
    control = ("--control", str(agent.directory / "run" / "control.sock"))
    for noun in ("status", "endpoints", "names", "patterns", "selectors", "identities", "ipcache", "policy-map", "drops"):
        for form in ("table", "json", "yaml"):
            command = (sys.executable, "-m", "agent", *control, noun, "-o", form)
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
            assert (done.returncode, done.stderr) == (0, ""), (noun, form)
            assert done.stdout.strip()
