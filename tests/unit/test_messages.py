"""What we write, as dnspython reads it."""

from __future__ import annotations

from typing import Any

import dns.edns
import dns.flags
import dns.message
import dns.opcode
import dns.rcode
import dns.rrset
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.types import PROTOCOL_TCP, PROTOCOL_UDP
from agent.dns import messages
from agent.dns.messages import ExtendedError
from agent.dns.wire import Rcode, WireError, read_question

COOKIES = [b"12345678", b"12345678" + b"s" * 8, b"12345678" + b"s" * 32]


def query(name: str = "WwW.Example.", rtype: str = "A", **options: Any) -> dns.message.QueryMessage:
    return dns.message.make_query(name, rtype, id=0xBEEF, **options)


def reply_of(question: dns.message.QueryMessage, addresses: int) -> bytes:
    reply = dns.message.make_response(question)
    reply.answer = [dns.rrset.from_text(question.question[0].name, 60, "IN", "A", *[f"198.18.0.{i}" for i in range(addresses)])]
    return reply.to_wire(max_size=65535)


def parsed(octets: bytes, asked: dns.message.Message) -> dns.message.Message:
    """As dnspython reads it; every answer of ours is a response to the question, in the client's case, without records."""
    message = dns.message.from_wire(octets)
    assert asked.is_response(message)
    assert octets[12 : 12 + len(read_question(asked.to_wire()).section)] == read_question(asked.to_wire()).section
    assert message.answer == message.authority == message.additional == []
    return message


@pytest.mark.parametrize("rcode", [Rcode.NXDOMAIN, Rcode.NOERROR, Rcode.REFUSED])
@pytest.mark.parametrize("flags", [0, dns.flags.RD, dns.flags.RD | dns.flags.CD | dns.flags.AD])
def test_a_denial_without_edns(rcode: Rcode, flags: int) -> None:
    """Result code, RA, RD and CD as asked, AD never; no OPT."""
    asked = query(use_edns=False, flags=flags)
    message = parsed(messages.denied(read_question(asked.to_wire()), rcode), asked)
    assert int(message.rcode()) == rcode
    assert message.flags & ~0xF == dns.flags.QR | dns.flags.RA | flags & (dns.flags.RD | dns.flags.CD)
    assert message.edns == -1


@pytest.mark.parametrize("cookie", [None, *COOKIES])
@pytest.mark.parametrize("do", [False, True])
def test_a_denial_with_edns(cookie: bytes | None, do: bool) -> None:
    """DO copied, the COOKIE as it came, and the reason as an extended error."""
    options = [] if cookie is None else [dns.edns.GenericOption("COOKIE", cookie)]
    asked = query(use_edns=0, want_dnssec=do, options=options)
    message = parsed(messages.denied(read_question(asked.to_wire()), text="no policy allows it"), asked)
    assert (message.edns, message.payload, bool(message.ednsflags & dns.flags.DO)) == (0, messages.UDP_SIZE, do)
    by_type = {option.otype: option for option in message.options}
    assert by_type.pop(15) == dns.edns.EDEOption("BLOCKED", "no policy allows it")
    assert [option.to_wire() for option in by_type.values()] == ([] if cookie is None else [cookie])


def test_a_failure_says_why() -> None:
    """SERVFAIL with the code that was given; without EDNS just SERVFAIL."""
    asked = query(use_edns=0)
    octets = messages.servfail(read_question(asked.to_wire()), ExtendedError.NOT_READY, "starting")
    message = parsed(octets, asked)
    assert message.rcode() == dns.rcode.SERVFAIL
    assert message.options == (dns.edns.EDEOption("NOT_READY", "starting"),)
    plain = query(use_edns=False)
    assert parsed(messages.servfail(read_question(plain.to_wire())), plain).rcode() == dns.rcode.SERVFAIL


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=400))
def test_no_answer_of_ours_outgrows_any_client(text: str) -> None:
    """The longest name, the longest cookie and any text: below 512 octets, and the text is cut between characters."""
    asked = query(".".join(["x" * 63] * 3 + ["y" * 61]), use_edns=0, options=[dns.edns.GenericOption("COOKIE", COOKIES[-1])])
    octets = messages.denied(read_question(asked.to_wire()), text=text)
    assert len(octets) <= 512
    (error,) = [option for option in parsed(octets, asked).options if isinstance(option, dns.edns.EDEOption)]
    assert text.startswith((error.text or "").rstrip("\x00")) or "\x00" in text


