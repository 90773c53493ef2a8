"""Removal against dnspython: whatever the reply, what is left is what should be left, and nothing else changed."""

from __future__ import annotations

from collections import Counter

import dns.flags
import dns.message
import dns.rdatatype
import dns.rrset
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent.core.guard import AddressGuard
from agent.core.types import Address, packed
from agent.dns.removal import guarded_addresses, without_addresses
from agent.dns.wire import Status, read_question, read_reply

GUARD = AddressGuard([packed("203.0.113.9")])
NAMES = ["www.example.", "WWW.Example.", "a.www.example.", "cdn.Test.", "x.cdn.test.", "test.", "ns.test."]
ADDRESSES = ["192.0.2.1", "198.51.100.7", "10.0.0.1", "127.0.0.1", "169.254.169.254", "203.0.113.9"]
ADDRESSES6 = ["2001:db8::1", "::1", "::ffff:10.0.0.1", "::ffff:192.0.2.1", "64:ff9b::a00:1", "fe80::1"]
SIGNED = "8 2 60 20300101000000 20200101000000 1 Test. aGVsbG8="

DATA_BY_TYPE: dict[str, st.SearchStrategy[str]] = {
    "A": st.sampled_from(ADDRESSES),
    "AAAA": st.sampled_from(ADDRESSES6),
    "HTTPS": st.builds(
        "{} . ipv4hint={} ipv6hint={}".format, st.integers(1, 3), st.sampled_from(ADDRESSES), st.sampled_from(ADDRESSES6)
    ),
    "SVCB": st.builds("0 {}".format, st.sampled_from(NAMES)),
    "RRSIG": st.builds("{} {}".format, st.sampled_from(["A", "AAAA", "HTTPS", "MX"]), st.just(SIGNED)),
    "TXT": st.sampled_from(['"x"', '"10.0.0.1"']),
    "NS": st.sampled_from(NAMES),
    "MX": st.builds("10 {}".format, st.sampled_from(NAMES)),
    "SRV": st.builds("1 2 443 {}".format, st.sampled_from(NAMES)),
    "SOA": st.builds("{} {} 1 2 3 4 5".format, st.sampled_from(NAMES), st.sampled_from(NAMES)),
    "NAPTR": st.builds('1 2 "s" "x" "!a!b!" {}'.format, st.sampled_from(NAMES)),
    "TYPE4660": st.binary(max_size=9).map(lambda octets: f"\\# {len(octets)} {octets.hex()}"),
}

Record = tuple[int, str, int, str, str]  # section, owner, TTL, type, data
records_of = st.lists(
    st.sampled_from(sorted(DATA_BY_TYPE)).flatmap(
        lambda rtype: st.tuples(
            st.integers(0, 2), st.sampled_from(NAMES), st.integers(0, 2**31 - 1), st.just(rtype), DATA_BY_TYPE[rtype]
        )
    ),
    max_size=12,
)


def as_written(record: Record) -> tuple[int, str, int, str, str]:
    section, owner, ttl, rtype, data = record
    (rdata,) = dns.rrset.from_text(owner, ttl, "IN", rtype, data)
    return section, owner.lower(), ttl, rtype, rdata.to_digestable().hex()


def as_read(message: dns.message.Message) -> list[tuple[int, str, int, str, str]]:
    """to_digestable is the canonical form (RFC 4034 6.2): names uncompressed and, in the older types, in lower case."""
    return [
        (section, str(rrset.name).lower(), rrset.ttl, dns.rdatatype.to_text(rrset.rdtype), rdata.to_digestable().hex())
        for section, rrsets in enumerate((message.answer, message.authority, message.additional))
        for rrset in rrsets
        for rdata in rrset
    ]


def naive_addresses(record: Record) -> set[Address]:
    _, _, _, rtype, data = record
    if rtype in ("A", "AAAA"):
        return {packed(data)}
    if rtype == "HTTPS":
        return {packed(part.split("=")[1]) for part in data.split()[2:]}
    return set()


