"""Reading DNS messages from the wire: the question of a query, and the addresses a reply teaches.

Rule 1: whatever the octets are, the only exception is `WireError`, and only `read_question` lets it out.
Rule 2: an address is learned only if its owner is on the one chain of aliases that starts at the question (RFC 1034 3.6.2),
whatever the order of the records; only from the answer section, only when the result code, extended by OPT, is NOERROR.
Rule 3: names are compared as lower-case wire form, never as text: a dot inside a label is not a separator.

Why by hand: a message object of dnspython costs 20 to 1000 microseconds, a walk over the octets 1 to 6, and this is done once
for every question and every reply. What the walk does not need it steps over by length: unknown types, options and padding
pass unread, and nothing is ever re-encoded. Octets after the last record are stepped over as well, as resolvers do.

What came before comes again: resolvers' clients ask the same, and caches answer the same within a second. So the last short
messages, id apart, are remembered with what was read from them; being read is all that is remembered.

Why a pointer must go before the labels it continues: RFC 1035 4.1.4 calls it a prior occurrence, and with every jump going
further back a name ends after a bounded number of steps without a set of places already seen.
"""

from __future__ import annotations

import enum
import struct
from functools import lru_cache
from struct import Struct
from typing import Final, NamedTuple

from agent.core import names
from agent.core.types import Address

HEADER: Final = Struct("!6H")  # id, flags, and the four counts (RFC 1035 4.1.1)
HEADER_OCTETS: Final = HEADER.size

FLAG_QR: Final = 0x8000
FLAG_TC: Final = 0x0200
FLAG_RD: Final = 0x0100
FLAG_RA: Final = 0x0080
FLAG_AD: Final = 0x0020
FLAG_CD: Final = 0x0010
MASK_OPCODE: Final = 0x7800
MASK_RCODE: Final = 0x000F

TYPE_A: Final = 1
TYPE_CNAME: Final = 5
TYPE_AAAA: Final = 28
TYPE_DNAME: Final = 39
TYPE_OPT: Final = 41
TYPE_SVCB: Final = 64
TYPE_HTTPS: Final = 65
TYPE_TSIG: Final = 250
TYPE_IXFR: Final = 251
TYPE_AXFR: Final = 252
CLASS_IN: Final = 1

OPTION_COOKIE: Final = 10
EDNS_DO: Final = 0x8000

NAME_OCTETS_MAX: Final = 255
LABEL_OCTETS_MAX: Final = 63
POINTER: Final = 0xC0
# A name has at most 127 labels, so an honest one has at most 126 places where it can jump.
JUMPS_MAX: Final = 126

# Of messages that were read: so many of each kind, none longer. What nobody asks again costs what it holds, 2 KB at most.
REMEMBERED_MAX: Final = 4096
REMEMBERED_OCTETS_MAX: Final = 512
_NO_ID: Final = bytes(2)
# Pointers to the id: a name that goes on there is another behind another id, so the message is read as it is.
_TO_ID: Final = (b"\xc0\x00", b"\xc0\x01")

_RECORD: Final = Struct("!HHIH")  # type, class, TTL, length of the data (RFC 1035 4.1.3)
_COMPRESSED_RECORD: Final = Struct("!HHHIH")  # the same behind an owner that is one pointer
_SHORT_PAIR: Final = Struct("!HH")
_TTL_TOP_BIT: Final = 0x8000_0000
_V4_MAPPED: Final = bytes(10) + b"\xff\xff"
_TYPES_OF_MESSAGES: Final = frozenset({TYPE_OPT, TYPE_TSIG})  # about the message as a whole: never an answer
_TYPES_OF_SERVICES: Final = frozenset({TYPE_HTTPS, TYPE_SVCB})
_HINT_OCTETS_BY_KEY: Final = {4: 4, 6: 16}  # ipv4hint, ipv6hint (RFC 9460 14.3.2)


