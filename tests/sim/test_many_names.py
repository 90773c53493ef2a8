"""Thousands of names at once: what takes slices and shares addresses is judged like the small histories.

SIM_NAMES=3000 makes more of it (scripts/sim).
"""

from __future__ import annotations

import os
import random

import pytest

from agent.core.events import PoliciesChanged
from agent.core.settings import Settings
from agent.core.types import packed
from tests.sim.simulation import Simulation
from tests.sim.world import EVERY_ADDRESS, UPSTREAM, World, allow, any_question

NAMES = int(os.environ.get("SIM_NAMES", "1000"))
ADDRESSES = [f"198.18.0.{number}" for number in range(1, 51)]


@pytest.mark.timeout(600)
def test_policies_and_processes_change_while_thousands_of_names_are_known() -> None:
    """Each address has dozens of names; every row of them moves, one write at a time, under a change and under a restart."""
    randomness = random.Random(3)
    names = [f"n{number}.{randomness.choice('abc')}.example." for number in range(NAMES)]
    world = World(Settings(upstreams=(UPSTREAM,), allow_addresses=EVERY_ADDRESS))
    world.start(any_question(), allow("*.a.example."), endpoints={1: "192.0.2.11", 2: "192.0.2.12"})
    for name in names:
        answer = world.resolve(name, *randomness.sample(ADDRESSES, 2), ttl=randomness.choice((60, 3_600)))
        assert answer.rcode == "NOERROR"
    world.answers.clear()
    world.auto = False
    sim = Simulation(world, tuple(map(packed, ADDRESSES[:4])), (443, 80))
    sim.judge()
    sim.handle(PoliciesChanged((any_question(), allow("*.a.example.", "*.b.example.", port=80)), "t"))
    _catch_up(sim, until=150)
    sim.restart((any_question(), allow("*.a.example.", "**.example."), allow("198.18.0.0/25", name="q")))
    _catch_up(sim, until=200)
    sim.jump(100.0)
    sim.rest()
    assert 0 < len(world.engine.dns_cache.lifetimes) < 2 * NAMES


def _catch_up(sim: Simulation, until: int) -> None:
    """So many writes, a few at a time; then the next thing happens, whatever is left."""
    for _ in range(until):
        if not sim.write():
            sim.advance(0.0)
        sim.acknowledge(2)
