"""A drop as it is kept and shown."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from agent.control.listings import Listings
from agent.core.settings import Settings
from agent.core.types import Direction, packed
from agent.datapath.abi import Reason
from agent.datapath.datapath import Datapath
from agent.datapath.events import PacketEvent
from agent.drops import Drops
from agent.facts import Facts
from tests.sim.world import World, allow

CLIENT, OTHER = "192.0.2.11", "192.0.2.99"


class OneEvent:
    """A datapath that has one to tell."""

    def __init__(self, event: PacketEvent) -> None:
        self._events = [event]

    def read_events(self, limit: int) -> list[PacketEvent]:
        told, self._events = self._events[:limit], self._events[limit:]
        return told


def dropped(reason: Reason, protocol: int, endpoint: int | None = 1, to: str = OTHER, *, audited: bool = False) -> PacketEvent:
    return PacketEvent(
        0.0, reason, audited, endpoint, 7, Direction.EGRESS, 0, 0, protocol, packed(CLIENT), packed(to), 0, 0, 0, 42
    )  # fmt: skip


def shown(event: PacketEvent) -> list[dict[str, Any]]:
    """Endpoint 1 is `veth1`."""
    world = World(Settings())
    world.start(allow("a.test."), endpoints={1: "192.0.2.11"})
    loop = asyncio.new_event_loop()
    try:
        drops = Drops(
            loop, cast(Datapath, OneEvent(event)), lambda: Listings(world.engine, 0.0), lambda *_: None, lambda _: None
        )
        return drops.read()
    finally:
        loop.close()


def test_a_drop_says_whose_it_is() -> None:
    """The interface of its endpoint, unless that has gone meanwhile or never was one."""
    for endpoint, interface in ((1, "veth1"), (2, None), (None, None)):
        (row,) = shown(dropped(Reason.DROP_POLICY, 6, endpoint))
        assert row["interface"] == interface


def test_arp_is_called_arp() -> None:
    """It has no number among the protocols of IP; one of those that has no name keeps its number."""
    claim, policy = Reason.DROP_NEIGHBOUR_CLAIM, Reason.DROP_POLICY
    for reason, number, name in ((claim, 0, "arp"), (claim, 58, "icmpv6"), (policy, 0, "0"), (policy, 47, "47")):
        (row,) = shown(dropped(reason, number))
        assert row["protocol"] == name


@pytest.mark.parametrize("to", ["224.0.0.251", "224.0.0.22", "ff02::fb", "ff12::1", "ff01::1"])
def test_what_is_said_to_the_link_is_chatter(to: str) -> None:
    """It is not among the drops; but what a rule denies is, a false sender, and what passed under audit."""
    assert shown(dropped(Reason.DROP_POLICY, 17, to=to)) == []
    assert len(shown(dropped(Reason.DROP_DENY, 17, to=to))) == 1
    assert len(shown(dropped(Reason.DROP_SOURCE, 17, to=to))) == 1
    assert len(shown(dropped(Reason.DROP_POLICY, 17, to=to, audited=True))) == 1


@pytest.mark.parametrize(
    "to", ["169.254.169.254", "255.255.255.255", "224.0.1.1", "239.255.255.250", "fe80::1", "ff02::1:2", "ff05::c", "ff0e::101"]
)
def test_what_is_meant_for_somebody_is_no_chatter(to: str) -> None:
    """An address of the link is somebody's, metadata services have such; DHCP is missed by who does not get it."""
    assert [row["destination"] for row in shown(dropped(Reason.DROP_POLICY, 17, to=to))] == [to]


@pytest.mark.parametrize(("kind", "lost"), [("verdict", 3), ("drop", 3), ("chatter", 3), ("question", None)])
def test_lost_packets_are_missed_by_who_hears_of_packets(kind: str, lost: int | None) -> None:
    """Of which kind they would have been nobody knows."""

    async def counted() -> int | None:
        facts = Facts(lambda: None)
        listener = facts.listen(frozenset({kind}), None)
        facts.lose(3)
        facts.tell(kind, {})
        line = await anext(listener.lines())
        count: int | None = line["fact"].get("count")
        return count

    assert asyncio.run(counted()) == lost
