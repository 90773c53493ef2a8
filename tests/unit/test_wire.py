"""The walker over DNS messages, one promise a test."""

from __future__ import annotations

import ipaddress
import struct
from typing import Any, NamedTuple

import dns.message
import dns.rrset
import pytest

from agent.core.types import packed
from agent.dns import wire as wire_module
from agent.dns.wire import Answer, Fault, Question, Status, WireError, find_opt, read_name, read_question, read_reply


class Record(NamedTuple):
    """One record for `reply_to`: the owner already in wire form (a pointer to the question by default)."""

    rtype: int
    data: bytes
    ttl: int = 60
    owner: bytes = b"\xc0\x0c"
    rclass: int = 1

    def to_wire(self) -> bytes:
        return self.owner + struct.pack("!HHIH", self.rtype, self.rclass, self.ttl, len(self.data)) + self.data


def question_of(name: str = "www.example.", rtype: str = "A", **options: Any) -> Question:
    return read_question(dns.message.make_query(name, rtype, id=0x1234, **options).to_wire())


def reply_to(question: Question, *answers: Record, flags: int = 0x8180, additional: tuple[bytes, ...] = ()) -> bytes:
    header = struct.pack("!6H", question.id, flags, 1, len(answers), 0, len(additional))
    return header + question.section + b"".join(record.to_wire() for record in answers) + b"".join(additional)


def wire(name: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in name.split(".") if label) + b"\x00"


# --- questions -------------------------------------------------------------------------------------------------------


def test_a_question_keeps_its_spelling_and_is_named_in_lower_case() -> None:
    """The section is the client's octets; name and wire form are for comparing."""
    message = dns.message.make_query("WwW.ExAmple", "AAAA", id=7, use_edns=False).to_wire()
    question = read_question(message)
    assert (question.id, question.name, question.qtype, question.qclass) == (7, "www.example.", 28, 1)
    assert question.section == message[12:]
    assert question.wire_name == b"\x03www\x07example\x00"
    assert question.edns is None


def test_edns_of_a_question() -> None:
    """Size, version, DO and the COOKIE octets, wherever among the options the cookie stands."""
    options = [dns.edns.GenericOption(*option) for option in (("PADDING", bytes(9)), ("COOKIE", b"12345678"), ("ECS", b""))]
    edns = question_of(use_edns=0, payload=4096, want_dnssec=True, options=options).edns
    assert edns is not None
    assert (edns.udp_size, edns.version, edns.do, edns.cookie) == (4096, 0, True, b"12345678")


@pytest.mark.parametrize("octets", [0, 7, 9, 15, 41])
def test_a_cookie_of_illegal_length_is_none(octets: int) -> None:
    """RFC 7873 4: 8 octets, or 16 to 40."""
    edns = question_of(use_edns=0, options=[dns.edns.GenericOption("COOKIE", bytes(octets))]).edns
    assert edns is not None
    assert edns.cookie is None


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        pytest.param("", Fault.IGNORE, id="empty"),
        pytest.param("1234010000010000000000", Fault.IGNORE, id="eleven octets"),
        pytest.param("12348180000100000000000003777777076578616d706c650000010001", Fault.IGNORE, id="a response"),
        pytest.param("1234a80000010000000000000000010001", Fault.IGNORE, id="a response of another opcode"),
        pytest.param("12342800000100000000000003777777076578616d706c650000060001", Fault.NOTIMP, id="update"),
        pytest.param("123401000000000000000000", Fault.FORMERR, id="no question"),
        pytest.param("12340100000200000000000003777777000001000103777777000001" + "0001", Fault.FORMERR, id="two questions"),
        pytest.param("123401000001000000000000", Fault.FORMERR, id="question missing"),
        pytest.param("12340100000100000000000003777777", Fault.FORMERR, id="cut in the name"),
        pytest.param("123401000001000000000000037777770000010", Fault.FORMERR, id="cut before the class"),
        pytest.param("123401000001000000000000c00c00010001", Fault.FORMERR, id="compressed"),
        pytest.param("1234010000010000000000004161" + "0000010001", Fault.FORMERR, id="label of kind 01"),
        pytest.param("123401000001000000000000" + "0161" * 128 + "0000010001", Fault.FORMERR, id="257 octets"),
        pytest.param("12340100000100000000000100000100010000290200000000000004000a00", Fault.FORMERR, id="OPT cut"),
        pytest.param("12340100000100000000000100000100010000290200000000000004000a0008", Fault.FORMERR, id="option past OPT"),
        pytest.param("1234010000010000000000020000010001" + "0000290200000000000000" * 2, Fault.FORMERR, id="two OPT"),
        pytest.param("1234010000010000000000010000010001" + "016100002902000000000000" + "00", Fault.FORMERR, id="owned OPT"),
    ],
)
def test_what_is_no_question_says_how_to_answer(message: str, fault: Fault) -> None:
    """Junk and responses are ignored, so that two proxies never talk in circles; the rest is answered by its kind."""
    octets = bytes.fromhex(message + "0" * (len(message) % 2))
    with pytest.raises(WireError) as caught:
        read_question(octets)
    assert caught.value.fault is fault


