"""The DNS proxy's sockets as clients see them: sizes, fragments, segments, order, what is no question, how many connections.

What passes unchanged is in test_upstreams.py, real clients in test_clients.py, stories of the field in test_bug_cases_dns.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import dns.edns
import dns.flags
import dns.message
import dns.opcode
import pytest

from tests.cases.sockets import ask_in_pieces
from tests.netns.asking import exchange
from tests.netns.lab import Lab
from tests.netns.resolvers import Told
from tests.netns.running import RunningAgent
from tests.netns.spoken import Spoken

pytestmark = pytest.mark.root

# Servers that the policy names are asked themselves.
SPOKEN, SPOKEN6, TOLD = "198.51.100.81", "2001:db8:53::81", "198.51.100.82"
POLICY = f"{SPOKEN}:53\n[{SPOKEN6}]:53\n{TOLD}:53\n**.test:443/tcp\n"
CONNECTIONS_MAX, CONNECTIONS_OF_ENDPOINT_MAX = 24, 16
RECORD_OCTETS = 12  # an owner that is a pointer, type, class, TTL, length


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(clients=2, records={"a.test.": ["A 198.51.100.11"]}, ports=(443,)) as lab:
        yield lab


@pytest.fixture(scope="module")
def spoken(lab: Lab) -> Spoken:
    return Spoken(lab, SPOKEN, SPOKEN6)


@pytest.fixture(scope="module")
def agent(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    limits = {"tcp-connections": CONNECTIONS_MAX, "tcp-connections-per-endpoint": CONNECTIONS_OF_ENDPOINT_MAX}
    with RunningAgent(lab, POLICY, tmp_path_factory.mktemp("agent"), limits=limits) as agent:
        yield agent


def question(name: str = "size.test", *, number: int = 0x1234, edns: int | None = None, padding: int = 0) -> bytes:
    """edns: the size it says; padding: octets of a padding option."""
    query = dns.message.make_query(name, "TYPE65280", id=number)
    if edns is not None:
        options: list[dns.edns.Option] = [dns.edns.GenericOption(dns.edns.OptionType.PADDING, bytes(padding))]
        query.use_edns(0, payload=edns, options=options if padding else None)
    return query.to_wire(max_size=65_535)


def reply_to(query: bytes, octets: int) -> bytes:
    """Of just so many octets: one record of a type nobody knows."""
    section = query[12 : query.index(0, 12) + 5]
    data = octets - 12 - len(section) - RECORD_OCTETS
    record = b"\xc0\x0c" + section[-4:] + b"\x00\x00\x00\x3c" + data.to_bytes(2, "big") + bytes(data)
    return query[:2] + bytes.fromhex("81800001000100000000") + section + record


# --- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize("server", [SPOKEN, SPOKEN6])
@pytest.mark.parametrize(
    ("edns", "octets", "fits"),
    [
        (None, 512, True),
        (None, 513, False),
        (100, 512, True),
        (600, 600, True),
        (600, 601, False),
        (1232, 4_000, False),
        (4096, 4_000, True),
        (65_535, 60_000, True),
    ],
)
def test_a_client_gets_over_udp_what_it_takes(
    lab: Lab, spoken: Spoken, server: str, edns: int | None, octets: int, fits: bool
) -> None:
    """Octet for octet, in fragments where it must be; what is longer than the client said is empty with TC, and TCP has it."""
    query = question(edns=edns)
    whole = reply_to(query, octets)
    spoken.tell(whole)
    (reply,) = exchange(lab, [query], server=server)
    if fits:
        assert reply == whole
        return
    cut = dns.message.from_wire(reply)
    assert cut.flags & dns.flags.TC
    assert (cut.id, len(cut.question), cut.answer, cut.edns >= 0) == (0x1234, 1, [], edns is not None)
    assert len(reply) <= max(512, edns or 0)
    assert exchange(lab, [query], server=server, transport="tcp") == [whole]


@pytest.mark.usefixtures("agent")
def test_the_longest_message_there_is_passes_over_tcp(lab: Lab, spoken: Spoken) -> None:
    """65,535 octets back, and a question of as many on the way there: byte for byte but for the id."""
    query = question(edns=1232, padding=65_535 - len(question(edns=1232)) - 4)
    assert len(query) == 65_535
    whole = reply_to(query, 65_535)
    spoken.tell(whole)
    spoken.asked()
    assert exchange(lab, [query], server=SPOKEN, transport="tcp") == [whole]
    (seen,) = spoken.asked()
    assert (seen.transport, seen.message[2:]) == ("tcp", query[2:])


@pytest.mark.parametrize(("server", "octets"), [(SPOKEN, 1_472), (SPOKEN6, 1_452)])
def test_a_question_as_long_as_a_packet(lab: Lab, agent: RunningAgent, spoken: Spoken, server: str, octets: int) -> None:
    """It passes over UDP. A longer one does not, for nothing reassembles it on the way to the proxy: dropped, counted, and TCP
    takes it.
    """
    empty = len(question(edns=1232)) + 4
    query, longer = (question(edns=1232, padding=length - empty) for length in (octets, octets + 1))
    whole = reply_to(query, 200)
    spoken.tell(whole)
    spoken.asked()
    assert exchange(lab, [query], server=server) == [whole]
    assert exchange(lab, [longer], server=server, within_s=0.5) == []
    assert exchange(lab, [longer], server=server, transport="tcp") == [whole]
    assert [(seen.transport, seen.message[2:]) for seen in spoken.asked()] == [("udp", query[2:]), ("tcp", longer[2:])]
    assert {row["reason"] for row in agent.ask("drops") if row["destination"] == server} == {"fragment"}


# --- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize("server", [SPOKEN, SPOKEN6])
def test_a_question_in_segments_of_one_octet(lab: Lab, spoken: Spoken, server: str) -> None:
    """The two of the length too."""
    query = question()
    whole = reply_to(query, 300)
    spoken.tell(whole)
    assert ask_in_pieces(lab, query, [1] * (2 + len(query)), lab.client.namespace, server) == whole


def test_answers_on_a_connection_come_as_they_are_there(lab: Lab, agent: RunningAgent) -> None:
    """The first question's is held by the upstream: those behind it do not wait for it (RFC 7766 6.2.1.1)."""
    records = {"records": ["A 198.51.100.12"]}
    told = Told(lab, TOLD, {"slow.test.": {**records, "hold": True}, "one.test.": records, "two.test.": records})
    queries = [
        dns.message.make_query(name, "A", id=number).to_wire()
        for number, name in enumerate(("slow.test", "one.test", "two.test"), 1)
    ]
    before = agent.status()["counters"].get("replies released", 0)
    with ThreadPoolExecutor(1) as pool:
        exchanging = pool.submit(exchange, lab, queries, server=TOLD, transport="tcp")
        agent.await_status(lambda status: status["counters"].get("replies released", 0) >= before + 2, within_s=5)
        assert told.release() == 1
        replies = exchanging.result()
    assert sorted(reply[1] for reply in replies[:2]) == [2, 3]
    assert [reply[1] for reply in replies[2:]] == [1]
    assert all(dns.message.from_wire(reply).answer for reply in replies)


