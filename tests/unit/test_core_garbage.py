"""The core makes no reference cycles: what is let go is gone at once, so that the collector may stay frozen for ever.

A full pass over a million addresses would stop the one thread for half a second; without cycles there is nothing for it to do.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from agent.core.events import HostAddresses
from agent.core.rules import Policy
from agent.core.settings import Settings
from agent.core.types import Table, packed
from tests.sim.world import UPSTREAM, World, allow

NAMES = ("a.example.", "b.example.", "x.a.example.", "c.test.")
ADDRESSES = ("192.0.2.101", "192.0.2.102", "198.51.100.7", "203.0.113.9")
POLICIES = (
    (allow("a.example."),),
    (allow("*.example.", "c.test."),),
    (allow("**.example.", "198.51.100.0/24", deny=("203.0.113.0/24",)), allow("*", port=80, app="e2", name="q")),
    (allow("10.0.0.0/8"),),
    (),
)


@contextmanager
def unreachable() -> Iterator[list[str]]:
    """What of agent.core only a collector could free, of all that was made meanwhile."""
    found: list[str] = []
    gc.collect()
    gc.freeze()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found += [repr(thing)[:200] for thing in gc.garbage if type(thing).__module__.startswith("agent.core")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.unfreeze()


def history(world: World, chance: random.Random, steps: int) -> None:
    """Whatever can happen, with a kernel that refuses some of it."""
    for step in range(steps):
        match chance.randrange(9):
            case 0 | 1 | 2:
                world.reply(world.ask(chance.choice(NAMES)), *chance.sample(ADDRESSES, 2), ttl=chance.choice((5, 60)))
            case 3:
                world.ask(chance.choice(NAMES))
            case 4:
                world.advance(chance.choice((0.01, 1.1, 5.1, 70.0)))
            case 5:
                world.apply(*chance.choice(POLICIES))
            case 6:
                world.add_endpoint(10 + step, "192.0.2.12", isolated=chance.random() < 0.5)
                world.remove_endpoint(10 + step)
            case 7:
                world.kernel.fail(chance.choice((Table.IPCACHE, Table.POLICY)), 2)
            case _:
                world.handle(HostAddresses(frozenset({packed(chance.choice(ADDRESSES))})))


@pytest.mark.parametrize("seed", range(4))
def test_histories_leave_nothing_to_the_collector(seed: int) -> None:
    """Replies, ends, policy changes in slices, refusals, endpoints, a restart. The engine itself, wired once, stays."""
    with unreachable() as found:
        world = World(Settings(upstreams=(UPSTREAM,), ttl_floor_s=5.0, identities_max=(20, 16_384)[seed % 2]))
        world.engine.names.pairs_at_once = world.engine.sets.rows_at_once = 1
        world.start(*POLICIES[1], endpoints={1: "192.0.2.11", 2: "192.0.2.13"})
        history(world, random.Random(seed), 150)
        first = world.engine
        world.restart()
        history(world, random.Random(-seed), 50)
        world.advance(100.0)
        assert world.kernel.writes > 100
    assert first is not world.engine
    assert not found, found


def test_a_cycle_would_be_seen() -> None:
    """The check above is able to fail."""

    def make() -> None:
        policies: list[object] = [allow("a.example.")]
        assert isinstance(policies[0], Policy)
        policies.append(policies)

    with unreachable() as found:
        make()
    assert len(found) > 0
