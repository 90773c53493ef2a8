"""What is said of each question: one fact, with all a person may want to know; where nobody watches, one a second."""

from __future__ import annotations

import dns.message

from agent.core.events import AskerGone, Fact, Query, Tick, UpstreamFailed
from agent.core.proxy import QUESTION_S_MAX
from agent.core.settings import Settings
from agent.core.types import PROTOCOL_TCP, PROTOCOL_UDP, packed
from tests.sim.world import EVERY_ADDRESS, UPSTREAM, World, allow

A = "198.51.100.1"
CLIENT = "192.0.2.11"
KEYS = {"endpoint", "client", "server", "protocol", "name", "type", "verdict", "cookie", "upstream", "upstream_s"}
KEYS |= {"gate_s", "rows", "outcome", "why", "unsaid"}


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
    """Time with the upstream and time at the gate apart."""
    world = started()
    world.auto = False
    asker = world.ask("a.test.")
    world.advance(0.25)
    world.reply(asker, A)
    world.advance(0.125)
    world.auto = True
    world.quiesce()
    (fact,) = said(world)
    assert fact.fields.keys() == KEYS
    assert {**fact.fields, "cookie": 0} == {
        "endpoint": 1, "client": CLIENT, "server": "203.0.113.1", "protocol": "udp", "name": "a.test.", "type": 1,
        "verdict": "allowed", "cookie": 0, "upstream": "203.0.113.53", "upstream_s": 0.25, "gate_s": 0.125, "rows": 1,
        "outcome": "released", "why": None, "unsaid": None,
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
