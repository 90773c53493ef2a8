"""Bug cases of order, start-up and the central race: the first packet after a lookup, and what was there before the agent."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent.core.types import packed
from tests.netns import pcap
from tests.netns.asking import ask, connect
from tests.netns.flooding import Flood, times_at
from tests.netns.judge import Judgement, judge
from tests.netns.lab import NAME_SERVERS, Client, Lab
from tests.netns.running import RunningAgent
from tests.netns.sending import Conversation, Stream, counts, drop_counts, dropping, reasons, seen

pytestmark = pytest.mark.root

PEERS = ("203.0.113.5", "203.0.113.9", "203.0.113.53")
RECORDS: dict[str, Sequence[str]] = {
    "a.test.": ["A 198.51.100.11"],
    "b.test.": ["A 198.51.100.111"],
    "many.test.": [f"A 198.51.100.{host}" for host in range(1, 9)],
    "audited.test.": ["A 198.51.100.16"],
    "x.blob.test.": ["300 A 198.51.100.19"],
    "both.test.": ["A 198.51.100.28"],
    **{f"n{host}.a.test.": [f"A 198.18.1.{host}"] for host in range(1, 101)},
}
COUNTING_SERVER, OWN_SERVER = "198.51.100.60", "203.0.113.53"
# Answers every question for an A record by an address, the same or the next one each time.
_NAME_SERVER = """
import ipaddress, socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind((sys.argv[1], 53))
address, step = ipaddress.ip_address(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
while True:
    asked, peer = s.recvfrom(4096)
    question = asked[12:asked.index(0, 12) + 5]
    record = bytes.fromhex("c00c000100010000001e0004") + address.packed
    s.sendto(asked[:2] + bytes.fromhex("81800001000100000000") + question + record, peer)
    address += step
"""

# Asks names, so many at once, and sends a SYN to the address of a reply before it looks at anything else. Prints how many
# connected, and how many segments were sent twice. The first answer's owner is a pointer to the question.
_FIRST_SYNS = """
import json, os, resource, select, socket, struct, sys, time
wanted = json.loads(sys.argv[1])
if wanted["cpu"] is not None: os.sched_setaffinity(0, {wanted["cpu"]})
resource.setrlimit(resource.RLIMIT_NOFILE, (8192, 8192))
names, asking, connecting = iter(wanted["names"]), {}, []
poll = select.poll()

def ask(name):
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    question = labels + bytes.fromhex("0000010001")
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.connect((wanted["server"], 53))
    s.send(bytes.fromhex("000101000001000000000000") + question)
    asking[s.fileno()] = s, 12 + len(question)
    poll.register(s, select.POLLIN)

for _, name in zip(range(wanted["at_once"]), names): ask(name)
deadline = time.monotonic() + 60
while asking and time.monotonic() < deadline:
    for fd, _ in poll.poll(1000):
        s, end = asking[fd]
        reply = s.recv(4096)
        syn = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        syn.connect_ex((socket.inet_ntoa(reply[end + 12:end + 16]), 443))
        connecting.append(syn)
        poll.unregister(s)
        del asking[fd]
        s.close()
        for name in names:
            ask(name)
            break
connected = again = 0
for syn in connecting:
    late = not select.select([], [syn], [], 3)[1]
    connected += not late and syn.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    again += struct.unpack_from("I", syn.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 100)[0]
print(json.dumps({"asked": len(connecting), "connected": connected, "again": again}))
"""

# One socket asks a.test and evil.test in turn until its standard input ends; then what it heard: name, rcode, address.
_OLD_SOCKET = """
import json, select, socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.connect((sys.argv[1], 53))
s.settimeout(2)
heard = []
print("asking", flush=True)
while not select.select([sys.stdin], [], [], 0.01)[0]:
    name = ("a", "evil")[len(heard) % 2]
    question = bytes([len(name)]) + name.encode() + b"\\x04test\\0" + bytes.fromhex("00010001")
    s.send(len(heard).to_bytes(2, "big") + bytes.fromhex("01000001000000000000") + question)
    try:
        reply = s.recv(4096)
    except OSError as error:
        heard.append([name, str(error), ""])
        continue
    end = 12 + len(question)
    heard.append([name, reply[3] & 15, socket.inet_ntoa(reply[end + 12:end + 16]) if reply[7] else ""])
print(json.dumps(heard))
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(clients=2, records=RECORDS, ports=(80, 443, 9000)) as lab:
        for peer in PEERS:
            lab.run(lab.internet, "ip", "route", "add", "local", peer, "dev", "lo")
        yield lab


def policy_for(app: str, peer: str) -> str:
    """For the endpoints with this label: what `peer`, an entry of toFQDNs, selects, at port 443."""
    return f"""\
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {{name: {app}}}
spec:
  endpointSelector: {{matchLabels: {{app: {app}}}}}
  egress: [{{toFQDNs: [{peer}], toPorts: [{{ports: [{{port: '443'}}]}}]}}]
"""


def start_name_server(lab: Lab, address: str, first: str, step: int) -> None:
    server = lab.start(lab.internet, sys.executable, "-c", _NAME_SERVER, address, first, str(step))
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"


def process_of(agent: RunningAgent) -> int:
    """Who listens at the control socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(agent.directory / "run" / "control.sock"))
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid: int = struct.unpack("3i", credentials)[0]
    return pid


def command(agent: RunningAgent, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`namegate …`, asked of this agent."""
    control = ("--control", str(agent.directory / "run" / "control.sock"))
    line = (sys.executable, "-m", "agent", *control, *arguments)
    return subprocess.run(line, capture_output=True, text=True, timeout=30, check=False)


def first_syns(
    lab: Lab, names: Sequence[str], *, at_once: int = 1, cpu: int | None = None
) -> tuple[Mapping[str, int], Judgement]:
    """What the client said, and what the captures on both sides say."""
    wanted = json.dumps({"server": NAME_SERVERS[0], "names": names, "at_once": at_once, "cpu": cpu})
    near = lab.capture(lab.client.namespace, lab.client.device, "port 53 or port 443", name="first-near")
    far = lab.capture(lab.host, lab.uplink, "port 443", name="first-far")
    with near, far:
        said = json.loads(lab.run(lab.client.namespace, sys.executable, "-c", _FIRST_SYNS, wanted, timeout_s=90).stdout)
    assert (near.lost, far.lost) == (0, 0), "the captures lost packets"
    return said, judge(pcap.read(near.path), pcap.read(far.path), ports=(443,))


def assert_every_first_syn_arrived(agent: RunningAgent, said: Mapping[str, int], judged: Judgement, count: int) -> None:
    assert said == {"asked": count, "connected": count, "again": 0}
    assert (len(judged.by_address), judged.lost, judged.unresolved) == (count, [], [])
    assert (judged.retransmitted, judged.not_understood) == (0, 0)
    assert judged.early(agent.acknowledged_at_ns()) == []
    with dropping(agent, policy=1):
        assert connect(agent.lab, "203.0.113.9") == "connection refused"


def test_case_001_the_first_syn_after_a_fresh_lookup_arrives(lab: Lab, tmp_path: Path) -> None:
    """1,000 rounds with a new address each: every first SYN, and none is sent twice (decision 8)."""
    start_name_server(lab, COUNTING_SERVER, "198.18.4.1", 1)
    dns = {"upstreams": [COUNTING_SERVER]}
    with RunningAgent(lab, "a.test:443/tcp\n", tmp_path / "agent", dns=dns) as agent:
        said, judged = first_syns(lab, ["a.test"] * 1000)
        assert_every_first_syn_arrived(agent, said, judged, 1000)


def test_case_002_a_reply_waits_for_its_row_and_is_servfail_without_it(lab: Lab, tmp_path: Path) -> None:
    """A slow write holds the reply, a failing one turns it into SERVFAIL without the address, and is counted (8, 9)."""
    with RunningAgent(lab, "a.test:443/tcp\nb.test:443/tcp\n", tmp_path / "agent") as agent:
        agent.inject(delay=0.5)
        answer = ask(lab, "a.test")
        assert (answer.status, answer.addresses) == ("NOERROR", ("198.51.100.11",))
        assert answer.took_ms >= 500
        assert connect(lab, "198.51.100.11") == "connected"
        agent.inject(delay=0, fail={"table": "ipcache", "times": 1000, "errno": "EAGAIN"})
        with lab.capture(lab.client.namespace, lab.client.device, name="2-near") as near:
            answer = ask(lab, "b.test")
        assert (answer.status, answer.addresses) == ("SERVFAIL", ())
        assert answer.error.startswith("14 (Not Ready)")
        packets = pcap.read(near.path).packets
        assert [packet for packet in packets if packed("198.51.100.111") in packet.payload] == []
        assert any(packet.source_port == 53 for packet in packets)
        status = agent.status()
        assert (status["failed"], status["counters"]["replies failed"]) == (1, 1)
        with dropping(agent, policy=1):
            assert connect(lab, "198.51.100.111") == "connection refused"


def test_case_003_an_answer_with_several_addresses_is_released_whole(lab: Lab, tmp_path: Path) -> None:
    """The fifth of eight cannot be written: none of the eight reaches the client; then all, each open (decision 8)."""
    with RunningAgent(lab, "many.test:443/tcp\n", tmp_path / "agent") as agent:
        agent.inject(fail={"table": "ipcache", "times": 1000, "errno": "ENOMEM", "key": "198.51.100.5/32"})
        with lab.capture(lab.client.namespace, lab.client.device, "port 53", name="3-near") as near:
            answer = ask(lab, "many.test")
        assert (answer.status, answer.addresses, answer.error[:2]) == ("SERVFAIL", (), "14")
        given = [record.split()[1] for record in RECORDS["many.test."]]
        payloads = b"".join(packet.payload for packet in pcap.read(near.path).packets)
        assert [address for address in given if packed(address) in payloads] == []
        agent.inject(clear=True)
        agent.await_status(lambda status: status["state"] == "enforcing", within_s=5)
        assert sorted(ask(lab, "many.test").addresses) == given
        assert {connect(lab, address) for address in given} == {"connected"}
        with dropping(agent, policy=1):
            assert connect(lab, "198.51.100.9") == "connection refused"


def test_case_004_a_client_on_the_proxys_own_processor_finds_every_address_open(lab: Lab, tmp_path: Path) -> None:
    """100 lookups at once, each followed by a SYN before the client looks at anything else: all arrive at the first try."""
    with RunningAgent(lab, "*.a.test:443/tcp\n", tmp_path / "agent") as agent:
        cpu = min(os.sched_getaffinity(0))
        for thread in Path(f"/proc/{process_of(agent)}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {cpu})
        said, judged = first_syns(lab, [f"n{host}.a.test" for host in range(1, 101)], at_once=100, cpu=cpu)
        assert_every_first_syn_arrived(agent, said, judged, 100)


def test_case_006_audit_reports_no_packet_that_enforcement_would_let_pass(lab: Lab, tmp_path: Path) -> None:
    """The first SYN after a reply counts as allowed; one without a lookup passes and is told as what would be dropped (23)."""
    client = lab.client
    endpoint = {"interface": client.endpoint, "addresses": list(client.addresses), "audit": True}
    with RunningAgent(lab, "audited.test:443/tcp\n", tmp_path / "agent", endpoints=[endpoint]) as agent:
        assert agent.ask("endpoints")[0]["state"] == "audited: everything passes"
        assert agent.status()["not_enforced"] == [client.endpoint]
        said, judged = first_syns(lab, ["audited.test"])
        assert said == {"asked": 1, "connected": 1, "again": 0}
        assert [len(judged.by_address), judged.lost] == [1, []]
        assert (counts(agent)["pass-audit"], counts(agent)["pass-policy"], agent.ask("drops")) == (0, 1, [])
        assert connect(lab, "203.0.113.9") == "connected"
        assert counts(agent)["pass-audit"] > 0
        told = [(row["destination"], row["audited"], row["why"]) for row in agent.ask("drops")]
        assert told[0] == ("203.0.113.9", True, "not resolved through the proxy")
        assert {destination for destination, _, _ in told} == {"203.0.113.9"}


def test_case_007_nothing_that_is_allowed_is_lost_by_the_start(lab: Lab, tmp_path: Path) -> None:
    """1,000 datagrams a second to an allowed network, from before the attachment until after it (10, 17)."""
    stream = Stream(lab, "203.0.113.5", 9000, 1000)
    with RunningAgent(lab, "203.0.113.0/24\n", tmp_path / "agent") as agent:
        # So that much of the stream, which is echoed, comes after the attachment.
        agent.await_status(lambda _: counts(agent)["pass-flow"] > 2000, within_s=10)
        sent, heard = stream.end()
        assert sent > 1000
        assert heard == sent
        assert drop_counts(agent).total() == 0
        with dropping(agent, policy=1):
            assert connect(lab, "198.51.100.9") == "connection refused"


@pytest.fixture
def stub_resolver(lab: Lab, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A caching resolver on the host's loopback; it asks the lab's name server from the host's own address."""
    line = ("dnsmasq", "-k", "-p", "53", "--no-resolv", "--no-hosts", "-C", "/dev/null", "--user=root", "--pid-file=")
    with (tmp_path / "dnsmasq.log").open("w") as log:
        at = ("--listen-address=127.0.0.1", "--bind-interfaces", f"--server={NAME_SERVERS[0]}")
        process = lab.start(lab.host, *line, *at, stdout=log)
        lab.run(lab.host, "dig", "@127.0.0.1", "a.test", "+tries=20", "+time=1", "+short")
        yield process
        process.terminate()
        process.wait(timeout=10)


def host_itself(lab: Lab) -> Client:
    """The host as a client: what it sends leaves by its uplink."""
    return Client(lab.host, lab.uplink, lab.uplink, ("203.0.113.1", "2001:db8:2::1"), ("203.0.113.2", "2001:db8:2::2"))


def test_case_009_an_answer_from_a_cache_that_was_warm_before_the_start_opens_nothing(
    lab: Lab, tmp_path: Path, stub_resolver: subprocess.Popen[str]
) -> None:
    """The drop says that the address was not resolved through the proxy; once the cache is empty the lookup opens it."""
    host = host_itself(lab)
    uplink = {"interface": lab.uplink, "orientation": "uplink"}
    assert ask(lab, "x.blob.test", client=host, server="127.0.0.1").addresses == ("198.51.100.19",)
    with RunningAgent(lab, "*.blob.test:443/tcp\n", tmp_path / "agent", endpoints=[uplink]) as agent:
        assert ask(lab, "x.blob.test", client=host, server="127.0.0.1").addresses == ("198.51.100.19",)
        with dropping(agent, policy=1):
            assert connect(lab, "198.51.100.19", client=host) == "connection refused"
        assert reasons(agent, "198.51.100.19") == [("policy", "not resolved through the proxy")]
        stub_resolver.send_signal(signal.SIGHUP)  # empties the cache
        assert ask(lab, "x.blob.test", client=host, server="127.0.0.1").addresses == ("198.51.100.19",)
        assert connect(lab, "198.51.100.19", client=host) == "connected"


def test_case_011_a_dns_flow_that_is_older_than_the_agent_does_not_bypass_it(lab: Lab, tmp_path: Path) -> None:
    """From the attachment on the proxy answers the socket's questions; the server that is asked sees none any more (4, 5)."""
    start_name_server(lab, OWN_SERVER, "203.0.113.66", 0)
    with lab.capture(lab.host, lab.uplink, f"udp and dst {OWN_SERVER}", name="11-far") as far:
        asking = lab.start(lab.client.namespace, sys.executable, "-c", _OLD_SOCKET, OWN_SERVER, stdin=subprocess.PIPE)
        assert asking.stdout is not None
        assert asking.stdout.readline() == "asking\n"
        with RunningAgent(lab, "a.test:443/tcp\n", tmp_path / "agent") as agent:
            agent.await_status(lambda status: status["denied"] >= 20, within_s=10)
            said, _ = asking.communicate("end\n", timeout=10)
            assert drop_counts(agent).total() == 0
    heard: list[list[Any]] = json.loads(said)
    own, ours = {"a": [0, "203.0.113.66"], "evil": [0, "203.0.113.66"]}, {"a": [0, "198.51.100.11"], "evil": [3, ""]}
    by_the_server = [rest == own[name] for name, *rest in heard]
    assert [rest == ours[name] for name, *rest in heard] == [not is_own for is_own in by_the_server]
    assert by_the_server == sorted(by_the_server, reverse=True), "an answer of the server after one of the proxy"
    assert len(seen(far)) == sum(by_the_server) > 2


def test_case_012_a_connection_from_before_the_start_is_ended(lab: Lab, tmp_path: Path) -> None:
    """HTTP with keep-alive to an address that no rule allows: its next request is dropped, and the client is told (17, 19)."""
    with Conversation(lab, "203.0.113.9", 80) as talk:
        assert talk.say("GET / HTTP/1.1") == "echoed"
        with RunningAgent(lab, "a.test:443/tcp\n", tmp_path / "agent") as agent:
            with lab.capture(lab.host, lab.uplink, "dst 203.0.113.9", name="12-far") as far, dropping(agent, policy=1):
                assert talk.say("GET /more HTTP/1.1") == "connection reset by peer"
            assert reasons(agent, "203.0.113.9") == [("policy", "not resolved through the proxy")]
            assert seen(far) == []
            assert ask(lab, "a.test").status == "NOERROR"
            assert connect(lab, "198.51.100.11") == "connected"


def test_case_014_an_endpoint_without_a_policy_is_open_and_one_without_its_row_is_not(lab: Lab, tmp_path: Path) -> None:
    """Not selected means open, and status says so; a row that is removed is missed, and what it drops has a reason (16, 22)."""
    with RunningAgent(lab, policy_for("nobody", "{matchName: a.test}"), tmp_path / "agent") as agent:
        assert connect(lab, "203.0.113.9") == "connected"
        said = command(agent, "status")
        assert said.returncode == 0
        assert re.search(r"^not enforced +ep1\n +ep2$", said.stdout, re.MULTILINE), said.stdout
        assert agent.status()["not_enforced"] == ["ep1", "ep2"]
        assert drop_counts(agent).total() == 0
        (tables,) = (agent.pins / "maps").iterdir()
        (key, _), *_ = sorted(rows_of_interfaces(lab, tables))
        lab.run(lab.host, "bpftool", "map", "delete", "pinned", tables / "endpoints", "key", *key.split())
        said = command(agent, "status")
        assert (said.returncode, "degraded" in said.stdout) == (1, True), said.stdout
        assert connect(lab, "203.0.113.9", within_s=0.2) == "timed out"
        assert set(drop_counts(agent)) == {"no-endpoint"}
        assert connect(lab, "203.0.113.9", client=lab.clients[1]) == "connected"


def rows_of_interfaces(lab: Lab, tables: Path) -> list[tuple[str, str]]:
    """Rows of `endpoints` by interface index, as bpftool writes bytes."""
    found = json.loads(lab.run(lab.host, "bpftool", "-j", "map", "dump", "pinned", tables / "endpoints").stdout)
    return [(" ".join(row["key"]), " ".join(row["value"])) for row in found]


def make_late(lab: Lab, number: int) -> float:
    """A veth whose far end is the client's, with addresses of its own; gives when it came to be, in seconds of the captures."""
    name, far, net = f"late{number}", f"far{number}", f"10.9.{number}"
    at = time.time_ns() / 1e9
    lab.run(lab.host, *f"ip link add {name} type veth peer name {far} netns {lab.client.namespace}".split())
    for line in (f"addr add {net}.1/30 dev {name}", f"link set {name} up", f"route add {net}.2/32 dev {name}"):
        lab.run(lab.host, "ip", *line.split())
    for line in (f"addr add {net}.2/30 dev {far}", f"link set {far} up", f"route replace 203.0.113.9/32 via {net}.1 dev {far}"):
        lab.run(lab.client.namespace, "ip", *line.split())
    return at


def test_case_015_an_interface_that_comes_later_is_taken_over_or_told(lab: Lab, tmp_path: Path) -> None:
    """By its pattern, within a second; as long as it is not, status names it and says no (decision 7)."""
    pattern = {"interface": "late*", "labels": {"app": "late"}}
    with RunningAgent(lab, "a.test:443/tcp\n", tmp_path / "agent", endpoints=[pattern]) as agent:
        try:
            far = lab.capture(lab.host, lab.uplink, "dst 203.0.113.9", name="15-far")
            with far, Flood(lab, lab.client.namespace, "203.0.113.9", "far1"):
                at = make_late(lab, 1)
                agent.await_status(lambda status: counts(agent)["policy"] > 0, within_s=5)
            # While the flood lasts the refusals of a second are used up; the SYN is sent again after one.
            assert connect(lab, "203.0.113.9", within_s=3) == "connection refused"
            passed = times_at(far.path, "203.0.113.9")
            print(f"\n{len(passed)} datagrams passed, the last {max(passed, default=at) - at:.3f} s after the making")
            assert max(passed, default=at) - at < 1
            assert set(drop_counts(agent)) <= {"policy", "source", "neighbour-claim"}
            assert ask(lab, "a.test", server="203.0.113.9").status == "NOERROR"
            agent.inject(delay=0.5)
            make_late(lab, 2)
            said = command(agent, "status")
            assert (said.returncode, "late2" in said.stdout) == (1, True), said.stdout
            agent.inject(delay=0)
            agent.await_status(lambda status: status["state"] == "enforcing", within_s=5)
            assert command(agent, "status").returncode == 0
        finally:
            for number in (1, 2):
                lab.run(lab.host, "ip", "link", "del", f"late{number}", check=False)


@pytest.mark.parametrize("without", [[], ["tcx"]], ids=["tcx", "clsact"])
def test_case_017_after_a_restart_the_new_policy_acts_through_one_program_each_way(
    lab: Lab, tmp_path: Path, without: list[str]
) -> None:
    """No filter of the process before is left that judges by what it knew."""
    with RunningAgent(lab, "a.test:443/tcp\nb.test:443/tcp\n", tmp_path / "agent", testing={"without": without}) as agent:
        assert ask(lab, "a.test").status == "NOERROR"
        assert connect(lab, "198.51.100.11") == "connected"
        agent.end(signal.SIGTERM)
        agent.start()
        assert connect(lab, "198.51.100.11") == "connected"
        agent.apply("b.test:443/tcp\n")
        with dropping(agent, policy=1):
            assert connect(lab, "198.51.100.11") == "connection refused"
        assert ask(lab, "b.test").status == "NOERROR"
        assert connect(lab, "198.51.100.111") == "connected"
        attached = {"clsact": filters_on(lab, lab.client.endpoint), "tcx": links_on(lab, lab.client.endpoint)}
        assert attached == {"clsact": [1, 1] if without else [0, 0], "tcx": [0, 0] if without else [1, 1]}


def filters_on(lab: Lab, interface: str) -> list[int]:
    """Programs by tc's filters at ingress and egress."""
    (hooks,) = json.loads(lab.run(lab.host, "bpftool", "-j", "net", "show", "dev", interface).stdout)
    return [sum(hook["kind"] == f"clsact/{way}" for hook in hooks["tc"]) for way in ("ingress", "egress")]


def links_on(lab: Lab, interface: str) -> list[int]:
    """The same of TCX, of which the bpftool of Debian 12 knows nothing: asked of the kernel by bpf(2)."""
    script = "import socket, sys; from agent.datapath import syscall as s; n = socket.if_nametoindex(sys.argv[1]); "
    script += "print(len(s.tcx_programs(n, s.TCX_INGRESS)), len(s.tcx_programs(n, s.TCX_EGRESS)))"
    return [int(count) for count in lab.run(lab.host, sys.executable, "-c", script, interface).stdout.split()]


@pytest.mark.parametrize("comes", ["with-the-start", "while-a-flow-runs"])
def test_case_018_a_selector_of_another_endpoint_closes_nothing(lab: Lab, tmp_path: Path, comes: str) -> None:
    """B's `*` claims the address that A has by name: A's flow loses nothing, and what A needs is there before B's reply (8)."""
    a, b = policy_for("e1", "{matchName: both.test}"), policy_for("e2", "{matchPattern: '*'}")
    other = lab.clients[1]
    first = f"{a}---\n{b}" if comes == "with-the-start" else a
    with RunningAgent(lab, first, tmp_path / "agent") as agent:
        assert ask(lab, "both.test").addresses == ("198.51.100.28",)
        stream = Stream(lab, "198.51.100.28", 443)
        with (
            Conversation(lab, "198.51.100.28") as talk,
            lab.capture(other.namespace, other.device, "port 53", name="18") as near,
        ):
            talk.begin(50)
            agent.apply(f"{a}---\n{b}")
            assert ask(lab, "both.test", client=other).addresses == ("198.51.100.28",)
            assert connect(lab, "198.51.100.28") == "connected"
            assert connect(lab, "198.51.100.28", client=other) == "connected"
            assert talk.echoed() == (50, 0)
            assert talk.say() == "echoed"
        sent, heard = stream.end()
        assert sent == heard > 50
        assert judge(pcap.read(near.path), pcap.Recording(())).early(agent.acknowledged_at_ns()) == []
        with dropping(agent, policy=1):
            assert connect(lab, "198.51.100.9") == "connection refused"
