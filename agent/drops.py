"""Packets as the kernel tells of them, denied ones and on request those that open a flow: read from its ring a few at a time,
and explained; the last drops are kept.

What hosts say to groups of their link all the time (`is_chatter`) is nobody's try to reach anything: it is told and counted
apart, so that it does not hide what was denied.

A workload that floods what it is denied costs a question's answer a millisecond of waiting, and the agent a hundredth of its
time; where somebody listens, a twentieth. What does not fit in the ring meanwhile is counted as lost by the program.
"""

from __future__ import annotations

import asyncio
import collections
import datetime as dt
from collections.abc import Callable
from typing import Final

from agent.control.listings import Listings, Row
from agent.core.types import PROTOCOL_NAMES, Direction, packed, text_of
from agent.datapath.abi import Loss, Reason
from agent.datapath.datapath import Datapath
from agent.datapath.events import PacketEvent

# Enough to answer "what was dropped just now"; the counters have the rest.
KEPT_MAX: Final = 10_000
# At once, and the pause after so many.
AT_ONCE: Final = 32
AT_ONCE_HEARD: Final = 512
PAUSE_S: Final = 0.1
# Who asks for them gets what has come by then; 10 ms of it, under a flood.
TO_SHOW_MAX: Final = 512

# Multicast DNS, LLMNR, group reports: groups whose packets no router passes on (RFC 5771 4, RFC 4291 2.7). Not DHCP, of neither
# family: who is denied it has no address, and somebody will want to know why.
_LINK_BLOCK: Final = packed("224.0.0.0")[:3]
_LINK_SCOPES: Final = frozenset({1, 2})
_ALL_DHCP_SERVERS: Final = packed("ff02::1:2")


class Drops:
    """taken: called with each, as the kernel told it and as it is shown. lost: with the number of those that nobody was told
    of, while somebody listens. chatter: how many packets of it were told of.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        datapath: Datapath,
        listings: Callable[[], Listings],
        taken: Callable[[PacketEvent, Row], None],
        lost: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self._datapath = datapath
        self._listings = listings
        self._taken = taken
        self._kept: collections.deque[Row] = collections.deque(maxlen=KEPT_MAX)
        self._lost = lost
        self.chatter = 0
        self._lost_before: int | None = None  # None where nobody listens
        self._again: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._again = None
        self._loop.add_reader(self._datapath.events_fd, self._hear)

    def close(self) -> None:
        self._loop.remove_reader(self._datapath.events_fd)
        if self._again is not None:
            self._again.cancel()

    def hear(self, *, is_heard: bool, openings: bool) -> None:
        """Somebody listens; to flows that are opened as well."""
        self._lost_before = self._lost_now() if is_heard else None
        self._datapath.tell_openings(openings)

    def read(self) -> list[Row]:
        """All that are kept, with those that have come by now."""
        self._read(TO_SHOW_MAX)
        return list(self._kept)

    def _hear(self) -> None:
        at_once = AT_ONCE if self._lost_before is None else AT_ONCE_HEARD
        if self._read(at_once) == at_once:
            self._loop.remove_reader(self._datapath.events_fd)
            self._again = self._loop.call_later(PAUSE_S, self.start)

    def _read(self, most: int) -> int:
        """Says how many there were."""
        listings = self._listings()
        events = self._datapath.read_events(most)
        for event in events:
            row = _row(event, listings)
            if is_chatter(event):
                self.chatter += 1
            elif event.reason.is_drop:
                self._kept.append(row)
            self._taken(event, row)
        if self._lost_before is not None and self._lost_before < (lost := self._lost_now()):
            self._lost(lost - self._lost_before)
            self._lost_before = lost
        return len(events)

    def _lost_now(self) -> int:
        return self._datapath.losses()[Loss.EVENT]


def is_chatter(event: PacketEvent) -> bool:
    """To a group of the link, and dropped because no rule allows it; what a rule denies, or a false sender, is no chatter.
    Under audit it is what a policy would need to let pass.
    """
    if event.reason is not Reason.DROP_POLICY or event.audited:
        return False
    to = event.destination
    if len(to) == 16:
        return to[0] == 0xFF and to[1] & 0x0F in _LINK_SCOPES and to != _ALL_DHCP_SERVERS
    return to.startswith(_LINK_BLOCK)


def _row(event: PacketEvent, listings: Listings) -> Row:
    is_egress = event.direction is Direction.EGRESS
    remote = event.destination if is_egress else event.source
    seen = listings.seen_on(remote, event.endpoint)
    return {
        "time": dt.datetime.now().astimezone().isoformat(timespec="milliseconds"),
        "endpoint": event.endpoint,
        "interface": listings.interface_of(event.endpoint),
        "reason": event.reason.text,
        "audited": event.audited,
        "direction": event.direction.name.lower(),
        "protocol": _protocol(event),
        "source": text_of(event.source),
        "destination": text_of(event.destination),
        "source_port": event.source_port,
        "port": event.policy_port,
        "identity": event.identity,
        "rule": listings.rule_text(event.cookie) if event.cookie else "no rule",
        "names": [one.name for one in seen],
        "chains": [list(one.chain) for one in seen if len(one.chain) > 1],
        "why": listings.why_dropped(event.reason.text, remote, event.endpoint, is_egress=is_egress),
    }


def _protocol(event: PacketEvent) -> str:
    """By name. ARP has no number among those of IP; a claim by neighbour discovery is ICMPv6."""
    if event.reason is Reason.DROP_NEIGHBOUR_CLAIM and not event.protocol:
        return "arp"
    return PROTOCOL_NAMES.get(event.protocol, str(event.protocol))
