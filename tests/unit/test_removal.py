"""Guarded addresses taken out of replies, as dnspython reads what is left."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import dns.edns
import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import dns.tsig
import pytest

from agent.core.guard import AddressGuard
from agent.core.types import PROTOCOL_UDP, Prefix, packed
from agent.dns import messages
from agent.dns.removal import guarded_addresses, without_addresses
from agent.dns.wire import Question, Status, read_name, read_question, read_reply

GUARD = AddressGuard([packed("172.17.0.1")])
METADATA, PRIVATE, PUBLIC = "169.254.169.254", "10.1.2.3", "198.51.100.110"


def asked(name: str = "A.TesT.", rtype: str = "A", **options: Any) -> tuple[dns.message.QueryMessage, Question]:
    query = dns.message.make_query(name, rtype, id=0xBEEF, **{"use_edns": 0, **options})
    return query, read_question(query.to_wire())


def reply_of(
    query: dns.message.QueryMessage, *answer: str, authority: Sequence[str] = (), additional: Sequence[str] = ()
) -> bytes:
    """Records as `owner TTL type data`, in this order, sets not gathered."""
    reply = dns.message.make_response(query, our_payload=4096)
    reply.flags |= dns.flags.RA | dns.flags.AD
    for section, lines in ((reply.answer, answer), (reply.authority, authority), (reply.additional, additional)):
        for line in lines:
            owner, ttl, rtype, data = line.split(" ", 3)
            section.append(dns.rrset.from_text(owner, int(ttl), "IN", rtype, data))
    return reply.to_wire(max_size=65535)


def removed(reply: bytes, question: Question, allowed: Sequence[Prefix] = ()) -> bytes:
    assert read_reply(reply, question).status is Status.OK
    kinds = guarded_addresses(reply, lambda address: GUARD.forbids(address, allowed))
    assert kinds
    altered = without_addresses(reply, question, kinds)
    assert altered is not None
    return altered


def lines_of(section: Sequence[dns.rrset.RRset]) -> list[str]:
    return [f"{rrset.name} {rrset.ttl} {dns.rdatatype.to_text(rrset.rdtype)} {rdata}" for rrset in section for rdata in rrset]


def read(octets: bytes) -> dns.message.Message:
    return dns.message.from_wire(octets, one_rr_per_rrset=True)


def error_of(message: dns.message.Message) -> str | None:
    (error,) = [option for option in message.options if isinstance(option, dns.edns.EDEOption)]
    assert error.code == 15
    return error.text


# --- bug cases, theme 14 ---------------------------------------------------------------------------------------------


def test_case_161_the_hosts_own_address() -> None:
    """A wildcard name that resolves to the host: NODATA, and the extended error says what it was."""
    query, question = asked("x.nip.test.")
    message = read(removed(reply_of(query, "x.nip.test. 60 A 172.17.0.1"), question))
    assert (message.rcode(), message.answer) == (dns.rcode.NOERROR, [])
    assert error_of(message) == "guarded address taken out: host"


def test_case_162_metadata_beside_a_public_address() -> None:
    """The reply holds the public address only, and the addresses left to learn are those."""
    query, question = asked("a.test.")
    reply = reply_of(query, f"a.test. 60 A {METADATA}", f"a.test. 60 A {PUBLIC}")
    altered = removed(reply, question)
    assert lines_of(read(altered).answer) == [f"a.test. 60 A {PUBLIC}"]
    assert error_of(read(altered)) == "guarded address taken out: metadata"
    kinds = guarded_addresses(reply, GUARD.forbids)
    left = [address for address, _ in read_reply(reply, question).addresses if address not in kinds]
    assert left == [address for address, _ in read_reply(altered, question).addresses] == [packed(PUBLIC)]


@pytest.mark.parametrize(("allowed", "left"), [(["10.0.0.0/8"], ["10.1.2.3"]), ([], [])])
def test_case_163_a_rightful_internal_name(allowed: list[str], left: list[str]) -> None:
    """With leave for 10.0.0.0/8 that address stays and 192.168.7.7 goes; without, NODATA."""
    query, question = asked("repo.internal.test.")
    reply = reply_of(query, "repo.internal.test. 60 A 10.1.2.3", "repo.internal.test. 60 A 192.168.7.7")
    message = read(removed(reply, question, [Prefix.parse(text) for text in allowed]))
    assert lines_of(message.answer) == [f"repo.internal.test. 60 A {text}" for text in left]
    assert error_of(message) == "guarded address taken out: private"


def test_case_165_a_denied_address_is_not_a_guarded_one() -> None:
    """What a rule denies is the datapath's to drop: the reply stays as it came."""
    query, _ = asked("a.test.")
    assert guarded_addresses(reply_of(query, "a.test. 60 A 203.0.113.7", "a.test. 60 A 198.51.100.165"), GUARD.forbids) == {}


