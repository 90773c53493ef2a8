"""limits.names: who fills the table makes way for the others (places.py)."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from agent.core.places import MADE_AT_ONCE, Account, Place, Places
from agent.core.settings import Settings
from agent.core.types import SCOPE_SHARED, packed
from tests.sim.world import EVERY_ADDRESS, UPSTREAM, World, allow

FLOODING, OTHER, THIRD = 1, 2, 3
ADDRESSES = ("10.0.0.1", "10.0.0.2")


def full(names_max: int = 100) -> World:
    """Three endpoints that may ask for every name below example; the first has asked until no place was left."""
    settings = Settings(upstreams=(UPSTREAM,), allow_addresses=EVERY_ADDRESS, names_max=names_max)
    world = World(settings)
    world.start(allow("*.example."), endpoints={number: f"192.0.2.{number}" for number in (FLOODING, OTHER, THIRD)})
    for number in range(names_max):
        learn(world, f"n{number}.example.", FLOODING)
        world.advance(0.01)
    assert len(known(world)) == names_max
    return world


def learn(world: World, name: str, endpoint: int, address: str = ADDRESSES[0]) -> str:
    return world.resolve(name, address, endpoint=endpoint, ttl=3_600).rcode


def known(world: World) -> set[str]:
    return {pair.name for pair in world.engine.dns_cache.lifetimes}


def test_a_full_table_makes_way_for_an_endpoint_with_few_names() -> None:
    """And for each of its next ones; what it has stays, however long the other goes on."""
    world = full()
    own = [f"own{number}.example." for number in range(10)]
    for name in own:
        assert learn(world, name, OTHER) == "NOERROR"
        world.advance(0.01)
    for number in range(200):
        assert learn(world, f"m{number}.example.", FLOODING) == "NOERROR"
        world.advance(0.01)
    assert set(own) <= known(world)
    assert world.engine.names._places.accounts.total == len(known(world)) <= 100


def test_names_longest_unused_go_first() -> None:
    """One that is asked for again and again is not among them."""
    world = full()
    learn(world, "n0.example.", FLOODING)
    learn(world, "own.example.", OTHER)
    assert {f"n{number}.example." for number in (0, *range(60, 100))} <= known(world)
    assert "n1.example." not in known(world)


def test_a_name_with_a_live_flow_stays() -> None:
    """Its address is open; and with a flow to each of them there is no room, as before."""
    world = full(4)
    busy, idle = ADDRESSES
    learn(world, "n0.example.", FLOODING, idle)  # now at both
    world.advance(1.0)
    world.last_seen[SCOPE_SHARED, packed(idle)] = world.now
    assert learn(world, "own.example.", OTHER) == "NOERROR"
    assert known(world) == {"n0.example.", "own.example."}
    for name in ("a.example.", "b.example."):
        learn(world, name, FLOODING, idle)
    world.last_seen[SCOPE_SHARED, packed(busy)] = world.now
    assert learn(world, "late.example.", THIRD) == "SERVFAIL"
    assert len(known(world)) == 4


def test_a_flood_cannot_begin_with_its_neighbours_names() -> None:
    """A name that two endpoints ask for is on neither's account."""
    world = full()
    for endpoint in (FLOODING, OTHER):
        learn(world, "shared.example.", endpoint)
    for number in range(300):
        world.advance(0.01)
        learn(world, f"m{number}.example.", FLOODING)
    assert "shared.example." in known(world)


def test_names_of_before_a_restart_make_way() -> None:
    """Nobody knows who asked for them."""
    world = full()
    world.restart()
    world.advance(0.0)
    assert learn(world, "own.example.", OTHER) == "NOERROR"
    assert learn(world, "n5000.example.", FLOODING) == "NOERROR"
    assert "own.example." in known(world)


ACCOUNTS = st.sampled_from((None, 1, 2, 3))


@given(st.lists(st.tuples(ACCOUNTS, st.integers(0, 9), st.sampled_from((1, 1, 1, 40))), min_size=1, max_size=20), ACCOUNTS)
def test_who_makes_way(names: list[tuple[Account, int, int]], asking: Account) -> None:
    """Never who has less than the asker, or less than half of an equal share; and where all is looked at, somebody does
    unless the asker has most."""
    places = Places(60.0)
    for account, _, _ in names:
        places.accounts.add(account)
    every = [Place(str(number), account, size, used) for number, (account, used, size) in enumerate(names)]
    places.choose(every, asking)
    leaving = [every[int(name)] for name in places.leaving]
    shares = {account for account, _, _ in names}
    for place in leaving:
        count = places.accounts.of(place.account)
        assert count >= places.accounts.of(asking)
        assert 2 * count * len(shares) >= len(names)
    assert leaving
    order = [(-places.accounts.of(place.account), place.answered_at) for place in leaving]
    assert order == sorted(order)
    assert sum(place.addresses for place in itertools.islice(leaving, len(leaving) - 1)) < MADE_AT_ONCE