class Rcode(enum.IntEnum):
    NOERROR = 0
    FORMERR = 1
    SERVFAIL = 2
    NXDOMAIN = 3
    NOTIMP = 4
    REFUSED = 5


class Fault(enum.Enum):
    """What a message that is no question deserves."""

    IGNORE = "ignore"  # too short, or itself a response: answering could start a loop
    FORMERR = "formerr"
    NOTIMP = "notimp"  # an opcode other than QUERY


class WireError(Exception):
    """The octets are not what they should be; `fault` says how to answer."""

    def __init__(self, fault: Fault, why: str) -> None:
        super().__init__(why)
        self.fault = fault


class Edns(NamedTuple):
    """What the OPT record of a query says (RFC 6891 6.1.2).

    udp_size: as sent, unclamped. cookie: the COOKIE option's octets as sent (RFC 7873), None without one or with one of an
    illegal length.
    """

    udp_size: int
    version: int
    do: bool
    cookie: bytes | None


class Question:
    """The one question of a query.

    name: text as in `agent.core.names`. wire_name: the same in lower-case wire form. section: the question section as it came,
    in the client's case. flags: the header's second word.
    """

    __slots__ = ("edns", "flags", "id", "name", "qclass", "qtype", "section", "wire_name")

    def __init__(
        self,
        number: int,
        flags: int,
        name: str,
        wire_name: bytes,
        qtype: int,
        qclass: int,
        section: bytes,
        edns: Edns | None,
    ) -> None:
        self.id = number
        self.flags = flags
        self.name = name
        self.wire_name = wire_name
        self.qtype = qtype
        self.qclass = qclass
        self.section = section
        self.edns = edns


class Status(enum.Enum):
    OK = "ok"  # may be passed on; a result code other than NOERROR is OK and teaches nothing
    TRUNCATED = "truncated"  # what it holds is not to be used (RFC 2181 9): pass on `messages.truncated`, not these octets
    MALFORMED = "malformed"
    LOOP = "loop"  # the chain of aliases comes back to itself
    MISMATCH = "mismatch"  # not a reply to this question


class Answer(NamedTuple):
    """What a reply teaches about the name that was asked.

    rcode: with the upper bits of OPT. addresses: each once, with the TTL of its own record in seconds (the longest, if it
    came twice); empty unless status is OK and rcode NOERROR. chain: the name asked, then the targets of its aliases.
    is_all: there is no other address in any section, as far as a glance shows; False says nothing.
    """

    status: Status
    rcode: int
    addresses: tuple[tuple[Address, int], ...]
    chain: tuple[str, ...]
    is_all: bool = False


@lru_cache(maxsize=8192)  # the same names come again and again; strangers can push out entries, never add to the bound
def name_of(wire_name: bytes) -> str:
    """Text of a name in lower-case wire form."""
    return names.from_wire(wire_name)


# --- questions -------------------------------------------------------------------------------------------------------


def read_question(message: bytes) -> Question:
    """The question of a query; WireError if there is not exactly one, or the message cannot be walked to its end."""
    q = _rest_of_question(message[2:]) if 2 < len(message) <= REMEMBERED_OCTETS_MAX else None
    if q is None:
        return _read_question(message)
    number = message[0] << 8 | message[1]
    return Question(number, q.flags, q.name, q.wire_name, q.qtype, q.qclass, q.section, q.edns)


@lru_cache(maxsize=REMEMBERED_MAX)
def _rest_of_question(behind_id: bytes) -> Question | None:
    return None if _may_point_to_id(behind_id) else _read_question(_NO_ID + behind_id)


def _may_point_to_id(octets: bytes) -> bool:
    # Not `in`, which first asks whether it is a number that is looked for, and takes five times as long.
    return octets.find(_TO_ID[0]) >= 0 or octets.find(_TO_ID[1]) >= 0


