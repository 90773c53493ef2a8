"""Bug cases of DNS: transport, names as clients ask them, upstreams that fail or lie, ways around the proxy.

Themes 5 and 7, and the cases of 2, 3, 14 and 15 that are about questions and take real packets. The rest of them is in
tests/unit/test_bug_cases_*.py. DNS_LONG=1: at length, with the times that the cases state.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import dns.flags
import dns.message
import dns.rcode
import pytest

from agent.core.types import packed
from tests.netns import pcap
from tests.netns.asking import ask, connect, exchange, finish, start_asking
from tests.netns.lab import NAME_SERVERS, Lab
from tests.netns.lookups import Lookups
from tests.netns.resolvers import Liar, Told, start_dnsmasq
from tests.netns.running import RunningAgent
from tests.netns.sending import Conversation, dropping, reasons, rows, seen
from tests.netns.test_bug_cases_start import process_of

pytestmark = pytest.mark.root

IS_LONG: Final = bool(os.environ.get("DNS_LONG"))
JUNK_S: Final = 60 if IS_LONG else 1
FORGED: Final = 100_000

OWN_SERVER = "203.0.113.53"
PEERS = (OWN_SERVER, "203.0.113.67", "203.0.113.72", "203.0.113.74", "203.0.113.120", "203.0.113.9")
FIRST, SECOND, LIAR, ELSEWHERE = "198.51.100.200", "198.51.100.201", "198.51.100.202", "198.51.100.203"
MANY = [f"198.18.6.{host}" for host in range(1, 41)]
# 8 of these at a time, as object stores do it.
POOL = [f"198.18.3.{host}" for host in range(256)] + [f"198.18.4.{host}" for host in range(44)]
NAMES: dict[str, dict[str, Any]] = {
    "a.test.": {"records": ["A 198.51.100.10", "AAAA 2001:db8:53::10"]},
    "denied.test.": {"records": ["A 203.0.113.9"]},
    "secret.evil.test.": {"records": ["A 203.0.113.9"]},
    "other.test.": {"records": ["A 203.0.113.72"]},
    "s3.test.": {"records": [f"A {address}" for address in POOL], "choose": 8, "ttl": 1},
    "n42.test.": {"records": ["A 198.51.100.42"]},
    "svc.": {"records": ["A 198.51.100.52"]},
    "n82.test.": {"udp": {"records": ["A 198.51.100.90"], "tc": True}, "records": ["A 198.51.100.90", "A 198.51.100.91"]},
    "n85.test.": {"records": ["A 198.51.100.94"]},
    "n86.test.": {"records": [f"A {address}" for address in MANY], "udp": {"records": [], "tc": True}},
    "n93.test.": {"records": ["A 198.51.100.96", "AAAA 2001:db8:53::96"]},
    "x.nip.test.": {"records": ["A 192.0.2.5"]},
    "doh.test.": {"records": ["A 198.51.100.53"]},
    "n172.test.": {"records": ["A 198.51.100.172"]},
    "n177.test.": {"records": ["A 198.51.100.177"]},
    "n179.test.": {"records": ["A 198.51.100.179"], "hold": True},
    **{f"n{number}.test.": {"records": [f"A 198.18.9.{number}"]} for number in range(20)},
}
POLICY = "a.test:443/tcp\ngone.test:443/tcp\nn*.test:443/tcp\nsvc:443/tcp\n*.nip.test\ndoh.test:443/tcp\n"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(clients=2, ports=(443,)) as lab:
        for peer in PEERS:
            lab.run(lab.internet, "ip", "route", "add", "local", peer, "dev", "lo")
        yield lab


@pytest.fixture(scope="module")
def other_lab() -> Iterator[Lab]:
    """For cases with an agent of their own: a host has one at a time."""
    with Lab(ports=(443,)) as lab:
        for peer in PEERS:
            lab.run(lab.internet, "ip", "route", "add", "local", peer, "dev", "lo")
        yield lab


@pytest.fixture(scope="module")
def first(lab: Lab) -> Told:
    """It refuses what it was told nothing about, and so the second one is asked."""
    return Told(lab, FIRST, {"n179.test.": NAMES["n179.test."]})


@pytest.fixture(scope="module")
def second(lab: Lab) -> Told:
    return Told(lab, SECOND, NAMES)


@pytest.fixture(scope="module")
def agent(lab: Lab, first: Told, second: Told, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """For cases on addresses of their own; counters and drops are compared with those of before."""
    dns = {"upstreams": [FIRST, SECOND]}
    with RunningAgent(lab, POLICY, tmp_path_factory.mktemp("dns") / "agent", dns=dns) as agent:
        yield agent


def query(name: str, kind: str = "A", number: int = 1) -> bytes:
    message = dns.message.make_query(name, kind, use_edns=0)
    message.id = number
    return message.to_wire()


def count(agent: RunningAgent, *counters: str) -> int:
    counted = agent.status()["counters"]
    return sum(counted.get(counter, 0) for counter in counters)


# --- theme 2: replies ------------------------------------------------------------------------------------------------

# For so many seconds: every millisecond a datagram of junk, or one that says it is a reply; every 20 ms a question. Prints of
# each kind how many were sent and how many replies came; of the questions, how many were answered with no error.
_JUNK = """
import collections, json, random, select, socket, sys, time
server, seconds = sys.argv[1], float(sys.argv[2])
chance = random.Random(1)

