"""The walker against dnspython: messages of all sorts, whole and damaged.

`naive_addresses` is the twin: forty lines over dnspython's objects that anybody can check. On a whole message both say the
same; on a damaged one the walker never learns what the twin does not, and never raises.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.rdata
import dns.rdataclass
import dns.rdatatype
import dns.rrset
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent.core.types import Address, packed
from agent.dns.wire import Question, Status, WireError, find_opt, read_question, read_reply

LABELS = ["www", "WWW", "a", "b", "cdn", "example", "Example", "x" * 63, "é", "a.b", "\x00"]
TYPES = ["A", "A", "A", "AAAA", "CNAME", "CNAME", "DNAME", "TXT", "MX", "HTTPS", "SVCB"]
ADDRESSES = ["192.0.2.1", "192.0.2.2", "198.51.100.7", "203.0.113.255"]
ADDRESSES6 = ["2001:db8::1", "2001:db8::2", "::ffff:192.0.2.9", "::"]
SERVICES = ["0 svc.test.", "1 .", "1 . ipv4hint=192.0.2.1,192.0.2.77", "2 b. alpn=h2 ipv4hint=192.0.2.3 ipv6hint=2001:db8::5"]


def fuzz_one(octets: bytes) -> None:
    """Entry for a fuzzer: any octets, as a query and as the reply to a query that the same octets describe."""
    try:
        question = read_question(octets)
    except WireError:
        question = read_question(dns.message.make_query("www.example.", "A", id=0x1234).to_wire())
    find_opt(octets)
    check_learned(octets, question)
    # As a reply to just this question, so that the walk gets past the comparison of the question.
    fitting = question.id.to_bytes(2, "big") + b"\x81\x80\x00\x01" + octets[6:12].ljust(6, b"\x00") + question.section
    check_learned(fitting + octets[len(fitting) :], question)


def check_learned(reply: bytes, question: Question) -> None:
    answer = read_reply(reply, question)
    if answer.addresses:
        assert answer.status is Status.OK
        assert answer.rcode == 0
        assert set(answer.addresses) <= set(naive_addresses(reply, question).items())


def naive_addresses(reply: bytes, question: Question) -> dict[Address, int]:
    """Addresses a careful reader could take from the reply, with the longest TTL of each, by dnspython's reading."""
    message = dns.message.from_wire(reply, one_rr_per_rrset=True, ignore_trailing=True, continue_on_error=True)
    on_chain = {dns.name.from_wire(question.section, 0)[0]}
    for _ in message.answer:
        for rrset in message.answer:
            for rdata in rrset:
                if rrset.rdclass != dns.rdataclass.IN:
                    continue
                if rrset.rdtype == dns.rdatatype.CNAME and rrset.name in on_chain:
                    on_chain.add(rdata.target)
                elif rrset.rdtype == dns.rdatatype.DNAME:
                    for name in [name for name in on_chain if name.is_subdomain(rrset.name) and name != rrset.name]:
                        try:
                            on_chain.add(name.relativize(rrset.name).concatenate(rdata.target))
                        except dns.name.NameTooLong:
                            continue
        if len(on_chain) > 200:
            break
    ttls: dict[Address, int] = {}
    for rrset in message.answer:
        if rrset.rdclass != dns.rdataclass.IN or rrset.name not in on_chain:
            continue
        for rdata in rrset:
            found = []
            if rrset.rdtype in (dns.rdatatype.A, dns.rdatatype.AAAA):
                found = [rdata.address]
            elif rrset.rdtype in (dns.rdatatype.HTTPS, dns.rdatatype.SVCB) and rdata.priority:
                found = [text for key in (4, 6) if key in rdata.params for text in rdata.params[key].addresses]
            for text in found:
                ttl = rrset.ttl if rrset.ttl < 0x80000000 else 0
                ttls[packed(text)] = max(ttl, ttls.get(packed(text), 0))
    return ttls


@st.composite
def names(draw: st.DrawFn) -> dns.name.Name:
    labels = draw(st.lists(st.sampled_from(LABELS), min_size=0, max_size=3))
    return dns.name.Name([*[label.encode("latin-1") for label in labels], b""])


