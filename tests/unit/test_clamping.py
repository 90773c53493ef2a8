"""TTLs shortened in place, as dnspython reads what is left."""

from __future__ import annotations

import dns.message
import dns.tsig

from agent.dns.clamping import clamped
from tests.unit.test_removal import asked, lines_of, read, reply_of


def test_only_ttls_of_answers_over_the_bound_change() -> None:
    """Also an alias's and a signature's; the original TTL inside the signature and other sections stay."""
    query, _ = asked()
    signed = "A 8 2 7200 20300101000000 20200101000000 1 a.test. AAAA"
    answer = (
        "a.test. 3600 CNAME b.test.",
        "b.test. 60 A 192.0.2.1",
        "b.test. 3600 A 192.0.2.2",
        f"b.test. 3600 RRSIG {signed}",
    )
    reply = reply_of(query, *answer, authority=["test. 7200 NS ns.test."], additional=["ns.test. 7200 A 192.0.2.53"])
    short = clamped(reply, 60)
    assert [line.split()[1] for line in lines_of(read(short).answer)] == ["60"] * 4
    assert short == reply.replace((3600).to_bytes(4, "big"), (60).to_bytes(4, "big"))
    assert clamped(reply, 3600) == reply


def test_a_ttl_with_the_top_bit_set_stays() -> None:
    """It is 0 (RFC 2181 8); the bound would make it longer."""
    query, _ = asked()
    reply = reply_of(query, "a.test. 305419896 A 192.0.2.1").replace((305419896).to_bytes(4, "big"), b"\x80\x00\x00\x01")
    assert clamped(reply, 60) == reply


def test_a_message_that_is_signed_as_a_whole_passes_as_it_is() -> None:
    """Who checks the signature would take a shorter TTL for a forgery."""
    query, _ = asked()
    query.use_tsig(dns.tsig.Key("key.", b"secret"))
    query.to_wire()
    response = dns.message.make_response(query)
    response.answer = read(reply_of(asked()[0], "a.test. 3600 A 192.0.2.1")).answer
    signed = response.to_wire()
    assert clamped(signed, 60) == signed