def opened():
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.connect((server, 53))
    s.setblocking(False)
    return s

kinds = {kind: opened() for kind in ("junk", "reply", "question")}
sent, heard, good = collections.Counter(), collections.Counter(), 0

def question(number, flags):
    label = b"n%d" % (number % 20)
    head = number.to_bytes(2, "big") + flags + bytes((0, 1)) + bytes(6)
    return head + bytes([len(label)]) + label + b"\\x04test" + bytes.fromhex("0000010001")

def junk():
    whole = question(chance.randrange(65536), bytes((chance.randrange(128), chance.randrange(256))))
    changed = bytearray(whole)
    changed[chance.randrange(2, len(whole))] = chance.randrange(256)
    changed[2] &= 127
    return chance.choice((chance.randbytes(chance.randrange(4097)), whole[:chance.randrange(len(whole))], bytes(changed)))

def hear():
    global good
    for kind, s in kinds.items():
        while select.select([s], [], [], 0)[0]:
            try: reply = s.recv(65535)
            except OSError: continue
            heard[kind] += 1
            good += kind == "question" and reply[3] & 15 == 0 and reply[7] == 1

def send(kind, message):
    try: kinds[kind].send(message)
    except OSError: return
    sent[kind] += 1

begun, n = time.monotonic(), 0
while time.monotonic() < begun + seconds:
    n += 1
    time.sleep(max(0, begun + n / 1000 - time.monotonic()))
    if n % 20 == 0: send("question", question(n & 0xFFFF, bytes((1, 0))))
    elif n % 3: send("junk", junk())
    else: send("reply", question(n & 0xFFFF, bytes((0x81, 0x80))))
    hear()
deadline = time.monotonic() + 4
while heard["question"] < sent["question"] and time.monotonic() < deadline:
    time.sleep(0.01)
    hear()
