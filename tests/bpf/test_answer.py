"""What a denied packet of the endpoint becomes: its refusal, right to the last bit of its checksums."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest

from agent.core.types import Verdict, Write, packed
from agent.datapath.abi import Reason
from tests.judges import SMALL_TABLES, KernelJudge
from tests.packets import (
    ACK,
    CLIENT,
    CLIENT6,
    GRE,
    ICMP,
    ICMPV6,
    OTHER,
    PEER,
    PEER6,
    PUSH,
    RST,
    SYN,
    TCP,
    UDP,
    echo,
    ethernet,
    extended,
    fragment4,
    frame,
    ipv4_header,
    tcp,
    udp,
)
from tests.verdict_cases import BASE, REDIRECT, endpoint, group, rule

pytestmark = pytest.mark.root

_PER_SECOND = 20
_REDIRECT, _DROP = 7, 2
_FAMILIES = pytest.mark.parametrize(("client", "peer"), [(CLIENT, PEER), (CLIENT6, PEER6)])


class Answering(KernelJudge):
    def __init__(self) -> None:
        super().__init__({**SMALL_TABLES, "ANSWERS_PER_SECOND": _PER_SECOND, "QUESTIONS_PER_SECOND": 50, "QUESTION_BURST": 500})

    def reset(self) -> None:
        super().reset()
        rows = self.tables._rows_by_map["answers"]
        for key, _ in list(rows.dump(rows.value.size)):
            rows.delete(key)
        for number in range(4):
            self.tables.drop_dns_socket(number)
        self.apply(BASE)


@pytest.fixture(scope="module")
def loaded() -> Iterator[Answering]:
    judge = Answering()
    yield judge
    judge.close()


@pytest.fixture
def kernel(loaded: Answering) -> Answering:
    loaded.reset()
    return loaded


def _sum(data: bytes) -> int:
    """RFC 1071: 0xffff over data whose checksum is right."""
    even = data + bytes(len(data) % 2)
    total = sum(int.from_bytes(even[at : at + 2], "big") for at in range(0, len(even), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def _opened(answer: bytes, client: str, peer: str, protocol: int) -> bytes:
    """The transport part of an answer whose Ethernet and IP headers are as they should be."""
    asked = frame(client, peer, protocol, b"")
    assert answer[:6] == asked[6:12]
    assert answer[6:14] == asked[:6] + asked[12:14]
    if ":" in client:
        header, payload = answer[14:54], answer[54:]
        assert struct.unpack_from(">HBB", header, 4) == (len(payload), protocol, 64)
        assert header[8:] == packed(peer) + packed(client)
        assert _sum(header[8:] + struct.pack(">II", len(payload), protocol) + payload) == 0xFFFF
        return payload
    header, payload = answer[14:34], answer[34:]
    assert _sum(header) == 0xFFFF
    assert header[0] == 0x45
    assert struct.unpack_from(">H", header, 2) == (20 + len(payload),)
    assert (header[9], header[12:16], header[16:20]) == (protocol, packed(peer), packed(client))
    pseudo = b"" if protocol == ICMP else header[12:] + struct.pack(">HH", protocol, len(payload))
    assert _sum(pseudo + payload) == 0xFFFF
    return payload


@_FAMILIES
@pytest.mark.parametrize(("flags", "data"), [(SYN, b""), (SYN, b"early data"), (ACK, b"x" * 1_001), (SYN | ACK, b"")])
def test_reset(kernel: Answering, client: str, peer: str, flags: int, data: bytes) -> None:
    """TCP gets a reset that its connection takes for the peer's (RFC 9293 3.10.7.1)."""
    run = kernel.run("from_endpoint", frame(client, peer, TCP, tcp(40000, 443, flags, data)))
    assert run.action == _REDIRECT
    reset = _opened(run.frame, client, peer, TCP)
    source, destination, number, acknowledged, offset, answered = struct.unpack_from(">HHIIBB", reset)
    assert (source, destination, len(reset), offset) == (443, 40000, 20, 0x50)
    if flags & ACK:
        assert (answered, number) == (RST, 1)
    else:
        assert (answered, number, acknowledged) == (RST | ACK, 0, 1 + 1 + len(data))


@_FAMILIES
@pytest.mark.parametrize("size", [0, 1, 8, 1_200])
def test_unreachable(kernel: Answering, client: str, peer: str, size: int) -> None:
    """UDP gets "administratively prohibited", which quotes what was refused."""
    asked = frame(client, peer, UDP, udp(40000, 443, b"y" * size))
    run = kernel.run("from_endpoint", asked)
    assert run.action == _REDIRECT
    protocol, quoted = (ICMPV6, 48) if ":" in client else (ICMP, 28)
    message = _opened(run.frame, client, peer, protocol)
    assert (message[0], message[1]) == ((1, 1) if ":" in client else (3, 13))
    assert message[8:] == asked[14 : 14 + quoted]