def _read_question(message: bytes) -> Question:
    if len(message) < HEADER_OCTETS:
        raise WireError(Fault.IGNORE, "shorter than a header")
    number, flags, questions, answers, authorities, additionals = HEADER.unpack_from(message)
    if flags & FLAG_QR:
        raise WireError(Fault.IGNORE, "a response")
    if flags & MASK_OPCODE:
        raise WireError(Fault.NOTIMP, f"opcode {(flags & MASK_OPCODE) >> 11}")
    if questions != 1:
        raise WireError(Fault.FORMERR, f"{questions} questions")
    try:
        at = HEADER_OCTETS
        while length := message[at]:
            if length > LABEL_OCTETS_MAX:
                raise WireError(Fault.FORMERR, "a compressed or unknown label in the question")
            at += 1 + length
        at += 1
        if at - HEADER_OCTETS > NAME_OCTETS_MAX:
            raise WireError(Fault.FORMERR, "a name of more than 255 octets")
        qtype, qclass = _SHORT_PAIR.unpack_from(message, at)
        end = at + 4
        wire_name = message[HEADER_OCTETS:at].lower()  # lengths are below 64, so only letters change
        edns = None
        if answers or authorities or additionals:
            opt = _find_opt(message, end, answers + authorities, additionals, {HEADER_OCTETS: wire_name})
            edns = None if opt is None else _read_edns(message, opt)
    except (IndexError, struct.error):
        raise WireError(Fault.FORMERR, "cut short") from None
    return Question(number, flags, name_of(wire_name), wire_name, qtype, qclass, message[HEADER_OCTETS:end], edns)


def _read_edns(message: bytes, opt: int) -> Edns:
    """The OPT record whose root owner stands at `opt`; it lies inside the message."""
    _, udp_size, ttl, length = _RECORD.unpack_from(message, opt + 1)
    at = opt + 11
    end = at + length
    cookie = None
    while at < end:
        code, octets = _SHORT_PAIR.unpack_from(message, at)
        at += 4 + octets
        if at > end:
            raise WireError(Fault.FORMERR, "an option runs past its record")
        if code == OPTION_COOKIE and cookie is None and (octets == 8 or 16 <= octets <= 40):
            cookie = message[at - octets : at]
    return Edns(udp_size, (ttl >> 16) & 0xFF, bool(ttl & EDNS_DO), cookie)


# --- replies ---------------------------------------------------------------------------------------------------------


def read_reply(message: bytes, question: Question) -> Answer:
    """What the reply teaches; never raises. Only an answer of status OK may be passed on as it came."""
    section = question.section
    if (
        HEADER_OCTETS < len(message) <= REMEMBERED_OCTETS_MAX
        and message[12 : 12 + len(section)] == section
        and message[0] << 8 | message[1] == question.id
    ):
        answer = _rest_of_reply(message[2:], len(section))
        if answer is not None:
            return answer
    return _read_reply(message, question)


@lru_cache(maxsize=REMEMBERED_MAX)
def _rest_of_reply(behind_id: bytes, section_octets: int) -> Answer | None:
    """A reply to the question it repeats, octet for octet."""
    if _may_point_to_id(behind_id):
        return None
    section = behind_id[HEADER_OCTETS - 2 : HEADER_OCTETS - 2 + section_octets]
    name, (qtype, qclass) = section[:-4].lower(), _SHORT_PAIR.unpack(section[-4:])
    return _read_reply(_NO_ID + behind_id, Question(0, 0, name_of(name), name, qtype, qclass, section, None))