# --- replies ---------------------------------------------------------------------------------------------------------


def test_a_reply_must_be_one() -> None:
    """Another id, a query, another opcode, another type or name: MISMATCH; another spelling is the same question."""
    question = question_of()
    good = reply_to(question, Record(1, packed("192.0.2.1")))
    assert read_reply(good, question).status is Status.OK
    assert read_reply(good[:12] + good[12:29].upper() + good[29:], question).status is Status.OK
    for wrong in (
        b"\x12\x35" + good[2:],
        good[:2] + b"\x01" + good[3:],
        good[:2] + b"\xa9" + good[3:],
        good.replace(b"\x03www", b"\x03wwx"),
        reply_to(question_of(rtype="AAAA")),
    ):
        assert read_reply(wrong, question) == Answer(Status.MISMATCH, 0, (), ())


def test_types_are_not_letters() -> None:
    """Type 65 (HTTPS) and type 97 differ by the bit that separates A from a, and stay different questions."""
    question = question_of(rtype="TYPE65")
    assert read_reply(reply_to(question_of(rtype="TYPE97")), question).status is Status.MISMATCH


def test_a_truncated_reply_teaches_nothing() -> None:
    """Whatever it holds (it may be cut inside a record), the caller is told to pass on an empty one."""
    question = question_of()
    reply = reply_to(question, Record(1, packed("192.0.2.1")), flags=0x8380)
    assert read_reply(reply, question) == Answer(Status.TRUNCATED, 0, (), ())
    assert read_reply(reply[:-2], question).status is Status.TRUNCATED


def test_the_chain_is_told_in_order() -> None:
    """From the name asked to the last target, in lower case, whatever the order of the records."""
    question = question_of()
    answer = read_reply(
        reply_to(
            question,
            Record(1, packed("192.0.2.1"), owner=wire("b.example")),
            Record(5, wire("B.Example"), owner=wire("A.example")),
            Record(5, wire("a.example")),
        ),
        question,
    )
    assert answer == Answer(
        Status.OK, 0, ((packed("192.0.2.1"), 60),), ("www.example.", "a.example.", "b.example."), is_all=True
    )


@pytest.mark.parametrize("target", ["www.example", "a.example"])
def test_a_chain_that_returns_is_a_loop(target: str) -> None:
    """To the question or to any name on the way: LOOP, and nothing is learned."""
    question = question_of()
    answers = (Record(5, wire("a.example")), Record(5, wire(target), owner=wire("a.example")), Record(1, packed("192.0.2.1")))
    assert read_reply(reply_to(question, *answers), question) == Answer(Status.LOOP, 0, (), ())


def test_a_loop_beside_the_chain_is_nobodys_business() -> None:
    """Only the chain that starts at the question is followed."""
    question = question_of()
    answers = (Record(5, wire("x.example"), owner=wire("x.example")), Record(1, packed("192.0.2.1")))
    assert read_reply(reply_to(question, *answers), question).addresses == ((packed("192.0.2.1"), 60),)


def test_the_same_alias_twice_is_one_and_two_different_ones_are_malformed() -> None:
    """RFC 2181 10.1: a name has one canonical name."""
    question = question_of()
    alias, address = Record(5, wire("a.example")), Record(1, packed("192.0.2.1"), owner=wire("a.example"))
    assert read_reply(reply_to(question, alias, alias, address), question).addresses == ((packed("192.0.2.1"), 60),)
    other = Record(5, wire("b.example"))
    assert read_reply(reply_to(question, alias, other, address), question).status is Status.MALFORMED


def test_dname_renames_what_is_below_it() -> None:
    """Below its owner, not the owner itself, and a CNAME beside it goes first."""
    question = question_of("a.www.example.")
    dname = Record(39, wire("cdn.test"), owner=wire("www.example"))
    below = Record(1, packed("192.0.2.1"), owner=wire("a.cdn.test"))
    assert read_reply(reply_to(question, dname, below), question).chain == ("a.www.example.", "a.cdn.test.")
    assert read_reply(reply_to(question, dname, below), question).addresses == ((packed("192.0.2.1"), 60),)
    apex = question_of("www.example.")
    assert read_reply(reply_to(apex, dname, below), apex).addresses == ()
    alias = Record(5, wire("b.test"))
    assert read_reply(reply_to(question, dname, alias, below), question).chain == ("a.www.example.", "b.test.")