def test_case_104_a_mapped_address() -> None:
    """An AAAA record with ::ffff:10.0.0.5: NODATA; with a public address inside it is none of the guard's business."""
    query, question = asked("a.test.", "AAAA")
    message = read(removed(reply_of(query, "a.test. 60 AAAA ::ffff:10.0.0.5"), question))
    assert (message.rcode(), message.answer) == (dns.rcode.NOERROR, [])
    assert error_of(message) == "guarded address taken out: private"
    assert guarded_addresses(reply_of(query, "a.test. 60 AAAA ::ffff:192.0.2.5"), GUARD.forbids) == {}


# --- which records go ------------------------------------------------------------------------------------------------

A_SIGNED = "A 8 2 60 20300101000000 20200101000000 1 test. aGVsbG8="
HTTPS_SIGNED = "HTTPS 8 2 60 20300101000000 20200101000000 1 test. aGVsbG8="


def test_a_set_loses_its_signature_and_the_reply_its_ad() -> None:
    """RRSIG of the set that lost a record goes, in whatever letter case; those of other sets and owners stay; AD is cleared."""
    query, question = asked("a.test.", want_dnssec=True)
    reply = reply_of(
        query,
        f"a.test. 60 A {PRIVATE}",
        f"a.test. 60 A {PUBLIC}",
        f"A.Test. 60 RRSIG {A_SIGNED}",
        f"a.test. 60 RRSIG {HTTPS_SIGNED}",
        f"b.test. 60 RRSIG {A_SIGNED}",
    )
    message = read(removed(reply, question))
    kept = [f"a.test. 60 A {PUBLIC}", f"a.test. 60 RRSIG {HTTPS_SIGNED}", f"b.test. 60 RRSIG {A_SIGNED}"]
    assert lines_of(message.answer) == kept
    assert message.flags & dns.flags.AD == 0
    assert message.flags & ~dns.flags.AD == dns.flags.QR | dns.flags.RD | dns.flags.RA


@pytest.mark.parametrize(
    "data",
    [
        f"1 . ipv4hint={PUBLIC},{PRIVATE}",
        "1 svc.test. alpn=h2 ipv6hint=2001:db8::1,fd00:ec2::254",
        "1 . ipv6hint=::ffff:10.0.0.5",
        "1 . ipv6hint=64:ff9b::a00:5",
    ],
)
@pytest.mark.parametrize("rtype", ["HTTPS", "SVCB"])
def test_a_service_record_goes_whole(rtype: str, data: str) -> None:
    """One guarded hint takes the record with it; the record beside it stays."""
    query, question = asked("a.test.", rtype)
    message = read(removed(reply_of(query, f"a.test. 60 {rtype} {data}", f"a.test. 60 {rtype} 2 ."), question))
    assert lines_of(message.answer) == [f"a.test. 60 {rtype} 2 ."]


def test_hints_that_a_strict_reader_refuses() -> None:
    """In alias mode, out of order and cut short: a client that takes them finds none."""
    params = b"\x00\x06\x00\x10" + packed("2001:db8::1") + b"\x00\x04\x00\x06" + packed(PRIVATE) + b"\xc0\x00"
    query, question = asked("a.test.")
    plain = reply_of(query, f"a.test. 60 A {PUBLIC}")
    service = b"\xc0\x0c" + struct.pack("!HHIH", 65, 1, 60, 3 + len(params)) + b"\x00\x00\x00" + params
    reply = plain[:10] + b"\x00\x02" + plain[12:] + service
    message = read(removed(reply, question))
    assert lines_of(message.answer) == [f"a.test. 60 A {PUBLIC}"]
    assert message.additional == []


