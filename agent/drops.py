"""Denied packets as the kernel tells of them: read from its ring a few at a time, explained, and the last of them kept.

A workload that floods what it is denied costs a question's answer a millisecond of waiting, and the agent a hundredth of its
time. Drops that do not fit in the ring meanwhile are counted as lost by the program.
"""

from __future__ import annotations

import asyncio
import collections
import datetime as dt
from collections.abc import Callable
from typing import Final

from agent.control.listings import Listings, Row
from agent.core.types import PROTOCOL_NAMES, Direction, text_of
from agent.datapath.datapath import Datapath
from agent.datapath.events import DropEvent

# Enough to answer "what was dropped just now"; the counters have the rest.
KEPT_MAX: Final = 10_000
# At once, and the pause after so many.
AT_ONCE: Final = 32
PAUSE_S: Final = 0.1
# Who asks for them gets what has come by then; 10 ms of it, under a flood.
TO_SHOW_MAX: Final = 512


class Drops:
    """taken: called with each, as the kernel told it and as it is shown."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        datapath: Datapath,
        listings: Callable[[], Listings],
        taken: Callable[[DropEvent, Row], None],
    ) -> None:
        self._loop = loop
        self._datapath = datapath
        self._listings = listings
        self._taken = taken
        self._kept: collections.deque[Row] = collections.deque(maxlen=KEPT_MAX)
        self._again: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._again = None
        self._loop.add_reader(self._datapath.events_fd, self._hear)

    def close(self) -> None:
        self._loop.remove_reader(self._datapath.events_fd)
        if self._again is not None:
            self._again.cancel()

    def read(self) -> list[Row]:
        """All that are kept, with those that have come by now."""
        self._read(TO_SHOW_MAX)
        return list(self._kept)

    def _hear(self) -> None:
        if self._read(AT_ONCE) == AT_ONCE:
            self._loop.remove_reader(self._datapath.events_fd)
            self._again = self._loop.call_later(PAUSE_S, self.start)

    def _read(self, most: int) -> int:
        """Says how many there were."""
        listings = self._listings()
        events = self._datapath.read_events(most)
        for event in events:
            drop = _row(event, listings)
            self._kept.append(drop)
            self._taken(event, drop)
        return len(events)


def _row(event: DropEvent, listings: Listings) -> Row:
    is_egress = event.direction is Direction.EGRESS
    remote = event.destination if is_egress else event.source
    return {
        "time": dt.datetime.now().astimezone().isoformat(timespec="milliseconds"),
        "endpoint": event.endpoint,
        "reason": event.reason.text,
        "audited": event.audited,
        "direction": event.direction.name.lower(),
        "protocol": PROTOCOL_NAMES.get(event.protocol, str(event.protocol)),
        "source": text_of(event.source),
        "destination": text_of(event.destination),
        "port": event.policy_port,
        "identity": event.identity,
        "rule": listings.rule_text(event.cookie) if event.cookie else "no rule",
        "names": listings.names_on(remote),
        "why": listings.why_dropped(event.reason.text, remote, is_egress=is_egress),
    }