def _read_reply(message: bytes, question: Question) -> Answer:
    if len(message) < HEADER_OCTETS:
        return _nothing(Status.MALFORMED)
    number, flags, questions, answers, authorities, additionals = HEADER.unpack_from(message)
    rcode = flags & MASK_RCODE
    if number != question.id or questions != 1 or flags & (FLAG_QR | MASK_OPCODE) != FLAG_QR:
        return _nothing(Status.MISMATCH, rcode)
    at = HEADER_OCTETS + len(question.section)
    if message[HEADER_OCTETS:at] != question.section and not _same_question(message[HEADER_OCTETS:at], question):
        return _nothing(Status.MISMATCH, rcode)
    if flags & FLAG_TC:
        return _nothing(Status.TRUNCATED, rcode)
    try:
        records = _Records(message, question.wire_name)
        at = records.read_answers(at, answers)
        if authorities or additionals:
            opt = _find_opt(message, at, authorities, additionals, records.names_by_place)
            if opt is not None:
                rcode |= message[opt + 5] << 4
            records.is_plain = records.is_plain and opt == at and additionals == 1
        if rcode or question.qclass != CLASS_IN:
            return Answer(Status.OK, rcode, (), (question.name,))
        return records.answer(question)
    except (IndexError, struct.error, WireError):
        return _nothing(Status.MALFORMED, rcode)


def _nothing(status: Status, rcode: int = 0) -> Answer:
    return Answer(status, rcode, (), ())


def _same_question(section: bytes, question: Question) -> bool:
    """Equal but for the letter case of the name; type and class are not letters."""
    return section[-4:] == question.section[-4:] and section[:-4].lower() == question.wire_name