def test_whatever_the_owner_class_and_section() -> None:
    """An address beside the chain, in the additional section or of another class is not shown either."""
    query, question = asked("a.test.", "MX")
    reply = reply_of(
        query,
        "a.test. 60 MX 10 mail.test.",
        f"other.test. 60 A {METADATA}",
        authority=["test. 60 NS ns.test."],
        additional=[f"mail.test. 60 A {PRIVATE}", "mail.test. 60 AAAA fe80::1", f"ns.test. 60 A {PUBLIC}"],
    )
    internet, chaos = [struct.pack("!HHIH", 1, rclass, 60, 4) + packed(METADATA) for rclass in (1, 3)]
    assert internet in reply
    for octets in (reply, reply.replace(internet, chaos)):
        message = read(removed(octets, question))
        assert lines_of(message.answer) == ["a.test. 60 MX 10 mail.test."]
        assert lines_of(message.authority) == ["test. 60 NS ns.test."]
        assert lines_of(message.additional) == [f"ns.test. 60 A {PUBLIC}"]
        assert error_of(message) == "guarded address taken out: link-local, metadata, private"


def test_the_chain_stays_when_its_end_goes() -> None:
    """NODATA at the end of an alias. NS and SOA go: the client must not take it for a referral, nor cache it."""
    query, question = asked("a.test.")
    reply = reply_of(
        query,
        "a.test. 60 CNAME b.test.",
        f"b.test. 60 A {PRIVATE}",
        authority=["test. 60 NS ns.test.", "test. 60 SOA ns.test. root.test. 1 2 3 4 5"],
    )
    message = read(removed(reply, question))
    assert (message.rcode(), lines_of(message.answer), message.authority) == (
        dns.rcode.NOERROR,
        ["a.test. 60 CNAME b.test."],
        [],
    )


# --- what stays as it was --------------------------------------------------------------------------------------------


def test_without_edns_there_is_no_extended_error() -> None:
    """Who does not speak EDNS gets none."""
    query, question = asked("a.test.", use_edns=False)
    message = read(removed(reply_of(query, f"a.test. 60 A {PRIVATE}"), question))
    assert (message.edns, message.answer) == (-1, [])


def test_the_upstreams_opt_is_added_to() -> None:
    """Size, DO, cookie and the upstream's own extended error stay; ours comes last."""
    query, question = asked("a.test.", options=[dns.edns.GenericOption("COOKIE", b"12345678")])
    response = dns.message.from_wire(reply_of(query, f"a.test. 60 A {PRIVATE}"))
    theirs = [dns.edns.GenericOption("COOKIE", b"12345678" * 2), dns.edns.EDEOption("STALE_ANSWER", "stale")]
    response.use_edns(0, dns.flags.DO, payload=1400, options=theirs)
    message = read(removed(response.to_wire(), question))
    assert (message.payload, message.ednsflags & dns.flags.DO) == (1400, dns.flags.DO)
    ours = dns.edns.EDEOption("BLOCKED", "guarded address taken out: private")
    assert [option.to_wire() for option in message.options] == [option.to_wire() for option in [*theirs, ours]]


def test_a_reply_without_opt_gets_one() -> None:
    """The client spoke EDNS, the upstream does not: the extended error comes in an OPT of ours, with the client's cookie."""
    query, question = asked("a.test.", options=[dns.edns.GenericOption("COOKIE", b"12345678")])
    response = dns.message.from_wire(reply_of(query, f"a.test. 60 A {PRIVATE}"))
    response.use_edns(False)
    message = read(removed(response.to_wire(), question))
    assert (message.edns, message.payload) == (0, messages.UDP_SIZE)
    assert [int(option.otype) for option in message.options] == [10, 15]


def test_the_clients_letter_case() -> None:
    """The question is the client's octet for octet, and so is every owner that pointed to it; other names keep their own."""
    query, question = asked("wWw.A.TesT.")
    reply = reply_of(
        query, f"wWw.A.TesT. 60 A {PRIVATE}", f"wWw.A.TesT. 60 A {PUBLIC}", f"www.a.test. 60 A {PUBLIC}", "X.a.TesT. 60 TXT x"
    )
    reply = reply[:12] + question.section.swapcase()[:-4] + reply[len(question.section) + 8 :]
    altered = removed(reply, question)
    assert altered[12 : 12 + len(question.section)] == question.section
    assert lines_of(read(altered).answer)[0] == f"wWw.A.TesT. 60 A {PUBLIC}"


