"""Endpoints with policies of their own: judged by these alone, whatever happens around them.

SIM_STEPS=200000 makes a long run of the attachments that come and go, SIM_SEED another one.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest

from agent.attachments import PolicyText, own_policies
from agent.core.events import HostAddresses
from agent.core.rules import Policy
from agent.core.settings import Settings
from agent.core.types import Direction, EndpointValue, GroupValue, Table, packed, text_of
from tests.sim.simulation import ADDRESSES, NAMES, PORTS_JUDGED, Simulation
from tests.sim.world import EVERY_ADDRESS, UPSTREAM, World, allow

A, B = "192.0.2.101", "192.0.2.102"
ATTACHMENTS = max(120, int(os.environ.get("SIM_STEPS", "0")) // 50)
AT_A_TIME = 4


def own(*lines: str) -> tuple[Policy, ...]:
    return own_policies([PolicyText("own", "\n".join(lines))])


def started(**settings: int) -> World:
    """Endpoint 1 is judged by everybody's policies, which allow a.example, endpoint 2 by its own, which allow b.example."""
    world = World(Settings(upstreams=(UPSTREAM,), allow_addresses=EVERY_ADDRESS, **settings))  # type: ignore[arg-type]
    world.start(allow("a.example.", deny=(f"{B}/32",)))
    world.add_endpoint(2, "192.0.2.12", own=own("b.example:443/tcp"))
    world.advance(0.0)
    return world


def group_of(world: World, number: int) -> object:
    return world.engine.groups.endpoints[number].group


def test_neither_widened_nor_narrowed_by_everybodys() -> None:
    """Before, after and while these change, and over a restart."""
    world = started()
    for _ in range(2):
        assert world.resolve("b.example.", B, endpoint=2).addresses == [B]
        assert world.resolve("a.example.", A, endpoint=1).addresses == [A]
        assert world.resolve("a.example.", A, endpoint=2).rcode == "NXDOMAIN"
        assert (world.passes(B, endpoint=2), world.passes(A, endpoint=2)) == (True, False)
        assert (world.passes(B), world.passes(A)) == (False, True)
        world.apply(allow("*.example."))
        world.apply(allow("a.example.", deny=(f"{B}/32",)))
        world.advance(2.0)
        world.restart()
        world.advance(2.0)


def test_closed_in_both_directions_but_for_the_host() -> None:
    """Whatever the texts say of that; endpoint 1, which no policy closes inward, is reached by all."""
    world = started()
    rows = world.kernel.rows

    def admits(number: int, peer: str) -> bool:
        endpoint = rows[Table.ENDPOINTS][100 + number]
        assert isinstance(endpoint, EndpointValue)
        group = rows[Table.GROUPS][endpoint.group]
        assert isinstance(group, GroupValue)
        verdict = world.kernel.verdict_for(100 + number, packed(peer), 6, 8080, Direction.INGRESS)
        return verdict is not None or not group.default_deny_ingress

    world.handle(HostAddresses(frozenset({packed("192.0.2.1")})))
    assert [admits(2, peer) for peer in ("192.0.2.1", "192.0.2.11", A)] == [True, False, False]
    assert [admits(1, peer) for peer in ("192.0.2.1", "192.0.2.11", A)] == [True, True, True]
    world.add_endpoint(3, "192.0.2.13", own=own_policies(()))
    world.advance(0.0)
    assert world.resolve("b.example.", B, endpoint=3).rcode == "NXDOMAIN"
    assert (world.passes(B, endpoint=3), admits(3, "192.0.2.11")) == (False, False)


def test_equal_policies_share_a_set() -> None:
    """Also when they were read twice, and not where one is only audited."""
    world = started()
    world.add_endpoint(3, "192.0.2.13", own=own("b.example:443/tcp"))
    world.add_endpoint(4, "192.0.2.14", own=own("b.example:443/tcp"), audit=True)
    world.add_endpoint(5, "192.0.2.15", own=own("a.example:443/tcp"))
    world.advance(2.0)
    assert group_of(world, 3) is group_of(world, 2)
    assert len({id(group_of(world, number)) for number in (1, 2, 4, 5)}) == 4
    assert len(world.kernel.rows[Table.GROUPS]) == 4


