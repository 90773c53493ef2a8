"""What the agent can tell while it works, for whoever listens: questions, drops, policies, endpoints, as they come.

Rule 1: it costs nothing where nobody listens: questions are facts only while somebody wants those of their endpoint.
Rule 2: a listener that reads too slowly loses lines, never the agent time or memory; what it lost is counted and told.

A line is {"fact": {"kind": …, "time": …, …}}; of the kind `lost` is one with the count of those that are not there.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

LINES_MAX: Final = 1_000
# Kinds that the kernel's ring tells of.
PACKETS: Final = ("verdict", "drop", "chatter")

Row = dict[str, Any]


class Stream:
    """Lines for one reader."""

    def __init__(self) -> None:
        self._lines: asyncio.Queue[Row] = asyncio.Queue(LINES_MAX)
        self._lost = 0

    def put(self, fact: Mapping[str, Any]) -> None:
        try:
            self._lines.put_nowait({"fact": fact})
        except asyncio.QueueFull:
            self._lost += 1

    def lose(self, count: int) -> None:
        self._lost += count

    async def lines(self) -> AsyncIterator[Row]:
        """As they come; ends with its reader."""
        while True:
            line = await self._lines.get()
            lost, self._lost = self._lost, 0
            if lost:
                yield {"fact": {"kind": "lost", "count": lost}}
            yield line


class Listener:
    """A `Feed` of all facts of these kinds, of this endpoint; empty and None stand for all."""

    def __init__(self, facts: Facts, kinds: frozenset[str], endpoint: int | None) -> None:
        self.first: Mapping[str, Any] = {"kinds": sorted(kinds), "endpoint": endpoint}
        self.kinds = kinds
        self.endpoint = endpoint
        self.stream = Stream()
        self._facts = facts

    def hears(self, kind: str) -> bool:
        return not self.kinds or kind in self.kinds

    def lines(self) -> AsyncIterator[Row]:
        return self.stream.lines()

    async def end(self) -> Row:
        self._facts.leave(self)
        return {"end": True}


class Facts:
    """changed: called when listeners came or went."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._listeners: list[Listener] = []
        self._changed = changed

    def listen(self, kinds: frozenset[str], endpoint: int | None) -> Listener:
        listener = Listener(self, kinds, endpoint)
        self._listeners.append(listener)
        self._changed()
        return listener

    def leave(self, listener: Listener) -> None:
        self._listeners.remove(listener)
        self._changed()

    def are_wanted(self, kind: str) -> bool:
        return any(listener.hears(kind) for listener in self._listeners)

    def lose(self, count: int) -> None:
        """So many packets were told by nobody."""
        for listener in self._listeners:
            if any(map(listener.hears, PACKETS)):
                listener.stream.lose(count)

    def tell(self, kind: str, fields: Mapping[str, Any]) -> None:
        if not self._listeners:
            return
        fact = {"kind": kind, "time": dt.datetime.now().astimezone().isoformat(timespec="milliseconds"), **fields}
        for listener in self._listeners:
            if listener.hears(kind) and listener.endpoint in (None, fields.get("endpoint")):
                listener.stream.put(fact)