class _Records:
    """The records of one answer section that bear on addresses.

    names_by_place: every name read so far, by where it starts: almost every owner is a pointer to one of them. is_plain: there
    is nothing so far that may hold an address and was not read as one.
    """

    __slots__ = ("_aliases", "_dnames", "_message", "_ttls_by_owner", "is_plain", "names_by_place")

    def __init__(self, message: bytes, wire_name: bytes) -> None:
        self._message = message
        self._aliases: dict[bytes, bytes] = {}
        self._dnames: dict[bytes, bytes] = {}
        self._ttls_by_owner: dict[bytes, dict[Address, int]] = {}
        self.names_by_place: dict[int, bytes] = {HEADER_OCTETS: wire_name}
        self.is_plain = True

    def read_answers(self, at: int, count: int) -> int:
        """Take in `count` records from `at` on; gives the place behind them (the caller compares it with the end)."""
        message = self._message
        names_by_place = self.names_by_place
        ttls_by_owner = self._ttls_by_owner
        unpack = _COMPRESSED_RECORD.unpack_from
        last_pointer = -1
        owner = b""
        ttls: dict[Address, int] = {}
        for _ in range(count):
            if message[at] >= POINTER:
                pointer, rtype, rclass, ttl, length = unpack(message, at)
                data = at + 12
                if pointer != last_pointer:
                    found = names_by_place.get(pointer & 0x3FFF)
                    owner = found if found is not None else read_name(message, at, names_by_place)[0]
                    ttls = ttls_by_owner.setdefault(owner, {})
                    last_pointer = pointer
            else:
                owner, at = read_name(message, at, names_by_place)
                rtype, rclass, ttl, length = _RECORD.unpack_from(message, at)
                data = at + 10
                ttls = ttls_by_owner.setdefault(owner, {})
                last_pointer = -1
            at = data + length
            if rtype == TYPE_A and rclass == CLASS_IN:
                if length != 4:
                    raise WireError(Fault.FORMERR, "an A record that is not four octets")
                address = message[data:at]
                if address in ttls or ttl >= _TTL_TOP_BIT:
                    _keep_longest(ttls, address, ttl)
                else:
                    ttls[address] = ttl
            elif rtype in _TYPES_OF_MESSAGES:
                raise WireError(Fault.FORMERR, "OPT or TSIG in the answer section")
            elif rclass != CLASS_IN:
                self.is_plain = False
            elif rtype == TYPE_AAAA:
                if length != 16:
                    raise WireError(Fault.FORMERR, "an AAAA record that is not sixteen octets")
                _keep_longest(ttls, unmapped(message[data:at]), ttl)
            elif rtype == TYPE_CNAME:
                self._read_alias(self._aliases, owner, data, at)
            elif rtype == TYPE_DNAME:
                self._read_alias(self._dnames, owner, data, at)
            elif rtype in _TYPES_OF_SERVICES:
                self.is_plain = False
                self._read_hints(ttls, data, at, ttl)
        if at > len(message):
            raise WireError(Fault.FORMERR, "cut short")
        return at

    def _read_alias(self, targets_by_owner: dict[bytes, bytes], owner: bytes, at: int, end: int) -> None:
        target, read_to = read_name(self._message, at, self.names_by_place)
        if read_to != end:
            raise WireError(Fault.FORMERR, "the data of an alias is not just a name")
        # One name has one canonical name (RFC 2181 10.1). With two there is no chain, and no telling which one a client takes.
        if targets_by_owner.setdefault(owner, target) != target:
            raise WireError(Fault.FORMERR, "two aliases for one name")

    def _read_hints(self, ttls: dict[Address, int], at: int, end: int, ttl: int) -> None:
        """Address hints of a service record (RFC 9460 2.2); alias mode (priority 0) has none."""
        message = self._message
        if end > len(message):
            raise WireError(Fault.FORMERR, "cut short")
        priority = int.from_bytes(message[at : at + 2], "big")
        at += 2
        while length := message[at]:
            if length > LABEL_OCTETS_MAX:
                raise WireError(Fault.FORMERR, "a compressed target name")
            at += 1 + length
        at += 1
        key_before = -1
        while at < end:
            key, length = _SHORT_PAIR.unpack_from(message, at)
            at += 4
            value_end = at + length
            if key <= key_before:
                raise WireError(Fault.FORMERR, "service parameters out of order")
            octets = _HINT_OCTETS_BY_KEY.get(key)
            if octets and priority:
                if length == 0 or length % octets:
                    raise WireError(Fault.FORMERR, "an address hint that is not whole addresses")
                for start in range(at, value_end, octets):
                    _keep_longest(ttls, unmapped(message[start : start + octets]), ttl)
            key_before = key
            at = value_end
        if at != end:
            raise WireError(Fault.FORMERR, "service data past its record")

    def answer(self, question: Question) -> Answer:
        """Follow the aliases from the question and gather the addresses that stand on the way."""
        if not self._aliases and not self._dnames:
            ttls = self._ttls_by_owner.get(question.wire_name)
            is_all = self.is_plain and len(self._ttls_by_owner) == (ttls is not None)
            return Answer(Status.OK, 0, tuple(ttls.items()) if ttls else (), (question.name,), is_all)
        owner: bytes | None = question.wire_name
        chain: dict[bytes, None] = {}
        gathered: dict[Address, int] = {}
        while owner is not None:
            if owner in chain:
                return _nothing(Status.LOOP)
            chain[owner] = None
            for address, ttl in self._ttls_by_owner.get(owner, {}).items():
                _keep_longest(gathered, address, ttl)
            owner = self._aliases.get(owner) or self._renamed(owner)
        is_all = self.is_plain and all(owner in chain for owner, ttls in self._ttls_by_owner.items() if ttls)
        return Answer(Status.OK, 0, tuple(gathered.items()), tuple([name_of(name) for name in chain]), is_all)

    def _renamed(self, name: bytes) -> bytes | None:
        """The name with the suffix of a DNAME above it replaced (RFC 6672 2.2), None if there is none or it gets too long.

        A server that sends DNAME sends the CNAME made from it too; this is for those that do not.
        """
        if not self._dnames:
            return None
        at = 0
        while name[at]:
            at += 1 + name[at]
            target = self._dnames.get(name[at:])
            if target is not None:
                renamed = name[:at] + target
                return renamed if len(renamed) <= NAME_OCTETS_MAX else None
        return None


def unmapped(address: bytes) -> Address:
    """A v4-mapped IPv6 address is the IPv4 address: that is where the packets go."""
    return address[12:] if address.startswith(_V4_MAPPED) else address