def naive_kept(records: list[Record]) -> list[Record]:
    gone = [record for record in records if any(GUARD.forbids(address) for address in naive_addresses(record))]
    sets = {(owner.lower(), rtype) for _, owner, _, rtype, _ in gone}
    kept = [
        record
        for record in records
        if record not in gone and not (record[3] == "RRSIG" and (record[1].lower(), record[4].split()[0]) in sets)
    ]
    is_answered = any(section == 0 and rtype != "RRSIG" for section, _, _, rtype, _ in kept)
    if any(record[0] == 0 for record in gone) and not is_answered:
        kept = [record for record in kept if record[0] != 1]
    return kept


@settings(max_examples=300, deadline=None)
@given(records_of, st.sampled_from(["www.example.", "wWw.eXample."]), st.sampled_from([None, 0]), st.booleans())
@example(  # a signature alone was taken out of the answer section, which had no address: it did not become empty by that
    [
        (1, "www.example.", 0, "A", "192.0.2.1"),
        (1, "a.www.example.", 0, "A", "10.0.0.1"),
        (0, "a.www.example.", 0, "RRSIG", f"A {SIGNED}"),
    ],
    "www.example.",
    None,
    False,
)
def test_what_is_left_is_what_should_be_left(records: list[Record], name: str, edns: int | None, upstream_edns: bool) -> None:
    """The twin takes the records out of a list; the message has just these, in order, and its header, question and OPT."""
    query = dns.message.make_query(name, "A", id=0x1234, use_edns=False if edns is None else edns)
    question = read_question(query.to_wire())
    response = dns.message.make_response(query)
    response.flags |= dns.flags.AD | dns.flags.AA
    response.use_edns(0 if upstream_edns else False, payload=1400)
    for section, owner, ttl, rtype, data in records:
        response.section_from_number(section + 1).append(dns.rrset.from_text(owner, ttl, "IN", rtype, data))
    reply = response.to_wire(max_size=65535)
    kinds = guarded_addresses(reply, GUARD.forbids)
    forbidden = {address for record in records for address in naive_addresses(record) if GUARD.forbids(address)}
    assert set(kinds) == forbidden
    answer = read_reply(reply, question)
    if answer.is_all:  # a glance says that there is no other address: then it needs no second look
        assert set(guarded_addresses(reply, lambda _: "any")) <= {address for address, _ in answer.addresses}
    if not kinds or answer.status is not Status.OK:
        return
    altered = without_addresses(reply, question, kinds)
    assert altered is not None
    message = dns.message.from_wire(altered, one_rr_per_rrset=True)
    expected = sorted(naive_kept(records), key=lambda record: record[0])
    assert as_read(message) == [as_written(record) for record in expected]
    assert altered[12 : 12 + len(question.section)] == question.section
    assert message.id == 0x1234
    assert message.flags == response.flags & ~dns.flags.AD
    assert guarded_addresses(altered, GUARD.forbids) == {}
    assert (message.edns >= 0) == (edns is not None or upstream_edns)
    assert Counter(int(option.otype) for option in message.options) == ({15: 1} if edns is not None else {})


@settings(max_examples=300, deadline=None)
@given(records_of, st.data())
def test_a_damaged_reply_is_altered_well_or_not_at_all(records: list[Record], data: st.DataObject) -> None:
    """Octets changed anywhere: if the walker calls it OK, the result is None or a message the walker reads, free of what was
    to go.
    """
    query = dns.message.make_query("www.example.", "A", id=0x1234, use_edns=0)
    question = read_question(query.to_wire())
    response = dns.message.make_response(query)
    for section, owner, ttl, rtype, text in records:
        response.section_from_number(section + 1).append(dns.rrset.from_text(owner, ttl, "IN", rtype, text))
    octets = bytearray(response.to_wire(max_size=65535))
    for place in data.draw(st.lists(st.integers(12 + len(question.section), len(octets) - 1), max_size=4)):
        octets[place] = data.draw(st.integers(0, 255) | st.sampled_from([0xC0, 0x00, 0x0C]))
    reply = bytes(octets)
    answer = read_reply(reply, question)
    if answer.status is not Status.OK:
        return
    if answer.is_all:
        assert set(guarded_addresses(reply, lambda _: "any")) <= {address for address, _ in answer.addresses}
    kinds = guarded_addresses(reply, GUARD.forbids)
    altered = without_addresses(reply, question, kinds)
    if altered is not None:
        assert read_reply(altered, question).status is Status.OK
        assert guarded_addresses(altered, GUARD.forbids) == {}
