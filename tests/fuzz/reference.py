"""A slow reader of DNS messages, for the judge: what a reply may teach at most, and where its records stand.

Rule 1: no line of the walker and no line of its way of reading: records are read one by one into a list, names label by label,
and what may be learned is a search over a graph of aliases, not a walk along a chain.
Rule 2: what cannot be read to its end teaches nothing (RFC 1035; DECISIONS 11).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

A, CNAME, AAAA, DNAME, OPT, TSIG = 1, 5, 28, 39, 41, 250
SERVICES = (64, 65)
IN = 1
ANSWER, AUTHORITY, ADDITIONAL = 1, 2, 3
REACHED_MAX = 150  # a rename that makes names longer ends after 126


class Unreadable(Exception):
    """Not a message."""


class Record(NamedTuple):
    """owner: labels in lower case. start, data, end: places in the message."""

    section: int
    owner: tuple[bytes, ...]
    rtype: int
    rclass: int
    ttl: int
    start: int
    data: int
    end: int


class Bound(NamedTuple):
    """What may be learned, each address with the TTLs it may have; and whether all of it must be: nothing was ambiguous."""

    may: dict[bytes, set[int]]
    is_exact: bool


NOTHING = Bound({}, is_exact=True)


def name_at(message: bytes, at: int) -> tuple[tuple[bytes, ...], int]:
    """Labels in lower case and the place behind them; a pointer goes before the labels it continues (RFC 1035 4.1.4)."""
    labels: list[bytes] = []
    behind = None
    begun = at
    octets = 1
    while True:
        if at >= len(message):
            raise Unreadable("a name runs past the end")
        kind, length = message[at] >> 6, message[at] & 0x3F
        if kind == 0:
            at += 1
            if length == 0:
                return tuple(labels), at if behind is None else behind
            if at + length > len(message):
                raise Unreadable("a label runs past the end")
            octets += 1 + length
            labels.append(message[at : at + length].lower())
            at += length
        elif kind == 3:
            if at + 1 >= len(message):
                raise Unreadable("half a pointer")
            target = length << 8 | message[at + 1]
            if behind is None:
                behind = at + 2
            if target >= begun:
                raise Unreadable("a pointer that does not go back")
            begun = at = target
        else:
            raise Unreadable("a label of an unknown kind")
        if octets > 255:
            raise Unreadable("a name that is too long")


def records_of(message: bytes) -> Iterator[Record]:
    """Every record in order; Unreadable in the middle where there is no next one."""
    if len(message) < 12:
        raise Unreadable("no header")
    _, _, questions, *counts = struct.unpack_from("!6H", message)
    at = 12
    asked: tuple[bytes, ...] = ()
    for _ in range(questions):
        asked, at = name_at(message, at)
        at += 4
    for section, count in enumerate(counts, ANSWER):
        for _ in range(count):
            if questions == 1 and message[at : at + 2] == b"\xc0\x0c":
                owner, fixed = asked, at + 2  # nearly every owner; and the question can have many labels
            else:
                owner, fixed = name_at(message, at)
            if fixed + 10 > len(message):
                raise Unreadable("cut in a record")
            rtype, rclass, ttl, length = struct.unpack_from("!HHIH", message, fixed)
            end = fixed + 10 + length
            if end > len(message):
                raise Unreadable("data past the end")
            yield Record(section, owner, rtype, rclass, ttl, at, fixed + 10, end)
            at = end
    if at > len(message):
        raise Unreadable("cut in the question")


def bound_of(reply: bytes, section: bytes, records: list[Record] | None = None) -> Bound:
    """The bound for a reply to the question with this section: the graph of aliases, whatever the order of the records.

    records: of the reply, if they are known.
    """
    try:
        number_of_questions = int.from_bytes(reply[4:6], "big")
        is_of_question = reply[12 : 12 + len(section)].lower() == section.lower()
        if number_of_questions != 1 or not is_of_question or section[-2:] != b"\x00\x01":
            return NOTHING
        records = list(records_of(reply)) if records is None else records
        rcode = reply[3] & 0x0F
        for record in records:
            if record.rtype == OPT:
                rcode |= record.ttl >> 24 << 4
        if rcode or reply[2] & 0xFA != 0x80:  # a response, QUERY, not truncated
            return NOTHING
        return _bound(reply, name_at(section, 0)[0], records)
    except Unreadable:
        return NOTHING


def _bound(reply: bytes, asked: tuple[bytes, ...], records: list[Record]) -> Bound:
    answers = [record for record in records if record.section == ANSWER and record.rclass == IN]
    cnames: dict[tuple[bytes, ...], set[tuple[bytes, ...]]] = {}
    dnames: dict[tuple[bytes, ...], set[tuple[bytes, ...]]] = {}
    for record in answers:
        if record.rtype in (CNAME, DNAME):
            aliases = cnames if record.rtype == CNAME else dnames
            aliases.setdefault(record.owner, set()).add(name_at(reply, record.data)[0])
    reached, new = {asked}, [asked]
    is_exact = True
    while new:
        if len(reached) > REACHED_MAX:
            # Renames that branch: every owner may be reached, for all we know.
            reached |= {record.owner for record in answers}
            is_exact = False
            break
        name = new.pop()
        targets = set(cnames.get(name, ()))
        for owner, renamings in dnames.items():
            cut = len(name) - len(owner)
            if cut < 1 or name[cut:] != owner:
                continue
            for target in renamings:
                renamed = (*name[:cut], *target)
                if sum(map(len, renamed)) + len(renamed) + 1 <= 255:
                    targets.add(renamed)
                else:
                    is_exact = False
        if len(targets) > 1 or targets & reached:
            is_exact = False
        for target in targets - reached:
            reached.add(target)
            new.append(target)
    may: dict[bytes, set[int]] = {}
    for record in answers:
        if record.owner in reached:
            for address in addresses_in(record.rtype, reply[record.data : record.end], is_strict=True):
                may.setdefault(address, set()).add(0 if record.ttl >> 31 else record.ttl)
    return Bound(may, is_exact)


def addresses_in(rtype: int, data: bytes, *, is_strict: bool) -> list[bytes]:
    """Of one record; a v4-mapped address is the IPv4 address. is_strict: no hints in alias mode (RFC 9460 2.4.2)."""
    if rtype in SERVICES:
        found = hints_in(data) if not is_strict or data[:2] != b"\x00\x00" else []
    else:
        found = [data] if (rtype, len(data)) in ((A, 4), (AAAA, 16)) else []
    return [address[12:] if address[:12] == bytes(10) + b"\xff\xff" else address for address in found]


def hints_in(data: bytes) -> list[bytes]:
    """Also behind a target that is compressed, which it must not be."""
    found = []
    at = 2
    while at < len(data) and 0 < data[at] < 0xC0:
        at += 1 + data[at]
    at += 1 if at < len(data) and data[at] == 0 else 2
    while at + 4 <= len(data):
        key, length = struct.unpack_from("!HH", data, at)
        size = {4: 4, 6: 16}.get(key)
        value = data[at + 4 : at + 4 + length]
        if size is not None:
            found += [value[i : i + size] for i in range(0, len(value) - size + 1, size)]
        at += 4 + length
    return found
