"""What is said of each question: one fact, with all a person may want to know; where nobody watches, one a second."""

from __future__ import annotations

import dns.message
import pytest

from agent.control.listings import Listings
from agent.core.events import AskerGone, Fact, Query, Tick, UpstreamFailed
from agent.core.proxy import QUESTION_S_MAX
from agent.core.settings import Settings
from agent.core.types import PROTOCOL_TCP, PROTOCOL_UDP, packed
from tests.sim.world import EVERY_ADDRESS, UPSTREAM, World, allow

A, B = "198.51.100.1", "198.51.100.2"
CLIENT = "192.0.2.11"
KEYS = {"endpoint", "client", "server", "protocol", "name", "type", "verdict", "cookie", "upstream", "upstream_s"}
KEYS |= {"gate_s", "rows", "outcome", "why", "unsaid"}
ANSWER_KEYS = {"rcode", "answers", "cnames"}


def started(settings: Settings | None = None) -> World:
    world = World(settings or Settings(upstreams=(UPSTREAM,), allow_addresses=EVERY_ADDRESS))
    world.start(allow("a.test.", "*.w.test."), endpoints={1: CLIENT, 2: "192.0.2.12"})
    return world


def said(world: World) -> list[Fact]:
    """Of questions, since it was asked for last."""
    facts = [fact for fact in world.facts if fact.kind == "question"]
    world.facts.clear()
    return facts


def test_a_released_reply_says_by_which_rule_how_long_and_for_how_many_rows() -> None:
    """Time with the upstream and time at the gate apart; and what the reply said."""
    world = started()
    world.auto = False
    asker = world.ask("a.test.")
    world.advance(0.25)
    world.reply(asker, A)
    world.advance(0.125)
    world.auto = True
    world.quiesce()
    (fact,) = said(world)
    assert fact.fields.keys() == KEYS | ANSWER_KEYS
    assert {**fact.fields, "cookie": 0} == {
        "endpoint": 1, "client": CLIENT, "server": "203.0.113.1", "protocol": "udp", "name": "a.test.", "type": 1,
        "verdict": "allowed", "cookie": 0, "upstream": "203.0.113.53", "upstream_s": 0.25, "gate_s": 0.125, "rows": 1,
        "outcome": "released", "why": None, "unsaid": None,
        "rcode": 0, "answers": [{"address": A, "ttl": 60}], "cnames": [],
    }  # fmt: skip
    cookie = fact.fields["cookie"]
    assert isinstance(cookie, int)
    assert str(world.engine.cookies.rule_by_cookie[cookie].origin) == "p:1"


def test_every_end_of_a_question_is_said_once() -> None:
    """Denied, failed, given up by its client, gone with its endpoint, unreadable, over a bound, from nobody."""
    world = started(Settings(upstreams=(UPSTREAM,), allow_addresses=EVERY_ADDRESS, open_questions_per_endpoint_max=1))

    def outcome() -> tuple[object, ...]:
        (fact,) = said(world)
        assert not fact.fields.keys() - KEYS
        return tuple(fact.fields.get(key) for key in ("verdict", "outcome", "why"))

    world.ask("b.test.")
    assert outcome() == ("denied", "denied", None)
    world.ask("b.test.", "AXFR")
    assert outcome() == ("denied", "denied", "no zone transfers")
    asker = world.ask("a.test.")
    assert not said(world), "it is open"
    world.ask("a.test.")
    assert outcome() == (None, "failed", "too many open questions")
    number = world.transaction_of(asker)
    assert number is not None
    world.handle(UpstreamFailed(number, "connection refused"))
    assert outcome() == ("allowed", "failed", "connection refused")
    world.ask("a.test.")
    world.advance(QUESTION_S_MAX)
    assert outcome() == ("allowed", "failed", "no upstream answered in time")
    world.handle(AskerGone(world.ask("a.test.", protocol=PROTOCOL_TCP)))
    assert outcome() == ("allowed", "gone", "the client hung up")
    for message, wanted in ((b"\0" * 12, "refused"), (b"junk", "ignored")):
        world.handle(Query(object(), packed(CLIENT), packed(A), 53, PROTOCOL_UDP, message))
        assert outcome()[1] == wanted
    world.handle(Query(object(), packed("192.0.2.99"), packed(A), 53, PROTOCOL_UDP, dns.message.make_query(".", "A").to_wire()))
    assert outcome()[1:] == ("ignored", "no endpoint has this address")
    world.ask("a.test.")
    world.remove_endpoint(1)
    assert outcome() == ("allowed", "gone", "its endpoint is gone")


