"""A drop as it is kept and shown."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from agent.control.listings import Listings
from agent.core.settings import Settings
from agent.core.types import Direction, packed
from agent.datapath.abi import Reason
from agent.datapath.datapath import Datapath
from agent.datapath.events import PacketEvent
from agent.drops import Drops
from tests.sim.world import World, allow

CLIENT, OTHER = packed("192.0.2.11"), packed("192.0.2.99")


class OneEvent:
    """A datapath that has one to tell."""

    def __init__(self, event: PacketEvent) -> None:
        self._events = [event]

    def read_events(self, limit: int) -> list[PacketEvent]:
        told, self._events = self._events[:limit], self._events[limit:]
        return told


def shown(reason: Reason, protocol: int, endpoint: int | None = 1) -> dict[str, Any]:
    """From endpoint 1, which is `veth1`."""
    event = PacketEvent(
        0.0, reason, False, endpoint, 7, Direction.EGRESS, 0, 0, protocol, CLIENT, OTHER, 0, 0, 0, 42
    )  # fmt: skip
    world = World(Settings())
    world.start(allow("a.test."), endpoints={1: "192.0.2.11"})
    loop = asyncio.new_event_loop()
    try:
        drops = Drops(
            loop, cast(Datapath, OneEvent(event)), lambda: Listings(world.engine, 0.0), lambda *_: None, lambda _: None
        )
        (row,) = drops.read()
    finally:
        loop.close()
    return row


def test_a_drop_says_whose_it_is() -> None:
    """The interface of its endpoint, unless that has gone meanwhile or never was one."""
    assert shown(Reason.DROP_POLICY, 6)["interface"] == "veth1"
    assert shown(Reason.DROP_POLICY, 6, 2)["interface"] is None
    assert shown(Reason.DROP_POLICY, 6, None)["interface"] is None


def test_arp_is_called_arp() -> None:
    """It has no number among the protocols of IP; one of those that has no name keeps its number."""
    assert shown(Reason.DROP_NEIGHBOUR_CLAIM, 0)["protocol"] == "arp"
    assert shown(Reason.DROP_NEIGHBOUR_CLAIM, 58)["protocol"] == "icmpv6"
    assert shown(Reason.DROP_POLICY, 0)["protocol"] == "0"
    assert shown(Reason.DROP_POLICY, 47)["protocol"] == "47"
