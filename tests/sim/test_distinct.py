"""Different names under a pattern: counted, shown, and refused where a setting says so (DECISIONS 23)."""

from __future__ import annotations

import pytest

from agent.control.listings import Listings, Row
from agent.core.distinct import NAMES_OF_A_MINUTE_MAX, PATTERNS_MAX, DistinctNames
from agent.core.settings import Settings
from tests.sim.world import EVERY_ADDRESS, UPSTREAM, World, allow, any_question

A, B = "198.51.100.1", "198.51.100.2"


def started(names_per_minute: int = 0) -> World:
    """Endpoint 1 may ask all below a.test, endpoint 2 one name."""
    settings = Settings(upstreams=(UPSTREAM,), allow_addresses=EVERY_ADDRESS, names_per_minute=names_per_minute)
    world = World(settings)
    policies = allow("*.a.test.", "written.a.test.", app="e1"), allow("b.test.", app="e2", name="q")
    world.start(*policies, endpoints={1: "192.0.2.11", 2: "192.0.2.12"})
    return world


def shown(world: World) -> list[Row]:
    return Listings(world.engine, world.now).patterns()


def test_a_wildcard_that_carries_data_shows() -> None:
    """Bug case 171: a thousand labels a minute are counted, none is refused, and who asks one name is not
    slowed by it: its question is answered at once, and nothing of it is counted."""
    world = started()
    for minute in range(2):
        for number in range(1_000):
            asker = world.ask(f"x{minute}-{number}.a.test.")
            world.reply(asker, rcode="NXDOMAIN")
            assert world.answer_of(asker).rcode == "NXDOMAIN"
            world.answers.clear()
        assert world.resolve("b.test.", B, endpoint=2).addresses == [B]
        (row,) = shown(world)
        assert (row["endpoint"], row["pattern"], row["in_this_minute"]) == (1, "*.a.test.", 1_000)
        world.advance(60)
    (row,) = shown(world)
    assert row["names"] == pytest.approx(2_000, rel=0.25)  # four times what it is off by
    assert (row["in_this_minute"], row["most_in_a_minute"], row["refused"]) == (0, 1_000, 0)
    world.resolve("x.a.test.", A)
    (row,) = shown(world)
    assert (row["in_this_minute"], row["most_in_a_minute"]) == (1, 1_000)


def test_a_name_counts_once_and_one_that_is_written_out_not_at_all() -> None:
    """However often it is asked, and for which type."""
    world = started()
    for _ in range(50):
        for name in ("one.a.test.", "two.a.test.", "written.a.test."):
            world.resolve(name, A)
            world.ask(name, "AAAA")
            world.advance(4.0)
    (row,) = shown(world)
    assert (row["pattern"], row["names"], row["most_in_a_minute"]) == ("*.a.test.", 2, 2)


def test_over_the_limit_a_new_name_is_answered_like_a_denied_one() -> None:
    """A name of this minute may be asked on; with the next minute others may."""
    world = started(names_per_minute=3)
    for number in range(3):
        assert world.resolve(f"n{number}.a.test.", A).rcode == "NOERROR"
    over = world.ask("n3.a.test.")
    answer = world.answer_of(over)
    assert answer.rcode == "NXDOMAIN"
    assert "names-per-minute" in str(answer.message.extended_errors()[0].text)
    assert world.resolve("n1.a.test.", A).rcode == "NOERROR"
    assert world.resolve("written.a.test.", A).rcode == "NOERROR"
    assert world.resolve("b.test.", B, endpoint=2).rcode == "NOERROR"
    assert world.engine.proxy.counters["questions over names-per-minute"] == 1
    assert [row["refused"] for row in shown(world)] == [1]
    world.advance(60)
    assert world.resolve("n3.a.test.", A).rcode == "NOERROR"


def test_a_policy_of_every_name_counts_them_too() -> None:
    """A rule without names is the pattern of every name; of several rules the first that takes a name has it."""
    world = World(Settings(upstreams=(UPSTREAM,), allow_addresses=EVERY_ADDRESS))
    world.start(any_question(), endpoints={1: "192.0.2.11"})
    for name in ("a.example.", "b.test."):
        world.resolve(name, A)
    world.apply(allow("x*.a.test.", "*.a.test.", "**.test."))
    world.advance(0.0)
    for name in ("c.test.", "d.a.test.", "xy.a.test."):
        world.resolve(name, A)
    names = {row["pattern"]: row["names"] for row in shown(world)}
    assert names == {"*": 2, "**.test.": 1, "*.a.test.": 1, "x*.a.test.": 1}


def test_what_is_held_is_bounded_and_goes_with_the_endpoint() -> None:
    """Whatever is asked for how long."""
    distinct = DistinctNames(0)
    for number in range(3 * NAMES_OF_A_MINUTE_MAX):
        assert distinct.may_ask(1, f"*.p{number % (2 * PATTERNS_MAX)}", f"n{number}", 0.0)
    (asking,) = distinct._by_endpoint.values()
    assert len(asking.names) == NAMES_OF_A_MINUTE_MAX
    assert len(asking.patterns) == PATTERNS_MAX
    distinct.forget(1)
    assert not list(distinct.asked(0.0))