def test_dname_that_makes_a_name_too_long_ends_the_chain() -> None:
    """RFC 6672 2.2: there is no such name, and no endless growth through a DNAME into its own subtree."""
    question = question_of("a.test.")
    dname = Record(39, wire("a.b.test"), owner=wire("test"))
    answer = read_reply(reply_to(question, dname), question)
    assert answer.status is Status.OK
    assert len(answer.chain) <= 128


def test_a_mapped_address_is_the_v4_address() -> None:
    """The packets will be IPv4."""
    question = question_of(rtype="AAAA")
    mapped = ipaddress.ip_address("::ffff:192.0.2.7").packed
    assert read_reply(reply_to(question, Record(28, mapped)), question).addresses == ((packed("192.0.2.7"), 60),)


def test_an_address_told_twice_lives_as_long_as_the_longer() -> None:
    """A client may keep either; a TTL with the top bit set is 0 (RFC 2181 8) and never the longer."""
    question = question_of()
    answers = [Record(1, packed("192.0.2.1"), ttl=ttl) for ttl in (20, 30, 0xFFFFFFFF, 10)]
    assert read_reply(reply_to(question, *answers), question).addresses == ((packed("192.0.2.1"), 30),)


def test_hints_of_a_service_record_are_addresses_of_the_name_asked() -> None:
    """ipv4hint and ipv6hint of service mode; alias mode has no parameters."""
    question = question_of(rtype="HTTPS")
    hints4 = struct.pack("!HH", 4, 8) + packed("192.0.2.1") + packed("192.0.2.2")
    hints = hints4 + struct.pack("!HH", 6, 16) + packed("2001:db8::1")
    service = Record(65, b"\x00\x01\x00" + struct.pack("!HH", 1, 3) + b"\x02h3" + hints)
    learned = read_reply(reply_to(question, service), question).addresses
    assert learned == tuple((packed(text), 60) for text in ("192.0.2.1", "192.0.2.2", "2001:db8::1"))
    alias = Record(65, b"\x00\x00" + wire("svc.test") + hints)
    assert read_reply(reply_to(question, alias), question).addresses == ()
    elsewhere = Record(65, service.data, owner=wire("other.example"))
    assert read_reply(reply_to(question, elsewhere), question).addresses == ()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param("0001", id="no target"),
        pytest.param("0001c00c", id="compressed target"),
        pytest.param("00010000040003c00002", id="part of an address"),
        pytest.param("00010000040000", id="no address"),
        pytest.param("0001000004000", id="cut parameter"),
        pytest.param("000100000400040000000000040004c0000201", id="the same key twice"),
        pytest.param("0001000006001020010db800000000000000000000000100040004c0000201", id="keys out of order"),
        pytest.param("00010000040008c0000201", id="value past the record"),
    ],
)
def test_a_service_record_that_does_not_parse_is_malformed(data: str) -> None:
    """A client could read hints out of it that we did not (RFC 9460 2.2)."""
    question = question_of(rtype="HTTPS")
    record = Record(65, bytes.fromhex(data + "0" * (len(data) % 2)))
    assert read_reply(reply_to(question, record), question).status is Status.MALFORMED


def test_the_upper_bits_of_the_result_code_count() -> None:
    """BADVERS is 16: zero in the header, one in OPT, in either place OPT may stand among the additional records."""
    question = question_of()
    opt = bytes.fromhex("00002904d0010000000000")
    extra = b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 60, 4) + packed("203.0.113.9")
    for additional in ((opt,), (extra, opt), (opt, extra)):
        answer = read_reply(reply_to(question, Record(1, packed("192.0.2.1")), additional=additional), question)
        assert (answer.status, answer.rcode, answer.addresses) == (Status.OK, 16, ())


def test_tsig_comes_last() -> None:
    """RFC 8945 5.1: elsewhere it is a format error; at the end it passes, and the addresses before it teach."""
    question = question_of()
    tsig = b"\x03key\x00" + struct.pack("!HHIH", 250, 255, 0, 4) + bytes(4)
    opt = bytes.fromhex("00002904d0000000000000")
    address = Record(1, packed("192.0.2.1"))
    assert read_reply(reply_to(question, address, additional=(opt, tsig)), question).addresses
    assert read_reply(reply_to(question, address, additional=(tsig, opt)), question).status is Status.MALFORMED