print(json.dumps({"sent": sent, "heard": heard, "good": good}))
"""


def test_case_035_junk_toward_port_53_disturbs_nobody(lab: Lab, agent: RunningAgent) -> None:
    """Random octets, cut and altered questions, messages that say they are replies: never more answers than questions, none to
    a reply, every question between them is answered, and the memory stays."""
    assert {ask(lab, f"n{number}.test").status for number in range(20)} == {"NOERROR"}
    before = memory_kib(agent)
    said = lab.run(
        lab.client.namespace, sys.executable, "-c", _JUNK, NAME_SERVERS[0], str(JUNK_S), timeout_s=JUNK_S + 20
    ).stdout
    outcome = json.loads(said)
    sent, heard = outcome["sent"], outcome["heard"]
    print(f"\n{outcome}, memory {before} KiB before, {memory_kib(agent)} after")
    assert min(sent["junk"], sent["reply"]) > 200 * JUNK_S
    assert 0 < heard["junk"] <= sent["junk"]
    assert heard.get("reply", 0) == 0
    assert outcome["good"] == heard["question"] == sent["question"] >= 40 * JUNK_S
    assert memory_kib(agent) < before + 16_384, "some 7 MiB are taken once, by the first of it"
    assert agent.status()["state"] == "enforcing"


def memory_kib(agent: RunningAgent) -> int:
    """Resident memory of the agent."""
    found = re.search(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{process_of(agent)}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


# Asks for a name and connects to one of its addresses, as often as said; prints how many rounds ended in a connection.
_ROUNDS = """
import random, socket, sys
import dns.message
server, name, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.connect((server, 53))
s.settimeout(5)
connected = 0
for _ in range(rounds):
    s.send(dns.message.make_query(name, "A").to_wire())
    answer = dns.message.from_wire(s.recv(65535)).answer
    address = random.choice([record.address for rrset in answer for record in rrset])
    with socket.create_connection((address, 443), timeout=0.9):
        connected += 1
print(connected)
"""


def test_case_037_a_name_with_other_addresses_each_time(other_lab: Lab, tmp_path: Path) -> None:
    """8 of 300 at random, a hundred times: each answer is good, answers add up, and at last the name holds none (14, 15)."""
    lab = other_lab
    Told(lab, SECOND, {"s3.test.": NAMES["s3.test."]})
    dns = {"upstreams": [SECOND], "ttl-floor": "1s", "keep-while-flow-seen": "1s"}
    with RunningAgent(lab, "s3.test:443/tcp\n", tmp_path / "agent", dns=dns) as agent:
        said = lab.run(lab.client.namespace, sys.executable, "-c", _ROUNDS, NAME_SERVERS[0], "s3.test", "100").stdout
        assert said == "100\n"
        held = {row["address"] for row in agent.ask("names")}
        assert 8 < len(held) <= len(POOL)
        assert held <= set(POOL)
        agent.await_status(lambda status: status["names"] == 0, within_s=15)
        with dropping(agent, policy=1):
            assert connect(lab, min(held)) == "connection refused"


def test_case_040_a_name_that_does_not_resolve_hinders_no_other(
    lab: Lab, agent: RunningAgent, first: Told, second: Told
) -> None:
    """Negative answers are passed on as they are; the name is there without an address, and the others work."""
    for rcode in ("NXDOMAIN", "SERVFAIL"):
        first.tell({"gone.test.": {"rcode": rcode}})
        second.tell({"gone.test.": {"rcode": rcode}})
        answer = ask(lab, "gone.test")
        assert (answer.status, answer.addresses, answer.error) == (rcode, (), "")
        assert ask(lab, "n42.test").addresses == ("198.51.100.42",)
        assert connect(lab, "198.51.100.42") == "connected"
    (row,) = [row for row in agent.ask("selectors") if row["selector"] == "fqdn:gone.test."]
    assert row["addresses"] == []
    assert "gone.test." not in {row["name"] for row in agent.ask("names")}


# --- theme 3: names --------------------------------------------------------------------------------------------------


def test_case_046_a_resolver_on_the_hosts_side_of_the_link_is_intercepted_too(other_lab: Lab, tmp_path: Path) -> None:
    """Also when it is the agent's own upstream; to the host itself it goes on answering (4, 5)."""
    lab = other_lab
    resolver = lab.client.gateways[0]
    start_dnsmasq(lab, resolver, "--address=/x.a.test/198.51.100.46", "--address=/evil.test/203.0.113.9", namespace=lab.host)
    with RunningAgent(lab, "*.a.test:443/tcp\n", tmp_path / "agent", dns={"upstreams": [resolver]}) as agent:
        answer = ask(lab, "x.a.test", server=resolver)
        assert (answer.addresses, answer.server) == (("198.51.100.46",), resolver)
        assert ask(lab, "evil.test", server=resolver).status == "NXDOMAIN"
        assert [row["name"] for row in agent.ask("names")] == ["x.a.test."]
        assert connect(lab, "198.51.100.46") == "connected"
        said = lab.run(lab.host, "dig", f"@{resolver}", "evil.test", "+short", "+time=2")
        assert said.stdout == "203.0.113.9\n"
        with dropping(agent, policy=1):
            assert connect(lab, "203.0.113.9") == "connection refused"