def test_a_long_text_is_cut_between_characters() -> None:
    """Every octet of a text is part of a whole character."""
    asked = query(use_edns=0)
    for text in ("é" * 200, "x" + "é" * 200):
        (error,) = parsed(messages.denied(read_question(asked.to_wire()), text=text), asked).options
        assert isinstance(error, dns.edns.EDEOption)
        assert text.startswith(error.text or "")
        assert len((error.text or "").encode()) in {messages.TEXT_OCTETS_MAX, messages.TEXT_OCTETS_MAX - 1}


@pytest.mark.parametrize(
    ("message", "rcode"),
    [
        ("beef0100000000000000" + "0000", dns.rcode.FORMERR),
        ("beef2900000100000000000003777777076578616d706c650000060001", dns.rcode.NOTIMP),
    ],
)
def test_what_cannot_be_read_gets_a_bare_header(message: str, rcode: dns.rcode.Rcode) -> None:
    """Twelve octets with the id, the opcode and RD as they came: never more than it cost."""
    octets = bytes.fromhex(message)
    with pytest.raises(WireError) as caught:
        read_question(octets)
    refusal = messages.refusal(octets, caught.value)
    assert refusal is not None
    answer = dns.message.from_wire(refusal)
    assert len(refusal) == 12
    assert (answer.id, answer.rcode()) == (0xBEEF, rcode)
    assert answer.flags & (dns.flags.QR | dns.flags.RD) == dns.flags.QR | dns.flags.RD
    assert answer.opcode() == dns.opcode.from_flags(int(message[4:8], 16))


def test_a_response_is_not_answered() -> None:
    """Two proxies must never talk in circles."""
    octets = dns.message.make_response(query()).to_wire()
    with pytest.raises(WireError) as caught:
        read_question(octets)
    assert messages.refusal(octets, caught.value) is None


def test_truncated_keeps_the_upstreams_opt_and_flags() -> None:
    """TC, no records, and what the upstream said about itself."""
    asked = query(use_edns=0, payload=1400)
    reply = dns.message.make_response(asked)
    reply.flags |= dns.flags.AA
    reply.use_edns(0, payload=4096, options=[dns.edns.EDEOption("STALE_ANSWER", "stale")])
    reply.answer = [dns.rrset.from_text("www.example.", 60, "IN", "A", "192.0.2.1")]
    message = parsed(messages.truncated(reply.to_wire(), read_question(asked.to_wire())), asked)
    assert message.flags & (dns.flags.TC | dns.flags.AA) == dns.flags.TC | dns.flags.AA
    assert (message.payload, message.options) == (4096, (dns.edns.EDEOption("STALE_ANSWER", "stale"),))


def test_truncated_of_a_padded_reply_fits_too() -> None:
    """An upstream's OPT that alone is longer than the client takes is not kept."""
    asked = query(use_edns=0, payload=512)
    reply = dns.message.make_response(asked)
    reply.use_edns(0, options=[dns.edns.GenericOption("PADDING", bytes(900))])
    octets = messages.fit(reply.to_wire(), read_question(asked.to_wire()), PROTOCOL_UDP)
    assert len(octets) <= 512
    assert parsed(octets, asked).options == ()


def test_truncated_of_a_reply_cut_in_two() -> None:
    """An upstream may cut inside a record: the client still gets a whole message, with an OPT of ours."""
    asked = query(use_edns=0, options=[dns.edns.GenericOption("COOKIE", COOKIES[0])])
    octets = messages.truncated(reply_of(asked, 3)[:50], read_question(asked.to_wire()))
    message = parsed(octets, asked)
    assert [option.to_wire() for option in message.options] == [COOKIES[0]]


@pytest.mark.parametrize(
    ("edns_size", "addresses", "fits"),
    [
        (None, 29, True),  # 493 octets
        (None, 40, False),
        (100, 29, True),  # a size below 512 means 512
        (100, 40, False),
        (1232, 70, True),
        (1232, 80, False),
        (65535, 200, True),
    ],
)
def test_a_udp_reply_fits_the_client(edns_size: int | None, addresses: int, fits: bool) -> None:
    """As long as the client takes: unchanged, octet for octet; longer: empty with TC. Over TCP always unchanged."""
    asked = query(use_edns=False if edns_size is None else 0, payload=edns_size or 0)
    question = read_question(asked.to_wire())
    assert messages.size_taken(question) == max(512, edns_size or 0)
    reply = reply_of(asked, addresses)
    fitted = messages.fit(reply, question, PROTOCOL_UDP)
    assert messages.fit(reply, question, PROTOCOL_TCP) == reply
    if fits:
        assert fitted == reply
    else:
        assert len(fitted) <= 512
        assert parsed(fitted, asked).flags & dns.flags.TC