def record(owner: bytes, rtype: int, data: bytes) -> bytes:
    return owner + struct.pack("!HHIH", rtype, 1, 60, len(data)) + data


def pointer(place: int) -> bytes:
    return struct.pack("!H", 0xC000 | place)


def test_pointers_into_what_is_gone() -> None:
    """Owners and data of every kind that hang on a record's owner survive the record."""
    query, question = asked("a.test.", "ANY", use_edns=False)
    header = query.to_wire()
    start = len(header)
    gone = record(b"\x04Gone" + pointer(14), 1, packed(PRIVATE))  # Gone.test; its owner starts at `start`
    away, test, at = pointer(start), pointer(14), start + len(gone)
    # A name that stands inside the data of a record that goes: the target of a service.
    service = record(b"\xc0\x0c", 65, b"\x00\x01\x03svc\x00" + b"\x00\x04\x00\x04" + packed(PRIVATE))
    svc = pointer(at + 12 + 2)
    kept = [
        record(away, 1, packed(PUBLIC)),
        record(b"\x02in" + away, 5, away),
        record(svc, 16, b"\x02hi"),
        record(b"\xc0\x0c", 6, away + b"\x04root" + away + struct.pack("!5I", 1, 2, 3, 4, 5)),
        record(b"\xc0\x0c", 15, b"\x00\x0a" + away),
        record(b"\xc0\x0c", 33, b"\x00\x01\x00\x02\x00\x03" + away),
        record(b"\xc0\x0c", 35, b"\x00\x01\x00\x02\x01s\x00\x03!a!" + away),
        record(b"\xc0\x0c", 26, b"\x00\x01" + away + svc),
        record(b"\xc0\x0c", 17, test + away),
        record(b"\xc0\x0c", 12345, away + b"\xff\x00any octets"),  # unknown: no pointer, whatever it looks like
    ]
    reply = (
        header[:2] + b"\x81\x80" + struct.pack("!4H", 1, 2 + len(kept), 0, 0) + header[12:] + gone + service + b"".join(kept)
    )
    before = lines_of(read(reply).answer)
    after = lines_of(read(removed(reply, question)).answer)
    assert after == [line for line in before if PRIVATE not in line]
    assert len(after) == len(kept)
    assert "in.Gone.test. 60 CNAME Gone.test." in after
    assert 'svc. 60 TXT "hi"' in after