def _keep_longest(ttls: dict[Address, int], address: Address, ttl: int) -> None:
    if ttl & _TTL_TOP_BIT:
        ttl = 0  # RFC 2181 8
    if ttl >= ttls.get(address, 0):
        ttls[address] = ttl


# --- names and records -----------------------------------------------------------------------------------------------


def read_name(message: bytes, at: int, names_by_place: dict[int, bytes], jumps: int = 0) -> tuple[bytes, int]:
    """The name at `at`, in lower-case wire form, and the place behind it; WireError or IndexError if there is none.

    names_by_place: names known to start at these places; what is read is added, so that a message full of pointers to pointers
    costs no more than its length.
    """
    start = at
    while True:
        length = message[at]
        if length == 0:
            at += 1
            name = message[start:at].lower()  # lengths are below 64, so only letters change
            break
        if length <= LABEL_OCTETS_MAX:
            at += 1 + length
            if at - start > NAME_OCTETS_MAX:
                raise WireError(Fault.FORMERR, "a name of more than 255 octets")
            continue
        if length < POINTER:
            raise WireError(Fault.FORMERR, "a label of an unknown kind")
        target = (length & 0x3F) << 8 | message[at + 1]
        if target >= start or jumps == JUMPS_MAX:
            raise WireError(Fault.FORMERR, "a pointer that does not go back, or too many")
        suffix = names_by_place.get(target)
        if suffix is None:
            suffix, _ = read_name(message, target, names_by_place, jumps + 1)
        name = message[start:at].lower() + suffix
        at += 2
        break
    if len(name) > NAME_OCTETS_MAX:
        raise WireError(Fault.FORMERR, "a name of more than 255 octets")
    names_by_place[start] = name
    return name, at


def find_opt(message: bytes) -> bytes | None:
    """The OPT record of a message, its eleven fixed octets and its options; None without one or if the walk to it fails."""
    if len(message) < HEADER_OCTETS:
        return None
    _, _, questions, answers, authorities, additionals = HEADER.unpack_from(message)
    names_by_place: dict[int, bytes] = {}
    try:
        at = HEADER_OCTETS
        for _ in range(questions):
            at = read_name(message, at, names_by_place)[1] + 4
        opt = _find_opt(message, at, answers + authorities, additionals, names_by_place)
    except (IndexError, struct.error, WireError):
        return None
    return None if opt is None else message[opt : opt + 11 + int.from_bytes(message[opt + 9 : opt + 11], "big")]


def _find_opt(message: bytes, at: int, others: int, additionals: int, names_by_place: dict[int, bytes]) -> int | None:
    """Step over `others` records and then the additional section; where OPT starts, None without one.

    WireError if a record does not lie inside the message, if there are two OPT or one whose owner is not one zero octet (RFC
    6891 6.1.1 and 6.1.2: nor a pointer to one), or if TSIG is not the last record (RFC 8945 5.1).
    """
    if others == 0 and additionals == 1 and message[at] == 0:
        # Nearly every query with EDNS, and every short reply.
        rtype, _, _, length = _RECORD.unpack_from(message, at + 1)
        if at + 11 + length > len(message):
            raise WireError(Fault.FORMERR, "cut short")
        return at if rtype == TYPE_OPT else None
    opt = None
    last = others + additionals - 1
    for index in range(others + additionals):
        start = at
        _, at = read_name(message, at, names_by_place)
        rtype, _, _, length = _RECORD.unpack_from(message, at)
        at += 10 + length
        if rtype == TYPE_OPT:
            if index < others or opt is not None or message[start]:
                raise WireError(Fault.FORMERR, "an OPT record in the wrong place, twice, or with an owner")
            opt = start
        elif rtype == TYPE_TSIG and index != last:
            raise WireError(Fault.FORMERR, "a TSIG record that is not the last")
    if at > len(message):
        raise WireError(Fault.FORMERR, "cut short")
    return opt
