"""A stream of messages from a seed: each built to lie in some way, or one of the corpus, and most of them damaged.

The same seed gives the same messages in the same order: nothing here depends on sets, hashes or time.

Written by octets and not by dnspython: one costs ten microseconds, and half of what is written here dnspython refuses to write.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tests.fuzz.corpus import Exchange, exchanges

WWW = b"\x03www\x07example\x00"
NAMES = (
    WWW,
    b"\x03WWW\x07eXample\x00",
    b"\x01a\x03www\x07example\x00",
    b"\x07example\x00",
    b"\x03cdn\x04test\x00",
    b"\x01x\x03cdn\x04test\x00",
    b"\x04test\x00",
    b"\x00",
    b"\x05a.b\x00\xe9\x04test\x00",
    b"\x04_443\x04_tcp\x03www\x07example\x00",
    b"\x01*\x04test\x00",
    (b"\x3f" + b"x" * 63) * 3 + b"\x3d" + b"y" * 61 + b"\x00",  # 255 octets
    b"\x01a" * 127 + b"\x00",  # the most labels
    b"\x3f" + b"z" * 63 + b"\x04test\x00",
)
# The longest ones cost as much as twenty others.
QUESTIONS = (*NAMES[:3] * 10, *NAMES[3:11] * 2, *NAMES[11:])
OWNERS = (*NAMES[:11] * 5, *NAMES[11:])
ADDRESSES = tuple(
    bytes(address)
    for address in (*((192, 0, 2, host) for host in range(1, 8)), (198, 51, 100, 7), (10, 0, 0, 1), (127, 0, 0, 1))
)
_V6 = bytes.fromhex("20010db8")
ADDRESSES6 = (
    *(_V6 + bytes(11) + bytes((host,)) for host in range(1, 10)),
    bytes(10) + b"\xff\xff" + ADDRESSES[2],
    bytes(10) + b"\xff\xff" + ADDRESSES[-2],
    bytes(15) + b"\x01",
    bytes.fromhex("0064ff9b") + bytes(8) + ADDRESSES[-2],
)
QTYPES = (1, 1, 1, 28, 65, 64, 255, 5, 16, 6, 4660, 252)
CLASSES = (1,) * 12 + (3, 254, 255, 4096)
TTLS = (0, 1, 60, 60, 60, 3600, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
OTHER_TYPES = (2, 6, 12, 15, 16, 24, 33, 35, 39, 41, 43, 46, 47, 48, 50, 99, 250, 255, 257, 4660, 65535)
WORDS = (0, 1, 2, 0x00FF, 0x0100, 0x7FFF, 0x8000, 0xC000, 0xC00C, 0xC00D, 0xFFFF)
OCTETS = (0x00, 0x01, 0x3F, 0x40, 0x7F, 0x80, 0xC0, 0xFF)

Pick = Callable[[], float]


# One message in so many is compared with dnspython, which takes ten times as long as everything else. Those are less often
# built to lie and less often damaged, so that half of them are read by both.
COMPARED_EVERY = 28
# One in so many goes through a whole engine.
GATED_EVERY = 64


class Message(NamedTuple):
    """What is put to the judge. reply None: the query alone is what is tried."""

    query: bytes
    reply: bytes | None
    is_compared: bool = True
    is_gated: bool = True


def messages(seed: int, chunk: int, number: int) -> Iterator[Message]:
    """The messages of one chunk of the stream, some of them twice; chunks do not depend on each other."""
    source = random.Random(f"{seed}/{chunk}")
    pick = source.random
    base = exchanges()
    exchange, message = base[0], Message(b"", None)
    for place in range(number):
        if place and pick() < 0.02:
            # The one before with another id: what is remembered of a message must not be.
            yield _with_id(message, int(pick() * 65536).to_bytes(2, "big"))
            continue
        is_compared = place % COMPARED_EVERY == 0
        # What was made is put in whole and damaged: to make one costs more than to judge it.
        if is_compared or pick() < 0.4:
            exchange = _exchange(pick, base, 0.6 if is_compared else 0.2)
        query, reply = exchange
        is_query = pick() < 0.2
        if pick() < (0.25 if is_compared else 0.6):
            if is_query:
                query = damaged(pick, query, base)
            else:
                reply = damaged(pick, reply, base)
                # Else nearly every one would end at the comparison of the question.
                if pick() < 0.9 and len(query) > 16:
                    end = _behind_question(query)
                    reply = query[:2] + reply[2:4] + query[4:6] + reply[6:12] + query[12:end] + reply[end:]
        message = Message(query, None if is_query else reply, is_compared, is_gated=place % GATED_EVERY == 1)
        yield message


def _with_id(message: Message, number: bytes) -> Message:
    reply = None if message.reply is None else number + message.reply[2:]
    return Message(number + message.query[2:], reply, is_compared=False, is_gated=False)


def _exchange(pick: Pick, base: tuple[Exchange, ...], share_of_base: float) -> Exchange:
    kind = pick()
    if kind < share_of_base:
        return base[int(pick() * len(base))]
    if kind < 0.75:
        return _lying(pick)
    return _chain(pick) if kind < 0.9995 else _long(pick)


def _behind_question(query: bytes) -> int:
    at = 12
    while at < len(query) and 0 < query[at] < 0x40:
        at += 1 + query[at]
    return at + 5


# --- messages made to lie ------------------------------------------------------------------------------------------------


def _query(pick: Pick) -> bytes:
    number = int(pick() * 65536).to_bytes(2, "big")
    name = QUESTIONS[int(pick() * len(QUESTIONS))]
    qtype, qclass = QTYPES[int(pick() * len(QTYPES))], 1 if pick() < 0.97 else CLASSES[int(pick() * len(CLASSES))]
    question = name + qtype.to_bytes(2, "big") + qclass.to_bytes(2, "big")
    flags = b"\x01\x00" if pick() < 0.8 else b"\x00\x30"
    if pick() < 0.5:
        return number + flags + b"\x00\x01" + bytes(6) + question
    opt = _opt(pick)
    return number + flags + b"\x00\x01" + bytes(5) + b"\x01" + question + opt


def _opt(pick: Pick) -> bytes:
    """An OPT record; about one in four is odd."""
    options = b""
    while pick() < 0.5:
        code = (10, 8, 15, 12, 3, 65001)[int(pick() * 6)]
        length = (8, 16, 24, 40, 0, 7, 41, 4)[int(pick() * 8)] if pick() < 0.95 else 600
        options += code.to_bytes(2, "big") + length.to_bytes(2, "big") + bytes(length if pick() < 0.95 else length // 2)
    size = (0, 511, 512, 1232, 4096, 65535)[int(pick() * 6)]
    upper = b"\x00" if pick() < 0.9 else b"\x01"
    version = b"\x00" if pick() < 0.9 else b"\x02"
    owner = b"\x00" if pick() < 0.97 else WWW
    length = len(options) + (0 if pick() < 0.97 else 3)
    fixed = owner + b"\x00\x29" + size.to_bytes(2, "big") + upper + version + (b"\x80\x00" if pick() < 0.5 else b"\x00\x00")
    return fixed + length.to_bytes(2, "big") + options


class _Reply:
    """A reply while it is written. places: where names stand, to point at."""

    def __init__(self, pick: Pick, query: bytes) -> None:
        self.pick = pick
        end = _behind_question(query)
        self.out = bytearray(query[:2] + b"\x81\x80\x00\x01" + bytes(6) + query[12:end])
        self.query = query
        self.places = [12]
        at = 12
        while length := query[at]:
            at += 1 + length
            self.places.append(at)
        self.counts = [0, 0, 0]

    def name(self) -> None:
        """A name: mostly good, in every way in which one can be written."""
        pick, out = self.pick, self.out
        kind = pick()
        here = len(out)
        if kind < 0.45:
            out += b"\xc0\x0c"
        elif kind < 0.62:
            self.point(self.places[int(pick() * len(self.places))])
        elif kind < 0.90:
            out += OWNERS[int(pick() * len(OWNERS))]
            self.places.append(here)
        elif kind < 0.95:
            out += b"\x01" + b"abX\x00"[int(pick() * 4) :][:1]
            self.point(self.places[int(pick() * len(self.places))])
            self.places.append(here)
        elif kind < 0.965:
            self.point(here + int(pick() * 32) - 4)  # itself, forward
        elif kind < 0.98:
            self.point(int(pick() * here))  # into anything
        elif kind < 0.985:
            out += b"\x3f" + b"x" * 63
            self.point(self.places[int(pick() * len(self.places))])
            self.places.append(here)
        elif kind < 0.995:
            # A pointer to a pointer, as often as it goes.
            for _ in range(int(pick() * 140)):
                self.point(max(12, len(out) - 2) if len(out) > here else 12)
            self.point(max(12, len(out) - 2))
        else:
            out += (b"\x41a\x00", b"\x80\x00", (b"\x3f" + b"x" * 63) * 4 + b"\x00")[int(pick() * 3)]

    def point(self, place: int) -> None:
        self.out += (0xC000 | place & 0x3FFF).to_bytes(2, "big")

    def record(self, section: int, rtype: int, owner: bytes | None = None, data: bytes | None = None) -> None:
        """Without owner or data, ones that fit the type, most of the time."""
        pick, out = self.pick, self.out
        self.counts[section] += 1
        if owner is None:
            self.name()
        elif owner in NAMES[:2] and pick() < 0.7:
            out += b"\xc0\x0c"
        else:
            out += owner
        rclass = 1 if pick() < 0.95 else CLASSES[int(pick() * len(CLASSES))]
        out += (
            rtype.to_bytes(2, "big")
            + rclass.to_bytes(2, "big")
            + TTLS[int(pick() * len(TTLS))].to_bytes(4, "big")
            + b"\x00\x00"
        )
        start = len(out)
        if data is not None:
            out += data
        else:
            self.data(rtype)
        length = len(out) - start
        if pick() < 0.01:
            length = max(0, length + int(pick() * 9) - 4)
        out[start - 2 : start] = (length & 0xFFFF).to_bytes(2, "big")

    def data(self, rtype: int) -> None:
        pick, out = self.pick, self.out
        if rtype == 1:
            out += ADDRESSES[int(pick() * len(ADDRESSES))] if pick() < 0.97 else bytes(int(pick() * 18))
        elif rtype == 28:
            out += ADDRESSES6[int(pick() * len(ADDRESSES6))] if pick() < 0.97 else bytes(int(pick() * 18))
        elif rtype in (2, 5, 12, 39):
            self.name()
        elif rtype in (64, 65):
            self.service()
        elif rtype == 15:
            out += b"\x00\x0a"
            self.name()
        elif rtype == 6:
            self.name()
            self.name()
            out += bytes(20)
        elif rtype in (24, 46):
            covered = (0, 1, 28, 65)[int(pick() * 4)]
            out += covered.to_bytes(2, "big") + b"\x08\x02" + bytes(14) + WWW + b"signature"
        elif rtype == 35:
            out += b"\x00\x01\x00\x02\x01s\x01x\x03!a!"
            self.name()
        else:
            out += bytes(int(pick() * 40))

    def service(self) -> None:
        pick, out = self.pick, self.out
        out += (b"\x00\x01", b"\x00\x01", b"\x00\x00", b"\xff\xff", b"\x00")[int(pick() * 5) if pick() < 0.3 else 0]
        out += OWNERS[int(pick() * len(OWNERS))] if pick() < 0.97 else b"\xc0\x0c"
        keys = sorted(int(pick() * 8) for _ in range(int(pick() * 5)))
        if pick() < 0.03:
            keys.reverse()
        elif pick() < 0.97:
            keys = list(dict.fromkeys(keys))
        for key in keys:
            addresses: tuple[bytes, ...] = {4: ADDRESSES, 6: ADDRESSES6}.get(key, (b"\x02h2",) if key == 1 else (b"\x01\xbb",))
            value = b"".join(
                addresses[int(pick() * len(addresses))] for _ in range(int(pick() * 3) + 1 if key in (4, 6) else 1)
            )
            if pick() < 0.03:
                value = value[:-1]
            out += key.to_bytes(2, "big") + (len(value) if pick() < 0.98 else 0xFFFF).to_bytes(2, "big") + value

    def end(self) -> bytes:
        """What is behind the answers, and the header."""
        pick = self.pick
        while pick() < 0.25:
            self.record(1, (2, 6, 1, 28)[int(pick() * 4)])
        while pick() < 0.3:
            self.record(2, (1, 28, 65, 16)[int(pick() * 4)])
        while pick() < (0.5 if self.counts[2] < 2 else 0.05):
            self.counts[2 if pick() < 0.97 else int(pick() * 3)] += 1
            self.out += _opt(pick)
        if pick() < 0.02:
            self.record(2, 250)
        if pick() < 0.03:
            self.out += bytes(int(pick() * 30))
        if pick() < 0.04:
            lie = (-1, 1, 2, 0x7FFF, 0xFFFF)[int(pick() * 5)]
            place = int(pick() * 3)
            self.counts[place] = (self.counts[place] + lie) & 0xFFFF
        if pick() < 0.03:
            self.out[4:6] = (int(pick() * 3)).to_bytes(2, "big")
        flags = 0x8180
        if pick() < 0.1:
            flags = (0x8183, 0x8182, 0x8380, 0x83A0, 0x0100, 0xA180, 0x8185, 0xFFFF)[int(pick() * 8)]
        self.out[2:4] = flags.to_bytes(2, "big")
        for place, count in enumerate(self.counts):
            self.out[6 + 2 * place : 8 + 2 * place] = count.to_bytes(2, "big")
        return bytes(self.out)


def _lying(pick: Pick) -> Exchange:
    """Records of every kind in any order, each part of it sometimes false."""
    query = _query(pick)
    reply = _Reply(pick, query)
    for _ in range(int(pick() * 7)):
        kind = pick()
        if kind < 0.4:
            rtype = 1
        elif kind < 0.55:
            rtype = 28
        elif kind < 0.75:
            rtype = 5
        elif kind < 0.85:
            rtype = 64 + int(pick() * 2)
        else:
            rtype = OTHER_TYPES[int(pick() * len(OTHER_TYPES))]
        reply.record(0, rtype)
    return Exchange(query, reply.end())


def _chain(pick: Pick) -> Exchange:
    """Aliases from the question to some addresses, in any order, with what does not belong there: forks, loops, strangers."""
    query = _query(pick)
    reply = _Reply(pick, query)
    name = query[12 : _behind_question(query) - 4]
    records: list[tuple[int, bytes, bytes | None]] = []
    for number in range(int(pick() * 6) if pick() < 0.97 else int(pick() * 60)):
        if pick() < 0.12:
            cut = 0
            for _ in range(int(pick() * 3) + 1):
                if name[cut]:
                    cut += 1 + name[cut]
            target = OWNERS[int(pick() * len(OWNERS))]
            records.append((39, name[cut:], target))
            if pick() < 0.5:
                records.append((5, name, name[:cut] + target))
            name = name[:cut] + target
            if len(name) > 255:
                break
        else:
            target = b"\x02c%d" % (number % 10) + NAMES[4] if pick() < 0.8 else OWNERS[int(pick() * len(OWNERS))]
            records.append((5, name, target))
            name = target
    for _ in range(int(pick() * 4)):
        kind = (1, 1, 1, 28, 28, 65)[int(pick() * 6)]
        records.append((kind, name, None))
    while pick() < 0.35:
        stranger = OWNERS[int(pick() * len(OWNERS))]
        kind = (1, 28, 5, 39, 65, 46)[int(pick() * 6)]
        records.append((kind, stranger, None))
    if pick() < 0.5:
        for at in range(len(records) - 1, 0, -1):
            other = int(pick() * (at + 1))
            records[at], records[other] = records[other], records[at]
    for rtype, owner, data in records:
        reply.record(0, rtype, owner, data)
    return Exchange(query, reply.end())


def _long(pick: Pick) -> Exchange:
    """Thousands of records, or of pointers to pointers: as much work as a message can hold."""
    query = _query(pick)
    reply = _Reply(pick, query)
    rtype = (1, 28, 5, 65)[int(pick() * 4)]
    owner = None if pick() < 0.5 else NAMES[0]
    while len(reply.out) < 60_000 * pick():
        reply.record(0, rtype, owner)
    return Exchange(query, reply.end()[:65535])


# --- damage ---------------------------------------------------------------------------------------------------------------


def damaged(pick: Pick, octets: bytes, base: tuple[Exchange, ...]) -> bytes:
    """Octets changed, put in, cut out, repeated, lost at the end, or taken from another message."""
    message = bytearray(octets)
    while True:
        size = len(message)
        at, kind = int(pick() * (size + 1)), pick()
        if kind < 0.25 and at < size:
            message[at] ^= 1 << int(pick() * 8)
        elif kind < 0.45:
            message[at : at + 1] = bytes((OCTETS[int(pick() * len(OCTETS))],))
        elif kind < 0.6:
            message[at : at + 2] = WORDS[int(pick() * len(WORDS))].to_bytes(2, "big")
        elif kind < 0.68:
            message[at : at + 2] = (0xC000 | int(pick() * (size + 4)) & 0x3FFF).to_bytes(2, "big")
        elif kind < 0.76:
            place = 2 + 2 * int(pick() * 5)
            message[place : place + 2] = int(pick() * 6).to_bytes(2, "big")
        elif kind < 0.82:
            message[at:at] = bytes(int(pick() * 3) + 1)
        elif kind < 0.88:
            del message[at : at + 1 + int(pick() * 4)]
        elif kind < 0.92:
            del message[at:]
        elif kind < 0.96:
            message[at:at] = message[int(pick() * (size + 1)) :][: int(pick() * 40)]
        else:
            other = base[int(pick() * len(base))].reply
            cut = int(pick() * (len(other) + 1))
            message[at : at + int(pick() * 60)] = other[cut : cut + int(pick() * 60)]
        if pick() < 0.4:
            return bytes(message[:65535])
