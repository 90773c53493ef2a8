"""Facts counted for a screen: what each endpoint does a second, which names are asked, what is dropped.

Times are seconds of a clock that only goes forward. Rates are those of the last `WINDOW_S` whole seconds. Bounded: of each
endpoint the `ROWS_MAX` names and drops that were seen last are kept, so that one that floods does not push out the others'.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from agent.monitor.facts import KnownEndpoints, Row, remote_of, verdict_of

WINDOW_S: Final = 5
ROWS_MAX: Final = 100


class Count(enum.IntEnum):
    QUESTIONS = 0
    REFUSED = 1  # questions that were denied or failed
    FLOWS = 2
    DROPS = 3


class Rates:
    """Counts by second, of the last few seconds."""

    def __init__(self) -> None:
        self.totals = [0] * len(Count)
        self._seconds: deque[tuple[int, list[int]]] = deque()

    def note(self, count: Count, now: float) -> None:
        self.totals[count] += 1
        second = int(now)
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, [0] * len(Count)))
            self._forget(second)
        self._seconds[-1][1][count] += 1

    def per_second(self, count: Count, now: float) -> float:
        """Without the second that has only begun."""
        second = int(now)
        self._forget(second)
        return sum(counts[count] for at, counts in self._seconds if at < second) / WINDOW_S

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] < second - WINDOW_S:
            self._seconds.popleft()


@dataclass(slots=True)
class NameRow:
    """verdict: of the question asked last. seen: number of the fact that said so, which orders rows by time."""

    endpoint: str
    name: str
    asked: int = 0
    verdict: str = ""
    answer: str = ""
    seen: int = 0


@dataclass(slots=True)
class DropRow:
    """The drop seen last stands for all like it."""

    endpoint: str
    last: Row
    times: int = 0
    seen: int = 0


T = TypeVar("T", NameRow, DropRow)
Rows = dict[int | None, OrderedDict[Hashable, T]]


@dataclass(slots=True)
class Tally:
    """names, drops: by endpoint and what rows have in common, the one seen last at the end. lost: facts that were not heard."""

    everybody: Rates = field(default_factory=Rates)
    by_endpoint: dict[int | None, Rates] = field(default_factory=dict)
    names: Rows[NameRow] = field(default_factory=dict)
    drops: Rows[DropRow] = field(default_factory=dict)
    lost: int = 0
    heard: int = 0

    def take(self, fact: Row, endpoints: KnownEndpoints, now: float) -> None:
        self.heard += 1
        kind = fact["kind"]
        if kind == "lost":
            self.lost += fact["count"]
        elif kind == "question":
            self._note(fact, Count.QUESTIONS, now)
            verdict = verdict_of(fact)
            if verdict in ("denied", "failed"):
                self._note(fact, Count.REFUSED, now)
            if "name" in fact:
                row = self._latest(self.names, fact, fact["name"], lambda: NameRow(endpoints.label_of(fact), fact["name"]))
                row.asked += 1
                row.verdict = verdict or ""
                row.answer = next((answer["address"] for answer in fact.get("answers") or ()), row.answer)
        elif kind == "verdict":
            self._note(fact, Count.FLOWS, now)
        elif kind == "drop":
            self._note(fact, Count.DROPS, now)
            what = fact["direction"], fact["protocol"], remote_of(fact), fact["port"], fact["reason"]
            drop = self._latest(self.drops, fact, what, lambda: DropRow(endpoints.label_of(fact), fact))
            drop.times += 1
            drop.last = fact

    def keep(self, known: Collection[int]) -> None:
        """Of endpoints that are gone nothing is counted any longer."""
        for gone in self.by_endpoint.keys() - {None, *known}:
            for table in (self.by_endpoint, self.names, self.drops):
                table.pop(gone, None)

    def _note(self, fact: Row, count: Count, now: float) -> None:
        self.everybody.note(count, now)
        self.by_endpoint.setdefault(fact["endpoint"], Rates()).note(count, now)

    def _latest(self, table: Rows[T], fact: Row, key: Hashable, make: Callable[[], T]) -> T:
        """The row of this key, which is its endpoint's last one now."""
        rows = table.setdefault(fact["endpoint"], OrderedDict())
        row = rows.get(key)
        if row is None:
            if len(rows) >= ROWS_MAX:
                rows.popitem(last=False)
            row = rows[key] = make()
        rows.move_to_end(key)
        row.seen = self.heard
        return row


def rows_of(table: Rows[T], only: int | None) -> list[T]:
    """Of one endpoint, or of all; the one seen last is the first."""
    chosen = table.values() if only is None else [table.get(only, OrderedDict())]
    return sorted((row for rows in chosen for row in rows.values()), key=lambda row: -row.seen)