def test_where_nobody_watches_a_flood_is_one_fact_a_second() -> None:
    """With how many there were besides; another endpoint's denial is said all the same, and what is usual is not said."""
    world = started()
    world.engine.proxy.is_watched = False
    for second in range(3):
        for _ in range(200):
            world.ask("b.test.")
        world.ask("c.test.", endpoint=2)
        world.resolve("a.test.", A)
        facts = said(world)
        assert [fact.fields["endpoint"] for fact in facts] == [1, 2]
        assert facts[0].fields["unsaid"] == (199 if second else None)
        world.now += 1.0
        world.handle(Tick())
        world.answers.clear()


def test_addresses_that_are_taken_out_are_said_sparingly_too() -> None:
    """An upstream under a hostile client's hand could fill the log with them."""
    world = started(Settings(upstreams=(UPSTREAM,)))
    world.engine.proxy.is_watched = False
    for _ in range(50):
        world.resolve("a.test.", "127.0.0.1")
    (fact,) = [fact for fact in world.facts if fact.kind == "guard"]
    assert fact.fields["addresses"] == {"127.0.0.1": "loopback"}


@pytest.mark.parametrize("is_audit", [False, True])
def test_who_watches_an_endpoint_is_told_of_each_address_that_is_taken_out(is_audit: bool) -> None:
    """Also where the log is not told; and under audit, where it is not taken out."""
    world = started(Settings(upstreams=(UPSTREAM,)))
    world.add_endpoint(3, "192.0.2.13", audit=is_audit)
    world.advance(0.0)
    world.engine.proxy.is_watched = False
    world.engine.proxy.watched.add(3)
    for name in ("a.test.", "b.test.") if is_audit else ("a.test.", "a.test."):
        answered = world.resolve(name, "10.0.0.5", endpoint=3)
        assert answered.addresses == (["10.0.0.5"] if is_audit else [])
    facts = [fact for fact in world.facts if fact.kind == "guard"]
    assert [(fact.fields["addresses"], fact.fields["audited"]) for fact in facts] == 2 * [({"10.0.0.5": "private"}, is_audit)]


def test_a_drop_is_explained_by_what_its_endpoint_was_answered() -> None:
    """By its own rules as well: who learns for itself hears nothing of names that others asked."""
    world = World(Settings(upstreams=(UPSTREAM,), allow_addresses=EVERY_ADDRESS))
    world.start(allow("a.test.", app="e3"), allow("*.test.", app="e4"), allow("*.test.", app="e5"))
    for number in (3, 4, 5):
        world.add_endpoint(number, f"192.0.2.{10 + number}", isolated=number != 5)
    world.advance(0.0)
    listings = Listings(world.engine, world.now)
    world.resolve("a.test.", A, endpoint=3)
    world.resolve("b.test.", B, endpoint=4)

    def why(address: str, endpoint: int) -> str | None:
        return listings.why_dropped("policy", packed(address), endpoint, is_egress=True)

    assert [listings.names_on(packed(A), number) for number in (3, 4, 5, None)] == [["a.test."], [], ["a.test."], ["a.test."]]
    assert [why(A, number) for number in (3, 4)] == ["no rule for this port: a.test.", "not resolved through the proxy"]
    assert why(B, 3) == "not resolved through the proxy"
    world.resolve("a.test.", A, endpoint=4)
    assert [why(A, number) for number in (3, 4)] == 2 * ["no rule for this port: a.test."]
    world.apply(allow("c.test.", app="e3"), allow("*.test.", app="e4"))
    world.advance(0.0)
    assert why(A, 3) == "no rule for this name: a.test."
