"""Messages to begin with: those of the cases, and messages of every kind as dnspython writes them.

The corpus is the same in every run and every process: nothing in it comes from the seed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import dns.edns
import dns.flags
import dns.message
import dns.rcode
import dns.rrset

CASES = Path(__file__).parent.parent / "cases"
MADE = 400

OWNERS = ("www.example.", "WWW.Example.", "a.www.example.", "cdn.test.", "x.cdn.test.", "test.", ".", "x" * 63 + ".example.")
HASH = "aGVsbG8="
DATA_BY_TYPE = {
    "A": ("192.0.2.1", "198.51.100.7", "10.0.0.1", "169.254.169.254"),
    "AAAA": ("2001:db8::1", "::ffff:192.0.2.9", "::ffff:10.0.0.1", "::1", "64:ff9b::a00:1"),
    "CNAME": OWNERS,
    "DNAME": OWNERS,
    "NS": OWNERS,
    "PTR": OWNERS,
    "MX": ("10 mail.test.",),
    "TXT": ('"text"', '"a" "b" ""'),
    "SOA": ("ns.test. hostmaster.test. 1 2 3 4 5",),
    "SRV": ("1 2 443 www.example.",),
    "NAPTR": ('1 2 "s" "x" "!a!b!" www.example.',),
    "CAA": ('0 issue "ca.test"',),
    "HTTPS": (
        "0 cdn.test.",
        "1 .",
        "1 . alpn=h2,h3 ipv4hint=192.0.2.1,192.0.2.77",
        "2 b.test. port=8443 ipv4hint=192.0.2.3 ipv6hint=2001:db8::5",
        "1 . mandatory=alpn alpn=h2 no-default-alpn ipv4hint=127.0.0.1",
    ),
    "SVCB": ("0 cdn.test.", "1 . ipv6hint=2001:db8::7,::1", "3 d.test. dohpath=/q{?dns} key65280=x"),
    "DS": ("1 8 2 " + "ab" * 32,),
    "DNSKEY": (f"257 3 8 {HASH}",),
    "RRSIG": (
        f"A 8 2 60 20300101000000 20200101000000 1 example. {HASH}",
        f"HTTPS 8 2 60 20300101000000 20200101000000 1 . {HASH}",
    ),
    "NSEC": ("a.test. A AAAA RRSIG NSEC",),
    "NSEC3": ("1 1 12 aabbccdd 2t7b4g4vsa5smi47k61mv5bv1a22bojr A RRSIG",),
    "TLSA": ("3 1 1 " + "cd" * 32,),
    "SSHFP": ("4 2 " + "ef" * 32,),
    "LOC": ("52 22 23.000 N 4 53 32.000 E -2.00m 0.00m 10000m 10m",),
    "HINFO": ('"cpu" "os"',),
    "RP": ("a.test. b.test.",),
    "AFSDB": ("1 a.test.",),
    "URI": ('10 1 "ftp://a.test/"',),
    "TYPE4660": (r"\# 0", r"\# 4 0a000001"),
}


def option(code: int, data: bytes = b"") -> dns.edns.GenericOption:
    return dns.edns.GenericOption(dns.edns.OptionType.make(code), data)


OPTIONS: tuple[tuple[dns.edns.Option, ...], ...] = (
    (option(10, b"12345678"),),
    (option(10, b"12345678" + b"s" * 16),),
    (option(10, b"12345678" + b"s" * 32), option(3)),
    (dns.edns.ECSOption("192.0.2.0", 24), option(12, bytes(64))),
    (dns.edns.EDEOption(dns.edns.EDECode.BLOCKED, "blocked"),),
    (option(65001, b"unknown"), option(11, b"\x00\x64")),
    (),
)


class Exchange(NamedTuple):
    """A query and a reply to it, as octets."""

    query: bytes
    reply: bytes


@lru_cache(maxsize=1)
def exchanges() -> tuple[Exchange, ...]:
    return (*_of_the_cases(), *_as_dnspython_writes_them())


def _of_the_cases() -> Iterator[Exchange]:
    for file in ("wire", "dnsproxy"):
        for case in json.loads((CASES / f"{file}.json").read_text())["cases"]:
            if "query_hex" not in case:
                continue
            upstream = case if file == "wire" else case["upstream"]
            for reply in upstream.get("replies_hex", [upstream.get("reply_hex", "")]):
                yield Exchange(bytes.fromhex(case["query_hex"]), bytes.fromhex(reply))


def _as_dnspython_writes_them() -> Iterator[Exchange]:
    source = random.Random(0)
    types = [*DATA_BY_TYPE, *["A", "AAAA", "CNAME"] * 8]
    for number in range(MADE):
        query = dns.message.make_query(
            source.choice(OWNERS), source.choice(["A", "AAAA", "HTTPS", "ANY", "TXT", "TYPE4660"]), id=number * 101 & 0xFFFF
        )
        if source.random() < 0.6:
            options = list(source.choice(OPTIONS))
            query.use_edns(0, 0x8000 * source.randrange(2), source.choice([0, 512, 1232, 65535]), options=options)
        reply = dns.message.make_response(query, our_payload=1400)
        reply.set_rcode(dns.rcode.Rcode(source.choice([0, 0, 0, 0, 0, 2, 3, 5, 16] if query.edns >= 0 else [0, 0, 0, 3])))
        if source.random() < 0.4:
            reply.flags |= dns.flags.AD | dns.flags.AA
        for section in (reply.answer, reply.answer, reply.authority, reply.additional):
            for _ in range(source.choice([0, 1, 2, 5])):
                rtype = source.choice(types)
                # A set for each record: dnspython writes those of one set in an order of its own.
                ttl = source.choice([0, 1, 60, 0x7FFFFFFF])
                section.append(dns.rrset.from_text(source.choice(OWNERS), ttl, "IN", rtype, source.choice(DATA_BY_TYPE[rtype])))
        octets = reply.to_wire(max_size=65535)
        if source.random() < 0.03:
            octets = _signed(octets)
        yield Exchange(query.to_wire(), octets)


def _signed(octets: bytes) -> bytes:
    """With a TSIG record that nobody could verify; written by hand, for a real one holds the time."""
    data = b"\x0bhmac-sha256\x00" + bytes(6) + b"\x01\x2c\x00\x20" + bytes(32) + octets[:2] + bytes(4)
    record = b"\x03key\x04test\x00" + b"\x00\xfa\x00\xff" + bytes(4) + len(data).to_bytes(2, "big") + data
    return octets[:10] + (int.from_bytes(octets[10:12], "big") + 1).to_bytes(2, "big") + octets[12:] + record