def getent(lab: Lab, resolv_conf: str, name: str) -> tuple[str, float]:
    """What glibc finds for this name in a client with this resolv.conf, and the seconds it took."""
    resolver = lab.directory / "resolv.conf"
    resolver.write_text(resolv_conf)
    own_file = (
        'mount --bind "$0" /etc/resolv.conf && exec getent -s dns ahostsv4 "$1"'  # seen by this process alone: unshare(1)
    )
    begun = time.monotonic()
    done = lab.run(lab.client.namespace, "unshare", "--mount", "sh", "-c", own_file, resolver, name, check=False)
    return done.stdout, time.monotonic() - begun


def test_case_052_a_search_list_goes_on_after_a_denied_name(lab: Lab, agent: RunningAgent) -> None:
    """svc.corp.test is NXDOMAIN with Blocked and not forwarded, so the library asks for svc (5)."""
    before = count(agent, "questions denied")
    with lab.capture(lab.host, lab.uplink, "port 53", name="52-far") as far:
        found, _ = getent(lab, f"search corp.test\nnameserver {NAME_SERVERS[0]}\n", "svc")
    assert "198.51.100.52" in found
    assert count(agent, "questions denied") == before + 1
    assert [packet for packet in seen(far) if b"\x04corp" in packet.payload] == []
    assert [packet for packet in seen(far) if b"\x03svc\x00" in packet.payload]
    answer = ask(lab, "svc.corp.test")
    assert (answer.status, answer.error[:12]) == ("NXDOMAIN", "15 (Blocked)")
    assert connect(lab, "198.51.100.52") == "connected"


def test_case_053_a_denied_name_fails_at_once(lab: Lab, agent: RunningAgent) -> None:
    """In under a second, with three name servers to try."""
    servers = "".join(f"nameserver {server}\n" for server in (*NAME_SERVERS, OWN_SERVER))
    found, seconds = getent(lab, servers, "denied.test")
    assert (found, seconds < 1) == ("", True), seconds
    found, _ = getent(lab, servers, "a.test")
    assert "198.51.100.10" in found


# --- theme 5: transport ----------------------------------------------------------------------------------------------


def test_case_082_what_the_repetition_over_tcp_says_is_learned(lab: Lab, agent: RunningAgent) -> None:
    """The reply by UDP is cut: no address of it reaches the client; all that TCP brings are open."""
    (cut,) = exchange(lab, [query("n82.test")])
    message = dns.message.from_wire(cut)
    assert (bool(message.flags & dns.flags.TC), message.answer) == (True, [])
    with dropping(agent, policy=1):
        assert connect(lab, "198.51.100.91") == "connection refused"
    assert sorted(ask(lab, "n82.test", "A", "+notcp").addresses) == ["198.51.100.90", "198.51.100.91"]
    assert {connect(lab, address) for address in ("198.51.100.90", "198.51.100.91")} == {"connected"}


def test_case_084_dns_over_tcp_is_judged_too(lab: Lab, agent: RunningAgent) -> None:
    """By whatever server is asked; the denied answer comes from there, and nothing about the name leaves (4, 5)."""
    with lab.capture(lab.host, lab.uplink, "port 53", name="84-far") as far:
        for server in (NAME_SERVERS[0], OWN_SERVER):
            answer = ask(lab, "denied.test", "A", "+tcp", server=server)
            assert (answer.status, answer.addresses, answer.server) == ("NXDOMAIN", (), server)
            assert answer.error.startswith("15 (Blocked)")
        assert ask(lab, "a.test", "A", "+tcp", server=OWN_SERVER).addresses == ("198.51.100.10",)
    assert [packet for packet in seen(far) if b"denied" in packet.payload] == []
    assert {packet.destination_port for packet in seen(far, destination=SECOND)} == {53}
    assert seen(far, destination=OWN_SERVER) == []