# Opens so many connections, says so, and counts at the end of standard input how many the server has not closed.
_IDLE = """
import socket, sys
opened = [socket.create_connection((sys.argv[1], 53), 5) for _ in range(int(sys.argv[2]))]
print("open", flush=True)
sys.stdin.read()
left = 0
for s in opened:
    s.setblocking(False)
    try:
        left += s.recv(1) != b""
    except BlockingIOError:
        left += 1
    except OSError:
        pass
print(left, flush=True)
"""


def test_idle_connections_are_bounded_for_each_and_for_all(lab: Lab, agent: RunningAgent, spoken: Spoken) -> None:
    """Forty of either endpoint: no more than its own bound are held of one, nor than the bound of all of both; and both go on
    asking over TCP, for the idlest gives way."""
    spoken.tell(reply_to(question(), 100))
    waiting = []
    for client in lab.clients:
        script = (sys.executable, "-c", _IDLE, SPOKEN, "40")
        waiting.append(lab.start(client.namespace, *script, stdin=subprocess.PIPE))
        stdout = waiting[-1].stdout
        assert stdout is not None
        assert stdout.readline() == "open\n"
    for client in lab.clients:
        (reply,) = exchange(lab, [question()], server=SPOKEN, transport="tcp", namespace=client.namespace)
        assert len(reply) == 100
    left = [int(one.communicate(timeout=10)[0]) for one in waiting]
    assert max(left) <= CONNECTIONS_OF_ENDPOINT_MAX
    assert 0 < sum(left) <= CONNECTIONS_MAX
    assert agent.status()["state"] == "enforcing"


# --- what is no question -------------------------------------------------------------------------------------------------


def with_opcode(opcode: dns.opcode.Opcode) -> bytes:
    message = dns.message.make_query("a.test", "A", id=0x2000 + opcode)
    message.set_opcode(opcode)
    return message.to_wire()


NO_QUESTIONS = [
    (question()[:4] + b"\x00\x02" + question()[6:] + question()[12:], 1),  # two
    (question()[:4] + b"\x00\x00" + question()[6:12], 1),  # none
    (question()[:-3], 1),  # cut
    (question()[:12] + b"\xc0\x0c" + question()[-4:], 1),  # a name that points at itself
    *((with_opcode(dns.opcode.Opcode(opcode)), 4) for opcode in (1, 2, 4, 5, 6)),
]


@pytest.mark.parametrize(("server", "transport"), [(SPOKEN, "udp"), (SPOKEN6, "tcp")])
def test_what_is_no_question_costs_as_little_as_it_did(
    lab: Lab, agent: RunningAgent, spoken: Spoken, server: str, transport: str
) -> None:
    """FORMERR or NOTIMP (RFC 1035 4.1.1) in a bare header with its id, nothing to a response or to less than a header, nothing
    upstream; and on the same connection a question is answered as ever."""
    query = question(number=0x7777)
    whole = reply_to(query, 100)
    spoken.tell(whole)
    spoken.asked()
    before = agent.status()["counters"].get("questions ignore", 0)
    silent = [reply_to(query, 60), query[:11], query[:2]]
    messages = [[message] for message, _ in NO_QUESTIONS]
    replies = exchange(lab, *messages, [query], server=server, transport=transport)
    for (message, rcode), reply in zip(NO_QUESTIONS, replies[:-1], strict=True):
        assert (reply[:2], reply[2] & 0x80, reply[3] & 0x0F, reply[4:]) == (message[:2], 0x80, rcode, bytes(8))
        assert len(reply) <= len(message)
    assert replies[-1] == whole
    assert exchange(lab, [*silent, query], server=server, transport=transport, within_s=1) == [whole]
    assert [seen.message[2:] for seen in spoken.asked()] == [query[2:]] * 2
    assert agent.status()["counters"]["questions ignore"] == before + len(silent)
