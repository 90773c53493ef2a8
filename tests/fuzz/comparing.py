"""Agreement with dnspython: what both take for good they read alike; where only one takes it, the difference is in this list.

Any other difference is a Disagreement. What the walker alone takes:

    stepped over    dnspython reads the data of every record. The walker reads those that bear on addresses and steps over the
                    others by length (wire.py): what is wrong inside is the client's business, and so is an option of EDNS.
    parameters      Of a service record the walker reads priority, target, order and hints. Whether `mandatory` is kept, or
                    alias mode has parameters (clients ignore them, RFC 9460 2.4.2), decides nothing about an address.
    chain length    dnspython follows at most 16 pointers; the walker as many as a name can need (126).
    DNAME           with a compressed target, which nobody may write (RFC 3597 4) and old servers wrote: it is read as meant.
    overlap         A pointer may lead to labels that run into the name that points. It ends all the same, since each label goes
                    forward and each pointer back, and whoever follows it reads the same name.
    TSIG            of a class other than ANY, or last in a section that is not the additional one: whoever has the key refuses
                    it; here it only means that the reply is not altered.

What dnspython alone takes:

    loop            The chain of aliases comes back to itself: SERVFAIL (DECISIONS 11).
    two aliases     Two CNAMEs or DNAMEs of one owner with different targets (RFC 2181 10.1): which one a client takes nobody
                    knows.
    OPT owner       A pointer to a root name, where RFC 6891 6.1.2 has one zero octet: whoever reads an OPT by its fixed places,
                    and passes it on, would read the octet beside it.
    no question     A query that is a response, has not one question, another opcode than QUERY, or a question name with a
                    pointer, which has nothing to point at but the header.
"""

from __future__ import annotations

import dns.exception
import dns.message
import dns.name
import dns.rdataclass
import dns.rdatatype

from agent.core.types import packed
from agent.dns.wire import Answer, Question, find_opt
from tests.fuzz import reference

_READ_IN_ANSWERS = frozenset({reference.A, reference.AAAA, reference.CNAME, reference.DNAME})


class Disagreement(Exception):
    """Read differently by both, or good for one of them without a reason that is listed."""


def compare_query(query: bytes, question: Question | None) -> str:
    """What came of it: `both`, `neither`, or the name of the difference."""
    theirs, error = _read(query)
    if question is None:
        return "neither" if theirs is None else _why_only_theirs_query(query)
    if theirs is None:
        return _why_only_ours(query, error)
    (asked,) = theirs.question
    _same("name", question.wire_name, asked.name.canonicalize().to_wire())
    _same("type and class", (question.qtype, question.qclass), (asked.rdtype, asked.rdclass))
    _same("id and flags", (question.id, question.flags), (theirs.id, int(theirs.flags)))
    ours = None if question.edns is None else (question.edns.version, question.edns.udp_size, question.edns.do)
    _same("EDNS", ours, (theirs.edns, theirs.payload, bool(theirs.ednsflags & 0x8000)) if theirs.edns >= 0 else None)
    if question.edns is not None and question.edns.cookie is not None:
        cookies = [option.to_wire() for option in theirs.options if option.otype == 10]
        _same("cookie", question.edns.cookie, cookies[0])
    return "both"


def compare_reply(reply: bytes, question: Question, answer: Answer) -> str | None:
    """As for a query; None for what only the walker judges: it is a reply to the question, and nobody may use a cut one."""
    if answer.status.name in ("MISMATCH", "TRUNCATED"):
        return None
    theirs, error = _read(reply)
    if answer.status.name != "OK":
        return "neither" if theirs is None else _why_only_theirs(reply, theirs, answer)
    if theirs is None:
        return _why_only_ours(reply, error)
    (asked,) = theirs.question
    _same("question", question.wire_name, asked.name.canonicalize().to_wire())
    _same("result code", answer.rcode, int(theirs.rcode()))
    opt = find_opt(reply)
    ours_of_opt = None if opt is None else (int.from_bytes(opt[3:5], "big"), opt[6])
    _same("OPT", ours_of_opt, (theirs.payload, theirs.edns) if theirs.edns >= 0 else None)
    may, is_exact = _addresses(theirs, asked)
    ours = dict(answer.addresses)
    # Where there are several ways on, the twin has gone all of them, and found other records of the same address.
    if ours != may if is_exact else any(ttl > may.get(address, -1) for address, ttl in ours.items()):
        raise Disagreement(f"addresses: the walker says {ours}, dnspython {may}")
    return "both"


def is_readable(octets: bytes) -> bool:
    return _read(octets)[0] is not None


def _read(octets: bytes) -> tuple[dns.message.Message | None, Exception | None]:
    try:
        return dns.message.from_wire(octets, keyring=False, ignore_trailing=True, one_rr_per_rrset=True), None
    # Besides dnspython's own, ValueError and its kind from the text of an option or the struct of a record.
    except (dns.exception.DNSException, ValueError, IndexError) as error:
        return None, error