# Sends so many octets to an echo server and reads them back, 64 KiB at a time; prints the seconds.
_BULK = """
import socket, sys, time
address, octets, chunk = sys.argv[1], int(sys.argv[2]), bytes(65536)
s = socket.create_connection((address, 443), timeout=10)
begun = time.monotonic()
for _ in range(octets // len(chunk)):
    s.sendall(chunk)
    heard = 0
    while heard < len(chunk): heard += len(s.recv(len(chunk)))
print(time.monotonic() - begun)
"""


def test_case_085_only_port_53_reaches_the_proxy(lab: Lab, agent: RunningAgent) -> None:
    """A transfer beside DNS over TCP is not turned round, and is as fast as under a policy that turns nothing round."""

    def transfer() -> float:
        return float(lab.run(lab.client.namespace, sys.executable, "-c", _BULK, "198.51.100.94", str(16 << 20)).stdout)

    agent.apply("198.51.100.94/32:443/tcp\n")
    try:
        without = [transfer() for _ in range(3)]
        agent.apply(POLICY)
        assert ask(lab, "n85.test", "A", "+tcp").addresses == ("198.51.100.94",)
        gate = lab.capture(lab.host, "ng-gate", "tcp", name="85-gate")
        with gate:
            asking = [start_asking(lab, "n85.test", "A", "+tcp") for _ in range(5)]
            beside = [transfer() for _ in range(3)]
            assert {finish(each).addresses for each in asking} == {("198.51.100.94",)}
    finally:
        agent.apply(POLICY)
    ports = [{packet.source_port, packet.destination_port} for packet in seen(gate)]
    assert ports
    assert all(53 in pair and 443 not in pair for pair in ports)
    print(f"\n16 MiB there and back: {min(without):.3f} s without, {min(beside):.3f} s beside questions")
    assert min(beside) < 2 * min(without)


def test_case_086_a_question_goes_upstream_by_the_transport_it_came_by(lab: Lab, agent: RunningAgent, second: Told) -> None:
    """Over TCP the answer is complete, whatever UDP would have said."""
    before = second.asked()
    answer = ask(lab, "n86.test", "A", "+tcp")
    assert sorted(answer.addresses) == sorted(MANY)
    (reply,) = exchange(lab, [query("n86.test")], transport="tcp")
    assert not dns.message.from_wire(reply).flags & dns.flags.TC
    asked = {question: times - before.get(question, 0) for question, times in second.asked().items() if "n86" in question}
    assert asked == {"tcp n86.test. A": 2}
    assert {connect(lab, address) for address in (MANY[0], MANY[-1])} == {"connected"}


def test_case_093_a_connection_stays_open_between_its_questions(lab: Lab, agent: RunningAgent) -> None:
    """A and AAAA back to back are two answers; a third question on the same connection is answered too."""
    replies = exchange(
        lab, [query("n93.test", "A", 1), query("n93.test", "AAAA", 2)], [query("n93.test", "A", 3)], transport="tcp"
    )
    messages = {message.id: message for message in map(dns.message.from_wire, replies)}
    found = {number: [record.to_text() for rrset in message.answer for record in rrset] for number, message in messages.items()}
    assert found == {1: ["198.51.100.96"], 2: ["2001:db8:53::96"], 3: ["198.51.100.96"]}
    assert replies[2][:2] == b"\x00\x03"


# Opens a connection on which it sends an octet of a message each second, and then idle ones; at the end of standard input, or
# when all are closed if the second argument says so, prints how many are still open, and the seconds since they were opened.
_IDLE = """
import json, select, socket, sys, time
server, idle, is_patient = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1"
slow = socket.create_connection((server, 53), timeout=5)
slow.send(bytes(1))
held = [slow] + [socket.create_connection((server, 53), timeout=5) for _ in range(idle)]
for s in held: s.setblocking(False)
begun = sent_at = time.monotonic()
print("open", flush=True)

def is_open(s):
    try: return s.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError: return True
    except OSError: return False

while True:
    if time.monotonic() > sent_at + 1:
        sent_at += 1
        try: slow.send(bytes(1))
        except OSError: pass
    still = sum(map(is_open, held))
    if is_patient and not still or not is_patient and select.select([sys.stdin], [], [], 0)[0] or time.monotonic() > begun + 60:
        break
    time.sleep(0.02)
print(json.dumps([still, is_open(slow), time.monotonic() - begun]))
"""