@pytest.mark.parametrize(("rtype", "skip", "names"), [(14, 0, 2), (30, 0, 1), (24, 18, 1), (46, 18, 1), (47, 0, 1)])
def test_pointers_that_dnspython_does_not_follow(rtype: int, skip: int, names: int) -> None:
    """MINFO and NXT it takes for unknown octets, in signatures and NSEC it refuses pointers: our own reader judges."""
    query, question = asked("a.test.", "ANY", use_edns=False)
    header = query.to_wire()
    gone = record(b"\x04Gone" + pointer(14), 1, packed(PRIVATE))
    away = b"\x03Err" + pointer(len(header))
    kept = record(b"\xc0\x0c", rtype, b"\x00\x0f" * (skip // 2) + away * names + b"more")
    reply = header[:2] + b"\x81\x80" + struct.pack("!4H", 1, 2, 0, 0) + header[12:] + gone + kept
    altered = removed(reply, question)
    at = len(header) + 2 + 10 + skip
    for _ in range(names):
        name, at = read_name(altered, at, {})
        assert name == b"\x03err\x04gone\x04test\x00"
    assert altered[at:] == b"more"


def test_names_beyond_the_reach_of_pointers() -> None:
    """A pointer has fourteen bits: names that first stand behind them are written out each time."""
    query, question = asked("a.test.", "ANY")
    far = [f"far.test. 60 A {PUBLIC}", "far.test. 60 MX 10 far.test."]
    reply = reply_of(query, f"a.test. 60 A {PRIVATE}", f"a.test. 60 TYPE4660 \\# 17000 {'00' * 17000}", *far)
    assert lines_of(read(removed(reply, question)).answer)[1:] == far


# --- what cannot be altered ------------------------------------------------------------------------------------------


def test_a_signed_reply_is_not_altered() -> None:
    """TSIG, as dnspython signs it, and SIG(0): None, for the caller to answer SERVFAIL."""
    query, question = asked("a.test.")
    query.use_tsig(dns.tsig.Key("key.test.", b"secret"))
    query.to_wire()
    response = dns.message.make_response(query)
    response.answer.append(dns.rrset.from_text("a.test.", 60, "IN", "A", PRIVATE))
    signed = response.to_wire()
    kinds = guarded_addresses(signed, GUARD.forbids)
    assert kinds == {packed(PRIVATE): "private"}
    assert without_addresses(signed, question, kinds) is None
    plain = reply_of(asked("a.test.")[0], f"a.test. 60 A {PRIVATE}")
    sig0 = record(b"\x00", 24, bytes(18) + b"\x00" + b"signature")
    counted = plain[:10] + struct.pack("!H", 2) + plain[12:] + sig0
    assert guarded_addresses(counted, GUARD.forbids) == kinds
    assert without_addresses(counted, question, kinds) is None
    # The signature of a set is no signature of the message.
    covering = plain[:10] + struct.pack("!H", 2) + plain[12:] + record(b"\x00", 24, b"\x00\x0f" + bytes(16) + b"\x00sig")
    assert without_addresses(covering, question, kinds) is not None


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\xc0\xff", id="forward, out of the message"),
        pytest.param(b"\xc0\x45", id="forward, to a name"),
        pytest.param(b"\xc0\x43", id="to itself"),
        pytest.param(b"\x80\x0c", id="a label of an unknown kind"),
        pytest.param(b"\x03", id="into the next record"),
        pytest.param(b"\xc0", id="half a pointer"),
    ],
)
def test_a_name_that_cannot_be_read(data: bytes) -> None:
    """It cannot be written again, so the reply is not given."""
    query, question = asked("a.test.", use_edns=False)
    plain = reply_of(query, f"a.test. 60 A {PRIVATE}", f"a.test. 60 A {PUBLIC}")
    authority = record(b"\x00", 2, data) + record(b"\x01n\x00", 16, b"\x01x")
    reply = plain[:8] + struct.pack("!H", 2) + plain[10:] + authority
    assert reply[0x43:].startswith(data)
    assert data != b"\xc0\x45" or reply[0x45:].startswith(b"\x01n\x00")
    assert read_reply(reply, question).status is Status.OK
    kinds = guarded_addresses(reply, GUARD.forbids)
    assert kinds
    assert without_addresses(reply, question, kinds) is None


def test_a_reply_that_would_outgrow_every_message() -> None:
    """Names that may not be compressed come out long: beyond 65,535 octets there is no message."""
    query, question = asked(".".join(["x" * 63] * 3 + ["y" * 50]) + ".", "ANY", use_edns=False)
    count = 400
    services = b"".join(record(b"\xc0\x0c", 33, struct.pack("!3H", n, 0, 443) + b"\xc0\x0c") for n in range(count))
    header = query.to_wire()
    reply = header[:2] + b"\x81\x80" + struct.pack("!4H", 1, count + 1, 0, 0) + header[12:] + services
    reply += record(b"\xc0\x0c", 1, packed(PRIVATE))
    kinds = guarded_addresses(reply, GUARD.forbids)
    assert read_reply(reply, question).status is Status.OK
    assert kinds
    assert without_addresses(reply, question, kinds) is None


def test_a_reply_that_outgrows_the_client_is_truncated() -> None:
    """The extended error may be the octets too many: `messages.fit` then sends TC, and no record is lost unseen."""
    query, question = asked("a.test.", payload=512)
    # 29 addresses and OPT fill 499 octets; one goes, the extended error comes.
    reply = reply_of(query, f"a.test. 60 A {PRIVATE}", *[f"a.test. 60 A 198.18.0.{n}" for n in range(28)])
    assert len(reply) <= 512
    altered = removed(reply, question)
    assert len(altered) > 512
    message = read(messages.fit(altered, question, PROTOCOL_UDP))
    assert message.flags & dns.flags.TC
    assert message.answer == []
    assert error_of(message) == "guarded address taken out: private"