def test_other_policies_take_over_in_one_step() -> None:
    """At no write in between is anything open that neither allows, nor shut what both do."""
    world = started()
    world.add_endpoint(2, "192.0.2.12", own=own("a.example:443/tcp", "b.example:443/tcp"))
    world.advance(2.0)
    for name, address in (("a.example.", A), ("b.example.", B)):
        assert world.resolve(name, address, endpoint=2).addresses == [address]
    world.auto = False
    added = world.engine.groups.endpoints[2].added
    world.handle(replace(added, policies=own("b.example:443/tcp", "c.example:443/tcp")))
    assert world.passes(A, endpoint=2)
    while world.waiting_writes or world.engine.groups.can_step or world.engine.groups.is_behind:
        assert world.passes(B, endpoint=2)
        assert not world.passes("192.0.2.103", endpoint=2)
        world.write_one()
        world.advance(0.0)
    assert not world.passes(A, endpoint=2)


@pytest.mark.parametrize("known", [False, True])
def test_what_does_not_fit_is_refused_and_the_others_go_on(known: bool) -> None:
    """A new endpoint is not judged by it; one that was there is judged as before."""
    world = started(policy_rows_per_set_max=40)
    assert world.resolve("b.example.", B, endpoint=2).addresses == [B]
    big = own(*(f"n{number}.example:443/tcp" for number in range(50)))
    number = 2 if known else 3
    world.add_endpoint(number, f"192.0.2.1{number}", own=big)
    world.apply(allow("a.example."), ticket="refused")
    world.advance(3.0)
    assert "one set holds 40" in str(world.settled["refused"])
    assert world.passes(B, endpoint=2)
    assert world.attached.keys() == {1, 2}
    if known:
        world.add_endpoint(2, "192.0.2.12", own=own("b.example:443/tcp"))
    else:
        world.remove_endpoint(3)
    world.apply(allow("a.example."), ticket="taken")
    world.advance(3.0)
    assert world.settled["taken"] is None
    assert world.passes(B, endpoint=2)


@pytest.mark.timeout(0 if "SIM_STEPS" in os.environ else 120)
def test_hundreds_come_and_go() -> None:
    """Each with policies that nobody else has; the kernel lags behind, names are learned, processes die (I1 to I7)."""
    chance = random.Random(int(os.environ.get("SIM_SEED", "6")))
    world = World(Settings(upstreams=(UPSTREAM,), allow_addresses=EVERY_ADDRESS, ttl_floor_s=5.0), auto=False)
    sim = Simulation(world, ADDRESSES[:5], PORTS_JUDGED[:1])
    sim.engine.sets.rows_at_once = 3
    world.start(allow("a.example.", port=80), endpoints={1: "192.0.2.11"})
    there: list[int] = []

    def catch_up(writes: int) -> None:
        for _ in range(writes):
            if not sim.write() and not sim.unheard:
                return
            sim.acknowledge(2)
            sim.hear_flows()

    for number in range(10, 10 + ATTACHMENTS):
        if len(there) == AT_A_TIME or (there and chance.random() < 0.3):
            sim.remove_endpoint(there.pop(chance.randrange(len(there))))
        lines = [f"{name}:{80 + number}/tcp" for name in ("every.test", *NAMES)][: chance.randint(1, 3)]
        lines += [f"{name}:80/tcp" for name in chance.sample(NAMES, chance.randint(0, 2))]
        lines += ["10.0.1.0/24:80/tcp"] * chance.randint(0, 1) + ["!10.0.1.2/32"] * chance.randint(0, 1)
        world.add_endpoint(number, f"192.0.2.{20 + number % 200}", own=own(*lines))
        sim.judge()
        there.append(number)
        for _ in range(2):
            endpoint, name = chance.choice([1, *there]), chance.choice(NAMES)
            asker = world.ask(name, endpoint=endpoint)
            sim.questions[asker] = (endpoint, name, world.now)
            sim.judge()
            if world.transaction_of(asker) in world.asked:
                sim.replied[asker] = world.now
                world.reply(asker, text_of(chance.choice(ADDRESSES[:4])), ttl=8)
                sim.judge()
            catch_up(chance.randint(0, 12))
        sim.advance(chance.choice((0.0, 0.01, 0.4)))
        if chance.random() < 0.03:
            sim.restart(cut=chance.randint(0, 4))
            sim.engine.sets.rows_at_once = 3
        if chance.random() < 0.2:
            catch_up(1_000)
    sim.rest()
    assert world.attached.keys() >= {1, *there}
    assert len(world.kernel.rows[Table.GROUPS]) == 1 + len(there)