def test_case_095_idle_and_slow_connections_exhaust_nothing(lab: Lab, agent: RunningAgent) -> None:
    """200 idle ones and one that sends an octet a second, of one endpoint: held to its bound; the other is served as ever."""
    before = count(agent, "connections idle", "connections refused")
    script = (sys.executable, "-c", _IDLE, NAME_SERVERS[0], "200", "1" if IS_LONG else "0")
    idle = lab.start(lab.client.namespace, *script, stdin=subprocess.PIPE)
    assert idle.stdout is not None
    assert idle.stdout.readline() == "open\n"
    other = lab.clients[1]
    with Lookups(lab, 20, 50, client=other) as lookups:
        by_tcp = [ask(lab, f"n{number % 20}.test", "A", "+tcp", client=other) for number in range(50)]
    assert count(agent, "connections idle", "connections refused") >= before + 201 - 64
    still, slow_is_open, seconds = json.loads(idle.communicate("end\n", timeout=70)[0])
    assert {answer.status for answer in by_tcp} == {"NOERROR"}
    assert max(answer.took_ms for answer in by_tcp) < 1_000
    assert statistics.median(answer.took_ms for answer in by_tcp) < 100
    assert dict(lookups.looked.codes) == {"0": lookups.looked.sent}
    assert lookups.looked.took[-1] < 1
    assert (still <= 64, slow_is_open) == (True, False)
    if IS_LONG:
        assert (still, seconds < 15) == (0, True), "unfinished messages and idle connections end at a deadline"


# --- theme 14: ways around -------------------------------------------------------------------------------------------


def test_case_161_a_pattern_opens_no_address_of_the_host(lab: Lab, agent: RunningAgent) -> None:
    """The record is taken out and logged, nothing is learned, the host's services stay closed (13)."""
    host = lab.client.gateways[0]
    answer = ask(lab, "x.nip.test")
    assert (answer.status, answer.addresses, answer.error[:12]) == ("NOERROR", (), "15 (Blocked)")
    assert "x.nip.test." not in {row["name"] for row in agent.ask("names")}
    with dropping(agent, policy=1):
        assert connect(lab, host, 5432) == "connection refused"
    assert [line for line in agent.log.read_text().splitlines() if " guard " in line and host in line]


def test_case_167_a_forged_reply_teaches_nothing(other_lab: Lab, tmp_path: Path) -> None:
    """100,000 of them before and after the real one, wrong in id, question, port or address, or guessed: all are ignored and
    counted, the real one is used, and the forged address is neither learned nor open (11)."""
    lab = other_lab
    right, wrong = "198.51.100.167", "203.0.113.67"
    with RunningAgent(lab, "a.test:443/tcp\n", tmp_path / "agent", dns={"upstreams": [LIAR]}) as agent:
        liar = Liar(lab, LIAR, elsewhere=ELSEWHERE, right=right, wrong=wrong, count=FORGED)
        before = udp_counts(lab)
        with lab.capture(lab.client.namespace, lab.client.device, "port 53", name="167-near") as near:
            answer = ask(lab, "a.test")
            sent = liar.sent()
        assert (answer.status, answer.addresses) == ("NOERROR", (right,))
        assert sum(sent.values()) == FORGED
        counted = agent.status()["counters"]
        by_kernel = udp_counts(lab) - before
        print(f"\n{sent}\nlate {counted['late']}, mismatched {counted['mismatched']}, by the kernel {dict(by_kernel)}")
        # A busy machine loses some on the way.
        assert min(counted["late"], counted["mismatched"]) > 1_000
        heard = counted["late"] + counted["mismatched"] + by_kernel["RcvbufErrors"]
        assert heard > 0.95 * sum(sent[way] for way in ("wrong id", "wrong question", "no reply", "no question"))
        assert by_kernel["NoPorts"] > 0.95 * sum(sent[way] for way in ("wrong port", "wrong address", "any port"))
        assert [packet for packet in seen(near) if packed(wrong) in packet.payload] == []
        assert [(row["name"], row["address"]) for row in agent.ask("names")] == [("a.test.", right)]
        in_kernel = [key for key, _ in rows(agent, "ipcache4")]
        assert [packed(right) in key for key in in_kernel].count(True) == 1
        assert [key for key in in_kernel if packed(wrong) in key] == []
        assert connect(lab, right) == "connected"
        with dropping(agent, policy=1):
            assert connect(lab, wrong) == "connection refused"


