"""Taking guarded addresses out of a reply (DECISIONS 13).

Rule 1: what the client gets holds no guarded address that a resolver library would use: none in an A or AAAA record, whatever
its owner, class and section (musl looks at neither owner nor class), and no HTTPS or SVCB record with one as a hint.
Rule 2: everything else arrives as it was: order, TTLs, letter case, unknown types, the upstream's options. Only the names are
written anew, because a pointer may lead into a record that is gone.
Rule 3: what cannot be altered is not altered: a message that is signed as a whole, or one we cannot write again.

Why by hand and not as objects of dnspython: the reply must be read here exactly as the walker of wire.py reads it, or what one
of them does not see gets through; and a record whose data nobody here needs must not be able to spoil the reply.

The extended error is Blocked (15): a policy of who operates the resolver. Filtered (17) is what the client itself asked to be
filtered, Forged (4) says that what is still there is made up (RFC 8914 4).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from struct import Struct
from typing import NamedTuple

from agent.core.types import Address
from agent.dns import messages
from agent.dns.messages import ExtendedError
from agent.dns.wire import (
    FLAG_AD,
    HEADER,
    HEADER_OCTETS,
    JUMPS_MAX,
    LABEL_OCTETS_MAX,
    NAME_OCTETS_MAX,
    POINTER,
    TYPE_A,
    TYPE_AAAA,
    TYPE_CNAME,
    TYPE_DNAME,
    TYPE_HTTPS,
    TYPE_OPT,
    TYPE_SVCB,
    TYPE_TSIG,
    Fault,
    Question,
    WireError,
    unmapped,
)

TYPE_SIG = 24
TYPE_RRSIG = 46
MESSAGE_OCTETS_MAX = 0xFFFF

_ADDRESS_OCTETS = {TYPE_A: 4, TYPE_AAAA: 16}
_SERVICES = frozenset((TYPE_HTTPS, TYPE_SVCB))
_TYPES_WITH_ADDRESSES = _SERVICES.union(_ADDRESS_OCTETS)
_HINT_OCTETS_BY_KEY = {4: 4, 6: 16}  # ipv4hint, ipv6hint (RFC 9460 14.3.2)
_SIGNATURES = frozenset((TYPE_SIG, TYPE_RRSIG))
# An answer section of nothing but these says where to look, not what is there.
_ON_THE_WAY = _SIGNATURES | {TYPE_CNAME, TYPE_DNAME}
ANSWER, AUTHORITY, ADDITIONAL = range(3)

_FIXED = Struct("!HHIH")  # type, class, TTL, length of the data
_PAIR = Struct("!HH")
_POINTER_TARGET_MAX = 0x3FFF


class _Layout(NamedTuple):
    """Where names stand in a type's data: behind `skip` octets, `names` of them, then octets that hold none.

    may_compress: only the types of RFC 1035 may be written with pointers (RFC 3597 4); in the others they may be met.
    """

    skip: int
    names: int
    may_compress: bool = False


# Every type whose data may hold a pointer; RFC 3597 4 forbids it to all that came later, so this list is complete. NAPTR has
# strings in front and is measured on its own. RRSIG and NSEC must not use pointers (RFC 4034 3.1.7, 4.1.1); early signers did.
_NAPTR = 35
_LAYOUTS = {
    2: _Layout(0, 1, True),  # NS
    3: _Layout(0, 1, True),  # MD
    4: _Layout(0, 1, True),  # MF
    TYPE_CNAME: _Layout(0, 1, True),
    6: _Layout(0, 2, True),  # SOA
    7: _Layout(0, 1, True),  # MB
    8: _Layout(0, 1, True),  # MG
    9: _Layout(0, 1, True),  # MR
    12: _Layout(0, 1, True),  # PTR
    14: _Layout(0, 2, True),  # MINFO
    15: _Layout(2, 1, True),  # MX
    17: _Layout(0, 2),  # RP
    18: _Layout(2, 1),  # AFSDB
    21: _Layout(2, 1),  # RT
    TYPE_SIG: _Layout(18, 1),
    26: _Layout(2, 2),  # PX
    30: _Layout(0, 1),  # NXT
    33: _Layout(6, 1),  # SRV
    36: _Layout(2, 1),  # KX
    TYPE_DNAME: _Layout(0, 1),
    TYPE_RRSIG: _Layout(18, 1),
    47: _Layout(0, 1),  # NSEC
}


class Record(NamedTuple):
    """Where a record stands: its section, its owner, its data."""

    section: int
    start: int
    rtype: int
    data: int
    end: int


# --- what is in a reply ----------------------------------------------------------------------------------------------


def guarded_addresses(reply: bytes, forbids: Callable[[Address], str | None]) -> dict[Address, str]:
    """The forbidden addresses of a reply, each with its kind; nearly always none.

    The reply is one that `read_reply` called OK. Addresses are as it gives them: a v4-mapped one is the IPv4 address.
    """
    # Once for every reply that is learned from, so without the records and generators of the rest of this file.
    kinds: dict[Address, str] = {}
    _, _, _, answers, authorities, additionals = HEADER.unpack_from(reply)
    at = _behind_name(reply, HEADER_OCTETS) + 4
    for _ in range(answers + authorities + additionals):
        # Nearly every owner is one pointer.
        at = at + 2 if reply[at] >= POINTER else _behind_name(reply, at)
        rtype, _, _, length = _FIXED.unpack_from(reply, at)
        data = at + 10
        at = data + length
        if rtype in _TYPES_WITH_ADDRESSES:
            for address in _addresses(rtype, reply[data:at]):
                kind = forbids(address)
                if kind is not None:
                    kinds[address] = kind
    return kinds


def _addresses(rtype: int, data: bytes) -> Iterable[Address]:
    """The addresses a client could take from a record.

    Of a service record also what a strict reader refuses (hints in alias mode, parameters out of order): it is not sure that
    every client is one.
    """
    octets = _ADDRESS_OCTETS.get(rtype)
    if octets is not None:
        return (unmapped(data),) if len(data) == octets else ()
    return _hints(data) if rtype in _SERVICES else ()


def _hints(data: bytes) -> Iterator[Address]:
    try:
        at = _behind_name(data, 2)
        while at < len(data):
            key, length = _PAIR.unpack_from(data, at)
            at += 4
            octets = _HINT_OCTETS_BY_KEY.get(key)
            if octets is not None:
                value = data[at : at + length]
                for start in range(0, len(value) - octets + 1, octets):
                    yield unmapped(value[start : start + octets])
            at += length
    except (IndexError, struct.error):
        return


def _behind_name(message: bytes, at: int) -> int:
    while length := message[at]:
        if length >= POINTER:
            return at + 2
        at += 1 + length
    return at + 1


# --- writing it again ------------------------------------------------------------------------------------------------


def without_addresses(reply: bytes, question: Question, kinds: Mapping[Address, str]) -> bytes | None:
    """The reply without the records that hold one of these addresses, and without the signatures of their sets.

    None where it cannot be altered: it is signed with TSIG or SIG(0), a name in it cannot be read, or written again it would be
    longer than a message may be. The client is then owed a SERVFAIL. The result may be longer than the reply: `messages.fit`.
    kinds: as from `guarded_addresses` of this reply. The question section is the client's, in its letter case.
    """
    # Names that point into the question come out in the client's case.
    start = HEADER_OCTETS + len(question.section)
    source = reply[:HEADER_OCTETS] + question.section + reply[start:]
    records = list(walk(source))
    if any(signs_the_message(source, record) for record in records):
        return None
    guarded = {
        record
        for record in records
        if any(address in kinds for address in _addresses(record.rtype, source[record.data : record.end]))
    }
    gone = set(guarded)
    try:
        rewriting = _Rewriting(source, question)
        sets = {(rewriting.name(record.start)[0].lower(), record.rtype) for record in guarded}
        for record in records:
            if record.rtype in _SIGNATURES and record.end - record.data >= 18:
                covered = int.from_bytes(source[record.data : record.data + 2], "big")
                if (rewriting.name(record.start)[0].lower(), covered) in sets:
                    gone.add(record)
        # Beside an answer that became empty NS would read as a referral, and SOA as leave to cache that (RFC 2308 2.2, 5).
        kept = [record for record in records if record not in gone]
        if any(record.section == ANSWER for record in guarded) and not any(_answers(record) for record in kept):
            kept = [record for record in kept if record.section != AUTHORITY]
        text = "guarded address taken out: " + ", ".join(sorted(set(kinds.values())))
        return rewriting.write(kept, messages.error_option(ExtendedError.BLOCKED, text))
    except (IndexError, struct.error, WireError):
        return None


def walk(message: bytes) -> Iterator[Record]:
    """Every record of a message that `read_reply` called OK, in order."""
    _, _, questions, *counts = HEADER.unpack_from(message)
    at = HEADER_OCTETS
    for _ in range(questions):
        at = _behind_name(message, at) + 4
    for section, count in enumerate(counts):
        for _ in range(count):
            start = at
            at = _behind_name(message, at)
            rtype, _, _, length = _FIXED.unpack_from(message, at)
            data = at + 10
            at = data + length
            yield Record(section, start, rtype, data, at)


def _answers(record: Record) -> bool:
    return record.section == ANSWER and record.rtype not in _ON_THE_WAY


def signs_the_message(message: bytes, record: Record) -> bool:
    """TSIG (RFC 8945), or SIG(0): a SIG that covers no type (RFC 2931 3)."""
    if record.rtype == TYPE_SIG:
        return message[record.data : record.end].startswith(b"\x00\x00")
    return record.rtype == TYPE_TSIG


class _Rewriting:
    """One message written again from another's records.

    Pointers are made only to names of the same letter case, so that every name keeps its own.
    """

    def __init__(self, source: bytes, question: Question) -> None:
        self._source = source
        self._question = question
        self._names_by_place: dict[int, bytes] = {}
        self._places_by_name: dict[bytes, int] = {}
        self._out = bytearray(HEADER_OCTETS)
        self._put_name(question.section[:-4])
        self._out += question.section[-4:]

    def write(self, records: list[Record], error: bytes) -> bytes | None:
        """error: the extended error as an option of EDNS."""
        counts = [0, 0, 0]
        has_edns = self._question.edns is not None
        has_opt = False
        for record in records:
            counts[record.section] += 1
            if record.rtype == TYPE_OPT and has_edns and not has_opt:
                has_opt = True
                self._put_record(record, error)
            else:
                self._put_record(record)
        if has_edns and not has_opt:
            counts[ADDITIONAL] += 1
            self._out += messages.own_opt(self._question, error)
        if len(self._out) > MESSAGE_OCTETS_MAX:
            return None
        number, flags = HEADER.unpack_from(self._source)[:2]
        HEADER.pack_into(self._out, 0, number, flags & ~FLAG_AD, 1, *counts)
        return bytes(self._out)

    def _put_record(self, record: Record, more: bytes = b"") -> None:
        """more: octets to add to the data."""
        owner, at = self.name(record.start)
        self._put_name(owner)
        fixed = len(self._out)
        self._out += self._source[at : record.data]
        self._put_data(record)
        self._out += more
        length = len(self._out) - fixed - 10
        if length > 0xFFFF:
            raise WireError(Fault.FORMERR, "data longer than its record can say")
        self._out[fixed + 8 : fixed + 10] = length.to_bytes(2, "big")

    def _put_data(self, record: Record) -> None:
        at, end = record.data, record.end
        layout = self._naptr(record) if record.rtype == _NAPTR else _LAYOUTS.get(record.rtype)
        if layout is not None and at < end:
            self._out += self._source[at : at + layout.skip]
            at += layout.skip
            for _ in range(layout.names):
                name, at = self.name(at)
                if layout.may_compress:
                    self._put_name(name)
                else:
                    self._out += name
            if at > end:
                raise WireError(Fault.FORMERR, "a name that runs past its record")
        self._out += self._source[at:end]

    def _naptr(self, record: Record) -> _Layout:
        """Order and preference, then three strings, then the name (RFC 3403 4.1)."""
        at = record.data + 4
        for _ in range(3):
            at += 1 + self._source[at]
        return _Layout(at - record.data, 1)

    def _put_name(self, name: bytes) -> None:
        at = 0
        while name[at]:
            place = self._places_by_name.get(name[at:])
            if place is not None:
                self._out += (POINTER << 8 | place).to_bytes(2, "big")
                return
            if len(self._out) <= _POINTER_TARGET_MAX:
                self._places_by_name[name[at:]] = len(self._out)
            self._out += name[at : at + 1 + name[at]]
            at += 1 + name[at]
        self._out.append(0)

    def name(self, at: int, jumps: int = 0) -> tuple[bytes, int]:
        """The name at `at`, uncompressed, in its own letter case, and the place behind it; by the rules of `wire.read_name`."""
        source, start = self._source, at
        while True:
            length = source[at]
            if length == 0:
                at += 1
                name = source[start:at]
                break
            if length <= LABEL_OCTETS_MAX:
                at += 1 + length
                continue
            if length < POINTER:
                raise WireError(Fault.FORMERR, "a label of an unknown kind")
            target = (length & 0x3F) << 8 | source[at + 1]
            if target >= start or jumps == JUMPS_MAX:
                raise WireError(Fault.FORMERR, "a pointer that does not go back, or too many")
            suffix = self._names_by_place.get(target)
            if suffix is None:
                suffix, _ = self.name(target, jumps + 1)
            name = source[start:at] + suffix
            at += 2
            break
        if len(name) > NAME_OCTETS_MAX:
            raise WireError(Fault.FORMERR, "a name of more than 255 octets")
        self._names_by_place[start] = name
        return name, at