def test_silence(kernel: Answering) -> None:
    """A reset, what went to many, fragments, other protocols, options, tags, spoofed sources and the peer get no answer."""
    kernel.apply([rule(REDIRECT, 0, UDP, 53)])
    options = ipv4_header(CLIENT, PEER, TCP, 24)
    for silent in (
        frame(CLIENT, PEER, TCP, tcp(1, 2, RST)),
        frame(CLIENT, "224.0.0.251", UDP, udp(1, 2)),
        frame(CLIENT, "255.255.255.255", UDP, udp(1, 2)),
        frame(CLIENT6, "ff02::fb", UDP, udp(1, 2)),
        fragment4(CLIENT, PEER, UDP, udp(1, 2, b"z" * 24), 0, more=True, number=3),
        frame(CLIENT, PEER, ICMP, echo(8, 1)),
        frame(CLIENT, PEER, GRE, bytes(20)),
        ethernet(0x0800, b"\x46" + options[1:] + bytes(4) + tcp(1, 2)),
        extended(CLIENT6, PEER6, [0], TCP, tcp(1, 2)),
        frame(CLIENT, PEER, TCP, tcp(1, 2), 0x8100),
        frame("192.0.2.11", PEER, TCP, tcp(1, 2)),
    ):
        run = kernel.run("from_endpoint", silent)
        assert (run.action, run.frame) == (_DROP, silent)
    assert kernel.run("to_endpoint", frame(OTHER, CLIENT, TCP, tcp(1, 2))).action == _DROP


@_FAMILIES
@pytest.mark.parametrize("size", [2_400, 2_801])
def test_reset_of_what_a_card_is_to_cut_up(kernel: Answering, client: str, peer: str, size: int) -> None:
    """Several segments in one packet are refused once, by a reset that acknowledges all of them."""
    whole = frame(client, peer, TCP, tcp(40000, 443, PUSH, b"x" * size))
    run = kernel.run("from_endpoint", whole, segments=2)
    assert run.action == _REDIRECT
    reset = _opened(run.frame, client, peer, TCP)
    acknowledged, _, answered = struct.unpack_from(">IBB", reset, 8)
    assert (len(reset), answered, acknowledged) == (20, RST | ACK, 1 + size)


def test_silent(kernel: Answering) -> None:
    """`denied: drop`: the endpoint gets no refusal, and its packets are counted all the same."""
    kernel.apply([endpoint(silent=True)])
    for denied in (frame(CLIENT, PEER, TCP, tcp(1, 2)), frame(CLIENT6, PEER6, UDP, udp(1, 2))):
        run = kernel.run("from_endpoint", denied)
        assert (run.action, run.frame) == (_DROP, denied)
    assert kernel._counts() == {Reason.DROP_POLICY: 2}


@_FAMILIES
def test_too_many_questions(kernel: Answering, client: str, peer: str) -> None:
    """A burst goes to the proxy; what is over it is refused like any denied packet, under a reason of its own."""
    kernel.set_listeners()
    kernel.apply([rule(REDIRECT, 0, UDP, 53)])
    question = frame(client, peer, UDP, udp(40000, 53))
    assert kernel.run("from_endpoint", question, repeat=500).frame == question
    assert kernel._counts() == {Reason.PASS_REDIRECT: 500}
    runs = (kernel.run("from_endpoint", question) for _ in range(50))  # one is due every 20 ms
    run = next(run for run in runs if run.frame != question)
    assert run.action == _REDIRECT
    assert (
        _opened(run.frame, client, peer, ICMPV6 if ":" in client else ICMP)[8:]
        == question[14 : 14 + (48 if ":" in client else 28)]
    )
    assert kernel._counts()[Reason.DROP_QUESTION_LIMIT] == 1


def test_limit(kernel: Answering) -> None:
    """No more refusals than the limit in a second; the rest is dropped silently, and counted all the same."""
    denied = frame(CLIENT, PEER, TCP, tcp(1, 2))
    before = kernel._counts().get(Reason.DROP_POLICY, 0)
    actions = [kernel.run("from_endpoint", denied).action for _ in range(2 * _PER_SECOND)]
    assert actions[:_PER_SECOND] == [_REDIRECT] * _PER_SECOND
    assert _DROP in actions[_PER_SECOND:]
    assert kernel._counts()[Reason.DROP_POLICY] - before == 2 * _PER_SECOND


def test_every_refusal_of_policy(kernel: Answering) -> None:
    """Denied by a rule, of an ended flow, without a proxy: the client hears of each."""
    denied = frame(CLIENT, PEER, TCP, tcp(1, 443))
    question = frame(CLIENT, PEER, UDP, udp(1, 53))

    def writes(*changes: Write) -> None:
        kernel.apply(changes)

    writes(rule(Verdict.ALLOW), rule(REDIRECT, 0, UDP, 53), rule(Verdict.DENY, number=2))
    assert kernel.run("from_endpoint", question).action == _REDIRECT
    assert kernel._counts()[Reason.DROP_NO_SOCKET] > 0
    assert kernel.run("from_endpoint", denied).action == -1
    writes(group(2))
    assert kernel.run("from_endpoint", denied).action == _REDIRECT
    assert kernel.run("from_endpoint", frame(CLIENT, PEER, TCP, tcp(1, 443, ACK))).action == _REDIRECT
    writes(group(2, audit=True))
    assert kernel.run("from_endpoint", denied).action == -1