def udp_counts(lab: Lab) -> Counter[str]:
    """Of the host: datagrams that no socket takes (NoPorts), and those for which a socket has no room (RcvbufErrors), …"""
    lines = lab.run(lab.host, "grep", "^Udp:", "/proc/net/snmp").stdout.splitlines()
    keys, values = (line.split()[1:] for line in lines)
    return Counter(dict(zip(keys, map(int, values), strict=True)))


def test_case_169_an_address_learned_elsewhere_stays_closed(lab: Lab, agent: RunningAgent) -> None:
    """A client that resolves through a host it may talk to, such as DoH, gains nothing: no list of such hosts is needed."""
    assert ask(lab, "doh.test").addresses == ("198.51.100.53",)
    with Conversation(lab, "198.51.100.53") as talk:
        assert talk.say("what is the address of the other one?") == "echoed"
        with dropping(agent, policy=1):
            assert connect(lab, "203.0.113.120") == "connection refused"
    assert reasons(agent, "203.0.113.120") == [("policy", "not resolved through the proxy")]


KINDS: Final = (
    *("A", "NS", "CNAME", "SOA", "NULL", "PTR", "HINFO", "MX", "TXT", "AAAA", "SRV", "NAPTR", "DNAME", "DS", "DNSKEY"),
    *("TLSA", "SVCB", "HTTPS", "CAA", "ANY"),
)


def test_case_170_questions_for_denied_names_never_leave(lab: Lab, agent: RunningAgent) -> None:
    """20 types, both transports, both families, various servers: nothing about the name is seen on the upstream's side (5)."""
    asked = [query("secret.evil.test", kind, number) for number, kind in enumerate(KINDS)]
    with lab.capture(lab.host, lab.uplink, name="170-far") as far:
        for server in (*NAME_SERVERS, OWN_SERVER, "2001:db8:53::77"):
            for transport in ("udp", "tcp"):
                replies = [dns.message.from_wire(reply) for reply in exchange(lab, asked, server=server, transport=transport)]
                assert {reply.rcode() for reply in replies} == {dns.rcode.NXDOMAIN}
                assert sorted(reply.id for reply in replies) == list(range(len(KINDS)))
        assert ask(lab, "a.test").status == "NOERROR"
    packets = pcap.read(far.path).packets
    assert any(b"\x01a\x04test" in packet.payload for packet in packets)
    assert [packet for packet in packets if b"secret" in packet.payload.lower()] == []


# Resolves the names that come on its socket in the file system, one a datagram, as a resolver of the host's own.
_HOSTS_RESOLVER = """
import os, socket, sys
import dns.message, dns.query
path, server = sys.argv[1:]
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
s.bind(path)
print("ready", flush=True)
while True:
    name, asker = s.recvfrom(256)
    answer = dns.query.udp(dns.message.make_query(name.decode(), "A"), server, timeout=2).answer
    s.sendto(answer[0][0].address.encode(), asker)
"""
_ASK_HOSTS_RESOLVER = """
import socket, sys
path, *names = sys.argv[1:]
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
s.bind(path + ".client")
s.settimeout(5)
for name in names:
    s.sendto(name.encode(), path)
    print(s.recv(64).decode())
"""