def _same(what: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise Disagreement(f"{what}: the walker says {ours!r}, dnspython {theirs!r}")


def _addresses(message: dns.message.Message, asked: dns.rrset.RRset) -> tuple[dict[bytes, int], bool]:
    """Over every alias from the question, with the longest TTL of each; exact if no name on the way has two ways on."""
    if message.rcode() != 0 or asked.rdclass != dns.rdataclass.IN:
        return {}, True
    answers = [rrset for rrset in message.answer if rrset.rdclass == dns.rdataclass.IN]
    reached: set[dns.name.Name] = set()
    new, is_exact = {asked.name}, True
    while new and len(reached) < reference.REACHED_MAX:
        reached |= new
        following = set()
        for name in new:
            targets = {rrset[0].target for rrset in answers if rrset.rdtype == dns.rdatatype.CNAME and rrset.name == name}
            for rrset in answers:
                if rrset.rdtype == dns.rdatatype.DNAME and name.is_subdomain(rrset.name) and name != rrset.name:
                    try:
                        targets.add(name.relativize(rrset.name).concatenate(rrset[0].target))
                    except dns.name.NameTooLong:
                        is_exact = False
            is_exact = is_exact and len(targets) < 2
            following |= targets
        new = following - reached
    longest: dict[bytes, int] = {}
    for rrset in answers:
        if rrset.name not in reached and not new:
            continue
        (record,) = rrset
        found: list[str] = []
        if rrset.rdtype in (dns.rdatatype.A, dns.rdatatype.AAAA):
            found = [record.address]
        elif rrset.rdtype in (dns.rdatatype.HTTPS, dns.rdatatype.SVCB) and record.priority:
            found = [text for key in (4, 6) if key in record.params for text in record.params[key].addresses]
        for text in found:
            longest[packed(text)] = max(rrset.ttl, longest.get(packed(text), 0))
    return longest, is_exact and not new


# --- differences -----------------------------------------------------------------------------------------------------------


def _why_only_theirs_query(query: bytes) -> str:
    if query[2] & 0xF8 or query[4:6] != b"\x00\x01":
        return "dnspython alone: no question"
    if query[reference.name_at(query, 12)[1] - 2] >= 0xC0:
        return "dnspython alone: no question"
    if _has_pointing_opt(query):
        return "dnspython alone: OPT owner"
    raise Disagreement("dnspython alone takes the query")


def _has_pointing_opt(octets: bytes) -> bool:
    return any(record.rtype == reference.OPT and octets[record.start] for record in reference.records_of(octets))


def _why_only_theirs(reply: bytes, message: dns.message.Message, answer: Answer) -> str:
    if answer.status.name == "LOOP":
        return "dnspython alone: loop"
    targets: dict[tuple[dns.name.Name, int], dns.name.Name] = {}
    for rrset in message.answer:
        is_alias = rrset.rdclass == dns.rdataclass.IN and rrset.rdtype in (dns.rdatatype.CNAME, dns.rdatatype.DNAME)
        if is_alias and targets.setdefault((rrset.name, rrset.rdtype), rrset[0].target) != rrset[0].target:
            return "dnspython alone: two aliases"
    if _has_pointing_opt(reply):
        return "dnspython alone: OPT owner"
    raise Disagreement("dnspython alone takes the reply")


def _why_only_ours(octets: bytes, error: Exception | None) -> str:
    records = list(reference.records_of(octets))
    if isinstance(error, dns.message.BadTSIG):
        last = records[-1]
        signed = [record for record in records if record.rtype == reference.TSIG]
        if signed == [last] and (last.rclass != 255 or last.section != reference.ADDITIONAL):
            return "ours alone: TSIG"
        raise Disagreement(f"ours alone takes a message with a TSIG in the wrong place: {error}")
    # Again, with the place of each mistake.
    reading = dns.message.from_wire(octets, keyring=False, ignore_trailing=True, one_rr_per_rrset=True, continue_on_error=True)
    found = {_why_of(octets, records, mistake.exception, mistake.offset) for mistake in reading.errors}
    if not found:
        raise Disagreement(f"ours alone takes it: {error}")
    return "ours alone: " + min(found)


def _why_of(octets: bytes, records: list[reference.Record], error: Exception, offset: int) -> str:
    for record in records:
        if record.data <= offset <= record.end:
            is_read = record.section == reference.ANSWER and record.rclass == reference.IN
            if is_read and record.rtype in reference.SERVICES:
                return "parameters"
            if not is_read or record.rtype not in _READ_IN_ANSWERS:
                return "stepped over"
            if record.rtype == reference.DNAME and isinstance(error, dns.name.DecompressionForbidden):
                return "DNAME"
    if isinstance(error, dns.name.PointerChainTooLong):
        return "chain length"
    if any(_overlaps(octets, at) for record in records for at in (record.start, record.data)):
        return "overlap"
    raise Disagreement(f"ours alone takes it: {type(error).__name__} at {offset}: {error}")


def _overlaps(octets: bytes, at: int) -> bool:
    """Does a pointer of the name lead to labels that run into the octets that point there?"""
    begun, limit = at, len(octets)
    while at < len(octets) and (length := octets[at]):
        if length >= 0xC0:
            limit, at = begun, int.from_bytes(octets[at : at + 2], "big") & 0x3FFF
            if at >= begun:
                return False
            begun = at
        else:
            at += 1 + length
            if at >= limit:
                return True
    return False