@st.composite
def records(draw: st.DrawFn, owners: list[dns.name.Name]) -> dns.rrset.RRset:
    rtype = draw(st.sampled_from(TYPES))
    target = draw(st.sampled_from(owners)).to_text()
    choices = {
        "A": ADDRESSES,
        "AAAA": ADDRESSES6,
        "TXT": ['"text"'],
        "MX": [f"10 {target}"],
        "HTTPS": SERVICES,
        "SVCB": SERVICES,
    }
    data = draw(st.sampled_from(choices.get(rtype, [target])))
    ttl = draw(st.sampled_from([0, 1, 60, 0x7FFFFFFF]))
    return dns.rrset.from_text(draw(st.sampled_from(owners)), ttl, "IN", rtype, data)


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A query and a reply to it as dnspython writes them: records in any order, names compressed."""
    owners = draw(st.lists(names(), min_size=1, max_size=4))
    rtype, edns = draw(st.sampled_from(["A", "AAAA", "ANY", "HTTPS"])), draw(st.sampled_from([False, 0]))
    query = dns.message.make_query(owners[0], rtype, use_edns=edns)
    reply = dns.message.make_response(query)
    for section in (reply.answer, reply.answer, reply.answer, reply.authority, reply.additional):
        section.extend(draw(st.lists(records(owners), max_size=3)))
    return query.to_wire(), reply.to_wire(max_size=65535)


@settings(max_examples=300, deadline=None)
@given(exchanges())
def test_a_whole_reply_teaches_what_the_twin_says(exchange: tuple[bytes, bytes]) -> None:
    """Equal sets of (address, TTL), unless the reply has no single chain."""
    query, reply = exchange
    answer = read_reply(reply, read_question(query))
    twin = naive_addresses(reply, read_question(query))
    if answer.status is Status.OK:
        assert dict(answer.addresses).items() <= twin.items()
        if set(answer.addresses) != set(twin.items()):
            # Only a CNAME that goes before a DNAME keeps the walker from an address the twin reaches over every edge.
            assert "DNAME" in {dns.rdatatype.to_text(rrset.rdtype) for rrset in dns.message.from_wire(reply).answer}
    else:
        assert answer.status in {Status.LOOP, Status.MALFORMED}
        assert not answer.addresses
        assert {"CNAME", "DNAME"} & {dns.rdatatype.to_text(rrset.rdtype) for rrset in dns.message.from_wire(reply).answer}


@settings(max_examples=400, deadline=None)
@given(exchanges(), st.data())
def test_a_damaged_message_never_teaches_more(exchange: tuple[bytes, bytes], data: st.DataObject) -> None:
    """Octets changed, cut out, put in, or the end lost: no exception, and nothing the twin does not see."""
    query, reply = exchange
    damaged = bytearray(reply)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged)))
        kind = data.draw(st.sampled_from(["change", "change", "cut", "put", "end"]))
        octets = data.draw(st.binary(min_size=1, max_size=2))
        if kind == "change":
            damaged[at : at + len(octets)] = octets
        elif kind == "cut":
            del damaged[at : at + len(octets)]
        elif kind == "put":
            damaged[at:at] = octets
        else:
            del damaged[max(at, 12) :]
    check_learned(bytes(damaged), read_question(query))
    fuzz_one(bytes(damaged))


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=120))
@example(b"\x00" * 12)
@example(b"\xff" * 64)
@example(bytes.fromhex("123400000001000000000001") + b"\xc0\x0c\x00\x01\x00\x01")
def test_any_octets_at_all(octets: bytes) -> None:
    """Rule 1 of the module: nothing but WireError, and that only from read_question."""
    fuzz_one(octets)


@settings(max_examples=300, deadline=None)
@given(names(), st.sampled_from(["A", "AAAA", "HTTPS"]), st.booleans())
def test_a_question_reads_as_dnspython_reads_it(name: dns.name.Name, rtype: str, with_edns: bool) -> None:
    """Name, type, class and EDNS of any query it can write."""
    query = dns.message.make_query(name, rtype, use_edns=0 if with_edns else False, payload=1400, want_dnssec=with_edns)
    question = read_question(query.to_wire())
    assert question.wire_name == name.canonicalize().to_wire()
    assert question.qtype == dns.rdatatype.from_text(rtype)
    assert question.section == query.to_wire()[12 : 12 + len(question.section)]
    assert (question.edns is not None) == with_edns
    if question.edns is not None:
        assert (question.edns.udp_size, question.edns.do) == (1400, True)


@pytest.mark.parametrize("addresses", [1, 20])
def test_the_walk_costs_a_fraction_of_a_message_object(addresses: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed for the reader (-s); the test itself only asks for ten times, in the same run, so that no machine fails it."""
    query = dns.message.make_query("www.example.com.", "A", use_edns=0)
    reply = dns.message.make_response(query)
    reply.answer = [dns.rrset.from_text("www.example.com.", 60, "IN", "A", *[f"192.0.2.{i}" for i in range(addresses)])]
    octets = reply.to_wire()
    question = read_question(query.to_wire())
    ours = seconds_of(lambda: read_reply(octets, question), 2000)
    theirs = seconds_of(lambda: dns.message.from_wire(octets), 50)
    with capsys.disabled():
        print(f"\n{addresses} A: {ours * 1e6:.1f} us, dnspython {theirs * 1e6:.0f} us, ratio {theirs / ours:.0f}")
    assert theirs > 10 * ours


def seconds_of(call: Callable[[], object], number: int) -> float:
    return min(timeit.repeat(call, number=number, repeat=5)) / number