def test_case_172_a_resolver_socket_of_the_host_opens_nothing(lab: Lab, agent: RunningAgent, second: Told) -> None:
    """It crosses namespaces without a packet: what it says was not resolved through the proxy. The documentation warns."""
    path = str(lab.directory / "resolver")
    resolver = lab.start(lab.host, sys.executable, "-c", _HOSTS_RESOLVER, path, SECOND)
    assert resolver.stdout is not None
    assert resolver.stdout.readline() == "ready\n"
    said = lab.run(lab.client.namespace, sys.executable, "-c", _ASK_HOSTS_RESOLVER, path, "n172.test", "other.test")
    assert said.stdout.split() == ["198.51.100.172", "203.0.113.72"]
    for address in said.stdout.split():
        with dropping(agent, policy=1):
            assert connect(lab, address) == "connection refused"
        assert reasons(agent, address) == [("policy", "not resolved through the proxy")]
    assert ask(lab, "n172.test").addresses == ("198.51.100.172",)
    assert connect(lab, "198.51.100.172") == "connected"
    assert "The socket of a resolver of the host" in (Path(__file__).parents[2] / "README.md").read_text()


_TLS = """
import socket, ssl, sys
context = ssl._create_unverified_context()
try:
    with socket.create_connection((sys.argv[1], 443), timeout=2) as s:
        print("connected", flush=True)
        context.wrap_socket(s, server_hostname=sys.argv[2])
except OSError as error:
    print(error.strerror.lower())
"""


def test_case_174_a_name_in_the_handshake_opens_nothing(lab: Lab, agent: RunningAgent) -> None:
    """The SYN is dropped: the client does not get so far as to say an allowed name to an address of its own choice."""
    address = "203.0.113.74"
    with lab.capture(lab.host, lab.uplink, f"host {address}", name="174-far") as far, dropping(agent, policy=1):
        said = lab.run(lab.client.namespace, sys.executable, "-c", _TLS, address, "a.test").stdout
    assert said == "connection refused\n"
    assert seen(far) == []
    assert reasons(agent, address) == [("policy", "not resolved through the proxy")]


# --- theme 15: upstreams ---------------------------------------------------------------------------------------------


def test_case_177_servfail_of_one_upstream_is_not_final(lab: Lab, agent: RunningAgent, first: Told) -> None:
    """The next one is asked, by both transports."""
    first.tell({"n177.test.": {"rcode": "SERVFAIL"}})
    for transport in ("+notcp", "+tcp"):
        answer = ask(lab, "n177.test", "A", transport)
        assert (answer.status, answer.addresses) == ("NOERROR", ("198.51.100.177",))
        assert answer.took_ms < 1_000
    assert {question for question in first.asked() if "n177" in question} == {"udp n177.test. A", "tcp n177.test. A"}
    assert connect(lab, "198.51.100.177") == "connected"


def test_case_179_a_reply_after_the_proxy_gave_up(lab: Lab, agent: RunningAgent, first: Told, second: Told) -> None:
    """SERVFAIL before 4 s; what both upstreams say later is counted, neither sent nor learned (11)."""
    before = count(agent, "late")
    with lab.capture(lab.client.namespace, lab.client.device, "port 53", name="179-near") as near:
        answers = [finish(each) for each in [start_asking(lab, "n179.test", "A", f"+{how}tcp") for how in ("no", "")]]
        for answer in answers:
            assert (answer.status, answer.addresses) == ("SERVFAIL", ())
            assert 2_500 < answer.took_ms < 4_000
        # The connections are closed by now: what is late comes by UDP, once from each.
        assert (first.release(), second.release()) == (2, 2)
        agent.await_status(lambda status: status["counters"].get("late", 0) == before + 2, within_s=5)
    assert [packet for packet in seen(near) if packed("198.51.100.179") in packet.payload] == []
    assert "198.51.100.179" not in {row["address"] for row in agent.ask("names")}
    with dropping(agent, policy=1):
        assert connect(lab, "198.51.100.179") == "connection refused"