def test_every_cut_of_a_reply_is_malformed_or_not_a_reply() -> None:
    """A message that ends too early, wherever, teaches nothing."""
    question = question_of("www.example.", "A", use_edns=0)
    reply = dns.message.make_response(dns.message.make_query("www.example.", "A", id=0x1234, use_edns=0))
    reply.answer = [
        dns.rrset.from_text("www.example.", 60, "IN", "CNAME", "a.example."),
        dns.rrset.from_text("a.example.", 60, "IN", "A", "192.0.2.1", "192.0.2.2"),
        dns.rrset.from_text("www.example.", 60, "IN", "HTTPS", "1 . ipv4hint=192.0.2.3"),
    ]
    reply.authority = [dns.rrset.from_text("example.", 60, "IN", "NS", "ns.example.")]
    octets = reply.to_wire()
    assert read_reply(octets, question).status is Status.OK
    for length in range(len(octets)):
        answer = read_reply(octets[:length], question)
        assert answer.status in {Status.MALFORMED, Status.MISMATCH}
        assert answer.addresses == ()


def test_a_maze_of_pointers_costs_no_more_than_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners that point into the middle of a run of pointers: every place is read once."""
    reads: list[int] = []

    def counting(message: bytes, at: int, *rest: Any) -> tuple[bytes, int]:
        reads.append(at)
        return read_name(message, at, *rest)

    monkeypatch.setattr(wire_module, "read_name", counting)
    question = question_of()
    # One long run of pointers, each to the one before, then records that each point into the middle of it.
    maze_at = 12 + len(question.section) + 2 + 10
    maze = b"".join((0xC000 | place).to_bytes(2, "big") for place in [12, *range(maze_at, maze_at + 240, 2)])
    owners = [(0xC000 | (maze_at + 2 * (index % 100))).to_bytes(2, "big") for index in range(3000)]
    records = [Record(16, maze), *(Record(1, index.to_bytes(4, "big"), owner=owner) for index, owner in enumerate(owners))]
    answer = read_reply(reply_to(question, *records), question)
    assert answer.status is Status.OK
    assert len(answer.addresses) == 3000
    assert len(reads) <= 2 * len(records) + 120


def test_the_owner_of_opt_is_one_zero_octet() -> None:
    """A pointer to a root name stands for the same, and moves what is behind it by an octet: RFC 6891 6.1.2 has no pointer."""
    question, address = question_of(""), Record(1, packed("192.0.2.1"))
    other = Record(99, b"\0").to_wire()
    for owner, status in ((b"\0", Status.OK), (b"\xc0\x0c", Status.MALFORMED)):
        opt = Record(41, b"", owner=owner).to_wire()
        for additional in ((opt,), (other, opt)):
            assert read_reply(reply_to(question, address, additional=additional), question).status is status


def test_a_name_that_points_at_the_id_is_read_with_it() -> None:
    """What is remembered of a message is not said of the same octets behind another id, where they are another name or none."""
    section = b"\x03www\x07example\x00\x00\x01\x00\x01"
    record = b"\xc0\x0c\x00\x05\x00\x01\x00\x00\x00\x3c\x00\x02\xc0\x01"  # CNAME, to a name at the id's second octet
    for number, status in ((0x1200, Status.OK), (0x127E, Status.MALFORMED), (0x1200, Status.OK)):
        question = read_question(struct.pack("!6H", number, 0x0100, 1, 0, 0, 0) + section)
        reply = struct.pack("!6H", number, 0x8180, 1, 1, 0, 0) + section + record
        assert read_reply(reply, question).status is status
    query = section + b"\xc0\x01\x00\x10\x00\x01\x00\x00\x00\x00\x00\x00"
    assert read_question(struct.pack("!6H", 0x1200, 0x0100, 1, 0, 0, 1) + query).name == "www.example."
    with pytest.raises(WireError):
        read_question(struct.pack("!6H", 0x127E, 0x0100, 1, 0, 0, 1) + query)


def test_find_opt_gives_the_record_as_it_came() -> None:
    """Behind any other records; None where there is none or the message breaks off."""
    opt = bytes.fromhex("00002904d00000800000080003000401020304")
    question = question_of()
    reply = reply_to(question, Record(1, packed("192.0.2.1")), additional=(opt,))
    assert find_opt(reply) == opt
    assert find_opt(reply_to(question)) is None
    assert find_opt(reply[:-1]) is None
    assert find_opt(b"") is None
